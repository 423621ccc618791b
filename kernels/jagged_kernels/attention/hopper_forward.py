"""Forward of jagged attention for Hopper: a warp-specialised kernel, persistent over the tile
schedule.

    S = scale · q kᵀ + bias,  P = activation(S),  O = output scale · P v        per segment and head
    softmax, per block of keys:  m' = max(m, max S),  P = exp2(S − m'),  l' = l · exp2(m − m') + Σ
    P,  O' = O · exp2(m − m') + P v at the end of a tile:  O / l,  lse = m + log2 l

Roles, at head dim 128 | 64:
    warps 0–3, 4–7 | 0–3, 4–7, 8–11   consumers: MMA, softmax or activation, epilogue.
    `_fwd_consume`
    warp 8 | 12                       producer: tiles and TMA loads, as far ahead as the rings have
    room. `_fwd_produce`
Registers per thread: consumers 240, 240 | 168, 160, 160; producer 24.

Tile: 128 | 192 query rows, 64 per consumer, by blocks of 64 keys, or of 128 where segments are long
(select.long_key_blocks_are_faster). With a time table, head dim 64 has the roles, registers and
tile of 128, as buckets take registers.

Keys and values may lie in pages (pages.py). A block lies in one page, so only the producer's row of
a load changes: `_key_row`.

Small tiles (select.small_tiles_are_faster): 64 query rows, one consumer, warps 0–3, and the
producer is warp 4. Two | three thread blocks share a multiprocessor; consumers have 232 | 136
registers. With a time table: two, and 232.

Barriers, one per stage s:
    q[i].full[s], k.full[s], v.full[s]   arrive count 1, the TMA load of that buffer
    q[i].empty[s]                        arrive count 1: consumer i, its only reader, has read q for
    the last time
    k.empty[s], v.empty[s]               arrive count of one per consumer: the MMA that reads the
    buffer is complete
    tail                                 arrive count of one per consumer: its share of v's rows
    past the segment is 0
    queue.full[s], queue.empty[s]        arrive counts 1 and one per consumer: the words of a tile

Shared memory in KiB, plus 1 for the tile queue, the barriers and the arguments of warps:
    head dim 128: 224 = q 2 × 2 × 16 + k 4 × 16 + v 4 × 16 + epilogue 2 × 16; blocks of 128 keys: k
    2 × 32 + v 2 × 32
    head dim  64: 152 = q 3 × 2 × 8 + k 5 × 8 + v 5 × 8 + epilogue 3 × 8; blocks of 128 keys: 168, k
    3 × 16 + v 3 × 16
    small tiles:  96 = q 16 + k 2 × 16 + v 2 × 16 + epilogue 16 | 56 = q 2 × 8 + k 2 × 8 + v 2 × 8 +
    epilogue 8
    with a time table, 0.125 more per consumer, for ranges of buckets; at 64: 112.25 = q 2 × 2 × 8 +
    k 4 × 8 + v 4 × 8 + epilogue 2 × 8, small tiles 72.125, k 3 × 8 + v 3 × 8

Order of a consumer's loop (`_next_block`): start S = q kᵀ of a block; start O += P v of the
previous block; wait for S; compute its P while the second MMA runs; wait for that MMA; rescale O
(`rescale_rows` in hopper_softmax.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ..common.activations import activation_factors
from ..common.loads import key_row, load_page
from ..common.pipeline import (
    WARPGROUP_ROWS,
    Output,
    Ring,
    Tail,
    consumer_release,
    consumer_wait,
    consumer_wait_ahead,
    head_descriptor,
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
from ..schedule.cost import LoopedSide
from .bias import Bias
from .bias_tables import kernel_bias
from .configs import HopperConfig
from .hopper_bias import bias_block, bias_of_queries, make_ranges
from .hopper_common import (
    Position,
    Schedule,
    Tile,
    TileQueue,
    consumer_visits,
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
    take_tile,
    visited_block,
)
from .hopper_softmax import SUMS, SoftmaxState, attention_weights, log2_approx, rescale_rows
from .mask import Blocks, num_masked_blocks
from .params import AttentionParams, Operands
from .scales import output_factor, score_factor
from .segments import TiledSegments
from .tile_lists import kernel_tiles


class _Options(NamedTuple):
    """Constants of a launch."""

    heads: gl.constexpr
    group: gl.constexpr  # query heads per key head
    v_dim: gl.constexpr
    activation: gl.constexpr  # function of activations.py; None: softmax
    mask: gl.constexpr
    q_shared: gl.constexpr
    q_in_registers: gl.constexpr
    bias: gl.constexpr  # BiasKind, or None
    consumers: gl.constexpr
    page_rows: gl.constexpr
    # thread blocks take tiles through a counter; otherwise the zigzag assigns them
    dynamic_tiles: gl.constexpr


class _Rings(NamedTuple):
    """Buffers in shared memory. q: a ring per consumer; in a consumer, its own. tail: barrier of
    the values' tail."""

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
    act_factor: gl.tensor
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
    bias: Bias
    ranges: gl.tensor
    queue: TileQueue
    page_table_ptr: gl.tensor  # None where the keys of a segment are adjacent
    next_tile_ptr: gl.tensor  # None unless tiles are assigned dynamically


