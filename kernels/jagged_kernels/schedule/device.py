"""The zigzag schedule's tile list built on the device, where only the device knows the offsets:
without a sync.

Without a mask, one launch: all tiles of a segment cost the same, so ranking the segments ranks the
tiles. Under a mask each tile has its own work, and two launches sort by counting.
`_tile_work_kernel` computes the class of work of each tile of a head, and counts the tiles of each
class in every CHUNK of tiles. From these counts `_masked_list_kernel` computes each tile's position
in the list. Counts do not depend on the order of atomic additions, so the list does not either.

In groups of segments (cost.grouping): one launch ranks the segments, another writes their tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.mask import column_blocks, first_target_column, num_masked_blocks, row_blocks
from ..attention.params import AttentionParams, MaskParams
from ..common.device import cdiv
from ..common.loads import find_tile, load_segment, segment_lengths
from ..common.ops import direct, operator
from ..common.ptxas import safe_ptxas
from .cost import (
    EXACT_TOP_BITS,
    EXACT_WORK,
    SHORT,
    TOP_BITS,
    WORK_CLASSES,
    Grouping,
    LoopedSide,
    grouping,
)
from .host import Segments, num_query_groups, tile_capacity

CHUNK = 256  # virtual tiles that a program of _masked_list_kernel writes
EXACT, CLASSES = tl.constexpr(EXACT_WORK), tl.constexpr(WORK_CLASSES)
SHIFT_TO_TOP_BITS = tl.constexpr(TOP_BITS)
CLASS_OF_TOP_BITS = tl.constexpr(EXACT_WORK - EXACT_TOP_BITS)  # added to them, from EXACT on
# one for each sort key, after one for no tile; a power of 2
BUCKETS = tl.constexpr(WORK_CLASSES + SHORT + 2)
SHORT_ROWS = tl.constexpr(SHORT)


@triton.jit
def _sort_key(work, rows, columns):
    """`cost.sort_key`."""
    return tl.where((rows <= SHORT_ROWS) & (columns <= SHORT_ROWS), work, work + (SHORT_ROWS + 1))


class Sides(NamedTuple):
    """The segments that tiles are listed of.

    num_segments: of the tiled side. num_heads: heads of a tile's segment.
    """

    offsets_ptr: tl.tensor
    other_offsets_ptr: tl.tensor
    num_segments: tl.tensor
    num_heads: tl.tensor


class _Sizes(NamedTuple):
    """Rows and columns of a block, and the query groups of both sides."""

    block_m: tl.constexpr
    block_n: tl.constexpr
    groups: tl.constexpr
    other_groups: tl.constexpr


@triton.jit
def _sort_keys(sides, segments, SIZES: tl.constexpr):
    """Rows and the sort key of the tiles (cost.sort_key), for a vector of segments. No rows past
    the last one."""
    real = segments < sides.num_segments
    rows, others = segment_lengths(sides.offsets_ptr, segments, real), segments
    if SIZES.groups > 1:
        others = segments % (sides.num_segments // SIZES.groups)
    columns = segment_lengths(sides.other_offsets_ptr, others, real)
    work = tl.cdiv(columns.to(tl.int32), SIZES.block_n)
    for other_group in tl.static_range(1, SIZES.other_groups):
        columns_of_group = segment_lengths(
            sides.other_offsets_ptr, others + other_group * sides.num_segments, real
        )
        work += tl.cdiv(columns_of_group.to(tl.int32), SIZES.block_n)
    if SIZES.groups > 1 or SIZES.other_groups > 1:
        return rows, work + (SHORT_ROWS + 1)
    else:
        return rows, _sort_key(work, rows, columns)


@triton.jit
def write_tiles(
    sides,
    tiles_ptr,
    num_tiles_ptr,
    SORT_KEYS: tl.constexpr,
    SIZES: tl.constexpr,
    FIRST_LONG: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Each program writes the tiles of SEGMENTS segments. A segment's first position is the number
    of tiles of the segments that a stable sort by keys, largest first, puts before it. Comparing
    with all segments is cheaper here than sorting.

    SORT_KEYS: `_sort_keys`, or another function of `sides`, segments and SIZES. FIRST_LONG: the
    smallest key of a long segment's tiles.
    """
    num_segments, num_heads = sides.num_segments, sides.num_heads
    segments = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    rows, key = SORT_KEYS(sides, segments, SIZES)
    first = tl.zeros([SEGMENTS], tl.int32)
    total, num_long = 0, 0
    for start in range(0, num_segments, CHUNK):
        others = start + tl.arange(0, CHUNK)
        other_rows, other_key = SORT_KEYS(sides, others, SIZES)
        other_tiles = tl.cdiv(other_rows.to(tl.int32), SIZES.block_m) * num_heads
        longer = other_key[None, :] > key[:, None]
        earlier = (other_key[None, :] == key[:, None]) & (others[None, :] < segments[:, None])
        first += tl.sum(tl.where(longer | earlier, other_tiles[None, :], 0), 1)
        total += tl.sum(other_tiles, 0)
        num_long += tl.sum(tl.where(other_key >= FIRST_LONG, other_tiles, 0), 0)
    if tl.program_id(0) == 0:
        tl.store(num_tiles_ptr, total)
        tl.store(num_tiles_ptr + 1, num_long)

    blocks = tl.cdiv(rows.to(tl.int32), SIZES.block_m)
    tiles, blocks = blocks * num_heads, tl.maximum(blocks, 1)[:, None]
    for start in range(0, tl.max(tiles, 0), SEGMENTS):
        within = start + tl.arange(0, SEGMENTS)[None, :]
        row_ptr = tiles_ptr + (first[:, None] + within).to(tl.int64) * 3
        mask = within < tiles[:, None]
        tl.store(row_ptr, segments[:, None], mask=mask)
        tl.store(row_ptr + 1, within // blocks, mask=mask)
        tl.store(row_ptr + 2, within % blocks, mask=mask)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "num_heads"])
