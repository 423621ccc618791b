"""JaggedTargetAttention as one autograd node.

    q = targets W_qᵀ + b_q,  [k | v] = history W_kvᵀ + b_kv
    h = dropout(attention(q, k, v)),  y = h W_oᵀ + b_o

Rows and parameters are cast once, to the dtype of the GEMMs; rows behind the last segment are
cleared in the same pass. Queries are grouped by user after their projection. The attention's
backward writes the gradients of k and v as one tensor, that of their projection. The gradients of
rows and of weights leave their GEMM in the rows' and the weights' dtype.

On the CPU, where users have few candidates, the history is not projected:

    scale · q (W_k x + b_k) = scale · (W_kᵀ q) x + c,  Σ p (W_v x + b_v) = W_v (Σ p x) + b_v Σ p

c is a constant of the segment, which softmax takes away. So attention reads the history's rows
themselves, and queries and sums are projected for each head. With n candidates, a row takes
2 · n · H · E multiplications forward; its projection alone would take 2 · E².
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jagged_kernels.schedule.host import TileSchedule
from torch import Tensor, nn

from ..cpu.buckets import groups
from ..cpu.order import by_length, rows_back
from ..cpu.pooling import pool, pooled_gradients
from ..functional.attention import attention_forward, packed_gradients
from ..functional.attention_call import AttentionOptions, parsed_call
from ..functional.nodes import apply, differentiable_once, release, reshaped_result
from ..functional.tail import runs_kernels, with_zero_tail
from ..masks import AttentionMask
from ..segments import RowSegments, are_single, values_are_checkable
from ..settings import is_batch_invariant
from .one_node import (
    cast,
    dropout_gradient,
    dropped,
    first_rows,
    gemm_rows,
    in_training,
    linear,
    linear_gradients,
    parameters_of,
    rounded_gemm_rows,
    rows_for_attention,
)
from .targets import Targets

if TYPE_CHECKING:
    from .target_attention import JaggedTargetAttention


MANY = 2**20  # elements, from which torch's gather takes twice the time that their bytes do


class TargetCall(NamedTuple):
    """What a node of targets computes. dtype: of the GEMMs' operands. dropout, attention_dropout:
    probabilities, 0 outside of training. mask: set by `self_target_node.py` alone, for the
    history's attention to itself."""

    given: Targets
    num_heads: int
    dtype: torch.dtype
    schedule: TileSchedule | None = None
    dropout: float = 0.0
    attention_dropout: float = 0
    mask: AttentionMask | None = None


