"""Triton kernels of jagged attention for any GPU: forward, dq, and dk with dv, each around its
function for one block.

    S = scale · q kᵀ + bias,  P = activation(S),  O = output scale · P v    per segment and head
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
from .params import BiasKind, MaskParams
from .scales import output_factor, score_factor
from .triton_bias import (
    add_to_tables,
    bias_block,
    bias_of_keys,
    bias_of_rows,
    store_buckets,
    sums_of_tile,
)


class Options(NamedTuple):
    """Constants of a launch.

    group: query heads of a key head. tile, block: rows of a tile, and of the blocks that it loops
    over. block_d, block_dv: head dims padded to powers of 2. align: elements that strides count.
    page_rows: as in load_page. buckets: entries of the time table's sums;
    0 if dS is not summed for the bias tables.
    """

    group: int
    head_dim: int
    v_dim: int
    block_d: int
    block_dv: int
    precision: str
    mask: MaskParams | None
    bias: BiasKind | None
    masked_stages: int
    tile: int
    block: int
    align: int
    q_shared: bool = False
    kv_shared: bool = False
    query_groups: int = 1
    page_rows: int | None = None
    buckets: int = 0


class Call(NamedTuple):
    """What the three kernels are given alike: the segments, the list of tiles, and factors."""

    q_offsets_ptr: tl.tensor
    kv_offsets_ptr: tl.tensor
    tiles_ptr: tl.tensor
    num_targets_ptr: tl.tensor
    segment_scale_ptr: tl.tensor
    scale: tl.tensor
    act_factor: tl.tensor
    dact_factor: tl.tensor
    output_scale: tl.tensor


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


class _State(NamedTuple):
    """acc = P v `[BLOCK_M, BLOCK_DV]`, and softmax's running maximum and sum of each row."""

    acc: tl.tensor
    row_max: tl.tensor
    row_sum: tl.tensor


class _Visible(NamedTuple):
    """Columns `[BLOCK_M, 1]` of a tile's query rows, and what they see: visible_columns."""

    rows: tl.tensor
    bounds: tl.tensor


class _Keys(NamedTuple):
    """What a tile of query rows loops over."""

    k: Rows
    v: Rows


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
def _load_tile(call, wave, waves, num_segments):
    """The program's tile in a wave."""
    return load_tile(
        call.tiles_ptr,
        wave,
        waves,
        tl.program_id(0),
        tl.num_programs(0),
        call.q_offsets_ptr,
        call.kv_offsets_ptr,
        num_segments,
    )


@triton.jit
def _visited(call, tile, num_rows, OPTIONS: tl.constexpr):
    """Blocks that a tile of query rows visits, and what its rows see."""
    ROWS: tl.constexpr = OPTIONS.tile
    MASK: tl.constexpr = OPTIONS.mask
    column = tile.block * ROWS + tile.kv_len - tile.q_len
    first_target = first_target_column(call.num_targets_ptr, tile.segment, tile.kv_len, MASK)
    last = column + tl.minimum(num_rows, ROWS) - 1
    blocks = column_blocks(column, last, tile.kv_len, first_target, MASK, OPTIONS.block)
    rows = (column + tl.arange(0, ROWS))[:, None]
    if MASK is None:  # the bounds are not read
        return blocks, _Visible(rows, (rows, rows, rows))
    else:
        return blocks, _Visible(rows, visible_columns(rows, first_target, MASK))


@triton.jit
def _load_keys(keys, block, OPTIONS: tl.constexpr, MASKED: tl.constexpr):
    """k and v of a key block."""
    row, head, num_keys = block.row, block.head, block.num_keys
    BLOCK_N: tl.constexpr = OPTIONS.block
    k = load_rows(keys.k, row, head, num_keys, OPTIONS.head_dim, BLOCK_N, OPTIONS.block_d, MASKED)
    v = load_rows(keys.v, row, head, num_keys, OPTIONS.v_dim, BLOCK_N, OPTIONS.block_dv, MASKED)
    return k, v


