"""Jagged attention for Hopper: a warp-specialised forward kernel, persistent over the tile schedule."""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ..common.activations import activation_factors
from ..common.device import mean_rows
from ..common.pipeline import (
    WARPGROUP_ROWS,
    Output,
    Ring,
    Tail,
    consumer_release,
    consumer_wait,
    consumer_wait_ahead,
    launch_specialised,
    make_barriers,
    make_epilogue_buffers,
    make_ring,
    make_rings,
    mma_abt,
    mma_layout,
    opaque_rows,
    producer_load,
    ring_rows,
    skip_stage,
    store_epilogue,
    to_mma_operand,
    wait_for_stores,
    wait_for_tail,
    zero_tail,
)
from ..common.ptxas import safe_ptxas
from ..schedule.device import fitting_tiles, query_lists
from .configs import hopper_keys_are_long
from .hopper_common import (
    Position,
    Schedule,
    Tile,
    TileQueue,
    consumer_visits,
    descriptor,
    grid,
    key_blocks,
    launch_constants,
    load_wave,
    make_tile_queue,
    num_waves,
    pop_tile,
    push_tile,
    release_tile,
    result_descriptor,
    score_scale,
    segment_factor,
    visible_keys,
    visited_block,
)
from .mask import Blocks, num_masked_blocks

SUMS = gl.constexpr(8)  # partial sums of a row until its tile ends: two for each of the four threads that hold it


class _Options(NamedTuple):
    """Constants of a launch."""

    heads: gl.constexpr
    group: gl.constexpr  # query heads per key head
    v_dim: gl.constexpr
    activation: gl.constexpr  # function of activations.py; None: softmax
    mask: gl.constexpr
    q_shared: gl.constexpr
    q_in_registers: gl.constexpr
    consumers: gl.constexpr


class _Rings(NamedTuple):
    """Buffers in shared memory. q: a ring per consumer; in a consumer, its own. tail: barrier of the values' tail."""

    q: Ring
    k: Ring
    v: Ring
    tail: gl.shared_memory_descriptor


class _Outputs(NamedTuple):
    out_desc: gl.tensor
    out_ptr: gl.tensor
    lse_ptr: gl.tensor
    stride_lse: gl.tensor
    buffers: gl.shared_memory_descriptor


class _Scales(NamedTuple):
    scale: gl.tensor
    value_factor: gl.tensor
    output_scale: gl.tensor
    segment_scale_ptr: gl.tensor


class _Kernel(NamedTuple):
    """What the kernel hands to its warps."""

    q_desc: gl.tensor
    k_desc: gl.tensor
    v_desc: gl.tensor
    schedule: Schedule
    rings: _Rings
    outputs: _Outputs
    scales: _Scales
    queue: TileQueue


class _Visit(NamedTuple):
    """A consumer's work on a tile: the blocks of keys from the `skipped`-th to the last visited one.

    wave: step of the ring of q. step: of the tile's first block in the rings of k and v. row: column of the consumer's first row.
    num_keys: in the first block, the only one that the segment's end may cut.
    """

    wave: gl.tensor
    step: gl.tensor
    tile: Tile
    blocks: Blocks
    visited: gl.tensor
    skipped: gl.tensor
    row: gl.tensor
    num_keys: gl.tensor


class _State(NamedTuple):
    """Softmax's running maximum `[64]` and partial sums `[64, SUMS]` of the rows, and acc = P v `[64, width]`."""

    row_max: gl.tensor
    row_sum: gl.tensor
    acc: gl.tensor


