"""Bounds of attention, forward and backward, from its definition.

    S = scale · q kᵀ + bias,  P = activation(S),  out = (P v) · output_scale
            per segment and head; softmax: P = e^S / Σ e^S; dropout multiplies P in P v and Pᵀ dO,
            and dP
    dV = Pᵀ dO,  dP = dO Vᵀ,  dQ = scale · dS K,  dK = scale · dSᵀ Q,  doutput_scale = Σ dO ∘ (P v)
    softmax: dS = P ∘ (dP - rowsum(dO ∘ out));  pointwise: dS = activation'(S) ∘ dP

A program may round P and dS to the operands' dtype before the second MMA
(`Arithmetic.rounds_factors`), reads `out` as it was rounded, and rounds each result once.
Everything else is in fp32, or in float64 for float64 operands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from jagged_modules.bias import RelativeBias
from jagged_modules.containers.offsets import block_offsets, positions_in_segments
from jagged_modules.masks import AttentionMask
from jagged_modules.rotary import Rotary

from .activations import activated
from .arithmetic import Arithmetic, arithmetic_of
from .attention_bias import ScoreBias, SharedError, Tables
from .bound import Bound
from .dropout import Dropout

SMALLEST_SCALE = 1e-20  # by which the kernels divide a bias
MOST_SCORES = 2**21  # float64 scores of several segments at a time; a larger segment is alone


class _Options(NamedTuple):
    """Options that are the same for all segments.

    factors: the dtype that P and dS are rounded to before an MMA. ds_factor: dS is rounded after
    multiplication by it. precise: see `_rounded`; it applies to dS.
    """

    scale: float
    activation: str
    dtype: torch.dtype
    factors: torch.dtype
    arithmetic: Arithmetic
    ds_factor: float = 1.0
    precise: bool | None = False


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    q_offsets: Tensor | str,
    kv_offsets: Tensor | str | None = None,
    *,
    scale: float | None = None,
    activation: str = "softmax",
    mask: AttentionMask | None = None,
    bias: RelativeBias | None = None,
    output_scale: float | Tensor = 1.0,
    dropout_p: float = 0,
    dropout_seed: Tensor | None = None,
    arithmetic: Arithmetic | None = None,
) -> dict[str, Bound]:
    """Bounds of `functional.jagged_attention` and its gradients: "out", "dq", "dk", "dv", and of
    what requires a gradient "doutput_scale", "dposition" and "dtime", the last two in the shapes of
    the bias's tables.

    do: the gradient of the result; the other arguments are the function's.
    """
    arithmetic = arithmetic_of(q) if arithmetic is None else arithmetic
    scale = q.shape[2] ** -0.5 if scale is None else scale
    factors = q.dtype if arithmetic.rounds_factors else torch.promote_types(q.dtype, torch.float32)
    operands = Bound.exact(q), Bound.exact(k), Bound.exact(v)
    # Kernels take softmax's maximum before scaling, and divide a bias by the scale. So other scales
    # are multiplied into q first.
    unusable = (
        activation == "softmax" and scale <= 0 or bias is not None and abs(scale) < SMALLEST_SCALE
    )
    scales_q = arithmetic.rounds_factors and unusable
    if scales_q:
        operands = operands[0].scaled(scale).rounded(q.dtype), *operands[1:]
    options = _Options(1.0 if scales_q else scale, activation, q.dtype, factors, arithmetic)
    segments = _segments(q, q_offsets, k, kv_offsets)
    factor, rest = _split_scale(output_scale, segments, do)
    inner_dtype = q.dtype
    # results before scaling may overflow fp16
    if rest is not None and segments.shares_factor and q.dtype == torch.float16:
        inner_dtype = torch.float32
        options = options._replace(factors=inner_dtype)

    heads = k.shape[1]
    grad = Bound.exact(do)
    if rest is not None:
        grad = _rescaled(grad, rest, segments, inner_dtype)
    inner = _Rows(do.shape, do)
    tables = None if bias is None else Tables(bias, q.shape[1], q.dtype)
    dq, dk, dv = _Rows(q.shape, q), _Rows(k.shape, k), _Rows(v.shape, v)
    of_queries = segments.of_queries
    if isinstance(kv_offsets, str):
        of_queries = [torch.arange(do.shape[0], device=q.device)]
    dropout = Dropout.of(dropout_p, dropout_seed, of_queries, do.shape[0])
    factors_of_rows, all_alike = Bound.exact(factor[:, None, None].expand(-1, q.shape[1], 1)), True
    for group in _groups(segments.of_keys, mask, q.shape[1]):
        rows, kv_rows = group.rows, group.kv_rows
        q_rows = rows % q.shape[0]
        keep = None
        if mask is not None:
            num_keys, masked = kv_rows.shape[1], group.masked
            keep = mask.keep(masked, num_keys, group.targets, q.device)
            keep = pad(keep, (0, 0, 0, rows.shape[1] - masked), value=True)
            keep = keep.repeat(q.shape[1] // heads, 1)
        parts = zip((*operands, grad, factors_of_rows), (q_rows, kv_rows, kv_rows, rows, rows))
        *blocks, row_factor = (_take(x, index, heads) for x, index in parts)
        scores_bias = None if tables is None else tables.of_segments(group)
        kept = dropout and dropout.factors(rows, kv_rows.shape[1], q.shape[1], heads)
        results, alike = _segment(*blocks, keep, row_factor.value, options, scores_bias, kept)
        all_alike &= alike
        for total, index, result in zip(
            (inner, dq, dk, dv), (rows, q_rows, kv_rows, kv_rows), results
        ):
            total.add(index, result, heads)

    inner = inner.bound.rounded(inner_dtype)
    out = inner if rest is None else _rescaled(inner, rest, segments, q.dtype)
    dq = dq.bound.rounded(q.dtype)
    dq = dq.scaled(scale).rounded(q.dtype) if scales_q else dq
    bounds = {"out": out, "dq": dq} | {
        name: x.bound.rounded(q.dtype) for name, x in (("dk", dk), ("dv", dv))
    }
    if isinstance(output_scale, Tensor) and output_scale.requires_grad:
        bounds["doutput_scale"] = _scale_gradient(
            output_scale, do, inner, inner_dtype, factor, segments
        )
    bounds = {name: x._replace(lines=1 if all_alike else None) for name, x in bounds.items()}
    if rest is not None and segments.shares_factor and not all_alike:
        # All keys of a segment share the roundings of dO: at most as many of their errors are
        # independent as v, or q and k, have columns.
        lines = heads * sum(min(len(x.kv_rows), q.shape[2], v.shape[2]) for x in segments.of_keys)
        bounds |= {name: bounds[name]._replace(lines=lines) for name in ("dk", "dv")}
    return (
        bounds if tables is None else bounds | tables.bounds(activation == "softmax" or all_alike)
    )


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    offsets: Tensor,
    *,
    block_size: int = 64,
    scale: float | None = None,
    rotary: Rotary | None = None,
    precise: bool | None = False,
    composed: bool = False,
    dropout_p: float = 0,
    dropout_seed: Tensor | None = None,
    arithmetic: Arithmetic | None = None,
) -> dict[str, Bound]:
    """Bounds of `functional.block_diagonal_attention` and its gradients: "out", "dq", "dk", "dv".

    A program may round rotated operands to their dtype, as it may P and dS. Where angles are linear
    and v is not rotated, it may count positions from any row, which changes what it rounds.
    Gradients of rotated operands are rotated back before their one rounding. precise: bfloat16 q, k
    and dS are rounded to float16 in units of their largest element, as the Hopper kernels do on
    request; None: it is not known whether they are. composed: rotary is a step of its own, before
    which the gradients are rounded too.
    """
    arithmetic = arithmetic_of(q) if arithmetic is None else arithmetic
    scale = q.shape[2] ** -0.5 if scale is None else scale
    factors = q.dtype if arithmetic.rounds_factors else torch.promote_types(q.dtype, torch.float32)
    if rotary is None or q.dtype != torch.bfloat16:
        precise = False
    options = _Options(scale, "softmax", q.dtype, factors, arithmetic, scale or 1.0, precise)
    operands = [Bound.exact(x) for x in (q, k, v)]
    is_rotated = [
        rotary is not None,
        rotary is not None,
        rotary is not None and rotary.rotate == "qkv",
    ]
    cos = sin = None
    if rotary is not None:
        positions = (
            positions_in_segments(offsets, q.shape[0])
            if rotary.positions is None
            else rotary.positions.to(q.device)
        )
        cos, sin = (x.to(q.device)[positions].double()[:, None] for x in (rotary.cos, rotary.sin))
        operands = [_rotated(x, cos, sin) if t else x for x, t in zip(operands, is_rotated)]
        counts_from_any_row = (
            rotary.linear and rotary.positions is None and not is_rotated[2] and not composed
        )
        rounded = _rounded_at_any_angle if counts_from_any_row else _rounded
        q_rotated, k_rotated = (rounded(x, factors, precise) for x in operands[:2])
        operands = [
            q_rotated,
            k_rotated,
            operands[2].rounded(factors) if is_rotated[2] else operands[2],
        ]

    heads = k.shape[1]
    totals, all_alike = [_Rows(x.shape, x) for x in (do, q, k, v)], True
    one = torch.ones((), dtype=torch.float64, device=q.device)
    blocks = [
        _Segment(0, rows, rows)
        for rows in _rows_of(block_offsets(offsets.to(q.device), block_size, q.shape[0]), q.device)
    ]
    dropout = Dropout.of(dropout_p, dropout_seed, [x.rows for x in blocks], q.shape[0])
    for group in _groups(blocks, None, q.shape[1]):
        parts = [_take(x, group.rows, heads) for x in (*operands, Bound.exact(do))]
        kept = dropout and dropout.factors(group.rows, group.rows.shape[1], q.shape[1], heads)
        of_group, alike = _segment(*parts, None, one, options, dropped=kept)
        all_alike &= alike
        for total, result in zip(totals, of_group):
            total.add(group.rows, result, heads)
    results = [x.bound for x in totals]
    rounded = [x.rounded(q.dtype) if composed else x for x in results[1:]]
    gradients = [
        _rotated(x, cos, -sin) if t else y for x, y, t in zip(rounded, results[1:], is_rotated)
    ]
    lines = 1 if all_alike else None
    return {
        name: x.rounded(q.dtype)._replace(lines=lines)
        for name, x in zip(("out", "dq", "dk", "dv"), (results[0], *gradients))
    }


# -- segments of equal lengths: [segments · key heads, group · rows, dim] --------------------------


def _segment(
    q: Bound,
    k: Bound,
    v: Bound,
    do: Bound,
    keep: Tensor | None,
    factor: Tensor,
    options: _Options,
    bias: ScoreBias | None = None,
    dropped: Tensor | None = None,
) -> tuple[tuple[Bound, Bound, Bound, Bound], bool]:
    """(out, dq, dk, dv) before their rounding, and whether all visible scores of each matrix are
    equal (`_are_alike`).

    factor: output_scale, of each row or of all. bias: of the scores; dS is added to the sums of its
    tables. dropped: dropout's factors of P, or None.
    """
    if keep is None:
        keep = torch.ones((), dtype=torch.bool, device=q.value.device)
    scores = (q @ k.mT).scaled(options.scale)
    if bias is not None:
        scores = bias.added_to(scores, q.value.shape[-1])
    parts = _softmax if options.activation == "softmax" else _pointwise
    out, p, ds, of_row = parts(scores, v, do, keep, options, dropped)
    if of_row is not None and q.rms.dim():
        # The errors of a rounded q are shared by its scores, so they do not average out in the
        # log-sum-exp L: dL = Σ P dS = scale · dq · Σ P k. Without errors of dP, rowsum(P ∘ dP) then
        # is off by -dL times itself. The largest errors already are sums of absolute values.
        common, delta = of_row
        of_q = abs(options.scale) * (q.rms * (p.value @ k.value)).norm(dim=-1, keepdim=True)
        zeros = torch.zeros_like(of_q)
        of_row = common.widened(zeros, of_q), delta.widened(zeros, delta.value.abs() * of_q)
    p = p.rounded(options.factors).where(keep)
    alike = _are_alike(scores.value, keep)
    rms = _dropped(p, dropped).rms
    out = out.widened(torch.zeros_like(out.value), torch.where(alike, (rms @ v.value).abs(), 0.0))
    if bias is not None:
        shared = []
        if of_row is not None:
            weights = ds.value, p.value
            shared = [
                SharedError((w * factor).where(keep, 0.0), x.error, x.rms)
                for w, x in zip(weights, of_row)
            ]
        bias.collect(ds.where(keep).scaled(factor), keep, shared, alike)
    ds = _rounded(ds, options.factors, options.precise, 1 / abs(options.ds_factor)).where(keep)
    dq = ds @ k
    if of_row is not None:
        # errors shared by all scores of a row, which do not average out over the keys
        common, delta = of_row
        seen = (Bound.exact(p.value) @ k).value.abs()
        dq = dq.widened(
            common.error * dq.value.abs() + delta.error * seen,
            torch.hypot(common.rms * dq.value, delta.rms * seen),
        )
        p = p.widened(p.value * common.error, p.value * common.rms)
        ds = ds.widened(
            ds.value.abs() * common.error + p.value * delta.error,
            torch.hypot(ds.value * common.rms, p.value * delta.rms),
        )
    p = _dropped(p, dropped)
    dv = p.mT @ do.scaled(factor)
    dv = dv.widened(
        torch.zeros_like(dv.value),
        torch.where(alike, (p.rms.mT @ do.scaled(factor).value).abs(), 0.0),
    )
    dk = ds.mT @ q.scaled(options.scale * factor)
    return (out.scaled(factor), dq.scaled(options.scale * factor), dk, dv), bool(alike.all())


def _dropped(x: Bound, factors: Tensor | None) -> Bound:
    """P or dP, times dropout's factors; what is dropped may be NaN."""
    return x if factors is None else x.where(factors > 0).scaled(factors)


