"""The ranker of ranking models (train_dlrm.py). Its cache has the interaction's keys and values of
a history. New events change the age of all earlier ones, so the history of a user with new events
is encoded anew.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from ranking_data import RankingDataset, ages
from ranking_model import PaddedTargetAttention, RankingModel
from serving_histories import NONE, Request
from serving_rankers import Batch, Ranker, integers, jagged
from serving_steps import CachedStep, FeatureTable, RankingStep, to_device

import jagged_modules as jm


class RankingRanker(Ranker):
    """Serves a RankingModel. The score is the log-odds that the user likes the candidate."""

    needs_history = False

    def __init__(
        self,
        model: RankingModel,
        dataset: RankingDataset,
        dtype: torch.dtype = torch.float32,
        graphs: bool = False,
        **options: Any,
    ):
        users = FeatureTable(dataset.user_features, dataset.log.num_users)
        items = FeatureTable(dataset.log.item_features, dataset.log.num_items)
        self.step = RankingStep(model, dtype, users, items)
        super().__init__(model, model.head, dtype=dtype, graphs=graphs, **options)
        model.head.over.float()
        self.width = model.sequences.embeddings["item"].weight.shape[1]
        self.dataset, self.ratings = dataset, dataset.ratings.tolist()
        self._ages = ages(np.array([self.max_history]))
        interaction = model.head.interaction
        self._pads = graphs and isinstance(interaction, PaddedTargetAttention)
        if self._pads:
            interaction.pads_to_bound = True

    def _cached_layer(self) -> CachedStep:
        layer = CachedStep(
            self.model.head.interaction,
            cache=self._cache,
            append=lambda events, kept, ids: self.run(events=events, kept=kept, **ids),
        )
        # the histories to which it appends have no rows
        layer.append_reads_cache = layer.append_writes_pages = True
        return layer

    def _cache(self, history: Any) -> jm.HistoryCache:
        """The keys and values of ids of events, or of no rows."""
        if isinstance(history, jm.Jagged):
            return self.model.head.interaction.cache(history)
        return self.run(**history)

    @property
    def longest_window(self) -> int:
        return max(self.max_history, self.dataset.max_stream)

    def _score(self, batch: Batch) -> torch.Tensor:
        fresh = self._users_to_encode(batch)
        ids, joint = self._ids(batch), self._encodes_and_scores
        events = self._events(batch, batch.counts if joint else fresh, fresh) if fresh else {}
        self.stages.end("lookup")
        if self.cache is None:
            return self.run(**ids, **events)
        users = list(batch.counts)
        if fresh and joint:
            logits = self._append(users, events.pop("events"), list(fresh), ids=ids | events)
            self.stages.end("cache")
            return logits
        if fresh:
            self.cache.put(list(fresh), events)
        kept = self._read(self.cache.select, users)
        self.stages.end("cache")
        return self.run(**ids, kept=kept)

    def _users_to_encode(self, batch: Batch) -> Mapping[int, Any]:
        """The users whose histories are encoded."""
        fresh: Mapping[int, Any] = batch.counts
        if self.cache is not None:
            fresh = dict.fromkeys(self.cache.missing([*batch.counts])) | batch.new
        self.counts["encoded"] += len(fresh)
        self.counts["reused"] += len(batch.counts) - len(fresh)
        return fresh

    def _ids(self, batch: Batch) -> dict[str, Any]:
        """The ids of users and candidates, as `RankingStep.inputs` takes them."""
        count = self.histories.num_users
        users = integers([user if user < count else count for user in batch.counts])
        return dict(users=users, targets=jagged(batch.candidates[:, None], batch.counts.values()))

    def _events(self, batch: Batch, users: Iterable[int], fresh: Container[int]) -> dict[str, Any]:
        """The ids of the histories of fresh users, of others none, as `RankingStep.inputs` takes
        them."""
        histories, lengths = self._windows(batch, users, fresh, self.max_history, 3)
        spans = [self._ages[self.max_history - n :] for n in lengths]
        np.concatenate(spans, out=histories[:, 2])
        events: dict[str, Any] = dict(events=jagged(histories, lengths))
        if self.dataset.max_stream:
            events["stream"] = jagged(
                *self._windows(batch, users, fresh, self.dataset.max_stream, 2)
            )
        if self._pads:
            # each is a graph of its own
            longest = 1 << (max(1, *lengths) - 1).bit_length()
            events["longest"] = min(longest, self.max_history)
        return events

    def _windows(
        self, batch: Batch, users: Iterable[int], fresh: Container[int], count: int, columns: int
    ) -> tuple[np.ndarray, list[int]]:
        """The last events of fresh users, one user after another, [L, columns], of which the first
        are items and ratings; and the numbers of all users' events."""
        items: list[np.ndarray] = []
        ratings: list[np.ndarray] = []
        collect, new = self.histories.collect, batch.new.get
        lengths = [
            collect(user, new(user, NONE), count, items, ratings) if user in fresh else 0
            for user in users
        ]
        values = np.empty((sum(lengths), columns), np.int64)
        np.concatenate(items, out=values[:, 0])
        np.concatenate(ratings, out=values[:, 1])
        return values, lengths

    @torch.no_grad()
    def attention(self, user: int, candidates: np.ndarray) -> torch.Tensor | None:
        head, batch = self.model.head, Batch.of([Request(user, candidates)])
        if not isinstance(head.interaction, jm.JaggedTargetAttention):
            return None
        ids = self._ids(batch) | self._events(batch, [user], [user])
        x = self.step.inputs(**to_device(ids, self.device))
        history, _ = head.encode(x)
        k, _ = head.interaction.cache(history).layers[0].values.chunk(2, dim=2)
        q = head.interaction.q_proj(head.targets(x).values).unflatten(1, k.shape[1:])
        scores = torch.einsum("chd,lhd->hcl", q, k) * k.shape[2] ** -0.5
        return scores.softmax(dim=2).mean(dim=0).float().cpu()