# -- producer -----------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _fwd_produce(kernel, OPTIONS: gl.constexpr):
    schedule, rings = kernel.schedule, kernel.rings
    ROWS: gl.constexpr = OPTIONS.consumers * WARPGROUP_ROWS
    BLOCK: gl.constexpr = kernel.k_desc.block_type.shape[1]
    waves = num_waves(schedule)
    next_tile = load_wave(schedule, 0, waves, OPTIONS.mask)
    step = 0  # of the rings of k and v
    for wave in range(waves):
        tile = next_tile
        next_tile = load_wave(schedule, wave + 1, waves, OPTIONS.mask)
        push_tile(kernel.queue, wave, tile)
        blocks, count = key_blocks(tile, OPTIONS.mask, ROWS, BLOCK)
        count = gl.maximum(count, 1)
        row = tile.q_start + tile.block * ROWS
        if OPTIONS.q_shared:
            row -= tile.q_start
        for consumer in gl.static_range(OPTIONS.consumers):
            producer_load(rings.q[consumer], kernel.q_desc, wave, tile.head, row + consumer * WARPGROUP_ROWS)
        for number in range(count + 1):  # in the order of their use: the keys of a block before the values of the one before it
            if number < count:
                producer_load(
                    rings.k, kernel.k_desc, step + number, tile.head // OPTIONS.group,
                    tile.kv_start + visited_block(number, blocks) * BLOCK,
                )  # fmt: skip
            if number > 0:
                producer_load(
                    rings.v, kernel.v_desc, step + number - 1, tile.head // OPTIONS.group,
                    tile.kv_start + visited_block(number - 1, blocks) * BLOCK,
                )  # fmt: skip
        step += count


# -- softmax ------------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _mask_scores(x, value, position, MASK: gl.constexpr):
    """x where the rows see the keys, `value` elsewhere. Without a mask, most blocks end before their segment does."""
    if MASK is not None or position.num_keys < x.shape[1]:
        x = gl.where(visible_keys(position, MASK, x.shape[1]), x, value)
    return x


@gluon.jit
def _halves(x):
    """The left and the right half of an MMA's columns: other registers of the same thread, nothing moves."""
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, x.shape[1] // 2)
    left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, L, assert_trivial=True), gl.convert_layout(right, L, assert_trivial=True)


@gluon.jit
def _fold(x, MAXIMUM: gl.constexpr):
    """Maxima or sums `[64, SUMS]` of the columns that are SUMS apart: within a thread, as a tree instead of one long chain."""
    if x.shape[1] == SUMS:
        return x
    else:
        left, right = _halves(x)
        left, right = _fold(left, MAXIMUM), _fold(right, MAXIMUM)
        if MAXIMUM:
            return gl.maximum(left, right)
        else:
            return left + right


@gluon.jit
def _online_softmax(scores, position, state, scale, MASK: gl.constexpr, MASKED: gl.constexpr):
    """exp2(scores - running maximum), the new state but for acc, and the factor by which acc is to be rescaled."""
    row_max = state.row_max
    if MASKED:
        scores = _mask_scores(scores, float("-inf"), position, MASK)
    block_max = gl.convert_layout(gl.max(_fold(scores, True), 1), row_max.type.layout)
    new_max = gl.maximum(row_max, block_max * scale)
    shift = new_max
    if MASKED:  # a row that has seen no key yet: with any finite maximum its weights are 0
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(scores * scale - shift[:, None])
    rescale = gl.exp2(row_max - shift)
    row_sum = state.row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, state.row_sum.type.layout))[:, None] + _fold(p, False)
    return p, _State(new_max, row_sum, state.acc), rescale


@gluon.jit
def _weights(scores, position, state, scale, OPTIONS: gl.constexpr, MASKED: gl.constexpr):
    """P of a block's scores, the new state but for acc, and the factor by which softmax rescales acc."""
    if OPTIONS.activation is None:
        return _online_softmax(scores, position, state, scale, OPTIONS.mask, MASKED)
    else:
        p, _ = OPTIONS.activation(scores, scale)
        if MASKED:
            p = _mask_scores(p, 0.0, position, OPTIONS.mask)
        return p, state, state.row_max


@gluon.jit
def _rescale(acc, factor):
    """acc times a factor per row."""
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def _log2(x):
    """log2 by the special-function unit: error at most 2⁻²², absolute or relative."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


# -- consumers ----------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _start_scores(q, k, OPTIONS: gl.constexpr):
    """Start q kᵀ."""
    if OPTIONS.q_in_registers:
        q = gl.convert_layout(q, gl.DotOperandLayout(0, mma_layout(WARPGROUP_ROWS, k.shape[0]), 2), assert_trivial=True)
    return mma_abt(q, k)


@gluon.constexpr_function
def _skips_blocks(mask, consumers, block):
    """Whether a consumer looks for blocks that it can skip: where a block is as long as a tile there are hardly any."""
    return mask is not None and consumers * WARPGROUP_ROWS > block


@gluon.jit
def _q_operand(q, rings, wave, SKIPS: gl.constexpr, OPTIONS: gl.constexpr):
    """The tile's query rows for one of several branches and loops."""
    if OPTIONS.q_in_registers or not SKIPS:
        return q
    else:
        return opaque_rows(rings.q, wave)