def _softmax(
    scores: Bound, v: Bound, do: Bound, keep: Tensor, options: _Options, dropped: Tensor | None
):
    """(out, P, dS, errors that the scores of a row share).

    P and dS have the errors that are independent for each score. Shared are the error of the row's
    log-sum-exp, relative to P and dS, and that of rowsum(dO ∘ out).
    """
    largest = scores.value.masked_fill(~keep, float("-inf")).amax(-1, keepdim=True)
    largest = torch.where(largest == float("-inf"), 0.0, largest)
    size = scores.value.abs() + largest.abs()
    # The error of the maximum cancels in the quotient. Score and difference are rounded, both after
    # conversion to base 2.
    exponents = Bound(
        (scores.value - largest).where(keep, 0.0), scores.error, scores.rms, scores.dtype
    ).off_by(4, size)
    weights = exponents.exp(options.arithmetic.exp_ulps).where(keep)
    total = weights.sum(-1).map(lambda x: x.unsqueeze(-1))
    total = total._replace(value=torch.where(total.value == 0, 1.0, total.value))
    out = (_dropped(weights.rounded(options.factors).where(keep), dropped) @ v) / total

    # The backward subtracts the log-sum-exp instead, whose fp32 rounding is shared by the row.
    lse = largest + total.value.log()
    log_error = Bound(lse, total.error / total.value, total.rms / total.value, total.dtype).off_by(
        6, lse.abs() + largest.abs() + 1
    )
    p = (exponents.off_by(2, lse.abs()).exp(options.arithmetic.exp_ulps)).where(keep)
    p = Bound(p.value / total.value, p.error / total.value, p.rms / total.value, p.dtype).off_by(1)
    delta = (do * out.rounded(options.dtype)).sum(-1).map(lambda x: x.unsqueeze(-1))
    dp = _dropped(do @ v.mT, dropped)
    ds = p * Bound(dp.value - delta.value, dp.error, dp.rms, dp.dtype).off_by(
        1, dp.value.abs() + delta.value.abs()
    )
    return out, p, ds, (log_error, delta)


