"""Matrix multiplications of jagged tensors: the registered operators, their launches and autograd.

    jagged_dense_bmm    out[b] = activation(x[b] @ y[b] + bias[b])    dx = dz yᵀ, dy = xᵀ dz, dbias
                        = the sum of dz's rows
    jagged_jagged_bmm   out[b] = x[b]ᵀ @ y[b]                         dx = y gᵀ, dy = x g
    jagged_outer        p[b] = x[b] @ y[b]ᵀ                           dx = g y, dy = gᵀ x
    jagged_gram         p[b] = x[b] @ x[b]ᵀ                           dx = (g + gᵀ) x
    jagged_symmetric    out[b] = p[b] + p[b]ᵀ                         dp = g + gᵀ
    array_jagged_bmm    out[b] = p[b] @ y[b], or p[b]ᵀ @ y[b]         dp = g yᵀ, or y gᵀ; dy = pᵀ g,
                        or p g

Every gradient is another operator of this list, so all of them can be differentiated again; with an
activation, once. Sums are fp32, in an order that follows from the shapes, and rounded once: results
are deterministic. Offsets stay on the device; the last of them is the number of rows. There is one
backend: launch.py launches triton_kernels.py, with the configurations of configs.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..common.autograd import differentiate_by, refuse_derivative
from ..common.device import contiguous_last_dim
from ..common.ops import operator
from ..common.tail import zero_tails
from .launch import array, dense, jagged_jagged, outer, symmetric

# -- operators -------------------------------------------------------------------------------------


@operator("jagged_dense_bmm", fake=lambda x, _, y, *others: x.new_empty((x.shape[0], y.shape[2])))
def triton_jagged_dense_bmm(
    x: Tensor,
    offsets: Tensor,
    y: Tensor,
    bias: Tensor | None,
    activation: str | None,
    max_seqlen: int | None = None,
    batch_invariant: bool = False,
    clear_tail: bool = True,
) -> Tensor:
    """out[b] = activation(x[b] @ y[b] + bias[b]).

    Args:
        x: `[L, D]`, fp32, fp16 or bf16. offsets: `[B + 1]`.
        y: `[B, D, T]` of any strides; one matrix for all segments is expanded. bias: `[B, T]` or
            None.
        activation: a name of `common/activations.py`, or None.
        max_seqlen: rows of the longest segment, for the gradients. Too small a value costs time
            only.
        batch_invariant: the gradients' sums over a segment's rows are cut into chunks of a fixed
            length.
        clear_tail: write 0 to the rows behind the last segment, of the result and of x's gradient;
            False: there are none.

    Returns:
        `[L, T]`.
    """
    out = dense(x, offsets, y, bias, activation, None)
    if clear_tail:
        zero_tails((out, offsets))
    return out


@operator("jagged_dense_bmm_dact", fake=lambda grad, *_: grad.new_empty(grad.shape))
def triton_jagged_dense_bmm_dact(
    grad: Tensor, x: Tensor, offsets: Tensor, y: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """Gradient `[L, T]` of the activation's input, which is computed again, given the gradient of
    the result. Rows behind the last segment are not written: what takes this gradient does not read
    them."""
    return dense(x, offsets, y, bias, activation, grad)


@operator(
    "jagged_jagged_bmm",
    fake=lambda x, y, offsets, *_: x.new_empty((offsets.shape[0] - 1, x.shape[1], y.shape[1])),
)
def triton_jagged_jagged_bmm(
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    max_seqlen: int | None = None,
    batch_invariant: bool = False,
    clear_tail: bool = True,
) -> Tensor:
    """out[b] = x[b]ᵀ @ y[b].

    Args:
        x: `[L, D]`, y: `[L, T]`, fp32, fp16 or bf16. offsets: `[B + 1]`.
        max_seqlen: rows of the longest segment. Too small a value costs time only.
        batch_invariant: long segments are cut into chunks of a fixed length.
        clear_tail: as of `triton_jagged_dense_bmm`, for the gradients.

    Returns:
        `[B, D, T]`, 0 for an empty segment.
    """
    return jagged_jagged(x, y, offsets, max_seqlen, batch_invariant)


@operator("jagged_sum", fake=lambda x, y, *_: x.new_empty((y.shape[0] - 1, x.shape[1])))
def triton_jagged_sum(
    x: Tensor, offsets: Tensor, max_seqlen: int | None = None, batch_invariant: bool = False
) -> Tensor:
    """Sums of the rows of each segment, `[B, T]`: x `[L, T]` in fp32, fp16 or bf16, offsets
    `[B + 1]`. Others: as
    `triton_jagged_jagged_bmm`."""
    return jagged_jagged(None, x, offsets, max_seqlen, batch_invariant).squeeze(1)


@operator("jagged_outer", fake=lambda x, *others: x.new_empty(others[-1:]))
def triton_jagged_outer(
    x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, p_offsets: Tensor, total: int
) -> Tensor:
    """p[b] = x[b] @ y[b]ᵀ, row-major and one after the other.

    Args:
        x: `[Lx, D]`, y: `[Ly, D]`, fp32, fp16 or bf16.
        x_offsets, y_offsets: `[B + 1]`, of segments of N_b and M_b rows. p_offsets: `[B + 1]`, of
            N_b M_b elements.
        total: Σ N_b M_b.

    Returns:
        `[total]`.
    """
    return outer(
        contiguous_last_dim(x), contiguous_last_dim(y), x_offsets, y_offsets, p_offsets, total
    )


@operator("jagged_gram", fake=lambda x, *others: x.new_empty(others[-1:]))
def triton_jagged_gram(x: Tensor, offsets: Tensor, p_offsets: Tensor, total: int) -> Tensor:
    """p[b] = x[b] @ x[b]ᵀ. Reads about half as much as `triton_jagged_outer` of x with itself; same
    arguments."""
    return outer(contiguous_last_dim(x), None, offsets, offsets, p_offsets, total)


triton_jagged_symmetric = operator("jagged_symmetric", fake=lambda p, *_: torch.empty_like(p))(
    symmetric
)
triton_array_jagged_bmm = operator(
    "array_jagged_bmm", fake=lambda p, y, *others: y.new_empty((others[3], y.shape[1]))
)(array)


# -- autograd --------------------------------------------------------------------------------------


def _dense_gradients(grad, wanted, x, offsets, y, bias, activation, *options):
    wants_x, _, wants_y, wants_bias, *_ = wanted
    if activation is not None:
        grad = triton_jagged_dense_bmm_dact(grad, x, offsets, y, bias, activation)
    dx = dy = dbias = None
    if wants_x:
        dx = triton_jagged_dense_bmm(grad, offsets, y.transpose(1, 2), None, None, *options)
    if wants_y:
        dy = triton_jagged_jagged_bmm(x, grad, offsets, *options)
    if wants_bias:
        dbias = triton_jagged_sum(grad, offsets, *options[:2])
    return dx, None, dy, dbias


def _jagged_gradients(grad, wanted, x, y, offsets, *options):
    dx = dy = None
    if wanted[0]:
        dx = triton_jagged_dense_bmm(y, offsets, grad.transpose(1, 2), None, None, *options)
    if wanted[1]:
        dy = triton_jagged_dense_bmm(x, offsets, grad, None, None, *options)
    return dx, dy


def _sum_gradients(grad, _, rows, offsets, *options):
    # The rows behind the last segment are those of one more, whose gradient is 0.
    lengths = pad(offsets, (0, 1), value=rows).diff()
    return (pad(grad, (0, 0, 0, 1)).repeat_interleave(lengths, 0, output_size=rows),)


def _outer_gradients(grad, wanted, x, y, *offsets_and_total):
    offsets, dx, dy = offsets_and_total[:-1], None, None
    if wanted[0]:
        dx = triton_array_jagged_bmm(grad, y, *offsets, x.shape[0], False)
    if wanted[1]:
        dy = triton_array_jagged_bmm(grad, x, *offsets, y.shape[0], True)
    return dx, dy


def _gram_gradients(grad, _, x, offsets, p_offsets, total):
    both = triton_jagged_symmetric(grad, offsets, p_offsets, x.shape[0])
    return (triton_array_jagged_bmm(both, x, offsets, offsets, p_offsets, x.shape[0], False),)


def _array_gradients(grad, wanted, p, y, x_offsets, y_offsets, p_offsets, rows, transposed):
    offsets, dp, dy = (x_offsets, y_offsets, p_offsets), None, None
    if wanted[0]:
        x_rows, y_rows = (y, grad) if transposed else (grad, y)
        dp = triton_jagged_outer(x_rows, y_rows, *offsets, p.shape[0])
    if wanted[1]:
        dy = triton_array_jagged_bmm(p, grad, *offsets, y.shape[0], not transposed)
    return dp, dy


differentiate_by(triton_jagged_dense_bmm, _dense_gradients)
refuse_derivative(
    triton_jagged_dense_bmm_dact,
    "jagged_dense_bmm is not differentiable twice with an activation: the activation's derivative"
    " has none of its own",
)
differentiate_by(triton_jagged_jagged_bmm, _jagged_gradients)
differentiate_by(triton_jagged_sum, _sum_gradients, lambda x, *others: (x.shape[0], *others))
differentiate_by(triton_jagged_outer, _outer_gradients)
differentiate_by(triton_jagged_gram, _gram_gradients)
differentiate_by(
    triton_jagged_symmetric,
    lambda grad, _, *others: (triton_jagged_symmetric(grad, *others),),
    lambda p, *others: others,
)
differentiate_by(triton_array_jagged_bmm, _array_gradients)
