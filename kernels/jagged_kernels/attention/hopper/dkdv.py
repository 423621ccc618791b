"""dk and dv of jagged attention for Hopper: a warp-specialised kernel over tiles of keys.

    Sᵀ = scale · k qᵀ + biasᵀ,  dPᵀ = v dOᵀ,  dV = Pᵀ dO,  dK = scale · dSᵀ q
    per segment and key head, over the heads of its group                 P, dS: scores.py

Roles:
    warps 0–3, 4–7   consumers: MMA, P and dS, epilogue
    warp 8           producer: tiles, TMA loads, lse and delta
Registers per thread: consumers 240, producer 24.

Tile: 128 keys, 64 per consumer, by blocks of 64 query rows, or of 128 at head dim 64 with softmax
and no mask. Small tiles (select.small_tiles_are_faster), at head dim 64 alone: one consumer. By
blocks of 64 query rows, where two thread blocks share a multiprocessor and consumers have 232
registers; or of 32 rows where query segments are short, three thread blocks and 136 registers.

Barriers, one per stage: q, do, k[i], v[i]: `full` 1, the TMA load; q's also guards lse and delta,
written before. `empty` of q and dO one per consumer, its MMAs of the buffer are complete; of k and
v 1, consumer i is done with the tile. tail: two per consumer, its shares of q's and dO's rows past
the segment are 0. queue: tile_source.py.

Shared memory in KiB, plus 1 for the tile queue, the barriers and the arguments of warps; lse and
delta with softmax only:
    head dim 128: 225.5 = q 3 × 16 + dO 3 × 16 + k 2 × 16 + v 2 × 16 + epilogue 4 × 16 + lse, delta
                  1.5
    head dim  64: 162 = q 4 × 8 + dO 4 × 8 + k 2 × 2 × 8 + v 2 × 2 × 8 + epilogue 4 × 8 + lse, delta
                  2; blocks of 128 rows: q and dO 2 × 16
    small tiles:  97.5 = q 3 × 8 + dO 3 × 8 + k 2 × 8 + v 2 × 8 + epilogue 2 × 8 + lse, delta 1.5
    of few rows:  56.75 = q 3 × 4 + dO 3 × 4 + k 8 + v 8 + epilogue 2 × 8 + lse, delta .75
    with a time table, at 128: 193, q 2 × 16 + dO 2 × 16, and .125 more per consumer, for ranges of
    buckets; with stored buckets, instead of ranges 4 more per consumer and stage of q, which a
    barrier of q guards, and up to 2 per consumer for the time table

Scores are computed transposed: Pᵀ and dSᵀ stay in registers, as first operands of the next MMAs.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ...common.loads import load_segment
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
    opaque_rows,
    producer_load,
    release,
    skip_stage,
    store_epilogue,
    to_mma_operand,
    wait_for_tail,
    zero_tail,
)
from ...common.ptxas import safe_ptxas
from ..dropout import dropout_of_head
from ..mask import first_target_column, num_masked_blocks
from ..scales import output_factor, score_factor
from .args import UNSPECIALISED, Kernel, Outputs, Rings, Schedule, with_activation
from .bias import (
    bias_block,
    bias_of_keys,
    bytes_of_buckets,
    first_stored_block,
    load_buckets,
    make_buckets,
    make_ranges,
    stored_buckets,
)
from .scores import (
    QueryBlock,
    drop_gradient,
    lanes_of_block,
    make_stats,
    minus_delta,
    put_stats,
    stats_of_step,
    weights_of_keys,
)
from .tile_source import (
    consume_waves,
    consumer_visits,
    first_target_of,
    make_tile_queue,
    of_queries,
    produce_waves,
    query_blocks,
    visited_block,
)


class Keys(NamedTuple):
    """A consumer's keys of a tile: k and v in shared memory, and the column of the first key."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    column: gl.tensor


class _Visited(NamedTuple):
    """The blocks of query rows that a tile of keys visits, in all heads and query groups.

    blocks: Blocks of the first query group. masked: how many are masked; they come first. count:
    how many there are.
    """

    blocks: gl.tensor
    masked: gl.tensor
    count: gl.tensor


