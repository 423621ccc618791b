"""The AttentionCall of operands, segments and options that are parsed. Nothing below checks them
again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jagged_kernels.attention.pages import Pages
from jagged_kernels.attention.params import AttentionCall, AttentionParams, Segments
from jagged_kernels.schedule.host import TileSchedule, mask_of_groups
from torch import Tensor
from torch.nn.functional import pad

from ..bias import RelativeBias
from ..dropout import parse_dropout
from ..dtypes import autocast, autocast_operands
from ..masks import AttentionMask
from ..scalars import check_shape
from ..segments import RowSegments, check_device, normal_form
from ..settings import backward_workspace, is_batch_invariant
from ..tracing import is_symbolic
from ..validation import MAX_HEAD_DIM, check_dtype, refuse_transforms
from .attention_bias import with_bias
from .paged_keys import readable_keys


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
    dropout_p: float = 0
    dropout_seed: Tensor | None = None


DEFAULT_OPTIONS = AttentionOptions()


class ParsedAttention(NamedTuple):
    """An attention, ready to be computed.

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


def checked_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: RowSegments | None,
    keys: RowSegments | None,
    options: AttentionOptions,
) -> ParsedAttention:
    """`parsed_call` of operands that a caller or a module gives, in the dtype of autocast.
    WrongDtype if the device has no attention for q's, ValueError if q, k and v do not match,
    RuntimeError inside a torch.func transform, except by definition, and under torch.jit.trace."""
    pages, implementation = options.pages, options.implementation
    if pages is not None and keys is not None:
        k, v, pages = readable_keys(pages, keys.offsets, (q, k, v), implementation)
    scaled = pages is not None and pages.scales is not None
    q, k, v = (autocast(q), k, v) if scaled else autocast_operands(q, k, v)
    check_dtype("q", q, "jagged_attention", implementation)
    check_operands(q, k, v, scaled=scaled)
    if implementation != "reference":
        refuse_transforms("jagged_attention does")
    jit: Any = torch.jit  # is_tracing has no annotation
    if jit.is_tracing():
        raise RuntimeError("attention cannot be recorded by torch.jit.trace: use torch.export")
    return parsed_call(q, k, v, queries, keys, options._replace(pages=pages))


def parsed_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: RowSegments | None,
    keys: RowSegments | None,
    options: AttentionOptions,
) -> ParsedAttention:
    """The call of operands that need no checks: those of a layer's node. queries, keys: None where
    all segments share the operand."""
    activation, scale, output_scale, mask, bias, schedule, implementation, pages, *_ = options
    segments = _segments(q, queries, keys, pages)
    is_constant = not isinstance(output_scale, Tensor) and not is_symbolic(output_scale)
    params = AttentionParams(
        scale=q.shape[2] ** -0.5 if scale is None else float(scale),
        activation=activation,
        # torch.compile makes a symbol of a float default
        output_scale=float(output_scale) if is_constant else 1.0,
        batch_invariant=is_batch_invariant(implementation),
        implementation=implementation,
        workspace=backward_workspace.current(),
        dropout_p=0.0,  # as above
    )
    if options.dropout_p:
        p, seed = parse_dropout(options.dropout_p, options.dropout_seed, q)
        params = params._replace(dropout_p=p, dropout_seed=seed)
    if mask is not None and mask.hides_nothing():
        mask = None
    if mask is not None:
        params = params._replace(mask=mask_of_groups(mask.params, segments.query_groups))
        if mask.num_targets is not None:
            params = params._replace(num_targets=normal_form(mask.num_targets, q.device))
    if bias is not None:
        bias = bias.with_boundaries()
        if implementation != "reference":
            params = with_bias(params, bias, q.dtype)
    if schedule is not None and (q.is_cuda or implementation in ("triton", "hopper")):
        schedule = schedule.to(q.device, non_blocking=True)
    call = AttentionCall(q, k, v, segments, params, schedule)
    row_scale = None
    if not is_constant:
        call, row_scale = _with_output_scale(call, output_scale)
    if segments.kv_shared:
        call = _one_segment(call)
    return ParsedAttention(call, mask, bias, row_scale, q.dtype)


