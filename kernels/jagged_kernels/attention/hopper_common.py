"""What the attention kernels for Hopper share: the schedule's tiles, the blocks that they visit, scores, and the launch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common.activations import activation_function
from ..common.configs import padded_dim
from ..common.device import descriptor_sizes, device_properties
from ..common.gluon_api import thread_barrier
from ..common.loads import load_tile as read_tile
from ..common.loads import zigzag_waves
from ..common.pipeline import LOG2_E, WARPGROUP_ROWS, box_layout, make_barriers, product_layout
from .configs import HopperConfig
from .mask import (
    column_blocks,
    first_target_column,
    is_visible,
    is_visited,
    num_partial_blocks,
    partial_block,
    row_blocks,
    visible_columns,
)
from .params import AttentionParams, MaskParams, Operands

TILE_FIELDS = gl.constexpr(8)
TILE_SLOTS = gl.constexpr(4)  # tiles of one block follow each other quickly

# -- tiles and their blocks ---------------------------------------------------------------------------------------------------------


@gluon.jit
def num_waves(schedule):
    """How many tiles this thread block gets."""
    _, num_tiles_ptr, _, _, _, _ = schedule
    return zigzag_waves(gl.load(num_tiles_ptr), gl.program_id(0), gl.num_programs(0))


@gluon.jit
def tile_of_wave(schedule, wave, waves, MASK: gl.constexpr, places_ptr=None):
    """The tile of a wave, as tiles.py has it, and its first target column, or the place of its segment's score gradients, which are kept
    without a mask alone. Asked for one wave ahead: its loads wait for one another."""
    tiles_ptr, _, q_offsets_ptr, kv_offsets_ptr, num_segments, num_targets_ptr = schedule
    segment, head, block, q_start, q_len, kv_start, kv_len = read_tile(
        tiles_ptr, wave, waves, gl.program_id(0), gl.num_programs(0), q_offsets_ptr, kv_offsets_ptr, num_segments
    )
    if places_ptr is None:
        last = first_target_column(num_targets_ptr, segment, kv_len, MASK)
    else:
        last = gl.load(places_ptr + segment)
    return segment, head, block, q_start, q_len, kv_start, kv_len, last


@gluon.jit
def make_tile_ring(CONSUMERS: gl.constexpr):
    """Through which the loading warp, which has time to wait for them, hands tiles to those that compute."""
    slots = gl.allocate_shared_memory(gl.int32, [TILE_SLOTS * TILE_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return slots, make_barriers(TILE_SLOTS, 1), make_barriers(TILE_SLOTS, CONSUMERS)


@gluon.jit
def pass_tile(ring, wave, tile):
    """What tile_of_wave gave, to be taken by every warpgroup."""
    slots, full, empty = ring
    slot = wave % TILE_SLOTS
    mbarrier.wait(empty.index(slot), wave // TILE_SLOTS & 1 ^ 1)
    for i in gl.static_range(TILE_FIELDS):
        value = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + tile[i].to(gl.int32)
        slots.index(slot * TILE_FIELDS + i).store(value)
    thread_barrier()
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _field(slots, i):
    return gl.sum(slots.index(i).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def take_tile(ring, wave, wanted=True):
    """What tile_of_wave gave; anything if it is not wanted, as there is none."""
    slots, full, _ = ring
    mbarrier.wait(full.index(wave % TILE_SLOTS), wave // TILE_SLOTS & 1, pred=wanted)
    i = wave % TILE_SLOTS * TILE_FIELDS
    segment, head, block, q_start = _field(slots, i), _field(slots, i + 1), _field(slots, i + 2), _field(slots, i + 3)
    q_len, kv_start, kv_len, target = _field(slots, i + 4), _field(slots, i + 5), _field(slots, i + 6), _field(slots, i + 7)
    return segment, head, block, q_start.to(gl.int64), q_len, kv_start.to(gl.int64), kv_len, target


@gluon.jit
def end_tile(ring, wave):
    """This warpgroup is done with the tile. Not at once when it has taken it: a load is issued before an arrival, but need not have been
    carried out."""
    _, _, empty = ring
    mbarrier.arrive(empty.index(wave % TILE_SLOTS), count=1)


@gluon.jit
def key_blocks(tile, MASK: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """The blocks of keys that a tile of ROWS query rows visits, as masks.py has them, and their number."""
    _, _, block, _, q_len, _, kv_len, first_target = tile
    row = block * ROWS
    last_row = gl.minimum(row + ROWS, q_len) - 1
    shift = kv_len - q_len
    blocks = column_blocks(row + shift, last_row + shift, kv_len, first_target, MASK, BLOCK)
    return blocks, num_partial_blocks(blocks) + blocks[8]


@gluon.jit
def query_blocks(tile, MASK: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """The blocks of query rows that visit a tile of ROWS keys, as masks.py has them, and their number."""
    _, _, block, _, q_len, _, kv_len, first_target = tile
    blocks = row_blocks(block * ROWS, q_len, kv_len, first_target, MASK, BLOCK, ROWS)
    return blocks, num_partial_blocks(blocks) + blocks[8]


@gluon.jit
def visited_block(number, blocks):
    """The number-th block: those that the mask or the segment's end cuts come first, last one first, which is where the segment ends."""
    partial = num_partial_blocks(blocks)
    return gl.where(number < partial, partial_block(partial - 1 - number, blocks), blocks[7] + number - partial)


