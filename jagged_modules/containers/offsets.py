"""Segments cut into blocks of a fixed number of rows, counted from each segment's start."""

from __future__ import annotations

import torch
from torch import Tensor


def block_offsets(offsets: Tensor, block_size: int, total: int) -> Tensor:
    """Offsets of the blocks as segments of their own, `[total // block_size + B + 1]`: a size that needs no look at the lengths.

    Segment b owns the places from offsets[b] // block_size + b on: at least as many as it has blocks, the others empty.
    """
    firsts = offsets // block_size + torch.arange(offsets.shape[0], dtype=offsets.dtype, device=offsets.device)
    places = torch.arange(total // block_size + offsets.shape[0], dtype=offsets.dtype, device=offsets.device)
    segments = torch.searchsorted(firsts, places, right=True) - 1
    ends = offsets[(segments + 1).clamp(max=offsets.shape[0] - 1)]
    return torch.minimum(offsets[segments] + (places - firsts[segments]) * block_size, ends)


def rows_and_segments(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """`[total]` row numbers, and the segment of each."""
    rows = torch.arange(total, dtype=offsets.dtype, device=offsets.device)
    return rows, torch.searchsorted(offsets, rows, right=True) - 1


def positions_in_segments(offsets: Tensor, total: int) -> Tensor:
    """`[total]`, each row's distance from the start of its segment."""
    rows, segments = rows_and_segments(offsets, total)
    return rows - offsets[segments]


def matrix_offsets(offsets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Offsets of B times `width` rows, and of jagged rows of that width in a flat buffer."""
    return torch.arange(offsets.shape[0], device=offsets.device) * width, offsets.long() * width
