"""Backward of jagged attention for Hopper: the warp-specialised kernel for dq, built as the forward is, and the launcher of both; that for
dk, dv is attention_dkdv.py's.

Both compute the scores again, so that each output tile has one owner; where there is room for what the second makes of them, it comes first
and a third takes the place of the first, attention_score_gradients.py. A warpgroup holds 64 rows of a tile: of queries for dq, of keys for
dk, dv, where scores and their gradients are transposed: either way they are the first factors of what they are multiplied with, in the
registers where they arise. What one warpgroup computes between its products overlaps with the other's products.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ..common.activations import activation_factors
from ..common.device import has_descriptor
from ..common.pipeline import (
    LOAD_REGISTERS,
    WARPGROUP_ROWS,
    await_cleared,
    await_full,
    clear_rows,
    fetch,
    hold_until_full,
    make_barriers,
    make_ring,
    make_rings,
    make_stages,
    own_rows,
    pass_over,
    pass_over_keys,
    product_layout,
    put_rows,
    release,
    vector_layout,
)
from ..common.ptxas import safe_ptxas
from ..schedule.device import kernel_tiles
from ..schedule.host import Segments, TileList
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
from .hopper_dkdv import attention_bwd_dkdv_hopper_kernel
from .hopper_ds import (
    attention_bwd_dq_of_kept_hopper_kernel,
    find_places,
    kept_constants,
    plan_workspace,
    write_delta,
)
from .mask import num_partial_blocks
from .params import AttentionParams, Gradients, Operands
from .select import Selection

# -- dq -----------------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _dq_load(
    q_desc, do_desc, k_desc, v_desc, shared, GROUP: gl.constexpr, MASK: gl.constexpr, Q_SHARED: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ROW_STAGES: gl.constexpr,
):  # fmt: skip
    schedule, rings, places_ptr = shared[0], shared[1], shared[4]
    q_rings, do_rings, k_ring, v_ring, _cleared = rings
    ROWS: gl.constexpr = CONSUMERS * WARPGROUP_ROWS
    BLOCK: gl.constexpr = k_desc.block_type.shape[1]
    waves = num_waves(schedule)
    next_tile = tile_of_wave(schedule, 0, waves, MASK, places_ptr)
    turn = 0  # of the rings of keys and values
    for wave in range(waves):
        tile = next_tile
        next_tile = tile_of_wave(schedule, wave + 1, waves, MASK, places_ptr)
        pass_tile(shared[-1], wave, tile)
        _, head, block, q_start, _, kv_start, _, place = tile
        blocks, visited = key_blocks(tile, MASK, ROWS, BLOCK)
        if places_ptr is not None:
            visited = gl.where(place < 0, visited, 0)
        for consumer in gl.static_range(CONSUMERS):
            row = q_start + block * ROWS + consumer * WARPGROUP_ROWS
            q_row = row
            if Q_SHARED:
                q_row = row - q_start
            fetch(q_rings[consumer], q_desc, wave, head, q_row, ROW_STAGES)
            fetch(do_rings[consumer], do_desc, wave, head, row, ROW_STAGES)
        for number in range(visited):
            key_row = kv_start + visited_block(number, blocks) * BLOCK
            fetch(k_ring, k_desc, turn + number, head // GROUP, key_row, STAGES)
            fetch(v_ring, v_desc, turn + number, head // GROUP, key_row, STAGES)
        turn += visited


@gluon.jit
def _row_sums(out_ptr, do_ring, wave, row, head, num_rows, HEADS: gl.constexpr, DIM: gl.constexpr, ROW_STAGES: gl.constexpr):
    """rowsum(dO ∘ O) of a warpgroup's rows: dO from its ring, O from global memory."""
    WIDTH: gl.constexpr = do_ring[0].shape[3]
    L: gl.constexpr = vector_layout(WIDTH)
    rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    ptrs = out_ptr + row * (HEADS * DIM) + head * DIM + rows[:, None] * (HEADS * DIM) + columns[None, :]
    out = gl.load(ptrs, mask=(rows < num_rows)[:, None] & (columns < DIM)[None, :], other=0.0)
    do = await_full(do_ring, wave, ROW_STAGES).load(L)
    return gl.sum(out.to(gl.float32) * do.to(gl.float32), 1)


