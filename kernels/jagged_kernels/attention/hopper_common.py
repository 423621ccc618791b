"""Parts of the attention kernels for Hopper: the tile queue, the blocks that a tile visits,
visibility in registers, and the launch."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common.activations import activation_function
from ..common.device import device_properties
from ..common.gluon_api import thread_barrier
from ..common.loads import load_listed_tile, load_tile, zigzag_waves
from ..common.pipeline import (
    WARPGROUP_ROWS,
    consumer_wait,
    head_descriptor,
    make_barriers,
    mma_layout,
    vector_layout,
)
from .configs import HopperConfig
from .mask import (
    column_blocks,
    first_target_column,
    is_visible,
    is_visited,
    masked_block,
    num_masked_blocks,
    row_blocks,
    visible_columns,
)
from .params import AttentionParams, MaskParams, Operands

TILE_FIELDS = gl.constexpr(8)
TILE_SLOTS = gl.constexpr(4)  # tiles of one block follow one another quickly


class Schedule(NamedTuple):
    """The tiles of a launch and the segments that they belong to.

    num_segments: number of key segments; None with one query group. num_targets_ptr: None unless
    the mask has targets.
    """

    tiles_ptr: gl.tensor
    num_tiles_ptr: gl.tensor
    q_offsets_ptr: gl.tensor
    kv_offsets_ptr: gl.tensor
    num_segments: gl.tensor
    num_targets_ptr: gl.tensor


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


class DsTile(NamedTuple):
    """A Tile of a kernel that stores or reads dS, which is not done under a mask.

    ds_block: the first block of the segment's dS in the workspace; negative: it is not stored.
    """

    segment: gl.tensor
    head: gl.tensor
    block: gl.tensor
    q_start: gl.tensor
    q_len: gl.tensor
    kv_start: gl.tensor
    kv_len: gl.tensor
    ds_block: gl.tensor


class TileQueue(NamedTuple):
    """Passes tiles from the producer to the consumers. The producer loads them, as it has time to
    wait.

    slots: the words of TILE_SLOTS tiles. full: arrive count 1, the producer's. empty: arrive count
    1 per consumer.
    """

    slots: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Position(NamedTuple):
    """Where a consumer's block of scores lies: column of its first row, first column, number of
    keys from there on in the segment, and the segment's first target column."""

    row: gl.tensor
    column: gl.tensor
    num_keys: gl.tensor
    first_target: gl.tensor