@gluon.jit
def _first_block(q, rings, step, position, state, scale, tail, consumer: gl.constexpr, OPTIONS: gl.constexpr, COLUMNS: gl.constexpr):
    """P of the first COLUMNS keys of a tile's first block, and the new state: no MMA of an earlier block is under way. Zeroes the values'
    tail."""
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, COLUMNS)
    WIDTH: gl.constexpr = rings.v.buffers.shape[3]
    k = consumer_wait(rings.k, step)
    if _skips_blocks(OPTIONS.mask, OPTIONS.consumers, rings.k.buffers.shape[2]):
        k = opaque_rows(rings.k, step)
    scores = _start_scores(q, k.slice(0, COLUMNS), OPTIONS)
    has_tail = position.num_keys < COLUMNS
    if has_tail:
        zero_tail(consumer_wait(rings.v, step).slice(0, COLUMNS), position.num_keys, tail, consumer, OPTIONS.consumers)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    consumer_release(rings.k, step)
    state = _State(gl.convert_layout(state.row_max, gl.SliceLayout(1, L)), state.row_sum, state.acc)
    p, state, _ = _weights(scores, position, state, scale, OPTIONS, True)
    if has_tail:
        wait_for_tail(tail)
    return to_mma_operand(p, rings.v.buffers.dtype, WIDTH), state


