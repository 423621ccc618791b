"""Reads event logs for next-item models: the MovieLens formats of movielens.py, and sequence files
without timestamps.

A sequence file has a line per user: the user's id, then item ids from oldest to newest, separated
by spaces. Ids are integers or text, without spaces and the separators of the MovieLens formats.
Several preprocessed data sets are published in this form, for instance the Amazon sets of ICLRec
(Chen et al. 2022, arXiv:2202.02519).
"""

import sys
from pathlib import Path

import numpy as np
from movielens import EventLog, find_log, read_log, read_text
from published_ids import Ids, check_id

SEPARATORS = ("\t", ",", "::")  # of the columns in the MovieLens formats
EXPECTED = "expected ids separated by spaces: a user's id, then item ids from oldest to newest"


def read_events(path: str | Path) -> EventLog:
    """Read a sequence file or a rating log.

    Args:
        path: a file, whose format is recognised by its first line, or a folder with exactly one
            MovieLens log.

    Raises:
        FileNotFoundError, ValueError: as `movielens.read_log`; a line of a sequence file has no
            items, an id with a separator or a control
        character, or a user has two lines.
    """
    path = find_log(Path(path))
    text = read_text(path)
    first_line = text.split("\n", 1)[0]
    if not first_line.strip() or any(separator in first_line for separator in SEPARATORS):
        return read_log(path)
    return _parse_sequences(path, text)


def _parse_sequences(path: Path, text: str) -> EventLog:
    line_of: dict[str, int] = {}  # user -> number of the user's line
    sequences = []
    for number, line in enumerate(text.split("\n"), start=1):
        user, *items = [sys.intern(id) for id in line.split(" ") if id] or [""]
        if not user:
            continue
        try:
            for id in (user, *items):
                if any(separator in check_id(id) for separator in SEPARATORS):
                    raise ValueError(f"an id must have no separator of columns, not {id!r}")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {EXPECTED}; {error}") from error
        if not items:
            raise ValueError(f"{path}, line {number}: {EXPECTED}; user {user} has no items")
        if user in line_of:
            raise ValueError(
                f"{path}, line {number}: expected one line per user; user {user} has line"
                f" {line_of[user]} too"
            )
        line_of[user] = number
        sequences.append(items)
    users, rows = Ids.of(line_of)
    by_user = [sequences[line] for line in np.argsort(rows)]
    items, item = Ids.of(id for sequence in by_user for id in sequence)
    return EventLog(
        user=np.repeat(np.arange(len(users)), [*map(len, by_user)]),
        item=item,
        timestamp=None,
        users=users,
        items=items,
    )