@gluon.jit
def own_rows_visit(
    tile, block, BLOCKS_OF: gl.constexpr, consumer: gl.constexpr, CONSUMERS: gl.constexpr, MASK: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Whether a warpgroup's 64 rows of a tile would visit a block, which the tile visits; BLOCKS_OF: key_blocks or query_blocks."""
    if MASK is None:
        return True
    else:
        segment, head, number, q_start, q_len, kv_start, kv_len, first_target = tile
        own_tile = segment, head, number * CONSUMERS + consumer, q_start, q_len, kv_start, kv_len, first_target
        blocks, _ = BLOCKS_OF(own_tile, MASK, WARPGROUP_ROWS, BLOCK)
        return is_visited(block, blocks)


@gluon.jit
def visible_keys(row, column, num_keys, first_target, MASK: gl.constexpr, COLUMNS: gl.constexpr):
    """Which of a block's first keys, num_keys of them real, the warpgroup's rows see."""
    L: gl.constexpr = product_layout(WARPGROUP_ROWS, COLUMNS)
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :]
    if MASK is None:
        return columns < num_keys
    else:
        rows = row + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))[:, None]
        return is_visible(column + columns, rows, visible_columns(rows, first_target, MASK), MASK)


# -- parts of their products --------------------------------------------------------------------------------------------------------


@gluon.jit
def multiply_rows(rows, others):
    """rows othersᵀ, [64, others], under way; `rows` in shared memory or registers."""
    COLUMNS: gl.constexpr = others.shape[0]
    none = gl.zeros([WARPGROUP_ROWS, COLUMNS], gl.float32, product_layout(WARPGROUP_ROWS, COLUMNS))
    return warpgroup_mma(rows, others.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def as_factor(p, DTYPE: gl.constexpr, WIDTH: gl.constexpr):
    """A product's result as the first factor of one WIDTH columns wide: rounded, in the registers where it is."""
    return gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, product_layout(WARPGROUP_ROWS, WIDTH), 2))


@gluon.jit
def score_scale(scale, ACTIVATION: gl.constexpr):
    """Softmax takes exponentials in base 2."""
    if ACTIVATION is None:
        return scale * LOG2_E
    else:
        return scale


@gluon.jit
def segment_factor(factor, output_scale, segment_scale_ptr, segment):
    """factor · output scale, which may be the segment's own."""
    if segment_scale_ptr is None:
        return factor * output_scale
    else:
        return factor * gl.load(segment_scale_ptr + segment)


# -- launch -------------------------------------------------------------------------------------------------------------------------


def launch_options(config: HopperConfig) -> dict:
    """What of a launch follows from its configuration."""
    return dict(
        CONSUMERS=config.consumers,
        STAGES=config.stages,
        ROW_STAGES=config.row_stages,
        REGISTERS=config.registers,
        num_warps=4,
        maxnreg=config.launch_registers,
    )


def launch_constants(config: HopperConfig, operands: Operands, params: AttentionParams) -> dict:
    """The launch arguments that all kernels share."""
    q, k, v, _, _ = operands
    return _constants(config, q.shape[1], k.shape[1], v.shape[2], q.dtype, params.activation, params.mask, params.q_shared)


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
        MASK=mask,
        Q_SHARED=q_shared,
    )


def grid(tiles: Tensor) -> tuple[int, ...]:
    """As many thread blocks as the GPU holds at a time; none, which is no grid, where there are no tiles."""
    blocks = min(device_properties(tiles.device)[1], tiles.shape[0])
    return (blocks,) if blocks else ()


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Of `[rows, H, D]`, as `[H, rows, D]`, in boxes of so many rows of a head; columns past D read as 0."""
    return TensorDescriptor(x, *descriptor_sizes(x), *_box(rows, x.shape[2], x.dtype))


@functools.cache
def _box(rows: int, dim: int, dtype: torch.dtype):
    """Shape and layout of a descriptor's box."""
    box = [1, rows, padded_dim(dim)]
    return box, box_layout(dtype, *box)


def result_descriptor(x: Tensor) -> TensorDescriptor | None:
    """Through which a kernel stores 64 rows of a head; none of what is summed afterwards in fp32."""
    return None if x.dtype == torch.float32 else descriptor(x, WARPGROUP_ROWS.value)