@triton.jit
def _scores(q, k, block, bias, OPTIONS: tl.constexpr):
    """q kᵀ of a key block, plus the bias divided by the scale."""
    BIAS: tl.constexpr = OPTIONS.bias
    if OPTIONS.bias is None:
        return tl.dot(q, tl.trans(k), input_precision=OPTIONS.precision)
    else:
        times = key_times(bias.of_tile, block.column + tl.arange(0, OPTIONS.block), BIAS)
        start = bias_block(
            bias.of_tile,
            bias.row,
            block.column,
            bias.times,
            times,
            q.shape[0],
            OPTIONS.block,
            False,
            BIAS,
        )
        return tl.dot(q, tl.trans(k), start, input_precision=OPTIONS.precision)


@triton.jit
def _fwd_block(
    q,
    keys,
    block,
    visible,
    state,
    scale,
    bias,
    ACTIVATION: tl.constexpr,
    OPTIONS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One key block: scores, online softmax or activation, acc += P v. Returns the new state."""
    MASK: tl.constexpr = OPTIONS.mask
    BLOCK_N: tl.constexpr = OPTIONS.block
    k, v = _load_keys(keys, block, OPTIONS, MASKED)
    scores = _scores(q, k, block, bias, OPTIONS)
    columns = tl.arange(0, BLOCK_N)[None, :]
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
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=OPTIONS.precision)
    return _State(acc, row_max, row_sum)


@safe_ptxas
@triton.jit(
    do_not_specialize=["num_segments", "stride_lse"],
    do_not_specialize_on_alignment=["num_tiles_ptr", "page_table_ptr"],
)
def attention_fwd_kernel(
    x,
    k_desc,
    v_desc,
    call,
    num_segments,
    num_tiles_ptr,
    bias,
    strides,
    stride_lse,
    page_table_ptr,
    ACTIVATION: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """O of a tile of query rows; with softmax also the log-sum-exp of its scores. x: Operands, of
    whose `[rows, heads, dim]` tensors `strides` has the strides of rows and heads in turn.
    page_table_ptr: as in load_page."""
    BIAS: tl.constexpr = OPTIONS.bias
    BLOCK_M: tl.constexpr = OPTIONS.tile
    BLOCK_N: tl.constexpr = OPTIONS.block
    GROUP: tl.constexpr = OPTIONS.group
    ALIGN: tl.constexpr = OPTIONS.align
    HEAD_DIM: tl.constexpr = OPTIONS.head_dim
    V_DIM: tl.constexpr = OPTIONS.v_dim
    BLOCK_D: tl.constexpr = OPTIONS.block_d
    BLOCK_DV: tl.constexpr = OPTIONS.block_dv
    PAGE_ROWS: tl.constexpr = OPTIONS.page_rows
    worker, num_workers, num_tiles = tl.program_id(0), tl.num_programs(0), tl.load(num_tiles_ptr)
    q_rows = Rows(x.q, None, strides[0] * ALIGN, strides[1] * ALIGN)
    keys = _Keys(
        Rows(x.k, k_desc, strides[2] * ALIGN, strides[3] * ALIGN),
        Rows(x.v, v_desc, strides[4] * ALIGN, strides[5] * ALIGN),
    )
    out_rows = Rows(x.out, None, strides[6] * ALIGN, strides[7] * ALIGN)
    scale = score_factor(call.scale, ACTIVATION)
    waves = zigzag_waves(num_tiles, worker, num_workers)
    next_tile = _load_tile(call, 0, waves, num_segments)
    for wave in range(0, waves):
        tile = next_tile
        next_tile = _load_tile(call, wave + 1, waves, num_segments)
        row, num_rows = tile.q_start + tile.block * BLOCK_M, tile.q_len - tile.block * BLOCK_M
        q_row = row
        if OPTIONS.q_shared:
            q_row = row - tile.q_start
        q = load_rows(q_rows, q_row, tile.head, num_rows, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        blocks, visible = _visited(call, tile, num_rows, OPTIONS)
        row_bias = None
        if OPTIONS.bias is not None:
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
                q, keys, key_block, visible, state, scale, row_bias, ACTIVATION, OPTIONS, False
            )
        page = load_page(tile, masked_block(0, blocks) * BLOCK_N, page_table_ptr, PAGE_ROWS)
        for number in tl.range(0, num_masked_blocks(blocks), num_stages=OPTIONS.masked_stages):
            n = masked_block(number, blocks) * BLOCK_N
            key_block = _KeyBlock(
                key_row(tile, n, page, PAGE_ROWS), n, tile.head // GROUP, tile.kv_len - n
            )
            page = load_page(
                tile, masked_block(number + 1, blocks) * BLOCK_N, page_table_ptr, PAGE_ROWS
            )
            state = _fwd_block(
                q, keys, key_block, visible, state, scale, row_bias, ACTIVATION, OPTIONS, True
            )

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
            acc = acc * (call.act_factor * _output_factor(call, tile))
        store_rows(out_rows, row, tile.head, acc, num_rows, V_DIM, BLOCK_M, BLOCK_DV)


@triton.jit
def _output_factor(call, tile):
    """The output scale of a tile's segment."""
    return output_factor(call.output_scale, call.segment_scale_ptr, tile.segment)


@triton.jit
def _dq_block(
    queries,
    keys,
    block,
    visible,
    acc,
    buckets,
    scale,
    bias,
    sums,
    ACTIVATION: tl.constexpr,
    OPTIONS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One key block: dS from the scores computed again, acc += dS k. With `sums`, dS is also added
    to the sums of the bias tables. Returns acc and buckets."""
    MASK: tl.constexpr = OPTIONS.mask
    BIAS: tl.constexpr = OPTIONS.bias
    BLOCK_N: tl.constexpr = OPTIONS.block
    k, v = _load_keys(keys, block, OPTIONS, MASKED)
    scores = _scores(queries.q, k, block, bias, OPTIONS)
    dp = tl.dot(queries.do, tl.trans(v), input_precision=OPTIONS.precision)
    if ACTIVATION is None:
        ds = tl.exp2(scores * scale - queries.lse[:, None]) * (dp - queries.delta[:, None])
    else:
        _, dact = ACTIVATION(scores, scale)
        ds = dact * dp
    if MASKED:
        columns = tl.arange(0, BLOCK_N)[None, :]
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
    x,
    k_desc,
    v_desc,
    call,
    num_segments,
    num_tiles_ptr,
    bias,
    strides,
    stride_lse,
    sums,
    ACTIVATION: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """dq of a tile of query rows; with softmax also writes delta = rowsum(dO ∘ O), which the dk, dv
    kernel reads. With `sums`, a TableSums, also sums dS for the gradients of the bias tables, each
    program in its own memory. x: BackwardDq, with `strides` as the forward's."""
    BIAS: tl.constexpr = OPTIONS.bias
    BLOCK_M: tl.constexpr = OPTIONS.tile
    BLOCK_N: tl.constexpr = OPTIONS.block
    GROUP: tl.constexpr = OPTIONS.group
    ALIGN: tl.constexpr = OPTIONS.align
    HEAD_DIM: tl.constexpr = OPTIONS.head_dim
    V_DIM: tl.constexpr = OPTIONS.v_dim
    BLOCK_D: tl.constexpr = OPTIONS.block_d
    BLOCK_DV: tl.constexpr = OPTIONS.block_dv
    BUCKETS: tl.constexpr = OPTIONS.buckets
    worker, num_workers, num_tiles = tl.program_id(0), tl.num_programs(0), tl.load(num_tiles_ptr)
    q_rows = Rows(x.q, None, strides[0] * ALIGN, strides[1] * ALIGN)
    keys = _Keys(
        Rows(x.k, k_desc, strides[2] * ALIGN, strides[3] * ALIGN),
        Rows(x.v, v_desc, strides[4] * ALIGN, strides[5] * ALIGN),
    )
    out_rows = Rows(x.out, None, strides[6] * ALIGN, strides[7] * ALIGN)
    do_rows = Rows(x.do, None, strides[8] * ALIGN, strides[9] * ALIGN)
    dq_rows = Rows(x.dq, None, strides[10] * ALIGN, strides[11] * ALIGN)
    score_scale = score_factor(call.scale, ACTIVATION)
    waves = zigzag_waves(num_tiles, worker, num_workers)
    next_tile = _load_tile(call, 0, waves, num_segments)
    for wave in range(0, waves):
        tile = next_tile
        next_tile = _load_tile(call, wave + 1, waves, num_segments)
        row, num_rows = tile.q_start + tile.block * BLOCK_M, tile.q_len - tile.block * BLOCK_M
        q_row = row
        if OPTIONS.q_shared:
            q_row = row - tile.q_start
        q = load_rows(q_rows, q_row, tile.head, num_rows, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        do = load_rows(do_rows, row, tile.head, num_rows, V_DIM, BLOCK_M, BLOCK_DV, True)
        blocks, visible = _visited(call, tile, num_rows, OPTIONS)
        lse, delta = 0.0, 0.0
        if ACTIVATION is None:
            out = load_rows(out_rows, row, tile.head, num_rows, V_DIM, BLOCK_M, BLOCK_DV, True)
            lanes = tl.arange(0, BLOCK_M)
            offsets = tile.head.to(tl.int64) * stride_lse + row + lanes
            lse = tl.load(x.lse + offsets, mask=lanes < num_rows, other=0.0)
            delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
            tl.store(x.delta + offsets, delta, mask=lanes < num_rows)

        queries = _QueryTile(q, do, lse, delta)
        row_bias, tile_sums = None, None
        if OPTIONS.bias is not None:
            row_bias = bias_of_rows(bias, tile, BLOCK_M, BIAS)
        if BUCKETS > 0:
            factor = call.dact_factor * _output_factor(call, tile)
            tile_sums = sums_of_tile(sums, tile, num_rows, factor, bias, BLOCK_M * BLOCK_N, BIAS)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        buckets = tl.zeros([BUCKETS if BUCKETS > 0 else 1], tl.float32)
        for n in range(
            blocks.full_first * BLOCK_N, (blocks.full_first + blocks.full_count) * BLOCK_N, BLOCK_N
        ):
            key_block = _KeyBlock(tile.kv_start + n, n, tile.head // GROUP, BLOCK_N)
            acc, buckets = _dq_block(
                queries, keys, key_block, visible, acc, buckets, score_scale, row_bias, tile_sums,
                ACTIVATION, OPTIONS, False,
            )  # fmt: skip
        for number in tl.range(0, num_masked_blocks(blocks), num_stages=OPTIONS.masked_stages):
            n = masked_block(number, blocks) * BLOCK_N
            key_block = _KeyBlock(tile.kv_start + n, n, tile.head // GROUP, tile.kv_len - n)
            acc, buckets = _dq_block(
                queries, keys, key_block, visible, acc, buckets, score_scale, row_bias, tile_sums,
                ACTIVATION, OPTIONS, True,
            )  # fmt: skip
        if BUCKETS > 0:
            store_buckets(tile_sums, buckets, BIAS)
        acc = acc * (call.scale * call.dact_factor * _output_factor(call, tile))
        store_rows(dq_rows, row, tile.head, acc, num_rows, HEAD_DIM, BLOCK_M, BLOCK_D)


@triton.jit
def _transposed_scores(keys, q, block, bias, OPTIONS: tl.constexpr):
    """k qᵀ of a block of query rows, plus the bias divided by the scale."""
    BIAS: tl.constexpr = OPTIONS.bias
    if OPTIONS.bias is None:
        return tl.dot(keys.k, tl.trans(q), input_precision=OPTIONS.precision)
    else:
        times = query_times(bias.of_tile, block.first + tl.arange(0, OPTIONS.block), BIAS)
        start = bias_block(
            bias.of_tile,
            block.first,
            bias.row,
            bias.times,
            times,
            keys.k.shape[0],
            OPTIONS.block,
            True,
            BIAS,
        )
        return tl.dot(keys.k, tl.trans(q), start, input_precision=OPTIONS.precision)


@triton.jit
def _dkdv_block(
    keys,
    queries,
    block,
    dk,
    dv,
    scale,
    bias,
    ACTIVATION: tl.constexpr,
    OPTIONS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One query block: dv += Pᵀ dO, dk += dSᵀ q. Scores are transposed, so that Pᵀ and dSᵀ are
    first operands of MMAs."""
    MASK: tl.constexpr = OPTIONS.mask
    BLOCK_M: tl.constexpr = OPTIONS.block
    head, num_rows = block.head, block.num_rows
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
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=OPTIONS.precision)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=OPTIONS.precision)
    return dk, dv


@safe_ptxas
@triton.jit(
    do_not_specialize=["num_segments", "stride_lse"],
    do_not_specialize_on_alignment=["num_tiles_ptr"],
)
def attention_bwd_dkdv_kernel(
    x,
    q_desc,
    k_desc,
    do_desc,
    call,
    num_segments,
    num_tiles_ptr,
    bias,
    strides,
    stride_lse,
    ACTIVATION: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """dk, dv of a tile of key rows. It loops over the query groups, the query heads of the key
    head, and their blocks of rows. x: BackwardDkdv, with `strides` as the forward's."""
    BIAS: tl.constexpr = OPTIONS.bias
    BLOCK_M: tl.constexpr = OPTIONS.block
    BLOCK_N: tl.constexpr = OPTIONS.tile
    HEAD_DIM: tl.constexpr = OPTIONS.head_dim
    V_DIM: tl.constexpr = OPTIONS.v_dim
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
    next_tile = _load_tile(call, 0, waves, num_segments)
    for wave in range(0, waves):
        tile = next_tile
        next_tile = _load_tile(call, wave + 1, waves, num_segments)
        row, num_rows = tile.kv_start + tile.block * BLOCK_N, tile.kv_len - tile.block * BLOCK_N
        kv_row = row
        if OPTIONS.kv_shared:
            kv_row = row - tile.kv_start
        v = load_rows(v_rows, kv_row, tile.head, num_rows, V_DIM, BLOCK_N, BLOCK_DV, True)
        k = load_rows(
            k_rows, kv_row, tile.head, num_rows, HEAD_DIM, BLOCK_N, BLOCK_D, k_desc is None
        )
        first_target = first_target_column(call.num_targets_ptr, tile.segment, tile.kv_len, MASK)

        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        q_start, q_len = tile.q_start, tile.q_len
        for query_group in range(0, OPTIONS.query_groups):
            if OPTIONS.query_groups > 1:
                q_start, q_len = load_segment(
                    call.q_offsets_ptr, tile.segment + query_group * num_segments
                )
            q_row = q_start
            if OPTIONS.q_shared:
                q_row = q_start - q_start  # 0, of q_start's type
            blocks = row_blocks(
                tile.block * BLOCK_N, q_len, tile.kv_len, first_target, MASK, BLOCK_M, BLOCK_N
            )
            keys = _KeyTile(
                k, v, (tile.block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None], first_target
            )
            for group_head in range(0, OPTIONS.group):
                head = tile.head * OPTIONS.group + group_head
                lse_head, delta_head = x.lse, x.delta
                if ACTIVATION is None:
                    of_head = head.to(tl.int64) * stride_lse
                    lse_head, delta_head = x.lse + of_head, x.delta + of_head
                queries = _Queries(q_rows, do_rows, lse_head, delta_head)
                key_bias = None
                if OPTIONS.bias is not None:
                    key_bias = bias_of_keys(bias, tile, head, BLOCK_N, BIAS)
                for m in range(
                    blocks.full_first * BLOCK_M,
                    (blocks.full_first + blocks.full_count) * BLOCK_M,
                    BLOCK_M,
                ):
                    block = _QueryBlock(
                        m, q_row + m, q_start + m, m + tile.kv_len - q_len, head, BLOCK_M
                    )
                    dk, dv = _dkdv_block(
                        keys, queries, block, dk, dv, score_scale, key_bias,
                        ACTIVATION, OPTIONS, False,
                    )  # fmt: skip
                for number in tl.range(
                    0, num_masked_blocks(blocks), num_stages=OPTIONS.masked_stages
                ):
                    m = masked_block(number, blocks) * BLOCK_M
                    block = _QueryBlock(
                        m, q_row + m, q_start + m, m + tile.kv_len - q_len, head, q_len - m
                    )
                    dk, dv = _dkdv_block(
                        keys, queries, block, dk, dv, score_scale, key_bias,
                        ACTIVATION, OPTIONS, True,
                    )  # fmt: skip
        factor = _output_factor(call, tile)
        dk *= call.scale * call.dact_factor * factor
        store_rows(dk_rows, row, tile.head, dk, num_rows, HEAD_DIM, BLOCK_N, BLOCK_D)
        dv *= call.act_factor * factor
        store_rows(dv_rows, row, tile.head, dv, num_rows, V_DIM, BLOCK_N, BLOCK_DV)
