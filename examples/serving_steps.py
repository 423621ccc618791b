"""What rankers compute on the device, as modules of plain tensors: `jm.graphed` replays their calls
from CUDA graphs.

A batch's ids are int64 tensors on the host, one for the users, one for each kind of event, and one
for the candidates. They go to the device in one copy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from data.event_log import Categorical
from ranking_model import Inputs, RankingModel
from sequence_model import SequenceModel
from torch import nn
from torch.nn import functional
from torchrec import EmbeddingBagCollection, JaggedTensor

import jagged_modules as jm

# of jm.graphed. Few capacities, so that the warm-up captures all graphs: requests wait for those
# that it leaves out. Up to 1,024 rows, padding costs the device little; batches with more than the
# last run without a graph. There are at least 64 segments, so that those of the padding are short:
# of cached rows, they are read for the padding alone
ROWS = [32, 256, *(2**n for n in range(10, 18))]
CAPACITIES = dict(events=ROWS, stream=ROWS, targets=ROWS, kept=[2**13, 2**15, 2**17])
GRAPHS = dict(capacities=[2**n for n in range(6, 18)], rows=CAPACITIES, max_graphs=256)


class FeatureTable:
    """The categories of the side features of all users or items.

    columns: int64 [N + 1, sum of widths], the features' categories side by side, -1 behind the last
        one of an entity. The last row has none.
    widths: the largest number of categories of each feature.
    """

    def __init__(self, features: dict[str, Categorical], count: int):
        columns = []
        for feature in features.values():
            lengths = np.diff(feature.offsets)
            column = np.full((count + 1, lengths.max(initial=1)), -1)
            column[:count][np.arange(column.shape[1]) < lengths[:, None]] = feature.values
            columns.append(column)
        self.columns, self.widths = np.concatenate(columns, axis=1), [x.shape[1] for x in columns]


def to_device(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The arguments on the device. int64 tensors and Jaggeds of the host go there in one copy from
    page-locked memory; Jaggeds keep their lengths on the host."""
    parts = {
        name: (x.values, x.offsets) if isinstance(x, jm.Jagged) else (x,)
        for name, x in arguments.items()
        if isinstance(x, (torch.Tensor, jm.Jagged)) and x.device != device
    }
    if not parts:
        return arguments
    flat = [x.flatten() for both in parts.values() for x in both]
    sizes = [len(x) for x in flat]
    packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    torch.cat(flat, out=packed)
    views, moved = iter(packed.to(device, non_blocking=True).split(sizes)), {}
    for name, both in parts.items():
        values, *offsets = (next(views).view(x.shape) for x in both)
        whole = arguments[name]
        moved[name] = (
            jm.Jagged(values, *offsets, whole.max_seqlen, host_lengths=whole.host_lengths)
            if offsets
            else values
        )
    return arguments | moved


