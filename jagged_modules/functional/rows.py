"""Rows of jagged tensors by index arithmetic: padded and back, with a dense tensor, joined and split. Public through `functional`.

Nothing loops over segments or waits for a device; gradients of any order. Arithmetic of two jagged tensors of the same segments
is torch's own on their values.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ..containers.offsets import rows_and_segments
from ..scalars import check_kind, check_size
from ..validation import (
    check_dense,
    check_device,
    check_dtype,
    check_integers,
    check_offsets,
    check_tensor,
    checked_offsets,
    transforms_are_active,
    values_are_checkable,
)

_FBGEMM_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)


def jagged_to_padded(
    values: Tensor,
    offsets: Tensor,
    max_seqlen: int,
    padding_value: float = 0,  # an int: torch.compile makes a symbol of a float default
) -> Tensor:
    """Each segment as the first rows of a dense block, padding_value after them.

    FBGEMM's operator where fbgemm_gpu has been imported (TorchRec does), for `[L, D]` values that need no gradient: its second
    derivatives are wrong without a warning, and it has no fp64. Torch otherwise; the results are equal.

    Args:
        values: `[L, ...]` of any dtype.
        offsets: `[B + 1]` int32 or int64, on the values' device or the host.
        max_seqlen: rows N of each block. Host offsets are checked against it; of longer segments on a device N rows are taken.

    Returns:
        `[B, N, ...]`.

    Raises:
        TypeError: an argument of the wrong kind. ValueError: values without rows, or offsets that are none of L rows, are on another
        device, or have a segment longer than max_seqlen.
    """
    _check_rows("jagged_to_padded", "values", values)
    check_size("max_seqlen", max_seqlen, at_least=0)
    check_kind("padding_value", padding_value, (int, float, complex, torch.SymInt, torch.SymFloat), "a number")
    offsets = checked_offsets("offsets", offsets, values.shape[0], values, "the values'", max_seqlen)
    if sys.modules.get("fbgemm_gpu") is not None and _fbgemm_is_right(values):
        return torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [max_seqlen], padding_value)
    segments = offsets.shape[0] - 1
    segment, position = _positions(offsets, values.shape[0])
    places = segment * max_seqlen + position
    places = torch.where(position < max_seqlen, places, segments * max_seqlen)  # a last row, cut off, for what is too long
    padded = values.new_full((segments * max_seqlen + 1, *values.shape[1:]), padding_value)
    return torch.unflatten(padded.index_copy(0, places, values)[:-1], 0, (segments, max_seqlen))


def padded_to_jagged(dense: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
    """The first rows of each block, as many as its segment has, one after the other.

    Torch's gather: the backward of FBGEMM's dense_to_jagged takes several times as long on the CPU.

    Args:
        dense: `[B, N, ...]` of any dtype.
        offsets: `[B + 1]` int32 or int64, on dense's device or the host.
        total: the number of rows L, offsets[-1]. Needed where only a device knows it, and under torch.compile.

    Returns:
        `[L, ...]`. Rows past N, which only offsets on a device can ask for unnoticed, are 0.

    Raises:
        TypeError: an argument of the wrong kind. ValueError: shapes or offsets that do not fit, a segment longer than N, or no total
        where it is needed.
    """
    return _padded_to_jagged("dense", dense, offsets, "total", total)


def _padded_to_jagged(name: str, dense: Tensor, offsets: Tensor, total_name: str, total: int | None) -> Tensor:
    _check_rows("padded_to_jagged", name, dense, "[B, N, ...]", 2)
    if total is None:
        check_offsets("offsets", offsets)
        if not values_are_checkable(offsets):
            raise ValueError("total must be the number of rows where offsets are on a device or in a traced graph, got None")
        total = int(offsets[-1])
    check_size("total", total, at_least=0)
    segments, width = dense.shape[:2]
    given, offsets = offsets, checked_offsets("offsets", offsets, total, dense, f"{name}'s", width, f"{name}'s N")
    if offsets.shape[0] - 1 != segments:
        raise ValueError(f"{name} must have one block for each of the {offsets.shape[0] - 1} segments, got {list(dense.shape)}")
    if total > segments * width:
        raise ValueError(f"{total_name} must be at most the rows of {name}, {segments * width}, got {total}")
    segment, position = _positions(offsets, total)
    taken = dense.flatten(0, 1).index_select(0, segment * width + position.clamp(max=width - 1))
    if values_are_checkable(given):  # no segment is too long
        return taken
    return taken.masked_fill((position >= width).view(-1, *[1] * (dense.dim() - 2)), 0)


def jagged_dense_add(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Row i of segment b plus y[b, i]. The rest of y is not read.

    Args:
        x: `[L, D]`, y: `[B, N, D]`, of the same floating dtype. offsets: `[B + 1]` of x, on its device or the host.

    Returns:
        `[L, D]`. Beyond y's N rows y counts as 0; host offsets that go there are an error.

    Raises:
        TypeError, ValueError: as `padded_to_jagged`; also dtypes, widths or devices that differ.
    """
    return x + _dense_rows("jagged_dense_add", x, y, offsets)


