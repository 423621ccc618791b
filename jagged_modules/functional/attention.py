"""Attention of jagged queries to jagged keys and values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jagged_kernels.attention.pages import Pages
from jagged_kernels.attention.params import AttentionParams, MaskParams
from jagged_kernels.attention.select import AttentionProblem
from jagged_kernels.common.device import contiguous_last_dim
from jagged_kernels.schedule.cost import LoopedSide, is_short, one_pass_may_run
from jagged_kernels.schedule.host import TileSchedule, num_query_groups
from torch import Tensor
from torch.nn.functional import pad

from ..activations import ACTIVATIONS
from ..autocast import autocast, autocast_operands
from ..bias import RelativeBias
from ..containers.candidates import CandidateIndex
from ..cpu.attention import attention_cpu
from ..masks import AttentionMask, check_num_targets
from ..reference import attention_reference
from ..scalars import check_choice, check_kind, check_number
from ..schedule import device_schedule
from ..settings import backward_workspace, is_batch_invariant
from ..validation import (
    IMPLEMENTATIONS,
    MAX_HEAD_DIM,
    check_device,
    check_implementation,
    check_offsets,
    check_offsets_shape,
    check_tensor,
    refuse_transforms,
    values_are_checkable,
)
from .attention_bias import check_bias, with_bias
from .joined_rows import joined_rows
from .paged_keys import paged_keys
from .segment_scale import expand_to_rows

ATTENTION_IMPLEMENTATIONS = (*IMPLEMENTATIONS, "hopper")
BLOCKS = (16, 32, 64, 128)  # block sizes, in rows, that the kernels have tiles for
TILES = (*BLOCKS, 192)
SMALLEST_SCALE = 1e-20  # by which the kernels divide a bias


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
    output_scale: float | Tensor = 1,  # an int, because torch.compile makes a symbol of a float default
    mask: AttentionMask | None = None,
    bias: RelativeBias | None = None,
    schedule: TileSchedule | None = None,
    implementation: str = "auto",
    pages: Pages | None = None,
) -> Tensor:
    """Attention within the segments of jagged tensors: activation(scale · q kᵀ + bias) · output_scale · v for every segment and head.

    Gradients flow to q, k, v and a tensor output_scale. The result of a query row that sees no key is 0. Nothing is padded, and an operand
    that all segments share is not replicated. Blocks of keys that the mask hides from a whole tile of queries are skipped.

    Args:
        q: `[Lq, H, D]` fp32, fp16 or bf16 (on the CPU also fp64). Any row and head stride: views of a packed projection are read in place.
        k: `[Lk, Hkv, D]`, same dtype as q. H is a multiple of Hkv; query head h reads key head h // (H / Hkv).
        v: `[Lk, Hkv, Dv]`, same dtype. D and Dv are 1 to 256.
        q_offsets: int32 or int64, on q's device or the host. One of: `[B + 1]`; "shared": all segments use all rows of q `[S, H, D]`;
            `[n · B + 1]`: n query groups of B segments. Segments b, B + b, 2B + b, ... of q then read the keys and values of segment b,
            which are not copied.
        kv_offsets: the same for k and v. One of: `[B + 1]`; None: q_offsets (self-attention); "shared": all segments use all rows of k
            and v.
        max_seqlen_q, max_seqlen_kv: lengths of the longest segments, in rows. Host offsets are checked against them; nothing is truncated.
        activation: "softmax", or a pointwise function of each score: "identity", "relu", "relu_squared", "leaky_relu" (slope 0.01), "silu",
            "gelu", "gelu_tanh", "gelu_taylor" (within 4e-3 of GELU, no special-function unit), "hardswish", "sigmoid".
        scale: factor of q kᵀ before the activation; 1/sqrt(D) if None.
        output_scale: factor after the activation, for example HSTU's 1/N: a number, or a tensor `[B]`, one number for each segment of q.
            Must be 1 with softmax. With a tensor, fp16 operands are computed in fp32 if segments share keys. torch.compile recompiles for
            another number, but not for other values of a tensor.
        mask: which keys each query row sees; all if None. Must be None with shared keys or several query groups.
        bias: learned biases of the scores by relative position and time, on q's device. Its tables get gradients. Must be None with shared
            queries or keys, or several query groups: their rows have no position.
        schedule: the tile schedule of these lengths, from `Jagged.schedule` or `zigzag_schedule`. If None, it is built from the offsets,
            without a sync if they are on the device. Only the kernels use it.
        implementation: "auto", "reference", "triton" or "hopper". "hopper" needs compute capability 9.0, a 16-bit dtype, D and Dv that are
            multiples of 8, both in 40 to 64 or both in 72 to 128, and rows that start at 16-byte boundaries. "auto" on CUDA uses the
            Hopper kernels if they support the inputs and are faster, otherwise the Triton kernels. They are not faster for
            "gelu_taylor" above D = 64, and with a bias for very short segments, "gelu_taylor", and "gelu" up to D = 64. "auto" on the
            CPU batches segments of equal lengths.
        pages: where the keys of each segment lie, if k and v are a storage of pages `[num_pages · page_rows, Hkv, ...]` instead of the
            segments' rows. kv_offsets and the bias's timestamps count the keys of the segments, as without pages. The kernels read the
            pages; the CPU path, "reference", and an autocast that changes k's dtype gather the rows first. For inference: nothing may
            require a gradient. Must be None with shared queries or keys, or several query groups.

    Returns:
        `[Lq, H, Dv]`; `[B · S, H, Dv]` for shared q.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes, devices, heads, offsets or the schedule do not match; an unknown name.
        RuntimeError: a second derivative, or a torch.func transform (vmap, grad, jvp); "reference" supports both. Also pages with a tensor
            that requires a gradient.
    """
    for name, x, shape in (("q", q, "[Lq, H, D]"), ("k", k, "[Lk, Hkv, D]"), ("v", v, "[Lk, Hkv, Dv]")):
        check_tensor(name, x, 3, shape, "jagged_attention", implementation)
    kv_offsets = q_offsets if kv_offsets is None else kv_offsets
    if pages is not None:
        k, v, pages = paged_keys(pages, q, k, v, q_offsets, kv_offsets, output_scale, bias, implementation)
    q, k, v = autocast_operands(q, k, v)
    check_attention(q, k, v, q_offsets, kv_offsets, scale, activation, output_scale, mask, schedule, implementation)
    if bias is not None:
        check_kind("bias", bias, RelativeBias, "a RelativeBias")
    if implementation != "reference":
        refuse_transforms("jagged_attention does")
    kv_rows = k.shape[0] if pages is None else pages.num_rows
    segments = _check_segments(q, kv_rows, q_offsets, kv_offsets, max_seqlen_q, max_seqlen_kv, mask)
    if bias is not None:
        if segments.q_shared or segments.share_keys:
            raise ValueError("bias must be None where segments share queries or keys, or with several query groups: rows have no position")
        bias = check_bias(bias, q, kv_rows, segments.q_offsets, segments.kv_offsets)
    batch_invariant, workspace = is_batch_invariant(implementation), backward_workspace.current()
    if mask is not None and mask.hides_nothing():
        mask = None

    dtype, row_scale = q.dtype, None
    if isinstance(output_scale, Tensor):
        _check_output_scale(output_scale, segments.num_segments, q.device)
        if segments.kv_shared or (segments.groups > 1 or output_scale.requires_grad) and implementation != "reference":
            output_scale, row_scale = _split_scale(output_scale, q, segments, batch_invariant)
            if dtype == torch.float16 and segments.share_keys:  # before its segment's scale is applied, a result may overflow fp16
                if implementation == "hopper":
                    raise ValueError(
                        "implementation 'hopper' takes no tensor output_scale in fp16 where segments share keys: "
                        "use bf16, a number, or 'auto'"
                    )
                q, k, v, schedule = *(x.float() for x in (q, k, v)), None
    if segments.kv_shared:  # query rows do not interact, so all of them form one segment
        ends = torch.arange(2, dtype=segments.q_offsets.dtype, device=segments.q_offsets.device)
        segments = segments._replace(q_offsets=ends * q.shape[0], kv_offsets=ends * k.shape[0])

    params = AttentionParams(
        scale=q.shape[2] ** -0.5 if scale is None else float(scale),
        q_shared=segments.q_shared,
        activation=activation,
        mask=None if mask is None else list(mask.params),
        output_scale=1.0 if isinstance(output_scale, Tensor) else float(output_scale),
        batch_invariant=batch_invariant,
        table_gradients=False,
        num_targets=None if mask is None else mask.num_targets,
        segment_scale=output_scale if isinstance(output_scale, Tensor) else None,
    )
    if bias is not None and implementation != "reference":
        params = with_bias(params, bias, q.dtype)
    offsets = segments.q_offsets, segments.kv_offsets
    if implementation == "reference":
        out = attention_reference(
            q, k, v, *offsets, scale=params.scale, q_shared=params.q_shared, activation=activation, mask=mask, output_scale=output_scale,
            bias=bias,
        )  # fmt: skip
    elif implementation == "auto" and q.device.type != "cuda":
        out, _ = attention_cpu(q, k, v, *offsets, *params)
    else:
        out = _triton_attention(q, k, v, segments, params, schedule, implementation, workspace, pages)
    return out if row_scale is None else (out * row_scale[:, None, None]).to(dtype)


def attend_unchecked(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, scale: float) -> Tensor:
    """`jagged_attention` with softmax, of operands and offsets on one device that are known to match."""
    refuse_transforms("jagged_attention does")
    q, k, v = autocast_operands(q, k, v)
    params = AttentionParams(scale, False, "softmax", None, 1.0, is_batch_invariant("auto"), False, None, None)
    if q.device.type != "cuda":
        return attention_cpu(q, k, v, q_offsets, kv_offsets, *params)[0]
    segments = _Segments(q_offsets, kv_offsets, q_shared=False, kv_shared=False, groups=1)
    return _triton_attention(q, k, v, segments, params, None, "auto", backward_workspace.current())


class _Segments(NamedTuple):
    """The segments of an attention.

    Attributes:
        q_offsets, kv_offsets: offsets of query rows, of the output's if q is shared, and of keys.
        q_shared, kv_shared: whether all segments use all rows of q, or of k and v.
        groups: number of query groups.
    """

    q_offsets: Tensor
    kv_offsets: Tensor
    q_shared: bool
    kv_shared: bool
    groups: int

    @property
    def num_segments(self) -> int:
        return self.q_offsets.shape[0] - 1

    @property
    def share_keys(self) -> bool:
        """Whether several segments of queries read the same keys."""
        return self.kv_shared or self.groups > 1


def _check_segments(
    q: Tensor, kv_rows: int, q_offsets: Tensor | str, kv_offsets: Tensor | str, max_seqlen_q: int | None, max_seqlen_kv: int | None,
    mask: AttentionMask | None,
) -> _Segments:  # fmt: skip
    """The segments, with their sizes and the offsets' values checked. With shared keys, each segment of queries has all of them."""
    same = kv_offsets is q_offsets and max_seqlen_kv is None
    if not isinstance(q_offsets, str):
        check_offsets("q_offsets", q_offsets, q.shape[0], max_seqlen_q, "max_seqlen_q")
        if kv_offsets is q_offsets and kv_rows != q.shape[0]:
            raise ValueError(f"k must have q's rows, {q.shape[0]}, because they have the same offsets, got {kv_rows}")
    if isinstance(kv_offsets, str):
        if isinstance(q_offsets, str):
            raise ValueError('q_offsets and kv_offsets cannot both be "shared": the number of segments would be unknown')
        return _Segments(q_offsets, q_offsets, q_shared=False, kv_shared=True, groups=1)
    if not same:
        check_offsets("kv_offsets", kv_offsets, kv_rows, max_seqlen_kv, "max_seqlen_kv")
    if isinstance(q_offsets, str):
        q_offsets = torch.arange(kv_offsets.shape[0], dtype=kv_offsets.dtype, device=kv_offsets.device) * q.shape[0]
        segments = _Segments(q_offsets, kv_offsets, q_shared=True, kv_shared=False, groups=1)
    else:
        segments = _Segments(q_offsets, kv_offsets, q_shared=False, kv_shared=False, groups=1)
        if not same and q_offsets.shape != kv_offsets.shape:
            groups = num_query_groups("q_offsets", segments.num_segments, "kv_offsets", kv_offsets.shape[0] - 1, mask)
            segments = segments._replace(groups=groups)
    if mask is not None:
        check_num_targets("mask.num_targets", mask.num_targets, kv_offsets, q.device, "q's")
    return segments


