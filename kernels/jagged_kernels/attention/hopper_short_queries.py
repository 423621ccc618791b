"""dq, dk and dv of segments with few query rows for Hopper, in one kernel. hopper_backward.py
launches it.

    S = scale · q kᵀ,  dP = dO vᵀ,  dQ = scale · dS k,  dV = Pᵀ dO,  dK = scale · dSᵀ q         per
    segment and head
    softmax:    dS = P ∘ (dP − delta),  P = exp2(S − lse),  delta = rowsum(dO ∘ O)
    pointwise:  P = activation(S),  dS = activation'(S) ∘ dP

A tile has all query rows of a segment. So it alone computes dk and dv of the segment's keys: each
block of keys is loaded once, and its gradients are stored at once. There are five MMAs instead of
seven, and nothing is added up between thread blocks, which take tiles from the list one by one,
through a counter.

Roles:
    warps 0–3, ...   consumers: MMA, P and dS of 64 rows, dq. The first one computes dv, the second
    one dk; a single one both. `_consume` the next warp    producer: tiles and TMA loads. `_produce`
Registers per thread: 1 consumer 232, 2 consumers 240, 3 consumers 160; producer 24. With 1
consumer, two thread blocks share a multiprocessor.

Tile: 64 query rows per consumer, up to 3 consumers at head dim 64 and 2 at 128, by blocks of 64
keys.

A consumer passes P and dS of its rows through shared memory, as dk and dv need those of all rows. A
consumer without rows passes nothing.

Barriers, one per stage s, for C consumers:
    q.full[s], do.full[s], k.full[s], v.full[s]   arrive count 1, the TMA load of that buffer
    q.empty[s], do.empty[s]                       arrive count C: the tile is done, as dv reads dO
    of all consumers, dk their q k.empty[s], v.empty[s]                        arrive count C: the
    MMA that reads the buffer is complete tail                                          arrive count
    C: the consumers' shares of k's rows past the segment are 0 scores.full[s]
    arrive count C: all consumers' P and dS of a step are written scores.empty[s]
    arrive count 1 or 2, the consumers that compute dv and dk: they have read P and dS
    queue.full[s], queue.empty[s]                 arrive counts 1 and C: the words of a tile;
    segment -1 ends the list

Shared memory in KiB, plus 1.5 for the tile queue, the barriers and the arguments of warps:
    head dim 128, 1 consumer: 112 = q 16 + dO 16 + k 2 × 16 + v 16 + P, dS 2 × 8 + epilogue 16
                  2:          224 = q 2 × 16 + dO 2 × 16 + k 2 × 16 + v 2 × 16 + P, dS 2 × 2 × 2 × 8
                  + epilogue 2 × 16
    head dim 64,  1:          104 = q 2 × 8 + dO 2 × 8 + k 3 × 8 + v 3 × 8 + P, dS 2 × 8 + epilogue
                  8 2:          192 = q 4 × 8 + dO 4 × 8 + k 3 × 8 + v 3 × 8 + P, dS 2 × 2 × 2 × 8 +
                  epilogue 2 × 8
                  3:          216 = q 6 × 8 + dO 6 × 8 + k 3 × 8 + v 3 × 8 + P, dS 2 × 3 × 8 +
                  epilogue 3 × 8
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.gluon_api import thread_barrier
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
    mma_abt,
    mma_layout,
    producer_load,
    producer_skip,
    ring_rows,
    skip_key_block,
    store_epilogue,
    to_mma_operand,
    wait_for_tail,
    zero_rows,
    zero_tail,
)
from ..common.ptxas import safe_ptxas
from .configs import HopperConfig
from .hopper_common import (
    Position,
    QueryRows,
    Schedule,
    TileQueue,
    key_blocks,
    launch_constants,
    make_tile_queue,
    pop_tile,
    push_tile,
    release_tile,
    row_sums,
    take_tile,
    visible_keys,
    visited_block,
)
from .hopper_dkdv import Scales
from .mask import num_masked_blocks
from .params import AttentionParams, Operands
from .scales import output_factor, score_factor


class _Options(NamedTuple):
    """Constants of a launch."""

    heads: gl.constexpr
    head_dim: gl.constexpr
    v_dim: gl.constexpr
    activation: gl.constexpr  # function of activations.py; None: softmax
    consumers: gl.constexpr


class _Rings(NamedTuple):
    """Buffers in shared memory. q, do: consumer i has step wave · consumers + i. tail: barrier of
    the keys' tail."""

    q: Ring
    do: Ring
    k: Ring
    v: Ring
    tail: gl.shared_memory_descriptor


