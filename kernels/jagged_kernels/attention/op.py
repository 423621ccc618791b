"""Jagged attention: the registered operators, whose bodies select and launch kernels, and autograd.

    S = scale · q kᵀ + bias,  P = activation(S) · output_scale,  O = P v    per segment and head
    dV = Pᵀ dO,  dP = dO Vᵀ,  dQ = scale · dS K,  dK = scale · dSᵀ Q
    softmax: dS = P ∘ (dP − rowsum(dO ∘ O));  pointwise: dS = activation'(S) ∘ dP · output_scale
    bias tables: dposition[j - i + N - 1] = Σ dS,  dtime[bucket(u_i - t_j)] = Σ dS      (bias.py)

Every kernel is persistent over a zigzag schedule (schedule/); each output tile has one owner, so
results are deterministic. Softmax scores and the stored log-sum-exp (fp32, [H, rows]) are in base
2, whose exponential the hardware has; pointwise activations store nothing. Each kernel computes the
scores again; on Hopper, one kernel may compute all gradients (hopper/one_pass.py). If there are
many short segments, these have kernels of their own (triton_packed.py).

Shared operands are not replicated. Keys shared by all segments make one segment of all query rows;
only dk, dv need a split of the query rows into chunks, summed afterwards. Very many query rows of a
segment are split too (split_queries.py). Queries shared by all
segments are read at row 0 of every segment (`Q_SHARED`) and their dq is summed over the segments.
Query groups are segments of one schedule: a segment's index in its group is that of its keys, and a
tile of keys loops over the groups.

Keys and values of cached histories may lie in pages (pages.py). The forward reads them there, as an
operator without a backward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..common.autograd import refuse_derivative, refuse_twice
from ..common.device import (
    contiguous_last_dim,
    device_properties,
    has_descriptor,
    row_and_head_strides,
)
from ..common.ops import direct, on_the_tensors_device, operator
from ..common.tail import zero_tails
from ..schedule.cost import LoopedSide, one_pass_may_run
from ..schedule.host import NOT_LISTED, TileList
from . import packed
from .autograd import backward_fake, differentiable, differentiate_attention, packed_backward_fake
from .bias_tables import kernel_bias
from .params import (
    BACKWARD_SCHEMA,
    FORWARD_SCHEMA,
    PACKED_BACKWARD_SCHEMA,
    PAGED_SCHEMA,
    Arguments,
    AttentionCall,
    Gradients,
    Operands,
    PackedGradients,
    Segments,
    SegmentTensors,
    empty_table_gradients,
    pack,
    unpack,
)
from .select import Selection, select
from .split_queries import SplitQueries
from .stored_buckets import with_stored_buckets
from .triton_launch import triton_dkdv, triton_dq, triton_forward

SMALLEST_SCALE = 1e-20  # by which the kernels divide a bias
FEW = 2**20  # elements, which a GPU sets to 0 in the time of a launch

# -- the registered operators, which take the arguments of `params.pack` ---------------------------


@operator("attention", lambda *args: _empty_outputs(unpack(*args)[0]), FORWARD_SCHEMA)
def triton_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel.

    Returns:
        out `[rows, H, Dv]` in q's dtype and, with softmax, lse `[H, rows]` fp32, log2 of the sum of
        exp(scores); `[H, 0]` without.
    """
    return _forward(*unpack(*arguments))


@operator("paged_attention", lambda *args: _empty_outputs(unpack(*args)[0])[0], PAGED_SCHEMA)
def triton_paged_attention(*arguments: Any) -> Tensor:
    """`triton_attention` of keys and values in pages, in one query group, without a backward."""
    return _forward(*unpack(*arguments))[0]


def _forward(
    call: AttentionCall, tiles: TileList, keys: TileList, clears: bool = True
) -> tuple[Tensor, Tensor]:
    """clears: write 0 to the rows of out behind the last segment; False where a node does so."""
    params, (out, lse) = call.params, _empty_outputs(call)
    selection = _select(call, tiles.block, keys.block)
    # no batch needs another kernel for this
    if not _has_rows(call):
        return out.zero_(), lse.fill_(-math.inf)
    clears = clears and call.segments.has_tail and not call.segments.q_shared
    # It takes the host less time than a launch behind the kernel's. A trace has no number.
    if clears and isinstance(size := out.numel(), int) and size <= FEW:
        out, clears = out.zero_(), False
    operands, segments = Operands(call.q, call.k, call.v, out, lse), _with_tiles(call, tiles)
    if selection.packed_fwd is not None:
        packed.forward(operands, segments, params, selection.packed_fwd)
        segments = segments._replace(long_only=True)
    if selection.backend == "hopper":
        from .hopper.launch import forward

        forward(operands, segments, params, selection.fwd)
    else:
        triton_forward(operands, segments, params, selection)
    if clears:
        zero_tails((out, segments.q_offsets))
    return out, lse


