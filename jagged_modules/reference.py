"""Definitions of the operators in plain torch: differentiable, for any device and floating-point
dtype. Tests compare against them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from .activations import POINTWISE
from .bias import RelativeBias, next_timestamps, position_index, time_buckets
from .dropout import Dropout
from .masks import AttentionMask
from .scalars import to_ints
from .unit_activations import (
    UnitParameters,
    UnitTable,
    pair_features,
    statistics_table,
    unit_activation,
)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    *,
    scale: float,
    q_shared: bool = False,
    activation: str = "softmax",
    mask: AttentionMask | None = None,
    output_scale: float | Tensor = 1.0,
    bias: RelativeBias | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """dropout(activation(scale · q kᵀ + bias)) · output_scale · v per segment and head; see
    `functional.jagged_attention` for shapes.

    The result of a row that sees no key is 0. q_shared: all segments use all rows of q, and
    q_offsets are those of the output. With n · B query segments, segments b, B + b, ... use key
    segment b, and mask and bias are those of the first B. Values at masked positions must be finite
    here: 0 times NaN is NaN.
    """
    group = q.shape[1] // k.shape[1]
    num_targets = (
        to_ints(mask.num_targets) if mask is not None and mask.num_targets is not None else None
    )
    outputs: list[Tensor] = []
    q_segments, kv_segments = segments(q_offsets, q_shared), segments(kv_offsets)
    num_own = len(kv_segments)
    kv_segments *= len(q_segments) // len(kv_segments)
    for b, (q_rows, kv_rows) in enumerate(zip(q_segments, kv_segments, strict=True)):
        keys, values = (x[kv_rows].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[q_rows], keys) * scale
        if bias is not None and b < num_own:
            scores = scores + _bias_of_segment(bias, b, q_rows, kv_rows, q.device).to(scores.dtype)
        hidden = torch.zeros((), dtype=torch.bool, device=q.device)
        if mask is not None and b < num_own:
            targets = num_targets[b] if num_targets and b < len(num_targets) else 0
            hidden = ~mask.keep(scores.shape[1], scores.shape[2], targets, q.device)
        if activation == "softmax":
            nothing_seen = hidden.all(-1, keepdim=True) if hidden.dim() else hidden
            scores = scores.masked_fill(hidden & ~nothing_seen, float("-inf"))
            p = torch.softmax(scores, dim=-1).masked_fill(nothing_seen, 0.0)
        else:
            p = POINTWISE[activation].function(scores).masked_fill(hidden, 0.0)
            p = p * (
                output_scale[b]
                if isinstance(output_scale, Tensor) and output_scale.numel()
                else output_scale
            )
        if dropout is not None:
            heads = torch.arange(q.shape[1], device=q.device)
            rows, keys_of_rows = (slice(0, size) for size in p.shape[1:])
            dropped = dropout.dropped(q_offsets[b], heads, rows, keys_of_rows)
            p = p.masked_fill(dropped, 0.0) * dropout.factor
        outputs.append(torch.einsum("hij,jhd->ihd", p, values))
    return torch.cat(outputs)


def _bias_of_segment(
    bias: RelativeBias, segment: int, q_rows: slice, kv_rows: slice, device: torch.device
) -> Tensor:
    """The bias of a segment's scores, `[H or 1, rows, columns]`."""
    num_queries, num_keys = q_rows.stop - q_rows.start, kv_rows.stop - kv_rows.start
    if num_queries == 0 or num_keys == 0:  # no score reads it, and the tables' gradients are 0
        return torch.stack([x.sum() for x in (bias.position, bias.time) if x is not None]).sum()
    shift = 0 if bias.query_shift is None else int(bias.query_shift[segment])
    j = torch.arange(num_keys, device=device)
    i = torch.arange(num_queries, device=device) + (num_keys - num_queries + shift)
    total = torch.zeros((), device=device)
    if bias.position is not None and bias.max_seqlen is not None:
        table = bias.position.reshape(-1, bias.position.shape[-1])
        total = total + table[:, position_index(i, j, bias.max_seqlen)]
    if bias.time is not None and bias.timestamps is not None and bias.boundaries is not None:
        t = bias.timestamps[kv_rows]
        u = bias.query_timestamps
        u = next_timestamps(i, t) if u is None else u[q_rows]
        table = bias.time.reshape(-1, bias.time.shape[-1])
        total = total + table[:, time_buckets(u, t, bias.boundaries)]
    return total


def linear_compress_reference(
    weights: Sequence[Tensor], embeddings: Sequence[Tensor], indices: Sequence[Tensor]
) -> Tensor:
    """[W_0 | W_1 | ...] @ [E_0[index_0[b]]; E_1[index_1[b]]; ...] for each row b of the last
    embeddings. All levels are replicated."""
    replicated = [embedding.index_select(0, index) for embedding, index in zip(embeddings, indices)]
    return torch.cat(list(weights), dim=1) @ torch.cat([*replicated, embeddings[-1]], dim=1)


