"""Jagged attention on the CPU: the operator and its backward.

Segments with equal lengths form a group, and `attention_math` computes one group at a time. Nothing
is padded. Adjacent segments of a group are read in place; others are gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jagged_kernels.attention.autograd import (
    backward_fake,
    differentiate_attention,
    packed_backward_fake,
)
from jagged_kernels.attention.params import (
    BACKWARD_SCHEMA,
    FORWARD_SCHEMA,
    PACKED_BACKWARD_SCHEMA,
    Arguments,
    AttentionCall,
    AttentionParams,
    PackedGradients,
    pack,
    unpack,
)
from jagged_kernels.common.autograd import refuse_twice
from jagged_kernels.common.one_thread import one_thread
from torch import Tensor
from torch.nn.functional import pad

from . import one_query
from .attention_bias import TableGradients
from .attention_math import (
    dot_products_are_finite,
    softmax_backward,
    softmax_forward,
    unfused_backward,
    unfused_forward,
)
from .buckets import compute_dtype
from .groups import Group, groups_of, is_by_rows, put, take
from .one_query import has_one_query_each
from .operators import host_operator
from .shares import in_shares


def attention_cpu(call: AttentionCall) -> Tensor:
    """Jagged attention. fp16 and bf16 are computed in fp32 and rounded once. batch_invariant:
    segments, and without a mask query rows, are computed one by one."""
    return _OPERATOR(*pack(call))[0]


def cpu_forward(call: AttentionCall) -> tuple[Tensor, Tensor, Arguments]:
    """`attention_cpu` in a layer's autograd node: out, lse, `cpu_packed_backward`'s arguments."""
    arguments = pack(call)
    return *_OPERATOR(*arguments), arguments


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The body of the operator: the output `[rows, H, Dv]`, and the log-sum-exp of the scores in
    fp32 or fp64, `[rows, H, 1]` with softmax, otherwise `[0, H, 1]`."""
    with one_thread() as threads:
        return _attend(unpack(*arguments)[0], threads)


def _attend(call: AttentionCall, threads: int) -> tuple[Tensor, Tensor]:
    q, k, v, segments, params, _ = call
    if has_one_query_each(call):
        return _attend_by_one_query(call, threads)
    out, lse = (x.zero_() for x in _empty_outputs(call))
    queries, keys, values, results = _compute_operands(params.activation, q, k, v, out)
    is_fused = _is_fused(params)
    finite = is_fused and dot_products_are_finite(params.scale, queries, keys, values)

    def compute(groups: list[Group]) -> None:
        for group in groups:
            operands, rule = group.operands(queries, keys, values), group.rule(params)
            if not is_fused:
                block, block_lse = unfused_forward(*operands, rule)
            else:
                block, block_lse = softmax_forward(*operands, rule, finite)
            if block_lse is not None:
                put(lse, group.rows, block_lse[..., None])
            put(results, group.rows, block)

    groups = list(groups_of(q.shape[1], segments, params))
    in_shares(compute, groups, _cost(q, v), threads, is_fused and _is_one_call(params))
    return _result_like(out, _scaled(results, segments.q_offsets, params)), lse


def _backward(do: Tensor, results: list[Tensor | None], *arguments: Any) -> tuple[Tensor, ...]:
    """The body of the backward's operator. results: of the forward; only softmax reads them.
    Returns gradients of q, k, v and the tables of the bias, each in its operand's shape and dtype;
    `[0]` for a table that gets none."""
    call = unpack(*arguments)[0]
    with one_thread() as threads:
        dq, dk, dv, *dtables = _gradients(do, results, call, threads)
    dq, dk, dv = (_result_like(x, dx) for x, dx in zip(call[:3], (dq, dk, dv)))
    return dq, dk, dv, *dtables


def _packed_backward(
    do: Tensor,
    results: list[Tensor | None],
    of_queries: Tensor,
    of_keys: Tensor | None,
    columns: list[int],
    *arguments: Any,
) -> tuple[Tensor, Tensor]:
    """The body of the packed backward's operator."""
    call = unpack(*arguments)[0]
    parts = PackedGradients(of_queries, of_keys, columns).parts(*call[:3], call.segments.q_shared)
    if not _are_all_stored(call):
        for part in parts:
            part.zero_()
    with one_thread() as threads:
        *gradients, dposition, dtime = _gradients(do, results, call, threads, tuple(parts))
    for part, dx in zip(parts, gradients):
        if dx.data_ptr() != part.data_ptr():
            part.copy_(dx[..., : part.shape[-1]])
    return dposition, dtime


