"""An attention's arguments, parsed into one AttentionCall. Nothing below checks them again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jagged_kernels.attention.pages import Pages
from jagged_kernels.attention.params import AttentionCall, AttentionParams, Segments
from jagged_kernels.schedule.cost import MaskParams
from jagged_kernels.schedule.host import TileSchedule, num_query_groups
from torch import Tensor
from torch.nn.functional import pad

from ..autocast import autocast_operands
from ..bias import RelativeBias
from ..masks import AttentionMask, check_num_targets
from ..scalars import check_kind
from ..segments import (
    RowSegments,
    check_device,
    check_offsets,
    normal_form,
    parse_segments,
    values_are_checkable,
)
from ..settings import backward_workspace, is_batch_invariant
from ..tracing import is_symbolic
from ..validation import check_implementation, refuse_transforms
from .attention_bias import check_bias, with_bias
from .attention_checks import (
    ATTENTION_IMPLEMENTATIONS,
    check_mask,
    check_operands,
    check_output_scale,
    check_scalars,
    check_schedule,
    check_schedule_of,
    check_shared,
)
from .paged_keys import paged_keys
from .segment_scale import expand_to_rows


class AttentionOptions(NamedTuple):
    """The arguments of `jagged_attention` besides the operands and their segments."""

    activation: str = "softmax"
    scale: float | None = None
    output_scale: float | Tensor = 1
    mask: AttentionMask | None = None
    bias: RelativeBias | None = None
    schedule: TileSchedule | None = None
    implementation: str = "auto"
    pages: Pages | None = None


DEFAULT_OPTIONS = AttentionOptions()


class Side(NamedTuple):
    """The segments of the queries or of the keys, as a caller of a public function gives them."""

    offsets: Any  # a tensor, or "shared"
    max_seqlen: int | None = None


class ParsedAttention(NamedTuple):
    """An attention's arguments, parsed.

    Attributes:
        call: what kernels and the CPU path take.
        mask, bias: as the definition takes them.
        row_scale: the factor of each row of the call's result that is left to the caller, or None.
        dtype: of the result.
    """

    call: AttentionCall
    mask: AttentionMask | None
    bias: RelativeBias | None
    row_scale: Tensor | None
    dtype: torch.dtype


def parse_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Side | RowSegments,
    keys: Side | RowSegments,
    options: AttentionOptions,
) -> ParsedAttention:
    """Check the arguments of an attention and bring them into the form that implementations
    take."""
    activation, scale, output_scale, mask, bias, schedule, implementation, pages = options
    if pages is not None:
        k, v, pages = paged_keys(pages, (q, k, v), queries, keys, options)
    q, k, v = autocast_operands(q, k, v)
    check_operands(q, k, v)
    for name, side in (("q_offsets", queries), ("kv_offsets", keys)):
        if isinstance(side.offsets, str):
            check_shared(name, side.offsets)
        elif isinstance(side.offsets, Tensor):
            check_device(name, side.offsets, q.device, "q's")
    check_scalars(activation, scale, output_scale)
    check_mask(mask, isinstance(keys.offsets, str))
    check_implementation(implementation, ATTENTION_IMPLEMENTATIONS, q.device)
    check_schedule_of(q, schedule)
    if bias is not None:
        check_kind("bias", bias, RelativeBias, "a RelativeBias")
    if implementation != "reference":
        refuse_transforms("jagged_attention does")
    kv_rows = k.shape[0] if pages is None else pages.num_rows
    segments = _segments(q, kv_rows, queries, keys, mask, pages)
    if bias is not None:
        if segments.q_shared or segments.share_keys:
            raise ValueError(
                "bias must be None where segments share queries or keys, or with several query"
                " groups: rows have no position"
            )
        bias = check_bias(bias, q, kv_rows, queries.offsets, keys.offsets)
    if mask is not None and mask.hides_nothing():
        mask = None

    params = AttentionParams(
        scale=q.shape[2] ** -0.5 if scale is None else float(scale),
        activation=activation,
        mask=None if mask is None else MaskParams(*mask.params),
        output_scale=1.0,  # torch.compile makes a symbol of a float default
        batch_invariant=is_batch_invariant(implementation),
        implementation=implementation,
        workspace=backward_workspace.current(),
    )
    if mask is not None and mask.num_targets is not None:
        params = params._replace(num_targets=normal_form(mask.num_targets, q.device))
    if bias is not None and implementation != "reference":
        params = with_bias(params, bias, q.dtype)
    if schedule is not None and (q.is_cuda or implementation in ("triton", "hopper")):
        schedule = schedule.to(q.device, non_blocking=True)
        if values_are_checkable(schedule.num_tiles) and not segments.kv_shared:
            check_schedule(schedule, segments.q_offsets, segments.kv_offsets)
    call = AttentionCall(q, k, v, segments, params, schedule)
    call, row_scale = _with_output_scale(call, output_scale)
    if segments.kv_shared:
        call = _one_segment(call)
    return ParsedAttention(call, mask, bias, row_scale, q.dtype)


def _parsed(
    side: Side | RowSegments, name: str, rows: int, device: torch.device, longest: str
) -> RowSegments:
    """The segments of an operand with so many rows. longest: the name of max_seqlen in errors."""
    if isinstance(side, RowSegments):
        return side
    check_offsets(name, side.offsets, rows, side.max_seqlen, longest)
    return parse_segments(name, side.offsets, rows, device)


def _segments(
    q: Tensor,
    kv_rows: int,
    queries: Side | RowSegments,
    keys: Side | RowSegments,
    mask: AttentionMask | None,
    pages: Pages | None,
) -> Segments:
    """The segments, with their sizes and the offsets' values checked. With shared keys, each
    segment of queries has all of them."""
    same_offsets = keys.offsets is queries.offsets
    if isinstance(queries.offsets, str) and isinstance(keys.offsets, str):
        raise ValueError(
            'q_offsets and kv_offsets cannot both be "shared": the number of segments would be'
            " unknown"
        )
    own = others = None
    if not isinstance(queries.offsets, str):
        own = _parsed(queries, "q_offsets", q.shape[0], q.device, "max_seqlen_q")
        if same_offsets and kv_rows != q.shape[0]:
            raise ValueError(
                f"k must have q's rows, {q.shape[0]}, because they have the same offsets, got"
                f" {kv_rows}"
            )
        if isinstance(keys.offsets, str):
            return Segments(own.offsets, own.offsets, kv_shared=True, has_tail=own.has_tail)
        if same_offsets and isinstance(keys, Side) and keys.max_seqlen is None:
            others = own
    if others is None:
        others = _parsed(keys, "kv_offsets", kv_rows, q.device, "max_seqlen_kv")
    if own is None:
        kv_offsets = others.offsets
        steps = torch.arange(kv_offsets.shape[0], dtype=kv_offsets.dtype, device=q.device)
        segments = Segments(steps * q.shape[0], kv_offsets, q_shared=True)
    else:
        kv_offsets = own.offsets if same_offsets else others.offsets
        segments = Segments(own.offsets, kv_offsets, has_tail=own.has_tail)
        if segments.share_keys:
            num_keys = kv_offsets.shape[0] - 1
            num_query_groups("q_offsets", segments.num_segments, "kv_offsets", num_keys, mask)
    if mask is not None:
        check_num_targets("mask.num_targets", mask.num_targets, keys.offsets, q.device, "q's")
    if pages is not None or same_offsets:  # pages have no rows behind the last segment
        return segments._replace(pages=pages)
    return segments._replace(has_tail=segments.has_tail or others.has_tail)


def _one_segment(call: AttentionCall) -> AttentionCall:
    """With shared keys, query rows do not interact: all of them form one segment."""
    q_offsets, k = call.segments.q_offsets, call.k
    ends = torch.arange(2, dtype=q_offsets.dtype, device=q_offsets.device)
    num_queries = q_offsets.select(0, -1) if call.segments.has_tail else call.q.shape[0]
    segments = call.segments._replace(q_offsets=ends * num_queries, kv_offsets=ends * k.shape[0])
    return call._replace(segments=segments, schedule=None)


def _with_output_scale(
    call: AttentionCall, output_scale: float | Tensor
) -> tuple[AttentionCall, Tensor | None]:
    """The call with the factors of its output, and what is left of them for each row."""
    q, segments, implementation = call.q, call.segments, call.params.implementation
    if not isinstance(output_scale, Tensor):
        if not is_symbolic(output_scale):
            params = call.params._replace(output_scale=float(output_scale))
            return call._replace(params=params), None
        dtype = torch.promote_types(q.dtype, torch.float32)
        output_scale = q.new_full((segments.num_segments,), output_scale, dtype=dtype)
    check_output_scale(output_scale, segments.num_segments, q.device)
    output_scale = normal_form(output_scale, q.device)
    needs_split = segments.share_keys or output_scale.requires_grad
    if not segments.kv_shared and (implementation == "reference" or not needs_split):
        return call._replace(params=call.params._replace(segment_scale=output_scale)), None
    factor, rows = _split_scale(output_scale, q, segments, call.params.batch_invariant)
    call = call._replace(params=call.params._replace(segment_scale=factor))
    if q.dtype == torch.float16 and segments.share_keys:
        # before its segment's scale is applied, a result may overflow fp16
        if implementation == "hopper":
            raise ValueError(
                "implementation 'hopper' takes no tensor output_scale in fp16 where segments"
                " share keys: use bf16, a number, or 'auto'"
            )
        q, k, v = (x.float() for x in (q, call.k, call.v))
        call = call._replace(q=q, k=k, v=v, schedule=None)
    return call, rows


def _split_scale(
    output_scale: Tensor, q: Tensor, segments: Segments, batch_invariant: bool
) -> tuple[Tensor, Tensor]:
    """output_scale `[B]` as a product of two factors: one that the kernels apply before they round,
    and the rest, in fp32 or fp64.

    The kernels compute no gradient for their factor, so it is detached. Segments that share keys
    may be in one tile, for which the kernels have one factor: a power of two above the largest
    finite scale of the batch, or 1 if batch-invariant.

    Returns:
        The kernels' factor, for each of their segments, and the rest for each row of the output.
    """
    dtype = torch.promote_types(torch.promote_types(output_scale.dtype, q.dtype), torch.float32)
    output_scale = output_scale.to(dtype)
    factor = output_scale.detach()
    if segments.share_keys and batch_invariant:
        factor = factor.new_ones(())
    # scaling by a power of two is exact, so no result depends on another segment's scale
    elif segments.share_keys:
        largest = pad(factor.abs().nan_to_num(nan=0.0, posinf=0.0), (0, 1)).amax()
        factor = largest / torch.frexp(largest).mantissa.clamp(min=0.5)
    factor = torch.where(factor == 0, 1, factor)
    rows = q.shape[0] * (segments.num_segments if segments.q_shared else 1)
    rest = expand_to_rows(output_scale / factor, segments.q_offsets, rows, segments.has_tail)
    return factor.expand(1 if segments.kv_shared else segments.num_segments), rest
