"""CPU operators for `batch_invariant`. They compute one matrix or one row at a time.

For a whole batch, torch splits a GEMM or a pointwise function into blocks by its size, and the
elements at a block's edge take other instructions than those inside. A matrix or row that is copied
and computed alone has results that do not depend on the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from jagged_kernels.common.one_thread import one_thread
from torch import Tensor

from ..activations import POINTWISE
from .buckets import compute_dtype
from .operators import host_operator
from .shares import in_shares


@host_operator(
    "jagged_modules::batched_matmul_cpu",
    lambda weight, x: x.new_empty((x.shape[0], weight.shape[0], x.shape[2])),
)
def batched_matmul_cpu(weight: Tensor, x: Tensor) -> Tensor:
    """weight `[M, K]` @ x[b] `[K, N]` for each b: `[B, M, N]`. It has derivatives of any order."""
    out = x.new_empty((x.shape[0], weight.shape[0], x.shape[2]))
    weight = weight.to(compute_dtype(weight)).contiguous()

    def compute(share: list[tuple[Tensor, Tensor]]) -> None:
        for matrix, result in share:
            result.copy_(torch.mm(weight, _copy(matrix)))

    with one_thread() as threads:
        in_shares(compute, list(zip(x, out)), lambda _: weight.numel() * x.shape[2], threads)
    return out


@host_operator("jagged_modules::pointwise_rows_cpu", lambda x, _: x.new_empty(x.shape))
def pointwise_rows_cpu(x: Tensor, activation: str) -> Tensor:
    """The pointwise activation of this name, applied to each row of x `[L, D]`: `[L, D]`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    with one_thread():
        for row, result in zip(x, out):
            result.copy_(POINTWISE[activation].function(_copy(row)))
    return out


@host_operator(
    "jagged_modules::pointwise_rows_backward_cpu",
    lambda grad, x, _: x.new_empty(x.shape),
    "activations are not differentiable twice under batch_invariant",
)
def pointwise_rows_backward_cpu(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """The gradient of x `[L, D]`, given the gradient `[L, D]` of the result."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    with one_thread():
        for row_grad, row, result in zip(grad, x, out):
            result.copy_(POINTWISE[activation].backward(_copy(row_grad), _copy(row)))
    return out


def _copy(x: Tensor) -> Tensor:
    """A contiguous, aligned copy, in fp32 or fp64."""
    return x.to(compute_dtype(x), copy=True, memory_format=torch.contiguous_format)


def weight_gradient(do: Tensor, x: Tensor) -> Tensor:
    """Σ_b do[b] `[M, N]` @ x[b]ᵀ `[N, K]` as one GEMM: `[M, K]`."""
    dims: Any = ([0, 2], [0, 2])  # torch hides its overloads from checkers
    return torch.tensordot(do, x, dims)


def _setup_batched_matmul(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _batched_matmul_backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """dW is a sum over the batch, so it is computed as one GEMM: it cannot be batch-invariant."""
    weight, x = ctx.saved_tensors
    wants_weight, wants_x = ctx.needs_input_grad
    return weight_gradient(do, x) if wants_weight else None, batched_matmul_cpu(
        weight.mT, do
    ) if wants_x else None


def _setup_pointwise(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    x, ctx.activation = inputs
    ctx.save_for_backward(x)


def _pointwise_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return pointwise_rows_backward_cpu(grad, *ctx.saved_tensors, ctx.activation), None


batched_matmul_cpu.register_autograd(_batched_matmul_backward, setup_context=_setup_batched_matmul)
pointwise_rows_cpu.register_autograd(_pointwise_backward, setup_context=_setup_pointwise)
