"""Side features of users and items, from the files that MovieLens logs have beside them."""

import csv
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .event_log import Categories

ML100K_GENRES = (
    "unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy Film-Noir"
    " Horror Musical Mystery Romance Sci-Fi Thriller War Western"
).split()


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
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
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


def read_categories(folder: Path, readers: dict[str, Reader]) -> Categories:
    """Names of categories by feature, from the first file of `readers`, which are `USER_FILES` or
    `ITEM_FILES`, that exists in the folder. Empty if none exists."""
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
