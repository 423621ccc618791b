"""dk and dv of jagged attention for Hopper at head dims above 128: as dkdv.py, but two warpgroups
share each tile of keys, as dk and dv of 64 keys would fill the registers of one.

    Sᵀ = scale · k qᵀ,  dPᵀ = v dOᵀ,  dV = Pᵀ dO,  dK = scale · dSᵀ q
    per segment and key head, over the heads of its group                 P, dS: scores.py

Roles:
    warps 0–7   consumer: MMA, P and dS, epilogue. Of Sᵀ and dPᵀ, warps 0–3 have the first half of
                the query rows; of dK and dV, the first half of the columns. Warps 4–7 the others.
    warp 8      producer: tiles, TMA loads, lse and delta
Registers per thread: consumer 240, of which dK and dV 64 each, and up to head dim 192, where each
is two tensors, of 128 and 64 columns, 48; producer 24.

Tile: 64 keys, by blocks of 64 query rows.

Barriers, one per stage: q, do, k, v: `full` 1, the TMA load; q's also guards lse and delta, written
before. `empty` 1, the consumer's: of q and dO after the MMAs of a block, of k and v once TMA has
read the tile's results. Its warps synchronise before each, as an MMA synchronises one warpgroup
alone. tail: two, the shares of q's and dO's rows past the segment are 0. queue: tile_source.py.

Shared memory in KiB, plus 1 for the tile queue, the barriers and the arguments of warps:
    209 = q 2 × 32 + dO 2 × 32 + k 32 + v 32 + Pᵀ 8 + dSᵀ 8 + lse, delta 1 (softmax only)
    dV and dK are stored through the buffers of v and k.

Each warpgroup needs Pᵀ and dSᵀ of all rows of a block: they pass through shared memory, as first
operands of the next MMAs. Order of a block: start Sᵀ and dPᵀ; wait for Sᵀ; write Pᵀ while dPᵀ runs;
start dV; wait for dPᵀ; write dSᵀ while dV runs; start dK. The wait for both is in the next block,
with that for its Sᵀ: Sᵀ and dPᵀ follow dK without a pause.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ...common.gluon_api import thread_barrier
from ...common.pipeline import (
    WARPGROUP_ROWS,
    Output,
    consumer_wait,
    launch_specialised,
    make_barriers,
    make_ring,
    make_rings,
    mma_abt,
    mma_layout,
    mma_parts,
    num_parts,
    opaque_rows,
    release,
    store_epilogue,
    wait_for_parts,
    wait_for_stores,
    zero_parts,
)
from ...common.ptxas import safe_ptxas
from ..dropout import dropout_of_head
from ..scales import output_factor, score_factor
from .args import UNSPECIALISED, Kernel, Outputs, Rings, Schedule, with_activation
from .dkdv import Keys, produce, visited_blocks, visited_rows, zero_tails
from .scores import (
    QueryBlock,
    drop_gradient,
    make_stats,
    minus_delta,
    stats_of_step,
    weights_of_keys,
)
from .tile_source import consume_waves, first_target_of, make_tile_queue

GROUPS = gl.constexpr(2)  # warpgroups, which share the columns of each MMA's result


@gluon.jit
def _share(x, buffer):
    """Write x to shared memory as the first operand of an MMA of all warps."""
    buffer.store(x.to(buffer.dtype))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _block(
    keys, rings, operands, step, follows, dk, dv, rows, scale, tail_phase,
    OPTIONS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One query block: dv += Pᵀ dO, dk += dSᵀ q. Rows past the segment are 0 and add nothing to
    either. operands: buffers of Pᵀ and dSᵀ. follows: whether the tile has a previous block, whose
    MMAs this one waits for and whose buffers it releases. Returns dk, dv, under way, and the next
    tail phase."""
    q = consumer_wait(rings.q, step)
    if MASKED:
        has_tail = rows.num_rows < q.shape[0]
        if has_tail:
            zero_tails(rings, step, rows.num_rows, tail_phase, 0, 1)
        tail_phase += has_tail.to(gl.int32)
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, q.shape[0], GROUPS)
    scores = mma_abt(keys.k, q, None, GROUPS, OPTIONS.head_dim)
    do = consumer_wait(rings.do, step)
    dp = mma_abt(keys.v, do, None, GROUPS, OPTIONS.v_dim)
    PENDING: gl.constexpr = num_parts(do.shape[1], OPTIONS.v_dim)
    sums, others = wait_for_parts(dv + dk, (scores,), PENDING)
    dv, dk, scores = sums[: len(dv)], sums[len(dv) :], others[0]
    thread_barrier()
    release(rings.q, step - 1, follows)
    release(rings.do, step - 1, follows)
    p, dact = weights_of_keys(scores, rings, step, keys.column, rows, scale, OPTIONS, MASKED)
    _share(p, operands.index(0))
    dv = mma_parts(operands.index(0), do, dv)
    dp = warpgroup_mma_wait(len(dv), deps=(dp,))
    dp, dact = drop_gradient(dp, dact, rows, OPTIONS)
    dp = minus_delta(dp, stats_of_step(rings.delta, step, L, OPTIONS), OPTIONS)
    _share(dact * dp, operands.index(1))
    dk = mma_parts(operands.index(1), q, dk)
    return dk, dv, tail_phase


