"""JaggedTargetAttention on the CPU where each user has one candidate: the history is not projected.

    scale · q (W_k x + b_k) = scale · (W_kᵀ q) x + c,  Σ p (W_v x + b_v) = W_v (Σ p x) + b_v Σ p

c is a constant of the segment, which softmax takes away. So attention reads the history's rows
themselves. Each user has a query and a sum of rows for each head, which are projected. A row takes
2 · H · E multiplications forward; its projection alone would take 2 · E².
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cpu.pooling import pool, pooled_gradients
from ..functional.nodes import apply, differentiable_once
from ..segments import are_single, values_are_checkable
from ..settings import is_batch_invariant
from .one_node import in_training
from .targets import Targets

if TYPE_CHECKING:
    from .target_attention import JaggedTargetAttention


def has_one_candidate_each(
    layer: JaggedTargetAttention, given: Targets, history: Tensor, dtype: torch.dtype
) -> bool:
    """Whether `attend_without_projection` computes the layer on the CPU, and takes less time than
    projections of the history `[L, E]`: with few heads, whose products are no GEMM, and with more
    rows than users. dtype: of the projections."""
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


def attend_without_projection(
    layer: JaggedTargetAttention, given: Targets, history: Tensor
) -> Tensor:
    """The layer's result for targets, of which each user has one, and their histories `[L, E]`."""
    heads, (level,), kv_proj = layer.num_heads, given.levels, layer.kv_proj
    q = level.grouped(torch.unflatten(layer.q_proj(given.rows), -1, (heads, -1)))
    weights = torch.unflatten(kv_proj.weight, 0, (2, heads, -1))  # [2, H, D, E]
    biases = torch.unflatten(kv_proj.bias, 0, (2, heads, 1, -1))
    of_keys = q.transpose(0, 1) @ weights[0]  # [H, B, E]
    offsets = level.keys.offsets
    sums = apply(_Pooled, of_keys, history.contiguous(), offsets, q.shape[2] ** -0.5)
    out = torch.baddbmm(biases[1], sums, weights[1].mT)
    out = out.masked_fill((offsets.diff() == 0)[:, None], 0).transpose(0, 1)
    return layer.out_proj(layer.dropout(level.ungrouped(out).flatten(-2)))


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