def _pointwise(
    scores: Bound, v: Bound, do: Bound, keep: Tensor, options: _Options, dropped: Tensor | None
):
    approximate = options.arithmetic.approximate and options.dtype == torch.bfloat16
    p, slope = (x.where(keep) for x in activated(scores, options.activation, approximate))
    out = _dropped(p.rounded(options.factors).where(keep), dropped) @ v
    dp = _dropped(do @ v.mT, dropped)
    ds = slope * dp
    # 0 times NaN or infinity: 0 by torch's derivative of relu, NaN by the kernels
    unspecified = (slope.value == 0) & ~dp.value.isfinite()
    errors = (
        ds.error.masked_fill(unspecified, torch.inf),
        ds.rms.masked_fill(unspecified, torch.inf),
    )
    return out, p, Bound(ds.value.masked_fill(unspecified, 0.0), *errors, ds.dtype), None


def _are_alike(scores: Tensor, keep: Tensor) -> Tensor:
    """Whether all visible scores of a matrix `[..., queries, keys]` are equal, as when the scale is
    0 or all rows are equal: `[..., 1, 1]`.

    Weights of rows that see as many keys are then equal, and so are their roundings, which do not
    average out in a sum.
    """
    if scores.numel() == 0:
        return scores.new_zeros((*scores.shape[:-2], 1, 1), dtype=torch.bool)
    largest = scores.where(keep, -torch.inf).amax((-2, -1), keepdim=True)
    smallest = scores.where(keep, torch.inf).amin((-2, -1), keepdim=True)
    return largest - smallest <= 1e-9 * largest.abs()


