"""Attention of segments of equal lengths on the CPU, forward and backward: operands `[segments, heads, rows, dim]`, fp32 or fp64.

The query rows go block by block, each with the columns that any row of it sees. Scores are computed again in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..activations import POINTWISE
from ..masks import AttentionMask
from .buckets import softmax_gradient

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
    if mask is None:
        # All scores of such a row are NaN. torch's fused attention treats it as a row that sees no key and returns 0.
        not_finite = ~q.isfinite().all(-1, keepdim=True)
        out, lse = _fused_attention(q, k, v, scale=scale)
        return out.masked_fill_(not_finite, math.nan), lse
    flags = mask, num_targets, scale
    if _products_are_finite(scale, q, k, v):
        return _fused_forward(q, k, v, *flags)
    bad_q, bad_kv = _unsafe_rows(q, k, scale), _unsafe_rows(k, q, scale) | _unsafe_rows(v)
    affected, _ = _affected(q, k, bad_q, bad_kv, mask, num_targets)
    fused_out, fused_lse = _fused_forward(_clear(q, bad_q), _clear(k, bad_kv), _clear(v, bad_kv), *flags)
    out, lse = unfused_forward(q, k, v, *flags, "softmax")
    assert lse is not None  # as with every softmax
    return torch.where(affected[..., None], out, fused_out), torch.where(affected, lse, fused_lse)  # other rows stay bitwise equal


def softmax_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: AttentionMask | None, num_targets: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from what `softmax_forward` gave."""
    if mask is None:
        return _fused_attention_backward(do, q, k, v, out, lse, 0.0, False, scale=scale)
    flags = mask, num_targets, scale
    if _products_are_finite(scale, do, q, k, v):
        return _fused_backward(do, q, k, v, out, lse, *flags)
    bad_q, bad_kv = _unsafe_rows(q, k, scale) | _unsafe_rows(do, v), _unsafe_rows(k, q, scale) | _unsafe_rows(v, do)
    affected, affected_keys = _affected(q, k, bad_q, bad_kv, mask, num_targets)
    (do_, q_, out_), (k_, v_) = (_clear(x, affected) for x in (do, q, out)), (_clear(x, bad_kv) for x in (k, v))
    fused = _fused_backward(do_, q_, k_, v_, out_, lse.masked_fill(affected, 0.0), *flags)
    unfused = unfused_backward(do, q, k, v, *flags, "softmax")
    choices = (affected, affected_keys, affected_keys)
    dq, dk, dv = (torch.where(rows[..., None], x, y) for rows, x, y in zip(choices, unfused, fused))
    return dq, dk, dv


def _fused_forward(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, num_targets: int, scale: float) -> tuple[Tensor, Tensor]:
    """`softmax_forward` under a mask, for operands whose products are finite."""
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:3])
    for rows, columns, hidden in _blocks(q, k, mask, num_targets):
        operands = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        out[:, :, rows], lse[:, :, rows] = _fused_attention(*operands, attn_mask=_bias(hidden, q), scale=scale)
    return out, lse


def _fused_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: AttentionMask, num_targets: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`softmax_backward` under a mask, for operands whose products are finite."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for rows, columns, hidden in _blocks(q, k, mask, num_targets):
        operands = do[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], out[:, :, rows], lse[:, :, rows]
        grads = _fused_attention_backward(*operands, 0.0, False, attn_mask=_bias(hidden, q), scale=scale)
        dq[:, :, rows] = grads[0]
        dk[:, :, columns] += grads[1]
        dv[:, :, columns] += grads[2]
    return dq, dk, dv


