"""Jagged attention on the CPU: the operator and its backward.

Segments with equal lengths form a group, and `attention_math` computes one group at a time. Nothing
is padded. Adjacent segments of a group are read in place; others are gathered. If that would gather
most rows, all of them are sorted by their segments' lengths first.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jagged_kernels.attention.params import AttentionParams, MaskParams, empty_table_gradients
from jagged_kernels.common.one_thread import one_thread
from torch import Tensor
from torch.nn.functional import pad

from ..autocast import host_operator
from ..masks import AttentionMask
from .attention_bias import BlockBias, TableGradients
from .attention_math import (
    SCORES_AT_A_TIME,
    dot_products_are_finite,
    softmax_backward,
    softmax_forward,
    unfused_backward,
    unfused_forward,
)
from .buckets import Rows, compute_dtype
from .shares import in_shares

# bytes; GEMMs of matrices that start elsewhere may round otherwise, so that a result would depend
# on other segments
ALIGNMENT = 64


@host_operator("jagged_modules::attention_cpu")
def attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    scale: float,
    q_shared: bool,
    activation: str,
    mask: list[int] | None,
    output_scale: float,
    batch_invariant: bool,
    table_gradients: bool,
    num_targets: Tensor | None,
    segment_scale: Tensor | None,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    timestamps: Tensor | None,
    boundaries: Tensor | None,
    query_timestamps: Tensor | None,
    query_shift: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Jagged attention.

    From scale on, the arguments are the fields of `AttentionParams`. batch_invariant: segments, and
    without a mask query rows, are computed one by one. fp16 and bf16 are computed in fp32 and
    rounded once.

    Returns:
        The output `[rows, H, Dv]`, and the log-sum-exp of the scores in fp32 or fp64:
        `[rows, H, 1]` with softmax, otherwise `[0, H, 1]`.
    """
    params = AttentionParams(
        scale,
        q_shared,
        activation,
        mask,
        output_scale,
        batch_invariant,
        table_gradients,
        num_targets,
        segment_scale,
        position_bias,
        time_bias,
        timestamps,
        boundaries,
        query_timestamps,
        query_shift,
    )
    with one_thread() as threads:
        return _attend(q, k, v, q_offsets, kv_offsets, params, threads)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    params: AttentionParams,
    threads: int,
) -> tuple[Tensor, Tensor]:
    scale, activation = params.scale, params.activation
    out, lse = (x.zero_() for x in _empty_outputs(q, v, q_offsets, params.q_shared, activation))
    segments = _Segments.of(q_offsets, kv_offsets, params)
    queries, keys, values, results = _compute_operands(activation, *segments.sorted(q, k, v), out)
    is_fused = activation == "softmax" and not params.has_bias
    finite = is_fused and dot_products_are_finite(scale, queries, keys, values)

    def compute(groups: list[_Group]) -> None:
        for group in groups:
            operands = group.operands(queries, keys, values)
            if not is_fused:
                block, block_lse = unfused_forward(
                    *operands, *group.mask, scale, activation, group.bias(segments.params)
                )
            else:
                block, block_lse = softmax_forward(*operands, *group.mask, scale, finite)
            if block_lse is not None:
                _put(lse, group.rows, block_lse[..., None])
            _put(results, group.rows, block)

    in_shares(
        compute,
        list(_groups(q.shape[1], segments)),
        _cost(q, v),
        threads,
        is_fused and _is_one_call(params),
    )
    results, lse = (_unsorted(x, segments.q_order, len(x)) for x in (results, lse))
    return _result_like(out, _scaled(results, q_offsets, params)), lse


@attention_cpu.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    scale: float,
    q_shared: bool,
    activation: str,
    *args: Any,
) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q, v, q_offsets, q_shared, activation)


