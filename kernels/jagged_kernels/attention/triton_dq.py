"""Portable kernel of attention's dq (triton_tiles.py has the equations)."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.loads import Rows, load_rows, store_rows, zigzag_waves
from ..common.ptxas import safe_ptxas
from .dropout import Dropout, is_kept
from .mask import is_visible, masked_block, num_masked_blocks
from .scales import score_factor
from .triton_bias import add_to_tables, bias_of_rows, store_buckets, sums_of_tile
from .triton_tiles import (
    KeyBlock,
    Keys,
    block_scores,
    load_call_tile,
    load_keys,
    query_rows,
    segment_dropout,
    segment_factor,
    visited_blocks,
)


class BackwardDq(NamedTuple):
    """Pointers of the dq kernel. delta is a result."""

    q: tl.tensor
    k: tl.tensor
    v: tl.tensor
    out: tl.tensor
    do: tl.tensor
    dq: tl.tensor
    lse: tl.tensor
    delta: tl.tensor


class _QueryTile(NamedTuple):
    """A tile's query rows in registers: q, dO, and with softmax the rows' log-sum-exp and delta.
    dropout: of their weights, or None."""

    q: tl.tensor
    do: tl.tensor
    lse: tl.tensor
    delta: tl.tensor
    dropout: Dropout


@triton.jit
def _dq_block(
    queries, keys, block, visible, acc, buckets, scale, bias, sums,
    ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One key block: dS from the scores computed again, acc += dS k. With `sums`, dS is also added
    to the sums of the bias tables. Returns acc and buckets."""
    MASK: tl.constexpr = OPTIONS.mask
    BIAS: tl.constexpr = OPTIONS.bias
    k, v = load_keys(keys, block, OPTIONS, MASKED)
    scores = block_scores(queries.q, k, block, bias, OPTIONS)
    dp = tl.dot(queries.do, tl.trans(v), input_precision=OPTIONS.precision)
    if queries.dropout is not None:
        columns = tl.arange(0, OPTIONS.block)[None, :]
        kept = is_kept(queries.dropout, visible.places, columns, column=block.column)
        dp = tl.where(kept, dp * queries.dropout.factor, 0.0)
    if ACTIVATION is None:
        ds = tl.exp2(scores * scale - queries.lse[:, None]) * (dp - queries.delta[:, None])
    else:
        _, dact = ACTIVATION(scores, scale)
        ds = dact * dp
    if MASKED:
        columns = tl.arange(0, OPTIONS.block)[None, :]
        if OPTIONS.mask is not None:
            ds = tl.where(
                is_visible(block.column + columns, visible.rows, visible.bounds, MASK), ds, 0.0
            )
        # exp2 may have overflown where there is no key; elsewhere k is 0
        elif ACTIVATION is None:
            ds = tl.where(columns < block.num_keys, ds, 0.0)
    if OPTIONS.buckets > 0:
        buckets = add_to_tables(ds, block, bias, sums, buckets, BIAS)
    return tl.dot(ds.to(k.dtype), k, acc, input_precision=OPTIONS.precision), buckets


