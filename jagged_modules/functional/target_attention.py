"""Attention of candidates to their users' histories."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from jagged_kernels.attention.pages import Pages
from jagged_kernels.schedule.host import TileSchedule
from torch import Tensor
from torch.nn.functional import pad

from ..containers.candidates import CandidateIndex
from ..dtypes import autocast
from ..masks import AttentionMask
from ..scalars import check_choice, check_equal, check_kind, is_sequence
from ..segments import RowSegments, check_device, check_offsets, check_offsets_shape, parse_segments
from ..validation import check_tensor, transforms_are_active
from .attention import attend, computed
from .attention_arguments import Side, check_shared, parse_arguments
from .attention_bias import BiasSide, check_bias
from .attention_call import AttentionOptions, check_operands, check_output_scale
from .target_levels import LEVELS, attend_to_levels, parse_levels


@overload
def target_attention(
    q: Tensor,
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    candidates: Sequence[CandidateIndex | Tensor],
    kv_offsets: Sequence[Tensor],
    *,
    levels: Literal["each"],
    activation: str = "softmax",
    scale: float | None = None,
    output_scale: float = 1,
    implementation: str = "auto",
) -> tuple[Tensor, ...]: ...


@overload
def target_attention(
    q: Tensor,
    k: Tensor | Sequence[Tensor],
    v: Tensor | Sequence[Tensor],
    candidates: CandidateIndex | Tensor | Sequence[CandidateIndex | Tensor],
    kv_offsets: Tensor | str | Sequence[Tensor],
    *,
    levels: Literal["joint"] = "joint",
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    activation: str = "softmax",
    scale: float | None = None,
    output_scale: float | Tensor = 1,
    mask: AttentionMask | None = None,
    schedule: TileSchedule | None = None,
    implementation: str = "auto",
    pages: Pages | None = None,
    dropout_p: float = 0,
    dropout_seed: Tensor | None = None,
) -> Tensor: ...


def target_attention(
    q: Tensor,
    k: Any,
    v: Any,
    candidates: Any,
    kv_offsets: Any,
    *,
    levels: str = "joint",
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    activation: str = "softmax",
    scale: float | None = None,
    output_scale: float | Tensor = 1,
    mask: AttentionMask | None = None,
    schedule: TileSchedule | None = None,
    implementation: str = "auto",
    pages: Pages | None = None,
    dropout_p: float = 0,
    dropout_seed: Tensor | None = None,
) -> Any:
    """Attention of each candidate to its user's history. There is one copy of keys and values per
    user, forward and backward.

    A candidate may have histories in several levels, for example of its user and of its vendor.
    Then k, v, candidates and kv_offsets are tuples, with an entry for each level in any order. Each
    level has its own batch, of which nothing is copied.

    Query rows do not interact, so the candidates of a user form one long query segment. If
    candidates are not grouped by user, q is gathered into groups first and the output is put back
    in order: one copy of q and one of the output, none of k or v.

    Args:
        q: `[num_candidates, n_q, H, D]`, n_q query rows per candidate.
        k: `[L, Hkv, D]`, the keys of the users' histories.
        v: `[L, Hkv, Dv]`, their values.
        candidates: the user of each candidate: a `CandidateIndex`, or `[num_candidates]` int32 or
            int64 in any order. Must be a CandidateIndex if kv_offsets is "shared", because the
            number of users is then unknown.
        kv_offsets: `[num_users + 1]`, or "shared".
        levels: of several levels, "joint": the keys of all of them are as one history, with one
            softmax; or "each": each level is an attention by itself.
        max_seqlen_q: the largest number of query rows of a user.
        schedule: the schedule of the grouped queries, from
            `Jagged.schedule(queries=candidates, rows_per_candidate=n_q, ...)`.
        mask: as in `jagged_attention`. It takes the query rows of a user, in the order of q, as the
            last rows of the history.
        max_seqlen_kv, activation, scale, output_scale, implementation, pages: as in
            `jagged_attention`. With several levels, the sizes, mask, schedule and pages must be
            None, and output_scale a number.
        dropout_p, dropout_seed: as in `jagged_attention`. The query rows of a user, grouped, are
            one segment. With several levels, the seed must be None: each level draws its own.

    Returns:
        `[num_candidates, n_q, H, Dv]`, in the order of q. The result of a candidate whose user has
        no history is 0. With levels="each", a tuple of the levels' results.

    Raises:
        TypeError, ValueError, RuntimeError: as `jagged_attention`; also if candidates do not match
            q or kv_offsets.
    """
    check_choice("levels", levels, LEVELS)
    options = AttentionOptions(
        activation, scale, output_scale, mask, None, schedule, implementation, pages, dropout_p,
        dropout_seed,
    )  # fmt: skip
    if is_sequence(k):
        given = dict(k=k, v=v, candidates=candidates, kv_offsets=kv_offsets)
        longest = dict(max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv)
        parsed = parse_levels(q, given, longest, options)
        results = attend_to_levels(*parsed, options, levels == "joint")
        return results[0] if levels == "joint" else results
    check_tensor("q", q, 4, "[num_candidates, n_q, H, D]", "target_attention", implementation)
    if getattr(pages, "scales", None) is None:  # else k and v are in 8 bits
        check_tensor("k", k, 3, "[L, Hkv, D]", "target_attention", implementation)
        check_tensor("v", v, 3, "[L, Hkv, Dv]", "target_attention", implementation)
    if isinstance(kv_offsets, str):
        check_shared("kv_offsets", kv_offsets)
        where = 'a CandidateIndex where kv_offsets is "shared"'
        check_kind("candidates", candidates, CandidateIndex, where)
        num_users = candidates.num_users
    else:
        check_offsets_shape("kv_offsets", kv_offsets)
        num_users = kv_offsets.shape[0] - 1
    num_candidates, rows = q.shape[:2]
    candidates, queries = CandidateIndex.parse(candidates, q, num_users, rows)
    if max_seqlen_q is not None:
        check_offsets(
            "candidates", queries.offsets, max_seqlen=max_seqlen_q, longest="max_seqlen_q"
        )
    keys = Side(kv_offsets, max_seqlen_kv)
    q = candidates.grouped(q).flatten(0, 1)
    out = computed(parse_arguments(q, k, v, queries, keys, options))
    return candidates.ungrouped(torch.unflatten(out, 0, (num_candidates, rows)))


def self_target_attention(
    q_user: Tensor,
    q_candidates: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    candidate_offsets: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of users' own rows and of their candidates to the users' histories, as two query
    groups of one `jagged_attention`.

    Each kernel is launched once for both groups. k and v are not copied, and the kernel sums dk and
    dv over both groups.

    Args:
        q_user: `[L, H, D]`, with the same segments as k and v.
        q_candidates: `[C, H, D]`, grouped by user. If its rows follow those of q_user in one buffer
            (`q[:L]` and `q[L:]`), both are read in place; otherwise they are copied once.
        k: `[L, Hkv, D]`, the keys of the users' histories.
        v: `[L, Hkv, Dv]`, their values.
        offsets: `[B + 1]` int32 or int64: the segments of q_user, k and v.
        candidate_offsets: `[B + 1]` int32 or int64: the segments of q_candidates.
        options: keyword arguments of `jagged_attention`. Mask and bias are those of q_user's rows:
            candidates see the whole history, without a bias, and the mask has no num_targets. A
            tensor output_scale is `[2 · B]`, first the factors of q_user's segments. A schedule is
            built for the lengths of q_user's segments followed by those of q_candidates. Dropout
            counts the rows of both results as one, with those of q_user behind the last segment.

    Returns:
        `[L, H, Dv]` and `[C, H, Dv]`, views of one tensor.

    Raises:
        TypeError, ValueError, RuntimeError: as `jagged_attention`; also if q_user and q_candidates,
            or their offsets, do not match.
    """
    function, implementation = "self_target_attention", options.get("implementation", "auto")
    check_tensor("q_user", q_user, 3, "[L, H, D]", function, implementation)
    check_tensor("q_candidates", q_candidates, 3, "[C, H, D]", function, implementation)
    check_tensor("k", k, 3, "[L, Hkv, D]", function, implementation)
    check_tensor("v", v, 3, "[L, Hkv, Dv]", function, implementation)
    q_user, q_candidates, k, v = autocast(q_user), autocast(q_candidates), autocast(k), autocast(v)
    for what, expected, given in (
        ("dtype", q_user.dtype, q_candidates.dtype),
        ("device", q_user.device, q_candidates.device),
        ("heads and head dim", list(q_user.shape[1:]), list(q_candidates.shape[1:])),
    ):
        check_equal("q_candidates", f"have q_user's {what}", expected, given)
    check_operands(q_user, k, v, "q_user")
    rows, device = (q_user.shape[0], q_candidates.shape[0]), q_user.device
    check_equal("k", "have q_user's rows", rows[0], k.shape[0])
    of_segments = dict(offsets=offsets, candidate_offsets=candidate_offsets)
    for (name, x), total in zip(of_segments.items(), rows):
        check_offsets(name, x, total)
        check_device(name, x, device, "q_user's")
    if offsets.shape != candidate_offsets.shape:
        raise ValueError(
            "offsets and candidate_offsets must describe the same number of segments, got"
            f" {offsets.shape[0] - 1} and {candidate_offsets.shape[0] - 1}"
        )
    if (bias := options.get("bias")) is not None:
        own = BiasSide("q_user", rows[0], offsets, "offsets")
        check_bias(bias, device, q_user.shape[1], "q_user's", own, own._replace(name="k"))
    users = parse_segments("offsets", offsets, rows[0], device)
    candidates = parse_segments("candidate_offsets", candidate_offsets, rows[1], device)
    queries, keys, options = joined_segments(users, candidates, rows, options)
    for side, segments in (("q", queries), ("kv", keys)):
        longest = options.pop(f"max_seqlen_{side}", None)
        if longest is not None:
            check_offsets(f"{side}_offsets", segments.offsets, None, longest, f"max_seqlen_{side}")
    q = joined_rows(q_user, q_candidates)
    out = computed(parse_arguments(q, k, v, queries, keys, AttentionOptions(**options)))
    of_users, of_candidates = torch.split_with_sizes(out, rows)
    return of_users, of_candidates


