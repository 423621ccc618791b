"""Arithmetic on offsets: blocks of rows, rows to segments, positions in segments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def first_blocks(offsets: Tensor, block_size: int) -> Tensor:
    """`[B + 1]`: the segment of `block_offsets` with which each segment begins."""
    # torch.export.draft_export of 2.13 fails at // of tensors
    return torch.div(offsets, block_size, rounding_mode="trunc") + torch.arange(
        offsets.shape[0], dtype=offsets.dtype, device=offsets.device
    )


def block_offsets(offsets: Tensor, block_size: int, total: int) -> Tensor:
    """Offsets `[total // block_size + B + 1]` that cut each segment into blocks of block_size rows,
    counted from the segment's start. Each block becomes a segment. Some new segments are empty:
    their number follows from total and B, so no length is read. The blocks of segment b begin at
    new segment offsets[b] // block_size + b."""
    firsts = first_blocks(offsets, block_size)
    blocks = torch.arange(
        total // block_size + offsets.shape[0], dtype=offsets.dtype, device=offsets.device
    )
    segments = torch.searchsorted(firsts, blocks, right=True) - 1
    ends = offsets[(segments + 1).clamp(max=offsets.shape[0] - 1)]
    return torch.minimum(offsets[segments] + (blocks - firsts[segments]) * block_size, ends)


def rows_and_segments(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """`[total]` row indices, and the segment of each row."""
    rows = torch.arange(total, dtype=offsets.dtype, device=offsets.device)
    if torch.compiler.is_compiling():  # Inductor searches a slice from its tensor's start on
        offsets = pad(offsets, (0, 1), value=torch.iinfo(torch.int32).max)
    return rows, torch.searchsorted(offsets, rows, right=True) - 1


def segments_and_positions(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """`[total]` segment of each row, and the row's index within its segment."""
    rows, segments = rows_and_segments(offsets, total)
    return segments, rows - offsets[segments]


def positions_in_segments(offsets: Tensor, total: int) -> Tensor:
    """`[total]` index of each row within its segment."""
    return segments_and_positions(offsets, total)[1]


def rows_of_ranges(begins: Tensor, lengths: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows begins[b] to begins[b] + lengths[b] of each b, one range after another, and the offsets
    `[B + 1]` of the ranges. begins, lengths: int64 `[B]` on the host. device: of the results."""
    offsets = pad(lengths.cumsum(0), (1, 0))
    total = int(offsets[-1])
    begins, offsets = (x.to(device, non_blocking=True) for x in (begins, offsets))
    segments, positions = segments_and_positions(offsets, total)
    return begins[segments] + positions, offsets


def concatenated_rows(offsets: Sequence[Tensor], totals: Sequence[int]) -> Tensor:
    """int64 `[Σ totals]`: for each row of jagged tensors with these offsets, one tensor after
    another, its row in their concatenation segment by segment. Rows behind the last segment get
    rows behind the last one there, not all different."""
    indices: list[Tensor] = []
    for k, total in enumerate(totals):
        rows, segment = rows_and_segments(offsets[k], total)
        for other, bounds in enumerate(offsets):
            # its rows before this one: those of earlier segments, and those of this segment if it
            # comes before k
            if other != k:
                rows = rows + bounds[(segment + int(other < k)).clamp(max=bounds.shape[0] - 1)]
        indices.append(rows)
    return torch.cat(indices).long()


def matrix_offsets(offsets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Offsets `[B + 1]` of B matrices of `width` rows each, and of B matrices of jagged rows by
    `width` columns in a flat buffer."""
    return torch.arange(offsets.shape[0], device=offsets.device) * width, offsets.long() * width
