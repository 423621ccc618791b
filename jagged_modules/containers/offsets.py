"""Arithmetic on offsets: blocks of rows, rows to segments, positions in segments."""

from __future__ import annotations

import torch
from torch import Tensor


def block_offsets(offsets: Tensor, block_size: int, total: int) -> Tensor:
    """Offsets `[total // block_size + B + 1]` that cut each segment into blocks of block_size rows, counted from the segment's start.

    Each block becomes a segment. Some new segments are empty: their number follows from total and B, so no length is read. The blocks of
    segment b begin at new segment offsets[b] // block_size + b.
    """
    firsts = offsets // block_size + torch.arange(offsets.shape[0], dtype=offsets.dtype, device=offsets.device)
    blocks = torch.arange(total // block_size + offsets.shape[0], dtype=offsets.dtype, device=offsets.device)
    segments = torch.searchsorted(firsts, blocks, right=True) - 1
    ends = offsets[(segments + 1).clamp(max=offsets.shape[0] - 1)]
    return torch.minimum(offsets[segments] + (blocks - firsts[segments]) * block_size, ends)


def rows_and_segments(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """`[total]` row indices, and the segment of each row."""
    rows = torch.arange(total, dtype=offsets.dtype, device=offsets.device)
    return rows, torch.searchsorted(offsets, rows, right=True) - 1


def segments_and_positions(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """`[total]` segment of each row, and the row's index within its segment."""
    rows, segments = rows_and_segments(offsets, total)
    return segments, rows - offsets[segments]


def positions_in_segments(offsets: Tensor, total: int) -> Tensor:
    """`[total]` index of each row within its segment."""
    return segments_and_positions(offsets, total)[1]


def matrix_offsets(offsets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Offsets `[B + 1]` of B matrices of `width` rows each, and of B matrices of jagged rows by `width` columns in a flat buffer."""
    return torch.arange(offsets.shape[0], device=offsets.device) * width, offsets.long() * width
