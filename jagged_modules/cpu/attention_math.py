"""Attention on the CPU for segments of equal lengths, forward and backward. Operands are
`[segments, heads, rows, dim]`, fp32 or fp64.

Query rows are computed in blocks. A block covers the columns that at least one of its rows sees.
The backward recomputes the scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..activations import POINTWISE
from ..masks import AttentionMask
from .attention_bias import BlockBias, BlockDropout, TableGradients
from .buckets import softmax_gradient

# query rows of a block; fewer rows see fewer columns, more rows need fewer passes over k and v
ROWS = 128
SCORES_AT_A_TIME = 2**18  # scores that fit a core's caches; a group is computed by one thread
# limit of a block's scores, over the query heads of one key head; long segments get fewer than ROWS
# rows
MOST_SCORES = 2**21

Piece = tuple[slice, slice, slice, Tensor | None]  # of `_pieces`

_fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Rule(NamedTuple):
    """How weights are made: dropout(act(scale · q kᵀ + bias)), of which a mask hides some.
    num_targets: of a segment."""

    mask: AttentionMask | None
    num_targets: int
    scale: float
    activation: str = "softmax"
    bias: BlockBias | None = None
    dropout: BlockDropout | None = None


def softmax_forward(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, finite: bool = False
) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of the scores `[segments, heads, rows]`, by torch's fused
    attention. A row that sees no key gets 0. q, k and v must have the same head dim and a last
    stride of 1. finite: whether `dot_products_are_finite` is known to hold."""
    out, lse = _fused_forward(q, k, v, rule)
    if finite:
        return out, lse
    # a score is NaN or infinity; or all are NaN or -infinity, where torch returns out = lse = 0, as
    # for a row that sees no key
    lost = ~(lse.isfinite() & (lse != 0))
    some = lost.flatten(1).any(1)
    if bool(some.any()):
        exact_out, exact_lse = unfused_forward(q[some], k[some], v[some], rule)
        assert exact_lse is not None  # "softmax" returns it
        # the bits of others do not change, nor do rows that see no key
        rows = lost[some] & ((exact_lse != -math.inf) | exact_out.isnan().any(-1))
        out[some] = torch.where(rows[..., None], exact_out, out[some])
        exact_lse = exact_lse.masked_fill(exact_lse == math.inf, math.nan)  # so are the gradients
        lse[some] = torch.where(rows, exact_lse, lse[some])
    return out, lse


def softmax_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rule: Rule,
    finite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. out, lse: the results of `softmax_forward`. finite: as there, for
    do, q, k and v."""
    gradients = _fused_backward(do, q, k, v, out, lse, rule)
    if rule.mask is None or finite:
        return gradients
    unsafe = _unsafe_segments(rule.scale, do, q, k, v)
    if bool(unsafe.any()):
        exact = unfused_backward(do[unsafe], q[unsafe], k[unsafe], v[unsafe], rule)
        for dx, exact_dx in zip(gradients, exact):
            dx[unsafe] = exact_dx
    return gradients


def _fused_forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """`softmax_forward` for operands whose dot products are finite."""
    mask, num_targets, scale, *_ = rule
    if mask is None or _is_causal(mask, q, k):
        return _fused_attention(q, k, v, 0.0, mask is not None, scale=scale)
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:3])
    for rows, columns, hidden in _blocks(q, k, mask, num_targets):
        operands = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        out[:, :, rows], lse[:, :, rows] = _fused_attention(
            *operands, attn_mask=_bias(hidden, q), scale=scale
        )
    return out, lse


def _fused_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """`softmax_backward` for operands whose dot products are finite."""
    mask, num_targets, scale, *_ = rule
    if mask is None or _is_causal(mask, q, k):
        return _fused_attention_backward(do, q, k, v, out, lse, 0.0, mask is not None, scale=scale)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for rows, columns, hidden in _blocks(q, k, mask, num_targets):
        of_queries, results = (x[:, :, rows] for x in (do, q)), (x[:, :, rows] for x in (out, lse))
        of_keys = (x[:, :, columns] for x in (k, v))
        operands, bias = (*of_queries, *of_keys, *results), _bias(hidden, q)
        dq[:, :, rows], block_dk, block_dv = _fused_attention_backward(
            *operands, 0.0, False, attn_mask=bias, scale=scale
        )
        dk[:, :, columns] += block_dk
        dv[:, :, columns] += block_dv
    return dq, dk, dv


def _is_causal(mask: AttentionMask, q: Tensor, k: Tensor) -> bool:
    """Whether the mask is the causal one of torch's fused attention."""
    return mask.params.is_causal and q.shape[2] == k.shape[2]


