"""dq of jagged attention for Hopper: a warp-specialised kernel over tiles of queries. It computes
scores that dkdv.py computes too, so that each output tile has one owner and results are
deterministic. With a RelativeBias, it also sums dS for the gradients of the tables (bias.py).

    S = scale · q kᵀ + bias,  dP = dO vᵀ,  dQ = scale · dS k              dS, dropout: scores.py

Roles, at head dim 128 and above | 64:
    warps 0–3, 4–7 | 0–3, 4–7, 8–11   consumers: MMA, dS, epilogue
    warp 8 | 12                       producer: tiles and TMA loads
Registers per thread: consumers 240, 240 | 168, 160, 160; producer 24.

Tile: 128 | 192 query rows, 64 per consumer, by blocks of 64 keys. With a time table, and beside the
kernel for short queries (configs.dq_config), head dim 64 may have the roles, registers and tile of
128. Small tiles (select.small_tiles_are_faster): one consumer; two | three thread blocks share a
multiprocessor, and consumers have 232 | 136 registers. With a time table: two, and 232.

Barriers, one per stage: q[i], do[i], k, v: `full` 1, the TMA load; `empty` one per consumer that
reads the ring: of q and dO consumer i alone, done with the tile, of k and v after each MMA. tail:
one per consumer, its share of k's rows past the segment is 0. queue: tile_source.py.

Shared memory in KiB, plus 1 for the tile queue, the barriers and the arguments of warps:
    head dim 128: 224 = q 2 × 2 × 16 + dO 2 × 2 × 16 + k 2 × 16 + v 2 × 16 + epilogue 2 × 16
    head dim  64: 168 = q 3 × 2 × 8 + dO 3 × 2 × 8 + k 3 × 8 + v 3 × 8 + epilogue 3 × 8
       two consumers: 144 = q 2 × 2 × 8 + dO 2 × 2 × 8 + k 4 × 8 + v 4 × 8 + epilogue 2 × 8
    small tiles:  112 = q 16 + dO 16 + k 2 × 16 + v 2 × 16 + epilogue 16
                | 72 = q 8 + dO 8 + k 3 × 8 + v 3 × 8 + epilogue 8
    with a bias, 17 more per consumer, for sums of dS. At head dim 128, q and dO then have one
    buffer instead of two: 194; at 64: 219
    with a time table, .125 more per consumer, for ranges of buckets; at 64, two consumers: 178.25;
    with stored buckets as in forward.py
    head dim 256: 224 = q 2 × 32 + dO 2 × 32 + k 2 × 32 + v 32; roles, registers and tile of 128. dQ
    is stored through the buffer of q, which the producer fills again only then. Up to 192, dQ is
    two tensors, of 128 and 64 columns: 96 registers instead of 128

dS stays in registers, as the first operand of the next MMA. One consumer's arithmetic overlaps with
the MMAs of the others.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

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
    num_parts,
    opaque_rows,
    producer_load,
    release,
    skip_key_block,
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
from ..mask import num_masked_blocks
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
from .bias_sums import add_to_tables, make_scratch, sums_of_tile
from .scores import (
    Position,
    QueryRows,
    drop_by_queries,
    dropout_of_queries,
    minus_delta,
    row_stats,
    visible_keys,
    weights,
)
from .tile_source import (
    consume_waves,
    consumer_visits,
    first_target_of,
    has_rows,
    in_strips,
    key_blocks,
    make_tile_queue,
    produce_waves,
    visited_block,
)


@gluon.jit
def _load_tile(tile, wave, step, kernel, OPTIONS: gl.constexpr):
    rings = kernel.rings
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    ROWS: gl.constexpr = CONSUMERS * WARPGROUP_ROWS
    BLOCK: gl.constexpr = kernel.k_desc.block_type.shape[1]
    tile = in_strips(tile, OPTIONS, BLOCK)
    blocks, visited = key_blocks(tile, OPTIONS.mask, ROWS, BLOCK)
    for consumer in gl.static_range(CONSUMERS):
        row = tile.q_start + (tile.block + consumer) * WARPGROUP_ROWS
        q_row = row
        if OPTIONS.q_shared:
            q_row = row - tile.q_start
        producer_load(rings.q[consumer], kernel.q_desc, wave, tile.head, q_row)
        producer_load(rings.do[consumer], kernel.do_desc, wave, tile.head, row)
    head = tile.head // OPTIONS.group
    BYTES: gl.constexpr = bytes_of_buckets(kernel.buckets_desc, CONSUMERS)
    first, stride = 0, 0
    if kernel.buckets_desc is not None:
        first, stride = first_stored_block(kernel.bias, tile, kernel.schedule.num_segments)
        first += tile.block * stride
    for number in range(visited):
        block = visited_block(number, blocks)
        key_row = tile.kv_start + block * BLOCK
        producer_load(rings.k, kernel.k_desc, step + number, head, key_row, BYTES)
        if kernel.buckets_desc is not None:
            load_buckets(
                rings.k, rings.buckets, kernel.buckets_desc, step + number, first + block, stride,
                CONSUMERS,
            )  # fmt: skip
        producer_load(rings.v, kernel.v_desc, step + number, head, key_row)
    return step + visited


@gluon.jit
def _dq_produce(kernel, OPTIONS: gl.constexpr):
    produce_waves(_load_tile, kernel, OPTIONS)


@gluon.jit
def _dq_block(
    rows, rings, step, more, acc, position, scale, tables, tail,
    consumer: gl.constexpr, OPTIONS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One key block: dS from the scores computed again, acc += dS k, and dS added to the sums of
    the bias tables. `more`: whether another block follows. tables: ConsumerBias and SumsOfTile, or
    None."""
    bias, sums = tables
    k = consumer_wait(rings.k, step)
    # With pointwise activations, or blocks of another size, waiting ahead costs more than it gains.
    WAITS_AHEAD: gl.constexpr = OPTIONS.activation is None and k.shape[1] == 64
    if MASKED:
        has_tail = position.num_keys < k.shape[0]
        if has_tail:
            zero_tail(k, position.num_keys, tail, consumer, OPTIONS.consumers)
    block_bias, buckets = None, None
    STORED: gl.constexpr = rings.buckets is not None
    if OPTIONS.bias is not None:
        stored = None
        if STORED:
            stored = stored_buckets(
                rings, rings.k, step, 0, consumer, OPTIONS.consumers, k.shape[0], False
            )
        block_bias, buckets = bias_block(
            bias, position.column, k.shape[0], False, OPTIONS.bias, stored
        )
    scores = mma_abt(rows.q, k, block_bias, 1, OPTIONS.head_dim)
    dp = mma_abt(rows.do, consumer_wait(rings.v, step), None, 1, OPTIONS.v_dim)
    scores = warpgroup_mma_wait(num_parts(k.shape[1], OPTIONS.v_dim), deps=(scores,))
    _, dact = weights(scores, rows.lse[:, None], scale, OPTIONS)
    if WAITS_AHEAD:
        wait_until_full(rings.k, step + 1, more)
    dp = drop_by_queries(warpgroup_mma_wait(0, deps=(dp,)), position)
    dp = minus_delta(dp, rows.delta[:, None], OPTIONS)
    release(rings.v, step)
    ds = dact * dp
    if MASKED:
        ds = gl.where(visible_keys(position, OPTIONS.mask, k.shape[0]), ds, 0.0)
        if has_tail:
            wait_for_tail(tail)
    operand = to_mma_operand(ds, k.dtype, k.shape[1])
    acc = mma_parts(operand, k, acc)
    if OPTIONS.has_sums:
        if STORED:  # loaded again: they would take registers until here
            buckets = stored_buckets(
                rings, rings.k, step, 0, consumer, OPTIONS.consumers, k.shape[0], False
            )
        add_to_tables(ds, buckets, position.column, bias, sums, OPTIONS.bias)
    acc, _ = wait_for_parts(acc, (operand,))
    release(rings.k, step)
    return acc


