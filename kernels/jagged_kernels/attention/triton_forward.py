"""Portable forward of jagged attention (triton_tiles.py has the equations)."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.loads import Rows, key_row, load_page, load_rows, store_rows, zigzag_waves
from ..common.ptxas import safe_ptxas
from .dropout import is_kept
from .mask import is_visible, masked_block, num_masked_blocks
from .scales import score_factor
from .triton_bias import bias_of_rows
from .triton_tiles import (
    KeyBlock,
    Keys,
    block_scores,
    load_call_tile,
    load_keys,
    query_rows,
    scaled_keys,
    segment_dropout,
    segment_factor,
    visited_blocks,
)


class Forward(NamedTuple):
    """Pointers of the forward kernel. out and lse are results. key_scales: factors of keys in 8
    bits, with the strides of their rows and heads, or None."""

    q: tl.tensor
    k: tl.tensor
    v: tl.tensor
    out: tl.tensor
    lse: tl.tensor
    key_scales: tl.tensor = None
    scales_row_stride: tl.tensor = None
    scales_head_stride: tl.tensor = None


class _State(NamedTuple):
    """acc = P v `[BLOCK_M, BLOCK_DV]`, and softmax's running maximum and sum of each row."""

    acc: tl.tensor
    row_max: tl.tensor
    row_sum: tl.tensor


