"""Triton kernels of jagged attention for any GPU: forward, dq, and dk with dv, each around its
function for one block.

    S = scale · q kᵀ + bias,  P = activation(S),  O = output scale · P v             per segment and
    head
    dV = Pᵀ dO,  dP = dO vᵀ,  dQ = scale · dS k,  dK = scale · dSᵀ q
    softmax:    dS = P ∘ (dP − delta),  delta = rowsum(dO ∘ O);  scores and lse are in base 2
    pointwise:  dS = activation'(S) ∘ dP

Tile: BLOCK_M query rows of a head, over blocks of BLOCK_N keys; for dk and dv, BLOCK_N keys of a
key head, over query groups, the query heads of the key head, and blocks of BLOCK_M query rows. A
program takes tiles from the zigzag schedule, and reads the next tile's bounds while it works on
one. Full blocks come first, without masking; then masked blocks, which the mask or the segment's
end cuts (mask.py).

Operands that a tile loops over are loaded by TMA if they have a descriptor. At most one of those
that it loads once is loaded by TMA: two TMA loads outside a loop wait for one another.
`num_segments` is None with one query group (load_tile). The forward's keys and values may lie in
pages (pages.py): a block lies in one page, so only its first row changes (key_row).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.loads import (
    Rows,
    key_row,
    load_page,
    load_rows,
    load_segment,
    load_tile,
    store_rows,
    zigzag_waves,
)
from ..common.ptxas import safe_ptxas
from .bias import key_times, query_times
from .mask import (
    column_blocks,
    first_target_column,
    is_visible,
    masked_block,
    num_masked_blocks,
    row_blocks,
    visible_columns,
)
from .scales import output_factor, score_factor
from .triton_bias import (
    add_to_tables,
    bias_block,
    bias_of_keys,
    bias_of_rows,
    store_buckets,
    sums_of_tile,
)


class _Options(NamedTuple):
    """Constants of a launch. block: keys, or in the dk, dv kernel query rows, of a block. block_d,
    block_dv: head dims padded to powers of 2. activation: a function of activations.py, None:
    softmax. bias: BiasKind, or None. has_sums: whether dS is summed for the bias tables."""

    head_dim: tl.constexpr
    v_dim: tl.constexpr
    block: tl.constexpr
    block_d: tl.constexpr
    block_dv: tl.constexpr
    precision: tl.constexpr
    activation: tl.constexpr
    mask: tl.constexpr
    bias: tl.constexpr
    has_sums: tl.constexpr


class _State(NamedTuple):
    """acc = P v `[BLOCK_M, BLOCK_DV]`, and softmax's running maximum and sum of each row."""

    acc: tl.tensor
    row_max: tl.tensor
    row_sum: tl.tensor


class _Visible(NamedTuple):
    """Columns `[BLOCK_M, 1]` of a tile's query rows, and what they see: visible_columns."""

    rows: tl.tensor
    bounds: tl.tensor


class _KeyBlock(NamedTuple):
    """A block of keys: first row, first column, head, and number of keys from there on in the
    segment."""

    row: tl.tensor
    column: tl.tensor
    head: tl.tensor
    num_keys: tl.tensor


class _QueryTile(NamedTuple):
    """A tile's query rows in registers: q, dO, and with softmax the rows' log-sum-exp and delta."""

    q: tl.tensor
    do: tl.tensor
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
    """What a tile of keys loops over: q and dO, and with softmax the head's lse and delta."""

    q: Rows
    do: Rows
    lse_ptr: tl.tensor
    delta_ptr: tl.tensor


class _QueryBlock(NamedTuple):
    """A block of query rows: first row in the segment, in q, and in the other operands; column of
    the first row, head, and number of rows from there on in the segment."""

    first: tl.tensor
    q_row: tl.tensor
    row: tl.tensor
    column: tl.tensor
    head: tl.tensor
    num_rows: tl.tensor