def _rounded(x: Bound, dtype: torch.dtype, precise: bool | None, unit: float = 1.0) -> Bound:
    """The bound rounded to dtype or, if precise, to float16 in units of the largest element; None:
    to either.

    A program uses the largest element of a tile, which is no larger. unit: as in `Bound.rounded`,
    for dtype.
    """
    plain = x.rounded(dtype, unit)
    if precise is False or not x.value.numel():
        return plain
    in_units = x.rounded(torch.float16, x.value.abs().amax())
    if precise:
        return in_units
    return plain._replace(
        error=torch.maximum(plain.error, in_units.error), rms=torch.maximum(plain.rms, in_units.rms)
    )


def _rounded_at_any_angle(x: Bound, dtype: torch.dtype, precise: bool | None) -> Bound:
    """`_rounded` of pairs that a program rotates by one more angle, which is not known.

    Let a pair be (a, b) = r (cos t, sin t), and f the other angle. The program rounds the pair
    r (cos(t + f), sin(t + f)). Rotated back, its errors e1 and e2 make a wrong by
    e1 cos f + e2 sin f. They are at most u times the components rounded, with deviations of d times
    them. So however small a is, its error is

        at most u r (|cos(t + f) cos f| + |sin(t + f) sin f|) <= u r,
        of variance d^2 r^2 (cos^2(t + f) cos^2 f + sin^2(t + f) sin^2 f)
            = d^2 r^2 (1 + cos(2 t + 2 f) cos 2 f) / 2 <= d^2 r^2 (3 + cos 2 t) / 4
            = d^2 (a^2 + b^2 / 2).
    """
    zeros = torch.zeros_like(x.value)
    sizes = Bound(x.value.abs() + x.error, zeros, zeros, x.dtype)
    errors = _rounded(sizes, dtype, precise)
    largest, variance = (y.unflatten(-1, (-1, 2)) for y in (errors.error, errors.rms**2))
    largest = torch.hypot(largest, largest.flip(-1))
    return x.widened(*(y.flatten(-2) for y in (largest, (variance + variance.flip(-1) / 2).sqrt())))