def target_node(
    layer: JaggedTargetAttention,
    linears: Sequence[nn.Linear],
    given: Targets,
    history: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The layer's result for the rows of these targets of one level, in the operands' dtype.
    linears: its projections. history: `[L, E]`."""
    if history.is_cpu and _has_few_candidates(layer, given, history, dtype):
        return _attend_without_projection(layer, given, history)
    schedule = given.levels[0].schedule(layer.num_heads, layer.head_dim, dtype)
    of_result = layer.dropout
    dropout = in_training(of_result, of_result.p)
    of_weights = in_training(layer, layer.attention_dropout)
    call = TargetCall(given, layer.num_heads, dtype, schedule, dropout, of_weights)
    return apply(_Node, given.rows, history, *parameters_of(*linears), call)


class _Saved(NamedTuple):
    """What the backward reads, besides the attention's segments. end: of the targets. The last
    three: of `Order`."""

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
    history_rows: Tensor | None


class Order(NamedTuple):
    """The order in which rows are computed: targets of one user, and on the CPU segments of equal
    lengths, are adjacent.

    Attributes:
        queries, keys: the segments in this order.
        order, inverse: of the targets' rows, or of blocks of as many rows each; None: as they are.
        history_rows: of the history, in this order; None: as they are.
    """

    queries: RowSegments
    keys: RowSegments
    order: Tensor | None = None
    inverse: Tensor | None = None
    history_rows: Tensor | None = None

    @classmethod
    def of(cls, given: Targets) -> Order:
        (level,) = given.levels
        queries, keys, index = level.queries, level.keys, level.candidates
        order, inverse = (None, None) if index is None else (index.order, index.inverse)
        found = None
        offsets = queries.offsets, keys.offsets
        if given.rows.is_cpu and values_are_checkable(keys.offsets) and not are_single(*offsets):
            found = by_length(*offsets)
        if found is None:
            return cls(queries, keys, order, inverse)
        rows = found.q_rows
        if order is not None:
            n_q = given.rows.shape[1]
            rows = (order[:, None] * n_q + torch.arange(n_q, device="cpu")).flatten()[rows]
        places = torch.arange(len(rows), device="cpu")
        inverse = torch.empty_like(rows).index_copy_(0, rows, places)
        queries, keys = RowSegments(found.q_offsets), RowSegments(found.kv_offsets)
        return cls(queries, keys, rows, inverse, found.kv_rows)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, call = arguments
        targets, *_ = inputs
        shape, (*operands, uncleared) = targets.shape[:-1], _attended(ctx, inputs, call)
        y, end = linear(*operands), call.given.end
        if uncleared:
            # in blocks as the end counts them
            rows = y if shape.numel() == shape[0] else y.view(*shape, y.shape[1])
            y, end = with_zero_tail(rows, end, *uncleared).flatten(0, -2), None
        y = first_rows(y, shape.numel())  # without what gemm_rows added
        return with_zero_tail(reshaped_result(y, [*shape, y.shape[1]]), end)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        count, tensors = len(_Saved._fields), ctx.saved_tensors  # checkpointing allows one read
        saved, segments = _Saved(*tensors[:count]), list(tensors[count:])
        of_targets, of_history, *wanted = ctx.needs_input_grad[:-1]
        of_q, of_keys, of_out = wanted[:2], wanted[2:4], wanted[4:]
        of_targets_dtype, of_history_dtype, dtype = ctx.dtypes
        needs_dh, h = any((of_targets, of_history, *wanted[:4])), saved.h
        num_rows = None if saved.end is None else h.shape[0]
        dy = gemm_rows(_rows(dy, saved.end), saved.end, h.dtype, num_rows, has_columns=False)
        dy = dy.flatten(0, -2)
        dh, *dout = linear_gradients(dy, h, saved.out_weight, [needs_dh, *of_out], h.dtype, dtype)
        if dh is None:
            return *[None] * 6, *dout, None
        dh = dropout_gradient(dh, saved.kept, ctx.dropout)
        do = in_order(dh, saved.order).view_as(saved.out)
        attention = saved.q, saved.k, saved.v, segments, *ctx.options
        # `in_order` copies dq, and takes the queries' rows alone
        of_dq = saved.targets.shape[0] if saved.inverse is None else saved.q.shape[0]
        rows = of_dq, saved.history.shape[0]
        queries, keys = ctx.shape.numel(), saved.k.shape[0]
        dq, dkv = packed_gradients(do, [saved.out, saved.lse], False, *attention, rows=rows)
        release(saved.q, saved.k, saved.out, dh, do)
        of_q, of_keys = [of_targets, *of_q], [of_history, *of_keys]
        dq = in_order(dq, saved.inverse)
        dtargets, *dq_proj = linear_gradients(
            dq, saved.targets, saved.q_weight, of_q, of_targets_dtype, dtype, num_rows=queries
        )
        if dtargets is not None:
            dtargets = dtargets.view(*ctx.shape, dtargets.shape[1])
        dhistory, *dkv_proj = linear_gradients(
            dkv, saved.history, saved.kv_weight, of_keys, of_history_dtype, dtype, num_rows=keys
        )
        if dhistory is not None:
            dhistory = rows_back(dhistory, saved.history_rows, keys)
        return dtargets, dhistory, *dq_proj, *dkv_proj, *dout, None


def _attended(
    ctx: Any, inputs: Sequence[Tensor], call: TargetCall
) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """The operands of the output's projection, and tensors to be cleared with its result. Saves
    what a backward reads; without one, the other projections are free when this returns. inputs:
    targets in any of their forms, the history's rows `[L, E]`, and weights and biases."""
    end, dtype, heads = call.given.end, call.dtype, call.num_heads
    given_targets, given_history, *parameters = inputs
    q_weight, q_bias, kv_weight, kv_bias, out_weight, out_bias = cast(dtype, *parameters)
    queries, keys, order, inverse, history_rows = Order.of(call.given)
    targets = rounded_gemm_rows(_rows(given_targets, end), end, dtype).flatten(0, -2)
    history = in_order(given_history, history_rows)  # on the CPU alone
    history = rounded_gemm_rows(history, call.given.levels[0].end, dtype)
    num_rows = given_targets.shape[:-1].numel()
    q = rows_for_attention(linear(targets, q_weight, q_bias), num_rows, end)
    q = in_order(q, order)
    q = q.view(q.shape[0], heads, q.shape[1] // heads)
    # keys are always cut: the backward counts the history's rows by them
    k, v = keys_and_values(linear(history, kv_weight, kv_bias), given_history.shape[0], heads)
    options = AttentionOptions(schedule=call.schedule, dropout_p=call.attention_dropout)
    attention = parsed_call(q, k, v, queries, keys, options).call
    trains = any(ctx.needs_input_grad)
    # The projection takes each row by itself, so what it takes may be cleared behind it.
    clears = bool(call.dropout) or inverse is not None or not runs_kernels(q)
    results = attention_forward(attention, trains, clears)
    out, lse, (q, k, v, segments, *ctx.options) = results
    uncleared = [(out, queries.offsets)] if attention.segments.has_tail and not clears else []
    h, kept = dropped(in_order(out.flatten(1), inverse), call.dropout)
    saved = _Saved(
        targets, history, q_weight, kv_weight, q, k, v, out, lse, h, kept, out_weight,
        end, order, inverse, history_rows,
    )  # fmt: skip
    ctx.save_for_backward(*saved, *segments)
    ctx.shape, ctx.dropout = given_targets.shape[:-1], call.dropout
    ctx.dtypes = given_targets.dtype, given_history.dtype, parameters[0].dtype
    return h, out_weight, out_bias, uncleared


def keys_and_values(kv: Tensor, num_rows: int, heads: int) -> Sequence[Tensor]:
    """k and v `[num_rows, heads, dim]`, views of the first rows of their contiguous projection. One
    view for each takes the host a third of the time of operators that a graph can change."""
    dim = kv.shape[1] // (2 * heads)
    if torch.compiler.is_compiling():
        return first_rows(kv, num_rows).view(num_rows, 2, heads, dim).unbind(1)
    shape, strides = (num_rows, heads, dim), (kv.shape[1], dim, 1)
    return kv.as_strided(shape, strides), kv.as_strided(shape, strides, heads * dim)


def _rows(x: Tensor, end: Tensor | None) -> Tensor:
    """x as rows, unless those before the end are counted in blocks of several."""
    return x if end is not None and x.dim() == 3 and x.shape[1] > 1 else x.flatten(0, -2)


def in_order(x: Tensor, order: Tensor | None, out: Tensor | None = None) -> Tensor:
    """The rows of x `[rows, width]`, or blocks of as many rows each, in this order. out: the
    result, of rows of any stride, if it is given."""
    if order is None or not x.shape[0]:
        return x if out is None else out.copy_(x)
    single = x.shape[0] == order.shape[0]
    rows = x if single else torch.unflatten(x, 0, (order.shape[0], -1))
    if x.numel() >= MANY and runs_kernels(x) and (out is None or single):
        from jagged_kernels.common.tail import kept_rows_on_device

        return kept_rows_on_device(rows, None, order=order, out=out).view(x.shape)
    # on a GPU, an index takes half of the host time of index_select; on the CPU, copies take longer
    ordered = rows[order] if x.is_cuda else rows.index_select(0, order)
    ordered = ordered if single else ordered.view(x.shape)
    return ordered if out is None else out.copy_(ordered)  # graphs take no strided `out=`


def _has_few_candidates(
    layer: JaggedTargetAttention, given: Targets, history: Tensor, dtype: torch.dtype
) -> bool:
    """Whether `_attend_without_projection` computes the layer on the CPU, and takes less time than
    projections of the history `[L, E]`. dtype: of the projections."""
    (level,) = given.levels
    if history.dtype != dtype or dtype.itemsize < 4 or not values_are_checkable(level.keys.offsets):
        return False
    if in_training(layer, layer.attention_dropout) or is_batch_invariant():
        return False
    num_rows, width = history.shape
    if width < 32:  # one query of a user takes less time without GEMMs
        return False
    queries, keys = level.queries.offsets.diff(), level.keys.offsets.diff()
    if queries.shape != keys.shape or num_rows < 2 * int(queries.sum()):
        return False
    return 2 * layer.num_heads * int((queries * keys).sum()) <= width * num_rows


def _attend_without_projection(
    layer: JaggedTargetAttention, given: Targets, history: Tensor
) -> Tensor:
    """The layer's result for targets and their histories `[L, E]`."""
    heads, (level,), kv_proj = layer.num_heads, given.levels, layer.kv_proj
    offsets = level.queries.offsets, level.keys.offsets
    q = level.grouped(torch.unflatten(layer.q_proj(given.rows), -1, (heads, -1)))
    weights = torch.unflatten(kv_proj.weight, 0, (2, heads, -1))  # [2, H, D, E]
    biases = torch.unflatten(kv_proj.bias, 0, (2, heads, 1, -1))
    of_keys = (q.transpose(0, 1) @ weights[0]).transpose(0, 1)  # [N, H, E]
    sums = apply(_Pooled, of_keys, history, *offsets, q.shape[2] ** -0.5).transpose(0, 1)
    out = torch.baddbmm(biases[1], sums, weights[1].mT).transpose(0, 1)
    queries, keys = (x.diff() for x in offsets)
    out = out.masked_fill(torch.repeat_interleave(keys == 0, queries)[:, None, None], 0)
    return layer.out_proj(layer.dropout(level.ungrouped(out).flatten(-2)))


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, x: Tensor, q_offsets: Tensor, offsets: Tensor, scale: float
    ) -> Tensor:
        of_q, of_x, ctx.rows = None, None, (q.shape[0], x.shape[0])
        order = by_length(q_offsets, offsets, share=0)
        if order is not None:
            q_offsets, of_q, offsets, of_x = order
        ctx.blocks, ctx.scale = list(groups(q_offsets, offsets)), scale
        q, x = in_order(q.detach(), of_q).contiguous(), in_order(x.detach(), of_x).contiguous()
        u, p = pool(q, x, ctx.blocks, scale)
        ctx.save_for_backward(q, x, p, of_q, of_x)
        return rows_back(u, of_q, ctx.rows[0])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, du: Tensor) -> tuple[Tensor | None, ...]:
        q, x, p, *orders = ctx.saved_tensors
        operands, wanted = (q, x, p), ctx.needs_input_grad[:2]
        du = in_order(du, orders[0]).contiguous()
        found = pooled_gradients(du, operands, ctx.blocks, ctx.scale, wanted)
        gradients = zip(found, orders, ctx.rows)
        return *(None if dx is None else rows_back(dx, *at) for dx, *at in gradients), *[None] * 3