@host_operator("jagged_modules::attention_cpu_backward")
def attention_cpu_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    scale: float,
    q_shared: bool,
    activation: str,
    mask: list[int] | None,
    output_scale: float,
    batch_invariant: bool,
    table_gradients: bool,
    num_targets: Tensor | None,
    segment_scale: Tensor | None,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    timestamps: Tensor | None,
    boundaries: Tensor | None,
    query_timestamps: Tensor | None,
    query_shift: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the tables of the bias, each in its operand's shape and dtype; `[0]`
    for a table that gets none.

    out, lse: results of the forward with softmax, otherwise None.
    """
    params = AttentionParams(
        scale,
        q_shared,
        activation,
        mask,
        output_scale,
        batch_invariant,
        table_gradients,
        num_targets,
        segment_scale,
        position_bias,
        time_bias,
        timestamps,
        boundaries,
        query_timestamps,
        query_shift,
    )
    with one_thread() as threads:
        return _gradients(do, q, k, v, out, lse, q_offsets, kv_offsets, params, threads)


def _gradients(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    params: AttentionParams,
    threads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    scale, activation, q_shared = params.scale, params.activation, params.q_shared
    segments = _Segments.of(q_offsets, kv_offsets, params)
    grad = _sorted(_scaled(do.to(compute_dtype(do)), q_offsets, params), segments.q_order)
    out, lse = (None if x is None else _sorted(x, segments.q_order) for x in (out, lse))
    queries, keys, values, grad, *results = _compute_operands(
        activation, *segments.sorted(q, k, v), grad, *([] if out is None else [out])
    )
    dq, dk, dv = (torch.zeros_like(x) for x in (queries, keys, values))
    finite = (
        activation == "softmax"
        and params.mask is not None
        and dot_products_are_finite(scale, grad, queries, keys, values)
    )

    def compute(groups: list[_Group]) -> tuple[Tensor | None, TableGradients]:
        """Store or add the gradients of the groups' rows. Returns those of operands that all groups
        share."""
        shared_dq, dtables = (
            torch.zeros_like(queries) if q_shared else None,
            TableGradients.of(segments.params),
        )
        for group in groups:
            operands, bias = (
                (_take(grad, group.rows), *group.operands(queries, keys, values)),
                group.bias(segments.params),
            )
            if activation == "softmax" and lse is not None and bias is None:
                block, block_lse = (_take(x, group.rows) for x in (*results, lse))
                block_dq, block_dk, block_dv = softmax_backward(
                    *operands, block, block_lse[..., 0], *group.mask, scale, finite
                )
            else:
                block_dq, block_dk, block_dv = unfused_backward(
                    *operands, *group.mask, scale, activation, bias, dtables
                )
            if shared_dq is not None:
                shared_dq += block_dq.sum(0).transpose(0, 1)
            else:
                _put(dq, group.q_rows, block_dq)
            for dx, block_dx in ((dk, block_dk), (dv, block_dv)):
                _put(
                    dx,
                    group.kv_rows,
                    block_dx if group.is_first else _take(dx, group.kv_rows) + block_dx,
                )
        return shared_dq, dtables

    dtables = TableGradients.of(segments.params)
    divisible = lse is not None and not params.has_bias and _is_one_call(params)
    threads = 1 if _is_by_rows(params) else threads  # rows of a segment add to the same keys
    for _, groups in itertools.groupby(
        _groups(q.shape[1], segments), key=lambda group: group.query_group
    ):
        for shared_dq, share_dtables in in_shares(
            compute, list(groups), _cost(q, v), threads, divisible
        ):
            dtables.add_all(share_dtables)
            if shared_dq is not None:
                dq += shared_dq
    dq = dq if q_shared else _unsorted(dq, segments.q_order, q.shape[0])
    dk, dv = (_unsorted(x, segments.kv_order, k.shape[0]) for x in (dk, dv))
    return (
        _result_like(q, dq),
        _result_like(k, dk),
        _result_like(v, dv),
        *dtables.results(q, params),
    )


@attention_cpu_backward.register_fake
def _(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    *params: Any,
) -> tuple[Tensor, ...]:
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return *grads, *empty_table_gradients(AttentionParams(*params), q)


class _Segments(NamedTuple):
    """The segments in the order of their computation.

    Attributes:
        q_offsets, kv_offsets: their offsets.
        params: the parameters, those of segments and rows in this order.
        q_order, kv_order: the rows of the output and of the keys in this order; None if it is the
            caller's.
    """

    q_offsets: Tensor
    kv_offsets: Tensor
    params: AttentionParams
    q_order: Tensor | None = None
    kv_order: Tensor | None = None

    @classmethod
    def of(cls, q_offsets: Tensor, kv_offsets: Tensor, params: AttentionParams) -> _Segments:
        """Sorted by their lengths if more than half of the keys are in groups of segments that are
        not adjacent."""
        if params.batch_invariant or q_offsets.shape != kv_offsets.shape or len(q_offsets) < 3:
            return cls(q_offsets, kv_offsets, params)
        q_lengths, kv_lengths = q_offsets.diff().long(), kv_offsets.diff().long()
        key, order = (kv_lengths * (q_offsets[-1] + 1) + q_lengths).sort(stable=True)
        gaps = (key[1:] == key[:-1]) & (order.diff() != 1)
        scattered = order[pad(gaps, (0, 1)) | pad(gaps, (1, 0))]
        if 2 * int(kv_lengths[scattered].sum()) <= int(kv_offsets[-1]):
            return cls(q_offsets, kv_offsets, params)
        (q_offsets, q_order), (kv_offsets, kv_order) = (
            _reordered(q_offsets, order),
            _reordered(kv_offsets, order),
        )
        of_segments = {
            name: x[order]
            for name in ("num_targets", "query_shift")
            if (x := getattr(params, name)) is not None
        }
        times = dict(timestamps=kv_order, query_timestamps=q_order)
        of_rows = {
            name: x[rows]
            for name, rows in times.items()
            if (x := getattr(params, name)) is not None
        }
        return cls(
            q_offsets, kv_offsets, params._replace(**of_segments, **of_rows), q_order, kv_order
        )

    def sorted(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The operands in this order; shared queries have none."""
        return (
            q if self.params.q_shared else _sorted(q, self.q_order),
            _sorted(k, self.kv_order),
            _sorted(v, self.kv_order),
        )


