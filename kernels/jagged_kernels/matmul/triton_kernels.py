"""Device code of matrix multiplications of jagged tensors. The equations are in op.py.

Tiles of rows are numbered in closed form (`find_tile`), so a grid follows from shapes alone.
Feature dimensions are constants, as a model fixes them; numbers of rows and segments are not. Row
strides are in units of ALIGN elements (see `aligned_strides`): ALIGN alone decides how wide loads
are, so a batch of one row, whose stride is arbitrary, runs the same kernel.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.loads import find_segment, find_tile, load_matrix, load_segment, log2, store_matrix
from ..common.ptxas import safe_ptxas


class Options(NamedTuple):
    """Constants of a product. d, t: columns of x and of y. transposed: the second operand, or p, is
    transposed in memory. factor: of the value and the derivative of an activation, which leaves it
    out. align: elements that strides count."""

    d: int
    t: int
    block_m: int
    block_n: int
    block_k: int
    precision: str
    align: int
    transposed: bool = False
    factor: float = 1.0


class Dense(NamedTuple):
    """Pointers of `jagged_dense_bmm_kernel`. bias, grad: or None."""

    x: tl.tensor
    y: tl.tensor
    bias: tl.tensor
    grad: tl.tensor
    out: tl.tensor


@safe_ptxas
@triton.jit(
    do_not_specialize=[
        "num_segments",
        "stride_x",
        "stride_yb",
        "stride_y",
        "stride_bias",
        "stride_grad",
    ]
)
def jagged_dense_bmm_kernel(
    pointers, offsets_ptr, num_segments, stride_x, stride_yb, stride_y, stride_bias, stride_grad,
    ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """out[b] = activation(x[b] @ y[b] + bias[b]), `[L, T]`. With a pointer `grad`, a gradient of
    it: grad times the activation's derivative. pointers: Dense.

    Transposed, y is `[B, T, D]` in memory. Grid: tile indices of x, blocks of columns, which follow
    one another: they share x's rows.
    """
    D: tl.constexpr = OPTIONS.d
    T: tl.constexpr = OPTIONS.t
    TRANSPOSED: tl.constexpr = OPTIONS.transposed
    BLOCK_M: tl.constexpr = OPTIONS.block_m
    BLOCK_N: tl.constexpr = OPTIONS.block_n
    BLOCK_K: tl.constexpr = OPTIONS.block_k
    ALIGN: tl.constexpr = OPTIONS.align
    BLOCKS_N: tl.constexpr = (T + BLOCK_N - 1) // BLOCK_N
    tile_index, column = tl.program_id(0) // BLOCKS_N, tl.program_id(0) % BLOCKS_N * BLOCK_N
    segment, start, num_rows, row = find_tile(tile_index, offsets_ptr, num_segments, log2(BLOCK_M))
    if row >= num_rows:
        return
    x_ptr = pointers.x + start * (stride_x * ALIGN)
    y_ptr = pointers.y + tl.cast(segment, tl.int64) * (stride_yb * ALIGN)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, D, BLOCK_K):
        x = load_matrix(x_ptr, row, k, stride_x * ALIGN, num_rows, D, BLOCK_M, BLOCK_K, False)
        y = load_matrix(y_ptr, k, column, stride_y * ALIGN, D, T, BLOCK_K, BLOCK_N, TRANSPOSED)
        acc = tl.dot(x, y, acc, input_precision=OPTIONS.precision)
    if pointers.bias is not None:
        columns = column + tl.arange(0, BLOCK_N)
        bias = tl.load(
            pointers.bias + tl.cast(segment, tl.int64) * (stride_bias * ALIGN) + columns,
            mask=columns < T,
            other=0.0,
        )
        acc += bias.to(tl.float32)[None, :]
    if ACTIVATION is not None:
        act, dact = ACTIVATION(acc, 1.0)
        if pointers.grad is None:
            acc = act * OPTIONS.factor
        else:
            grad_ptr = pointers.grad + start * (stride_grad * ALIGN)
            grad = load_matrix(
                grad_ptr, row, column, stride_grad * ALIGN, num_rows, T, BLOCK_M, BLOCK_N, False
            )
            acc = grad.to(tl.float32) * (dact * OPTIONS.factor)
    store_matrix(pointers.out + start * T, row, column, T, acc, num_rows, T)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "shift", "stride_x", "stride_y"])
def jagged_jagged_bmm_kernel(
    x_ptr, y_ptr, out_ptr, partial_ptr, offsets_ptr, num_segments, shift, stride_x, stride_y,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """out[b] = x[b]ᵀ @ y[b], `[B, D, T]`. Without x: the sum of y's rows, with d = block_m = 1.

    A segment longer than a chunk of 2^shift rows is summed by chunks. The sum of chunk i goes to
    slot 2 (offsets[b] // chunk) + i: a segment of n > chunk rows has at most n // chunk + 1 <= 2 (n
    // chunk) chunks, and the next segment begins at least n // chunk chunks later. Grid: chunk
    indices, tiles of the result, which follow one another.
    """
    D: tl.constexpr = OPTIONS.d
    T: tl.constexpr = OPTIONS.t
    BLOCK_M: tl.constexpr = OPTIONS.block_m
    BLOCK_N: tl.constexpr = OPTIONS.block_n
    BLOCK_K: tl.constexpr = OPTIONS.block_k
    ALIGN: tl.constexpr = OPTIONS.align
    BLOCKS_N: tl.constexpr = (T + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = (D + BLOCK_M - 1) // BLOCK_M * BLOCKS_N
    chunk_index, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    row, column = tile // BLOCKS_N * BLOCK_M, tile % BLOCKS_N * BLOCK_N
    segment, start, num_rows, first = find_tile(chunk_index, offsets_ptr, num_segments, shift)
    if (first >= num_rows) & (first > 0):  # the first chunk of an empty segment writes zeros
        return
    y_ptr += start * (stride_y * ALIGN)
    chunk = 1 << shift
    last = tl.minimum(first + chunk, num_rows)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(first, last, BLOCK_K):
        y = load_matrix(y_ptr, k, column, stride_y * ALIGN, last, T, BLOCK_K, BLOCK_N, False)
        if x_ptr is None:
            acc += tl.sum(y.to(tl.float32), 0)[None, :]
        else:
            x = load_matrix(
                x_ptr + start * (stride_x * ALIGN), row, k, stride_x * ALIGN, D, last, BLOCK_M,
                BLOCK_K, True,
            )  # fmt: skip
            acc = tl.dot(x, y, acc, input_precision=OPTIONS.precision)
    if num_rows <= chunk:
        store_matrix(out_ptr + tl.cast(segment, tl.int64) * (D * T), row, column, T, acc, D, T)
    else:
        slot = 2 * (start >> shift) + (first >> shift)
        store_matrix(partial_ptr + slot * (D * T), row, column, T, acc, D, T)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "shift"])
def sum_chunks_kernel(
    partial_ptr, out_ptr, offsets_ptr, num_segments, shift,
    SIZE: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[b] = the sum over the chunks of a segment that has several, `[SIZE]` each, in fp32 and in
    their order.

    Grid: windows of as many rows as a chunk, blocks. At most one long segment begins in a window,
    and no other segment after it.
    """
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    window, column = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * BLOCK
    segment = find_segment(window, offsets_ptr, num_segments, shift, False)
    start, num_rows = load_segment(offsets_ptr, segment)
    num_chunks = ((num_rows - 1) >> shift) + 1
    if (num_chunks <= 1) | ((start >> shift) != window):
        return
    partial_ptr += 2 * tl.cast(window, tl.int64) * SIZE
    acc = tl.zeros([CHUNKS, BLOCK], tl.float32)
    for chunk in range(0, num_chunks, CHUNKS):
        acc += load_matrix(partial_ptr, chunk, column, SIZE, num_chunks, SIZE, CHUNKS, BLOCK, False)
    store_matrix(
        out_ptr + tl.cast(segment, tl.int64) * SIZE, 0, column, SIZE, tl.sum(acc, 0)[None, :], 1,
        SIZE,
    )  # fmt: skip


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "stride_x", "stride_y"])
def jagged_outer_kernel(
    x_ptr, y_ptr, p_ptr, x_offsets_ptr, y_offsets_ptr, p_offsets_ptr, num_segments, stride_x,
    stride_y,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """p[b] = x[b] @ y[b]ᵀ, row-major from p_offsets[b] on. Grid: tile indices of x.

    Without y, x[b] @ x[b]ᵀ: a tile on the diagonal reads its rows once, and a tile above it is also
    stored transposed, below it.
    """
    D: tl.constexpr = OPTIONS.d
    BLOCK_M: tl.constexpr = OPTIONS.block_m
    BLOCK_N: tl.constexpr = OPTIONS.block_n
    BLOCK_K: tl.constexpr = OPTIONS.block_k
    ALIGN: tl.constexpr = OPTIONS.align
    segment, x_start, num_rows, row = find_tile(
        tl.program_id(0), x_offsets_ptr, num_segments, log2(BLOCK_M)
    )
    if row >= num_rows:
        return
    x_ptr += x_start * (stride_x * ALIGN)
    p_ptr += tl.load(p_offsets_ptr + segment).to(tl.int64)
    if y_ptr is None:
        other_ptr, stride, num_columns, first = x_ptr, stride_x * ALIGN, num_rows, row + BLOCK_M
        acc = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
        for k in range(0, D, BLOCK_K):
            x = load_matrix(x_ptr, row, k, stride, num_rows, D, BLOCK_M, BLOCK_K, False)
            acc = tl.dot(x, tl.trans(x), acc, input_precision=OPTIONS.precision)
        store_matrix(p_ptr, row, row, num_rows, acc, num_rows, num_rows)
    else:
        y_start, num_columns = load_segment(y_offsets_ptr, segment)
        other_ptr, stride, first = y_ptr + y_start * (stride_y * ALIGN), stride_y * ALIGN, 0
    STEPS: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # one loop: the next block's loads are under way while one ends
    for i in range(0, tl.cdiv(num_columns - first, BLOCK_N) * STEPS):
        column, k = first + i // STEPS * BLOCK_N, i % STEPS * BLOCK_K
        x = load_matrix(x_ptr, row, k, stride_x * ALIGN, num_rows, D, BLOCK_M, BLOCK_K, False)
        y = load_matrix(other_ptr, k, column, stride, D, num_columns, BLOCK_K, BLOCK_N, True)
        acc = tl.dot(x, y, acc, input_precision=OPTIONS.precision)
        if i % STEPS == STEPS - 1:
            store_matrix(p_ptr, row, column, num_columns, acc, num_rows, num_columns)
            if y_ptr is None:
                store_matrix(p_ptr, column, row, num_columns, tl.trans(acc), num_rows, num_columns)
            acc = tl.zeros_like(acc)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments"])
def jagged_symmetric_kernel(
    p_ptr, out_ptr, x_offsets_ptr, p_offsets_ptr, num_segments, BLOCK: tl.constexpr
):
    """out[b] = p[b] + p[b]ᵀ of square matrices. Grid: tile indices of rows."""
    segment, _, size, row = find_tile(tl.program_id(0), x_offsets_ptr, num_segments, log2(BLOCK))
    start = tl.load(p_offsets_ptr + segment).to(tl.int64)
    for column in range(0, tl.where(row < size, size, 0), BLOCK):
        block = load_matrix(p_ptr + start, row, column, size, size, size, BLOCK, BLOCK, False).to(
            tl.float32
        )
        mirror = load_matrix(p_ptr + start, row, column, size, size, size, BLOCK, BLOCK, True).to(
            tl.float32
        )
        store_matrix(out_ptr + start, row, column, size, block + mirror, size, size)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "stride_y"])
