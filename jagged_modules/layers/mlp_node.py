"""JaggedMLP as one autograd node.

    z = x Wᵀ + b,  y = act(z)                             y is the next layer's x
    dz = dy · act'(z),  dx = dz W,  dW = dzᵀ x,  db = Σ dz

Rows and parameters are cast once, to the dtype of the GEMMs; rows behind the last segment are
cleared in the same pass, and those of the gradient where the last activation's backward reads it.
That of each activation adds up the bias' gradient in the same pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..functional.nodes import apply, differentiable_once, release
from ..functional.tail import cleared, with_zero_tail
from .one_node import cast, linear, linear_gradients

if TYPE_CHECKING:
    from .mlp import JaggedMLP


class MLPCall(NamedTuple):
    """What the node computes. end: of the rows, if only the device knows it. dtype: of the GEMMs'
    operands. activation, gated: of the kernels; gated: half of the columns times the other half."""

    end: Tensor | None
    dtype: torch.dtype
    activation: str
    gated: bool


def mlp_node(layer: JaggedMLP, x: Tensor, end: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The layer's result for x `[L, dims[0]]`, in the operands' dtype."""
    gated = layer.activation == "swiglu"
    call = MLPCall(end, dtype, "silu" if gated else layer.activation, gated)
    parameters = (y for linear in layer.layers for y in (linear.weight, linear.bias))
    result: Tensor = apply(_Node, x, call, *parameters)
    return result


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
            z = linear(y, weight, bias)
            if trains:
                saved += y, weight, z
            y = activated(z, activation, gated)
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
            dz, sums = activation_gradients(dy, z, ctx.activation, ctx.gated, end)
            release(z)
            needs = of_x or any(wanted[:first]), wanted[first], False
            x_dtype = z.dtype if first else ctx.x_dtype
            dx, dweight, _ = linear_gradients(dz, x, weight, needs, x_dtype, ctx.dtype, first > 0)
            dbias = sums.to(ctx.dtype) if wanted[first + 1] else None
            gradients = [dweight, dbias, *gradients]
            if dx is None:
                return None, None, *[None] * first, *gradients
            dy, end = dx, None  # it is 0 behind the end
        return dy, None, *gradients


# -- what kernels compute --------------------------------------------------------------------------


def activated(z: Tensor, activation: str, gated: bool) -> Tensor:
    from jagged_kernels.rows.activation import triton_activation

    return triton_activation(z, activation, gated)


def activation_gradients(
    dy: Tensor, z: Tensor, activation: str, gated: bool, end: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of z, 0 from end[-1] on, and its sum over rows."""
    from jagged_kernels.rows.activation import triton_activation_backward

    return triton_activation_backward(dy, z, activation, gated, end)