class _Visit(NamedTuple):
    """A consumer's work on a tile: the blocks of keys from the `skipped`-th to the last visited
    one.

    wave: step of the ring of q. step: of the tile's first block in the rings of k and v. row:
    column of the consumer's first row. num_keys: in the first block, the only one that the
    segment's end may cut. bias: ConsumerBias of the consumer's rows, or None.
    """

    wave: gl.tensor
    step: gl.tensor
    tile: Tile
    blocks: Blocks
    visited: gl.tensor
    skipped: gl.tensor
    row: gl.tensor
    num_keys: gl.tensor
    bias: gl.tensor


# -- producer --------------------------------------------------------------------------------------


@gluon.jit
def _key_row(kernel, tile, column, OPTIONS: gl.constexpr):
    """Row of k and v of a key at a column of the tile's segment. The values' page is in the L1
    cache, as the keys' was."""
    return key_row(
        tile,
        column,
        load_page(tile, column, kernel.page_table_ptr, OPTIONS.page_rows),
        OPTIONS.page_rows,
    )


@gluon.jit
def _load_tile(kernel, tile, wave, step, OPTIONS: gl.constexpr):
    """Hand a tile to the consumers, and load its rows. Returns the step after its last block."""
    rings = kernel.rings
    ROWS: gl.constexpr = OPTIONS.consumers * WARPGROUP_ROWS
    BLOCK: gl.constexpr = kernel.k_desc.block_type.shape[1]
    push_tile(kernel.queue, wave, tile)
    blocks, count = key_blocks(tile, OPTIONS.mask, ROWS, BLOCK)
    count = gl.maximum(count, 1)
    row = tile.q_start + tile.block * ROWS
    if OPTIONS.q_shared:
        row -= tile.q_start
    for consumer in gl.static_range(OPTIONS.consumers):
        producer_load(
            rings.q[consumer], kernel.q_desc, wave, tile.head, row + consumer * WARPGROUP_ROWS
        )
    # in the order of their use: the keys of a block before the values of the one before it
    for number in range(count + 1):
        if number < count:
            producer_load(
                rings.k, kernel.k_desc, step + number, tile.head // OPTIONS.group,
                _key_row(kernel, tile, visited_block(number, blocks) * BLOCK, OPTIONS),
            )  # fmt: skip
        if number > 0:
            producer_load(
                rings.v, kernel.v_desc, step + number - 1, tile.head // OPTIONS.group,
                _key_row(kernel, tile, visited_block(number - 1, blocks) * BLOCK, OPTIONS),
            )  # fmt: skip
    return step + count