@safe_ptxas
@triton.jit(
    do_not_specialize=["num_segments", "stride_lse"],
    do_not_specialize_on_alignment=["num_tiles_ptr"],
)
def attention_bwd_dq_kernel(
    x, k_desc, v_desc, call, num_segments, num_tiles_ptr, bias, strides, stride_lse, sums,
    ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """dq of a tile of query rows; with softmax also writes delta = rowsum(dO ∘ O), which the dk, dv
    kernel reads. With `sums`, a TableSums, also sums dS for the gradients of the bias tables, each
    program in its own memory. x: BackwardDq, with `strides` as the forward's."""
    BIAS: tl.constexpr = OPTIONS.bias
    BLOCK_M: tl.constexpr = OPTIONS.tile
    BLOCK_N: tl.constexpr = OPTIONS.block
    BLOCK_D: tl.constexpr = OPTIONS.block_d
    ALIGN: tl.constexpr = OPTIONS.align
    BUCKETS: tl.constexpr = OPTIONS.buckets
    worker, num_workers, num_tiles = tl.program_id(0), tl.num_programs(0), tl.load(num_tiles_ptr)
    q_rows = Rows(x.q, None, strides[0] * ALIGN, strides[1] * ALIGN)
    keys = Keys(
        Rows(x.k, k_desc, strides[2] * ALIGN, strides[3] * ALIGN),
        Rows(x.v, v_desc, strides[4] * ALIGN, strides[5] * ALIGN),
        None,
    )
    out_rows = Rows(x.out, None, strides[6] * ALIGN, strides[7] * ALIGN)
    do_rows = Rows(x.do, None, strides[8] * ALIGN, strides[9] * ALIGN)
    dq_rows = Rows(x.dq, None, strides[10] * ALIGN, strides[11] * ALIGN)
    score_scale = score_factor(call.scale, ACTIVATION)
    waves = zigzag_waves(num_tiles, worker, num_workers)
    next_tile = load_call_tile(call, 0, waves, num_segments)
    for wave in range(0, waves):
        tile = next_tile
        next_tile = load_call_tile(call, wave + 1, waves, num_segments)
        first, row, q_row, num_rows = query_rows(tile, OPTIONS)
        q = load_rows(q_rows, q_row, tile.head, num_rows, OPTIONS.head_dim, BLOCK_M, BLOCK_D, True)
        do = load_rows(
            do_rows, row, tile.head, num_rows, OPTIONS.v_dim, BLOCK_M, OPTIONS.block_dv, True
        )
        blocks, visible = visited_blocks(call, tile, first, num_rows, num_segments, OPTIONS)
        lse, delta = 0.0, 0.0
        if ACTIVATION is None:
            out = load_rows(
                out_rows, row, tile.head, num_rows, OPTIONS.v_dim, BLOCK_M, OPTIONS.block_dv, True
            )
            lanes = tl.arange(0, BLOCK_M)
            offsets = tile.head.to(tl.int64) * stride_lse + row + lanes
            lse = tl.load(x.lse + offsets, mask=lanes < num_rows, other=0.0)
            delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
            tl.store(x.delta + offsets, delta, mask=lanes < num_rows)

        dropout = segment_dropout(call, tile.head, tile.q_start, OPTIONS)
        queries = _QueryTile(q, do, lse, delta, dropout)
        row_bias = bias_of_rows(bias, tile, first, num_segments, BLOCK_M, BIAS)
        tile_sums = None
        if BUCKETS > 0:
            factor = call.dact_factor * segment_factor(call, tile)
            tile_sums = sums_of_tile(sums, tile, num_rows, factor, bias, BLOCK_M * BLOCK_N, BIAS)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        buckets = tl.zeros([BUCKETS if BUCKETS > 0 else 1], tl.float32)
        for n in range(
            blocks.full_first * BLOCK_N, (blocks.full_first + blocks.full_count) * BLOCK_N, BLOCK_N
        ):
            key_block = KeyBlock(tile.kv_start + n, n, tile.head // OPTIONS.group, BLOCK_N)
            acc, buckets = _dq_block(
                queries, keys, key_block, visible, acc, buckets, score_scale, row_bias, tile_sums,
                ACTIVATION, OPTIONS, False,
            )  # fmt: skip
        for number in tl.range(0, num_masked_blocks(blocks), num_stages=OPTIONS.masked_stages):
            n = masked_block(number, blocks) * BLOCK_N
            key_block = KeyBlock(tile.kv_start + n, n, tile.head // OPTIONS.group, tile.kv_len - n)
            acc, buckets = _dq_block(
                queries, keys, key_block, visible, acc, buckets, score_scale, row_bias, tile_sums,
                ACTIVATION, OPTIONS, True,
            )  # fmt: skip
        if BUCKETS > 0:
            store_buckets(tile_sums, buckets, BIAS)
        acc = acc * (call.scale * call.dact_factor * segment_factor(call, tile))
        store_rows(dq_rows, row, tile.head, acc, num_rows, OPTIONS.head_dim, BLOCK_M, BLOCK_D)
