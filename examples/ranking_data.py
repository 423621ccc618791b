"""From a rating log to ranking batches: the split by time, the chunks, the KeyedJaggedTensors.

The task: will the user like the item (rating >= `LIKED`), given the ratings the user gave strictly earlier?

Every user's timeline is cut into *chunks* of consecutive ratings. The ratings of a chunk are the candidates of one row of a batch and the
ratings before the chunk are the one history that they all attend to, so a history enters a batch once however many candidates it serves.
Ratings that share a timestamp with a chunk's first candidate are no part of its history: what is not strictly earlier is not known yet.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from movielens import Categorical, RatingLog
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler
from torchrec import KeyedJaggedTensor

LIKED = 4.0
SPLITS = ("train", "valid", "test")


def split_by_time(log: RatingLog, valid_fraction: float = 0.1, test_fraction: float = 0.1) -> np.ndarray:
    """Index into `SPLITS` of each rating, int64 [N]: of every user the last tenth is for testing, the tenth before it for validation.

    A user's ratings with one timestamp stay together, in the split of the first of them.
    """
    if not (0 < valid_fraction and 0 < test_fraction and valid_fraction + test_fraction < 1):
        raise ValueError(
            f"valid_fraction and test_fraction must be positive and leave some to train on, not {valid_fraction} and {test_fraction}"
        )
    first = first_of_equal(log.user)
    length = np.bincount(log.user, minlength=log.num_users)[log.user]
    position = (first_simultaneous(log) - first) / length
    return (position >= 1 - valid_fraction - test_fraction).astype(np.int64) + (position >= 1 - test_fraction)


def first_simultaneous(log: RatingLog) -> np.ndarray:
    """Row of the first rating that the same user gave at the same time, int64 [N]."""
    return first_of_equal(log.user, log.timestamp)


def first_of_equal(*columns: np.ndarray) -> np.ndarray:
    """Row at which the run of equal neighbours that each row belongs to begins, int64 [N]."""
    rows = np.arange(len(columns[0]))
    begins = np.any([np.diff(column, prepend=column[:1] - 1) != 0 for column in columns], axis=0)
    return np.maximum.accumulate(np.where(begins, rows, 0))


def add_popularity(log: RatingLog, selected: np.ndarray) -> RatingLog:
    """The log with the items' side feature `popularity`: the number of ratings among the `selected` (bool [N]), in powers of two."""
    counts = np.bincount(log.item[selected], minlength=log.num_items)
    popularity = Categorical.single(np.log2(counts + 1).astype(np.int64))
    return replace(log, item_features={"popularity": popularity, **log.item_features})


@dataclass(frozen=True)
class Chunks:
    """Rows of a log, int64 [C] each: candidates `start:end` of one user, whose history is `history_start:history_end`."""

    history_start: np.ndarray
    history_end: np.ndarray
    start: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return len(self.start)


