"""Backward of jagged attention for Hopper: the warp-specialised kernel for dq, and the launcher of
all backward kernels.

    S = scale · q kᵀ + bias,  dP = dO vᵀ,  dQ = scale · dS k                         per segment and
    head
    softmax:    dS = P ∘ (dP − delta),  P = exp2(S − lse),  delta = rowsum(dO ∘ O)
    pointwise:  dS = activation'(S) ∘ dP

The kernel for dk and dv is in hopper_dkdv.py. Both compute S again, so that each output tile has
one owner and results are deterministic. Where memory allows, the dk, dv kernel runs first and
stores dS, and the kernel in hopper_ds.py computes dq from it. With a RelativeBias, the dq kernel
also sums dS for the gradients of the tables (hopper_bias.py). For long segments, one kernel
computes all three gradients (hopper_one_pass.py).

Roles, at head dim 128 | 64:
    warps 0–3, 4–7 | 0–3, 4–7, 8–11   consumers: MMA, dS, epilogue. `_dq_consume`
    warp 8 | 12                       producer: tiles and TMA loads. `_dq_produce`
Registers per thread: consumers 240, 240 | 168, 160, 160; producer 24.

Tile: 128 | 192 query rows, 64 per consumer, by blocks of 64 keys. With a time table, and beside the
kernel for short queries (configs.dq_config), head dim 64 may have the roles, registers and tile of
128.

Small tiles (select.small_tiles_are_faster): 64 query rows, one consumer, warps 0–3, and the
producer is warp 4. Two | three thread blocks share a multiprocessor; consumers have 232 | 136
registers. With a time table: two, and 232.

Barriers, one per stage s:
    q[i].full[s], do[i].full[s], k.full[s], v.full[s]   arrive count 1, the TMA load of that buffer
    q[i].empty[s], do[i].empty[s]                       arrive count 1: consumer i, its only reader,
    is done with the tile k.empty[s], v.empty[s]                              arrive count of one
    per consumer: the MMA that reads the buffer is complete tail
    arrive count of one per consumer: its share of k's rows past the segment is 0 queue.full[s],
    queue.empty[s]                       arrive counts 1 and one per consumer: the words of a tile

Shared memory in KiB, plus 1 for the tile queue, the barriers and the arguments of warps:
    head dim 128: 224 = q 2 × 2 × 16 + dO 2 × 2 × 16 + k 2 × 16 + v 2 × 16 + epilogue 2 × 16
    head dim  64: 168 = q 3 × 2 × 8 + dO 3 × 2 × 8 + k 3 × 8 + v 3 × 8 + epilogue 3 × 8
                  two consumers: 144 = q 2 × 2 × 8 + dO 2 × 2 × 8 + k 4 × 8 + v 4 × 8 + epilogue 2 ×
                  8
    small tiles:  112 = q 16 + dO 16 + k 2 × 16 + v 2 × 16 + epilogue 16 | 72 = q 8 + dO 8 + k 3 × 8
    + v 3 × 8 + epilogue 8 with a bias, 17 more per consumer, for sums of dS. At head dim 128, q and
    dO then have one buffer instead of two: 194; at 64: 219 with a time table, 0.125 more per
    consumer, for ranges of buckets; at 64, with two consumers: 178.25

dS stays in registers, as the first operand of the next MMA. One consumer's arithmetic overlaps with
the MMAs of the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ..common.activations import activation_factors
from ..common.descriptors import has_descriptor
from ..common.pipeline import (
    WARPGROUP_ROWS,
    Output,
    Ring,
    Tail,
    TensorDescriptor,
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
    skip_key_block,
    skip_stage,
    store_epilogue,
    to_mma_operand,
    wait_for_tail,
    zero_tail,
)
from ..common.ptxas import safe_ptxas
from ..schedule.cost import LoopedSide
from ..schedule.host import TileList
from .bias import Bias, TableSums
from .bias_tables import TableGradients, kernel_bias
from .dq_sums import DqSums
from .hopper_bias import (
    BLOCK_OF_SCRATCH,
    THREADS,
    add_to_tables,
    bias_block,
    bias_of_queries,
    make_ranges,
    make_scratch,
    sums_of_tile,
)
from .hopper_common import (
    Position,
    QueryRows,
    Schedule,
    TileQueue,
    consumer_visits,
    first_target_of,
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
    row_sums,
    visible_keys,
    visited_block,
)
from .hopper_dkdv import attention_bwd_dkdv_hopper_kernel
from .hopper_ds import (
    assign_ds_blocks,
    attention_bwd_dq_from_ds_hopper_kernel,
    dq_from_ds_constants,
    plan_workspace,
    workspace_limit,
    write_delta,
)
from .hopper_one_pass import attention_bwd_hopper_kernel, one_pass_constants
from .hopper_short_queries import attention_bwd_short_queries_hopper_kernel, short_queries_constants
from .mask import num_masked_blocks
from .params import AttentionParams, Gradients, Operands, empty_table_gradients
from .scales import output_factor, score_factor
from .segments import TiledSegments
from .select import Selection
from .tile_lists import kernel_tiles, list_short_queries

# -- dq --------------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """Constants of a launch."""

    heads: gl.constexpr
    group: gl.constexpr  # query heads per key head
    head_dim: gl.constexpr
    v_dim: gl.constexpr
    activation: gl.constexpr  # function of activations.py; None: softmax
    mask: gl.constexpr
    q_shared: gl.constexpr
    has_ds: gl.constexpr  # whether another kernel computes dq of the segments whose dS is stored
    bias: gl.constexpr  # BiasKind, or None
    has_sums: gl.constexpr  # whether dS is summed for the bias tables
    consumers: gl.constexpr


class _Rings(NamedTuple):
    """Buffers in shared memory. q, do: a ring per consumer; in a consumer, its own. tail: barrier
    of the keys' tail."""

    q: Ring
    do: Ring
    k: Ring
    v: Ring
    tail: gl.shared_memory_descriptor


