"""Gradients of the scores that Hopper's dk, dv kernel keeps, and its kernel for dq from them: one product in place of three.

They lie in a workspace in blocks of 64 keys by 64 queries: of every segment, head and 64 keys those of all queries, one after the other.
In a block they lie as the registers hold them with which the dk, dv kernel multiplies: each thread writes and reads 16 bytes at a time, and
neither kernel needs shared memory to transpose them. A segment whose blocks do not fit has no place; its dq is computed as without.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..common import device as launch
from ..common.configs import padded_dim
from ..common.loads import segment_lengths
from ..common.pipeline import (
    LOAD_REGISTERS,
    WARPGROUP_ROWS,
    await_cleared,
    await_full,
    clear_rows,
    fetch,
    make_barriers,
    make_ring,
    make_rings,
    make_stages,
    pass_over_keys,
    product_layout,
    put_rows,
    release,
)
from ..common.ptxas import safe_ptxas
from .configs import HopperConfig
from .hopper_common import (
    end_tile,
    key_blocks,
    launch_options,
    make_tile_ring,
    num_waves,
    pass_tile,
    segment_factor,
    take_tile,
    tile_of_wave,
    visited_block,
)
from .mask import num_partial_blocks
from .params import Operands
from .select import storing_ds_is_faster

SIDE = gl.constexpr(64)  # keys and queries of a block
BLOCK_BYTES = 64 * 64 * 2
WORKSPACE = 2**31  # bytes
PART = 4  # segments, or several times as many: their offsets begin at 16-byte boundaries, which kernels are compiled for

# -- where blocks lie ---------------------------------------------------------------------------------------------------------------


@triton.jit
def _cdiv_lengths(offsets_ptr, segments, real, BLOCK: tl.constexpr):
    return tl.cdiv(segment_lengths(offsets_ptr, segments, real).to(tl.int32), BLOCK).to(tl.int64)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "capacity"])
def attention_places_kernel(
    q_offsets_ptr, kv_offsets_ptr, num_tiles_ptr, places_ptr, num_other_tiles_ptr, num_segments, capacity,
    HEADS: tl.constexpr, QUERY_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each segment's first block in a workspace of `capacity` blocks, -1 where not all of its blocks fit; and for the kernel that does
    without: the number of its tiles, none if all fit."""
    total = tl.zeros([], tl.int64)
    for start in range(0, num_segments, CHUNK):
        segments = start + tl.arange(0, CHUNK)
        real = segments < num_segments
        queries = _cdiv_lengths(q_offsets_ptr, segments, real, QUERY_BLOCK) * (QUERY_BLOCK // SIDE)
        blocks = queries * _cdiv_lengths(kv_offsets_ptr, segments, real, SIDE) * HEADS
        end = total + tl.cumsum(blocks, 0)
        tl.store(places_ptr + segments, tl.where(end <= capacity, end - blocks, -1).to(tl.int32), mask=real)
        total += tl.sum(blocks, 0)
    tl.store(num_other_tiles_ptr, tl.where(total > capacity, tl.load(num_tiles_ptr), 0))


def find_places(
    q_offsets: Tensor, kv_offsets: Tensor, num_tiles: Tensor, capacity: int, heads: int, query_block: int
) -> tuple[Tensor, Tensor]:
    """Launch attention_places_kernel: places int32 `[B]`, and the number of tiles `[1]` for the kernel that does without.

    query_block: query rows of the dk, dv kernel's blocks, which it keeps whole.
    """
    segments = q_offsets.shape[0] - 1
    places, num_other_tiles = q_offsets.new_empty(segments, dtype=torch.int32), torch.empty_like(num_tiles)
    attention_places_kernel[(1,)](
        q_offsets, kv_offsets, num_tiles, places, num_other_tiles, segments, capacity, HEADS=heads, QUERY_BLOCK=query_block, CHUNK=1024
    )
    return places, num_other_tiles


def plan_workspace(
    q: Tensor, k: Tensor, q_offsets: Tensor, kv_offsets: Tensor, workspace: int | None, *gradients: Tensor
) -> tuple[int, list[tuple[int, int]]]:  # fmt: skip
    """How many blocks to have room for, and the parts, first segment and end, that are to use it one after the other.

    Nothing is read from the device: there are as many blocks where lengths are uniform up to twice their mean. There is room for no more
    than `WORKSPACE` or the gradients take, or than `workspace` bytes. For none where that does not pay, as where segments are too
    long for it.
    """
    num_segments = q_offsets.shape[0] - 1
    queries, keys = launch.mean_rows(q.shape[0], q_offsets) / 64, launch.mean_rows(k.shape[0], kv_offsets) / 64
    num_blocks = math.ceil(4 / 3 * q.shape[1] * num_segments * (queries + 0.5) * (keys + 0.5))
    most = max(WORKSPACE, sum(x.nbytes for x in gradients)) if workspace is None else workspace
    room = most // BLOCK_BYTES
    if not storing_ds_is_faster(num_blocks, 64 * min(queries, keys), q.shape[2]) or PART * num_blocks > room * num_segments:
        return 0, []
    parts = math.ceil(num_blocks / room)
    bounds = sorted({min(PART * math.ceil(part * num_segments / parts / PART), num_segments) for part in range(parts + 1)})
    return min(num_blocks, room), list(zip(bounds, bounds[1:]))


@gluon.jit
def first_block(place, head, key_block, q_len, kv_len, QUERY_BLOCK: gl.constexpr):
    """Where a segment's blocks of 64 keys begin in the workspace."""
    queries = gl.cdiv(q_len, QUERY_BLOCK) * (QUERY_BLOCK // SIDE)
    return place + (head * gl.cdiv(kv_len, SIDE) + key_block).to(gl.int64) * queries


@gluon.jit
def keep_blocks(ds, ds_ptr, block):
    """Store dSᵀ [64 keys, queries], the first factor of a product, as the registers hold it, from a block of the workspace on; not if that
    is negative."""
    QUERIES: gl.constexpr = ds.shape[1]
    L: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    # keys: warp, half, lane; queries: 16 at a time, half, lane, pair
    parts = ds.reshape([4, 2, 8, QUERIES // 16, 2, 4, 2]).permute((3, 0, 2, 5, 4, 1, 6))
    flat = gl.convert_layout(parts.reshape([SIDE * QUERIES]), L)
    gl.store(ds_ptr + block * (SIDE * SIDE) + gl.arange(0, SIDE * QUERIES, layout=L), flat, mask=block >= 0)


@gluon.constexpr_function
def _kept_layout():
    """What a warp of the dq kernel reads of a kept block: what the four warps of the dk, dv kernel hold of its 16 queries."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )


@gluon.jit
def _take_block(buffer, WIDTH: gl.constexpr):
    """dS [64 queries, 64 keys] of a kept block as the first factor of a product WIDTH columns wide: every 8 × 8 elements transposed."""
    parts = buffer.load(_kept_layout())
    parts = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [parts], dtype=parts.dtype, is_pure=False, pack=2
    )
    parts = parts.reshape([4, 4, 8, 4, 2, 2, 2]).permute((0, 4, 2, 1, 5, 3, 6))
    return gl.convert_layout(parts.reshape([SIDE, SIDE]), gl.DotOperandLayout(0, product_layout(WARPGROUP_ROWS, WIDTH), 2))


# -- dq -----------------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _fetch_nothing(ring, turn, STAGES: gl.constexpr):
    """In place of a box for a warpgroup that has no rows, and passes over it."""
    slot = turn % STAGES
    mbarrier.wait(ring[2].index(slot), turn // STAGES & 1 ^ 1)
    mbarrier.arrive(ring[1].index(slot), count=1)


@gluon.jit
def _load(
    ds_desc, k_desc, shared, GROUP: gl.constexpr, QUERY_BLOCK: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    schedule, places_ptr, rings = shared[0], shared[1], shared[2]
    ds_rings, k_ring, _cleared = rings
    waves = num_waves(schedule)
    next_tile = tile_of_wave(schedule, 0, waves, None, places_ptr)
    turn = 0
    for wave in range(waves):
        tile = next_tile
        next_tile = tile_of_wave(schedule, wave + 1, waves, None, places_ptr)
        pass_tile(shared[-1], wave, tile)
        _, head, block, _, q_len, kv_start, kv_len, place = tile
        blocks, visited = key_blocks(tile, None, CONSUMERS * WARPGROUP_ROWS, SIDE)
        visited = gl.where(place < 0, 0, visited)
        for number in range(visited):
            key_block = visited_block(number, blocks)
            fetch(k_ring, k_desc, turn + number, head // GROUP, kv_start + key_block * SIDE, STAGES)
            first = first_block(place, head, key_block, q_len, kv_len, QUERY_BLOCK)
            for consumer in gl.static_range(CONSUMERS):
                query_block = block * CONSUMERS + consumer
                if query_block * SIDE < q_len:
                    fetch(ds_rings[consumer], ds_desc, turn + number, 0, (first + query_block) * SIDE, STAGES)
                else:
                    _fetch_nothing(ds_rings[consumer], turn + number, STAGES)
        turn += visited


@gluon.jit
def _add_block(
    ds_ring, k_ring, turn, acc, num_keys, cleared, clears, consumer: gl.constexpr, CONSUMERS: gl.constexpr, PARTIAL: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One key block: acc += dS k. What lies past the segment in dS are gradients for a neighbour's keys."""
    k = await_full(k_ring, turn, STAGES)
    if PARTIAL:
        cut = num_keys < SIDE
        if cut:
            clear_rows(k, num_keys, cleared, consumer, CONSUMERS)
    ds = _take_block(await_full(ds_ring, turn, STAGES), k.shape[1])
    if PARTIAL:
        keys = gl.arange(0, SIDE, layout=gl.SliceLayout(0, ds.type.layout))
        ds = gl.where(keys[None, :] < num_keys, ds, 0.0)
        if cut:
            await_cleared(cleared, clears)
    acc = warpgroup_mma(ds, k, acc, is_async=True)
    acc, ds = warpgroup_mma_wait(0, deps=(acc, ds))
    release(ds_ring, turn, STAGES)
    release(k_ring, turn, STAGES)
    return acc


@gluon.jit
def _compute(
    consumer: gl.constexpr, shared, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    schedule, rings, results, scales = shared[0], shared[2], shared[3], shared[4]
    ds_rings, k_ring, cleared = rings
    ds_ring = ds_rings[consumer]
    dq_desc, dq_ptr, stages = results
    factor, output_scale, segment_scale_ptr = scales
    WIDTH: gl.constexpr = k_ring[0].shape[3]
    waves = num_waves(schedule)
    turn, clears = 0, 0
    for wave in range(waves):
        tile = take_tile(shared[-1], wave)
        segment, head, block, q_start, q_len, _, kv_len, place = tile
        if place >= 0:
            blocks, visited = key_blocks(tile, None, CONSUMERS * WARPGROUP_ROWS, SIDE)
            partial = num_partial_blocks(blocks)
            num_keys = gl.where(partial > 0, kv_len - visited_block(0, blocks) * SIDE, SIDE)
            first = (block * CONSUMERS + consumer) * WARPGROUP_ROWS
            num_rows = q_len - first
            if num_rows > 0:
                acc = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, product_layout(WARPGROUP_ROWS, WIDTH))
                for number in range(partial):
                    acc = _add_block(ds_ring, k_ring, turn + number, acc, num_keys, cleared, clears, consumer, CONSUMERS, True, STAGES)
                for number in range(partial, visited):
                    acc = _add_block(ds_ring, k_ring, turn + number, acc, SIDE, cleared, clears, consumer, CONSUMERS, False, STAGES)
                acc = acc * segment_factor(factor, output_scale, segment_scale_ptr, segment)
                put_rows(acc, stages.index(consumer), 0, dq_desc, dq_ptr, q_start + first, head, num_rows, HEADS, HEAD_DIM)
            else:
                for number in range(visited):
                    left = gl.where(number == 0, num_keys, SIDE)
                    pass_over_keys(k_ring, ds_ring, turn + number, left, cleared, clears, consumer, CONSUMERS, STAGES)
            turn += visited
            clears += (num_keys < SIDE).to(gl.int32)
        end_tile(shared[-1], wave)
    tma.store_wait(0)


@safe_ptxas
@gluon.jit
def attention_bwd_dq_of_kept_hopper_kernel(
    ds_desc, k_desc, dq_desc, dq_ptr, places_ptr, q_offsets_ptr, kv_offsets_ptr, tiles_ptr, num_tiles_ptr, segment_scale_ptr,
    scale, slope_factor, output_scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, QUERY_BLOCK: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dq of a tile of query rows, of the segments that have a place."""
    schedule = tiles_ptr, num_tiles_ptr, q_offsets_ptr, kv_offsets_ptr, None, None
    rings = make_rings(ds_desc, STAGES, CONSUMERS), make_ring(k_desc, STAGES, CONSUMERS), make_barriers(1, CONSUMERS)
    results = dq_desc, dq_ptr, make_stages(k_desc, CONSUMERS)
    scales = scale * slope_factor, output_scale, segment_scale_ptr
    shared = schedule, places_ptr, rings, results, scales, make_tile_ring(CONSUMERS)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_compute, (0, shared, HEADS, HEAD_DIM, CONSUMERS, STAGES)),
            (_compute, (1, shared, HEADS, HEAD_DIM, CONSUMERS, STAGES)),
            (_load, (ds_desc, k_desc, shared, GROUP, QUERY_BLOCK, CONSUMERS, STAGES)),
        ], [4, 1], [REGISTERS, LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_compute, (0, shared, HEADS, HEAD_DIM, CONSUMERS, STAGES)),
            (_compute, (1, shared, HEADS, HEAD_DIM, CONSUMERS, STAGES)),
            (_compute, (2, shared, HEADS, HEAD_DIM, CONSUMERS, STAGES)),
            (_load, (ds_desc, k_desc, shared, GROUP, QUERY_BLOCK, CONSUMERS, STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, LOAD_REGISTERS])  # fmt: skip


def kept_constants(config: HopperConfig, operands: Operands) -> dict:
    """Constant arguments and launch of attention_bwd_dq_of_kept_hopper_kernel, but for QUERY_BLOCK."""
    q, k, *_ = operands
    options = launch_options(config)
    del options["ROW_STAGES"]  # dS has as many buffers as the keys
    return options | dict(HEADS=q.shape[1], GROUP=q.shape[1] // k.shape[1], HEAD_DIM=q.shape[2])


# -- delta --------------------------------------------------------------------------------------------------------------------------


@safe_ptxas
@triton.jit(do_not_specialize=["num_rows", "stride_delta"])
def attention_delta_kernel(
    do_ptr, out_ptr, delta_ptr, num_rows, stride_row, stride_head, stride_delta, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO ∘ O), of a block of rows of a head."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (columns < DIM)[None, :]
    do = tl.load(do_ptr + rows[:, None] * stride_row + head * stride_head + columns[None, :], mask=mask, other=0.0)
    out = tl.load(out_ptr + (rows[:, None] * HEADS + head) * DIM + columns[None, :], mask=mask, other=0.0)
    tl.store(delta_ptr + head * stride_delta + rows, tl.sum(do.to(tl.float32) * out.to(tl.float32), 1), mask=rows < num_rows)


def write_delta(do: Tensor, out: Tensor, delta: Tensor) -> None:
    """Launch attention_delta_kernel; `out` contiguous, `delta` `[H, rows]`."""
    rows, heads, dim = do.shape
    attention_delta_kernel[(triton.cdiv(rows, 64), heads)](
        do, out, delta, rows, do.stride(0), do.stride(1), delta.stride(0), HEADS=heads, DIM=dim, BLOCK_D=padded_dim(dim), ROWS=64
    )
