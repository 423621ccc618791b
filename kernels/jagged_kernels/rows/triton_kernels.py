"""Device code of norms of rows, and of HSTU's gate. The equations are in op.py.

A program takes tiles of rows of one group of columns: a norm is over the group. A tile is in
registers, in fp32, so each operand is read once.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.ptxas import safe_ptxas
from ..common.random import philox

# Dropout draws three numbers below it for an element, from 64 random bits.
RANDOM_NUMBERS = tl.constexpr(2**21)


class Options(NamedTuple):
    """Constants of the kernels. dim: columns of a group. rms: the root mean square norm. eps: added
    to the variance. align: elements that strides count. rows, block: of a tile."""

    dim: int
    rms: bool
    eps: float
    align: int
    rows: int
    block: int


class NormForward(NamedTuple):
    """Operands and results of `row_norm_fwd_kernel`. added, bias, end, total, copy and mean may be
    None."""

    x: tl.tensor
    added: tl.tensor
    weight: tl.tensor
    bias: tl.tensor
    end: tl.tensor
    total: tl.tensor
    y: tl.tensor
    copy: tl.tensor
    mean: tl.tensor
    rstd: tl.tensor


class NormBackward(NamedTuple):
    """Operands and results of `row_norm_bwd_kernel`. added, residual, kept, end, copy, dbias and
    total may be None."""

    dy: tl.tensor
    added: tl.tensor
    x: tl.tensor
    mean: tl.tensor
    rstd: tl.tensor
    weight: tl.tensor
    residual: tl.tensor
    kept: tl.tensor
    end: tl.tensor
    dx: tl.tensor
    copy: tl.tensor
    dweight: tl.tensor
    dbias: tl.tensor
    total: tl.tensor


class Gate(NamedTuple):
    """Operands of the gate. bias may be None, and seed without dropout."""

    u: tl.tensor
    a: tl.tensor
    mean: tl.tensor
    rstd: tl.tensor
    weight: tl.tensor
    bias: tl.tensor
    seed: tl.tensor


class GateGradients(NamedTuple):
    """dout and the results of `gate_bwd_kernel`. dbias may be None."""

    dout: tl.tensor
    du: tl.tensor
    da: tl.tensor
    dweight: tl.tensor
    dbias: tl.tensor


class Tile(NamedTuple):
    """Rows, int64 [ROWS], which of them exist, columns of the group [BLOCK], and the mask of
    elements [ROWS, BLOCK]."""

    rows: tl.tensor
    exist: tl.tensor
    columns: tl.tensor
    mask: tl.tensor


@triton.jit
def _tile(index, num_rows, OPTIONS: tl.constexpr):
    """The tile of the index among those of the program's group."""
    rows = tl.cast(index, tl.int64) * OPTIONS.rows + tl.arange(0, OPTIONS.rows)
    columns = tl.arange(0, OPTIONS.block)
    exist = rows < num_rows
    return Tile(rows, exist, columns, exist[:, None] & (columns < OPTIONS.dim)[None, :])


@triton.jit
def _before_end(tile, end_ptr, num_segments):
    """The tile without the rows from the last of the offsets at end_ptr on."""
    if end_ptr is not None:
        exist = tile.exist & (tile.rows < tl.load(end_ptr + num_segments))
        tile = Tile(tile.rows, exist, tile.columns, tile.mask & exist[:, None])
    return tile


@triton.jit
def _ptrs(ptr, stride, tile, first):
    """Pointers to the tile's elements, of which the group's first one is in column `first`."""
    return ptr + tile.rows[:, None] * stride + (first + tile.columns)[None, :]


@triton.jit
def _load(ptr, stride, tile, first):
    return tl.load(_ptrs(ptr, stride, tile, first), mask=tile.mask, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, stride, tile, first, x):
    tl.store(_ptrs(ptr, stride, tile, first), x.to(ptr.dtype.element_ty), mask=tile.mask)


@triton.jit
def _of_columns(ptr, tile, first, DIM: tl.constexpr):
    """A weight or a bias, [BLOCK]."""
    return tl.load(ptr + first + tile.columns, mask=tile.columns < DIM, other=0.0).to(tl.float32)