def _split_scale(output_scale: Tensor, q: Tensor, segments: _Segments, batch_invariant: bool) -> tuple[Tensor, Tensor]:
    """output_scale `[B]` as a product of two factors: one that the kernels apply before they round, and the rest, in fp32 or fp64.

    The kernels compute no gradient for their factor, so it is detached. Segments that share keys may be in one tile, for which the kernels
    have one factor: a power of two above the largest finite scale of the batch, or 1 if batch-invariant.

    Returns:
        The kernels' factor, for each of their segments, and the rest for each row of the output.
    """
    dtype = torch.promote_types(torch.promote_types(output_scale.dtype, q.dtype), torch.float32)
    output_scale = output_scale.to(q.device, dtype, non_blocking=True)
    factor = output_scale.detach()
    if segments.share_keys and batch_invariant:
        factor = factor.new_ones(())
    elif segments.share_keys:  # scaling by a power of two is exact, so no result depends on another segment's scale
        largest = pad(factor.abs().nan_to_num(nan=0.0, posinf=0.0), (0, 1)).amax()
        factor = largest / torch.frexp(largest).mantissa.clamp(min=0.5)
    factor = torch.where(factor == 0, 1, factor)
    rows = q.shape[0] * (segments.num_segments if segments.q_shared else 1)
    rest = expand_to_rows(output_scale / factor, segments.q_offsets.to(q.device, non_blocking=True), rows)
    return factor.expand(1 if segments.kv_shared else segments.num_segments), rest