@gluon.jit
def _rows_of_block(rows, rings, wave):
    """The rows for a block of keys. At head dims above 128, 64 registers would hold addresses of q
    and dO through a loop: each block computes them."""
    if rings.q.buffers.shape[3] > 128:
        return QueryRows(
            opaque_rows(rings.q, wave), opaque_rows(rings.do, wave), rows.lse, rows.delta
        )
    else:
        return rows


@gluon.jit
def _sums(kernel, tile, num_rows, consumer: gl.constexpr, OPTIONS: gl.constexpr):
    """SumsOfTile of a consumer's rows."""
    scales = kernel.args
    factor = scales.dact_factor * output_factor(
        scales.output_scale, scales.segment_scale_ptr, tile.segment
    )
    part = gl.program_id(0) * OPTIONS.consumers + consumer
    return sums_of_tile(
        kernel.sums, kernel.bias, kernel.scratch[consumer], part,
        tile.head, num_rows, factor, OPTIONS.bias,
    )  # fmt: skip


@gluon.jit
def _dq_tile(tile, wave, step, tail_phase, consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    shared, scales, outputs = kernel.rings, kernel.args, kernel.outputs
    rings = Rings(
        q=shared.q[consumer], do=shared.do[consumer], k=shared.k, v=shared.v, tail=shared.tail,
        buckets=shared.buckets,
    )  # fmt: skip
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    BLOCK: gl.constexpr = rings.k.buffers.shape[2]
    STATS: gl.constexpr = gl.SliceLayout(1, mma_layout(WARPGROUP_ROWS, BLOCK))
    STORES_FROM_Q: gl.constexpr = outputs.buffers is None
    tile = in_strips(tile, OPTIONS, BLOCK)
    first_target = first_target_of(tile, OPTIONS.mask)
    blocks, visited = key_blocks(tile, OPTIONS.mask, CONSUMERS * WARPGROUP_ROWS, BLOCK)
    masked = num_masked_blocks(blocks)
    if OPTIONS.whole_blocks:
        masked = gl.to_tensor(0)
    first = (tile.block + consumer) * WARPGROUP_ROWS
    num_rows = tile.q_len - first
    # Keys in the first block, the only one that the segment's end may cut.
    num_keys = gl.where(masked > 0, tile.kv_len - visited_block(0, blocks) * BLOCK, BLOCK)
    tail = Tail(rings.tail, tail_phase)
    if has_rows(tile, first, OPTIONS.mask):
        dropout = dropout_of_queries(scales, tile, first, OPTIONS)
        lse = gl.arange(0, WARPGROUP_ROWS, layout=STATS)
        delta = lse
        if OPTIONS.activation is None:
            lse, delta, offsets, real = row_stats(kernel, rings.do, wave, tile, first, 0.0, OPTIONS)
            if dropout is not None:  # dS is then without the factor of the weights that are kept
                delta /= dropout.factor
            gl.store(kernel.args.delta_ptr + offsets, delta, mask=real)
        consumer_wait(rings.q, wave)
        consumer_wait(rings.do, wave)
        acc = zero_parts(rings.k.buffers.shape[3], OPTIONS.head_dim)
        row = first + tile.kv_len - tile.q_len
        scale = score_factor(scales.scale, OPTIONS.activation)
        rows = QueryRows(opaque_rows(rings.q, wave), opaque_rows(rings.do, wave), lse, delta)
        bias, sums = None, None  # a function's None, or one assigned alone, fits in no tuple
        if OPTIONS.bias is not None:
            bias = bias_of_queries(kernel, tile, first, consumer, OPTIONS.bias)
        if OPTIONS.has_sums:
            sums = _sums(kernel, tile, num_rows, consumer, OPTIONS)
        tables = bias, sums
        for number in range(masked):
            key_block = visited_block(number, blocks)
            column = key_block * BLOCK
            num_left = tile.kv_len - column
            if consumer_visits(tile, tile.block + consumer, key_block, key_blocks, OPTIONS, BLOCK):
                position = Position(row, column, num_left, first_target, dropout)
                acc = _dq_block(
                    _rows_of_block(rows, rings, wave), rings, step + number,
                    number + 1 < visited, acc, position, scale,
                    tables, tail, consumer, OPTIONS, True,
                )  # fmt: skip
            else:
                skip_key_block(rings.k, rings.v, step + number, num_left, tail, consumer, CONSUMERS)
        rows = QueryRows(opaque_rows(rings.q, wave), opaque_rows(rings.do, wave), lse, delta)
        for number in range(masked, visited):
            column = 0
            if OPTIONS.bias is not None or dropout is not None:
                column = visited_block(number, blocks) * BLOCK
            position = Position(row, column, BLOCK, first_target, dropout)
            acc = _dq_block(
                _rows_of_block(rows, rings, wave), rings, step + number, number + 1 < visited,
                acc, position, scale, tables, tail, consumer, OPTIONS, False,
            )  # fmt: skip
        if STORES_FROM_Q:
            buffer = rings.q.buffers.index(wave % rings.q.buffers.shape[0])
        else:
            release(rings.q, wave)
            buffer = outputs.buffers.index(consumer)
        release(rings.do, wave)
        factor = output_factor(scales.output_scale, scales.segment_scale_ptr, tile.segment)
        acc = [x * (scales.scale * scales.dact_factor * factor) for x in acc]
        store_epilogue(
            acc, outputs.dq, buffer, 0,
            tile.q_start + first, tile.head, num_rows, OPTIONS.dq_stride, OPTIONS.head_dim,
        )  # fmt: skip
        if STORES_FROM_Q:
            fence_async_shared()
            wait_for_stores()
            release(rings.q, wave)
    else:
        skip_stage(rings.q, wave)
        skip_stage(rings.do, wave)
        for number in range(visited):
            left = gl.where(number == 0, num_keys, BLOCK)
            skip_key_block(rings.k, rings.v, step + number, left, tail, consumer, CONSUMERS)
    return step + visited, tail_phase + (num_keys < BLOCK).to(gl.int32)


@gluon.jit
def _dq_consume(consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    consume_waves(_dq_tile, consumer, kernel, OPTIONS)


@safe_ptxas
@gluon.jit(**UNSPECIALISED)
def attention_bwd_dq_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, dq_desc, num_tiles_ptr, num_segments, args, bias, sums,
    buckets_desc, ACTIVATION: gl.constexpr, CONSTANTS: gl.constexpr,
):  # fmt: skip
    """dq of a tile of query rows; with softmax also writes delta = rowsum(dO ∘ O), which the dk, dv
    kernel reads."""
    OPTIONS: gl.constexpr = with_activation(CONSTANTS, ACTIVATION)
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    schedule = Schedule(
        args.tiles_ptr, num_tiles_ptr, args.q_offsets_ptr, args.kv_offsets_ptr, num_segments,
        args.num_targets_ptr, do_desc.shape[1], args.next_tile_ptr,
    )  # fmt: skip
    q = make_rings(q_desc, OPTIONS.row_stages, CONSUMERS)
    do = make_rings(do_desc, OPTIONS.row_stages, CONSUMERS)
    k = make_ring(k_desc, OPTIONS.stages, CONSUMERS)
    v = make_ring(v_desc, OPTIONS.v_stages, CONSUMERS)
    buckets = make_buckets(buckets_desc, OPTIONS.stages, CONSUMERS)
    rings = Rings(q=q, do=do, k=k, v=v, tail=make_barriers(1, CONSUMERS), buckets=buckets)
    buffers = None
    if q_desc.block_type.shape[2] <= 128:
        buffers = make_epilogue_buffers(q_desc, CONSUMERS)
    queue = make_tile_queue(CONSUMERS)
    scratch = None
    if OPTIONS.has_sums:
        scratch = make_scratch(CONSUMERS)
    kernel = Kernel(
        args, schedule, rings, queue,
        Outputs(dq=Output(dq_desc, args.dq_ptr), buffers=buffers),
        q_desc=q_desc, do_desc=do_desc, k_desc=k_desc, v_desc=v_desc, buckets_desc=buckets_desc,
        bias=bias, ranges=make_ranges(CONSUMERS, OPTIONS.bias), sums=sums, scratch=scratch,
    )  # fmt: skip
    launch_specialised(_dq_consume, _dq_produce, kernel, OPTIONS)
