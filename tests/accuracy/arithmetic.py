"""Errors that an implementation may make, besides those of sums in fp32 (float64 for float64
operands) and one rounding of each result."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor


class Arithmetic(NamedTuple):
    """The arithmetic of one implementation.

    Attributes:
        exp_ulps: error of exponentials, in units in the last place.
        rounds_factors: P, dS and rotated operands are rounded to the operands' dtype before an MMA.
        approximate: bfloat16 activations use the hardware's approximate tanh.
        rounds_levels: the levels of linear_compress are rounded one by one, and their gradients are
            summed in the operands' dtype.
        torch_matmul: matrix multiplications are torch's own; see `splits_sums`.
    """

    exp_ulps: float
    rounds_factors: bool
    approximate: bool
    rounds_levels: bool
    torch_matmul: bool


# The hardware's exponential in base 2 has a relative error of 2^-22 at most (PTX ISA, ex2.approx):
# 2 ulps, or 4 with a logarithm's.
KERNELS = Arithmetic(
    exp_ulps=4, rounds_factors=True, approximate=True, rounds_levels=False, torch_matmul=False
)
# torch's fused CPU attention uses an exponential with an error of up to 20 ulps
# (Vectorized::exp_u20), and computes in fp32 throughout.
TORCH_CPU = Arithmetic(
    exp_ulps=20, rounds_factors=False, approximate=False, rounds_levels=True, torch_matmul=True
)


def arithmetic_of(x: Tensor) -> Arithmetic:
    """The arithmetic of public functions for operands like x: kernels on CUDA and in Triton's
    interpreter, torch on the CPU."""
    return KERNELS if x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1" else TORCH_CPU


def splits_sums(x: Tensor) -> bool:
    """Whether torch's matrix multiplications of operands like x may split K and round partial sums
    to the operands' dtype."""
    allowed = torch.backends.cuda.matmul
    if x.dtype == torch.bfloat16:
        return x.is_cuda and bool(allowed.allow_bf16_reduced_precision_reduction)
    return (
        x.is_cuda
        and x.dtype == torch.float16
        and bool(allowed.allow_fp16_reduced_precision_reduction)
    )