def _triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: _Segments,
    params: AttentionParams,
    schedule: TileSchedule | None,
    implementation: str,
    workspace: int | None,
    pages: Pages | None = None,
) -> Tensor:
    from jagged_kernels.attention.op import attention, paged_attention

    device, kv_shared, kv_rows = q.device, segments.kv_shared, k.shape[0] if pages is None else pages.num_rows
    q, k, v = contiguous_last_dim(q), contiguous_last_dim(k), contiguous_last_dim(v)
    # The kernels compute row maxima of unscaled scores, so scale must be > 0. They divide a bias by the scale.
    if params.scale <= 0 and params.activation == "softmax" or params.has_bias and abs(params.scale) < SMALLEST_SCALE:
        q, params = q * params.scale, params._replace(scale=1.0)
    self_attention = segments.kv_offsets is segments.q_offsets
    q_offsets = _on_device(segments.q_offsets, device)
    kv_offsets = q_offsets if self_attention else _on_device(segments.kv_offsets, device)
    if params.num_targets is not None:
        params = params._replace(num_targets=params.num_targets.to(device, non_blocking=True).contiguous())
    if params.segment_scale is not None:
        params = params._replace(segment_scale=params.segment_scale.to(device, torch.float32, non_blocking=True).contiguous())
    if schedule is None or kv_shared:
        problem = AttentionProblem(
            q.shape[2],
            v.shape[2],
            q.dtype,
            implementation=implementation,
            activation=params.activation,
            masked=params.mask is not None,
            biased=params.has_bias,
            timed=params.time_bias is not None,
            batch_invariant=params.batch_invariant,
        )
        q_rows = q.shape[0] * (q_offsets.shape[0] - 1) if params.q_shared else q.shape[0]
        schedule = device_schedule(
            problem, q_offsets, kv_offsets, q_rows, kv_rows, num_heads=q.shape[1], num_kv_heads=k.shape[1],
            mask=params.mask, num_targets=params.num_targets, backward=False,
        )  # fmt: skip
    else:
        schedule = schedule.to(device, non_blocking=True)
        if values_are_checkable(schedule.num_tiles):
            _check_schedule(schedule, q_offsets, kv_offsets)
    if pages is not None:
        return paged_attention(
            q, k, v, q_offsets, kv_offsets, pages.to(device).table, pages.page_rows, pages.num_rows, schedule.tiles, schedule.num_tiles,
            schedule.block_m, implementation, *params,
        )  # fmt: skip
    keys = schedule.backward
    if keys is not None and not keys.ascending:
        masked, causal = params.mask is not None, params.mask is not None and MaskParams(*params.mask).is_causal
        num_segments = kv_offsets.shape[0] - 1
        if one_pass_may_run(LoopedSide(*q.shape), k.shape[0], k.shape[1], num_segments, masked, causal):
            keys = None  # made for other sizes or another mask, so the backward lists its own tiles
    out, _ = attention(
        q, k, v, q_offsets, kv_offsets, schedule.tiles, schedule.num_tiles, keys and keys.tiles, keys and keys.num_tiles,
        schedule.block_m, keys and keys.block_m, kv_shared, implementation, workspace, *params,
    )  # fmt: skip
    return out