def _tile_list_kernel(
    offsets_ptr, other_offsets_ptr, tiles_ptr, num_tiles_ptr, num_segments, num_heads,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEGMENTS: tl.constexpr, CHUNK: tl.constexpr,
    GROUPS: tl.constexpr, OTHER_GROUPS: tl.constexpr,
):  # fmt: skip
    sides = Sides(offsets_ptr, other_offsets_ptr, num_segments, num_heads)
    SIZES: tl.constexpr = _Sizes(BLOCK_M, BLOCK_N, GROUPS, OTHER_GROUPS)
    write_tiles(sides, tiles_ptr, num_tiles_ptr, _sort_keys, SIZES, SHORT_ROWS + 1, SEGMENTS, CHUNK)


# -- under a mask ----------------------------------------------------------------------------------


@triton.jit
def _work_class(work):
    """`cost.work_class`."""
    top_bits = work.to(tl.float32).to(tl.int32, bitcast=True) >> SHIFT_TO_TOP_BITS
    return tl.minimum(tl.where(work < EXACT, work, top_bits + CLASS_OF_TOP_BITS), CLASSES - 1)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments"])
def _tile_work_kernel(
    offsets_ptr,
    other_offsets_ptr,
    num_targets_ptr,
    chunks_ptr,
    num_segments,
    MASK: tl.constexpr,
    KEY_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHIFT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Each program writes the bucket, segment and block of one virtual tile, and counts it in its
    chunk. A virtual tile has 2^SHIFT rows, at most BLOCK_M, so every tile has one; those that are
    no tile are in bucket 0.

    A chunk has BUCKETS counts, then the buckets, segments and blocks of its CHUNK tiles.
    """
    index = tl.program_id(0) + (tl.load(offsets_ptr) >> SHIFT)
    segment, _, length, virtual_row = find_tile(index, offsets_ptr, num_segments, SHIFT)
    block, bucket = virtual_row >> SHIFT, 0
    row = block * BLOCK_M
    if row < length:
        _, other_length = load_segment(other_offsets_ptr, segment)
        if KEY_TILES:
            first_target = first_target_column(num_targets_ptr, segment, length, MASK)
            blocks = row_blocks(row, other_length, length, first_target, MASK, BLOCK_N, BLOCK_M)
        else:
            first_target = first_target_column(num_targets_ptr, segment, other_length, MASK)
            last_row, shift = tl.minimum(row + BLOCK_M, length) - 1, other_length - length
            blocks = column_blocks(
                row + shift, last_row + shift, other_length, first_target, MASK, BLOCK_N
            )
        bucket = 1 + _sort_key(
            _work_class(num_masked_blocks(blocks) + blocks.full_count), length, other_length
        )

    chunk_ptr = chunks_ptr + tl.program_id(0) // CHUNK * (BUCKETS + 3 * CHUNK)
    tl.atomic_add(chunk_ptr + bucket, 1, sem="relaxed")
    tile_ptr = chunk_ptr + BUCKETS + tl.program_id(0) % CHUNK
    tl.store(tile_ptr, bucket)
    tl.store(tile_ptr + CHUNK, segment)
    tl.store(tile_ptr + 2 * CHUNK, block)


@safe_ptxas
@triton.jit(do_not_specialize=["num_chunks", "capacity", "num_heads"])
def _masked_list_kernel(
    chunks_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_chunks,
    capacity,
    num_heads,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each program writes the tiles of a chunk to their positions in the list. Virtual tiles that
    are no tile come last, as zeros. Spare entries of the last chunk are zeros too; they are not
    counted, so their positions are past the capacity.

    capacity: of the list, in tiles of one head. ROWS: chunks whose counts are added at a time.
    """
    SIZE: tl.constexpr = BUCKETS + 3 * CHUNK
    chunk, buckets = tl.program_id(0), tl.arange(0, BUCKETS)
    total, before = tl.zeros([BUCKETS], tl.int32), tl.zeros([BUCKETS], tl.int32)
    for start in range(0, num_chunks, ROWS):
        others = (start + tl.arange(0, ROWS))[:, None]
        counts = tl.load(
            chunks_ptr + others * SIZE + buckets[None, :], mask=others < num_chunks, other=0
        )
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(others < chunk, counts, 0), 0)
    # In each bucket, this chunk's tiles come after all tiles of higher buckets and after those of
    # earlier chunks.
    first = tl.sum(total, 0) - tl.cumsum(total, 0) + before
    if chunk == 0:
        tl.store(num_tiles_ptr, tl.sum(tl.where(buckets > 0, total, 0), 0) * num_heads)
        tl.store(
            num_tiles_ptr + 1, tl.sum(tl.where(buckets > 1 + SHORT_ROWS, total, 0), 0) * num_heads
        )

    bucket_ptr = chunks_ptr + chunk * SIZE + BUCKETS
    tiles = tl.arange(0, CHUNK)
    bucket = tl.load(bucket_ptr + tiles)
    # plus the number of earlier tiles of this chunk in the bucket
    position = tl.gather(first, bucket, 0)
    for start in range(0, CHUNK, 32):
        others = start + tl.arange(0, 32)
        same = tl.load(bucket_ptr + others)[None, :] == bucket[:, None]
        position += tl.sum((same & (others[None, :] < tiles[:, None])).to(tl.int32), 1)

    real, listed = bucket > 0, position < capacity
    segment = tl.load(bucket_ptr + CHUNK + tiles, mask=real, other=0)
    block = tl.load(bucket_ptr + 2 * CHUNK + tiles, mask=real, other=0)
    tile_ptr = tiles_ptr + position.to(tl.int64) * num_heads * 3
    for head in range(0, num_heads):
        tl.store(tile_ptr + head * 3, segment, mask=listed)
        tl.store(tile_ptr + head * 3 + 1, tl.where(real, head, 0), mask=listed)
        tl.store(tile_ptr + head * 3 + 2, block, mask=listed)


