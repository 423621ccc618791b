import numpy as np
import pytest
from data.logs import read_log
from marks import raising

ROWS = [
    (7, 10, 3.0, 500),
    (2, 30, 4.5, 200),
    (7, 20, 5.0, 400),
    (2, 10, 1.0, 200),
    (7, 30, 2.0, 450),
]


def lines(separator, rows=ROWS, header=None):
    rows = [separator.join(f"{value:g}" for value in row) for row in rows]
    return "\n".join([*([header] if header else []), *rows]) + "\n"


FORMS = {
    "u.data": lines("\t"),
    "ratings.dat": lines("::"),
    "ratings.csv": lines(",", header="userId,movieId,rating,timestamp"),
    "small.inter": lines(
        "\t", header="user_id:token\titem_id:token\trating:float\ttimestamp:float"
    ),
}


def write(folder, **files):
    for name, text in files.items():
        (folder / name).write_text(text, encoding="latin-1")
    return folder


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("as_folder", [False, True])
def test_every_form_reads_the_same(tmp_path, name, as_folder):
    (tmp_path / name).write_text(FORMS[name])
    log = read_log(tmp_path if as_folder else tmp_path / name)
    assert (log.num_users, log.num_items, len(log)) == (2, 3, 5)
    assert log.user.tolist() == [0, 0, 1, 1, 1]
    assert log.item.tolist() == [2, 0, 1, 2, 0]
    assert log.rating.tolist() == [4.5, 1.0, 5.0, 2.0, 3.0]
    assert log.timestamp.tolist() == [200, 200, 400, 450, 500]
    assert log.user_features == {} and log.item_features == {}


def test_columns_of_a_header_may_come_in_any_order_among_others(tmp_path):
    text = (
        "timestamp:float\titem_id:token\textra:token\tuser_id:token\trating:float\n5\t1\tx\t2\t4\n"
    )
    (tmp_path / "a.inter").write_text(text)
    log = read_log(tmp_path)
    assert (log.rating.tolist(), log.timestamp.tolist()) == ([4.0], [5.0])


IDS = {  # texts of a column → the ids in the order of their rows
    "integers": (["10", "9", "0", "-3"], [-3, 0, 9, 10]),
    "large integers": ([str(2**53), str(2**53 + 1), str(2**64), "1"], [1, 2**53, 2**53 + 1, 2**64]),
    "leading zeros": (["007", "7", "10", "9"], ["007", "10", "7", "9"]),
    "text": (["user:b", "a b", "é", "1e3"], ["1e3", "a b", "user:b", "é"]),
}


@pytest.mark.parametrize(("texts", "expected"), IDS.values(), ids=IDS)
@pytest.mark.parametrize("name", FORMS)
def test_ids_stay_as_they_are_in_the_file(tmp_path, name, texts, expected):
    """And each event is that of its user and item."""
    separator = {"ratings.dat": "::", "ratings.csv": ","}.get(name, "\t")
    header = [FORMS[name].split("\n")[0]] * (name in ("ratings.csv", "small.inter"))
    rows = [
        (user, item, str(1 + i), str(50 - i))
        for i, (user, item) in enumerate(zip(texts, texts[::-1], strict=True))
    ]
    (tmp_path / name).write_text("\n".join([*header, *map(separator.join, rows)]), encoding="utf-8")
    log = read_log(tmp_path)
    assert list(log.users) == list(log.items) == expected and [*map(type, log.users)] == [
        *map(type, expected)
    ]
    found = {
        (str(log.users[user]), str(log.items[item]), rating)
        for user, item, rating in zip(log.user, log.item, log.rating)
    }
    assert found == {(user, item, float(rating)) for user, item, rating, _ in rows}


def test_quoted_ids_of_csv(tmp_path):
    (tmp_path / "ratings.csv").write_text(
        '"userId","movieId",rating,timestamp\n"a,b","c ""d""",4,7\nx,"y",3,8\n'
    )
    log = read_log(tmp_path)
    assert (list(log.users), list(log.items)) == (["a,b", "x"], ['c "d"', "y"])


@pytest.mark.parametrize(
    "times",
    [[2**53, 2**53 + 1, 2**53 + 2], [2**62, 2**62 + 1, 2**63 - 1], [-(2**63) + 1, 0, 2**63 - 1]],
    ids=str,
)
@pytest.mark.parametrize("form", ["{}", "{}.0"])
def test_large_timestamps_keep_their_order(tmp_path, times, form):
    """float64 would make those of the first lists equal."""
    rows = [f"1\t{item}\t3\t{form.format(times[item])}" for item in (2, 0, 1)]
    (tmp_path / "u.data").write_text("\n".join(rows))
    log = read_log(tmp_path)
    assert log.item.tolist() == [0, 1, 2] and log.timestamp.tolist() == times


