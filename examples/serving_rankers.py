"""Rankers: requests of several users in, scores of their candidates out, with the histories' keys
and values kept between requests. serving_ranking.py and serving_next_item.py have one for each kind
of model.
"""

import time
from abc import ABC, abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from checkpoints import Weights
from published_ids import Vocabulary
from serving_events import EventStore, StoredEvent
from serving_histories import NONE, Histories, NewEvents, Request
from serving_outputs import OutputCache
from serving_steps import GRAPHS, CachedStep, Step
from torch import nn

import jagged_modules as jm
from jagged_modules.segments import Segmentation

# settings beside the shapes
COMPUTED = (
    "model",
    "interaction",
    "parts",
    "num_heads",
    "max_history",
    "max_stream",
    "block_size",
    "scores",
)
# of a cache's pages: on a GPU attention reads those of 128 rows without a copy
PAGE_ROWS = {"cuda": 128, "cpu": 16}


@dataclass
class Stages:
    """Seconds by stage of the last call: lookup (ids of the batch), cache (encoding and gathering
    of histories), score (the rest).

    On a GPU the first two are the host's time, and the device's is in the last, which waits for it.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = 0.0

    def start(self) -> None:
        self.seconds.clear()
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        """The time since the end of the stage before was of this one."""
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now


class CacheKind(NamedTuple):
    """max_bytes: the budget; 0: no cache, each request computes its history.

    page_rows: of a page; those of `PAGE_ROWS` if None.
    dtype: of keys and values in 8 bits; that of the model if None.
    slack: of a next-item model's history that is longer than the window, so many fewer events are
        encoded, so that as many can be appended before it is encoded anew.
    """

    max_bytes: int
    page_rows: int | None = None
    dtype: torch.dtype | None = None
    slack: int = 0


class Ranker(ABC):
    """Scores candidates. Not safe to call from several threads.

    Args:
        model: the model, in eval mode, with its weights.
        dense: the module that computes in `dtype`. Embedding tables, and the last step of a score,
            are fp32.
        histories: the users' events.
        max_history: events of a history that the model takes.
        cache: of the histories' keys and values.
        held_out: items by user that the log has after the histories, for demonstrations.
        settings: those of the training run.
        vocabulary: what the rows of the tables must stand for, so that the weights fit the log.
        dtype: of `dense`, and of the cached keys and values.
        graphs: whether steps are replayed from CUDA graphs.
    """

    needs_history: bool  # whether a user without events cannot be scored
    step: Step
    width: int  # of the rows of a history

    def __init__(
        self,
        model: nn.Module,
        dense: nn.Module,
        histories: Histories,
        max_history: int,
        cache: CacheKind,
        held_out: dict[int, list[int]],
        settings: dict[str, Any],
        vocabulary: Vocabulary,
        dtype: torch.dtype = torch.float32,
        graphs: bool = False,
    ):
        self.model, self.histories, self.max_history, self.held_out = (
            model.eval(),
            histories,
            max_history,
            held_out,
        )
        self.settings, self.vocabulary, self.dtype = settings, vocabulary, dtype
        dense.to(dtype)
        self.device = next(model.parameters()).device
        if not 0 <= cache.slack < max_history:
            raise ValueError(
                f"--history-slack must be 0 to {max_history - 1}, less than the model's"
                f" --max-history, got {cache.slack}"
            )
        self._slack = cache.slack
        self.run: Any = jm.graphed(self.step, **GRAPHS) if graphs else self.step
        self._has_pages = False
        self.cache: Any = self._make_cache(cache, graphs) if cache.max_bytes else None
        # whether one step encodes and scores: rows are read where it writes them
        self._encodes_and_scores = self.cache is None or self.cache.reads_pages
        self.ratings: list[float] = []
        self.store: EventStore | None = None
        self.stages = Stages()
        # requests by what happened to their histories
        self.counts = {"reused": 0, "appended": 0, "encoded": 0}

    @torch.no_grad()
    def score(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        """fp32 scores [C] on the host for each request. Then the new events of requests that store
        them are part of the histories.

        Of several requests of a user, only the first may have new events; all are scored after
        these.

        If it raises, no event was added, and the cache still fits the histories.
        FloatingPointError: a score is NaN or infinite.
        """
        self.stages.start()
        order: Sequence[int] = range(len(requests))
        if len({x.user for x in requests}) < len(requests):  # few batches
            order = sorted(order, key=lambda i: requests[i].user)
            requests = [requests[i] for i in order]
        batch = Batch.of(requests)
        try:
            scores = self._score(batch).float().cpu()
            if not np.isfinite(scores.numpy()).all():
                raise FloatingPointError("the model's scores are not finite")
            not_stored = [x.user for x in requests if not x.stores_events]
            stored = batch.new
            if not_stored:
                stored = new_events(x for x in requests if x.stores_events)
            self._add_events(stored)
        except BaseException:
            if self.cache is not None:
                self.cache.evict(batch.counts)
            raise
        if self.cache is not None and not_stored:
            self.cache.evict(not_stored)
        parts = torch.unsafe_split_with_sizes(scores, batch.sizes)
        self.stages.end("score")
        if isinstance(order, range):
            return list(parts)
        return [part for _, part in sorted(zip(order, parts, strict=True), key=lambda x: x[0])]

    def _add_events(self, new: Mapping[int, NewEvents]) -> None:
        """Add the users' new events to the histories, when the store has them."""
        if self.store is not None and (
            events := [event for user, x in new.items() for event in self._published(user, x)]
        ):
            self.store.append(events)
        add, keep = self.histories.add, self.longest_window
        for user, x in new.items():
            add(user, x, keep)

    def _published(self, user: int, events: NewEvents) -> list[StoredEvent]:
        name, items, ratings = str(self.histories.users[user]), self.histories.items, self.ratings
        return [
            StoredEvent(name, str(items[item]), ratings[rating] if ratings else None)
            for item, rating in zip(events.item.tolist(), events.rating.tolist(), strict=True)
        ]

    def keep_events(self, store: EventStore) -> None:
        """Add the store's events to the histories, and from now on those of requests to the store.
        Call it before the first request, after `warm_up`. ValueError if an event is not of this
        log."""
        ratings = {rating: index for index, rating in enumerate(self.ratings or [None])}
        by_user: dict[str, list[StoredEvent]] = defaultdict(list)
        for event in store.load():
            by_user[event.user].append(event)
        rows = self.histories.users.rows(by_user).tolist()
        for row, events in zip(rows, by_user.values(), strict=True):
            items = self.histories.items.rows(event.item for event in events)
            unknown = [x for x, item in zip(events, items) if item < 0 or x.rating not in ratings]
            if row < 0 or unknown:
                raise ValueError(f"{(unknown or events)[0]} is not an event of the log's ids")
            indices = np.array([ratings[event.rating] for event in events], dtype=np.int64)
            self.histories.add(row, NewEvents(items, indices), self.longest_window)
        self.store = store

    def forget_user(self, user: int) -> None:
        """Forget the events that the user's requests brought."""
        if self.store is not None:
            self.store.forget(str(self.histories.users[user]))
        self.replace_events(user, NONE)

    @property
    def captures(self) -> int:
        """How many batches waited until graphs of their sizes were captured."""
        return self.run.captures if self.run is not self.step else 0

    def _make_cache(self, kind: CacheKind, graphs: bool) -> jm.PagedHistoryCache | OutputCache:
        layer, page_rows = self._cached_layer(), kind.page_rows
        layer.takes_host_tables = graphs
        if page_rows is None:
            page_rows = PAGE_ROWS.get(self.device.type, 128)
        return jm.PagedHistoryCache(layer, kind.max_bytes, page_rows, kind.dtype)

    @abstractmethod
    def _cached_layer(self) -> CachedStep:
        """The layer whose keys and values are cached."""

    @property
    def longest_window(self) -> int:
        """The events of a history that the model can see."""
        return self.max_history

    @abstractmethod
    def _score(self, batch: "Batch") -> torch.Tensor:
        """Scores [C] of the candidates of all users."""

    @abstractmethod
    def attention(self, user: int, candidates: np.ndarray) -> torch.Tensor | None:
        """Attention weights [C, L] of candidates over the user's events, the mean of the heads;
        None if they have none."""

    def load(self, weights: Weights) -> bool:
        """Replace the model's weights. Cached rows of the old weights are not used any more. False
        if the weights are those that it has.

        Raises ValueError if the weights are of another model, also of one whose tensors have equal
        shapes, or of a log with other ids. The model is then unchanged.
        """
        changed = [
            name for name in COMPUTED if weights.settings.get(name) != self.settings.get(name)
        ]
        if changed:
            values = (
                f"{name} is {weights.settings.get(name)!r}, not {self.settings.get(name)!r}"
                for name in changed
            )
            raise ValueError(f"the weights are of another model: {'; '.join(values)}")
        if difference := weights.vocabulary.difference(self.vocabulary):
            prints = f"{weights.vocabulary.fingerprint}, not {self.vocabulary.fingerprint}"
            raise ValueError(
                f"the weights are of a log with other ids: fingerprint {prints}; {difference}"
            )
        own = self.model.state_dict()
        shapes = [
            {name: (x.shape, x.is_floating_point()) for name, x in tensors.items()}
            for tensors in (own, weights.tensors)
        ]
        if shapes[0] != shapes[1]:
            differing = sorted(
                name
                for name in shapes[0].keys() | shapes[1].keys()
                if shapes[0].get(name) != shapes[1].get(name)
            )
            raise ValueError(f"the weights are of another model: {', '.join(differing[:5])} differ")
        if all(torch.equal(x, weights.tensors[name].to(x)) for name, x in own.items()):
            return False
        self.model.load_state_dict(weights.tensors)
        if self.cache is not None:
            self.cache.clear()
        return True

    def check_cache(self) -> None:
        """ValueError if the cache has no room for the log's longest history. Call it before the
        first request."""
        user = self.histories.longest()
        if self.cache is None or not self.histories.length(user):
            return
        try:
            self.score([Request(user, np.zeros(1, np.int64))])
        except jm.CacheFull as error:
            raise ValueError(
                f"--cache-mb {self.cache.max_bytes / 1e6:g} is too small for the longest history:"
                f" {error}"
            ) from error
        self.forget()
        self.counts = dict.fromkeys(self.counts, 0)

    def replace_events(self, user: int, events: NewEvents) -> None:
        """Replace the events that requests brought. The user's next request encodes the history
        anew."""
        self.histories.replace(user, events)
        if self.cache is not None:
            self.cache.evict([user])

    def forget(self) -> None:
        """Forget the events of all requests, and what is cached."""
        self.histories.forget()
        if self.cache is not None:
            self.cache.clear()

    def _append(self, users: list[int], events: jm.Jagged, anew: list[int], **others: Any) -> Any:
        """`append` of the cache. A history that is encoded anew is appended to an empty one: `put`
        returns no output, and its rows are not written by the pass of the model that makes them."""
        if not self._has_pages:
            self._make_pages(anew)
            self._has_pages = True
        return self.cache.append(users, events, anew=anew, **others)

    def _make_pages(self, users: list[int]) -> None:
        """Give the users empty histories, the first ones that are cached."""
        nothing = torch.empty(0, self.width, dtype=self.dtype, device=self.device)
        offsets = torch.zeros(len(users) + 1, dtype=torch.int64)
        self.cache.put(users, jm.Jagged.unchecked(nothing, offsets, None))

    def _read(self, read: Callable[[list[int]], Any], users: list[int]) -> Any:
        """What a method of the cache has of all users. CacheFull if writes for some users of this
        batch evicted others of it."""
        try:
            return read(users)
        except KeyError as error:
            raise jm.CacheFull(
                f"the cache has no room for the histories of {len(users)} users at once"
            ) from error