def make_chunks(log: RatingLog, selected: np.ndarray, chunk_size: int = 8, max_history: int = 200) -> Chunks:
    """Cuts the ratings where `selected` (bool [N]) holds into chunks.

    Args:
        chunk_size: most candidates of a chunk.
        max_history: most ratings of its history, the latest before it.
    """
    for name, value in (("chunk_size", chunk_size), ("max_history", max_history)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    rows = np.arange(len(log))
    first = first_of_equal(log.user)
    run = first_of_equal(log.user, selected)
    start = rows[selected & ((rows - run) % chunk_size == 0)]
    run_end = np.searchsorted(run, run[start], side="right")
    history_end = first_simultaneous(log)[start]
    return Chunks(np.maximum(first[start], history_end - max_history), history_end, start, np.minimum(start + chunk_size, run_end))


@dataclass
class RankingBatch:
    """B chunks with L ratings of history and C candidates in all.

    Args:
        ids: keys `history_item`, `history_rating`, `history_age` (N_b ids each) and `target_item` (n_b ids) per row, stride B.
        users: the users' side features, stride B.
        items: side features of the history's items, then of the candidates, stride L + C.
        labels: float32 [C], 1 where the user liked the candidate.
    """

    ids: KeyedJaggedTensor
    users: KeyedJaggedTensor
    items: KeyedJaggedTensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "RankingBatch":
        move = dict(non_blocking=True)
        return RankingBatch(
            self.ids.to(device, **move), self.users.to(device, **move), self.items.to(device, **move), self.labels.to(device, **move)
        )

    def pin_memory(self) -> "RankingBatch":
        return RankingBatch(self.ids.pin_memory(), self.users.pin_memory(), self.items.pin_memory(), self.labels.pin_memory())


class RankingDataset(Dataset):
    """Batches of chunks: `dataset[[4, 0, 7]]` is the batch of those three chunks.

    The users' side features are the log's and the user's own number; the items' are the log's.
    """

    def __init__(self, log: RatingLog, chunks: Chunks):
        self.log, self.chunks = log, chunks
        ratings, self.rating_index = np.unique(log.rating, return_inverse=True)
        self.num_ratings, self.num_ages = len(ratings), int(np.log2(len(log))) + 1
        self.user_features = {"user": Categorical.single(np.arange(log.num_users)), **log.user_features}

    def labels(self) -> np.ndarray:
        """Whether the candidates of all chunks were liked, bool [candidates]."""
        return self.log.rating[ranges(self.chunks.start, self.chunks.end)[0]] >= LIKED

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, indices: list[int]) -> RankingBatch:
        log, chunks, pick = self.log, self.chunks, np.asarray(indices)
        history, history_lengths = ranges(chunks.history_start[pick], chunks.history_end[pick])
        targets, target_lengths = ranges(chunks.start[pick], chunks.end[pick])
        # How many ratings ago, in powers of two: 0 is the latest one before the chunk.
        age = np.log2(np.repeat(chunks.history_end[pick], history_lengths) - history).astype(np.int64)
        ids = {
            "history_item": (log.item[history], history_lengths),
            "history_rating": (self.rating_index[history], history_lengths),
            "history_age": (age, history_lengths),
            "target_item": (log.item[targets], target_lengths),
        }
        return RankingBatch(
            ids=keyed(ids),
            users=keyed({name: bags(feature, log.user[chunks.start[pick]]) for name, feature in self.user_features.items()}),
            items=keyed({name: bags(feature, log.item[np.concatenate([history, targets])]) for name, feature in log.item_features.items()}),
            labels=torch.from_numpy((log.rating[targets] >= LIKED).astype(np.float32)),
        )


def ranges(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The integers of all `start[b]:end[b]`, one range after the other, and the lengths of the ranges."""
    lengths = end - start
    offsets = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(start - offsets, lengths), lengths


def bags(feature: Categorical, entities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, lengths = ranges(feature.offsets[entities], feature.offsets[entities + 1])
    return feature.values[rows], lengths


def keyed(features: dict[str, tuple[np.ndarray, np.ndarray]]) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor of (values, lengths) by key, which knows its sizes by key, so that no lookup waits for a device to tell them."""
    values, lengths = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*features.values(), strict=True))
    return KeyedJaggedTensor(keys=list(features), values=values, lengths=lengths.to(torch.int32)).sync()


def make_loader(
    dataset: Dataset, batch_size: int, shuffle_seed: int | None = None, num_workers: int = 0, pin_memory: bool = False
) -> DataLoader:
    """`dataset[indices]` of `batch_size` indices each, in order, or shuffled by `shuffle_seed` alone."""
    if shuffle_seed is None:
        sampler = SequentialSampler(dataset)
    else:
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(shuffle_seed))
    batches = BatchSampler(sampler, batch_size, drop_last=False)
    return DataLoader(dataset, sampler=batches, batch_size=None, num_workers=num_workers, pin_memory=pin_memory)
