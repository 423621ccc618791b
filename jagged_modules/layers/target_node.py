"""JaggedTargetAttention as one autograd node.

    q = targets W_qᵀ + b_q,  [k | v] = history W_kvᵀ + b_kv
    h = dropout(attention(q, k, v)),  y = h W_oᵀ + b_o

Rows and parameters are cast once, to the dtype of the GEMMs; rows behind the last segment are
cleared in the same pass. Targets are grouped by user before their projection. The attention's
backward writes the gradients of k and v as one tensor, that of their projection. The gradients of
rows and of weights leave their GEMM in the rows' and the weights' dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jagged_kernels.schedule.host import TileSchedule
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..containers.jagged import Jagged
from ..functional.attention import attention_forward, attention_packed_backward
from ..functional.attention_call import AttentionOptions, parsed_call
from ..functional.tail import cleared, leaving
from ..segments import RowSegments
from ..tracing import as_constant
from .one_node import cast, linear, linear_gradients, operand_dtype
from .targets import Targets

if TYPE_CHECKING:
    from .target_attention import JaggedTargetAttention


class TargetInputs(NamedTuple):
    """The tensors that may have gradients: targets in any of their forms, the history's rows
    `[L, E]`, and weights and biases of the projections."""

    targets: Tensor
    history: Tensor
    q_weight: Tensor
    q_bias: Tensor
    kv_weight: Tensor
    kv_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor


class TargetCall(NamedTuple):
    """What the node computes. dtype: of the GEMMs' operands. end: of the history's rows. dropout:
    probability, 0 outside of training."""

    given: Targets
    keys: RowSegments
    end: Tensor | None
    num_heads: int
    dtype: torch.dtype
    schedule: TileSchedule | None
    dropout: float


def target_node(
    layer: JaggedTargetAttention, given: Targets, history: Jagged, schedule: TileSchedule | None
) -> Tensor:
    """The layer's result for these targets, in their form, in the operands' dtype."""
    of_projections = (
        x for linear in layer.projections for x in (linear.weight, linear.bias)
    )  # fmt: skip
    inputs = TargetInputs(given.rows, history.values, *of_projections)
    dropout = as_constant(layer.dropout.p) if layer.dropout.training else 0.0
    call = TargetCall(
        given,
        history.parsed("history"),
        history.end("history"),
        layer.num_heads,
        operand_dtype(given.rows),
        schedule,
        dropout,
    )
    return _Node.apply(*inputs, call)  # type: ignore[no-untyped-call]  # unannotated in torch


class _Saved(NamedTuple):
    """What the backward reads, besides the attention's segments. end: of the targets. order,
    inverse: of candidates."""

    targets: Tensor
    history: Tensor
    q_weight: Tensor
    kv_weight: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    h: Tensor
    kept: Tensor | None
    out_weight: Tensor
    end: Tensor | None
    order: Tensor | None
    inverse: Tensor | None


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        inputs, (given, keys, end, num_heads, dtype, schedule, dropout) = (
            TargetInputs(*arguments[:-1]),
            arguments[-1],
        )
        index = given.candidates
        q_weight, q_bias, kv_weight, kv_bias, out_weight, out_bias = cast(dtype, *inputs[2:])
        targets = cleared(inputs.targets, given.end, dtype)
        if index is not None:
            targets = index.grouped(targets)
        targets = targets.flatten(0, -2)
        history = cleared(inputs.history, end, dtype)
        q = linear(targets, q_weight, q_bias).unflatten(1, (num_heads, -1))
        kv = linear(history, kv_weight, kv_bias).unflatten(1, (2 * num_heads, -1))
        k, v = kv.chunk(2, 1)
        options = AttentionOptions(schedule=schedule)
        call = parsed_call(q, k, v, given.segments, keys, options).call
        out, lse, attention = attention_forward(call, any(ctx.needs_input_grad))
        q, k, v, segments, *ctx.options = attention
        h, kept = given.ungrouped(out.flatten(1)).flatten(0, -2), None
        if dropout:
            h, kept = torch.native_dropout(h, dropout, True)
        order, inverse = (None, None) if index is None else (index.order, index.inverse)
        saved = _Saved(
            targets, history, q_weight, kv_weight, q, k, v, out, lse, h, kept, out_weight,
            given.end, order, inverse,
        )  # fmt: skip
        ctx.save_for_backward(*saved, *segments)
        ctx.shape, ctx.dropout, ctx.dtype = inputs.targets.shape[:-1], dropout, inputs.q_bias.dtype
        ctx.targets_dtype, ctx.history_dtype = inputs.targets.dtype, inputs.history.dtype
        return leaving(linear(h, out_weight, out_bias).unflatten(0, ctx.shape), given.end)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = _Saved(*ctx.saved_tensors[: len(_Saved._fields)])
        segments = list(ctx.saved_tensors[len(_Saved._fields) :])
        of_targets, of_history, *wanted = ctx.needs_input_grad[:-1]
        of_q, of_keys, of_out = wanted[:2], wanted[2:4], wanted[4:]
        needs_dh, h = any((of_targets, of_history, *wanted[:4])), saved.h
        dy = cleared(dy, saved.end, h.dtype).flatten(0, -2)
        dh, *dout = linear_gradients(
            dy, h, saved.out_weight, [needs_dh, *of_out], h.dtype, ctx.dtype
        )
        if dh is None:
            return *[None] * 6, *dout, None
        if saved.kept is not None:
            scale = 0.0 if ctx.dropout == 1 else 1 / (1 - ctx.dropout)
            dh = torch.ops.aten.native_dropout_backward(dh, saved.kept, scale)
        do = _in_order(dh.unflatten(0, ctx.shape), saved.order).view_as(saved.out)
        attention = saved.q, saved.k, saved.v, segments, *ctx.options
        dq, dkv, *_ = attention_packed_backward(do, [saved.out, saved.lse], False, *attention)
        dtargets, *dq_proj = linear_gradients(
            dq.flatten(1),
            saved.targets,
            saved.q_weight,
            [of_targets, *of_q],
            ctx.targets_dtype,
            ctx.dtype,
        )
        if dtargets is not None:
            dtargets = _in_order(dtargets.unflatten(0, ctx.shape), saved.inverse)
        dhistory, *dkv_proj = linear_gradients(
            dkv.flatten(1),
            saved.history,
            saved.kv_weight,
            [of_history, *of_keys],
            ctx.history_dtype,
            ctx.dtype,
        )
        return dtargets, dhistory, *dq_proj, *dkv_proj, *dout, None


def _in_order(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x.index_select(0, order)