def _rotated(x: Bound, cos: Tensor, sin: Tensor) -> Bound:
    """(x0, x1) → (x0 cos - x1 sin, x1 cos + x0 sin) for pairs of the last dimension. The tables are
    rounded to fp32; a kernel may use other tables that give the same scores."""
    even, odd = (x.map(lambda y, i=i: y.unflatten(-1, (-1, 2))[..., i]) for i in range(2))
    halves = []
    for first, second, sine in ((even, odd, -sin), (odd, even, sin)):
        a, b = (
            Bound(y.value * t, y.error * t.abs(), y.rms * t.abs(), y.dtype)
            for y, t in ((first, cos), (second, sine))
        )
        halves.append((a + b).off_by(6, first.value.abs() + second.value.abs()))
    stacked = (torch.stack([a, b], -1).flatten(-2) for a, b in zip(halves[0][:3], halves[1][:3]))
    return Bound(*stacked, x.dtype)


# -- segments --------------------------------------------------------------------------------------


class _Segment(NamedTuple):
    """The rows of one segment of keys, and the rows of the result that read them. masked: how many
    of these, the first ones, are of the first query group, whose mask it is."""

    number: int
    rows: Tensor
    kv_rows: Tensor
    masked: int = 0


class _Segments(NamedTuple):
    of_keys: list[_Segment]
    of_queries: list[Tensor]
    shares_factor: bool


