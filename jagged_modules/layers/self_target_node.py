"""JaggedSelfTargetAttention as one autograd node.

    [q | k | v] = history [W_q | W_kv]ᵀ + [b_q | b_kv],  q_t = targets W_tᵀ + b_t
    [h; h_t] = attention([q; q_t], k, v),  y = h W_oᵀ + b_o,  y_t = h_t W_otᵀ + b_ot

The rows of q_t are below those of q, in the same columns: nothing is copied for the attention,
which takes both as one operand, nor for the gradients of the history's projection, which are one
tensor. The columns of k and v in the rows of targets are memory that nothing uses.

Rows and parameters are cast, cleared and ordered as in `target_node`: q_t is ordered where it is
written below q.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..cpu.order import rows_back
from ..functional.attention import attention_forward, packed_gradients
from ..functional.attention_call import AttentionOptions, parsed_call
from ..functional.nodes import apply, differentiable_once, release, reshaped_result
from ..functional.tail import cleared, with_zero_tail
from ..functional.target_attention import joined_segments
from .one_node import cast, gemm_rows, in_training, linear, linear_gradients, parameters_of
from .target_node import Order, TargetCall, in_order
from .targets import Targets

if TYPE_CHECKING:
    from .self_target_attention import JaggedSelfTargetAttention


def self_target_node(
    layer: JaggedSelfTargetAttention,
    linears: Sequence[nn.Linear],
    given: Targets,
    history: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The layer's results for the history `[L, E]` and for the rows of these targets of one level,
    in the operands' dtype. linears: its projections."""
    dropout = in_training(layer, layer.attention_dropout)
    call = TargetCall(given, layer.num_heads, dtype, attention_dropout=dropout, mask=layer.mask)
    values, results = apply(_Node, given.rows, history, *parameters_of(*linears), call)
    return values, results


class _Saved(NamedTuple):
    """What the backward reads, besides the attention's segments. ends: of the history and of the
    targets. The last three: of `Order`."""

    targets: Tensor
    history: Tensor
    qkv_weight: Tensor
    target_weight: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    out_weight: Tensor
    target_out_weight: Tensor
    end: Tensor | None
    end_of_targets: Tensor | None
    order: Tensor | None
    inverse: Tensor | None
    history_rows: Tensor | None


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *inputs, call = arguments
        targets, history, *_ = inputs
        h, of_output, order = _attended(ctx, inputs, call)
        rows, shape = history.shape[0], targets.shape[:-1]
        values = rows_back(linear(h[:rows], *of_output[:2]), order.history_rows, rows)
        results = in_order(linear(h[rows:], *of_output[2:]), order.inverse)
        results = reshaped_result(results, [*shape, results.shape[1]])
        results = with_zero_tail(results, call.given.end)
        return with_zero_tail(values, call.given.levels[0].end), results

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, dvalues: Tensor | None, dresults: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        count, tensors = len(_Saved._fields), ctx.saved_tensors  # which may be read once
        saved, segments = _Saved(*tensors[:count]), list(tensors[count:])
        of_targets, of_history, *wanted = ctx.needs_input_grad[:-1]
        of_targets_dtype, of_history_dtype, dtype = ctx.dtypes
        h, rows = saved.out.flatten(1), saved.history.shape[0]
        if dvalues is not None:
            dvalues = in_order(cleared(dvalues, saved.end, h.dtype), saved.history_rows)
        if dresults is not None:
            dresults = cleared(dresults, saved.end_of_targets, h.dtype).flatten(0, -2)
            dresults = in_order(dresults, saved.order)
        needs_dh = any((of_targets, of_history, *wanted[:6]))
        dh = torch.empty_like(h) if needs_dh else h.new_empty(0)
        own, others = (slice(rows), saved.out_weight), (slice(rows, None), saved.target_out_weight)
        dout = [
            *_of_output(dvalues, h, dh, *own, wanted[6:8], dtype),
            *_of_output(dresults, h, dh, *others, wanted[8:], dtype),
        ]
        if not needs_dh:
            return *[None] * 8, *dout, None
        attention = saved.q, saved.k, saved.v, segments, *ctx.options
        do = dh.view_as(saved.out)
        dqkv, _ = packed_gradients(do, [saved.out, saved.lse], True, *attention)
        release(saved.q, saved.out, dh)
        width = h.shape[1]
        dtargets, *dtarget_proj = linear_gradients(
            in_order(dqkv[rows:, :width], saved.inverse), saved.targets, saved.target_weight,
            [of_targets, *wanted[4:6]], of_targets_dtype, dtype,
        )  # fmt: skip
        if dtargets is not None:
            dtargets = torch.unflatten(dtargets, 0, ctx.shape)
        of_qkv = [of_history, wanted[0] or wanted[2], wanted[1] or wanted[3]]
        dhistory, *packed = linear_gradients(
            dqkv[:rows], saved.history, saved.qkv_weight, of_qkv, of_history_dtype, dtype
        )
        if dhistory is not None:
            dhistory = rows_back(dhistory, saved.history_rows, rows)
        (dq_weight, dkv_weight), (dq_bias, dkv_bias) = (
            (None, None) if x is None else x.tensor_split([width]) for x in packed
        )
        dprojections = dq_weight, dq_bias, dkv_weight, dkv_bias, *dtarget_proj
        return dtargets, dhistory, *dprojections, *dout, None


