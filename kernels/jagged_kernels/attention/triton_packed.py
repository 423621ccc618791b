"""Triton kernels of attention for short segments: forward, and one kernel for dq, dk and dv. op.py
has the equations.

A packed tile (packed_tiles.py) holds whole segments, so all keys of its queries are in the tile:
one S, block-diagonal by segment, one softmax, and nothing stored for the backward. A program takes
an equal share of the tiles and heads. Self-attention has one list of rows for both sides. In
cross-attention a segment may have rows on one side alone: its output or its gradients are zeros.

    delta = rowsum(P ∘ dP), which equals rowsum(dO ∘ O)

0 · NaN is NaN, so a NaN or infinity in one segment would reach the other segments of its tile
through an MMA. Such a value makes a checksum not finite: the sum of O in the forward, that of S and
dP before the mask in the backward. Then the tile is computed again, one segment at a time, with the
rows of the others as zeros.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.loads import Rows
from ..common.ptxas import safe_ptxas
from .dropout import dropout_of_head, is_kept, kept_factor
from .mask import is_visible, visible_columns
from .packed_tiles import ROWS
from .params import MaskParams
from .scales import score_factor

ALL = tl.constexpr(-1)  # instead of a segment: all segments of a tile
NONE = tl.constexpr(2**31 - 1)  # larger than any segment


class Options(NamedTuple):
    """Constants of a launch. group: query heads of a key head. block_d, block_dv: head dims padded
    to powers of 2. align: elements that strides count."""

    heads: int
    group: int
    head_dim: int
    v_dim: int
    block_d: int
    block_dv: int
    align: int
    precision: str
    mask: MaskParams | None


class Batch(NamedTuple):
    """What the segments of a batch have: offsets `[B + 1]` of queries, and of keys, None in
    self-attention; the packed tiles; num_targets and segment_scale `[B]`, or None."""

    q_offsets_ptr: tl.tensor
    kv_offsets_ptr: tl.tensor
    tiles_ptr: tl.tensor
    num_tiles_ptr: tl.tensor
    num_targets_ptr: tl.tensor
    segment_scale_ptr: tl.tensor


class Scales(NamedTuple):
    """Factors of the scores, of P, of dS, and of the output, and what dropout_of_head takes, None
    without dropout."""

    scale: tl.tensor
    act_factor: tl.tensor
    dact_factor: tl.tensor
    output_scale: tl.tensor
    seed_ptr: tl.tensor
    threshold: tl.tensor


class Backward(NamedTuple):
    """Pointers of the backward."""

    q: tl.tensor
    k: tl.tensor
    v: tl.tensor
    do: tl.tensor
    dq: tl.tensor
    dk: tl.tensor
    dv: tl.tensor


class _Side(NamedTuple):
    """The queries or the keys of a packed tile. Of each row `[ROWS]`: its row in the operands, its
    segment, -1 if there is none, and whether it is computed."""

    row: tl.tensor
    segment: tl.tensor
    computed: tl.tensor


@triton.jit
def _load_side(tiles_ptr, number, segment):
    """Rows of one segment are computed, or of ALL. number: of the side, counted from the first tile
    on."""
    ptrs = tiles_ptr + tl.cast(number, tl.int64) * (2 * ROWS) + tl.arange(0, ROWS)
    row, of_row = tl.load(ptrs), tl.load(ptrs + ROWS)
    return _Side(row, of_row, (of_row >= 0) & ((segment == ALL) | (of_row == segment)))


@triton.jit
def _next_segment(queries, keys, segment, checksum, CROSS: tl.constexpr):
    """The segment to compute after `segment`; NONE if there is none. After ALL, there is one only
    if the checksum is not finite."""
    following = tl.min(tl.where(queries.segment > segment, queries.segment, NONE), 0)
    if CROSS:
        following = tl.minimum(
            following, tl.min(tl.where(keys.segment > segment, keys.segment, NONE), 0)
        )
    return tl.where((segment == ALL) & (checksum - checksum == 0), NONE, following)


@triton.jit
def _pointers(rows, side, head, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to a tile's rows `[ROWS, BLOCK_D]` of an operand, and a mask of those that are
    computed."""
    columns = tl.arange(0, BLOCK_D)
    first = side.row.to(tl.int64) * rows.stride_row + tl.cast(head, tl.int64) * rows.stride_head
    mask = side.computed[:, None]
    if DIM != BLOCK_D:
        mask = mask & (columns < DIM)[None, :]
    return rows.ptr + first[:, None] + columns[None, :], mask