def unfused_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, num_targets: int, scale: float, activation: str
) -> tuple[Tensor, Tensor | None]:
    """P v for P = act(scale · q kᵀ), 0 where hidden; with softmax also the log-sum-exp of the scores `[segments, heads, rows]`."""
    finite = mask is None or _are_finite(v)
    queries, keys, values = _fold(q * scale, k), k.flatten(0, 1), v.flatten(0, 1)
    out = queries.new_zeros(*queries.shape[:3], v.shape[3])
    lse = queries.new_zeros(queries.shape[:3]) if activation == "softmax" else None
    for some, rows, columns, hidden in _pieces(q, k, mask, num_targets):
        scores = queries[some, :, rows].flatten(1, 2) @ keys[some, columns].mT
        if lse is not None:
            lse[some, :, rows] = _hide(scores, hidden, -math.inf).logsumexp(-1).view_as(lse[some, :, rows])
        p, value = _weights(scores, hidden, activation), values[some, columns]
        result = p @ value if finite or hidden is None else _visible_product(p, value, hidden.repeat(queries.shape[1], 1))
        out[some, :, rows] = result.view_as(out[some, :, rows])
    return _unfold(out, k), None if lse is None else _unfold(lse, k)


def unfused_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, num_targets: int, scale: float, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dV = Pᵀ dO,  dS = act'(S) ∘ dO Vᵀ,  dQ = scale · dS K,  dK = dSᵀ (scale · Q)."""
    queries, grads, keys, values = _fold(q * scale, k), _fold(do, k), k.flatten(0, 1), v.flatten(0, 1)
    finite = mask is None or _are_finite(queries, grads, keys)
    dq, dk, dv = (torch.zeros_like(x) for x in (queries, keys, values))
    for some, rows, columns, hidden in _pieces(q, k, mask, num_targets):
        query, grad = (x[some, :, rows].flatten(1, 2) for x in (queries, grads))
        key, value = keys[some, columns], values[some, columns]
        scores = query @ key.mT
        p = _weights(scores, hidden, activation)
        ds = _ds(grad @ value.mT, scores, p, hidden, activation)
        if finite or hidden is None:
            dv[some, columns].baddbmm_(p.mT, grad)
            dk[some, columns].baddbmm_(ds.mT, query)
            block = ds @ key
        else:
            no_pair = hidden.repeat(queries.shape[1], 1)
            dv[some, columns] += _visible_product(p.mT, grad, no_pair.mT)
            dk[some, columns] += _visible_product(ds.mT, query, no_pair.mT)
            block = _visible_product(ds, key, no_pair)
        dq[some, :, rows] = block.view_as(dq[some, :, rows])
    return _unfold(dq, k) * scale, dk.unflatten(0, k.shape[:2]), dv.unflatten(0, k.shape[:2])


def _weights(scores: Tensor, hidden: Tensor | None, activation: str) -> Tensor:
    """P, 0 where hidden. Softmax overwrites the scores there."""
    if activation == "softmax":
        return _hide(_hide(scores, hidden, -math.inf).softmax(-1), hidden)
    return _hide(POINTWISE[activation].function(scores), hidden)


def _ds(dp: Tensor, scores: Tensor, p: Tensor, hidden: Tensor | None, activation: str) -> Tensor:
    """dS, 0 where hidden. Softmax: P ∘ (dP - rowsum(P ∘ dP))."""
    if activation == "softmax":
        return _hide(softmax_gradient(_hide(dp, hidden), p, -1, dp.dtype), hidden)
    return _hide(POINTWISE[activation].backward(dp, scores), hidden)


def _are_finite(*operands: Tensor) -> bool:
    """False if an element is not finite, or if a norm overflows. The norm needs no temporary tensor."""
    return all(math.isfinite(torch.linalg.vector_norm(x)) for x in operands)


def _products_are_finite(scale: float, *operands: Tensor) -> bool:
    """False if an element, or a product of rows of two operands, may not be finite.

    torch's fused attention adds -inf to hidden scores and multiplies hidden rows by 0, which gives NaN for such values.
    """
    bound = math.prod(1 + float(torch.linalg.vector_norm(x)) for x in operands)
    return bound * (1 + abs(scale)) < torch.finfo(operands[0].dtype).max