class _Operands(NamedTuple):
    out_ptr: gl.tensor
    dq_desc: gl.tensor
    dq_ptr: gl.tensor
    lse_ptr: gl.tensor
    delta_ptr: gl.tensor
    stride_lse: gl.tensor
    buffers: gl.shared_memory_descriptor


class _Scales(NamedTuple):
    scale: gl.tensor
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
    operands: _Operands
    scales: _Scales
    bias: Bias
    ranges: gl.tensor
    sums: TableSums
    scratch: gl.tensor
    ds_blocks_ptr: gl.tensor
    queue: TileQueue


@gluon.jit
def _dq_produce(kernel, OPTIONS: gl.constexpr):
    schedule, rings = kernel.schedule, kernel.rings
    ROWS: gl.constexpr = OPTIONS.consumers * WARPGROUP_ROWS
    BLOCK: gl.constexpr = kernel.k_desc.block_type.shape[1]
    waves = num_waves(schedule)
    next_tile = load_wave(schedule, 0, waves, OPTIONS.mask, kernel.ds_blocks_ptr)
    step = 0  # of the rings of k and v
    for wave in range(waves):
        tile = next_tile
        next_tile = load_wave(schedule, wave + 1, waves, OPTIONS.mask, kernel.ds_blocks_ptr)
        push_tile(kernel.queue, wave, tile)
        blocks, visited = key_blocks(tile, OPTIONS.mask, ROWS, BLOCK)
        if OPTIONS.has_ds:
            visited = gl.where(tile.ds_block < 0, visited, 0)
        for consumer in gl.static_range(OPTIONS.consumers):
            row = tile.q_start + tile.block * ROWS + consumer * WARPGROUP_ROWS
            q_row = row
            if OPTIONS.q_shared:
                q_row = row - tile.q_start
            producer_load(rings.q[consumer], kernel.q_desc, wave, tile.head, q_row)
            producer_load(rings.do[consumer], kernel.do_desc, wave, tile.head, row)
        for number in range(visited):
            key_row = tile.kv_start + visited_block(number, blocks) * BLOCK
            producer_load(
                rings.k, kernel.k_desc, step + number, tile.head // OPTIONS.group, key_row
            )
            producer_load(
                rings.v, kernel.v_desc, step + number, tile.head // OPTIONS.group, key_row
            )
        step += visited


