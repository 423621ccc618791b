"""BlockDiagonalSelfAttention as one autograd node.

    qkv = x Wᵀ + b,  h = attention(qkv),  y = h W_oᵀ + b_o
    dh = dy W_o,  dqkv = attention's backward(dh),  dx = dqkv W
    dW = dqkvᵀ x,  dW_o = dyᵀ h,  db and db_o: column sums of dqkv and dy

x and the parameters are cast once, to the dtype of the GEMMs; rows behind the last segment are
cleared in the same pass. The gradient of x leaves its GEMM in x's dtype, and those of the weights
in theirs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..functional.block_attention import packed_arguments
from ..functional.nodes import apply, differentiable_once, release
from ..functional.tail import cleared, with_zero_tail
from ..rotary import Rotary
from .one_node import cast, gemm_rows, linear, linear_gradients


class BlockAttention(NamedTuple):
    """What the node computes between its projections. end: of the rows, if only the device knows
    it. dtype: of the GEMMs' operands. dropout: probability of attention
    weights, 0 outside of training."""

    offsets: Tensor
    end: Tensor | None
    num_heads: int
    block_size: int
    rotary: Rotary | None
    dtype: torch.dtype
    dropout: float = 0


def block_attention_node(
    x: Tensor, qkv_proj: nn.Linear, out_proj: nn.Linear, attention: BlockAttention
) -> Tensor:
    """The layer's result `[L, E]` in the operands' dtype, for x `[L, E]`."""
    parameters = qkv_proj.weight, qkv_proj.bias, out_proj.weight, out_proj.bias
    return apply(_Node, x, *parameters, attention)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters_and_attention: Any) -> Tensor:
        *parameters, attention = parameters_and_attention
        return with_zero_tail(linear(*_attended(ctx, x, parameters, attention)), attention.end)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from jagged_kernels.block_attention import op
        from jagged_kernels.common.ops import called

        x, qkv_weight, qkv, offsets, *tables, h, out_weight, end = ctx.saved_tensors
        wanted: list[bool] = list(ctx.needs_input_grad[:5])
        of_qkv, of_out = wanted[:3], [any(wanted[:3]), *wanted[3:]]
        dy = cleared(dy, end, h.dtype)
        dh, *dout = linear_gradients(dy, h, out_weight, of_out, dy.dtype, ctx.dtype)
        if dh is None:
            return None, None, None, *dout, None
        do = dh.view_as(qkv[:, 0])
        inputs = do, qkv, offsets, tables, *ctx.options
        dqkv = called(op.triton_block_attention_packed_backward, *inputs).flatten(1)
        release(qkv, h, dh)
        dx_and_proj = linear_gradients(dqkv, x, qkv_weight, of_qkv, ctx.x_dtype, ctx.dtype)
        return *dx_and_proj, *dout, None


def _attended(
    ctx: Any, x: Tensor, parameters: list[Tensor], attention: BlockAttention
) -> tuple[Tensor, Tensor, Tensor]:
    """The operands of the output's projection, in its dtype. Saves what a backward reads; without
    one, the packed projection is free when this returns."""
    from jagged_kernels.block_attention import op
    from jagged_kernels.common.ops import called

    offsets, end, num_heads, block_size, rotary, dtype, dropout = attention
    ctx.x_dtype, ctx.dtype = x.dtype, parameters[0].dtype
    qkv_weight, qkv_bias, out_weight, out_bias = cast(dtype, *parameters)
    x = gemm_rows(x, end, dtype)
    qkv = torch.unflatten(linear(x, qkv_weight, qkv_bias), 1, (3, num_heads, -1))
    qkv, offsets, tables, *ctx.options = packed_arguments(
        qkv, offsets, block_size=block_size, rotary=rotary, dropout_p=dropout
    )
    h = called(op.triton_block_attention_packed, qkv, offsets, tables, *ctx.options).flatten(1)
    ctx.save_for_backward(x, qkv_weight, qkv, offsets, *tables, h, out_weight, end)
    return h, out_weight, out_bias
