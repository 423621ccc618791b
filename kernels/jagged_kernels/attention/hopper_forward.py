"""Jagged attention for Hopper: a warp-specialised forward kernel, persistent over the tile schedule.

A thread block is one warp that loads and two or three warpgroups that compute, 64 query rows of a tile each. The loading warp runs ahead
through the schedule, as far as rings of buffers have room: the next tile's rows are there when a tile ends. A warpgroup has the scores of
a key block and the weighted values of the block before in flight together, and takes the scores' weights while the latter still run.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ..common.activations import activation_factors
from ..common.pipeline import (
    LOAD_REGISTERS,
    WARPGROUP_ROWS,
    await_cleared,
    await_full,
    await_stored,
    clear_rows,
    fetch,
    hold_until_full,
    make_barriers,
    make_ring,
    make_rings,
    make_stages,
    own_rows,
    pass_over,
    product_layout,
    put_rows,
    release,
    rows_of,
)
from ..common.ptxas import safe_ptxas
from ..schedule.device import kernel_tiles
from ..schedule.host import Segments
from .configs import HopperConfig
from .hopper_common import (
    as_factor,
    descriptor,
    end_tile,
    grid,
    key_blocks,
    launch_constants,
    make_tile_ring,
    multiply_rows,
    num_waves,
    own_rows_visit,
    pass_tile,
    result_descriptor,
    score_scale,
    segment_factor,
    take_tile,
    tile_of_wave,
    visible_keys,
    visited_block,
)
from .mask import num_partial_blocks
from .params import AttentionParams, Operands

SUMS = gl.constexpr(8)  # of a row, until the tile ends: two for each of the four threads that hold it

# -- the forward's parts -------------------------------------------------------------------------------------------------------------


@gluon.jit
def _fwd_load(
    q_desc, k_desc, v_desc, shared, GROUP: gl.constexpr, MASK: gl.constexpr, Q_SHARED: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, ROW_STAGES: gl.constexpr,
):  # fmt: skip
    schedule, rings = shared[0], shared[1]
    q_rings, k_ring, v_ring, _cleared = rings
    ROWS: gl.constexpr = CONSUMERS * WARPGROUP_ROWS
    BLOCK: gl.constexpr = k_desc.block_type.shape[1]
    waves = num_waves(schedule)
    next_tile = tile_of_wave(schedule, 0, waves, MASK)
    turn = 0  # of the rings of keys and values
    for wave in range(waves):
        tile = next_tile
        next_tile = tile_of_wave(schedule, wave + 1, waves, MASK)
        pass_tile(shared[-1], wave, tile)
        _, head, block, q_start, _, kv_start, _, _ = tile
        blocks, count = key_blocks(tile, MASK, ROWS, BLOCK)
        count = gl.maximum(count, 1)
        row = q_start + block * ROWS
        if Q_SHARED:
            row -= q_start
        for consumer in gl.static_range(CONSUMERS):
            fetch(q_rings[consumer], q_desc, wave, head, row + consumer * WARPGROUP_ROWS, ROW_STAGES)
        for number in range(count + 1):  # in the order of their use: the keys of a block before the values of the one before it
            if number < count:
                fetch(k_ring, k_desc, turn + number, head // GROUP, kv_start + visited_block(number, blocks) * BLOCK, STAGES)
            if number > 0:
                fetch(v_ring, v_desc, turn + number - 1, head // GROUP, kv_start + visited_block(number - 1, blocks) * BLOCK, STAGES)
        turn += count


@gluon.jit
def _hide(x, value, keys, MASK: gl.constexpr):
    """x where the rows see the keys, `value` elsewhere; `keys` as visible_keys takes them. Most blocks end where their keys do."""
    row, column, num_keys, first_target = keys
    if MASK is not None or num_keys < x.shape[1]:
        x = gl.where(visible_keys(row, column, num_keys, first_target, MASK, x.shape[1]), x, value)
    return x


@gluon.jit
def _halves(x):
    """The left and the right half of a product's columns: they are registers, nothing moves."""
    L: gl.constexpr = product_layout(WARPGROUP_ROWS, x.shape[1] // 2)
    left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, L, assert_trivial=True), gl.convert_layout(right, L, assert_trivial=True)


