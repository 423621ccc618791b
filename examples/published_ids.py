"""The published ids of users and items, and the rows of a model's tables that stand for them.

Logs, requests and answers have published ids. Models have numbers of rows. `Ids` leads from one
to the other. A model's `Vocabulary` is saved with its weights, so that they are not used with a log
whose ids have other rows.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

Id = int | str
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,38}")


class Ids:
    """Distinct ids, whose rows are those of their ascending order: row i has the id `ids[i]`.

    The ids are integers if each of them is written as one, without a plus sign, without leading
    zeros and with at most 39 digits. Otherwise all are text. Ids are equal if their texts are: 7 is
    "7", also in a request, and "007" is another id.

    Args:
        ids: the ids of a column, integers or text, also repeated.
    """

    def __init__(self, ids: Iterable[Id]):
        texts = set(map(str, ids))
        self._ids = sorted(map(int, texts)) if all(map(INTEGER.fullmatch, texts)) else sorted(texts)
        self._row = {str(id): row for row, id in enumerate(self._ids)}

    @classmethod
    def of(cls, column: Iterable[Id]) -> tuple["Ids", np.ndarray]:
        """The ids of a column [N], and the row of each of its entries, int64 [N]."""
        column = column.tolist() if isinstance(column, np.ndarray) else list(column)
        ids = cls(column)
        return ids, ids.rows(column)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, row: int) -> Id:
        return self._ids[row]

    def __iter__(self) -> Iterator[Id]:
        return iter(self._ids)

    def rows(self, ids: Iterable[Id]) -> np.ndarray:
        """The row of each of these ids, int64 [N]; -1 for an unknown one."""
        return np.array([self._row.get(str(id), -1) for id in ids], dtype=np.int64)


class Vocabulary:
    """What the rows of a model's tables stand for.

    Args:
        names: for each table the id, the rating or the category of each row.
    """

    def __init__(self, names: Mapping[str, Iterable[Id | float]]):
        self.names = {table: list(rows) for table, rows in names.items()}
        self.text = json.dumps(self.names)
        self.fingerprint = fingerprint([self.text.encode()])

    @classmethod
    def from_text(cls, text: str) -> "Vocabulary":
        """The vocabulary with this `text`. Raises ValueError if there is none."""
        names = json.loads(text)
        if not isinstance(names, dict) or not all(
            isinstance(rows, list) for rows in names.values()
        ):
            raise ValueError("it has no table of ids")
        return cls(names)

    def difference(self, other: "Vocabulary") -> str:
        """Where this vocabulary first differs from the other one. Empty if they are equal."""
        if self.text == other.text:
            return ""
        table = next(
            table
            for table in (self.names | other.names)
            if self.names.get(table) != other.names.get(table)
        )
        own, others = self.names.get(table, []), other.names.get(table, [])
        row = next(
            (row for row, (x, y) in enumerate(zip(own, others)) if x != y),
            min(len(own), len(others)),
        )
        name, expected = (
            repr(rows[row]) if row < len(rows) else "nothing" for rows in (own, others)
        )
        return f"row {row} of {table!r} is {name}, not {expected}"


def fingerprint(parts: Iterable[bytes]) -> str:
    """16 hexadecimal digits that depend on all bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def check_id(text: str) -> str:
    """The text. Raises ValueError if it is empty or has characters that cannot be printed."""
    if not (text and text.isprintable()):
        raise ValueError(f"an id must be an integer or text that can be printed, not {text!r}")
    return text