def check_operands(
    q: Tensor, k: Tensor, v: Tensor, q_name: str = "q", scaled: bool = False
) -> None:
    """ValueError unless q, k and v, cast by autocast already, match. q_name: what the caller calls
    q. scaled: k and v are in 8 bits."""
    dtype, device = q.dtype, q.device
    for name, x in (("k", k), ("v", v)):
        if x.dtype != dtype and not scaled:
            raise ValueError(f"{name} must have {q_name}'s dtype, {dtype}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name} must be on {q_name}'s device, {device}, got {x.device}")
    heads, head_dim = q.shape[1:]
    _, kv_heads, k_dim = k.shape
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"v must have k's rows and heads, {list(k.shape[:2])}, got {list(v.shape[:2])}"
        )
    if k_dim != head_dim:
        raise ValueError(f"k must have {q_name}'s head dim, {head_dim}, got {k_dim}")
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{q_name}'s heads must be a multiple of k's, got {heads} and {kv_heads}")
    for name, dim in ((q_name, head_dim), ("v", v.shape[2])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name}'s head dim must be 1 to {MAX_HEAD_DIM}, got {dim}")


def _segments(
    q: Tensor, queries: RowSegments | None, keys: RowSegments | None, pages: Pages | None
) -> Segments:
    """With shared keys, each segment of queries has all of them."""
    if keys is None:
        assert queries is not None
        return Segments(queries.offsets, queries.offsets, kv_shared=True, has_tail=queries.has_tail)
    # pages have no rows behind the last segment
    has_tail = keys.has_tail and pages is None
    if queries is None:
        steps = torch.arange(keys.offsets.shape[0], dtype=keys.offsets.dtype, device=q.device)
        return Segments(steps * q.shape[0], keys.offsets, q_shared=True, has_tail=has_tail)
    has_tail = has_tail or queries.has_tail
    return Segments(queries.offsets, keys.offsets, has_tail=has_tail, pages=pages)


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
    """The call with the factors of its output, which are no constant, and what is left of them for
    each row."""
    q, segments, implementation = call.q, call.segments, call.params.implementation
    if not isinstance(output_scale, Tensor):
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


def check_output_scale(output_scale: Tensor, num_segments: int, device: torch.device) -> None:
    check_shape("output_scale", output_scale, "[B]", num_segments)
    check_device("output_scale", output_scale, device, "q's")


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


def expand_to_rows(x: Tensor, offsets: Tensor, num_rows: int, has_tail: bool = False) -> Tensor:
    """x[b] repeated for each row of segment b: `[B]` to `[num_rows]`. offsets are `[B + 1]` on x's
    device. The gradient is summed in a fixed order. That of torch.repeat_interleave is not
    deterministic on a GPU. has_tail: there may be rows behind the last segment, whose value is
    0."""
    if has_tail:  # they are the rows of one more segment
        x, offsets = pad(x, (0, 1)), torch.cat([offsets, offsets.narrow(0, 0, 1) + num_rows])
    if x.is_cuda and x.requires_grad and x.dtype == torch.float32:
        return _ExpandToRows.apply(x, offsets, num_rows)  # type: ignore[no-untyped-call]  # unannotated in torch
    return torch.repeat_interleave(x, offsets.diff(), output_size=num_rows)


class _ExpandToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(offsets)
        return torch.repeat_interleave(x, offsets.diff(), output_size=num_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from jagged_kernels.matmul.op import triton_jagged_sum

        (grad,), (offsets,) = grads, ctx.saved_tensors
        return triton_jagged_sum(grad.unsqueeze(1), offsets).squeeze(1), None, None