@operator("attention_backward", backward_fake, BACKWARD_SCHEMA)
def triton_attention_backward(do: Tensor, results: list[Tensor | None], *arguments: Any):
    """Launch the dq kernel, which with softmax also writes delta = rowsum(dO ∘ O), then the dk, dv
    kernel, which reads it. On Hopper: hopper/launch.py. results: out, which only softmax reads, and
    lse. Returns dq, dk, dv and the gradients of position_bias and time_bias, in the shapes and
    dtypes of what they are gradients of; `[0]` for a table that gets none."""
    unpacked = call, tiles, key_tiles = unpack(*arguments)
    q, k, v, (q_offsets, kv_offsets, q_shared, kv_shared, has_tail, *_), params, _ = call
    if not _has_rows(call):
        empty = (x.new_zeros(x.shape) for x in (q, k, v))
        return *empty, *(x.zero_() for x in empty_table_gradients(params, q))
    chunks = _select(call, tiles.block, key_tiles.block).query_chunks if kv_shared else 1
    # A shared operand's gradient is one fp32 partial per segment (queries) or chunk of query rows
    # (keys), then a fixed-order sum.
    dq = q.new_empty((do.shape[0], *q.shape[1:]), dtype=torch.float32 if q_shared else q.dtype)
    dk, dv = (
        x.new_empty(
            (chunks * x.shape[0], *x.shape[1:]), dtype=torch.float32 if kv_shared else x.dtype
        )
        for x in (k, v)
    )
    dtables = _write_gradients(do, results, unpacked, dq, dk, dv)
    if has_tail:
        of_queries = [] if q_shared else [(dq, q_offsets)]
        of_keys = [] if kv_shared else [(dk, kv_offsets), (dv, kv_offsets)]
        zero_tails(*of_queries, *of_keys)
    if q_shared:
        dq = dq.view(q_offsets.shape[0] - 1, *q.shape).sum(0).to(q.dtype)
    if kv_shared:
        dk, dv = (dx.view(chunks, *x.shape).sum(0).to(x.dtype) for dx, x in ((dk, k), (dv, v)))
    return dq, dk, dv, *dtables


@operator("attention_packed_backward", packed_backward_fake, PACKED_BACKWARD_SCHEMA)
def triton_attention_packed_backward(
    do: Tensor,
    results: list[Tensor | None],
    of_queries: Tensor,
    of_keys: Tensor | None,
    columns: list[int],
    *arguments: Any,
):
    """`triton_attention_backward` that writes dq, dk and dv to columns of contiguous tensors, see
    `PackedGradients`: a GEMM of a packed projection then needs no sum and no copy. Keys are not
    shared. Rows behind the last segment become 0, in all columns. Returns the gradients of
    position_bias and time_bias."""
    unpacked = unpack(*arguments)
    call = unpacked[0]
    outs = PackedGradients(of_queries, of_keys, columns)
    parts = outs.parts(*call[:3], call.segments.q_shared)
    if _has_rows(call):
        dtables = _write_gradients(do, results, unpacked, *parts)
    else:
        dtables = empty_table_gradients(call.params, call.q)
        for x in (*parts, *dtables):
            x.zero_()
    if call.segments.has_tail:
        of_rows = [(of_queries, call.segments.q_offsets)]
        if of_keys is not None:
            of_rows.append((of_keys, call.segments.kv_offsets))
        elif not call.segments.is_self_attention:
            of_rows.append((of_queries[: call.k.shape[0]], call.segments.kv_offsets))
        zero_tails(*of_rows)
    return dtables


