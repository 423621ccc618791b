"""Data sets by name, from made-up archives at file:// addresses."""

import hashlib
import io
import json
import tarfile
import urllib.request
import zipfile
from dataclasses import replace

import data.datasets
import fetch_data
import pytest
from data.datasets import DATASETS, fetch
from data.event_log import RatingLog
from data.logs import read_log

RATINGS = "1::10::3::100\n1::20::4::90\n2::10::5::80\n"
CLICKS = "user_id,video_id,date,time_ms,is_click\n"
YELP = [
    {"user_id": "a", "business_id": "x", "stars": 4.0, "date": "1970-01-01 00:01:40", "text": ","},
    {"user_id": "a", "business_id": "y", "stars": 1.0, "date": "1970-01-01 00:01:30", "text": ""},
    {"user_id": "b", "business_id": "x", "stars": 5.0, "date": "1970-01-01 00:01:20", "text": ""},
]
FILES = {  # name of the data set → its files, which have the same events
    "ml-1m": {"ml-1m/ratings.dat": RATINGS, "ml-1m/README": "no log", "ml-1m/users.dat": ""},
    "ml-20m": {
        "ml-20m/ratings.csv": "userId,movieId,rating,timestamp\n" + RATINGS.replace("::", ","),
        "ml-20m/tags.csv": "no log",
    },
    "kuairand-pure": {
        "KuaiRand-Pure/data/log_standard_2.csv": CLICKS + "2,10,0,80000,1\n",
        "KuaiRand-Pure/data/log_standard_1.csv": CLICKS + "1,10,0,100000,0\n1,20,0,90000,1\n",
        "KuaiRand-Pure/data/log_random.csv": "no log",
    },
    "yelp": {"x/yelp_academic_dataset_review.json": "".join(json.dumps(x) + "\n" for x in YELP)},
    "taobao": {"UserBehavior.csv": "1,10,7,pv,100\n1,20,7,buy,90\n2,10,8,fav,80\n"},
    "criteo-attribution": {
        "criteo_attribution_dataset.tsv": (
            "timestamp\tuid\tcampaign\tclick\n100\t1\t10\t0\n90\t1\t20\t1\n80\t2\t10\t1\n"
        )
    },
}
EXPECTED = {"ml-1m": [4, 3, 5], "ml-20m": [4, 3, 5], "taobao": [4, 1, 2], "yelp": [1, 4, 5]}