@gluon.jit
def _fwd_produce(kernel, OPTIONS: gl.constexpr):
    schedule = kernel.schedule
    step = 0  # of the rings of k and v
    if OPTIONS.dynamic_tiles:
        num_tiles, wave = gl.load(schedule.num_tiles_ptr), 0
        tile = take_tile(schedule, num_tiles, kernel.next_tile_ptr, OPTIONS.mask)
        while tile.segment >= 0:
            step = _load_tile(kernel, tile, wave, step, OPTIONS)
            wave += 1
            tile = take_tile(schedule, num_tiles, kernel.next_tile_ptr, OPTIONS.mask)
        push_tile(kernel.queue, wave, tile)
    else:
        waves = num_waves(schedule)
        next_tile = load_wave(schedule, 0, waves, OPTIONS.mask)
        for wave in range(waves):
            tile = next_tile
            next_tile = load_wave(schedule, wave + 1, waves, OPTIONS.mask)
            step = _load_tile(kernel, tile, wave, step, OPTIONS)


# -- consumers -------------------------------------------------------------------------------------


@gluon.jit
def _start_scores(q, k, start, OPTIONS: gl.constexpr):
    """Start q kᵀ, plus `start` if there is a bias."""
    if OPTIONS.q_in_registers:
        q = gl.convert_layout(
            q,
            gl.DotOperandLayout(0, mma_layout(WARPGROUP_ROWS, k.shape[0]), 2),
            assert_trivial=True,
        )
    return mma_abt(q, k, start)


@gluon.constexpr_function
def _skips_blocks(mask, consumers, block):
    """Whether a consumer looks for blocks that it can skip: where a block is as long as a tile
    there are hardly any."""
    return mask is not None and consumers * WARPGROUP_ROWS > block


@gluon.jit
def _q_operand(q, rings, wave, SKIPS: gl.constexpr, OPTIONS: gl.constexpr):
    """The tile's query rows, for use in one of several branches or loops."""
    if OPTIONS.q_in_registers or not SKIPS:
        return q
    else:
        return opaque_rows(rings.q, wave)


@gluon.jit
def _first_block(
    q,
    rings,
    step,
    position,
    state,
    scale,
    bias,
    tail,
    consumer: gl.constexpr,
    OPTIONS: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """P of the first COLUMNS keys of a tile's first block, and the new state. No MMA of an earlier
    block is under way. Also zeroes the tail of v."""
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, COLUMNS)
    WIDTH: gl.constexpr = rings.v.buffers.shape[3]
    k = consumer_wait(rings.k, step)
    if _skips_blocks(OPTIONS.mask, OPTIONS.consumers, rings.k.buffers.shape[2]):
        k = opaque_rows(rings.k, step)
    block_bias = None
    if OPTIONS.bias is not None:
        block_bias, _ = bias_block(bias, position.column, COLUMNS, False, OPTIONS.bias)
    scores = _start_scores(q, k.slice(0, COLUMNS), block_bias, OPTIONS)
    has_tail = position.num_keys < COLUMNS
    if has_tail:
        zero_tail(
            consumer_wait(rings.v, step).slice(0, COLUMNS),
            position.num_keys,
            tail,
            consumer,
            OPTIONS.consumers,
        )
    scores = warpgroup_mma_wait(0, deps=(scores,))
    consumer_release(rings.k, step)
    state = SoftmaxState(
        gl.convert_layout(state.row_max, gl.SliceLayout(1, L)), state.row_sum, state.acc
    )
    p, state, _ = attention_weights(scores, position, state, scale, OPTIONS, True)
    if has_tail:
        wait_for_tail(tail)
    return to_mma_operand(p, rings.v.buffers.dtype, WIDTH), state


