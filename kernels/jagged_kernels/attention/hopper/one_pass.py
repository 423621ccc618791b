"""dq, dk and dv of jagged attention for Hopper in one kernel over tiles of keys, for long segments.

    Sᵀ = scale · k qᵀ,  dPᵀ = v dOᵀ,  dV = Pᵀ dO,  dK = scale · dSᵀ q,  dQ = scale · dS k
    per segment and key head, over the heads of its group                 P, dS: scores.py

dk and dv stay in registers. dq of a block of query rows is a sum over tiles of keys. It is added up
in fp32 in global memory by bulk reductions, in the order of the tiles in the segment, so results
are deterministic. A counter for each block holds the number of tiles added. The first tile stores
its term. Each later tile waits for its predecessor. dq_sums.py rounds the sums.

No deadlock: thread blocks take tiles from the list one by one, so a tile starts after all tiles
before it in the list. The tiles of a segment and head are listed in ascending order, and a tile
waits for its predecessors alone. docs/decisions/one-pass-backward.md: which order is fast.

Roles:
    two warpgroups   consumers: MMA, P and dS, epilogue, at head dim 128 also dq
    a warpgroup      dq, at head dim 64 only
    a warp           producer: tiles, TMA loads, lse and delta
    two warps        writers (dq_writers.py): each adds half of dq to global memory
    a warp           publisher (dq_writers.py): counts what the writers have added
The publisher counts by an atomic addition with release order, which takes about a microsecond. A
writer that waited for it could not keep up with the MMAs. Without that order, another tile might
see the count before the term.
Registers per thread: consumers 240; at head dim 64 192, under a mask or with long activations 208,
and what is left for dq, 104 or 72; others 24.

Tile: 128 keys, 64 per consumer, by blocks of 64 query rows. Blocks are visited in descending order:
then tiles of a segment that begin at the same time follow one another at a distance of one
addition. dq of a block needs dS of both consumers. At head dim 128 each consumer computes half of
its columns, for its writer. At head dim 64 the dq warpgroup computes it, and blocks alternate
between the writers. Operands in registers save traffic to shared memory: dK takes dS from
registers, and at head dim 64, where registers are left, k and v are loaded into registers once per
tile.

Barriers, one per stage: q, do, v[i], tail: as in dkdv.py. k[i]: `full` 1, `empty` 2, consumer i and
the other one or the dq warpgroup. exchange.ds: `full` 2, both consumers' dS; `empty` 2 at head dim
128, both have read it, 1 at 64. dq[i]: 1 and 1, to writer i. written: 1 and 1, from writer i, whose
addition is complete, to the publisher. queue: `empty` 5, at head dim 64 6.

Shared memory in KiB, plus 1.5 for the tile queue, the barriers and the arguments of warps; lse and
delta with softmax only. The epilogue uses the buffers of v.
    head dim 128: 225 = q 2 × 16 + dO 2 × 16 + k 2 × 16 + v 2 × 16 + dS 2 × 16 + dq 4 × 16
                  + lse, delta 1
    head dim  64: 225.5 = q 3 × 8 + dO 3 × 8 + k 2 × 2 × 8 + v 2 × 2 × 8 + dS 3 × 16 + dq 4 × 16
                  + lse, delta 1.5

An MMA that is under way at the end of a loop's body, or too many at a time, make ptxas wait after
every MMA. So at head dim 128 the MMA of the next block's scores begins behind the others and ends
with the body. test_attention_gluon.py checks it.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ...common.gluon_api import reinterpret, thread_barrier
from ...common.pipeline import (
    LOAD_REGISTERS,
    WARPGROUP_ROWS,
    Handover,
    Output,
    Ring,
    consumer_wait,
    make_barriers,
    make_ring,
    make_rings,
    mma_abt,
    mma_layout,
    opaque,
    producer_load,
    publish,
    release,
    ring_rows,
    store_epilogue,
    to_mma_operand,
    wait_until_empty,
    wait_until_full,
    zero_rows,
)
from ...common.ptxas import safe_ptxas
from ..scales import output_factor, score_factor
from .args import UNSPECIALISED, Kernel, Outputs, Rings, Schedule, with_activation
from .dkdv import load_keys, zero_tails
from .dq_writers import descending_blocks, publish_dq, write_dq
from .scores import (
    QueryBlock,
    lanes_of_block,
    make_stats,
    minus_delta,
    put_stats,
    stats_of_step,
    weights_of_keys,
)
from .tile_source import consume_taken, first_target_of, make_tile_queue, produce_taken


class Exchange(NamedTuple):
    """Buffers and barriers between the consumers, to the dq warpgroup, to each writer, and from the
    writers to the publisher.

    ds: of `ds_buffers` `[2 · stages, 64, 64]`, dSᵀ of both consumers for each stage. dq: a ring of
    fp32 `[1, 64, 64]` per writer. written: a barrier per writer. sums_desc: dq in global memory,
    fp32 `[H, blocks · rows, D]`.
    """

    ds_buffers: gl.shared_memory_descriptor
    ds: Handover
    dq: Ring
    written: Handover
    sums_desc: gl.tensor


class _Keys(NamedTuple):
    """A consumer's keys of a tile: wave of the tile, column of the first key, and number of keys
    from there on in the segment. k, v: their rows, at head dim 64 in registers, as first
    operands of MMAs."""

    wave: gl.tensor
    column: gl.tensor
    num_keys: gl.tensor
    k: gl.tensor
    v: gl.tensor


class _Sums(NamedTuple):
    """What a consumer carries from block to block: dk and dv, and at head dim 128 the scores of the
    next block."""

    dk: gl.tensor
    dv: gl.tensor
    scores: gl.tensor


# -- producer --------------------------------------------------------------------------------------


@gluon.jit
def _load_tile(tile, wave, step, kernel, OPTIONS: gl.constexpr):
    """Loads the first query blocks of a tile before its keys: the buffers of keys may be in use
    until the previous tile ends."""
    rings = kernel.rings
    lanes = lanes_of_block(OPTIONS.block)
    visited = descending_blocks(tile, OPTIONS)
    key_row = tile.kv_start + tile.block * (OPTIONS.consumers * WARPGROUP_ROWS)
    count = OPTIONS.group * visited.count
    for number in range(count + 1):
        if number == gl.minimum(count, rings.q.buffers.shape[0]):
            load_keys(kernel, tile, wave, key_row, OPTIONS.consumers)
        if number < count:
            head, first = tile.head, (visited.last - number) * OPTIONS.block
            if OPTIONS.group > 1:
                head = tile.head * OPTIONS.group + number // visited.count
                first = (visited.last - number % visited.count) * OPTIONS.block
            if OPTIONS.activation is None:
                put_stats(kernel, step + number, head, tile.q_start, tile.q_len, first, lanes)
            producer_load(rings.q, kernel.q_desc, step + number, head, tile.q_start + first)
            producer_load(rings.do, kernel.do_desc, step + number, head, tile.q_start + first)
    return step + count


@gluon.jit
def _produce(kernel, OPTIONS: gl.constexpr):
    produce_taken(_load_tile, gl.load(kernel.schedule.num_tiles_ptr), kernel, OPTIONS)


# -- dq --------------------------------------------------------------------------------------------


@gluon.jit
def _share_ds(exchange, step, ds, consumer: gl.constexpr):
    """Pass on this consumer's dSᵀ of a step, for dq."""
    wait_until_empty(exchange.ds, step)
    slot = step % exchange.ds.full.shape[0]
    exchange.ds_buffers.index(2 * slot + consumer).store(ds)
    publish(exchange.ds, step)


