"""Triton kernels of self-attention for short segments: forward, and one kernel for dq, dk and dv. op.py has the equations.

A packed tile (schedule/packed.py) holds whole segments, so all keys of its rows are in the tile: one S, block-diagonal by segment, one
softmax, and nothing stored for the backward. A program takes an equal share of the tiles and heads.

    delta = rowsum(P ∘ dP), which equals rowsum(dO ∘ O)

0 · NaN is NaN, so a NaN or infinity in one segment would reach the other segments of its tile through an MMA. Such a value makes a checksum
not finite: the sum of O in the forward, that of S and dP before the mask in the backward. Then the tile is computed again, one segment at a
time, with the rows of the others as zeros.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.loads import Rows
from ..common.ptxas import safe_ptxas
from ..schedule.packed import ROWS
from .mask import is_visible, visible_columns
from .scales import score_factor

ALL = tl.constexpr(-1)  # instead of a segment: all segments of a tile
NONE = tl.constexpr(2**31 - 1)  # larger than any segment


class _Batch(NamedTuple):
    """What the segments of a batch have: offsets `[B + 1]`, and num_targets and segment_scale `[B]`, or None."""

    offsets_ptr: tl.tensor
    num_targets_ptr: tl.tensor
    segment_scale_ptr: tl.tensor


class _Tile(NamedTuple):
    """Of each row `[ROWS]` of a packed tile: its row in the operands and its segment, -1 if there is none."""

    row: tl.tensor
    segment: tl.tensor


@triton.jit
def _load_tile(tiles_ptr, number):
    ptrs = tiles_ptr + tl.cast(number, tl.int64) * (2 * ROWS) + tl.arange(0, ROWS)
    return _Tile(tl.load(ptrs), tl.load(ptrs + ROWS))


@triton.jit
def _is_computed(tile, segment):
    """Which rows are computed: those of one segment, or all."""
    return (tile.segment >= 0) & ((segment == ALL) | (tile.segment == segment))


@triton.jit
def _next_segment(tile, segment, checksum):
    """The segment to compute after `segment`; NONE if there is none. After ALL, there is one only if the checksum is not finite."""
    following = tl.min(tl.where(tile.segment > segment, tile.segment, NONE), 0)
    return tl.where((segment == ALL) & (checksum - checksum == 0), NONE, following)


@triton.jit
def _pointers(rows, tile, head, computed, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to a tile's rows `[ROWS, BLOCK_D]` of an operand, and a mask of those that are computed."""
    columns = tl.arange(0, BLOCK_D)
    first = tile.row.to(tl.int64) * rows.stride_row + tl.cast(head, tl.int64) * rows.stride_head
    mask = computed[:, None]
    if DIM != BLOCK_D:
        mask = mask & (columns < DIM)[None, :]
    return rows.ptr + first[:, None] + columns[None, :], mask


