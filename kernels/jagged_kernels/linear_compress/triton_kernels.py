"""Portable device code of linear compression: copies of weights, the GEMM with addends, a weight's
gradient, sums over groups of rows. op.py has the equations.

M, K and N are constants, as a model fixes them; batch sizes are not. Strides are in units of ALIGN
elements (see `aligned_strides`).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.loads import Matrices, load_block, store_block
from ..common.ptxas import safe_ptxas


class Addends(NamedTuple):
    """Results of the shared levels, fp32, and for each level the index of every batch row.

    flags_ptr: int32, not 0 where the tile of a shared result is stored, by the tile's number; None:
    all are. firsts: the first batch row of each level, in the order of the tiles' numbers.
    """

    ptrs: tl.tuple
    indices_ptrs: tl.tuple
    flags_ptr: tl.tensor
    firsts: tl.tuple


class SharedLevel(NamedTuple):
    """Weight, embeddings, strides as of `linear_compress_fwd_kernel`, result in fp32."""

    w_ptr: tl.tensor
    e_ptr: tl.tensor
    strides: tl.tuple
    result_ptr: tl.tensor


class Tile(NamedTuple):
    """Batch row, first row and first column of a tile."""

    batch: tl.tensor
    row: tl.tensor
    column: tl.tensor


class Options(NamedTuple):
    """Constants of a GEMM. tail_m: rows of the last tile of a matrix. align: elements that strides
    count."""

    m: int
    k: int
    n: int
    block_m: int
    block_n: int
    block_k: int
    align: int
    precision: str
    tail_m: int = 0


@safe_ptxas
@triton.jit(do_not_specialize=["num_zeros"])
def align_rows_kernel(copies, zeros_ptr, num_zeros, BLOCK: tl.constexpr):
    """Copy weights to rows of another stride, and write zeros. Grid: rows of the weights.

    copies: for each weight its pointer and strides, the copy's pointer and row stride, and the
    number of columns.
    """
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    for level in tl.static_range(len(copies)):
        weight_ptr, stride_row, stride_column, copy_ptr, stride_copy, num_columns = copies[level]
        for first in range(0, num_columns, BLOCK):
            column = first + lanes
            x = tl.load(
                weight_ptr + row * stride_row + column.to(tl.int64) * stride_column,
                mask=column < num_columns,
            )
            tl.store(copy_ptr + row * stride_copy + column, x, mask=column < num_columns)
    for first in range(tl.program_id(0) * BLOCK, num_zeros, tl.num_programs(0) * BLOCK):
        tl.store(zeros_ptr + first + lanes, 0, mask=first + lanes < num_zeros)


@triton.jit
def _store_epilogue(
    acc, addends, out_ptr, tile, M: tl.constexpr, N: tl.constexpr, MAX_N: tl.constexpr
):
    """out[batch] = acc + the addends of the batch row. Tiles of more than MAX_N columns are stored
    by halves: the accumulator changes its layout through shared memory, which halves need less
    of."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    if BLOCK_N > MAX_N:
        left, right = tl.split(tl.permute(tl.reshape(acc, BLOCK_M, 2, BLOCK_N // 2), 0, 2, 1))
        _store_epilogue(left, addends, out_ptr, tile, M, N, MAX_N)
        _store_epilogue(
            right, addends, out_ptr, Tile(tile.batch, tile.row, tile.column + BLOCK_N // 2), M, N,
            MAX_N,
        )  # fmt: skip
    else:
        for level in tl.static_range(len(addends.ptrs)):
            index = tl.load(addends.indices_ptrs[level] + tile.batch)
            addend = Matrices(addends.ptrs[level], None, M * N, N)
            acc += load_block(addend, index, tile.row, tile.column, M, N, BLOCK_M, BLOCK_N)
        store_block(
            Matrices(out_ptr, None, M * N, N), tile.batch, tile.row, tile.column, acc, M, N,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _decoded(firsts):
    """Undo `encoded` of op.py."""
    numbers = ()
    for i in tl.static_range(len(firsts)):
        numbers = numbers + ((firsts[i] - 3) // 2,)
    return numbers


@triton.jit
def _wait_for_addends(addends, tile, OPTIONS: tl.constexpr):
    """Wait until other programs have stored the tile of each shared result that `tile` adds."""
    BLOCKS_N: tl.constexpr = (OPTIONS.n + OPTIONS.block_n - 1) // OPTIONS.block_n
    TILES: tl.constexpr = (OPTIONS.m + OPTIONS.block_m - 1) // OPTIONS.block_m * BLOCKS_N
    if addends.flags_ptr is not None:
        part = tile.row // OPTIONS.block_m * BLOCKS_N + tile.column // OPTIONS.block_n
        for level in tl.static_range(len(addends.ptrs)):
            index = tl.load(addends.indices_ptrs[level] + tile.batch).to(tl.int32)
            number = (addends.firsts[level] + index) * TILES + part
            while tl.atomic_add(addends.flags_ptr + number, 0, sem="acquire") == 0:
                pass


@triton.jit
def _gemm_tile(w, e, addends, out_ptr, tile, BLOCK_M: tl.constexpr, OPTIONS: tl.constexpr):
    K: tl.constexpr = OPTIONS.k
    BLOCK_N: tl.constexpr = OPTIONS.block_n
    BLOCK_K: tl.constexpr = OPTIONS.block_k
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        w_block = load_block(w, 0, tile.row, k, OPTIONS.m, K, BLOCK_M, BLOCK_K)
        e_block = load_block(e, tile.batch, k, tile.column, K, OPTIONS.n, BLOCK_K, BLOCK_N)
        acc = tl.dot(w_block, e_block, acc, input_precision=OPTIONS.precision)
    _wait_for_addends(addends, tile, OPTIONS)
    _store_epilogue(acc, addends, out_ptr, tile, OPTIONS.m, OPTIONS.n, 128)


@triton.jit
def _tile_or_tail(
    w_ptr, w_desc, w_tail_desc, stride, e, addends, out_ptr, tile, OPTIONS: tl.constexpr
):  # fmt: skip
    """A tile of out. w_tail_desc: of the last M tile, which has tail_m rows. stride: of w's
    rows."""
    if OPTIONS.tail_m == OPTIONS.block_m or tile.row + OPTIONS.block_m <= OPTIONS.m:
        w = Matrices(w_ptr, w_desc, 0, stride * OPTIONS.align)
        _gemm_tile(w, e, addends, out_ptr, tile, OPTIONS.block_m, OPTIONS)
    else:
        w_tail = Matrices(w_ptr, w_tail_desc, 0, stride * OPTIONS.align)
        _gemm_tile(w_tail, e, addends, out_ptr, tile, OPTIONS.tail_m, OPTIONS)


@safe_ptxas
@triton.jit(do_not_specialize=["batch"])
def linear_compress_fwd_kernel(
    w_ptr, e_ptr, out_ptr, addends_ptr, indices_ptr, w_desc, w_tail_desc, e_desc, batch, strides,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """out[b] = W @ E[b] + Σ_l addends_l[index_l[b]], `[M, N]` each, the addends in fp32.
    Persistent. strides: of w's rows, of e's matrices and rows.

    The tiles of a batch row follow one another, so its embeddings are read from DRAM once. Its last
    M tile has tail_m rows. Which of its tiles is first rotates from wave to wave, so that no
    program gets the short ones alone.
    """
    BLOCK_M: tl.constexpr = OPTIONS.block_m
    BLOCK_N: tl.constexpr = OPTIONS.block_n
    BLOCKS_N: tl.constexpr = (OPTIONS.n + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = (OPTIONS.m + BLOCK_M - 1) // BLOCK_M * BLOCKS_N
    e = Matrices(e_ptr, e_desc, strides[1] * OPTIONS.align, strides[2] * OPTIONS.align)
    addends = Addends(addends_ptr, indices_ptr, None, ())
    # No pipelining: where one block spans K, Triton would pipeline the loop over tiles and exceed
    # shared memory.
    for index in tl.range(tl.program_id(0), batch * TILES, tl.num_programs(0), num_stages=1):
        b = index // TILES
        part = (index + b * TILES // tl.num_programs(0)) % TILES
        tile = Tile(b, part // BLOCKS_N * BLOCK_M, part % BLOCKS_N * BLOCK_N)
        _tile_or_tail(w_ptr, w_desc, w_tail_desc, strides[0], e, addends, out_ptr, tile, OPTIONS)


@safe_ptxas
@triton.jit
def linear_compress_fwd_levels_kernel(
    w_ptr, e_ptr, out_ptr, shared, indices_ptr, state_ptr, w_desc, w_tail_desc, e_desc, strides,
    firsts, OPTIONS: tl.constexpr, DEPTHS: tl.constexpr, ALIGNS: tl.constexpr,
):  # fmt: skip
    """`linear_compress_fwd_kernel` that computes the shared levels' results too. Persistent.

    Tiles are numbered by level, the shared levels first, and come from an atomic counter. Waiting
    for a tile cannot deadlock: a running program has taken it, and tiles of shared levels wait for
    nothing.

    shared: a SharedLevel for each, DEPTHS and ALIGNS their k and align. Shared levels are few rows,
    and read without descriptors, which Triton does not take in a tuple. firsts: the
    first batch row of each level, the candidates' too, and the end. state_ptr: int32 zeros, the
    counter, then a flag for each tile of the shared levels.
    """
    LEVELS: tl.constexpr = len(shared)
    BLOCKS_N: tl.constexpr = (OPTIONS.n + OPTIONS.block_n - 1) // OPTIONS.block_n
    TILES: tl.constexpr = (OPTIONS.m + OPTIONS.block_m - 1) // OPTIONS.block_m * BLOCKS_N
    firsts = _decoded(firsts)
    flags_ptr = state_ptr + 1
    results = ()
    for level in tl.static_range(LEVELS):
        results = results + (shared[level].result_ptr,)
    e = Matrices(e_ptr, e_desc, strides[1] * OPTIONS.align, strides[2] * OPTIONS.align)
    addends = Addends(results, indices_ptr, flags_ptr, firsts)
    number = tl.atomic_add(state_ptr, 1, sem="relaxed")
    while number < firsts[LEVELS + 1] * TILES:
        b = number // TILES
        row = number % TILES // BLOCKS_N * OPTIONS.block_m
        column = number % BLOCKS_N * OPTIONS.block_n
        if b >= firsts[LEVELS]:
            tile = Tile(b - firsts[LEVELS], row, column)
            _tile_or_tail(
                w_ptr, w_desc, w_tail_desc, strides[0], e, addends, out_ptr, tile, OPTIONS
            )
        else:
            for level in tl.static_range(LEVELS):
                if (b >= firsts[level]) & (b < firsts[level + 1]):
                    tile = Tile(b - firsts[level], row, column)
                    _shared_tile(shared[level], tile, OPTIONS, DEPTHS[level], ALIGNS[level])
            tl.debug_barrier()  # all threads have stored before one of them sets the flag
            tl.atomic_xchg(flags_ptr + number, 1, sem="release")
        number = tl.atomic_add(state_ptr, 1, sem="relaxed")


@triton.constexpr_function
def _of_level(o, depth, align):
    """The options with another k and align; the interpreter passes them as a plain tuple."""
    m, _, n, block_m, block_n, block_k, _, *others = o
    return Options(m, depth, n, block_m, block_n, block_k, align, *others)


@triton.jit
def _shared_tile(level, tile, OPTIONS: tl.constexpr, DEPTH: tl.constexpr, ALIGN: tl.constexpr):
    """A tile of a shared level's result."""
    OF_LEVEL: tl.constexpr = _of_level(OPTIONS, DEPTH, ALIGN)
    e = Matrices(level.e_ptr, None, level.strides[1] * ALIGN, level.strides[2] * ALIGN)
    nothing = Addends((), (), None, ())
    _tile_or_tail(
        level.w_ptr, None, None, level.strides[0], e, nothing, level.result_ptr, tile, OF_LEVEL
    )


@safe_ptxas
@triton.jit(do_not_specialize=["batch"])
def linear_compress_bwd_dw_kernel(
    g_ptr, e_ptr, partial_ptr, g_desc, e_desc, batch, stride_gb, stride_g, stride_eb, stride_e,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """partial[p] = the p-th of equal parts of Σ_b G[b] E[b]ᵀ, `[M, K]` fp32. Grid: tiles, parts.

    The sum runs over the blocks of block_n columns of all batch rows in one long loop.
    """
    M: tl.constexpr = OPTIONS.m
    K: tl.constexpr = OPTIONS.k
    N: tl.constexpr = OPTIONS.n
    BLOCK_M: tl.constexpr = OPTIONS.block_m
    BLOCK_K: tl.constexpr = OPTIONS.block_k
    BLOCK_N: tl.constexpr = OPTIONS.block_n
    ALIGN: tl.constexpr = OPTIONS.align
    BLOCKS_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    STEPS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    g = Matrices(g_ptr, g_desc, stride_gb * ALIGN, stride_g * ALIGN)
    e = Matrices(e_ptr, e_desc, stride_eb * ALIGN, stride_e * ALIGN)
    row, column = tl.program_id(0) // BLOCKS_K * BLOCK_M, tl.program_id(0) % BLOCKS_K * BLOCK_K
    part, parts = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    first, last = (
        (part * batch * STEPS // parts).to(tl.int32),
        ((part + 1) * batch * STEPS // parts).to(tl.int32),
    )
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for step in range(first, last):
        g_block = load_block(g, step // STEPS, row, step % STEPS * BLOCK_N, M, N, BLOCK_M, BLOCK_N)
        e_block = load_block(
            e, step // STEPS, column, step % STEPS * BLOCK_N, K, N, BLOCK_K, BLOCK_N
        )
        acc = tl.dot(g_block, tl.trans(e_block), acc, input_precision=OPTIONS.precision)
    store_block(
        Matrices(partial_ptr, None, M * K, K), part, row, column, acc, M, K, BLOCK_M, BLOCK_K
    )


@safe_ptxas
@triton.jit
def sum_groups_kernel(
    x_ptr, orders_ptr, offsets_ptr, outs_ptr, firsts, size, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[g] = Σ x[order[i]] over i from offsets[g] to offsets[g + 1], rows of `size`, in fp32 and
    in that order, for each of several levels.

    Grid: groups of all levels, blocks of a row, which follow one another. In one dimension, as the
    others have at most 65,535 programs. firsts: the first group of each level, and the end; not
    used with one level.
    """
    blocks = tl.cdiv(size, BLOCK)
    group, lanes = (
        tl.program_id(0) // blocks,
        tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK),
    )
    LEVELS: tl.constexpr = len(outs_ptr)
    firsts = _decoded(firsts)
    for level in tl.static_range(LEVELS):
        if LEVELS == 1:
            _sum_group(x_ptr, orders_ptr[0], offsets_ptr[0], outs_ptr[0], group, lanes, size, ROWS)
        elif (group >= firsts[level]) & (group < firsts[level + 1]):
            of_level = group - firsts[level]
            _sum_group(
                x_ptr, orders_ptr[level], offsets_ptr[level], outs_ptr[level], of_level, lanes,
                size, ROWS,
            )  # fmt: skip


@triton.jit
def _sum_group(x_ptr, order_ptr, offsets_ptr, out_ptr, group, lanes, size, ROWS: tl.constexpr):
    start, end = tl.load(offsets_ptr + group), tl.load(offsets_ptr + group + 1)
    acc = tl.zeros([ROWS, lanes.shape[0]], tl.float32)
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & (lanes < size)[None, :]
        if order_ptr is not None:
            rows = tl.load(order_ptr + rows, mask=rows < end, other=0)
        acc += tl.load(
            x_ptr + rows.to(tl.int64)[:, None] * size + lanes[None, :], mask=mask, other=0.0
        ).to(tl.float32)
    out = tl.sum(acc, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + group.to(tl.int64) * size + lanes, out, mask=lanes < size)