class _Scores(NamedTuple):
    """Buffers between consumers, `[stages · consumers, 64 rows, 64 keys]`: consumer i has buffer
    step % stages · consumers + i."""

    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class _Outputs(NamedTuple):
    dq: Output
    dk: Output
    dv: Output
    buffers: gl.shared_memory_descriptor


class _Statistics(NamedTuple):
    """Softmax's log-sum-exp `[H, rows]`, and the output, of which and dO delta is computed."""

    out_ptr: gl.tensor
    lse_ptr: gl.tensor
    stride_lse: gl.tensor


class _Kernel(NamedTuple):
    """What the kernel hands to its warps. num_tiles: of the list."""

    q_desc: gl.tensor
    do_desc: gl.tensor
    k_desc: gl.tensor
    v_desc: gl.tensor
    schedule: Schedule
    num_tiles: gl.tensor
    next_tile_ptr: gl.tensor
    rings: _Rings
    scores: _Scores
    outputs: _Outputs
    statistics: _Statistics
    scales: Scales
    queue: TileQueue


@gluon.jit
def _produce(kernel, OPTIONS: gl.constexpr):
    """Loads the first key blocks of a tile before its queries, whose buffers may be in use until
    the previous tile ends."""
    schedule, rings = kernel.schedule, kernel.rings
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    BLOCK: gl.constexpr = kernel.k_desc.block_type.shape[1]
    step, wave = 0, 0  # of the rings of k and v, and of tiles
    tile = take_tile(schedule, kernel.num_tiles, kernel.next_tile_ptr, None)
    push_tile(kernel.queue, wave, tile)
    while tile.segment >= 0:
        blocks, visited = key_blocks(tile, None, CONSUMERS * WARPGROUP_ROWS, BLOCK)
        for number in range(visited + 1):
            if number == gl.minimum(visited, rings.v.buffers.shape[0]):
                for consumer in gl.static_range(CONSUMERS):
                    first = consumer * WARPGROUP_ROWS
                    if first < tile.q_len:
                        producer_load(
                            rings.q,
                            kernel.q_desc,
                            wave * CONSUMERS + consumer,
                            tile.head,
                            tile.q_start + first,
                        )
                        producer_load(
                            rings.do,
                            kernel.do_desc,
                            wave * CONSUMERS + consumer,
                            tile.head,
                            tile.q_start + first,
                        )
                    else:
                        producer_skip(rings.q, wave * CONSUMERS + consumer)
                        producer_skip(rings.do, wave * CONSUMERS + consumer)
            if number < visited:
                key_row = tile.kv_start + visited_block(number, blocks) * BLOCK
                producer_load(rings.k, kernel.k_desc, step + number, tile.head, key_row)
                producer_load(rings.v, kernel.v_desc, step + number, tile.head, key_row)
        step += visited
        wave += 1
        tile = take_tile(schedule, kernel.num_tiles, kernel.next_tile_ptr, None)
        push_tile(kernel.queue, wave, tile)