def _unsafe_rows(x: Tensor, other: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Mask of the rows of x `[..., rows, D]` that are not finite, or whose products with finite rows of `other` may not be."""
    norms = torch.linalg.vector_norm(x, dim=-1)
    if other is not None:
        norms = norms * ((1 + abs(scale)) * (1 + torch.linalg.vector_norm(other, dim=-1).nan_to_num(0.0, posinf=0.0).amax()))
    return ~norms.isfinite()


def _affected(q: Tensor, k: Tensor, bad_q: Tensor, bad_kv: Tensor, mask: AttentionMask, num_targets: int) -> tuple[Tensor, Tensor]:
    """Masks `[segments, heads, rows]` of the queries that are bad or see a bad key, and of the keys that are seen by such a query."""
    group = q.shape[1] // k.shape[1]
    rows_affected, keys = bad_q.clone(), bad_kv.repeat_interleave(group, 1).to(q.dtype)
    keys_affected = torch.zeros_like(keys, dtype=torch.bool)
    for rows, columns, hidden in _blocks(q, k, mask, num_targets):
        visible = (~hidden).to(q.dtype)
        rows_affected[:, :, rows] |= keys[:, :, columns] @ visible.mT > 0
        keys_affected[:, :, columns] |= rows_affected[:, :, rows].to(q.dtype) @ visible > 0
    return rows_affected, keys_affected.unflatten(1, (-1, group)).any(2)


def _clear(x: Tensor, rows: Tensor) -> Tensor:
    return x.masked_fill(rows[..., None], 0.0)


def _visible_product(p: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
    """p `[some, M, N]` @ x `[some, N, D]`, where hidden pairs `[M, N]` add nothing: p is 0 there, but 0 · NaN and 0 · inf would be NaN.

    The finite elements of x are multiplied first. Visible elements that are not finite then make the result +inf, -inf or NaN.
    """
    not_finite = ~x.isfinite()
    terms = (~hidden).to(x.dtype) @ not_finite.to(x.dtype)
    signs = p.sign() @ x.sign().masked_fill(~x.isinf(), 0.0)
    others = torch.where(signs.abs() == terms, signs * math.inf, math.nan)
    return p @ x.masked_fill(not_finite, 0.0) + torch.where(terms == 0, 0.0, others)


def _row_blocks(q: Tensor, k: Tensor, at_a_time: int) -> Iterator[slice]:
    """Query rows, at most `at_a_time`, and fewer where they would have more than MOST_SCORES."""
    num_queries = q.shape[2]
    at_a_time = max(1, min(at_a_time, MOST_SCORES * k.shape[1] // (q.shape[1] * k.shape[2])))
    for start in range(0, num_queries, at_a_time):
        yield slice(start, min(start + at_a_time, num_queries))


def _blocks(q: Tensor, k: Tensor, mask: AttentionMask, num_targets: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Query rows, the columns that any of them sees, and a boolean `[rows, columns]` of what is hidden nevertheless."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    for rows in _row_blocks(q, k, ROWS):
        keep = mask.rule(torch.arange(rows.start, rows.stop) + (num_keys - num_queries), num_keys, num_targets)
        seen = keep.any(0).nonzero()
        if len(seen):
            columns = slice(int(seen[0]), int(seen[-1]) + 1)
            yield rows, columns, ~keep[:, columns]


def _unmasked_blocks(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, None]]:
    """`_blocks` without a mask."""
    segments, heads, num_keys = q.shape[0], q.shape[1], k.shape[2]
    for rows in _row_blocks(q, k, max(ROWS, scores_at_a_time() // (segments * heads * num_keys))):
        yield rows, slice(0, num_keys), None


def _pieces(q: Tensor, k: Tensor, mask: AttentionMask | None, num_targets: int) -> Iterator[tuple[slice, slice, slice, Tensor | None]]:
    """The blocks, each for some of the key heads of all segments at a time."""
    segments, kv_heads = k.shape[:2]
    for rows, columns, hidden in _unmasked_blocks(q, k) if mask is None else _blocks(q, k, mask, num_targets):
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


def _hide(x: Tensor, hidden: Tensor | None, value: float = 0.0) -> Tensor:
    """x `[some, group · rows, columns]` with the value written where hidden, in place."""
    if hidden is not None:
        x.unflatten(1, (-1, len(hidden))).masked_fill_(hidden, value)
    return x


def _bias(hidden: Tensor, like: Tensor) -> Tensor:
    """What softmax adds to the scores."""
    return torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