def jagged_dense_mul(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Row i of segment b times y[b, i]; all else as in `jagged_dense_add`."""
    return x * _dense_rows("jagged_dense_mul", x, y, offsets)


def jagged_concat(values: Sequence[Tensor], offsets: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Joins jagged tensors along their rows: segment b of the result is segment b of the first, of the second and so on.

    Args:
        values: one `[L_k, ...]` or more, of the same dtype and the same sizes after the first. offsets: `[B + 1]` of each.

    Returns:
        `[Σ L_k, ...]` and offsets `[B + 1]`.

    Raises:
        TypeError, ValueError: no tensors, as many offsets as values are wanted, or sizes, dtypes, devices or offsets that do not fit.

    Example::

        values, offsets = F.jagged_concat([history, targets], [history_offsets, target_offsets])
    """
    for name, x in (("values", values), ("offsets", offsets)):
        check_kind(name, x, (list, tuple), "a sequence of tensors")
    values, offsets = list(values), list(offsets)
    if not values or len(values) != len(offsets):
        raise ValueError(f"values and offsets must be as many and at least one, got {len(values)} and {len(offsets)}")
    for k, (x, bounds) in enumerate(zip(values, offsets)):
        _check_rows("jagged_concat", f"values[{k}]", x)
        _check_alike(f"values[{k}]", x, "values[0]", values[0])
        offsets[k] = checked_offsets(f"offsets[{k}]", bounds, x.shape[0], x, f"values[{k}]'s")
        if bounds.shape != offsets[0].shape:
            raise ValueError(f"offsets[{k}] must have offsets[0]'s shape, {list(offsets[0].shape)}, got {list(bounds.shape)}")
    places: list[Tensor] = []
    for k, x in enumerate(values):
        rows, segment = rows_and_segments(offsets[k], x.shape[0])
        for other, bounds in enumerate(offsets):
            if other != k:  # rows of the other tensors that come before: those of this segment too where they are earlier in the list
                rows = rows + bounds[segment + int(other < k)]
        places.append(rows)
    joined = torch.cat(values)
    return torch.zeros_like(joined).index_copy(0, torch.cat(places).long(), joined), sum(offsets[1:], offsets[0])


def jagged_split(
    x: Tensor, offsets: Tensor, first_lengths: Tensor | int, total_first: int | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Splits every segment into its first rows and the rest; `jagged_concat` joins them again.

    Args:
        x: `[L, ...]`, offsets: `[B + 1]` on its device or the host.
        first_lengths: rows that go to the first part: `[B]` int32 or int64 on x's device or the host, or an int for all segments.
        total_first: Σ first_lengths. Needed where only a device knows it, and under torch.compile, unless first_lengths is an int.

    Returns:
        (values `[Σ first_lengths, ...]`, offsets `[B + 1]`) of the first rows, and the same of the rest.

    Raises:
        TypeError: an argument of the wrong kind. ValueError: first_lengths that are negative or more than a segment has, or another
        shape, offsets or device that does not fit, or no total_first where it is needed.
    """
    _check_rows("jagged_split", "x", x)
    given, offsets = offsets, checked_offsets("offsets", offsets, x.shape[0], x, "x's")
    segments = offsets.shape[0] - 1
    if not isinstance(first_lengths, Tensor):
        check_size("first_lengths", first_lengths, at_least=0)
        total_first = segments * first_lengths
        first_lengths = torch.full((segments,), first_lengths, dtype=given.dtype, device=given.device)
    check_integers("first_lengths", first_lengths)
    if first_lengths.shape[0] != segments:
        raise ValueError(f"first_lengths must have shape [B] = [{segments}], got {list(first_lengths.shape)}")
    check_device("first_lengths", first_lengths, x.device, "x's")
    total_first = _checked_total(first_lengths, given, total_first)
    if total_first > x.shape[0]:
        raise ValueError(f"total_first must be at most x's rows, {x.shape[0]}, got {total_first}")
    first_lengths = first_lengths.to(x.device, offsets.dtype, non_blocking=True)
    first = torch.cat([offsets.new_zeros(1), first_lengths.cumsum(0, dtype=offsets.dtype)])
    rest = offsets - first
    rows, segment = rows_and_segments(first, total_first)
    head = x.index_select(0, rows + rest[segment])
    rows, segment = rows_and_segments(rest, x.shape[0] - total_first)
    return (head, first), (x.index_select(0, rows + first[segment + 1]), rest)


def _fbgemm_is_right(values: Tensor) -> bool:
    differentiated = torch.is_grad_enabled() and values.requires_grad or transforms_are_active()
    return values.dim() == 2 and values.dtype in _FBGEMM_DTYPES and not differentiated


def _checked_total(first_lengths: Tensor, offsets: Tensor, total: int | None) -> int:
    """The sum of first_lengths: as given, or read where that waits for no device."""
    if total is not None:
        check_size("total_first", total, at_least=0)
    if not values_are_checkable(first_lengths):
        if total is None:
            raise ValueError("total_first must be the sum of first_lengths where they are on a device or in a traced graph, got None")
        return total
    if values_are_checkable(offsets):
        lengths = offsets.diff().to(first_lengths.device)
        wrong = (first_lengths < 0) | (first_lengths > lengths)
        if wrong.any():
            b = int(wrong.int().argmax())
            found = f"{int(first_lengths[b])} of {int(lengths[b])} at segment {b}"
            raise ValueError(f"first_lengths must be 0 to the segment's length, got {found}")
    if total is not None and int(first_lengths.sum()) != total:
        raise ValueError(f"total_first must be the sum of first_lengths, {int(first_lengths.sum())}, got {total}")
    return int(first_lengths.sum())


def _dense_rows(function: str, x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """y's rows for those of x `[L, D]`."""
    check_tensor("x", x, 2, "[L, D]", function)
    check_tensor("y", y, 3, "[B, N, D]", function)
    _check_alike("y", y.flatten(0, 1), "x", x)
    return _padded_to_jagged("y", y, offsets, "x's rows", x.shape[0])


def _positions(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """`[total]`, each row's segment, and its distance from the segment's start."""
    rows, segments = rows_and_segments(offsets, total)
    return segments, rows - offsets[segments]


def _check_rows(function: str, name: str, x: Tensor, shape: str = "[L, ...]", dim: int = 1) -> None:
    check_kind(name, x, Tensor, "a torch.Tensor")
    check_dtype(name, x, function)
    check_dense(name, x)
    if x.dim() < dim:
        raise ValueError(f"{name} must have shape {shape}, got {list(x.shape)}")


def _check_alike(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """ValueError unless rows of both may stand in one tensor."""
    kinds = {"dtype": (x.dtype, other.dtype), "device": (x.device, other.device), "row shape": (list(x.shape[1:]), list(other.shape[1:]))}
    for what, (own, expected) in kinds.items():
        if own != expected:
            raise ValueError(f"{name} must have {other_name}'s {what}, {expected}, got {own}")
