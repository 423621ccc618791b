"""dq, dk and dv of segments with few query rows for Hopper, in one kernel.

    S = scale · q kᵀ,  dP = dO vᵀ,  dQ = scale · dS k,  dV = Pᵀ dO,  dK = scale · dSᵀ q
    per segment and head                                                  P, dS: scores.py

A tile has all query rows of a segment. So it alone computes dk and dv of the segment's keys: each
block of keys is loaded once, and its gradients are stored at once. There are five MMAs instead of
seven, and nothing is added up between thread blocks, which take tiles from the list one by one.

Roles:
    warps 0–3, ...   consumers: MMA, P and dS of 64 rows, dq. The first one computes dv, the second
                     one dk; a single one both
    the next warp    producer: tiles and TMA loads
Registers per thread: 1 consumer 232, 2 consumers 240, 3 consumers 160; producer 24. With 1
consumer, two thread blocks share a multiprocessor.

Tile: 64 query rows per consumer, up to 3 consumers at head dim 64 and 2 at 128, by blocks of 64
keys. A consumer passes P and dS of its rows through shared memory, as dk and dv need those of all
rows. A consumer without rows passes nothing.

Barriers, one per stage, for C consumers: q, do, k, v: `full` 1, the TMA load; `empty` C, of q and
dO when the tile is done, as dv reads dO of all consumers, dk their q. tail: C, the consumers'
shares of k's rows past the segment are 0. exchange: `full` C, all consumers' P and dS of a step are
written; `empty` 1 or 2, the consumers that compute dv and dk. queue: tile_source.py.

Shared memory in KiB, plus 1.5 for the tile queue, the barriers and the arguments of warps:
    head dim 128, 1 consumer: 112 = q 16 + dO 16 + k 2 × 16 + v 16 + P, dS 2 × 8 + epilogue 16
                  2:          224 = q 2 × 16 + dO 2 × 16 + k 2 × 16 + v 2 × 16 + P, dS 2 × 2 × 2 × 8
                              + epilogue 2 × 16
    head dim 64,  1:          104 = q 2 × 8 + dO 2 × 8 + k 3 × 8 + v 3 × 8 + P, dS 2 × 8 + epilogue
                              8
                  2:          192 = q 4 × 8 + dO 4 × 8 + k 3 × 8 + v 3 × 8 + P, dS 2 × 2 × 2 × 8 +
                              epilogue 2 × 8
                  3:          216 = q 6 × 8 + dO 6 × 8 + k 3 × 8 + v 3 × 8 + P, dS 2 × 3 × 8 +
                              epilogue 3 × 8
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ...common.gluon_api import thread_barrier
from ...common.pipeline import (
    WARPGROUP_ROWS,
    Output,
    Tail,
    consumer_wait,
    launch_specialised,
    make_barriers,
    make_epilogue_buffers,
    make_ring,
    mark_full,
    mma_abt,
    mma_layout,
    producer_load,
    producer_skip,
    publish,
    release,
    ring_rows,
    skip_key_block,
    store_epilogue,
    to_mma_operand,
    wait_for_tail,
    wait_until_empty,
    wait_until_full,
    zero_rows,
    zero_tail,
)
from ...common.ptxas import safe_ptxas
from ..mask import num_masked_blocks
from ..scales import output_factor, score_factor
from .args import UNSPECIALISED, Kernel, Outputs, Rings, Schedule, with_activation
from .scores import Position, QueryRows, minus_delta, row_stats, visible_keys, weights
from .tile_source import (
    Tile,
    consume_taken,
    key_blocks,
    make_tile_queue,
    produce_taken,
    visited_block,
)


class _Exchange(NamedTuple):
    """Buffers between consumers, `[stages · consumers, 64 rows, 64 keys]`: consumer i has buffer
    step % stages · consumers + i."""

    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class _Visit(NamedTuple):
    """A tile, its wave, the factor of its gradients, and the tail of its keys. In the rings of q
    and dO, consumer i has step wave · consumers + i."""

    tile: Tile
    wave: gl.tensor
    factor: gl.tensor
    tail: Tail


# -- producer --------------------------------------------------------------------------------------


@gluon.jit
def _load_queries(tile, wave, kernel, CONSUMERS: gl.constexpr):
    rings = kernel.rings
    for consumer in gl.static_range(CONSUMERS):
        first, step = consumer * WARPGROUP_ROWS, wave * CONSUMERS + consumer
        if first < tile.q_len:
            producer_load(rings.q, kernel.q_desc, step, tile.head, tile.q_start + first)
            producer_load(rings.do, kernel.do_desc, step, tile.head, tile.q_start + first)
        else:
            producer_skip(rings.q, step)
            producer_skip(rings.do, step)


@gluon.jit
def _load_tile(tile, wave, step, kernel, OPTIONS: gl.constexpr):
    """Loads the first key blocks of a tile before its queries, whose buffers may be in use until
    the previous tile ends."""
    rings = kernel.rings
    BLOCK: gl.constexpr = kernel.k_desc.block_type.shape[1]
    blocks, visited = key_blocks(tile, None, OPTIONS.consumers * WARPGROUP_ROWS, BLOCK)
    for number in range(visited + 1):
        if number == gl.minimum(visited, rings.v.buffers.shape[0]):
            _load_queries(tile, wave, kernel, OPTIONS.consumers)
        if number < visited:
            key_row = tile.kv_start + visited_block(number, blocks) * BLOCK
            producer_load(rings.k, kernel.k_desc, step + number, tile.head, key_row)
            producer_load(rings.v, kernel.v_desc, step + number, tile.head, key_row)
    return step + visited


@gluon.jit
def _produce(kernel, OPTIONS: gl.constexpr):
    produce_taken(_load_tile, kernel.num_tiles, kernel, OPTIONS)


# -- consumers -------------------------------------------------------------------------------------


@gluon.jit
def _start_sum(buffers, slot, ring, wave, CONSUMERS: gl.constexpr):
    """Start the MMA Xᵀ Y over the first consumer's rows, `[64 keys, width]`: X from its buffer in a
    slot, Y from its step of a ring."""
    WIDTH: gl.constexpr = ring.buffers.shape[3]
    y = ring_rows(ring, wave * CONSUMERS % ring.buffers.shape[0])
    zeros = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, mma_layout(WARPGROUP_ROWS, WIDTH))
    x = buffers.index(slot * CONSUMERS).permute((1, 0))
    return warpgroup_mma(x, y, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_other_rows(acc, buffers, slot, ring, wave, num_queries, CONSUMERS: gl.constexpr):
    """Add Xᵀ Y over the rows of the second consumer and of later ones."""
    for consumer in range(1, (num_queries + WARPGROUP_ROWS - 1) // WARPGROUP_ROWS):
        x = buffers.index(slot * CONSUMERS + consumer).permute((1, 0))
        y = ring_rows(ring, (wave * CONSUMERS + consumer) % ring.buffers.shape[0])
        acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(x, y, acc, is_async=True),))
    return acc


@gluon.jit
def _start_key_gradient(kernel, wave, step, consumer: gl.constexpr, CONSUMERS: gl.constexpr):
    """Start the MMA of the first consumer's rows: of dv in the first consumer, of dk in the
    second."""
    shared, rings = kernel.exchange, kernel.rings
    slot = step % shared.full.shape[0]
    wait_until_full(shared, step)
    if consumer == 0:
        return _start_sum(shared.p, slot, rings.do, wave, CONSUMERS)
    else:
        return _start_sum(shared.ds, slot, rings.q, wave, CONSUMERS)


@gluon.jit
def _finish_key_gradients(
    acc, kernel, visit, step, block, consumer: gl.constexpr, OPTIONS: gl.constexpr
):
    """Store dv in the first consumer, dk in the second, and both in a single one. acc: the complete
    MMA of _start_key_gradient."""
    shared, rings, outputs, scales = kernel.exchange, kernel.rings, kernel.outputs, kernel.args
    tile, wave, factor = visit.tile, visit.wave, visit.factor
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    BLOCK: gl.constexpr = rings.k.buffers.shape[2]
    slot, buffer = step % shared.full.shape[0], outputs.buffers.index(consumer)
    row, num_keys = tile.kv_start + block * BLOCK, tile.kv_len - block * BLOCK
    if consumer == 0:
        acc = _add_other_rows(acc, shared.p, slot, rings.do, wave, tile.q_len, CONSUMERS)
        if CONSUMERS > 1:
            release(shared, step)
        dv = acc * (scales.act_factor * factor)
        store_epilogue(
            (dv,), outputs.dv, buffer, 0, row, tile.head, num_keys, OPTIONS.dv_stride, OPTIONS.v_dim
        )
    if CONSUMERS == 1:
        acc = _start_sum(shared.ds, slot, rings.q, wave, CONSUMERS)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    if CONSUMERS == 1 or consumer == 1:
        acc = _add_other_rows(acc, shared.ds, slot, rings.q, wave, tile.q_len, CONSUMERS)
        release(shared, step)
        acc *= scales.scale * scales.dact_factor * factor
        DIM: gl.constexpr = OPTIONS.head_dim
        store_epilogue(
            (acc,), outputs.dk, buffer, 0, row, tile.head, num_keys, OPTIONS.dk_stride, DIM
        )


@gluon.jit
def _block(
    kernel, rows, dq, visit, step, block,
    consumer: gl.constexpr, OPTIONS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One key block: P and dS for all consumers, dq += dS k, and this consumer's part of dv and dk.
    Returns dq."""
    rings, shared = kernel.rings, kernel.exchange
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    BLOCK: gl.constexpr = rings.k.buffers.shape[2]
    slot = step % shared.full.shape[0] * CONSUMERS + consumer
    k = consumer_wait(rings.k, step)
    if MASKED:
        num_keys = visit.tile.kv_len - block * BLOCK
        has_tail = num_keys < BLOCK
        if has_tail:
            zero_tail(k, num_keys, visit.tail, consumer, CONSUMERS)
    scores = mma_abt(rows.q, k)
    dp = mma_abt(rows.do, consumer_wait(rings.v, step))
    scores = warpgroup_mma_wait(1, deps=(scores,))
    scale = score_factor(kernel.args.scale, OPTIONS.activation)
    p, dact = weights(scores, rows.lse[:, None], scale, OPTIONS)
    wait_until_empty(shared, step)
    shared.p.index(slot).store(p.to(k.dtype))
    dp = warpgroup_mma_wait(0, deps=(dp,))
    release(rings.v, step)
    ds = dact * minus_delta(dp, rows.delta[:, None], OPTIONS)
    if MASKED:
        ds = gl.where(visible_keys(Position(0, 0, num_keys, 0), None, BLOCK), ds, 0.0)
        if has_tail:
            wait_for_tail(visit.tail)
    ds = ds.to(k.dtype)
    shared.ds.index(slot).store(ds)
    publish(shared, step)
    operand = to_mma_operand(ds, k.dtype, BLOCK)
    dq = warpgroup_mma(operand, k, dq, is_async=True)
    if consumer < 2:
        acc = _start_key_gradient(kernel, visit.wave, step, consumer, CONSUMERS)
        dq, operand, acc = warpgroup_mma_wait(0, deps=(dq, operand, acc))
        release(rings.k, step)
        _finish_key_gradients(acc, kernel, visit, step, block, consumer, OPTIONS)
    else:
        dq, operand = warpgroup_mma_wait(0, deps=(dq, operand))
        release(rings.k, step)
    return dq


