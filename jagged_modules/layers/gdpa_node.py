"""JaggedGDPA and GDPABlock as one autograd node, and as part of an encoder's.

    [q | k | v] = x [W_q | W_kv]ᵀ + [b_q | b_kv]      each also learned, k and v from a context
    q, k = norm(q), norm(k)                           with qk_norm, per head
    h = dropout(attention(q, k, v)),  y = h W_oᵀ + b_o

A block has a norm and a residual around this: see `residual_node.py`.

The rows and the parameters are cast once, to the dtype of the GEMMs. Rows that give queries, keys
and values have one projection, and the attention's backward writes its gradient as one tensor. The
gradients of rows without a norm leave their GEMM in the rows' dtype, and those of the weights in
theirs. Rows behind the last segment are cleared in these passes; see `functional/tail.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..bias import RelativeBias
from ..functional.attention import attention_backward, attention_forward, packed_gradients
from ..functional.attention_call import AttentionOptions, parsed_call
from ..functional.nodes import apply, differentiable_once, release, reshaped_result
from ..functional.tail import with_zero_tail
from ..segments import RowSegments
from ..tracing import as_constant
from .norms import NormOptions, RMSNorm, norm_parameters
from .one_node import (
    bias_columns,
    cast,
    dropout_gradient,
    dropped,
    gemm_rows,
    in_training,
    linear,
    linear_gradients,
    node_dtype,
    parameters_of,
    rounded_gemm_rows,
    rows_for_attention,
)
from .residual_node import (
    Around,
    Residual,
    Stream,
    normed_columns_gradients,
    residual_gradients,
    row_norm,
    with_residual,
)

if TYPE_CHECKING:
    from .gdpa import JaggedGDPA


class NodeInputs(NamedTuple):
    """The tensors that may have gradients.

    Attributes:
        x: `[L, E]`, or learned queries `[S, H, D]`. context: `[M, E]`, or None.
        norm, norm_bias: of a block's norm; None without one.
        q_weight, q_bias, out_weight, out_bias: of the projections; None for learned queries.
        keys, values: weight and bias of the projection of keys and values, or learned ones
            `[W, Hkv, D]`.
        q_norm, k_norm: weights `[D]` of the norms of queries and keys, or None.
    """

    x: Tensor
    context: Tensor | None
    norm: Tensor | None
    norm_bias: Tensor | None
    q_weight: Tensor | None
    q_bias: Tensor | None
    keys: Tensor
    values: Tensor
    out_weight: Tensor
    out_bias: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class Sides(NamedTuple):
    """What `JaggedGDPA._sides` gives: rows of a context `[M, E]`, or None; ends of the rows of x
    and of the context; segments and options of the attention."""

    context: Tensor | None
    ends: tuple[Tensor | None, Tensor | None]
    queries: Any
    keys: RowSegments | None
    options: AttentionOptions


class GDPACall(NamedTuple):
    """What the node computes. dtype: of the GEMMs' operands. ends: of the rows of x and of the
    context. dropout: probability, 0 outside of training. residual: of a block. qk_eps: of the norms
    of q and k."""

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ends: tuple[Tensor | None, Tensor | None]
    queries: RowSegments | None
    keys: RowSegments | None
    options: AttentionOptions
    dropout: float
    residual: Residual | None
    qk_eps: float | None


def gdpa_dtype(
    layer: JaggedGDPA, x: Tensor, bias: RelativeBias | None, *others: nn.Module
) -> torch.dtype | None:
    """The dtype in which `gdpa_node` computes the layer's result for x, by the modules' parameters;
    None where these and the `others` are called."""
    config = layer.config
    if bias is not None:
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
    of_queries = [] if config.num_seeds else [layer.q_proj]
    of_keys = [] if config.num_weights else [layer.kv_proj]
    linears = [*of_queries, *of_keys, layer.out_proj]
    if type(layer.dropout) is not nn.Dropout:
        return None
    return node_dtype(x, linears, layer.dropout, *norms, *others)


def gdpa_node(
    layer: JaggedGDPA, x: Tensor, norm: nn.RMSNorm | None, dtype: torch.dtype, sides: Sides
) -> Tensor:
    """The layer's result for x `[L, E]`, or for its seeds, in the operands' dtype. With a norm, a
    block's, in the wider of this dtype and x's."""
    residual = None
    if norm is not None:
        residual = Residual(dtype, NormOptions.of(norm), columns=bias_columns(x, dtype))
    arguments = node_arguments(layer, x, norm, dtype, sides, residual)
    return apply(_Node, *arguments)


def node_arguments(
    layer: JaggedGDPA,
    x: Tensor,
    norm: nn.Module | None,
    dtype: torch.dtype,
    sides: Sides,
    residual: Residual | None,
) -> tuple[Any, ...]:
    """`NodeInputs` and a `GDPACall`, for what `gdpa_node` takes."""
    config, dropout = layer.config, layer.dropout
    of_queries: Any = (None, None) if config.num_seeds else parameters_of(layer.q_proj)
    if config.num_weights:
        of_keys: Any = layer.key_weights, layer.value_weights
    else:
        of_keys = parameters_of(layer.kv_proj)
    projections: list[Any] = [*of_queries, *of_keys, *parameters_of(layer.out_proj)]
    of_heads: tuple[Any, Any] = (None, None)
    qk_eps: Any = None
    if config.qk_norm:
        of_heads, qk_eps = (layer.q_norm.weight, layer.k_norm.weight), layer.q_norm.eps
    weight, bias = (None, None) if norm is None else norm_parameters(norm)
    inputs = NodeInputs(x, sides.context, weight, bias, *[*projections, *of_heads])
    call = GDPACall(
        dtype, layer.num_heads, layer.num_kv_heads, layer.head_dim, *sides[1:],
        in_training(dropout, dropout.p), residual,
        None if qk_eps is None else as_constant(qk_eps),
    )  # fmt: skip
    return *inputs, call


class _Saved(NamedTuple):
    """What the backward of the attention reads, besides its segments. weight: of q, or of q, k and
    v. kv_weight: of k and v from a context. out: with softmax. kept: what dropout keeps. of_q: of
    `HeadNorm`, of q, or of q and k; of_k: of k from a context. None without: weight for learned
    queries."""

    rows: Tensor
    context: Any
    weight: Any
    kv_weight: Any
    q: Tensor
    k: Tensor
    v: Tensor
    out: Any
    lse: Tensor
    h: Tensor
    kept: Any
    out_weight: Tensor
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
        y, saved = attention_part(ctx, inputs, call)
        ctx.save_for_backward(*saved)
        return y.x if y.added is None else y.joined(call.ends[0])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *attention_part_gradients(ctx, Stream(dy), ctx.saved_tensors), None


def attention_part(
    ctx: Any, inputs: NodeInputs, call: GDPACall
) -> tuple[Stream, list[Tensor | None]]:
    """The result of a layer or block, and what `attention_part_gradients` reads besides ctx."""
    ctx.x_dtype, ctx.dtype, ctx.rows = inputs.x.dtype, inputs.out_weight.dtype, inputs.x.shape[0]
    ctx.residual, (end, _) = call.residual, call.ends

    def part(rows: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        operands, saved = _attended(ctx, rows, inputs, call)
        return linear(*operands), saved

    if call.residual is None:
        is_learned = inputs.q_weight is None
        rows = inputs.x
        if not is_learned:
            rows = rounded_gemm_rows(rows, end, call.dtype)
        y, saved = part(rows)
        if end is not None:
            y = y[: ctx.rows]
            y = with_zero_tail(reshaped_result(y, y.shape), end)
        return Stream(y), [*Around(end), *saved]
    if call.residual.of_norm:  # keys and values of rows without the norm
        inputs = inputs._replace(context=inputs.x)
    norm: Any = inputs.norm, inputs.norm_bias
    given = Stream(inputs.x), norm, call.residual, end, any(ctx.needs_input_grad)
    stream, around, saved = with_residual(*given, part)
    return stream, [*around, *saved]


def attention_part_gradients(
    ctx: Any, dy: Stream, saved: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """Of `NodeInputs`, the node's first inputs. saved: by `attention_part`."""
    wanted: Any = NodeInputs(*ctx.needs_input_grad[: len(NodeInputs._fields)])
    around, saved = Around.first_of(saved)
    of_attention, segments = _Saved(*saved[: len(_Saved._fields)]), saved[len(_Saved._fields) :]
    if ctx.residual is None:
        (end, *_), h = around, of_attention.h
        grad = gemm_rows(dy.x, end, h.dtype, None if end is None else h.shape[0], False)
        given = (grad, None), of_attention, list(segments), wanted, wanted.x
        dx, others = _gradients(ctx, *given)
        return dx, others[0], None, None, *others[1:]
    if takes_x := ctx.residual.of_norm:
        wanted = wanted._replace(context=wanted.x)

    def part(
        dy: Tensor, sums: Tensor | None, of_rows: bool
    ) -> tuple[Tensor | None, Tensor | None, tuple[Any, ...]]:
        given = (dy, sums), of_attention, list(segments), wanted, of_rows
        drows, others = _gradients(ctx, *given)
        return drows, others[0] if takes_x else None, others

    needs = wanted.x, wanted.norm or wanted.norm_bias
    stream, of_norm, others = residual_gradients(dy, around, ctx.residual, needs, part)
    dx = None if stream is None else stream.joined(None)  # its terms are 0 behind the end
    return dx, None if takes_x else others[0], *of_norm, *others[1:]


