"""dq, dk and dv of jagged attention for Hopper in one kernel over tiles of keys. hopper_backward.py
launches it, for long segments.

    Sᵀ = scale · k qᵀ,  dPᵀ = v dOᵀ,  dV = Pᵀ dO,  dK = scale · dSᵀ q,  dQ = scale · dS k
    per segment and key head, over the heads of its group
    softmax:    dS = P ∘ (dP − delta),  P = exp2(S − lse),  delta = rowsum(dO ∘ O)
    pointwise:  P = activation(S),  dS = activation'(S) ∘ dP

dk and dv stay in registers. dq of a block of query rows is a sum over tiles of keys. It is added up
in fp32 in global memory by bulk reductions, in the order of the tiles in the segment, so results
are deterministic. A counter for each block holds the number of tiles added. The first tile stores
its term. Each later tile waits for its predecessor. dq_sums.py rounds the sums.

No deadlock: thread blocks take tiles from the list one by one, through a counter, so a tile starts
after all tiles before it in the list. The tiles of a segment and head are listed in ascending
order, and a tile waits for its predecessors alone. docs/decisions/one-pass-backward.md says which
order of the list is fast.

Roles:
    two warpgroups   consumers: MMA, P and dS, epilogue, at head dim 128 also dq. `_consume`
    a warpgroup      dq, at head dim 64 only. `_sum_dq`
    a warp           producer: tiles, TMA loads, lse and delta. `_produce`
    two warps        writers: each adds half of dq to global memory. `write_dq` in
    hopper_dq_writers.py
    a warp           publisher: counts what the writers have added. `publish_dq`
A count is a release, which takes about a microsecond. A writer that waited for it could not keep up
with the MMAs. Without a release, another tile may add its term first.
Registers per thread: consumers 240; at head dim 64 192, under a mask or with long activations 208,
and what is left for dq, 104 or 72; others 24.

Tile: 128 keys, 64 per consumer, by blocks of 64 query rows. Blocks are visited in descending order:
then tiles of a segment that begin at the same time follow one another at a distance of one
addition. dq of a block needs dS of both consumers. At head dim 128 each consumer computes half of
its columns, for its writer. At head dim 64 the dq warpgroup computes it, and blocks alternate
between the writers. Operands in registers save traffic to shared memory: dK takes dS from
registers, and at head dim 64, where registers are left, k and v are loaded into registers once per
tile.

Barriers, one per stage s:
    q.full[s], do.full[s], q.empty[s], do.empty[s], v[i].full[s], v[i].empty[s], tail   as in
    hopper_dkdv.py
    k[i].full[s], k[i].empty[s]       arrive counts 1, the TMA load, and 2: consumer i, and the
    other one or the dq warpgroup ds.full[s], ds.empty[s]           arrive counts 2, both consumers'
    dS of a step, and at head dim 128 2, both have read it, at 64 1 dq[i].full[s], dq[i].empty[s]
    arrive counts 1 and 1: to writer i written[i].full, written[i].empty arrive counts 1 and 1: from
    writer i, whose addition is complete, to the publisher queue.full[s], queue.empty[s]     arrive
    counts 1 and 5, at head dim 64 6: the words of a tile; segment -1 ends the list

Shared memory in KiB, plus 1.5 for the tile queue, the barriers and the arguments of warps; lse and
    delta with softmax only: head dim 128: 225 = q 2 × 16 + dO 2 × 16 + k 2 × 16 + v 2 × 16 + dS 2 ×
    16 + dq 4 × 16 + lse, delta 1 head dim  64: 225.5 = q 3 × 8 + dO 3 × 8 + k 2 × 2 × 8 + v 2 × 2 ×
    8 + dS 3 × 16 + dq 4 × 16 + lse, delta 1.5
The epilogue uses the buffers of v.

An MMA that is under way at the end of a loop's body, or too many at a time, make ptxas wait after
every MMA. So at head dim 128 the MMA of the next block's scores begins behind the others and ends
with the body. test_attention_gluon.py checks it.
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

from ..common.gluon_api import reinterpret, thread_barrier
from ..common.pipeline import (
    LOAD_REGISTERS,
    WARPGROUP_ROWS,
    Output,
    Ring,
    Tail,
    consumer_release,
    consumer_wait,
    consumer_wait_ahead,
    make_barriers,
    make_ring,
    make_rings,
    mma_abt,
    mma_layout,
    opaque,
    producer_load,
    producer_wait,
    ring_rows,
    store_epilogue,
    to_mma_operand,
    zero_rows,
)
from ..common.ptxas import safe_ptxas
from .configs import HopperConfig
from .hopper_common import (
    Schedule,
    TileQueue,
    first_target_of,
    launch_constants,
    make_tile_queue,
    pop_tile,
    push_tile,
    release_tile,
    take_tile,
)
from .hopper_dkdv import QueryBlock, Scales, Stats, load_stats, put_stats, visible_rows, zero_tails
from .hopper_dq_writers import descending_blocks, publish_dq, write_dq
from .params import AttentionParams, Operands
from .scales import output_factor, score_factor


class _Options(NamedTuple):
    """Constants of a launch."""

    heads: gl.constexpr
    group: gl.constexpr  # query heads per key head
    head_dim: gl.constexpr
    v_dim: gl.constexpr
    activation: gl.constexpr  # function of activations.py; None: softmax
    mask: gl.constexpr
    consumers: gl.constexpr
    block: gl.constexpr  # query rows of a block
    # head dim 128: each consumer computes half of dq's columns; at 64 the dq warpgroup computes it
    wide: gl.constexpr


class _Exchange(NamedTuple):
    """Buffers and barriers between the consumers, to the dq warpgroup, to each writer, and from the
    writers to the publisher.

    ds: `[2 · stages, 64, 64]`, dSᵀ of both consumers for each stage. dq: a ring of fp32
    `[1, 64, 64]` per writer. written: a barrier per writer.
    """

    ds: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    ds_empty: gl.shared_memory_descriptor
    dq: Ring
    written_full: gl.shared_memory_descriptor
    written_empty: gl.shared_memory_descriptor


class _Rings(NamedTuple):
    """Buffers in shared memory. k, v: a ring per consumer. lse, delta: fp32 `[stages, rows]`,
    guarded by the barriers of q. tail: barrier of the tails of q and dO."""

    q: Ring
    do: Ring
    k: Ring
    v: Ring
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    tail: gl.shared_memory_descriptor


class _Outputs(NamedTuple):
    dk_desc: gl.tensor
    dv_desc: gl.tensor
    dk_ptr: gl.tensor
    dv_ptr: gl.tensor


class _Sums(NamedTuple):
    """dq in global memory. desc: fp32 `[H, blocks · rows, D]`. added_ptr: int32 `[H, blocks]`, how
    many tiles have been added."""

    desc: gl.tensor
    added_ptr: gl.tensor
    blocks: gl.tensor


class _Kernel(NamedTuple):
    """What the kernel hands to its warps."""

    q_desc: gl.tensor
    do_desc: gl.tensor
    k_desc: gl.tensor
    v_desc: gl.tensor
    schedule: Schedule
    next_tile_ptr: gl.tensor
    rings: _Rings
    exchange: _Exchange
    stats: Stats
    outputs: _Outputs
    sums: _Sums
    scales: Scales
    queue: TileQueue


class _Keys(NamedTuple):
    """A consumer's keys of a tile: column of the first one, and number of keys from there on in the
    segment. k, v: their rows in registers, as first operands of MMAs; None at head dim 128."""

    column: gl.tensor
    num_keys: gl.tensor
    k: gl.tensor
    v: gl.tensor


# -- producer --------------------------------------------------------------------------------------


@gluon.jit
def _produce(kernel, OPTIONS: gl.constexpr):
    """Loads the first query blocks of a tile before its keys: the buffers of keys may be in use
    until the previous tile ends."""
    rings = kernel.rings
    ROWS: gl.constexpr = OPTIONS.consumers * WARPGROUP_ROWS
    lanes = gl.arange(
        0, OPTIONS.block, layout=gl.BlockedLayout([OPTIONS.block // 32], [32], [1], [0])
    )
    step, wave = 0, 0
    num_tiles = gl.load(kernel.schedule.num_tiles_ptr)
    tile = take_tile(kernel.schedule, num_tiles, kernel.next_tile_ptr, OPTIONS.mask)
    push_tile(kernel.queue, wave, tile)
    while tile.segment >= 0:
        visited = descending_blocks(tile, OPTIONS)
        key_row = tile.kv_start + tile.block * ROWS
        count = OPTIONS.group * visited.count
        for number in range(count + 1):
            if number == gl.minimum(count, rings.q.buffers.shape[0]):
                for consumer in gl.static_range(OPTIONS.consumers):
                    producer_load(
                        rings.k[consumer],
                        kernel.k_desc,
                        wave,
                        tile.head,
                        key_row + consumer * WARPGROUP_ROWS,
                    )
                    producer_load(
                        rings.v[consumer],
                        kernel.v_desc,
                        wave,
                        tile.head,
                        key_row + consumer * WARPGROUP_ROWS,
                    )
            if number < count:
                head, first = tile.head, (visited.last - number) * OPTIONS.block
                if OPTIONS.group > 1:
                    head = tile.head * OPTIONS.group + number // visited.count
                    first = (visited.last - number % visited.count) * OPTIONS.block
                if OPTIONS.activation is None:
                    lse, delta = load_stats(
                        kernel.stats, head, tile.q_start, tile.q_len, first, lanes
                    )
                    put_stats(rings, step + number, lse, delta)
                producer_load(rings.q, kernel.q_desc, step + number, head, tile.q_start + first)
                producer_load(rings.do, kernel.do_desc, step + number, head, tile.q_start + first)
        step += count
        wave += 1
        tile = take_tile(kernel.schedule, num_tiles, kernel.next_tile_ptr, OPTIONS.mask)
        push_tile(kernel.queue, wave, tile)


# -- consumers -------------------------------------------------------------------------------------


@gluon.jit
def _share_ds(exchange, step, ds, consumer: gl.constexpr):
    """Pass on this consumer's dSᵀ of a step, for dq."""
    STAGES: gl.constexpr = exchange.ds_full.shape[0]
    mbarrier.wait(exchange.ds_empty.index(step % STAGES), step // STAGES & 1 ^ 1)
    exchange.ds.index(2 * (step % STAGES) + consumer).store(ds)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(exchange.ds_full.index(step % STAGES), count=1)


@gluon.jit
def _operands_of_dq(rings, exchange, slot, step, i: gl.constexpr, consumer: gl.constexpr):
    """dS `[64 queries, 64 keys]` of consumer i, and k `[64 keys, 64]` of it, at head dim 128 this
    consumer's columns."""
    k = ring_rows(rings.k[i], slot)
    if k.shape[1] == 128:  # in shared memory, 64 columns follow 64 columns
        L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WARPGROUP_ROWS, 64], k.dtype)
        k = reinterpret(k, k.dtype, [2, WARPGROUP_ROWS, 64], L).index(consumer)
    return exchange.ds.index(2 * (step % exchange.ds_full.shape[0]) + i).permute((1, 0)), k


