import pytest
from data.logs import read_log
from sequence_files import read_events

RATINGS = "1\t5\t3\t100\n1\t6\t3\t100\n2\t6\t4\t50\n1\t4\t5\t20\n"


def write(folder, text, name="small.txt"):
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    "text",
    ["7 30 10 20 10\n2 20 5\n", "7 30 10 20 10\r\n\r\n2  20 5", "\ufeff2 20 5 \n7 30 10 20 10\n\n"],
)
def test_a_line_has_the_items_of_a_user_in_their_order(tmp_path, text):
    log = read_events(write(tmp_path, text))
    assert (log.num_users, log.num_items, len(log), log.timestamp) == (2, 4, 6, None)
    assert log.user.tolist() == [0, 0, 1, 1, 1, 1]  # users 2 and 7
    assert list(log.users) == [2, 7] and [log.items[row] for row in log.item] == [
        20,
        5,
        30,
        10,
        20,
        10,
    ]


def test_ids_stay_as_they_are_in_the_file(tmp_path):
    log = read_events(write(tmp_path, f"u10 007 7 {2**70}\nu9 7 -1\n"))
    assert [log.users[row] for row in log.user] == ["u10", "u10", "u10", "u9", "u9"]
    assert [log.items[row] for row in log.item] == ["007", "7", str(2**70), "7", "-1"]


@pytest.mark.parametrize("character", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028"], ids=ascii)
def test_a_character_that_ends_lines_elsewhere(tmp_path, character):
    """It ends none here, so the events behind it are not those of another user. No id has it."""
    path = tmp_path / "small.txt"
    path.write_text(f"1 2 3{character}2 4 5\n7 8\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match="small.txt, line 1: expected ids .* can be printed, not '3"
    ):
        read_events(path)


@pytest.mark.parametrize("as_folder", [False, True])
def test_movielens_formats_are_read_as_such(tmp_path, as_folder):
    path = write(tmp_path, RATINGS, "u.data")
    log, expected = read_events(tmp_path if as_folder else path), read_log(path)
    assert log.timestamp.tolist() == expected.timestamp.tolist() == [20, 100, 100, 50]
    # items 5 and 6 of user 1 have one timestamp and stay in the order of the file
    assert log.item.tolist() == [0, 1, 2, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "small.txt is empty"),
        ("1 2 3\n\n2\n", "small.txt, line 3: expected ids .* user 2 has no items"),
        (
            "1 2 3\n2 4\n1 5\n",
            "small.txt, line 3: expected one line per user; user 1 has line 1 too",
        ),
        ("1 2 3\n2 4\t5\n", r"small.txt, line 2: expected ids .* can be printed, not '4\\t5'"),
        (
            "1 2 3\n2 4 5,6\n",
            (
                "small.txt, line 2: expected ids separated by spaces: .* no separator of columns,"
                " not '5,6'"
            ),
        ),
    ],
)
def test_bad_input(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_events(write(tmp_path, text))


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "small.txt").write_bytes(b"1 2 3\n\xff\xfe 4\n")
    with pytest.raises(ValueError, match="small.txt: expected text in UTF-8; byte 6 is not"):
        read_events(tmp_path / "small.txt")