def _reordered(offsets: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """The offsets of segments in another order, and the rows in this order."""
    lengths, starts = offsets.diff()[order], offsets[:-1][order]
    ends = lengths.cumsum(0)
    rows = torch.repeat_interleave(starts - ends + lengths, lengths) + torch.arange(
        int(offsets[-1]), device="cpu"
    )
    return pad(ends, (1, 0)), rows


def _sorted(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x.index_select(0, order)


def _unsorted(x: Tensor, order: Tensor | None, num_rows: int) -> Tensor:
    """Undo `_sorted`, which leaves out the rows behind the last segment: they are 0."""
    if order is None or not num_rows:
        return x
    out = x.new_empty((num_rows, *x.shape[1:]))
    out[len(order) :] = 0
    return out.index_copy_(0, order, x[: len(order)]) if len(order) else out


class _Group(NamedTuple):
    """Segments with equal lengths and numbers of targets.

    Attributes:
        rows, q_rows, kv_rows: their rows of the output, of q, and of k and v.
        mask: the mask, and the number of targets of each segment.
        query_group: the query group that they belong to; those of one have different keys.
        is_first: no other group of these keys comes before, so gradients of keys are stored, not
            added.
        shift: query_shift of each segment.
        scores: the number of their scores, of all heads.
    """

    rows: Rows
    q_rows: Rows
    kv_rows: Rows
    mask: tuple[AttentionMask | None, int]
    query_group: int
    is_first: bool
    shift: int
    scores: int

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[segments, heads, rows, dim]` blocks of q, k and v; shared queries repeat without a
        copy."""
        keys, values = (_take(x, self.kv_rows) for x in (k, v))
        queries = _take(q, self.q_rows)
        return (
            queries if len(queries) == len(keys) else queries.expand(len(keys), -1, -1, -1),
            keys,
            values,
        )

    def bias(self, params: AttentionParams) -> BlockBias | None:
        """The bias of these segments."""
        if not params.has_bias:
            return None
        t = None if params.timestamps is None else self.kv_rows.take(params.timestamps)
        u = None if params.query_timestamps is None else self.rows.take(params.query_timestamps)
        return BlockBias(params, self.kv_rows.length - self.rows.length + self.shift, t, u)


def _groups(num_heads: int, segments: _Segments) -> Iterator[_Group]:
    """Groups of segments that have queries and keys, in the order of the query groups.

    batch_invariant: a group is one segment or, without a mask, one query row: a candidate's result
    must not depend on the user's other candidates.
    """
    params = segments.params
    mask = (
        None
        if params.mask is None
        else AttentionMask.from_params(MaskParams(*params.mask), params.num_targets)
    )
    q_shared, batch_invariant = params.q_shared, params.batch_invariant
    q_bounds, kv_bounds = segments.q_offsets.tolist(), segments.kv_offsets.tolist()
    num_segments = len(kv_bounds) - 1
    by_rows = _is_by_rows(params)
    targets = [0] * num_segments if params.num_targets is None else params.num_targets.tolist()
    shifts = [0] * num_segments if params.query_shift is None else params.query_shift.tolist()
    starts: defaultdict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    for query_group in range((len(q_bounds) - 1) // max(1, num_segments)):
        bounds = q_bounds[query_group * num_segments : (query_group + 1) * num_segments + 1]
        for q_start, q_end, kv_start, kv_end, *others in zip(
            bounds, bounds[1:], kv_bounds, kv_bounds[1:], targets, shifts
        ):
            if q_end > q_start and kv_end > kv_start:
                num_queries = 1 if by_rows else q_end - q_start
                lengths = num_queries, kv_end - kv_start
                starts[(query_group, *lengths, *others)] += (
                    (row, kv_start) for row in range(q_start, q_end, num_queries)
                )
    for (query_group, num_queries, num_keys, t, shift), pairs in starts.items():
        at_a_time = (
            1
            if batch_invariant
            else max(1, SCORES_AT_A_TIME // (num_heads * num_queries * num_keys))
        )
        for first in range(0, len(pairs), at_a_time):
            q_starts, kv_starts = zip(*pairs[first : first + at_a_time])
            rows, kv_rows = (
                Rows.of(q_starts, num_queries, batch_invariant),
                Rows.of(kv_starts, num_keys, batch_invariant),
            )
            q_rows = Rows.of((0,), num_queries) if q_shared else rows
            scores = num_heads * num_queries * num_keys * len(q_starts)
            yield _Group(
                rows,
                q_rows,
                kv_rows,
                (mask, t),
                query_group,
                query_group == 0 and not by_rows,
                shift,
                scores,
            )


def _is_by_rows(params: AttentionParams) -> bool:
    """Whether a group is one query row."""
    return (
        params.batch_invariant
        and params.mask is None
        and not params.q_shared
        and not params.has_bias
    )


def _is_one_call(params: AttentionParams) -> bool:
    """Whether torch's fused attention computes a group in one call."""
    return params.mask is None or MaskParams(*params.mask).is_causal


def _cost(q: Tensor, v: Tensor) -> Callable[[_Group], int]:
    """The number of multiplications of a group."""
    return lambda group: group.scores * (q.shape[2] + v.shape[2])


def _take(x: Tensor, rows: Rows) -> Tensor:
    """The rows of x `[rows, heads, dim]` as a block `[segments, heads, length, dim]`."""
    return rows.take(x).transpose(1, 2)


def _put(x: Tensor, rows: Rows, block: Tensor) -> None:
    """Undo `_take`: write a block to its rows of x."""
    rows.put(x, block.transpose(1, 2))


def _compute_operands(activation: str, *tensors: Tensor) -> Iterator[Tensor]:
    """The tensors in fp32 or fp64, and for softmax as torch's fused attention needs them: equal
    head dims, which zeros fill up, a last stride of 1, and rows that start at multiples of
    ALIGNMENT.
    """
    width = max(x.shape[-1] for x in tensors)
    if any(x.shape[1] * width * compute_dtype(x).itemsize % ALIGNMENT for x in tensors):
        width = -(-width // 16) * 16  # 64 bytes of fp32
    for x in tensors:
        x = x.to(compute_dtype(x))
        if activation == "softmax":
            x = pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
            aligned = (x.data_ptr() | x.stride(0) * x.element_size()) % ALIGNMENT == 0
            x = (
                x
                if x.stride(-1) == 1 and aligned
                else x.clone(memory_format=torch.contiguous_format)
            )
        yield x


def _result_like(like: Tensor, x: Tensor) -> Tensor:
    """Undo `_compute_operands`: x with the dtype and head dim of `like`."""
    # no slice if nothing is cut: autograd would see a view
    x = x if x.shape[-1] == like.shape[-1] else x[..., : like.shape[-1]]
    return x.to(like.dtype).contiguous()


def _scaled(x: Tensor, q_offsets: Tensor, params: AttentionParams) -> Tensor:
    """Rows of the output, or of its gradient, times segment_scale of their segment and
    output_scale."""
    if params.segment_scale is not None:
        factors = torch.repeat_interleave(params.segment_scale.to(x.dtype), q_offsets.diff())
        # 0 behind the last segment
        x = x * pad(factors, (0, x.shape[0] - len(factors)))[:, None, None]
    return x if params.output_scale == 1 else x * params.output_scale


def _empty_outputs(
    q: Tensor, v: Tensor, q_offsets: Tensor, q_shared: bool, activation: str
) -> tuple[Tensor, Tensor]:
    rows = q.shape[0] * (q_offsets.shape[0] - 1) if q_shared else q.shape[0]
    lse_rows = rows if activation == "softmax" else 0
    return q.new_empty((rows, q.shape[1], v.shape[2])), q.new_empty(
        (lse_rows, q.shape[1], 1), dtype=compute_dtype(q)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, q_offsets, kv_offsets, *options = inputs
    params = AttentionParams(*options)
    saved = output if params.activation == "softmax" else (None, None)
    # the fields from there on are tensors
    ctx.num_options = next(i for i, name in enumerate(params._fields) if name == "num_targets")
    ctx.save_for_backward(q, k, v, *saved, q_offsets, kv_offsets, *params[ctx.num_options :])
    ctx.options = params[: ctx.num_options]


def _backward(ctx: Any, do: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    params = AttentionParams(*ctx.options, *tensors[7:])
    dq, dk, dv, dposition, dtime = attention_cpu_backward(do, *tensors[:7], *params)
    of_params = dict.fromkeys(params._fields)
    if params.table_gradients:
        of_params["position_bias"] = None if params.position_bias is None else dposition
        of_params["time_bias"] = None if params.time_bias is None else dtime
    return dq, dk, dv, None, None, *of_params.values()


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "attention is not differentiable twice on the CPU: its backward has no derivative of"
        " its own"
    )


attention_cpu.register_autograd(_backward, setup_context=_setup_context)
attention_cpu_backward.register_autograd(_no_second_derivative)
