"""Reads rating logs in the published MovieLens formats into arrays sorted by user and time.

| file          | columns                                                                            | published with    |
|---------------|------------------------------------------------------------------------------------|-------------------|
| `u.data`      | user, item, rating, timestamp; tabs, no header                                     | ml-100k           |
| `ratings.dat` | user::item::rating::timestamp                                                      | ml-1m, ml-10m     |
| `ratings.csv` | userId,movieId,rating,timestamp under a header                                     | ml-20m and later  |
| `*.inter`     | a `name:type` header, tabs: user_id, item_id, rating, timestamp in any order       | recbole's exports |

Files beside the log (`u.user`, `u.item`, `users.dat`, `movies.dat`, `movies.csv`, `*.user`, `*.item`) become side features.
"""

import codecs
import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

LOG_NAMES = ("u.data", "ratings.dat", "ratings.csv", "*.inter")
COLUMNS = ("user", "item", "rating", "timestamp")
# Names of the columns in the two formats with a header.
HEADER_NAMES = {
    "csv": {"userId": "user", "movieId": "item", "rating": "rating", "timestamp": "timestamp"},
    "inter": {"user_id": "user", "item_id": "item", "rating": "rating", "timestamp": "timestamp"},
}
ML100K_GENRES = (
    "unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy Film-Noir Horror Musical Mystery "
    "Romance Sci-Fi Thriller War Western"
).split()

Categories = dict[str, dict[int, list[str]]]  # feature name -> published id -> names of its categories


@dataclass(frozen=True)
class Categorical:
    """A side feature: user or item i has the categories `values[offsets[i]:offsets[i + 1]]` (int64)."""

    values: np.ndarray
    offsets: np.ndarray
    cardinality: int

    @cached_property
    def is_single(self) -> bool:
        """Whether each user or item has one category."""
        return np.array_equal(self.offsets, np.arange(len(self.values) + 1))

    @classmethod
    def single(cls, categories: np.ndarray) -> "Categorical":
        """One category for each user or item, int64 [N]."""
        return cls(categories, np.arange(len(categories) + 1), int(categories.max()) + 1)

    @classmethod
    def from_names(cls, ids: np.ndarray, names: dict[int, list[str]]) -> "Categorical":
        """Number the category names of `ids` [N] in sorted order. An id without names gets an empty bag."""
        bags = [names.get(int(i), []) for i in ids]
        vocabulary = {name: number for number, name in enumerate(sorted({name for bag in bags for name in bag}))}
        values = np.array([vocabulary[name] for bag in bags for name in bag], dtype=np.int64)
        return cls(values, np.cumsum([0, *map(len, bags)], dtype=np.int64), max(len(vocabulary), 1))


@dataclass(frozen=True)
class EventLog:
    """Events, each of a user and an item, sorted by user, then by time. Users and items are numbered from 0.

    Args:
        user, item: int64 [N].
        timestamp: float64 [N], in seconds; None if only the order of a user's events is known.
        num_users, num_items: numbers of users and items.
    """

    user: np.ndarray
    item: np.ndarray
    timestamp: np.ndarray | None
    num_users: int
    num_items: int

    def __len__(self) -> int:
        return len(self.user)


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
        cls, user, item, rating, timestamp, user_categories: Categories | None = None, item_categories: Categories | None = None
    ) -> "RatingLog":
        """Build a log from columns [N] in any order, with any integer ids of users and items.

        Ratings of a user with the same timestamp keep their order.
        """
        order = np.lexsort((timestamp, user))
        user_ids, user = np.unique(np.asarray(user)[order], return_inverse=True)
        item_ids, item = np.unique(np.asarray(item)[order], return_inverse=True)
        return cls(
            user=user,
            item=item,
            timestamp=np.asarray(timestamp, dtype=np.float64)[order],
            num_users=len(user_ids),
            num_items=len(item_ids),
            rating=np.asarray(rating, dtype=np.float32)[order],
            user_features={feature: Categorical.from_names(user_ids, names) for feature, names in (user_categories or {}).items()},
            item_features={feature: Categorical.from_names(item_ids, names) for feature, names in (item_categories or {}).items()},
        )


