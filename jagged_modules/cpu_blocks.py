"""Attention of segments of equal lengths on the CPU, forward and backward: operands `[segments, heads, rows, dim]`, fp32 or fp64.

The query rows go block by block, each with the columns that any row of it sees. Scores are computed anew in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .activations import POINTWISE
from .masks import AttentionMask

ROWS = 128  # of a block: fewer see fewer columns, more take fewer passes over k and v
MOST_SCORES = 2**21  # of the query heads of a key head, where ROWS of a very long segment would have more

_fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def scores_at_a_time() -> int:
    """As many as stay in the threads' caches."""
    return 2**18 * torch.get_num_threads()


def softmax_forward(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, num_targets: int, scale: float) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp of the scores `[segments, heads, rows]`: torch's fused attention, which gives 0 to a row that sees nothing.

    One head dim for all of q, k and v, whose last stride is 1.
    """
    # Scores of such rows are all NaN, which torch's fused attention takes for a row that sees nothing.
    not_finite = ~q.isfinite().all(-1, keepdim=True)
    if mask is None:
        out, lse = _fused_attention(q, k, v, scale=scale)
        return out.masked_fill_(not_finite, math.nan), lse
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:3])
    for rows, columns, hidden in _blocks(q, k, mask, num_targets):
        operands = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        block, lse[:, :, rows] = _fused_attention(*operands, attn_mask=_bias(hidden, q), scale=scale)
        sees = ~hidden.all(-1, keepdim=True)
        out[:, :, rows] = block.masked_fill_(not_finite[:, :, rows] & sees, math.nan)
    return out, lse


def softmax_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: AttentionMask | None, num_targets: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from what `softmax_forward` gave."""
    if mask is None:
        return _fused_attention_backward(do, q, k, v, out, lse, 0.0, False, scale=scale)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for rows, columns, hidden in _blocks(q, k, mask, num_targets):
        operands = do[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], out[:, :, rows], lse[:, :, rows]
        grads = _fused_attention_backward(*operands, 0.0, False, attn_mask=_bias(hidden, q), scale=scale)
        dq[:, :, rows] = grads[0]
        dk[:, :, columns] += grads[1]
        dv[:, :, columns] += grads[2]
    return dq, dk, dv


def pointwise_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, num_targets: int, scale: float, activation: str
) -> Tensor:
    """P v for P = act(scale · q kᵀ), 0 where hidden."""
    function = POINTWISE[activation].function
    queries, keys, values = _fold(q * scale, k), k.flatten(0, 1), v.flatten(0, 1)
    out = queries.new_zeros(*queries.shape[:3], v.shape[3])
    for some, rows, columns, hidden in _pieces(q, k, mask, num_targets):
        scores = queries[some, :, rows].flatten(1, 2) @ keys[some, columns].mT
        result = _hide(function(scores), hidden) @ values[some, columns]
        out[some, :, rows] = result.view_as(out[some, :, rows])
    return _unfold(out, k)


def pointwise_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, num_targets: int, scale: float, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dV = Pᵀ dO,  dS = act'(S) ∘ dO Vᵀ,  dQ = scale · dS K,  dK = dSᵀ (scale · Q)."""
    function, backward = POINTWISE[activation]
    queries, grads, keys, values = _fold(q * scale, k), _fold(do, k), k.flatten(0, 1), v.flatten(0, 1)
    dq, dk, dv = (torch.zeros_like(x) for x in (queries, keys, values))
    for some, rows, columns, hidden in _pieces(q, k, mask, num_targets):
        query, grad = (x[some, :, rows].flatten(1, 2) for x in (queries, grads))
        key, value = keys[some, columns], values[some, columns]
        scores = query @ key.mT
        dv[some, columns].baddbmm_(_hide(function(scores), hidden).mT, grad)
        ds = _hide(backward(grad @ value.mT, scores), hidden)
        dk[some, columns].baddbmm_(ds.mT, query)
        dq[some, :, rows] = (ds @ key).view_as(dq[some, :, rows])
    return _unfold(dq, k) * scale, *(x.unflatten(0, k.shape[:2]) for x in (dk, dv))


def _blocks(q: Tensor, k: Tensor, mask: AttentionMask | None, num_targets: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Query rows, the columns that any of them sees, and a boolean `[rows, columns]` of what is hidden nevertheless."""
    segments, heads, num_queries, _ = q.shape
    kv_heads, num_keys = k.shape[1:3]
    at_a_time = ROWS if mask is not None else max(ROWS, scores_at_a_time() // (segments * heads * num_keys))
    at_a_time = max(1, min(at_a_time, MOST_SCORES * kv_heads // (heads * num_keys)))
    for start in range(0, num_queries, at_a_time):
        rows, columns, hidden = slice(start, min(start + at_a_time, num_queries)), slice(0, num_keys), None
        if mask is not None:
            keep = mask.rule(torch.arange(rows.start, rows.stop) + (num_keys - num_queries), num_keys, num_targets)
            seen = keep.any(0).nonzero()
            if not len(seen):
                continue
            columns = slice(int(seen[0]), int(seen[-1]) + 1)
            hidden = ~keep[:, columns]
        yield rows, columns, hidden


def _pieces(q: Tensor, k: Tensor, mask: AttentionMask | None, num_targets: int) -> Iterator[tuple[slice, slice, slice, Tensor | None]]:
    """`_blocks`, each for some of the key heads of all segments at a time."""
    segments, kv_heads = k.shape[:2]
    for rows, columns, hidden in _blocks(q, k, mask, num_targets):
        scores = q.shape[1] // kv_heads * (rows.stop - rows.start) * (columns.stop - columns.start)
        at_a_time = max(1, scores_at_a_time() // scores)
        for start in range(0, segments * kv_heads, at_a_time):
            yield slice(start, start + at_a_time), rows, columns, hidden


def _fold(x: Tensor, k: Tensor) -> Tensor:
    """`[segments · key heads, group, rows, dim]`: the query heads that share a key head together, so that no key is repeated."""
    return x.unflatten(1, (k.shape[1], -1)).flatten(0, 1)


def _unfold(x: Tensor, k: Tensor) -> Tensor:
    """Undo `_fold`."""
    return x.unflatten(0, k.shape[:2]).flatten(1, 2)


def _hide(x: Tensor, hidden: Tensor | None) -> Tensor:
    """0 in x `[some, group · rows, columns]` where hidden, in place."""
    if hidden is not None:
        x.unflatten(1, (-1, len(hidden))).masked_fill_(hidden, 0.0)
    return x


def _bias(hidden: Tensor, like: Tensor) -> Tensor:
    """What softmax adds to the scores."""
    return torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
