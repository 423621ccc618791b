"""Logs in other forms than MovieLens', and sequence files."""

import argparse
import gzip
import sys

import data.blocks
import pytest
from data.event_log import EventLog, RatingLog
from data.forms import Form, add_form_options, form_of
from data.logs import read_log

from .test_logs import FORMS, ROWS, write

OTHERS = {  # text → options of the programs; all are the same events
    "u i\nb x\na x\nb y\n": ["--columns", "user=u", "item=i"],
    "b x\na  x\n\nb y\n": ["--columns", "user=1", "item=2"],
    "x|9|b\nx|9|a\ny|9|b\n": ["--columns", "user=3", "item=1", "--separator", "|"],
    '"u";"i"\nb;x\n"a";x\nb;"y"\n': ["--columns", "user=u", "item=i", "--separator", ";"],
    '"b";"x";1\n"a";x;2\nb;"y";3\n': ["--columns", "user=1", "item=2"],
    "b\tx\na\tx\nb\ty\n": [],
    "user_id,product_id\nb,x\na,x\nb,y\n": [],
    "q,r\nb,x\na,x\nb,y\n": ["--header", "--columns", "user=1", "item=2"],
    '{"uid": "b", "iid": "x"}\n{"iid": "x", "uid": "a"}\n\n{"uid": "b", "iid": "y"}\n': [],
}


def options(*arguments):
    parser = argparse.ArgumentParser()
    add_form_options(parser)
    return form_of(parser.parse_args(arguments))


@pytest.mark.parametrize("text", OTHERS, ids=[*range(len(OTHERS))])
@pytest.mark.parametrize("block", [1, 2, 1 << 16])
def test_pairs(tmp_path, monkeypatch, text, block):
    """In the order of the file, in blocks of any size, without ratings and times."""
    monkeypatch.setattr(data.blocks, "BLOCK", block)
    (tmp_path / "pairs").write_text(text)
    log = read_log(tmp_path / "pairs", options(*OTHERS[text]))
    assert (list(log.users), list(log.items)) == (["a", "b"], ["x", "y"])
    assert (log.user.tolist(), log.item.tolist()) == ([0, 1, 1], [0, 0, 1])
    assert log.timestamp is None and not isinstance(log, RatingLog)


def test_a_user_an_item_and_a_time(tmp_path):
    (tmp_path / "log.csv").write_text("uid,ts,iid\n1,30,7\n1,10,8\n2,5,7\n")
    log = read_log(tmp_path / "log.csv")
    assert log.timestamp.tolist() == [10, 30, 5] and log.item.tolist() == [1, 0, 0]
    assert type(log) is EventLog


def test_spaces_around_an_id_are_not_of_it(tmp_path):
    (tmp_path / "log.csv").write_text("user,item\n a,1\na ,2\na,1 \n")
    log = read_log(tmp_path / "log.csv")
    assert (list(log.users), log.item.tolist()) == (["a"], [0, 1, 0])


def test_columns_that_are_not_named_are_not_read(tmp_path):
    (tmp_path / "log.csv").write_text("user,item,rating,ts\n1,7,bad,worse\n")
    log = read_log(tmp_path / "log.csv", options("--columns", "user=user", "item=item"))
    assert len(log) == 1 and log.timestamp is None


TIMES = {
    ("1500", "ms"): 1.5,
    ("3000", "ms"): 3,
    ("3000000", "us"): 3,
    ("1970-01-02", None): 86400,
    ("1970-01-01 00:00:02.500", None): 2.5,
    ("1970-01-01T01:00:00+01:00", None): 0,
    ("1970-01-02", "ms"): 86400,
}


@pytest.mark.parametrize(("text", "unit"), TIMES, ids=str)
def test_times_are_seconds(tmp_path, text, unit):
    (tmp_path / "log.csv").write_text(f"user,item,rating,time\n1,2,3,{text}\n")
    log = read_log(tmp_path / "log.csv", Form(time_unit=unit))
    assert log.timestamp.tolist() == [TIMES[text, unit]]