def _gradients(
    do: Tensor,
    results: list[Tensor | None],
    call: AttentionCall,
    threads: int,
    parts: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """dq, dk and dv in the dtype and with the head dim of the computation, and those of the tables.
    parts: where they are written in place if these are the operands'; zeros unless
    `_are_all_stored`."""
    if has_one_query_each(call):
        return _gradients_by_one_query(do, results, call, threads, parts)
    q, k, v, segments, params, _ = call
    scale, activation, q_shared = params.scale, params.activation, segments.q_shared
    grad = _scaled(do.to(compute_dtype(do)), segments.q_offsets, params)
    out, lse = results if activation == "softmax" else [None, None]
    is_fused = _is_fused(params)
    queries, keys, values, grad, *outs = _compute_operands(
        activation, q, k, v, grad, *([] if out is None else [out])
    )
    if parts is None or (queries.dtype, queries.shape[2]) != (q.dtype, q.shape[2]):
        parts = tuple(torch.zeros_like(x) for x in (queries, keys, values))
    dq, dk, dv = parts
    finite = (
        activation == "softmax"
        and params.mask is not None
        and dot_products_are_finite(scale, grad, queries, keys, values)
    )

    def compute(groups: list[Group]) -> tuple[Tensor | None, TableGradients]:
        """Store or add the gradients of the groups' rows. Returns those of shared operands."""
        shared_dq = torch.zeros_like(queries) if q_shared else None
        dtables = TableGradients.of(params)
        for group in groups:
            operands = (take(grad, group.rows), *group.operands(queries, keys, values))
            found, rule = None, group.rule(params)
            if lse is not None and (is_fused or not (params.mask or params.has_bias)):
                block, block_lse = (take(x, group.rows) for x in (*outs, lse))
                found = block, block_lse[..., 0]
            if is_fused and found is not None:
                block_dq, block_dk, block_dv = softmax_backward(*operands, *found, rule, finite)
            else:
                block_dq, block_dk, block_dv = unfused_backward(*operands, rule, dtables, found)
            if shared_dq is not None:
                shared_dq += block_dq.sum(0).transpose(0, 1)
            else:
                put(dq, group.q_rows, block_dq)
            for dx, block_dx in ((dk, block_dk), (dv, block_dv)):
                put(
                    dx,
                    group.kv_rows,
                    block_dx if group.is_first else take(dx, group.kv_rows) + block_dx,
                )
        return shared_dq, dtables

    dtables = TableGradients.of(params)
    divisible = is_fused and _is_one_call(params)
    for query_group, groups in itertools.groupby(
        groups_of(q.shape[1], segments, params), key=lambda group: group.query_group
    ):
        # rows of a segment add to the same keys
        of_group = 1 if is_by_rows(segments, params, query_group) else threads
        for shared_dq, share_dtables in in_shares(
            compute, list(groups), _cost(q, v), of_group, divisible
        ):
            dtables.add_all(share_dtables)
            if shared_dq is not None:
                dq += shared_dq
    return dq, dk, dv, *dtables.results(q, params)


def _attend_by_one_query(call: AttentionCall, threads: int) -> tuple[Tensor, Tensor]:
    """`_attend` where each segment has one query row."""
    operands, params = one_query.operands(call), call.params
    out, lse = _empty_outputs(call)
    results = out if out.dtype == lse.dtype else torch.empty_like(out, dtype=lse.dtype)

    def compute(chunks: list[one_query.Chunk]) -> None:
        for chunk in chunks:
            one_query.forward(chunk, operands, params.scale, results, lse)

    one_query.in_chunks(compute, call, threads)
    return _result_like(out, _scaled(results, call.segments.q_offsets, params)), lse


def _gradients_by_one_query(
    do: Tensor,
    results: list[Tensor | None],
    call: AttentionCall,
    threads: int,
    parts: tuple[Tensor, ...] | None,
) -> tuple[Tensor, ...]:
    """`_gradients` where each segment has one query row."""
    operands, params = one_query.operands(call), call.params
    dtype = operands[0].dtype
    grad = _scaled(do.to(dtype), call.segments.q_offsets, params)
    out_and_lse: Any = tuple(None if x is None else x.to(dtype) for x in results)
    gradients: Any = parts
    if parts is None or dtype != call.q.dtype:
        gradients = tuple(torch.zeros_like(x) for x in operands)

    def compute(chunks: list[one_query.Chunk]) -> None:
        for chunk in chunks:
            one_query.backward(chunk, grad, out_and_lse, operands, params.scale, gradients)

    one_query.in_chunks(compute, call, threads)
    return *gradients, *TableGradients.of(params).results(call.q, params)


def _are_all_stored(call: AttentionCall) -> bool:
    """Whether one group has each row of q, k and v, so that its gradient is stored: no row is left
    out, and none is added to."""
    q_offsets, kv_offsets = call.segments.q_offsets, call.segments.kv_offsets
    if call.params.batch_invariant or q_offsets.shape != kv_offsets.shape or len(q_offsets) < 2:
        return False
    if int(q_offsets[-1]) != call.q.shape[0] or int(kv_offsets[-1]) != call.k.shape[0]:
        return False
    return torch.equal(q_offsets.diff() > 0, kv_offsets.diff() > 0)


def _is_fused(params: AttentionParams) -> bool:
    """Whether torch's fused attention computes it."""
    is_plain = not params.has_bias and params.dropout_seed is None
    return params.activation == "softmax" and is_plain


def _is_one_call(params: AttentionParams) -> bool:
    """Whether torch's fused attention computes a group in one call."""
    return params.mask is None or params.mask.is_causal


def _cost(q: Tensor, v: Tensor) -> Callable[[Group], int]:
    """The number of multiplications of a group."""
    return lambda group: group.scores * (q.shape[2] + v.shape[2])


def _compute_operands(activation: str, *tensors: Tensor) -> Iterator[Tensor]:
    """The tensors in fp32 or fp64, and for softmax as torch's fused attention needs them: equal
    head dims, which zeros fill up, and a last stride of 1."""
    width = max(x.shape[-1] for x in tensors)
    for x in tensors:
        x = x.to(compute_dtype(x))
        if activation == "softmax":
            x = pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
            if x.stride(-1) != 1:
                x = x.clone(memory_format=torch.contiguous_format)
        yield x


def _result_like(like: Tensor, x: Tensor) -> Tensor:
    """Undo `_compute_operands`: x with the dtype and head dim of `like`."""
    # no slice if nothing is cut: autograd would see a view
    x = x if x.shape[-1] == like.shape[-1] else x[..., : like.shape[-1]]
    return x.to(like.dtype).contiguous()


def _scaled(x: Tensor, q_offsets: Tensor, params: AttentionParams) -> Tensor:
    """Rows of the output, or of its gradient, times their segment_scale and output_scale."""
    if params.segment_scale is not None:
        factors = torch.repeat_interleave(params.segment_scale.to(x.dtype), q_offsets.diff())
        # 0 behind the last segment
        x = x * pad(factors, (0, x.shape[0] - len(factors)))[:, None, None]
    return x if params.output_scale == 1 else x * params.output_scale


def _empty_outputs(call: AttentionCall) -> tuple[Tensor, Tensor]:
    q, rows = call.q, call.segments.num_output_rows(call.q)
    lse_rows = rows if call.params.activation == "softmax" else 0
    return q.new_empty((rows, q.shape[1], call.v.shape[2])), q.new_empty(
        (lse_rows, q.shape[1], 1), dtype=compute_dtype(q)
    )


# -- the registered operators, which take the arguments of `params.pack` ---------------------------


_OPERATOR = host_operator(
    "attention_cpu", lambda *arguments: _empty_outputs(unpack(*arguments)[0]), FORWARD_SCHEMA
)(_forward)
cpu_backward = host_operator("attention_cpu_backward", backward_fake, BACKWARD_SCHEMA)(_backward)
cpu_packed_backward = host_operator(
    "attention_cpu_packed_backward", packed_backward_fake, PACKED_BACKWARD_SCHEMA
)(_packed_backward)
differentiate_attention(_OPERATOR, cpu_backward)
refuse_twice("attention", cpu_backward, cpu_packed_backward)
