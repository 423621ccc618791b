"""Portable kernel of attention's dk and dv (triton_tiles.py has the equations)."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.loads import Rows, ScheduledTile, load_rows, load_segment, store_rows, zigzag_waves
from ..common.ptxas import safe_ptxas
from .bias import query_times
from .dropout import Dropout, is_kept, kept_factor
from .mask import (
    first_target_column,
    is_visible,
    masked_block,
    num_masked_blocks,
    row_blocks,
    visible_columns,
)
from .scales import score_factor
from .triton_bias import bias_block, bias_of_keys
from .triton_tiles import load_call_tile, segment_dropout, segment_factor


class BackwardDkdv(NamedTuple):
    """Pointers of the dk, dv kernel."""

    q: tl.tensor
    k: tl.tensor
    v: tl.tensor
    do: tl.tensor
    dk: tl.tensor
    dv: tl.tensor
    lse: tl.tensor
    delta: tl.tensor


class _KeyTile(NamedTuple):
    """A tile's keys in registers: k, v, their columns `[BLOCK_N, 1]`, and the segment's first
    target column."""

    k: tl.tensor
    v: tl.tensor
    columns: tl.tensor
    first_target: tl.tensor


class _Queries(NamedTuple):
    """What a tile of keys loops over: q and dO, with softmax the head's lse and delta, the head,
    and the dropout of its weights, or None."""

    q: Rows
    do: Rows
    lse_ptr: tl.tensor
    delta_ptr: tl.tensor
    head: tl.tensor
    dropout: Dropout


class _Starts(NamedTuple):
    """Of a query segment: its first row in q, and in the other operands, the column of its first
    row, and its number of rows."""

    q_row: tl.tensor
    row: tl.tensor
    column: tl.tensor
    num_rows: tl.tensor


class _QueryBlock(NamedTuple):
    """A block of query rows: first row in the segment, in q, and in the other operands; column of
    the first row, and number of rows from there on in the segment."""

    first: tl.tensor
    q_row: tl.tensor
    row: tl.tensor
    column: tl.tensor
    num_rows: tl.tensor


@triton.jit
def _transposed_scores(keys, q, block, bias, OPTIONS: tl.constexpr):
    """k qᵀ of a block of query rows, plus the bias divided by the scale."""
    BIAS: tl.constexpr = OPTIONS.bias
    if OPTIONS.bias is None:
        return tl.dot(keys.k, tl.trans(q), input_precision=OPTIONS.precision)
    else:
        times = query_times(bias.of_tile, block.first + tl.arange(0, OPTIONS.block), BIAS)
        start = bias_block(
            bias.of_tile, block.first, bias.row, bias.times, times,
            keys.k.shape[0], OPTIONS.block, True, BIAS,
        )  # fmt: skip
        return tl.dot(keys.k, tl.trans(q), start, input_precision=OPTIONS.precision)


@triton.jit
def _dkdv_block(
    keys, queries, block, dk, dv, scale, bias,
    ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One query block: dv += Pᵀ dO, dk += dSᵀ q. Scores are transposed, so that Pᵀ and dSᵀ are
    first operands of MMAs."""
    MASK: tl.constexpr = OPTIONS.mask
    BLOCK_M: tl.constexpr = OPTIONS.block
    head, num_rows = queries.head, block.num_rows
    q = load_rows(
        queries.q, block.q_row, head, num_rows, OPTIONS.head_dim, BLOCK_M, OPTIONS.block_d, MASKED
    )
    rows = tl.arange(0, BLOCK_M)
    if MASKED and OPTIONS.mask is not None:
        columns_of_rows = (block.column + rows)[None, :]
        bounds = visible_columns(columns_of_rows, keys.first_target, MASK)
        visible = is_visible(keys.columns, columns_of_rows, bounds, MASK)
    do = load_rows(
        queries.do, block.row, head, num_rows, OPTIONS.v_dim, BLOCK_M, OPTIONS.block_dv, MASKED
    )
    scores = _transposed_scores(keys, q, block, bias, OPTIONS)
    dp = tl.dot(keys.v, tl.trans(do), input_precision=OPTIONS.precision)
    if queries.dropout is not None:
        if OPTIONS.kv_shared:  # rows of the batch: a chunk of them may begin anywhere
            kept = is_kept(queries.dropout, (block.row + rows)[None, :], keys.columns)
        else:
            kept = is_kept(queries.dropout, rows[None, :], keys.columns, block.first)
        dp = tl.where(kept, dp * queries.dropout.factor, 0.0)
    if ACTIVATION is None:
        if MASKED:  # rows past the segment add nothing: exp2(0 - inf) = 0
            real = rows < num_rows
            lse = tl.load(queries.lse_ptr + block.row + rows, mask=real, other=float("inf"))
            delta = tl.load(queries.delta_ptr + block.row + rows, mask=real, other=0.0)
        else:
            lse = tl.load(queries.lse_ptr + block.row + rows)
            delta = tl.load(queries.delta_ptr + block.row + rows)
        p = tl.exp2(scores * scale - lse[None, :])
        ds = p * (dp - delta[None, :])
    else:
        p, dact = ACTIVATION(scores, scale)
        ds = dact * dp
    if MASKED and OPTIONS.mask is not None:
        p, ds = tl.where(visible, p, 0.0), tl.where(visible, ds, 0.0)
    if queries.dropout is not None:
        p = tl.where(kept, p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=OPTIONS.precision)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=OPTIONS.precision)
    return dk, dv