def din_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    normalize: str | None,
    features: Sequence[str],
    units: UnitParameters | None,
    mask: AttentionMask | None = None,
) -> Tensor:
    """Σ_i p_i v_i with the MLP's scores; see `functional.din_attention`. A row per pair of a row of
    q `[R, E]` and an event of its segment that it sees. Running statistics are not updated."""
    mask = mask or AttentionMask()
    sides = segments(q_offsets), segments(kv_offsets)
    targets = [0] * len(sides[0])
    if mask.num_targets is not None and len(mask.num_targets):
        targets = to_ints(mask.num_targets)
    pairs: list[Tensor] = []
    for rows, events, t in zip(*sides, targets):
        sizes = rows.stop - rows.start, events.stop - events.start
        first = torch.tensor([rows.start, events.start], device=q.device)
        pairs.append(mask.keep(*sizes, t, q.device).nonzero() + first)
    i, j = torch.cat(pairs).unbind(1)
    h = pair_features(q[i], k[j], features)
    for layer, (weight, bias) in enumerate(zip(weights[:-1], biases)):
        z = linear(h, weight, bias)
        h = unit_activation(z, activation, _unit_table(z, activation, units, layer))
    s = linear(h, weights[-1], biases[-1]).squeeze(1)
    p = _softmax_of_rows(s, i, q.shape[0]) if normalize == "softmax" else s
    return _weighted_sums(p, v[j], i, q.shape[0])


def _softmax_of_rows(s: Tensor, i: Tensor, num_rows: int) -> Tensor:
    """exp(s - lse) of scores of rows i: the log-sum-exp is what the backward keeps."""
    top = s.new_zeros(num_rows).scatter_reduce(0, i, s.detach(), "amax", include_self=False)
    total = s.new_zeros(num_rows).index_add(0, i, (s - top[i]).exp())
    return (s - (top + total.log())[i]).exp()


def _weighted_sums(p: Tensor, v: Tensor, i: Tensor, num_rows: int) -> Tensor:
    return v.new_zeros(num_rows, v.shape[1]).index_add(0, i, p[:, None] * v)


def _unit_table(
    z: Tensor, activation: str, units: UnitParameters | None, layer: int
) -> UnitTable | None:
    if units is None:
        return None
    if activation == "prelu":
        return UnitTable(units.slopes[layer], *[z.new_zeros(())] * 6)
    if units.uses_batch or units.running_means is None or units.running_vars is None:
        return statistics_table(units, layer, z.mean(0), z.var(0, correction=0))
    return statistics_table(units, layer, units.running_means[layer], units.running_vars[layer])


def segments(offsets: Tensor, shared: bool = False) -> list[slice]:
    """The row slice of each segment. If `shared`, all slices are the block of rows that the
    segments share. One empty slice if B is 0."""
    bounds = to_ints(offsets) if offsets.shape[0] > 1 else [0, 0]
    return [
        slice(0, end - start) if shared else slice(start, end)
        for start, end in zip(bounds, bounds[1:])
    ]


def jagged_dense_bmm_reference(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """x[b] @ y[b] of x `[L, D]` and y `[B, D, T]`: `[L, T]`."""
    results = [x[rows] @ matrix for rows, matrix in zip(segments(offsets), y)]
    return torch.cat(results) if results else x @ y.sum(0)


def jagged_jagged_bmm_reference(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """x[b]ᵀ @ y[b] of x `[L, D]` and y `[L, T]`: `[B, D, T]`."""
    return torch.stack([x[rows].T @ y[rows] for rows in segments(offsets)])[: offsets.shape[0] - 1]


def jagged_softmax_reference(x: Tensor, offsets: Tensor) -> Tensor:
    """softmax(x[b]) over the rows of x `[L, H]`: `[L, H]`. 0 where all elements are -infinity."""
    return torch.cat([_softmax(x[rows], 0) for rows in segments(offsets)])


def jagged_outer_reference(x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """x[b] @ y[b]ᵀ of x `[Lx, D]` and y `[Ly, D]`, flattened: `[Σ N_b · M_b]`."""
    pairs = zip(segments(x_offsets), segments(y_offsets))
    return torch.cat([(x[rows] @ y[columns].T).flatten() for rows, columns in pairs])


def array_jagged_bmm_reference(
    p: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor,
    p_offsets: Tensor,
    transposed: bool = False,
) -> Tensor:
    """p[b] @ y[b] of matrices p[b] `[N_b, M_b]`, or p[b]ᵀ @ y[b]."""
    matrices = _matrices(p, x_offsets, y_offsets, p_offsets)
    matrices = [matrix.T for matrix in matrices] if transposed else matrices
    of_y = segments(x_offsets if transposed else y_offsets)
    return torch.cat([matrix @ y[rows] for matrix, rows in zip(matrices, of_y)])


def jagged2_softmax_reference(
    p: Tensor, x_offsets: Tensor, y_offsets: Tensor, p_offsets: Tensor, dim: int = -1
) -> Tensor:
    """softmax(p[b]) of matrices p[b] `[N_b, M_b]`, flattened. 0 where all elements are -inf."""
    matrices = _matrices(p, x_offsets, y_offsets, p_offsets)
    return torch.cat([_softmax(matrix, dim).flatten() for matrix in matrices])


def _softmax(x: Tensor, dim: int) -> Tensor:
    nothing_seen = (x == float("-inf")).all(dim, keepdim=True)
    return x.masked_fill(nothing_seen, 0.0).softmax(dim).masked_fill(nothing_seen, 0.0)


def _matrices(p: Tensor, *offsets: Tensor) -> list[Tensor]:
    return [
        p[scores].reshape(x.stop - x.start, y.stop - y.start)
        for x, y, scores in zip(*(segments(o) for o in offsets))
    ]
