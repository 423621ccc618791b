"""JaggedMLP as one autograd node, and a feed-forward network as part of a node.

    z = x Wᵀ + b,  y = act(z)                             y is the next layer's x
    dz = dy · act'(z),  dx = dz W,  dW = dzᵀ x,  db = Σ dz

Rows and parameters are cast once, to the dtype of the GEMMs; rows behind the last segment are
cleared in the same pass, and those of the gradient where the last activation's backward reads it.
That of each activation adds up the bias' gradient in the same pass.

    h = dropout(act(x W₁ᵀ + b₁)),  y = h W₂ᵀ + b₂        a feed-forward network

Its backward computes h again, in the pass that computes dz. ReLU is the GEMM's, and its derivative
follows from its result, also after dropout, whose gradient is 0 where h is: there is no z, and h is
not computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..functional.linear import keeps_result, relu_linear
from ..functional.nodes import apply, differentiable_once, is_last_backward, release
from ..functional.tail import cleared, with_zero_tail
from .one_node import (
    LinearGradients,
    cast,
    dropout_gradient,
    dropout_scale,
    dropped,
    linear,
    linear_gradients,
    parameters_of,
    product,
)

if TYPE_CHECKING:
    from .mlp import JaggedMLP


class MLPCall(NamedTuple):
    """What the node computes. end: of the rows, if only the device knows it. dtype: of the GEMMs'
    operands. activation, gated: of the kernels; gated: half of the columns times the other half."""

    end: Tensor | None
    dtype: torch.dtype
    activation: str
    gated: bool


def kernels_activation(name: str) -> tuple[str, bool]:
    """`activation` and `gated` for an activation of rows."""
    return ("silu", True) if name == "swiglu" else (name, False)


def mlp_node(layer: JaggedMLP, x: Tensor, end: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The layer's result for x `[L, dims[0]]`, in the operands' dtype."""
    call = MLPCall(end, dtype, *kernels_activation(layer.activation))
    return apply(_Node, x, call, *parameters_of(*layer.layers))


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: MLPCall, *parameters: Tensor) -> Tensor:
        end, dtype, activation, gated = call
        ctx.x_dtype, ctx.dtype = x.dtype, parameters[0].dtype
        ctx.activation, ctx.gated = activation, gated
        saved: list[Tensor] = []
        trains = any(ctx.needs_input_grad)
        y, parameters = cleared(x, end, dtype), tuple(cast(dtype, *parameters))
        for weight, bias in zip(parameters[::2], parameters[1::2]):
            x = y
            y, z = _activated_linear(x, weight, bias, activation, gated)
            if trains:
                saved += x, weight, z
        ctx.save_for_backward(end, *saved)
        return with_zero_tail(y, end)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        end, *saved = ctx.saved_tensors
        of_x, _, *wanted = ctx.needs_input_grad
        gradients: list[Tensor | None] = []
        for first in reversed(range(0, len(wanted), 2)):  # of the layer's parameters
            (x, weight, z), saved = saved[-3:], saved[:-3]
            needs = of_x or any(wanted[:first]), wanted[first], wanted[first + 1]
            options = ctx.activation, ctx.gated, end
            dtypes = z.dtype if first else ctx.x_dtype, ctx.dtype
            # With ReLU, x is also the z of the layer before; the last one's is the node's result.
            own = not keeps_result(ctx.activation)
            frees = own and first > 0, own or first + 2 < len(wanted)
            dx, *of_parameters = _layer_gradients(dy, x, weight, z, needs, options, dtypes, frees)
            gradients = [*of_parameters, *gradients]
            if dx is None:
                return None, None, *[None] * first, *gradients
            dy, end = dx, None  # it is 0 behind the end
        return dy, None, *gradients


def _activated_linear(
    x: Tensor, weight: Tensor, bias: Tensor, activation: str, gated: bool
) -> tuple[Tensor, Tensor]:
    """act(z), and what its backward reads."""
    if keeps_result(activation):
        y = relu_linear(x, weight, bias)
        return y, y
    z = linear(x, weight, bias)
    return activated(z, activation, gated), z


def _layer_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    z: Tensor,
    wanted: Sequence[bool],
    options: tuple[str, bool, Tensor | None],
    dtypes: tuple[torch.dtype, torch.dtype],
    frees: tuple[bool, bool],
) -> LinearGradients:
    """Of act(z), z = x Wᵀ + b. wanted: of x, weight and bias. options: activation, gated, and the
    end of dy's rows. dtypes: of x's gradient and of the parameters. frees: x and z are the node's
    own and read no more."""
    dz, sums = activation_gradients(dy, z, *options)
    if frees[1]:
        release(z)
    of_gemm = [*wanted[:2], False], *dtypes
    dx, dweight, _ = linear_gradients(dz, x, weight, *of_gemm, frees[0])
    return dx, dweight, sums.to(dtypes[1]) if wanted[2] else None