@triton.jit
def _fwd_block(
    q, keys, block, visible, state, scale, bias, dropout,
    ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One key block: scores, online softmax or activation, acc += P v. Returns the new state."""
    MASK: tl.constexpr = OPTIONS.mask
    k, v = load_keys(keys, block, OPTIONS, MASKED)
    if keys.scales is not None:
        k, v = scaled_keys(k, v, keys.scales, block, q.dtype)
    scores = block_scores(q, k, block, bias, OPTIONS)
    columns = tl.arange(0, OPTIONS.block)[None, :]
    if MASKED and OPTIONS.mask is not None:
        seen = is_visible(block.column + columns, visible.rows, visible.bounds, MASK)
    else:
        seen = columns < block.num_keys
    acc, row_max, row_sum = state
    if ACTIVATION is None:
        if MASKED:
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        subtracted = new_max
        # the maximum of a row that has seen no key is -inf; any finite number gives it weights of 0
        if OPTIONS.mask is not None:
            subtracted = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores * scale - subtracted[:, None])
        rescale = tl.exp2(row_max - subtracted)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        row_max = new_max
        acc = acc * rescale[:, None]
    else:  # past the segment's end v is 0
        p, _ = ACTIVATION(scores, scale)
        if MASKED and OPTIONS.mask is not None:
            p = tl.where(seen, p, 0.0)
    if dropout is not None:
        p = tl.where(is_kept(dropout, visible.places, columns, column=block.column), p, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=OPTIONS.precision)
    return _State(acc, row_max, row_sum)


@safe_ptxas
@triton.jit(
    do_not_specialize=["num_segments", "stride_lse"],
    do_not_specialize_on_alignment=["num_tiles_ptr", "page_table_ptr"],
)
def attention_fwd_kernel(
    x, k_desc, v_desc, call, num_segments, num_tiles_ptr, bias, strides, stride_lse, page_table_ptr,
    ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """O of a tile of query rows; with softmax also the log-sum-exp of its scores. x: Forward, of
    whose `[rows, heads, dim]` tensors `strides` has the strides of rows and heads in turn.
    page_table_ptr: as in load_page."""
    BIAS: tl.constexpr = OPTIONS.bias
    BLOCK_M: tl.constexpr = OPTIONS.tile
    BLOCK_N: tl.constexpr = OPTIONS.block
    BLOCK_DV: tl.constexpr = OPTIONS.block_dv
    ALIGN: tl.constexpr = OPTIONS.align
    PAGE_ROWS: tl.constexpr = OPTIONS.page_rows
    worker, num_workers, num_tiles = tl.program_id(0), tl.num_programs(0), tl.load(num_tiles_ptr)
    q_rows = Rows(x.q, None, strides[0] * ALIGN, strides[1] * ALIGN)
    key_scales = None
    if x.key_scales is not None:
        key_scales = x.key_scales, x.scales_row_stride, x.scales_head_stride
    keys = Keys(
        Rows(x.k, k_desc, strides[2] * ALIGN, strides[3] * ALIGN),
        Rows(x.v, v_desc, strides[4] * ALIGN, strides[5] * ALIGN),
        key_scales,
    )
    out_rows = Rows(x.out, None, strides[6] * ALIGN, strides[7] * ALIGN)
    scale = score_factor(call.scale, ACTIVATION)
    waves = zigzag_waves(num_tiles, worker, num_workers)
    next_tile = load_call_tile(call, 0, waves, num_segments)
    for wave in range(0, waves):
        tile = next_tile
        next_tile = load_call_tile(call, wave + 1, waves, num_segments)
        first, row, q_row, num_rows = query_rows(tile, OPTIONS)
        q = load_rows(
            q_rows, q_row, tile.head, num_rows, OPTIONS.head_dim, BLOCK_M, OPTIONS.block_d, True
        )
        blocks, visible = visited_blocks(call, tile, first, num_rows, num_segments, OPTIONS)
        row_bias = bias_of_rows(bias, tile, first, num_segments, BLOCK_M, BIAS)
        dropout = segment_dropout(call, tile.head, tile.q_start, OPTIONS)

        state = _State(
            tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
            tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M], tl.float32),
        )
        # The next block's page is read ahead, so that a block's loads depend on none of the same
        # iteration: that would cost a stage.
        full = blocks.full_first * BLOCK_N
        page = load_page(tile, full, page_table_ptr, PAGE_ROWS)
        for n in range(full, (blocks.full_first + blocks.full_count) * BLOCK_N, BLOCK_N):
            key_block = KeyBlock(
                key_row(tile, n, page, PAGE_ROWS), n, tile.head // OPTIONS.group, BLOCK_N
            )
            page = load_page(tile, n + BLOCK_N, page_table_ptr, PAGE_ROWS)
            state = _fwd_block(
                q, keys, key_block, visible, state, scale, row_bias, dropout,
                ACTIVATION, OPTIONS, False,
            )  # fmt: skip
        page = load_page(tile, masked_block(0, blocks) * BLOCK_N, page_table_ptr, PAGE_ROWS)
        for number in tl.range(0, num_masked_blocks(blocks), num_stages=OPTIONS.masked_stages):
            n = masked_block(number, blocks) * BLOCK_N
            key_block = KeyBlock(
                key_row(tile, n, page, PAGE_ROWS), n, tile.head // OPTIONS.group, tile.kv_len - n
            )
            page = load_page(
                tile, masked_block(number + 1, blocks) * BLOCK_N, page_table_ptr, PAGE_ROWS
            )
            state = _fwd_block(
                q, keys, key_block, visible, state, scale, row_bias, dropout,
                ACTIVATION, OPTIONS, True,
            )  # fmt: skip

        acc, row_max, row_sum = state
        if ACTIVATION is None:
            # A row that sees no key leaves row_sum at 0: its output is 0 and its log-sum-exp -inf.
            acc = acc * (1.0 / tl.where(row_sum > 0, row_sum, 1.0))[:, None]
            lanes = tl.arange(0, BLOCK_M)
            tl.store(
                x.lse + tile.head.to(tl.int64) * stride_lse + row + lanes,
                row_max + tl.log2(row_sum),
                mask=lanes < num_rows,
            )
        else:
            acc = acc * (call.act_factor * segment_factor(call, tile))
        if call.seed_ptr is not None:
            acc *= dropout.factor
        store_rows(out_rows, row, tile.head, acc, num_rows, OPTIONS.v_dim, BLOCK_M, BLOCK_DV)
