"""Autograd of attention's operators, whose arguments are those of `params.pack`. No triton
import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..common.autograd import below_autograd, differentiate
from .params import Arguments, Options, SegmentTensors, empty_table_gradients, unpack

_SAVED = len(SegmentTensors._fields)  # tensors behind q, k and v; those of the bias follow


class _Attention(torch.autograd.Function):
    """Of the arguments that may get gradients, and all arguments together: autograd's time on the
    host grows with what it is given. op: arguments → out, lse. backward_op: do, [out, lse],
    *arguments → dq, dk, dv, dposition, dtime. Only softmax reads out."""

    @staticmethod
    def forward(ctx, q, k, v, position_bias, time_bias, arguments, op, backward_op):
        with below_autograd():
            out, lse = op(*arguments)
        _, _, _, segments, bias, *ctx.others = arguments
        saved_out = out if arguments.activation == "softmax" else None
        ctx.save_for_backward(saved_out, lse, q, k, v, *segments, *bias)
        ctx.backward_op = backward_op
        has_gradients = Options(*arguments.options).table_gradients
        ctx.tables = [has_gradients and x is not None for x in (position_bias, time_bias)]
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, do, _dlse):
        out, lse, q, k, v, *saved = ctx.saved_tensors
        dq, dk, dv, *dtables = ctx.backward_op(
            do, [out, lse], q, k, v, saved[:_SAVED], saved[_SAVED:], *ctx.others
        )
        of_tables = (dx if has_one else None for dx, has_one in zip(dtables, ctx.tables))
        return dq, dk, dv, *of_tables, None, None, None


# without what `_Attention.apply` does for torch.func
_apply = super(torch.autograd.Function, _Attention).apply


def differentiable(
    arguments: Arguments, op: Callable, backward_op: Callable, apply: Callable = _apply
) -> Any:
    """out and lse of op, with their gradients by backward_op."""
    q, k, v, _, (position_bias, time_bias, *_), *_ = arguments
    return apply(q, k, v, position_bias, time_bias, arguments, op, backward_op)


def differentiate_attention(op: Callable, backward_op: Callable) -> None:
    """Route the operator's calls under autograd through `_Attention`."""

    def call(*inputs: Any) -> Any:
        return differentiable(Arguments(*inputs), op, backward_op, _Attention.apply)

    differentiate(op, call)


def backward_fake(do: Tensor, results: Any, *arguments: Any) -> tuple[Tensor, ...]:
    """Outputs of a backward's operator, without looking at data."""
    call = unpack(*arguments)[0]
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in call[:3])
    return *grads, *empty_table_gradients(call.params, call.q)


def packed_backward_fake(
    do: Tensor, results: Any, of_queries: Tensor, of_keys: Any, columns: Any, *arguments: Any
) -> tuple[Tensor, ...]:
    """The same of the packed backward's operator."""
    call = unpack(*arguments)[0]
    return empty_table_gradients(call.params, call.q)
