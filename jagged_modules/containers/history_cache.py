"""HistoryCache: keys and values of the histories of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..scalars import check_equal, check_kind, check_size, possessive
from ..segments import check_integers
from .jagged import Jagged, as_tensor, check_same_segments
from .offsets import concatenated_rows, rows_of_ranges


@dataclasses.dataclass(frozen=True, eq=False)
class HistoryCache:
    """Keys and values of B histories. A layer's `cache` returns them and its `score` takes them.

    `select` and `append` are differentiable. `PagedHistoryCache` keeps the rows of many users
    between requests.

    layers: one Jagged of the same B segments per layer, with values
        `[L, H, key width + value width]`: keys and values of the rows that targets see. Its
        max_seqlen is that of the histories, or above. In a selection of a `PagedHistoryCache` whose
        pages attention reads, `values` are copied at their first use.
    timestamps: int64 `[L]` of these rows, for an HSTU with config.relative_time; else None.
    max_rows: how many of the latest rows of a history its next events and targets see; None: all.
        `append` keeps these.

    Example::

        attention = jm.JaggedTargetAttention(embedding_dim=32, num_heads=4)
        cache = attention.cache((torch.randn(5, 32), torch.tensor([0, 2, 5])))  # 2 and 3 events
        event = torch.randn(1, 32), torch.tensor([0, 0, 1])  # of user 1
        _, new = attention.append(event, cache)
        cache = cache.append(new)  # 2 and 4 events
        out = attention.score(torch.randn(3, 5, 32), cache.select([1, 0, 1]))  # [3, 5, 32]
    """

    layers: tuple[Jagged, ...]
    timestamps: Tensor | None = None
    max_rows: int | None = None

    @property
    def num_segments(self) -> int:
        """The number B of histories."""
        return self.layers[0].num_segments

    def select(self, segments: Sequence[int] | Tensor) -> HistoryCache:
        """The cache of these histories, in this order. Copies their rows.

        The host must know the number of rows: segments, and lengths that only a device knows, are
        copied to it, which synchronises. For the same reason, torch.compile breaks the graph here.

        Args:
            segments: `[S]` indices of histories, 0 to B - 1, repeats allowed: a sequence of ints,
                or an int32 or int64 tensor.

        Returns:
            S histories. max_seqlen stays as it is, so the scores of a history do not depend on
            which others are selected.

        Raises:
            TypeError, ValueError: segments are no integers, not 1-D or out of range; the layers or
                the timestamps differ in their number of rows; segments or lengths are on the meta
                device.
        """
        first = self._first_layer("cache")
        indices = as_tensor("segments", segments)
        if not isinstance(segments, Tensor) and not indices.numel():
            indices = indices.long()  # torch makes a float tensor of []
        check_integers("segments", indices)
        indices, known = _on_host("segments", indices), first.host_lengths
        lengths = _on_host("cache's offsets", first.offsets.diff()) if known is None else known
        wrong = indices[(indices < 0) | (indices >= first.num_segments)]
        if wrong.numel():
            raise ValueError(
                f"segments must be 0 to B - 1 = {first.num_segments - 1}, got {int(wrong[0])}"
            )
        lengths = lengths.long()
        begins, lengths = (lengths.cumsum(0) - lengths)[indices], lengths[indices]
        rows, offsets = rows_of_ranges(begins, lengths, first.values.device)
        selected = Jagged(
            first.values.index_select(0, rows), offsets, first.max_seqlen, host_lengths=lengths
        )
        others = (selected.with_values(x.values.index_select(0, rows)) for x in self.layers[1:])
        timestamps = None if self.timestamps is None else self.timestamps.index_select(0, rows)
        return HistoryCache((selected, *others), timestamps, self.max_rows)

    def append(self, new: HistoryCache) -> HistoryCache:
        """The cache in which each history's rows are followed by its new rows. Copies both.

        With max_rows, the last max_rows rows of each history are kept. If only a device knows the
        lengths, this synchronises.

        Args:
            new: keys and values of the next events of the same B histories, in the same order: what
                the layer's `append` returns. An HSTU's `cache` does not compute them, because they
                depend on the cached rows.

        Returns:
            B histories. max_seqlen is the sum of both, at most max_rows; None if one of them is
            None.

        Raises:
            TypeError: new is no HistoryCache.
            ValueError: new has another number of segments or layers, another max_rows, or keys and
                values of another shape, dtype or device; only one has timestamps.
        """
        check_kind("new", new, HistoryCache, "a HistoryCache")
        first, first_new = self._first_layer("cache"), new._first_layer("new")
        for what, x, own in zip(_KIND, new._kind(), self._kind()):
            check_equal("new", f"have the cache's {what}", own, x)
        check_same_segments("new", first_new, "cache", first)
        device, limit = first.values.device, self.max_rows
        parts = [x.offsets.to(device, non_blocking=True) for x in (first, first_new)]
        offsets, lengths = parts[0] + parts[1], _sum(first.host_lengths, first_new.host_lengths)
        max_seqlen = _sum(first.max_seqlen, first_new.max_seqlen)
        rows = concatenated_rows(parts, [x.values.shape[0] for x in (first, first_new)])
        # The inverse. Zeros: rows behind the last segment may have none.
        rows = torch.zeros_like(rows).index_copy_(
            0, rows, torch.arange(rows.shape[0], device=device)
        )
        if limit is not None:
            lengths = _on_host("offsets", offsets.diff()) if lengths is None else lengths
            kept = lengths.clamp(max=limit)
            last, offsets = rows_of_ranges(lengths.cumsum(0) - kept, kept, device)
            rows = rows[last]
            lengths = kept
            max_seqlen = None if max_seqlen is None else min(max_seqlen, limit)

        def joined(x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([x, y]).index_select(0, rows)

        grown = Jagged(
            joined(first.values, first_new.values), offsets, max_seqlen, host_lengths=lengths
        )
        grown.feature_keys = first.feature_keys
        others = (
            grown.with_values(joined(x.values, y.values))
            for x, y in zip(self.layers[1:], new.layers[1:])
        )
        timestamps = None
        if self.timestamps is not None and new.timestamps is not None:
            timestamps = joined(self.timestamps, new.timestamps)
        return HistoryCache((grown, *others), timestamps, limit)

    def _first_layer(self, name: str) -> Jagged:
        """The first layer. TypeError or ValueError if a field is wrong, or numbers of rows differ.
        Errors call the cache `name`."""
        check_kind(name, self.layers, tuple, "a HistoryCache with a tuple of layers")
        if not self.layers:
            raise ValueError(f"{name} must have at least 1 layer, got 0")
        for layer in self.layers:
            check_kind(name, layer, Jagged, "a HistoryCache of Jagged layers")
        rows = [x.values.shape[0] for x in self.layers]
        if self.timestamps is not None:
            check_integers(f"{possessive(name)} timestamps", self.timestamps, (torch.int64,))
            rows.append(self.timestamps.shape[0])
        if self.max_rows is not None:
            check_size(f"{possessive(name)} max_rows", self.max_rows)
        if any(count != rows[0] for count in rows[1:]):
            raise ValueError(
                f"{name} must have as many rows in each layer and in its timestamps, got {rows}"
            )
        return self.layers[0]

    def _kind(self) -> tuple[object, ...]:
        """What the caches of one layer share: see _KIND."""
        values = [x.values for x in self.layers]
        kinds = [
            [list(x.shape[1:]) for x in values],
            [x.dtype for x in values],
            [x.device for x in values],
        ]
        return len(values), *kinds, self.timestamps is not None, self.max_rows


_KIND = ("number of layers", "heads and widths", "dtypes", "devices", "timestamps", "max_rows")


def _sum(x: Any, y: Any) -> Any:
    """x + y, None if one is unknown."""
    return None if x is None or y is None else x + y


def _on_host(name: str, x: Tensor) -> Tensor:
    if x.is_meta:
        raise ValueError(
            f"{name} must be on a device with values: the number of rows depends on them, got meta"
        )
    return x.long().cpu()