@gluon.jit
def _skip_block(
    kernel, visit, step, block, num_keys, consumer: gl.constexpr, OPTIONS: gl.constexpr
):
    """A key block for a consumer without rows: it passes no P and dS."""
    rings, shared = kernel.rings, kernel.exchange
    skip_key_block(rings.k, rings.v, step, num_keys, visit.tail, consumer, OPTIONS.consumers)
    wait_until_empty(shared, step)
    thread_barrier()
    mark_full(shared, step)
    if consumer < 2:
        acc = _start_key_gradient(kernel, visit.wave, step, consumer, OPTIONS.consumers)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _finish_key_gradients(acc, kernel, visit, step, block, consumer, OPTIONS)


@gluon.jit
def _load_rows(kernel, tile, wave, num_rows, consumer: gl.constexpr, OPTIONS: gl.constexpr):
    """The consumer's QueryRows. Those past the segment are 0, with an lse of infinity: dk and dv
    are sums over rows."""
    rings = kernel.rings
    STATS: gl.constexpr = gl.SliceLayout(1, mma_layout(WARPGROUP_ROWS, rings.k.buffers.shape[2]))
    step = wave * OPTIONS.consumers + consumer
    q, do = consumer_wait(rings.q, step), consumer_wait(rings.do, step)
    if num_rows < WARPGROUP_ROWS:
        zero_rows(q, num_rows, 0, 1)
        zero_rows(do, num_rows, 0, 1)
    lse = gl.arange(0, WARPGROUP_ROWS, layout=STATS)
    delta = lse
    if OPTIONS.activation is None:
        first = consumer * WARPGROUP_ROWS
        lse, delta, _, _ = row_stats(kernel, rings.do, step, tile, first, float("inf"), OPTIONS)
    return QueryRows(q, do, lse, delta)


