"""What an implementation's arithmetic may do, beside sums in fp32 (of float64 operands: in float64) and one rounding of each result."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor


class Arithmetic(NamedTuple):
    """exp_ulps: how far exponentials are off, in units in the last place. rounds_factors: whether what a program computes and then
    multiplies by a matrix (weights, their gradients, rotated operands) is rounded to the operands' dtype before, as matrix units want it.
    approximate: whether activations of bfloat16 are made from the hardware's tanh. rounds_levels: whether the levels of linear_compress
    are rounded one by one, and their gradients summed in the operands' dtype. torch_products: whether products are torch's own, which
    `splits_sums` says more of."""

    exp_ulps: float
    rounds_factors: bool
    approximate: bool
    rounds_levels: bool
    torch_products: bool


# The hardware's exponential in base 2 has a relative error of 2^-22 at most (PTX ISA, ex2.approx): 2 ulps, or 4 with a logarithm's.
KERNELS = Arithmetic(exp_ulps=4, rounds_factors=True, approximate=True, rounds_levels=False, torch_products=False)
# torch's fused CPU attention takes exponentials off by up to 20 ulps (Vectorized::exp_u20); it computes in fp32 throughout.
TORCH_CPU = Arithmetic(exp_ulps=20, rounds_factors=False, approximate=False, rounds_levels=True, torch_products=True)


def arithmetic_of(x: Tensor) -> Arithmetic:
    """What public functions do with such operands: kernels on CUDA and in Triton's interpreter, torch on the CPU."""
    return KERNELS if x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1" else TORCH_CPU


def splits_sums(x: Tensor) -> bool:
    """Whether torch's own products of such operands may be split along their sums, with partial sums of the operands' dtype."""
    allowed = torch.backends.cuda.matmul
    if x.dtype == torch.bfloat16:
        return x.is_cuda and bool(allowed.allow_bf16_reduced_precision_reduction)
    return x.is_cuda and x.dtype == torch.float16 and bool(allowed.allow_fp16_reduced_precision_reduction)