@triton.jit
def _query_block(starts, m, num_rows):
    """The block from the m-th row of a segment on."""
    return _QueryBlock(m, starts.q_row + m, starts.row + m, m + starts.column, num_rows)


@triton.jit
def _dkdv_head(
    keys, queries, starts, blocks, dk, dv, scale, bias,
    ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """The blocks of query rows of one query segment and head: full ones, then masked ones."""
    BLOCK_M: tl.constexpr = OPTIONS.block
    for m in range(
        blocks.full_first * BLOCK_M, (blocks.full_first + blocks.full_count) * BLOCK_M, BLOCK_M
    ):
        block = _query_block(starts, m, BLOCK_M)
        dk, dv = _dkdv_block(keys, queries, block, dk, dv, scale, bias, ACTIVATION, OPTIONS, False)
    for number in tl.range(0, num_masked_blocks(blocks), num_stages=OPTIONS.masked_stages):
        m = masked_block(number, blocks) * BLOCK_M
        block = _query_block(starts, m, starts.num_rows - m)
        dk, dv = _dkdv_block(keys, queries, block, dk, dv, scale, bias, ACTIVATION, OPTIONS, True)
    return dk, dv


@safe_ptxas
@triton.jit(
    do_not_specialize=["num_segments", "stride_lse"],
    do_not_specialize_on_alignment=["num_tiles_ptr"],
)
def attention_bwd_dkdv_kernel(
    x, q_desc, k_desc, do_desc, call, num_segments, num_tiles_ptr, bias, strides, stride_lse,
    ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """dk, dv of a tile of key rows. It loops over the query groups, the query heads of the key
    head, and their blocks of rows. x: BackwardDkdv, with `strides` as the forward's."""
    BIAS: tl.constexpr = OPTIONS.bias
    BLOCK_N: tl.constexpr = OPTIONS.tile
    BLOCK_D: tl.constexpr = OPTIONS.block_d
    BLOCK_DV: tl.constexpr = OPTIONS.block_dv
    ALIGN: tl.constexpr = OPTIONS.align
    MASK: tl.constexpr = OPTIONS.mask
    worker, num_workers, num_tiles = tl.program_id(0), tl.num_programs(0), tl.load(num_tiles_ptr)
    q_rows = Rows(x.q, q_desc, strides[0] * ALIGN, strides[1] * ALIGN)
    k_rows = Rows(x.k, k_desc, strides[2] * ALIGN, strides[3] * ALIGN)
    v_rows = Rows(x.v, None, strides[4] * ALIGN, strides[5] * ALIGN)
    do_rows = Rows(x.do, do_desc, strides[6] * ALIGN, strides[7] * ALIGN)
    dk_rows = Rows(x.dk, None, strides[8] * ALIGN, strides[9] * ALIGN)
    dv_rows = Rows(x.dv, None, strides[10] * ALIGN, strides[11] * ALIGN)
    score_scale = score_factor(call.scale, ACTIVATION)
    waves = zigzag_waves(num_tiles, worker, num_workers)
    next_tile = load_call_tile(call, 0, waves, num_segments)
    for wave in range(0, waves):
        tile = next_tile
        next_tile = load_call_tile(call, wave + 1, waves, num_segments)
        row, num_rows = tile.kv_start + tile.block * BLOCK_N, tile.kv_len - tile.block * BLOCK_N
        kv_row = row
        if OPTIONS.kv_shared:
            kv_row = row - tile.kv_start
        v = load_rows(v_rows, kv_row, tile.head, num_rows, OPTIONS.v_dim, BLOCK_N, BLOCK_DV, True)
        k = load_rows(
            k_rows, kv_row, tile.head, num_rows, OPTIONS.head_dim, BLOCK_N, BLOCK_D, k_desc is None
        )
        first_target = first_target_column(
            call.num_targets_ptr, tile.segment, tile.kv_len, MASK, num_segments
        )

        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        segment, q_start, q_len = tile.segment, tile.q_start, tile.q_len
        for query_group in range(0, OPTIONS.query_groups):
            of_group = first_target
            if OPTIONS.query_groups > 1:
                segment = tile.segment + query_group * num_segments
                q_start, q_len = load_segment(call.q_offsets_ptr, segment)
                of_group = first_target_column(
                    call.num_targets_ptr, segment, tile.kv_len, MASK, num_segments
                )
            q_row = q_start
            if OPTIONS.q_shared:
                q_row = q_start - q_start  # 0, of q_start's type
            blocks = row_blocks(
                tile.block * BLOCK_N, q_len, tile.kv_len, of_group, MASK, OPTIONS.block, BLOCK_N
            )
            starts = _Starts(q_row, q_start, tile.kv_len - q_len, q_len)
            keys = _KeyTile(k, v, (tile.block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None], of_group)
            for group_head in range(0, OPTIONS.group):
                head = tile.head * OPTIONS.group + group_head
                lse_head, delta_head = x.lse, x.delta
                if ACTIVATION is None:
                    of_head = head.to(tl.int64) * stride_lse
                    lse_head, delta_head = x.lse + of_head, x.delta + of_head
                dropout = segment_dropout(call, head, q_start, OPTIONS)
                queries = _Queries(q_rows, do_rows, lse_head, delta_head, head, dropout)
                of_queries = ScheduledTile(
                    segment, tile.head, tile.block, q_start, q_len, tile.kv_start, tile.kv_len
                )
                key_bias = bias_of_keys(bias, of_queries, head, num_segments, BLOCK_N, BIAS)
                dk, dv = _dkdv_head(
                    keys, queries, starts, blocks, dk, dv, score_scale, key_bias,
                    ACTIVATION, OPTIONS,
                )  # fmt: skip
        factor = segment_factor(call, tile)
        dk *= call.scale * call.dact_factor * factor
        store_rows(dk_rows, row, tile.head, dk, num_rows, OPTIONS.head_dim, BLOCK_N, BLOCK_D)
        dv *= call.act_factor * factor
        if call.seed_ptr is not None:
            dv *= kept_factor(call.threshold)
        store_rows(dv_rows, row, tile.head, dv, num_rows, OPTIONS.v_dim, BLOCK_N, BLOCK_DV)
