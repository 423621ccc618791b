"""Attention whose scores, or whose mask, a caller's function gives. The three operators on flat
scores compute it, so that the function sees all scores of a batch at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..activations import POINTWISE
from ..containers.padding import padded_to
from ..dtypes import autocast_operands
from ..masks import AttentionMask, is_visible
from ..scalars import check_equal
from ..segments import RowSegments, normal_form
from ..tracing import is_recording
from ..validation import IMPLEMENTATIONS, check_implementation
from .attention_arguments import Side, check_scalars, check_sides
from .attention_call import AttentionOptions, check_operands, check_output_scale, expand_to_rows
from .matmul import array_jagged_bmm_jagged_out, jagged_jagged_bmm_jagged_out
from .score_plan import ScorePlan
from .softmax import jagged2_softmax


class Pairs(NamedTuple):
    """Pairs of a query row and a key of its segment: int64 tensors on q's device. `head` is
    `[H, 1]`, the others are `[pairs]`.

    Attributes:
        segment, head: of the pair.
        q, k: places of the query row and of the key in their segment.
        q_row, k_row: rows of q and of k.
        q_len, k_len: numbers of query rows and of keys of the segment.
    """

    segment: Tensor
    head: Tensor
    q: Tensor
    k: Tensor
    q_row: Tensor
    k_row: Tensor
    q_len: Tensor
    k_len: Tensor

    @classmethod
    def of(cls, plan: ScorePlan, num_heads: int) -> Pairs:
        x_offsets, y_offsets, p_offsets = (x.long() for x in plan.offsets)
        segments = torch.arange(len(p_offsets) - 1, device=p_offsets.device)
        segment = segments.repeat_interleave(p_offsets.diff(), output_size=plan.total)
        place = torch.arange(plan.total, device=p_offsets.device) - p_offsets[segment]
        q_len, k_len = x_offsets.diff()[segment], y_offsets.diff()[segment]
        q, k = place // k_len, place % k_len
        head = torch.arange(num_heads, device=p_offsets.device)[:, None]
        return cls(
            segment, head, q, k, x_offsets[segment] + q, y_offsets[segment] + k, q_len, k_len
        )


Score = Callable[[Tensor, Pairs], Tensor]
Mask = AttentionMask | Callable[[Pairs], Tensor]


def attention_by_functions(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Side,
    keys: Side,
    options: AttentionOptions,
    score: Score | None,
    mask: Mask | None,
) -> Tensor:
    """`jagged_attention` with these functions. options: its other arguments, and an
    AttentionMask."""
    activation, implementation = options.activation, options.implementation
    if not (score is None or callable(score)):
        raise TypeError(f"score must be a function, got {type(score).__name__}")
    if not (mask is None or mask is options.mask or callable(mask)):
        raise TypeError(f"mask must be an AttentionMask or a function, got {type(mask).__name__}")
    own, others = _checked_sides(q, k, queries, keys, options)
    q, k, v = autocast_operands(q, k, v)
    check_operands(q, k, v)
    plan = ScorePlan.from_offsets(*[x.offsets.cpu() for x in (own, others)]).to(q.device)
    pairs, heads, dtype = Pairs.of(plan, q.shape[1]), range(q.shape[1]), q.dtype
    group, rows = q.shape[1] // k.shape[1], q.shape[0]
    scale = q.shape[2] ** -0.5 if options.scale is None else options.scale
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = (q[: plan.x_rows].to(wide), k[: plan.y_rows].to(wide), v[: plan.y_rows].to(wide))
    with torch.autocast(q.device.type, enabled=False):
        run: Any = dict(plan=plan, implementation=implementation)
        scores = torch.stack(
            [jagged_jagged_bmm_jagged_out(q[:, h] * scale, k[:, h // group], **run) for h in heads]
        )
        if score is not None:
            scores = _checked("score", score(scores, pairs), scores)
        hidden = None if mask is None else ~_visible(mask, pairs, scores)
        if activation == "softmax":
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            p = [jagged2_softmax(x, **run) for x in scores]
        else:
            weights = POINTWISE[activation].function(scores)
            p = list(weights if hidden is None else weights.masked_fill(hidden, 0))
        out = torch.stack(
            [array_jagged_bmm_jagged_out(p[h], v[:, h // group], **run) for h in heads], 1
        )
    factor = options.output_scale
    if isinstance(factor, Tensor):
        check_output_scale(factor, own.offsets.shape[0] - 1, q.device)
        factor = normal_form(factor, q.device).to(wide)
        factor = expand_to_rows(factor, own.offsets, plan.x_rows)[:, None, None]
    return padded_to((out * factor).to(dtype), rows)


def _checked_sides(
    q: Tensor, k: Tensor, queries: Side, keys: Side, options: AttentionOptions
) -> tuple[RowSegments, RowSegments]:
    """The segments of queries and keys, after checks of all that `attention_by_functions` takes."""
    for name in ("bias", "schedule", "pages", "dropout_seed"):
        if getattr(options, name) is not None:
            raise ValueError(f"{name} must be None with score or a function as mask")
    if options.dropout_p:
        raise ValueError(
            f"dropout_p must be 0 with score or a function as mask, got {options.dropout_p}"
        )
    check_implementation(options.implementation, IMPLEMENTATIONS, q.device)
    check_scalars(options.activation, options.scale, options.output_scale)
    if is_recording(q.device):
        raise RuntimeError(
            "jagged_attention with score or a function as mask reads the offsets on the host: call"
            " it outside of torch.compile and CUDA graphs, or use flex_attention there"
        )
    own, others = check_sides(q, k.shape[0], queries, keys, options.mask)
    if own is None or others is None:
        raise ValueError(
            "q_offsets and kv_offsets must be tensors with score or a function as mask, got"
            ' "shared"'
        )
    must = "have as many segments as kv_offsets with score or a function as mask"
    check_equal("q_offsets", must, *(x.offsets.shape[0] - 1 for x in (others, own)))
    return own, others


def _checked(name: str, x: object, scores: Tensor) -> Tensor:
    """What a function returned, expanded to all heads and pairs: scores, or booleans of a mask."""
    kind = "booleans" if name == "mask" else "floating-point scores"
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must return a tensor of {kind}, got {type(x).__name__}")
    if not (x.dtype == torch.bool if name == "mask" else x.is_floating_point()):
        raise TypeError(f"{name} must return a tensor of {kind}, got {x.dtype}")
    try:
        return (x if name == "mask" else x.to(scores.dtype)).expand_as(scores)
    except RuntimeError:
        raise ValueError(
            f"{name} must return a tensor that expands to {list(scores.shape)}, heads and pairs,"
            f" got shape {list(x.shape)}"
        ) from None


def _visible(mask: Mask, at: Pairs, scores: Tensor) -> Tensor:
    if not isinstance(mask, AttentionMask):
        return _checked("mask", mask(at), scores)
    targets: Tensor | int = 0
    if mask.num_targets is not None:
        targets = normal_form(mask.num_targets, scores.device).long()[at.segment]
    return is_visible(mask, at.q + at.k_len - at.q_len, at.k, at.k_len, targets).expand_as(scores)
