"""dk and dv of jagged attention for Hopper: a warp-specialised kernel over tiles of keys.
hopper_backward.py launches it.

    Sᵀ = scale · k qᵀ + biasᵀ,  dPᵀ = v dOᵀ,  dV = Pᵀ dO,  dK = scale · dSᵀ q         per segment
    and key head, over the heads of its group softmax:    dS = P ∘ (dP − delta),  P = exp2(S − lse),
    delta = rowsum(dO ∘ O) pointwise:  P = activation(S),  dS = activation'(S) ∘ dP

Roles:
    warps 0–3, 4–7   consumers: MMA, P and dS, epilogue. `_dkdv_consume`
    warp 8           producer: tiles, TMA loads, lse and delta. `_dkdv_produce`
Registers per thread: consumers 240, producer 24.

Tile: 128 keys, 64 per consumer, by blocks of 64 query rows, or of 128 at head dim 64 with softmax
and no mask.

Small tiles (select.small_tiles_are_faster), at head dim 64 alone: 64 keys, one consumer, warps 0–3,
and the producer is warp 4. By blocks of 64 query rows, where two thread blocks share a
multiprocessor and consumers have 232 registers; or of 32 rows where query segments are short, three
thread blocks and 136 registers.

Barriers, one per stage s:
    q.full[s], do.full[s]             arrive count 1, the TMA load of that buffer; q's also guards
    lse[s] and delta[s], written before q.empty[s], do.empty[s]           arrive count of one per
    consumer: its MMAs of the buffer are complete; q's also guards lse, delta k[i].full[s],
    v[i].full[s]        arrive count 1, the TMA load of that buffer k[i].empty[s], v[i].empty[s]
    arrive count 1: consumer i, its only reader, is done with the tile tail
    arrive count of two per consumer: its shares of q's and dO's rows past the segment are 0
    queue.full[s], queue.empty[s]     arrive counts 1 and one per consumer: the words of a tile

Shared memory in KiB, plus 1 for the tile queue, the barriers and the arguments of warps; lse and
    delta with softmax only: head dim 128: 225.5 = q 3 × 16 + dO 3 × 16 + k 2 × 16 + v 2 × 16 +
    epilogue 4 × 16 + lse, delta 1.5 head dim  64: 162 = q 4 × 8 + dO 4 × 8 + k 2 × 2 × 8 + v 2 × 2
    × 8 + epilogue 4 × 8 + lse, delta 2; blocks of 128 rows: q and dO 2 × 16 small tiles:  97.5 = q
    3 × 8 + dO 3 × 8 + k 2 × 8 + v 2 × 8 + epilogue 2 × 8 + lse, delta 1.5 of few rows:  56.75 = q 3
    × 4 + dO 3 × 4 + k 8 + v 8 + epilogue 2 × 8 + lse, delta .75

Scores are computed transposed: Pᵀ and dSᵀ stay in registers, as first operands of the next MMAs.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ..common.gluon_api import thread_barrier
from ..common.loads import load_segment
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
    make_rings,
    mma_abt,
    mma_layout,
    opaque_rows,
    producer_load,
    producer_wait,
    skip_stage,
    store_epilogue,
    to_mma_operand,
    wait_for_tail,
    zero_tail,
)
from ..common.ptxas import safe_ptxas
from .bias import Bias
from .hopper_bias import bias_block, bias_of_keys, make_ranges
from .hopper_common import (
    Schedule,
    Tile,
    TileQueue,
    consumer_visits,
    first_target_of,
    load_wave,
    make_tile_queue,
    num_waves,
    pop_tile,
    push_tile,
    query_blocks,
    release_tile,
    visited_block,
)
from .hopper_ds import SIDE, first_ds_block, store_ds
from .mask import is_visible, num_masked_blocks, visible_columns
from .scales import output_factor, score_factor

# so low that the workspace index of every block of the segment is negative
NOT_STORED = gl.constexpr(-(2**40))


class _Options(NamedTuple):
    """Constants of a launch."""

    heads: gl.constexpr
    group: gl.constexpr  # query heads per key head
    head_dim: gl.constexpr
    v_dim: gl.constexpr
    activation: gl.constexpr  # function of activations.py; None: softmax
    mask: gl.constexpr
    q_shared: gl.constexpr
    kv_shared: gl.constexpr
    query_groups: gl.constexpr
    has_ds: gl.constexpr  # whether dS is stored
    bias: gl.constexpr  # BiasKind, or None
    consumers: gl.constexpr
    block: gl.constexpr  # query rows of a block


class _Rings(NamedTuple):
    """Buffers in shared memory. k, v: a ring per consumer; in a consumer, its own. lse, delta: fp32
    `[stages, rows]`, guarded by the barriers of q. tail: barrier of the tails of q and dO."""

    q: Ring
    do: Ring
    k: Ring
    v: Ring
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    tail: gl.shared_memory_descriptor


class Stats(NamedTuple):
    """Softmax's numbers of the query rows, `[H, rows]`: log-sum-exp of the scores, and delta =
    rowsum(dO ∘ O)."""

    lse_ptr: gl.tensor
    delta_ptr: gl.tensor
    stride_lse: gl.tensor


class _Outputs(NamedTuple):
    dk_desc: gl.tensor
    dv_desc: gl.tensor
    dk_ptr: gl.tensor
    dv_ptr: gl.tensor
    buffers: gl.shared_memory_descriptor


class Scales(NamedTuple):
    """act_factor, dact_factor: of activations.activation_factors. segment_scale_ptr: replaces
    output_scale unless it is None."""

    scale: gl.tensor
    act_factor: gl.tensor
    dact_factor: gl.tensor
    output_scale: gl.tensor
    segment_scale_ptr: gl.tensor


class _Kernel(NamedTuple):
    """What the kernel hands to its warps."""

    q_desc: gl.tensor
    do_desc: gl.tensor
    k_desc: gl.tensor
    v_desc: gl.tensor
    schedule: Schedule
    rings: _Rings
    stats: Stats
    outputs: _Outputs
    scales: Scales
    bias: Bias
    ranges: gl.tensor
    ds_ptr: gl.tensor
    ds_blocks_ptr: gl.tensor
    queue: TileQueue


class _Keys(NamedTuple):
    """A consumer's keys of a tile: k and v in shared memory, the column of the first key, and the
    workspace of dS or None."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    column: gl.tensor
    ds_ptr: gl.tensor


