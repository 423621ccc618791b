"""Attention of jagged queries to jagged keys and values."""

from __future__ import annotations

import torch
from jagged_kernels.attention.pages import Pages
from jagged_kernels.attention.params import AttentionCall, AttentionParams, MaskParams, Segments
from jagged_kernels.attention.select import AttentionProblem
from jagged_kernels.schedule.host import TileSchedule
from torch import Tensor
from torch.nn.functional import pad

from ..autocast import autocast_operands
from ..bias import RelativeBias
from ..cpu.attention import attention_cpu
from ..masks import AttentionMask
from ..reference import attention_reference
from ..scalars import check_kind
from ..schedule import device_schedule
from ..settings import backward_workspace, is_batch_invariant
from ..tracing import is_symbolic
from ..validation import check_tensor, normal_form, refuse_transforms, values_are_checkable
from .attention_bias import check_bias, with_bias
from .attention_checks import (
    AttentionSegments,
    check_attention,
    check_output_scale,
    check_schedule,
    check_segments,
)
from .paged_keys import paged_keys
from .segment_scale import expand_to_rows
from .tail import may_have_tail, padded_to


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
    mask: AttentionMask | None = None,
    bias: RelativeBias | None = None,
    schedule: TileSchedule | None = None,
    implementation: str = "auto",
    pages: Pages | None = None,
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
        mask: which keys each query row sees; all if None. Must be None with shared keys or several
            query groups.
        bias: learned biases of the scores by relative position and time, on q's device. Its tables
            get gradients. Must be None with shared
            queries or keys, or several query groups: their rows have no position.
        schedule: the tile schedule of these lengths, from `Jagged.schedule` or `zigzag_schedule`.
            If None, it is built from the offsets, without a sync if they are on the device. Only
            the kernels use it.
        implementation: "auto", "reference", "triton" or "hopper". "hopper" needs compute capability
            9.0, a 16-bit dtype, D and Dv that are multiples of 8, both in 40 to 64 or both in 72 to
            128, and rows that start at 16-byte boundaries. "auto" on CUDA uses the Hopper kernels
            if they support the inputs and are faster, otherwise the Triton kernels. They are not
            faster for "gelu_taylor" above D = 64, and with a bias for very short segments,
            "gelu_taylor", and "gelu" up to D = 64. "auto" on the CPU batches segments of equal
            lengths.
        pages: where the keys of each segment lie, if k and v are a storage of pages
            `[num_pages · page_rows, Hkv, ...]` instead of the segments' rows. kv_offsets and the
            bias's timestamps count the keys of the segments, as without pages. The kernels read the
            pages; the CPU path, "reference", and an autocast that changes k's dtype gather the rows
            first. For inference: nothing may require a gradient. Must be None with shared queries
                or keys, or several query groups.

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
    for name, x, shape in (
        ("q", q, "[Lq, H, D]"),
        ("k", k, "[Lk, Hkv, D]"),
        ("v", v, "[Lk, Hkv, Dv]"),
    ):
        check_tensor(name, x, 3, shape, "jagged_attention", implementation)
    kv_offsets = q_offsets if kv_offsets is None else kv_offsets
    if pages is not None:
        k, v, pages = paged_keys(
            pages, q, k, v, q_offsets, kv_offsets, output_scale, bias, implementation
        )
    q, k, v = autocast_operands(q, k, v)
    check_attention(
        q,
        k,
        v,
        q_offsets,
        kv_offsets,
        scale,
        activation,
        output_scale,
        mask,
        schedule,
        implementation,
    )
    if bias is not None:
        check_kind("bias", bias, RelativeBias, "a RelativeBias")
    if implementation != "reference":
        refuse_transforms("jagged_attention does")
    kv_rows = k.shape[0] if pages is None else pages.num_rows
    segments = check_segments(q, kv_rows, q_offsets, kv_offsets, max_seqlen_q, max_seqlen_kv, mask)
    if bias is not None:
        if segments.q_shared or segments.share_keys:
            raise ValueError(
                "bias must be None where segments share queries or keys, or with several query"
                " groups: rows have no position"
            )
        bias = check_bias(bias, q, kv_rows, segments.q_offsets, segments.kv_offsets)
    has_tail = _may_have_tail(q, kv_rows, segments, pages)
    segments = segments.on(q.device)
    batch_invariant, workspace = is_batch_invariant(implementation), backward_workspace.current()
    if mask is not None and mask.hides_nothing():
        mask = None

    dtype, row_scale = q.dtype, None
    if not isinstance(output_scale, Tensor) and is_symbolic(output_scale):
        output_scale = q.new_full(
            (segments.num_segments,), output_scale, dtype=torch.promote_types(dtype, torch.float32)
        )
    if isinstance(output_scale, Tensor):
        check_output_scale(output_scale, segments.num_segments, q.device)
        output_scale = normal_form(output_scale, q.device)
        if (
            segments.kv_shared
            or (segments.groups > 1 or output_scale.requires_grad)
            and implementation != "reference"
        ):
            output_scale, row_scale = _split_scale(
                output_scale, q, segments, batch_invariant, has_tail
            )
            # before its segment's scale is applied, a result may overflow fp16
            if dtype == torch.float16 and segments.share_keys:
                if implementation == "hopper":
                    raise ValueError(
                        "implementation 'hopper' takes no tensor output_scale in fp16 where"
                        " segments share keys: use bf16, a number, or 'auto'"
                    )
                q, k, v, schedule = *(x.float() for x in (q, k, v)), None
    if segments.kv_shared:  # query rows do not interact, so all of them form one segment
        ends = torch.arange(2, dtype=segments.q_offsets.dtype, device=segments.q_offsets.device)
        num_queries = segments.q_offsets.select(0, -1) if has_tail else q.shape[0]
        segments = segments._replace(q_offsets=ends * num_queries, kv_offsets=ends * k.shape[0])

    params = AttentionParams(
        scale=q.shape[2] ** -0.5 if scale is None else float(scale),
        activation=activation,
        mask=None if mask is None else MaskParams(*mask.params),
        output_scale=1.0 if isinstance(output_scale, Tensor) else float(output_scale),
        batch_invariant=batch_invariant,
        implementation=implementation,
        workspace=workspace,
        num_targets=(
            None
            if mask is None or mask.num_targets is None
            else normal_form(mask.num_targets, q.device)
        ),
        segment_scale=output_scale if isinstance(output_scale, Tensor) else None,
    )
    if bias is not None and implementation != "reference":
        params = with_bias(params, bias, q.dtype)
    if implementation == "reference":
        out = attention_reference(
            q,
            k,
            v,
            segments.q_offsets,
            segments.kv_offsets,
            scale=params.scale,
            q_shared=segments.q_shared,
            activation=activation,
            mask=mask,
            output_scale=output_scale,
            bias=bias,
        )
        out = out if segments.q_shared else padded_to(out, q.shape[0])
    else:
        where = Segments(*segments[:4], has_tail, pages)
        out = _attend(AttentionCall(q, k, v, where, params, schedule))
    return out if row_scale is None else (out * row_scale[:, None, None]).to(dtype)