def array_jagged_bmm_kernel(
    p_ptr, y_ptr, out_ptr, out_offsets_ptr, y_offsets_ptr, p_offsets_ptr, num_segments, stride_y,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """out[b] = p[b] @ y[b]. p[b] has a row for each row of out[b] and a column for each row of
    y[b]; transposed, p[b]ᵀ is in memory. Grid: tile indices of the result, blocks of columns, which
    follow one another: they share p."""
    D: tl.constexpr = OPTIONS.d
    TRANSPOSED: tl.constexpr = OPTIONS.transposed
    BLOCK_M: tl.constexpr = OPTIONS.block_m
    BLOCK_N: tl.constexpr = OPTIONS.block_n
    BLOCK_K: tl.constexpr = OPTIONS.block_k
    ALIGN: tl.constexpr = OPTIONS.align
    BLOCKS_N: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    tile_index, column = tl.program_id(0) // BLOCKS_N, tl.program_id(0) % BLOCKS_N * BLOCK_N
    segment, start, num_rows, row = find_tile(
        tile_index, out_offsets_ptr, num_segments, log2(BLOCK_M)
    )
    if row >= num_rows:
        return
    y_start, length = load_segment(y_offsets_ptr, segment)
    y_ptr += y_start * (stride_y * ALIGN)
    p_ptr += tl.load(p_offsets_ptr + segment).to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, length, BLOCK_K):
        p = load_matrix(
            p_ptr, row, k, num_rows if TRANSPOSED else length, num_rows, length, BLOCK_M, BLOCK_K,
            TRANSPOSED,
        )  # fmt: skip
        y = load_matrix(y_ptr, k, column, stride_y * ALIGN, length, D, BLOCK_K, BLOCK_N, False)
        acc = tl.dot(p, y, acc, input_precision=OPTIONS.precision)
    store_matrix(out_ptr + start * D, row, column, D, acc, num_rows, D)
