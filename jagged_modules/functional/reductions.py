"""Reductions of segments: one row for each, or the first or last rows of each, or those of some
time. x is a tensor with offsets, or any container without them.

They do not loop over segments and do not synchronise with a device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from ..containers.jagged import Jagged
from ..containers.offsets import (
    block_offsets,
    first_blocks,
    rows_and_segments,
    segments_and_positions,
)
from ..containers.padding import indices_of_true, never_empty
from ..cpu.buckets import compute_dtype
from ..dtypes import autocast_dtype
from ..scalars import check_kind, check_shape, check_size
from ..segments import (
    check_device,
    check_integers,
    check_not_negative,
    checked_offsets,
    values_are_checkable,
)
from ..validation import IMPLEMENTATIONS, check_dense, check_implementation
from .matmul import jagged_jagged_bmm
from .nodes import apply, reshaped_result
from .operands import runs_kernels
from .rows import check_fill, check_rows, rows_or_zeros

SUM_BLOCK = 512  # rows


def jagged_sum(
    x: Any,
    offsets: Tensor | None = None,
    *,
    max_seqlen: int | None = None,
    implementation: str = "auto",
) -> Tensor:
    """The sum of each segment's rows; 0 for an empty segment.

    Sums are fp32 or wider, in a fixed order. Kernels are those of `jagged_jagged_bmm`, with a
    column of ones. Gradients of any order.

    Args:
        x: `[L, ...]`, dtypes as in `jagged_dense_bmm`; or any container of them, without offsets.
        offsets: `[B + 1]` int32 or int64, on x's device or the host.
        max_seqlen, implementation: as in `jagged_dense_bmm`.

    Returns:
        `[B, ...]`.

    Raises:
        TypeError, ValueError: as `jagged_jagged_bmm`.
    """
    x, offsets, max_seqlen = _parts(x, offsets, max_seqlen)
    check_rows("jagged_sum", "x", x, implementation=implementation)
    if autocast_dtype(x) != x.dtype:  # sums stay in x's dtype, as torch's
        with torch.autocast(x.device.type, enabled=False):
            return jagged_sum(x, offsets, max_seqlen=max_seqlen, implementation=implementation)
    rows = x.reshape(x.shape[0], x.shape[1:].numel())
    check_implementation(implementation, IMPLEMENTATIONS, x.device)
    if implementation == "auto" and not runs_kernels(implementation, x):
        offsets = checked_offsets("offsets", offsets, x.shape[0], x, "x's", max_seqlen)
        sums: Tensor = apply(_Sums, rows.to(compute_dtype(rows)), offsets).to(x.dtype)
    else:
        options: Any = dict(max_seqlen=max_seqlen, implementation=implementation)
        sums = jagged_jagged_bmm(x.new_ones(x.shape[0], 1), rows, offsets, **options)[:, 0]
    return sums.reshape(sums.shape[0], *x.shape[1:])


def jagged_mean(
    x: Any,
    offsets: Tensor | None = None,
    *,
    max_seqlen: int | None = None,
    implementation: str = "auto",
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
    x, offsets, max_seqlen = _parts(x, offsets, max_seqlen)
    check_rows("jagged_mean", "x", x, implementation=implementation)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    sums = jagged_sum(wide, offsets, max_seqlen=max_seqlen, implementation=implementation)
    lengths = offsets.diff().clamp(min=1).to(x.device, sums.dtype, non_blocking=True)
    return (sums / _per_row(lengths, sums)).to(x.dtype)


def jagged_max(x: Any, offsets: Tensor | None = None, empty: float = 0) -> Tensor:
    """The largest element of each segment, column by column. Its gradient goes to the first row
    that has it. A NaN is larger than all numbers.

    Args:
        x: `[L, ...]`, any real dtype of the dtype table; or any container of them, without offsets.
        offsets: `[B + 1]` int32 or int64, on x's device or the host.
        empty: the result of an empty segment.

    Returns:
        `[B, ...]`.

    Raises:
        TypeError, ValueError: types, shapes, dtypes or devices do not match.
    """
    x, offsets, _ = _parts(x, offsets)
    check_rows("jagged_max", "x", x)
    check_fill("empty", empty, "x", x)
    offsets = checked_offsets("offsets", offsets, x.shape[0], x, "x's")
    x = never_empty(x)
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


def jagged_first(
    x: Any, offsets: Tensor | None = None, k: int | Tensor = 1
) -> tuple[Tensor, Tensor]:
    """The first k rows of each segment, all of a shorter one.

    Args:
        x: `[L, ...]`, any dtype of the dtype table; or any container of them, without offsets.
        offsets: `[B + 1]` int32 or int64, on x's device or the host.
        k: a number for all segments, or `[B]` int32 or int64 on x's device or the host.

    Returns:
        Values `[Σ min(length, k), ...]` and offsets `[B + 1]` on x's device. If only a device knows
        the lengths, the values have as many rows as there can be, of which those behind the last
        segment are 0.

    Raises:
        TypeError, ValueError: types, shapes or devices do not match; k is negative.
    """
    return _part("jagged_first", x, offsets, k, is_last=False)


def jagged_last(
    x: Any, offsets: Tensor | None = None, k: int | Tensor = 1
) -> tuple[Tensor, Tensor]:
    """The last k rows of each segment, all of a shorter one, in their order.

    Args:
        x, offsets, k: as in `jagged_first`.

    Returns:
        Values `[Σ min(length, k), ...]` and offsets `[B + 1]`, as `jagged_first`.

    Raises:
        TypeError, ValueError: as `jagged_first`.
    """
    return _part("jagged_last", x, offsets, k, is_last=True)


def jagged_between(
    x: Any,
    offsets: Tensor | None = None,
    *,
    times: Tensor,
    start: float | Tensor | None = None,
    end: float | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The rows of each segment with start <= time < end, in their order: for instance the events of
    the week before a request.

    Args:
        x: `[L, ...]`, any dtype of the dtype table; or any container of them, without offsets.
        offsets: `[B + 1]` int32 or int64, on x's device or the host.
        times: `[L]` of the rows, in any order: an integer or a floating-point dtype.
        start, end: a number for all segments, or `[B]`; integers if times are. No limit if None.

    Returns:
        Values `[rows between, ...]` and offsets `[B + 1]` on x's device. Values have L rows where
        only a device knows how many there are; those behind the last segment are 0.

    Raises:
        TypeError, ValueError: types, shapes, dtypes or devices do not match.

    Example::

        events, offsets = torch.randn(5, 32), torch.tensor([0, 2, 5])
        times, requests = torch.tensor([10, 80, 30, 60, 95]), torch.tensor([90, 95])
        week, ends = jm.functional.jagged_between(
            events, offsets, times=times, start=requests - 40, end=requests
        )  # rows 1 and 3
    """
    x, offsets, _ = _parts(x, offsets)
    check_rows("jagged_between", "x", x)
    given, total = [offsets, times, start, end], x.shape[0]
    offsets = checked_offsets("offsets", offsets, total, x, "x's")
    segments = offsets.shape[0] - 1
    times = _numbers("times", times, "L", total, x.device)
    if not times.is_floating_point():
        times = times.long()  # torch would wrap a larger bound to a narrower dtype
    segment = rows_and_segments(offsets, total)[1]
    is_between = segment < segments
    for name, bound in (("start", start), ("end", end)):
        if bound is not None:
            bound = _bound_of_rows(name, bound, times, segment, segments)
            is_between = is_between & (times >= bound if name == "start" else times < bound)
    known = all(values_are_checkable(y) for y in given if isinstance(y, Tensor))
    known = known and not x.is_meta
    if known:
        total = int(is_between.sum())
    index = indices_of_true(is_between, total)
    ends = pad(is_between.cumsum(0, dtype=offsets.dtype), (1, 0))[offsets]
    return rows_or_zeros(x, index, None if known else index == x.shape[0]), ends