def attend_unchecked(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, scale: float
) -> Tensor:
    """`jagged_attention` with softmax, of operands and offsets on one device that are known to
    match."""
    refuse_transforms("jagged_attention does")
    params = AttentionParams(
        scale, batch_invariant=is_batch_invariant("auto"), workspace=backward_workspace.current()
    )
    segments = Segments(q_offsets, kv_offsets)
    return _attend(AttentionCall(*autocast_operands(q, k, v), segments, params))


def _may_have_tail(
    q: Tensor, kv_rows: int, segments: AttentionSegments, pages: Pages | None
) -> bool:
    """Whether there may be rows behind the last segment of queries or keys. Shared operands and
    pages have none."""
    sides = [] if segments.q_shared else [("q_offsets", segments.q_offsets, q.shape[0])]
    if (
        not segments.kv_shared
        and pages is None
        and not (sides and segments.kv_offsets is segments.q_offsets)
    ):
        sides += [("kv_offsets", segments.kv_offsets, kv_rows)]
    return any(may_have_tail(*side, q.device) for side in sides)


def _split_scale(
    output_scale: Tensor,
    q: Tensor,
    segments: AttentionSegments,
    batch_invariant: bool,
    has_tail: bool,
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
    rest = expand_to_rows(output_scale / factor, segments.q_offsets, rows, has_tail)
    return factor.expand(1 if segments.kv_shared else segments.num_segments), rest


def _attend(call: AttentionCall) -> Tensor:
    """By an implementation that takes a call: that of the CPU, or kernels."""
    if call.params.implementation == "auto" and call.q.device.type != "cuda":
        return attention_cpu(call)
    from jagged_kernels.attention.op import attention

    return attention(AttentionCall(*call[:-1], _schedule(call)))


def _schedule(call: AttentionCall) -> TileSchedule:
    """The call's schedule, checked, or one made on the device."""
    q, k, v, segments, p, schedule = call
    q_offsets, kv_offsets = segments.q_offsets, segments.kv_offsets
    if schedule is not None and not segments.kv_shared:
        schedule = schedule.to(q.device, non_blocking=True)
        if values_are_checkable(schedule.num_tiles):
            check_schedule(schedule, q_offsets, kv_offsets)
        return schedule
    problem = AttentionProblem(
        q.shape[2],
        v.shape[2],
        q.dtype,
        implementation=p.implementation,
        activation=p.activation,
        masked=p.mask is not None,
        biased=p.has_bias,
        timed=p.time_bias is not None,
        batch_invariant=p.batch_invariant,
    )
    return device_schedule(
        problem,
        q_offsets,
        kv_offsets,
        segments.num_output_rows(q),
        segments.num_keys(k),
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        mask=None if p.mask is None else list(p.mask),
        num_targets=p.num_targets,
        backward=False,
    )