@gluon.jit
def _dq_block(
    q, do, k_ring, v_ring, turn, more, acc, lse, delta, row, column, num_keys, first_target, scale, cleared, clears,
    consumer: gl.constexpr, CONSUMERS: gl.constexpr, ACTIVATION: gl.constexpr, MASK: gl.constexpr, PARTIAL: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One key block: dS from the scores computed again, acc += dS k."""
    k = await_full(k_ring, turn, STAGES)
    HOLD: gl.constexpr = ACTIVATION is None and k.shape[1] == 64  # elsewhere it costs more than it gains
    if PARTIAL:
        cut = num_keys < k.shape[0]
        if cut:
            clear_rows(k, num_keys, cleared, consumer, CONSUMERS)
    scores = multiply_rows(q, k)
    dp = multiply_rows(do, await_full(v_ring, turn, STAGES))
    scores = warpgroup_mma_wait(1, deps=(scores,))
    if ACTIVATION is None:
        slope = gl.exp2(scores * scale - lse[:, None])
        if HOLD:
            hold_until_full(k_ring, turn + 1, more, STAGES)
        dp = warpgroup_mma_wait(0, deps=(dp,)) - delta[:, None]
    else:
        _, slope = ACTIVATION(scores, scale)
        dp = warpgroup_mma_wait(0, deps=(dp,))
    release(v_ring, turn, STAGES)
    ds = slope * dp
    if PARTIAL:
        ds = gl.where(visible_keys(row, column, num_keys, first_target, MASK, k.shape[0]), ds, 0.0)
        if cut:
            await_cleared(cleared, clears)
    ds = as_factor(ds, k.dtype, k.shape[1])
    acc = warpgroup_mma(ds, k, acc, is_async=True)
    acc, ds = warpgroup_mma_wait(0, deps=(acc, ds))
    release(k_ring, turn, STAGES)
    return acc


@gluon.jit
def _dq_compute(
    consumer: gl.constexpr, shared, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr, ACTIVATION: gl.constexpr,
    MASK: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ROW_STAGES: gl.constexpr,
):  # fmt: skip
    schedule, rings, operands, scales, places_ptr = shared[0], shared[1], shared[2], shared[3], shared[4]
    q_rings, do_rings, k_ring, v_ring, cleared = rings
    q_ring, do_ring = q_rings[consumer], do_rings[consumer]
    out_ptr, dq_desc, dq_ptr, lse_ptr, delta_ptr, stride_lse, stages = operands
    scale, slope_factor, output_scale, segment_scale_ptr = scales
    BLOCK: gl.constexpr = k_ring[0].shape[2]
    WIDTH: gl.constexpr = k_ring[0].shape[3]
    STATS: gl.constexpr = gl.SliceLayout(1, product_layout(WARPGROUP_ROWS, BLOCK))
    lanes = gl.arange(0, WARPGROUP_ROWS, layout=STATS)
    waves = num_waves(schedule)
    turn, clears = 0, 0
    for wave in range(waves):
        tile = take_tile(shared[-1], wave)
        segment, head, block, q_start, q_len, _, kv_len, first_target = tile
        blocks, visited = key_blocks(tile, MASK, CONSUMERS * WARPGROUP_ROWS, BLOCK)
        partial = num_partial_blocks(blocks)
        first = (block * CONSUMERS + consumer) * WARPGROUP_ROWS
        num_rows = q_len - first
        if places_ptr is not None:
            other = tile[7] < 0
            partial, visited, num_rows = gl.where(other, partial, 0), gl.where(other, visited, 0), gl.where(other, num_rows, 0)
        num_keys = gl.where(partial > 0, kv_len - visited_block(0, blocks) * BLOCK, BLOCK)  # in the first block, the only one cut
        if num_rows > 0:
            lse, delta = lanes, lanes
            if ACTIVATION is None:
                places = head.to(gl.int64) * stride_lse + q_start + first + lanes
                lse = gl.load(lse_ptr + places, mask=lanes < num_rows, other=0.0)
                delta = _row_sums(out_ptr, do_ring, wave, q_start + first, head, num_rows, HEADS, V_DIM, ROW_STAGES)
                delta = gl.convert_layout(delta, STATS)
                gl.store(delta_ptr + places, delta, mask=lanes < num_rows)
            await_full(q_ring, wave, ROW_STAGES)
            await_full(do_ring, wave, ROW_STAGES)
            acc = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, product_layout(WARPGROUP_ROWS, WIDTH))
            row = first + kv_len - q_len
            q, do = own_rows(q_ring, wave, ROW_STAGES), own_rows(do_ring, wave, ROW_STAGES)
            for number in range(partial):
                key_block = visited_block(number, blocks)
                column = key_block * BLOCK
                if own_rows_visit(tile, key_block, key_blocks, consumer, CONSUMERS, MASK, BLOCK):
                    acc = _dq_block(
                        q, do, k_ring, v_ring, turn + number, number + 1 < visited, acc, lse, delta, row, column, kv_len - column,
                        first_target, score_scale(scale, ACTIVATION), cleared, clears, consumer, CONSUMERS, ACTIVATION, MASK, True, STAGES,
                    )  # fmt: skip
                else:
                    pass_over_keys(
                        k_ring, v_ring, turn + number, kv_len - column, cleared, clears, consumer, CONSUMERS, STAGES
                    )  # fmt: skip
            q, do = own_rows(q_ring, wave, ROW_STAGES), own_rows(do_ring, wave, ROW_STAGES)
            for number in range(partial, visited):
                acc = _dq_block(
                    q, do, k_ring, v_ring, turn + number, number + 1 < visited, acc, lse, delta, row, 0, BLOCK, first_target,
                    score_scale(scale, ACTIVATION), cleared, clears, consumer, CONSUMERS, ACTIVATION, MASK, False, STAGES,
                )  # fmt: skip
            release(q_ring, wave, ROW_STAGES)
            release(do_ring, wave, ROW_STAGES)
            acc = acc * segment_factor(scale * slope_factor, output_scale, segment_scale_ptr, segment)
            put_rows(acc, stages.index(consumer), 0, dq_desc, dq_ptr, q_start + first, head, num_rows, HEADS, HEAD_DIM)
        else:
            pass_over(q_ring, wave, ROW_STAGES)
            pass_over(do_ring, wave, ROW_STAGES)
            for number in range(visited):
                left = gl.where(number == 0, num_keys, BLOCK)
                pass_over_keys(k_ring, v_ring, turn + number, left, cleared, clears, consumer, CONSUMERS, STAGES)
        turn += visited
        clears += (num_keys < BLOCK).to(gl.int32)
        end_tile(shared[-1], wave)
    tma.store_wait(0)


@safe_ptxas
@gluon.jit(do_not_specialize=["num_segments", "stride_lse"])
def attention_bwd_dq_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, dq_desc, out_ptr, dq_ptr, lse_ptr, delta_ptr,
    q_offsets_ptr, kv_offsets_ptr, num_segments, tiles_ptr, num_tiles_ptr, num_targets_ptr, segment_scale_ptr,
    scale, slope_factor, output_scale, stride_lse, places_ptr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr, ACTIVATION: gl.constexpr, MASK: gl.constexpr,
    Q_SHARED: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ROW_STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dq of a tile of query rows; with softmax also writes delta = rowsum(dO ∘ O), which the dk, dv kernel reads. With a `places_ptr` of
    the segments alone that have no place there."""
    schedule = tiles_ptr, num_tiles_ptr, q_offsets_ptr, kv_offsets_ptr, num_segments, num_targets_ptr
    row_rings = make_rings(q_desc, ROW_STAGES, CONSUMERS), make_rings(do_desc, ROW_STAGES, CONSUMERS)
    key_rings = make_ring(k_desc, STAGES, CONSUMERS), make_ring(v_desc, STAGES, CONSUMERS)
    rings = row_rings[0], row_rings[1], key_rings[0], key_rings[1], make_barriers(1, CONSUMERS)
    operands = out_ptr, dq_desc, dq_ptr, lse_ptr, delta_ptr, stride_lse, make_stages(q_desc, CONSUMERS)
    scales = scale, slope_factor, output_scale, segment_scale_ptr
    shared = schedule, rings, operands, scales, places_ptr, make_tile_ring(CONSUMERS)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_dq_compute, (0, shared, HEADS, HEAD_DIM, V_DIM, ACTIVATION, MASK, CONSUMERS, STAGES, ROW_STAGES)),
            (_dq_compute, (1, shared, HEADS, HEAD_DIM, V_DIM, ACTIVATION, MASK, CONSUMERS, STAGES, ROW_STAGES)),
            (_dq_load, (q_desc, do_desc, k_desc, v_desc, shared, GROUP, MASK, Q_SHARED, CONSUMERS, STAGES, ROW_STAGES)),
        ], [4, 1], [REGISTERS, LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_dq_compute, (0, shared, HEADS, HEAD_DIM, V_DIM, ACTIVATION, MASK, CONSUMERS, STAGES, ROW_STAGES)),
            (_dq_compute, (1, shared, HEADS, HEAD_DIM, V_DIM, ACTIVATION, MASK, CONSUMERS, STAGES, ROW_STAGES)),
            (_dq_compute, (2, shared, HEADS, HEAD_DIM, V_DIM, ACTIVATION, MASK, CONSUMERS, STAGES, ROW_STAGES)),
            (_dq_load, (q_desc, do_desc, k_desc, v_desc, shared, GROUP, MASK, Q_SHARED, CONSUMERS, STAGES, ROW_STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, LOAD_REGISTERS])  # fmt: skip