@triton.jit
def _load(rows, tile, head, computed, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    ptrs, mask = _pointers(rows, tile, head, computed, DIM, BLOCK_D)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _store(rows, tile, head, computed, x, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    ptrs, mask = _pointers(rows, tile, head, computed, DIM, BLOCK_D)
    tl.store(ptrs, x.to(rows.ptr.dtype.element_ty), mask=mask)


@triton.jit
def _visible(tile, batch, computed, MASK: tl.constexpr):
    """`[ROWS, ROWS]`: whether a row sees a column. Rows that are not computed see each other, as zeros."""
    same = tile.segment[:, None] == tile.segment[None, :]
    if MASK is None:
        return same
    else:
        start = tl.load(batch.offsets_ptr + tile.segment, mask=computed, other=0).to(tl.int32)
        end = tl.load(batch.offsets_ptr + tile.segment + 1, mask=computed, other=0).to(tl.int32)
        column, first_target = tile.row - start, end - start
        if MASK.has_targets:
            num_targets = tl.load(batch.num_targets_ptr + tile.segment, mask=computed, other=0).to(tl.int32)
            first_target = tl.maximum(first_target - num_targets, 0)
        row = column[:, None]
        return same & is_visible(column[None, :], row, visible_columns(row, first_target[:, None], MASK), MASK)


@triton.jit
def _output_factors(batch, tile, computed, output_scale):
    """The output scale `[ROWS, 1]` of each row's segment."""
    if batch.segment_scale_ptr is None:
        return output_scale
    else:
        return tl.load(batch.segment_scale_ptr + tile.segment, mask=computed, other=0.0)[:, None]


@triton.jit
def _softmax(scores, visible):
    """exp2(scores - row maximum), 0 where not visible; the rows' maximum and sum."""
    scores = tl.where(visible, scores, float("-inf"))
    row_max = tl.max(scores, 1)
    p = tl.exp2(scores - tl.where(row_max == float("-inf"), 0.0, row_max)[:, None])
    return p, row_max, tl.sum(p, 1)


@triton.jit
def _reciprocal(row_sum):
    """1 / row_sum `[ROWS, 1]`; 1 for a row that sees no key, whose P is 0."""
    return (1.0 / tl.where(row_sum > 0, row_sum, 1.0))[:, None]


@safe_ptxas
@triton.jit(do_not_specialize=["stride_lse"])
def packed_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, offsets_ptr, tiles_ptr, num_tiles_ptr, num_targets_ptr, segment_scale_ptr,
    scale, act_factor, output_scale,
    stride_qm, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_om, stride_oh, stride_lse,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """O of one packed tile and head after the other; with softmax also the log-sum-exp of its scores."""
    q_rows = Rows(q_ptr, None, stride_qm * ALIGN, stride_qh * ALIGN)
    k_rows = Rows(k_ptr, None, stride_kn * ALIGN, stride_kh * ALIGN)
    v_rows = Rows(v_ptr, None, stride_vn * ALIGN, stride_vh * ALIGN)
    out_rows = Rows(out_ptr, None, stride_om * ALIGN, stride_oh * ALIGN)
    batch = _Batch(offsets_ptr, num_targets_ptr, segment_scale_ptr)
    scale = score_factor(scale, ACTIVATION)
    for item in range(tl.program_id(0), tl.load(num_tiles_ptr) * HEADS, tl.num_programs(0)):
        head, segment = item % HEADS, ALL
        while segment < NONE:
            tile = _load_tile(tiles_ptr, item // HEADS)
            computed = _is_computed(tile, segment)
            q = _load(q_rows, tile, head, computed, HEAD_DIM, BLOCK_D)
            k = _load(k_rows, tile, head // GROUP, computed, HEAD_DIM, BLOCK_D)
            v = _load(v_rows, tile, head // GROUP, computed, V_DIM, BLOCK_DV)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            visible = _visible(tile, batch, computed, MASK)
            if ACTIVATION is None:
                p, row_max, row_sum = _softmax(scores * scale, visible)
                lse_ptrs = lse_ptr + tl.cast(head, tl.int64) * stride_lse + tile.row
                tl.store(lse_ptrs, row_max + tl.log2(row_sum), mask=computed)
                factor = _reciprocal(row_sum)
            else:
                p, _ = ACTIVATION(scores, scale)
                p = tl.where(visible, p, 0.0)
                factor = act_factor * _output_factors(batch, tile, computed, output_scale)
            out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION) * factor
            _store(out_rows, tile, head, computed, out, V_DIM, BLOCK_DV)
            segment = _next_segment(tile, segment, tl.sum(out))


@safe_ptxas
@triton.jit
def packed_attention_bwd_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, offsets_ptr, tiles_ptr, num_tiles_ptr, num_targets_ptr, segment_scale_ptr,
    scale, act_factor, dact_factor, output_scale,
    stride_qm, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_dom, stride_doh,
    stride_dqm, stride_dqh, stride_dkn, stride_dkh, stride_dvn, stride_dvh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of one packed tile and key head after the other, with the query heads of its group."""
    q_rows = Rows(q_ptr, None, stride_qm * ALIGN, stride_qh * ALIGN)
    k_rows = Rows(k_ptr, None, stride_kn * ALIGN, stride_kh * ALIGN)
    v_rows = Rows(v_ptr, None, stride_vn * ALIGN, stride_vh * ALIGN)
    do_rows = Rows(do_ptr, None, stride_dom * ALIGN, stride_doh * ALIGN)
    dq_rows = Rows(dq_ptr, None, stride_dqm * ALIGN, stride_dqh * ALIGN)
    dk_rows = Rows(dk_ptr, None, stride_dkn * ALIGN, stride_dkh * ALIGN)
    dv_rows = Rows(dv_ptr, None, stride_dvn * ALIGN, stride_dvh * ALIGN)
    batch = _Batch(offsets_ptr, num_targets_ptr, segment_scale_ptr)
    score_scale = score_factor(scale, ACTIVATION)
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    for item in range(tl.program_id(0), tl.load(num_tiles_ptr) * KEY_HEADS, tl.num_programs(0)):
        key_head, segment = item % KEY_HEADS, ALL
        while segment < NONE:
            tile = _load_tile(tiles_ptr, item // KEY_HEADS)
            computed = _is_computed(tile, segment)
            k = _load(k_rows, tile, key_head, computed, HEAD_DIM, BLOCK_D)
            v = _load(v_rows, tile, key_head, computed, V_DIM, BLOCK_DV)
            visible = _visible(tile, batch, computed, MASK)
            factor = _output_factors(batch, tile, computed, output_scale)
            dk, dv = tl.zeros([ROWS, BLOCK_D], tl.float32), tl.zeros([ROWS, BLOCK_DV], tl.float32)
            checksum = 0.0
            for group_head in range(0, GROUP):
                head = key_head * GROUP + group_head
                q = _load(q_rows, tile, head, computed, HEAD_DIM, BLOCK_D)
                do = _load(do_rows, tile, head, computed, V_DIM, BLOCK_DV)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
                checksum += tl.sum(scores + dp)
                dp = tl.where(visible, dp, 0.0)
                if ACTIVATION is None:
                    p, _, row_sum = _softmax(scores * score_scale, visible)
                    p = p * _reciprocal(row_sum)
                    ds = p * (dp - tl.sum(p * dp, 1)[:, None])
                else:
                    p, dact = ACTIVATION(scores, score_scale)
                    p, ds = tl.where(visible, p, 0.0), tl.where(visible, dact * dp, 0.0)
                ds = ds.to(q.dtype)
                dq = tl.dot(ds, k, input_precision=PRECISION) * (scale * dact_factor * factor)
                _store(dq_rows, tile, head, computed, dq, HEAD_DIM, BLOCK_D)
                dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
                if GROUP == 1:  # frees the registers of dv before dk takes as many
                    _store(dv_rows, tile, key_head, computed, dv * (act_factor * factor), V_DIM, BLOCK_DV)
                dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
            if GROUP > 1:
                _store(dv_rows, tile, key_head, computed, dv * (act_factor * factor), V_DIM, BLOCK_DV)
            _store(dk_rows, tile, key_head, computed, dk * (scale * dact_factor * factor), HEAD_DIM, BLOCK_D)
            segment = _next_segment(tile, segment, checksum)
