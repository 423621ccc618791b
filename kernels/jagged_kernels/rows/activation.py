"""Activations of rows between two GEMMs: the registered operators and their launches.

    y = act(x)                    dx = dy · act'(x)
    gated, x = [x₁ | x₂]:
    y = act(x₁) · x₂              dx₁ = dy · x₂ · act'(x₁),  dx₂ = dy · act(x₁)

"silu", gated, is SwiGLU. x has its GEMM's bias: cuBLAS adds it in the GEMM. The bias' gradient are
the sums of the columns of dx, which the backward adds up in the same pass, in fp32, over a fixed
number of programs and then over these: two runs give the same bits.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..common.activations import activation_function
from ..common.autograd import refuse_derivative
from ..common.device import cdiv, contiguous_last_dim, device_properties, row_strides
from ..common.ops import operator
from .activation_kernels import (
    ActivationBackward,
    ActivationOptions,
    activation_bwd_kernel,
    activation_fwd_kernel,
)
from .configs import FEW_WARPS, RowsConfig, activation_config


def _activation_fake(x, activation, gated=False):
    return x.new_empty((x.shape[0], x.shape[1] // (2 if gated else 1)))


@operator("activation", _activation_fake)
def triton_activation(x: Tensor, activation: str, gated: bool = False) -> Tensor:
    """The activation of each element, or of a half of the columns times the other half.

    Args:
        x: `[L, W]`, fp32, fp16 or bf16, any row stride; gated: `[L, 2 W]`.
        activation: name of a pointwise activation.

    Returns:
        y `[L, W]` in x's dtype.
    """
    x, y = contiguous_last_dim(x), _activation_fake(x, activation, gated)
    if y.numel():
        options, config, strides = _options(y.shape[1], gated, x, y)
        activation_fwd_kernel[(cdiv(len(y), config.rows), cdiv(y.shape[1], config.block))](
            x, y, len(y), strides,
            ACTIVATION=activation_function(activation, False), OPTIONS=options,
            num_warps=config.num_warps,
        )  # fmt: skip
    return y


def _activation_backward_fake(dy, x, activation, gated=False, end=None, scale=1.0):
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=torch.float32)


@operator("activation_backward", _activation_backward_fake)
def triton_activation_backward(
    dy: Tensor,
    x: Tensor,
    activation: str,
    gated: bool = False,
    end: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Gradient of `triton_activation`, and the sums of its columns.

    Args:
        dy: `[L, W]`, gradient of y. x, activation, gated: the forward's.
        end: integers `[B + 1]`: rows from the last one on are not read and give 0. None: all are
            rows.
        scale: of dy. ReLU's derivative at its result is 0 where dropout drops it, so that it is
            what the gradient of dropout needs.

    Returns:
        dx in x's shape and dtype, and its sums over rows, fp32.
    """
    dx = x.new_empty(x.shape)
    return dx, _write_gradients(dy, x, dx, activation, gated, (None, scale), end)


def _again_fake(dy, x, dx, activation, gated=False, kept=None, scale=1.0):
    return x.new_empty(x.shape[1], dtype=torch.float32)


@operator(
    "activation_again_backward",
    _again_fake,
    "(Tensor(a!) dy, Tensor x, Tensor(b!) dx, str activation, bool gated=False,"
    " Tensor? kept=None, float scale=1.0) -> Tensor",
)
def triton_activation_again_backward(
    dy: Tensor,
    x: Tensor,
    dx: Tensor,
    activation: str,
    gated: bool = False,
    kept: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`triton_activation_backward` and `triton_activation` in one pass: y replaces dy.

    Args:
        dy: `[L, W]`, any row stride. x, activation, gated: the forward's.
        dx: of x's shape and dtype, for the gradient; may be x.
        kept, scale: of dropout behind the activation, whose result replaces dy: bools `[L, W]`,
            and the factor of what is kept.

    Returns:
        The sums of dx over rows, fp32.
    """
    return _write_gradients(dy, x, dx, activation, gated, (kept, scale), again=True)


def _write_gradients(
    dy: Tensor,
    x: Tensor,
    dx: Tensor,
    activation: str,
    gated: bool,
    dropout: tuple[Tensor | None, float],
    end: Tensor | None = None,
    again: bool = False,
) -> Tensor:
    """Write dx, and y to dy if `again`. dropout: kept and scale. Returns the sums of dx."""
    rows, columns = x.shape
    if dx.numel() == 0:
        return x.new_zeros(columns, dtype=torch.float32)
    if not again:
        dy, x = contiguous_last_dim(dy), contiguous_last_dim(x)
    options, config, strides = _options(dy.shape[1], gated, dy, x, dx)
    kept, scale = dropout
    options = options._replace(again=again, scaled=kept is not None or scale != 1)
    kept = None if kept is None else kept.contiguous().view(torch.uint8)
    blocks = cdiv(dy.shape[1], config.block)
    if gated and kept is not None:
        config = dataclasses.replace(config, warps_per_sm=FEW_WARPS)
    most = config.programs_per_sm * device_properties(x.device).num_sms
    programs = min(cdiv(rows, config.rows), max(1, most // blocks))
    sums = x.new_empty((programs, columns), dtype=torch.float32)
    activation_bwd_kernel[(programs, blocks)](
        ActivationBackward(dy, x, kept, end, dx, sums), rows, 0 if end is None else len(end) - 1,
        scale, strides,
        ACTIVATION=activation_function(activation, False), OPTIONS=options,
        num_warps=config.num_warps,
    )  # fmt: skip
    return sums.sum(0)


def _options(
    width: int, gated: bool, *tensors: Tensor
) -> tuple[ActivationOptions, RowsConfig, tuple[int, ...]]:
    """With the row strides of the tensors, as the kernel is given them."""
    config, (align, strides) = activation_config(width), row_strides(*tensors)
    options = ActivationOptions(width, gated, align, config.rows, config.block)
    return options, config, tuple(strides)


for _op in triton_activation, triton_activation_backward, triton_activation_again_backward:
    refuse_derivative(_op, "activations of rows have no derivative of their own: a node has one")