def unfused_forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """P v with P = dropout(act(scale · q kᵀ + bias)), 0 where hidden. With softmax also the
    log-sum-exp of the scores `[segments, heads, rows]`."""
    mask, num_targets, scale, activation, bias, dropout = rule
    queries, keys, values = _fold(q * scale, k), k.flatten(0, 1), v.flatten(0, 1)
    out = queries.new_zeros(*queries.shape[:3], v.shape[3])
    lse = queries.new_zeros(queries.shape[:3]) if activation == "softmax" else None
    for some, rows, columns, hidden in _pieces(q, k, mask, num_targets):
        scores = queries[some, :, rows].flatten(1, 2) @ keys[some, columns].mT
        if bias is not None:
            bias.add(scores, q, k, (some, rows, columns))
        if lse is not None:
            lse[some, :, rows] = (
                _hide(scores, hidden, -math.inf).logsumexp(-1).view_as(lse[some, :, rows])
            )
        p, value = _weights(scores, hidden, activation), values[some, columns]
        if dropout is not None:
            p.masked_fill_(dropout.dropped(q, k, (some, rows, columns)), 0.0)
        out[some, :, rows] = (p @ value).view_as(out[some, :, rows])
    if dropout is not None:
        out *= dropout.dropout.factor
    return _unfold(out, k), None if lse is None else _unfold(lse, k)


