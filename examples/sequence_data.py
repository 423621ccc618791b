"""Turns an event log into sequences for next-item recommendation: leave-one-out split, windows,
batches.

The task is to predict the item of a user's next event, given the items so far. Ratings are not
used. Events of a user with the same timestamp stay in the order of the file.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from data.event_log import EventLog
from published_ids import Vocabulary
from ranking_data import SPLITS, first_of_equal, keyed, ranges
from torch.utils.data import Dataset
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

NUM_INTERVALS = 64  # buckets of time since a user's previous event


@dataclass(frozen=True)
class Windows:
    """Windows of inputs: rows `start:end` of a log, int64 [W], each of one user. The target of an
    input is the item of the next row."""

    start: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return len(self.start)


def leave_one_out(log: EventLog, max_history: int = 200) -> dict[str, Windows]:
    """Windows of at most `max_history` inputs for each split.

    The last item of each user is the test target, the one before it the validation target. Both are
    predicted from the latest inputs before them. The remaining items are for training: they are cut
    into windows, starting from the latest input, so that each item except a user's first is
    predicted once. Users with fewer than three events are used for training only.
    """
    if max_history < 1:
        raise ValueError(f"max_history must be at least 1, not {max_history}")
    rows = np.arange(len(log))
    first = rows[first_of_equal(log.user) == rows]
    end = np.append(first[1:], len(log))
    held_out = np.where(end - first >= 3, 2, 0)
    # the division rounds up
    number, windows = ranges(np.zeros_like(first), -((first + 1 + held_out - end) // max_history))
    latest, earliest = (np.repeat(row, windows) for row in (end - 1 - held_out, first))
    train_end = latest - number * max_history
    split = {"train": Windows(np.maximum(earliest, train_end - max_history), train_end)}
    for name, back in (("valid", 2), ("test", 1)):
        split[name] = Windows(
            np.maximum(first, end - back - max_history)[held_out > 0], (end - back)[held_out > 0]
        )
    return split


def time_intervals(log: EventLog) -> np.ndarray:
    """The bucket of the time since the user's previous event, int64 [N]: 1 + floor(log2(1 +
    seconds)), and 0 for a user's first event.

    HSTU's relative bias has such buckets of log time (Zhai et al. 2024, arXiv:2402.17152). Raises
    ValueError without timestamps.
    """
    if log.timestamp is None:
        raise ValueError("time intervals need timestamps, which the log does not have")
    # whose differences are exact
    times = log.timestamp if log.timestamp.dtype.kind == "f" else log.timestamp.view(np.uint64)
    seconds = np.diff(times, prepend=times[:1]).astype(np.float64)
    first = first_of_equal(log.user) == np.arange(len(log))
    seconds[first] = 0.0
    return np.where(
        first, 0, np.minimum(1 + np.log2(1 + seconds).astype(np.int64), NUM_INTERVALS - 1)
    )


def whole_seconds(log: EventLog) -> np.ndarray:
    """The timestamps, rounded down, int64 [N]. Raises ValueError without timestamps."""
    if log.timestamp is None:
        raise ValueError("the log has no timestamps")
    return np.floor(log.timestamp).astype(np.int64)


@dataclass
class SequenceBatch(Pipelineable):
    """A batch of B windows with L inputs in total.

    Args:
        ids: keys `item`, `position` (in the window), `target` (the item that follows each input)
            and, if the dataset has intervals, `interval` (the bucket of the time since the previous
            event), N_b ids per row, and with `add_rivals` also `rival`.
        seen: key `seen`, the user's items up to the window's last input.
        timestamps, next_timestamps: int64 [L], in seconds, of each input and of its target; None
            unless the dataset has timestamps.
    """

    ids: KeyedJaggedTensor
    seen: KeyedJaggedTensor
    timestamps: torch.Tensor | None = None
    next_timestamps: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def targets(self) -> torch.Tensor:
        """The item that follows each input, int64 [L]."""
        return self.ids["target"].values()

    @property
    def rivals(self) -> torch.Tensor:
        """The items that all targets of the batch compete with, int64 [N]."""
        return self.ids["rival"].values()

    def last_inputs(self) -> torch.Tensor:
        """The index of the last input of each window, int64 [B]. The row without ids of an empty
        batch is no window."""
        inputs = self.ids["item"]
        return inputs.offsets()[1:][inputs.lengths() > 0].long() - 1

    def next_items(self) -> torch.Tensor:
        """The item that follows each window, int64 [B]."""
        return self.targets[self.last_inputs()]

    def add_rivals(self, items: torch.Tensor) -> "SequenceBatch":
        """The batch with the key `rival`: `items` [N], in the first row."""
        lengths = torch.zeros(self.ids.stride(), dtype=torch.int32)
        lengths[0] = len(items)
        rivals = KeyedJaggedTensor(keys=["rival"], values=items, lengths=lengths)
        return replace(self, ids=KeyedJaggedTensor.concat([self.ids, rivals]).sync())

    def to(self, device: torch.device, non_blocking: bool = True) -> "SequenceBatch":
        return SequenceBatch(
            **{name: x.to(device, non_blocking=non_blocking) for name, x in self._parts().items()}
        )

    def record_stream(self, stream: torch.Stream) -> None:
        for x in self._parts().values():
            x.record_stream(stream)

    def pin_memory(self) -> "SequenceBatch":
        return SequenceBatch(**{name: x.pin_memory() for name, x in self._parts().items()})

    def _parts(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if x is not None}


class SequenceDataset(Dataset):
    """Batches of windows: `dataset[[4, 0, 7]]` is the batch of these three windows.

    Args:
        log: the events.
        windows: windows of the log.
        intervals: whether the batches have the key `interval`, which needs timestamps.
        timestamps: whether the batches have timestamps.
    """

    def __init__(
        self, log: EventLog, windows: Windows, intervals: bool = False, timestamps: bool = False
    ):
        self.log, self.windows, self.first = log, windows, first_of_equal(log.user)
        self.interval = time_intervals(log) if intervals else None
        self.timestamp = whole_seconds(log) if timestamps else None

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary({"user": self.log.users, "item": self.log.items})

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, indices: list[int]) -> SequenceBatch:
        item, pick = self.log.item, np.asarray(indices, dtype=np.int64)
        start, end = self.windows.start[pick], self.windows.end[pick]
        inputs, lengths = ranges(start, end)
        seen, seen_lengths = ranges(self.first[start], end)
        position = inputs - np.repeat(start, lengths)
        ids = {
            "item": (item[inputs], lengths),
            "position": (position, lengths),
            "target": (item[inputs + 1], lengths),
        }
        if self.interval is not None:
            ids["interval"] = (self.interval[inputs], lengths)
        times = (
            ()
            if self.timestamp is None
            else (torch.from_numpy(self.timestamp[rows]) for rows in (inputs, inputs + 1))
        )
        return SequenceBatch(keyed(ids), keyed({"seen": (item[seen], seen_lengths)}), *times)


def make_datasets(
    log: EventLog, max_history: int = 200, intervals: bool = False, timestamps: bool = False
) -> dict[str, SequenceDataset]:
    """The datasets by split. Raises ValueError if no user has three events, which the split
    needs."""
    windows = leave_one_out(log, max_history)
    if not len(windows["test"]):
        raise ValueError(
            f"none of the {log.num_users} users has 3 events: one to start from, one to validate on"
            " and one to test on"
        )
    return {name: SequenceDataset(log, windows[name], intervals, timestamps) for name in SPLITS}
