"""Lists of tiles for a backward that leaves segments with few query rows to a kernel of their own:
made on the device, without a sync."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.device import cdiv
from ..common.loads import segment_lengths
from ..common.ptxas import safe_ptxas
from .device import Sides, write_tiles
from .host import Segments, TileList, tile_capacity

# added to the work of long segments' tiles; more blocks than a segment has
FIRST_LONG = tl.constexpr(2**30)


class ShortQueries(NamedTuple):
    """Two lists of tiles, those of long segments first, each longest first.

    Attributes:
        queries, keys: segments with the list of query tiles and with that of key tiles, of which
            kernels take the long segments.
        next_tile: int32 `[1]`, 0, a counter of the tiles that the short segments' kernel has begun.
    """

    queries: Segments
    keys: Segments
    next_tile: Tensor


class _Sizes(NamedTuple):
    """Rows and columns of a block, the most query rows of a short segment, and whether the tiled
    side is the keys."""

    block_m: tl.constexpr
    block_n: tl.constexpr
    short: tl.constexpr
    key_tiles: tl.constexpr


@triton.jit
def _sort_keys(sides, segments, SIZES: tl.constexpr):
    """Rows and the sort key of the tiles: the work, and FIRST_LONG more without query rows or with
    many."""
    real = segments < sides.num_segments
    rows, columns = (
        segment_lengths(sides.offsets_ptr, segments, real),
        segment_lengths(sides.other_offsets_ptr, segments, real),
    )
    queries = columns if SIZES.key_tiles else rows
    work = tl.cdiv(columns.to(tl.int32), SIZES.block_n)
    return rows, tl.where((queries > 0) & (queries <= SIZES.short), work, work + FIRST_LONG)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "num_heads", "num_kv_heads"])
def _short_queries_kernel(
    q_offsets_ptr,
    kv_offsets_ptr,
    query_tiles_ptr,
    key_tiles_ptr,
    counts_ptr,
    num_segments,
    num_heads,
    num_kv_heads,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes the list of query tiles, ROWS rows each, or that of key tiles, KEYS rows each."""
    if tl.program_id(1) == 0:
        sides = Sides(q_offsets_ptr, kv_offsets_ptr, num_segments, num_heads)
        QUERIES: tl.constexpr = _Sizes(ROWS, BLOCK, ROWS, False)
        write_tiles(
            sides, query_tiles_ptr, counts_ptr, _sort_keys, QUERIES, FIRST_LONG, SEGMENTS, CHUNK
        )
    else:
        # Another name than `sides`: where the offsets have different integer dtypes, so do the two
        # tuples.
        key_sides = Sides(kv_offsets_ptr, q_offsets_ptr, num_segments, num_kv_heads)
        KEY_SIZES: tl.constexpr = _Sizes(KEYS, BLOCK, ROWS, True)
        write_tiles(
            key_sides,
            key_tiles_ptr,
            counts_ptr + 2,
            _sort_keys,
            KEY_SIZES,
            FIRST_LONG,
            SEGMENTS,
            CHUNK,
        )


def list_short_queries(
    segments: Segments,
    sizes: tuple[int, int],
    heads: tuple[int, int],
    rows: int,
    keys: int,
    block: int,
) -> ShortQueries:
    """Launch _short_queries_kernel.

    Args:
        segments: with one query group, at least one segment.
        sizes, heads: rows and heads of the queries and of the keys.
        rows, keys: of a query tile and of a key tile. Segments with 1 to `rows` query rows are
            short.
        block: rows of the blocks in which work is counted.
    """
    num_segments, segments_of_program = segments.q_offsets.shape[0] - 1, 32
    # Multiples of 4, as kernels are compiled for pointers to 16 bytes.
    capacities = [
        cdiv(tile_capacity(size, num_segments, *of_tiles), 4) * 4
        for size, *of_tiles in zip(sizes, heads, (rows, keys))
    ]
    # Zeros: a kernel reads its first tile ahead, also where it has none.
    counts, *tiles = segments.q_offsets.new_zeros(
        (8 + 3 * sum(capacities),), dtype=torch.int32
    ).split([8, *(3 * x for x in capacities)])
    query_tiles, key_tiles = (x.view(-1, 3) for x in tiles)
    _short_queries_kernel[(cdiv(num_segments, segments_of_program), 2)](
        segments.q_offsets,
        segments.kv_offsets,
        query_tiles,
        key_tiles,
        counts,
        num_segments,
        *heads,
        ROWS=rows,
        KEYS=keys,
        BLOCK=block,
        SEGMENTS=segments_of_program,
        CHUNK=512,
    )
    queries = segments._replace(tiles=TileList(query_tiles, counts[:2], rows), long_only=True)
    of_keys = segments._replace(tiles=TileList(key_tiles, counts[2:4], keys), long_only=True)
    return ShortQueries(queries, of_keys, counts[4:5])