class _Sums(torch.autograd.Function):
    """Sums of the rows `[L, D]` of each segment, of its blocks first: they round less than one sum
    of many rows. The last bag has the rows behind the last segment."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        ctx.rows = x.shape[0]
        blocks = _bags(x, block_offsets(offsets, SUM_BLOCK, ctx.rows))
        sums = _bags(blocks, first_blocks(offsets, SUM_BLOCK))
        return reshaped_result(sums, sums.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (offsets,) = ctx.saved_tensors
        _, segment = rows_and_segments(offsets, ctx.rows)
        return pad(grads[0], (0, 0, 0, 1)).index_select(0, segment), None


def _bags(x: Tensor, offsets: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], dtype=offsets.dtype, device=x.device)
    return embedding_bag(rows, x, offsets, mode="sum")[:-1]


def _bound_of_rows(
    name: str, bound: float | Tensor, times: Tensor, segment: Tensor, segments: int
) -> float | Tensor:
    """The bound of each row. Rows behind the last segment have any."""
    if not isinstance(bound, Tensor):
        floats = (float, torch.SymFloat) if times.is_floating_point() else ()
        kinds = (int, torch.SymInt, *floats)  # torch compares integers with floats in fp32
        check_kind(name, bound, kinds, f"a number as times, {times.dtype}, or a tensor")
        if type(bound) is int and not times.is_floating_point() and not -(2**63) <= bound < 2**63:
            raise ValueError(f"{name} must be a number of int64, got {bound}")
        return bound
    bound = _numbers(name, bound, "B", segments, times.device)
    if bound.is_floating_point() != times.is_floating_point():
        raise ValueError(f"{name} must be numbers as times, {times.dtype}, got {bound.dtype}")
    return pad(bound, (0, 1))[segment]


def _numbers(name: str, x: Tensor, letter: str, rows: int, device: torch.device) -> Tensor:
    """Real numbers `[rows]`, on the device."""
    check_dense(name, x)
    if x.dtype == torch.bool or x.is_complex() or x.shape != (rows,):
        raise ValueError(
            f"{name} must be real numbers of shape [{letter}] = [{rows}], got {x.dtype}"
            f" {list(x.shape)}"
        )
    check_device(name, x, device, "x's")
    return x.to(device, non_blocking=True)


def _parts(
    x: Any, offsets: Tensor | None, max_seqlen: int | None = None
) -> tuple[Tensor, Tensor, int | None]:
    """Values, offsets and max_seqlen, of a container if there are no offsets."""
    if offsets is not None:
        return x, offsets, max_seqlen
    rows = Jagged.wrap(x, max_seqlen)
    return rows.values, rows.offsets, rows.max_seqlen


def _part(
    function: str, x: Any, offsets: Tensor | None, k: int | Tensor, is_last: bool
) -> tuple[Tensor, Tensor]:
    x, offsets, _ = _parts(x, offsets)
    check_rows(function, "x", x)
    given, total = offsets, x.shape[0]
    offsets = checked_offsets("offsets", offsets, total, x, "x's")
    segments = offsets.shape[0] - 1
    if isinstance(k, Tensor):
        check_integers("k", k)
        check_shape("k", k, "[B]", segments)
        check_device("k", k, x.device, "x's")
        check_not_negative("k", k)
    else:
        check_size("k", k, at_least=0)
        total = min(total, segments * k)
    known = values_are_checkable(given) and (not isinstance(k, Tensor) or values_are_checkable(k))
    if known:
        total = int(_at_most(given.diff().cpu(), k.cpu() if isinstance(k, Tensor) else k).sum())
    most = k.to(x.device, non_blocking=True) if isinstance(k, Tensor) else k
    taken = _at_most(offsets.diff(), most)
    ends = pad(taken.cumsum(0, dtype=offsets.dtype), (1, 0))
    segment, position = segments_and_positions(ends, total)
    absent = None if known else segment >= segments
    firsts = offsets[:-1] if not is_last else offsets[1:] - taken
    index = firsts[segment if known else segment.clamp(max=max(segments - 1, 0))] + position
    return rows_or_zeros(x, index, absent), ends


def _at_most(lengths: Tensor, k: int | Tensor) -> Tensor:
    """The smaller of both. k is not brought into a narrower dtype, in which it would wrap."""
    if isinstance(k, Tensor):
        return torch.minimum(lengths, k)
    return lengths.clamp(max=min(k, torch.iinfo(lengths.dtype).max))


def _per_row(x: Tensor, like: Tensor) -> Tensor:
    """x `[rows]` as `[rows, 1, ...]` with the dimensions of `like`."""
    return x.view(-1, *[1] * (like.dim() - 1))
