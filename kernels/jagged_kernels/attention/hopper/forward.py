"""Forward of jagged attention for Hopper: a warp-specialised kernel, persistent over the tile
schedule.

    S = scale · q kᵀ + bias,  P = activation(S),  O = output scale · P v
    softmax, per block of keys:  m' = max(m, max S),  P = exp2(S − m'),
        l' = l · exp2(m − m') + Σ P,  O' = O · exp2(m − m') + P v
    at the end of a tile:  O / l,  lse = m + log2 l

Roles, at head dim 128 and above | 64:
    warps 0–3, 4–7 | 0–3, 4–7, 8–11   consumers: MMA, softmax or activation, epilogue
    warp 8 | 12                       producer: tiles and TMA loads, as far ahead as rings have room
Registers per thread: consumers 240, 240 | 168, 160, 160; producer 24.

Tile: 128 | 192 query rows, 64 per consumer, by blocks of 64 keys, or of 128 where segments are long
(select.long_key_blocks_are_faster). With a time table, head dim 64 has the roles, registers and
tile of 128, as buckets take registers. Small tiles (select.small_tiles_are_faster): one consumer;
two | three thread blocks share a multiprocessor, and consumers have 232 | 136 registers. With a
time table: two, and 232.

Keys and values may lie in pages (pages.py). A block lies in one page, so only the producer's row of
a load changes: `_key_row`.

Barriers, one per stage: q[i], k, v: `full` 1, the TMA load; `empty` one per consumer that reads the
ring: of q consumer i alone, after its last MMA of the tile, of k and v after each MMA. tail: one
per consumer, its share of v's rows past the segment is 0. queue: tile_source.py.

Shared memory in KiB, plus 1 for the tile queue, the barriers and the arguments of warps:
    head dim 128: 224 = q 2 × 2 × 16 + k 4 × 16 + v 4 × 16 + epilogue 2 × 16
                  blocks of 128 keys: k 2 × 32 + v 2 × 32
    head dim 256: 224 = q 2 × 32 + k 2 × 32 + v 2 × 32 + epilogue 2 × 16, half of the columns at a
                  time; roles, registers and tile of 128. Up to 192, O is two tensors, of 128 and
                  64 columns: 96 registers instead of 128
    head dim  64: 152 = q 3 × 2 × 8 + k 5 × 8 + v 5 × 8 + epilogue 3 × 8
                  blocks of 128 keys: 168, k 3 × 16 + v 3 × 16
    small tiles:  96 = q 16 + k 2 × 16 + v 2 × 16 + epilogue 16
                | 56 = q 2 × 8 + k 2 × 8 + v 2 × 8 + epilogue 8
    with a time table, .125 more per consumer, for ranges of buckets; at 128: 192.25, k 3 × 16 +
    v 3 × 16; at 64: 112.25 = q 2 × 2 × 8 + k 4 × 8 + v 4 × 8 + epilogue 2 × 8, small tiles 72.125,
    k 3 × 8 + v 3 × 8
    with stored buckets, instead of ranges 4 more per consumer and stage of k, which a barrier of k
    guards, and up to 2 per consumer for the time table

Order of a consumer's loop (`_next_block`): start S = q kᵀ of a block; start O += P v of the
previous block; wait for S; compute its P while the second MMA runs; wait for that MMA; rescale O.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from ...common.gluon_api import thread_barrier
from ...common.loads import key_row, load_page
from ...common.pipeline import (
    WARPGROUP_ROWS,
    Output,
    Tail,
    consumer_wait,
    launch_specialised,
    make_barriers,
    make_epilogue_buffers,
    make_ring,
    make_rings,
    mma_abt,
    mma_layout,
    mma_parts,
    opaque_rows,
    producer_load,
    release,
    ring_rows,
    skip_stage,
    store_epilogue,
    to_mma_operand,
    wait_for_parts,
    wait_for_stores,
    wait_for_tail,
    wait_until_full,
    zero_parts,
    zero_tail,
)
from ...common.ptxas import safe_ptxas
from ..dropout import Dropout
from ..mask import Blocks, num_masked_blocks
from ..scales import output_factor, score_factor
from .args import UNSPECIALISED, Kernel, Outputs, Rings, Schedule, with_activation
from .bias import (
    bias_block,
    bias_of_queries,
    bytes_of_buckets,
    first_stored_block,
    load_buckets,
    make_buckets,
    make_ranges,
    stored_buckets,
)
from .scores import Position, drop_by_queries, dropout_of_queries
from .softmax import SUMS, SoftmaxState, attention_weights, log2_approx, rescale_rows
from .tile_source import (
    Tile,
    has_rows,
    in_strips,
    key_blocks,
    make_tile_queue,
    num_skipped,
    num_waves,
    pop_tile,
    produce_taken,
    produce_waves,
    visited_block,
)


class _Visit(NamedTuple):
    """A consumer's work on a tile: the blocks of keys from the `skipped`-th to the last visited
    one.

    wave: step of the ring of q. step: of the tile's first block in the rings of k and v. row:
    column of the consumer's first row. num_keys: in the first block, the only one that the
    segment's end may cut. scale: of the scores. bias: ConsumerBias of its rows, or None. tail: of
    the values. dropout: dropout_of_queries.
    """

    wave: gl.tensor
    step: gl.tensor
    tile: Tile
    blocks: Blocks
    visited: gl.tensor
    skipped: gl.tensor
    row: gl.tensor
    num_keys: gl.tensor
    scale: gl.tensor
    bias: gl.tensor
    tail: Tail
    dropout: Dropout


# -- producer --------------------------------------------------------------------------------------


@gluon.jit
def _key_row(kernel, tile, column, OPTIONS: gl.constexpr):
    """Row of k and v of a key at a column of the tile's segment. The values' page is in the L1
    cache, as the keys' was."""
    page = load_page(tile, column, kernel.page_table_ptr, OPTIONS.page_rows)
    return key_row(tile, column, page, OPTIONS.page_rows)