@triton.jit
def _scores(q, k, block, bias, OPTIONS: tl.constexpr):
    """q kᵀ of a key block, plus the bias divided by the scale."""
    if OPTIONS.bias is None:
        return tl.dot(q, tl.trans(k), input_precision=OPTIONS.precision)
    else:
        times = key_times(bias.of_tile, block.column + tl.arange(0, OPTIONS.block), OPTIONS.bias)
        start = bias_block(
            bias.of_tile,
            bias.row,
            block.column,
            bias.times,
            times,
            q.shape[0],
            OPTIONS.block,
            False,
            OPTIONS.bias,
        )
        return tl.dot(q, tl.trans(k), start, input_precision=OPTIONS.precision)


@triton.jit
def _fwd_block(
    q, keys, values, block, visible, state, scale, bias, OPTIONS: tl.constexpr, MASKED: tl.constexpr
):
    """One key block: scores, online softmax or activation, acc += P v. Returns the new state."""
    BLOCK_N: tl.constexpr = OPTIONS.block
    k = load_rows(
        keys,
        block.row,
        block.head,
        block.num_keys,
        OPTIONS.head_dim,
        BLOCK_N,
        OPTIONS.block_d,
        MASKED,
    )
    v = load_rows(
        values,
        block.row,
        block.head,
        block.num_keys,
        OPTIONS.v_dim,
        BLOCK_N,
        OPTIONS.block_dv,
        MASKED,
    )
    scores = _scores(q, k, block, bias, OPTIONS)
    columns = tl.arange(0, BLOCK_N)[None, :]
    if MASKED and OPTIONS.mask is not None:
        seen = is_visible(block.column + columns, visible.rows, visible.bounds, OPTIONS.mask)
    else:
        seen = columns < block.num_keys
    acc, row_max, row_sum = state
    if OPTIONS.activation is None:
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
        p, _ = OPTIONS.activation(scores, scale)
        if MASKED and OPTIONS.mask is not None:
            p = tl.where(seen, p, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=OPTIONS.precision)
    return _State(acc, row_max, row_sum)