# -- launcher -----------------------------------------------------------------------------------------------------------------------


class _Launches:
    """The kernels of one backward, with what all of their launches share."""

    def __init__(self, operands: Operands, grads: Gradients, params: AttentionParams, kv_shared: bool, selection: Selection) -> None:
        q, k, v, out, _ = operands
        do = grads.do if has_descriptor(grads.do) else grads.do.contiguous()
        self.grads = grads._replace(do=do)
        self.operands = operands._replace(out=do if out is None else out.contiguous())
        self.params, self.kv_shared, self.selection = params, kv_shared, selection
        self.value_factor, self.slope_factor = activation_factors(params.activation, q.dtype == torch.bfloat16, params.scale)
        self.q_desc, self.do_desc, self.k_desc, self.v_desc = (descriptor(x, 64) for x in (q, do, k, v))
        self.dq_desc, self.dk_desc, self.dv_desc = (result_descriptor(x) for x in (grads.dq, grads.dk, grads.dv))

    def query_tiles(self, segments: Segments) -> TileList:
        dq, config = self.grads.dq, self.selection.dq
        return TileList(*kernel_tiles(segments, config, dq.shape[0], dq.shape[1], self.params), config.tile)

    def dq(self, segments: Segments, segment_scale: Tensor | None, places: Tensor | None = None) -> None:
        """dq; given workspace offsets, of the segments that have none. Tiles are query_tiles."""
        tiles, num_tiles, _ = segments.tiles
        params, lse, delta = self.params, self.operands.lse, self.grads.delta
        if blocks := grid(tiles):
            attention_bwd_dq_hopper_kernel[blocks](
                self.q_desc, self.do_desc, self.k_desc, self.v_desc, self.dq_desc, self.operands.out, self.grads.dq, lse, delta,
                segments.q_offsets, segments.kv_offsets, segments.segments_per_group, tiles, num_tiles, params.num_targets, segment_scale,
                params.scale, self.slope_factor, params.output_scale, lse.stride(0), places,
                HEAD_DIM=self.operands.q.shape[2], **launch_constants(self.selection.dq, self.operands, params),
            )  # fmt: skip

    def dkdv(self, segments: Segments, segment_scale: Tensor | None, ds: Tensor | None = None, places: Tensor | None = None) -> None:
        """dk and dv; given a workspace, also dS of the segments that have an offset there."""
        q, lse, delta = self.operands.q, self.operands.lse, self.grads.delta
        dk, dv = self.grads.dk, self.grads.dv
        params, config = self.params, self.selection.dkdv
        q_desc, do_desc = self.q_desc, self.do_desc
        if config.block != 64:
            q_desc, do_desc = descriptor(q, config.block), descriptor(self.grads.do, config.block)
        tiles, num_tiles = kernel_tiles(segments, config, dk.shape[0], dk.shape[1], params, key_tiles=True)
        if blocks := grid(tiles):
            attention_bwd_dkdv_hopper_kernel[blocks](
                q_desc, do_desc, self.k_desc, self.v_desc, self.dk_desc, self.dv_desc, dk, dv, lse, delta,
                segments.q_offsets, segments.kv_offsets, segments.segments_per_group, tiles, num_tiles, params.num_targets, segment_scale,
                params.scale, self.value_factor, self.slope_factor, params.output_scale, lse.stride(0), ds, places,
                HEAD_DIM=q.shape[2], KV_SHARED=self.kv_shared, LISTS=segments.query_groups,
                **launch_constants(config, self.operands, params),
            )  # fmt: skip

    def dq_from_ds(self, segments: Segments, segment_scale: Tensor | None, ds: Tensor, places: Tensor) -> None:
        """dq of the segments that have an offset in the workspace. Tiles are query_tiles."""
        tiles, num_tiles, _ = segments.tiles
        if blocks := grid(tiles):
            attention_bwd_dq_of_kept_hopper_kernel[blocks](
                descriptor(ds, 64), self.k_desc, self.dq_desc, self.grads.dq, places, segments.q_offsets, segments.kv_offsets,
                tiles, num_tiles, segment_scale, self.params.scale, self.slope_factor, self.params.output_scale,
                QUERY_BLOCK=self.selection.dkdv.block, **kept_constants(self.selection.dq_from_ds, self.operands),
            )  # fmt: skip