class QueryBlock(NamedTuple):
    """A block of query rows: the first one, its column, number of rows from there on in the
    segment, and the segment's first target column."""

    first: gl.tensor
    column: gl.tensor
    num_rows: gl.tensor
    first_target: gl.tensor


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
def _tile_of_group(schedule, tile, query_group):
    """The tile of keys with the query segment of another query group."""
    q_start, q_len = load_segment(
        schedule.q_offsets_ptr, tile.segment + query_group * schedule.num_segments
    )
    return Tile(
        tile.segment,
        tile.head,
        tile.block,
        q_start,
        q_len,
        tile.kv_start,
        tile.kv_len,
        tile.first_target,
    )


@gluon.jit
def _visited_blocks(schedule, tile, OPTIONS: gl.constexpr):
    """The _Visited blocks of a tile of keys."""
    ROWS: gl.constexpr = OPTIONS.consumers * WARPGROUP_ROWS
    blocks, visited = query_blocks(tile, OPTIONS.mask, ROWS, OPTIONS.block)
    visited *= OPTIONS.group
    masked = OPTIONS.group * num_masked_blocks(blocks)
    for query_group in gl.static_range(1, OPTIONS.query_groups):
        others, count = query_blocks(
            _tile_of_group(schedule, tile, query_group), OPTIONS.mask, ROWS, OPTIONS.block
        )
        visited += OPTIONS.group * count
        masked += OPTIONS.group * num_masked_blocks(others)
    return _Visited(blocks, masked, visited)


