"""An order of segments in which those of equal lengths are side by side: layers project rows in it
on the CPU, where that saves attention a gather of most rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class ByLength(NamedTuple):
    """Offsets of the segments in order of their lengths, and the rows of queries and of keys."""

    q_offsets: Tensor
    q_rows: Tensor
    kv_offsets: Tensor
    kv_rows: Tensor


def by_length(q_offsets: Tensor, kv_offsets: Tensor, share: float = 0.5) -> ByLength | None:
    """An order in which segments of equal lengths are adjacent. None if at most this share of the
    keys is in groups of segments that are not adjacent already."""
    if q_offsets.shape != kv_offsets.shape or len(q_offsets) < 3:
        return None
    q_lengths, kv_lengths = q_offsets.diff().long(), kv_offsets.diff().long()
    key, order = (kv_lengths * (q_offsets[-1] + 1) + q_lengths).sort(stable=True)
    gaps = (key[1:] == key[:-1]) & (order.diff() != 1)
    scattered = order[pad(gaps, (0, 1)) | pad(gaps, (1, 0))]
    if int(kv_lengths[scattered].sum()) <= share * int(kv_offsets[-1]):
        return None
    return ByLength(*_reordered(q_offsets, order), *_reordered(kv_offsets, order))


def _reordered(offsets: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """The offsets of segments in another order, and the rows in this order."""
    lengths, starts = offsets.diff()[order], offsets[:-1][order]
    ends = lengths.cumsum(0)
    rows = torch.repeat_interleave(starts - ends + lengths, lengths) + torch.arange(
        int(offsets[-1]), device="cpu"
    )
    return pad(ends, (1, 0)), rows


def rows_back(x: Tensor, order: Tensor | None, num_rows: int) -> Tensor:
    """x, rows in this order, as the caller has them; 0 behind the last segment, whose rows have no
    place in the order."""
    if order is None or not num_rows:
        return x
    out = x.new_empty((num_rows, *x.shape[1:]))
    out[len(order) :] = 0
    return out.index_copy_(0, order, x[: len(order)]) if len(order) else out
