"""Jagged softmax: the registered operators, their launches and autograd.

    forward   y = exp(x - max x) / Σ exp(x - max x)        along a line; 0 where all x are -inf
    backward  dx = y (g - Σ y g)

A line is a column of a segment, or a row or a column of a jagged matrix. Sums are fp32, in an order
that follows from the shapes, so results are deterministic. Offsets stay on the device; the last of
them is the number of rows, or of elements of all matrices. There is one backend, triton_kernels.py;
configs.py has its launch configurations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.autograd import differentiate_by_result, refuse_twice
from ..common.device import cdiv, chunk_shift, contiguous_last_dim, row_strides
from ..common.ops import operator
from ..common.tail import zero_tails
from .configs import jagged2_softmax_config, jagged_softmax_config
from .triton_kernels import Options, jagged2_softmax_kernel, jagged_softmax_kernel

# -- operators -------------------------------------------------------------------------------------


@operator("jagged_softmax", fake=lambda x, *_: x.new_empty(x.shape))
def triton_jagged_softmax(
    x: Tensor,
    offsets: Tensor,
    max_seqlen: int | None = None,
    batch_invariant: bool = False,
    clear_tail: bool = True,
) -> Tensor:
    """softmax over the rows of each segment, column by column.

    Args:
        x: `[L, H]`, fp32, fp16 or bf16. offsets: `[B + 1]`.
        max_seqlen: rows of the longest segment. Too small a value costs time only.
        batch_invariant: long segments are cut into chunks of a fixed length.
        clear_tail: write 0 to the rows behind the last segment; False: there are none.

    Returns:
        `[L, H]`.
    """
    return _jagged_softmax(None, x, offsets, max_seqlen, batch_invariant, clear_tail)


def _jagged_softmax(
    grad: Tensor | None,
    x: Tensor,
    offsets: Tensor,
    max_seqlen: int | None = None,
    batch_invariant: bool = False,
    clear_tail: bool = True,
) -> Tensor:
    """The forward of x. With the gradient of the result: the gradient of the input, where x is the
    forward's result."""
    x, grad = contiguous_last_dim(x), None if grad is None else contiguous_last_dim(grad)
    (rows, columns), segments = x.shape, offsets.shape[0] - 1
    out = x.new_empty((rows, columns))
    if out.numel() == 0 or segments == 0:
        return out.zero_()
    config = jagged_softmax_config(x.element_size(), columns)
    blocks = cdiv(columns, config.lines)
    shift = chunk_shift(rows, max_seqlen, blocks, x.device, batch_invariant)
    chunks = rows >> shift
    sums = x.new_empty((2 * chunks, 2, columns), dtype=torch.float32)
    align, strides = row_strides(*[z for z in (x, grad) if z is not None])
    for finish in (False, True) if rows > 1 << shift else (False,):
        jagged_softmax_kernel[((chunks + segments) * blocks,)](
            x, grad, out, sums, offsets, segments, shift, strides[0], strides[-1],
            OPTIONS=Options(columns, finish, align, config.lines, config.length),
            num_warps=config.num_warps,
        )  # fmt: skip
    if clear_tail:
        zero_tails((out, offsets))
    return out


triton_jagged_softmax_backward = operator(
    "jagged_softmax_backward",
    lambda grad, out, *_: out.new_empty(out.shape),
    "(Tensor grad, Tensor out, Tensor offsets, SymInt? max_seqlen=None, bool batch_invariant=False,"
    " bool clear_tail=True) -> Tensor",
)(_jagged_softmax)


@operator("jagged2_softmax", fake=lambda p, *_: p.new_empty(p.shape))
def triton_jagged2_softmax(
    p: Tensor, x_offsets: Tensor, y_offsets: Tensor, p_offsets: Tensor, lines: int, columns: bool
) -> Tensor:
    """softmax of each row of the matrices p[b], or of each column.

    Args:
        p: `[Σ N_b M_b]`, the matrices `[N_b, M_b]` row-major, one after the other; fp32, fp16 or
            bf16.
        x_offsets, y_offsets: `[B + 1]`, of segments of N_b and M_b rows. p_offsets: `[B + 1]`, of
            N_b M_b elements.
        lines: number of rows of all matrices; with `columns`, number of columns.

    Returns:
        `[Σ N_b M_b]`.
    """
    return _jagged2_softmax(None, p, x_offsets, y_offsets, p_offsets, lines, columns)


def _jagged2_softmax(
    grad: Tensor | None,
    p: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor,
    p_offsets: Tensor,
    lines: int,
    columns: bool,
) -> Tensor:
    """As `_jagged_softmax`."""
    p = p.contiguous()
    grad = None if grad is None else grad.contiguous()
    segments = p_offsets.shape[0] - 1
    out = torch.empty_like(p)
    if p.numel():
        config = jagged2_softmax_config(columns)
        jagged2_softmax_kernel[(lines // config.lines + segments,)](
            p, grad, out, x_offsets, y_offsets, p_offsets, segments, OVER_COLUMNS=columns,
            LINES=config.lines, LENGTH=config.length, num_warps=config.num_warps,
        )  # fmt: skip
    return out


triton_jagged2_softmax_backward = operator(
    "jagged2_softmax_backward",
    lambda grad, out, *_: out.new_empty(out.shape),
    "(Tensor grad, Tensor out, Tensor x_offsets, Tensor y_offsets, Tensor p_offsets, SymInt lines,"
    " bool columns) -> Tensor",
)(_jagged2_softmax)

# -- autograd --------------------------------------------------------------------------------------


differentiate_by_result(triton_jagged_softmax, triton_jagged_softmax_backward, 1)
refuse_twice("jagged_softmax", triton_jagged_softmax_backward)
differentiate_by_result(triton_jagged2_softmax, triton_jagged2_softmax_backward, 3)
refuse_twice("jagged2_softmax", triton_jagged2_softmax_backward)