@gluon.jit
def _next_block(q, rings, step, more, position, p, state, scale, OPTIONS: gl.constexpr, MASKED: gl.constexpr):
    """P of the block of a step, and the new state with acc += P v of the block before. `more`: whether another block follows."""
    WAITS_AHEAD: gl.constexpr = OPTIONS.activation is not None
    if WAITS_AHEAD:  # the block before has waited for these keys
        k = ring_rows(rings.k, step % rings.k.buffers.shape[0])
    else:
        k = consumer_wait(rings.k, step)
    scores = _start_scores(q, k, OPTIONS)
    acc = warpgroup_mma(p, consumer_wait(rings.v, step - 1).slice(0, p.shape[1]), state.acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    consumer_release(rings.k, step)
    new_p, state, rescale = _weights(scores, position, state, scale, OPTIONS, MASKED)
    new_p = to_mma_operand(new_p, k.dtype, state.acc.shape[1])
    if WAITS_AHEAD:
        consumer_wait_ahead(rings.k, step + 1, more)
        acc, p, new_p = warpgroup_mma_wait(0, deps=(acc, p, new_p))
    else:
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    consumer_release(rings.v, step - 1)
    if OPTIONS.activation is None:
        acc = _rescale(acc, rescale)
    return new_p, _State(state.row_max, state.row_sum, acc)


@gluon.jit
def _last_values(p, rings, step, wave, state, OPTIONS: gl.constexpr):
    """acc + P v of a tile's last block, and with softmax the factor and log-sum-exp, base 2, of each row, computed while the MMA runs. Also
    waits until the epilogue buffer is free."""
    acc = warpgroup_mma(p, consumer_wait(rings.v, step).slice(0, p.shape[1]), state.acc, is_async=True)
    consumer_release(rings.q, wave)  # only now: an MMA has read q's registers, so their loads are complete
    wait_for_stores()
    row_max = state.row_max
    factor, lse = row_max, row_max
    if OPTIONS.activation is None:
        row_sum = gl.convert_layout(gl.sum(state.row_sum, 1), row_max.type.layout)
        # A row that sees no key leaves row_sum at 0: its output is 0 and its log-sum-exp -inf.
        factor = 1.0 / gl.where(row_sum > 0, row_sum, 1.0)
        lse = row_max + _log2(row_sum)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    consumer_release(rings.v, step)
    return acc, factor, lse


@gluon.jit
def _fwd_rows(q, rings, visit, scale, tail, consumer: gl.constexpr, OPTIONS: gl.constexpr):
    """acc = P v over a consumer's blocks, and the factor and log-sum-exp of each row as _last_values returns them.

    The first block is apart, as only it may end before its block of keys does: half a block of keys takes half the MMA.
    """
    BLOCK: gl.constexpr = rings.k.buffers.shape[2]
    WIDTH: gl.constexpr = rings.v.buffers.shape[3]
    SCORES: gl.constexpr = mma_layout(WARPGROUP_ROWS, BLOCK)
    STATS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SKIPS: gl.constexpr = _skips_blocks(OPTIONS.mask, OPTIONS.consumers, BLOCK)
    blocks, wave, step, skipped, row, num_keys = visit.blocks, visit.wave, visit.step, visit.skipped, visit.row, visit.num_keys
    kv_len, first_target = visit.tile.kv_len, visit.tile.first_target
    state = _State(
        gl.full([WARPGROUP_ROWS], float("-inf"), gl.float32, STATS),
        gl.zeros([WARPGROUP_ROWS, SUMS], gl.float32, mma_layout(WARPGROUP_ROWS, SUMS)),
        gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, mma_layout(WARPGROUP_ROWS, WIDTH)),
    )
    acc, factor, lse = state.acc, state.row_max, state.row_max
    count = gl.maximum(visit.visited, 1)
    masked = num_masked_blocks(blocks)
    column = visited_block(skipped, blocks) * BLOCK
    if SKIPS:
        num_keys = gl.where(skipped > 0, kv_len - column, num_keys)
    begun = skipped + 1
    p = to_mma_operand(gl.zeros([WARPGROUP_ROWS, BLOCK], gl.float32, SCORES), rings.v.buffers.dtype, WIDTH)
    if num_keys <= BLOCK // 2:
        q_rows = _q_operand(q, rings, wave, SKIPS, OPTIONS)
        half, first = _first_block(
            q_rows, rings, step + skipped, Position(row, column, num_keys, first_target), state, scale, tail, consumer, OPTIONS,
            BLOCK // 2,
        )  # fmt: skip
        state = _State(gl.convert_layout(first.row_max, STATS), first.row_sum, first.acc)
        if count > begun:
            if OPTIONS.activation is not None:
                consumer_wait_ahead(rings.k, step + begun, True)
            column = visited_block(begun, blocks) * BLOCK
            q_rows = _q_operand(q, rings, wave, SKIPS, OPTIONS)
            p, state = _next_block(
                q_rows, rings, step + begun, count > begun + 1, Position(row, column, kv_len - column, first_target), half, state, scale,
                OPTIONS, OPTIONS.mask is not None,
            )  # fmt: skip
        else:
            half_acc, factor, lse = _last_values(half, rings, step + skipped, wave, state, OPTIONS)
            state = _State(state.row_max, state.row_sum, half_acc)
        begun += 1
    else:
        q_rows = _q_operand(q, rings, wave, SKIPS, OPTIONS)
        p, state = _first_block(
            q_rows, rings, step + skipped, Position(row, column, num_keys, first_target), state, scale, tail, consumer, OPTIONS, BLOCK
        )  # fmt: skip
        if OPTIONS.activation is not None:
            consumer_wait_ahead(rings.k, step + begun, count > begun)
    if OPTIONS.mask is not None:
        q_rows = _q_operand(q, rings, wave, SKIPS, OPTIONS)
        for number in range(begun, masked):
            column = visited_block(number, blocks) * BLOCK
            p, state = _next_block(
                q_rows, rings, step + number, number + 1 < count, Position(row, column, kv_len - column, first_target), p, state, scale,
                OPTIONS, True,
            )  # fmt: skip
    q_rows = _q_operand(q, rings, wave, SKIPS, OPTIONS)
    for number in range(gl.maximum(begun, masked), count):
        p, state = _next_block(
            q_rows, rings, step + number, number + 1 < count, Position(row, 0, BLOCK, first_target), p, state, scale, OPTIONS, False
        )  # fmt: skip
    acc = state.acc
    if begun <= count:
        acc, factor, lse = _last_values(p, rings, step + count - 1, wave, state, OPTIONS)
    return acc, factor, lse


