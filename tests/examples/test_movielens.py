import numpy as np
import pytest
from movielens import read_log

ROWS = [(7, 10, 3.0, 500), (2, 30, 4.5, 200), (7, 20, 5.0, 400), (2, 10, 1.0, 200), (7, 30, 2.0, 450)]


def lines(separator, rows=ROWS, header=None):
    rows = [separator.join(f"{value:g}" for value in row) for row in rows]
    return "\n".join([*([header] if header else []), *rows]) + "\n"


FORMS = {
    "u.data": lines("\t"),
    "ratings.dat": lines("::"),
    "ratings.csv": lines(",", header="userId,movieId,rating,timestamp"),
    "small.inter": lines("\t", header="user_id:token\titem_id:token\trating:float\ttimestamp:float"),
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
    text = "timestamp:float\titem_id:token\textra:token\tuser_id:token\trating:float\n5\t1\tx\t2\t4\n"
    (tmp_path / "a.inter").write_text(text)
    log = read_log(tmp_path)
    assert (log.rating.tolist(), log.timestamp.tolist()) == ([4.0], [5.0])


def test_windows_line_ends_and_byte_order_mark(tmp_path):
    (tmp_path / "ratings.csv").write_bytes(b"\xef\xbb\xbf" + FORMS["ratings.csv"].replace("\n", "\r\n").encode())
    assert len(read_log(tmp_path)) == 5


SIDES = {
    "ml-100k": {
        "u.data": FORMS["u.data"],
        "u.user": "2|24|M|artist|111\n7|53|F|other|222\n",
        "u.item": "10|Café (1995)|01-Jan-1995||url|0|1|0|0|0|1" + "|0" * 13 + "\n20|Nowhen|||url" + "|0" * 18 + "|1\n",
    },
    "ml-1m": {
        "ratings.dat": FORMS["ratings.dat"],
        "users.dat": "2::M::24::artist::111\n7::F::53::other::222\n",
        "movies.dat": "10::Café (1995)::Action|Comedy\n20::Nowhen::Western\n",
    },
    "inter": {
        "a.inter": FORMS["small.inter"],
        "a.user": "user_id:token\tage:token\tgender:token\toccupation:token\n2\t24\tM\tartist\n7\t53\tF\tother\n",
        "a.item": "item_id:token\trelease_year:token\tclass:token_seq\n10\t1995\tAction Comedy\n20\t\tWestern\n",
    },
}


@pytest.mark.parametrize("form", SIDES)
def test_side_features(tmp_path, form):
    log = read_log(write(tmp_path, **SIDES[form]))
    users = {name: (feature.values.tolist(), feature.offsets.tolist(), feature.cardinality) for name, feature in log.user_features.items()}
    assert users == {name: ([0, 1], [0, 1, 2], 2) for name in ("age", "gender", "occupation")} | {"gender": ([1, 0], [0, 1, 2], 2)}
    genre, released = log.item_features["genre"], log.item_features["released"]
    # Items 10, 20, 30: two genres, one genre, not in the file.
    assert (genre.values.tolist(), genre.offsets.tolist(), genre.cardinality) == ([0, 1, 2], [0, 2, 3, 3], 3)
    assert (released.values.tolist(), released.offsets.tolist(), released.cardinality) == ([0], [0, 1, 1, 1], 1)


def test_side_features_of_csv_with_quoted_titles(tmp_path):
    movies = 'movieId,title,genres\n10,"Cat, The (1995)",Action|Comedy\n30,Dog,(no genres listed)\n'
    log = read_log(write(tmp_path, **{"ratings.csv": FORMS["ratings.csv"], "movies.csv": movies}))
    assert np.diff(log.item_features["genre"].offsets).tolist() == [2, 0, 1]


def test_side_files_may_be_empty_or_begin_with_a_byte_order_mark(tmp_path):
    empty = read_log(write(tmp_path, **{"a.inter": FORMS["small.inter"], "a.user": "", "a.item": ""}))
    assert empty.user_features == {} and empty.item_features == {}
    for name, text in ("a.user", SIDES["inter"]["a.user"]), ("a.item", SIDES["inter"]["a.item"]):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    log = read_log(tmp_path)
    assert log.user_features["gender"].values.tolist() == [1, 0] and log.item_features["genre"].values.tolist() == [0, 1, 2]
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv/ratings.csv").write_text(FORMS["ratings.csv"])
    (tmp_path / "csv/movies.csv").write_text("movieId,title,genres\n10,A,Action\n", encoding="utf-8-sig")
    assert read_log(tmp_path / "csv").item_features["genre"].values.tolist() == [0]


def test_titles_in_utf_8(tmp_path):
    """The second byte of Å is a line end in Latin-1."""
    (tmp_path / "ratings.dat").write_text(FORMS["ratings.dat"])
    (tmp_path / "movies.dat").write_text("10::Ådalen (1995)::Action\n20::Nowhen::Western\n", encoding="utf-8")
    assert read_log(tmp_path).item_features["genre"].values.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({}, FileNotFoundError, "no rating log in .*expected one of u.data"),
        ({"u.data": ""}, ValueError, "u.data is empty"),
        ({"u.data": FORMS["u.data"], "ratings.dat": FORMS["ratings.dat"]}, ValueError, "several rating logs"),
        ({"ratings.csv": "userId,rating,timestamp\n1,2,3\n"}, ValueError, "no column movieId in the header"),
        ({"ratings.csv": "userId,movieId,rating,timestamp\n"}, ValueError, "header but no rows"),
        ({"a.inter": "user_id:token\titem_id:token\trating:float\n1\t2\t3\n"}, ValueError, "no column timestamp"),
        ({"u.data": "1\t2\t3\n"}, ValueError, "expected numbers in the columns user, item, rating, timestamp"),
        ({"u.data": "1\t2\tgood\t4\n"}, ValueError, "expected numbers in the columns"),
        ({"u.data": "1\t2\tnan\t4\n"}, ValueError, "u.data, line 1: the rating must be a finite number"),
        ({"u.data": "1\t2\t1e39\t4\n"}, ValueError, "u.data, line 1: the rating must be a finite number of float32, not 1e"),
        ({"u.data": "1\t2\t3\t1e19\n"}, ValueError, r"u.data, line 1: the timestamp must be a finite number below 2\*\*63, not 1e"),
        ({"ratings.csv": FORMS["ratings.csv"] + "\n\n1,2,3,nan\n"}, ValueError, "ratings.csv, line 9: the timestamp must be"),
        ({"ratings.csv": FORMS["ratings.csv"] + "\n\n1,2,3,\n1,2\n"}, ValueError, "ratings.csv, line 9: .* separated by ',', not '1,2,3,'"),
        ({"ratings.dat": FORMS["ratings.dat"] + "1::2::3\n"}, ValueError, "ratings.dat, line 6: .* separated by '::', not '1::2::3'"),
        ({"u.data": "1.5\t2\t3\t4\n"}, ValueError, "u.data, line 1: the user must be an integer id, not 1.5"),
        ({"u.data": "1\tnan\t3\t4\n"}, ValueError, "u.data, line 1: the item must be an integer id, not nan"),
        ({"u.data": f"{2**53}\t2\t3\t4\n{2**53 + 1}\t2\t3\t4\n"}, ValueError, r"u.data, line 1: the user must be an id below 2\*\*53"),
        ({"u.data": FORMS["u.data"], "u.user": "1|24|M\n"}, ValueError, "u.user: row 1 below any header does not have the columns"),
        ({"ratings.csv": FORMS["ratings.csv"], "movies.csv": "movieId,title,genres\n1,A,B\n2,C\n"}, ValueError, "movies.csv: row 2 below"),
    ],
)
def test_bad_input(tmp_path, files, error, message):
    with pytest.raises(error, match=message):
        read_log(write(tmp_path, **files))


def test_missing_path(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or folder .*nowhere"):
        read_log(tmp_path / "nowhere")