@gluon.jit
def _fold(x, MAXIMUM: gl.constexpr):
    """Maxima or sums of the columns that are SUMS apart: of what a thread holds, many at a time, where a row's are one long chain."""
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
def _weights(scores, keys, row_max, row_sum, scale, ACTIVATION: gl.constexpr, MASK: gl.constexpr, PARTIAL: gl.constexpr):
    """Weights of a block's scores, and the running maximum and sum of softmax's; what both were before is to be multiplied by `rescale`."""
    if ACTIVATION is None:
        if PARTIAL:
            scores = _hide(scores, float("-inf"), keys, MASK)
        block_max = gl.convert_layout(gl.max(_fold(scores, True), 1), row_max.type.layout)
        new_max = gl.maximum(row_max, block_max * scale)
        shift = new_max
        if PARTIAL:  # a row that has seen nothing yet: any finite maximum gives it weights 0
            shift = gl.where(new_max == float("-inf"), 0.0, new_max)
        p = gl.exp2(scores * scale - shift[:, None])
        rescale = gl.exp2(row_max - shift)
        partial = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None] + _fold(p, False)
        return p, new_max, partial, rescale
    else:
        p, _ = ACTIVATION(scores, scale)
        if PARTIAL:
            p = _hide(p, 0.0, keys, MASK)
        return p, row_max, row_sum, row_max


@gluon.jit
def _score(q, k, Q_REGISTERS: gl.constexpr):
    """q kᵀ, under way."""
    if Q_REGISTERS:
        q = gl.convert_layout(q, gl.DotOperandLayout(0, product_layout(WARPGROUP_ROWS, k.shape[0]), 2), assert_trivial=True)
    return multiply_rows(q, k)


@gluon.constexpr_function
def _passes_blocks_over(mask, consumers, block):
    """Whether a warpgroup looks for blocks of which only others see something: seldom are there any where a block is as long as a tile."""
    return mask is not None and consumers * WARPGROUP_ROWS > block


@gluon.jit
def _own_q(q, q_ring, wave, OWN: gl.constexpr, ROW_STAGES: gl.constexpr, Q_REGISTERS: gl.constexpr):
    """The tile's query rows for one of several branches and loops."""
    if Q_REGISTERS or not OWN:
        return q
    else:
        return own_rows(q_ring, wave, ROW_STAGES)


@gluon.jit
def _first_weights(
    q, k_ring, v_ring, turn, row_max, row_sum, row, column, num_keys, first_target, scale, cleared, clears,
    consumer: gl.constexpr, CONSUMERS: gl.constexpr, ACTIVATION: gl.constexpr, MASK: gl.constexpr, STAGES: gl.constexpr,
    Q_REGISTERS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Of a block's first keys, no product being under way; what follows their values becomes 0."""
    L: gl.constexpr = product_layout(WARPGROUP_ROWS, COLUMNS)
    WIDTH: gl.constexpr = v_ring[0].shape[3]
    k = await_full(k_ring, turn, STAGES)
    if _passes_blocks_over(MASK, CONSUMERS, k_ring[0].shape[2]):
        k = own_rows(k_ring, turn, STAGES)
    scores = _score(q, k.slice(0, COLUMNS), Q_REGISTERS)
    cut = num_keys < COLUMNS
    if cut:
        clear_rows(await_full(v_ring, turn, STAGES).slice(0, COLUMNS), num_keys, cleared, consumer, CONSUMERS)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    release(k_ring, turn, STAGES)
    row_max = gl.convert_layout(row_max, gl.SliceLayout(1, L))
    keys = row, column, num_keys, first_target
    p, row_max, row_sum, _ = _weights(scores, keys, row_max, row_sum, scale, ACTIVATION, MASK, True)
    if cut:
        await_cleared(cleared, clears)
    return as_factor(p, v_ring[0].dtype, WIDTH), row_max, row_sum


@gluon.jit
def _log2(x):
    """As the special-function unit has it: off by 2⁻²² at most, or by that part of the result."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _last_values(
    p, v_ring, turn, acc, row_max, row_sum, q_ring, wave, ACTIVATION: gl.constexpr, STAGES: gl.constexpr, ROW_STAGES: gl.constexpr
):  # fmt: skip
    """acc + p v of a tile's last keys, and, made while that product is under way, what a row of it is to be multiplied by and the row's
    log-sum-exp in base 2; both softmax's alone. The staging buffer has been awaited too."""
    acc = warpgroup_mma(p, await_full(v_ring, turn, STAGES).slice(0, p.shape[1]), acc, is_async=True)
    release(q_ring, wave, ROW_STAGES)  # not before products have taken what registers hold of them: loads may still be under way
    await_stored()
    factor, lse = row_max, row_max
    if ACTIVATION is None:
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout)
        # A row that sees no key leaves row_sum at 0: its output is 0 and its log-sum-exp -inf.
        factor = 1.0 / gl.where(row_sum > 0, row_sum, 1.0)
        lse = row_max + _log2(row_sum)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    release(v_ring, turn, STAGES)
    return acc, factor, lse