def attend_users_and_candidates(
    q: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    users: RowSegments,
    candidates: RowSegments,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """`self_target_attention` of a layer. q: those of the users and of the candidates."""
    rows = q[0].shape[0], q[1].shape[0]
    queries, keys, given = joined_segments(users, candidates, rows, dict(bias=options.bias))
    options = options._replace(bias=given["bias"])
    of_users, of_candidates = torch.split_with_sizes(
        attend(joined_rows(*q), k, v, queries, keys, options), rows
    )
    return of_users, of_candidates


def joined_segments(
    users: RowSegments, candidates: RowSegments, rows: tuple[int, int], options: dict[str, Any]
) -> tuple[RowSegments, RowSegments, dict[str, Any]]:
    """The segments of the queries and of the keys, and the options, of `self_target_attention`.

    Where rows may follow the last user's, or the last candidate, the rows between the users' and
    the candidates' are one more query segment, and those behind the candidates another. They are
    the queries of one more segment of keys, which is empty, so their results and gradients are 0.
    """
    num_rows = rows[0] + rows[1]  # torch.export.save does not know the sym_sum that is sum(rows)
    q_offsets = candidates.offsets + rows[0]
    num_segments, has_tail = users.offsets.shape[0] - 1, users.has_tail or candidates.has_tail
    if (bias := options.get("bias")) is not None:  # of the candidates, nothing is read
        behind = dict(query_timestamps=rows[1], query_shift=num_segments + 2 * has_tail)
        given = {
            x: pad(y, (0, n)) for x, n in behind.items() if (y := getattr(bias, x)) is not None
        }
        options = options | dict(bias=dataclasses.replace(bias, **given))
    if not has_tail:
        # torch.export: a sum of [B] would exclude B = 1
        q_offsets = torch.cat([users.offsets, q_offsets[1:]])
        return RowSegments(q_offsets, num_rows=num_rows), users, options
    # a sum: a graph would be compiled for each number that pads or fills
    ends = candidates.offsets.narrow(0, 0, 1) + num_rows
    q_offsets = torch.cat([users.offsets, q_offsets, ends])
    options = options | dict(schedule=None)  # another number of segments
    output_scale = options.get("output_scale")
    if isinstance(output_scale, Tensor):
        check_output_scale(output_scale, 2 * num_segments, users.offsets.device)
        options["output_scale"] = pad(output_scale.view(2, -1), (0, 1), value=1).flatten()
    kv_offsets = torch.cat([users.offsets, users.offsets[-1:]])
    keys = RowSegments(kv_offsets, num_rows=rows[0], has_tail=True)
    return RowSegments(q_offsets, num_rows=num_rows), keys, options


def joined_rows(x: Tensor, y: Tensor) -> Tensor:
    """The rows of x `[N, ...]`, then those of y. A view if y follows x in memory, else a copy."""
    if torch.compiler.is_compiling() or transforms_are_active() or not _adjoin(x, y):
        return torch.cat([x, y])
    return _JoinedRows.apply(x, y)  # type: ignore[no-untyped-call]  # unannotated in torch


def _adjoin(x: Tensor, y: Tensor) -> bool:
    same = (
        x.dtype == y.dtype
        and x.device == y.device
        and x.shape[1:] == y.shape[1:]
        and x.stride() == y.stride()
    )
    if not same:
        return False
    # of the objects, because storages of fake tensors have no address
    own, other = (part.untyped_storage()._cdata for part in (x, y))  # pyright: ignore[reportPrivateUsage]
    return (
        own == other
        and x.stride(0) > 0
        and y.storage_offset() == x.storage_offset() + x.shape[0] * x.stride(0)
    )


class _JoinedRows(torch.autograd.Function):
    """A view over x and y. The gradient of torch's x.as_strided flows to x only, not to y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.rows = x.shape[0], y.shape[0]
        return x.detach().as_strided((sum(ctx.rows), *x.shape[1:]), x.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        dx, dy = torch.split_with_sizes(grads[0], ctx.rows)
        return dx, dy
