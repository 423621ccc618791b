"""Downloads published data sets by name, and converts them to logs that `logs.read_log` reads.

An archive comes from the data set's own site and is checked by a published checksum, or by that of
its first download, which the folder keeps in `checksums.json`. Logs that are not `ready` are
converted to events.csv: user, item, rating and timestamp, in seconds or as dates.
"""

import csv
import hashlib
import json
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from .blocks import read_blocks
from .forms import TIME_UNITS, Form
from .logs import seconds

LOCK = "checksums.json"


@dataclass(frozen=True)
class Published:
    """A published data set.

    Args:
        page: where it is described.
        licence: what its site says about its use.
        files: patterns of the names of the files to take from the archive.
        address: that of its archive. None: it is given only to those who accept its terms on its
            page.
        checksum: `algorithm:hexadecimal digits` of the archive, if it is published.
        form: how the log is written.
        ratings: numbers for texts of the column of ratings.
        ready: whether the files are kept as they are.
    """

    page: str
    licence: str
    files: tuple[str, ...]
    address: str | None = None
    checksum: str | None = None
    form: Form = field(default_factory=Form)
    ratings: dict[str, str] = field(default_factory=dict)
    ready: bool = False


def _movielens(name: str, checksum: str, *files: str) -> Published:
    return Published(
        f"https://grouplens.org/datasets/movielens/{name.removeprefix('ml-')}/",
        "research; neither commercial use nor redistribution without permission",
        files,
        f"https://files.grouplens.org/datasets/movielens/{name}.zip",
        f"md5:{checksum}",
        ready=True,
    )


def _amazon(category: str, year: int) -> Published:
    """Reviews of products of a category by users, each with at least 5."""
    if year == 2014:
        return Published(
            "https://snap.stanford.edu/data/amazon/productGraph/",
            "not stated; cite McAuley et al. 2015, and He and McAuley 2016",
            ("*.json.gz",),
            "https://snap.stanford.edu/data/amazon/productGraph/categoryFiles/"
            f"reviews_{category}_5.json.gz",
        )
    return Published(
        "https://amazon-reviews-2023.github.io/",
        "not stated; cite Hou et al. 2024",
        ("*.csv.gz",),
        "https://mcauleylab.ucsd.edu/public_datasets/data/amazon_2023/benchmark/5core/rating_only/"
        f"{category}.csv.gz",
        form=Form(time_unit="ms"),
    )


def _sequences(file: str, checksum: str) -> Published:
    """Users' items from oldest to newest, as published with ICLRec."""
    return Published(
        "https://github.com/salesforce/ICLRec/tree/main/data",
        "not stated; cite He and McAuley 2016, and McAuley et al. 2015. Yelp: academic use",
        (f"{file}.txt",),
        "https://raw.githubusercontent.com/salesforce/ICLRec/"
        f"4afb54a036ebbf4166ed5858122d89c0642251a7/data/{file}.txt",
        f"sha256:{checksum}",
        ready=True,
    )


DATASETS = {
    "ml-100k": _movielens(
        "ml-100k", "0e33842e24a9c977be4e0107933c0723", "u.data", "u.user", "u.item"
    ),
    "ml-1m": _movielens("ml-1m", "c4d9eecfca2ab87c1945afe126590906", "*s.dat"),
    "ml-20m": _movielens("ml-20m", "cd245b17a1ae2cc31bb14903e1204af3", "ratings.csv", "movies.csv"),
    "ml-32m": _movielens("ml-32m", "d472be332d4daa821edc399621853b57", "ratings.csv", "movies.csv"),
    **{
        f"amazon-2014-{category.split('_')[0].lower()}": _amazon(category, 2014)
        for category in ("Beauty", "Sports_and_Outdoors", "Toys_and_Games", "Video_Games")
    },
    **{
        f"amazon-2023-{category.split('_')[0].lower()}": _amazon(category, 2023)
        for category in ("Beauty_and_Personal_Care", "Books", "Toys_and_Games", "Video_Games")
    },
    "iclrec-beauty": _sequences(
        "Beauty", "226cce9c3105299ca0db9615d7d3fb32b3175e90da43100ae352599f0f0107b8"
    ),
    "iclrec-sports": _sequences(
        "Sports_and_Outdoors", "2a095e0648872beb9982408958290f5d655db5be2911c3756b5446de9f0b8de2"
    ),
    "iclrec-toys": _sequences(
        "Toys_and_Games", "176c680c688d497598c4a89a03b402c0fe78d795e5db335c2e78dd5f2d778a3f"
    ),
    "iclrec-yelp": _sequences(
        "Yelp", "724b219106b81dd2349027da997334ddb6da9fe2f152ad6e0d97a93170f7caed"
    ),
    "kuairand-pure": Published(
        "https://kuairand.com/",
        "CC BY-SA 4.0",
        ("log_standard_*.csv",),
        "https://zenodo.org/records/10439422/files/KuaiRand-Pure.tar.gz",
        form=Form(
            dict(user="user_id", item="video_id", rating="is_click", time="time_ms"), time_unit="ms"
        ),
    ),
    "yelp": Published(
        "https://www.yelp.com/dataset",
        "Yelp's terms: academic use, no redistribution",
        ("*review.json",),
    ),
    "taobao": Published(
        "https://tianchi.aliyun.com/dataset/649",
        "CC BY-NC-SA 4.0",
        ("UserBehavior.csv",),
        form=Form(dict(user="1", item="2", rating="4", time="5")),
        ratings={"pv": "1", "fav": "2", "cart": "3", "buy": "4"},
    ),
    "criteo-attribution": Published(
        "https://ailab.criteo.com/criteo-attribution-modeling-bidding-dataset/",
        "CC BY-NC-SA 4.0",
        ("criteo_attribution_dataset.tsv.gz",),
        form=Form(dict(user="uid", item="campaign", rating="click", time="timestamp")),
    ),
}