@gluon.jit
def _load_tile(tile, wave, step, kernel, OPTIONS: gl.constexpr):
    """Hand a tile to the consumers, and load its rows. Returns the step after its last block."""
    rings = kernel.rings
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    ROWS: gl.constexpr = CONSUMERS * WARPGROUP_ROWS
    BLOCK: gl.constexpr = kernel.k_desc.block_type.shape[1]
    tile = in_strips(tile, OPTIONS, BLOCK)
    blocks, count = key_blocks(tile, OPTIONS.mask, ROWS, BLOCK)
    count = gl.maximum(count, 1)
    row = tile.q_start + tile.block * WARPGROUP_ROWS
    if OPTIONS.q_shared:
        row -= tile.q_start
    for consumer in gl.static_range(CONSUMERS):
        producer_load(
            rings.q[consumer], kernel.q_desc, wave, tile.head, row + consumer * WARPGROUP_ROWS
        )
    BYTES: gl.constexpr = bytes_of_buckets(kernel.buckets_desc, CONSUMERS)
    first, stride = 0, 0
    if kernel.buckets_desc is not None:
        first, stride = first_stored_block(kernel.bias, tile, kernel.schedule.num_segments)
        first += tile.block * stride
    # in the order of their use: the keys of a block before the values of the one before it
    for number in range(count + 1):
        if number < count:
            producer_load(
                rings.k, kernel.k_desc, step + number, tile.head // OPTIONS.group,
                _key_row(kernel, tile, visited_block(number, blocks) * BLOCK, OPTIONS), BYTES,
            )  # fmt: skip
            if kernel.buckets_desc is not None:
                load_buckets(
                    rings.k, rings.buckets, kernel.buckets_desc, step + number,
                    first + visited_block(number, blocks), stride, CONSUMERS,
                )  # fmt: skip
        if number > 0:
            producer_load(
                rings.v, kernel.v_desc, step + number - 1, tile.head // OPTIONS.group,
                _key_row(kernel, tile, visited_block(number - 1, blocks) * BLOCK, OPTIONS),
            )  # fmt: skip
    return step + count


