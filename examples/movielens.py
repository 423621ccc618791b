"""Reads rating logs in the published MovieLens formats into arrays sorted by user and time.

| file          | columns                                                     | published with    |
|---------------|-------------------------------------------------------------|-------------------|
| `u.data`      | user, item, rating, timestamp; tabs, no header              | ml-100k           |
| `ratings.dat` | user::item::rating::timestamp                               | ml-1m, ml-10m     |
| `ratings.csv` | userId,movieId,rating,timestamp under a header              | ml-20m and later  |
| `*.inter`     | a `name:type` header, tabs: user_id, item_id, rating,       | recbole's exports |
|               | timestamp in any order                                      |                   |

Ids of users and items are integers or text: see `published_ids.Ids`.

Files beside the log (`u.user`, `u.item`, `users.dat`, `movies.dat`, `movies.csv`, `*.user`,
`*.item`) become side features.
"""

import csv
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from published_ids import Id, Ids, check_id, fingerprint

LOG_NAMES = ("u.data", "ratings.dat", "ratings.csv", "*.inter")
COLUMNS = ("user", "item", "rating", "timestamp")
LARGEST_RATING = float(np.finfo(np.float32).max)
# Names of the columns in the two formats with a header.
HEADER_NAMES = {
    "csv": {"userId": "user", "movieId": "item", "rating": "rating", "timestamp": "timestamp"},
    "inter": {"user_id": "user", "item_id": "item", "rating": "rating", "timestamp": "timestamp"},
}
ML100K_GENRES = (
    "unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy Film-Noir"
    " Horror Musical Mystery Romance Sci-Fi Thriller War Western"
).split()

# feature name -> published id -> names of its categories
Categories = dict[str, dict[Id, list[str]]]


@dataclass(frozen=True)
class Categorical:
    """A side feature: user or item i has the categories `values[offsets[i]:offsets[i + 1]]`
    (int64). They may have names."""

    values: np.ndarray
    offsets: np.ndarray
    cardinality: int
    names: tuple[str, ...] = ()

    @cached_property
    def is_single(self) -> bool:
        """Whether each user or item has one category."""
        return np.array_equal(self.offsets, np.arange(len(self.values) + 1))

    @classmethod
    def single(cls, categories: np.ndarray) -> "Categorical":
        """One category for each user or item, int64 [N]."""
        return cls(categories, np.arange(len(categories) + 1), int(categories.max()) + 1)

    @classmethod
    def from_names(cls, ids: Iterable[Id], names: dict[Id, list[str]]) -> "Categorical":
        """Number the category names of `ids` [N] in sorted order. An id without names gets an empty
        bag."""
        by_text = {str(id): own for id, own in names.items()}
        bags = [by_text.get(str(id), []) for id in ids]
        vocabulary = {
            name: number
            for number, name in enumerate(sorted({name for bag in bags for name in bag}))
        }
        values = np.array([vocabulary[name] for bag in bags for name in bag], dtype=np.int64)
        return cls(
            values,
            np.cumsum([0, *map(len, bags)], dtype=np.int64),
            max(len(vocabulary), 1),
            tuple(vocabulary),
        )


@dataclass(frozen=True)
class EventLog:
    """Events, each of a user and an item, sorted by user, then by time.

    Args:
        user, item: int64 [N], rows of `users` and `items`.
        timestamp: int64 or float64 [N], in seconds; None if only the order of a user's events is
            known.
        users, items: the published ids.
    """

    user: np.ndarray
    item: np.ndarray
    timestamp: np.ndarray | None
    users: Ids
    items: Ids

    def __len__(self) -> int:
        return len(self.user)

    @property
    def num_users(self) -> int:
        return len(self.users)

    @property
    def num_items(self) -> int:
        return len(self.items)

    @cached_property
    def fingerprint(self) -> str:
        """It depends on all ids, events and side features, and on their order."""
        return fingerprint(_contents(self))


def _contents(value: Any) -> Iterator[bytes]:
    """The bytes of all fields of a log."""
    if isinstance(value, EventLog | Categorical):
        for each in fields(value):
            yield each.name.encode()
            yield from _contents(getattr(value, each.name))
    elif isinstance(value, dict):
        for name, part in value.items():
            yield name.encode()
            yield from _contents(part)
    elif isinstance(value, np.ndarray):
        yield value.dtype.str.encode()
        yield np.ascontiguousarray(value)
    else:
        yield repr(list(value) if isinstance(value, Ids) else value).encode()