def _attended(
    ctx: Any, rows: Tensor, inputs: NodeInputs, call: GDPACall
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor | None]]:
    """The operands of the output's projection, in its dtype, and what a backward reads: nothing
    without one, so that the other projections are free when this returns."""
    context, (_, context_end) = inputs.context, call.ends
    ctx.of_context = None if context is None else (context.dtype, context.shape[0])
    ctx.is_learned, ctx.dropout = inputs.keys.dim() == 3, call.dropout
    if context is not None:
        context = rounded_gemm_rows(context, context_end, call.dtype)
    given = [x for x in inputs[4:10] if x is not None]
    *parameters, out_weight, out_bias = cast(call.dtype, *given)
    (q, k, v), weights, of_heads = _projected(rows, context, inputs, parameters, call)
    attention = parsed_call(q, k, v, call.queries, call.keys, call.options).call
    trains = any(ctx.needs_input_grad)
    out, lse, (q, k, v, segments, *ctx.options) = attention_forward(attention, trains)
    h, kept = dropped(out.flatten(1), call.dropout)
    of_softmax = out if call.options.activation == "softmax" else None
    saved = [rows, context, *weights, q, k, v, of_softmax, lse, h, kept, out_weight]
    saved += [*of_heads, *segments]  # as in _Saved
    return (h, out_weight, out_bias), saved if trains else []