@gluon.jit
def _fwd_produce(kernel, OPTIONS: gl.constexpr):
    if kernel.schedule.next_tile_ptr is None:
        produce_waves(_load_tile, kernel, OPTIONS)
    else:
        produce_taken(_load_tile, gl.load(kernel.schedule.num_tiles_ptr), kernel, OPTIONS)


# -- consumers -------------------------------------------------------------------------------------


@gluon.jit
def _start_scores(q, k, start, OPTIONS: gl.constexpr):
    """Start q kᵀ, plus `start` if there is a bias."""
    if OPTIONS.q_in_registers:
        L: gl.constexpr = gl.DotOperandLayout(0, mma_layout(WARPGROUP_ROWS, k.shape[0]), 2)
        q = gl.convert_layout(q, L, assert_trivial=True)
    return mma_abt(q, k, start, 1, OPTIONS.head_dim)


@gluon.jit
def _bias_block(
    rings, visit, step, column, consumer: gl.constexpr, OPTIONS: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """bias_block of a step's first COLUMNS keys, which begin at `column`."""
    stored = None
    if rings.buckets is not None:
        stored = stored_buckets(
            rings, rings.k, step, 0, consumer, OPTIONS.consumers, COLUMNS, False
        )
    return bias_block(visit.bias, column, COLUMNS, False, OPTIONS.bias, stored)[0]


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
    q, rings, visit, position, state,
    consumer: gl.constexpr, OPTIONS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """P of the first COLUMNS keys of a tile's first block, and the new state. No MMA of an earlier
    block is under way. Also zeroes the tail of v."""
    step = visit.step + visit.skipped
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, COLUMNS)
    WIDTH: gl.constexpr = rings.v.buffers.shape[3]
    k = consumer_wait(rings.k, step)
    if _skips_blocks(OPTIONS.mask, OPTIONS.consumers, rings.k.buffers.shape[2]):
        k = opaque_rows(rings.k, step)
    block_bias = None
    if OPTIONS.bias is not None:
        block_bias = _bias_block(rings, visit, step, position.column, consumer, OPTIONS, COLUMNS)
    scores = _start_scores(q, k.slice(0, COLUMNS), block_bias, OPTIONS)
    has_tail = position.num_keys < COLUMNS
    if has_tail:
        v = consumer_wait(rings.v, step).slice(0, COLUMNS)
        zero_tail(v, position.num_keys, visit.tail, consumer, OPTIONS.consumers)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    release(rings.k, step)
    row_max = gl.convert_layout(state.row_max, gl.SliceLayout(1, L))
    state = SoftmaxState(row_max, state.row_sum, state.acc)
    p, state, _ = attention_weights(scores, position, state, visit.scale, OPTIONS, True)
    p = drop_by_queries(p, position)
    if has_tail:
        wait_for_tail(visit.tail)
    return to_mma_operand(p, rings.v.buffers.dtype, WIDTH), state