@gluon.jit
def _dq_block(
    rows,
    rings,
    step,
    more,
    acc,
    position,
    scale,
    bias,
    sums,
    tail,
    consumer: gl.constexpr,
    OPTIONS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """One key block: dS from the scores computed again, acc += dS k, and with `sums` dS added to
    the sums of the bias tables. `more`: whether another block follows."""
    k = consumer_wait(rings.k, step)
    # With pointwise activations, or blocks of another size, waiting ahead costs more than it gains.
    WAITS_AHEAD: gl.constexpr = OPTIONS.activation is None and k.shape[1] == 64
    if MASKED:
        has_tail = position.num_keys < k.shape[0]
        if has_tail:
            zero_tail(k, position.num_keys, tail, consumer, OPTIONS.consumers)
    block_bias, buckets = None, None
    if OPTIONS.bias is not None:
        block_bias, buckets = bias_block(bias, position.column, k.shape[0], False, OPTIONS.bias)
    scores = mma_abt(rows.q, k, block_bias)
    dp = mma_abt(rows.do, consumer_wait(rings.v, step))
    scores = warpgroup_mma_wait(1, deps=(scores,))
    if OPTIONS.activation is None:
        dact = gl.exp2(scores * scale - rows.lse[:, None])
        if WAITS_AHEAD:
            consumer_wait_ahead(rings.k, step + 1, more)
        dp = warpgroup_mma_wait(0, deps=(dp,)) - rows.delta[:, None]
    else:
        _, dact = OPTIONS.activation(scores, scale)
        dp = warpgroup_mma_wait(0, deps=(dp,))
    consumer_release(rings.v, step)
    ds = dact * dp
    if MASKED:
        ds = gl.where(visible_keys(position, OPTIONS.mask, k.shape[0]), ds, 0.0)
        if has_tail:
            wait_for_tail(tail)
    operand = to_mma_operand(ds, k.dtype, k.shape[1])
    acc = warpgroup_mma(operand, k, acc, is_async=True)
    if OPTIONS.has_sums:
        add_to_tables(ds, buckets, position.column, bias, sums, OPTIONS.bias)
    acc, operand = warpgroup_mma_wait(0, deps=(acc, operand))
    consumer_release(rings.k, step)
    return acc


@gluon.jit
def _dq_consume(consumer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    schedule, operands, scales, queue = (
        kernel.schedule,
        kernel.operands,
        kernel.scales,
        kernel.queue,
    )
    rings = _Rings(
        kernel.rings.q[consumer],
        kernel.rings.do[consumer],
        kernel.rings.k,
        kernel.rings.v,
        kernel.rings.tail,
    )
    output = Output(operands.dq_desc, operands.dq_ptr)
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    BLOCK: gl.constexpr = rings.k.buffers.shape[2]
    WIDTH: gl.constexpr = rings.k.buffers.shape[3]
    STATS: gl.constexpr = gl.SliceLayout(1, mma_layout(WARPGROUP_ROWS, BLOCK))
    lanes = gl.arange(0, WARPGROUP_ROWS, layout=STATS)
    waves = num_waves(schedule)
    step, tail_phase = 0, 0
    for wave in range(waves):
        tile = pop_tile(queue, wave, HAS_DS=OPTIONS.has_ds)
        first_target = first_target_of(tile, OPTIONS.mask)
        blocks, visited = key_blocks(tile, OPTIONS.mask, CONSUMERS * WARPGROUP_ROWS, BLOCK)
        masked = num_masked_blocks(blocks)
        first = (tile.block * CONSUMERS + consumer) * WARPGROUP_ROWS
        num_rows = tile.q_len - first
        if OPTIONS.has_ds:
            other = tile.ds_block < 0
            masked, visited, num_rows = (
                gl.where(other, masked, 0),
                gl.where(other, visited, 0),
                gl.where(other, num_rows, 0),
            )
        # Keys in the first block, the only one that the segment's end may cut.
        num_keys = gl.where(masked > 0, tile.kv_len - visited_block(0, blocks) * BLOCK, BLOCK)
        tail = Tail(rings.tail, tail_phase)
        if num_rows > 0:
            lse, delta = lanes, lanes
            if OPTIONS.activation is None:
                offsets = (
                    tile.head.to(gl.int64) * operands.stride_lse + tile.q_start + first + lanes
                )
                lse = gl.load(operands.lse_ptr + offsets, mask=lanes < num_rows, other=0.0)
                delta = row_sums(
                    operands.out_ptr,
                    rings.do,
                    wave,
                    tile.q_start + first,
                    tile.head,
                    num_rows,
                    OPTIONS.heads,
                    OPTIONS.v_dim,
                )
                delta = gl.convert_layout(delta, STATS)
                gl.store(operands.delta_ptr + offsets, delta, mask=lanes < num_rows)
            consumer_wait(rings.q, wave)
            consumer_wait(rings.do, wave)
            acc = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, mma_layout(WARPGROUP_ROWS, WIDTH))
            row = first + tile.kv_len - tile.q_len
            rows = QueryRows(opaque_rows(rings.q, wave), opaque_rows(rings.do, wave), lse, delta)
            bias, sums = None, None
            if OPTIONS.bias is not None:
                bias = bias_of_queries(
                    kernel.bias, tile, first, kernel.ranges[consumer], OPTIONS.bias
                )
            if OPTIONS.has_sums:
                factor = scales.dact_factor * output_factor(
                    scales.output_scale, scales.segment_scale_ptr, tile.segment
                )
                part = gl.program_id(0) * CONSUMERS + consumer
                sums = sums_of_tile(
                    kernel.sums,
                    kernel.bias,
                    kernel.scratch[consumer],
                    part,
                    tile.head,
                    num_rows,
                    factor,
                    OPTIONS.bias,
                )
            for number in range(masked):
                key_block = visited_block(number, blocks)
                column = key_block * BLOCK
                if consumer_visits(
                    tile, key_block, key_blocks, consumer, CONSUMERS, OPTIONS.mask, BLOCK
                ):
                    acc = _dq_block(
                        rows,
                        rings,
                        step + number,
                        number + 1 < visited,
                        acc,
                        Position(row, column, tile.kv_len - column, first_target),
                        score_factor(scales.scale, OPTIONS.activation),
                        bias,
                        sums,
                        tail,
                        consumer,
                        OPTIONS,
                        True,
                    )
                else:
                    skip_key_block(
                        rings.k,
                        rings.v,
                        step + number,
                        tile.kv_len - column,
                        tail,
                        consumer,
                        CONSUMERS,
                    )
            rows = QueryRows(opaque_rows(rings.q, wave), opaque_rows(rings.do, wave), lse, delta)
            for number in range(masked, visited):
                column = 0
                if OPTIONS.bias is not None:
                    column = visited_block(number, blocks) * BLOCK
                acc = _dq_block(
                    rows,
                    rings,
                    step + number,
                    number + 1 < visited,
                    acc,
                    Position(row, column, BLOCK, first_target),
                    score_factor(scales.scale, OPTIONS.activation),
                    bias,
                    sums,
                    tail,
                    consumer,
                    OPTIONS,
                    False,
                )
            consumer_release(rings.q, wave)
            consumer_release(rings.do, wave)
            factor = output_factor(scales.output_scale, scales.segment_scale_ptr, tile.segment)
            acc = acc * (scales.scale * scales.dact_factor * factor)
            store_epilogue(
                acc,
                output,
                operands.buffers.index(consumer),
                0,
                tile.q_start + first,
                tile.head,
                num_rows,
                OPTIONS.heads,
                OPTIONS.head_dim,
            )
        else:
            skip_stage(rings.q, wave)
            skip_stage(rings.do, wave)
            for number in range(visited):
                left = gl.where(number == 0, num_keys, BLOCK)
                skip_key_block(rings.k, rings.v, step + number, left, tail, consumer, CONSUMERS)
        step += visited
        tail_phase += (num_keys < BLOCK).to(gl.int32)
        release_tile(queue, wave)
    tma.store_wait(0)


@safe_ptxas
@gluon.jit(
    do_not_specialize=["num_segments", "stride_lse"],
    do_not_specialize_on_alignment=["num_tiles_ptr"],
)
def attention_bwd_dq_hopper_kernel(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dq_desc,
    out_ptr,
    dq_ptr,
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
    sums,
    scale,
    dact_factor,
    output_scale,
    stride_lse,
    ds_blocks_ptr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    V_DIM: gl.constexpr,
    ACTIVATION: gl.constexpr,
    MASK: gl.constexpr,
    Q_SHARED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    BIAS: gl.constexpr,
    HAS_SUMS: gl.constexpr,
):
    """dq of a tile of query rows; with softmax also writes delta = rowsum(dO ∘ O), which the dk, dv
    kernel reads. With a `ds_blocks_ptr`, only of the segments whose dS is not stored."""
    OPTIONS: gl.constexpr = _Options(
        HEADS,
        GROUP,
        HEAD_DIM,
        V_DIM,
        ACTIVATION,
        MASK,
        Q_SHARED,
        ds_blocks_ptr is not None,
        BIAS,
        HAS_SUMS,
        CONSUMERS,
    )
    schedule = Schedule(
        tiles_ptr, num_tiles_ptr, q_offsets_ptr, kv_offsets_ptr, num_segments, num_targets_ptr
    )
    q_rings, do_rings = (
        make_rings(q_desc, ROW_STAGES, CONSUMERS),
        make_rings(do_desc, ROW_STAGES, CONSUMERS),
    )
    k_ring, v_ring = make_ring(k_desc, STAGES, CONSUMERS), make_ring(v_desc, STAGES, CONSUMERS)
    rings = _Rings(q_rings, do_rings, k_ring, v_ring, make_barriers(1, CONSUMERS))
    operands = _Operands(
        out_ptr,
        dq_desc,
        dq_ptr,
        lse_ptr,
        delta_ptr,
        stride_lse,
        make_epilogue_buffers(q_desc, CONSUMERS),
    )
    scales = _Scales(scale, dact_factor, output_scale, segment_scale_ptr)
    queue = make_tile_queue(CONSUMERS)
    scratch = None
    if HAS_SUMS:
        scratch = make_scratch(CONSUMERS)
    ranges = make_ranges(CONSUMERS, BIAS)
    kernel = _Kernel(
        q_desc,
        do_desc,
        k_desc,
        v_desc,
        schedule,
        rings,
        operands,
        scales,
        bias,
        ranges,
        sums,
        scratch,
        ds_blocks_ptr,
        queue,
    )
    launch_specialised(_dq_consume, _dq_produce, kernel, OPTIONS, REGISTERS)


# -- launcher --------------------------------------------------------------------------------------


class _Launches:
    """The kernels of one backward, with the arguments that their launches share."""

    def __init__(
        self,
        operands: Operands,
        grads: Gradients,
        segments: TiledSegments,
        params: AttentionParams,
        kv_shared: bool,
        selection: Selection,
    ) -> None:
        q, k, v, out, _ = operands
        do = grads.do if has_descriptor(grads.do) else grads.do.contiguous()
        self.grads = grads if do is grads.do else grads._replace(do=do)
        out = do if out is None else out.contiguous()
        self.operands = operands if out is operands.out else operands._replace(out=out)
        self.params, self.kv_shared, self.selection = params, kv_shared, selection
        self.bias = kernel_bias(params, segments, q.shape[0])
        self.act_factor, self.dact_factor = activation_factors(
            params.activation, q.dtype == torch.bfloat16, params.scale
        )
        self.q_desc, self.do_desc, self.k_desc, self.v_desc = [
            head_descriptor(x, 64) for x in (q, do, k, v)
        ]
        self.dq_desc, self.dk_desc, self.dv_desc = [
            result_descriptor(x) for x in (grads.dq, grads.dk, grads.dv)
        ]

    def row_descriptors(self, rows: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Of q and dO, for blocks of so many rows."""
        if rows == 64:
            return self.q_desc, self.do_desc
        return head_descriptor(self.operands.q, rows), head_descriptor(self.grads.do, rows)

    def query_tiles(self, segments: TiledSegments) -> TileList:
        dq, config = self.grads.dq, self.selection.dq
        rows, heads, dim = dq.shape
        looped = LoopedSide(*self.operands.k.shape[:2], dim)
        return TileList(
            *kernel_tiles(segments, config, rows, heads, self.params, looped=looped), config.tile
        )

    def dq(
        self, segments: TiledSegments, segment_scale: Tensor | None, ds_blocks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """dq; with ds_blocks, only of the segments whose dS is not stored. Tiles: query_tiles.
        Returns the gradients of the bias tables."""
        tiles, num_tiles, _ = segments.tiles
        params, lse, delta, config = (
            self.params,
            self.operands.lse,
            self.grads.delta,
            self.selection.dq,
        )
        blocks = grid(tiles, config)
        sums = None
        if params.table_gradients:
            consumers = blocks[0] * config.consumers if blocks else 0
            sums = TableGradients.empty(
                params, consumers, tiles.device, threads=THREADS, block=BLOCK_OF_SCRATCH
            )
        if blocks:
            attention_bwd_dq_hopper_kernel[blocks](
                self.q_desc,
                self.do_desc,
                self.k_desc,
                self.v_desc,
                self.dq_desc,
                self.operands.out,
                self.grads.dq,
                lse,
                delta,
                segments.q_offsets,
                segments.kv_offsets,
                segments.segments_per_group,
                tiles,
                num_tiles,
                params.num_targets,
                segment_scale,
                self.bias,
                sums and sums.argument(),
                params.scale,
                self.dact_factor,
                params.output_scale,
                lse.stride(0),
                ds_blocks,
                HEAD_DIM=self.operands.q.shape[2],
                BIAS=params.bias_kind,
                HAS_SUMS=params.table_gradients,
                **launch_constants(config, self.operands, params, segments.q_shared),
            )
        return (
            empty_table_gradients(params, self.operands.q)
            if sums is None
            else sums.results(params, self.operands.q)
        )

    def dkdv(
        self,
        segments: TiledSegments,
        segment_scale: Tensor | None,
        ds: Tensor | None = None,
        ds_blocks: Tensor | None = None,
    ) -> None:
        """dk and dv; with a workspace `ds`, also stores dS of the segments that have a block
        there."""
        q, lse, delta = self.operands.q, self.operands.lse, self.grads.delta
        dk, dv = self.grads.dk, self.grads.dv
        params, config = self.params, self.selection.dkdv
        q_desc, do_desc = self.row_descriptors(config.block)
        tiles, num_tiles = kernel_tiles(
            segments,
            config,
            dk.shape[0],
            dk.shape[1],
            params,
            key_tiles=True,
            looped=LoopedSide(*q.shape),
        )
        if blocks := grid(tiles, config):
            attention_bwd_dkdv_hopper_kernel[blocks](
                q_desc,
                do_desc,
                self.k_desc,
                self.v_desc,
                self.dk_desc,
                self.dv_desc,
                dk,
                dv,
                lse,
                delta,
                segments.q_offsets,
                segments.kv_offsets,
                segments.segments_per_group,
                tiles,
                num_tiles,
                params.num_targets,
                segment_scale,
                self.bias,
                params.scale,
                self.act_factor,
                self.dact_factor,
                params.output_scale,
                lse.stride(0),
                ds,
                ds_blocks,
                HEAD_DIM=q.shape[2],
                KV_SHARED=self.kv_shared,
                QUERY_GROUPS=segments.query_groups,
                BIAS=params.bias_kind,
                **launch_constants(config, self.operands, params, segments.q_shared),
            )

    def one_pass(self, keys: TiledSegments, segment_scale: Tensor | None) -> None:
        """dq, dk and dv in one kernel, and another that rounds dq."""
        q, k, lse, grads = self.operands.q, self.operands.k, self.operands.lse, self.grads
        params, config = self.params, self.selection.one_pass
        if params.activation == "softmax":
            write_delta(grads.do, self.operands.out, grads.delta)
        q_desc, do_desc = self.row_descriptors(config.block)
        sums = DqSums.empty(q, keys.q_offsets.shape[0] - 1, config.block)
        tiles, num_tiles = kernel_tiles(
            keys,
            config,
            k.shape[0],
            k.shape[1],
            params,
            key_tiles=True,
            looped=LoopedSide(*q.shape),
        )
        if blocks := grid(tiles, config):
            attention_bwd_hopper_kernel[blocks](
                q_desc,
                do_desc,
                self.k_desc,
                self.v_desc,
                self.dk_desc,
                self.dv_desc,
                sums.descriptor(),
                grads.dk,
                grads.dv,
                lse,
                grads.delta,
                sums.added,
                sums.next_tile,
                keys.q_offsets,
                keys.kv_offsets,
                tiles,
                num_tiles,
                segment_scale,
                params.scale,
                self.act_factor,
                self.dact_factor,
                params.output_scale,
                lse.stride(0),
                sums.num_blocks,
                HEAD_DIM=q.shape[2],
                **one_pass_constants(config, self.operands, params),
            )
        sums.write(
            grads.dq, keys, segment_scale, params.scale * self.dact_factor, params.output_scale
        )

    def short_queries(self, segments: TiledSegments, next_tile: Tensor) -> None:
        """dq, dk and dv of the segments that `segments`, whose tiles are listed, leaves out as
        short."""
        (q, _, _, out, lse), grads = self.operands, self.grads
        params, config = self.params, self.selection.short_queries
        tiles, num_tiles, _ = segments.tiles
        if blocks := grid(tiles, config):
            attention_bwd_short_queries_hopper_kernel[blocks](
                self.q_desc,
                self.do_desc,
                self.k_desc,
                self.v_desc,
                self.dq_desc,
                self.dk_desc,
                self.dv_desc,
                out,
                grads.dq,
                grads.dk,
                grads.dv,
                lse,
                segments.q_offsets,
                segments.kv_offsets,
                tiles,
                num_tiles,
                next_tile,
                params.segment_scale,
                params.scale,
                self.act_factor,
                self.dact_factor,
                params.output_scale,
                lse.stride(0),
                HEAD_DIM=q.shape[2],
                **short_queries_constants(config, self.operands, params),
            )

    def dq_from_ds(
        self, segments: TiledSegments, segment_scale: Tensor | None, ds: Tensor, ds_blocks: Tensor
    ) -> None:
        """dq of the segments whose dS is stored. Tiles: query_tiles."""
        tiles, num_tiles, _ = segments.tiles
        if blocks := grid(tiles, self.selection.dq_from_ds):
            attention_bwd_dq_from_ds_hopper_kernel[blocks](
                head_descriptor(ds, 64),
                self.k_desc,
                self.dq_desc,
                self.grads.dq,
                ds_blocks,
                segments.q_offsets,
                segments.kv_offsets,
                tiles,
                num_tiles,
                segment_scale,
                self.params.scale,
                self.dact_factor,
                self.params.output_scale,
                QUERY_BLOCK=self.selection.dkdv.block,
                **dq_from_ds_constants(self.selection.dq_from_ds, self.operands),
            )


def backward(
    operands: Operands,
    grads: Gradients,
    queries: TiledSegments,
    keys: TiledSegments,
    params: AttentionParams,
    kv_shared: bool,
    selection: Selection,
    workspace: int | None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for all gradients, if it is selected and `workspace_limit` has room for its
    sums, else those for dq and for dk, dv. If the limit has room for dS, the dk, dv kernel stores
    dS, and dq is computed from it; not with a bias, whose tables' gradients the dq kernel computes.
    Returns these gradients."""
    launches = _Launches(operands, grads, queries, params, kv_shared, selection)
    if selection.one_pass is not None:
        num_bytes = DqSums.num_bytes(
            operands.q, keys.q_offsets.shape[0] - 1, selection.one_pass.block
        )
        if num_bytes <= workspace_limit(workspace, grads.dq, grads.dk, grads.dv):
            launches.one_pass(keys, params.segment_scale)
            return empty_table_gradients(params, operands.q)
    num_blocks, parts = 0, []
    if selection.short_queries is not None:
        q, k, config = operands.q, operands.k, selection.short_queries
        queries, keys, next_tile = list_short_queries(
            queries,
            (q.shape[0], k.shape[0]),
            (q.shape[1], k.shape[1]),
            config.tile,
            selection.dkdv.tile,
            config.block,
        )
        launches.short_queries(queries, next_tile)
    elif (
        params.mask is None
        and not params.has_bias
        and queries.query_groups == 1
        and not (queries.q_shared or kv_shared)
    ):
        num_blocks, parts = plan_workspace(
            operands.q,
            operands.k,
            queries.q_offsets,
            queries.kv_offsets,
            workspace,
            grads.dq,
            grads.dk,
            grads.dv,
        )
    if not num_blocks:
        dtables = launches.dq(
            queries._replace(tiles=launches.query_tiles(queries)), params.segment_scale
        )
        launches.dkdv(keys, params.segment_scale)
        return dtables
    if params.activation == "softmax":
        write_delta(launches.grads.do, launches.operands.out, grads.delta)
    ds = operands.q.new_empty((num_blocks * 64, 1, 64))
    for start, end in parts:
        segment_scale = None if params.segment_scale is None else params.segment_scale[start:end]
        if len(parts) > 1:
            offsets = (x[start : end + 1] for x in (queries.q_offsets, queries.kv_offsets))
            queries_of_part = keys_of_part = TiledSegments(*offsets, TileList(None, None, None))
        else:
            queries_of_part, keys_of_part = queries, keys
        queries_of_part = queries_of_part._replace(tiles=launches.query_tiles(queries_of_part))
        ds_blocks, num_other_tiles = assign_ds_blocks(
            queries_of_part.q_offsets,
            queries_of_part.kv_offsets,
            queries_of_part.tiles.num_tiles,
            num_blocks,
            operands.q.shape[1],
            selection.dkdv.block,
        )
        launches.dkdv(keys_of_part, segment_scale, ds, ds_blocks)
        launches.dq_from_ds(queries_of_part, segment_scale, ds, ds_blocks)
        launches.dq(
            queries_of_part._replace(
                tiles=queries_of_part.tiles._replace(num_tiles=num_other_tiles)
            ),
            segment_scale,
            ds_blocks,
        )
    return empty_table_gradients(params, operands.q)
