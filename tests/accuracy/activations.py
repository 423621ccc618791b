"""Pointwise activations and their derivatives, with the errors that implementations may make."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_modules.activations import POINTWISE

from .bound import LARGEST_DEVIATION, Bound

# (argument, height) of each jump of a derivative. Where the argument's error reaches the jump,
# either side's value is right.
JUMPS = {
    "relu": ((0.0, 1.0),),
    "leaky_relu": ((0.0, 0.99),),
    "hardswish": ((-3.0, 0.5), (3.0, 0.5)),
    "gelu_taylor": ((-3.06, 0.03), (3.06, 0.03)),
}
# The most roundings of an activation. They are of numbers no larger than the argument, the result
# and 1. The activations of NO_CANCELLATION add no terms of opposite signs: their roundings are of
# numbers no larger than the result.
ROUNDINGS = 16
NO_CANCELLATION = ("identity", "relu", "relu_squared", "leaky_relu", "sigmoid")
# tanh.approx has a relative error of 2^-11 (PTX ISA), and the formulas multiply it by 0.5.
TANH_ERROR = 2.0**-12


def activated(x: Bound, name: str, approximate: bool = False) -> tuple[Bound, Bound]:
    """Bounds of the activation's value and derivative at x. approximate: the hardware's tanh is
    used, as for bfloat16."""
    argument = x.value.detach().requires_grad_()
    with torch.enable_grad():
        value = POINTWISE[name].function(argument)
        (slope,) = torch.autograd.grad(value.sum(), argument, create_graph=True)
        curvature = (
            torch.autograd.grad(slope.sum(), argument, allow_unused=True)[0]
            if slope.requires_grad
            else None
        )
    value, slope = value.detach(), slope.detach()
    curvature = torch.zeros_like(value) if curvature is None else curvature.abs()
    size = x.value.abs()
    values = Bound(value, _reached(slope.abs(), curvature, x.error), slope.abs() * x.rms, x.dtype)
    slopes = Bound(slope, curvature * x.error, curvature * x.rms, x.dtype)
    for argument, height in JUMPS.get(name, ()):
        jump = (
            height
            * (
                (x.value - argument).abs() < torch.minimum(x.error, LARGEST_DEVIATION * x.rms)
            ).double()
        )
        slopes, values = slopes.widened(jump, jump), values.widened(jump * x.error, jump * x.rms)
    if name != "identity":
        values = values.off_by(
            ROUNDINGS, value.abs() if name in NO_CANCELLATION else torch.maximum(size, value.abs())
        )
        # 1 - tanh² has an error of eps, and is multiplied by the argument and its polynomial's
        # slope; beyond 6 it is 0 in fp32.
        near = size.clamp(max=6)
        of_slope = (
            1 + 2 * near * (0.8 + 0.107 * near**2) if name == "gelu_tanh" else torch.ones_like(size)
        )
        slopes = slopes.off_by(ROUNDINGS, torch.maximum(slope.abs(), of_slope))
    if approximate and name in ("silu", "gelu", "gelu_tanh", "sigmoid"):
        of_slope = (
            1 + 2 * size * (0.8 + 0.107 * size.clamp(max=4) ** 2)
            if name == "gelu_tanh"
            else 1 + size
        )
        for_value = torch.ones_like(size) if name == "sigmoid" else size
        values, slopes = (
            y.widened(TANH_ERROR * s, TANH_ERROR / 3 * s)
            for y, s in ((values, for_value), (slopes, of_slope))
        )
    return values, slopes


def _reached(slope: Tensor, curvature: Tensor, error: Tensor) -> Tensor:
    return (slope + curvature * error / 2) * error