@gluon.jit
def _visited_rows(schedule, tile, number, visited, OPTIONS: gl.constexpr):
    """The number-th visited block: first row and number of rows of its query segment, its head in
    the group, and the block."""
    blocks, q_start, q_len = visited.blocks, tile.q_start, tile.q_len
    if OPTIONS.query_groups > 1:
        full = number >= visited.masked
        number = gl.where(full, number - visited.masked, number)
        for query_group in gl.static_range(1, OPTIONS.query_groups):
            other = _tile_of_group(schedule, tile, query_group)
            others, _ = query_blocks(
                other, OPTIONS.mask, OPTIONS.consumers * WARPGROUP_ROWS, OPTIONS.block
            )
            count = OPTIONS.group * gl.where(full, blocks.full_count, num_masked_blocks(blocks))
            if number >= count:
                number -= count
                q_start, q_len, blocks = other.q_start, other.q_len, others
        number += gl.where(full, OPTIONS.group * num_masked_blocks(blocks), 0)
    group_head, block = _head_and_block(number, blocks, OPTIONS.group)
    return q_start, q_len, group_head, block


# -- producer --------------------------------------------------------------------------------------


@gluon.jit
def load_stats(stats, head, q_start, q_len, first, lanes):
    """lse and delta of the segment's query rows first + lanes. Rows past the segment add nothing:
    exp2(score - inf) = 0."""
    offsets = head.to(gl.int64) * stats.stride_lse + q_start + first + lanes
    lse = gl.load(stats.lse_ptr + offsets, mask=lanes < q_len - first, other=float("inf"))
    delta = gl.load(stats.delta_ptr + offsets, mask=lanes < q_len - first, other=0.0)
    return lse, delta


@gluon.jit
def put_stats(rings, step, lse, delta):
    """Write lse and delta to the buffers of a step, before producer_load fills that of q and marks
    it as full."""
    producer_wait(rings.q, step)
    slot = step % rings.q.buffers.shape[0]
    rings.lse.index(slot).store(lse)
    rings.delta.index(slot).store(delta)
    thread_barrier()


@gluon.jit
def _dkdv_produce(kernel, OPTIONS: gl.constexpr):
    """Loads the first query blocks of a tile before its keys: the buffers of keys may be in use
    until the previous tile ends."""
    schedule, rings = kernel.schedule, kernel.rings
    ROWS: gl.constexpr = OPTIONS.consumers * WARPGROUP_ROWS
    lanes = gl.arange(
        0, OPTIONS.block, layout=gl.BlockedLayout([OPTIONS.block // 32], [32], [1], [0])
    )
    waves = num_waves(schedule)
    next_tile = load_wave(schedule, 0, waves, OPTIONS.mask, kernel.ds_blocks_ptr)
    step = 0  # of the rings of q and dO
    for wave in range(waves):
        tile = next_tile
        next_tile = load_wave(schedule, wave + 1, waves, OPTIONS.mask, kernel.ds_blocks_ptr)
        push_tile(kernel.queue, wave, tile)
        visited = _visited_blocks(schedule, tile, OPTIONS)
        key_row = tile.kv_start + tile.block * ROWS
        if OPTIONS.kv_shared:
            key_row -= tile.kv_start
        for number in range(visited.count + 1):
            if number == gl.minimum(visited.count, rings.q.buffers.shape[0]):
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
            if number < visited.count:
                q_start, q_len, group_head, block = _visited_rows(
                    schedule, tile, number, visited, OPTIONS
                )
                head = tile.head * OPTIONS.group + group_head
                first = block * OPTIONS.block
                if OPTIONS.activation is None:
                    lse, delta = load_stats(kernel.stats, head, q_start, q_len, first, lanes)
                    put_stats(rings, step + number, lse, delta)
                row = q_start + first
                q_row = row
                if OPTIONS.q_shared:
                    q_row = row - q_start
                producer_load(rings.q, kernel.q_desc, step + number, head, q_row)
                producer_load(rings.do, kernel.do_desc, step + number, head, row)
        step += visited.count


# -- consumers -------------------------------------------------------------------------------------


@gluon.jit
def visible_rows(keys, rows, MASK: gl.constexpr, BLOCK: gl.constexpr):
    """Which query rows of a block see the consumer's keys, `[64, BLOCK]`: transposed, as the scores
    are."""
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, BLOCK)
    key_columns = keys.column + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))[:, None]
    row_columns = rows.column + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, L))[None, :]
    return is_visible(
        key_columns, row_columns, visible_columns(row_columns, rows.first_target, MASK), MASK
    )


