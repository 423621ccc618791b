"""Operators that move rows by index arithmetic: padding, arithmetic with a dense tensor,
concatenation, splitting, selection.

They do not loop over segments and do not synchronise with a device. They have gradients of any
order. For arithmetic of two jagged tensors with the same segments, use torch on their values.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..containers.offsets import concatenated_rows, rows_and_segments, segments_and_positions
from ..containers.padding import KEPT, SIDES, never_empty, padded
from ..dtypes import in_one_dtype
from ..scalars import check_choice, check_equal, check_kind, check_shape, check_size
from ..segments import (
    check_device,
    check_index_values,
    check_integers,
    check_offsets,
    checked_offsets,
    may_have_tail,
    values_are_checkable,
)
from ..tracing import is_symbolic
from ..validation import check_dense, check_dtype, check_tensor, runs_transforms
from .tail import copies_by_kernels, leaving, without_tail

_FBGEMM_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)


def jagged_to_padded(
    values: Tensor,
    offsets: Tensor,
    max_seqlen: int,
    padding_value: float = 0,  # an int, because torch.compile makes a symbol of a float default
    *,
    side: str = "right",
    truncate: str | None = None,
) -> Tensor:
    """Pad each segment with padding_value to max_seqlen rows.

    One kernel on CUDA, forward and backward. Elsewhere, FBGEMM's operator if fbgemm_gpu has been
    imported (TorchRec does this) and values are `[L, D]` and need no gradient: FBGEMM's second
    derivatives are wrong without a warning, it has no fp64, and it rounds padding values to fp64,
    also for integers. Otherwise, and for complex values, torch. The results are equal.

    Args:
        values: `[L, ...]`, any dtype of the dtype table.
        offsets: `[B + 1]` int32 or int64, on the values' device or the host.
        max_seqlen: rows N of each padded segment. Host offsets are checked against it unless
            longer segments are to be truncated. With device offsets, a longer segment keeps its
            first N rows.
        padding_value: the value of the rows that belong to no segment.
        side: where these rows are: "right", behind the segment's, or "left", before them.
        truncate: which N rows a longer segment keeps: "newest", its last, or "oldest", its first.

    Returns:
        `[B, N, ...]`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: values have no row dimension; offsets do not end at L, are on another device, or
            have a segment longer than max_seqlen.
    """
    check_rows("jagged_to_padded", "values", values)
    check_size("max_seqlen", max_seqlen, at_least=0)
    check_fill("padding_value", padding_value, "values", values)
    check_choice("side", side, SIDES)
    if truncate is not None:
        check_choice("truncate", truncate, KEPT)
    longest = max_seqlen if truncate is None else None
    offsets = checked_offsets("offsets", offsets, values.shape[0], values, "the values'", longest)
    if copies_by_kernels(values) and not is_symbolic(padding_value):
        from jagged_kernels.rows.padding import triton_jagged_to_padded

        options = padding_value, side == "left", truncate == "newest"
        return triton_jagged_to_padded(values, None, offsets, max_seqlen, *options)
    is_usual = side == "right" and truncate != "newest"
    fbgemm = sys.modules.get("fbgemm_gpu")
    if is_usual and fbgemm is not None and _fbgemm_is_right(values, padding_value):
        return torch.ops.fbgemm.jagged_to_padded_dense(
            values, [offsets], [max_seqlen], padding_value
        )
    return padded(values, offsets, max_seqlen, padding_value, side, truncate)


def padded_to_jagged(dense: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
    """Remove the padding: concatenate the first rows of each padded segment, as many as the segment
    has.

    One kernel on CUDA, forward and backward. Elsewhere, and for complex rows, torch's gather: the
    backward of FBGEMM's dense_to_jagged takes several times as long on the CPU.

    Args:
        dense: `[B, N, ...]`, any dtype of the dtype table.
        offsets: `[B + 1]` int32 or int64, on dense's device or the host.
        total: the number of rows L = offsets[-1]. Required if the offsets are on a device, and
            under torch.compile.

    Returns:
        `[L, ...]`. Rows past N, and rows behind the last segment, are 0. Only offsets on a device
        can have them; host offsets raise an error.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes or offsets do not match, a segment is longer than N, or total is required
            and None.
    """
    check_rows("padded_to_jagged", "dense", dense, "[B, N, ...]", 2)
    if total is None:
        check_offsets("offsets", offsets)
        if not values_are_checkable(offsets):
            raise ValueError(
                "total must be the number of rows if offsets are on a device or in a traced graph,"
                " got None"
            )
        total = int(offsets[-1])
    check_size("total", total, at_least=0)
    given, offsets = offsets, _offsets_of_padded("dense", dense, offsets, total)
    if copies_by_kernels(dense):
        from jagged_kernels.rows.padding import triton_padded_to_jagged

        return triton_padded_to_jagged(dense, offsets, total)
    return _rows_of_padded(dense, offsets, total, values_are_checkable(given))


def jagged_dense_add(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Add y[b, i] to row i of each segment b of x. Rows of y past a segment's end are not read.

    One kernel on CUDA, and one for each gradient.

    Args:
        x: `[L, D]` fp64, fp32, fp16 or bf16.
        y: `[B, N, D]`, same dtype, except under autocast.
        offsets: `[B + 1]` int32 or int64, the segments of x, on x's device or the host.

    Returns:
        `[L, D]`. If a segment has more than N rows, y counts as 0 there. Rows behind the last
        segment are 0. Host offsets raise an error instead.

    Raises:
        TypeError, ValueError: as `padded_to_jagged`; also if dtypes, widths or devices differ.
    """
    return _jagged_dense("jagged_dense_add", x, y, offsets)