def _projected(
    rows: Tensor,
    context: Tensor | None,
    inputs: NodeInputs,
    parameters: list[Tensor],
    call: GDPACall,
) -> tuple[list[Tensor], tuple[Tensor | None, Tensor | None], tuple[Any, ...]]:
    """q, k and v `[rows, heads, head_dim]`, and the weights of their projections and the norms of
    their heads, as `_Saved` has them. parameters: those of q_weight, q_bias, keys and values that
    are not None, cast."""
    *of_queries, keys, values = parameters
    (end, context_end), num_rows = call.ends, inputs.x.shape[0]
    of_q, of_k = (inputs.q_norm, call.num_heads), (inputs.k_norm, call.num_kv_heads)

    def in_heads(*parts: Tensor) -> list[Tensor]:
        return [torch.unflatten(x, 1, (-1, call.head_dim)) for x in parts]

    if context is None and keys.dim() == 2:
        weight, bias = (torch.cat(pair) for pair in zip(of_queries, (keys, values)))
        width = (call.num_heads + call.num_kv_heads) * call.head_dim
        qk, v = rows_for_attention(linear(rows, weight, bias), num_rows, end).tensor_split(
            [width], 1
        )
        qk, norms = _normed(qk, [of_q, of_k], call)
        q, k = qk.tensor_split([call.num_heads * call.head_dim], 1)
        return in_heads(q, k, v), (weight, None), (*norms, *HeadNorm())
    queries = rows.flatten(1)
    if of_queries:
        queries = rows_for_attention(linear(rows, *of_queries), num_rows, end)
    q, q_norm = _normed(queries, [of_q], call)
    q_weight = of_queries[0] if of_queries else None
    if context is None:
        return [*in_heads(q), keys, values], (q_weight, None), (*q_norm, *HeadNorm())
    given: Any = inputs.context
    k, v = rows_for_attention(linear(context, keys, values), given.shape[0], context_end).chunk(
        2, 1
    )
    k, k_norm = _normed(k, [of_k], call)
    return in_heads(q.to(call.dtype), k, v), (q_weight, keys), (*q_norm, *k_norm)


def _normed(
    x: Tensor, norms: list[tuple[Tensor | None, int]], call: GDPACall
) -> tuple[Tensor, HeadNorm]:
    """The norm of each head of x, columns of a projection. norms: weight and number of heads; a
    weight of None: no norm."""
    weights = [weight.repeat(heads) for weight, heads in norms if weight is not None]
    if not weights:
        return x, HeadNorm()
    weight, groups = torch.cat(weights), sum(heads for _, heads in norms)
    norm = NormOptions(call.qk_eps, groups, True)
    normed, _, rstd = row_norm(x, weight, None, call.dtype, norm)
    return normed, HeadNorm(x, rstd, weight)