@triton.jit
def _load(rows, side, head, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    ptrs, mask = _pointers(rows, side, head, DIM, BLOCK_D)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _store(rows, side, head, x, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    ptrs, mask = _pointers(rows, side, head, DIM, BLOCK_D)
    tl.store(ptrs, x.to(rows.ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_of_segments(ptr, side):
    """A number of each row's segment; 0 of rows that are not computed."""
    return tl.load(ptr + side.segment, mask=side.computed, other=0)


@triton.jit
def _visible(queries, keys, batch, CROSS: tl.constexpr, MASK: tl.constexpr):
    """`[ROWS, ROWS]`: whether a row sees a column. Rows that are not computed see each other, as
    zeros."""
    same = queries.segment[:, None] == keys.segment[None, :]
    if MASK is None:
        return same
    else:
        q_offsets_ptr, kv_offsets_ptr = batch.q_offsets_ptr, batch.q_offsets_ptr
        if CROSS:
            kv_offsets_ptr = batch.kv_offsets_ptr
        start = _load_of_segments(kv_offsets_ptr, queries).to(tl.int32)
        end = _load_of_segments(kv_offsets_ptr + 1, queries).to(tl.int32)
        row, column, kv_len = queries.row - start, keys.row - start, end - start
        if CROSS:  # the last row of a segment is in the column of its last key
            row = queries.row - _load_of_segments(q_offsets_ptr + 1, queries).to(tl.int32) + kv_len
            column = keys.row - _load_of_segments(kv_offsets_ptr, keys).to(tl.int32)
        first_target = kv_len
        if MASK.has_targets:
            first_target = tl.maximum(
                kv_len - _load_of_segments(batch.num_targets_ptr, queries).to(tl.int32), 0
            )
        row = row[:, None]
        return same & is_visible(
            column[None, :], row, visible_columns(row, first_target[:, None], MASK), MASK
        )


@triton.jit
def _kept(queries, keys, batch, scales, head, CROSS: tl.constexpr):
    """`[ROWS, ROWS]`: whether dropout keeps a weight."""
    kv_offsets_ptr = batch.q_offsets_ptr
    if CROSS:
        kv_offsets_ptr = batch.kv_offsets_ptr
    start = _load_of_segments(batch.q_offsets_ptr, queries).to(tl.int32)
    key_start = _load_of_segments(kv_offsets_ptr, keys).to(tl.int32)
    dropout = dropout_of_head(scales.seed_ptr, scales.threshold, head, start[:, None])
    return is_kept(dropout, (queries.row - start)[:, None], (keys.row - key_start)[None, :])


@triton.jit
def _output_factors(batch, side, output_scale):
    """The output scale `[ROWS, 1]` of each row's segment."""
    if batch.segment_scale_ptr is None:
        return output_scale
    else:
        return _load_of_segments(batch.segment_scale_ptr, side)[:, None]


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
    x, batch, scales, strides, stride_lse, ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr
):
    """O of one packed tile and head after the other; with softmax also the log-sum-exp of its
    scores. x: Operands, of whose `[rows, heads, dim]` tensors `strides` has the strides of rows and
    heads in turn."""
    HEADS: tl.constexpr = OPTIONS.heads
    ALIGN: tl.constexpr = OPTIONS.align
    MASK: tl.constexpr = OPTIONS.mask
    q_rows = Rows(x.q, None, strides[0] * ALIGN, strides[1] * ALIGN)
    k_rows = Rows(x.k, None, strides[2] * ALIGN, strides[3] * ALIGN)
    v_rows = Rows(x.v, None, strides[4] * ALIGN, strides[5] * ALIGN)
    out_rows = Rows(x.out, None, strides[6] * ALIGN, strides[7] * ALIGN)
    CROSS: tl.constexpr = batch.kv_offsets_ptr is not None
    SIDES: tl.constexpr = 2 if CROSS else 1
    scale = score_factor(scales.scale, ACTIVATION)
    for item in range(tl.program_id(0), tl.load(batch.num_tiles_ptr) * HEADS, tl.num_programs(0)):
        head, segment = item % HEADS, ALL
        while segment < NONE:
            queries = _load_side(batch.tiles_ptr, item // HEADS * SIDES, segment)
            keys = queries
            if CROSS:
                keys = _load_side(batch.tiles_ptr, item // HEADS * SIDES + 1, segment)
            q = _load(q_rows, queries, head, OPTIONS.head_dim, OPTIONS.block_d)
            k = _load(k_rows, keys, head // OPTIONS.group, OPTIONS.head_dim, OPTIONS.block_d)
            v = _load(v_rows, keys, head // OPTIONS.group, OPTIONS.v_dim, OPTIONS.block_dv)
            scores = tl.dot(q, tl.trans(k), input_precision=OPTIONS.precision)
            visible = _visible(queries, keys, batch, CROSS, MASK)
            if ACTIVATION is None:
                p, row_max, row_sum = _softmax(scores * scale, visible)
                lse_ptrs = x.lse + tl.cast(head, tl.int64) * stride_lse + queries.row
                tl.store(lse_ptrs, row_max + tl.log2(row_sum), mask=queries.computed)
                factor = _reciprocal(row_sum)
            else:
                p, _ = ACTIVATION(scores, scale)
                p = tl.where(visible, p, 0.0)
                factor = scales.act_factor * _output_factors(batch, queries, scales.output_scale)
            if scales.seed_ptr is not None:
                p = tl.where(_kept(queries, keys, batch, scales, head, CROSS), p, 0.0)
                factor = factor * kept_factor(scales.threshold)
            out = tl.dot(p.to(v.dtype), v, input_precision=OPTIONS.precision) * factor
            _store(out_rows, queries, head, out, OPTIONS.v_dim, OPTIONS.block_dv)
            segment = _next_segment(queries, keys, segment, tl.sum(out), CROSS)


@safe_ptxas
@triton.jit
def packed_attention_bwd_kernel(
    x, batch, scales, strides, ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr
):
    """dQ, dK and dV of one packed tile and key head after the other, with the query heads of its
    group. x: Backward, with `strides` as the forward's."""
    GROUP: tl.constexpr = OPTIONS.group
    HEAD_DIM: tl.constexpr = OPTIONS.head_dim
    V_DIM: tl.constexpr = OPTIONS.v_dim
    BLOCK_D: tl.constexpr = OPTIONS.block_d
    BLOCK_DV: tl.constexpr = OPTIONS.block_dv
    ALIGN: tl.constexpr = OPTIONS.align
    PRECISION: tl.constexpr = OPTIONS.precision
    MASK: tl.constexpr = OPTIONS.mask
    q_rows = Rows(x.q, None, strides[0] * ALIGN, strides[1] * ALIGN)
    k_rows = Rows(x.k, None, strides[2] * ALIGN, strides[3] * ALIGN)
    v_rows = Rows(x.v, None, strides[4] * ALIGN, strides[5] * ALIGN)
    do_rows = Rows(x.do, None, strides[6] * ALIGN, strides[7] * ALIGN)
    dq_rows = Rows(x.dq, None, strides[8] * ALIGN, strides[9] * ALIGN)
    dk_rows = Rows(x.dk, None, strides[10] * ALIGN, strides[11] * ALIGN)
    dv_rows = Rows(x.dv, None, strides[12] * ALIGN, strides[13] * ALIGN)
    CROSS: tl.constexpr = batch.kv_offsets_ptr is not None
    SIDES: tl.constexpr = 2 if CROSS else 1
    score_scale = score_factor(scales.scale, ACTIVATION)
    KEY_HEADS: tl.constexpr = OPTIONS.heads // OPTIONS.group
    for item in range(
        tl.program_id(0), tl.load(batch.num_tiles_ptr) * KEY_HEADS, tl.num_programs(0)
    ):
        key_head, segment = item % KEY_HEADS, ALL
        while segment < NONE:
            queries = _load_side(batch.tiles_ptr, item // KEY_HEADS * SIDES, segment)
            keys = queries
            if CROSS:
                keys = _load_side(batch.tiles_ptr, item // KEY_HEADS * SIDES + 1, segment)
            k = _load(k_rows, keys, key_head, HEAD_DIM, BLOCK_D)
            v = _load(v_rows, keys, key_head, V_DIM, BLOCK_DV)
            visible = _visible(queries, keys, batch, CROSS, MASK)
            factor = _output_factors(batch, queries, scales.output_scale)
            key_factor = factor
            if CROSS:
                key_factor = _output_factors(batch, keys, scales.output_scale)
            dk, dv = tl.zeros([ROWS, BLOCK_D], tl.float32), tl.zeros([ROWS, BLOCK_DV], tl.float32)
            checksum = 0.0
            for group_head in range(0, GROUP):
                head = key_head * GROUP + group_head
                q = _load(q_rows, queries, head, HEAD_DIM, BLOCK_D)
                do = _load(do_rows, queries, head, V_DIM, BLOCK_DV)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
                checksum += tl.sum(scores + dp)
                dp = tl.where(visible, dp, 0.0)
                if scales.seed_ptr is not None:
                    kept = _kept(queries, keys, batch, scales, head, CROSS)
                    dp = tl.where(kept, dp * kept_factor(scales.threshold), 0.0)
                if ACTIVATION is None:
                    p, _, row_sum = _softmax(scores * score_scale, visible)
                    p = p * _reciprocal(row_sum)
                    ds = p * (dp - tl.sum(p * dp, 1)[:, None])
                else:
                    p, dact = ACTIVATION(scores, score_scale)
                    p, ds = tl.where(visible, p, 0.0), tl.where(visible, dact * dp, 0.0)
                if scales.seed_ptr is not None:
                    p = tl.where(kept, p * kept_factor(scales.threshold), 0.0)
                ds = ds.to(q.dtype)
                dq = tl.dot(ds, k, input_precision=PRECISION) * (
                    scales.scale * scales.dact_factor * factor
                )
                _store(dq_rows, queries, head, dq, HEAD_DIM, BLOCK_D)
                dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
                if GROUP == 1:  # frees the registers of dv before dk takes as many
                    _store(
                        dv_rows, keys, key_head, dv * (scales.act_factor * key_factor), V_DIM,
                        BLOCK_DV,
                    )  # fmt: skip
                dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
            if GROUP > 1:
                _store(
                    dv_rows, keys, key_head, dv * (scales.act_factor * key_factor), V_DIM, BLOCK_DV
                )
            _store(
                dk_rows, keys, key_head, dk * (scales.scale * scales.dact_factor * key_factor),
                HEAD_DIM, BLOCK_D,
            )  # fmt: skip
            segment = _next_segment(queries, keys, segment, checksum, CROSS)