def _launch_masked_list(
    offsets: Tensor,
    other_offsets: Tensor,
    tiles: Tensor,
    num_tiles: Tensor,
    total_rows: int,
    num_heads: int,
    block_m: int,
    block_n: int,
    mask: MaskParams,
    num_targets: Tensor | None,
    key_tiles: bool,
) -> None:
    """Write `tiles` and `num_tiles`, of at least one segment."""
    if mask.has_targets and num_targets is None:
        raise ValueError("num_targets must be given, as the mask has targets, got None")
    num_targets = num_targets.contiguous() if mask.has_targets else None
    num_segments, shift = offsets.shape[0] - 1, block_m.bit_length() - 1
    # find_tile divides first and last rows, not lengths: hence one more
    num_virtual = (total_rows >> shift) + num_segments + 1
    num_chunks = cdiv(num_virtual, CHUNK)
    chunks = offsets.new_zeros((num_chunks * (BUCKETS.value + 3 * CHUNK),), dtype=torch.int32)
    _tile_work_kernel[(num_virtual,)](
        offsets,
        other_offsets,
        num_targets,
        chunks,
        num_segments,
        MASK=mask,
        KEY_TILES=key_tiles,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SHIFT=shift,
        CHUNK=CHUNK,
        num_warps=1,
    )
    _masked_list_kernel[(num_chunks,)](
        chunks,
        tiles,
        num_tiles,
        num_chunks,
        len(tiles) // num_heads,
        num_heads,
        CHUNK=CHUNK,
        ROWS=8,
        num_warps=8,
    )


