"""Rows between jagged and padded form: where each row goes, without a loop or a sync."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..scalars import check_choice, check_kind, to_ints
from ..segments import check_device, check_integers, values_are_checkable
from ..tracing import may_hold
from ..validation import check_dense
from .offsets import segments_and_positions

SIDES = ("right", "left")
KEPT = ("newest", "oldest")


def padded_to(x: Tensor, rows: int) -> Tensor:
    """x `[n, ...]` with rows of 0 behind its own."""
    return x if x.shape[0] == rows else pad(x, (0, 0) * (x.dim() - 1) + (0, rows - x.shape[0]))


def never_empty(x: Tensor) -> Tensor:
    """x `[n, ...]`, with a row of 0 behind its own where n may be 0: a row to gather from."""
    return pad(x, (0, 0) * (x.dim() - 1) + (0, 1)) if may_hold(x.shape[0] == 0) else x


def padded(
    values: Tensor,
    offsets: Tensor,
    max_seqlen: int,
    padding_value: float,
    side: str = "right",
    truncate: str | None = None,
) -> Tensor:
    """values `[L, ...]` as `[B, N, ...]`, N = max_seqlen. Arguments are checked. side: of the
    padding. truncate: the rows that a segment longer than N keeps, its first ones if None."""
    segments = offsets.shape[0] - 1
    segment, place = segments_and_positions(offsets, values.shape[0])
    if truncate == "newest" or side == "left":
        lengths = pad(offsets.diff(), (0, 1))[segment]  # 0 behind the last segment
        if truncate == "newest":
            place = place - (lengths - max_seqlen).clamp(min=0)
        if side == "left":
            place = place + (max_seqlen - lengths).clamp(min=0)
    # Truncated rows, and those behind the last segment, go to an extra last row, removed below.
    has_place = (place >= 0) & (place < max_seqlen) & (segment < segments)
    index = torch.where(has_place, segment * max_seqlen + place, segments * max_seqlen)
    out = values.new_full((segments * max_seqlen + 1, *values.shape[1:]), padding_value)
    return torch.unflatten(out.index_copy(0, index, values)[:-1], 0, (segments, max_seqlen))


def real_rows(
    x: Tensor, lengths: Tensor | None, mask: Tensor | None, side: str
) -> tuple[Tensor, Tensor, int, Tensor | None]:
    """The parts of `Jagged.from_padded`: values, offsets, max_seqlen and host_lengths."""
    check_dense("x", x)
    check_choice("side", side, SIDES)
    if x.dim() < 2:
        raise ValueError(f"x must have shape [B, N, ...], got {list(x.shape)}")
    if (lengths is None) == (mask is None):
        found = "neither" if mask is None else "both"
        raise ValueError(f"one of lengths and mask must be given, got {found}")
    segments, width = x.shape[:2]
    if lengths is not None:
        lengths = _checked("lengths", lengths, (segments,), "[B]", x)
        check_integers("lengths", lengths)
        if values_are_checkable(lengths) and bool(((lengths < 0) | (lengths > width)).any()):
            raise ValueError(f"lengths must be 0 to x's N, {width}, got {to_ints(lengths)}")
        mask = real_places(lengths, width, side)
    else:
        mask = _checked("mask", mask, (segments, width), "[B, N]", x)
        if mask.dtype != torch.bool:
            raise ValueError(f"mask must be bool, True for real rows, got {mask.dtype}")
        lengths = mask.sum(1)
    host_lengths = lengths.long() if values_are_checkable(lengths) else None
    total = segments * width if host_lengths is None else int(host_lengths.sum())
    rows = x.flatten(0, 1)
    if host_lengths is None:  # rows behind the last segment are this row of 0
        rows = torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])
    values = rows.index_select(0, indices_of_true(mask.to(x.device, non_blocking=True), total))
    offsets = pad(lengths.to(x.device, non_blocking=True).cumsum(0), (1, 0))
    longest = width if host_lengths is None else max(to_ints(host_lengths), default=0)
    return values, offsets, longest, host_lengths


def real_places(lengths: Tensor, width: int, side: str) -> Tensor:
    """bool `[B, N]`: which rows of the padded form are real."""
    positions = torch.arange(width, device=lengths.device)
    return (positions if side == "right" else positions.flip(0)) < lengths[:, None]


def _checked(name: str, x: Any, shape: tuple[int, ...], letters: str, of: Tensor) -> Tensor:
    check_kind(name, x, Tensor, "a torch.Tensor")
    if x.shape != shape:
        hint = "; a mask is given as mask=" if x.shape == of.shape[:2] else ""
        raise ValueError(
            f"{name} must have shape {letters} = {list(shape)}, got {list(x.shape)}{hint}"
        )
    check_device(name, x, of.device, "x's")
    return x


def indices_of_true(mask: Tensor, total: int) -> Tensor:
    """int64 `[total]`: the indices of the first `total` True elements of mask `[B, N]`, flat.
    Behind the last of them: mask.numel()."""
    mask, count = mask.flatten(), mask.numel()
    places = torch.where(mask, mask.cumsum(0) - 1, total)
    index = places.new_full((total + 1,), count)
    # elements that are False all go to the last place, which is removed
    return index.scatter(0, places, torch.arange(count, device=mask.device))[:-1]
