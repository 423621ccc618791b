"""Packed tiles: the short segments of a batch, several whole ones to a tile. They are found on the device, without a sync."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.device import cdiv
from ..common.loads import segment_lengths
from ..common.ptxas import safe_ptxas
from .cost import SHORT

ROWS = tl.constexpr(SHORT)  # of a packed tile
CHUNK = 32  # segments that one program packs: few enough that it is done in microseconds


class PackedTiles(NamedTuple):
    """Packed tiles as kernels take them.

    Attributes:
        tiles: int32 `[capacity, 2, 64]`: of each row of a tile its row in the operands, and its segment; -1 where a tile has no row.
        num_tiles: int32 `[1]`, how many tiles there are. The others are not written.
    """

    tiles: Tensor
    num_tiles: Tensor


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments"])
def _pack_kernel(offsets_ptr, tiles_ptr, num_tiles_ptr, num_segments, CHUNK: tl.constexpr):
    """Each program packs the short segments of CHUNK segments, in their order. A tile ends where the next segment has no room.

    Programs take places in `tiles` in any order. A tile's contents and its results do not depend on its place.
    """
    segments = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    real = segments < num_segments
    start = tl.load(offsets_ptr + segments, mask=real, other=0).to(tl.int32)
    length = segment_lengths(offsets_ptr, segments, real)
    length = tl.where(length <= ROWS, length, 0).to(tl.int32)
    # Positions count the rows of this chunk's short segments: a segment has [end - length, end), a tile [tile_start, tile_end).
    end = tl.cumsum(length, 0)
    first, total = end - length, tl.sum(length, 0)
    tile, tile_start, tile_end = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    num_tiles, position = 0, 0
    while position < total:
        next_position = tl.max(tl.where(end <= position + ROWS, end, 0), 0)
        inside = (first >= position) & (first < next_position)
        tile = tl.where(inside, num_tiles, tile)
        tile_start = tl.where(inside, position, tile_start)
        tile_end = tl.where(inside, next_position, tile_end)
        position = next_position
        num_tiles += 1

    tile += tl.atomic_add(num_tiles_ptr, num_tiles, sem="relaxed")
    rows = tl.arange(0, ROWS)[None, :]
    is_row = rows < length[:, None]
    place = (first - tile_start)[:, None] + rows
    is_rest = (end == tile_end)[:, None] & (place < ROWS)  # after the tile's last segment
    mask = (length > 0)[:, None] & (is_row | is_rest)
    ptrs = tiles_ptr + tile[:, None] * (2 * ROWS) + place
    tl.store(ptrs, tl.where(is_row, start[:, None] + rows, -1), mask=mask)
    tl.store(ptrs + ROWS, tl.where(is_row, segments[:, None], -1), mask=mask)


def pack_short_segments(offsets: Tensor, total_rows: int) -> PackedTiles:
    """Launch _pack_kernel.

    Args:
        offsets: `[B + 1]`, of segments with `total_rows` rows together, below 2^31.
    """
    num_segments = offsets.shape[0] - 1
    num_chunks = cdiv(num_segments, CHUNK)
    # Two successive tiles of a chunk have more than SHORT rows together.
    capacity = min(num_segments, 2 * total_rows // (SHORT + 1) + num_chunks)
    packed = PackedTiles(
        tiles=offsets.new_empty((capacity, 2, SHORT), dtype=torch.int32), num_tiles=offsets.new_zeros((1,), dtype=torch.int32)
    )  # fmt: skip
    _pack_kernel[(num_chunks,)](offsets, *packed, num_segments, CHUNK=CHUNK, num_warps=1)
    return packed
