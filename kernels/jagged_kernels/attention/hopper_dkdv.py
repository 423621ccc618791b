"""dk and dv of jagged attention for Hopper: the second kernel of the backward, whose first and whose launcher are attention_backward.py's.

Tiles are of keys. Of the query blocks that see them, of all heads of a group and all lists of queries, scores and their gradients are
computed transposed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..common.gluon_api import thread_barrier
from ..common.loads import load_segment
from ..common.pipeline import (
    LOAD_REGISTERS,
    WARPGROUP_ROWS,
    await_cleared,
    await_full,
    clear_rows,
    fetch,
    make_barriers,
    make_ring,
    make_rings,
    make_stages,
    own_rows,
    pass_over,
    product_layout,
    put_rows,
    release,
)
from ..common.ptxas import safe_ptxas
from .hopper_common import (
    as_factor,
    end_tile,
    make_tile_ring,
    multiply_rows,
    num_waves,
    own_rows_visit,
    pass_tile,
    query_blocks,
    score_scale,
    segment_factor,
    take_tile,
    tile_of_wave,
    visited_block,
)
from .hopper_ds import SIDE, first_block, keep_blocks
from .mask import is_visible, num_partial_blocks, visible_columns

NO_PLACE = gl.constexpr(-(2**40))  # that no block of the segment has one either


@gluon.jit
def _head_and_block(number, blocks, GROUP: gl.constexpr):
    """Of the blocks that all query heads of a group visit, the number-th: its head in the group, and the block. Those that are not seen
    whole come first, of all heads."""
    if GROUP == 1:
        return 0, visited_block(number, blocks)
    else:
        partial = num_partial_blocks(blocks)
        whole = number >= GROUP * partial
        number = gl.where(whole, number - GROUP * partial, number)
        count = gl.maximum(gl.where(whole, blocks[8], partial), 1)
        return number // count, visited_block(gl.where(whole, partial, 0) + number % count, blocks)


@gluon.jit
def _tile_of_list(schedule, tile, query_list):
    """The tile of keys with the segment of queries that reads them in a list."""
    _, _, q_offsets_ptr, _, num_segments, _ = schedule
    segment, kv_head, block, _, _, kv_start, kv_len, first_target = tile
    q_start, q_len = load_segment(q_offsets_ptr, segment + query_list * num_segments)
    return segment, kv_head, block, q_start, q_len, kv_start, kv_len, first_target


@gluon.jit
def _blocks_of_lists(schedule, tile, GROUP: gl.constexpr, LISTS: gl.constexpr, MASK: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """Of the blocks of query rows that visit a tile of ROWS keys: the first list's, as masks.py has them; how many of all lists and heads
    are not seen whole; and how many there are."""
    blocks, visited = query_blocks(tile, MASK, ROWS, BLOCK)
    visited *= GROUP
    partial = GROUP * num_partial_blocks(blocks)
    for query_list in gl.static_range(1, LISTS):
        others, count = query_blocks(_tile_of_list(schedule, tile, query_list), MASK, ROWS, BLOCK)
        visited += GROUP * count
        partial += GROUP * num_partial_blocks(others)
    return blocks, partial, visited


@gluon.jit
def _visited_rows(
    schedule, tile, number, blocks, partial, GROUP: gl.constexpr, LISTS: gl.constexpr, MASK: gl.constexpr, ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """The number-th of these blocks, of which those not seen whole come first, of all lists: first row and number of rows of its segment,
    its head in the group, and the block."""
    q_start, q_len = tile[3], tile[4]
    if LISTS > 1:
        whole = number >= partial
        number = gl.where(whole, number - partial, number)
        for query_list in gl.static_range(1, LISTS):
            other = _tile_of_list(schedule, tile, query_list)
            others, _ = query_blocks(other, MASK, ROWS, BLOCK)
            count = GROUP * gl.where(whole, blocks[8], num_partial_blocks(blocks))
            if number >= count:
                number -= count
                q_start, q_len, blocks = other[3], other[4], others
        number += gl.where(whole, GROUP * num_partial_blocks(blocks), 0)
    group_head, block = _head_and_block(number, blocks, GROUP)
    return q_start, q_len, group_head, block


@gluon.jit
def _dkdv_load(
    q_desc, do_desc, k_desc, v_desc, shared, GROUP: gl.constexpr, ACTIVATION: gl.constexpr, MASK: gl.constexpr, Q_SHARED: gl.constexpr,
    KV_SHARED: gl.constexpr, LISTS: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ROW_STAGES: gl.constexpr,
):  # fmt: skip
    """The first query blocks are asked for before the keys, whose buffers are in use until the tile before ends."""
    schedule, rings, stats, places_ptr = shared[0], shared[1], shared[2], shared[5][1]
    q_ring, do_ring, k_rings, v_rings, lse_slots, delta_slots, _cleared = rings
    lse_ptr, delta_ptr, stride_lse = stats
    ROWS: gl.constexpr = CONSUMERS * WARPGROUP_ROWS
    BLOCK: gl.constexpr = q_desc.block_type.shape[1]
    lanes = gl.arange(0, BLOCK, layout=gl.BlockedLayout([BLOCK // 32], [32], [1], [0]))
    waves = num_waves(schedule)
    next_tile = tile_of_wave(schedule, 0, waves, MASK, places_ptr)
    turn = 0  # of the rings of queries and dO
    for wave in range(waves):
        tile = next_tile
        next_tile = tile_of_wave(schedule, wave + 1, waves, MASK, places_ptr)
        pass_tile(shared[-1], wave, tile)
        _, kv_head, key_block, _, _, kv_start, _, _ = tile
        blocks, partial, visited = _blocks_of_lists(schedule, tile, GROUP, LISTS, MASK, ROWS, BLOCK)
        key_row = kv_start + key_block * ROWS
        if KV_SHARED:
            key_row -= kv_start
        for number in range(visited + 1):
            if number == gl.minimum(visited, STAGES):
                for consumer in gl.static_range(CONSUMERS):
                    fetch(k_rings[consumer], k_desc, wave, kv_head, key_row + consumer * WARPGROUP_ROWS, ROW_STAGES)
                    fetch(v_rings[consumer], v_desc, wave, kv_head, key_row + consumer * WARPGROUP_ROWS, ROW_STAGES)
            if number < visited:
                q_start, q_len, group_head, block = _visited_rows(
                    schedule, tile, number, blocks, partial, GROUP, LISTS, MASK, ROWS, BLOCK
                )  # fmt: skip
                head = kv_head * GROUP + group_head
                first = block * BLOCK
                if ACTIVATION is None:  # rows past the segment: exp2(score - inf) = 0, so they add nothing
                    places = head.to(gl.int64) * stride_lse + q_start + first + lanes
                    lse = gl.load(lse_ptr + places, mask=lanes < q_len - first, other=float("inf"))
                    delta = gl.load(delta_ptr + places, mask=lanes < q_len - first, other=0.0)
                    slot = (turn + number) % STAGES
                    mbarrier.wait(q_ring[2].index(slot), (turn + number) // STAGES & 1 ^ 1)
                    lse_slots.index(slot).store(lse)
                    delta_slots.index(slot).store(delta)
                    thread_barrier()
                row = q_start + first
                q_row = row
                if Q_SHARED:
                    q_row = row - q_start
                fetch(q_ring, q_desc, turn + number, head, q_row, STAGES)
                fetch(do_ring, do_desc, turn + number, head, row, STAGES)
        turn += visited


@gluon.jit
def _visible_rows(key, row, first_target, MASK: gl.constexpr, COLUMNS: gl.constexpr):
    """Which of a block's query rows, from `row` on, see the warpgroup's keys: transposed as the scores are."""
    L: gl.constexpr = product_layout(WARPGROUP_ROWS, COLUMNS)
    keys = key + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))[:, None]
    rows = row + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :]
    return is_visible(keys, rows, visible_columns(rows, first_target, MASK), MASK)


@gluon.jit
def _clear_block(
    q_ring, do_ring, turn, num_rows, cleared, clears, consumer: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Queries and dO past their segment become 0, by all warpgroups together."""
    clear_rows(await_full(q_ring, turn, STAGES), num_rows, cleared, consumer, CONSUMERS)
    clear_rows(await_full(do_ring, turn, STAGES), num_rows, cleared, consumer, CONSUMERS)
    await_cleared(cleared, clears)


