"""Jagged rows and padded ones: the registered operators, their launches and autograd.

    jagged_to_padded    out[b, i] = x[row], or x[row] · f[row]    dx = padded_to_jagged(g), or
                                                                 f · g[b, i]; df = x · g[b, i]
    padded_to_jagged    out[row] = y[b, i]                        dy = jagged_to_padded(g)
    jagged_dense        out[row] = x[row] + y[b, i]               dx = g, dy = jagged_to_padded(g)
                        out[row] = x[row] · y[b, i]               dx = g · y[b, i],
                                                                 dy = jagged_to_padded(g, x)

i is the place of a row in its padded segment of N rows. Every gradient is another operator of this
list, in one launch and without sums, so all of them can be differentiated again. Offsets stay on
the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from ..common.autograd import differentiate_by
from ..common.device import cdiv, contiguous_last_dim, row_strides
from ..common.ops import operator
from .configs import padding_config
from .padding_kernels import PaddingOptions, to_jagged_kernel, to_padded_kernel

# -- operators -------------------------------------------------------------------------------------


def _to_padded_fake(x, factor, offsets, max_seqlen, *options):
    return x.new_empty((offsets.shape[0] - 1, max_seqlen, *x.shape[1:]))


@operator("jagged_to_padded", _to_padded_fake)
def triton_jagged_to_padded(
    x: Tensor,
    factor: Tensor | None,
    offsets: Tensor,
    max_seqlen: int,
    fill: Number = 0,
    left: bool = False,
    newest: bool = False,
) -> Tensor:
    """Each segment as max_seqlen rows.

    Args:
        x: `[L, ...]`, any dtype but complex ones. offsets: `[B + 1]`.
        factor: of x's shape and dtype, by which x is multiplied, or None.
        fill: the value of the rows that belong to no segment; 0 with a factor.
        left: these rows are before the segment's.
        newest: a longer segment keeps its last rows; otherwise its first ones.

    Returns:
        `[B, max_seqlen, ...]`.
    """
    out = _to_padded_fake(x, factor, offsets, max_seqlen)
    if out.numel():
        if factor is None:
            fill = _bits(torch.full((), fill, dtype=x.dtype, device="cpu")).item()
            rows, factors, places = _matrix(_bits(x)), None, _bits(out)
        else:
            rows, factors, places = _matrix(x), _matrix(factor), out
        num_places = out.shape[0] * max_seqlen
        grid, strides, constants = _launch(num_places, rows, factors, left, newest)
        to_padded_kernel[grid](
            rows, factors, offsets, places, x.shape[0], num_places, max_seqlen, fill, strides,
            **constants,
        )  # fmt: skip
    return out


def _to_jagged_fake(dense, offsets, total, *options):
    return dense.new_empty((total, *dense.shape[2:]))


@operator("padded_to_jagged", _to_jagged_fake)
def triton_padded_to_jagged(
    dense: Tensor, offsets: Tensor, total: int, left: bool = False, newest: bool = False
) -> Tensor:
    """The rows of `triton_jagged_to_padded`, one segment after another: dense `[B, N, ...]` as
    `[total, ...]`. Rows without a place in dense, and those behind the last segment, are 0."""
    out = _to_jagged_fake(dense, offsets, total)
    _write_jagged(_bits(out), None, _bits(dense), offsets, (left, newest, False))
    return out


@operator("jagged_dense", lambda x, *others: x.new_empty(x.shape))
def triton_jagged_dense(
    x: Tensor, y: Tensor | None, offsets: Tensor, multiplies: bool, has_tail: bool = True
) -> Tensor:
    """x[row] + y[b, i], or their product.

    Args:
        x: `[L, ...]`, a floating-point dtype. offsets: `[B + 1]`.
        y: `[B, N, ...]`, 0 where a row has no place. None: nothing is added.
        has_tail: there may be rows behind the last segment, which give 0.

    Returns:
        x's shape and dtype.
    """
    out = x.new_empty(x.shape)
    _write_jagged(out, x, y, offsets, (False, False, multiplies))
    return out


# -- launches --------------------------------------------------------------------------------------


def _write_jagged(
    out: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    offsets: Tensor,
    options: tuple[bool, bool, bool],
) -> None:
    """Launch `to_jagged_kernel`. options: left, newest, multiplies."""
    segments = offsets.shape[0] - 1
    if segments == 0:
        out.zero_()
    elif out.numel():
        rows = None if x is None else _matrix(x)
        places = None if y is None else _matrix(y.flatten(0, 1))
        grid, strides, constants = _launch(out.shape[0], rows, places, *options)
        to_jagged_kernel[grid](
            rows, places, offsets, out, out.shape[0], segments, 0 if y is None else y.shape[1],
            strides, **constants,
        )  # fmt: skip


def _bits(x: Tensor) -> Tensor:
    """x as integers, so that one kernel copies all dtypes of a size, with fills of any value."""
    return x.view(getattr(torch, f"int{8 * x.element_size()}"))


def _matrix(x: Tensor) -> Tensor:
    """x `[rows, ...]` as `[rows, size]` with adjacent elements."""
    return contiguous_last_dim(x.flatten(1) if x.dim() > 1 else x.unsqueeze(1))


def _launch(
    num_rows: int,
    x: Tensor | None,
    y: Tensor | None,
    left: bool,
    newest: bool,
    multiplies: bool = False,
) -> tuple[tuple[int], tuple[int, int], dict[str, Any]]:
    """Grid, strides and constants for so many rows of the result."""
    given = [z for z in (x, y) if z is not None]
    size = given[0].shape[1]
    config = padding_config(size, given[0].element_size())
    align, found = row_strides(*given)
    strides = (found[0] if x is not None else 0, found[-1] if y is not None else 0)
    options = PaddingOptions(size, left, newest, multiplies, align, config.rows, config.block)
    grid = (cdiv(num_rows, config.rows) * cdiv(size, config.block),)
    return grid, strides, dict(OPTIONS=options, num_warps=config.num_warps)


# -- autograd --------------------------------------------------------------------------------------


def _to_padded_gradients(grad, wanted, rows, x, factor, offsets, *places):
    if factor is None:
        return (triton_padded_to_jagged(grad, offsets, rows, *places),)
    dx = triton_jagged_dense(factor, grad, offsets, True) if wanted[0] else None
    return dx, triton_jagged_dense(x, grad, offsets, True) if wanted[1] else None


def _kept_of_padded(x, factor, offsets, max_seqlen, fill=0, *places):
    return x.shape[0], None if factor is None else x, factor, offsets, *places


def _to_jagged_gradients(grad, _, width, offsets, *places):
    return (triton_jagged_to_padded(grad, None, offsets, width, 0, *places),)


def _jagged_dense_gradients(grad, wanted, x, y, width, offsets, multiplies, has_tail):
    dx = grad
    if wanted[0] and (multiplies or has_tail):
        dx = triton_jagged_dense(grad, y, offsets, multiplies, has_tail)
    return dx, triton_jagged_to_padded(grad, x, offsets, width) if wanted[1] else None


def _kept_of_jagged_dense(x, y, offsets, multiplies, has_tail=True):
    width = None if y is None else y.shape[1]
    return *((x, y) if multiplies else (None, None)), width, offsets, multiplies, has_tail


differentiate_by(triton_jagged_to_padded, _to_padded_gradients, _kept_of_padded)
differentiate_by(
    triton_padded_to_jagged,
    _to_jagged_gradients,
    lambda dense, offsets, total, *places: (dense.shape[1], offsets, *places),
)
differentiate_by(triton_jagged_dense, _jagged_dense_gradients, _kept_of_jagged_dense)