def _segments(
    q: Tensor, q_offsets: Tensor | str, k: Tensor, kv_offsets: Tensor | str | None
) -> _Segments:
    """Every segment of keys with all queries that see it: of all query groups, or of all segments
    that share the keys."""
    kv_offsets = q_offsets if kv_offsets is None else kv_offsets
    q_shared, kv_shared = isinstance(q_offsets, str), isinstance(kv_offsets, str)
    count = (kv_offsets if q_shared else q_offsets).shape[0] - 1
    every_q = torch.arange(q.shape[0], device=q.device)
    queries = (
        [every_q + b * q.shape[0] for b in range(count)]
        if q_shared
        else _rows_of(q_offsets, q.device)
    )
    keys = (
        [torch.arange(k.shape[0], device=q.device)] if kv_shared else _rows_of(kv_offsets, q.device)
    )
    segments = []
    for number, kv_rows in enumerate(keys):
        readers = queries[number :: len(keys)]
        rows = torch.cat(readers) if readers else every_q[:0]
        segments.append(_Segment(number, rows, kv_rows, len(readers[0]) if readers else 0))
    return _Segments(segments, queries, kv_shared or len(queries) > len(keys))


def _rows_of(offsets: Tensor, device: torch.device) -> list[Tensor]:
    bounds = offsets.tolist()
    return [torch.arange(start, end, device=device) for start, end in zip(bounds, bounds[1:])]


class _Group(NamedTuple):
    """Segments of equal lengths and targets: their numbers, and their rows,
    `[segments, length]`. masked: of a `_Segment`."""

    numbers: list[int]
    rows: Tensor
    kv_rows: Tensor
    targets: int
    masked: int


