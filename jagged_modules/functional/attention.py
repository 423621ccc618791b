"""Attention of jagged queries to jagged keys and values."""

from __future__ import annotations

from typing import Any

import torch
from jagged_kernels.attention.pages import Pages
from jagged_kernels.attention.params import Arguments, AttentionCall, PackedGradients
from jagged_kernels.common.device import zeroed_behind
from jagged_kernels.schedule.host import TileSchedule
from torch import Tensor

from ..bias import RelativeBias
from ..containers.padding import padded_to
from ..cpu.attention import attention_cpu, cpu_backward, cpu_forward, cpu_packed_backward
from ..dropout import Dropout
from ..masks import AttentionMask
from ..reference import attention_reference
from ..schedule import device_schedule
from ..segments import RowSegments
from ..tracing import is_recording
from ..validation import check_tensor
from .attention_arguments import Side, parse_arguments
from .attention_call import DEFAULT_OPTIONS, AttentionOptions, ParsedAttention, checked_call
from .scored_attention import Mask, Score, attention_by_functions


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | str,
    kv_offsets: Tensor | str | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    activation: str = "softmax",
    scale: float | None = None,
    # an int, because torch.compile makes a symbol of a float default
    output_scale: float | Tensor = 1,
    mask: Mask | None = None,
    bias: RelativeBias | None = None,
    score: Score | None = None,
    schedule: TileSchedule | None = None,
    implementation: str = "auto",
    pages: Pages | None = None,
    dropout_p: float = 0,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """Attention within the segments of jagged tensors: activation(scale · q kᵀ + bias) ·
    output_scale · v for every segment and head.

    Gradients flow to q, k, v and a tensor output_scale. The result of a query row that sees no key
    is 0. Nothing is padded, and an operand that all segments share is not replicated. Blocks of
    keys that the mask hides from a whole tile of queries are skipped.

    Args:
        q: `[Lq, H, D]` fp32, fp16 or bf16 (on the CPU also fp64). Any row and head stride: views of
            a packed projection are read in place.
        k: `[Lk, Hkv, D]`, same dtype as q. H is a multiple of Hkv; query head h reads key head h //
            (H / Hkv).
        v: `[Lk, Hkv, Dv]`, same dtype. D and Dv are 1 to 256.
        q_offsets: int32 or int64, on q's device or the host. One of: `[B + 1]`; "shared": all
            segments use all rows of q `[S, H, D]`; `[n · B + 1]`: n query groups of B segments.
            Segments b, B + b, 2B + b, ... of q then read the keys and values of segment b, which
            are not copied.
        kv_offsets: the same for k and v. One of: `[B + 1]`; None: q_offsets (self-attention);
            "shared": all segments use all rows of k and v.
        max_seqlen_q, max_seqlen_kv: lengths of the longest segments, in rows. Host offsets are
            checked against them; nothing is truncated.
        activation: "softmax", or a pointwise function of each score: "identity", "relu",
            "relu_squared", "leaky_relu" (slope 0.01), "silu", "gelu", "gelu_tanh", "gelu_taylor"
            (within 4e-3 of GELU, no special-function unit), "hardswish", "sigmoid".
        scale: factor of q kᵀ before the activation; 1/sqrt(D) if None. torch.compile recompiles for
            another number: multiply q by one that changes from batch to batch.
        output_scale: factor after the activation, for example HSTU's 1/N: a number, or a tensor
            `[B]`, one number for each segment of q. Must be 1 with softmax. With a tensor, fp16
            operands are computed in fp32 if segments share keys. In a graph of torch.compile, a
            number that changes from batch to batch becomes a tensor.
        mask: which keys each query row sees; all if None. Must be None with shared keys. With
            several query groups it is that of the first one, and has no num_targets: rows of the
            others see all keys. Or a function g(at) that returns booleans: see score.
        bias: learned biases of the scores by relative position and time, on q's device. Its tables
            get gradients. Must be None with shared queries or keys: their rows have no position.
            With several query groups it is that of the first one; rows of the others have none.
        score: score(s, at) returns the scores that the activation takes, of s = scale · q kᵀ
            `[H, pairs]` in fp32 (fp64 for fp64) and of the pairs' places: at.segment, at.head,
            at.q, at.k (places in the segment), at.q_row, at.k_row (rows of q and k), at.q_len and
            at.k_len, which broadcast with s. Gradients flow to tensors that it reads; -infinity
            hides a pair from softmax. This and a function as mask are for what no other argument
            computes: all scores are stored, the offsets are read on the host, and shared operands,
            query groups, bias, schedule, pages, dropout and "hopper" are errors.
        schedule: the tile schedule of these lengths, from `Jagged.schedule` or `zigzag_schedule`.
            If None, it is built from the offsets, without a sync if they are on the device. Only
            the kernels use it.
        implementation: "auto", "reference", "triton" or "hopper". "hopper" needs compute capability
            9.0, a 16-bit dtype, D and Dv that are multiples of 8, both in 40 to 64, 72 to 128 or
            136 to 256, and rows that start at 16-byte boundaries. "auto" on CUDA uses Hopper's
            kernels if they support the inputs and are faster, otherwise Triton's. They are not
            faster for "gelu_taylor" above D = 64, and with a bias for very short segments,
            "gelu_taylor", and "gelu" up to D = 64. "auto" on the CPU batches segments of equal
            lengths.
        pages: where the keys of each segment lie, if k and v are a storage of pages
            `[num_pages · page_rows, Hkv, ...]` instead of the segments' rows. kv_offsets and the
            bias's timestamps count the keys of the segments, as without pages. The kernels read the
            pages; the CPU path, "reference", and an autocast that changes k's dtype gather the rows
            first. For inference: nothing may require a gradient. Must be None with shared queries
            or keys, or several query groups.
        dropout_p: probability with which a weight activation(...) becomes 0; the others are divided
            by 1 - dropout_p, after softmax's sum. At least 0 and below 1, rounded to a multiple of
            2^-16.
        dropout_seed: int64 `[]`, on q's device or the host; if None, torch's generator of q's
            device draws one. Which weights become 0 follows from the seed, the query head, the
            places of query row and key in their segment, and the row of the output in which this
            segment starts, as `jagged_modules.dropout` says. It depends on nothing else: no
            implementation, mask, or length of another segment. With shared keys, all rows of q are
            one segment. Under `batch_invariant`, the row in which a segment starts does not count:
            all segments drop the same weights. Seeds below 2^62 from a generator are independent.
            Seeds whose difference is in their lowest bits, as 0 and 1, exchange what heads drop: a
            count of steps is no good seed.

    Returns:
        `[Lq, H, Dv]`; `[B · S, H, Dv]` for shared q. Rows behind the last segment, which only
        offsets on a device can have, are 0. So are the gradients of such rows of q, k and v, and
        NaN there reaches nothing.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes, devices, heads, offsets or the schedule do not match; an unknown
            name.
        RuntimeError: a second derivative, or a torch.func transform (vmap, grad, jvp); "reference"
            supports both. Also pages with a tensor that requires a gradient.
    """
    check_tensor("q", q, 3, "[Lq, H, D]", "jagged_attention", implementation)
    if getattr(pages, "scales", None) is None:  # else k and v are in 8 bits
        check_tensor("k", k, 3, "[Lk, Hkv, D]", "jagged_attention", implementation)
        check_tensor("v", v, 3, "[Lk, Hkv, Dv]", "jagged_attention", implementation)
    rule = mask if isinstance(mask, AttentionMask) else None
    options = AttentionOptions(
        activation, scale, output_scale, rule, bias, schedule, implementation, pages, dropout_p,
        dropout_seed,
    )  # fmt: skip
    queries = Side(q_offsets, max_seqlen_q)
    keys = Side(q_offsets if kv_offsets is None else kv_offsets, max_seqlen_kv)
    if score is not None or mask is not rule:
        return attention_by_functions(q, k, v, queries, keys, options, score, mask)
    return computed(parse_arguments(q, k, v, queries, keys, options))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: RowSegments | None,
    keys: RowSegments | None,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """`jagged_attention` of operands with three dimensions, and segments and options that need no
    checks: those of a layer. queries, keys: None where all segments share the operand."""
    return computed(checked_call(q, k, v, queries, keys, options))