def jagged_dense_mul(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Multiply row i of each segment b of x by y[b, i]. Rows of y past a segment's end are not
    read.

    One kernel on CUDA, and one for each gradient.

    Args:
        x, y, offsets: as in `jagged_dense_add`.

    Returns:
        `[L, D]`, as of `jagged_dense_add`: with 0 for y where a segment has more than N rows.

    Raises:
        TypeError, ValueError: as `jagged_dense_add`.
    """
    return _jagged_dense("jagged_dense_mul", x, y, offsets)


def jagged_concat(values: Sequence[Tensor], offsets: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Concatenate jagged tensors along their rows: segment b of the result is segment b of
    values[0], then of values[1], and so on.

    Args:
        values: one or more tensors `[L_k, ...]` with the same dtype, except under autocast, and
            row shape.
        offsets: the offsets `[B + 1]` int32 or int64 of each of the values, on their device or the
            host.

    Returns:
        `[Σ L_k, ...]` and offsets `[B + 1]`. If values have rows behind their last segment, which
        only offsets on a device can have, the result has as many, all 0.

    Raises:
        TypeError, ValueError: there are no values, or not one offsets tensor for each; sizes,
            dtypes, devices or offsets do not match.

    Example::

        history, history_offsets = torch.randn(5, 8), torch.tensor([0, 2, 5])
        targets, target_offsets = torch.randn(3, 8), torch.tensor([0, 1, 3])
        values, offsets = F.jagged_concat([history, targets], [history_offsets, target_offsets])
        print(offsets)  # 0, 3, 8
    """
    for name, given in (("values", values), ("offsets", offsets)):
        check_kind(name, given, (list, tuple), "a sequence of tensors")
    values, offsets = list(values), list(offsets)
    if not values or len(values) != len(offsets):
        raise ValueError(
            f"values and offsets must have equal lengths, at least 1, got {len(values)} and"
            f" {len(offsets)}"
        )
    for k, x in enumerate(values):
        check_rows("jagged_concat", f"values[{k}]", x)
    values = in_one_dtype(*values)
    for k, (x, bounds) in enumerate(zip(values, offsets)):
        _check_alike(f"values[{k}]", x, "values[0]", values[0])
        offsets[k] = checked_offsets(f"offsets[{k}]", bounds, x.shape[0], x, f"values[{k}]'s")
        if may_have_tail(f"offsets[{k}]", bounds, x.shape[0], x.device):
            values[k] = without_tail(x, offsets[k])
        shapes = list(offsets[0].shape), list(bounds.shape)
        check_equal(f"offsets[{k}]", "have offsets[0]'s shape", *shapes)
    joined = torch.cat(values)
    rows = concatenated_rows(offsets, [x.shape[0] for x in values])
    return torch.zeros_like(joined).index_copy(0, rows, joined), sum(offsets[1:], offsets[0])


def jagged_split(
    x: Tensor, offsets: Tensor, first_lengths: Tensor | int, total_first: int | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Split each segment into its first rows and the rest. `jagged_concat` is the inverse.

    Args:
        x: `[L, ...]`, any dtype of the dtype table.
        offsets: `[B + 1]` int32 or int64, on x's device or the host.
        first_lengths: number of rows in the first part of each segment: `[B]` int32 or int64 on x's
            device or the host, or an int for all segments.
        total_first: Σ first_lengths. Required if first_lengths is a tensor on a device, or a tensor
            under torch.compile.

    Returns:
        A pair (values `[Σ first_lengths, ...]`, offsets `[B + 1]`) for the first rows, and such a
        pair for the rest. Rows behind a part's last segment, which only offsets on a device can
        have, are 0.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: first_lengths are negative or above a segment's length; shapes, offsets or
            devices do not match; total_first is required and None.
    """
    check_rows("jagged_split", "x", x)
    given, offsets = offsets, checked_offsets("offsets", offsets, x.shape[0], x, "x's")
    segments = offsets.shape[0] - 1
    if not isinstance(first_lengths, Tensor):
        check_size("first_lengths", first_lengths, at_least=0)
        expected = segments * first_lengths
        if total_first is not None:
            check_size("total_first", total_first, at_least=0)
            check_equal("total_first", "be the sum of first_lengths", expected, total_first)
        total_first = expected
        first_lengths = torch.full(
            (segments,), first_lengths, dtype=given.dtype, device=given.device
        )
    check_integers("first_lengths", first_lengths)
    check_shape("first_lengths", first_lengths, "[B]", segments)
    check_device("first_lengths", first_lengths, x.device, "x's")
    total_first = _checked_total(first_lengths, given, total_first)
    if total_first > x.shape[0]:
        raise ValueError(f"total_first must be at most x's rows, {x.shape[0]}, got {total_first}")
    given_lengths = first_lengths
    first_lengths = first_lengths.to(x.device, offsets.dtype, non_blocking=True)
    # padded first: torch.compile takes the sums of equal lengths for int64, whatever `dtype` says
    first = pad(first_lengths, (1, 0)).cumsum(0, dtype=offsets.dtype)
    rest = offsets - first
    has_tail = may_have_tail("offsets", given, x.shape[0], x.device) or not values_are_checkable(
        given_lengths
    )
    rows, segment = rows_and_segments(first, total_first)
    head = rows_or_zeros(x, rows + rest[segment], segment >= segments if has_tail else None)
    rows, segment = rows_and_segments(rest, x.shape[0] - total_first)
    index = rows + first[(segment + 1).clamp(max=segments) if has_tail else segment + 1]
    return (head, first), (rows_or_zeros(x, index, segment >= segments if has_tail else None), rest)


def jagged_select(
    x: Tensor, offsets: Tensor, index: Tensor, total: int | None = None
) -> tuple[Tensor, Tensor]:
    """The segments `index[0]`, `index[1]`, ... of x, one after another, each as often as it occurs.

    Reads a user's rows once per candidate, for models in which each candidate has a sequence of its
    own. Layers that take candidates do not need it: they read a user's rows in place.

    Args:
        x: `[L, ...]`, any dtype of the dtype table.
        offsets: `[B + 1]` int32 or int64, on x's device or the host.
        index: `[C]` int32 or int64, segments of x, on x's device or the host.
        total: the number of rows of the result, at least the sum of the segments' lengths, which is
            the default. Required if only a device knows that, and under torch.compile.

    Returns:
        Values `[total, ...]` and offsets `[C + 1]` on x's device. Rows behind the last segment are
        0.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, offsets or devices do not match; host indices are outside of [0, B);
            total is required and None, or below the sum.

    Example::

        x, offsets = torch.arange(5.0), torch.tensor([0, 2, 5])
        print(F.jagged_select(x, offsets, torch.tensor([1, 0, 1])))  # 2 3 4, 0 1, 2 3 4
    """
    check_rows("jagged_select", "x", x)
    given, offsets = offsets, checked_offsets("offsets", offsets, x.shape[0], x, "x's")
    segments = offsets.shape[0] - 1
    check_integers("index", index)
    check_device("index", index, x.device, "x's")
    check_index_values("index", index, segments, "B - 1 = {}")
    known = values_are_checkable(given) and values_are_checkable(index)
    if total is not None:
        check_size("total", total, at_least=0)
    if known:
        least = int(given.diff().cpu()[index.cpu().long()].sum())
        total = least if total is None else total
        if total < least:
            raise ValueError(f"total must be at least the sum of lengths, {least}, got {total}")
        known = total == least
    elif total is None:
        raise ValueError(
            "total must be the number of rows of the result if the offsets or the index are on a"
            " device or in a traced graph, got None"
        )
    index = index.to(x.device, torch.int64, non_blocking=True)
    ends = pad(offsets.diff()[index].cumsum(0, dtype=offsets.dtype), (1, 0))
    place, position = segments_and_positions(ends, total)
    begins = pad(offsets[index], (0, 1))  # the last one is that of rows behind the last segment
    absent = None if known else place >= index.shape[0]
    is_summed = torch.is_grad_enabled() and x.requires_grad and x.element_size() == 2
    wide = x.float() if is_summed else x  # sums of 16-bit gradients are in fp32
    return rows_or_zeros(wide, begins[place] + position, absent).to(x.dtype), ends


def _fbgemm_is_right(values: Tensor, padding_value: float) -> bool:
    if (torch.is_grad_enabled() and values.requires_grad) or runs_transforms():
        return False
    # as fp64, in every integer dtype
    exact = values.is_floating_point() or abs(padding_value) < 2**31
    return values.dim() == 2 and values.dtype in _FBGEMM_DTYPES and exact


def _checked_total(first_lengths: Tensor, offsets: Tensor, total: int | None) -> int:
    """The sum of first_lengths: `total` if given, otherwise computed from values on the host. Never
    synchronises with a device."""
    if total is not None:
        check_size("total_first", total, at_least=0)
    if not values_are_checkable(first_lengths):
        if total is None:
            raise ValueError(
                "total_first must be the sum of first_lengths if they are on a device or in a"
                " traced graph, got None"
            )
        return total
    if values_are_checkable(offsets):
        lengths = offsets.diff().to(first_lengths.device)
        wrong = (first_lengths < 0) | (first_lengths > lengths)
        if wrong.any():
            b = int(wrong.int().argmax())
            found = f"{int(first_lengths[b])} of {int(lengths[b])} at segment {b}"
            raise ValueError(f"first_lengths must be 0 to the segment's length, got {found}")
    first = int(first_lengths.sum())
    if total is not None:
        check_equal("total_first", "be the sum of first_lengths", first, total)
    return first


def rows_or_zeros(x: Tensor, index: Tensor, absent: Tensor | None) -> Tensor:
    """x[index], with 0 where the index is absent and not used."""
    if absent is None:
        return x.index_select(0, index)
    return (
        never_empty(x)
        .index_select(0, torch.where(absent, 0, index))
        .masked_fill(absent.view(-1, *[1] * (x.dim() - 1)), 0)
    )


def _offsets_of_padded(name: str, dense: Tensor, offsets: Tensor, total: int) -> Tensor:
    """`checked_offsets` of the segments of dense `[B, N, ...]`."""
    segments, width = dense.shape[:2]
    offsets = checked_offsets("offsets", offsets, total, dense, f"{name}'s", width, f"{name}'s N")
    if offsets.shape[0] - 1 != segments:
        raise ValueError(
            f"{name} must have one block for each of the {offsets.shape[0] - 1} segments, got"
            f" {list(dense.shape)}"
        )
    return offsets


def _rows_of_padded(dense: Tensor, offsets: Tensor, total: int, are_all: bool) -> Tensor:
    """`padded_to_jagged` by torch. are_all: each row has a place in dense."""
    segments, width = dense.shape[:2]
    segment, position = segments_and_positions(offsets, total)
    absent = None if are_all else (position >= width) | (segment >= segments)
    return rows_or_zeros(dense.flatten(0, 1), segment * width + position, absent)


def _jagged_dense(function: str, x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Arithmetic of each row of x `[L, D]` with the row of y that has its segment and position."""
    check_tensor("x", x, 2, "[L, D]", function)
    check_tensor("y", y, 3, "[B, N, D]", function)
    x, y = in_one_dtype(x, y)
    _check_alike("y", y.flatten(0, 1), "x", x)
    given, offsets = offsets, _offsets_of_padded("y", y, offsets, x.shape[0])
    multiplies = function == "jagged_dense_mul"
    has_tail = may_have_tail("offsets", given, x.shape[0], x.device)
    if copies_by_kernels(x):
        from jagged_kernels.rows.padding import triton_jagged_dense

        return triton_jagged_dense(x, y, offsets, multiplies, has_tail)
    rows = _rows_of_padded(y, offsets, x.shape[0], values_are_checkable(given))
    out = x * rows if multiplies else x + rows
    return leaving(out, offsets if has_tail else None)


def check_rows(
    function: str,
    name: str,
    x: Tensor,
    shape: str = "[L, ...]",
    dim: int = 1,
    implementation: str = "auto",
) -> None:
    check_kind(name, x, Tensor, "a torch.Tensor")
    check_dtype(name, x, function, implementation)
    check_dense(name, x)
    if x.dim() < dim:
        raise ValueError(f"{name} must have shape {shape}, got {list(x.shape)}")


def check_fill(name: str, value: object, of: str, x: Tensor) -> None:
    """Raise unless the value is a number that x, which errors call `of`, can hold."""
    check_kind(name, value, (int, float, complex, torch.SymInt, torch.SymFloat), "a number")
    if isinstance(value, complex) and not x.is_complex():
        raise ValueError(f"{name} must be a real number for {of} of {x.dtype}, got {value}")
    holds_fractions = x.is_floating_point() or x.is_complex()
    if isinstance(value, float) and not holds_fractions and value % 1:
        raise ValueError(f"{name} must be an integer for {of} of {x.dtype}, got {value}")
    if x.dtype == torch.bool or not isinstance(value, (int, float)) or is_symbolic(value):
        return
    if isinstance(value, float) and not math.isfinite(value):
        return  # all dtypes with fractions hold it
    limits = torch.finfo(x.dtype) if holds_fractions else torch.iinfo(x.dtype)
    if not limits.min <= value <= limits.max:
        raise ValueError(
            f"{name} must be {limits.min} to {limits.max} for {of} of {x.dtype}, got {value}"
        )


def _check_alike(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """ValueError unless both have the same dtype, device and row shape."""
    kinds = {
        "dtype": (x.dtype, other.dtype),
        "device": (x.device, other.device),
        "row shape": (list(x.shape[1:]), list(other.shape[1:])),
    }
    for what, (own, expected) in kinds.items():
        check_equal(name, f"have {other_name}'s {what}", expected, own)