@gluon.jit
def _next_block(
    q, rings, visit, number, more, position, p, state,
    consumer: gl.constexpr, OPTIONS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """P of the number-th block, and the new state with acc += P v of the previous block. `more`:
    whether another block follows."""
    step = visit.step + number
    WAITS_AHEAD: gl.constexpr = OPTIONS.activation is not None
    if WAITS_AHEAD:  # the previous block has waited for these keys
        k = ring_rows(rings.k, step % rings.k.buffers.shape[0])
    else:
        k = consumer_wait(rings.k, step)
    block_bias = None
    STORED: gl.constexpr = rings.buckets is not None
    if OPTIONS.bias is not None and not STORED:
        block_bias = _bias_block(rings, visit, step, position.column, consumer, OPTIONS, k.shape[0])
    scores = _start_scores(q, k, block_bias, OPTIONS)
    acc = mma_parts(p, consumer_wait(rings.v, step - 1).slice(0, p.shape[1]), state.acc)
    if STORED:  # found while both MMAs run
        block_bias = _bias_block(rings, visit, step, position.column, consumer, OPTIONS, k.shape[0])
    scores = warpgroup_mma_wait(len(acc), deps=(scores,))
    if STORED:
        scores += block_bias
        thread_barrier()  # all warps have read the buckets
    release(rings.k, step)
    new_p, state, rescale = attention_weights(scores, position, state, visit.scale, OPTIONS, MASKED)
    new_p = drop_by_queries(new_p, position)
    new_p = to_mma_operand(new_p, k.dtype, rings.v.buffers.shape[3])
    if WAITS_AHEAD:
        wait_until_full(rings.k, step + 1, more)
        acc, operands = wait_for_parts(acc, (p, new_p))
        new_p = operands[1]
    else:
        acc, _ = wait_for_parts(acc, (p,))
    release(rings.v, step - 1)
    if OPTIONS.activation is None:
        acc = rescale_rows(acc, rescale)
    return new_p, SoftmaxState(state.row_max, state.row_sum, acc)


@gluon.jit
def _last_values(p, rings, step, wave, state, OPTIONS: gl.constexpr):
    """acc + P v of a tile's last block, and with softmax the factor and log-sum-exp, base 2, of
    each row, computed while the MMA runs. Also waits until the epilogue buffer is free."""
    acc = mma_parts(p, consumer_wait(rings.v, step).slice(0, p.shape[1]), state.acc)
    # not earlier: loads of q into registers are complete once an MMA has read them
    release(rings.q, wave)
    wait_for_stores()
    row_max, factor, lse = state.row_max, state.row_max, state.row_max
    if OPTIONS.activation is None:
        row_sum = gl.convert_layout(gl.sum(state.row_sum, 1), row_max.type.layout)
        # A row that sees no key leaves row_sum at 0: its output is 0 and its log-sum-exp -inf.
        factor = 1.0 / gl.where(row_sum > 0, row_sum, 1.0)
        lse = row_max + log2_approx(row_sum)
    acc, _ = wait_for_parts(acc, (p,))
    release(rings.v, step)
    return acc, factor, lse


@gluon.jit
def _fwd_rows(q, rings, visit, consumer: gl.constexpr, OPTIONS: gl.constexpr):
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
    SOFTMAX: gl.constexpr = OPTIONS.activation is None
    blocks, wave, step = visit.blocks, visit.wave, visit.step
    skipped, row = visit.skipped, visit.row
    num_keys, kv_len, first_target = visit.num_keys, visit.tile.kv_len, visit.tile.first_target
    state = SoftmaxState(
        gl.full([WARPGROUP_ROWS], float("-inf"), gl.float32, STATS),
        gl.zeros([WARPGROUP_ROWS, SUMS], gl.float32, mma_layout(WARPGROUP_ROWS, SUMS)),
        zero_parts(WIDTH, OPTIONS.v_dim),
    )
    acc, factor, lse = state.acc, state.row_max, state.row_max
    count = gl.maximum(visit.visited, 1)
    masked = num_masked_blocks(blocks)
    column = visited_block(skipped, blocks) * BLOCK
    if SKIPS:
        num_keys = gl.where(skipped > 0, kv_len - column, num_keys)
    begun = skipped + 1
    nothing = gl.zeros([WARPGROUP_ROWS, BLOCK], gl.float32, SCORES)
    p = to_mma_operand(nothing, rings.v.buffers.dtype, WIDTH)
    position = Position(row, column, num_keys, first_target, visit.dropout)
    if num_keys <= BLOCK // 2:
        rows = _q_operand(q, rings, wave, SKIPS, OPTIONS)
        half, first = _first_block(
            rows, rings, visit, position, state, consumer, OPTIONS, BLOCK // 2
        )
        state = SoftmaxState(gl.convert_layout(first.row_max, STATS), first.row_sum, first.acc)
        if count > begun:
            if not SOFTMAX:
                wait_until_full(rings.k, step + begun)
            column = visited_block(begun, blocks) * BLOCK
            rows = _q_operand(q, rings, wave, SKIPS, OPTIONS)
            position = Position(row, column, kv_len - column, first_target, visit.dropout)
            p, state = _next_block(
                rows, rings, visit, begun, count > begun + 1, position, half, state,
                consumer, OPTIONS, OPTIONS.mask is not None,
            )  # fmt: skip
        else:
            half_acc, factor, lse = _last_values(half, rings, step + skipped, wave, state, OPTIONS)
            state = SoftmaxState(state.row_max, state.row_sum, half_acc)
        begun += 1
    else:
        rows = _q_operand(q, rings, wave, SKIPS, OPTIONS)
        p, state = _first_block(rows, rings, visit, position, state, consumer, OPTIONS, BLOCK)
        if not SOFTMAX:
            wait_until_full(rings.k, step + begun, count > begun)
    if OPTIONS.mask is not None:
        rows = _q_operand(q, rings, wave, SKIPS, OPTIONS)
        for number in range(begun, masked):
            column = visited_block(number, blocks) * BLOCK
            position = Position(row, column, kv_len - column, first_target, visit.dropout)
            p, state = _next_block(
                rows, rings, visit, number, number + 1 < count, position, p, state,
                consumer, OPTIONS, True,
            )  # fmt: skip
    rows = _q_operand(q, rings, wave, SKIPS, OPTIONS)
    for number in range(gl.maximum(begun, masked), count):
        column = 0
        if OPTIONS.bias is not None or visit.dropout is not None:
            column = visited_block(number, blocks) * BLOCK
        position = Position(row, column, BLOCK, first_target, visit.dropout)
        p, state = _next_block(
            rows, rings, visit, number, number + 1 < count, position, p, state,
            consumer, OPTIONS, False,
        )  # fmt: skip
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
def _fwd_tile(
    tile, wave, step, tail_phase, more, scale, consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr
):
    """Compute a consumer's rows of a tile. Returns the next step and tail phase, and with softmax
    the next tile, if `more` follow: it is popped before this one is stored. With pointwise
    activations that was 2 % slower."""
    outputs, scales, queue = kernel.outputs, kernel.args, kernel.queue
    shared = kernel.rings
    rings = Rings(
        q=shared.q[consumer], k=shared.k, v=shared.v, tail=shared.tail, buckets=shared.buckets
    )
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    BLOCK: gl.constexpr = rings.k.buffers.shape[2]
    SCORES: gl.constexpr = mma_layout(WARPGROUP_ROWS, BLOCK)
    SOFTMAX: gl.constexpr = OPTIONS.activation is None
    tile = in_strips(tile, OPTIONS, BLOCK)
    blocks, visited = key_blocks(tile, OPTIONS.mask, CONSUMERS * WARPGROUP_ROWS, BLOCK)
    # in the first block, the only one cut
    num_keys = gl.where(visited > 0, tile.kv_len - visited_block(0, blocks) * BLOCK, 0)
    # Constants leave branches out: their code costs time even where it does not run.
    if OPTIONS.whole_blocks:
        num_keys = gl.to_tensor(BLOCK)
    has_tail = (num_keys < BLOCK) & (num_keys != BLOCK // 2)
    first = (tile.block + consumer) * WARPGROUP_ROWS
    num_rows = tile.q_len - first
    tail = Tail(rings.tail, tail_phase)
    next_tile = tile
    # without rows, what it computes is not stored
    if has_rows(tile, first, OPTIONS.mask) | OPTIONS.whole_blocks:
        factor = scales.act_factor * output_factor(
            scales.output_scale, scales.segment_scale_ptr, tile.segment
        )
        q = consumer_wait(rings.q, wave)
        if OPTIONS.q_in_registers:
            q = q.load(gl.DotOperandLayout(0, SCORES, 2))
        skipped = 0
        if _skips_blocks(OPTIONS.mask, CONSUMERS, BLOCK):
            skipped = num_skipped(tile, blocks, visited, consumer, OPTIONS, BLOCK)
            _skip_blocks(rings, step, skipped, num_keys, has_tail, tail, consumer, CONSUMERS)
        bias = bias_of_queries(kernel, tile, first, consumer, OPTIONS.bias)
        row = first + tile.kv_len - tile.q_len
        dropout = dropout_of_queries(scales, tile, first, OPTIONS)
        visit = _Visit(
            wave, step, tile, blocks, visited, skipped, row, num_keys, scale, bias, tail, dropout
        )
        acc, row_factor, lse = _fwd_rows(q, rings, visit, consumer, OPTIONS)
        if SOFTMAX:
            next_tile = pop_tile(queue, wave + 1, more)
            if dropout is not None:
                row_factor *= scales.act_factor
            acc = rescale_rows(acc, row_factor)
        else:
            acc = [x * factor for x in acc]
        buffer, row = outputs.buffers.index(consumer), tile.q_start + first
        STRIDE: gl.constexpr = OPTIONS.heads * OPTIONS.v_dim
        store_epilogue(
            acc, outputs.out, buffer, None, row, tile.head, num_rows, STRIDE, OPTIONS.v_dim
        )
        if SOFTMAX:  # after the TMA store has started: its fence would wait for these stores
            lanes = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, SCORES))
            stored = lanes < num_rows
            of_head = kernel.args.lse_ptr + tile.head.to(gl.int64) * kernel.schedule.num_rows
            gl.store(of_head + tile.q_start + first + lanes, lse, mask=stored)
    else:
        skip_stage(rings.q, wave)
        count = gl.maximum(visited, 1)
        _skip_blocks(rings, step, count, num_keys, has_tail, tail, consumer, CONSUMERS)
        if SOFTMAX:
            next_tile = pop_tile(queue, wave + 1, more)
    release(queue, wave)
    return step + gl.maximum(visited, 1), tail_phase + has_tail.to(gl.int32), next_tile


