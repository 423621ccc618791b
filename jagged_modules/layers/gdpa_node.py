"""JaggedGDPA and GDPABlock as one autograd node.

    n = norm(x)                                       in a block; else n = x
    [q | k | v] = n [W_q | W_kv]ᵀ + [b_q | b_kv]      k and v also from a context, or learned
    h = dropout(attention(q, k, v)),  y = h W_oᵀ + b_o    in a block: + x

The rows and the parameters are cast once, to the dtype of the GEMMs. Rows that give queries, keys
and values have one projection, and the attention's backward writes its gradient as one tensor. The
gradients of rows without a norm leave their GEMM in the rows' dtype, and those of the weights in
theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..bias import RelativeBias
from ..functional.attention import attention_backward, attention_forward, packed_gradients
from ..functional.attention_call import AttentionOptions, parsed_call
from ..segments import RowSegments
from ..tracing import as_constant
from .one_node import (
    apply,
    cast,
    differentiable_once,
    dropout_gradient,
    dropped,
    linear,
    linear_gradients,
    node_dtype,
    release,
)

if TYPE_CHECKING:
    from .gdpa import JaggedGDPA


class NodeInputs(NamedTuple):
    """The tensors that may have gradients.

    Attributes:
        x: `[L, E]`. context: `[M, E]`, or None.
        norm: the weight of a block's norm, or None without a norm and a residual.
        q_weight, q_bias, out_weight, out_bias: of the projections.
        keys, values: weight and bias of the projection of keys and values, or learned ones
            `[W, Hkv, D]`.
    """

    x: Tensor
    context: Tensor | None
    norm: Tensor | None
    q_weight: Tensor
    q_bias: Tensor
    keys: Tensor
    values: Tensor
    out_weight: Tensor
    out_bias: Tensor


class GDPACall(NamedTuple):
    """What the node computes. dtype: of the GEMMs' operands. dropout: probability, 0 outside of
    training. eps: of the norm."""

    dtype: torch.dtype
    num_heads: int
    head_dim: int
    queries: RowSegments
    keys: RowSegments | None
    options: AttentionOptions
    dropout: float
    eps: float | None


def gdpa_dtype(
    layer: JaggedGDPA, x: Tensor, bias: RelativeBias | None, *others: nn.Module
) -> torch.dtype | None:
    """The dtype in which `gdpa_node` computes the layer's result for x, by the modules' parameters;
    None where these and the `others` are called."""
    config = layer.config
    if config.num_seeds or config.qk_norm or bias is not None:
        return None
    # kernels take the scale's sign into q
    if layer.activation == "softmax" and config.scale is not None and config.scale <= 0:
        return None
    of_keys = [] if config.num_weights else [layer.kv_proj]
    linears = [layer.q_proj, *of_keys, layer.out_proj]
    if type(layer.dropout) is not nn.Dropout:
        return None
    return node_dtype(x, linears, layer.dropout, *others)


def gdpa_node(
    layer: JaggedGDPA,
    x: Tensor,
    context: Tensor | None,
    norm: nn.RMSNorm | None,
    dtype: torch.dtype,
    attention: tuple[Any, Any, AttentionOptions],
) -> Tensor:
    """The layer's result for x `[L, E]` and a context `[M, E]`, in the operands' dtype. With a
    norm, a block's, in the wider of this dtype and x's. attention: segments and options."""
    keys: Tensor
    values: Tensor
    if layer.config.num_weights:
        keys, values = layer.key_weights, layer.value_weights
    else:
        keys, values = layer.kv_proj.weight, layer.kv_proj.bias
    q_proj, out_proj, dropout = layer.q_proj, layer.out_proj, layer.dropout
    weight, eps = (None, None) if norm is None else (norm.weight, norm.eps)
    projections = q_proj.weight, q_proj.bias, keys, values, out_proj.weight, out_proj.bias
    inputs = NodeInputs(x, context, weight, *projections)
    call = GDPACall(
        dtype,
        layer.num_heads,
        layer.head_dim,
        *attention,
        as_constant(dropout.p) if dropout.training else 0.0,
        None if eps is None else as_constant(eps),
    )
    result: Tensor = apply(_Node, *inputs, call)
    return result


class _Saved(NamedTuple):
    """What the backward reads, besides the attention's segments. x, norm and rstd: with a norm.
    weight: of q, or of q, k and v. kv_weight: of k and v from a context. out: with
    softmax. kept: what dropout keeps. None without."""

    x: Any
    norm: Any
    rstd: Any
    rows: Tensor
    context: Any
    weight: Tensor
    kv_weight: Any
    q: Tensor
    k: Tensor
    v: Tensor
    out: Any
    lse: Tensor
    h: Tensor
    kept: Any
    out_weight: Tensor


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        inputs, call = NodeInputs(*arguments[:-1]), arguments[-1]
        y = linear(*_attended(ctx, inputs, call))
        return y if inputs.norm is None else inputs.x + y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        count, tensors = len(_Saved._fields), ctx.saved_tensors  # which may be read once
        saved, segments = _Saved(*tensors[:count]), list(tensors[count:])
        wanted: list[bool] = list(ctx.needs_input_grad[: len(NodeInputs._fields)])
        h, of_out = saved.h, [any(wanted[:7]), *wanted[7:]]
        dh, *dout = linear_gradients(
            dy.to(h.dtype), h, saved.out_weight, of_out, h.dtype, ctx.dtype
        )
        if dh is None:
            return *[None] * 7, *dout, None
        dh = dropout_gradient(dh, saved.kept, ctx.dropout)
        dx, dcontext, *dprojections = _gradients(ctx, dh, saved, segments, wanted)
        dnorm = None
        if saved.norm is not None and dx is not None:
            dx, dnorm = rms_norm_gradients(dx, saved.x, saved.norm, saved.rstd, dy)
        return dx, dcontext, dnorm, *dprojections, *dout, None


def _attended(ctx: Any, inputs: NodeInputs, call: GDPACall) -> tuple[Tensor, Tensor, Tensor]:
    """The operands of the output's projection, in its dtype. Saves what a backward reads; without
    one, the other projections are free when this returns."""
    x, context, norm, dtype = *inputs[:3], call.dtype
    ctx.x_dtype, ctx.dtype = x.dtype, inputs.out_weight.dtype
    ctx.context_dtype = None if context is None else context.dtype
    ctx.is_learned, ctx.dropout = inputs.keys.dim() == 3, call.dropout
    rstd, context = None, None if context is None else context.to(dtype)
    if norm is None:
        rows = x.to(dtype)
    else:
        rows, rstd = rms_norm(x, norm, call.eps, dtype)
    *parameters, out_weight, out_bias = cast(dtype, *inputs[3:])
    (q, k, v), weights = _projected(rows, context, parameters, call)
    attention = parsed_call(q, k, v, call.queries, call.keys, call.options).call
    trains = any(ctx.needs_input_grad)
    out, lse, (q, k, v, segments, *ctx.options) = attention_forward(attention, trains)
    h, kept = dropped(out.flatten(1), call.dropout)
    of_norm = None if norm is None else x, norm, rstd
    of_softmax = out if call.options.activation == "softmax" else None
    saved = *of_norm, rows, context, *weights, q, k, v, of_softmax, lse, h, kept, out_weight
    ctx.save_for_backward(*saved, *segments)  # as in _Saved
    return h, out_weight, out_bias


def _projected(
    rows: Tensor, context: Tensor | None, parameters: list[Tensor], call: GDPACall
) -> tuple[list[Tensor], tuple[Tensor, Tensor | None]]:
    """q, k and v `[rows, heads, head_dim]`, and the weights of their projections, as `_Saved` has
    them. parameters: q_weight, q_bias, keys and values, cast."""
    q_weight, q_bias, keys, values = parameters
    heads = -1, call.head_dim
    if context is None and keys.dim() == 2:
        weight, bias = torch.cat([q_weight, keys]), torch.cat([q_bias, values])
        qkv = torch.unflatten(linear(rows, weight, bias), 1, heads)
        q, kv = qkv.tensor_split([call.num_heads], 1)
        return [q, *kv.chunk(2, 1)], (weight, None)
    q = torch.unflatten(linear(rows, q_weight, q_bias), 1, heads)
    if context is None:
        return [q, keys, values], (q_weight, None)
    kv = torch.unflatten(linear(context, keys, values), 1, heads)
    return [q, *kv.chunk(2, 1)], (q_weight, keys)


def _gradients(
    ctx: Any, dh: Tensor, saved: _Saved, segments: list[Tensor | None], wanted: list[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of the projected rows and of the context, and of `NodeInputs`' q_weight to values.
    wanted: of all inputs."""
    rows, q, dtype = saved.rows, saved.q, ctx.dtype
    do, results = torch.unflatten(dh, 1, (q.shape[1], -1)), [saved.out, saved.lse]
    arguments = q, saved.k, saved.v, segments, *ctx.options
    of_x, of_context, of_norm, *of_q, of_keys, of_values = wanted[:7]
    rows_dtype = rows.dtype if saved.norm is not None else ctx.x_dtype
    of_q = [of_x or of_norm, *of_q]
    if ctx.is_learned:
        dq, dk, dv, *_ = attention_backward(do, results, *arguments)
        dx, *dq_proj = linear_gradients(dq.flatten(1), rows, saved.weight, of_q, rows_dtype, dtype)
        return dx, None, *dq_proj, dk.to(dtype), dv.to(dtype)
    if saved.context is None:
        dqkv, _ = packed_gradients(do, results, True, *arguments)
        release(q, saved.k, saved.h, dh)
        of_qkv = [of_q[0], of_q[1] or of_keys, of_q[2] or of_values]
        of_rows = saved.weight, of_qkv, rows_dtype, dtype, saved.norm is not None
        dx, *packed = linear_gradients(dqkv, rows, *of_rows)
        width = q.shape[1] * q.shape[2]
        (dq_weight, dkeys), (dq_bias, dvalues) = (
            (None, None) if x is None else x.tensor_split([width]) for x in packed
        )
        return dx, None, dq_weight, dq_bias, dkeys, dvalues
    dq, dkv = packed_gradients(do, results, False, *arguments)
    release(q, saved.k, saved.h, dh)
    dx, *dq_proj = linear_gradients(dq.flatten(1), rows, saved.weight, of_q, rows_dtype, dtype)
    of_kv, context = [of_context, of_keys, of_values], saved.context
    dcontext, *dkv_proj = linear_gradients(
        dkv, context, saved.kv_weight, of_kv, ctx.context_dtype, dtype
    )
    return dx, dcontext, *dq_proj, *dkv_proj


# -- what a fused kernel may compute ---------------------------------------------------------------


def rms_norm(
    x: Tensor, weight: Tensor, eps: float | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """RMSNorm of rows, computed in fp32, as dtype; 1 / rms of each row."""
    from jagged_kernels.rows.op import triton_row_norm

    if eps is None:  # as in torch
        eps = torch.finfo(torch.promote_types(x.dtype, weight.dtype)).eps
    normed, _, rstd = triton_row_norm(x, weight, None, dtype, eps, 1, True)
    return normed, rstd


def rms_norm_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Of x, plus the gradient of the residual, in x's dtype; of weight in its dtype."""
    from jagged_kernels.rows.op import triton_row_norm_backward

    # kernels read no mean of this norm, and its eps is in rstd
    dx, sums = triton_row_norm_backward(dy, x, rstd, rstd, weight, residual, 0.0, True)
    return dx, sums[0].to(weight.dtype)