@dataclass(frozen=True)
class RatingLog(EventLog):
    """Events with timestamps and ratings.

    Args:
        rating: float32 [N].
        user_features, item_features: side features by name, one bag per user or item.
    """

    timestamp: np.ndarray
    rating: np.ndarray
    user_features: dict[str, Categorical] = field(default_factory=dict)
    item_features: dict[str, Categorical] = field(default_factory=dict)

    @classmethod
    def from_columns(
        cls,
        user,
        item,
        rating,
        timestamp,
        user_categories: Categories | None = None,
        item_categories: Categories | None = None,
    ) -> "RatingLog":
        """Build a log from columns [N] in any order, with the published ids of users and items.

        Ratings of a user with the same timestamp keep their order. Timestamps are all integers, or
        are rounded to float64.
        """
        (users, user), (items, item), timestamp = Ids.of(user), Ids.of(item), np.asarray(timestamp)
        order = np.lexsort((timestamp, user))
        return cls(
            user=user[order],
            item=item[order],
            timestamp=timestamp[order].astype(
                np.int64 if timestamp.dtype.kind == "i" else np.float64
            ),
            users=users,
            items=items,
            rating=np.asarray(rating, dtype=np.float32)[order],
            user_features={
                feature: Categorical.from_names(users, names)
                for feature, names in (user_categories or {}).items()
            },
            item_features={
                feature: Categorical.from_names(items, names)
                for feature, names in (item_categories or {}).items()
            },
        )


def read_log(path: str | Path) -> RatingLog:
    """Read a rating log and the side features beside it.

    Args:
        path: a log in one of the four formats, recognised by its content, or a folder with exactly
            one file of `LOG_NAMES`.

    Raises:
        FileNotFoundError: `path` does not exist, or the folder has no log.
        ValueError: the folder has several logs, columns are missing, a row does not parse, or there
            are no rows.
    """
    path = find_log(Path(path))
    text = read_text(path)
    if not text.strip():
        raise ValueError(f"{path} is empty; expected rows of user, item, rating and timestamp")
    columns = _parse_log(path, text)
    return RatingLog.from_columns(
        **columns,
        user_categories=_side_categories(path.parent, USER_FILES),
        item_categories=_side_categories(path.parent, ITEM_FILES),
    )