def computed(parsed: ParsedAttention) -> Tensor:
    """The result of an attention of any implementation."""
    call, row_scale = parsed.call, parsed.row_scale
    q, k, v, _, params, _ = call
    if params.implementation == "reference":
        out = _by_definition(parsed)
    elif _is_for_the_cpu(q, params.implementation):
        out = attention_cpu(call)
    else:
        from jagged_kernels.attention.op import attention

        trains = q.requires_grad or k.requires_grad or v.requires_grad
        out = attention(_with_schedule(call, trains and torch.is_grad_enabled()))
    return out if row_scale is None else (out * row_scale[:, None, None]).to(parsed.dtype)


def attention_forward(
    call: AttentionCall, trains: bool, clears: bool = True
) -> tuple[Tensor, Tensor, Arguments]:
    """The attention inside a layer's autograd node: out, lse, and the arguments for
    `packed_gradients` or `attention_backward`. trains: a backward follows. clears: False where the
    node clears the rows of out behind the last segment."""
    if _is_for_the_cpu(call.q, call.params.implementation):
        return cpu_forward(call)
    from jagged_kernels.attention.op import launch, prepared, triton_attention

    arguments, tiled = prepared(_with_schedule(call, trains))
    out, lse = triton_attention(*arguments) if tiled is None else launch(*tiled, clears)
    return out, lse, arguments