@triton.jit
def _statistics(x, tile, OPTIONS: tl.constexpr):
    """Mean and reciprocal standard deviation of each row. rms: no mean, and the reciprocal root
    mean square."""
    ROWS: tl.constexpr = OPTIONS.rows
    mean = tl.zeros([ROWS], tl.float32)
    if not OPTIONS.rms:
        mean = tl.sum(x, 1) / OPTIONS.dim
    centred = tl.where(tile.mask, x - mean[:, None], 0.0)
    return mean, 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / OPTIONS.dim + OPTIONS.eps)


@triton.jit
def _store_statistics(mean_ptr, rstd_ptr, mean, rstd, tile):
    """Both are `[rows, groups]`."""
    at = tile.rows * tl.num_programs(1) + tl.program_id(1)
    if mean_ptr is not None:
        tl.store(mean_ptr + at, mean, mask=tile.exist)
    tl.store(rstd_ptr + at, rstd, mask=tile.exist)


@triton.jit
def _normed(x, mean_ptr, rstd_ptr, tile):
    """x without its mean and in units of its standard deviation, and the reciprocal of that."""
    at = tile.rows * tl.num_programs(1) + tl.program_id(1)
    rstd = tl.load(rstd_ptr + at, mask=tile.exist, other=0.0)[:, None]
    if mean_ptr is not None:
        x -= tl.load(mean_ptr + at, mask=tile.exist, other=0.0)[:, None]
    return x * rstd, rstd


@triton.jit
def _norm_gradient(g, xhat, rstd, OPTIONS: tl.constexpr):
    """Gradient of a norm's input, given that of xhat. Columns behind the group have a g of 0."""
    dx = g - xhat * (tl.sum(g * xhat, 1) / OPTIONS.dim)[:, None]
    if not OPTIONS.rms:
        dx -= (tl.sum(g, 1) / OPTIONS.dim)[:, None]
    return dx * rstd


@triton.jit
def _store_sums(ptr, x, first, DIM: tl.constexpr):
    """Write the sum of the rows of x to this program's row of partial sums, `[programs, width]`."""
    width = tl.num_programs(1) * DIM
    columns = tl.arange(0, x.shape[1])
    ptrs = ptr + tl.program_id(0) * width + first + columns
    tl.store(ptrs, tl.sum(x, 0), mask=columns < DIM)


@safe_ptxas
@triton.jit(do_not_specialize=["num_rows", "num_segments", "stride_x"])
def row_norm_fwd_kernel(
    tensors, num_rows, num_segments, stride_x, EXTRA: tl.constexpr, OPTIONS: tl.constexpr
):
    """y = norm(x) · weight + bias, y again in copy's dtype, and the statistics of each row and
    group; y = 0 in rows behind the end. With added, x + added takes the place of x; with total, it
    is written there, and rounded to its dtype. tensors: NormForward. The stride is in units of
    `align` elements (see `aligned_strides`); all but x are contiguous, y with EXTRA columns behind
    its own. Grid: tiles, groups."""
    DIM: tl.constexpr = OPTIONS.dim
    tile = _tile(tl.program_id(0), num_rows, OPTIONS)
    read = _before_end(tile, tensors.end, num_segments)
    first, width = tl.program_id(1) * DIM, tl.num_programs(1) * DIM
    x = _load(tensors.x, stride_x * OPTIONS.align, read, first)
    if tensors.added is not None:
        x += _load(tensors.added, width, read, first)
        if tensors.total is not None:
            x = x.to(tensors.total.dtype.element_ty).to(tl.float32)
            _store(tensors.total, width, tile, first, x)
    mean, rstd = _statistics(x, read, OPTIONS)
    y = (x - mean[:, None]) * rstd[:, None]
    y *= _of_columns(tensors.weight, tile, first, DIM)[None, :]
    if tensors.bias is not None:
        y += _of_columns(tensors.bias, tile, first, DIM)[None, :]
    if tensors.end is not None:
        y = tl.where(read.mask, y, 0.0)
    _store(tensors.y, width + EXTRA, tile, first, y)
    if tensors.copy is not None:
        _store(tensors.copy, width, tile, first, y)
    if EXTRA > 0:
        behind = tl.arange(0, EXTRA)[None, :]
        one = (behind == 0).to(tensors.y.dtype.element_ty)
        ptrs = tensors.y + tile.rows[:, None] * (width + EXTRA) + width + behind
        tl.store(ptrs, one, mask=tile.exist[:, None])
    _store_statistics(tensors.mean, tensors.rstd, mean, rstd, tile)