def fetch(name: str, folder: Path, archive: str | Path | None = None) -> Path:
    """Download a data set, unless it is in `folder` already, and convert it. Returns its folder.

    Args:
        name: a key of `DATASETS`.
        folder: gets the folder `name` and `checksums.json`.
        archive: a path or an address of the archive, instead of the data set's own address.

    Raises:
        ValueError: the data set must be downloaded by hand, the archive has another checksum, or it
            lacks the files.
    """
    published, done = DATASETS[name], folder / name
    if done.exists():
        return done
    source = archive or published.address
    if source is None:
        raise ValueError(
            f"{name} has no open address: accept the terms of {published.page} and give the path of"
            " the archive by --archive"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as scratch:
        path = Path(scratch) / str(source).rsplit("/", 1)[-1]
        if archive is not None and Path(archive).is_file():
            path = Path(archive)
        else:
            with urllib.request.urlopen(str(source)) as remote, path.open("wb") as local:
                shutil.copyfileobj(remote, local)
                size, expected = local.tell(), remote.headers["Content-Length"]
            if expected is not None and size != int(expected):
                raise ValueError(f"{source} ended after {size} of {expected} bytes")
        lock = folder / LOCK
        known = json.loads(lock.read_text()) if lock.exists() else {}
        checksum = _check(name, path, published.checksum or known.get(name))
        raw, ready = Path(scratch) / "raw", Path(scratch) / "ready"
        for each in (raw, ready):
            each.mkdir()
        try:
            _unpack(path, published.files, raw)
        except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
            raise ValueError(f"{source} cannot be unpacked: {error}") from error
        files = sorted(raw.iterdir())
        if not files:
            raise ValueError(f"{source} has no file {' or '.join(published.files)}")
        if not published.ready:
            _convert(published, files, ready / "events.csv")
        (raw if published.ready else ready).rename(done)
        if published.checksum is None:
            lock.write_text(json.dumps({**known, name: checksum}, indent=2) + "\n")
    return done


def _check(name: str, path: Path, expected: str | None) -> str:
    """The checksum of an archive. Raises ValueError if it is not the expected one, if there is
    one."""
    algorithm = (expected or "sha256:").split(":")[0]
    with path.open("rb") as file:
        digest = hashlib.new(algorithm)
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    found = f"{algorithm}:{digest.hexdigest()}"
    if found != (expected or found):
        raise ValueError(f"the archive of {name} has the checksum {found}, not {expected}")
    return found


def _unpack(path: Path, patterns: tuple[str, ...], to: Path) -> None:
    """Copy the files whose names fit a pattern out of an archive, without their folders."""
    for name, file in _members(path):
        if any(fnmatch(name, pattern) for pattern in patterns):
            with (to / name).open("wb") as local:
                shutil.copyfileobj(file, local)


def _members(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    """The names without folders, and the contents, of the files of an archive, or of a file that is
    none."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if not entry.is_dir():
                    with archive.open(entry) as file:
                        yield Path(entry.filename).name, file
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for entry in archive:
                if entry.isfile():
                    yield Path(entry.name).name, archive.extractfile(entry)
    else:
        with path.open("rb") as file:
            yield path.name, file


def _convert(published: Published, files: list[Path], to: Path) -> None:
    """Write the events of all files into one, block by block."""
    form = published.form
    with to.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(("user", "item", "rating", "timestamp"))
        for path in files:
            for lines, block in read_blocks(path, form):
                block["rating"] = [published.ratings.get(text, text) for text in block["rating"]]
                try:
                    if form.time_unit is not None:
                        ticks = TIME_UNITS[form.time_unit]
                        block["time"] = [str(seconds(text, ticks)) for text in block["time"]]
                except (ValueError, ArithmeticError) as error:
                    where = f"{path.name}, lines {lines[0]} to {lines[-1]}"
                    raise ValueError(f"{where}: a time is neither a number nor a date") from error
                writer.writerows(zip(*(block[role] for role in ("user", "item", "rating", "time"))))