@gluon.jit
def _operands_of_dq(rings, exchange, slot, step, i: gl.constexpr, consumer: gl.constexpr):
    """dS `[64 queries, 64 keys]` of consumer i, and k `[64 keys, 64]` of it, at head dim 128 this
    consumer's columns."""
    k = ring_rows(rings.k[i], slot)
    if k.shape[1] == 128:  # in shared memory, 64 columns follow 64 columns
        L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WARPGROUP_ROWS, 64], k.dtype)
        k = reinterpret(k, k.dtype, [2, WARPGROUP_ROWS, 64], L).index(consumer)
    ds = exchange.ds_buffers.index(2 * (step % exchange.ds.full.shape[0]) + i)
    return ds.permute((1, 0)), k


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
    release(exchange.ds, step)
    ring = exchange.dq[writer]
    wait_until_empty(ring, dq_step)
    ring_rows(ring, dq_step % ring.buffers.shape[0]).store(dq)
    publish(ring, dq_step)


@gluon.jit
def _dq_of_step(rings, exchange, wave, step, consumer: gl.constexpr):
    """dq of a step, all at once."""
    wait_until_full(exchange.ds, step)
    return warpgroup_mma_wait(0, deps=(_start_dq(rings, exchange, wave, step, consumer),))


@gluon.jit
def _dq_tile(tile, wave, step, unused, index: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    """dq of all blocks of a tile, which alternate between the writers."""
    rings, exchange = kernel.rings, kernel.exchange
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
    release(rings.k[0], wave)
    release(rings.k[1], wave)
    return step, 0


@gluon.jit
def _sum_dq(kernel, OPTIONS: gl.constexpr):
    consume_taken(_dq_tile, 0, kernel, OPTIONS)


# -- consumers -------------------------------------------------------------------------------------


@gluon.jit
def _ds(dact, dp, rings, step, keys, OPTIONS: gl.constexpr):
    """dS of a block; 0 for keys past the segment, because dq sums over keys."""
    L: gl.constexpr = dp.type.layout
    ds = dact * minus_delta(dp, stats_of_step(rings.delta, step, L, OPTIONS), OPTIONS)
    if keys.num_keys < WARPGROUP_ROWS:
        rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))[:, None]
        ds = gl.where(rows < keys.num_keys, ds, 0.0)
    return ds