class QueryRows(NamedTuple):
    """A consumer's rows of a tile of the backward: q and dO in shared memory, and with softmax lse
    and delta in registers."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    lse: gl.tensor
    delta: gl.tensor


# -- tiles -----------------------------------------------------------------------------------------


@gluon.jit
def num_waves(schedule):
    """How many tiles this thread block gets."""
    return zigzag_waves(gl.load(schedule.num_tiles_ptr), gl.program_id(0), gl.num_programs(0))


@gluon.jit
def load_wave(schedule, wave, waves, MASK: gl.constexpr, ds_blocks_ptr=None):
    """The Tile of a wave; with a ds_blocks_ptr, a DsTile. The producer calls it one wave ahead, as
    its loads depend on one another."""
    tile = load_tile(
        schedule.tiles_ptr,
        wave,
        waves,
        gl.program_id(0),
        gl.num_programs(0),
        schedule.q_offsets_ptr,
        schedule.kv_offsets_ptr,
        schedule.num_segments,
    )
    if ds_blocks_ptr is None:
        first_target = first_target_column(
            schedule.num_targets_ptr, tile.segment, tile.kv_len, MASK
        )
        return Tile(
            tile.segment,
            tile.head,
            tile.block,
            tile.q_start,
            tile.q_len,
            tile.kv_start,
            tile.kv_len,
            first_target,
        )
    else:
        ds_block = gl.load(ds_blocks_ptr + tile.segment)
        return DsTile(
            tile.segment,
            tile.head,
            tile.block,
            tile.q_start,
            tile.q_len,
            tile.kv_start,
            tile.kv_len,
            ds_block,
        )


@gluon.jit
def take_tile(schedule, num_tiles, next_tile_ptr, MASK: gl.constexpr):
    """The next Tile that no thread block has taken, of the first num_tiles of the list; segment -1
    past them."""
    position = gl.atomic_add(next_tile_ptr, 1, sem="relaxed")
    tile = load_listed_tile(
        schedule.tiles_ptr,
        gl.maximum(gl.minimum(position, num_tiles - 1), 0),
        schedule.q_offsets_ptr,
        schedule.kv_offsets_ptr,
        schedule.num_segments,
    )
    first_target = first_target_column(schedule.num_targets_ptr, tile.segment, tile.kv_len, MASK)
    segment = gl.where(position < num_tiles, tile.segment, -1)
    return Tile(
        segment,
        tile.head,
        tile.block,
        tile.q_start,
        tile.q_len,
        tile.kv_start,
        tile.kv_len,
        first_target,
    )


@gluon.jit
def make_tile_queue(CONSUMERS: gl.constexpr):
    slots = gl.allocate_shared_memory(
        gl.int32, [TILE_SLOTS * TILE_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    return TileQueue(slots, make_barriers(TILE_SLOTS, 1), make_barriers(TILE_SLOTS, CONSUMERS))


@gluon.jit
def push_tile(queue, wave, tile):
    """Hand a Tile or DsTile to every consumer."""
    slot = wave % TILE_SLOTS
    mbarrier.wait(queue.empty.index(slot), wave // TILE_SLOTS & 1 ^ 1)
    for i in gl.static_range(TILE_FIELDS):
        word = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + tile[i].to(
            gl.int32
        )
        queue.slots.index(slot * TILE_FIELDS + i).store(word)
    thread_barrier()
    mbarrier.arrive(queue.full.index(slot), count=1)


@gluon.jit
def load_word(words, i):
    """A word of `[words, 1]` in shared memory."""
    return gl.sum(words.index(i).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def pop_tile(queue, wave, wanted=True, HAS_DS: gl.constexpr = False):
    """The Tile of a wave; with HAS_DS, a DsTile. Undefined unless `wanted`. release_tile must
    follow."""
    mbarrier.wait(queue.full.index(wave % TILE_SLOTS), wave // TILE_SLOTS & 1, pred=wanted)
    slots, i = queue.slots, wave % TILE_SLOTS * TILE_FIELDS
    segment, head, block, q_start = (
        load_word(slots, i),
        load_word(slots, i + 1),
        load_word(slots, i + 2),
        load_word(slots, i + 3),
    )
    q_len, kv_start, kv_len, last = (
        load_word(slots, i + 4),
        load_word(slots, i + 5),
        load_word(slots, i + 6),
        load_word(slots, i + 7),
    )
    if HAS_DS:
        return DsTile(
            segment, head, block, q_start.to(gl.int64), q_len, kv_start.to(gl.int64), kv_len, last
        )
    else:
        return Tile(
            segment, head, block, q_start.to(gl.int64), q_len, kv_start.to(gl.int64), kv_len, last
        )


@gluon.jit
def release_tile(queue, wave):
    """This warpgroup is done with a tile. Do not call it right after pop_tile, whose loads may
    still be under way."""
    mbarrier.arrive(queue.empty.index(wave % TILE_SLOTS), count=1)


# -- blocks that a tile visits ---------------------------------------------------------------------


@gluon.jit
def first_target_of(tile, MASK: gl.constexpr):
    """Column of the first target. Without a mask nothing reads it, and any number will do."""
    if MASK is None:
        return tile.kv_len
    else:
        return tile.first_target


@gluon.jit
def key_blocks(tile, MASK: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """The Blocks of keys that a tile of ROWS query rows visits, and their number."""
    row = tile.block * ROWS
    last_row = gl.minimum(row + ROWS, tile.q_len) - 1
    shift = tile.kv_len - tile.q_len
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
    tile,
    block,
    BLOCKS_OF: gl.constexpr,
    consumer: gl.constexpr,
    CONSUMERS: gl.constexpr,
    MASK: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """Whether a consumer's 64 rows would visit a block that its tile visits. BLOCKS_OF: key_blocks
    or query_blocks."""
    if MASK is None:
        return True
    else:
        block_of_consumer = tile.block * CONSUMERS + consumer
        rows = Tile(
            tile.segment,
            tile.head,
            block_of_consumer,
            tile.q_start,
            tile.q_len,
            tile.kv_start,
            tile.kv_len,
            tile.first_target,
        )
        blocks, _ = BLOCKS_OF(rows, MASK, WARPGROUP_ROWS, BLOCK)
        return is_visited(block, blocks)


@gluon.jit
def visible_keys(position, MASK: gl.constexpr, COLUMNS: gl.constexpr):
    """Which of a block's first COLUMNS keys the consumer's rows see, `[64 or 1, COLUMNS]`."""
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, COLUMNS)
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :]
    if MASK is None:
        return columns < position.num_keys
    else:
        rows = position.row + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))[:, None]
        return is_visible(
            position.column + columns,
            rows,
            visible_columns(rows, position.first_target, MASK),
            MASK,
        )


# -- delta -----------------------------------------------------------------------------------------


@gluon.jit
def row_sums(out_ptr, do_ring, step, row, head, num_rows, HEADS: gl.constexpr, DIM: gl.constexpr):
    """rowsum(dO ∘ O) of a consumer's rows: dO from a step of a ring, O from global memory."""
    WIDTH: gl.constexpr = do_ring.buffers.shape[3]
    L: gl.constexpr = vector_layout(WIDTH)
    rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    ptrs = (
        out_ptr
        + row * (HEADS * DIM)
        + head * DIM
        + rows[:, None] * (HEADS * DIM)
        + columns[None, :]
    )
    out = gl.load(ptrs, mask=(rows < num_rows)[:, None] & (columns < DIM)[None, :], other=0.0)
    do = consumer_wait(do_ring, step).load(L)
    return gl.sum(out.to(gl.float32) * do.to(gl.float32), 1)