def read_log(path: str | Path) -> RatingLog:
    """Read a rating log and the side features beside it.

    Args:
        path: a log in one of the four formats, recognised by its content, or a folder with exactly one file of `LOG_NAMES`.

    Raises:
        FileNotFoundError: `path` does not exist, or the folder has no log.
        ValueError: the folder has several logs, columns are missing, a row does not parse, or there are no rows.
    """
    path = find_log(Path(path))
    text = read_text(path)
    if not text.strip():
        raise ValueError(f"{path} is empty; expected rows of user, item, rating and timestamp")
    columns = _parse_log(path, text)
    return RatingLog.from_columns(
        **columns, user_categories=_side_categories(path.parent, USER_FILES), item_categories=_side_categories(path.parent, ITEM_FILES)
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
        raise ValueError(f"several rating logs in {path} ({', '.join(file.name for file in found)}); give the path of one")
    return found[0]


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8; byte {error.start} is not") from error


def _parse_log(path: Path, text: str) -> dict[str, np.ndarray]:
    header = text.split("\n", 1)[0].rstrip("\r")
    if ":" in header and "\t" in header:
        fields = [name.split(":", 1)[0] for name in header.split("\t")]
        return _parse_rows(path, text, "\t", _columns_by_name(path, fields, HEADER_NAMES["inter"]), header_rows=1)
    if "::" in header:
        return _parse_rows(path, text, "::", dict(enumerate(COLUMNS)))
    if "," in header:
        return _parse_rows(path, text, ",", _columns_by_name(path, header.split(","), HEADER_NAMES["csv"]), header_rows=1)
    return _parse_rows(path, text, "\t", dict(enumerate(COLUMNS)))


def _columns_by_name(path: Path, fields: list[str], names: dict[str, str]) -> dict[int, str]:
    if missing := [name for name in names if name not in fields]:
        raise ValueError(f"{path}: no column {', '.join(missing)} in the header {fields}")
    return {fields.index(name): column for name, column in names.items()}


def _parse_rows(path: Path, text: str, delimiter: str, columns: dict[int, str], header_rows: int = 0) -> dict[str, np.ndarray]:
    if not text.split("\n", header_rows)[-1].strip():
        raise ValueError(f"{path} has a header but no rows")

    def parse(lines: str, skiprows: int = 0) -> np.ndarray:
        text = io.StringIO(lines.replace("::", "\t"))
        # float64 holds every integer below 2**53, so ids and timestamps are exact.
        return np.loadtxt(text, delimiter=delimiter.replace("::", "\t"), skiprows=skiprows, usecols=list(columns), ndmin=2, comments=None)

    def rows() -> list[tuple[int, str]]:
        """The number and the text of each line that is a row."""
        return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line and number > header_rows]

    try:
        parsed = parse(text, header_rows)
    except (ValueError, IndexError) as error:
        number, line = _first_refused(rows(), lambda part: parse("\n".join(line for _, line in part)))
        names = ", ".join(COLUMNS)
        raise ValueError(
            f"{path}, line {number}: expected numbers in the columns {names} separated by {delimiter!r}, not {line[:100]!r}"
        ) from error
    values = dict(zip(columns.values(), parsed.T, strict=True))

    def check(name: str, good: np.ndarray, expected: str) -> None:
        if not good.all():
            row = int(np.argmin(good))
            raise ValueError(f"{path}, line {rows()[row][0]}: the {name} must be {expected}, not {float(values[name][row])}")

    for name in ("user", "item"):
        check(name, values[name] == np.round(values[name]), "an integer id")
        # Larger ones were rounded, so different ids may be equal.
        check(name, np.abs(values[name]) < 2**53, "an id below 2**53; number larger ones, for example hashes, anew")
        values[name] = values[name].astype(np.int64)
    check("rating", np.abs(values["rating"]) <= np.finfo(np.float32).max, "a finite number of float32")
    check("timestamp", np.abs(values["timestamp"]) < 2**63, "a finite number below 2**63")
    return values


