"""Packed tiles: the short segments of a batch, several whole ones to a tile. They are found on the
device, without a sync."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.device import cdiv
from ..common.loads import segment_lengths
from ..common.ptxas import safe_ptxas
from ..schedule.cost import SHORT
from .params import Segments, are_same

ROWS = tl.constexpr(SHORT)  # of a packed tile
CHUNK = 32  # segments that one program packs: few enough that it is done in microseconds
# one number counts both sides: a query is 1, a key is more than all queries of a chunk
ONE_KEY = tl.constexpr(2 * CHUNK * SHORT)


class PackedTiles(NamedTuple):
    """Packed tiles as kernels take them.

    Attributes:
        q_offsets, kv_offsets: `[B + 1]` of the segments. In self-attention kv_offsets is None, and
            queries and keys are one side.
        tiles: int32 `[capacity, sides, 2, 64]`: of each row of a tile its row in the operands, and
            its segment; -1 where a tile has no row.
        num_tiles: int32 `[1]`, how many tiles there are. The others are not written.
    """

    q_offsets: Tensor
    kv_offsets: Tensor | None
    tiles: Tensor
    num_tiles: Tensor


@triton.jit
def _of_queries(rows):
    return rows % ONE_KEY


@triton.jit
def _of_keys(rows):
    return rows // ONE_KEY


@triton.jit
def _write_side(ptrs, offsets_ptr, segments, packed, length, first_row, rows_of_tile):
    """Write one side's rows of each packed segment, from first_row on in its tile. The tile's last
    segments also write that it has no others.

    ptrs: of the segments' tiles. length: rows of each segment on this side. rows_of_tile: of its
    tile.
    """
    rows = tl.arange(0, ROWS)[None, :]
    start = tl.load(offsets_ptr + segments, mask=packed, other=0).to(tl.int32)
    is_row = rows < length[:, None]
    is_last, rows_in_tile = first_row + length == rows_of_tile, first_row[:, None] + rows
    ptrs = ptrs[:, None] + rows_in_tile
    mask = packed[:, None] & (is_row | is_last[:, None] & (rows_in_tile < ROWS))
    tl.store(ptrs, tl.where(is_row, start[:, None] + rows, -1), mask=mask)
    tl.store(ptrs + ROWS, tl.where(is_row, segments[:, None], -1), mask=mask)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments"])
def _pack_kernel(
    q_offsets_ptr, kv_offsets_ptr, tiles_ptr, num_tiles_ptr, num_segments, CHUNK: tl.constexpr
):
    """Each program packs the short segments of CHUNK segments, in their order. A tile ends where
    the next segment has no room on one of the sides. kv_offsets_ptr: None in self-attention.

    Programs reserve entries of `tiles` in any order. A tile's contents and its results do not
    depend on its entry.
    """
    segments = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    real = segments < num_segments
    length = segment_lengths(q_offsets_ptr, segments, real)
    short = length <= ROWS
    if kv_offsets_ptr is not None:
        keys = segment_lengths(kv_offsets_ptr, segments, real)
        short, length = short & (keys <= ROWS), length + keys * ONE_KEY
    length = tl.where(short, length, 0).to(tl.int32)
    # Positions count the rows of this chunk's short segments: a segment has [end - length, end), a
    # tile [tile_start, tile_end).
    end = tl.cumsum(length, 0)
    first, total = end - length, tl.sum(length, 0)
    tile = tl.zeros([CHUNK], tl.int32)
    tile_start = tl.zeros([CHUNK], tl.int32)
    tile_end = tl.zeros([CHUNK], tl.int32)
    num_tiles, position = 0, 0
    while position < total:
        rows = end - position
        next_position = tl.max(
            tl.where((_of_queries(rows) <= ROWS) & (_of_keys(rows) <= ROWS), end, 0), 0
        )
        inside = (first >= position) & (first < next_position)
        tile = tl.where(inside, num_tiles, tile)
        tile_start = tl.where(inside, position, tile_start)
        tile_end = tl.where(inside, next_position, tile_end)
        position = next_position
        num_tiles += 1

    tile += tl.atomic_add(num_tiles_ptr, num_tiles, sem="relaxed")
    packed, first_row, rows = length > 0, first - tile_start, tile_end - tile_start
    SIDES: tl.constexpr = 1 if kv_offsets_ptr is None else 2
    ptrs = tiles_ptr + tile.to(tl.int64) * (SIDES * 2 * ROWS)
    _write_side(
        ptrs, q_offsets_ptr, segments, packed, _of_queries(length), _of_queries(first_row),
        _of_queries(rows),
    )  # fmt: skip
    if kv_offsets_ptr is not None:
        _write_side(
            ptrs + 2 * ROWS, kv_offsets_ptr, segments, packed, _of_keys(length),
            _of_keys(first_row), _of_keys(rows),
        )  # fmt: skip


def pack_short_segments(segments: Segments, q_rows: int, kv_rows: int) -> PackedTiles:
    """Launch _pack_kernel.

    Args:
        segments: with one query group.
        q_rows, kv_rows: of all segments together, each below 2^31.
    """
    q_offsets, num_segments = segments.q_offsets, segments.q_offsets.shape[0] - 1
    kv_offsets, sides, rows = segments.kv_offsets, 2, q_rows + kv_rows
    if are_same(q_offsets, kv_offsets):
        kv_offsets, sides, rows = None, 1, q_rows
    num_chunks = cdiv(num_segments, CHUNK)
    # Two successive tiles of a chunk have more than SHORT rows together, on at least one side.
    capacity = min(num_segments, 2 * rows // (SHORT + 1) + num_chunks)
    tiles = q_offsets.new_empty((capacity, sides, 2, SHORT), dtype=torch.int32)
    num_tiles = q_offsets.new_zeros((1,), dtype=torch.int32)
    packed = PackedTiles(q_offsets, kv_offsets, tiles, num_tiles)
    _pack_kernel[(num_chunks,)](*packed, num_segments, CHUNK=CHUNK, num_warps=1)
    return packed