def _gradients(
    ctx: Any,
    grad: tuple[Tensor, Tensor | None],
    saved: _Saved,
    segments: list[Tensor | None],
    wanted: Any,
    of_rows: bool,
) -> tuple[Tensor | None, tuple[Any, ...]]:
    """Gradients of the rows that are projected; and of the context and of `NodeInputs`' q_weight to
    k_norm. grad: of the result, in the operands' dtype, and the sum of its rows, or None. wanted:
    of which, as `NodeInputs`; and of_rows."""
    dy, sums = grad
    projections = wanted.q_weight, wanted.q_bias, wanted.keys, wanted.values
    needs = any((of_rows, wanted.context, *projections, wanted.q_norm, wanted.k_norm))
    of_out, h = [needs, wanted.out_weight, wanted.out_bias], saved.h
    of_gemm = saved.out_weight, of_out, h.dtype, ctx.dtype
    frees = saved.out is None  # else h may be out
    dh, *dout = linear_gradients(dy, h, *of_gemm, frees, sums=sums)
    if ctx.residual is not None and dy.dtype != ctx.x_dtype:  # then dy is a copy
        release(dy)
    if dh is None:
        return None, (*[None] * 5, *dout, None, None)
    dh = dropout_gradient(dh, saved.kept, ctx.dropout)
    drows, dcontext, dprojections, of_heads = _attention_gradients(
        ctx, dh, saved, segments, wanted, of_rows
    )
    return drows, (dcontext, *dprojections, *dout, *of_heads)


def _attention_gradients(
    ctx: Any, dh: Tensor, saved: _Saved, segments: list[Tensor | None], wanted: Any, of_rows: bool
) -> tuple[Any, Any, tuple[Any, ...], tuple[Any, Any]]:
    """Gradients of rows, context, `NodeInputs`' q_weight to values, and q_norm and k_norm."""
    rows, q, dtype = saved.rows, saved.q, ctx.dtype
    do, results = torch.unflatten(dh, 1, (q.shape[1], -1)), [saved.out, saved.lse]
    arguments = q, saved.k, saved.v, segments, *ctx.options
    of_q: list[Any] = [of_rows, wanted.q_weight, wanted.q_bias]
    of_keys, of_values = wanted.keys, wanted.values
    is_block, width = ctx.residual is not None, q.shape[1] * q.shape[2]
    rows_dtype = rows.dtype if is_block else ctx.x_dtype
    # the norm's result, or a copy
    is_own = is_block and (ctx.residual.norm_first or rows.dtype != ctx.x_dtype)
    q_norm, k_norm = HeadNorm(*saved[-6:-3]), HeadNorm(*saved[-3:])
    if ctx.is_learned:
        dq, dk, dv, *_ = attention_backward(do, results, *arguments)
        of_queries = saved.weight, of_q, rows_dtype, dtype
        dx, *dq_proj = linear_gradients(dq.flatten(1), rows, *of_queries, num_rows=ctx.rows)
        return dx, None, (*dq_proj, dk.to(dtype), dv.to(dtype)), (None, None)
    if saved.context is None:
        of_dqkv = rows.shape[0], rows.shape[0]
        dqkv, _ = packed_gradients(do, results, True, *arguments, rows=of_dqkv)
        dq_norm, dk_norm = head_norm_gradients(dqkv[: q.shape[0]], q_norm, q.shape[2], width)
        release(q, saved.k, saved.v, saved.h, dh)
        of_qkv = [of_q[0], of_q[1] or of_keys, of_q[2] or of_values]
        of_gemm = saved.weight, of_qkv, rows_dtype, dtype, is_own, ctx.rows
        dx, *packed = linear_gradients(dqkv, rows, *of_gemm)
        (dq_weight, dkeys), (dq_bias, dvalues) = (
            (None, None) if x is None else x.tensor_split([width]) for x in packed
        )
        return dx, None, (dq_weight, dq_bias, dkeys, dvalues), (dq_norm, dk_norm)
    num_rows = None if saved.weight is None else (rows.shape[0], saved.context.shape[0])
    dq, dkv = packed_gradients(do, results, False, *arguments, rows=num_rows)
    dq_norm, _ = head_norm_gradients(dq[: q.shape[0]], q_norm, q.shape[2], width)
    dk_norm, _ = head_norm_gradients(dkv[: saved.k.shape[0]], k_norm, q.shape[2], width)
    release(saved.k, saved.v, saved.h, dh)
    if saved.weight is None:
        dx, dq_proj = dq.view(rows.shape).to(rows_dtype), [None, None]
    else:
        release(q)
        of_queries = saved.weight, of_q, rows_dtype, dtype
        dx, *dq_proj = linear_gradients(dq, rows, *of_queries, num_rows=ctx.rows)
    of_kv, (context_dtype, num_rows) = [wanted.context, of_keys, of_values], ctx.of_context
    dcontext, *dkv_proj = linear_gradients(
        dkv, saved.context, saved.kv_weight, of_kv, context_dtype, dtype, num_rows=num_rows
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