def test_compressed_text(tmp_path):
    with gzip.open(tmp_path / "ratings.csv.gz", "wt") as file:
        file.write(FORMS["ratings.csv"])
    (tmp_path / "ratings.csv").write_text(FORMS["ratings.csv"])
    logs = [read_log(tmp_path / name) for name in ("ratings.csv", "ratings.csv.gz")]
    assert logs[0].fingerprint == logs[1].fingerprint


COMPRESSED = gzip.compress((FORMS["ratings.csv"] * 99).encode())


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (COMPRESSED[:-20], "Compressed file ended before"),
        (COMPRESSED[:-8] + bytes(8), "CRC check failed"),
        (FORMS["ratings.csv"].encode(), "Not a gzipped file"),
    ],
    ids=["short", "changed", "plain"],
)
def test_a_damaged_compressed_file(tmp_path, written, message):
    path = tmp_path / "ratings.csv.gz"
    path.write_bytes(written)
    with pytest.raises(ValueError, match=f"ratings.csv.gz cannot be decompressed: {message}"):
        read_log(path)


@pytest.mark.parametrize("block", [1, 3])
def test_blocks_do_not_change_a_log(tmp_path, monkeypatch, block):
    """Nor the number of the line of an error."""
    whole = read_log(write(tmp_path, **{"u.data": FORMS["u.data"]}))
    monkeypatch.setattr(data.blocks, "BLOCK", block)
    assert read_log(tmp_path).fingerprint == whole.fingerprint
    with pytest.raises(ValueError, match="u.data, line 6: the rating must be"):
        read_log(write(tmp_path, **{"u.data": FORMS["u.data"] + "1\t2\tx\t4\n"}))


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    expected = read_log(write(tmp_path, **{"ratings.csv": FORMS["ratings.csv"]}) / "ratings.csv")
    user, item, rating, time = zip(*ROWS)
    columns = {"movie_id": item, "userId": [*map(str, user)], "rating": rating}
    times = {
        "int": pa.array(time),
        "date": pa.array([second * 10**6 for second in time], pa.timestamp("us")),
        "zoned": pa.array([second * 10**3 for second in time], pa.timestamp("ms", "CET")),
    }
    for name, column in times.items():
        (tmp_path / name).mkdir()
        table = pa.table({**columns, "ts": column})
        parquet.write_table(table[:2], tmp_path / name / "part-0.parquet")
        parquet.write_table(table[2:], tmp_path / name / "part-1.parquet")
        log = read_log(tmp_path / name)
        assert log.fingerprint == expected.fingerprint and log.timestamp.tolist() == [
            *expected.timestamp
        ]
    bad = {
        "the users must be integers or text, not double": {"user": [1.0], "item": ["a"]},
        "line 2: the item must be an id, .*, not ''": {"user": [1, 2], "item": ["a", None]},
        "no column known as item in the header": {"user": [1]},
        "cannot be read: Unsupported cast from list": {"user": [1], "item": [[2, 3]]},
        "cannot be read: Invalid UTF8": {"user": [b"\xff"], "item": [2]},
    }
    for message, table in bad.items():
        parquet.write_table(pa.table(table), tmp_path / "bad.parquet")
        with pytest.raises(ValueError, match=f"bad.parquet.* {message}"):
            read_log(tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match="bad.parquet: no column 3, only 2: .'user', 'item'"):
        read_log(tmp_path / "bad.parquet", Form({"user": "1", "item": "3"}))
    (tmp_path / "mixed").mkdir()
    for part, ids in enumerate(([1], ["a"])):
        table = pa.table({"user": ids, "item": [2]})
        parquet.write_table(table, tmp_path / "mixed" / f"part-{part}.parquet")
    with pytest.raises(ValueError, match="mixed cannot be read: .* 'a'"):
        read_log(tmp_path / "mixed")


