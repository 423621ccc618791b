"""Reads event logs of many forms into arrays sorted by user and time.

| file | columns |
|---|---|
| text with a header | by names, `forms.ALIASES` or `Form.columns`; tabs, `::`, `,` or `;` between |
| text without a header | user, item[, rating, time], as in MovieLens, or by places |
| `*.inter` of RecBole | by names, `name:type` |
| JSON objects, one a line | by names |
| Parquet, a file or a folder of files | by names; needs pyarrow |
| sequence file | a line per user: the user's id, then item ids from oldest to newest; spaces |

Text may be compressed (`.gz`). It is read in blocks: memory holds numbers, and each id once. Ids
are integers or text: see `published_ids.Ids`. Without times, the order is that of the file.
"""

from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from published_ids import Ids, check_id

from .blocks import read_blocks
from .event_log import EventLog, RatingLog, sort_events
from .forms import HEADER, TIME_UNITS, Form
from .side_features import ITEM_FILES, USER_FILES, read_categories

LOG_NAMES = ("u.data", "ratings.dat", "ratings.csv", "events.csv", "*.inter", "*.parquet")
LARGEST_RATING = float(np.finfo(np.float32).max)


def read_log(path: str | Path, form: Form | None = None) -> EventLog:
    """Read a log. If it has ratings and times it is a RatingLog, with the side features beside it.

    Args:
        path: a log, or a folder with exactly one of `LOG_NAMES`, with a log's Parquet files, or
            without these and with one `*.txt`.
        form: how it is written; the file decides if None.

    Raises:
        FileNotFoundError: `path` does not exist, or the folder has no log.
        ValueError: the folder has several logs, columns are missing, a row does not parse, there
            are no rows, or a Parquet file needs a package that is not installed.
    """
    path, form = find_log(Path(path)), form or Form()
    users, items, ticks = _Codes(), _Codes(), TIME_UNITS[form.time_unit or "s"]
    encoders = {"user": users, "item": items, "rating": _ratings, "time": partial(_times, ticks)}
    parts: dict[str, list[np.ndarray]] = {}
    for lines, block in read_blocks(path, form):
        for role, texts in block.items():
            try:
                parts.setdefault(role, []).append(encoders[role](texts))
            except _BadText as error:
                line = lines[texts.index(error.text)]
                raise ValueError(
                    f"{path}, line {line}: the {role} must be {EXPECTED[role]}, not"
                    f" {error.text[:100]!r}"
                    + (f"; {HEADER}" if line == 1 and form.header is None else "")
                ) from error
    columns = {role: np.concatenate(parts.pop(role)) for role in list(parts)}
    times = columns.get("time")
    if times is not None and times.dtype.kind == "f" and (large := np.abs(times) >= 2**53).any():
        raise ValueError(
            f"{path}: a time must be below 2**53 in a log with fractions of seconds, not"
            f" {times[large][0]:.0f}"
        )
    folder = path if path.is_dir() else path.parent
    sides = (USER_FILES, ITEM_FILES) if {"rating", "time"} <= columns.keys() else ({}, {})
    return sort_events(
        *users.rows(columns["user"]),
        *items.rows(columns["item"]),
        times,
        columns.get("rating"),
        *(read_categories(folder, files) for files in sides),
    )


def read_ratings(path: str | Path, form: Form | None = None) -> RatingLog:
    """Read a log as `read_log` does. Raises ValueError unless it has ratings and times."""
    log = read_log(path, form)
    if not isinstance(log, RatingLog):
        raise ValueError(
            f"{path}: a ranking model needs a column of ratings and one of times; train_hstu.py"
            " needs neither"
        )
    return log


def find_log(path: Path) -> Path:
    """The path of a file itself, of a folder that of its log, or its own if all of its logs are
    Parquet files."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"no file or folder {path}")
    found = sorted({file for name in LOG_NAMES for file in path.glob(name)})
    found = found or sorted(path.glob("*.txt"))  # elsewhere beside a log: what it is
    if not found:
        raise FileNotFoundError(f"no log in {path}; expected one of {', '.join(LOG_NAMES)}, *.txt")
    if all(file.suffix == ".parquet" for file in found):
        return path
    if len(found) > 1:
        raise ValueError(
            f"several logs in {path} ({', '.join(file.name for file in found)}); give the path of"
            " one"
        )
    return found[0]


EXPECTED = {
    "user": "an id, which is an integer or text that can be printed",
    "item": "an id, which is an integer or text that can be printed",
    "rating": "a finite number of float32",
    "time": "a finite number below 2**63 or a date",
}


class _BadText(ValueError):
    """A text that is no value of its column."""

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text


def _parsed(texts: list[str], parse: Callable[[str], Any]) -> Iterator[Any]:
    """The value of each text. Equal ones are parsed once."""
    values = {}
    for text in dict.fromkeys(texts):
        try:
            values[text] = parse(text.strip(" "))
        except (ValueError, ArithmeticError) as error:
            raise _BadText(text) from error
    return map(values.__getitem__, texts)


class _Codes:
    """Numbers for ids, in the order of their first occurrence."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}

    def __call__(self, texts: list[str]) -> np.ndarray:
        codes = _parsed(texts, lambda id: self.of.setdefault(check_id(id), len(self.of)))
        return np.fromiter(codes, np.int32, len(texts))

    def rows(self, codes: np.ndarray) -> tuple[Ids, np.ndarray]:
        """The ids, and the row of each code."""
        ids = Ids(self.of)
        return ids, ids.rows(self.of)[codes]


def _ratings(texts: list[str]) -> np.ndarray:
    return np.fromiter(_parsed(texts, _rating), np.float32, len(texts))


def _rating(text: str) -> float:
    value = float(_plain(text))
    if not abs(value) <= LARGEST_RATING:  # NaN too
        raise ValueError
    return value


def _times(ticks: int, texts: list[str]) -> np.ndarray:
    """Seconds, int64, or float64 if some are fractions."""
    times = list(_parsed(texts, lambda text: seconds(text, ticks)))
    whole = all(isinstance(time, int) for time in times)
    return np.array(times, dtype=np.int64 if whole else np.float64)


def seconds(text: str, ticks: int) -> int | float:
    """The seconds of a date, or of a number of `ticks`. They are an int if whole, also 5.0, because
    float64 would round it from 2**53 on."""
    try:
        exact = int(text) if text.isascii() and text.isdigit() else Decimal(_plain(text))
    except ArithmeticError:  # it is no number
        date = datetime.fromisoformat(text)
        date = date if date.tzinfo else date.replace(tzinfo=timezone.utc)
        exact = Decimal(str(date.timestamp()))
    else:
        exact = exact if ticks == 1 else Decimal(exact) / ticks
    if not abs(exact) < 2**63:
        raise ValueError
    return int(exact) if exact == int(exact) else float(exact)


def _plain(text: str) -> str:
    """The text of a number. Raises ValueError for the other forms that Python takes."""
    if "_" in text or not text.isascii():
        raise ValueError
    return text
