"""Where the tiles of Hopper's attention kernels come from, and which blocks a tile visits.

Either the zigzag assigns tiles to thread blocks, or these take them from the list one by one. In
both cases the producer loads them, as it has time to wait, and passes them to the other warps
through a queue.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ...common.gluon_api import thread_barrier
from ...common.loads import load_listed_tile, load_tile, zigzag_waves
from ...common.pipeline import (
    WARPGROUP_ROWS,
    make_barriers,
    mark_full,
    release,
    wait_until_empty,
    wait_until_full,
)
from ..mask import (
    column_blocks,
    first_query_row,
    first_target_column,
    is_visited,
    masked_block,
    num_masked_blocks,
    row_blocks,
)

TILE_FIELDS = gl.constexpr(8)
TILE_SLOTS = gl.constexpr(4)  # tiles of one block follow one another quickly


class Tile(NamedTuple):
    """A tile of a segment and head: the `block`-th of its query rows, or of its keys.

    q_start, q_len, kv_start, kv_len: first row, int64, and number of rows of its query and key
    segments.
    first_target: column of the segment's first target, kv_len if it has none.
    """

    segment: gl.tensor
    head: gl.tensor
    block: gl.tensor
    q_start: gl.tensor
    q_len: gl.tensor
    kv_start: gl.tensor
    kv_len: gl.tensor
    first_target: gl.tensor


class TileQueue(NamedTuple):
    """slots: the words of TILE_SLOTS tiles. full: arrive count 1, the producer's. empty: arrive
    count 1 per consumer, or warpgroup or warp that reads tiles."""

    slots: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


# -- tiles -----------------------------------------------------------------------------------------


@gluon.jit
def _tile(tile, segment, block, first_target):
    """A ScheduledTile or Tile with other fields."""
    return Tile(
        segment, tile.head, block,
        tile.q_start, tile.q_len, tile.kv_start, tile.kv_len, first_target,
    )  # fmt: skip


@gluon.jit
def of_queries(tile, segment, q_start, q_len, first_target):
    """A tile of keys with another query segment."""
    return Tile(
        segment, tile.head, tile.block,
        q_start, q_len, tile.kv_start, tile.kv_len, first_target,
    )  # fmt: skip


@gluon.jit
def num_waves(schedule):
    """How many tiles this thread block gets."""
    return zigzag_waves(gl.load(schedule.num_tiles_ptr), gl.program_id(0), gl.num_programs(0))


@gluon.jit
def load_wave(schedule, wave, waves, MASK: gl.constexpr):
    """The Tile of a wave. The producer calls it one wave ahead, as its loads depend on one
    another."""
    tile = load_tile(
        schedule.tiles_ptr, wave, waves, gl.program_id(0), gl.num_programs(0),
        schedule.q_offsets_ptr, schedule.kv_offsets_ptr, schedule.num_segments,
    )  # fmt: skip
    first_target = first_target_column(
        schedule.num_targets_ptr, tile.segment, tile.kv_len, MASK, schedule.num_segments
    )
    return _tile(tile, tile.segment, tile.block, first_target)


@gluon.jit
def take_tile(schedule, num_tiles, MASK: gl.constexpr):
    """The next Tile that no thread block has taken, of the first num_tiles of the list; segment -1
    past them."""
    position = gl.atomic_add(schedule.next_tile_ptr, 1, sem="relaxed")
    tile = load_listed_tile(
        schedule.tiles_ptr, gl.maximum(gl.minimum(position, num_tiles - 1), 0),
        schedule.q_offsets_ptr, schedule.kv_offsets_ptr, schedule.num_segments,
    )  # fmt: skip
    first_target = first_target_column(
        schedule.num_targets_ptr, tile.segment, tile.kv_len, MASK, schedule.num_segments
    )
    segment = gl.where(position < num_tiles, tile.segment, -1)
    return _tile(tile, segment, tile.block, first_target)


@gluon.jit
def make_tile_queue(CONSUMERS: gl.constexpr):
    slots = gl.allocate_shared_memory(
        gl.int32, [TILE_SLOTS * TILE_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    return TileQueue(slots, make_barriers(TILE_SLOTS, 1), make_barriers(TILE_SLOTS, CONSUMERS))


@gluon.jit
def push_tile(queue, wave, tile):
    """Hand a Tile to every consumer."""
    wait_until_empty(queue, wave)
    slot = wave % TILE_SLOTS
    for i in gl.static_range(TILE_FIELDS):
        word = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
        queue.slots.index(slot * TILE_FIELDS + i).store(word + tile[i].to(gl.int32))
    thread_barrier()
    mark_full(queue, wave)


@gluon.jit
def load_word(words, i):
    """A word of `[words, 1]` in shared memory."""
    return gl.sum(words.index(i).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def pop_tile(queue, wave, wanted=True):
    """The Tile of a wave. Undefined unless `wanted`. `release` of the queue must follow, but not
    right after it, when its loads may still be under way."""
    wait_until_full(queue, wave, wanted)
    words, i = queue.slots, wave % TILE_SLOTS * TILE_FIELDS
    segment, head, block = load_word(words, i), load_word(words, i + 1), load_word(words, i + 2)
    q_start, q_len = load_word(words, i + 3), load_word(words, i + 4)
    kv_start, kv_len = load_word(words, i + 5), load_word(words, i + 6)
    first_target = load_word(words, i + 7)
    return Tile(
        segment, head, block,
        q_start.to(gl.int64), q_len, kv_start.to(gl.int64), kv_len, first_target,
    )  # fmt: skip


# -- loops over tiles ------------------------------------------------------------------------------
# The state of a loop is two numbers: steps of the rings of the blocks that tiles loop over, and
# uses of the tail's barrier.


@gluon.jit
def produce_waves(load: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    """A producer's loop over the tiles that the zigzag assigns to its thread block. It hands each
    to the consumers, and calls load(tile, wave, step, kernel, OPTIONS), which returns the step
    after the tile."""
    waves = num_waves(kernel.schedule)
    next_tile = load_wave(kernel.schedule, 0, waves, OPTIONS.mask)
    step = 0
    for wave in range(waves):
        tile = next_tile
        next_tile = load_wave(kernel.schedule, wave + 1, waves, OPTIONS.mask)
        push_tile(kernel.queue, wave, tile)
        step = load(tile, wave, step, kernel, OPTIONS)


@gluon.jit
def consume_waves(compute: gl.constexpr, consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    """A consumer's loop over the tiles of `produce_waves`: compute(tile, wave, step, tail_phase,
    consumer, kernel, OPTIONS) returns the next step and tail phase."""
    waves = num_waves(kernel.schedule)
    step, tail_phase = 0, 0
    for wave in range(waves):
        tile = pop_tile(kernel.queue, wave)
        step, tail_phase = compute(tile, wave, step, tail_phase, consumer, kernel, OPTIONS)
        release(kernel.queue, wave)
    tma.store_wait(0)


@gluon.jit
def produce_taken(load: gl.constexpr, num_tiles, kernel, OPTIONS: gl.constexpr):
    """As `produce_waves`, of tiles that thread blocks take one by one from the first num_tiles of
    the list. Segment -1 ends the queue."""
    step, wave = 0, 0
    tile = take_tile(kernel.schedule, num_tiles, OPTIONS.mask)
    push_tile(kernel.queue, wave, tile)
    while tile.segment >= 0:
        step = load(tile, wave, step, kernel, OPTIONS)
        wave += 1
        tile = take_tile(kernel.schedule, num_tiles, OPTIONS.mask)
        push_tile(kernel.queue, wave, tile)


@gluon.jit
def consume_taken(compute: gl.constexpr, consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    """As `consume_waves`, of the tiles of `produce_taken`."""
    step, tail_phase, wave = 0, 0, 0
    tile = pop_tile(kernel.queue, wave)
    while tile.segment >= 0:
        step, tail_phase = compute(tile, wave, step, tail_phase, consumer, kernel, OPTIONS)
        release(kernel.queue, wave)
        wave += 1
        tile = pop_tile(kernel.queue, wave)


# -- blocks that a tile visits ---------------------------------------------------------------------


@gluon.jit
def first_target_of(tile, MASK: gl.constexpr):
    """Column of the first target. Without a mask nothing reads it, and any number will do."""
    if MASK is None:
        return tile.kv_len
    else:
        return tile.first_target


@gluon.jit
def in_strips(tile, OPTIONS: gl.constexpr, BLOCK: gl.constexpr):
    """A tile of queries whose `block` is that of its first consumer's 64 rows. Negative: consumers
    have no rows (`first_query_row`)."""
    ROWS: gl.constexpr = OPTIONS.consumers * WARPGROUP_ROWS
    MASK: gl.constexpr = OPTIONS.mask
    row = first_query_row(tile.block, tile.q_len, MASK, ROWS, BLOCK)
    return _tile(tile, tile.segment, row // WARPGROUP_ROWS, tile.first_target)


@gluon.jit
def has_rows(tile, first, MASK: gl.constexpr):
    """Whether a consumer has rows of a tile of queries, from the `first` one on."""
    if MASK is None:
        return first < tile.q_len
    else:
        return (first >= 0) & (first < tile.q_len)


@gluon.jit
def key_blocks(tile, MASK: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """The Blocks of keys that ROWS query rows visit, and their number. tile: of `in_strips`."""
    row = tile.block * WARPGROUP_ROWS
    last_row = gl.minimum(row + ROWS, tile.q_len) - 1
    row, shift = gl.maximum(row, 0), tile.kv_len - tile.q_len
    blocks = column_blocks(
        row + shift, last_row + shift, tile.kv_len, first_target_of(tile, MASK), MASK, BLOCK
    )
    return blocks, num_masked_blocks(blocks) + blocks.full_count


@gluon.jit
def query_blocks(tile, MASK: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """The Blocks of query rows that visit a tile of ROWS keys, and their number."""
    blocks = row_blocks(
        tile.block * ROWS, tile.q_len, tile.kv_len, first_target_of(tile, MASK), MASK, BLOCK, ROWS
    )
    return blocks, num_masked_blocks(blocks) + blocks.full_count


@gluon.jit
def visited_block(number, blocks):
    """The number-th block in the order of the Hopper kernels: masked blocks first, in descending
    order, as the last block is where the segment ends; then full blocks, ascending."""
    masked = num_masked_blocks(blocks)
    return gl.where(
        number < masked,
        masked_block(masked - 1 - number, blocks),
        blocks.full_first + number - masked,
    )


@gluon.jit
def consumer_visits(
    tile, strip, block, BLOCKS_OF: gl.constexpr, OPTIONS: gl.constexpr, BLOCK: gl.constexpr
):
    """Whether a consumer's 64 rows, the strip-th of the segment, would visit a block that its tile
    visits. BLOCKS_OF: key_blocks or query_blocks."""
    if OPTIONS.mask is None:
        return True
    else:
        rows = _tile(tile, tile.segment, strip, tile.first_target)
        blocks, _ = BLOCKS_OF(rows, OPTIONS.mask, WARPGROUP_ROWS, BLOCK)
        return is_visited(block, blocks)


@gluon.jit
def num_skipped(
    tile, blocks, visited, consumer: gl.constexpr, OPTIONS: gl.constexpr, BLOCK: gl.constexpr
):
    """How many of the first blocks of keys that a tile visits no row of the consumer sees. At least
    one block is left, as the rows need a result."""
    last = gl.minimum(num_masked_blocks(blocks), visited - 1)
    count = gl.to_tensor(0)
    strip = tile.block + consumer
    while (count < last) & (
        consumer_visits(tile, strip, visited_block(count, blocks), key_blocks, OPTIONS, BLOCK) == 0
    ):
        count += 1
    return count
