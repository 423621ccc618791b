"""The order in which the CPU computes segments: those of equal lengths side by side, where that
saves a gather of most rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jagged_kernels.attention.params import AttentionParams, Segments
from torch import Tensor
from torch.nn.functional import pad


class Ordered(NamedTuple):
    """The segments in the order of their computation.

    Attributes:
        segments: with offsets in this order.
        params: the parameters, those of segments and rows in this order.
        starts: `[B]`, where the segments of queries start in the caller's order.
        q_order, kv_order: the rows of the output and of the keys in this order; None if it is the
            caller's.
    """

    segments: Segments
    params: AttentionParams
    starts: Tensor
    q_order: Tensor | None = None
    kv_order: Tensor | None = None

    @classmethod
    def of(cls, segments: Segments, params: AttentionParams) -> Ordered:
        """Sorted by their lengths if `by_length` does so."""
        found, starts = None, segments.q_offsets[:-1]
        if not params.batch_invariant:
            found = by_length(segments.q_offsets, segments.kv_offsets)
        if found is None:
            return cls(segments, params, starts)
        order, q_offsets, q_order, kv_offsets, kv_order = found
        orders = dict(
            num_targets=order, query_shift=order, timestamps=kv_order, query_timestamps=q_order
        )
        sorted_fields = {
            name: x[rows]
            for name, rows in orders.items()
            if (x := getattr(params, name)) is not None
        }
        segments = segments._replace(q_offsets=q_offsets, kv_offsets=kv_offsets)
        params = params._replace(**sorted_fields)
        return cls(segments, params, starts[order], q_order, kv_order)

    def sorted(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The operands in this order; shared queries have none."""
        return (
            q if self.segments.q_shared else rows_in_order(q, self.q_order),
            rows_in_order(k, self.kv_order),
            rows_in_order(v, self.kv_order),
        )

    def is_by_rows(self, query_group: int) -> bool:
        """Whether a group of segments is one query row. Mask and bias are those of the first query
        group."""
        params = self.params
        return (
            params.batch_invariant
            and ((params.mask is None and not params.has_bias) or query_group > 0)
            and not self.segments.q_shared
        )


class ByLength(NamedTuple):
    """The order of the segments by length; their offsets in this order, and the rows of queries and
    of keys."""

    order: Tensor
    q_offsets: Tensor
    q_rows: Tensor
    kv_offsets: Tensor
    kv_rows: Tensor


def by_length(q_offsets: Tensor, kv_offsets: Tensor) -> ByLength | None:
    """An order in which segments of equal lengths are adjacent. None if at most half of the keys
    are in groups of segments that are not adjacent already."""
    if q_offsets.shape != kv_offsets.shape or len(q_offsets) < 3:
        return None
    q_lengths, kv_lengths = q_offsets.diff().long(), kv_offsets.diff().long()
    key, order = (kv_lengths * (q_offsets[-1] + 1) + q_lengths).sort(stable=True)
    gaps = (key[1:] == key[:-1]) & (order.diff() != 1)
    scattered = order[pad(gaps, (0, 1)) | pad(gaps, (1, 0))]
    if 2 * int(kv_lengths[scattered].sum()) <= int(kv_offsets[-1]):
        return None
    return ByLength(order, *_reordered(q_offsets, order), *_reordered(kv_offsets, order))


def _reordered(offsets: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """The offsets of segments in another order, and the rows in this order."""
    lengths, starts = offsets.diff()[order], offsets[:-1][order]
    ends = lengths.cumsum(0)
    rows = torch.repeat_interleave(starts - ends + lengths, lengths) + torch.arange(
        int(offsets[-1]), device="cpu"
    )
    return pad(ends, (1, 0)), rows


def rows_in_order(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x.index_select(0, order)


def rows_back(x: Tensor, order: Tensor | None, num_rows: int) -> Tensor:
    """Undo `rows_in_order`, which leaves out the rows behind the last segment: they are 0."""
    if order is None or not num_rows:
        return x
    out = x.new_empty((num_rows, *x.shape[1:]))
    out[len(order) :] = 0
    return out.index_copy_(0, order, x[: len(order)]) if len(order) else out
