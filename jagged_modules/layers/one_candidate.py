"""JaggedTargetAttention on the CPU where each user has one candidate: the history is not projected.

    scale · q (W_k x + b_k) = scale · (W_kᵀ q) x + c,  Σ p (W_v x + b_v) = W_v (Σ p x) + b_v Σ p

c is a constant of the segment, which softmax takes away. So attention reads the history's rows
themselves. Each user has a query and a sum of rows for each head, which are projected. A row takes
2 · H · E multiplications forward; its projection alone would take 2 · E².
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..cpu.one_query import are_single
from ..cpu.pooling import pool, pooled_gradients
from ..functional.nodes import apply, differentiable_once
from ..segments import RowSegments, values_are_checkable
from ..settings import is_batch_invariant
from .one_node import in_training
from .targets import Targets

if TYPE_CHECKING:
    from .target_attention import JaggedTargetAttention


def has_one_candidate_each(
    layer: JaggedTargetAttention, given: Targets, history: Tensor, dtype: torch.dtype
) -> bool:
    """Whether `attended` computes the layer on the CPU, and takes less time than projections of the
    history `[L, E]`: with few heads, whose products are no GEMM, and with more rows than users.
    dtype: of the projections."""
    (level,) = given.levels
    if history.dtype != dtype or dtype.itemsize < 4:
        return False
    if in_training(layer, layer.attention_dropout) or is_batch_invariant():
        return False
    offsets = level.keys.offsets
    num_users, width = offsets.shape[0] - 1, history.shape[1]
    if 8 * layer.num_heads > width + 32 or history.shape[0] < 4 * num_users:
        return False
    return values_are_checkable(offsets) and are_single(level.queries.offsets, offsets)


def attended(q: Tensor, kv_proj: nn.Linear, x: Tensor, keys: RowSegments) -> Tensor:
    """The attention of q `[B, H, D]` to histories x `[L, E]` that kv_proj would project:
    `[B, H, D]`, 0 for an empty history."""
    heads, head_dim = q.shape[1:]
    weights = torch.unflatten(kv_proj.weight, 0, (2, heads, head_dim))
    biases = torch.unflatten(kv_proj.bias, 0, (2, heads, 1, head_dim))
    of_keys = q.transpose(0, 1) @ weights[0]  # [H, B, E]
    sums = apply(_Pooled, of_keys, x.contiguous(), keys.offsets, head_dim**-0.5)
    out = torch.baddbmm(biases[1], sums, weights[1].mT)
    return out.masked_fill((keys.offsets.diff() == 0)[:, None], 0).transpose(0, 1)


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, x: Tensor, offsets: Tensor, scale: float) -> Tensor:
        u, lse = pool(q.detach(), x.detach(), offsets, scale)
        ctx.save_for_backward(u, lse, q, x, offsets)
        ctx.scale = scale
        return u

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, du: Tensor) -> tuple[Tensor | None, ...]:
        u, lse, q, x, offsets = ctx.saved_tensors
        operands, wanted = (q.detach(), x.detach()), ctx.needs_input_grad[:2]
        gradients = pooled_gradients(du, (u, lse), operands, offsets, ctx.scale, wanted)
        return *gradients, None, None