def backward(
    operands: Operands, grads: Gradients, queries: Segments, keys: Segments, params: AttentionParams, kv_shared: bool,
    selection: Selection, workspace: int | None,
) -> None:  # fmt: skip
    """Launch the kernels for dq and for dk, dv; or where the workspace, at most so many bytes, has room for dS, those that store it there
    and read it."""
    launches = _Launches(operands, grads, params, kv_shared, selection)
    num_blocks, parts = 0, []
    if params.mask is None and queries.query_groups == 1 and not (params.q_shared or kv_shared):
        num_blocks, parts = plan_workspace(
            operands.q, operands.k, queries.q_offsets, queries.kv_offsets, workspace, grads.dq, grads.dk, grads.dv
        )  # fmt: skip
    if not num_blocks:
        launches.dq(queries._replace(tiles=launches.query_tiles(queries)), params.segment_scale)
        launches.dkdv(keys, params.segment_scale)
        return
    if params.activation == "softmax":
        write_delta(launches.grads.do, launches.operands.out, grads.delta)
    ds = operands.q.new_empty((num_blocks * 64, 1, 64))
    for start, end in parts:
        segment_scale = None if params.segment_scale is None else params.segment_scale[start:end]
        if len(parts) > 1:
            offsets = (x[start : end + 1] for x in (queries.q_offsets, queries.kv_offsets))
            queries_of_part = keys_of_part = Segments(*offsets, TileList(None, None, None))
        else:
            queries_of_part, keys_of_part = queries, keys
        queries_of_part = queries_of_part._replace(tiles=launches.query_tiles(queries_of_part))
        places, num_other_tiles = find_places(
            queries_of_part.q_offsets, queries_of_part.kv_offsets, queries_of_part.tiles.num_tiles, num_blocks, operands.q.shape[1],
            selection.dkdv.block,
        )  # fmt: skip
        launches.dkdv(keys_of_part, segment_scale, ds, places)
        launches.dq_from_ds(queries_of_part, segment_scale, ds, places)
        launches.dq(queries_of_part._replace(tiles=queries_of_part.tiles._replace(num_tiles=num_other_tiles)), segment_scale, places)