class Step(nn.Module):
    """The parts of a ranker's step. Which one a call runs depends on the arguments that it gets.

    The model is no submodule, so that `jm.graphed` need not look at each call whether a parameter
    was replaced: a ranker's change in `load` alone, in place, which graphs see.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.dtype, self.device = dtype, next(model.parameters()).device
        vars(self)["model"] = model

    def forward(self, **arguments: Any) -> Any:
        return self.compute(**to_device(arguments, self.device))

    def compute(self, **arguments: Any) -> Any:
        raise NotImplementedError


class RankingStep(Step):
    """A RankingModel's lookups and its head.

    Args:
        users, items: the categories of their side features, which the device keeps.
    """

    model: RankingModel
    users: torch.Tensor
    items: torch.Tensor

    def __init__(
        self, model: RankingModel, dtype: torch.dtype, users: FeatureTable, items: FeatureTable
    ):
        super().__init__(model, dtype)
        self.user_widths, self.item_widths = users.widths, items.widths
        for name, table in (("users", users), ("items", items)):
            columns = torch.from_numpy(table.columns).to(self.device)
            self.register_buffer(name, columns, persistent=False)

    def inputs(
        self,
        users: torch.Tensor | None = None,
        events: jm.Jagged | None = None,
        stream: jm.Jagged | None = None,
        targets: jm.Jagged | None = None,
        longest: int | None = None,
    ) -> Inputs:
        """The head's inputs, None where they depend on an argument that is not given.

        Args:
            users: [B], rows of their features.
            events: [L, 3], item, rating and age.
            stream: [S, 2], item and rating.
            targets: [C, 1], items.
            longest: see `Inputs`.
        """
        bags = {"users": None if users is None else self._user_bags(users), "longest": longest}
        rows = dict.fromkeys(Inputs._fields) | bags
        if events is not None:
            item, rating, age = events.values.split(1, dim=1)
            summed = self._look_up("item", item) + self._item_bags(item).sum(dim=1)
            rows["history"] = summed + self._look_up("rating", rating) + self._look_up("age", age)
            rows["history_offsets"] = events.offsets
        if stream is not None:
            item, rating = stream.values.split(1, dim=1)
            rows["stream"] = self._look_up("item", item) + self._look_up("rating", rating)
            rows["stream_offsets"] = stream.offsets
        if targets is not None:
            sides = self._item_bags(targets.values)
            rows["items"] = self._look_up("item", targets.values) + sides.sum(dim=1)
            rows["item_features"], rows["item_offsets"] = sides, targets.offsets
        return Inputs(**rows).to(self.dtype)

    def compute(self, kept: jm.HistoryCache | None = None, **ids: Any) -> Any:
        """The logits [C]; with `kept`, of targets of cached histories. Without targets, the keys
        and values of the events.

        With `kept` and events, which are written behind these histories, a pair as of a layer's
        `append`: the logits, and no keys and values.
        """
        head, x = self.model.head, self.inputs(**ids)
        if x.items is None:
            return head.interaction.cache(head.encode(x)[0])
        if kept is None:
            return head(x)
        appends = x.history is not None
        if appends:
            new = head.interaction.cache(head.encode(x)[0]).layers[0]
            kept.layers[0].write(new.values)
        targets = head.targets(x)
        # the parts of models with a cache leave the users' vectors as they are
        interest = head.interaction.score(targets, kept).values
        logits = head.logits(x, x.users, targets.values, interest)
        return (logits, None) if appends else logits

    def _look_up(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids[:, 0], self.model.sequences.embeddings[table].weight)

    def _user_bags(self, ids: torch.Tensor) -> torch.Tensor:
        ids = self.users.index_select(0, ids)
        return sums_of_bags(
            self.model.user_bags, self.model.unpack.user_features, ids, self.user_widths
        )

    def _item_bags(self, ids: torch.Tensor) -> torch.Tensor:
        ids = self.items.index_select(0, ids[:, 0])
        return sums_of_bags(
            self.model.item_bags, self.model.unpack.item_features, ids, self.item_widths
        )


def sums_of_bags(
    bags: EmbeddingBagCollection, features: Sequence[str], ids: torch.Tensor, widths: list[int]
) -> torch.Tensor:
    """The features' sums [rows, features, E] of the embeddings of the ids [rows, columns] of a
    `FeatureTable`."""
    sums = []
    for name, part in zip(features, ids.split(widths, dim=1), strict=True):
        rows = functional.embedding(part.clamp(min=0), bags.embedding_bags[f"{name}_table"].weight)
        sums.append(rows.masked_fill((part < 0)[:, :, None], 0).sum(dim=1))
    return torch.stack(sums, dim=1)


class SequenceStep(Step):
    """A SequenceModel's lookups, encoder and scores.

    encoded: [1 + slots, E], what the encoder returned for the last event of the user who has a slot
        of the cache. The first row is no user's: padding is written to it.
    """

    model: SequenceModel
    encoded: torch.Tensor

    def __init__(self, model: SequenceModel, dtype: torch.dtype):
        super().__init__(model, dtype)
        self.register_buffer("encoded", None, persistent=False)
        self.grow(1)

    def grow(self, rows: int) -> None:
        """Give `encoded` so many rows of zeros."""
        width = self.model.encoder.norm.normalized_shape[0]
        self.encoded = torch.zeros(rows, width, dtype=self.dtype, device=self.device)

    def keep(self, slots: torch.Tensor, encoded: torch.Tensor) -> None:
        """Keep what the encoder returned for the users of these slots."""
        self.encoded.index_copy_(0, slots.to(self.device), encoded)

    def compute(
        self,
        events: jm.Jagged | None = None,
        kept: jm.HistoryCache | None = None,
        rows: torch.Tensor | None = None,
        targets: jm.Jagged | None = None,
    ) -> Any:
        """The scores [C] of the targets' items.

        Args:
            events: [N, 2], item and position in the window; without `kept` and rows, no segment is
                empty.
            kept: the cached histories that the events follow. The result is then a pair as of a
                layer's `append`: with targets, which need room for the events and slots in `kept`,
                the scores and None; else the last outputs, and the events' keys and values.
            rows: of `encoded`, of the users. The last outputs of those with events are written
                there first, if these are whole histories.
            targets: [C, 1], items.
        """
        encoder, embedded, added = self.model.encoder, {}, None
        if events is not None:
            for name, ids in zip(("item", "position"), events.values.split(1, dim=1), strict=True):
                embedded[name] = self._look_up(name, ids, events.offsets)
            inputs = events.with_values(encoder.inputs(embedded).to(self.dtype))
            if kept is None:
                encoded = last_rows(encoder.encoder(inputs))
            else:
                outputs, added = encoder.encoder.append(inputs, kept)
                encoded = last_rows(outputs)
                if targets is None:
                    return encoded, added
                rows = kept.layers[0].slots
            if rows is not None:
                self.keep(rows.masked_fill(events.offsets.diff() == 0, 0), encoded)
        if rows is not None:
            encoded = self.encoded.index_select(0, rows)
        embedded["target"] = self._look_up("item", targets.values, targets.offsets)
        embedded["rival"] = self._look_up("item", targets.values[:0], targets.offsets[:1])
        vectors, counts = encoder.vectors(encoded.float(), embedded), targets.offsets.diff()
        queries = vectors.queries.repeat_interleave(counts, dim=0, output_size=len(vectors.targets))
        scores = (queries * vectors.targets).sum(dim=1)
        return scores if kept is None else (scores, None)

    def _look_up(self, table: str, ids: torch.Tensor, offsets: torch.Tensor) -> JaggedTensor:
        weight = self.model.embeddings.embeddings[table].weight
        return JaggedTensor(functional.embedding(ids[:, 0], weight), offsets=offsets)


def last_rows(x: jm.Jagged) -> torch.Tensor:
    """The last row [B, width] of each segment; of an empty one, that of any."""
    return x.values[x.offsets[1:] - 1]


class CachedStep(nn.Module):
    """The layer of a ranker's cache: the model's, with steps of the ranker in place of methods. It
    has no parameters, so that the cache need not look at each call whether they have changed: a
    ranker's change in `load` alone, which clears the cache."""

    def __init__(self, layer: Any, **methods: Callable[..., Any]):
        super().__init__()
        self.append_reads_cache, self.max_cached_rows = (
            layer.append_reads_cache,
            layer.max_cached_rows,
        )
        self.append_writes_pages = getattr(layer, "append_writes_pages", False)
        vars(self).update(dict(cache=layer.cache, append=layer.append) | methods)