@gluon.jit
def _skip_blocks(rings, step, count, num_keys, has_tail, tail, consumer: gl.constexpr, CONSUMERS: gl.constexpr):
    """Skip the first blocks of a tile, but take part in zeroing the values' tail in the first one."""
    if has_tail & (count > 0):
        zero_tail(consumer_wait(rings.v, step), num_keys, tail, consumer, CONSUMERS)
        wait_for_tail(tail)
    for number in range(count):
        skip_stage(rings.k, step + number)
        skip_stage(rings.v, step + number)


@gluon.jit
def _num_skipped(tile, blocks, visited, consumer: gl.constexpr, OPTIONS: gl.constexpr, BLOCK: gl.constexpr):
    """How many of the tile's first blocks a consumer's rows see nothing of; at most all but one, as its rows need a result."""
    last = gl.minimum(num_masked_blocks(blocks), visited - 1)
    count = gl.to_tensor(0)
    while (count < last) & (
        consumer_visits(tile, visited_block(count, blocks), key_blocks, consumer, OPTIONS.consumers, OPTIONS.mask, BLOCK) == 0
    ):
        count += 1
    return count


@gluon.jit
def _fwd_consume(consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    schedule, outputs, scales, queue = kernel.schedule, kernel.outputs, kernel.scales, kernel.queue
    rings = _Rings(kernel.rings.q[consumer], kernel.rings.k, kernel.rings.v, kernel.rings.tail)
    output = Output(outputs.out_desc, outputs.out_ptr)
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    BLOCK: gl.constexpr = rings.k.buffers.shape[2]
    SCORES: gl.constexpr = mma_layout(WARPGROUP_ROWS, BLOCK)
    SOFTMAX: gl.constexpr = OPTIONS.activation is None
    scale = score_scale(scales.scale, OPTIONS.activation)
    waves = num_waves(schedule)
    step, tail_phase = 0, 0
    # With softmax the next tile is taken before this one is stored; pointwise activations are 2 % slower so.
    next_tile = pop_tile(queue, 0, waves > 0 if SOFTMAX else False)
    for wave in range(waves):
        tile = next_tile if SOFTMAX else pop_tile(queue, wave)
        blocks, visited = key_blocks(tile, OPTIONS.mask, CONSUMERS * WARPGROUP_ROWS, BLOCK)
        num_keys = gl.where(visited > 0, tile.kv_len - visited_block(0, blocks) * BLOCK, 0)  # in the first block, the only one cut
        has_tail = (num_keys < BLOCK) & (num_keys != BLOCK // 2)
        first = (tile.block * CONSUMERS + consumer) * WARPGROUP_ROWS
        num_rows = tile.q_len - first
        tail = Tail(rings.tail, tail_phase)
        if num_rows > 0:
            factor = segment_factor(scales.value_factor, scales.output_scale, scales.segment_scale_ptr, tile.segment)
            q = consumer_wait(rings.q, wave)
            if OPTIONS.q_in_registers:
                q = q.load(gl.DotOperandLayout(0, SCORES, 2))
            skipped = 0
            if _skips_blocks(OPTIONS.mask, CONSUMERS, BLOCK):
                skipped = _num_skipped(tile, blocks, visited, consumer, OPTIONS, BLOCK)
                _skip_blocks(rings, step, skipped, num_keys, has_tail, tail, consumer, CONSUMERS)
            visit = _Visit(wave, step, tile, blocks, visited, skipped, first + tile.kv_len - tile.q_len, num_keys)
            acc, row_factor, lse = _fwd_rows(q, rings, visit, scale, tail, consumer, OPTIONS)
            if SOFTMAX:
                next_tile = pop_tile(queue, wave + 1, wave + 1 < waves)
                acc = _rescale(acc, row_factor)
            else:
                acc = acc * factor
            buffer, row = outputs.buffers.index(consumer), tile.q_start + first
            store_epilogue(acc, output, buffer, None, row, tile.head, num_rows, OPTIONS.heads, OPTIONS.v_dim)
            if SOFTMAX:  # after the TMA store has started, whose fence would wait for it
                lanes = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, SCORES))
                stored = lanes < num_rows
                gl.store(outputs.lse_ptr + tile.head.to(gl.int64) * outputs.stride_lse + tile.q_start + first + lanes, lse, mask=stored)
        else:
            skip_stage(rings.q, wave)
            _skip_blocks(rings, step, gl.maximum(visited, 1), num_keys, has_tail, tail, consumer, CONSUMERS)
            if SOFTMAX:
                next_tile = pop_tile(queue, wave + 1, wave + 1 < waves)
        step += gl.maximum(visited, 1)
        tail_phase += has_tail.to(gl.int32)
        release_tile(queue, wave)
    tma.store_wait(0)