def attention_backward(
    do: Tensor, results: list[Tensor | None], *arguments: Any
) -> tuple[Tensor, ...]:
    """dq, dk, dv and the gradients of the tables, in a layer's node."""
    if _is_for_the_cpu(do, Arguments(*arguments).implementation):
        return cpu_backward(do, results, *arguments)
    from jagged_kernels.attention import op

    return op.attention_backward(do, results, *arguments)


def packed_gradients(
    do: Tensor,
    results: list[Tensor | None],
    together: bool,
    *arguments: Any,
    rows: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of the projections in a layer's node, each in one tensor. Keys are not shared.

    Args:
        rows: of the two results, if there are more than those of q and of k, behind which are 0.

    Returns:
        With `together`, where the first rows of queries are those of the keys:
        `[rows, (H + 2 Hkv) · D]` of `[q | k | v]`, twice.
        Without: `[rows, H · D]` of q, in fp32 on a GPU if all segments share q, and
        `[keys, 2 Hkv · D]` of `[k | v]`.
    """
    (q, k), outs = arguments[:2], PackedGradients.empty(arguments[:3], together, rows)
    of_queries, of_keys = outs[:2]
    q_shared, _, has_tail, *_ = Arguments(*arguments).options
    if rows is not None and not (has_tail and do.is_cuda):  # else kernels clear them
        zeroed_behind(of_queries, q.shape[0])
        if of_keys is not None:
            zeroed_behind(of_keys, k.shape[0])
    if do.is_cuda:
        from jagged_kernels.attention.op import attention_packed_backward

        if q_shared:  # rows for each segment, then a sum in a fixed order
            parts = q.new_empty(do.shape[0], q.shape[1] * q.shape[2], dtype=torch.float32)
            outs = outs._replace(of_queries=parts)
        attention_packed_backward(do, results, outs, *arguments)
        if q_shared:
            parts = torch.unflatten(outs.of_queries, 0, (do.shape[0] // len(q), len(q)))
            of_queries = parts.sum(0)
    else:
        cpu_packed_backward(do, results, *outs, *arguments)
    return of_queries, of_queries if of_keys is None else of_keys


def attention_arguments(
    like: Tensor,
    q_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    segments: RowSegments,
    options: AttentionOptions,
) -> Arguments:
    """The arguments of attention's operators for the self-attention of rows that a caller computes
    later: all but q, k and v, in whose place are tensors of their shapes. like: `[]`, of the dtype
    and device of q, k and v. q_shape: of q and of k. v_shape: of v."""
    from jagged_kernels.attention.op import operator_arguments

    q, v = like.expand(q_shape), like.expand(v_shape)
    call = checked_call(q, q, v, segments, segments, options).call
    return operator_arguments(_with_schedule(call, torch.is_grad_enabled()))


def _is_for_the_cpu(x: Tensor, implementation: str) -> bool:
    """Whether the CPU path computes, not the kernels: also for meta tensors, whose results have
    shapes alone."""
    return implementation == "auto" and not x.is_cuda


def _by_definition(parsed: ParsedAttention) -> Tensor:
    q, k, v, segments, params, _ = parsed.call
    out = attention_reference(
        q,
        k,
        v,
        segments.q_offsets,
        segments.kv_offsets,
        scale=params.scale,
        q_shared=segments.q_shared,
        activation=params.activation,
        mask=parsed.mask,
        output_scale=params.output_scale if params.segment_scale is None else params.segment_scale,
        bias=parsed.bias,
        dropout=Dropout.of(params),
    )
    return out if segments.q_shared else padded_to(out, q.shape[0])


def _with_schedule(call: AttentionCall, trains: bool) -> AttentionCall:
    """The call with a schedule; without one, the device makes it. trains: for a backward too. And
    with the buckets of a bias by time, if the host can know how many there are."""
    q, k, v, segments, p, schedule = call
    if schedule:
        if p.time_bias is None or is_recording(q.device):
            return call
        from jagged_kernels.attention.op import with_buckets

        return with_buckets(call)
    # In a graph of torch.compile, sizes are not known: the backward chooses its own tiles.
    needs_backward = trains and not (segments.kv_shared or torch.compiler.is_compiling())
    schedule = device_schedule(
        call.problem(q_rows=segments.num_output_rows(q), kv_rows=segments.num_keys(k)),
        segments.q_offsets,
        segments.kv_offsets,
        mask=None if p.mask is None else list(p.mask),
        num_targets=p.num_targets,
        backward=needs_backward,
    )
    return AttentionCall(q, k, v, segments, p, schedule)
