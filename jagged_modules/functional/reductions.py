"""Reductions of segments: one row for each, or the first or last rows of each.

They do not loop over segments and do not synchronise with a device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..autocast import autocast_dtype
from ..containers.offsets import segments_and_positions
from ..containers.padding import padded_to
from ..scalars import check_size
from ..segments import check_device, check_integers, checked_offsets, values_are_checkable
from .matmul import jagged_jagged_bmm
from .rows import check_rows, rows_or_zeros


def jagged_sum(
    x: Tensor, offsets: Tensor, *, max_seqlen: int | None = None, implementation: str = "auto"
) -> Tensor:
    """The sum of each segment's rows; 0 for an empty segment.

    Runs `jagged_jagged_bmm` with a column of ones: sums are fp32 or wider, in a fixed order.
    Gradients of any order.

    Args:
        x: `[L, ...]`, dtypes as in `jagged_dense_bmm`.
        offsets: `[B + 1]` int32 or int64, on x's device or the host.
        max_seqlen, implementation: as in `jagged_dense_bmm`.

    Returns:
        `[B, ...]`.

    Raises:
        TypeError, ValueError: as `jagged_jagged_bmm`.
    """
    check_rows("jagged_sum", "x", x, implementation=implementation)
    if autocast_dtype(x) != x.dtype:  # sums stay in x's dtype, as torch's
        with torch.autocast(x.device.type, enabled=False):
            return jagged_sum(x, offsets, max_seqlen=max_seqlen, implementation=implementation)
    rows, ones = x.reshape(x.shape[0], x.shape[1:].numel()), x.new_ones(x.shape[0], 1)
    sums = jagged_jagged_bmm(
        ones, rows, offsets, max_seqlen=max_seqlen, implementation=implementation
    )
    return sums[:, 0].reshape(-1, *x.shape[1:])


def jagged_mean(
    x: Tensor, offsets: Tensor, *, max_seqlen: int | None = None, implementation: str = "auto"
) -> Tensor:
    """The mean of each segment's rows; 0 for an empty segment. Sums are of an fp32 copy of 16-bit
    rows, so that they do not overflow, and the result is rounded once.

    Args:
        x, offsets, max_seqlen, implementation: as in `jagged_sum`.

    Returns:
        `[B, ...]`.

    Raises:
        TypeError, ValueError: as `jagged_sum`.
    """
    check_rows("jagged_mean", "x", x, implementation=implementation)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    sums = jagged_sum(wide, offsets, max_seqlen=max_seqlen, implementation=implementation)
    lengths = offsets.diff().clamp(min=1).to(x.device, sums.dtype, non_blocking=True)
    return (sums / _per_row(lengths, sums)).to(x.dtype)


def jagged_max(x: Tensor, offsets: Tensor, empty: float = 0) -> Tensor:
    """The largest element of each segment, column by column. Its gradient goes to the first row
    that has it. A NaN is larger than all numbers.

    Args:
        x: `[L, ...]`, any real dtype of the dtype table.
        offsets: `[B + 1]` int32 or int64, on x's device or the host.
        empty: the result of an empty segment.

    Returns:
        `[B, ...]`.

    Raises:
        TypeError, ValueError: types, shapes, dtypes or devices do not match.
    """
    check_rows("jagged_max", "x", x)
    offsets = checked_offsets("offsets", offsets, x.shape[0], x, "x's")
    x = padded_to(x, max(x.shape[0], 1))  # a row, which no segment has, to be gathered from
    total, segments = x.shape[0], offsets.shape[0] - 1
    segment, _ = segments_and_positions(offsets, total)
    index = _per_row(segment.long(), x).expand_as(x)
    with torch.no_grad():
        # one more segment takes the rows behind the last one
        most = x.new_zeros((segments + 1, *x.shape[1:]))
        most = most.scatter_reduce(0, index, x, "amax", include_self=False)
        of_row = most.index_select(0, segment)
        is_most = (x == of_row) | ((x != x) & (of_row != of_row))
        rows = _per_row(torch.arange(total, device=x.device), x)
        first = index.new_full(most.shape, total)
        first = first.scatter_reduce(0, index, torch.where(is_most, rows, total), "amin")
    first = first[:segments]
    return x.gather(0, first.clamp(max=total - 1)).masked_fill(first == total, empty)


def jagged_first(x: Tensor, offsets: Tensor, k: int | Tensor = 1) -> tuple[Tensor, Tensor]:
    """The first k rows of each segment, all of a shorter one.

    Args:
        x: `[L, ...]`, any dtype of the dtype table.
        offsets: `[B + 1]` int32 or int64, on x's device or the host.
        k: a number for all segments, or `[B]` int32 or int64 on x's device or the host: for
            instance how many rows are within some time.

    Returns:
        Values `[Σ min(length, k), ...]` and offsets `[B + 1]` on x's device. If only a device knows
        the lengths, the values have as many rows as there can be, of which those behind the last
        segment are 0.

    Raises:
        TypeError, ValueError: types, shapes or devices do not match; k is negative.
    """
    return _part("jagged_first", x, offsets, k, is_last=False)


def jagged_last(x: Tensor, offsets: Tensor, k: int | Tensor = 1) -> tuple[Tensor, Tensor]:
    """The last k rows of each segment, all of a shorter one, in their order.

    Args:
        x, offsets, k: as in `jagged_first`.

    Returns:
        Values `[Σ min(length, k), ...]` and offsets `[B + 1]`, as `jagged_first`.

    Raises:
        TypeError, ValueError: as `jagged_first`.
    """
    return _part("jagged_last", x, offsets, k, is_last=True)


def _part(
    function: str, x: Tensor, offsets: Tensor, k: int | Tensor, is_last: bool
) -> tuple[Tensor, Tensor]:
    check_rows(function, "x", x)
    given, total = offsets, x.shape[0]
    offsets = checked_offsets("offsets", offsets, total, x, "x's")
    segments = offsets.shape[0] - 1
    if isinstance(k, Tensor):
        check_integers("k", k)
        if k.shape != (segments,):
            raise ValueError(f"k must have shape [B] = [{segments}], got {list(k.shape)}")
        check_device("k", k, x.device, "x's")
        if values_are_checkable(k) and bool((k < 0).any()):
            raise ValueError(f"k must not be negative, got {int(k.min())}")
    else:
        check_size("k", k, at_least=0)
        total = min(total, segments * k)
    known = values_are_checkable(given) and not (
        isinstance(k, Tensor) and not values_are_checkable(k)
    )
    if known:
        lengths = given.diff().cpu()
        total = int(torch.minimum(lengths, torch.as_tensor(k, device="cpu").to(lengths)).sum())
    most = k.to(x.device, offsets.dtype, non_blocking=True) if isinstance(k, Tensor) else k
    lengths = offsets.diff()
    taken = torch.minimum(lengths, most) if isinstance(most, Tensor) else lengths.clamp(max=most)
    ends = pad(taken.cumsum(0, dtype=offsets.dtype), (1, 0))
    segment, position = segments_and_positions(ends, total)
    absent = None if known else segment >= segments
    firsts = offsets[:-1] if not is_last else offsets[1:] - taken
    index = firsts[segment if known else segment.clamp(max=max(segments - 1, 0))] + position
    return rows_or_zeros(x, index, absent), ends


def _per_row(x: Tensor, like: Tensor) -> Tensor:
    """x `[rows]` as `[rows, 1, ...]` with the dimensions of `like`."""
    return x.view(-1, *[1] * (like.dim() - 1))