def test_timestamps_with_fractions(tmp_path):
    (tmp_path / "u.data").write_text("1\t5\t3\t2.75\n1\t6\t3\t2.5\n1\t7\t3\t1\n")
    assert read_log(tmp_path).timestamp.tolist() == [1.0, 2.5, 2.75]


CHANGES = {
    "user": ("7\t20", "8\t20"),
    "item": ("\t20\t", "\t25\t"),
    "rating": ("4.5", "4"),
    "timestamp": ("450", "451"),
}


def test_a_fingerprint_depends_on_all_that_is_in_a_log(tmp_path):
    """Also if the sizes are equal. It does not depend on the form of the file."""

    def fingerprint_of(text, users=None):
        (tmp_path / "u.data").write_text(text)
        if users is not None:
            (tmp_path / "u.user").write_text(users)
        return read_log(tmp_path / "u.data").fingerprint

    text, users = FORMS["u.data"], SIDES["ml-100k"]["u.user"]
    first = fingerprint_of(text)
    assert (
        read_log(
            write(tmp_path, **{"ratings.csv": FORMS["ratings.csv"]}) / "ratings.csv"
        ).fingerprint
        == first
    )
    others = [fingerprint_of(text.replace(*change)) for change in CHANGES.values()]
    others += [fingerprint_of(text, users), fingerprint_of(text, users.replace("artist", "writer"))]
    assert len({first, *others}) == 1 + len(others)