def test_parquet_needs_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="a.parquet: Parquet needs the package pyarrow"):
        read_log(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("text", "form", "message"),
    [
        ("a,b\n1,2\n", Form({"user": "a", "item": "c"}), r"log: no column c in the header \['a'"),
        ("1,2\n", Form({"user": "1", "item": "3"}), "log, line 1: expected the columns user, item"),
        ("1,2\n", Form(header=True), "log: no column known as user and item in the header"),
        ("a,b,c,d\n1,2,3,4\n", Form(), "line 1: the rating must be .*, not 'c'; name columns by"),
        ('1,"2\n3,4\n', Form(), "log, line [12]: unexpected end of data"),
        ('{"user": 1, "item": 2}\n{"user": 3}\n', Form(), "log, line 2: the item must be"),
        ('{"user": 1, "item": 2}\n[3]\n', Form(), r"line 2: expected a JSON object, not '\[3\]"),
        (
            '{"user": 1, "item": 2}\n',
            Form({"user": "1", "item": "3"}),
            r"log: no column 3, only 2: \['user', 'item'\]",
        ),
        ('{"user": 1, "item": [2, 3]}\n', Form(), r"log, line 1: expected one item, not \[2, 3\]"),
        ("1\t\udcff\n", Form(), r"log, line 1: the item must be an id, .*, not '\\udcff'"),
        ("1\t2\t3\t1970-13-01\n", Form(), "the time must be .* or a date, not '1970-13-01'"),
    ],
)
def test_bad_forms(tmp_path, text, form, message):
    (tmp_path / "log").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message):
        read_log(tmp_path / "log", form)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"user": "a", "thing": "b"},), "columns must be of user, .*, time, not of 'thing'"),
        (({"user": "a", "time": "b"},), "columns must name user and item, not only user, time"),
        (({"user": "0", "item": "b"},), "the column of user must be .* a place from 1, not 0"),
        (({"user": "a", "item": "2"}, None, False), "without a header, user must be .*, not 'a'"),
    ],
)
def test_bad_columns(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Form(*arguments)
    if "thing" in arguments[0]:
        with pytest.raises(SystemExit):
            options("--columns", "thing=b")


# -- sequence files --------------------------------------------------------------------------------


def write_text(folder, text, name="small.txt"):
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    "text",
    ["7 30 10 20 10\n2 20 5\n", "7 30 10 20 10\r\n\r\n2  20 5", "\ufeff2 20 5 \n7 30 10 20 10\n\n"],
)
def test_a_line_has_the_items_of_a_user_in_their_order(tmp_path, text):
    log = read_log(write_text(tmp_path, text))
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


def test_ids_of_sequences_stay_as_they_are(tmp_path):
    log = read_log(write_text(tmp_path, f"u10 007 7 {2**70}\nu9 7 -1\n"))
    assert [log.users[row] for row in log.user] == ["u10", "u10", "u10", "u9", "u9"]
    assert [log.items[row] for row in log.item] == ["007", "7", str(2**70), "7", "-1"]


@pytest.mark.parametrize("character", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028"], ids=ascii)
def test_a_character_that_ends_lines_elsewhere(tmp_path, character):
    """It ends none here, so the events behind it are not those of another user. No id has it."""
    path = tmp_path / "small.txt"
    path.write_text(f"1 2 3{character}2 4 5\n7 8\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match="small.txt, line 1: the item must be .* can be printed, not '3"
    ):
        read_log(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "small.txt is empty"),
        ("1 2 3\n\n2\n", "small.txt, line 3: expected ids .* user 2 has no items"),
        ("1|2\n", "small.txt, line 1: .* If a line has columns, give --separator"),
        ("1 2 3\n2 4\n1 5\n", "small.txt, line 3: .* one line per user; user 1 has line 1 too"),
        ("1 2 3\n2 4\t5\n", r"small.txt, line 2: expected ids .* separator of columns, not '\\t'"),
        (
            "1 2 3\n2 4 5,6\n",
            (
                "small.txt, line 2: expected ids separated by spaces: .* no separator of columns,"
                " not ','"
            ),
        ),
    ],
)
def test_bad_sequences(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_log(write_text(tmp_path, text))


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "small.txt").write_bytes(b"1 2 3\n\xff\xfe 4\n")
    with pytest.raises(ValueError, match="small.txt, line 2: the user must be .*udcff"):
        read_log(tmp_path / "small.txt")