@safe_ptxas
@triton.jit(
    do_not_specialize=["num_segments", "stride_lse"],
    do_not_specialize_on_alignment=["num_tiles_ptr", "page_table_ptr"],
)
def attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    k_desc,
    v_desc,
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
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_om,
    stride_oh,
    stride_lse,
    page_table_ptr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MASK: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
    Q_SHARED: tl.constexpr,
    BIAS: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
):
    """O of a tile of query rows; with softmax also the log-sum-exp of its scores. page_table_ptr,
    PAGE_ROWS: as in load_page."""
    OPTIONS: tl.constexpr = _Options(
        HEAD_DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, ACTIVATION, MASK, BIAS, False
    )
    worker, num_workers, num_tiles = tl.program_id(0), tl.num_programs(0), tl.load(num_tiles_ptr)
    q_rows = Rows(q_ptr, None, stride_qm * ALIGN, stride_qh * ALIGN)
    k_rows = Rows(k_ptr, k_desc, stride_kn * ALIGN, stride_kh * ALIGN)
    v_rows = Rows(v_ptr, v_desc, stride_vn * ALIGN, stride_vh * ALIGN)
    out_rows = Rows(out_ptr, None, stride_om * ALIGN, stride_oh * ALIGN)
    scale = score_factor(scale, ACTIVATION)
    waves = zigzag_waves(num_tiles, worker, num_workers)
    next_tile = load_tile(
        tiles_ptr, 0, waves, worker, num_workers, q_offsets_ptr, kv_offsets_ptr, num_segments
    )
    for wave in range(0, waves):
        tile = next_tile
        next_tile = load_tile(
            tiles_ptr,
            wave + 1,
            waves,
            worker,
            num_workers,
            q_offsets_ptr,
            kv_offsets_ptr,
            num_segments,
        )
        row, num_rows = tile.q_start + tile.block * BLOCK_M, tile.q_len - tile.block * BLOCK_M
        q_row = row
        if Q_SHARED:
            q_row = row - tile.q_start
        q = load_rows(q_rows, q_row, tile.head, num_rows, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        column = tile.block * BLOCK_M + tile.kv_len - tile.q_len
        first_target = first_target_column(num_targets_ptr, tile.segment, tile.kv_len, MASK)
        blocks = column_blocks(
            column,
            column + tl.minimum(num_rows, BLOCK_M) - 1,
            tile.kv_len,
            first_target,
            MASK,
            BLOCK_N,
        )
        visible = _what_rows_see((column + tl.arange(0, BLOCK_M))[:, None], first_target, MASK)
        row_bias = None
        if BIAS is not None:
            row_bias = bias_of_rows(bias, tile, BLOCK_M, BIAS)

        state = _State(
            tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
            tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M], tl.float32),
        )
        # The next block's page is read ahead, so that a block's loads depend on none of the same
        # iteration: that would cost a stage.
        page = load_page(tile, blocks.full_first * BLOCK_N, page_table_ptr, PAGE_ROWS)
        for n in range(
            blocks.full_first * BLOCK_N, (blocks.full_first + blocks.full_count) * BLOCK_N, BLOCK_N
        ):
            key_block = _KeyBlock(key_row(tile, n, page, PAGE_ROWS), n, tile.head // GROUP, BLOCK_N)
            page = load_page(tile, n + BLOCK_N, page_table_ptr, PAGE_ROWS)
            state = _fwd_block(
                q, k_rows, v_rows, key_block, visible, state, scale, row_bias, OPTIONS, False
            )
        page = load_page(tile, masked_block(0, blocks) * BLOCK_N, page_table_ptr, PAGE_ROWS)
        for number in tl.range(0, num_masked_blocks(blocks), num_stages=MASKED_STAGES):
            n = masked_block(number, blocks) * BLOCK_N
            key_block = _KeyBlock(
                key_row(tile, n, page, PAGE_ROWS), n, tile.head // GROUP, tile.kv_len - n
            )
            page = load_page(
                tile, masked_block(number + 1, blocks) * BLOCK_N, page_table_ptr, PAGE_ROWS
            )
            state = _fwd_block(
                q, k_rows, v_rows, key_block, visible, state, scale, row_bias, OPTIONS, True
            )

        acc, row_max, row_sum = state
        if ACTIVATION is None:
            # A row that sees no key leaves row_sum at 0: its output is 0 and its log-sum-exp -inf.
            acc = acc * (1.0 / tl.where(row_sum > 0, row_sum, 1.0))[:, None]
            lanes = tl.arange(0, BLOCK_M)
            tl.store(
                lse_ptr + tile.head.to(tl.int64) * stride_lse + row + lanes,
                row_max + tl.log2(row_sum),
                mask=lanes < num_rows,
            )
        else:
            acc = acc * (act_factor * output_factor(output_scale, segment_scale_ptr, tile.segment))
        store_rows(out_rows, row, tile.head, acc, num_rows, V_DIM, BLOCK_M, BLOCK_DV)


@triton.jit
def _what_rows_see(rows, first_target, MASK: tl.constexpr):
    """_Visible of the rows at these columns. Without a mask, the bounds are not read."""
    if MASK is None:
        return _Visible(rows, (rows, rows, rows))
    else:
        return _Visible(rows, visible_columns(rows, first_target, MASK))


@triton.jit
def _dq_block(
    queries,
    keys,
    values,
    block,
    visible,
    acc,
    buckets,
    scale,
    bias,
    sums,
    OPTIONS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One key block: dS from the scores computed again, acc += dS k. With `sums`, dS is also added
    to the sums of the bias tables. Returns acc and buckets."""
    BLOCK_N: tl.constexpr = OPTIONS.block
    k = load_rows(
        keys,
        block.row,
        block.head,
        block.num_keys,
        OPTIONS.head_dim,
        BLOCK_N,
        OPTIONS.block_d,
        MASKED,
    )
    v = load_rows(
        values,
        block.row,
        block.head,
        block.num_keys,
        OPTIONS.v_dim,
        BLOCK_N,
        OPTIONS.block_dv,
        MASKED,
    )
    scores = _scores(queries.q, k, block, bias, OPTIONS)
    dp = tl.dot(queries.do, tl.trans(v), input_precision=OPTIONS.precision)
    if OPTIONS.activation is None:
        ds = tl.exp2(scores * scale - queries.lse[:, None]) * (dp - queries.delta[:, None])
    else:
        _, dact = OPTIONS.activation(scores, scale)
        ds = dact * dp
    if MASKED:
        columns = tl.arange(0, BLOCK_N)[None, :]
        if OPTIONS.mask is not None:
            ds = tl.where(
                is_visible(block.column + columns, visible.rows, visible.bounds, OPTIONS.mask),
                ds,
                0.0,
            )
        # exp2 may have overflown where there is no key; elsewhere k is 0
        elif OPTIONS.activation is None:
            ds = tl.where(columns < block.num_keys, ds, 0.0)
    if OPTIONS.has_sums:
        buckets = add_to_tables(ds, block, bias, sums, buckets, OPTIONS.bias)
    return tl.dot(ds.to(k.dtype), k, acc, input_precision=OPTIONS.precision), buckets


@safe_ptxas
@triton.jit(
    do_not_specialize=["num_segments", "stride_lse"],
    do_not_specialize_on_alignment=["num_tiles_ptr"],
)
def attention_bwd_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    do_ptr,
    dq_ptr,
    lse_ptr,
    delta_ptr,
    k_desc,
    v_desc,
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
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_om,
    stride_oh,
    stride_dom,
    stride_doh,
    stride_dqm,
    stride_dqh,
    stride_lse,
    sums,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MASK: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
    Q_SHARED: tl.constexpr,
    BIAS: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    """dq of a tile of query rows; with softmax also writes delta = rowsum(dO ∘ O), which the dk, dv
    kernel reads. With `sums`, a TableSums, also sums dS for the gradients of the bias tables, each
    program in its own memory. BUCKETS: entries of the time table's sums; 0 without `sums`."""
    OPTIONS: tl.constexpr = _Options(
        HEAD_DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, ACTIVATION, MASK, BIAS, BUCKETS > 0
    )
    worker, num_workers, num_tiles = tl.program_id(0), tl.num_programs(0), tl.load(num_tiles_ptr)
    q_rows = Rows(q_ptr, None, stride_qm * ALIGN, stride_qh * ALIGN)
    k_rows = Rows(k_ptr, k_desc, stride_kn * ALIGN, stride_kh * ALIGN)
    v_rows = Rows(v_ptr, v_desc, stride_vn * ALIGN, stride_vh * ALIGN)
    out_rows = Rows(out_ptr, None, stride_om * ALIGN, stride_oh * ALIGN)
    do_rows = Rows(do_ptr, None, stride_dom * ALIGN, stride_doh * ALIGN)
    dq_rows = Rows(dq_ptr, None, stride_dqm * ALIGN, stride_dqh * ALIGN)
    score_scale = score_factor(scale, ACTIVATION)
    waves = zigzag_waves(num_tiles, worker, num_workers)
    next_tile = load_tile(
        tiles_ptr, 0, waves, worker, num_workers, q_offsets_ptr, kv_offsets_ptr, num_segments
    )
    for wave in range(0, waves):
        tile = next_tile
        next_tile = load_tile(
            tiles_ptr,
            wave + 1,
            waves,
            worker,
            num_workers,
            q_offsets_ptr,
            kv_offsets_ptr,
            num_segments,
        )
        row, num_rows = tile.q_start + tile.block * BLOCK_M, tile.q_len - tile.block * BLOCK_M
        q_row = row
        if Q_SHARED:
            q_row = row - tile.q_start
        q = load_rows(q_rows, q_row, tile.head, num_rows, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        do = load_rows(do_rows, row, tile.head, num_rows, V_DIM, BLOCK_M, BLOCK_DV, True)
        column = tile.block * BLOCK_M + tile.kv_len - tile.q_len
        first_target = first_target_column(num_targets_ptr, tile.segment, tile.kv_len, MASK)
        blocks = column_blocks(
            column,
            column + tl.minimum(num_rows, BLOCK_M) - 1,
            tile.kv_len,
            first_target,
            MASK,
            BLOCK_N,
        )
        visible = _what_rows_see((column + tl.arange(0, BLOCK_M))[:, None], first_target, MASK)
        lse, delta = 0.0, 0.0
        if ACTIVATION is None:
            out = load_rows(out_rows, row, tile.head, num_rows, V_DIM, BLOCK_M, BLOCK_DV, True)
            lanes = tl.arange(0, BLOCK_M)
            offsets = tile.head.to(tl.int64) * stride_lse + row + lanes
            lse = tl.load(lse_ptr + offsets, mask=lanes < num_rows, other=0.0)
            delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
            tl.store(delta_ptr + offsets, delta, mask=lanes < num_rows)

        queries = _QueryTile(q, do, lse, delta)
        row_bias, tile_sums = None, None
        if BIAS is not None:
            row_bias = bias_of_rows(bias, tile, BLOCK_M, BIAS)
        if BUCKETS > 0:
            factor = dact_factor * output_factor(output_scale, segment_scale_ptr, tile.segment)
            tile_sums = sums_of_tile(sums, tile, num_rows, factor, bias, BLOCK_M * BLOCK_N, BIAS)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        buckets = tl.zeros([BUCKETS if BUCKETS > 0 else 1], tl.float32)
        for n in range(
            blocks.full_first * BLOCK_N, (blocks.full_first + blocks.full_count) * BLOCK_N, BLOCK_N
        ):
            key_block = _KeyBlock(tile.kv_start + n, n, tile.head // GROUP, BLOCK_N)
            acc, buckets = _dq_block(
                queries,
                k_rows,
                v_rows,
                key_block,
                visible,
                acc,
                buckets,
                score_scale,
                row_bias,
                tile_sums,
                OPTIONS,
                False,
            )
        for number in tl.range(0, num_masked_blocks(blocks), num_stages=MASKED_STAGES):
            n = masked_block(number, blocks) * BLOCK_N
            key_block = _KeyBlock(tile.kv_start + n, n, tile.head // GROUP, tile.kv_len - n)
            acc, buckets = _dq_block(
                queries,
                k_rows,
                v_rows,
                key_block,
                visible,
                acc,
                buckets,
                score_scale,
                row_bias,
                tile_sums,
                OPTIONS,
                True,
            )
        if BUCKETS > 0:
            store_buckets(tile_sums, buckets, BIAS)
        acc = acc * (
            scale * dact_factor * output_factor(output_scale, segment_scale_ptr, tile.segment)
        )
        store_rows(dq_rows, row, tile.head, acc, num_rows, HEAD_DIM, BLOCK_M, BLOCK_D)


@triton.jit
def _transposed_scores(keys, q, block, bias, OPTIONS: tl.constexpr):
    """k qᵀ of a block of query rows, plus the bias divided by the scale."""
    if OPTIONS.bias is None:
        return tl.dot(keys.k, tl.trans(q), input_precision=OPTIONS.precision)
    else:
        times = query_times(bias.of_tile, block.first + tl.arange(0, OPTIONS.block), OPTIONS.bias)
        start = bias_block(
            bias.of_tile,
            block.first,
            bias.row,
            bias.times,
            times,
            keys.k.shape[0],
            OPTIONS.block,
            True,
            OPTIONS.bias,
        )
        return tl.dot(keys.k, tl.trans(q), start, input_precision=OPTIONS.precision)


@triton.jit
def _dkdv_block(
    keys, queries, block, dk, dv, scale, bias, OPTIONS: tl.constexpr, MASKED: tl.constexpr
):
    """One query block: dv += Pᵀ dO, dk += dSᵀ q. Scores are transposed, so that Pᵀ and dSᵀ are
    first operands of MMAs."""
    BLOCK_M: tl.constexpr = OPTIONS.block
    q = load_rows(
        queries.q,
        block.q_row,
        block.head,
        block.num_rows,
        OPTIONS.head_dim,
        BLOCK_M,
        OPTIONS.block_d,
        MASKED,
    )
    rows = tl.arange(0, BLOCK_M)
    if MASKED and OPTIONS.mask is not None:
        columns_of_rows = (block.column + rows)[None, :]
        bounds = visible_columns(columns_of_rows, keys.first_target, OPTIONS.mask)
        visible = is_visible(keys.columns, columns_of_rows, bounds, OPTIONS.mask)
    do = load_rows(
        queries.do,
        block.row,
        block.head,
        block.num_rows,
        OPTIONS.v_dim,
        BLOCK_M,
        OPTIONS.block_dv,
        MASKED,
    )
    scores = _transposed_scores(keys, q, block, bias, OPTIONS)
    dp = tl.dot(keys.v, tl.trans(do), input_precision=OPTIONS.precision)
    if OPTIONS.activation is None:
        if MASKED:  # rows past the segment add nothing: exp2(0 - inf) = 0
            lse = tl.load(
                queries.lse_ptr + block.row + rows, mask=rows < block.num_rows, other=float("inf")
            )
            delta = tl.load(
                queries.delta_ptr + block.row + rows, mask=rows < block.num_rows, other=0.0
            )
        else:
            lse = tl.load(queries.lse_ptr + block.row + rows)
            delta = tl.load(queries.delta_ptr + block.row + rows)
        p = tl.exp2(scores * scale - lse[None, :])
        ds = p * (dp - delta[None, :])
    else:
        p, dact = OPTIONS.activation(scores, scale)
        ds = dact * dp
    if MASKED and OPTIONS.mask is not None:
        p, ds = tl.where(visible, p, 0.0), tl.where(visible, ds, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=OPTIONS.precision)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=OPTIONS.precision)
    return dk, dv


@safe_ptxas
@triton.jit(
    do_not_specialize=["num_segments", "stride_lse"],
    do_not_specialize_on_alignment=["num_tiles_ptr"],
)
def attention_bwd_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    dk_ptr,
    dv_ptr,
    lse_ptr,
    delta_ptr,
    q_desc,
    k_desc,
    do_desc,
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
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_dom,
    stride_doh,
    stride_dkn,
    stride_dkh,
    stride_dvn,
    stride_dvh,
    stride_lse,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MASK: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
    Q_SHARED: tl.constexpr,
    KV_SHARED: tl.constexpr,
    QUERY_GROUPS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """dk, dv of a tile of BLOCK_N key rows. It loops over the query groups, the query heads of the
    key head, and their blocks of BLOCK_M rows."""
    OPTIONS: tl.constexpr = _Options(
        HEAD_DIM, V_DIM, BLOCK_M, BLOCK_D, BLOCK_DV, PRECISION, ACTIVATION, MASK, BIAS, False
    )
    worker, num_workers, num_tiles = tl.program_id(0), tl.num_programs(0), tl.load(num_tiles_ptr)
    q_rows = Rows(q_ptr, q_desc, stride_qm * ALIGN, stride_qh * ALIGN)
    k_rows = Rows(k_ptr, k_desc, stride_kn * ALIGN, stride_kh * ALIGN)
    v_rows = Rows(v_ptr, None, stride_vn * ALIGN, stride_vh * ALIGN)
    do_rows = Rows(do_ptr, do_desc, stride_dom * ALIGN, stride_doh * ALIGN)
    dk_rows = Rows(dk_ptr, None, stride_dkn * ALIGN, stride_dkh * ALIGN)
    dv_rows = Rows(dv_ptr, None, stride_dvn * ALIGN, stride_dvh * ALIGN)
    score_scale = score_factor(scale, ACTIVATION)
    waves = zigzag_waves(num_tiles, worker, num_workers)
    next_tile = load_tile(
        tiles_ptr, 0, waves, worker, num_workers, q_offsets_ptr, kv_offsets_ptr, num_segments
    )
    for wave in range(0, waves):
        tile = next_tile
        next_tile = load_tile(
            tiles_ptr,
            wave + 1,
            waves,
            worker,
            num_workers,
            q_offsets_ptr,
            kv_offsets_ptr,
            num_segments,
        )
        row, num_rows = tile.kv_start + tile.block * BLOCK_N, tile.kv_len - tile.block * BLOCK_N
        kv_row = row
        if KV_SHARED:
            kv_row = row - tile.kv_start
        v = load_rows(v_rows, kv_row, tile.head, num_rows, V_DIM, BLOCK_N, BLOCK_DV, True)
        k = load_rows(
            k_rows, kv_row, tile.head, num_rows, HEAD_DIM, BLOCK_N, BLOCK_D, k_desc is None
        )
        first_target = first_target_column(num_targets_ptr, tile.segment, tile.kv_len, MASK)

        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        q_start, q_len = tile.q_start, tile.q_len
        for query_group in range(0, QUERY_GROUPS):
            if QUERY_GROUPS > 1:
                q_start, q_len = load_segment(
                    q_offsets_ptr, tile.segment + query_group * num_segments
                )
            q_row = q_start
            if Q_SHARED:
                q_row = q_start - q_start  # 0, of q_start's type
            blocks = row_blocks(
                tile.block * BLOCK_N, q_len, tile.kv_len, first_target, MASK, BLOCK_M, BLOCK_N
            )
            keys = _KeyTile(
                k, v, (tile.block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None], first_target
            )
            for group_head in range(0, GROUP):
                head = tile.head * GROUP + group_head
                lse_head, delta_head = lse_ptr, delta_ptr
                if ACTIVATION is None:
                    lse_head, delta_head = (
                        lse_ptr + head.to(tl.int64) * stride_lse,
                        delta_ptr + head.to(tl.int64) * stride_lse,
                    )
                queries = _Queries(q_rows, do_rows, lse_head, delta_head)
                key_bias = None
                if BIAS is not None:
                    key_bias = bias_of_keys(bias, tile, head, BLOCK_N, BIAS)
                for m in range(
                    blocks.full_first * BLOCK_M,
                    (blocks.full_first + blocks.full_count) * BLOCK_M,
                    BLOCK_M,
                ):
                    query_block = _QueryBlock(
                        m, q_row + m, q_start + m, m + tile.kv_len - q_len, head, BLOCK_M
                    )
                    dk, dv = _dkdv_block(
                        keys, queries, query_block, dk, dv, score_scale, key_bias, OPTIONS, False
                    )
                for number in tl.range(0, num_masked_blocks(blocks), num_stages=MASKED_STAGES):
                    m = masked_block(number, blocks) * BLOCK_M
                    query_block = _QueryBlock(
                        m, q_row + m, q_start + m, m + tile.kv_len - q_len, head, q_len - m
                    )
                    dk, dv = _dkdv_block(
                        keys, queries, query_block, dk, dv, score_scale, key_bias, OPTIONS, True
                    )
        out_scale = output_factor(output_scale, segment_scale_ptr, tile.segment)
        store_rows(
            dk_rows,
            row,
            tile.head,
            dk * (scale * dact_factor * out_scale),
            num_rows,
            HEAD_DIM,
            BLOCK_N,
            BLOCK_D,
        )
        store_rows(
            dv_rows,
            row,
            tile.head,
            dv * (act_factor * out_scale),
            num_rows,
            V_DIM,
            BLOCK_N,
            BLOCK_DV,
        )