@safe_ptxas
@gluon.jit(do_not_specialize=["num_segments", "stride_lse"])
def attention_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr,
    q_offsets_ptr, kv_offsets_ptr, num_segments, tiles_ptr, num_tiles_ptr, num_targets_ptr, segment_scale_ptr,
    scale, value_factor, output_scale, stride_lse,
    HEADS: gl.constexpr, GROUP: gl.constexpr, V_DIM: gl.constexpr, ACTIVATION: gl.constexpr, MASK: gl.constexpr, Q_SHARED: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ROW_STAGES: gl.constexpr, Q_REGISTERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    OPTIONS: gl.constexpr = _Options(HEADS, GROUP, V_DIM, ACTIVATION, MASK, Q_SHARED, Q_REGISTERS, CONSUMERS)
    schedule = Schedule(tiles_ptr, num_tiles_ptr, q_offsets_ptr, kv_offsets_ptr, num_segments, num_targets_ptr)
    k_ring, v_ring = make_ring(k_desc, STAGES, CONSUMERS), make_ring(v_desc, STAGES, CONSUMERS)
    rings = _Rings(make_rings(q_desc, ROW_STAGES, CONSUMERS), k_ring, v_ring, make_barriers(1, CONSUMERS))
    outputs = _Outputs(out_desc, out_ptr, lse_ptr, stride_lse, make_epilogue_buffers(q_desc, CONSUMERS))
    scales = _Scales(scale, value_factor, output_scale, segment_scale_ptr)
    queue = make_tile_queue(CONSUMERS)
    kernel = _Kernel(q_desc, k_desc, v_desc, schedule, rings, outputs, scales, queue)
    launch_specialised(_fwd_consume, _fwd_produce, kernel, OPTIONS, REGISTERS)


# -- launcher -----------------------------------------------------------------------------------------------------------------------


def forward(
    q, k, v, out, lse, q_offsets, kv_offsets, tiles, num_tiles, block_m, scale, q_shared, activation, mask, num_targets, segment_scale,
    output_scale, batch_invariant,
) -> None:  # fmt: skip
    """Launch the forward kernel; arguments as those of the portable one."""
    dims = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
    long = hopper_keys_are_long(mean_rows(k.shape[0], kv_offsets, batch_invariant), q.shape[2], mask is not None)
    config, constants = launch_constants("fwd", *dims, q.dtype, activation, mask and tuple(mask), q_shared, long)
    sizes = out.shape[0], q.shape[1], config.tile, config.block
    tiles, num_tiles = fitting_tiles(tiles, num_tiles, block_m, q_offsets, kv_offsets, *sizes, mask, num_targets)
    _, num_segments = query_lists(q_offsets, kv_offsets)
    value_factor, _ = activation_factors(activation, q.dtype == torch.bfloat16, scale)
    if blocks := grid(tiles):
        attention_fwd_hopper_kernel[blocks](
            descriptor(q, 64), descriptor(k, config.block), descriptor(v, config.block), result_descriptor(out), out, lse,
            q_offsets, kv_offsets, num_segments, tiles, num_tiles, num_targets, segment_scale,
            scale, value_factor, output_scale, lse.stride(0),
            Q_REGISTERS=config.rows_in_registers, **constants,
        )  # fmt: skip
