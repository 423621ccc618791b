"""The kernels that list tiles on the device. The lists are those of `host.zigzag_schedule`.

A kernel lists the tiles of queries, of keys, or of both in one launch: first come the programs of
the queries, then those of the keys. Its constants QUERIES and KEYS say what it lists; None: nothing
on that side. Both lists are in one buffer of int32, and everything that the kernels pass on to one
another:

    words 0 and 1: num_tiles of queries; 4 and 5: of keys; 8: 0
    from word 12 on: tiles of queries, tiles of keys, orders of the segments, chunks

- Without a mask, one launch: all tiles of a segment cost the same, so ranking the segments ranks
  the tiles.
- Under a mask each tile has its own work, and two launches sort by counting. `tile_work_kernel`
  computes the class of work of each tile of a head, and counts the tiles of each class in every
  CHUNK of tiles. From these counts `masked_list_kernel` computes each tile's position in the list.
  Counts do not depend on the order of atomic additions, so the list does not either.
- In groups of segments (cost.grouping): one launch ranks the segments, another writes their tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.loads import find_tile, load_segment, segment_lengths
from ..common.ptxas import safe_ptxas
from ..schedule.cost import EXACT_TOP_BITS, EXACT_WORK, SHORT, TOP_BITS, WORK_CLASSES
from .mask import column_blocks, first_query_row, first_target_column, num_masked_blocks, row_blocks

SEGMENTS = tl.constexpr(32)  # that a program of the kernels without a mask lists
SPARE = tl.constexpr(512)  # tiles that a program clears at a time
HEADER = tl.constexpr(12)  # words before the tiles
EXACT, CLASSES = tl.constexpr(EXACT_WORK), tl.constexpr(WORK_CLASSES)
SHIFT_TO_TOP_BITS = tl.constexpr(TOP_BITS)
CLASS_OF_TOP_BITS = tl.constexpr(EXACT_WORK - EXACT_TOP_BITS)  # added to them, from EXACT on
# one for each sort key, after one for no tile; a power of 2
BUCKETS = tl.constexpr(WORK_CLASSES + SHORT + 2)
SHORT_ROWS = tl.constexpr(SHORT)
# Added to the work of tiles of segments without query rows or with many, where those with few have
# a kernel of their own. More blocks than a segment has.
MANY_QUERIES = tl.constexpr(2**30)


# sizes of a batch, for which no kernel is compiled anew
SLOTS = ["num_segments", "query_slots", "key_slots"]
SIZES = [*SLOTS, "num_heads", "num_kv_heads"]


class Listed(NamedTuple):
    """What a kernel lists: the tiles of one side.

    block_m, block_n: rows of a tile, and of a block that it loops over. groups, other_groups: query
    groups of the side, and of the other side. in_groups, alternates: whether segments are in
    groups, and every other group in reverse order. few_queries: query rows of a segment up to which
    its tiles come last; 0: short segments do (cost.sort_key).
    """

    block_m: int
    block_n: int
    key_tiles: bool
    groups: int = 1
    other_groups: int = 1
    in_groups: bool = False
    alternates: bool = False
    few_queries: int = 0


class _Sides(NamedTuple):
    """The segments that tiles are listed of.

    num_segments: of the tiled side. num_heads: heads of a tile's segment.
    """

    offsets_ptr: tl.tensor
    other_offsets_ptr: tl.tensor
    num_segments: tl.tensor
    num_heads: tl.tensor


class _Place(NamedTuple):
    """Where a list goes. slots: tiles that it has room for."""

    tiles_ptr: tl.tensor
    num_tiles_ptr: tl.tensor
    slots: tl.tensor


@triton.jit
def _places(lists_ptr, query_slots, key_slots):
    """The _Place of the tiles of queries, and of those of keys."""
    tiles_ptr = lists_ptr + HEADER
    of_keys = _Place(tiles_ptr + query_slots.to(tl.int64) * 3, lists_ptr + 4, key_slots)
    return _Place(tiles_ptr, lists_ptr, query_slots), of_keys


@triton.jit
def _orders(lists_ptr, query_slots, key_slots, num_segments):
    """Where the segments of queries and of keys are listed by their numbers of blocks."""
    order_ptr = lists_ptr + HEADER + (query_slots.to(tl.int64) + key_slots) * 3
    return order_ptr, order_ptr + num_segments


@triton.jit
def _sort_key(work, rows, columns):
    """`cost.sort_key`."""
    return tl.where((rows <= SHORT_ROWS) & (columns <= SHORT_ROWS), work, work + (SHORT_ROWS + 1))


@triton.jit
def _sort_keys(sides, segments, LIST: tl.constexpr):
    """Rows and the sort key of the tiles, for a vector of segments. No rows past the last one."""
    real = segments < sides.num_segments
    rows, others = segment_lengths(sides.offsets_ptr, segments, real), segments
    if LIST.groups > 1:
        others = segments % (sides.num_segments // LIST.groups)
    columns = segment_lengths(sides.other_offsets_ptr, others, real)
    work = tl.cdiv(columns.to(tl.int32), LIST.block_n)
    OTHER_GROUPS: tl.constexpr = LIST.other_groups
    for other_group in tl.static_range(1, OTHER_GROUPS):
        columns_of_group = segment_lengths(
            sides.other_offsets_ptr, others + other_group * sides.num_segments, real
        )
        work += tl.cdiv(columns_of_group.to(tl.int32), LIST.block_n)
    if LIST.few_queries > 0:
        queries = columns if LIST.key_tiles else rows
        few = (queries > 0) & (queries <= LIST.few_queries)
        return rows, tl.where(few, work, work + MANY_QUERIES)
    elif LIST.groups > 1 or LIST.other_groups > 1:
        return rows, work + (SHORT_ROWS + 1)
    else:
        return rows, _sort_key(work, rows, columns)


@triton.jit
def _write_tiles(sides, place, program, LIST: tl.constexpr):
    """Each program writes the tiles of SEGMENTS segments, and clears its share of the spare slots.
    A segment's first position is the number of tiles of the segments that a stable sort by keys,
    largest first, puts before it. Comparing with all segments is cheaper here than sorting.
    """
    CHUNK: tl.constexpr = 512 if LIST.few_queries > 0 else 256
    FIRST_LONG: tl.constexpr = MANY_QUERIES if LIST.few_queries > 0 else SHORT_ROWS + 1
    num_segments, num_heads = sides.num_segments, sides.num_heads
    segments = program * SEGMENTS + tl.arange(0, SEGMENTS)
    rows, key = _sort_keys(sides, segments, LIST)
    first = tl.zeros([SEGMENTS], tl.int32)
    total, num_long = 0, 0
    for start in range(0, num_segments, CHUNK):
        others = start + tl.arange(0, CHUNK)
        other_rows, other_key = _sort_keys(sides, others, LIST)
        other_tiles = tl.cdiv(other_rows.to(tl.int32), LIST.block_m) * num_heads
        longer = other_key[None, :] > key[:, None]
        earlier = (other_key[None, :] == key[:, None]) & (others[None, :] < segments[:, None])
        first += tl.sum(tl.where(longer | earlier, other_tiles[None, :], 0), 1)
        total += tl.sum(other_tiles, 0)
        num_long += tl.sum(tl.where(other_key >= FIRST_LONG, other_tiles, 0), 0)
    if program == 0:
        tl.store(place.num_tiles_ptr, total)
        tl.store(place.num_tiles_ptr + 1, num_long)

    blocks = tl.cdiv(rows.to(tl.int32), LIST.block_m)
    tiles, blocks = blocks * num_heads, tl.maximum(blocks, 1)[:, None]
    for start in range(0, tl.max(tiles, 0), SEGMENTS):
        within = start + tl.arange(0, SEGMENTS)[None, :]
        positions, mask = first[:, None] + within, within < tiles[:, None]
        _store_tiles(place, positions, segments[:, None], within // blocks, within % blocks, mask)
    _clear_spare(place, total + program * SPARE, tl.cdiv(num_segments, SEGMENTS) * SPARE)


@triton.jit
def _store_tiles(place, positions, segment, head, block, mask):
    tile_ptr = place.tiles_ptr + positions.to(tl.int64) * 3
    tl.store(tile_ptr, segment, mask=mask)
    tl.store(tile_ptr + 1, head, mask=mask)
    tl.store(tile_ptr + 2, block, mask=mask)


@triton.jit
def _clear_spare(place, first, step):
    """Write zeros to the slots from `first` on, SPARE in every `step`. A kernel reads its first
    tile ahead, also where it has none."""
    for start in range(first, place.slots, tl.maximum(step, 1)):
        positions = start + tl.arange(0, SPARE)
        _store_tiles(place, positions, 0, 0, 0, positions < place.slots)


@safe_ptxas
@triton.jit(do_not_specialize=SIZES)
def tile_list_kernel(
    q_offsets_ptr, kv_offsets_ptr, lists_ptr, num_segments, num_heads, num_kv_heads, query_slots,
    key_slots,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Writes the tiles sorted by work; of a side in groups, only the order of its segments.
    num_segments: of the keys."""
    program, query_programs = tl.program_id(0), 0
    if program == 0:
        tl.store(lists_ptr + 8, 0)
    of_queries, of_keys = _places(lists_ptr, query_slots, key_slots)
    query_order_ptr, key_order_ptr = _orders(lists_ptr, query_slots, key_slots, num_segments)
    if QUERIES is not None:
        queries = _Sides(q_offsets_ptr, kv_offsets_ptr, num_segments * QUERIES.groups, num_heads)
        query_programs = tl.maximum(tl.cdiv(queries.num_segments, SEGMENTS), 1)
        if program < query_programs:
            _list_segments(queries, of_queries, query_order_ptr, program, QUERIES)
    if KEYS is not None:
        keys = _Sides(kv_offsets_ptr, q_offsets_ptr, num_segments, num_kv_heads)
        if program >= query_programs:
            _list_segments(keys, of_keys, key_order_ptr, program - query_programs, KEYS)


