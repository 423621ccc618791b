"""dS stored by Hopper's dk, dv kernel, and the kernel that computes dq from it with one MMA instead
of three.

    dQ = scale · dS k                                                                 per segment
    and head

dS is stored in a workspace, in blocks of 64 keys by 64 queries. The blocks of one head and 64 keys
follow one another, for all queries. A block is in the order of the dk, dv kernel's registers: each
thread stores and loads 16 bytes at a time, and no kernel transposes it in shared memory. If a
segment's blocks have no room, its dS is not stored, and the kernel in hopper_backward.py computes
its dq.

Roles, at head dim 128 | 64:
    warps 0–3, 4–7 | 0–3, 4–7, 8–11   consumers: MMA, epilogue. `_dq_consume`
    warp 8 | 12                       producer: tiles and TMA loads. `_dq_produce`
Registers per thread: consumers 240, 240 | 168, 160, 160; producer 24.

Tile: 128 | 192 query rows, 64 per consumer, by blocks of 64 keys.

Barriers, one per stage s:
    ds[i].full[s]                   arrive count 1, the TMA load of that buffer, or the producer's
    arrival if the consumer has no rows ds[i].empty[s]                  arrive count 1: consumer i,
    its only reader; the MMA of the registers loaded from it is complete k.full[s], k.empty[s]
    arrive counts 1, the TMA load, and 2 | 3, one per consumer tail
    arrive count 2 | 3, one per consumer: its share of k's rows past the segment is 0 queue.full[s],
    queue.empty[s]   arrive counts 1 and 2 | 3: the words of a tile

Shared memory in KiB, plus 1 for the tile queue, the barriers and the arguments of warps:
    head dim 128: 160 = dS 2 × 4 × 8 + k 4 × 16 + epilogue 2 × 16
    head dim  64: 152 = dS 3 × 4 × 8 + k 4 × 8 + epilogue 3 × 8
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ..common.configs import padded_dim
from ..common.device import cdiv, mean_seqlen
from ..common.loads import segment_lengths
from ..common.pipeline import (
    WARPGROUP_ROWS,
    Output,
    Ring,
    Tail,
    consumer_release,
    consumer_wait,
    launch_specialised,
    make_barriers,
    make_epilogue_buffers,
    make_ring,
    make_rings,
    mma_layout,
    producer_load,
    producer_skip,
    skip_key_block,
    store_epilogue,
    wait_for_tail,
    zero_tail,
)
from ..common.ptxas import safe_ptxas
from .configs import HopperConfig
from .hopper_common import (
    Schedule,
    TileQueue,
    key_blocks,
    launch_options,
    load_wave,
    make_tile_queue,
    num_waves,
    pop_tile,
    push_tile,
    release_tile,
    visited_block,
)
from .mask import num_masked_blocks
from .params import Operands
from .scales import output_factor
from .select import storing_ds_is_faster

SIDE = gl.constexpr(64)  # a block of dS is 64 keys by 64 queries
BLOCK_BYTES = 64 * 64 * 2
WORKSPACE = 2**31  # bytes of dS at most, unless the gradients take more
# a part of the batch begins at a multiple of 4 segments, so that its offsets begin at a 16-byte
# boundary, as kernels assume
PART = 4

# -- blocks of the workspace -----------------------------------------------------------------------


@triton.jit
def _cdiv_lengths(offsets_ptr, segments, real, BLOCK: tl.constexpr):
    return tl.cdiv(segment_lengths(offsets_ptr, segments, real).to(tl.int32), BLOCK).to(tl.int64)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "capacity"])
def attention_ds_blocks_kernel(
    q_offsets_ptr,
    kv_offsets_ptr,
    num_tiles_ptr,
    ds_blocks_ptr,
    num_other_tiles_ptr,
    num_segments,
    capacity,
    HEADS: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes each segment's first block in a workspace of `capacity` blocks, -1 if its dS is not
    stored because not all of its blocks have room. Also writes the number of tiles for the dq
    kernel that computes dS again: 0 if the dS of all segments is stored."""
    total = tl.zeros([], tl.int64)
    for start in range(0, num_segments, CHUNK):
        segments = start + tl.arange(0, CHUNK)
        real = segments < num_segments
        queries = _cdiv_lengths(q_offsets_ptr, segments, real, QUERY_BLOCK) * (QUERY_BLOCK // SIDE)
        blocks = queries * _cdiv_lengths(kv_offsets_ptr, segments, real, SIDE) * HEADS
        end = total + tl.cumsum(blocks, 0)
        tl.store(
            ds_blocks_ptr + segments,
            tl.where(end <= capacity, end - blocks, -1).to(tl.int32),
            mask=real,
        )
        total += tl.sum(blocks, 0)
    tl.store(num_other_tiles_ptr, tl.where(total > capacity, tl.load(num_tiles_ptr), 0))


def assign_ds_blocks(
    q_offsets: Tensor,
    kv_offsets: Tensor,
    num_tiles: Tensor,
    capacity: int,
    heads: int,
    query_block: int,
) -> tuple[Tensor, Tensor]:
    """Launch attention_ds_blocks_kernel. Returns ds_blocks, int32 `[B]`, and the number of tiles,
    `[1]`, for the dq kernel that computes dS again.

    query_block: query rows of the dk, dv kernel's blocks. It stores full blocks, also where the
    segment ends within one.
    """
    segments = q_offsets.shape[0] - 1
    ds_blocks, num_other_tiles = (
        q_offsets.new_empty(segments, dtype=torch.int32),
        torch.empty_like(num_tiles),
    )
    attention_ds_blocks_kernel[(1,)](
        q_offsets,
        kv_offsets,
        num_tiles,
        ds_blocks,
        num_other_tiles,
        segments,
        capacity,
        HEADS=heads,
        QUERY_BLOCK=query_block,
        CHUNK=1024,
    )
    return ds_blocks, num_other_tiles


def workspace_limit(workspace: int | None, *gradients: Tensor) -> int:
    """How many bytes a backward may take besides its results: `workspace`; if it is None,
    `WORKSPACE` or the size of the gradients, whichever is larger."""
    return max(WORKSPACE, sum(x.nbytes for x in gradients)) if workspace is None else workspace


def plan_workspace(
    q: Tensor,
    k: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    workspace: int | None,
    *gradients: Tensor,
) -> tuple[int, list[tuple[int, int]]]:
    """The number of blocks to allocate, and the parts of the batch, (first segment, end), that use
    them one after the other.

    It follows from shapes, without a sync: as many blocks as segments of uniform lengths up to
    twice the mean would need, within `workspace_limit`. (0, []) where storing dS is not faster, or
    a few segments exceed the limit.
    """
    num_segments = q_offsets.shape[0] - 1
    queries, keys = (
        mean_seqlen(q.shape[0], q_offsets) / 64,
        mean_seqlen(k.shape[0], kv_offsets) / 64,
    )
    num_blocks = math.ceil(4 / 3 * q.shape[1] * num_segments * (queries + 0.5) * (keys + 0.5))
    if not storing_ds_is_faster(num_blocks, 64 * min(queries, keys), q.shape[2]):
        return 0, []
    room = workspace_limit(workspace, *gradients) // BLOCK_BYTES
    if PART * num_blocks > room * num_segments:
        return 0, []
    parts = math.ceil(num_blocks / room)
    bounds = sorted(
        {
            min(PART * math.ceil(part * num_segments / parts / PART), num_segments)
            for part in range(parts + 1)
        }
    )
    return min(num_blocks, room), list(zip(bounds, bounds[1:]))


@gluon.jit
def first_ds_block(ds_block, head, key_block, q_len, kv_len, QUERY_BLOCK: gl.constexpr):
    """The first workspace block of a head and 64 keys. ds_block: the segment's first block."""
    queries = gl.cdiv(q_len, QUERY_BLOCK) * (QUERY_BLOCK // SIDE)
    return ds_block + (head * gl.cdiv(kv_len, SIDE) + key_block).to(gl.int64) * queries


@gluon.jit
def store_ds(ds, ds_ptr, block):
    """Store dSᵀ [64 keys, queries], an MMA operand, in the order of its registers, from a workspace
    block on. Negative: not stored."""
    QUERIES: gl.constexpr = ds.shape[1]
    L: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    # keys: warp, half, lane; queries: 16 at a time, half, lane, pair
    parts = ds.reshape([4, 2, 8, QUERIES // 16, 2, 4, 2]).permute((3, 0, 2, 5, 4, 1, 6))
    flat = gl.convert_layout(parts.reshape([SIDE * QUERIES]), L)
    gl.store(
        ds_ptr + block * (SIDE * SIDE) + gl.arange(0, SIDE * QUERIES, layout=L),
        flat,
        mask=block >= 0,
    )


@gluon.constexpr_function
def _stored_layout():
    """Layout in which a warp of the dq kernel reads a block: 16 queries, which the four warps of
    the dk, dv kernel stored."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )


@gluon.jit
def _load_ds(buffer, WIDTH: gl.constexpr):
    """dS [64 queries, 64 keys] of a block that store_ds wrote, as the first operand of an MMA of
    WIDTH columns. Registers are transposed 8 × 8 elements at a time."""
    parts = buffer.load(_stored_layout())
    parts = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        "=r,r",
        [parts],
        dtype=parts.dtype,
        is_pure=False,
        pack=2,
    )
    parts = parts.reshape([4, 4, 8, 4, 2, 2, 2]).permute((0, 4, 2, 1, 5, 3, 6))
    return gl.convert_layout(
        parts.reshape([SIDE, SIDE]), gl.DotOperandLayout(0, mma_layout(WARPGROUP_ROWS, WIDTH), 2)
    )


# -- dq from dS ------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """Constants of a launch. query_block: rows of the dk, dv kernel's query blocks, which it stores
    in full."""

    heads: gl.constexpr
    group: gl.constexpr
    head_dim: gl.constexpr
    query_block: gl.constexpr
    consumers: gl.constexpr


class _Rings(NamedTuple):
    """Buffers in shared memory. ds: a ring per consumer; in a consumer, its own. tail: barrier of
    the keys' tail."""

    ds: Ring
    k: Ring
    tail: gl.shared_memory_descriptor


class _Outputs(NamedTuple):
    dq_desc: gl.tensor
    dq_ptr: gl.tensor
    buffers: gl.shared_memory_descriptor


class _Scales(NamedTuple):
    factor: gl.tensor
    output_scale: gl.tensor
    segment_scale_ptr: gl.tensor


class _Kernel(NamedTuple):
    """What the kernel hands to its warps."""

    ds_desc: gl.tensor
    k_desc: gl.tensor
    schedule: Schedule
    ds_blocks_ptr: gl.tensor
    rings: _Rings
    outputs: _Outputs
    scales: _Scales
    queue: TileQueue


@gluon.jit
def _dq_produce(kernel, OPTIONS: gl.constexpr):
    schedule, rings = kernel.schedule, kernel.rings
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    waves = num_waves(schedule)
    next_tile = load_wave(schedule, 0, waves, None, kernel.ds_blocks_ptr)
    step = 0
    for wave in range(waves):
        tile = next_tile
        next_tile = load_wave(schedule, wave + 1, waves, None, kernel.ds_blocks_ptr)
        push_tile(kernel.queue, wave, tile)
        blocks, visited = key_blocks(tile, None, CONSUMERS * WARPGROUP_ROWS, SIDE)
        visited = gl.where(tile.ds_block < 0, 0, visited)
        for number in range(visited):
            key_block = visited_block(number, blocks)
            producer_load(
                rings.k,
                kernel.k_desc,
                step + number,
                tile.head // OPTIONS.group,
                tile.kv_start + key_block * SIDE,
            )
            first = first_ds_block(
                tile.ds_block, tile.head, key_block, tile.q_len, tile.kv_len, OPTIONS.query_block
            )
            for consumer in gl.static_range(CONSUMERS):
                query_block = tile.block * CONSUMERS + consumer
                if query_block * SIDE < tile.q_len:
                    producer_load(
                        rings.ds[consumer],
                        kernel.ds_desc,
                        step + number,
                        0,
                        (first + query_block) * SIDE,
                    )
                else:
                    producer_skip(rings.ds[consumer], step + number)
        step += visited


@gluon.jit
def _dq_block(
    rings,
    step,
    acc,
    num_keys,
    tail,
    consumer: gl.constexpr,
    CONSUMERS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """One key block: acc += dS k. Past the segment's last key, dS holds gradients of another
    segment's keys."""
    k = consumer_wait(rings.k, step)
    if MASKED:
        has_tail = num_keys < SIDE
        if has_tail:
            zero_tail(k, num_keys, tail, consumer, CONSUMERS)
    ds = _load_ds(consumer_wait(rings.ds, step), k.shape[1])
    if MASKED:
        keys = gl.arange(0, SIDE, layout=gl.SliceLayout(0, ds.type.layout))
        ds = gl.where(keys[None, :] < num_keys, ds, 0.0)
        if has_tail:
            wait_for_tail(tail)
    acc = warpgroup_mma(ds, k, acc, is_async=True)
    acc, ds = warpgroup_mma_wait(0, deps=(acc, ds))
    consumer_release(rings.ds, step)
    consumer_release(rings.k, step)
    return acc


@gluon.jit
def _dq_consume(consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    schedule, outputs, scales, queue = kernel.schedule, kernel.outputs, kernel.scales, kernel.queue
    rings = _Rings(kernel.rings.ds[consumer], kernel.rings.k, kernel.rings.tail)
    output = Output(outputs.dq_desc, outputs.dq_ptr)
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    WIDTH: gl.constexpr = rings.k.buffers.shape[3]
    waves = num_waves(schedule)
    step, tail_phase = 0, 0
    for wave in range(waves):
        tile = pop_tile(queue, wave, HAS_DS=True)
        if tile.ds_block >= 0:
            blocks, visited = key_blocks(tile, None, CONSUMERS * WARPGROUP_ROWS, SIDE)
            masked = num_masked_blocks(blocks)
            num_keys = gl.where(masked > 0, tile.kv_len - visited_block(0, blocks) * SIDE, SIDE)
            first = (tile.block * CONSUMERS + consumer) * WARPGROUP_ROWS
            num_rows = tile.q_len - first
            tail = Tail(rings.tail, tail_phase)
            if num_rows > 0:
                acc = gl.zeros(
                    [WARPGROUP_ROWS, WIDTH], gl.float32, mma_layout(WARPGROUP_ROWS, WIDTH)
                )
                for number in range(masked):
                    acc = _dq_block(
                        rings, step + number, acc, num_keys, tail, consumer, CONSUMERS, True
                    )
                for number in range(masked, visited):
                    acc = _dq_block(
                        rings, step + number, acc, SIDE, tail, consumer, CONSUMERS, False
                    )
                acc = acc * (
                    scales.factor
                    * output_factor(scales.output_scale, scales.segment_scale_ptr, tile.segment)
                )
                store_epilogue(
                    acc,
                    output,
                    outputs.buffers.index(consumer),
                    0,
                    tile.q_start + first,
                    tile.head,
                    num_rows,
                    OPTIONS.heads,
                    OPTIONS.head_dim,
                )
            else:
                for number in range(visited):
                    left = gl.where(number == 0, num_keys, SIDE)
                    skip_key_block(
                        rings.k, rings.ds, step + number, left, tail, consumer, CONSUMERS
                    )
            step += visited
            tail_phase += (num_keys < SIDE).to(gl.int32)
        release_tile(queue, wave)
    tma.store_wait(0)


@safe_ptxas
@gluon.jit
def attention_bwd_dq_from_ds_hopper_kernel(
    ds_desc,
    k_desc,
    dq_desc,
    dq_ptr,
    ds_blocks_ptr,
    q_offsets_ptr,
    kv_offsets_ptr,
    tiles_ptr,
    num_tiles_ptr,
    segment_scale_ptr,
    scale,
    dact_factor,
    output_scale,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    QUERY_BLOCK: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """dq of a tile of query rows, in the segments whose dS is stored."""
    OPTIONS: gl.constexpr = _Options(HEADS, GROUP, HEAD_DIM, QUERY_BLOCK, CONSUMERS)
    schedule = Schedule(tiles_ptr, num_tiles_ptr, q_offsets_ptr, kv_offsets_ptr, None, None)
    rings = _Rings(
        make_rings(ds_desc, STAGES, CONSUMERS),
        make_ring(k_desc, STAGES, CONSUMERS),
        make_barriers(1, CONSUMERS),
    )
    outputs = _Outputs(dq_desc, dq_ptr, make_epilogue_buffers(k_desc, CONSUMERS))
    scales = _Scales(scale * dact_factor, output_scale, segment_scale_ptr)
    queue = make_tile_queue(CONSUMERS)
    kernel = _Kernel(ds_desc, k_desc, schedule, ds_blocks_ptr, rings, outputs, scales, queue)
    launch_specialised(_dq_consume, _dq_produce, kernel, OPTIONS, REGISTERS)


def dq_from_ds_constants(config: HopperConfig, operands: Operands) -> dict:
    """Constant arguments and launch options of attention_bwd_dq_from_ds_hopper_kernel, without
    QUERY_BLOCK."""
    q, k, *_ = operands
    options = launch_options(config)
    del options["ROW_STAGES"]  # dS has as many buffers as the keys
    return options | dict(HEADS=q.shape[1], GROUP=q.shape[1] // k.shape[1], HEAD_DIM=q.shape[2])


# -- delta -----------------------------------------------------------------------------------------


@safe_ptxas
@triton.jit(do_not_specialize=["num_rows", "stride_delta"])
def attention_delta_kernel(
    do_ptr,
    out_ptr,
    delta_ptr,
    num_rows,
    stride_row,
    stride_head,
    stride_delta,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """delta = rowsum(dO ∘ O), of a block of rows of a head."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (columns < DIM)[None, :]
    do = tl.load(
        do_ptr + rows[:, None] * stride_row + head * stride_head + columns[None, :],
        mask=mask,
        other=0.0,
    )
    out = tl.load(
        out_ptr + (rows[:, None] * HEADS + head) * DIM + columns[None, :], mask=mask, other=0.0
    )
    tl.store(
        delta_ptr + head * stride_delta + rows,
        tl.sum(do.to(tl.float32) * out.to(tl.float32), 1),
        mask=rows < num_rows,
    )


def write_delta(do: Tensor, out: Tensor, delta: Tensor) -> None:
    """Launch attention_delta_kernel; `out` contiguous, `delta` `[H, rows]`."""
    rows, heads, dim = do.shape
    attention_delta_kernel[(cdiv(rows, 64), heads)](
        do,
        out,
        delta,
        rows,
        do.stride(0),
        do.stride(1),
        delta.stride(0),
        HEADS=heads,
        DIM=dim,
        BLOCK_D=padded_dim(dim),
        ROWS=64,
    )