@gluon.jit
def _start_dq(rings, exchange, wave, step, consumer: gl.constexpr):
    """Start two MMAs: dq of a step, `[64, 64]`; at head dim 128 this consumer's columns of it."""
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, 64)
    slot = opaque(wave % rings.k[0].buffers.shape[0])
    ds, k = _operands_of_dq(rings, exchange, slot, step, 0, consumer)
    dq = warpgroup_mma(
        ds, k, gl.zeros([WARPGROUP_ROWS, 64], gl.float32, L), use_acc=False, is_async=True
    )
    ds, k = _operands_of_dq(rings, exchange, slot, step, 1, consumer)
    return warpgroup_mma(ds, k, dq, is_async=True)


@gluon.jit
def _finish_dq(exchange, step, dq_step, dq, writer: gl.constexpr):
    """Release dS of a step, and pass dq to a writer."""
    mbarrier.arrive(exchange.ds_empty.index(step % exchange.ds_full.shape[0]), count=1)
    ring = exchange.dq[writer]
    producer_wait(ring, dq_step)
    ring_rows(ring, dq_step % ring.buffers.shape[0]).store(dq)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(ring.full.index(dq_step % ring.buffers.shape[0]), count=1)


@gluon.jit
def _wait_for_ds(exchange, step, wanted):
    STAGES: gl.constexpr = exchange.ds_full.shape[0]
    mbarrier.wait(exchange.ds_full.index(step % STAGES), step // STAGES & 1, pred=wanted)


@gluon.jit
def _dq_of_step(rings, exchange, wave, step, consumer: gl.constexpr):
    """dq of a step, all at once."""
    _wait_for_ds(exchange, step, True)
    return warpgroup_mma_wait(0, deps=(_start_dq(rings, exchange, wave, step, consumer),))


@gluon.jit
def _sum_dq(kernel, OPTIONS: gl.constexpr):
    """dq of all blocks, which alternate between the writers."""
    rings, exchange, queue = kernel.rings, kernel.exchange, kernel.queue
    step, wave = 0, 0
    tile = pop_tile(queue, wave)
    while tile.segment >= 0:
        visited = descending_blocks(tile, OPTIONS)
        consumer_wait(rings.k[0], wave)
        consumer_wait(rings.k[1], wave)
        for _ in range(OPTIONS.group * visited.count):
            dq = _dq_of_step(rings, exchange, wave, step, 0)
            if step % 2 == 0:
                _finish_dq(exchange, step, step // 2, dq, 0)
            else:
                _finish_dq(exchange, step, step // 2, dq, 1)
            step += 1
        consumer_release(rings.k[0], wave)
        consumer_release(rings.k[1], wave)
        release_tile(queue, wave)
        wave += 1
        tile = pop_tile(queue, wave)


@gluon.jit
def _weights(scores, rings, step, keys, rows, scale, OPTIONS: gl.constexpr, MASKED: gl.constexpr):
    """P of a block, and the factor of dP in dS: P with softmax, else the activation's
    derivative."""
    if OPTIONS.activation is None:
        lse = rings.lse.index(step % rings.lse.shape[0]).load(gl.SliceLayout(0, scores.type.layout))
        p = gl.exp2(scores * scale - lse[None, :])
        dact = p
    else:
        p, dact = OPTIONS.activation(scores, scale)
    if MASKED and OPTIONS.mask is not None:
        visible = visible_rows(keys, rows, OPTIONS.mask, scores.shape[1])
        p, dact = gl.where(visible, p, 0.0), gl.where(visible, dact, 0.0)
    return p, dact


@gluon.jit
def _ds(dact, dp, rings, step, keys, OPTIONS: gl.constexpr):
    """dS of a block; 0 for keys past the segment, because dq sums over keys."""
    L: gl.constexpr = dp.type.layout
    if OPTIONS.activation is None:
        dp = dp - rings.delta.index(step % rings.delta.shape[0]).load(gl.SliceLayout(0, L))[None, :]
    ds = dact * dp
    if keys.num_keys < WARPGROUP_ROWS:
        ds = gl.where(
            (gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L)) < keys.num_keys)[:, None],
            ds,
            0.0,
        )
    return ds


@gluon.jit
def _narrow_block(
    rings,
    exchange,
    step,
    dk,
    dv,
    keys,
    rows,
    scale,
    consumer: gl.constexpr,
    OPTIONS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """One query block at head dim 64, transposed: dv += Pᵀ dO, dk += dSᵀ q. Rows past the segment
    are 0 and add nothing."""
    DTYPE: gl.constexpr = rings.q.buffers.dtype
    WIDTH: gl.constexpr = rings.q.buffers.shape[3]
    q = consumer_wait(rings.q, step)
    scores = mma_abt(keys.k, q)
    do = consumer_wait(rings.do, step)
    dp = mma_abt(keys.v, do)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    p, dact = _weights(scores, rings, step, keys, rows, scale, OPTIONS, MASKED)
    p = to_mma_operand(p, DTYPE, WIDTH)
    dv = warpgroup_mma(p, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = _ds(dact, dp, rings, step, keys, OPTIONS)
    shared_ds, ds = ds.to(DTYPE), to_mma_operand(ds, DTYPE, WIDTH)
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    _share_ds(exchange, step, shared_ds, consumer)
    dk, dv, ds, p = warpgroup_mma_wait(0, deps=(dk, dv, ds, p))
    consumer_release(rings.q, step)
    consumer_release(rings.do, step)
    return dk, dv


@gluon.jit
def _wide_block(
    rings,
    exchange,
    wave,
    step,
    follows,
    more,
    scores,
    dk,
    dv,
    keys,
    rows,
    scale,
    consumer: gl.constexpr,
    OPTIONS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """One query block at head dim 128: as _narrow_block, and this consumer's part of dq of the
    previous block if this one `follows` another of the tile. scores: the block's. Returns dk, dv,
    and the scores of the next block if `more` follow."""
    STAGES: gl.constexpr = rings.q.buffers.shape[0]
    WIDTH: gl.constexpr = rings.q.buffers.shape[3]
    slot = opaque(wave % rings.v[0].buffers.shape[0])
    do = consumer_wait(rings.do, step)
    dp = mma_abt(ring_rows(rings.v[consumer], slot), do)
    p, dact = _weights(scores, rings, step, keys, rows, scale, OPTIONS, MASKED)
    p = to_mma_operand(p, do.dtype, WIDTH)
    dv = warpgroup_mma(p, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = _ds(dact, dp, rings, step, keys, OPTIONS)
    shared_ds, ds = ds.to(do.dtype), to_mma_operand(ds, do.dtype, WIDTH)
    dk = warpgroup_mma(ds, ring_rows(rings.q, step % STAGES), dk, is_async=True)
    _share_ds(exchange, step, shared_ds, consumer)
    dv, p = warpgroup_mma_wait(1, deps=(dv, p))
    _wait_for_ds(exchange, step - 1, follows)
    dq = _start_dq(rings, exchange, wave, step - 1, consumer)
    consumer_wait_ahead(rings.q, step + 1, more)
    next_q = ring_rows(rings.q, (step + more.to(gl.int32)) % STAGES)
    scores = mma_abt(ring_rows(rings.k[consumer], slot), next_q)
    dk, ds = warpgroup_mma_wait(3, deps=(dk, ds))
    consumer_release(rings.q, step)
    consumer_release(rings.do, step)
    dq = warpgroup_mma_wait(1, deps=(dq,))
    if follows:
        _finish_dq(exchange, step - 1, step - 1, dq, consumer)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    return dk, dv, scores


@gluon.jit
def _block(
    rings,
    exchange,
    wave,
    step,
    follows,
    more,
    scores,
    dk,
    dv,
    keys,
    rows,
    scale,
    consumer: gl.constexpr,
    OPTIONS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """One query block, by _narrow_block at head dim 64, where dq and the next scores are not the
    consumers' work, or by _wide_block."""
    if OPTIONS.wide:
        dk, dv, scores = _wide_block(
            rings,
            exchange,
            wave,
            step,
            follows,
            more,
            scores,
            dk,
            dv,
            keys,
            rows,
            scale,
            consumer,
            OPTIONS,
            MASKED,
        )
    else:
        dk, dv = _narrow_block(
            rings, exchange, step, dk, dv, keys, rows, scale, consumer, OPTIONS, MASKED
        )
    return dk, dv, scores


@gluon.jit
def _consume(consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    rings, exchange, outputs, scales, queue = (
        kernel.rings,
        kernel.exchange,
        kernel.outputs,
        kernel.scales,
        kernel.queue,
    )
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    BLOCK: gl.constexpr = rings.q.buffers.shape[2]
    WIDTH: gl.constexpr = rings.q.buffers.shape[3]
    KV_HEADS: gl.constexpr = OPTIONS.heads // OPTIONS.group
    scale = score_factor(scales.scale, OPTIONS.activation)
    step, tail_phase, wave = 0, 0, 0
    tile = pop_tile(queue, wave)
    while tile.segment >= 0:
        first_target = first_target_of(tile, OPTIONS.mask)
        visited = descending_blocks(tile, OPTIONS)
        first = (tile.block * CONSUMERS + consumer) * WARPGROUP_ROWS
        num_keys = tile.kv_len - first
        slot = wave % rings.k[0].buffers.shape[0]
        consumer_wait(rings.k[consumer], wave)
        if OPTIONS.wide:
            consumer_wait(rings.k[1 - consumer], wave)
        consumer_wait(rings.v[consumer], wave)
        k, v = ring_rows(rings.k[consumer], slot), ring_rows(rings.v[consumer], slot)
        if num_keys < WARPGROUP_ROWS:  # dq is a sum over keys
            zero_rows(k, num_keys, 0, 1)
        if OPTIONS.wide:
            keys = _Keys(first, num_keys, None, None)
        else:
            ROWS: gl.constexpr = gl.DotOperandLayout(0, mma_layout(WARPGROUP_ROWS, BLOCK), 2)
            k, v = k.load(ROWS), v.load(ROWS)
            keys = _Keys(first, num_keys, k, v)
        dk = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, mma_layout(WARPGROUP_ROWS, WIDTH))
        dv = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, mma_layout(WARPGROUP_ROWS, WIDTH))
        start, shift, count = step, tile.kv_len - tile.q_len, visited.count
        for _ in range(gl.where(count > 0, OPTIONS.group, 0)):
            q = consumer_wait(rings.q, step)
            num_rows = tile.q_len - visited.last * BLOCK
            if num_rows < BLOCK:  # only the last block, which comes first
                zero_tails(rings, step, num_rows, Tail(rings.tail, tail_phase), consumer, CONSUMERS)
                tail_phase += 1
            scores = gl.zeros(
                [WARPGROUP_ROWS, BLOCK], gl.float32, mma_layout(WARPGROUP_ROWS, BLOCK)
            )
            if OPTIONS.wide:
                scores = warpgroup_mma_wait(0, deps=(mma_abt(k, q),))
            for number in range(visited.at_end):
                row = (visited.last - number) * BLOCK
                rows = QueryBlock(row, row + shift, tile.q_len - row, first_target)
                dk, dv, scores = _block(
                    rings,
                    exchange,
                    wave,
                    step + number,
                    step + number > start,
                    number + 1 < count,
                    scores,
                    dk,
                    dv,
                    keys,
                    rows,
                    scale,
                    consumer,
                    OPTIONS,
                    True,
                )
            for number in range(visited.at_end, visited.at_end + visited.full):
                dk, dv, scores = _block(
                    rings,
                    exchange,
                    wave,
                    step + number,
                    step + number > start,
                    number + 1 < count,
                    scores,
                    dk,
                    dv,
                    keys,
                    QueryBlock(0, 0, BLOCK, first_target),
                    scale,
                    consumer,
                    OPTIONS,
                    False,
                )
            if OPTIONS.mask is not None:
                for number in range(visited.at_end + visited.full, count):
                    row = (visited.last - number) * BLOCK
                    rows = QueryBlock(row, row + shift, tile.q_len - row, first_target)
                    dk, dv, scores = _block(
                        rings,
                        exchange,
                        wave,
                        step + number,
                        step + number > start,
                        number + 1 < count,
                        scores,
                        dk,
                        dv,
                        keys,
                        rows,
                        scale,
                        consumer,
                        OPTIONS,
                        True,
                    )
            step += count
        if OPTIONS.wide:
            if step > start:
                dq = _dq_of_step(rings, exchange, wave, step - 1, consumer)
                _finish_dq(exchange, step - 1, step - 1, dq, consumer)
        thread_barrier()
        consumer_release(rings.k[consumer], wave)
        if OPTIONS.wide:
            consumer_release(rings.k[1 - consumer], wave)
        if num_keys > 0:
            factor = output_factor(scales.output_scale, scales.segment_scale_ptr, tile.segment)
            row, buffer = tile.kv_start + first, rings.v[consumer].buffers.index(slot)
            dv *= scales.act_factor * factor
            store_epilogue(
                dv,
                Output(outputs.dv_desc, outputs.dv_ptr),
                buffer,
                0,
                row,
                tile.head,
                num_keys,
                KV_HEADS,
                OPTIONS.v_dim,
            )
            dk *= scales.scale * scales.dact_factor * factor
            store_epilogue(
                dk,
                Output(outputs.dk_desc, outputs.dk_ptr),
                buffer,
                0,
                row,
                tile.head,
                num_keys,
                KV_HEADS,
                OPTIONS.head_dim,
            )
        tma.store_wait(0)
        thread_barrier()
        consumer_release(rings.v[consumer], wave)
        release_tile(queue, wave)
        wave += 1
        tile = pop_tile(queue, wave)


@safe_ptxas
@gluon.jit(
    do_not_specialize=["stride_lse", "sum_blocks"],
    do_not_specialize_on_alignment=["num_tiles_ptr", "added_ptr", "next_tile_ptr"],
)
def attention_bwd_hopper_kernel(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dk_desc,
    dv_desc,
    sums_desc,
    dk_ptr,
    dv_ptr,
    lse_ptr,
    delta_ptr,
    added_ptr,
    next_tile_ptr,
    q_offsets_ptr,
    kv_offsets_ptr,
    tiles_ptr,
    num_tiles_ptr,
    segment_scale_ptr,
    scale,
    act_factor,
    dact_factor,
    output_scale,
    stride_lse,
    sum_blocks,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    V_DIM: gl.constexpr,
    ACTIVATION: gl.constexpr,
    MASK: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """dk and dv of a tile of key rows, and its terms of dq."""
    BLOCK: gl.constexpr = q_desc.block_type.shape[1]
    WIDTH: gl.constexpr = q_desc.block_type.shape[2]
    WIDE: gl.constexpr = WIDTH == 128
    DS_STAGES: gl.constexpr = 2 if WIDE else 3
    OPTIONS: gl.constexpr = _Options(
        HEADS, GROUP, HEAD_DIM, V_DIM, ACTIVATION, MASK, CONSUMERS, BLOCK, WIDE
    )
    schedule = Schedule(tiles_ptr, num_tiles_ptr, q_offsets_ptr, kv_offsets_ptr, None, None)
    q_ring, do_ring = make_ring(q_desc, STAGES, CONSUMERS), make_ring(do_desc, STAGES, CONSUMERS)
    k_rings = make_ring(k_desc, ROW_STAGES, CONSUMERS), make_ring(k_desc, ROW_STAGES, CONSUMERS)
    v_rings = make_rings(v_desc, ROW_STAGES, CONSUMERS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], PLAIN)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], PLAIN)
    # Each consumer arrives twice a block: for its share of q, and for its share of dO.
    rings = _Rings(q_ring, do_ring, k_rings, v_rings, lse, delta, make_barriers(1, 2 * CONSUMERS))
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WARPGROUP_ROWS, BLOCK], q_desc.dtype)
    ds = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS * DS_STAGES, WARPGROUP_ROWS, BLOCK], DS)
    dq_rings = make_rings(sums_desc, 2, CONSUMERS)
    exchange = _Exchange(
        ds,
        make_barriers(DS_STAGES, CONSUMERS),
        make_barriers(DS_STAGES, CONSUMERS if WIDE else 1),
        dq_rings,
        make_barriers(2, 1),
        make_barriers(2, 1),
    )
    stats = Stats(lse_ptr, delta_ptr, stride_lse)
    outputs = _Outputs(dk_desc, dv_desc, dk_ptr, dv_ptr)
    sums = _Sums(sums_desc, added_ptr, sum_blocks)
    scales = Scales(scale, act_factor, dact_factor, output_scale, segment_scale_ptr)
    queue = make_tile_queue(CONSUMERS + 3 if WIDE else CONSUMERS + 4)
    kernel = _Kernel(
        q_desc,
        do_desc,
        k_desc,
        v_desc,
        schedule,
        next_tile_ptr,
        rings,
        exchange,
        stats,
        outputs,
        sums,
        scales,
        queue,
    )
    if WIDE:
        gl.warp_specialize(
            [
                (_consume, (0, kernel, OPTIONS)),
                (_consume, (1, kernel, OPTIONS)),
                (_produce, (kernel, OPTIONS)),
                (write_dq, (0, kernel, OPTIONS)),
                (write_dq, (1, kernel, OPTIONS)),
                (publish_dq, (kernel, OPTIONS)),
            ],
            [4, 1, 1, 1, 1],
            [REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
        )
    else:
        # four warpgroups have 4 · 128
        DQ_REGISTERS: gl.constexpr = 512 - CONSUMERS * REGISTERS - LOAD_REGISTERS
        gl.warp_specialize(
            [
                (_consume, (0, kernel, OPTIONS)),
                (_consume, (1, kernel, OPTIONS)),
                (_sum_dq, (kernel, OPTIONS)),
                (_produce, (kernel, OPTIONS)),
                (write_dq, (0, kernel, OPTIONS)),
                (write_dq, (1, kernel, OPTIONS)),
                (publish_dq, (kernel, OPTIONS)),
            ],
            [4, 4, 1, 1, 1, 1],
            [
                REGISTERS,
                DQ_REGISTERS,
                LOAD_REGISTERS,
                LOAD_REGISTERS,
                LOAD_REGISTERS,
                LOAD_REGISTERS,
            ],
        )


def one_pass_constants(config: HopperConfig, operands: Operands, params: AttentionParams) -> dict:
    """Constant arguments and launch options of attention_bwd_hopper_kernel, without HEAD_DIM."""
    constants = dict(launch_constants(config, operands, params))
    del constants["Q_SHARED"]
    return constants
