"""Rows behind the last segment: kernels that write 0 to them, and their launches.

Only the device knows where the last segment ends. No other kernel reads these rows as rows of a
segment, or writes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .autograd import refuse_derivative
from .configs import padded_dim
from .device import aligned_strides, cdiv, contiguous_last_dim, device_properties
from .ops import direct, on_the_tensors_device, operator
from .ptxas import safe_ptxas

BLOCK = 2048  # elements that a program writes at a time


@safe_ptxas
@triton.jit(
    do_not_specialize=["segments_0", "segments_1", "segments_2", "rows_0", "rows_1", "rows_2"]
)
def zero_tails_kernel(
    out_ptrs, offsets_ptrs, segments_0, segments_1, segments_2, rows_0, rows_1, rows_2,
    SIZES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write 0 to the rows of each out, of at most three, from its offsets[-1] on. A row has
    SIZES[i] elements. Persistent: nothing to do without a tail. Numbers are no tuples, whose parts
    Triton would specialise."""
    num_segments, num_rows = (segments_0, segments_1, segments_2), (rows_0, rows_1, rows_2)
    for i in tl.static_range(len(out_ptrs)):
        first = tl.load(offsets_ptrs[i] + num_segments[i]).to(tl.int64) * SIZES[i]
        last = tl.cast(num_rows[i], tl.int64) * SIZES[i]
        for block in range(
            first // BLOCK + tl.program_id(0), (last + BLOCK - 1) // BLOCK, tl.num_programs(0)
        ):
            # whole words are masked, because a block starts at a multiple of 16
            elements = block * BLOCK + tl.arange(0, BLOCK)
            zeros = tl.zeros([BLOCK], out_ptrs[i].dtype.element_ty)
            tl.store(out_ptrs[i] + elements, zeros, mask=(elements >= first) & (elements < last))


class KeptRows(NamedTuple):
    """Tensors of `keep_rows_kernel`. added, order, offsets: or None."""

    x: Any
    added: Any
    order: Any
    offsets: Any
    out: Any


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "num_rows", "stride"])
def keep_rows_kernel(
    tensors, num_segments, num_rows, stride,
    SIZE: tl.constexpr, EXTRA: tl.constexpr, WIDTH: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[row] = x[row] + added[row] if the row is before offsets[-1], else 0; without offsets, for
    all rows; without added, x[row]; with an order, x[order[row]]. EXTRA columns of out behind those
    of x are 1, 0, 0, ...

    The stride is in units of ALIGN elements (see `aligned_strides`), that of out is WIDTH; added is
    contiguous. Grid: blocks of rows, blocks of columns, which follow one another.
    """
    BLOCKS: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    rows = tl.program_id(0) // BLOCKS * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    exists, in_row = rows < num_rows, (columns < SIZE)[None, :]
    kept, source = exists, rows
    if tensors.offsets is not None:
        kept &= rows < tl.load(tensors.offsets + num_segments)
    if tensors.order is not None:
        source = tl.load(tensors.order + rows, mask=exists, other=0)
    source, rows = source.to(tl.int64)[:, None], rows.to(tl.int64)[:, None]
    mask = kept[:, None] & in_row
    x = tl.load(tensors.x + source * (stride * ALIGN) + columns[None, :], mask=mask, other=0.0)
    if tensors.added is not None:
        x += tl.load(tensors.added + rows * SIZE + columns[None, :], mask=mask, other=0.0)
    out_ptrs = tensors.out + rows * WIDTH
    tl.store(out_ptrs + columns[None, :], x, mask=exists[:, None] & in_row)
    if EXTRA > 0:
        behind = tl.arange(0, EXTRA)[None, :]
        one = (behind == 0).to(tensors.out.dtype.element_ty)
        tl.store(out_ptrs + SIZE + behind, one, mask=exists[:, None])


def zero_tails(*tensors: tuple[Tensor, Tensor]) -> None:
    """Write 0 to the rows from offsets[-1] on, of each (contiguous `[rows, ...]`, offsets
    `[B + 1]`), at most three, in one launch."""
    outs, offsets, sizes, blocks = [], [], [], 0
    segments, rows = [0, 0, 0], [0, 0, 0]
    for x, of_segments in tensors:
        if size := x.numel():
            segments[len(outs)], rows[len(outs)] = of_segments.shape[0] - 1, x.shape[0]
            outs.append(x)
            offsets.append(of_segments)
            sizes.append(size // x.shape[0])
            blocks += cdiv(size, BLOCK)
    if outs:
        grid = (min(blocks, 2 * device_properties(outs[0].device).num_sms),)
        zero_tails_kernel[grid](
            tuple(outs), tuple(offsets), *segments, *rows,
            SIZES=tuple(sizes), BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


def kept_rows(
    x: Tensor,
    offsets: Tensor | None,
    dtype: torch.dtype | None = None,
    extra: int = 0,
    added: Tensor | None = None,
    order: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A copy of x `[rows, ...]` with 0 in the rows from offsets[-1] on, in another dtype if one is
    given; without the rest, x in this dtype.

    Args:
        extra: columns behind those of x `[rows, columns]`, with 1, 0, 0, ...
        added: `[rows, ...]`, contiguous, added to x in the wider of their dtypes.
        order: `[rows]`, the row of x that each row of the copy has.
        out: the copy, of rows of any stride, and of others behind them; None: a new tensor.
    """
    if offsets is None and not extra and added is None and order is None:
        if out is None:
            return x.to(dtype)
        (out if out.shape[0] == x.shape[0] else out[: x.shape[0]]).copy_(x)
        return out
    shape = (x.shape[0], x.shape[1] + extra) if extra else x.shape
    out = x.new_empty(shape, dtype=dtype) if out is None else out
    if x.numel() == 0:
        return out
    rows = contiguous_last_dim(x.flatten(1) if x.dim() > 1 else x.unsqueeze(1))
    size = rows.shape[1]
    columns = min(padded_dim(size), 1024)
    height = 4096 // columns
    align, (stride,) = aligned_strides((rows, 0))
    segments = 0 if offsets is None else offsets.shape[0] - 1
    keep_rows_kernel[(cdiv(x.shape[0], height) * cdiv(size, columns),)](
        KeptRows(rows, added, order, offsets, out), segments, x.shape[0], stride,
        SIZE=size, EXTRA=extra, WIDTH=out.stride(0), ALIGN=align, ROWS=height, COLUMNS=columns,
        num_warps=4,
    )  # fmt: skip
    return out


# On the device of the tensors, for callers other than operators, which are there already.
zero_tails_on_device = on_the_tensors_device(zero_tails)
kept_rows_on_device = on_the_tensors_device(kept_rows)


@operator("zero_tail", lambda x, offsets: None, "(Tensor(a!) x, Tensor offsets) -> ()")
def triton_zero_tail(x: Tensor, offsets: Tensor) -> None:
    """`zero_tails` of one tensor, for graphs."""
    zero_tails((x, offsets))


def zero_tail(x: Tensor, offsets: Tensor) -> None:
    """Write 0 to the rows from offsets[-1] on, below autograd: of a contiguous `[rows, ...]` that
    the caller has just computed."""
    direct(triton_zero_tail, (x, offsets), (x,))(x, offsets)


refuse_derivative(triton_zero_tail, "zero_tail has no derivative: its caller has one")