def make_zip(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def make_tar(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Gives a data set the address of an archive of these files, which is returned."""

    def serve(name, files, make=make_zip):
        path = tmp_path / f"{name}.archive"
        make(path, files)
        published = replace(DATASETS[name], address=path.as_uri(), checksum=None)
        if name == "criteo-attribution":
            published = replace(published, files=("*.tsv",))
        monkeypatch.setitem(data.datasets.DATASETS, name, published)
        return path

    return serve


@pytest.mark.parametrize("make", [make_zip, make_tar])
@pytest.mark.parametrize("name", FILES)
def test_a_data_set_is_a_log(tmp_path, serve, name, make):
    serve(name, FILES[name], make)
    fetch_data.main([name, "--to", str(tmp_path / "to")])
    log = read_log(tmp_path / "to" / name)
    assert isinstance(log, RatingLog)
    assert log.user.tolist() == [0, 0, 1] and log.item.tolist() == [1, 0, 0]
    assert log.timestamp.tolist() == [90, 100, 80]
    assert log.rating.tolist() == EXPECTED.get(name, [1, 0, 1])
    kept = {path.name for path in (tmp_path / "to").iterdir()}
    assert kept == {name, "checksums.json"}


def test_sequences(tmp_path, serve):
    """Text beside a log of a known name is not read."""
    serve("iclrec-toys", {"data/Toys_and_Games.txt": "1 20 10\n2 10\n", "data/Yelp.txt": "1 2\n"})
    folder = fetch("iclrec-toys", tmp_path / "to")
    log = read_log(folder)
    assert log.user.tolist() == [0, 0, 1] and log.item.tolist() == [1, 0, 0]
    assert not isinstance(log, RatingLog)
    (folder / "u.data").write_text(RATINGS.replace("::", "\t"))
    assert isinstance(read_log(folder), RatingLog)


def test_a_file_that_is_no_archive(tmp_path, serve):
    path = serve("yelp", FILES["yelp"])
    path = path.with_name("a_review.json")
    path.write_text(FILES["yelp"]["x/yelp_academic_dataset_review.json"])
    log = read_log(fetch("yelp", tmp_path / "to", path))
    assert len(log) == 3


def test_a_checksum_is_published_or_that_of_the_first_download(tmp_path, serve, monkeypatch):
    path, to = serve("ml-1m", FILES["ml-1m"]), tmp_path / "to"
    first = fetch("ml-1m", to)
    lock = json.loads((to / "checksums.json").read_text())
    assert lock == {"ml-1m": f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"}
    path.write_bytes(b"changed")
    assert fetch("ml-1m", to) == first  # which is not downloaded again
    first.rename(tmp_path / "first")
    with pytest.raises(ValueError, match="of ml-1m has the checksum sha256:.*, not sha256:"):
        fetch("ml-1m", to)
    make_zip(path, FILES["ml-1m"])
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    for checksum, fails in ((f"md5:{md5}", False), (f"md5:{md5[::-1]}", True)):
        published = replace(DATASETS["ml-1m"], checksum=checksum)
        monkeypatch.setitem(data.datasets.DATASETS, "ml-1m", published)
        if fails:
            with pytest.raises(ValueError, match=f"has the checksum md5:{md5}, not {checksum}"):
                fetch("ml-1m", tmp_path / checksum)
        else:
            fetch("ml-1m", tmp_path / checksum)
        assert (tmp_path / checksum / "ml-1m").exists() != fails
        assert not (tmp_path / checksum / "checksums.json").exists()


def test_bad_downloads(tmp_path, serve):
    """End with one line, and leave no data set."""
    cases = {
        "yelp has no open address: accept the terms of .*/dataset and give": ["yelp"],
        "nowhere.zip": ["ml-1m", "--archive", (tmp_path / "nowhere.zip").as_uri()],
    }
    serve("taobao", {"other.csv": ""})
    cases["has no file UserBehavior.csv"] = ["taobao"]
    serve("kuairand-pure", {"log_standard_1.csv": CLICKS + "1,2,3,soon,0\n"})
    cases["log_standard_1.csv, lines 2 to 2: a time is neither"] = ["kuairand-pure"]
    path = serve("ml-20m", FILES["ml-20m"], make_tar)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    cases["cannot be unpacked: "] = ["ml-20m"]
    for message, arguments in cases.items():
        with pytest.raises(SystemExit, match=f"^fetch_data: .*{message}"):
            fetch_data.main([*arguments, "--to", str(tmp_path / "to")])
        assert not (tmp_path / "to" / arguments[0]).exists()
        assert not (tmp_path / "to/checksums.json").exists()


def test_a_download_that_ends_early(tmp_path, serve, monkeypatch):
    path = serve("ml-1m", FILES["ml-1m"])
    opened = urllib.request.urlopen

    def announce_more(address):
        remote = opened(address)
        remote.headers.replace_header("Content-length", "9999")
        return remote

    monkeypatch.setattr(urllib.request, "urlopen", announce_more)
    with pytest.raises(ValueError, match=f"ended after {path.stat().st_size} of 9999 bytes"):
        fetch("ml-1m", tmp_path / "to")


@pytest.mark.parametrize("name", DATASETS)
def test_what_is_known_of_a_data_set(name):
    published = DATASETS[name]
    assert published.page.startswith("https://") and published.licence and published.files
    assert (published.address or "https://").startswith("https://")
    algorithm, _, digits = (published.checksum or "md5:" + "0" * 32).partition(":")
    assert len(bytes.fromhex(digits)) == hashlib.new(algorithm).digest_size