def _groups(segments: list[_Segment], mask: AttentionMask | None, heads: int) -> Iterator[_Group]:
    """Groups of the segments that have queries and keys. Each segment is in one group, and a group
    fits in memory."""
    targets = [] if mask is None or mask.num_targets is None else mask.num_targets.tolist()
    alike = defaultdict(list)
    for segment in segments:
        if len(segment.rows) and len(segment.kv_rows):
            count = targets[segment.number] if targets else 0
            alike[len(segment.rows), len(segment.kv_rows), count, segment.masked].append(segment)
    for (num_queries, num_keys, count, masked), members in alike.items():
        at_a_time = max(1, MOST_SCORES // (heads * num_queries * num_keys))
        for first in range(0, len(members), at_a_time):
            some = members[first : first + at_a_time]
            yield _Group(
                [x.number for x in some],
                torch.stack([x.rows for x in some]),
                torch.stack([x.kv_rows for x in some]),
                count,
                masked,
            )


def _split_scale(
    output_scale: float | Tensor, segments: _Segments, do: Tensor
) -> tuple[Tensor, Tensor | None]:
    """(factor of each row before the result is rounded, factor after it or None).

    Where segments with different scales share keys, the first factor is a power of two that is at
    least the largest scale; the rest of a segment's scale is multiplied afterwards, with a second
    rounding.
    """
    factor = torch.ones(do.shape[0], dtype=torch.float64, device=do.device)
    if not isinstance(output_scale, Tensor):
        return factor * output_scale, None
    scales = output_scale.detach().to(do.device, torch.float64)
    for number, rows in enumerate(segments.of_queries):
        factor[rows] = scales[number]
    if not (segments.shares_factor or output_scale.requires_grad):
        return factor, None
    first = scales.abs().amax() if segments.shares_factor and scales.numel() else factor
    first = torch.where(first == 0, 1.0, first).expand_as(factor)
    if segments.shares_factor:
        first = first / torch.frexp(first).mantissa.clamp(min=0.5)
    return first, (factor / first)[:, None, None]


def _scale_gradient(
    output_scale: Tensor,
    do: Tensor,
    inner: Bound,
    dtype: torch.dtype,
    factor: Tensor,
    segments: _Segments,
) -> Bound:
    """Σ dO ∘ (P v) of each segment, from inner = (P v) · factor. Any value is accepted where inner
    overflows its dtype."""
    overflows = inner.value.abs() + inner.error > torch.finfo(dtype).max
    inner = inner._replace(error=torch.where(overflows, torch.inf, inner.error))
    terms = (Bound.exact(do) * inner).scaled(1 / factor[:, None, None])
    sums = [terms.map(lambda x, rows=rows: x[rows]).sum((0, 1, 2)) for rows in segments.of_queries]
    parts = ("value", "error", "rms")
    stacked = [
        torch.stack([getattr(x, part) for x in sums]) if sums else output_scale.detach().double()
        for part in parts
    ]
    return Bound(*stacked, inner.dtype).rounded(output_scale.dtype)


def _rescaled(x: Bound, rest: Tensor, segments: _Segments, dtype: torch.dtype) -> Bound:
    """x times the rest of the scales, rounded. Where segments share no factor, the rest is exactly
    1, or 0 for a scale of 0."""
    return x.scaled(rest).rounded(dtype) if segments.shares_factor else x.map(lambda y: y * rest)


class _Rows:
    """Accumulates bounds into the rows of a tensor `[rows, heads, dim]`."""

    def __init__(self, shape: torch.Size, like: Tensor):
        self._sums = [torch.zeros(shape, dtype=torch.float64, device=like.device) for _ in range(3)]
        self._dtype = torch.promote_types(like.dtype, torch.float32)

    def add(self, rows: Tensor, block: Bound, heads: int) -> None:
        """Add a block in the shape of `_take` to rows `[segments, length]`, which may repeat."""
        parts = block.value, block.error, block.rms**2
        for total, part in zip(self._sums, parts):
            shape = len(rows), heads, total.shape[1] // heads, rows.shape[1], total.shape[2]
            spread = part.expand_as(block.value).reshape(shape).permute(0, 3, 1, 2, 4)
            total.index_add_(0, rows.flatten(), spread.flatten(2, 3).flatten(0, 1))

    @property
    def bound(self) -> Bound:
        value, error, variance = self._sums
        return Bound(value, error, variance.sqrt(), self._dtype)


def _take(x: Bound, rows: Tensor, heads: int) -> Bound:
    """`[segments · key heads, group · length, dim]` of x `[rows, heads, dim]` at rows
    `[segments, length]`."""
    return x.map(
        lambda y: (
            y[rows].unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3).flatten(0, 1)
        )
    )