def _on_device(x: Tensor, device: torch.device) -> Tensor:
    return x if x.device == device else x.to(device, non_blocking=True)


def target_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    candidates: CandidateIndex | Tensor,
    kv_offsets: Tensor | str,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    activation: str = "softmax",
    scale: float | None = None,
    output_scale: float | Tensor = 1,
    mask: AttentionMask | None = None,
    schedule: TileSchedule | None = None,
    implementation: str = "auto",
    pages: Pages | None = None,
) -> Tensor:
    """Attention of each candidate to its user's history. There is one copy of keys and values per user, forward and backward.

    Query rows do not interact, so the candidates of a user form one long query segment. If candidates are not grouped by user, q is
    gathered into groups first and the output is put back in order: one copy of q and one of the output, none of k or v.

    Args:
        q: `[num_candidates, n_q, H, D]`, n_q query rows per candidate.
        k: `[L, Hkv, D]`, the keys of the users' histories.
        v: `[L, Hkv, Dv]`, their values.
        candidates: the user of each candidate: a `CandidateIndex`, or `[num_candidates]` int32 or int64 in any order. Must be a
            CandidateIndex if kv_offsets is "shared", because the number of users is then unknown.
        kv_offsets: `[num_users + 1]`, or "shared".
        max_seqlen_q: the largest number of query rows of a user.
        schedule: the schedule of the grouped queries, from `Jagged.schedule(queries=candidates, rows_per_candidate=n_q, ...)`.
        mask: as in `jagged_attention`. It takes the query rows of a user, in the order of q, as the last rows of the history.
        max_seqlen_kv, activation, scale, output_scale, implementation, pages: as in `jagged_attention`.

    Returns:
        `[num_candidates, n_q, H, Dv]`, in the order of q. The result of a candidate whose user has no history is 0.

    Raises:
        TypeError, ValueError, RuntimeError: as `jagged_attention`; also if candidates do not match q or kv_offsets.
    """
    for name, x, shape in (("q", q, "[num_candidates, n_q, H, D]"), ("k", k, "[L, Hkv, D]"), ("v", v, "[L, Hkv, Dv]")):
        check_tensor(name, x, shape.count(",") + 1, shape, "target_attention", implementation)
    num_users = None
    if isinstance(kv_offsets, str):
        _check_shared("kv_offsets", kv_offsets)
    else:
        check_offsets_shape("kv_offsets", kv_offsets)
        num_users = kv_offsets.shape[0] - 1
    if num_users is not None:
        candidates = CandidateIndex.wrap(candidates, num_users)
    elif not isinstance(candidates, CandidateIndex):
        raise TypeError(f'candidates must be a CandidateIndex where kv_offsets is "shared", got {type(candidates).__name__}')
    candidates.check(q.shape[0], num_users)
    check_device("candidates", candidates.offsets, q.device, "q's")
    candidates = candidates.to(q.device)
    num_candidates, rows = q.shape[:2]
    if max_seqlen_q is not None:
        check_offsets("candidates", candidates.query_offsets(rows), max_seqlen=max_seqlen_q, longest="max_seqlen_q")
    if candidates.order is not None:
        q = q.index_select(0, candidates.order)
    out = jagged_attention(
        q.flatten(0, 1),
        k,
        v,
        candidates.query_offsets(rows),
        kv_offsets,
        max_seqlen_kv=max_seqlen_kv,
        activation=activation,
        scale=scale,
        output_scale=output_scale,
        mask=mask,
        schedule=schedule,
        implementation=implementation,
        pages=pages,
    )
    return candidates.ungrouped(torch.unflatten(out, 0, (num_candidates, rows)))