def _write_gradients(
    do: Tensor,
    results: list[Tensor | None],
    unpacked: tuple[AttentionCall, TileList, TileList],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> tuple[Tensor, Tensor]:
    """Launch the backward's kernels: write dq, dk and dv, whose last dim is contiguous, or partial
    sums of them. Returns the gradients of the bias tables."""
    call, queries_listed, keys_listed = unpacked
    q, k, v, (q_offsets, _, _, kv_shared, has_tail, *_), params, _ = call
    selection = _select(call, queries_listed.block, keys_listed.block)
    if selection.query_chunks > 1 and not kv_shared:
        split = SplitQueries.of(call, selection.query_chunks)
        partial = split.partial()
        dtables = _write_gradients(do, results, (split.call, NOT_LISTED, NOT_LISTED), dq, *partial)
        for x, out in zip(partial, (dk, dv)):
            split.add(x, out)
        return dtables
    queries, keys = _with_tiles(call, queries_listed), _with_tiles(call, keys_listed)
    operands, do = Operands(q, k, v, *results), contiguous_last_dim(do)
    if kv_shared:
        chunks = selection.query_chunks
        keys = _query_chunks(q_offsets[-1] if has_tail else q.shape[0], k, chunks)
        if params.segment_scale is not None:
            params = params._replace(segment_scale=params.segment_scale.repeat(chunks))
    grads = Gradients(do, dq, dk, dv, delta=torch.empty_like(operands.lse))
    if selection.packed_bwd is not None:
        packed.backward(operands, grads, queries, params, selection.packed_bwd)
        queries, keys = queries._replace(long_only=True), keys._replace(long_only=True)
    if selection.backend == "hopper":
        from .hopper.launch import backward

        return backward(operands, grads, queries, keys, params, kv_shared, selection)
    bias = kernel_bias(params)
    dtables = triton_dq(operands, grads, queries, params, bias, selection)
    triton_dkdv(operands, grads, keys, params, bias, kv_shared, selection)
    return dtables


def _has_rows(call: AttentionCall) -> bool:
    return bool(call.q.shape[0] and call.k.shape[0] and call.segments.num_segments)


def _with_tiles(call: AttentionCall, tiles: TileList) -> Segments:
    q_offsets, kv_offsets, q_shared, kv_shared, has_tail, pages, *_ = call.segments
    return Segments(q_offsets, kv_offsets, q_shared, kv_shared, has_tail, pages, tiles)


def _empty_outputs(call: AttentionCall) -> tuple[Tensor, Tensor]:
    q, rows = call.q, call.segments.num_output_rows(call.q)
    lse_rows = rows if call.params.activation == "softmax" else 0
    lse = q.new_empty((q.shape[1], lse_rows), dtype=torch.float32)
    return q.new_empty((rows, q.shape[1], call.v.shape[2])), lse


def _select(call: AttentionCall, tile_rows: int | None, key_tile_rows: int | None) -> Selection:
    """tile_rows, key_tile_rows: of the schedule's tiles."""
    q, k, v, segments, params, _ = call
    q_offsets, kv_offsets, q_shared, kv_shared, _, pages, *_ = segments
    # Hopper's kernels take 16 bits alone
    in_16_bits = q.element_size() == 2 and not segments.in_8_bits
    judges_alignment = params.implementation != "triton" and in_16_bits
    single_rows = params.batch_invariant and params.implementation == "auto"
    capability, num_sms = device_properties(q.device)
    targets = params.mask is not None and params.mask.is_causal_with_targets
    # a trace of the launches (precompile/traced.py) serves every batch
    known = not torch.compiler.is_compiling()
    problem = call.problem(
        capability=capability if q.is_cuda else None,
        causal=targets and not params.mask.has_targets,
        targets=targets,
        q_rows=q.shape[0] if known else None,
        q_segments=q_offsets.shape[0] - 1 if known else None,
        kv_rows=segments.num_keys(k) if known else None,
        kv_segments=kv_offsets.shape[0] - 1 if known else None,
        q_shared=q_shared,
        kv_shared=kv_shared,
        self_attention=known and segments.is_self_attention,
        paged=pages is not None,
        misaligned=_misaligned(q, k, v, single_rows) if judges_alignment else (),
        schedule=(tile_rows, key_tile_rows),
        num_sms=num_sms,
    )
    return _selection(problem)


_selection = functools.lru_cache(maxsize=64)(select)  # a backward finds what its forward selected


def _misaligned(q: Tensor, k: Tensor, v: Tensor, single_rows: bool) -> tuple[str, ...]:
    """Descriptions of q, k and v if the tensor memory accelerator cannot read one of them.
    single_rows: also check the row stride of an operand with a single row. No kernel uses it, but
    the choice must not depend on the number of rows."""
    aligned = has_descriptor(q) and has_descriptor(k) and has_descriptor(v)
    if aligned and not (single_rows and row_and_head_strides(q, k, v)[0] * q.element_size() < 16):
        return ()
    return tuple(
        f"{name} {list(x.shape)} with strides {x.stride()}"
        for name, x in (("q", q), ("k", k), ("v", v))
    )


def _query_chunks(num_queries: int | Tensor, k: Tensor, chunks: int) -> Segments:
    """The query rows split into `chunks` segments, each of which sees all keys."""
    boundaries = torch.arange(chunks + 1, device=k.device)
    return Segments(boundaries * num_queries // chunks, boundaries * k.shape[0])


# -- autograd --------------------------------------------------------------------------------------


def attention(call: AttentionCall) -> Tensor:
    """Attention by the portable or the Hopper kernels, in less host time than by a call of the
    operator. The call has a schedule."""
    arguments, tiled = prepared(call)
    if tiled is None:
        results = _operator(call)(*arguments)
        return results[0] if call.segments.pages is None else results
    if torch.is_grad_enabled() and call.segments.pages is None:
        return differentiable(arguments, lambda *_: launch(*tiled), attention_backward)[0]
    return launch(*tiled)[0]


def prepared(call: AttentionCall) -> tuple[Arguments, tuple[Any, ...] | None]:
    """The operator's arguments, and those of `launch`, which does the same in less host time; None
    where only the operator may be called. A node's backward gives the former to
    `attention_backward` or `attention_packed_backward`."""
    call = _for_kernels(call)
    tiles, key_tiles = call.schedule.tile_list, _key_tiles(call)
    arguments, params, op = pack(call, tiles, key_tiles), call.params, _operator(call)
    floats = *call[:3], params.segment_scale, params.position_bias, params.time_bias
    is_operator = direct(op, arguments, floats) is op
    return arguments, None if is_operator else (call, tiles, key_tiles)


def _operator(call: AttentionCall) -> Callable:
    return triton_attention if call.segments.pages is None else triton_paged_attention


def with_buckets(call: AttentionCall) -> AttentionCall:
    """The call with `StoredBuckets` among its params, if its kernels read them: only Hopper's do.
    The call has a bias by time and a schedule, and no graph records it."""
    if not call.schedule.num_blocks:
        return call
    call = _for_kernels(call)
    rows = call.schedule.block_m, _key_tiles(call).block
    return with_stored_buckets(call) if _select(call, *rows).backend == "hopper" else call


def operator_arguments(call: AttentionCall) -> Arguments:
    """The arguments of the operators, for a caller that gives them its own q, k and v: those of the
    call have the right shapes and dtypes, but no values. The call has a schedule, and its
    activation is pointwise."""
    scale = call.params.segment_scale
    if scale is not None:
        call = call._replace(params=call.params._replace(segment_scale=scale.float().contiguous()))
    return pack(call, call.schedule.tile_list, _key_tiles(call))


def _for_kernels(call: AttentionCall) -> AttentionCall:
    """With operands whose last dimension is contiguous, and a positive scale: kernels compute row
    maxima of unscaled scores, and divide a bias by the scale."""
    q, k, v, segments, params, schedule = call
    q, k, v = contiguous_last_dim(q), contiguous_last_dim(k), contiguous_last_dim(v)
    turns_maxima = params.scale <= 0 and params.activation == "softmax"
    if turns_maxima or (params.has_bias and abs(params.scale) < SMALLEST_SCALE):
        q, params = q * params.scale, params._replace(scale=1.0)
    if params.segment_scale is not None:
        params = params._replace(segment_scale=params.segment_scale.float().contiguous())
    return AttentionCall(q, k, v, segments, params, schedule)


def _key_tiles(call: AttentionCall) -> TileList:
    """Those of the schedule, unless they were made for other sizes or another mask: the one-pass
    backward needs ascending tiles, and then lists its own."""
    keys, mask = call.schedule.backward, call.params.mask
    if keys is None or call.segments.pages is not None:
        return NOT_LISTED
    if not keys.ascending:
        queries, segments = LoopedSide(*call.q.shape), call.segments.kv_offsets.shape[0] - 1
        causal = mask is not None and mask.is_causal
        if one_pass_may_run(queries, *call.k.shape[:2], segments, mask is not None, causal):
            return NOT_LISTED
    return keys.tile_list


def attention_backward(
    do: Tensor, results: list[Tensor | None], *arguments: Any
) -> tuple[Tensor, ...]:
    """`triton_attention_backward` in less host time."""
    return _directly(triton_attention_backward, (do, results), arguments)


def attention_packed_backward(
    do: Tensor, results: list[Tensor | None], outs: PackedGradients, *arguments: Any
) -> tuple[Tensor, ...]:
    """`triton_attention_packed_backward` in less host time."""
    return _directly(triton_attention_packed_backward, (do, results, *outs), arguments)


def _directly(op: Callable, first: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
    inputs = *first, *arguments
    if not torch.is_grad_enabled():
        q, k, v, segments, bias, *_ = arguments
        floats = first[0], q, k, v, SegmentTensors(*segments).segment_scale, *bias[:2]
        op = direct(op, inputs, floats)
    return op(*inputs)


launch = on_the_tensors_device(_forward)
differentiate_attention(triton_attention, attention_backward)
refuse_derivative(
    triton_paged_attention,
    "jagged_attention is not differentiable with pages: gather the keys and values first",
)
refuse_twice("jagged_attention", triton_attention_backward, triton_attention_packed_backward)