# -- blocks of query rows --------------------------------------------------------------------------


@gluon.jit
def _head_and_block(number, blocks, GROUP: gl.constexpr):
    """Head in the group and block of the number-th block that a tile of keys visits. The blocks of
    all heads are counted, masked blocks first."""
    if GROUP == 1:
        return 0, visited_block(number, blocks)
    else:
        masked = num_masked_blocks(blocks)
        full = number >= GROUP * masked
        number = gl.where(full, number - GROUP * masked, number)
        count = gl.maximum(gl.where(full, blocks.full_count, masked), 1)
        return number // count, visited_block(gl.where(full, masked, 0) + number % count, blocks)


@gluon.jit
def _tile_of_group(schedule, tile, query_group, MASK: gl.constexpr):
    """The tile of keys with the query segment of another query group."""
    segment = tile.segment + query_group * schedule.num_segments
    q_start, q_len = load_segment(schedule.q_offsets_ptr, segment)
    first_target = first_target_column(
        schedule.num_targets_ptr, segment, tile.kv_len, MASK, schedule.num_segments
    )
    return of_queries(tile, segment, q_start, q_len, first_target)


@gluon.jit
def visited_blocks(schedule, tile, OPTIONS: gl.constexpr):
    """The _Visited blocks of a tile of keys."""
    ROWS: gl.constexpr = OPTIONS.consumers * WARPGROUP_ROWS
    blocks, visited = query_blocks(tile, OPTIONS.mask, ROWS, OPTIONS.block)
    visited *= OPTIONS.group
    masked = OPTIONS.group * num_masked_blocks(blocks)
    for query_group in gl.static_range(1, OPTIONS.query_groups):
        other = _tile_of_group(schedule, tile, query_group, OPTIONS.mask)
        others, count = query_blocks(other, OPTIONS.mask, ROWS, OPTIONS.block)
        visited += OPTIONS.group * count
        masked += OPTIONS.group * num_masked_blocks(others)
    return _Visited(blocks, masked, visited)


@gluon.jit
def visited_rows(schedule, tile, number, visited, OPTIONS: gl.constexpr):
    """The number-th visited block: the tile with its query segment, its head in the group, and the
    block."""
    blocks, segment, q_start, q_len = visited.blocks, tile.segment, tile.q_start, tile.q_len
    first_target = first_target_of(tile, OPTIONS.mask)
    ROWS: gl.constexpr = OPTIONS.consumers * WARPGROUP_ROWS
    if OPTIONS.query_groups > 1:
        full = number >= visited.masked
        number = gl.where(full, number - visited.masked, number)
        for query_group in gl.static_range(1, OPTIONS.query_groups):
            other = _tile_of_group(schedule, tile, query_group, OPTIONS.mask)
            others, _ = query_blocks(other, OPTIONS.mask, ROWS, OPTIONS.block)
            count = OPTIONS.group * gl.where(full, blocks.full_count, num_masked_blocks(blocks))
            if number >= count:
                number -= count
                segment, q_start, q_len = other.segment, other.q_start, other.q_len
                blocks = others
                first_target = first_target_of(other, OPTIONS.mask)
        number += gl.where(full, OPTIONS.group * num_masked_blocks(blocks), 0)
    group_head, block = _head_and_block(number, blocks, OPTIONS.group)
    return of_queries(tile, segment, q_start, q_len, first_target), group_head, block


# -- producer --------------------------------------------------------------------------------------


@gluon.jit
def load_keys(kernel, tile, wave, key_row, CONSUMERS: gl.constexpr):
    """Fill each consumer's buffers of k and v."""
    rings = kernel.rings
    for consumer in gl.static_range(CONSUMERS):
        row = key_row + consumer * WARPGROUP_ROWS
        producer_load(rings.k[consumer], kernel.k_desc, wave, tile.head, row)
        producer_load(rings.v[consumer], kernel.v_desc, wave, tile.head, row)