class Batch(NamedTuple):
    """Requests. counts: of each user, how many of the candidates [C] are the user's, one user after
    another. sizes: of each request. new: the new events of the users who have some."""

    counts: dict[int, int]
    candidates: np.ndarray
    sizes: list[int]
    new: dict[int, NewEvents]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Batch":
        """Requests of a user are adjacent, and only the first has new events."""
        candidates = [x.candidates for x in requests]
        sizes, users = [*map(len, candidates)], [x.user for x in requests]
        counts = dict(zip(users, sizes, strict=True))
        if len(counts) < len(users):  # few batches
            counts = dict.fromkeys(counts, 0)
            for user, size in zip(users, sizes, strict=True):
                counts[user] += size
        return cls(counts, np.concatenate(candidates), sizes, new_events(requests))


def new_events(requests: Iterable[Request]) -> dict[int, NewEvents]:
    """Of the users who have some."""
    return {x.user: x.events for x in requests if len(x.events.item)}


def jagged(values: np.ndarray, lengths: Iterable[int]) -> jm.Jagged:
    """Segments of these lengths of the values [rows, columns], on the host. Not checked, and the
    offsets not looked up among known ones, which would take longer than the rest."""
    offsets = integers(accumulate(lengths, initial=0))
    return jm.Jagged.unchecked(torch.from_numpy(values), offsets, None, Segmentation())


def integers(values: Iterable[int]) -> torch.Tensor:
    """An int64 tensor of one or more numbers, in less time than by torch.tensor."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)