@gluon.jit
def _fwd_consume(consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    queue = kernel.queue
    SOFTMAX: gl.constexpr = OPTIONS.activation is None
    scale = score_factor(kernel.args.scale, OPTIONS.activation)
    step, tail_phase = 0, 0
    if kernel.schedule.next_tile_ptr is not None:
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
@gluon.jit(**UNSPECIALISED)
def attention_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, num_tiles_ptr, page_table_ptr, num_segments, args, bias,
    buckets_desc, ACTIVATION: gl.constexpr, CONSTANTS: gl.constexpr,
):  # fmt: skip
    """O of a tile of query rows; with softmax also the log-sum-exp of its scores."""
    OPTIONS: gl.constexpr = with_activation(CONSTANTS, ACTIVATION)
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    schedule = Schedule(
        args.tiles_ptr, num_tiles_ptr, args.q_offsets_ptr, args.kv_offsets_ptr, num_segments,
        args.num_targets_ptr, out_desc.shape[1], args.next_tile_ptr,
    )  # fmt: skip
    k = make_ring(k_desc, OPTIONS.stages, CONSUMERS)
    v = make_ring(v_desc, OPTIONS.stages, CONSUMERS)
    q = make_rings(q_desc, OPTIONS.row_stages, CONSUMERS)
    buckets = make_buckets(buckets_desc, OPTIONS.stages, CONSUMERS)
    rings = Rings(q=q, k=k, v=v, tail=make_barriers(1, CONSUMERS), buckets=buckets)
    buffers = make_epilogue_buffers(out_desc, CONSUMERS)
    queue = make_tile_queue(CONSUMERS)
    kernel = Kernel(
        args, schedule, rings, queue,
        Outputs(out=Output(out_desc, args.out_ptr), buffers=buffers),
        page_table_ptr=page_table_ptr, q_desc=q_desc, k_desc=k_desc, v_desc=v_desc,
        buckets_desc=buckets_desc, bias=bias, ranges=make_ranges(CONSUMERS, OPTIONS.bias),
    )  # fmt: skip
    launch_specialised(_fwd_consume, _fwd_produce, kernel, OPTIONS)