@gluon.jit
def _load_tile(tile, wave, step, kernel, OPTIONS: gl.constexpr):
    """Loads the first query blocks of a tile before its keys: the buffers of keys may be in use
    until the previous tile ends."""
    schedule, rings = kernel.schedule, kernel.rings
    lanes = lanes_of_block(OPTIONS.block)
    visited = visited_blocks(schedule, tile, OPTIONS)
    key_row = tile.kv_start + tile.block * (OPTIONS.consumers * WARPGROUP_ROWS)
    if OPTIONS.kv_shared:
        key_row -= tile.kv_start
    BYTES: gl.constexpr = bytes_of_buckets(kernel.buckets_desc, OPTIONS.consumers)
    for number in range(visited.count + 1):
        if number == gl.minimum(visited.count, rings.q.buffers.shape[0]):
            load_keys(kernel, tile, wave, key_row, OPTIONS.consumers)
        if number < visited.count:
            of_block, group_head, block = visited_rows(schedule, tile, number, visited, OPTIONS)
            q_start, q_len = of_block.q_start, of_block.q_len
            head = tile.head * OPTIONS.group + group_head
            first = block * OPTIONS.block
            if OPTIONS.activation is None:
                put_stats(kernel, step + number, head, q_start, q_len, first, lanes)
            row = q_start + first
            q_row = row
            if OPTIONS.q_shared:
                q_row = row - q_start
            producer_load(rings.q, kernel.q_desc, step + number, head, q_row, BYTES)
            if kernel.buckets_desc is not None:
                stored, stride = first_stored_block(kernel.bias, of_block, schedule.num_segments)
                stored += first // WARPGROUP_ROWS * stride + tile.block * OPTIONS.consumers
                load_buckets(
                    rings.q, rings.buckets, kernel.buckets_desc, step + number, stored, 1,
                    OPTIONS.consumers,
                )  # fmt: skip
            producer_load(rings.do, kernel.do_desc, step + number, head, row)
    return step + visited.count


@gluon.jit
def produce(kernel, OPTIONS: gl.constexpr):
    produce_waves(_load_tile, kernel, OPTIONS)


# -- consumers -------------------------------------------------------------------------------------


@gluon.jit
def zero_tails(rings, step, num_rows, tail_phase, consumer: gl.constexpr, CONSUMERS: gl.constexpr):
    """Zero the rows of q and dO past their segment. All consumers take part."""
    tail = Tail(rings.tail, tail_phase)
    zero_tail(consumer_wait(rings.q, step), num_rows, tail, consumer, CONSUMERS)
    zero_tail(consumer_wait(rings.do, step), num_rows, tail, consumer, CONSUMERS)
    wait_for_tail(tail)


@gluon.jit
def _skip_rows(rings, step, num_rows, tail_phase, consumer: gl.constexpr, CONSUMERS: gl.constexpr):
    """Skip a block that does not see this consumer's keys, but take part in zeroing its tail;
    returns the next tail phase."""
    has_tail = num_rows < rings.q.buffers.shape[2]
    if has_tail:
        zero_tails(rings, step, num_rows, tail_phase, consumer, CONSUMERS)
    skip_stage(rings.q, step)
    skip_stage(rings.do, step)
    return tail_phase + has_tail.to(gl.int32)