@safe_ptxas
@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def row_norm_bwd_kernel(tensors, num_rows, num_segments, scale, strides, OPTIONS: tl.constexpr):
    """dx, plus the residual's gradient, dx again in copy's dtype, and partial sums of the gradients
    of weight and bias, and of the copy in total. With added, dy + added takes the place of dy. With
    kept, the copy is dx · kept · scale. Rows behind the end are 0. tensors: NormBackward; dx may be
    dy; added, kept and copy are contiguous. strides: of dy, x, dx and the residual, in units of
    `align` elements. Grid: programs, groups."""
    DIM: tl.constexpr = OPTIONS.dim
    ALIGN: tl.constexpr = OPTIONS.align
    ROWS: tl.constexpr = OPTIONS.rows
    BLOCK: tl.constexpr = OPTIONS.block
    first, num_tiles = tl.program_id(1) * DIM, tl.cdiv(num_rows, ROWS)
    width = tl.num_programs(1) * DIM
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for index in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile = _tile(index, num_rows, OPTIONS)
        read = _before_end(tile, tensors.end, num_segments)
        dy = _load(tensors.dy, strides[0] * ALIGN, read, first)
        if tensors.added is not None:
            dy += _load(tensors.added, width, read, first)
        x = _load(tensors.x, strides[1] * ALIGN, read, first)
        xhat, rstd = _normed(x, tensors.mean, tensors.rstd, read)
        weight = _of_columns(tensors.weight, tile, first, DIM)
        dx = _norm_gradient(dy * weight[None, :], xhat, rstd, OPTIONS)
        if tensors.residual is not None:
            dx += _load(tensors.residual, strides[3] * ALIGN, read, first)
        tl.debug_barrier()  # all threads have read the elements of dy that dx may replace
        _store(tensors.dx, strides[2] * ALIGN, tile, first, dx)
        if tensors.kept is not None:
            dx *= _load(tensors.kept, width, read, first) * scale
        if tensors.copy is not None:
            _store(tensors.copy, width, tile, first, dx)
        dweight += dy * xhat
        dbias += dy
        if tensors.total is not None:
            total += dx
    _store_sums(tensors.dweight, dweight, first, DIM)
    if tensors.dbias is not None:
        _store_sums(tensors.dbias, dbias, first, DIM)
    if tensors.total is not None:
        _store_sums(tensors.total, total, first, DIM)


@triton.jit
def _random_words(seed, row, column):
    """Two random 32-bit words of each element, which depend on the seed, its row and its column."""
    zeros = tl.zeros([row.shape[0], column.shape[0]], tl.uint32)
    key = seed.to(tl.uint32)
    low = zeros + row.to(tl.uint32)[:, None]
    high = zeros + (column.to(tl.uint32) ^ (seed >> 32).to(tl.uint32))[None, :]
    return philox(low, high, key)


@triton.jit
def _kept(seed_ptr, threshold, tile, first):
    """Dropout's factors of the three parts of the output: 0, or the reciprocal of the probability
    to keep an element, threshold / RANDOM_NUMBERS."""
    low, high = _random_words(tl.load(seed_ptr), tile.rows, first + tile.columns)
    of_y = (low & 0x7FF) << 10 | (high & 0x3FF)  # bits that the other two leave
    scale = RANDOM_NUMBERS / tl.maximum(threshold, 1).to(tl.float32)
    return (
        tl.where((low >> 11).to(tl.int32) < threshold, scale, 0.0),
        tl.where((high >> 11).to(tl.int32) < threshold, scale, 0.0),
        tl.where(of_y.to(tl.int32) < threshold, scale, 0.0),
    )