@gluon.jit
def _pass_over_rows(
    q_ring, do_ring, turn, num_rows, cleared, clears, consumer: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """A block that does not see this warpgroup's keys; returns as _dkdv_block how often rows were cleared."""
    cut = num_rows < q_ring[0].shape[2]
    if cut:
        _clear_block(q_ring, do_ring, turn, num_rows, cleared, clears, consumer, CONSUMERS, STAGES)
    pass_over(q_ring, turn, STAGES)
    pass_over(do_ring, turn, STAGES)
    return clears + cut.to(gl.int32)


@gluon.jit
def _dkdv_block(
    k, v, q_ring, do_ring, lse_slots, delta_slots, turn, dk, dv, key, row, num_rows, first_target, scale, cleared, clears, ds_ptr, keep,
    consumer: gl.constexpr, CONSUMERS: gl.constexpr, ACTIVATION: gl.constexpr, MASK: gl.constexpr, PARTIAL: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One query block, transposed: dv += Pᵀ do, dk += dSᵀ q. Rows past the segment, being 0, add nothing to either. Also returns how
    often such were cleared. Keeps dS at the place `keep`, with a `ds_ptr`."""
    q = await_full(q_ring, turn, STAGES)
    if PARTIAL:
        cut = num_rows < q.shape[0]
        if cut:
            _clear_block(q_ring, do_ring, turn, num_rows, cleared, clears, consumer, CONSUMERS, STAGES)
        clears += cut.to(gl.int32)
    BLOCK: gl.constexpr = q.shape[0]
    WIDTH: gl.constexpr = q.shape[1]
    STATS: gl.constexpr = gl.SliceLayout(0, product_layout(WARPGROUP_ROWS, BLOCK))
    scores = multiply_rows(k, q)
    do = await_full(do_ring, turn, STAGES)
    dp = multiply_rows(v, do)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    if ACTIVATION is None:
        p = gl.exp2(scores * scale - lse_slots.index(turn % STAGES).load(STATS)[None, :])
        slope = p
    else:
        p, slope = ACTIVATION(scores, scale)
    if PARTIAL and MASK is not None:
        visible = _visible_rows(key, row, first_target, MASK, BLOCK)
        p, slope = gl.where(visible, p, 0.0), gl.where(visible, slope, 0.0)
    p = as_factor(p, do.dtype, WIDTH)
    dv = warpgroup_mma(p, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    if ACTIVATION is None:
        dp = dp - delta_slots.index(turn % STAGES).load(STATS)[None, :]
    ds = as_factor(slope * dp, q.dtype, WIDTH)
    if ds_ptr is not None:
        keep_blocks(ds, ds_ptr, keep)
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    dv, dk, p, ds = warpgroup_mma_wait(0, deps=(dv, dk, p, ds))
    release(q_ring, turn, STAGES)
    release(do_ring, turn, STAGES)
    return dk, dv, clears


@gluon.jit
def _place_to_keep(kept, tile, number, blocks, GROUP: gl.constexpr, QUERY_BLOCK: gl.constexpr):
    """The place in the workspace of dS of the number-th block; negative where it is not kept. `kept`: the place of the first."""
    if kept is None:
        return -1
    else:
        group_head, query_block = _head_and_block(number, blocks, GROUP)
        if GROUP > 1:
            kept += first_block(0, group_head, 0, tile[4], tile[6], QUERY_BLOCK)
        return kept + query_block * (QUERY_BLOCK // SIDE)


@gluon.jit
def _dkdv_compute(
    consumer: gl.constexpr, shared, HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr,
    ACTIVATION: gl.constexpr, MASK: gl.constexpr, LISTS: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr,
):  # fmt: skip
    schedule, rings, results, scales = shared[0], shared[1], shared[3], shared[4]
    ds_ptr = shared[5][0]
    q_ring, do_ring, k_rings, v_rings, lse_slots, delta_slots, cleared = rings
    k_ring, v_ring = k_rings[consumer], v_rings[consumer]
    dk_desc, dv_desc, dk_ptr, dv_ptr, stages = results
    scale, value_factor, slope_factor, output_scale, segment_scale_ptr = scales
    ROWS: gl.constexpr = CONSUMERS * WARPGROUP_ROWS
    BLOCK: gl.constexpr = q_ring[0].shape[2]
    WIDTH: gl.constexpr = q_ring[0].shape[3]
    waves = num_waves(schedule)
    turn, clears = 0, 0
    for wave in range(waves):
        tile = take_tile(shared[-1], wave)
        segment, kv_head, key_block, _, _, kv_start, kv_len, first_target = tile
        blocks, partial, visited = _blocks_of_lists(schedule, tile, GROUP, LISTS, MASK, ROWS, BLOCK)
        first = (key_block * CONSUMERS + consumer) * WARPGROUP_ROWS
        num_keys = kv_len - first
        kept = None
        if ds_ptr is not None:
            place = tile[7].to(gl.int64)
            kept = first_block(
                gl.where(place < 0, NO_PLACE, place), kv_head * GROUP, key_block * CONSUMERS + consumer, tile[4], kv_len, BLOCK
            )  # fmt: skip
        if num_keys > 0:
            await_full(k_ring, wave, ROW_STAGES)
            await_full(v_ring, wave, ROW_STAGES)
            dk = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, product_layout(WARPGROUP_ROWS, WIDTH))
            dv = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, product_layout(WARPGROUP_ROWS, WIDTH))
            k, v = own_rows(k_ring, wave, ROW_STAGES), own_rows(v_ring, wave, ROW_STAGES)
            for number in range(partial):
                _, q_len, _, block = _visited_rows(schedule, tile, number, blocks, partial, GROUP, LISTS, MASK, ROWS, BLOCK)
                row = block * BLOCK
                if own_rows_visit(tile, block, query_blocks, consumer, CONSUMERS, MASK, BLOCK):
                    keep = _place_to_keep(kept, tile, number, blocks, GROUP, BLOCK)
                    dk, dv, clears = _dkdv_block(
                        k, v, q_ring, do_ring, lse_slots, delta_slots, turn + number, dk, dv, first, row + kv_len - q_len, q_len - row,
                        first_target, score_scale(scale, ACTIVATION), cleared, clears, ds_ptr, keep,
                        consumer, CONSUMERS, ACTIVATION, MASK, True, STAGES,
                    )  # fmt: skip
                else:
                    clears = _pass_over_rows(
                        q_ring, do_ring, turn + number, q_len - row, cleared, clears, consumer, CONSUMERS, STAGES
                    )  # fmt: skip
            k, v = own_rows(k_ring, wave, ROW_STAGES), own_rows(v_ring, wave, ROW_STAGES)
            for number in range(partial, visited):
                keep = _place_to_keep(kept, tile, number, blocks, GROUP, BLOCK)
                dk, dv, clears = _dkdv_block(
                    k, v, q_ring, do_ring, lse_slots, delta_slots, turn + number, dk, dv, first, 0, BLOCK,
                    first_target, score_scale(scale, ACTIVATION), cleared, clears, ds_ptr, keep,
                    consumer, CONSUMERS, ACTIVATION, MASK, False, STAGES,
                )  # fmt: skip
            release(k_ring, wave, ROW_STAGES)
            release(v_ring, wave, ROW_STAGES)
            factor = segment_factor(1.0, output_scale, segment_scale_ptr, segment)
            row = kv_start + first
            dv *= value_factor * factor
            put_rows(dv, stages.index(consumer), 1, dv_desc, dv_ptr, row, kv_head, num_keys, HEADS // GROUP, V_DIM)
            dk *= scale * slope_factor * factor
            put_rows(dk, stages.index(CONSUMERS + consumer), 1, dk_desc, dk_ptr, row, kv_head, num_keys, HEADS // GROUP, HEAD_DIM)
        else:
            for number in range(visited):
                _, q_len, _, block = _visited_rows(schedule, tile, number, blocks, partial, GROUP, LISTS, MASK, ROWS, BLOCK)
                clears = _pass_over_rows(
                    q_ring, do_ring, turn + number, q_len - block * BLOCK, cleared, clears, consumer, CONSUMERS, STAGES
                )  # fmt: skip
            pass_over(k_ring, wave, ROW_STAGES)
            pass_over(v_ring, wave, ROW_STAGES)
        turn += visited
        end_tile(shared[-1], wave)
    tma.store_wait(0)


@safe_ptxas
@gluon.jit(do_not_specialize=["num_segments", "stride_lse"])
def attention_bwd_dkdv_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, lse_ptr, delta_ptr,
    q_offsets_ptr, kv_offsets_ptr, num_segments, tiles_ptr, num_tiles_ptr, num_targets_ptr, segment_scale_ptr,
    scale, value_factor, slope_factor, output_scale, stride_lse, ds_ptr, places_ptr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr, ACTIVATION: gl.constexpr, MASK: gl.constexpr,
    Q_SHARED: gl.constexpr, KV_SHARED: gl.constexpr, LISTS: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk, dv of a tile of key rows; loops over the blocks of LISTS lists of queries, of all heads of its group. With a `ds_ptr` keeps the
    scores' gradients there, of the segments that have a place in `places_ptr`, as attention_score_gradients.py has them."""
    schedule = tiles_ptr, num_tiles_ptr, q_offsets_ptr, kv_offsets_ptr, num_segments, num_targets_ptr
    rings = make_ring(q_desc, STAGES, CONSUMERS), make_ring(do_desc, STAGES, CONSUMERS)
    key_rings = make_rings(k_desc, ROW_STAGES, CONSUMERS), make_rings(v_desc, ROW_STAGES, CONSUMERS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_slots = gl.allocate_shared_memory(gl.float32, [STAGES, q_desc.block_type.shape[1]], PLAIN)
    delta_slots = gl.allocate_shared_memory(gl.float32, [STAGES, q_desc.block_type.shape[1]], PLAIN)
    # Each warpgroup arrives twice a block: for its queries, and for their dO.
    rings = rings[0], rings[1], key_rings[0], key_rings[1], lse_slots, delta_slots, make_barriers(1, 2 * CONSUMERS)
    stats = lse_ptr, delta_ptr, stride_lse
    results = dk_desc, dv_desc, dk_ptr, dv_ptr, make_stages(k_desc, 2 * CONSUMERS)
    scales = scale, value_factor, slope_factor, output_scale, segment_scale_ptr
    shared = schedule, rings, stats, results, scales, (ds_ptr, places_ptr), make_tile_ring(CONSUMERS)
    gl.warp_specialize([
        (_dkdv_compute, (0, shared, HEADS, GROUP, HEAD_DIM, V_DIM, ACTIVATION, MASK, LISTS, CONSUMERS, STAGES, ROW_STAGES)),
        (_dkdv_compute, (1, shared, HEADS, GROUP, HEAD_DIM, V_DIM, ACTIVATION, MASK, LISTS, CONSUMERS, STAGES, ROW_STAGES)),
        (_dkdv_load, (
            q_desc, do_desc, k_desc, v_desc, shared, GROUP, ACTIVATION, MASK, Q_SHARED, KV_SHARED, LISTS, CONSUMERS, STAGES, ROW_STAGES,
        )),
    ], [4, 1], [REGISTERS, LOAD_REGISTERS])  # fmt: skip