@gluon.jit
def _fwd_block(
    q, k_ring, v_ring, turn, more, p, acc, row_max, row_sum, row, column, num_keys, first_target, scale,
    ACTIVATION: gl.constexpr, MASK: gl.constexpr, PARTIAL: gl.constexpr, STAGES: gl.constexpr, Q_REGISTERS: gl.constexpr,
):  # fmt: skip
    """The scores of a key block, their weights, and acc += p v of the block before."""
    WIDTH: gl.constexpr = acc.shape[1]
    OUT: gl.constexpr = product_layout(WARPGROUP_ROWS, WIDTH)
    HOLD: gl.constexpr = ACTIVATION is not None
    if HOLD:  # the block before has waited for these keys
        k = rows_of(k_ring[0], turn % STAGES)
    else:
        k = await_full(k_ring, turn, STAGES)
    scores = _score(q, k, Q_REGISTERS)
    acc = warpgroup_mma(p, await_full(v_ring, turn - 1, STAGES).slice(0, p.shape[1]), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    release(k_ring, turn, STAGES)
    keys = row, column, num_keys, first_target
    new_p, row_max, row_sum, rescale = _weights(scores, keys, row_max, row_sum, scale, ACTIVATION, MASK, PARTIAL)
    new_p = as_factor(new_p, k.dtype, WIDTH)
    if HOLD:
        hold_until_full(k_ring, turn + 1, more, STAGES)
        acc, p, new_p = warpgroup_mma_wait(0, deps=(acc, p, new_p))
    else:
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    release(v_ring, turn - 1, STAGES)
    if ACTIVATION is None:
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
    return new_p, acc, row_max, row_sum


@gluon.jit
def _fwd_rows(
    q, q_ring, wave, tile, k_ring, v_ring, turn, blocks, skipped, visited, row, num_keys, scale, cleared, clears,
    consumer: gl.constexpr, CONSUMERS: gl.constexpr, ACTIVATION: gl.constexpr, MASK: gl.constexpr, STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr, Q_REGISTERS: gl.constexpr,
):  # fmt: skip
    """acc = p v over the blocks that the tile visits, but the first `skipped`; what its rows are to be multiplied by, and their
    log-sum-exp, as _last_values has them."""
    BLOCK: gl.constexpr = k_ring[0].shape[2]
    WIDTH: gl.constexpr = v_ring[0].shape[3]
    STATS: gl.constexpr = gl.SliceLayout(1, product_layout(WARPGROUP_ROWS, BLOCK))
    OUT: gl.constexpr = product_layout(WARPGROUP_ROWS, WIDTH)
    PASSES: gl.constexpr = _passes_blocks_over(MASK, CONSUMERS, BLOCK)
    row_max = gl.full([WARPGROUP_ROWS], float("-inf"), gl.float32, STATS)
    row_sum = gl.zeros([WARPGROUP_ROWS, SUMS], gl.float32, product_layout(WARPGROUP_ROWS, SUMS))
    acc = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, OUT)
    factor, lse = row_max, row_max
    _, _, _, _, _, _, kv_len, first_target = tile
    count = gl.maximum(visited, 1)
    partial = num_partial_blocks(blocks)
    column = visited_block(skipped, blocks) * BLOCK
    if PASSES:
        num_keys = gl.where(skipped > 0, kv_len - column, num_keys)
    begun = skipped + 1
    p = as_factor(gl.zeros([WARPGROUP_ROWS, BLOCK], gl.float32, product_layout(WARPGROUP_ROWS, BLOCK)), v_ring[0].dtype, WIDTH)
    if num_keys <= BLOCK // 2:
        own_q = _own_q(q, q_ring, wave, PASSES, ROW_STAGES, Q_REGISTERS)
        half, row_max, row_sum = _first_weights(
            own_q, k_ring, v_ring, turn + skipped, row_max, row_sum, row, column, num_keys, first_target, scale, cleared, clears,
            consumer, CONSUMERS, ACTIVATION, MASK, STAGES, Q_REGISTERS, BLOCK // 2,
        )  # fmt: skip
        row_max = gl.convert_layout(row_max, STATS)
        if count > begun:
            if ACTIVATION is not None:
                hold_until_full(k_ring, turn + begun, True, STAGES)
            column = visited_block(begun, blocks) * BLOCK
            own_q = _own_q(q, q_ring, wave, PASSES, ROW_STAGES, Q_REGISTERS)
            p, acc, row_max, row_sum = _fwd_block(
                own_q, k_ring, v_ring, turn + begun, count > begun + 1, half, acc, row_max, row_sum, row, column, kv_len - column,
                first_target, scale, ACTIVATION, MASK, MASK is not None, STAGES, Q_REGISTERS,
            )  # fmt: skip
        else:
            acc, factor, lse = _last_values(
                half, v_ring, turn + skipped, acc, row_max, row_sum, q_ring, wave, ACTIVATION, STAGES, ROW_STAGES
            )  # fmt: skip
        begun += 1
    else:
        own_q = _own_q(q, q_ring, wave, PASSES, ROW_STAGES, Q_REGISTERS)
        p, row_max, row_sum = _first_weights(
            own_q, k_ring, v_ring, turn + skipped, row_max, row_sum, row, column, num_keys, first_target, scale, cleared, clears,
            consumer, CONSUMERS, ACTIVATION, MASK, STAGES, Q_REGISTERS, BLOCK,
        )  # fmt: skip
        if ACTIVATION is not None:
            hold_until_full(k_ring, turn + begun, count > begun, STAGES)
    if MASK is not None:
        own_q = _own_q(q, q_ring, wave, PASSES, ROW_STAGES, Q_REGISTERS)
        for number in range(begun, partial):
            column = visited_block(number, blocks) * BLOCK
            p, acc, row_max, row_sum = _fwd_block(
                own_q, k_ring, v_ring, turn + number, number + 1 < count, p, acc, row_max, row_sum, row, column, kv_len - column,
                first_target, scale, ACTIVATION, MASK, True, STAGES, Q_REGISTERS,
            )  # fmt: skip
    own_q = _own_q(q, q_ring, wave, PASSES, ROW_STAGES, Q_REGISTERS)
    for number in range(gl.maximum(begun, partial), count):
        p, acc, row_max, row_sum = _fwd_block(
            own_q, k_ring, v_ring, turn + number, number + 1 < count, p, acc, row_max, row_sum, row, 0, BLOCK,
            first_target, scale, ACTIVATION, MASK, False, STAGES, Q_REGISTERS,
        )  # fmt: skip
    if begun <= count:
        acc, factor, lse = _last_values(
            p, v_ring, turn + count - 1, acc, row_max, row_sum, q_ring, wave, ACTIVATION, STAGES, ROW_STAGES
        )  # fmt: skip
    return acc, factor, lse


