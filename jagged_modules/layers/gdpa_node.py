"""JaggedGDPA and GDPABlock as one autograd node.

    n = norm(x)                                       in a block; else n = x
    [q | k | v] = n [W_q | W_kv]ᵀ + [b_q | b_kv]      k and v also from a context, or learned
    q, k = norm(q), norm(k)                           with qk_norm, per head
    h = dropout(attention(q, k, v)),  y = h W_oᵀ + b_o    in a block: + x

The rows and the parameters are cast once, to the dtype of the GEMMs. Rows that give queries, keys
and values have one projection, and the attention's backward writes its gradient as one tensor. The
gradients of rows without a norm leave their GEMM in the rows' dtype, and those of the weights in
theirs. Rows behind the last segment are cleared in these passes; see `functional/tail.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..bias import RelativeBias
from ..functional.attention import attention_backward, attention_forward, packed_gradients
from ..functional.attention_call import AttentionOptions, parsed_call
from ..functional.nodes import apply, differentiable_once, release
from ..functional.tail import cleared, residual_sum, with_zero_tail
from ..segments import RowSegments
from ..tracing import as_constant
from .norms import RMSNorm
from .one_node import (
    bias_columns,
    cast,
    dropout_gradient,
    dropped,
    gemm_rows,
    linear,
    linear_gradients,
    node_dtype,
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
        q_norm, k_norm: weights `[D]` of the norms of queries and keys, or None.
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
    q_norm: Tensor | None
    k_norm: Tensor | None


class GDPACall(NamedTuple):
    """What the node computes. dtype: of the GEMMs' operands. ends: of the rows of x and of the
    context. dropout: probability, 0 outside of training. eps: of the norm; qk_eps: of those of q
    and k."""

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ends: tuple[Tensor | None, Tensor | None]
    queries: RowSegments
    keys: RowSegments | None
    options: AttentionOptions
    dropout: float
    eps: float | None
    qk_eps: float | None


def gdpa_dtype(
    layer: JaggedGDPA, x: Tensor, bias: RelativeBias | None, *others: nn.Module
) -> torch.dtype | None:
    """The dtype in which `gdpa_node` computes the layer's result for x, by the modules' parameters;
    None where these and the `others` are called."""
    config = layer.config
    if config.num_seeds or bias is not None:
        return None
    norms: tuple[nn.Module, ...] = ()
    if config.qk_norm:
        q_norm, k_norm = norms = layer.q_norm, layer.k_norm
        if config.num_weights or type(q_norm) is not RMSNorm or type(k_norm) is not RMSNorm:
            return None
        if q_norm.eps != k_norm.eps:
            return None
    # kernels take the scale's sign into q
    if layer.activation == "softmax" and config.scale is not None and config.scale <= 0:
        return None
    of_keys = [] if config.num_weights else [layer.kv_proj]
    linears = [layer.q_proj, *of_keys, layer.out_proj]
    if type(layer.dropout) is not nn.Dropout:
        return None
    return node_dtype(x, linears, layer.dropout, *norms, *others)


def gdpa_node(
    layer: JaggedGDPA,
    x: Tensor,
    context: Tensor | None,
    norm: nn.RMSNorm | None,
    dtype: torch.dtype,
    ends: tuple[Tensor | None, Tensor | None],
    attention: tuple[Any, Any, AttentionOptions],
) -> Tensor:
    """The layer's result for x `[L, E]` and a context `[M, E]`, in the operands' dtype. With a
    norm, a block's, in the wider of this dtype and x's. ends: of the rows of both. attention:
    segments and options."""
    keys: Tensor
    values: Tensor
    if layer.config.num_weights:
        keys, values = layer.key_weights, layer.value_weights
    else:
        keys, values = layer.kv_proj.weight, layer.kv_proj.bias
    q_proj, out_proj, dropout = layer.q_proj, layer.out_proj, layer.dropout
    weight, eps = (None, None) if norm is None else (norm.weight, norm.eps)
    q_norm: Any = layer.q_norm
    k_norm: Any = layer.k_norm
    of_heads = (q_norm.weight, k_norm.weight) if layer.config.qk_norm else (None, None)
    qk_eps = q_norm.eps if layer.config.qk_norm else None
    projections = q_proj.weight, q_proj.bias, keys, values, out_proj.weight, out_proj.bias
    inputs = NodeInputs(x, context, weight, *projections, *of_heads)
    call = GDPACall(
        dtype,
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        ends,
        *attention,
        as_constant(dropout.p) if dropout.training else 0.0,
        None if eps is None else as_constant(eps),
        None if qk_eps is None else as_constant(qk_eps),
    )
    result: Tensor = apply(_Node, *inputs, call)
    return result


class _Saved(NamedTuple):
    """What the backward reads, besides the attention's segments. x, norm and rstd: with a norm.
    weight: of q, or of q, k and v. kv_weight: of k and v from a context. of_q: of `HeadNorm`, of q,
    or of q and k; of_k: of k from a context. out: with softmax. kept: what dropout keeps. None
    without."""

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
    end: Any
    q_raw: Any
    q_rstd: Any
    q_norm: Any
    k_raw: Any
    k_rstd: Any
    k_norm: Any


class HeadNorm(NamedTuple):
    """What the backward of `_normed` reads: its x, 1 / rms of each head, and the norms' weights by
    column. None without a norm."""

    x: Any = None
    rstd: Any = None
    weight: Any = None


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        inputs, call = NodeInputs(*arguments[:-1]), arguments[-1]
        y, end = linear(*_attended(ctx, inputs, call)), call.ends[0]
        return with_zero_tail(y, end) if inputs.norm is None else residual_sum(inputs.x, y, end)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        count, tensors = len(_Saved._fields), ctx.saved_tensors  # which may be read once
        saved, segments = _Saved(*tensors[:count]), list(tensors[count:])
        wanted: list[bool] = list(ctx.needs_input_grad[: len(NodeInputs._fields)])
        h, of_out = saved.h, [any(wanted[:7] + wanted[9:]), *wanted[7:9]]
        dh, *dout = linear_gradients(
            cleared(dy, saved.end, h.dtype), h, saved.out_weight, of_out, h.dtype, ctx.dtype
        )
        if dh is None:
            return *[None] * 7, *dout, *[None] * 3
        dh = dropout_gradient(dh, saved.kept, ctx.dropout)
        dx, dcontext, dprojections, of_heads = _gradients(ctx, dh, saved, segments, wanted)
        dnorm = None
        if saved.norm is not None and dx is not None:
            of_norm = saved.x, saved.norm, saved.rstd, dy, saved.end
            dx, dnorm = rms_norm_gradients(dx, *of_norm)
        return dx, dcontext, dnorm, *dprojections, *dout, *of_heads, None


def _attended(ctx: Any, inputs: NodeInputs, call: GDPACall) -> tuple[Tensor, Tensor, Tensor]:
    """The operands of the output's projection, in its dtype. Saves what a backward reads; without
    one, the other projections are free when this returns."""
    x, context, norm, dtype = *inputs[:3], call.dtype
    ctx.x_dtype, ctx.dtype = x.dtype, inputs.out_weight.dtype
    ctx.context_dtype = None if context is None else context.dtype
    ctx.is_learned, ctx.dropout = inputs.keys.dim() == 3, call.dropout
    rstd, (end, context_end) = None, call.ends
    context = None if context is None else gemm_rows(context, context_end, dtype)
    if norm is None:
        rows = gemm_rows(x, end, dtype)
    else:
        rows, rstd = rms_norm(x, norm, call.eps, dtype, 1, end, bias_columns(dtype))
    *parameters, out_weight, out_bias = cast(dtype, *inputs[3:9])
    (q, k, v), weights, of_heads = _projected(rows, context, inputs, parameters, call)
    attention = parsed_call(q, k, v, call.queries, call.keys, call.options).call
    trains = any(ctx.needs_input_grad)
    out, lse, (q, k, v, segments, *ctx.options) = attention_forward(attention, trains)
    h, kept = dropped(out.flatten(1), call.dropout)
    of_norm = None if norm is None else x, norm, rstd
    of_softmax = out if call.options.activation == "softmax" else None
    saved = *of_norm, rows, context, *weights, q, k, v, of_softmax, lse, h, kept, out_weight
    ctx.save_for_backward(*saved, end, *of_heads, *segments)  # as in _Saved
    return h, out_weight, out_bias


def _projected(
    rows: Tensor,
    context: Tensor | None,
    inputs: NodeInputs,
    parameters: list[Tensor],
    call: GDPACall,
) -> tuple[list[Tensor], tuple[Tensor, Tensor | None], tuple[Any, ...]]:
    """q, k and v `[rows, heads, head_dim]`, and the weights of their projections and the norms of
    their heads, as `_Saved` has them. parameters: q_weight, q_bias, keys and values, cast."""
    q_weight, q_bias, keys, values = parameters
    of_q, of_k = (inputs.q_norm, call.num_heads), (inputs.k_norm, call.num_kv_heads)

    def in_heads(*parts: Tensor) -> list[Tensor]:
        return [torch.unflatten(x, 1, (-1, call.head_dim)) for x in parts]

    if context is None and keys.dim() == 2:
        weight, bias = torch.cat([q_weight, keys]), torch.cat([q_bias, values])
        width = (call.num_heads + call.num_kv_heads) * call.head_dim
        qk, v = linear(rows, weight, bias).tensor_split([width], 1)
        qk, norms = _normed(qk, [of_q, of_k], call)
        q, k = qk.tensor_split([call.num_heads * call.head_dim], 1)
        return in_heads(q, k, v), (weight, None), (*norms, *HeadNorm())
    q, q_norm = _normed(linear(rows, q_weight, q_bias), [of_q], call)
    if context is None:
        return [*in_heads(q), keys, values], (q_weight, None), (*q_norm, *HeadNorm())
    k, v = linear(context, keys, values).chunk(2, 1)
    k, k_norm = _normed(k, [of_k], call)
    return in_heads(q, k, v), (q_weight, keys), (*q_norm, *k_norm)


def _normed(
    x: Tensor, norms: list[tuple[Tensor | None, int]], call: GDPACall
) -> tuple[Tensor, HeadNorm]:
    """The norm of each head of x, columns of a projection. norms: weight and number of heads; a
    weight of None: no norm."""
    weights = [weight.repeat(heads) for weight, heads in norms if weight is not None]
    if not weights:
        return x, HeadNorm()
    weight, groups = torch.cat(weights), sum(heads for _, heads in norms)
    normed, rstd = rms_norm(x, weight, call.qk_eps, call.dtype, groups, None)
    return normed, HeadNorm(x, rstd, weight)


def _gradients(
    ctx: Any, dh: Tensor, saved: _Saved, segments: list[Tensor | None], wanted: list[bool]
) -> tuple[Any, Any, tuple[Any, ...], tuple[Any, Any]]:
    """Gradients of the projected rows, of the context, of `NodeInputs`' q_weight to values, and of
    q_norm and k_norm. wanted: of all inputs."""
    rows, q, dtype = saved.rows, saved.q, ctx.dtype
    do, results = torch.unflatten(dh, 1, (q.shape[1], -1)), [saved.out, saved.lse]
    arguments = q, saved.k, saved.v, segments, *ctx.options
    of_x, of_context, of_norm, *of_q, of_keys, of_values = wanted[:7]
    rows_dtype = rows.dtype if saved.norm is not None else ctx.x_dtype
    of_q, width = [of_x or of_norm, *of_q], q.shape[1] * q.shape[2]
    q_norm, k_norm = HeadNorm(*saved[-6:-3]), HeadNorm(*saved[-3:])
    if ctx.is_learned:
        dq, dk, dv, *_ = attention_backward(do, results, *arguments)
        dx, *dq_proj = linear_gradients(dq.flatten(1), rows, saved.weight, of_q, rows_dtype, dtype)
        return dx, None, (*dq_proj, dk.to(dtype), dv.to(dtype)), (None, None)
    if saved.context is None:
        dqkv, _ = packed_gradients(do, results, True, *arguments)
        dq_norm, dk_norm = head_norm_gradients(dqkv, q_norm, q.shape[2], width)
        release(q, saved.k, saved.v, saved.h, dh)
        of_qkv = [of_q[0], of_q[1] or of_keys, of_q[2] or of_values]
        of_rows = saved.weight, of_qkv, rows_dtype, dtype, saved.norm is not None
        dx, *packed = linear_gradients(dqkv, rows, *of_rows)
        (dq_weight, dkeys), (dq_bias, dvalues) = (
            (None, None) if x is None else x.tensor_split([width]) for x in packed
        )
        return dx, None, (dq_weight, dq_bias, dkeys, dvalues), (dq_norm, dk_norm)
    dq, dkv = packed_gradients(do, results, False, *arguments)
    dq_norm, _ = head_norm_gradients(dq, q_norm, q.shape[2], width)
    dk_norm, _ = head_norm_gradients(dkv, k_norm, q.shape[2], width)
    release(q, saved.k, saved.v, saved.h, dh)
    dx, *dq_proj = linear_gradients(dq.flatten(1), rows, saved.weight, of_q, rows_dtype, dtype)
    of_kv, context = [of_context, of_keys, of_values], saved.context
    dcontext, *dkv_proj = linear_gradients(
        dkv, context, saved.kv_weight, of_kv, ctx.context_dtype, dtype
    )
    return dx, dcontext, (*dq_proj, *dkv_proj), (dq_norm, dk_norm)


def head_norm_gradients(
    grads: Tensor, norm: HeadNorm, head_dim: int, width: int
) -> tuple[Tensor | None, Tensor | None]:
    """Replace the gradient of the normed heads, the first columns of `grads`, by that of the
    projection.

    Returns:
        The gradients of the weights of the norms of the first `width` columns and of those behind,
        which there may be none of. None without a norm.
    """
    if norm.x is None:
        return None, None
    sums = normed_columns_gradients(grads, norm.x, norm.weight, norm.rstd)
    dq, dk = (torch.unflatten(x, 0, (-1, head_dim)).sum(0) for x in sums.tensor_split([width]))
    return dq.to(norm.weight.dtype), dk.to(norm.weight.dtype)


# -- what a fused kernel may compute ---------------------------------------------------------------


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float | None,
    dtype: torch.dtype,
    groups: int,
    end: Tensor | None,
    columns: int = 0,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of each of `groups` groups of columns of rows, computed in fp32, in dtype, with
    `columns` behind them as in `gemm_rows`; 1 / rms of each. Rows from end[-1] on are 0."""
    from jagged_kernels.rows.op import triton_row_norm

    if eps is None:  # as in torch
        eps = torch.finfo(torch.promote_types(x.dtype, weight.dtype)).eps
    normed, _, rstd = triton_row_norm(x, weight, None, dtype, eps, groups, True, columns, end)
    return normed, rstd


def rms_norm_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor, end: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of x, plus the gradient of the residual, in x's dtype; of weight in its dtype."""
    from jagged_kernels.rows.op import triton_row_norm_backward

    # kernels read no mean of this norm, and its eps is in rstd
    dx, sums = triton_row_norm_backward(dy, x, rstd, rstd, weight, residual, 0.0, True, end)
    return dx, sums[0].to(weight.dtype)


def normed_columns_gradients(grads: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """Replace the first columns of `grads`, the gradient of the norm of x, by that of x. The
    gradient of weight, in fp32."""
    from jagged_kernels.rows.op import triton_row_norm_packed_backward

    return triton_row_norm_packed_backward(grads, 0, x, rstd, rstd, weight, 0.0, True)[0]
