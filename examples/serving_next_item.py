"""The ranker of next-item models (train_hstu.py). Its cache has the encoder's keys and values, and
the encoder's output for the last event, which gives the query. New events are appended. A history
that outgrows the model's window is encoded anew, because the positions of all events change.

On a GPU, short histories are encoded anew whenever they get events, as the tables of their pages
take longer: their cache has the outputs alone.
"""

from collections.abc import Container
from typing import Any

import numpy as np
import torch
from sequence_model import SequenceModel
from serving_histories import NONE
from serving_outputs import OutputCache
from serving_rankers import Batch, CacheKind, Ranker, jagged
from serving_steps import CachedStep, SequenceStep

import jagged_modules as jm

# most products of the encoder's parameters and rows for a window that is encoded anew, by device.
# docs/serving.md has figures, of half as many
ENCODED_ANEW = {"cuda": 1e8}


class SequenceRanker(Ranker):
    """Serves a SequenceModel with the encoder hstu. The score is the dot product of the query of
    the last event and the candidate."""

    needs_history = True

    def __init__(self, model: SequenceModel, dtype: torch.dtype = torch.float32, **options: Any):
        self.step = SequenceStep(model, dtype)
        self.width = model.encoder.norm.normalized_shape[0]
        super().__init__(model, model.encoder.encoder, dtype=dtype, **options)
        self._appends = isinstance(self.cache, jm.PagedHistoryCache)
        self._positions = np.arange(self.max_history)
        # of cached users, how many events the cached rows are of
        self._held: dict[int, int] = {}

    def _make_cache(self, kind: CacheKind, graphs: bool) -> jm.PagedHistoryCache | OutputCache:
        """What is asked for by an option of pages or of appended events has pages."""
        wanted = kind.page_rows or kind.dtype or kind.slack
        size = sum(x.numel() for x in self.model.encoder.encoder.parameters())
        if wanted or self.max_history * size > ENCODED_ANEW.get(self.device.type, 0):
            return super()._make_cache(kind, graphs)
        cache = OutputCache(kind.max_bytes, self.width * self.dtype.itemsize)
        self.step.grow(1 + cache.num_slots)
        return cache

    def _cached_layer(self) -> CachedStep:
        return CachedStep(
            self.model.encoder.encoder,
            append=lambda events, kept, **others: self.run(events=events, kept=kept, **others),
        )

    def _score(self, batch: Batch) -> torch.Tensor:
        encoded, anew, ids = self._to_encode(batch)
        candidates = jagged(batch.candidates[:, None], batch.counts.values())
        self.stages.end("lookup")
        if self.cache is None:
            return self.run(events=ids, targets=candidates)
        if len(self._held) > 2 * len(self.cache) + 1024:
            self._held = {user: self._held[user] for user in self.cache.users()}
        if ids is not None and self._appends:
            if self._encodes_and_scores:
                scores = self._append(encoded, ids, anew, targets=candidates)
                self.stages.end("cache")
                return scores
            last = self._append(encoded, ids, anew)
            self.step.keep(self.cache.slots(encoded), last)
            ids = None
        rows = self._read(self.cache.slots, [*batch.counts])
        self.stages.end("cache")
        events = {} if ids is None else dict(events=ids)
        return self.run(targets=candidates, rows=rows, **events)

    def _append(self, users: list[int], events: jm.Jagged, anew: list[int], **others: Any) -> Any:
        try:
            return super()._append(users, events, anew, **others)
        except jm.CacheFull:  # nothing has changed
            raise
        except BaseException:
            # users whose pages were taken for these are back, but not the outputs of their slots
            self.cache.clear()
            raise

    def _make_pages(self, users: list[int]) -> None:
        super()._make_pages(users)
        self.step.grow(1 + self.cache.num_slots)

    def _to_encode(self, batch: Batch) -> tuple[list[int], list[int], jm.Jagged | None]:
        """The users with events to encode, and all others if one step encodes and scores; those of
        them whose histories begin with these events; and the items of the events and their
        positions, None if there are none."""
        users, new, most = batch.counts, batch.new, self.max_history
        held = self._held if self._appends else {}
        missing: Container[int] = users if self.cache is None else set(self.cache.missing([*users]))
        changed = [user for user in users if user in new or user in missing]
        self.counts["reused"] += len(users) - len(changed)
        if not changed:
            return [], [], None
        items: list[np.ndarray] = []
        spans: list[np.ndarray] = []
        anew: list[int] = []
        lengths = dict.fromkeys(users if self._encodes_and_scores else changed, 0)
        collect, positions = self.histories.collect, self._positions
        for user in changed:
            events = new.get(user, NONE)
            begin, length = 0 if user in missing else held.get(user, 0), len(events.item)
            # when a window is outgrown, all positions change
            if begin and begin + length <= most:
                items.append(events.item)
            else:
                count = self._window(user, length) if self._slack else most
                begin, length = 0, collect(user, events, count, items)
                anew.append(user)
            lengths[user], held[user] = length, begin + length
            spans.append(positions[begin : begin + length])
        self.counts["encoded"] += len(anew)
        self.counts["appended"] += len(changed) - len(anew)
        values = np.empty((sum(lengths.values()), 2), np.int64)
        np.concatenate(items, out=values[:, 0])
        np.concatenate(spans, out=values[:, 1])
        return [*lengths], anew, jagged(values, lengths.values())

    def _window(self, user: int, new: int) -> int:
        """How many events of a history are encoded, with so many new ones."""
        is_whole = self.histories.length(user) + new <= self.max_history
        return self.max_history - (0 if is_whole else self._slack)

    def attention(self, user: int, candidates: np.ndarray) -> None:
        """None: candidates do not attend to the history."""