def find_log(path: Path) -> Path:
    """The path of a file itself, of a folder that of its log."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"no file or folder {path}")
    found = sorted({file for name in LOG_NAMES for file in path.glob(name)})
    if not found:
        raise FileNotFoundError(f"no rating log in {path}; expected one of {', '.join(LOG_NAMES)}")
    if len(found) > 1:
        raise ValueError(
            f"several rating logs in {path} ({', '.join(file.name for file in found)}); give the"
            " path of one"
        )
    return found[0]


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8; byte {error.start} is not") from error


def _parse_log(path: Path, text: str) -> dict[str, Any]:
    lines = text.split("\n")
    header, delimiter = lines[0], next((x for x in ("\t", "::", ",") if x in lines[0]), "\t")
    if delimiter == ",":
        names = [name.strip() for name in next(csv.reader([header]))]
        return _parse_rows(
            path, lines, delimiter, _places(path, names, HEADER_NAMES["csv"]), header_rows=1
        )
    names = [name.split(":", 1)[0] for name in header.split("\t")]
    if not HEADER_NAMES["inter"].keys().isdisjoint(names):  # otherwise colons are of ids
        return _parse_rows(
            path, lines, delimiter, _places(path, names, HEADER_NAMES["inter"]), header_rows=1
        )
    return _parse_rows(
        path, lines, delimiter, {column: place for place, column in enumerate(COLUMNS)}
    )


def _places(path: Path, found: list[str], names: dict[str, str]) -> dict[str, int]:
    """The place of each column in a row."""
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{path}: no column {', '.join(missing)} in the header {found}")
    return {column: found.index(name) for name, column in names.items()}


def _parse_rows(
    path: Path, lines: list[str], delimiter: str, places: dict[str, int], header_rows: int = 0
) -> dict[str, Any]:
    """The columns: lists of texts of ids, ratings, and timestamps as int64, or as float64 if some
    are fractions."""
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    parsers = {"user": _id, "item": _id, "rating": _rating, "timestamp": _timestamp}
    steps = [(columns[name].append, parsers[name], places[name], name) for name in COLUMNS]
    numbers = []  # of the lines
    for number, line in enumerate(lines[header_rows:], start=1 + header_rows):
        if not line.strip():
            continue
        values = (
            next(csv.reader([line])) if '"' in line and delimiter == "," else line.split(delimiter)
        )
        numbers.append(number)
        for append, parse, place, name in steps:
            if place >= len(values):
                raise ValueError(
                    f"{path}, line {number}: expected the columns {', '.join(COLUMNS)} separated by"
                    f" {delimiter!r}, not {line[:100]!r}"
                )
            try:
                append(parse(values[place].strip(" ")))
            except (ValueError, ArithmeticError) as error:
                raise ValueError(
                    f"{path}, line {number}: the {name} must be {EXPECTED[name]}, not"
                    f" {values[place][:100]!r}"
                ) from error
    if not numbers:
        raise ValueError(f"{path} has a header but no rows")
    times = columns["timestamp"]
    if all(isinstance(time, int) for time in times):
        return {**columns, "timestamp": np.array(times, dtype=np.int64)}
    for number, time in zip(numbers, times):
        if abs(time) >= 2**53:
            raise ValueError(
                f"{path}, line {number}: the timestamp must be below 2**53 in a log with fractions"
                f" of seconds, not {time}"
            )
    return {**columns, "timestamp": np.array(times, dtype=np.float64)}


EXPECTED = {
    "user": "an id, which is an integer or text that can be printed",
    "item": "an id, which is an integer or text that can be printed",
    "rating": "a finite number of float32",
    "timestamp": "a finite number below 2**63",
}


def _id(text: str) -> str:
    return sys.intern(check_id(text))  # an id has many events


def _rating(text: str) -> float:
    value = float(_plain(text))
    if not abs(value) <= LARGEST_RATING:  # NaN too
        raise ValueError
    return value


def _timestamp(text: str) -> int | float:
    """An int if the text is a whole number, also one such as 5.0: float64 would round it from 2**53
    on."""
    exact = int(text) if text.isascii() and text.isdigit() else Decimal(_plain(text))
    if not abs(exact) < 2**63:
        raise ValueError
    return int(exact) if exact == int(exact) else float(exact)


def _plain(text: str) -> str:
    """The text of a number. Raises ValueError for the other forms that Python takes."""
    if "_" in text or not text.isascii():
        raise ValueError
    return text


# -- side features: each reader yields (id, {feature: names}) --------------------------------------


def _user_row(
    id: str, age: str, gender: str, occupation: str, *_: str
) -> tuple[str, dict[str, list[str]]]:
    return id.strip(" "), {
        "age": [f"{int(age) // 10 * 10}"],
        "gender": [gender],
        "occupation": [occupation],
    }


def _item_row(id: str, year: str, genres: Iterable[str]) -> tuple[str, dict[str, list[str]]]:
    return id.strip(" "), {
        "genre": list(genres),
        "released": [f"{int(year) // 5 * 5}"] if year.isdigit() else [],
    }


def _split_lines(path: Path, delimiter: str) -> Iterator[list[str]]:
    try:
        text = read_text(path)
    except ValueError:
        text = path.read_text(encoding="latin-1")  # of ml-100k and ml-1m
    for line in text.split("\n"):
        if line.strip():
            yield line.split(delimiter)


def _typed_rows(path: Path, names: tuple[str, ...]) -> Iterator[list[str]]:
    """Rows of a file with a `name:type` header, reduced to the columns `names`. A missing column
    reads as ''."""
    rows = _split_lines(path, "\t")
    fields = [name.split(":", 1)[0] for name in next(rows, [])]
    for row in rows:
        record = dict(zip(fields, row, strict=True))
        yield [record.get(name, "") for name in names]


def _title_year(title: str) -> str:
    title = title.strip()
    return title[-5:-1] if title.endswith(")") else ""


def _read_dat_items(path: Path):
    return (
        _item_row(id, _title_year(title), genres.split("|"))
        for id, title, genres in _split_lines(path, "::")
    )


def _read_csv_items(path: Path):
    with path.open(encoding="utf-8-sig", newline="") as lines:
        for row in csv.DictReader(lines):
            yield _item_row(row["movieId"], _title_year(row["title"]), row["genres"].split("|"))


def _read_ml100k_items(path: Path):
    for id, title, _, _, _, *flags in _split_lines(path, "|"):
        yield _item_row(
            id,
            _title_year(title),
            (genre for genre, flag in zip(ML100K_GENRES, flags, strict=True) if flag == "1"),
        )


def _read_typed_items(path: Path):
    return (
        _item_row(id, year, genres.split())
        for id, year, genres in _typed_rows(path, ("item_id", "release_year", "class"))
    )


Reader = Callable[[Path], Iterator[tuple[str, dict[str, list[str]]]]]
USER_FILES: dict[str, Reader] = {
    "u.user": lambda path: (_user_row(*row) for row in _split_lines(path, "|")),
    "users.dat": lambda path: (
        _user_row(id, age, gender, occupation)
        for id, gender, age, occupation, _ in _split_lines(path, "::")
    ),
    "*.user": lambda path: (
        _user_row(*row) for row in _typed_rows(path, ("user_id", "age", "gender", "occupation"))
    ),
}
ITEM_FILES: dict[str, Reader] = {
    "u.item": _read_ml100k_items,
    "movies.dat": _read_dat_items,
    "movies.csv": _read_csv_items,
    "*.item": _read_typed_items,
}


def _side_categories(folder: Path, readers: dict[str, Reader]) -> Categories:
    """Names of categories by feature, from the first file of `readers` that exists in the folder.
    Empty if none exists."""
    categories: Categories = {}
    for name, reader in readers.items():
        for path in sorted(folder.glob(name))[:1]:
            row = 1
            try:
                for id, features in reader(path):
                    for feature, names in features.items():
                        categories.setdefault(feature, {})[id] = names
                    row += 1
            # csv gives None for a column that a row lacks
            except (ValueError, TypeError, KeyError, AttributeError, csv.Error) as error:
                raise ValueError(
                    f"{path}: row {row} below any header does not have the columns of {name}:"
                    f" {error}"
                ) from error
            return categories
    return categories
