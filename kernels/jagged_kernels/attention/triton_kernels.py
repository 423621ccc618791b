"""Device code of jagged attention: the forward, the dq and the dk, dv kernel, each around its function for one block.

A program knows its next tile's bounds while it works on one. A tile first loops over the blocks that all of its rows see whole, then
over the rest, where the mask or a segment's end hides something; blocks hidden from the whole tile are not visited (masks.py). What a
tile loops over comes through TMA where there is a descriptor; of what it keeps, at most one block does, as one such load outside a loop
waits for the other.
`ACTIVATION` is a function of activations.py, None: softmax. `num_segments` is None unless several lists of query segments read the keys of
so many segments (load_tile).
"""

import triton
import triton.language as tl

from ..common.loads import load_rows, load_segment, load_tile, store_rows, zigzag_waves
from ..common.ptxas import safe_ptxas
from .mask import column_blocks, first_target_column, is_visible, num_partial_blocks, partial_block, row_blocks, visible_columns

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _fwd_block(
    q, k_operand, v_operand, row, column, rows, bounds, head, num_keys, acc, row_max, row_sum, scale,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, ACTIVATION: tl.constexpr, MASK: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """One key block: scores, online softmax or activation, acc += P v."""
    k = load_rows(k_operand, row, head, num_keys, HEAD_DIM, BLOCK_N, BLOCK_D, PARTIAL)
    v = load_rows(v_operand, row, head, num_keys, V_DIM, BLOCK_N, BLOCK_DV, PARTIAL)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    columns = tl.arange(0, BLOCK_N)[None, :]
    if PARTIAL and MASK is not None:
        visible = is_visible(column + columns, rows, bounds, MASK)
    else:
        visible = columns < num_keys
    if ACTIVATION is None:
        if PARTIAL:
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        subtracted = new_max
        if MASK is not None:  # A row may have seen no key yet: its maximum stays -inf, and any finite number gives weights of 0.
            subtracted = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores * scale - subtracted[:, None])
        rescale = tl.exp2(row_max - subtracted)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        row_max = new_max
        acc = acc * rescale[:, None]
    else:  # past the segment's end v is 0
        p, _ = ACTIVATION(scores, scale)
        if PARTIAL and MASK is not None:
            p = tl.where(visible, p, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, row_max, row_sum


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "stride_lse"])
def attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, k_desc, v_desc,
    q_offsets_ptr, kv_offsets_ptr, num_segments, tiles_ptr, num_tiles_ptr, num_targets_ptr, segment_scale_ptr,
    scale, value_factor, slope_factor, output_scale,
    stride_qm, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_om, stride_oh, stride_lse,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr, MASK: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
    Q_SHARED: tl.constexpr,
):  # fmt: skip
    worker, num_workers, num_tiles = tl.program_id(0), tl.num_programs(0), tl.load(num_tiles_ptr)
    q_operand = q_ptr, None, stride_qm * ALIGN, stride_qh * ALIGN
    k_operand = k_ptr, k_desc, stride_kn * ALIGN, stride_kh * ALIGN
    v_operand = v_ptr, v_desc, stride_vn * ALIGN, stride_vh * ALIGN
    out_operand = out_ptr, None, stride_om * ALIGN, stride_oh * ALIGN
    scale = _score_scale(scale, ACTIVATION)
    waves = zigzag_waves(num_tiles, worker, num_workers)
    next_tile = load_tile(tiles_ptr, 0, waves, worker, num_workers, q_offsets_ptr, kv_offsets_ptr, num_segments)
    for wave in range(0, waves):
        segment, head, block, q_start, q_len, kv_start, kv_len = next_tile
        next_tile = load_tile(tiles_ptr, wave + 1, waves, worker, num_workers, q_offsets_ptr, kv_offsets_ptr, num_segments)
        row, num_rows = q_start + block * BLOCK_M, q_len - block * BLOCK_M
        q_row = row
        if Q_SHARED:
            q_row = row - q_start
        q = load_rows(q_operand, q_row, head, num_rows, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        column = block * BLOCK_M + kv_len - q_len
        first_target = first_target_column(num_targets_ptr, segment, kv_len, MASK)
        blocks = column_blocks(column, column + tl.minimum(num_rows, BLOCK_M) - 1, kv_len, first_target, MASK, BLOCK_N)
        rows, bounds = _row_bounds((column + tl.arange(0, BLOCK_M))[:, None], first_target, MASK)

        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        for n in range(blocks[7] * BLOCK_N, (blocks[7] + blocks[8]) * BLOCK_N, BLOCK_N):
            acc, row_max, row_sum = _fwd_block(
                q, k_operand, v_operand, kv_start + n, n, rows, bounds, head // GROUP, BLOCK_N, acc, row_max, row_sum, scale,
                HEAD_DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, ACTIVATION, MASK, False,
            )  # fmt: skip
        for number in tl.range(0, num_partial_blocks(blocks), num_stages=PARTIAL_STAGES):
            n = partial_block(number, blocks) * BLOCK_N
            acc, row_max, row_sum = _fwd_block(
                q, k_operand, v_operand, kv_start + n, n, rows, bounds, head // GROUP, kv_len - n, acc, row_max, row_sum, scale,
                HEAD_DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, ACTIVATION, MASK, True,
            )  # fmt: skip

        if ACTIVATION is None:
            # A row that sees no key leaves row_sum at 0: its output is 0 and its log-sum-exp -inf.
            acc = acc * (1.0 / tl.where(row_sum > 0, row_sum, 1.0))[:, None]
            lanes = tl.arange(0, BLOCK_M)
            tl.store(lse_ptr + head.to(tl.int64) * stride_lse + row + lanes, row_max + tl.log2(row_sum), mask=lanes < num_rows)
        else:
            acc = acc * (value_factor * _output_scale(output_scale, segment_scale_ptr, segment))
        store_rows(out_operand, row, head, acc, num_rows, V_DIM, BLOCK_M, BLOCK_DV)


@triton.jit
def _score_scale(scale, ACTIVATION: tl.constexpr):
    """Softmax takes exponentials in base 2."""
    if ACTIVATION is None:
        return scale * LOG2_E
    else:
        return scale


@triton.jit
def _output_scale(output_scale, segment_scale_ptr, segment):
    if segment_scale_ptr is None:
        return output_scale
    else:
        return tl.load(segment_scale_ptr + segment)


@triton.jit
def _row_bounds(rows, first_target, MASK: tl.constexpr):
    """The rows and, under a mask, what they see."""
    if MASK is None:
        return rows, (rows, rows, rows)
    else:
        return rows, visible_columns(rows, first_target, MASK)


@triton.jit
def _dq_block(
    q, do, k_operand, v_operand, row, column, rows, bounds, head, num_keys, lse, delta, acc, scale,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, ACTIVATION: tl.constexpr, MASK: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """One key block: dS from the scores computed again, acc += dS k."""
    k = load_rows(k_operand, row, head, num_keys, HEAD_DIM, BLOCK_N, BLOCK_D, PARTIAL)
    v = load_rows(v_operand, row, head, num_keys, V_DIM, BLOCK_N, BLOCK_DV, PARTIAL)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    if ACTIVATION is None:
        ds = tl.exp2(scores * scale - lse[:, None]) * (dp - delta[:, None])
    else:
        _, slope = ACTIVATION(scores, scale)
        ds = slope * dp
    if PARTIAL:
        columns = tl.arange(0, BLOCK_N)[None, :]
        if MASK is not None:
            ds = tl.where(is_visible(column + columns, rows, bounds, MASK), ds, 0.0)
        elif ACTIVATION is None:  # exp2 may have overflown where there is no key; elsewhere k is 0
            ds = tl.where(columns < num_keys, ds, 0.0)
    return tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "stride_lse"])
def attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, k_desc, v_desc,
    q_offsets_ptr, kv_offsets_ptr, num_segments, tiles_ptr, num_tiles_ptr, num_targets_ptr, segment_scale_ptr,
    scale, value_factor, slope_factor, output_scale,
    stride_qm, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_om, stride_oh, stride_dom, stride_doh,
    stride_dqm, stride_dqh, stride_lse,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr, MASK: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
    Q_SHARED: tl.constexpr,
):  # fmt: skip
    """dq of a tile of query rows; with softmax also writes delta = rowsum(dO ∘ O), which the dk, dv kernel reads."""
    worker, num_workers, num_tiles = tl.program_id(0), tl.num_programs(0), tl.load(num_tiles_ptr)
    q_operand = q_ptr, None, stride_qm * ALIGN, stride_qh * ALIGN
    k_operand = k_ptr, k_desc, stride_kn * ALIGN, stride_kh * ALIGN
    v_operand = v_ptr, v_desc, stride_vn * ALIGN, stride_vh * ALIGN
    out_operand = out_ptr, None, stride_om * ALIGN, stride_oh * ALIGN
    do_operand = do_ptr, None, stride_dom * ALIGN, stride_doh * ALIGN
    dq_operand = dq_ptr, None, stride_dqm * ALIGN, stride_dqh * ALIGN
    score_scale = _score_scale(scale, ACTIVATION)
    waves = zigzag_waves(num_tiles, worker, num_workers)
    next_tile = load_tile(tiles_ptr, 0, waves, worker, num_workers, q_offsets_ptr, kv_offsets_ptr, num_segments)
    for wave in range(0, waves):
        segment, head, block, q_start, q_len, kv_start, kv_len = next_tile
        next_tile = load_tile(tiles_ptr, wave + 1, waves, worker, num_workers, q_offsets_ptr, kv_offsets_ptr, num_segments)
        row, num_rows = q_start + block * BLOCK_M, q_len - block * BLOCK_M
        q_row = row
        if Q_SHARED:
            q_row = row - q_start
        q = load_rows(q_operand, q_row, head, num_rows, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        do = load_rows(do_operand, row, head, num_rows, V_DIM, BLOCK_M, BLOCK_DV, True)
        column = block * BLOCK_M + kv_len - q_len
        first_target = first_target_column(num_targets_ptr, segment, kv_len, MASK)
        blocks = column_blocks(column, column + tl.minimum(num_rows, BLOCK_M) - 1, kv_len, first_target, MASK, BLOCK_N)
        rows, bounds = _row_bounds((column + tl.arange(0, BLOCK_M))[:, None], first_target, MASK)
        lse, delta = 0.0, 0.0
        if ACTIVATION is None:
            out = load_rows(out_operand, row, head, num_rows, V_DIM, BLOCK_M, BLOCK_DV, True)
            lanes = tl.arange(0, BLOCK_M)
            stat = head.to(tl.int64) * stride_lse + row + lanes
            lse = tl.load(lse_ptr + stat, mask=lanes < num_rows, other=0.0)
            delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
            tl.store(delta_ptr + stat, delta, mask=lanes < num_rows)

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for n in range(blocks[7] * BLOCK_N, (blocks[7] + blocks[8]) * BLOCK_N, BLOCK_N):
            acc = _dq_block(
                q, do, k_operand, v_operand, kv_start + n, n, rows, bounds, head // GROUP, BLOCK_N, lse, delta, acc, score_scale,
                HEAD_DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, ACTIVATION, MASK, False,
            )  # fmt: skip
        for number in tl.range(0, num_partial_blocks(blocks), num_stages=PARTIAL_STAGES):
            n = partial_block(number, blocks) * BLOCK_N
            acc = _dq_block(
                q, do, k_operand, v_operand, kv_start + n, n, rows, bounds, head // GROUP, kv_len - n, lse, delta, acc, score_scale,
                HEAD_DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, ACTIVATION, MASK, True,
            )  # fmt: skip
        acc = acc * (scale * slope_factor * _output_scale(output_scale, segment_scale_ptr, segment))
        store_rows(dq_operand, row, head, acc, num_rows, HEAD_DIM, BLOCK_M, BLOCK_D)


@triton.jit
def _dkdv_block(
    k, v, q_operand, do_operand, lse_ptr, delta_ptr, q_row, row, column, columns, first_target, head, num_rows, dk, dv, scale,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, ACTIVATION: tl.constexpr, MASK: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """One query block, transposed so that P and dS are first operands: dv += Pᵀ do, dk += dSᵀ q."""
    q = load_rows(q_operand, q_row, head, num_rows, HEAD_DIM, BLOCK_M, BLOCK_D, PARTIAL)
    rows = tl.arange(0, BLOCK_M)
    if PARTIAL and MASK is not None:
        columns_of_rows = (column + rows)[None, :]
        visible = is_visible(columns, columns_of_rows, visible_columns(columns_of_rows, first_target, MASK), MASK)
    do = load_rows(do_operand, row, head, num_rows, V_DIM, BLOCK_M, BLOCK_DV, PARTIAL)
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    if ACTIVATION is None:
        if PARTIAL:  # rows past the segment: exp2(0 - inf) = 0, so they add nothing
            lse = tl.load(lse_ptr + row + rows, mask=rows < num_rows, other=float("inf"))
            delta = tl.load(delta_ptr + row + rows, mask=rows < num_rows, other=0.0)
        else:
            lse = tl.load(lse_ptr + row + rows)
            delta = tl.load(delta_ptr + row + rows)
        p = tl.exp2(scores * scale - lse[None, :])
        ds = p * (dp - delta[None, :])
    else:
        p, slope = ACTIVATION(scores, scale)
        ds = slope * dp
    if PARTIAL and MASK is not None:
        p, ds = tl.where(visible, p, 0.0), tl.where(visible, ds, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "stride_lse"])
def attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, q_desc, k_desc, do_desc,
    q_offsets_ptr, kv_offsets_ptr, num_segments, tiles_ptr, num_tiles_ptr, num_targets_ptr, segment_scale_ptr,
    scale, value_factor, slope_factor, output_scale,
    stride_qm, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_dom, stride_doh,
    stride_dkn, stride_dkh, stride_dvn, stride_dvh, stride_lse,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr, MASK: tl.constexpr,
    PARTIAL_STAGES: tl.constexpr, Q_SHARED: tl.constexpr, KV_SHARED: tl.constexpr, LISTS: tl.constexpr,
):  # fmt: skip
    """dk, dv of a tile of BLOCK_N key rows; loops over LISTS lists of queries, the query heads of its group and their blocks of BLOCK_M
    rows."""
    worker, num_workers, num_tiles = tl.program_id(0), tl.num_programs(0), tl.load(num_tiles_ptr)
    q_operand = q_ptr, q_desc, stride_qm * ALIGN, stride_qh * ALIGN
    k_operand = k_ptr, k_desc, stride_kn * ALIGN, stride_kh * ALIGN
    v_operand = v_ptr, None, stride_vn * ALIGN, stride_vh * ALIGN
    do_operand = do_ptr, do_desc, stride_dom * ALIGN, stride_doh * ALIGN
    dk_operand = dk_ptr, None, stride_dkn * ALIGN, stride_dkh * ALIGN
    dv_operand = dv_ptr, None, stride_dvn * ALIGN, stride_dvh * ALIGN
    score_scale = _score_scale(scale, ACTIVATION)
    waves = zigzag_waves(num_tiles, worker, num_workers)
    next_tile = load_tile(tiles_ptr, 0, waves, worker, num_workers, q_offsets_ptr, kv_offsets_ptr, num_segments)
    for wave in range(0, waves):
        segment, kv_head, block, q_start, q_len, kv_start, kv_len = next_tile
        next_tile = load_tile(tiles_ptr, wave + 1, waves, worker, num_workers, q_offsets_ptr, kv_offsets_ptr, num_segments)
        row, num_rows = kv_start + block * BLOCK_N, kv_len - block * BLOCK_N
        kv_row = row
        if KV_SHARED:
            kv_row = row - kv_start
        v = load_rows(v_operand, kv_row, kv_head, num_rows, V_DIM, BLOCK_N, BLOCK_DV, True)
        k = load_rows(k_operand, kv_row, kv_head, num_rows, HEAD_DIM, BLOCK_N, BLOCK_D, k_desc is None)
        first_target = first_target_column(num_targets_ptr, segment, kv_len, MASK)

        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        for query_list in range(0, LISTS):
            if LISTS > 1:
                q_start, q_len = load_segment(q_offsets_ptr, segment + query_list * num_segments)
            q_row = q_start
            if Q_SHARED:
                q_row = q_start - q_start
            blocks = row_blocks(block * BLOCK_N, q_len, kv_len, first_target, MASK, BLOCK_M, BLOCK_N)
            columns = (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
            for group_head in range(0, GROUP):
                head = kv_head * GROUP + group_head
                lse_head, delta_head = lse_ptr, delta_ptr
                if ACTIVATION is None:
                    lse_head, delta_head = lse_ptr + head.to(tl.int64) * stride_lse, delta_ptr + head.to(tl.int64) * stride_lse
                for m in range(blocks[7] * BLOCK_M, (blocks[7] + blocks[8]) * BLOCK_M, BLOCK_M):
                    dk, dv = _dkdv_block(
                        k, v, q_operand, do_operand, lse_head, delta_head, q_row + m, q_start + m, m + kv_len - q_len, columns,
                        first_target, head, BLOCK_M, dk, dv, score_scale,
                        HEAD_DIM, V_DIM, BLOCK_M, BLOCK_D, BLOCK_DV, PRECISION, ACTIVATION, MASK, False,
                    )  # fmt: skip
                for number in tl.range(0, num_partial_blocks(blocks), num_stages=PARTIAL_STAGES):
                    m = partial_block(number, blocks) * BLOCK_M
                    dk, dv = _dkdv_block(
                        k, v, q_operand, do_operand, lse_head, delta_head, q_row + m, q_start + m, m + kv_len - q_len, columns,
                        first_target, head, q_len - m, dk, dv, score_scale,
                        HEAD_DIM, V_DIM, BLOCK_M, BLOCK_D, BLOCK_DV, PRECISION, ACTIVATION, MASK, True,
                    )  # fmt: skip
        out_scale = _output_scale(output_scale, segment_scale_ptr, segment)
        store_rows(dk_operand, row, kv_head, dk * (scale * slope_factor * out_scale), num_rows, HEAD_DIM, BLOCK_N, BLOCK_D)
        store_rows(dv_operand, row, kv_head, dv * (value_factor * out_scale), num_rows, V_DIM, BLOCK_N, BLOCK_DV)