# -- a feed-forward network ------------------------------------------------------------------------


class FeedForward(NamedTuple):
    """What the part of a node computes. activation, gated: of the kernels. dropout: probability, 0
    outside of training."""

    activation: str
    gated: bool
    dropout: float


class SavedFeedForward(NamedTuple):
    """What the backward reads. z: h where its activation keeps the result. kept: what dropout
    keeps; None without."""

    rows: Tensor
    weight1: Tensor
    z: Tensor
    kept: Tensor | None
    weight2: Tensor


def feed_forward(
    rows: Tensor, parameters: Sequence[Tensor], network: FeedForward, trains: bool
) -> tuple[Tensor, list[Tensor | None]]:
    """Its result, and `SavedFeedForward`, or nothing if no backward follows. parameters: weight and
    bias of both linear layers, of any dtype."""
    *first, weight2, bias2 = cast(rows.dtype, *parameters)
    h, saved = _hidden(rows, first, network)
    saved = [*saved, weight2] if trains else []
    return linear(h, weight2, bias2), saved


def _hidden(
    rows: Tensor, parameters: Sequence[Tensor], network: FeedForward
) -> tuple[Tensor, list[Tensor | None]]:
    """h, and what is saved but for the second weight."""
    weight, bias = parameters
    h, z = _activated_linear(rows, weight, bias, *network[:2])
    h, kept = dropped(h, network.dropout)
    return h, [rows, weight, h if keeps_result(network.activation) else z, kept]


def feed_forward_gradients(
    dy: Tensor,
    sums_of_dy: Tensor | None,
    saved: SavedFeedForward,
    network: FeedForward,
    wanted: Sequence[bool],
    dtype: torch.dtype,
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """Of the rows, in their dtype, and of the parameters, in this one. dy: in the operands' dtype.
    sums_of_dy: of its rows, or None. wanted: of which. The node has made the rows and reads them no
    more."""
    rows, weight1, z, kept, weight2 = saved
    activation, gated, dropout = network
    keeps = keeps_result(activation)

    def second(h: Tensor) -> Sequence[Tensor | None]:
        of_gemm = weight2, [False, *wanted[3:]], h.dtype, dtype, not keeps
        return linear_gradients(dy, h, *of_gemm, sums=sums_of_dy)[1:]

    if not any(wanted[:3]):
        h = z if keeps else dropout_gradient(activated(z, activation, gated), kept, dropout)
        return None, (None, None, *second(h))
    dz, scale = product(dy, weight2, z.dtype), dropout_scale(kept, dropout)
    if keeps:
        dsecond = second(z)
        dz, sums = activation_gradients(dz, z, activation, gated, None, scale)
        release(z)
    else:
        h, dz, sums = activated_again(dz, z, activation, gated, kept, scale)
        dsecond = second(h)
        del h
    of_first = weight1, [*wanted[:2], False], rows.dtype, dtype, True
    drows, dfirst, _ = linear_gradients(dz, rows, *of_first)
    release(dz)
    return drows, (dfirst, sums.to(dtype) if wanted[2] else None, *dsecond)


# -- what kernels compute --------------------------------------------------------------------------


def activated(z: Tensor, activation: str, gated: bool) -> Tensor:
    from jagged_kernels.common.ops import called
    from jagged_kernels.rows.activation import triton_activation

    return called(triton_activation, z, activation, gated)


def activation_gradients(
    dy: Tensor, z: Tensor, activation: str, gated: bool, end: Tensor | None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Of z, 0 from end[-1] on, and its sum over rows, for dy · scale."""
    from jagged_kernels.common.ops import called
    from jagged_kernels.rows.activation import triton_activation_backward

    return called(triton_activation_backward, dy, z, activation, gated, end, scale)


def activated_again(
    dy: Tensor, z: Tensor, activation: str, gated: bool, kept: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The activation of z with dropout, which replaces dy, the gradient of z, which replaces z
    unless another backward reads it, and the sum of the latter's rows. kept, scale: of dropout."""
    from jagged_kernels.common.ops import called
    from jagged_kernels.rows.activation import triton_activation_again_backward

    dz = z if is_last_backward() else dy.new_empty(z.shape)
    given = dy, z, dz, activation, gated, kept, scale
    return dy, dz, called(triton_activation_again_backward, *given)