@gluon.jit
def _start_sum(buffers, slot, ring, wave, consumer, CONSUMERS: gl.constexpr):
    """Start the MMA Xᵀ Y over a consumer's rows, `[64 keys, width]`: X from its buffer in a slot, Y
    from its step of a ring."""
    WIDTH: gl.constexpr = ring.buffers.shape[3]
    y = ring_rows(ring, (wave * CONSUMERS + consumer) % ring.buffers.shape[0])
    zeros = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, mma_layout(WARPGROUP_ROWS, WIDTH))
    x = buffers.index(slot * CONSUMERS + consumer).permute((1, 0))
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
    STAGES: gl.constexpr = kernel.scores.full.shape[0]
    slot = step % STAGES
    mbarrier.wait(kernel.scores.full.index(slot), step // STAGES & 1)
    if consumer == 0:
        return _start_sum(kernel.scores.p, slot, kernel.rings.do, wave, 0, CONSUMERS)
    else:
        return _start_sum(kernel.scores.ds, slot, kernel.rings.q, wave, 0, CONSUMERS)


@gluon.jit
def _finish_key_gradients(
    acc, kernel, tile, wave, step, block, factor, consumer: gl.constexpr, OPTIONS: gl.constexpr
):
    """Store dv in the first consumer, dk in the second, and both in a single one. acc: the complete
    MMA of _start_key_gradient."""
    scores, rings, outputs, scales = kernel.scores, kernel.rings, kernel.outputs, kernel.scales
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    BLOCK: gl.constexpr = rings.k.buffers.shape[2]
    slot, buffer = step % scores.full.shape[0], outputs.buffers.index(consumer)
    row, num_keys = tile.kv_start + block * BLOCK, tile.kv_len - block * BLOCK
    if consumer == 0:
        acc = _add_other_rows(acc, scores.p, slot, rings.do, wave, tile.q_len, CONSUMERS)
        if CONSUMERS > 1:
            mbarrier.arrive(scores.empty.index(slot), count=1)
        store_epilogue(
            acc * (scales.act_factor * factor),
            outputs.dv,
            buffer,
            0,
            row,
            tile.head,
            num_keys,
            OPTIONS.heads,
            OPTIONS.v_dim,
        )
    if CONSUMERS == 1:
        acc = warpgroup_mma_wait(
            0, deps=(_start_sum(scores.ds, slot, rings.q, wave, 0, CONSUMERS),)
        )
    if CONSUMERS == 1 or consumer == 1:
        acc = _add_other_rows(acc, scores.ds, slot, rings.q, wave, tile.q_len, CONSUMERS)
        mbarrier.arrive(scores.empty.index(slot), count=1)
        acc *= scales.scale * scales.dact_factor * factor
        store_epilogue(
            acc, outputs.dk, buffer, 0, row, tile.head, num_keys, OPTIONS.heads, OPTIONS.head_dim
        )


@gluon.jit
def _block(
    kernel,
    rows,
    dq,
    tile,
    wave,
    step,
    block,
    factor,
    tail,
    consumer: gl.constexpr,
    OPTIONS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """One key block: P and dS for all consumers, dq += dS k, and this consumer's part of dv and dk.
    Returns dq."""
    rings, shared, scale = (
        kernel.rings,
        kernel.scores,
        score_factor(kernel.scales.scale, OPTIONS.activation),
    )
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    BLOCK: gl.constexpr = rings.k.buffers.shape[2]
    STAGES: gl.constexpr = shared.full.shape[0]
    slot = step % STAGES
    k = consumer_wait(rings.k, step)
    if MASKED:
        num_keys = tile.kv_len - block * BLOCK
        has_tail = num_keys < BLOCK
        if has_tail:
            zero_tail(k, num_keys, tail, consumer, CONSUMERS)
    scores = mma_abt(rows.q, k)
    dp = mma_abt(rows.do, consumer_wait(rings.v, step))
    scores = warpgroup_mma_wait(1, deps=(scores,))
    if OPTIONS.activation is None:
        p = gl.exp2(scores * scale - rows.lse[:, None])
        dact = p
    else:
        p, dact = OPTIONS.activation(scores, scale)
    mbarrier.wait(shared.empty.index(slot), step // STAGES & 1 ^ 1)
    shared.p.index(slot * CONSUMERS + consumer).store(p.to(k.dtype))
    dp = warpgroup_mma_wait(0, deps=(dp,))
    consumer_release(rings.v, step)
    if OPTIONS.activation is None:
        dp = dp - rows.delta[:, None]
    ds = dact * dp
    if MASKED:
        ds = gl.where(visible_keys(Position(0, 0, num_keys, 0), None, BLOCK), ds, 0.0)
        if has_tail:
            wait_for_tail(tail)
    ds = ds.to(k.dtype)
    shared.ds.index(slot * CONSUMERS + consumer).store(ds)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(shared.full.index(slot), count=1)
    operand = to_mma_operand(ds, k.dtype, BLOCK)
    dq = warpgroup_mma(operand, k, dq, is_async=True)
    if consumer < 2:
        acc = _start_key_gradient(kernel, wave, step, consumer, CONSUMERS)
        dq, operand, acc = warpgroup_mma_wait(0, deps=(dq, operand, acc))
        consumer_release(rings.k, step)
        _finish_key_gradients(acc, kernel, tile, wave, step, block, factor, consumer, OPTIONS)
    else:
        dq, operand = warpgroup_mma_wait(0, deps=(dq, operand))
        consumer_release(rings.k, step)
    return dq


@gluon.jit
def _skip_block(
    kernel,
    tile,
    wave,
    step,
    block,
    num_keys,
    factor,
    tail,
    consumer: gl.constexpr,
    OPTIONS: gl.constexpr,
):
    """A key block for a consumer without rows: it passes no P and dS."""
    scores = kernel.scores
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    STAGES: gl.constexpr = scores.full.shape[0]
    skip_key_block(kernel.rings.k, kernel.rings.v, step, num_keys, tail, consumer, CONSUMERS)
    mbarrier.wait(scores.empty.index(step % STAGES), step // STAGES & 1 ^ 1)
    thread_barrier()
    mbarrier.arrive(scores.full.index(step % STAGES), count=1)
    if consumer < 2:
        acc = warpgroup_mma_wait(
            0, deps=(_start_key_gradient(kernel, wave, step, consumer, CONSUMERS),)
        )
        _finish_key_gradients(acc, kernel, tile, wave, step, block, factor, consumer, OPTIONS)


@gluon.jit
def _load_rows(kernel, tile, wave, num_rows, consumer: gl.constexpr, OPTIONS: gl.constexpr):
    """The consumer's QueryRows. Those past the segment are 0, with an lse of infinity: dk and dv
    are sums over rows."""
    rings, statistics = kernel.rings, kernel.statistics
    BLOCK: gl.constexpr = rings.k.buffers.shape[2]
    STATS: gl.constexpr = gl.SliceLayout(1, mma_layout(WARPGROUP_ROWS, BLOCK))
    step = wave * OPTIONS.consumers + consumer
    q, do = consumer_wait(rings.q, step), consumer_wait(rings.do, step)
    if num_rows < WARPGROUP_ROWS:
        zero_rows(q, num_rows, 0, 1)
        zero_rows(do, num_rows, 0, 1)
    lse = gl.arange(0, WARPGROUP_ROWS, layout=STATS)
    delta = lse
    if OPTIONS.activation is None:
        lanes, row = lse, tile.q_start + consumer * WARPGROUP_ROWS
        ptrs = statistics.lse_ptr + tile.head.to(gl.int64) * statistics.stride_lse + row + lanes
        lse = gl.load(ptrs, mask=lanes < num_rows, other=float("inf"))
        delta = row_sums(
            statistics.out_ptr,
            rings.do,
            step,
            row,
            tile.head,
            num_rows,
            OPTIONS.heads,
            OPTIONS.v_dim,
        )
        delta = gl.convert_layout(delta, STATS)
    return QueryRows(q, do, lse, delta)


@gluon.jit
def _consume(consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    rings, scales, outputs, queue = kernel.rings, kernel.scales, kernel.outputs, kernel.queue
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    BLOCK: gl.constexpr = rings.k.buffers.shape[2]
    WIDTH: gl.constexpr = rings.k.buffers.shape[3]
    step, tail_phase, wave = 0, 0, 0
    tile = pop_tile(queue, wave)
    while tile.segment >= 0:
        blocks, visited = key_blocks(tile, None, CONSUMERS * WARPGROUP_ROWS, BLOCK)
        masked = num_masked_blocks(blocks)
        num_keys = gl.where(masked > 0, tile.kv_len - visited_block(0, blocks) * BLOCK, BLOCK)
        first = consumer * WARPGROUP_ROWS
        tail, num_rows = Tail(rings.tail, tail_phase), tile.q_len - first
        factor = output_factor(scales.output_scale, scales.segment_scale_ptr, tile.segment)
        for other in gl.static_range(CONSUMERS):
            consumer_wait(rings.q, wave * CONSUMERS + other)
            consumer_wait(rings.do, wave * CONSUMERS + other)
        if num_rows > 0:
            rows = _load_rows(kernel, tile, wave, num_rows, consumer, OPTIONS)
            dq = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, mma_layout(WARPGROUP_ROWS, WIDTH))
            for number in range(masked):
                block = visited_block(number, blocks)
                dq = _block(
                    kernel,
                    rows,
                    dq,
                    tile,
                    wave,
                    step + number,
                    block,
                    factor,
                    tail,
                    consumer,
                    OPTIONS,
                    True,
                )
            for number in range(masked, visited):
                block = visited_block(number, blocks)
                dq = _block(
                    kernel,
                    rows,
                    dq,
                    tile,
                    wave,
                    step + number,
                    block,
                    factor,
                    tail,
                    consumer,
                    OPTIONS,
                    False,
                )
            dq *= scales.scale * scales.dact_factor * factor
            store_epilogue(
                dq,
                outputs.dq,
                outputs.buffers.index(consumer),
                0,
                tile.q_start + first,
                tile.head,
                num_rows,
                OPTIONS.heads,
                OPTIONS.head_dim,
            )
        else:
            thread_barrier()  # a late warp must not wait for a phase that the barriers have left
            for number in range(visited):
                left = gl.where(number == 0, num_keys, BLOCK)
                _skip_block(
                    kernel,
                    tile,
                    wave,
                    step + number,
                    visited_block(number, blocks),
                    left,
                    factor,
                    tail,
                    consumer,
                    OPTIONS,
                )
        for other in gl.static_range(CONSUMERS):
            consumer_release(rings.q, wave * CONSUMERS + other)
            consumer_release(rings.do, wave * CONSUMERS + other)
        step += visited
        tail_phase += (num_keys < BLOCK).to(gl.int32)
        release_tile(queue, wave)
        wave += 1
        tile = pop_tile(queue, wave)
    tma.store_wait(0)


@safe_ptxas
@gluon.jit(
    do_not_specialize=["stride_lse"],
    do_not_specialize_on_alignment=["num_tiles_ptr", "next_tile_ptr"],
)
def attention_bwd_short_queries_hopper_kernel(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    out_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    lse_ptr,
    q_offsets_ptr,
    kv_offsets_ptr,
    tiles_ptr,
    num_tiles_ptr,
    next_tile_ptr,
    segment_scale_ptr,
    scale,
    act_factor,
    dact_factor,
    output_scale,
    stride_lse,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    V_DIM: gl.constexpr,
    ACTIVATION: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """dq, dk and dv of the last tiles of a list: from num_tiles[1] on, up to num_tiles[0]."""
    BLOCK: gl.constexpr = k_desc.block_type.shape[1]
    OPTIONS: gl.constexpr = _Options(HEADS, HEAD_DIM, V_DIM, ACTIVATION, CONSUMERS)
    V_STAGES: gl.constexpr = 1 if CONSUMERS == 1 and k_desc.block_type.shape[2] == 128 else STAGES
    first = gl.load(num_tiles_ptr + 1)
    num_tiles = gl.load(num_tiles_ptr) - first
    schedule = Schedule(
        tiles_ptr + first.to(gl.int64) * 3, num_tiles_ptr, q_offsets_ptr, kv_offsets_ptr, None, None
    )
    rings = _Rings(
        make_ring(q_desc, ROW_STAGES * CONSUMERS, CONSUMERS),
        make_ring(do_desc, ROW_STAGES * CONSUMERS, CONSUMERS),
        make_ring(k_desc, STAGES, CONSUMERS),
        make_ring(v_desc, V_STAGES, CONSUMERS),
        make_barriers(1, CONSUMERS),
    )
    SCORE_STAGES: gl.constexpr = 2 if CONSUMERS == 2 else 1  # as shared memory allows
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WARPGROUP_ROWS, BLOCK], k_desc.dtype)
    p = gl.allocate_shared_memory(
        k_desc.dtype, [SCORE_STAGES * CONSUMERS, WARPGROUP_ROWS, BLOCK], L
    )
    ds = gl.allocate_shared_memory(
        k_desc.dtype, [SCORE_STAGES * CONSUMERS, WARPGROUP_ROWS, BLOCK], L
    )
    READERS: gl.constexpr = 1 if CONSUMERS == 1 else 2
    scores = _Scores(
        p, ds, make_barriers(SCORE_STAGES, CONSUMERS), make_barriers(SCORE_STAGES, READERS)
    )
    outputs = _Outputs(
        Output(dq_desc, dq_ptr),
        Output(dk_desc, dk_ptr),
        Output(dv_desc, dv_ptr),
        make_epilogue_buffers(k_desc, CONSUMERS),
    )
    statistics = _Statistics(out_ptr, lse_ptr, stride_lse)
    scales = Scales(scale, act_factor, dact_factor, output_scale, segment_scale_ptr)
    queue = make_tile_queue(CONSUMERS)
    kernel = _Kernel(
        q_desc,
        do_desc,
        k_desc,
        v_desc,
        schedule,
        num_tiles,
        next_tile_ptr,
        rings,
        scores,
        outputs,
        statistics,
        scales,
        queue,
    )
    launch_specialised(_consume, _produce, kernel, OPTIONS, REGISTERS)


def short_queries_constants(
    config: HopperConfig, operands: Operands, params: AttentionParams
) -> dict:
    """Constant arguments and launch options of attention_bwd_short_queries_hopper_kernel, without
    HEAD_DIM."""
    constants = dict(launch_constants(config, operands, params))
    for name in ("GROUP", "MASK", "Q_SHARED"):
        del constants[name]
    return constants