def _first_refused(rows: Sequence[Any], parse: Callable[[Sequence[Any]], Any]) -> Any:
    """The first row that `parse` refuses, which parses a sequence of rows if it can parse each of them. It refuses one of these."""
    while len(rows) > 1:
        middle = len(rows) // 2
        try:
            parse(rows[:middle])
            rows = rows[middle:]
        except (ValueError, IndexError):
            rows = rows[:middle]
    return rows[0]


# -- side features: each reader yields (id, {feature: names}) ----------------------------------------------------------------------------


def _user_row(id: str, age: str, gender: str, occupation: str, *_: str) -> tuple[int, dict[str, list[str]]]:
    return int(id), {"age": [f"{int(age) // 10 * 10}"], "gender": [gender], "occupation": [occupation]}


def _item_row(id: str, year: str, genres: Iterable[str]) -> tuple[int, dict[str, list[str]]]:
    return int(id), {"genre": list(genres), "released": [f"{int(year) // 5 * 5}"] if year.isdigit() else []}


def _split_lines(path: Path, delimiter: str) -> Iterator[list[str]]:
    # ml-100k and ml-1m are Latin-1. In other formats only ASCII columns are used, which Latin-1 reads correctly. But it reads a byte order
    # mark as three characters, and bytes of UTF-8 letters as what str.splitlines takes for ends of lines.
    for line in path.read_text(encoding="latin-1").removeprefix(codecs.BOM_UTF8.decode("latin-1")).split("\n"):
        if line.strip():
            yield line.split(delimiter)


def _typed_rows(path: Path, names: tuple[str, ...]) -> Iterator[list[str]]:
    """Rows of a file with a `name:type` header, reduced to the columns `names`. A missing column reads as ''."""
    rows = _split_lines(path, "\t")
    fields = [name.split(":", 1)[0] for name in next(rows, [])]
    for row in rows:
        record = dict(zip(fields, row, strict=True))
        yield [record.get(name, "") for name in names]


def _title_year(title: str) -> str:
    title = title.strip()
    return title[-5:-1] if title.endswith(")") else ""


def _read_dat_items(path: Path):
    return (_item_row(id, _title_year(title), genres.split("|")) for id, title, genres in _split_lines(path, "::"))


def _read_csv_items(path: Path):
    with path.open(encoding="utf-8-sig", newline="") as lines:
        for row in csv.DictReader(lines):
            yield _item_row(row["movieId"], _title_year(row["title"]), row["genres"].split("|"))


def _read_ml100k_items(path: Path):
    for id, title, _, _, _, *flags in _split_lines(path, "|"):
        yield _item_row(id, _title_year(title), (genre for genre, flag in zip(ML100K_GENRES, flags, strict=True) if flag == "1"))


def _read_typed_items(path: Path):
    return (_item_row(id, year, genres.split()) for id, year, genres in _typed_rows(path, ("item_id", "release_year", "class")))


Reader = Callable[[Path], Iterator[tuple[int, dict[str, list[str]]]]]
USER_FILES: dict[str, Reader] = {
    "u.user": lambda path: (_user_row(*row) for row in _split_lines(path, "|")),
    "users.dat": lambda path: (_user_row(id, age, gender, occupation) for id, gender, age, occupation, _ in _split_lines(path, "::")),
    "*.user": lambda path: (_user_row(*row) for row in _typed_rows(path, ("user_id", "age", "gender", "occupation"))),
}
ITEM_FILES: dict[str, Reader] = {
    "u.item": _read_ml100k_items,
    "movies.dat": _read_dat_items,
    "movies.csv": _read_csv_items,
    "*.item": _read_typed_items,
}


def _side_categories(folder: Path, readers: dict[str, Reader]) -> Categories:
    """Names of categories by feature, from the first file of `readers` that exists in the folder. Empty if none exists."""
    categories: Categories = {}
    for name, reader in readers.items():
        for path in sorted(folder.glob(name))[:1]:
            row = 1
            try:
                for id, features in reader(path):
                    for feature, names in features.items():
                        categories.setdefault(feature, {})[id] = names
                    row += 1
            except (ValueError, TypeError, KeyError, AttributeError, csv.Error) as error:  # csv gives None for a column that a row lacks
                raise ValueError(f"{path}: row {row} below any header does not have the columns of {name}: {error}") from error
            return categories
    return categories