# -- in groups of segments -------------------------------------------------------------------------


@triton.jit
def _num_blocks(offsets_ptr, segments, real, BLOCK_M: tl.constexpr):
    return tl.cdiv(segment_lengths(offsets_ptr, segments, real).to(tl.int32), BLOCK_M)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments"])
def _segment_order_kernel(
    offsets_ptr,
    order_ptr,
    num_segments,
    BLOCK_M: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes the segments in a stable order by their numbers of blocks, most blocks first."""
    segments = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    real = segments < num_segments
    blocks = _num_blocks(offsets_ptr, segments, real, BLOCK_M)
    rank = tl.zeros([SEGMENTS], tl.int32)
    for start in range(0, num_segments, CHUNK):
        others = start + tl.arange(0, CHUNK)
        other_blocks = tl.where(
            others < num_segments,
            _num_blocks(offsets_ptr, others, others < num_segments, BLOCK_M),
            -1,
        )
        earlier = (other_blocks[None, :] == blocks[:, None]) & (others[None, :] < segments[:, None])
        rank += tl.sum(((other_blocks[None, :] > blocks[:, None]) | earlier).to(tl.int32), 1)
    tl.store(order_ptr + rank, segments, mask=real)


@triton.jit
def _ranked_segments(sides, order_ptr, start, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr):
    """CHUNK ranks from `start` on: the ranks, the blocks of their segments, and the rows that their
    tiles loop over."""
    ranks = start + tl.arange(0, CHUNK)
    real = ranks < sides.num_segments
    segments = tl.load(order_ptr + ranks, mask=real, other=0)
    blocks = _num_blocks(sides.offsets_ptr, segments, real, BLOCK_M)
    return ranks, blocks, segment_lengths(sides.other_offsets_ptr, segments, real).to(tl.int32)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "num_heads", "group_rows"])
def _grouped_list_kernel(
    offsets_ptr,
    other_offsets_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_segments,
    num_heads,
    group_rows,
    KEY_TILES: tl.constexpr,
    ALTERNATES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Each program writes the tiles of the segment of its rank.

    Before a tile come all tiles of earlier groups, the blocks with a smaller number of all segments
    of its group, or with a larger one, and the same block of the group's segments of lower rank,
    which all have it.
    """
    sides = Sides(offsets_ptr, other_offsets_ptr, num_segments, num_heads)
    rank = tl.program_id(0)
    segment = tl.load(order_ptr + rank)
    num_blocks = tl.cdiv(load_segment(offsets_ptr, segment)[1], BLOCK_M)
    lower, lower_looped = 0, 0
    for start in range(0, rank, CHUNK):
        ranks, blocks, looped = _ranked_segments(sides, order_ptr, start, BLOCK_M, CHUNK)
        lower += tl.sum(tl.where(ranks < rank, blocks, 0), 0)
        lower_looped += tl.sum(tl.where(ranks < rank, looped, 0), 0)
    group = (lower_looped + load_segment(other_offsets_ptr, segment)[1] // 2) // group_rows
    heaviest_first = group >= 0
    if ALTERNATES:
        heaviest_first = group % 2 == 0
    ascending = heaviest_first == KEY_TILES

    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        position = tl.zeros([BLOCKS], tl.int32)
        total = 0
        for start in range(0, num_segments, CHUNK):
            ranks, blocks, looped = _ranked_segments(sides, order_ptr, start, BLOCK_M, CHUNK)
            groups = (total + tl.cumsum(looped, 0) - looped + looped // 2) // group_rows
            of_group = (groups == group) & (ranks < num_segments)
            earlier = tl.where(groups < group, blocks, 0) + (of_group & (ranks < rank)).to(tl.int32)
            smaller = tl.minimum(blocks[None, :], block[:, None])
            larger = tl.maximum(blocks[None, :] - 1 - block[:, None], 0)
            position += tl.sum(earlier, 0) + tl.sum(
                tl.where(of_group[None, :], tl.where(ascending, smaller, larger), 0), 1
            )
            total += tl.sum(looped, 0)
        tile_ptr = tiles_ptr + position.to(tl.int64) * num_heads * 3
        for head in range(0, num_heads):
            tl.store(tile_ptr + head * 3, segment, mask=block < num_blocks)
            tl.store(tile_ptr + head * 3 + 1, head, mask=block < num_blocks)
            tl.store(tile_ptr + head * 3 + 2, block, mask=block < num_blocks)
    if rank == num_segments - 1:
        tl.store(num_tiles_ptr, (lower + num_blocks) * num_heads)
        tl.store(num_tiles_ptr + 1, (lower + num_blocks) * num_heads)


def _launch_grouped_list(
    offsets: Tensor,
    other_offsets: Tensor,
    tiles: Tensor,
    num_tiles: Tensor,
    num_heads: int,
    block_m: int,
    key_tiles: bool,
    grouping: Grouping,
) -> None:
    """Write `tiles` and `num_tiles`, of at least one segment."""
    num_segments, segments = offsets.shape[0] - 1, 32
    order = offsets.new_empty((num_segments,), dtype=torch.int32)
    _segment_order_kernel[(cdiv(num_segments, segments),)](
        offsets, order, num_segments, BLOCK_M=block_m, SEGMENTS=segments, CHUNK=256
    )  # fmt: skip
    _grouped_list_kernel[(num_segments,)](
        offsets,
        other_offsets,
        order,
        tiles.zero_(),
        num_tiles,
        num_segments,
        num_heads,
        grouping.rows,
        KEY_TILES=key_tiles,
        ALTERNATES=grouping.alternates,
        BLOCK_M=block_m,
        BLOCKS=32,
        CHUNK=128,
    )


# -- the operator ----------------------------------------------------------------------------------


def _empty_list(offsets, other_offsets, total_rows, num_heads, block_m, block_n, *options):
    capacity = tile_capacity(total_rows, offsets.shape[0] - 1, num_heads, block_m)
    return offsets.new_empty((capacity, 3), dtype=torch.int32), offsets.new_empty(
        (2,), dtype=torch.int32
    )


@operator("tile_list", fake=_empty_list)
def tile_list(
    offsets: Tensor,
    other_offsets: Tensor,
    total_rows: int,
    num_heads: int,
    block_m: int,
    block_n: int,
    mask: list[int] | None = None,
    num_targets: Tensor | None = None,
    key_tiles: bool = False,
    other_rows: int = 0,
    num_other_heads: int = 0,
    head_dim: int = 0,
) -> tuple[Tensor, Tensor]:
    """The tiles of `host.zigzag_schedule`, from offsets on the device.

    Args:
        offsets: `[B + 1]` of the tiled side, `total_rows` rows together. other_offsets: `[B + 1]`
            of the side a tile loops over. Queries may have several groups, as in `zigzag_schedule`.
        num_heads, block_m, block_n, key_tiles: as in `zigzag_schedule`.
        mask: `MaskParams`, with num_targets `[B]` if it has targets.
        other_rows, num_other_heads, head_dim: `LoopedSide`, for Hopper's kernels, whose tiles may
            be listed in groups of segments.

    Returns:
        tiles int32 `[capacity, 3]`, capacity as in `host.tile_capacity`; rows that do not count are
        0. num_tiles int32 `[2]`, as in `TileSchedule`.
    """
    tiles, num_tiles = _empty_list(offsets, other_offsets, total_rows, num_heads, block_m, block_n)
    num_segments = offsets.shape[0] - 1
    sides = ("offsets", num_segments), ("other_offsets", other_offsets.shape[0] - 1)
    queries, keys = reversed(sides) if key_tiles else sides
    groups = num_query_groups(*queries, *keys, mask)
    params = None if mask is None else MaskParams(*mask)
    in_groups = None
    if groups == 1 and head_dim:
        looped = LoopedSide(other_rows, num_other_heads, head_dim)
        in_groups = grouping(total_rows, num_heads, looped, num_segments, params, key_tiles)
    if in_groups is not None:
        _launch_grouped_list(
            offsets, other_offsets, tiles, num_tiles, num_heads, block_m, key_tiles, in_groups
        )
        return tiles, num_tiles
    if params is not None and num_segments:
        sizes = total_rows, num_heads, block_m, block_n
        _launch_masked_list(
            offsets, other_offsets, tiles, num_tiles, *sizes, params, num_targets, key_tiles
        )
        return tiles, num_tiles
    segments = 32
    _tile_list_kernel[(max(1, cdiv(num_segments, segments)),)](
        offsets, other_offsets, tiles.zero_(), num_tiles, num_segments, num_heads,
        BLOCK_M=block_m, BLOCK_N=block_n, SEGMENTS=segments, CHUNK=256,
        GROUPS=1 if key_tiles else groups, OTHER_GROUPS=groups if key_tiles else 1,
    )  # fmt: skip
    return tiles, num_tiles


def list_tiles(*args: Any) -> tuple[Tensor, Tensor]:
    """`tile_list` in less host time."""
    return direct(tile_list, args, args[:1])(*args)


def kernel_tiles(
    segments: Segments,
    config,
    total_rows: int,
    num_heads: int,
    params: AttentionParams,
    key_tiles: bool = False,
    looped: LoopedSide | None = None,
) -> tuple[Tensor, Tensor]:
    """The tiles for a kernel and their number: the schedule's if its tile size is that of the
    launch configuration, else a new list.

    total_rows, num_heads: of the tiled side. key_tiles: the tiled side is the keys. looped: of
    Hopper's kernels.
    """
    tiles, num_tiles, block = segments.tiles
    if tiles is None or block != config.tile:
        offsets = segments.q_offsets, segments.kv_offsets
        sizes = total_rows, num_heads, config.tile, config.block
        offsets = reversed(offsets) if key_tiles else offsets
        looped = () if params.batch_invariant or looped is None else looped
        mask = params.mask and list(params.mask)
        tiles, num_tiles = list_tiles(
            *offsets, *sizes, mask, params.num_targets, key_tiles, *looped
        )
    return tiles, num_tiles[1:] if segments.long_only else num_tiles