@gluon.jit
def zero_tails(rings, step, num_rows, tail, consumer: gl.constexpr, CONSUMERS: gl.constexpr):
    """Zero the rows of q and dO past their segment. All consumers take part."""
    zero_tail(consumer_wait(rings.q, step), num_rows, tail, consumer, CONSUMERS)
    zero_tail(consumer_wait(rings.do, step), num_rows, tail, consumer, CONSUMERS)
    wait_for_tail(tail)


@gluon.jit
def _skip_rows(rings, step, num_rows, tail_phase, consumer: gl.constexpr, CONSUMERS: gl.constexpr):
    """Skip a block that does not see this consumer's keys, but take part in zeroing its tail;
    returns the next tail phase."""
    has_tail = num_rows < rings.q.buffers.shape[2]
    if has_tail:
        zero_tails(rings, step, num_rows, Tail(rings.tail, tail_phase), consumer, CONSUMERS)
    skip_stage(rings.q, step)
    skip_stage(rings.do, step)
    return tail_phase + has_tail.to(gl.int32)


@gluon.jit
def _dkdv_block(
    keys,
    rings,
    step,
    dk,
    dv,
    rows,
    scale,
    bias,
    tail_phase,
    ds_block,
    consumer: gl.constexpr,
    OPTIONS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """One query block, transposed: dv += Pᵀ dO, dk += dSᵀ q. Rows past the segment are 0 and add
    nothing to either. ds_block: workspace block where dSᵀ is stored, with a workspace. Returns dk,
    dv and the next tail phase."""
    q = consumer_wait(rings.q, step)
    if MASKED:
        has_tail = rows.num_rows < q.shape[0]
        if has_tail:
            zero_tails(
                rings,
                step,
                rows.num_rows,
                Tail(rings.tail, tail_phase),
                consumer,
                OPTIONS.consumers,
            )
        tail_phase += has_tail.to(gl.int32)
    BLOCK: gl.constexpr = q.shape[0]
    WIDTH: gl.constexpr = q.shape[1]
    STATS: gl.constexpr = gl.SliceLayout(0, mma_layout(WARPGROUP_ROWS, BLOCK))
    block_bias = None
    if OPTIONS.bias is not None:
        block_bias, _ = bias_block(bias, rows.first, BLOCK, True, OPTIONS.bias)
    scores = mma_abt(keys.k, q, block_bias)
    do = consumer_wait(rings.do, step)
    dp = mma_abt(keys.v, do)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    if OPTIONS.activation is None:
        p = gl.exp2(
            scores * scale - rings.lse.index(step % rings.q.buffers.shape[0]).load(STATS)[None, :]
        )
        dact = p
    else:
        p, dact = OPTIONS.activation(scores, scale)
    if MASKED and OPTIONS.mask is not None:
        visible = visible_rows(keys, rows, OPTIONS.mask, BLOCK)
        p, dact = gl.where(visible, p, 0.0), gl.where(visible, dact, 0.0)
    p = to_mma_operand(p, do.dtype, WIDTH)
    dv = warpgroup_mma(p, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    if OPTIONS.activation is None:
        dp = dp - rings.delta.index(step % rings.q.buffers.shape[0]).load(STATS)[None, :]
    ds = to_mma_operand(dact * dp, q.dtype, WIDTH)
    if OPTIONS.has_ds:
        store_ds(ds, keys.ds_ptr, ds_block)
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    dv, dk, p, ds = warpgroup_mma_wait(0, deps=(dv, dk, p, ds))
    consumer_release(rings.q, step)
    consumer_release(rings.do, step)
    return dk, dv, tail_phase


@gluon.jit
def _ds_block(first_block, tile, number, blocks, OPTIONS: gl.constexpr):
    """The workspace block of the number-th query block; negative: dS is not stored. first_block:
    the workspace block of the consumer's keys and first query block."""
    if OPTIONS.has_ds:
        group_head, query_block = _head_and_block(number, blocks, OPTIONS.group)
        if OPTIONS.group > 1:
            first_block += first_ds_block(0, group_head, 0, tile.q_len, tile.kv_len, OPTIONS.block)
        return first_block + query_block * (OPTIONS.block // SIDE)
    else:
        return -1


@gluon.jit
def _dkdv_consume(consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    schedule, outputs, scales, queue = kernel.schedule, kernel.outputs, kernel.scales, kernel.queue
    shared = kernel.rings
    rings = _Rings(
        shared.q,
        shared.do,
        shared.k[consumer],
        shared.v[consumer],
        shared.lse,
        shared.delta,
        shared.tail,
    )
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    BLOCK: gl.constexpr = rings.q.buffers.shape[2]
    WIDTH: gl.constexpr = rings.q.buffers.shape[3]
    KV_HEADS: gl.constexpr = OPTIONS.heads // OPTIONS.group
    waves = num_waves(schedule)
    step, tail_phase = 0, 0
    for wave in range(waves):
        tile = pop_tile(queue, wave, HAS_DS=OPTIONS.has_ds)
        first_target = first_target_of(tile, OPTIONS.mask)
        visited = _visited_blocks(schedule, tile, OPTIONS)
        first = (tile.block * CONSUMERS + consumer) * WARPGROUP_ROWS
        num_keys = tile.kv_len - first
        first_block = None
        if OPTIONS.has_ds:
            stored_at = tile.ds_block.to(gl.int64)
            first_block = first_ds_block(
                gl.where(stored_at < 0, NOT_STORED, stored_at),
                tile.head * OPTIONS.group,
                tile.block * CONSUMERS + consumer,
                tile.q_len,
                tile.kv_len,
                BLOCK,
            )
        if num_keys > 0:
            consumer_wait(rings.k, wave)
            consumer_wait(rings.v, wave)
            dk = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, mma_layout(WARPGROUP_ROWS, WIDTH))
            dv = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, mma_layout(WARPGROUP_ROWS, WIDTH))
            keys = _Keys(
                opaque_rows(rings.k, wave), opaque_rows(rings.v, wave), first, kernel.ds_ptr
            )
            for number in range(visited.masked):
                _, q_len, group_head, block = _visited_rows(
                    schedule, tile, number, visited, OPTIONS
                )
                row = block * BLOCK
                bias = None
                if OPTIONS.bias is not None:
                    head = tile.head * OPTIONS.group + group_head
                    bias = bias_of_keys(
                        kernel.bias, tile, head, first, kernel.ranges[consumer], OPTIONS.bias
                    )
                if consumer_visits(
                    tile, block, query_blocks, consumer, CONSUMERS, OPTIONS.mask, BLOCK
                ):
                    ds_block = _ds_block(first_block, tile, number, visited.blocks, OPTIONS)
                    dk, dv, tail_phase = _dkdv_block(
                        keys,
                        rings,
                        step + number,
                        dk,
                        dv,
                        QueryBlock(row, row + tile.kv_len - q_len, q_len - row, first_target),
                        score_factor(scales.scale, OPTIONS.activation),
                        bias,
                        tail_phase,
                        ds_block,
                        consumer,
                        OPTIONS,
                        True,
                    )
                else:
                    tail_phase = _skip_rows(
                        rings, step + number, q_len - row, tail_phase, consumer, CONSUMERS
                    )
            keys = _Keys(
                opaque_rows(rings.k, wave), opaque_rows(rings.v, wave), first, kernel.ds_ptr
            )
            for number in range(visited.masked, visited.count):
                ds_block = _ds_block(first_block, tile, number, visited.blocks, OPTIONS)
                bias, row = None, 0
                if OPTIONS.bias is not None:
                    _, _, group_head, block = _visited_rows(
                        schedule, tile, number, visited, OPTIONS
                    )
                    head, row = tile.head * OPTIONS.group + group_head, block * BLOCK
                    bias = bias_of_keys(
                        kernel.bias, tile, head, first, kernel.ranges[consumer], OPTIONS.bias
                    )
                dk, dv, tail_phase = _dkdv_block(
                    keys,
                    rings,
                    step + number,
                    dk,
                    dv,
                    QueryBlock(row, 0, BLOCK, first_target),
                    score_factor(scales.scale, OPTIONS.activation),
                    bias,
                    tail_phase,
                    ds_block,
                    consumer,
                    OPTIONS,
                    False,
                )
            consumer_release(rings.k, wave)
            consumer_release(rings.v, wave)
            factor = output_factor(scales.output_scale, scales.segment_scale_ptr, tile.segment)
            row = tile.kv_start + first
            dv *= scales.act_factor * factor
            dv_output, dv_buffer = (
                Output(outputs.dv_desc, outputs.dv_ptr),
                outputs.buffers.index(consumer),
            )
            store_epilogue(
                dv, dv_output, dv_buffer, 1, row, tile.head, num_keys, KV_HEADS, OPTIONS.v_dim
            )
            dk *= scales.scale * scales.dact_factor * factor
            dk_output, dk_buffer = (
                Output(outputs.dk_desc, outputs.dk_ptr),
                outputs.buffers.index(CONSUMERS + consumer),
            )
            store_epilogue(
                dk, dk_output, dk_buffer, 1, row, tile.head, num_keys, KV_HEADS, OPTIONS.head_dim
            )
        else:
            for number in range(visited.count):
                _, q_len, _, block = _visited_rows(schedule, tile, number, visited, OPTIONS)
                tail_phase = _skip_rows(
                    rings, step + number, q_len - block * BLOCK, tail_phase, consumer, CONSUMERS
                )
            skip_stage(rings.k, wave)
            skip_stage(rings.v, wave)
        step += visited.count
        release_tile(queue, wave)
    tma.store_wait(0)


@safe_ptxas
@gluon.jit(
    do_not_specialize=["num_segments", "stride_lse"],
    do_not_specialize_on_alignment=["num_tiles_ptr"],
)
def attention_bwd_dkdv_hopper_kernel(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dk_desc,
    dv_desc,
    dk_ptr,
    dv_ptr,
    lse_ptr,
    delta_ptr,
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
    dact_factor,
    output_scale,
    stride_lse,
    ds_ptr,
    ds_blocks_ptr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    V_DIM: gl.constexpr,
    ACTIVATION: gl.constexpr,
    MASK: gl.constexpr,
    Q_SHARED: gl.constexpr,
    KV_SHARED: gl.constexpr,
    QUERY_GROUPS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    BIAS: gl.constexpr,
):
    """dk, dv of a tile of key rows. It loops over the query blocks of all query groups and of all
    heads of a key head. With a `ds_ptr`, it also stores dS there, of the segments that have a block
    in `ds_blocks_ptr`."""
    BLOCK: gl.constexpr = q_desc.block_type.shape[1]
    OPTIONS: gl.constexpr = _Options(
        HEADS,
        GROUP,
        HEAD_DIM,
        V_DIM,
        ACTIVATION,
        MASK,
        Q_SHARED,
        KV_SHARED,
        QUERY_GROUPS,
        ds_ptr is not None,
        BIAS,
        CONSUMERS,
        BLOCK,
    )
    schedule = Schedule(
        tiles_ptr, num_tiles_ptr, q_offsets_ptr, kv_offsets_ptr, num_segments, num_targets_ptr
    )
    q_ring, do_ring = make_ring(q_desc, STAGES, CONSUMERS), make_ring(do_desc, STAGES, CONSUMERS)
    k_rings, v_rings = (
        make_rings(k_desc, ROW_STAGES, CONSUMERS),
        make_rings(v_desc, ROW_STAGES, CONSUMERS),
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], PLAIN)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], PLAIN)
    # Each consumer arrives twice a block: for its share of q, and for its share of dO.
    rings = _Rings(q_ring, do_ring, k_rings, v_rings, lse, delta, make_barriers(1, 2 * CONSUMERS))
    stats = Stats(lse_ptr, delta_ptr, stride_lse)
    outputs = _Outputs(
        dk_desc, dv_desc, dk_ptr, dv_ptr, make_epilogue_buffers(k_desc, 2 * CONSUMERS)
    )
    scales = Scales(scale, act_factor, dact_factor, output_scale, segment_scale_ptr)
    queue = make_tile_queue(CONSUMERS)
    kernel = _Kernel(
        q_desc,
        do_desc,
        k_desc,
        v_desc,
        schedule,
        rings,
        stats,
        outputs,
        scales,
        bias,
        make_ranges(CONSUMERS, BIAS),
        ds_ptr,
        ds_blocks_ptr,
        queue,
    )
    launch_specialised(_dkdv_consume, _dkdv_produce, kernel, OPTIONS, REGISTERS)