@gluon.jit
def _tile(tile, wave, step, tail_phase, consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    rings, scales, outputs = kernel.rings, kernel.args, kernel.outputs
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    BLOCK: gl.constexpr = rings.k.buffers.shape[2]
    WIDTH: gl.constexpr = rings.k.buffers.shape[3]
    blocks, visited = key_blocks(tile, None, CONSUMERS * WARPGROUP_ROWS, BLOCK)
    masked = num_masked_blocks(blocks)
    num_keys = gl.where(masked > 0, tile.kv_len - visited_block(0, blocks) * BLOCK, BLOCK)
    first = consumer * WARPGROUP_ROWS
    num_rows = tile.q_len - first
    factor = output_factor(scales.output_scale, scales.segment_scale_ptr, tile.segment)
    visit = _Visit(tile, wave, factor, Tail(rings.tail, tail_phase))
    for other in gl.static_range(CONSUMERS):
        consumer_wait(rings.q, wave * CONSUMERS + other)
        consumer_wait(rings.do, wave * CONSUMERS + other)
    if num_rows > 0:
        rows = _load_rows(kernel, tile, wave, num_rows, consumer, OPTIONS)
        dq = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, mma_layout(WARPGROUP_ROWS, WIDTH))
        for number in range(masked):
            block = visited_block(number, blocks)
            dq = _block(kernel, rows, dq, visit, step + number, block, consumer, OPTIONS, True)
        for number in range(masked, visited):
            block = visited_block(number, blocks)
            dq = _block(kernel, rows, dq, visit, step + number, block, consumer, OPTIONS, False)
        dq *= scales.scale * scales.dact_factor * factor
        store_epilogue(
            (dq,), outputs.dq, outputs.buffers.index(consumer), 0,
            tile.q_start + first, tile.head, num_rows, OPTIONS.dq_stride, OPTIONS.head_dim,
        )  # fmt: skip
    else:
        thread_barrier()  # a late warp must not wait for a phase that the barriers have left
        for number in range(visited):
            left = gl.where(number == 0, num_keys, BLOCK)
            block = visited_block(number, blocks)
            _skip_block(kernel, visit, step + number, block, left, consumer, OPTIONS)
    for other in gl.static_range(CONSUMERS):
        release(rings.q, wave * CONSUMERS + other)
        release(rings.do, wave * CONSUMERS + other)
    return step + visited, tail_phase + (num_keys < BLOCK).to(gl.int32)