@gluon.jit
def _narrow_block(
    kernel, step, sums, keys, rows, scale,
    consumer: gl.constexpr, OPTIONS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One query block at head dim 64, transposed: dv += Pᵀ dO, dk += dSᵀ q. Rows past the segment
    are 0 and add nothing. Returns the _Sums."""
    rings = kernel.rings
    DTYPE: gl.constexpr = rings.q.buffers.dtype
    WIDTH: gl.constexpr = rings.q.buffers.shape[3]
    q = consumer_wait(rings.q, step)
    scores = mma_abt(keys.k, q)
    do = consumer_wait(rings.do, step)
    dp = mma_abt(keys.v, do)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    p, dact = weights_of_keys(scores, rings, step, keys.column, rows, scale, OPTIONS, MASKED)
    p = to_mma_operand(p, DTYPE, WIDTH)
    dv = warpgroup_mma(p, do, sums.dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = _ds(dact, dp, rings, step, keys, OPTIONS)
    shared_ds, ds = ds.to(DTYPE), to_mma_operand(ds, DTYPE, WIDTH)
    dk = warpgroup_mma(ds, q, sums.dk, is_async=True)
    _share_ds(kernel.exchange, step, shared_ds, consumer)
    dk, dv, ds, p = warpgroup_mma_wait(0, deps=(dk, dv, ds, p))
    release(rings.q, step)
    release(rings.do, step)
    return _Sums(dk, dv, sums.scores)


@gluon.jit
def _wide_block(
    kernel, step, follows, more, sums, keys, rows, scale,
    consumer: gl.constexpr, OPTIONS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One query block at head dim 128: as _narrow_block, and this consumer's part of dq of the
    previous block if this one `follows` another of the tile. Starts from the block's scores, and
    ends with those of the next block if `more` follow."""
    rings, exchange, wave = kernel.rings, kernel.exchange, keys.wave
    STAGES: gl.constexpr = rings.q.buffers.shape[0]
    WIDTH: gl.constexpr = rings.q.buffers.shape[3]
    slot = opaque(wave % rings.v[0].buffers.shape[0])
    do = consumer_wait(rings.do, step)
    dp = mma_abt(ring_rows(rings.v[consumer], slot), do)
    p, dact = weights_of_keys(sums.scores, rings, step, keys.column, rows, scale, OPTIONS, MASKED)
    p = to_mma_operand(p, do.dtype, WIDTH)
    dv = warpgroup_mma(p, do, sums.dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = _ds(dact, dp, rings, step, keys, OPTIONS)
    shared_ds, ds = ds.to(do.dtype), to_mma_operand(ds, do.dtype, WIDTH)
    dk = warpgroup_mma(ds, ring_rows(rings.q, step % STAGES), sums.dk, is_async=True)
    _share_ds(exchange, step, shared_ds, consumer)
    dv, p = warpgroup_mma_wait(1, deps=(dv, p))
    wait_until_full(exchange.ds, step - 1, follows)
    dq = _start_dq(rings, exchange, wave, step - 1, consumer)
    wait_until_full(rings.q, step + 1, more)
    next_q = ring_rows(rings.q, (step + more.to(gl.int32)) % STAGES)
    scores = mma_abt(ring_rows(rings.k[consumer], slot), next_q)
    dk, ds = warpgroup_mma_wait(3, deps=(dk, ds))
    release(rings.q, step)
    release(rings.do, step)
    dq = warpgroup_mma_wait(1, deps=(dq,))
    if follows:
        _finish_dq(exchange, step - 1, step - 1, dq, consumer)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    return _Sums(dk, dv, scores)


@gluon.jit
def _block(
    kernel, step, follows, more, sums, keys, rows, scale,
    consumer: gl.constexpr, OPTIONS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One query block, by _narrow_block at head dim 64, where dq and the next scores are not the
    consumers' work, or by _wide_block."""
    if kernel.rings.q.buffers.shape[3] == 128:
        return _wide_block(
            kernel, step, follows, more, sums, keys, rows, scale, consumer, OPTIONS, MASKED
        )
    else:
        return _narrow_block(kernel, step, sums, keys, rows, scale, consumer, OPTIONS, MASKED)


@gluon.jit
def _load_consumer_keys(kernel, tile, wave, consumer: gl.constexpr, OPTIONS: gl.constexpr):
    """The consumer's _Keys of a tile. Those past the segment are 0: dq is a sum over keys."""
    rings = kernel.rings
    WIDE: gl.constexpr = rings.q.buffers.shape[3] == 128
    first = (tile.block * OPTIONS.consumers + consumer) * WARPGROUP_ROWS
    num_keys = tile.kv_len - first
    slot = wave % rings.k[0].buffers.shape[0]
    consumer_wait(rings.k[consumer], wave)
    if WIDE:
        consumer_wait(rings.k[1 - consumer], wave)
    consumer_wait(rings.v[consumer], wave)
    k, v = ring_rows(rings.k[consumer], slot), ring_rows(rings.v[consumer], slot)
    if num_keys < WARPGROUP_ROWS:
        zero_rows(k, num_keys, 0, 1)
    if not WIDE:
        ROWS: gl.constexpr = gl.DotOperandLayout(0, mma_layout(WARPGROUP_ROWS, OPTIONS.block), 2)
        k, v = k.load(ROWS), v.load(ROWS)
    return _Keys(wave, first, num_keys, k, v)


@gluon.jit
def _store_keys(kernel, tile, keys, sums, consumer: gl.constexpr, OPTIONS: gl.constexpr):
    """Store dk and dv of a consumer's keys, through its buffer of v."""
    outputs, scales, ring = kernel.outputs, kernel.args, kernel.rings.v[consumer]
    factor = output_factor(scales.output_scale, scales.segment_scale_ptr, tile.segment)
    buffer = ring.buffers.index(keys.wave % ring.buffers.shape[0])
    row = tile.kv_start + keys.column
    dv = sums.dv * (scales.act_factor * factor)
    store_epilogue(
        (dv,), outputs.dv, buffer, 0,
        row, tile.head, keys.num_keys, OPTIONS.dv_stride, OPTIONS.v_dim,
    )  # fmt: skip
    dk = sums.dk * (scales.scale * scales.dact_factor * factor)
    DIM: gl.constexpr = OPTIONS.head_dim
    store_epilogue(
        (dk,), outputs.dk, buffer, 0, row, tile.head, keys.num_keys, OPTIONS.dk_stride, DIM
    )


@gluon.jit
def _tile(tile, wave, step, tail_phase, consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    rings, exchange = kernel.rings, kernel.exchange
    BLOCK: gl.constexpr = rings.q.buffers.shape[2]
    WIDTH: gl.constexpr = rings.q.buffers.shape[3]
    WIDE: gl.constexpr = WIDTH == 128
    scale = score_factor(kernel.args.scale, OPTIONS.activation)
    first_target = first_target_of(tile, OPTIONS.mask)
    visited = descending_blocks(tile, OPTIONS)
    keys = _load_consumer_keys(kernel, tile, wave, consumer, OPTIONS)
    sums = _Sums(
        gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, mma_layout(WARPGROUP_ROWS, WIDTH)),
        gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, mma_layout(WARPGROUP_ROWS, WIDTH)),
        gl.zeros([WARPGROUP_ROWS, BLOCK], gl.float32, mma_layout(WARPGROUP_ROWS, BLOCK)),
    )
    start, shift, count = step, tile.kv_len - tile.q_len, visited.count
    for _ in range(gl.where(count > 0, OPTIONS.group, 0)):
        q = consumer_wait(rings.q, step)
        num_rows = tile.q_len - visited.last * BLOCK
        if num_rows < BLOCK:  # only the last block, which comes first
            zero_tails(rings, step, num_rows, tail_phase, consumer, OPTIONS.consumers)
            tail_phase += 1
        if WIDE:
            k = ring_rows(rings.k[consumer], wave % rings.k[0].buffers.shape[0])
            scores = warpgroup_mma_wait(0, deps=(mma_abt(k, q),))
            sums = _Sums(sums.dk, sums.dv, scores)
        for number in range(visited.at_end):
            row = (visited.last - number) * BLOCK
            rows = QueryBlock(row, row + shift, tile.q_len - row, first_target)
            sums = _block(
                kernel, step + number, step + number > start, number + 1 < count, sums,
                keys, rows, scale, consumer, OPTIONS, True,
            )  # fmt: skip
        rows = QueryBlock(0, 0, BLOCK, first_target)
        for number in range(visited.at_end, visited.at_end + visited.full):
            sums = _block(
                kernel, step + number, step + number > start, number + 1 < count, sums,
                keys, rows, scale, consumer, OPTIONS, False,
            )  # fmt: skip
        if OPTIONS.mask is not None:
            for number in range(visited.at_end + visited.full, count):
                row = (visited.last - number) * BLOCK
                rows = QueryBlock(row, row + shift, tile.q_len - row, first_target)
                sums = _block(
                    kernel, step + number, step + number > start, number + 1 < count, sums,
                    keys, rows, scale, consumer, OPTIONS, True,
                )  # fmt: skip
        step += count
    if WIDE:
        if step > start:
            dq = _dq_of_step(rings, exchange, wave, step - 1, consumer)
            _finish_dq(exchange, step - 1, step - 1, dq, consumer)
    thread_barrier()
    release(rings.k[consumer], wave)
    if WIDE:
        release(rings.k[1 - consumer], wave)
    if keys.num_keys > 0:
        _store_keys(kernel, tile, keys, sums, consumer, OPTIONS)
    tma.store_wait(0)
    thread_barrier()
    release(rings.v[consumer], wave)
    return step, tail_phase


@gluon.jit
def _consume(consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    consume_taken(_tile, consumer, kernel, OPTIONS)


@safe_ptxas
@gluon.jit(**UNSPECIALISED)
def attention_bwd_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, sums_desc, num_tiles_ptr, num_blocks, args,
    ACTIVATION: gl.constexpr, CONSTANTS: gl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of key rows, and its terms of dq."""
    OPTIONS: gl.constexpr = with_activation(CONSTANTS, ACTIVATION)
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    schedule = Schedule(
        args.tiles_ptr, num_tiles_ptr, args.q_offsets_ptr, args.kv_offsets_ptr, None,
        args.num_targets_ptr, do_desc.shape[1], args.next_tile_ptr,
    )  # fmt: skip
    BLOCK: gl.constexpr = OPTIONS.block
    WIDE: gl.constexpr = q_desc.block_type.shape[2] == 128
    DS_STAGES: gl.constexpr = 2 if WIDE else 3
    STAGES: gl.constexpr = OPTIONS.row_stages
    q = make_ring(q_desc, OPTIONS.stages, CONSUMERS)
    do = make_ring(do_desc, OPTIONS.stages, CONSUMERS)
    k = make_ring(k_desc, STAGES, CONSUMERS), make_ring(k_desc, STAGES, CONSUMERS)
    v = make_rings(v_desc, STAGES, CONSUMERS)
    lse, delta = make_stats(q), make_stats(q)
    # Each consumer arrives twice a block: for its share of q, and for its share of dO.
    tail = make_barriers(1, 2 * CONSUMERS)
    rings = Rings(q=q, do=do, k=k, v=v, lse=lse, delta=delta, tail=tail)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WARPGROUP_ROWS, BLOCK], q_desc.dtype)
    ds = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS * DS_STAGES, WARPGROUP_ROWS, BLOCK], DS)
    dq = make_rings(sums_desc, 2, CONSUMERS)
    readers: gl.constexpr = CONSUMERS if WIDE else 1
    ds_barriers = Handover(make_barriers(DS_STAGES, CONSUMERS), make_barriers(DS_STAGES, readers))
    written = Handover(make_barriers(2, 1), make_barriers(2, 1))
    outputs = Outputs(dk=Output(dk_desc, args.dk_ptr), dv=Output(dv_desc, args.dv_ptr))
    queue = make_tile_queue(CONSUMERS + 3 if WIDE else CONSUMERS + 4)
    kernel = Kernel(
        args, schedule, rings, queue, outputs,
        q_desc=q_desc, do_desc=do_desc, k_desc=k_desc, v_desc=v_desc,
        num_blocks=num_blocks, exchange=Exchange(ds, ds_barriers, dq, written, sums_desc),
    )  # fmt: skip
    REGISTERS: gl.constexpr = OPTIONS.registers
    if WIDE:
        gl.warp_specialize([
            (_consume, (0, kernel, OPTIONS)),
            (_consume, (1, kernel, OPTIONS)),
            (_produce, (kernel, OPTIONS)),
            (write_dq, (0, kernel, OPTIONS)),
            (write_dq, (1, kernel, OPTIONS)),
            (publish_dq, (kernel, OPTIONS)),
        ], [4, 1, 1, 1, 1], [
            REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS,
        ])  # fmt: skip
    else:
        # four warpgroups have 4 · 128
        DQ_REGISTERS: gl.constexpr = 512 - CONSUMERS * REGISTERS - LOAD_REGISTERS
        gl.warp_specialize([
            (_consume, (0, kernel, OPTIONS)),
            (_consume, (1, kernel, OPTIONS)),
            (_sum_dq, (kernel, OPTIONS)),
            (_produce, (kernel, OPTIONS)),
            (write_dq, (0, kernel, OPTIONS)),
            (write_dq, (1, kernel, OPTIONS)),
            (publish_dq, (kernel, OPTIONS)),
        ], [4, 4, 1, 1, 1, 1], [
            REGISTERS, DQ_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS,
        ])  # fmt: skip
