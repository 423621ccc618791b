"""Device code of linear compression: copies of weights, the candidates' product with what is added to it, a weight's gradient, sums over
groups of rows.

Sizes of the weights and the embeddings' width are constants, as they are a model's; batch sizes are not. Strides are in units of
ALIGN elements (see launch.py).
"""

import triton
import triton.language as tl

from ..common.loads import load_block, store_block
from ..common.ptxas import safe_ptxas


@safe_ptxas
@triton.jit(do_not_specialize=["num_zeros"])
def align_rows_kernel(copies, zeros_ptr, num_zeros, BLOCK: tl.constexpr):
    """Weights copied to rows of another stride, and zeros. Grid: rows of the weights."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    for level in tl.static_range(len(copies)):
        weight_ptr, stride_row, stride_column, copy_ptr, stride_copy, num_columns = copies[level]
        for first in range(0, num_columns, BLOCK):
            column = first + lanes
            x = tl.load(weight_ptr + row * stride_row + column.to(tl.int64) * stride_column, mask=column < num_columns)
            tl.store(copy_ptr + row * stride_copy + column, x, mask=column < num_columns)
    for first in range(tl.program_id(0) * BLOCK, num_zeros, tl.num_programs(0) * BLOCK):
        tl.store(zeros_ptr + first + lanes, 0, mask=first + lanes < num_zeros)


@triton.jit
def _add_and_store(
    acc, addends_ptr, indices_ptr, out_ptr, batch, row, column, M: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """out[batch] = acc + the rows of the addends that `batch` asks for. Wide tiles go by halves: a product lies in registers in another
    order than memory wants, and is exchanged through shared memory."""
    if BLOCK_N > CHUNK:
        left, right = tl.split(tl.permute(tl.reshape(acc, BLOCK_M, 2, BLOCK_N // 2), 0, 2, 1))
        _add_and_store(left, addends_ptr, indices_ptr, out_ptr, batch, row, column, M, N, BLOCK_M, BLOCK_N // 2, CHUNK)
        _add_and_store(right, addends_ptr, indices_ptr, out_ptr, batch, row, column + BLOCK_N // 2, M, N, BLOCK_M, BLOCK_N // 2, CHUNK)
    else:
        for level in tl.static_range(len(addends_ptr)):
            index = tl.load(indices_ptr[level] + batch)
            acc += load_block((addends_ptr[level], None, M * N, N), index, row, column, M, N, BLOCK_M, BLOCK_N)
        store_block((out_ptr, M * N, N), batch, row, column, acc, M, N, BLOCK_M, BLOCK_N)


@triton.jit
def _compress_tile(
    w, e, addends_ptr, indices_ptr, out_ptr, batch, row, column, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        w_block = load_block(w, 0, row, k, M, K, BLOCK_M, BLOCK_K)
        e_block = load_block(e, batch, k, column, K, N, BLOCK_K, BLOCK_N)
        acc = tl.dot(w_block, e_block, acc, input_precision=PRECISION)
    _add_and_store(acc, addends_ptr, indices_ptr, out_ptr, batch, row, column, M, N, BLOCK_M, BLOCK_N, 128)


@safe_ptxas
@triton.jit(do_not_specialize=["batch"])
def linear_compress_fwd_kernel(
    w_ptr, e_ptr, out_ptr, addends_ptr, indices_ptr, w_desc, w_tail_desc, e_desc, batch, stride_w, stride_eb, stride_e,
    M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, TAIL_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[b] = W @ E[b] + Σ_l addends_l[index_l[b]], `[M, N]` each, the addends in fp32.

    A candidate's tiles follow one another, so that its embeddings come from DRAM once. Its last rows make a tile of TAIL_M; which of
    the tiles is first turns from wave to wave, so that no program is dealt the short ones alone.
    """
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M * COLUMNS
    e = e_ptr, e_desc, stride_eb * ALIGN, stride_e * ALIGN
    # No pipelining: where one block spans K, Triton would pipeline the loop over tiles and exceed shared memory.
    for tile in tl.range(tl.program_id(0), batch * TILES, tl.num_programs(0), num_stages=1):
        b = tile // TILES
        part = (tile + b * TILES // tl.num_programs(0)) % TILES
        row, column = part // COLUMNS * BLOCK_M, part % COLUMNS * BLOCK_N
        if TAIL_M == BLOCK_M or row + BLOCK_M <= M:
            _compress_tile(
                (w_ptr, w_desc, 0, stride_w * ALIGN), e, addends_ptr, indices_ptr, out_ptr, b, row, column,
                M, K, N, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
        else:
            _compress_tile(
                (w_ptr, w_tail_desc, 0, stride_w * ALIGN), e, addends_ptr, indices_ptr, out_ptr, b, row, column,
                M, K, N, TAIL_M, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip


@safe_ptxas
@triton.jit(do_not_specialize=["batch"])
def linear_compress_bwd_dw_kernel(
    g_ptr, e_ptr, partial_ptr, g_desc, e_desc, batch, stride_gb, stride_g, stride_eb, stride_e,
    M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """partial[p] = the p-th of equal parts of Σ_b G[b] E[b]ᵀ, `[M, K]` fp32. Grid: tiles, parts.

    The sum runs over blocks of BLOCK_N columns, numbered through all batch rows: one long loop.
    """
    COLUMNS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    STEPS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    g = g_ptr, g_desc, stride_gb * ALIGN, stride_g * ALIGN
    e = e_ptr, e_desc, stride_eb * ALIGN, stride_e * ALIGN
    row, column = tl.program_id(0) // COLUMNS * BLOCK_M, tl.program_id(0) % COLUMNS * BLOCK_K
    part, parts = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    first, last = (part * batch * STEPS // parts).to(tl.int32), ((part + 1) * batch * STEPS // parts).to(tl.int32)
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for step in range(first, last):
        g_block = load_block(g, step // STEPS, row, step % STEPS * BLOCK_N, M, N, BLOCK_M, BLOCK_N)
        e_block = load_block(e, step // STEPS, column, step % STEPS * BLOCK_N, K, N, BLOCK_K, BLOCK_N)
        acc = tl.dot(g_block, tl.trans(e_block), acc, input_precision=PRECISION)
    store_block((partial_ptr, M * K, K), part, row, column, acc, M, K, BLOCK_M, BLOCK_K)


@safe_ptxas
@triton.jit
def sum_groups_kernel(x_ptr, order_ptr, offsets_ptr, out_ptr, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[g] = Σ x[order[i]] over i from offsets[g] to offsets[g + 1], rows of `size`, in fp32 and in that order. Grid: blocks, groups."""
    lanes, group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    start, end = tl.load(offsets_ptr + group), tl.load(offsets_ptr + group + 1)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & (lanes < size)[None, :]
        if order_ptr is not None:
            rows = tl.load(order_ptr + rows, mask=rows < end, other=0)
        acc += tl.load(x_ptr + rows.to(tl.int64)[:, None] * size + lanes[None, :], mask=mask, other=0.0).to(tl.float32)
    out = tl.sum(acc, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + group.to(tl.int64) * size + lanes, out, mask=lanes < size)