@gluon.jit
def _consume(consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    consume_taken(_tile, consumer, kernel, OPTIONS)
    tma.store_wait(0)


@safe_ptxas
@gluon.jit(**UNSPECIALISED)
def attention_bwd_short_queries_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, dq_desc, dk_desc, dv_desc, num_tiles_ptr, args,
    ACTIVATION: gl.constexpr, CONSTANTS: gl.constexpr,
):  # fmt: skip
    """dq, dk and dv of the last tiles of a list: from num_tiles[1] on, up to num_tiles[0]."""
    OPTIONS: gl.constexpr = with_activation(CONSTANTS, ACTIVATION)
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    STAGES: gl.constexpr = OPTIONS.stages
    ROW_STAGES: gl.constexpr = OPTIONS.row_stages * CONSUMERS
    BLOCK: gl.constexpr = k_desc.block_type.shape[1]
    V_STAGES: gl.constexpr = 1 if CONSUMERS == 1 and k_desc.block_type.shape[2] == 128 else STAGES
    first = gl.load(num_tiles_ptr + 1)
    num_tiles = gl.load(num_tiles_ptr) - first
    tiles_ptr = args.tiles_ptr + first.to(gl.int64) * 3
    schedule = Schedule(
        tiles_ptr, num_tiles_ptr, args.q_offsets_ptr, args.kv_offsets_ptr, None,
        args.num_targets_ptr, do_desc.shape[1], args.next_tile_ptr,
    )  # fmt: skip
    rings = Rings(
        q=make_ring(q_desc, ROW_STAGES, CONSUMERS), do=make_ring(do_desc, ROW_STAGES, CONSUMERS),
        k=make_ring(k_desc, STAGES, CONSUMERS), v=make_ring(v_desc, V_STAGES, CONSUMERS),
        tail=make_barriers(1, CONSUMERS),
    )  # fmt: skip
    SCORE_STAGES: gl.constexpr = 2 if CONSUMERS == 2 else 1  # as shared memory allows
    SHAPE: gl.constexpr = [SCORE_STAGES * CONSUMERS, WARPGROUP_ROWS, BLOCK]
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WARPGROUP_ROWS, BLOCK], k_desc.dtype)
    p = gl.allocate_shared_memory(k_desc.dtype, SHAPE, L)
    ds = gl.allocate_shared_memory(k_desc.dtype, SHAPE, L)
    READERS: gl.constexpr = 1 if CONSUMERS == 1 else 2
    full, empty = make_barriers(SCORE_STAGES, CONSUMERS), make_barriers(SCORE_STAGES, READERS)
    outputs = Outputs(
        dq=Output(dq_desc, args.dq_ptr), dk=Output(dk_desc, args.dk_ptr),
        dv=Output(dv_desc, args.dv_ptr), buffers=make_epilogue_buffers(k_desc, CONSUMERS),
    )  # fmt: skip
    queue = make_tile_queue(CONSUMERS)
    kernel = Kernel(
        args, schedule, rings, queue, outputs, num_tiles,
        q_desc=q_desc, do_desc=do_desc, k_desc=k_desc, v_desc=v_desc,
        exchange=_Exchange(p, ds, full, empty),
    )  # fmt: skip
    launch_specialised(_consume, _produce, kernel, OPTIONS)
