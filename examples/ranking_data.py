"""Turns a rating log into ranking batches: splits by time, cuts into chunks, builds
KeyedJaggedTensors.

The task is to predict whether the user likes the item (rating >= `LIKED`, if no other threshold is
given), given the user's strictly earlier ratings.

Each user's timeline is cut into *chunks* of consecutive ratings. The ratings of a chunk are the
candidates of one row of a batch. They share one history, the ratings before the chunk, so a history
is in the batch once for any number of candidates. Ratings with the timestamp of the chunk's first
candidate are not in its history, because they are not strictly earlier.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from data.event_log import Categorical, RatingLog
from published_ids import Vocabulary
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

LIKED = 4.0
SPLITS = ("train", "valid", "test")


def split_by_time(
    log: RatingLog, valid_fraction: float = 0.1, test_fraction: float = 0.1
) -> np.ndarray:
    """The index into `SPLITS` of each rating, int64 [N]. By default, a user's last tenth is for
    testing, the tenth before for validation.

    Ratings of a user with the same timestamp are all in the split of the first of them.
    """
    if not (0 < valid_fraction and 0 < test_fraction and valid_fraction + test_fraction < 1):
        raise ValueError(
            "valid_fraction and test_fraction must be positive and leave some to train on, not"
            f" {valid_fraction} and {test_fraction}"
        )
    first = first_of_equal(log.user)
    length = np.bincount(log.user, minlength=log.num_users)[log.user]
    position = (first_simultaneous(log) - first) / length
    return (position >= 1 - valid_fraction - test_fraction).astype(np.int64) + (
        position >= 1 - test_fraction
    )


def first_simultaneous(log: RatingLog) -> np.ndarray:
    """For each rating, the row of the first rating by the same user at the same time, int64 [N]."""
    return first_of_equal(log.user, log.timestamp)


def first_of_equal(*columns: np.ndarray) -> np.ndarray:
    """For each row, the first row of its run of equal adjacent rows, int64 [N]."""
    rows = np.arange(len(columns[0]))
    begins = np.any([np.diff(column, prepend=column[:1] - 1) != 0 for column in columns], axis=0)
    return np.maximum.accumulate(np.where(begins, rows, 0))


def add_popularity(log: RatingLog, selected: np.ndarray) -> RatingLog:
    """The log with an additional item feature `popularity`: floor(log2(1 + n)) for n `selected`
    (bool [N]) ratings of the item."""
    counts = np.bincount(log.item[selected], minlength=log.num_items)
    popularity = Categorical.single(np.log2(counts + 1).astype(np.int64))
    return replace(log, item_features={"popularity": popularity, **log.item_features})


@dataclass(frozen=True)
class Chunks:
    """Chunks as rows of a log, int64 [C] each: candidates `start:end` of one user with the history
    `history_start:history_end`."""

    history_start: np.ndarray
    history_end: np.ndarray
    start: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return len(self.start)


def make_chunks(
    log: RatingLog, selected: np.ndarray, chunk_size: int = 8, max_history: int = 200
) -> Chunks:
    """Cut the `selected` (bool [N]) ratings into chunks.

    Args:
        chunk_size: maximum number of candidates in a chunk.
        max_history: maximum number of ratings in a history; the latest ones are kept.
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
    return Chunks(
        np.maximum(first[start], history_end - max_history),
        history_end,
        start,
        np.minimum(start + chunk_size, run_end),
    )


@dataclass(frozen=True)
class TableSizes:
    """Numbers of rows of the embedding tables: items, ratings, ages of events, and each side
    feature by name."""

    items: int
    ratings: int
    ages: int
    user_features: dict[str, int]
    item_features: dict[str, int]


class Events(NamedTuple):
    """Events of B users, one user after another, from oldest to newest.

    Args:
        item: int64 [L].
        rating: int64 [L], indices into the sorted ratings.
        lengths: int64 [B], events of each user.
    """

    item: np.ndarray
    rating: np.ndarray
    lengths: np.ndarray


@dataclass
class RankingBatch(Pipelineable):
    """A batch of B chunks, with L history ratings and C candidates in total.

    Args:
        ids: keys `history_item`, `history_rating`, `history_age` (N_b ids each), `target_item` (n_b
            ids) and, if the dataset has streams, `stream_item` and `stream_rating` (S_b ids each)
            per row, stride B.
        users: the users' side features, stride B.
        items: side features of the items of the histories, then of the candidates, stride L + C.
        labels: float32 [C], 1 if the user liked the candidate, else 0.
    """

    ids: KeyedJaggedTensor
    users: KeyedJaggedTensor
    items: KeyedJaggedTensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device, non_blocking: bool = True) -> "RankingBatch":
        return RankingBatch(*(x.to(device, non_blocking=non_blocking) for x in vars(self).values()))

    def record_stream(self, stream: torch.Stream) -> None:
        for x in vars(self).values():
            x.record_stream(stream)

    def pin_memory(self) -> "RankingBatch":
        return RankingBatch(*(x.pin_memory() for x in vars(self).values()))