def _of_output(
    dy: Tensor | None,
    h: Tensor,
    dh: Tensor,
    rows: slice,
    weight: Tensor,
    wanted: Sequence[bool],
    dtype: torch.dtype,
) -> Sequence[Tensor | None]:
    """The gradients of weight and bias of the projection of these rows, None where none is wanted;
    writes that of the rows to dh, if it is not empty. dy: None if nothing has read the result."""
    if dy is None:
        dh[rows].zero_()
        return None, None
    if dh.numel():
        torch.mm(dy, weight, out=dh[rows])
    return linear_gradients(dy, h[rows], weight, [False, *wanted], h.dtype, dtype)[1:]


def _attended(
    ctx: Any, inputs: Sequence[Tensor], call: TargetCall
) -> tuple[Tensor, list[Tensor], Order]:
    """The attention's result for the history and the targets, in the order that is returned too,
    and the parameters of both output projections, in its dtype. Saves what a backward reads;
    without one, the other projections are free when this returns. inputs: as of `target_node`."""
    if not torch.compiler.is_compiling():  # torch.compile does not know it, and gives zeros
        ctx.set_materialize_grads(False)
    given, dtype, heads = call.given, call.dtype, call.num_heads
    end = given.levels[0].end
    given_targets, given_history, *parameters = inputs
    q_weight, q_bias, kv_weight, kv_bias, *of_targets_and_output = cast(dtype, *parameters)
    target_weight, target_bias, *of_output = of_targets_and_output
    qkv_weight, qkv_bias = torch.cat([q_weight, kv_weight]), torch.cat([q_bias, kv_bias])
    order = Order.of(given)
    targets = given_targets.flatten(0, -2) if given.end is None else given_targets
    targets = gemm_rows(targets, given.end, dtype).flatten(0, -2)
    history = in_order(gemm_rows(given_history, end, dtype), order.history_rows)
    rows, width = (history.shape[0], targets.shape[0]), q_weight.shape[0]
    qkv = history.new_empty(rows[0] + rows[1], 3 * width)
    own = history[:, : qkv_weight.shape[1]]
    torch.addmm(qkv_bias, own, qkv_weight.t(), out=qkv[: rows[0]])
    q_t = linear(targets, target_weight, target_bias)
    in_order(q_t, order.order, qkv[rows[0] :, :width])
    del q_t
    q, k, v = torch.unflatten(qkv, 1, (3, heads, -1)).unbind(1)
    queries, keys, _ = joined_segments(order.keys, order.queries, rows, {})
    k, v = k[: rows[0]], v[: rows[0]]
    options = AttentionOptions(mask=call.mask, dropout_p=call.attention_dropout)
    attention = parsed_call(q, k, v, queries, keys, options).call
    trains = any(ctx.needs_input_grad)
    out, lse, (q, k, v, segments, *ctx.options) = attention_forward(attention, trains)
    saved = _Saved(
        targets, history, qkv_weight, target_weight, q, k, v, out, lse, of_output[0],
        of_output[2], end, given.end, order.order, order.inverse, order.history_rows,
    )  # fmt: skip
    ctx.save_for_backward(*saved, *segments)
    ctx.shape = given_targets.shape[:-1]
    ctx.dtypes = given_targets.dtype, given_history.dtype, parameters[0].dtype
    return out.flatten(1), of_output, order
