"""Device code of activations of rows. The equations are in activation.py.

A program takes tiles of rows of one block of columns, in registers, in fp32.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.ptxas import safe_ptxas


class ActivationOptions(NamedTuple):
    """Constants of the kernels. width: columns of the result. gated: x has twice as many. align:
    elements that strides count. rows, block: of a tile. again: the backward also computes the
    forward's result. scaled: there is a factor of dropout."""

    width: int
    gated: bool
    align: int
    rows: int
    block: int
    again: bool = False
    scaled: bool = False


class ActivationBackward(NamedTuple):
    """Operands and results of `activation_bwd_kernel`. kept and end may be None."""

    dy: tl.tensor
    x: tl.tensor
    kept: tl.tensor
    end: tl.tensor
    dx: tl.tensor
    sums: tl.tensor


@triton.jit
def _load(ptr, stride, rows, columns, mask):
    """Elements [ROWS, BLOCK] in fp32, 0 where masked."""
    ptrs = ptr + rows[:, None] * stride + columns[None, :]
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, stride, rows, columns, mask, x):
    tl.store(ptr + rows[:, None] * stride + columns[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@safe_ptxas
@triton.jit(do_not_specialize=["num_rows"])
def activation_fwd_kernel(
    x_ptr, y_ptr, num_rows, strides, ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr
):
    """y = act(x), or act(x₁) · x₂. strides: of x and y, in units of `align` elements. Grid: tiles,
    blocks of columns."""
    ALIGN: tl.constexpr = OPTIONS.align
    rows = tl.cast(tl.program_id(0), tl.int64) * OPTIONS.rows + tl.arange(0, OPTIONS.rows)
    columns = tl.program_id(1) * OPTIONS.block + tl.arange(0, OPTIONS.block)
    mask = (rows < num_rows)[:, None] & (columns < OPTIONS.width)[None, :]
    y, _ = ACTIVATION(_load(x_ptr, strides[0] * ALIGN, rows, columns, mask), 1.0)
    if OPTIONS.gated:
        y *= _load(x_ptr, strides[0] * ALIGN, rows, columns + OPTIONS.width, mask)
    _store(y_ptr, strides[1] * ALIGN, rows, columns, mask, y)


@safe_ptxas
@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def activation_bwd_kernel(
    tensors, num_rows, num_segments, scale, strides,
    ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """dx, which may replace x, and this program's sums of its columns, `[programs, columns of x]`.
    Rows from the last of the offsets at `end` on are 0. With `again`, y replaces dy. With `scaled`,
    dy is multiplied by the scale, or by 0 where kept is 0, and y too. tensors: ActivationBackward;
    kept is contiguous. strides: of dy, x and dx, in units of `align` elements. Grid: programs,
    blocks of columns."""
    WIDTH: tl.constexpr = OPTIONS.width
    ALIGN: tl.constexpr = OPTIONS.align
    ROWS: tl.constexpr = OPTIONS.rows
    BLOCK: tl.constexpr = OPTIONS.block
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_value = tl.zeros([ROWS, BLOCK], tl.float32)
    of_gate = tl.zeros([ROWS, BLOCK], tl.float32)
    for index in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = tl.cast(index, tl.int64) * ROWS + tl.arange(0, ROWS)
        written = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
        read = written
        if tensors.end is not None:
            read &= (rows < tl.load(tensors.end + num_segments))[:, None]
        dx = _load(tensors.dy, strides[0] * ALIGN, rows, columns, read)
        if OPTIONS.scaled:
            factor = scale
            if tensors.kept is not None:
                factor *= _load(tensors.kept, WIDTH, rows, columns, read)
            dx *= factor
        act, dact = ACTIVATION(_load(tensors.x, strides[1] * ALIGN, rows, columns, read), 1.0)
        if OPTIONS.gated:
            gate = _load(tensors.x, strides[1] * ALIGN, rows, columns + WIDTH, read)
        if OPTIONS.again:
            tl.debug_barrier()  # all threads have read the elements of dy and x that are replaced
            y = act * gate if OPTIONS.gated else act
            if OPTIONS.scaled:
                y *= factor
            _store(tensors.dy, strides[0] * ALIGN, rows, columns, written, y)
        if OPTIONS.gated:
            dgate = dx * act
            _store(tensors.dx, strides[2] * ALIGN, rows, columns + WIDTH, written, dgate)
            of_gate += dgate
            dx *= gate
        dx *= dact
        _store(tensors.dx, strides[2] * ALIGN, rows, columns, written, dx)
        of_value += dx
    parts: tl.constexpr = 2 if OPTIONS.gated else 1
    sums = tensors.sums + tl.program_id(0) * (parts * WIDTH) + columns
    tl.store(sums, tl.sum(of_value, 0), mask=columns < WIDTH)
    if OPTIONS.gated:
        tl.store(sums + WIDTH, tl.sum(of_gate, 0), mask=columns < WIDTH)