@triton.jit
def _list_segments(sides, place, order_ptr, program, LIST: tl.constexpr):
    if LIST.in_groups:
        _write_order(sides, order_ptr, program, LIST.block_m)
    else:
        _write_tiles(sides, place, program, LIST)


# -- under a mask ----------------------------------------------------------------------------------


@triton.jit
def _work_class(work):
    """`cost.work_class`."""
    top_bits = work.to(tl.float32).to(tl.int32, bitcast=True) >> SHIFT_TO_TOP_BITS
    return tl.minimum(tl.where(work < EXACT, work, top_bits + CLASS_OF_TOP_BITS), CLASSES - 1)


@triton.jit
def _chunks(lists_ptr, query_slots, key_slots, num_segments):
    """Where the chunks begin: those of queries, then those of keys. Aligned to 16 words."""
    words = HEADER + (query_slots.to(tl.int64) + key_slots) * 3 + num_segments * 2
    return lists_ptr + tl.cdiv(words, 16) * 16


@safe_ptxas
@triton.jit(do_not_specialize=[*SLOTS, "query_programs"])
def tile_work_kernel(
    q_offsets_ptr, kv_offsets_ptr, num_targets_ptr, lists_ptr, num_segments, query_programs,
    query_slots, key_slots,
    MASK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program writes the bucket, segment and block of one virtual tile, and counts it in its
    chunk. A virtual tile has 2^SHIFT rows, at most block_m, so every tile has one; those that are
    no tile are in bucket 0.

    A chunk has BUCKETS counts, then the buckets, segments and blocks of its CHUNK tiles.
    query_programs: virtual tiles of the queries that the buffer has chunks for.
    """
    program = tl.program_id(0)
    chunk_ptr = _chunks(lists_ptr, query_slots, key_slots, num_segments)
    keys = _Sides(kv_offsets_ptr, q_offsets_ptr, num_segments, 1)
    if QUERIES is None:
        program += query_programs
    else:
        queries = _Sides(q_offsets_ptr, kv_offsets_ptr, num_segments * QUERIES.groups, 1)
        if program < query_programs:
            _count_tile(queries, num_targets_ptr, chunk_ptr, program, MASK, QUERIES, CHUNK)
    if KEYS is not None:
        if program >= query_programs:
            program -= query_programs
            chunk_ptr += tl.cdiv(query_programs, CHUNK).to(tl.int64) * (BUCKETS + 3 * CHUNK)
            _count_tile(keys, num_targets_ptr, chunk_ptr, program, MASK, KEYS, CHUNK)


@triton.jit
def _count_tile(
    sides, num_targets_ptr, chunks_ptr, program,
    MASK: tl.constexpr, LIST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    SHIFT: tl.constexpr = log2_floor(LIST.block_m)
    index = program + (tl.load(sides.offsets_ptr) >> SHIFT)
    segment, _, length, virtual_row = find_tile(index, sides.offsets_ptr, sides.num_segments, SHIFT)
    block, bucket = virtual_row >> SHIFT, 0
    row = block * LIST.block_m
    if row < length:
        num_segments, others = sides.num_segments // LIST.groups, segment
        if LIST.groups > 1:
            others = segment % num_segments
        _, other_length = load_segment(sides.other_offsets_ptr, others)
        if LIST.key_tiles:
            first_target = first_target_column(num_targets_ptr, segment, length, MASK, num_segments)
            blocks = row_blocks(
                row, other_length, length, first_target, MASK, LIST.block_n, LIST.block_m
            )
        else:
            first_target = first_target_column(
                num_targets_ptr, segment, other_length, MASK, num_segments
            )
            row = first_query_row(block, length, MASK, LIST.block_m, LIST.block_n)
            last_row, shift = tl.minimum(row + LIST.block_m, length) - 1, other_length - length
            row = tl.maximum(row, 0)
            blocks = column_blocks(
                row + shift, last_row + shift, other_length, first_target, MASK, LIST.block_n
            )
        work = num_masked_blocks(blocks) + blocks.full_count
        OTHER_GROUPS: tl.constexpr = LIST.other_groups
        for other_group in tl.static_range(1, OTHER_GROUPS):
            _, columns = load_segment(
                sides.other_offsets_ptr, segment + other_group * sides.num_segments
            )
            work += tl.cdiv(columns, LIST.block_n)
        if MASK.grouped:
            bucket = 1 + _work_class(work) + (SHORT_ROWS + 1)
        else:
            bucket = 1 + _sort_key(_work_class(work), length, other_length)

    chunk_ptr = chunks_ptr + program // CHUNK * (BUCKETS + 3 * CHUNK)
    tl.atomic_add(chunk_ptr + bucket, 1, sem="relaxed")
    tile_ptr = chunk_ptr + BUCKETS + program % CHUNK
    tl.store(tile_ptr, bucket)
    tl.store(tile_ptr + CHUNK, segment)
    tl.store(tile_ptr + 2 * CHUNK, block)


@triton.constexpr_function
def log2_floor(block: int) -> int:
    """The exponent of the largest power of 2 that is not above `block`."""
    return block.bit_length() - 1


@safe_ptxas
@triton.jit(do_not_specialize=[*SIZES, "query_chunks", "key_chunks"])
def masked_list_kernel(
    lists_ptr, num_segments, query_chunks, key_chunks, num_heads, num_kv_heads, query_slots,
    key_slots,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each program writes the tiles of a chunk to their positions in the list. Virtual tiles that
    are no tile come last, as zeros. Spare entries of the last chunk are zeros too; they are not
    counted, so their positions are past the list.

    ROWS: chunks whose counts are added at a time.
    """
    chunk = tl.program_id(0)
    chunks_ptr = _chunks(lists_ptr, query_slots, key_slots, num_segments)
    of_queries, of_keys = _places(lists_ptr, query_slots, key_slots)
    if QUERIES is None:
        chunk += query_chunks
    else:
        if chunk < query_chunks:
            _write_chunk(chunks_ptr, query_chunks, chunk, of_queries, num_heads, CHUNK, ROWS)
    if KEYS is not None:
        if chunk >= query_chunks:
            chunks_ptr += query_chunks.to(tl.int64) * (BUCKETS + 3 * CHUNK)
            _write_chunk(
                chunks_ptr, key_chunks, chunk - query_chunks, of_keys, num_kv_heads, CHUNK, ROWS
            )


@triton.jit
def _write_chunk(
    chunks_ptr, num_chunks, chunk, place, num_heads, CHUNK: tl.constexpr, ROWS: tl.constexpr
):
    SIZE: tl.constexpr = BUCKETS + 3 * CHUNK
    buckets = tl.arange(0, BUCKETS)
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
        num_long = tl.sum(tl.where(buckets > 1 + SHORT_ROWS, total, 0), 0)
        tl.store(place.num_tiles_ptr, tl.sum(tl.where(buckets > 0, total, 0), 0) * num_heads)
        tl.store(place.num_tiles_ptr + 1, num_long * num_heads)

    bucket_ptr = chunks_ptr + chunk * SIZE + BUCKETS
    tiles = tl.arange(0, CHUNK)
    bucket = tl.load(bucket_ptr + tiles)
    # plus the number of earlier tiles of this chunk in the bucket
    position = tl.gather(first, bucket, 0)
    for start in range(0, CHUNK, 32):
        others = start + tl.arange(0, 32)
        same = tl.load(bucket_ptr + others)[None, :] == bucket[:, None]
        position += tl.sum((same & (others[None, :] < tiles[:, None])).to(tl.int32), 1)

    real, listed = bucket > 0, position < place.slots // num_heads
    segment = tl.load(bucket_ptr + CHUNK + tiles, mask=real, other=0)
    block = tl.load(bucket_ptr + 2 * CHUNK + tiles, mask=real, other=0)
    for head in range(0, num_heads):
        of_head = tl.where(real, head, 0)
        _store_tiles(place, position * num_heads + head, segment, of_head, block, listed)


# -- in groups of segments -------------------------------------------------------------------------


@triton.jit
def _num_blocks(offsets_ptr, segments, real, BLOCK_M: tl.constexpr):
    return tl.cdiv(segment_lengths(offsets_ptr, segments, real).to(tl.int32), BLOCK_M)


@triton.jit
def _write_order(sides, order_ptr, program, BLOCK_M: tl.constexpr):
    """Writes the segments in a stable order by their numbers of blocks, most blocks first."""
    CHUNK: tl.constexpr = 256
    offsets_ptr, num_segments = sides.offsets_ptr, sides.num_segments
    segments = program * SEGMENTS + tl.arange(0, SEGMENTS)
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
@triton.jit(do_not_specialize=[*SIZES, "query_group_rows", "key_group_rows"])
def grouped_list_kernel(
    q_offsets_ptr, kv_offsets_ptr, lists_ptr, num_segments, num_heads, num_kv_heads, query_slots,
    key_slots, query_group_rows, key_group_rows,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Writes the tiles of the sides in groups, whose segments `tile_list_kernel` has ranked."""
    rank = tl.program_id(0)
    of_queries, of_keys = _places(lists_ptr, query_slots, key_slots)
    query_order_ptr, key_order_ptr = _orders(lists_ptr, query_slots, key_slots, num_segments)
    if QUERIES is not None:
        queries = _Sides(q_offsets_ptr, kv_offsets_ptr, num_segments, num_heads)
        if rank < num_segments:
            _write_ranked(queries, of_queries, query_order_ptr, rank, query_group_rows, QUERIES)
        rank -= num_segments
    if KEYS is not None:
        keys = _Sides(kv_offsets_ptr, q_offsets_ptr, num_segments, num_kv_heads)
        if rank >= 0:
            _write_ranked(keys, of_keys, key_order_ptr, rank, key_group_rows, KEYS)


@triton.jit
def _write_ranked(sides, place, order_ptr, rank, group_rows, LIST: tl.constexpr):
    """Each program writes the tiles of the segment of its rank. The last one clears the spare
    slots.

    Before a tile come all tiles of earlier groups, the blocks with a smaller number of all segments
    of its group, or with a larger one, and the same block of the group's segments of lower rank,
    which all have it.
    """
    BLOCK_M: tl.constexpr = LIST.block_m
    BLOCKS: tl.constexpr = 32
    CHUNK: tl.constexpr = 128
    num_segments, num_heads = sides.num_segments, sides.num_heads
    segment = tl.load(order_ptr + rank)
    num_blocks = tl.cdiv(load_segment(sides.offsets_ptr, segment)[1], BLOCK_M)
    lower, lower_looped = 0, 0
    for start in range(0, rank, CHUNK):
        ranks, blocks, looped = _ranked_segments(sides, order_ptr, start, BLOCK_M, CHUNK)
        lower += tl.sum(tl.where(ranks < rank, blocks, 0), 0)
        lower_looped += tl.sum(tl.where(ranks < rank, looped, 0), 0)
    group = (lower_looped + load_segment(sides.other_offsets_ptr, segment)[1] // 2) // group_rows
    heaviest_first = group >= 0
    if LIST.alternates:
        heaviest_first = group % 2 == 0
    ascending = heaviest_first == LIST.key_tiles

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
        for head in range(0, num_heads):
            _store_tiles(
                place, position * num_heads + head, segment, head, block, block < num_blocks
            )
    if rank == num_segments - 1:
        num_tiles = (lower + num_blocks) * num_heads
        tl.store(place.num_tiles_ptr, num_tiles)
        tl.store(place.num_tiles_ptr + 1, num_tiles)
        _clear_spare(place, num_tiles, SPARE)