# -- launch ----------------------------------------------------------------------------------------


def launch_options(config: HopperConfig) -> dict:
    """The constant arguments and options that follow from a kernel's configuration."""
    return dict(
        CONSUMERS=config.consumers,
        STAGES=config.stages,
        ROW_STAGES=config.row_stages,
        REGISTERS=config.registers,
        num_warps=4,
        maxnreg=config.launch_registers,
    )


def launch_constants(
    config: HopperConfig, operands: Operands, params: AttentionParams, q_shared: bool = False
) -> dict:
    """The launch arguments that all kernels share."""
    q, k, v, _, _ = operands
    return _constants(
        config,
        q.shape[1],
        k.shape[1],
        v.shape[2],
        q.dtype,
        params.activation,
        params.mask,
        q_shared,
    )


@functools.cache
def _constants(
    config: HopperConfig,
    heads: int,
    kv_heads: int,
    v_dim: int,
    dtype: torch.dtype,
    activation: str,
    mask: MaskParams | None,
    q_shared: bool,
) -> dict:
    return launch_options(config) | dict(
        HEADS=heads,
        GROUP=heads // kv_heads,
        V_DIM=v_dim,
        ACTIVATION=activation_function(activation, dtype == torch.bfloat16),
        MASK=mask and MaskParams(*mask),
        Q_SHARED=q_shared,
    )


def grid(tiles: Tensor, config: HopperConfig) -> tuple[int, ...]:
    """As many thread blocks as run at a time, or one per tile if there are fewer; `()`, no launch,
    without tiles."""
    blocks = min(device_properties(tiles.device).num_sms * config.ctas_per_sm, tiles.shape[0])
    return (blocks,) if blocks else ()


def result_descriptor(x: Tensor) -> TensorDescriptor | None:
    """TMA descriptor for stores of 64 rows; None for fp32 partial sums, which are stored from
    registers."""
    return None if x.dtype == torch.float32 else head_descriptor(x, WARPGROUP_ROWS.value)