class RankingDataset(Dataset):
    """Batches of chunks: `dataset[[4, 0, 7]]` is the batch of these three chunks.

    Users have the log's side features and their own row as features; items have the log's side
    features.

    Args:
        log: the ratings.
        chunks: chunks of the log.
        max_stream: maximum number of ratings in a stream, which are the latest ones before a chunk
            as in its history. 0: no streams.
        liked: the least rating of an item that the user likes.
    """

    def __init__(self, log: RatingLog, chunks: Chunks, max_stream: int = 0, liked: float = LIKED):
        self.log, self.chunks, self.max_stream, self.liked = log, chunks, max_stream, liked
        self.first = first_of_equal(log.user)
        self.ratings, self.rating_index = np.unique(log.rating, return_inverse=True)
        self.num_ratings, self.num_ages = len(self.ratings), int(np.log2(len(log))) + 1
        self.user_features = {
            "user": Categorical.single(np.arange(log.num_users)),
            **log.user_features,
        }

    @property
    def tables(self) -> TableSizes:
        features = (
            {name: feature.cardinality for name, feature in x.items()}
            for x in (self.user_features, self.log.item_features)
        )
        return TableSizes(self.log.num_items, self.num_ratings, self.num_ages, *features)

    @property
    def vocabulary(self) -> Vocabulary:
        names = {"user": self.log.users, "item": self.log.items, "rating": self.ratings.tolist()}
        for whose, features in (("user", self.log.user_features), ("item", self.log.item_features)):
            names |= {f"{whose}'s {name}": feature.names for name, feature in features.items()}
        return Vocabulary(names)

    def labels(self) -> np.ndarray:
        """Whether the candidates of all chunks were liked, bool [candidates]."""
        return self.log.rating[ranges(self.chunks.start, self.chunks.end)[0]] >= self.liked

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, indices: list[int]) -> RankingBatch:
        chunks, pick = self.chunks, np.asarray(indices, dtype=np.int64)
        start, end, stream = chunks.start[pick], chunks.history_end[pick], None
        targets, target_lengths = ranges(start, chunks.end[pick])
        if self.max_stream:
            stream = self._events(np.maximum(self.first[start], end - self.max_stream), end)
        history = self._events(chunks.history_start[pick], end)
        labels = (self.log.rating[targets] >= self.liked).astype(np.float32)
        return self.make_batch(
            self.log.user[start], history, self.log.item[targets], target_lengths, labels, stream
        )

    def _events(self, start: np.ndarray, end: np.ndarray) -> "Events":
        rows, lengths = ranges(start, end)
        return Events(self.log.item[rows], self.rating_index[rows], lengths)

    def make_batch(
        self,
        users: np.ndarray,
        history: "Events",
        targets: np.ndarray,
        target_lengths: np.ndarray,
        labels: np.ndarray,
        stream: "Events | None" = None,
    ) -> RankingBatch:
        """The batch of any users [B] with these events and candidates, which need not be in the
        log.

        Args:
            targets, target_lengths, labels: the candidates' items int64 [C], their number by user
                [B], and float32 [C].
            stream: the latest events of each user, if the dataset has streams.
        """
        log, lengths = self.log, history.lengths
        ids = {
            "history_item": (history.item, lengths),
            "history_rating": (history.rating, lengths),
            "history_age": (ages(lengths), lengths),
            "target_item": (targets, target_lengths),
        }
        if stream is not None:
            ids |= {
                "stream_item": (stream.item, stream.lengths),
                "stream_rating": (stream.rating, stream.lengths),
            }
        items = np.concatenate([history.item, targets])
        return RankingBatch(
            ids=keyed(ids),
            users=keyed(
                {name: bags(feature, users) for name, feature in self.user_features.items()}
            ),
            items=keyed(
                {name: bags(feature, items) for name, feature in log.item_features.items()}
            ),
            labels=torch.from_numpy(labels),
        )


def ranges(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The concatenated integer ranges `start[b]:end[b]`, and their lengths."""
    lengths = end - start
    offsets = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(start - offsets, lengths), lengths


def ages(lengths: np.ndarray) -> np.ndarray:
    """The age of each event of histories of these lengths: floor(log2) of how many ratings ago it
    was; 0 is the last rating before the chunk."""
    position, _ = ranges(np.zeros_like(lengths), lengths)
    return np.log2(np.repeat(lengths, lengths) - position).astype(np.int64)


def bags(feature: Categorical, entities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if feature.is_single:
        return feature.values[entities], np.ones(len(entities), np.int64)
    rows, lengths = ranges(feature.offsets[entities], feature.offsets[entities + 1])
    return feature.values[rows], lengths


def keyed(features: dict[str, tuple[np.ndarray, np.ndarray]]) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor of (values, lengths) by key. It caches its sizes per key, so that lookups
    do not synchronise with a device.

    Without rows it gets one row without ids, because TorchRec's collections do not take a batch of
    0 rows.
    """
    features = {
        key: (values, lengths if len(lengths) else np.zeros(1, np.int64))
        for key, (values, lengths) in features.items()
    }
    values, lengths = (
        torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*features.values(), strict=True)
    )
    return KeyedJaggedTensor(
        keys=list(features), values=values, lengths=lengths.to(torch.int32)
    ).sync()


class RankShare(Sampler[list[int]]):
    """The part of each batch of indices that one rank takes: every `world_size`-th index, starting
    from index `rank`.

    All ranks have the same number of batches, because each step is a step of all ranks. The last
    one may be empty on some of them.
    """

    def __init__(self, batches: BatchSampler, rank: int, world_size: int):
        self.batches, self.rank, self.world_size = batches, rank, world_size

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return (indices[self.rank :: self.world_size] for indices in self.batches)


def make_loader(
    dataset: Dataset,
    batch_size: int,
    shuffle_seed: int | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> DataLoader:
    """A loader of this rank's shares of batches: `dataset[indices]`, in order, or shuffled by
    `shuffle_seed` only.

    `batch_size` is that of all ranks together, so any number of ranks trains on the same batches.
    """
    if shuffle_seed is None:
        sampler = SequentialSampler(dataset)
    else:
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(shuffle_seed))
    shares = RankShare(BatchSampler(sampler, batch_size, drop_last=False), rank, world_size)
    return DataLoader(
        dataset, sampler=shares, batch_size=None, num_workers=num_workers, pin_memory=pin_memory
    )
