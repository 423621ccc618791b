"""Reads event logs for next-item models: the MovieLens formats of movielens.py, and sequence files without timestamps.

A sequence file has a line per user: the user's id, then item ids from oldest to newest, separated by spaces. All ids are integers. Several
preprocessed data sets are published in this form, for instance the Amazon sets of ICLRec (Chen et al. 2022, arXiv:2202.02519).
"""

from pathlib import Path

import numpy as np
from movielens import EventLog, find_log, read_log, read_text

SEPARATORS = ("\t", ",", "::")  # of the columns in the MovieLens formats
EXPECTED = "expected integers separated by spaces: a user's id, then item ids from oldest to newest"


def read_events(path: str | Path) -> EventLog:
    """Read a sequence file or a rating log.

    Args:
        path: a file, whose format is recognised by its first line, or a folder with exactly one MovieLens log.

    Raises:
        FileNotFoundError, ValueError: as `movielens.read_log`; a line of a sequence file has no items or an id that is no 64-bit integer,
        or a user has two lines.
    """
    path = find_log(Path(path))
    text = read_text(path)
    first_line = text.split("\n", 1)[0]
    if not first_line.strip() or any(separator in first_line for separator in SEPARATORS):
        return read_log(path)
    return _parse_sequences(path, text)


def _parse_sequences(path: Path, text: str) -> EventLog:
    line_of: dict[int, int] = {}  # user id -> number of the user's line
    sequences = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            user, *items = np.array(line.split(), dtype=np.int64).tolist()
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{path}, line {number}: {EXPECTED}; {error}") from error
        if not items:
            raise ValueError(f"{path}, line {number}: {EXPECTED}; user {user} has no items")
        if user in line_of:
            raise ValueError(f"{path}, line {number}: expected one line per user; user {user} has line {line_of[user]} too")
        line_of[user] = number
        sequences.append(items)
    # The user ids are distinct, so sorting by them keeps the events of a user in their order.
    by_user = sorted(zip(line_of, sequences, strict=True))
    user = np.repeat(np.arange(len(by_user)), [len(items) for _, items in by_user])
    item_ids, item = np.unique(np.concatenate([items for _, items in by_user]), return_inverse=True)
    return EventLog(user=user, item=item, timestamp=None, num_users=len(by_user), num_items=len(item_ids))
