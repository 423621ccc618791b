"""Activations by public name. They turn attention scores into weights: softmax, or a pointwise
function of each score.

These are the definitions: plain torch, differentiable, for any device. The kernels' versions are in
`jagged_kernels.common.activations`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from jagged_kernels.common.gelu_taylor import COEFFICIENTS, RANGE
from torch import Tensor
from torch.nn import functional as nnf

aten = torch.ops.aten


def gelu_taylor(x: Tensor) -> Tensor:
    """GELU computed from multiplications and additions only: max(x, 0) plus an even polynomial in
    |x| clamped to 3.06. It is within 4e-3 of GELU for all x, and its derivative is within 2.2e-2 of
    GELU's. Outside ±3.06 it is 0 or x up to rounding. The published Taylor polynomial (GDPA,
    equation 1) has the same form without the clamp; its error at x = 3 is 4.0."""
    dtype, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))
    a = x.abs().clamp(max=RANGE)
    t = a * a
    polynomial = torch.zeros_like(t)
    for coefficient in reversed(COEFFICIENTS):
        polynomial = (polynomial + coefficient) * t
    # the bracket is max(x, 0) with derivative 0.5 at 0
    return ((0.5 * x + 0.5 * x.abs()) - 0.5 * a + polynomial).to(dtype)


def _gelu_taylor_backward(grad: Tensor, x: Tensor) -> Tensor:
    a = x.clamp(-RANGE, RANGE)
    t = a * a
    slope = torch.zeros_like(t)
    for power, coefficient in reversed(list(enumerate(COEFFICIENTS, start=1))):
        slope = slope * t + 2 * power * coefficient
    return grad * (0.5 + torch.where(x.abs() <= RANGE, a * slope, 0.5 * x.sign()))


@dataclasses.dataclass(frozen=True)
class Activation:
    """A pointwise function of a score, and its backward: (gradient of the result, score) → gradient
    of the score."""

    function: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


POINTWISE = {
    "identity": Activation(lambda x: x, lambda grad, x: grad),
    "relu": Activation(torch.relu, lambda grad, x: aten.threshold_backward(grad, x, 0)),
    "relu_squared": Activation(
        lambda x: torch.relu(x) ** 2, lambda grad, x: 2 * grad * torch.relu(x)
    ),
    "leaky_relu": Activation(
        lambda x: nnf.leaky_relu(x, 0.01),
        lambda grad, x: aten.leaky_relu_backward(grad, x, 0.01, False),
    ),
    "silu": Activation(nnf.silu, aten.silu_backward),
    "gelu": Activation(nnf.gelu, aten.gelu_backward),
    "gelu_tanh": Activation(
        lambda x: nnf.gelu(x, approximate="tanh"),
        lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
    ),
    "gelu_taylor": Activation(gelu_taylor, _gelu_taylor_backward),
    "hardswish": Activation(nnf.hardswish, aten.hardswish_backward),
    "sigmoid": Activation(
        torch.sigmoid, lambda grad, x: aten.sigmoid_backward(grad, torch.sigmoid(x))
    ),
}
ACTIVATIONS = ("softmax", *POINTWISE)


def swiglu(x: Tensor) -> Tensor:
    """silu(a) · b of x = [a | b] `[..., 2 W]`."""
    a, b = x.chunk(2, -1)
    return nnf.silu(a) * b


def activation_of_rows(name: str) -> Callable[[Tensor], Tensor]:
    """An activation of a feed-forward network: "swiglu" or one of POINTWISE."""
    return swiglu if name == "swiglu" else POINTWISE[name].function