@gluon.jit
def _dkdv_block(
    keys, rings, step, dk, dv, rows, scale, bias, tail_phase,
    consumer: gl.constexpr, OPTIONS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One query block, transposed: dv += Pᵀ dO, dk += dSᵀ q. Rows past the segment are 0 and add
    nothing to either. Returns dk, dv and the next tail phase."""
    q = consumer_wait(rings.q, step)
    if MASKED:
        has_tail = rows.num_rows < q.shape[0]
        if has_tail:
            zero_tails(rings, step, rows.num_rows, tail_phase, consumer, OPTIONS.consumers)
        tail_phase += has_tail.to(gl.int32)
    BLOCK: gl.constexpr = q.shape[0]
    WIDTH: gl.constexpr = q.shape[1]
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, BLOCK)
    block_bias = None
    if OPTIONS.bias is not None:
        stored = None
        if rings.buckets is not None:
            stored = stored_buckets(
                rings, rings.q, step, rows.first, consumer, OPTIONS.consumers, BLOCK, True
            )
        block_bias, _ = bias_block(bias, rows.first, BLOCK, True, OPTIONS.bias, stored)
    scores = mma_abt(keys.k, q, block_bias)
    do = consumer_wait(rings.do, step)
    dp = mma_abt(keys.v, do)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    p, dact = weights_of_keys(scores, rings, step, keys.column, rows, scale, OPTIONS, MASKED)
    p = to_mma_operand(p, do.dtype, WIDTH)
    dv = warpgroup_mma(p, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    dp, dact = drop_gradient(dp, dact, rows, OPTIONS)
    dp = minus_delta(dp, stats_of_step(rings.delta, step, L, OPTIONS), OPTIONS)
    ds = to_mma_operand(dact * dp, q.dtype, WIDTH)
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    dv, dk, p, ds = warpgroup_mma_wait(0, deps=(dv, dk, p, ds))
    release(rings.q, step)
    release(rings.do, step)
    return dk, dv, tail_phase


@gluon.jit
def _dkdv_tile(tile, wave, step, tail_phase, consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    schedule, outputs = kernel.schedule, kernel.outputs
    scales, shared = kernel.args, kernel.rings
    rings = Rings(
        q=shared.q, do=shared.do, k=shared.k[consumer], v=shared.v[consumer],
        lse=shared.lse, delta=shared.delta, tail=shared.tail, buckets=shared.buckets,
    )  # fmt: skip
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    BLOCK: gl.constexpr = rings.q.buffers.shape[2]
    WIDTH: gl.constexpr = rings.q.buffers.shape[3]
    visited = visited_blocks(schedule, tile, OPTIONS)
    first = (tile.block * CONSUMERS + consumer) * WARPGROUP_ROWS
    num_keys = tile.kv_len - first
    scale = score_factor(scales.scale, OPTIONS.activation)
    if num_keys > 0:
        dropout = None
        if scales.seed_ptr is not None:
            dropout = dropout_of_head(scales.seed_ptr, scales.threshold, 0, 0)
        consumer_wait(rings.k, wave)
        consumer_wait(rings.v, wave)
        dk = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, mma_layout(WARPGROUP_ROWS, WIDTH))
        dv = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, mma_layout(WARPGROUP_ROWS, WIDTH))
        keys = Keys(opaque_rows(rings.k, wave), opaque_rows(rings.v, wave), first)
        for number in range(visited.masked):
            of_block, group_head, block = visited_rows(schedule, tile, number, visited, OPTIONS)
            row, q_len = block * BLOCK, of_block.q_len
            bias = bias_of_keys(kernel, of_block, group_head, first, consumer, OPTIONS)
            strip = tile.block * CONSUMERS + consumer
            if consumer_visits(of_block, strip, block, query_blocks, OPTIONS, BLOCK):
                first_target = first_target_of(of_block, OPTIONS.mask)
                rows = QueryBlock(
                    row, row + tile.kv_len - q_len, q_len - row, first_target,
                    dropout, of_block.q_start, tile.head * OPTIONS.group + group_head,
                )  # fmt: skip
                dk, dv, tail_phase = _dkdv_block(
                    keys, rings, step + number, dk, dv, rows, scale, bias, tail_phase,
                    consumer, OPTIONS, True,
                )  # fmt: skip
            else:
                tail_phase = _skip_rows(
                    rings, step + number, q_len - row, tail_phase, consumer, CONSUMERS
                )
        keys = Keys(opaque_rows(rings.k, wave), opaque_rows(rings.v, wave), first)
        for number in range(visited.masked, visited.count):
            of_block, group_head, row, start, head = tile, 0, 0, 0, 0
            if OPTIONS.bias is not None or dropout is not None:
                of_block, group_head, block = visited_rows(schedule, tile, number, visited, OPTIONS)
                row, start = block * BLOCK, of_block.q_start
                head = tile.head * OPTIONS.group + group_head
            bias = bias_of_keys(kernel, of_block, group_head, first, consumer, OPTIONS)
            first_target = first_target_of(tile, OPTIONS.mask)
            rows = QueryBlock(row, 0, BLOCK, first_target, dropout, start, head)
            dk, dv, tail_phase = _dkdv_block(
                keys, rings, step + number, dk, dv, rows, scale, bias, tail_phase,
                consumer, OPTIONS, False,
            )  # fmt: skip
        release(rings.k, wave)
        release(rings.v, wave)
        factor = output_factor(scales.output_scale, scales.segment_scale_ptr, tile.segment)
        row = tile.kv_start + first
        dv *= scales.act_factor * factor
        buffer = outputs.buffers.index(consumer)
        store_epilogue(
            (dv,), outputs.dv, buffer, 1, row, tile.head, num_keys, OPTIONS.dv_stride, OPTIONS.v_dim
        )
        dk *= scales.scale * scales.dact_factor * factor
        buffer = outputs.buffers.index(CONSUMERS + consumer)
        store_epilogue(
            (dk,), outputs.dk, buffer, 1,
            row, tile.head, num_keys, OPTIONS.dk_stride, OPTIONS.head_dim,
        )  # fmt: skip
    else:
        for number in range(visited.count):
            of_block, _, block = visited_rows(schedule, tile, number, visited, OPTIONS)
            left = of_block.q_len - block * BLOCK
            tail_phase = _skip_rows(rings, step + number, left, tail_phase, consumer, CONSUMERS)
        skip_stage(rings.k, wave)
        skip_stage(rings.v, wave)
    return step + visited.count, tail_phase


@gluon.jit
def _dkdv_consume(consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    consume_waves(_dkdv_tile, consumer, kernel, OPTIONS)


@safe_ptxas
@gluon.jit(**UNSPECIALISED)
def attention_bwd_dkdv_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, num_tiles_ptr, num_segments, args, bias,
    buckets_desc, ACTIVATION: gl.constexpr, CONSTANTS: gl.constexpr,
):  # fmt: skip
    """dk, dv of a tile of key rows. It loops over the query blocks of all query groups and of all
    heads of a key head."""
    OPTIONS: gl.constexpr = with_activation(CONSTANTS, ACTIVATION)
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    schedule = Schedule(
        args.tiles_ptr, num_tiles_ptr, args.q_offsets_ptr, args.kv_offsets_ptr, num_segments,
        args.num_targets_ptr, do_desc.shape[1], args.next_tile_ptr,
    )  # fmt: skip
    q = make_ring(q_desc, OPTIONS.stages, CONSUMERS)
    do = make_ring(do_desc, OPTIONS.stages, CONSUMERS)
    k = make_rings(k_desc, OPTIONS.row_stages, CONSUMERS)
    v = make_rings(v_desc, OPTIONS.row_stages, CONSUMERS)
    lse, delta = make_stats(q), make_stats(q)
    # Each consumer arrives twice a block: for its share of q, and for its share of dO.
    tail = make_barriers(1, 2 * CONSUMERS)
    buckets = make_buckets(buckets_desc, OPTIONS.stages, CONSUMERS)
    rings = Rings(q=q, do=do, k=k, v=v, lse=lse, delta=delta, tail=tail, buckets=buckets)
    outputs = Outputs(
        dk=Output(dk_desc, args.dk_ptr), dv=Output(dv_desc, args.dv_ptr),
        buffers=make_epilogue_buffers(k_desc, 2 * CONSUMERS),
    )  # fmt: skip
    queue = make_tile_queue(CONSUMERS)
    kernel = Kernel(
        args, schedule, rings, queue, outputs,
        q_desc=q_desc, do_desc=do_desc, k_desc=k_desc, v_desc=v_desc,
        buckets_desc=buckets_desc, bias=bias, ranges=make_ranges(CONSUMERS, OPTIONS.bias),
    )  # fmt: skip
    launch_specialised(_dkdv_consume, produce, kernel, OPTIONS)