def self_target_attention(
    q_user: Tensor, q_candidates: Tensor, k: Tensor, v: Tensor, offsets: Tensor, candidate_offsets: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attention of users' own rows and of their candidates to the users' histories, as two query groups of one `jagged_attention`.

    Each kernel is launched once for both groups. k and v are not copied, and the kernel sums dk and dv over both groups.

    Args:
        q_user: `[L, H, D]`, with the same segments as k and v.
        q_candidates: `[C, H, D]`, grouped by user. If its rows follow those of q_user in one buffer (`q[:L]` and `q[L:]`), both are read in
            place; otherwise they are copied once.
        k: `[L, Hkv, D]`, the keys of the users' histories.
        v: `[L, Hkv, Dv]`, their values.
        offsets: `[B + 1]` int32 or int64: the segments of q_user, k and v.
        candidate_offsets: `[B + 1]` int32 or int64: the segments of q_candidates.
        options: keyword arguments of `jagged_attention` except mask. A tensor output_scale is `[2 · B]`, first the factors of q_user's
            segments. A schedule is built for the lengths of q_user's segments followed by those of q_candidates.

    Returns:
        `[L, H, Dv]` and `[C, H, Dv]`, views of one tensor.

    Raises:
        TypeError, ValueError, RuntimeError: as `jagged_attention`; also if q_user and q_candidates, or their offsets, do not match.
    """
    operands = dict(q_user=(q_user, "[L, H, D]"), q_candidates=(q_candidates, "[C, H, D]"), k=(k, "[L, Hkv, D]"), v=(v, "[L, Hkv, Dv]"))
    for name, (x, shape) in operands.items():
        check_tensor(name, x, 3, shape, "self_target_attention", options.get("implementation", "auto"))
    for what, expected, given in (
        ("dtype", q_user.dtype, q_candidates.dtype),
        ("device", q_user.device, q_candidates.device),
        ("heads and head dim", list(q_user.shape[1:]), list(q_candidates.shape[1:])),
    ):
        if given != expected:
            raise ValueError(f"q_candidates must have q_user's {what}, {expected}, got {given}")
    q_user, q_candidates, k, v = autocast(q_user), autocast(q_candidates), autocast(k), autocast(v)
    check_attention(q_user, k, v, None, None, None, "softmax", 1, None, None, "auto", q_name="q_user")
    rows = q_user.shape[0], q_candidates.shape[0]
    if k.shape[0] != rows[0]:
        raise ValueError(f"k must have q_user's rows, {rows[0]}, got {k.shape[0]}")
    for name, x, total in (("offsets", offsets, rows[0]), ("candidate_offsets", candidate_offsets, rows[1])):
        check_offsets(name, x, total)
        check_device(name, x, q_user.device, "q_user's")
    if offsets.shape != candidate_offsets.shape:
        segments = offsets.shape[0] - 1, candidate_offsets.shape[0] - 1
        raise ValueError("offsets and candidate_offsets must describe the same number of segments, got {} and {}".format(*segments))
    if offsets.device != candidate_offsets.device:
        offsets, candidate_offsets = (x.to(q_user.device, non_blocking=True) for x in (offsets, candidate_offsets))
    q_offsets = torch.cat([offsets, (candidate_offsets + rows[0])[1:]])  # torch.export: a sum of [B] would exclude B = 1
    out = jagged_attention(joined_rows(q_user, q_candidates), k, v, q_offsets, offsets, **options)
    of_user, of_candidates = torch.split_with_sizes(out, rows)
    return of_user, of_candidates


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | str | None, kv_offsets: Tensor | str | None, scale: object, activation: str,
    output_scale: object, mask: object, schedule: object, implementation: str, q_name: str = "q",
) -> None:  # fmt: skip
    """Check everything that needs no offset values. q, k and v are cast by autocast already. q_name: what the caller calls q."""
    dtype, device = q.dtype, q.device
    for name, x in (("k", k), ("v", v)):
        if x.dtype != dtype:
            raise ValueError(f"{name} must have {q_name}'s dtype, {dtype}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name} must be on {q_name}'s device, {device}, got {x.device}")
    (_, heads, head_dim), (kv_rows, kv_heads, k_dim), (v_rows, v_heads, v_dim) = q.shape, k.shape, v.shape
    if kv_rows != v_rows or kv_heads != v_heads:
        raise ValueError(f"v must have k's rows and heads, {list(k.shape[:2])}, got {list(v.shape[:2])}")
    if k_dim != head_dim:
        raise ValueError(f"k must have {q_name}'s head dim, {head_dim}, got {k_dim}")
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{q_name}'s heads must be a multiple of k's, got {heads} and {kv_heads}")
    for name, dim in ((q_name, head_dim), ("v", v_dim)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name}'s head dim must be 1 to {MAX_HEAD_DIM}, got {dim}")
    for name, offsets in (("q_offsets", q_offsets), ("kv_offsets", kv_offsets)):
        if isinstance(offsets, str):
            _check_shared(name, offsets)
        elif isinstance(offsets, Tensor):
            check_device(name, offsets, device, f"{q_name}'s")
    if scale is not None:
        check_number("scale", scale)  # a tensor would get no gradient
    check_choice("activation", activation, ACTIVATIONS)
    if isinstance(output_scale, Tensor):
        check_tensor("output_scale", output_scale, output_scale.dim(), "[B]")  # its size is checked with the offsets
    else:
        check_number("output_scale", output_scale, what="a number or a tensor [B]")
    if activation == "softmax" and (isinstance(output_scale, Tensor) or output_scale != 1):
        raise ValueError(f"output_scale must be 1 with softmax, got {output_scale}")
    if mask is not None and not isinstance(mask, AttentionMask):
        raise TypeError(f"mask must be an AttentionMask, got {type(mask).__name__}")
    if mask is not None and isinstance(kv_offsets, str):
        raise ValueError("mask must be None where keys are shared by all segments: their rows have no position")
    check_implementation(implementation, ATTENTION_IMPLEMENTATIONS, device)
    if schedule is None:
        return
    if not isinstance(schedule, TileSchedule):
        raise TypeError(f"schedule must be a TileSchedule, got {type(schedule).__name__}")
    if schedule.num_heads != heads:
        raise ValueError(f"schedule was built for {schedule.num_heads} heads, {q_name} has {heads}")
    for half in (schedule, schedule.backward or schedule):
        if half.block_m not in TILES:
            raise ValueError(f"schedule must have a block_m of {TILES}, the kernels' tiles, got {half.block_m}")


def _check_shared(name: str, offsets: str) -> None:
    if offsets != "shared":
        raise ValueError(f'{name} must be a tensor or "shared", got "{offsets}"')


def _check_output_scale(output_scale: Tensor, num_segments: int, device: torch.device) -> None:
    if output_scale.shape != (num_segments,):
        raise ValueError(f"output_scale must have shape [B] = [{num_segments}], got {list(output_scale.shape)}")
    check_device("output_scale", output_scale, device, "q's")


def _check_schedule(schedule: TileSchedule, q_offsets: Tensor, kv_offsets: Tensor) -> None:
    """ValueError unless the schedule has as many tiles of each segment as these segments need, and the segments that it counts as short are
    short: kernels of packed tiles take them."""
    needed = (q_offsets.diff().long() + schedule.block_m - 1) // schedule.block_m * schedule.num_heads
    listed = schedule.tiles[: int(schedule.num_tiles[0]), 0].bincount(minlength=len(needed))
    needed = pad(needed, (0, len(listed) - len(needed)))
    if not torch.equal(listed, needed):
        segment = int((listed != needed).nonzero()[0])
        raise ValueError(
            f"schedule was built for other lengths: it has {listed[segment]} tiles of segment {segment}, q_offsets need {needed[segment]}"
        )
    if q_offsets.shape != kv_offsets.shape:  # no segment of several query groups counts as short
        return
    q_lengths, kv_lengths = q_offsets.diff(), kv_offsets.diff()
    long = ~is_short(q_lengths, kv_lengths)
    for half in (schedule, schedule.backward or schedule):
        segments = half.tiles[int(half.num_tiles[1]) : int(half.num_tiles[0]), 0].long()
        if long[segments].any():
            segment = int(segments[long[segments]][0])
            raise ValueError(
                f"schedule was built for other lengths: it counts segment {segment} as short, which has {q_lengths[segment]} queries and "
                f"{kv_lengths[segment]} keys"
            )