def unfused_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule,
    dtables: TableGradients | None = None,
    results: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dV = dropout(P)ᵀ dO,  dS = act'(S) ∘ dropout(dO Vᵀ),  dQ = scale · dS K,
    dK = dSᵀ (scale · Q). dS is also added to the gradients of bias tables.

    results: out and the log-sum-exp of the forward, which may be of more keys than k: softmax
    without a mask then reads them.
    """
    mask, num_targets, scale, activation, bias, dropout = rule
    queries = _fold(q * scale, k)
    grads = _fold(do, k)
    delta, sums = None, None
    if results is not None:
        delta = (grads * _fold(results[0], k)).sum(-1)
        sums = _fold(results[1][..., None], k)[..., 0]
    keys = k.flatten(0, 1)
    values = v.flatten(0, 1)
    dq, dk, dv = (torch.zeros_like(x) for x in (queries, keys, values))
    for some, rows, columns, hidden in _pieces(q, k, mask, num_targets):
        place = some, rows, columns
        query, grad = (x[some, :, rows].flatten(1, 2) for x in (queries, grads))
        key, value = keys[some, columns], values[some, columns]
        scores = query @ key.mT
        if bias is not None:
            bias.add(scores, q, k, place)
        if sums is None:
            p = _weights(scores, hidden, activation)
        else:
            p = (scores - sums[some, :, rows].flatten(1, 2)[..., None]).exp()
        dp = grad @ value.mT
        weights = p
        if dropout is not None:
            dropped, factor = dropout.dropped(q, k, place), dropout.dropout.factor
            weights, dp = (x.masked_fill(dropped, 0.0).mul_(factor) for x in (p, dp))
        if delta is not None:
            ds = p * (dp - delta[some, :, rows].flatten(1, 2)[..., None])
        elif activation == "softmax":  # P ∘ (dP - rowsum(P ∘ dP))
            ds = _hide(softmax_gradient(_hide(dp, hidden), p, -1, dp.dtype), hidden)
        else:
            ds = _hide(POINTWISE[activation].backward(dp, scores), hidden)
        if bias is not None and dtables is not None:
            dtables.add(ds, bias, q, k, place)
        dv[some, columns].baddbmm_(weights.mT, grad)
        dk[some, columns].baddbmm_(ds.mT, query)
        dq[some, :, rows] = (ds @ key).view_as(dq[some, :, rows])
    return _unfold(dq, k) * scale, dk.unflatten(0, k.shape[:2]), dv.unflatten(0, k.shape[:2])


def _weights(scores: Tensor, hidden: Tensor | None, activation: str) -> Tensor:
    """P, 0 where hidden. With softmax, hidden scores are overwritten in place."""
    if activation == "softmax":
        return _hide(_hide(scores, hidden, -math.inf).softmax(-1), hidden)
    return _hide(POINTWISE[activation].function(scores), hidden)


def dot_products_are_finite(scale: float, *operands: Tensor) -> bool:
    """False if an element, or a dot product of rows of two operands, may not be finite. torch's
    fused attention gives NaN for hidden scores that are infinite, and 0 for rows whose scores are
    all NaN."""
    return not bool(_unsafe_segments(scale, *(x[None] for x in operands)))


def _unsafe_segments(scale: float, *operands: Tensor) -> Tensor:
    """Boolean `[segments]`, of operands `[segments, ...]`: where `dot_products_are_finite` does not
    hold."""
    bound = torch.tensor(1 + abs(scale), device="cpu")
    for x in operands:
        bound = bound * (1 + torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim()))))
    return ~(bound < torch.finfo(operands[0].dtype).max)


def _row_blocks(q: Tensor, k: Tensor, at_a_time: int) -> Iterator[slice]:
    """Slices of the query rows: at most `at_a_time` rows, and fewer if they have more than
    MOST_SCORES scores."""
    num_queries = q.shape[2]
    at_a_time = max(1, min(at_a_time, MOST_SCORES * k.shape[1] // (q.shape[1] * k.shape[2])))
    for start in range(0, num_queries, at_a_time):
        yield slice(start, min(start + at_a_time, num_queries))


def _blocks(
    q: Tensor, k: Tensor, mask: AttentionMask, num_targets: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Blocks: query rows, the range of columns that at least one of them sees, and a boolean
    `[rows, columns]`, True where hidden."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    for rows in _row_blocks(q, k, ROWS):
        keep = mask.rule(
            torch.arange(rows.start, rows.stop, device="cpu") + (num_keys - num_queries),
            num_keys,
            num_targets,
        )
        seen = keep.any(0).nonzero()
        if len(seen):
            columns = slice(int(seen[0]), int(seen[-1]) + 1)
            yield rows, columns, ~keep[:, columns]


def _unmasked_blocks(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, None]]:
    """`_blocks` without a mask."""
    segments, heads, num_keys = q.shape[0], q.shape[1], k.shape[2]
    for rows in _row_blocks(q, k, max(ROWS, SCORES_AT_A_TIME // (segments * heads * num_keys))):
        yield rows, slice(0, num_keys), None


def _pieces(q: Tensor, k: Tensor, mask: AttentionMask | None, num_targets: int) -> Iterator[Piece]:
    """The blocks, each for some of the (segment, key head) pairs at a time: those pairs, then the
    fields of a block."""
    segments, kv_heads = k.shape[:2]
    for rows, columns, hidden in (
        _unmasked_blocks(q, k) if mask is None else _blocks(q, k, mask, num_targets)
    ):
        scores = q.shape[1] // kv_heads * (rows.stop - rows.start) * (columns.stop - columns.start)
        at_a_time = max(1, SCORES_AT_A_TIME // scores)
        for start in range(0, segments * kv_heads, at_a_time):
            yield slice(start, start + at_a_time), rows, columns, hidden


def _fold(x: Tensor, k: Tensor) -> Tensor:
    """x as `[segments · key heads, group, rows, dim]`: query heads that share a key head are
    together, so keys are not repeated."""
    return x.unflatten(1, (k.shape[1], -1)).flatten(0, 1)


def _unfold(x: Tensor, k: Tensor) -> Tensor:
    """Undo `_fold`."""
    return x.unflatten(0, k.shape[:2]).flatten(1, 2)


def _hide(x: Tensor, hidden: Tensor | None, value: float = 0.0) -> Tensor:
    """Write the value to x `[some, group · rows, columns]` where hidden, in place."""
    if hidden is not None:
        x.unflatten(1, (-1, len(hidden))).masked_fill_(hidden, value)
    return x


def _bias(hidden: Tensor, like: Tensor) -> Tensor:
    """The additive mask of torch's fused attention: -inf where hidden, else 0."""
    return torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