@gluon.jit
def _tile(tile, wave, step, tail_phase, consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    schedule, outputs, scales, shared = (
        kernel.schedule, kernel.outputs, kernel.args, kernel.rings,
    )  # fmt: skip
    rings = Rings(
        q=shared.q, do=shared.do, k=shared.k[0], v=shared.v[0],
        lse=shared.lse, delta=shared.delta, tail=shared.tail,
    )  # fmt: skip
    BLOCK: gl.constexpr = rings.q.buffers.shape[2]
    WIDTH: gl.constexpr = rings.q.buffers.shape[3]
    visited = visited_blocks(schedule, tile, OPTIONS)
    first = tile.block * WARPGROUP_ROWS
    scale = score_factor(scales.scale, OPTIONS.activation)
    dropout = None
    if scales.seed_ptr is not None:
        dropout = dropout_of_head(scales.seed_ptr, scales.threshold, 0, 0)
    consumer_wait(rings.k, wave)
    consumer_wait(rings.v, wave)
    dk = [warpgroup_mma_init(x) for x in zero_parts(WIDTH, OPTIONS.head_dim, GROUPS)]
    dv = [warpgroup_mma_init(x) for x in zero_parts(WIDTH, OPTIONS.v_dim, GROUPS)]
    keys = Keys(opaque_rows(rings.k, wave), opaque_rows(rings.v, wave), first)
    for number in range(visited.masked):
        of_block, group_head, block = visited_rows(schedule, tile, number, visited, OPTIONS)
        row, q_len = block * BLOCK, of_block.q_len
        rows = QueryBlock(
            row, row + tile.kv_len - q_len, q_len - row, first_target_of(of_block, OPTIONS.mask),
            dropout, of_block.q_start, tile.head * OPTIONS.group + group_head,
        )  # fmt: skip
        dk, dv, tail_phase = _block(
            keys, rings, kernel.exchange, step + number, number > 0, dk, dv, rows, scale,
            tail_phase, OPTIONS, True,
        )  # fmt: skip
    keys = Keys(opaque_rows(rings.k, wave), opaque_rows(rings.v, wave), first)
    for number in range(visited.masked, visited.count):
        row, start, head = 0, 0, 0
        if dropout is not None:
            of_block, group_head, block = visited_rows(schedule, tile, number, visited, OPTIONS)
            row, start = block * BLOCK, of_block.q_start
            head = tile.head * OPTIONS.group + group_head
        first_target = first_target_of(tile, OPTIONS.mask)
        rows = QueryBlock(row, 0, BLOCK, first_target, dropout, start, head)
        dk, dv, tail_phase = _block(
            keys, rings, kernel.exchange, step + number, number > 0, dk, dv, rows, scale,
            tail_phase, OPTIONS, False,
        )  # fmt: skip
    dv, dk = wait_for_parts(dv, dk)
    thread_barrier()
    release(rings.q, step + visited.count - 1, visited.count > 0)
    release(rings.do, step + visited.count - 1, visited.count > 0)
    factor = output_factor(scales.output_scale, scales.segment_scale_ptr, tile.segment)
    row, num_keys = tile.kv_start + first, tile.kv_len - first
    dv = [x * (scales.act_factor * factor) for x in dv]
    buffer = rings.v.buffers.index(wave % rings.v.buffers.shape[0])
    store_epilogue(
        dv, outputs.dv, buffer, 0, row, tile.head, num_keys, OPTIONS.dv_stride, OPTIONS.v_dim
    )
    dk = [x * (scales.scale * scales.dact_factor * factor) for x in dk]
    buffer = rings.k.buffers.index(wave % rings.k.buffers.shape[0])
    store_epilogue(
        dk, outputs.dk, buffer, 1, row, tile.head, num_keys, OPTIONS.dk_stride, OPTIONS.head_dim
    )
    fence_async_shared()
    wait_for_stores()
    release(rings.k, wave)
    release(rings.v, wave)
    return step + visited.count, tail_phase


@gluon.jit
def _consume(consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    consume_waves(_tile, consumer, kernel, OPTIONS)


@safe_ptxas
@gluon.jit(**UNSPECIALISED)
def attention_bwd_wide_dkdv_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, num_tiles_ptr, num_segments, args,
    ACTIVATION: gl.constexpr, CONSTANTS: gl.constexpr,
):  # fmt: skip
    """dk, dv of a tile of key rows. It loops over the query blocks of all query groups and of all
    heads of a key head."""
    OPTIONS: gl.constexpr = with_activation(CONSTANTS, ACTIVATION)
    schedule = Schedule(
        args.tiles_ptr, num_tiles_ptr, args.q_offsets_ptr, args.kv_offsets_ptr, num_segments,
        args.num_targets_ptr, do_desc.shape[1], args.next_tile_ptr,
    )  # fmt: skip
    q, do = make_ring(q_desc, OPTIONS.stages, 1), make_ring(do_desc, OPTIONS.stages, 1)
    k = make_rings(k_desc, OPTIONS.row_stages, 1)
    v = make_rings(v_desc, OPTIONS.row_stages, 1)
    rings = Rings(
        q=q, do=do, k=k, v=v, lse=make_stats(q), delta=make_stats(q), tail=make_barriers(1, 2)
    )
    shape: gl.constexpr = [WARPGROUP_ROWS, OPTIONS.block]
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, q_desc.dtype)
    kernel = Kernel(
        args, schedule, rings, make_tile_queue(1),
        Outputs(dk=Output(dk_desc, args.dk_ptr), dv=Output(dv_desc, args.dv_ptr)),
        q_desc=q_desc, do_desc=do_desc, k_desc=k_desc, v_desc=v_desc,
        exchange=gl.allocate_shared_memory(q_desc.dtype, [2, WARPGROUP_ROWS, OPTIONS.block], L),
    )  # fmt: skip
    launch_specialised(_consume, produce, kernel, OPTIONS)