def test_side_features_of_ids_that_are_text(tmp_path):
    files = {
        name: text.replace("\n2\t", "\né02\t").replace("\n7\t", "\né7\t")
        for name, text in SIDES["inter"].items()
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    log = read_log(tmp_path)
    assert list(log.users) == ["é02", "é7"] and log.user_features["gender"].values.tolist() == [
        1,
        0,
    ]


def test_windows_line_ends_and_byte_order_mark(tmp_path):
    (tmp_path / "ratings.csv").write_bytes(
        b"\xef\xbb\xbf" + FORMS["ratings.csv"].replace("\n", "\r\n").encode()
    )
    assert len(read_log(tmp_path)) == 5


SIDES = {
    "ml-100k": {
        "u.data": FORMS["u.data"],
        "u.user": "2|24|M|artist|111\n7|53|F|other|222\n",
        "u.item": (
            "10|Café (1995)|01-Jan-1995||url|0|1|0|0|0|1"
            + "|0" * 13
            + "\n20|Nowhen|||url"
            + "|0" * 18
            + "|1\n"
        ),
    },
    "ml-1m": {
        "ratings.dat": FORMS["ratings.dat"],
        "users.dat": "2::M::24::artist::111\n7::F::53::other::222\n",
        "movies.dat": "10::Café (1995)::Action|Comedy\n20::Nowhen::Western\n",
    },
    "inter": {
        "a.inter": FORMS["small.inter"],
        "a.user": (
            "user_id:token\tage:token\tgender:token\toccupation:token\n2\t24\tM\tartist\n7\t53\tF\tother\n"
        ),
        "a.item": (
            "item_id:token\trelease_year:token\tclass:token_seq\n10\t1995\tAction"
            " Comedy\n20\t\tWestern\n"
        ),
    },
}


@pytest.mark.parametrize("form", SIDES)
def test_side_features(tmp_path, form):
    log = read_log(write(tmp_path, **SIDES[form]))
    users = {
        name: (feature.values.tolist(), feature.offsets.tolist(), feature.cardinality)
        for name, feature in log.user_features.items()
    }
    assert users == {name: ([0, 1], [0, 1, 2], 2) for name in ("age", "gender", "occupation")} | {
        "gender": ([1, 0], [0, 1, 2], 2)
    }
    genre, released = log.item_features["genre"], log.item_features["released"]
    # Items 10, 20, 30: two genres, one genre, not in the file.
    assert (genre.values.tolist(), genre.offsets.tolist(), genre.cardinality) == (
        [0, 1, 2],
        [0, 2, 3, 3],
        3,
    )
    assert (released.values.tolist(), released.offsets.tolist(), released.cardinality) == (
        [0],
        [0, 1, 1, 1],
        1,
    )


def test_side_features_of_csv_with_quoted_titles(tmp_path):
    movies = 'movieId,title,genres\n10,"Cat, The (1995)",Action|Comedy\n30,Dog,(no genres listed)\n'
    log = read_log(write(tmp_path, **{"ratings.csv": FORMS["ratings.csv"], "movies.csv": movies}))
    assert np.diff(log.item_features["genre"].offsets).tolist() == [2, 0, 1]


def test_side_files_may_be_empty_or_begin_with_a_byte_order_mark(tmp_path):
    empty = read_log(
        write(tmp_path, **{"a.inter": FORMS["small.inter"], "a.user": "", "a.item": ""})
    )
    assert empty.user_features == {} and empty.item_features == {}
    for name, text in ("a.user", SIDES["inter"]["a.user"]), ("a.item", SIDES["inter"]["a.item"]):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    log = read_log(tmp_path)
    assert log.user_features["gender"].values.tolist() == [1, 0] and log.item_features[
        "genre"
    ].values.tolist() == [0, 1, 2]
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv/ratings.csv").write_text(FORMS["ratings.csv"])
    (tmp_path / "csv/movies.csv").write_text(
        "movieId,title,genres\n10,A,Action\n", encoding="utf-8-sig"
    )
    assert read_log(tmp_path / "csv").item_features["genre"].values.tolist() == [0]


def test_titles_in_utf_8(tmp_path):
    """The second byte of Å is a line end in Latin-1."""
    (tmp_path / "ratings.dat").write_text(FORMS["ratings.dat"])
    (tmp_path / "movies.dat").write_text(
        "10::Ådalen (1995)::Action\n20::Nowhen::Western\n", encoding="utf-8"
    )
    assert read_log(tmp_path).item_features["genre"].values.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        *raising(
            ValueError,
            {
                "u.data is empty": {"u.data": ""},
                "several logs": {"u.data": FORMS["u.data"], "ratings.dat": FORMS["ratings.dat"]},
                "no column known as item in the header": {
                    "ratings.csv": "userId,rating,timestamp\n1,2,3\n"
                },
                "ratings.csv has no rows": {"ratings.csv": "userId,movieId,rating,timestamp\n"},
                "u.data, line 1: the rating must be a finite number": {"u.data": "1\t2\tnan\t4\n"},
                "ratings.csv, line 9: the time must be": {
                    "ratings.csv": FORMS["ratings.csv"] + "\n\n1,2,3,nan\n"
                },
                "ratings.csv, line 9: the time must be .*, not ''": {
                    "ratings.csv": FORMS["ratings.csv"] + "\n\n1,2,3,\n1,2\n"
                },
                "ratings.csv, line 9: .* separated by ',', not '1,2'": {
                    "ratings.csv": FORMS["ratings.csv"] + "\n\n1,2\n"
                },
                "ratings.dat, line 6: .* separated by '::', not '1::2::3'": {
                    "ratings.dat": FORMS["ratings.dat"] + "1::2::3\n"
                },
                "u.data, line 2: the user must be an id, which is .*, not ' '": {
                    "u.data": "1\t2\t3\t4\n \t2\t3\t4\n"
                },
                r"u.data, line 1: the item must be an id, which is .*, not 'a\\x0bb'": {
                    "u.data": "1\ta\x0bb\t3\t4\n"
                },
                "u.user: row 1 below any header does not have the columns": {
                    "u.data": FORMS["u.data"],
                    "u.user": "1|24|M\n",
                },
                "movies.csv: row 2 below": {
                    "ratings.csv": FORMS["ratings.csv"],
                    "movies.csv": "movieId,title,genres\n1,A,B\n2,C\n",
                },
            },
        ),
        ({}, FileNotFoundError, "no log in .*expected one of u.data"),
        (
            {"u.data": "1\t2\t3\n"},
            ValueError,
            "u.data: expected the columns user, item or .*, time, not .*--columns user=COLUMN",
        ),
        (
            {"u.data": "1\t2\tgood\t4\n"},
            ValueError,
            "u.data, line 1: the rating must be a finite number of float32, not 'good'",
        ),
        (
            {"u.data": "1\t2\t3\t1_0\n"},
            ValueError,
            r"u.data, line 1: the time must be a finite number below 2\*\*63 or a date, not '1_0'",
        ),
        (
            {"u.data": "1\t2\t1e39\t4\n"},
            ValueError,
            "u.data, line 1: the rating must be a finite number of float32, not '1e39'",
        ),
        (
            {"u.data": "1\t2\t3\t1e19\n"},
            ValueError,
            r"u.data, line 1: the time must be a finite number below 2\*\*63 or a date, not '1e19'",
        ),
        (
            {"u.data": f"1\t2\t3\t.5\n1\t3\t3\t{2**53}\n"},
            ValueError,
            r"u.data: a time must be below 2\*\*53 in a log with .*, not 9007199254740992",
        ),
    ],
)
def test_bad_input(tmp_path, files, error, message):
    with pytest.raises(error, match=message):
        read_log(write(tmp_path, **files))


def test_missing_path(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or folder .*nowhere"):
        read_log(tmp_path / "nowhere")
