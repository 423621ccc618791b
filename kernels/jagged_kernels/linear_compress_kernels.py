"""Device code of linear compression: products with a shared left operand, its gradient, and sums over the candidates of a row.

Sizes of the weight and the embeddings' width are constants, as they are a model's; batch sizes are not. An operand is
(pointer, descriptor or None, batch stride, row stride).
"""

import triton
import triton.language as tl

from .tiles import load_block, store_block


@triton.jit
def _halves(x):
    """Left and right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x, x.shape[0], 2, x.shape[1] // 2), 0, 2, 1))


@triton.jit
def _add_and_store(
    acc, addends_ptr, indices_ptr, out, batch, row, column, M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """out[batch] = acc + the addends' rows that `batch` asks for. Wide tiles in chunks of columns: what the layouts of loads and
    products exchange goes through shared memory, where all columns at once do not fit."""
    if BLOCK_N > CHUNK:
        left, right = _halves(acc)
        _add_and_store(left, addends_ptr, indices_ptr, out, batch, row, column, M, N, BLOCK_M, BLOCK_N // 2, CHUNK)
        _add_and_store(right, addends_ptr, indices_ptr, out, batch, row, column + BLOCK_N // 2, M, N, BLOCK_M, BLOCK_N // 2, CHUNK)
    else:
        for level in tl.static_range(len(indices_ptr)):
            index = tl.load(indices_ptr[level] + batch)
            acc += load_block((addends_ptr[level], None, M * N, N), index, row, column, M, N, BLOCK_M, BLOCK_N)
        store_block(out, batch, row, column, acc, M, N, BLOCK_M, BLOCK_N)


@triton.jit
def _product_tile(
    w, e, addends_ptr, indices_ptr, out, batch, row, column, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if CHUNK == 0:
        for level in tl.static_range(len(indices_ptr)):
            index = tl.load(indices_ptr[level] + batch)
            acc += load_block((addends_ptr[level], None, M * N, N), index, row, column, M, N, BLOCK_M, BLOCK_N)
    for k in range(0, K, BLOCK_K):
        w_block = load_block(w, 0, row, k, M, K, BLOCK_M, BLOCK_K)
        e_block = load_block(e, batch, k, column, K, N, BLOCK_K, BLOCK_N)
        acc = tl.dot(w_block, e_block, acc, input_precision=PRECISION)
    if CHUNK == 0:
        _add_and_store(acc, (), (), out, batch, row, column, M, N, BLOCK_M, BLOCK_N, 64)
    else:
        _add_and_store(acc, addends_ptr, indices_ptr, out, batch, row, column, M, N, BLOCK_M, BLOCK_N, CHUNK)


@triton.jit(do_not_specialize=["batch"])
def linear_compress_fwd_kernel(
    w_ptr, e_ptr, out_ptr, addends_ptr, indices_ptr, w_desc, w_tail_desc, e_desc, batch,
    stride_w, stride_eb, stride_e,
    M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, TAIL_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[b] = W @ E[b] + Σ_l addends_l[index_l[b]], `[M, N]` each; the addends fp32.

    A batch row's tiles follow one another, so that its embeddings are read from DRAM once. The last M % BLOCK_M rows make a tile of
    their own height; which of the tiles comes first turns from wave to wave, so that no program is dealt the short ones alone.
    """
    worker, num_workers = tl.program_id(0), tl.num_programs(0)
    FULL: tl.constexpr = (M + BLOCK_M - TAIL_M) // BLOCK_M if TAIL_M == BLOCK_M else M // BLOCK_M
    ROWS: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = ROWS * COLUMNS
    e = e_ptr, e_desc, stride_eb * ALIGN, stride_e * ALIGN
    for tile in range(worker, batch * TILES, num_workers):
        b = tile // TILES
        part = (tile + b * TILES // num_workers) % TILES
        row, column = part // COLUMNS * BLOCK_M, part % COLUMNS * BLOCK_N
        if TAIL_M == BLOCK_M or row + BLOCK_M <= M:
            _product_tile(
                (w_ptr, w_desc, 0, stride_w * ALIGN), e, addends_ptr, indices_ptr, (out_ptr, None, M * N, N), b, row, column, M, K, N, BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, PRECISION
            )  # fmt: skip
        else:
            _product_tile(
                (w_ptr, w_tail_desc, 0, stride_w * ALIGN), e, addends_ptr, indices_ptr, (out_ptr, None, M * N, N), b, row, column, M, K, N, TAIL_M, BLOCK_N, BLOCK_K, CHUNK, PRECISION
            )  # fmt: skip


@triton.jit
def _gradient_tile(
    g, e, partial_ptr, row, column, first, last, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum of G[b] E[b]ᵀ over blocks of BLOCK_N columns, numbered through all batch rows, from `first` to `last`."""
    STEPS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for step in range(first, last):
        g_block = load_block(g, step // STEPS, row, step % STEPS * BLOCK_N, M, N, BLOCK_M, BLOCK_N)
        e_block = load_block(e, step // STEPS, column, step % STEPS * BLOCK_N, K, N, BLOCK_K, BLOCK_N)
        acc = tl.dot(g_block, tl.trans(e_block), acc, input_precision=PRECISION)
    store_block((partial_ptr, None, M * K, K), tl.program_id(1), row, column, acc, M, K, BLOCK_M, BLOCK_K)


@triton.jit(do_not_specialize=["batch"])
def linear_compress_bwd_dw_kernel(
    g_ptr, e_ptr, partial_ptr, g_desc, g_tail_desc, e_desc, e_tail_desc, batch, stride_gb, stride_g, stride_eb, stride_e,
    M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, TAIL_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """partial[s] = the s-th part of Σ_b G[b] E[b]ᵀ, `[M, K]` fp32. Grid: tiles, parts.

    The last M % BLOCK_M rows make tiles half as high and twice as wide.
    """
    FULL: tl.constexpr = M // BLOCK_M if TAIL_M < BLOCK_M else (M + BLOCK_M - 1) // BLOCK_M
    COLUMNS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    WIDE: tl.constexpr = BLOCK_K * BLOCK_M // TAIL_M
    g = g_ptr, g_desc, stride_gb * ALIGN, stride_g * ALIGN
    e = e_ptr, e_desc, stride_eb * ALIGN, stride_e * ALIGN
    tile, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    steps = batch * ((N + BLOCK_N - 1) // BLOCK_N)
    first, last = (part.to(tl.int64) * steps // parts).to(tl.int32), ((part + 1).to(tl.int64) * steps // parts).to(tl.int32)
    if tile < FULL * COLUMNS:
        row, column = tile // COLUMNS * BLOCK_M, tile % COLUMNS * BLOCK_K
        _gradient_tile(g, e, partial_ptr, row, column, first, last, M, K, N, BLOCK_M, BLOCK_K, BLOCK_N, PRECISION)
    else:
        if TAIL_M < BLOCK_M:
            g_tail = g_ptr, g_tail_desc, stride_gb * ALIGN, stride_g * ALIGN
            e_tail = e_ptr, e_tail_desc, stride_eb * ALIGN, stride_e * ALIGN
            column = (tile - FULL * COLUMNS) * WIDE
            _gradient_tile(g_tail, e_tail, partial_ptr, FULL * BLOCK_M, column, first, last, M, K, N, TAIL_M, WIDE, BLOCK_N, PRECISION)


@triton.jit
def sum_rows_kernel(x_ptr, order_ptr, offsets_ptr, out_ptr, size, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[u] = Σ x[order[i]] over i from offsets[u] to offsets[u + 1], in fp32 and in that order. Grid: blocks of the row, u."""
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    segment = tl.program_id(1)
    start, end = tl.load(offsets_ptr + segment), tl.load(offsets_ptr + segment + 1)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(start, end, ROWS):
        places = first + tl.arange(0, ROWS)
        rows = places
        if order_ptr is not None:
            rows = tl.load(order_ptr + places, mask=places < end, other=0)
        mask = (places < end)[:, None] & (lanes < size)[None, :]
        acc += tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride + lanes[None, :], mask=mask, other=0.0).to(tl.float32)
    out = tl.sum(acc, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + segment.to(tl.int64) * size + lanes, out, mask=lanes < size)