@safe_ptxas
@triton.jit(do_not_specialize=["num_rows", "threshold"])
def gate_fwd_kernel(tensors, out_ptr, num_rows, threshold, strides, OPTIONS: tl.constexpr):
    """out = dropout([silu(u) | a | silu(u) · norm(a)]) `[rows, 3 W]`, and the statistics of each
    row and group of a. tensors: Gate, whose mean and rstd are results. strides: of u and a, in
    units of `align` elements. Grid: tiles, groups."""
    DIM: tl.constexpr = OPTIONS.dim
    tile = _tile(tl.program_id(0), num_rows, OPTIONS)
    first, width = tl.program_id(1) * DIM, tl.num_programs(1) * DIM
    u = _load(tensors.u, strides[0] * OPTIONS.align, tile, first)
    a = _load(tensors.a, strides[1] * OPTIONS.align, tile, first)
    mean, rstd = _statistics(a, tile, OPTIONS)
    normed = (a - mean[:, None]) * rstd[:, None]
    normed *= _of_columns(tensors.weight, tile, first, DIM)[None, :]
    if tensors.bias is not None:
        normed += _of_columns(tensors.bias, tile, first, DIM)[None, :]
    u *= tl.sigmoid(u)
    y = u * normed
    if tensors.seed is not None:
        of_u, of_a, of_y = _kept(tensors.seed, threshold, tile, first)
        u, a, y = u * of_u, a * of_a, y * of_y
    _store(out_ptr, 3 * width, tile, first, u)
    _store(out_ptr, 3 * width, tile, width + first, a)
    _store(out_ptr, 3 * width, tile, 2 * width + first, y)
    _store_statistics(tensors.mean, tensors.rstd, mean, rstd, tile)


@safe_ptxas
@triton.jit(do_not_specialize=["first_tile", "num_rows", "threshold"])
def gate_bwd_kernel(
    tensors, grads, first_tile, num_rows, threshold, strides,
    RECOMPUTE: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """du, da, which may replace a, and partial sums of the gradients of weight and bias, of the
    tiles from `first_tile` on. RECOMPUTE: the forward's out replaces dout. tensors: Gate; grads:
    GateGradients. strides: of u, a, dout, du and da, in units of `align` elements. Grid: programs,
    groups."""
    DIM: tl.constexpr = OPTIONS.dim
    ALIGN: tl.constexpr = OPTIONS.align
    ROWS: tl.constexpr = OPTIONS.rows
    BLOCK: tl.constexpr = OPTIONS.block
    first, width = tl.program_id(1) * DIM, tl.num_programs(1) * DIM
    num_tiles = tl.cdiv(num_rows, ROWS)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    for index in range(first_tile + tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile = _tile(index, num_rows, OPTIONS)
        u = _load(tensors.u, strides[0] * ALIGN, tile, first)
        a = _load(tensors.a, strides[1] * ALIGN, tile, first)
        du = _load(grads.dout, strides[2] * ALIGN, tile, first)
        da = _load(grads.dout, strides[2] * ALIGN, tile, width + first)
        dy = _load(grads.dout, strides[2] * ALIGN, tile, 2 * width + first)
        xhat, rstd = _normed(a, tensors.mean, tensors.rstd, tile)
        weight = _of_columns(tensors.weight, tile, first, DIM)[None, :]
        normed = xhat * weight
        if tensors.bias is not None:
            normed += _of_columns(tensors.bias, tile, first, DIM)[None, :]
        gate = tl.sigmoid(u)
        silu = u * gate
        kept_silu, y = silu, silu * normed
        if tensors.seed is not None:
            of_u, of_a, of_y = _kept(tensors.seed, threshold, tile, first)
            du, da, dy = du * of_u, da * of_a, dy * of_y
            kept_silu, a, y = silu * of_u, a * of_a, y * of_y
        dsilu = du + dy * normed
        dnormed = dy * silu
        da += _norm_gradient(dnormed * weight, xhat, rstd, OPTIONS)
        tl.debug_barrier()  # all threads have read the elements of a and dout that are replaced
        _store(grads.du, strides[3] * ALIGN, tile, first, dsilu * gate * (1 + u * (1 - gate)))
        _store(grads.da, strides[4] * ALIGN, tile, first, da)
        dweight += dnormed * xhat
        dbias += dnormed
        if RECOMPUTE:
            _store(grads.dout, strides[2] * ALIGN, tile, first, kept_silu)
            _store(grads.dout, strides[2] * ALIGN, tile, width + first, a)
            _store(grads.dout, strides[2] * ALIGN, tile, 2 * width + first, y)
    _store_sums(grads.dweight, dweight, first, DIM)
    if grads.dbias is not None:
        _store_sums(grads.dbias, dbias, first, DIM)
