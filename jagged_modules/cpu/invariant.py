"""CPU operators for `batch_invariant`. They compute one matrix or one row at a time.

For a whole batch, torch splits a GEMM or a pointwise function into blocks by its size, and the
elements at a block's edge take other instructions than those inside. A matrix or row that is copied
and computed alone has results that do not depend on the batch.
"""

from __future__ import annotations

import torch
from jagged_kernels.common.autograd import differentiate_by, refuse_derivative
from jagged_kernels.common.one_thread import one_thread
from torch import Tensor

from ..activations import POINTWISE
from .buckets import compute_dtype
from .operators import host_operator
from .shares import in_shares


@host_operator(
    "batched_matmul_cpu", lambda weight, x: x.new_empty((x.shape[0], weight.shape[0], x.shape[2]))
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


@host_operator("pointwise_rows_cpu", lambda x, _: x.new_empty(x.shape))
def pointwise_rows_cpu(x: Tensor, activation: str) -> Tensor:
    """The pointwise activation of this name, applied to each row of x `[L, D]`: `[L, D]`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    with one_thread():
        for row, result in zip(x, out):
            result.copy_(POINTWISE[activation].function(_copy(row)))
    return out


@host_operator("pointwise_rows_backward_cpu", lambda grad, x, _: x.new_empty(x.shape))
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
    # not by tensordot: it compares each size to 1, and a graph may not know the batch's
    do, x = (y.transpose(0, 1).flatten(1) for y in (do, x))
    return do @ x.mT


def _batched_matmul_gradients(
    do: Tensor, needs: tuple[bool, bool], weight: Tensor, x: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """dW is a sum over the batch, so it is computed as one GEMM: it cannot be batch-invariant."""
    dx = batched_matmul_cpu(weight.mT, do) if needs[1] else None
    return weight_gradient(do, x) if needs[0] else None, dx


differentiate_by(batched_matmul_cpu, _batched_matmul_gradients)
differentiate_by(
    pointwise_rows_cpu, lambda grad, _, *given: (pointwise_rows_backward_cpu(grad, *given),)
)
refuse_derivative(
    pointwise_rows_backward_cpu, "activations are not differentiable twice under batch_invariant"
)