@gluon.jit
def _next_block(
    q,
    rings,
    step,
    more,
    position,
    p,
    state,
    scale,
    bias,
    OPTIONS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """P of the block of a step, and the new state with acc += P v of the previous block. `more`:
    whether another block follows."""
    WAITS_AHEAD: gl.constexpr = OPTIONS.activation is not None
    if WAITS_AHEAD:  # the previous block has waited for these keys
        k = ring_rows(rings.k, step % rings.k.buffers.shape[0])
    else:
        k = consumer_wait(rings.k, step)
    block_bias = None
    if OPTIONS.bias is not None:
        block_bias, _ = bias_block(bias, position.column, k.shape[0], False, OPTIONS.bias)
    scores = _start_scores(q, k, block_bias, OPTIONS)
    acc = warpgroup_mma(
        p, consumer_wait(rings.v, step - 1).slice(0, p.shape[1]), state.acc, is_async=True
    )
    scores = warpgroup_mma_wait(1, deps=(scores,))
    consumer_release(rings.k, step)
    new_p, state, rescale = attention_weights(scores, position, state, scale, OPTIONS, MASKED)
    new_p = to_mma_operand(new_p, k.dtype, state.acc.shape[1])
    if WAITS_AHEAD:
        consumer_wait_ahead(rings.k, step + 1, more)
        acc, p, new_p = warpgroup_mma_wait(0, deps=(acc, p, new_p))
    else:
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    consumer_release(rings.v, step - 1)
    if OPTIONS.activation is None:
        acc = rescale_rows(acc, rescale)
    return new_p, SoftmaxState(state.row_max, state.row_sum, acc)


@gluon.jit
def _last_values(p, rings, step, wave, state, OPTIONS: gl.constexpr):
    """acc + P v of a tile's last block, and with softmax the factor and log-sum-exp, base 2, of
    each row, computed while the MMA runs. Also waits until the epilogue buffer is free."""
    acc = warpgroup_mma(
        p, consumer_wait(rings.v, step).slice(0, p.shape[1]), state.acc, is_async=True
    )
    # not earlier: loads of q into registers are complete once an MMA has read them
    consumer_release(rings.q, wave)
    wait_for_stores()
    row_max = state.row_max
    factor, lse = row_max, row_max
    if OPTIONS.activation is None:
        row_sum = gl.convert_layout(gl.sum(state.row_sum, 1), row_max.type.layout)
        # A row that sees no key leaves row_sum at 0: its output is 0 and its log-sum-exp -inf.
        factor = 1.0 / gl.where(row_sum > 0, row_sum, 1.0)
        lse = row_max + log2_approx(row_sum)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    consumer_release(rings.v, step)
    return acc, factor, lse


@gluon.jit
def _fwd_rows(q, rings, visit, scale, tail, consumer: gl.constexpr, OPTIONS: gl.constexpr):
    """acc = P v over a consumer's blocks, and the factor and log-sum-exp of each row as
    _last_values returns them.

    The first block is computed apart: only it may be cut by the segment's end. If it has at most
    half a block of keys, its MMAs are half as large.
    """
    BLOCK: gl.constexpr = rings.k.buffers.shape[2]
    WIDTH: gl.constexpr = rings.v.buffers.shape[3]
    SCORES: gl.constexpr = mma_layout(WARPGROUP_ROWS, BLOCK)
    STATS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SKIPS: gl.constexpr = _skips_blocks(OPTIONS.mask, OPTIONS.consumers, BLOCK)
    blocks, wave, step, skipped, row, num_keys = (
        visit.blocks,
        visit.wave,
        visit.step,
        visit.skipped,
        visit.row,
        visit.num_keys,
    )
    kv_len, first_target = visit.tile.kv_len, visit.tile.first_target
    state = SoftmaxState(
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
    p = to_mma_operand(
        gl.zeros([WARPGROUP_ROWS, BLOCK], gl.float32, SCORES), rings.v.buffers.dtype, WIDTH
    )
    if num_keys <= BLOCK // 2:
        q_rows = _q_operand(q, rings, wave, SKIPS, OPTIONS)
        half, first = _first_block(
            q_rows,
            rings,
            step + skipped,
            Position(row, column, num_keys, first_target),
            state,
            scale,
            visit.bias,
            tail,
            consumer,
            OPTIONS,
            BLOCK // 2,
        )
        state = SoftmaxState(gl.convert_layout(first.row_max, STATS), first.row_sum, first.acc)
        if count > begun:
            if OPTIONS.activation is not None:
                consumer_wait_ahead(rings.k, step + begun, True)
            column = visited_block(begun, blocks) * BLOCK
            q_rows = _q_operand(q, rings, wave, SKIPS, OPTIONS)
            p, state = _next_block(
                q_rows,
                rings,
                step + begun,
                count > begun + 1,
                Position(row, column, kv_len - column, first_target),
                half,
                state,
                scale,
                visit.bias,
                OPTIONS,
                OPTIONS.mask is not None,
            )
        else:
            half_acc, factor, lse = _last_values(half, rings, step + skipped, wave, state, OPTIONS)
            state = SoftmaxState(state.row_max, state.row_sum, half_acc)
        begun += 1
    else:
        q_rows = _q_operand(q, rings, wave, SKIPS, OPTIONS)
        p, state = _first_block(
            q_rows,
            rings,
            step + skipped,
            Position(row, column, num_keys, first_target),
            state,
            scale,
            visit.bias,
            tail,
            consumer,
            OPTIONS,
            BLOCK,
        )
        if OPTIONS.activation is not None:
            consumer_wait_ahead(rings.k, step + begun, count > begun)
    if OPTIONS.mask is not None:
        q_rows = _q_operand(q, rings, wave, SKIPS, OPTIONS)
        for number in range(begun, masked):
            column = visited_block(number, blocks) * BLOCK
            p, state = _next_block(
                q_rows,
                rings,
                step + number,
                number + 1 < count,
                Position(row, column, kv_len - column, first_target),
                p,
                state,
                scale,
                visit.bias,
                OPTIONS,
                True,
            )
    q_rows = _q_operand(q, rings, wave, SKIPS, OPTIONS)
    for number in range(gl.maximum(begun, masked), count):
        column = 0
        if OPTIONS.bias is not None:
            column = visited_block(number, blocks) * BLOCK
        p, state = _next_block(
            q_rows,
            rings,
            step + number,
            number + 1 < count,
            Position(row, column, BLOCK, first_target),
            p,
            state,
            scale,
            visit.bias,
            OPTIONS,
            False,
        )
    acc = state.acc
    if begun <= count:
        acc, factor, lse = _last_values(p, rings, step + count - 1, wave, state, OPTIONS)
    return acc, factor, lse


@gluon.jit
def _skip_blocks(
    rings, step, count, num_keys, has_tail, tail, consumer: gl.constexpr, CONSUMERS: gl.constexpr
):
    """Skip the first blocks of a tile, but take part in zeroing the tail of v in the first one."""
    if has_tail & (count > 0):
        zero_tail(consumer_wait(rings.v, step), num_keys, tail, consumer, CONSUMERS)
        wait_for_tail(tail)
    for number in range(count):
        skip_stage(rings.k, step + number)
        skip_stage(rings.v, step + number)


@gluon.jit
def _num_skipped(
    tile, blocks, visited, consumer: gl.constexpr, OPTIONS: gl.constexpr, BLOCK: gl.constexpr
):
    """How many of the tile's first blocks no row of the consumer sees. At least one block is left,
    as the rows need a result."""
    last = gl.minimum(num_masked_blocks(blocks), visited - 1)
    count = gl.to_tensor(0)
    while (count < last) & (
        consumer_visits(
            tile,
            visited_block(count, blocks),
            key_blocks,
            consumer,
            OPTIONS.consumers,
            OPTIONS.mask,
            BLOCK,
        )
        == 0
    ):
        count += 1
    return count


@gluon.jit
def _fwd_tile(
    tile, wave, step, tail_phase, more, scale, consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr
):
    """Compute a consumer's rows of a tile. Returns the next step and tail phase, and with softmax
    the next tile, if `more` follow: it is popped before this one is stored. With pointwise
    activations that was 2 % slower."""
    outputs, scales, queue = kernel.outputs, kernel.scales, kernel.queue
    rings = _Rings(kernel.rings.q[consumer], kernel.rings.k, kernel.rings.v, kernel.rings.tail)
    output = Output(outputs.out_desc, outputs.out_ptr)
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    BLOCK: gl.constexpr = rings.k.buffers.shape[2]
    SCORES: gl.constexpr = mma_layout(WARPGROUP_ROWS, BLOCK)
    SOFTMAX: gl.constexpr = OPTIONS.activation is None
    blocks, visited = key_blocks(tile, OPTIONS.mask, CONSUMERS * WARPGROUP_ROWS, BLOCK)
    # in the first block, the only one cut
    num_keys = gl.where(visited > 0, tile.kv_len - visited_block(0, blocks) * BLOCK, 0)
    has_tail = (num_keys < BLOCK) & (num_keys != BLOCK // 2)
    first = (tile.block * CONSUMERS + consumer) * WARPGROUP_ROWS
    num_rows = tile.q_len - first
    tail = Tail(rings.tail, tail_phase)
    next_tile = tile
    if num_rows > 0:
        factor = scales.act_factor * output_factor(
            scales.output_scale, scales.segment_scale_ptr, tile.segment
        )
        q = consumer_wait(rings.q, wave)
        if OPTIONS.q_in_registers:
            q = q.load(gl.DotOperandLayout(0, SCORES, 2))
        skipped = 0
        if _skips_blocks(OPTIONS.mask, CONSUMERS, BLOCK):
            skipped = _num_skipped(tile, blocks, visited, consumer, OPTIONS, BLOCK)
            _skip_blocks(rings, step, skipped, num_keys, has_tail, tail, consumer, CONSUMERS)
        bias = None
        if OPTIONS.bias is not None:
            bias = bias_of_queries(kernel.bias, tile, first, kernel.ranges[consumer], OPTIONS.bias)
        visit = _Visit(
            wave,
            step,
            tile,
            blocks,
            visited,
            skipped,
            first + tile.kv_len - tile.q_len,
            num_keys,
            bias,
        )
        acc, row_factor, lse = _fwd_rows(q, rings, visit, scale, tail, consumer, OPTIONS)
        if SOFTMAX:
            next_tile = pop_tile(queue, wave + 1, more)
            acc = rescale_rows(acc, row_factor)
        else:
            acc = acc * factor
        buffer, row = outputs.buffers.index(consumer), tile.q_start + first
        store_epilogue(
            acc, output, buffer, None, row, tile.head, num_rows, OPTIONS.heads, OPTIONS.v_dim
        )
        if SOFTMAX:  # after the TMA store has started: its fence would wait for these stores
            lanes = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, SCORES))
            stored = lanes < num_rows
            gl.store(
                outputs.lse_ptr
                + tile.head.to(gl.int64) * outputs.stride_lse
                + tile.q_start
                + first
                + lanes,
                lse,
                mask=stored,
            )
    else:
        skip_stage(rings.q, wave)
        _skip_blocks(
            rings, step, gl.maximum(visited, 1), num_keys, has_tail, tail, consumer, CONSUMERS
        )
        if SOFTMAX:
            next_tile = pop_tile(queue, wave + 1, more)
    release_tile(queue, wave)
    return step + gl.maximum(visited, 1), tail_phase + has_tail.to(gl.int32), next_tile


@gluon.jit
def _fwd_consume(consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    queue = kernel.queue
    SOFTMAX: gl.constexpr = OPTIONS.activation is None
    scale = score_factor(kernel.scales.scale, OPTIONS.activation)
    step, tail_phase = 0, 0
    if OPTIONS.dynamic_tiles:
        wave = 0
        tile = pop_tile(queue, wave)
        while tile.segment >= 0:
            step, tail_phase, tile = _fwd_tile(
                tile, wave, step, tail_phase, True, scale, consumer, kernel, OPTIONS
            )
            wave += 1
            if not SOFTMAX:
                tile = pop_tile(queue, wave)
    else:
        waves = num_waves(kernel.schedule)
        next_tile = pop_tile(queue, 0, waves > 0 if SOFTMAX else False)
        for wave in range(waves):
            tile = next_tile if SOFTMAX else pop_tile(queue, wave)
            step, tail_phase, next_tile = _fwd_tile(
                tile, wave, step, tail_phase, wave + 1 < waves, scale, consumer, kernel, OPTIONS
            )  # fmt: skip
    tma.store_wait(0)


@safe_ptxas
@gluon.jit(
    do_not_specialize=["num_segments", "stride_lse"],
    do_not_specialize_on_alignment=["num_tiles_ptr", "page_table_ptr", "next_tile_ptr"],
)
def attention_fwd_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    out_ptr,
    lse_ptr,
    q_offsets_ptr,
    kv_offsets_ptr,
    num_segments,
    tiles_ptr,
    num_tiles_ptr,
    num_targets_ptr,
    segment_scale_ptr,
    bias,
    scale,
    act_factor,
    output_scale,
    stride_lse,
    page_table_ptr,
    next_tile_ptr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    V_DIM: gl.constexpr,
    ACTIVATION: gl.constexpr,
    MASK: gl.constexpr,
    Q_SHARED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr,
    Q_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
    BIAS: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
):
    """O of a tile of query rows; with softmax also the log-sum-exp of its scores. page_table_ptr,
    PAGE_ROWS: as in load_page. next_tile_ptr: how many tiles of the list have been taken, 0; None:
    the zigzag assigns tiles."""
    OPTIONS: gl.constexpr = _Options(
        HEADS,
        GROUP,
        V_DIM,
        ACTIVATION,
        MASK,
        Q_SHARED,
        Q_REGISTERS,
        BIAS,
        CONSUMERS,
        PAGE_ROWS,
        next_tile_ptr is not None,
    )
    schedule = Schedule(
        tiles_ptr, num_tiles_ptr, q_offsets_ptr, kv_offsets_ptr, num_segments, num_targets_ptr
    )
    k_ring, v_ring = make_ring(k_desc, STAGES, CONSUMERS), make_ring(v_desc, STAGES, CONSUMERS)
    rings = _Rings(
        make_rings(q_desc, ROW_STAGES, CONSUMERS), k_ring, v_ring, make_barriers(1, CONSUMERS)
    )
    outputs = _Outputs(
        out_desc, out_ptr, lse_ptr, stride_lse, make_epilogue_buffers(q_desc, CONSUMERS)
    )
    scales = _Scales(scale, act_factor, output_scale, segment_scale_ptr)
    queue = make_tile_queue(CONSUMERS)
    kernel = _Kernel(
        q_desc,
        k_desc,
        v_desc,
        schedule,
        rings,
        outputs,
        scales,
        bias,
        make_ranges(CONSUMERS, BIAS),
        queue,
        page_table_ptr,
        next_tile_ptr,
    )
    launch_specialised(_fwd_consume, _fwd_produce, kernel, OPTIONS, REGISTERS)


# -- launcher --------------------------------------------------------------------------------------


def forward(
    operands: Operands, segments: TiledSegments, params: AttentionParams, config: HopperConfig
) -> None:
    """Launch the forward kernel."""
    q, k, v, out, lse = operands
    pages = segments.pages
    looped = LoopedSide(segments.num_keys(k), k.shape[1], q.shape[2])
    tiles, num_tiles = kernel_tiles(
        segments, config, out.shape[0], q.shape[1], params, looped=looped
    )
    num_segments = segments.segments_per_group
    act_factor, _ = activation_factors(params.activation, q.dtype == torch.bfloat16, params.scale)
    constants = launch_constants(config, operands, params, segments.q_shared)
    if blocks := grid(tiles, config):
        out_desc = result_descriptor(out)
        next_tile = (
            out.new_zeros(1, dtype=torch.int32) if config.dynamic_tiles and pages is None else None
        )
        attention_fwd_hopper_kernel[blocks](
            head_descriptor(q, 64),
            head_descriptor(k, config.block),
            head_descriptor(v, config.block),
            out_desc,
            out,
            lse,
            segments.q_offsets,
            segments.kv_offsets,
            num_segments,
            tiles,
            num_tiles,
            params.num_targets,
            params.segment_scale,
            kernel_bias(params, segments, q.shape[0]),
            params.scale,
            act_factor,
            params.output_scale,
            lse.stride(0),
            pages and pages.table,
            next_tile,
            Q_REGISTERS=config.rows_in_registers,
            BIAS=params.bias_kind,
            PAGE_ROWS=pages and pages.page_rows,
            **constants,
        )