@gluon.jit
def _pass_over_blocks(
    k_ring, v_ring, turn, count, num_keys, cut, cleared, clears, consumer: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """A tile's first blocks, of which the warpgroup has no use, in the order in which they come."""
    if cut & (count > 0):
        clear_rows(await_full(v_ring, turn, STAGES), num_keys, cleared, consumer, CONSUMERS)
        await_cleared(cleared, clears)
    for number in range(count):
        pass_over(k_ring, turn + number, STAGES)
        pass_over(v_ring, turn + number, STAGES)


@gluon.jit
def _unseen_blocks(tile, blocks, visited, consumer: gl.constexpr, CONSUMERS: gl.constexpr, MASK: gl.constexpr, BLOCK: gl.constexpr):
    """How many of the tile's first blocks a warpgroup's rows see nothing of; not all: its rows shall have results."""
    last = gl.minimum(num_partial_blocks(blocks), visited - 1)
    count = gl.to_tensor(0)
    while (count < last) & (own_rows_visit(tile, visited_block(count, blocks), key_blocks, consumer, CONSUMERS, MASK, BLOCK) == 0):
        count += 1
    return count


@gluon.jit
def _fwd_compute(
    consumer: gl.constexpr, shared, HEADS: gl.constexpr, DIM: gl.constexpr, ACTIVATION: gl.constexpr, MASK: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ROW_STAGES: gl.constexpr, Q_REGISTERS: gl.constexpr,
):  # fmt: skip
    schedule, rings, outputs, scales = shared[0], shared[1], shared[2], shared[3]
    q_rings, k_ring, v_ring, cleared = rings
    q_ring = q_rings[consumer]
    out_desc, out_ptr, lse_ptr, stride_lse, stages = outputs
    scale, value_factor, output_scale, segment_scale_ptr = scales
    BLOCK: gl.constexpr = k_ring[0].shape[2]
    SCORES: gl.constexpr = product_layout(WARPGROUP_ROWS, BLOCK)
    scale = score_scale(scale, ACTIVATION)
    waves = num_waves(schedule)
    turn, clears = 0, 0
    EARLY: gl.constexpr = ACTIVATION is None  # takes the next tile before it stores this one; pointwise activations are 2 % slower so
    next_tile = take_tile(shared[-1], 0, waves > 0 if EARLY else False)
    for wave in range(waves):
        tile = next_tile if EARLY else take_tile(shared[-1], wave)
        segment, head, block, q_start, q_len, kv_start, kv_len, first_target = tile
        blocks, visited = key_blocks(tile, MASK, CONSUMERS * WARPGROUP_ROWS, BLOCK)
        num_keys = gl.where(visited > 0, kv_len - visited_block(0, blocks) * BLOCK, 0)  # in the first block, the only one cut
        cut = (num_keys < BLOCK) & (num_keys != BLOCK // 2)
        first = (block * CONSUMERS + consumer) * WARPGROUP_ROWS
        num_rows = q_len - first
        if num_rows > 0:
            factor = segment_factor(value_factor, output_scale, segment_scale_ptr, segment)
            q = await_full(q_ring, wave, ROW_STAGES)
            if Q_REGISTERS:
                q = q.load(gl.DotOperandLayout(0, SCORES, 2))
            skipped = 0
            if _passes_blocks_over(MASK, CONSUMERS, BLOCK):
                skipped = _unseen_blocks(tile, blocks, visited, consumer, CONSUMERS, MASK, BLOCK)
                _pass_over_blocks(k_ring, v_ring, turn, skipped, num_keys, cut, cleared, clears, consumer, CONSUMERS, STAGES)
            acc, row_factor, lse = _fwd_rows(
                q, q_ring, wave, tile, k_ring, v_ring, turn, blocks, skipped, visited, first + kv_len - q_len, num_keys, scale,
                cleared, clears, consumer, CONSUMERS, ACTIVATION, MASK, STAGES, ROW_STAGES, Q_REGISTERS,
            )  # fmt: skip
            if EARLY:
                next_tile = take_tile(shared[-1], wave + 1, wave + 1 < waves)
            if ACTIVATION is None:
                acc = acc * gl.convert_layout(row_factor, gl.SliceLayout(1, product_layout(WARPGROUP_ROWS, acc.shape[1])))[:, None]
            else:
                acc = acc * factor
            put_rows(acc, stages.index(consumer), None, out_desc, out_ptr, q_start + first, head, num_rows, HEADS, DIM)
            if ACTIVATION is None:  # after the box has left, whose fence would wait for it
                lanes = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, SCORES))
                gl.store(lse_ptr + head.to(gl.int64) * stride_lse + q_start + first + lanes, lse, mask=lanes < num_rows)
        else:
            pass_over(q_ring, wave, ROW_STAGES)
            count = gl.maximum(visited, 1)
            _pass_over_blocks(k_ring, v_ring, turn, count, num_keys, cut, cleared, clears, consumer, CONSUMERS, STAGES)
            if EARLY:
                next_tile = take_tile(shared[-1], wave + 1, wave + 1 < waves)
        turn += gl.maximum(visited, 1)
        clears += cut.to(gl.int32)
        end_tile(shared[-1], wave)
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
    schedule = tiles_ptr, num_tiles_ptr, q_offsets_ptr, kv_offsets_ptr, num_segments, num_targets_ptr
    key_rings = make_ring(k_desc, STAGES, CONSUMERS), make_ring(v_desc, STAGES, CONSUMERS)
    rings = make_rings(q_desc, ROW_STAGES, CONSUMERS), key_rings[0], key_rings[1], make_barriers(1, CONSUMERS)
    outputs = out_desc, out_ptr, lse_ptr, stride_lse, make_stages(q_desc, CONSUMERS)
    scales = scale, value_factor, output_scale, segment_scale_ptr
    shared = schedule, rings, outputs, scales, make_tile_ring(CONSUMERS)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_fwd_compute, (0, shared, HEADS, V_DIM, ACTIVATION, MASK, CONSUMERS, STAGES, ROW_STAGES, Q_REGISTERS)),
            (_fwd_compute, (1, shared, HEADS, V_DIM, ACTIVATION, MASK, CONSUMERS, STAGES, ROW_STAGES, Q_REGISTERS)),
            (_fwd_load, (q_desc, k_desc, v_desc, shared, GROUP, MASK, Q_SHARED, CONSUMERS, STAGES, ROW_STAGES)),
        ], [4, 1], [REGISTERS, LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_fwd_compute, (0, shared, HEADS, V_DIM, ACTIVATION, MASK, CONSUMERS, STAGES, ROW_STAGES, Q_REGISTERS)),
            (_fwd_compute, (1, shared, HEADS, V_DIM, ACTIVATION, MASK, CONSUMERS, STAGES, ROW_STAGES, Q_REGISTERS)),
            (_fwd_compute, (2, shared, HEADS, V_DIM, ACTIVATION, MASK, CONSUMERS, STAGES, ROW_STAGES, Q_REGISTERS)),
            (_fwd_load, (q_desc, k_desc, v_desc, shared, GROUP, MASK, Q_SHARED, CONSUMERS, STAGES, ROW_STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, LOAD_REGISTERS])  # fmt: skip


# -- launcher -----------------------------------------------------------------------------------------------------------------------


def forward(operands: Operands, segments: Segments, params: AttentionParams, config: HopperConfig) -> None:
    """Launch the forward kernel."""
    q, k, v, out, lse = operands
    tiles, num_tiles = kernel_tiles(segments, config, out.shape[0], q.shape[1], params)
    value_factor, _ = activation_factors(params.activation, q.dtype == torch.bfloat16, params.scale)
    if blocks := grid(tiles):
        attention_fwd_hopper_kernel[blocks](
            descriptor(q, 64), descriptor(k, config.block), descriptor(v, config.block), result_descriptor(out), out, lse,
            segments.q_offsets, segments.kv_offsets, segments.segments_per_group, tiles, num_tiles, params.num_targets,
            params.segment_scale, params.scale, value_factor, params.output_scale, lse.stride(0),
            Q_REGISTERS=config.rows_in_registers, **launch_constants(config, operands, params),
        )  # fmt: skip
