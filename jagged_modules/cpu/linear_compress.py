"""Linear compression in plain torch, as one GEMM per level whose results are gathered and added.
The CPU path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jagged_kernels.common.device import contiguous_last_dim
from torch import Tensor

from .invariant import batched_matmul_cpu, weight_gradient


def linear_compress_cpu(
    weights: Sequence[Tensor],
    embeddings: Sequence[Tensor],
    indices: Sequence[Tensor],
    batch_invariant: bool = False,
) -> Tensor:
    """Σ_l (W_l @ E_l)[index_l]. See `functional.linear_compress` for shapes. batch_invariant: the
    matrices of a level are multiplied one by one."""
    matmul: Callable[[Tensor, Tensor], Tensor] = (
        batched_matmul_cpu if batch_invariant else _SharedWeightMatmul.apply
    )
    *shared, out = map(matmul, weights, embeddings)
    for level, index in zip(shared, indices):
        out = out + level.index_select(0, index)
    return out


class _SharedWeightMatmul(torch.autograd.Function):
    """W @ E[b] for each b. Autograd would compute dW as B matrices `[M, K]` and sum them; this
    class computes it as one GEMM."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, embedding: Tensor) -> Tensor:
        ctx.save_for_backward(weight, embedding)
        return _multiply(weight, embedding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (do,), (weight, embedding) = grads, ctx.saved_tensors
        wants_weight, wants_embedding = ctx.needs_input_grad
        return (
            weight_gradient(do, embedding) if wants_weight else None,
            _multiply(weight.T, do) if wants_embedding else None,
        )


def _multiply(weight: Tensor, x: Tensor) -> Tensor:
    """weight @ x[b] for each b. torch.bmm would multiply expanded or strided matrices one by one,
    each of them in all threads."""
    weight, x = contiguous_last_dim(weight), contiguous_last_dim(x)
    return torch.bmm(weight.expand(x.shape[0], -1, -1), x)
