"""What turns attention scores into weights, by public name: softmax, or a function of each score by itself.

The functions here are plain torch, any device, differentiable: the definitions. `jagged_kernels.common.activations` holds the kernels' own.
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
    """GELU from multiplications and additions alone: max(x, 0) plus an even polynomial on |x| clamped to 3.06.

    Within 4e-3 of GELU for every x, and within 2.2e-2 of its derivative; exactly 0 or x outside ±3.06 but for rounding. The published
    Taylor polynomial (GDPA, equation 1) has the same form and no clamp: it is off by 4.0 at x = 3.
    """
    dtype, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))
    a = x.abs().clamp(max=RANGE)
    t = a * a
    polynomial = torch.zeros_like(t)
    for coefficient in reversed(COEFFICIENTS):
        polynomial = (polynomial + coefficient) * t
    return ((0.5 * x + 0.5 * x.abs()) - 0.5 * a + polynomial).to(dtype)  # the bracket is max(x, 0), its slope at 0 is 0.5


def _gelu_taylor_backward(grad: Tensor, x: Tensor) -> Tensor:
    a = x.clamp(-RANGE, RANGE)
    t = a * a
    slope = torch.zeros_like(t)
    for power, coefficient in reversed(list(enumerate(COEFFICIENTS, start=1))):
        slope = slope * t + 2 * power * coefficient
    return grad * (0.5 + torch.where(x.abs() <= RANGE, a * slope, 0.5 * x.sign()))


@dataclasses.dataclass(frozen=True)
class Activation:
    """A function of each score, and its gradient: (gradient of the value, score) → gradient of the score."""

    function: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


POINTWISE = {
    "identity": Activation(lambda x: x, lambda grad, x: grad),
    "relu": Activation(torch.relu, lambda grad, x: aten.threshold_backward(grad, x, 0)),
    "relu_squared": Activation(lambda x: torch.relu(x) ** 2, lambda grad, x: 2 * grad * torch.relu(x)),
    "leaky_relu": Activation(lambda x: nnf.leaky_relu(x, 0.01), lambda grad, x: aten.leaky_relu_backward(grad, x, 0.01, False)),
    "silu": Activation(nnf.silu, aten.silu_backward),
    "gelu": Activation(nnf.gelu, aten.gelu_backward),
    "gelu_tanh": Activation(lambda x: nnf.gelu(x, approximate="tanh"), lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh")),
    "gelu_taylor": Activation(gelu_taylor, _gelu_taylor_backward),
    "hardswish": Activation(nnf.hardswish, aten.hardswish_backward),
    "sigmoid": Activation(torch.sigmoid, lambda grad, x: aten.sigmoid_backward(grad, torch.sigmoid(x))),
}
ACTIVATIONS = ("softmax", *POINTWISE)
