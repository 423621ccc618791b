"""Functions that fused graphs call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jagged_kernels.schedule.cost import MaskParams
from torch import Tensor

from ..containers.candidates import CandidateIndex
from ..functional import din_attention, jagged_attention, target_attention
from ..functional.attention import attend
from ..functional.attention_call import AttentionOptions
from ..masks import AttentionMask
from ..scalars import check_kind
from ..segments import RowSegments, check_index_values, check_integers, values_are_checkable
from ..unit_activations import UnitParameters
from ..validation import check_tensor


def checked_map(
    candidate_to_user: Tensor, users: Mapping[str, Tensor], candidates: Mapping[str, Tensor]
) -> Tensor:
    """candidate_to_user itself; TypeError or ValueError unless it has one entry per candidate, in
    range if it is on the host, and the inputs' numbers of rows match. torch.compile and
    torch.export do not trace the checks."""
    if torch.compiler.is_compiling():
        return candidate_to_user
    check_integers("candidate_to_user", candidate_to_user)
    for name, x in (*users.items(), *candidates.items()):
        check_kind(name, x, Tensor, "a torch.Tensor")
        if not x.dim():
            raise ValueError(f"{name} must have rows, got a tensor without dimensions")
    owner, num_users = next((name, x.shape[0]) for name, x in users.items())
    for name, x in users.items():
        if x.shape[0] != num_users:
            raise ValueError(
                f"{name} must have one row per user, {num_users} as {owner}, got {x.shape[0]}"
            )
    for name, x in candidates.items():
        if x.shape[0] != candidate_to_user.shape[0]:
            raise ValueError(
                f"{name} must have one row per candidate, {candidate_to_user.shape[0]} as"
                f" candidate_to_user, got {x.shape[0]}"
            )
    check_index_values(
        "candidate_to_user", candidate_to_user, num_users, f"{{}}, the rows of {owner}"
    )
    return candidate_to_user


def check_inputs(inputs: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """TypeError or ValueError unless the inputs are such as the graph was captured for.

    Args:
        expected: of a tensor, its sizes: numbers; names of sizes that are the same wherever they
            occur; None for any size. Of another input, its value.
    """
    found: dict[str, int] = {}
    for name, sizes in expected.items():
        x = inputs[name]
        if isinstance(sizes, (list, tuple)):
            check_kind(name, x, Tensor, "a torch.Tensor")
        if not isinstance(x, Tensor) or not isinstance(sizes, (list, tuple)):
            if x is not sizes and (type(x) is not type(sizes) or x != sizes):
                raise ValueError(f"{name} must be as in example_inputs, {sizes}, got {x}")
            continue
        if x.dim() != len(sizes):
            raise ValueError(
                f"{name} must have {len(sizes)} dimensions, as in example_inputs, got"
                f" {list(x.shape)}"
            )
        for dim, (size, own) in enumerate(zip(sizes, x.shape)):
            if size is None or size == own:
                continue
            if isinstance(size, str) and found.setdefault(size, own) == own:
                continue
            raise ValueError(
                f"{name} must have size {found.get(str(size), size)} in dimension {dim}, which"
                f" example_inputs and dynamic_shapes fix, got {list(x.shape)}"
            )


def without_negative(index: Tensor, name: str) -> Tensor:
    """The map itself. It is shared by tensors of different sizes, from whose ends negative entries
    would count: ValueError for one of a host map, RuntimeError in a compiled graph and, at a later
    call, for device maps."""
    rule = f"{name} must not have negative entries, because it indexes tensors of different sizes"
    if not values_are_checkable(index):
        torch.ops.aten._assert_async.msg((index >= 0).all(), rule)
    elif index.numel() and (low := int(index.min())) < 0:
        raise ValueError(f"{rule}, got {low}")
    return index


def group_candidates(candidate_to_user: Tensor, users: Tensor) -> CandidateIndex:
    """The candidates by user, for all attentions of a graph. `users` has one row per user. The
    index has one more user without candidates, to whom the hidden keys belong."""
    return CandidateIndex.from_map(candidate_to_user.long(), users.shape[0] + 1)


def recurrence(
    input: Tensor,
    hx: Tensor | list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """torch's GRU, or with several first states its LSTM, in eval mode. First states may be
    expanded: cuDNN takes none."""
    options = params, has_biases, num_layers, 0.0, False, bidirectional, batch_first
    if isinstance(hx, Tensor):
        return torch.ops.aten.gru.input(input, hx.contiguous(), *options)
    return torch.ops.aten.lstm.input(input, [x.contiguous() for x in hx], *options)


def attend_in_place(query: Tensor, *given: Any) -> Tensor:
    """Attention of each candidate to its user's keys, of which there is one copy per user. given:
    from the key on, as `_attended` takes them.

    Args:
        query: `[C, H, Lq, D]`, or `[C · H, Lq, D]` with num_heads = H.
        key, value: `[U, H, T, D]` or `[U · H, T, D]`.
        candidates: of the users and of one more, see `group_candidates`.
        hidden: bool `[U, T]`, keys that no query sees. A mask need not be a prefix. None: all are
            visible.
        empty: the result of the candidates of a user without visible keys.

    Returns:
        In the shape of query.
    """
    return _attended(None, False, query, *given)[-1]


def attend_with_users(
    own: Tensor, query: Tensor, *given: Any, causal: bool
) -> tuple[Tensor, Tensor]:
    """`attend_in_place(query, *given)`, and in the same launch the attention of the users' own
    queries to the same keys.

    Args:
        own: `[U, H, L, D]` or `[U · H, L, D]`.
        causal: whether own queries see no later keys. Then all keys are visible, and L is T.

    Returns:
        In the shapes of own and of query.
    """
    of_users, of_candidates = _attended(own, causal, query, *given)
    return of_users, of_candidates


def _attended(
    own: Tensor | None,
    causal: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    candidates: CandidateIndex,
    hidden: Tensor | None,
    num_heads: int | None,
    scale: float,
    empty: float,
) -> list[Tensor]:
    """The results of `attend_with_users`; without `own`, that of `attend_in_place`."""
    check_tensor("query", query, query.dim(), "[C, H, Lq, D]", "target_attention")
    given = [query, key, value] if own is None else [query, key, value, own]
    if num_heads:
        given = [x.unflatten(0, (-1, num_heads)) for x in given]
    query, key, value, *_ = given
    num_users, num_keys = key.shape[0], key.shape[2]
    key, value = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
    if hidden is None:
        offsets = _with_one_more(num_users, num_keys, key.device)
    else:
        rows, offsets = visible_first(hidden)
        key, value = key.index_select(0, rows), value.index_select(0, rows)
    q = candidates.grouped(query).transpose(1, 2).flatten(0, 1)
    queries, sides = candidates.query_offsets(query.shape[2]), [*given[3:], query]
    for x in given[3:]:
        of_users = x.transpose(1, 2).flatten(0, 1)
        users = _with_one_more(num_users, x.shape[2], key.device)
        q, queries = torch.cat([of_users, q]), torch.cat([users, queries[1:] + of_users.shape[0]])
    options = AttentionOptions(scale=scale, mask=AttentionMask(causal=True) if causal else None)
    out = attend(q, key, value, RowSegments(queries), RowSegments(offsets), options)
    outs = out.split_with_sizes([x.shape[0] * x.shape[2] for x in sides])
    results = [
        x.unflatten(0, (side.shape[0], side.shape[2])).transpose(1, 2)
        for x, side in zip(outs, sides)
    ]
    results[-1] = candidates.ungrouped(results[-1])
    if empty != 0:  # attention gives 0
        lost = offsets.diff() == 0
        owners = [*[lost[:-1]] * len(given[3:]), lost[candidates.users(query.shape[0])]]
        results = [
            x.masked_fill(rows[:, None, None, None], empty) for x, rows in zip(results, owners)
        ]
    return [x.flatten(0, 1) for x in results] if num_heads else results


def attend_levels_in_place(
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    maps: list[Tensor],
    transposed: bool,
    num_heads: int | None,
    scale: float,
) -> Tensor:
    """Attention of each candidate to its rows' keys of several levels, as one history.

    Args:
        query: as of `attend_in_place`.
        keys, values: `[U, H, T, D]` or `[U · H, T, D]` of each level; keys `[..., D, T]` if
            transposed.
        maps: `[C]` of each level: the row of the level for each candidate.

    Returns:
        In the shape of query.
    """
    if num_heads:
        query = query.unflatten(0, (-1, num_heads))
        keys, values = ([x.unflatten(0, (-1, num_heads)) for x in own] for own in (keys, values))
    if transposed:
        keys = [x.mT for x in keys]
    offsets = tuple(_equal_segments(x.shape[0], x.shape[2], x.device) for x in keys)
    k, v = (tuple(x.transpose(1, 2).flatten(0, 1) for x in own) for own in (keys, values))
    out = target_attention(query.transpose(1, 2), k, v, tuple(maps), offsets, scale=scale)
    out = out.transpose(1, 2)
    return out.flatten(0, 1) if num_heads else out


def attend_equal_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_rows: int,
    kv_rows: int,
    scale: float,
    activation: str,
    mask: list[int] | None,
    output_scale: float,
    implementation: str,
) -> tuple[Tensor]:
    """`jagged_attention` of segments of q_rows queries `[B · q_rows, H, D]` and kv_rows keys each.
    mask: `MaskParams`."""
    num_segments = k.shape[0] // kv_rows
    kv_offsets = _equal_segments(num_segments, kv_rows, k.device)
    q_offsets = kv_offsets if q_rows == kv_rows else _equal_segments(num_segments, q_rows, k.device)
    rule = None if mask is None else AttentionMask.from_params(MaskParams(*mask), None)
    options: dict[str, Any] = dict(scale=scale, activation=activation, output_scale=output_scale)
    options |= dict(mask=rule, implementation=implementation)
    return (jagged_attention(q, k, v, q_offsets, kv_offsets, **options),)


def attend_segments_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    candidates: CandidateIndex,
    q_rows: int,
    kv_rows: int,
    **options: Any,
) -> tuple[Tensor]:
    """Attention of q_rows queries of each candidate, `[C · q_rows, H, D]`, to its user's kv_rows
    keys, `[U · kv_rows, H, D]`."""
    offsets = _with_one_more(k.shape[0] // kv_rows, kv_rows, k.device)
    out = target_attention(q.unflatten(0, (-1, q_rows)), k, v, candidates, offsets, **options)
    return (out.flatten(0, 1),)


def attend_by_mlp_in_place(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    candidates: CandidateIndex,
    hidden: Tensor | None,
    *,
    units: dict[str, Any],
    eps: float,
    activation: str,
    normalize: str | None,
    features: list[str],
    mean_of_hidden: bool,
    **mlp: Any,
) -> Tensor:
    """`din_attention` of each candidate, `[C, 1, E]` or `[C, E]`, to its user's keys, of which
    there is one copy per user.

    Args:
        key, value: `[U, T, E]` and `[U, T, Ev]`.
        candidates, hidden: as of `attend_in_place`.
        units: arguments of `UnitParameters`, without any if the activation has none. A slope may be
            one number for all units, or have more dimensions of size 1.
        eps: of the batch norms in Dice.
        activation, normalize, features: of `din_attention`.
        mean_of_hidden: whether a softmax of no visible keys gives the mean of all values, because
            they were hidden by a finite number. Otherwise NaN.
        mlp: arguments of `_linears`.

    Returns:
        `[C, 1, Ev]`.
    """
    num_users, num_keys = key.shape[:2]
    k = key.flatten(0, 1)
    v = k if value is key else value.flatten(0, 1)
    if hidden is None:
        offsets = _with_one_more(num_users, num_keys, key.device)
    else:
        rows, offsets = visible_first(hidden)
        v = v.index_select(0, rows)
        k = v if value is key else k.index_select(0, rows)
    weights, biases = _linears(**mlp)
    parameters = None
    if units:
        slopes = [x.flatten().expand(len(y)) for x, y in zip(units["slopes"], weights)]
        parameters = UnitParameters(**{**units, "slopes": slopes}, eps=eps)
    query = query if query.dim() == 3 else query.unsqueeze(1)
    given = query, k, v, candidates, offsets, weights, biases
    options: dict[str, Any] = dict(activation=activation, normalize=normalize, features=features)
    out = din_attention(*given, units=parameters, **options)
    if normalize is not None and hidden is not None:
        users = candidates.users(len(out))
        lost = (offsets.diff() == 0)[users][:, None, None]
        if mean_of_hidden:
            out = torch.where(lost, value.mean(1, keepdim=True)[users], out)
        else:
            out = out.masked_fill(lost, math.nan)
    return out


def _linears(
    weights: list[Tensor],
    biases: list[Tensor | None],
    norms: list[dict[str, Any] | None],
    factor: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """The linears that `din_attention` takes.

    Args:
        biases: None: of zeros.
        norms: arguments of the batch norms in eval mode that follow the linears.
        factor: of the last linear's results.
    """
    biases_or_zeros = [
        weight.new_zeros(len(weight)) if bias is None else bias
        for weight, bias in zip(weights, biases)
    ]
    pairs = list(zip(weights, biases_or_zeros))
    for i, norm in enumerate(norms):
        if norm is not None:
            scale = (norm["running_var"] + norm["eps"]).rsqrt()
            scale = scale if norm["weight"] is None else scale * norm["weight"]
            weight, bias = pairs[i]
            bias = (bias - norm["running_mean"]) * scale
            bias = bias if norm["bias"] is None else bias + norm["bias"]
            pairs[i] = (weight * scale[:, None]).to(weight.dtype), bias.to(weight.dtype)
    if factor != 1:
        pairs[-1] = pairs[-1][0] * factor, pairs[-1][1] * factor
    return [x for x, _ in pairs], [x for _, x in pairs]


def _equal_segments(number: int, rows: int, device: torch.device) -> Tensor:
    """Offsets of segments of equal length."""
    return torch.arange(number + 1, device=device) * rows


def _with_one_more(number: int, rows: int, device: torch.device) -> Tensor:
    """As `_equal_segments`, with one more segment, which is empty, see `group_candidates`."""
    return _equal_segments(number + 1, rows, device).clamp(max=number * rows)


def visible_first(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """An order of keys in which each user's visible ones follow one another, and the users' offsets
    in it. All sizes are known.

    Args:
        hidden: bool `[U, T]`.

    Returns:
        rows `[U · T]`: the visible keys of each user, then any others. offsets `[U + 2]`: of the
        users, and of the others.
    """
    num_users, num_keys = hidden.shape
    counts = (~hidden).flatten().cumsum(0)
    ends = counts.view(num_users, num_keys)[:, -1] if num_keys else counts.new_zeros(num_users)
    total = counts.shape[0]
    # without the last one, the result is a row
    rows = torch.searchsorted(counts[:-1], torch.arange(1, total + 1, device=counts.device))
    return rows, torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), total)])
