"""Segments of equal lengths, which the CPU's attention computes together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jagged_kernels.attention.params import AttentionParams, Segments
from torch import Tensor

from ..dropout import Dropout
from ..masks import AttentionMask
from .attention_bias import BlockBias, BlockDropout
from .attention_math import SCORES_AT_A_TIME, Rule
from .buckets import Rows, present_segments


class Group(NamedTuple):
    """Segments with equal lengths and numbers of targets.

    Attributes:
        rows, q_rows, kv_rows: their rows of the output, of q, and of k and v.
        mask: the mask, and the number of targets of each segment.
        query_group: the query group that they belong to; those of one have different keys.
        is_first: no other group of these keys comes before, so gradients of keys are stored, not
            added.
        shift: query_shift of each segment.
        scores: the number of their scores, of all heads.
        starts: where the segments of queries start.
        first: the place of the first query row in its segment.
    """

    rows: Rows
    q_rows: Rows
    kv_rows: Rows
    mask: tuple[AttentionMask | None, int]
    query_group: int
    is_first: bool
    shift: int
    scores: int
    starts: tuple[int, ...]
    first: int

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[segments, heads, rows, dim]` of q, k and v; shared queries repeat without a copy."""
        keys, values = (take(x, self.kv_rows) for x in (k, v))
        queries = take(q, self.q_rows)
        return (
            queries if len(queries) == len(keys) else queries.expand(len(keys), -1, -1, -1),
            keys,
            values,
        )

    def rule(self, params: AttentionParams) -> Rule:
        """How the weights of these segments are made. The bias is that of the first query group."""
        bias, drops, dropout = None, None, Dropout.of(params)
        if params.has_bias and self.query_group == 0:
            t = None if params.timestamps is None else self.kv_rows.take(params.timestamps)
            u = None if params.query_timestamps is None else self.rows.take(params.query_timestamps)
            bias = BlockBias(params, self.kv_rows.length - self.rows.length + self.shift, t, u)
        if dropout is not None:
            starts = torch.tensor(self.starts, device="cpu")
            drops = BlockDropout(dropout, starts, self.first)
        return Rule(*self.mask, params.scale, params.activation, bias, drops)


def is_by_rows(segments: Segments, params: AttentionParams, query_group: int) -> bool:
    """Whether a group of segments is one query row. Mask and bias are those of the first query
    group."""
    return (
        params.batch_invariant
        and ((params.mask is None and not params.has_bias) or query_group > 0)
        and not segments.q_shared
    )


def groups_of(num_heads: int, segments: Segments, params: AttentionParams) -> Iterator[Group]:
    """Groups of segments that have queries and keys, in the order of the query groups.
    batch_invariant: a group is one segment or, of a query group without a mask, one query row: a
    candidate's result must not depend on the user's other candidates."""
    mask = (
        None if params.mask is None else AttentionMask.from_params(params.mask, params.num_targets)
    )
    q_shared, batch_invariant = segments.q_shared, params.batch_invariant
    q_offsets, kv_offsets = segments.q_offsets, segments.kv_offsets
    num_segments = len(kv_offsets) - 1
    none = torch.zeros(num_segments, dtype=torch.int64, device="cpu")
    targets, shifts = (none if x is None else x for x in (params.num_targets, params.query_shift))
    starts: defaultdict[tuple[int, ...], list[tuple[int, int, int, int]]] = defaultdict(list)
    for query_group in range((len(q_offsets) - 1) // max(1, num_segments)):
        first, by_rows = query_group * num_segments, is_by_rows(segments, params, query_group)
        bounds = q_offsets[first : first + num_segments + 1]
        present = present_segments(bounds, kv_offsets)
        columns = bounds[:-1], bounds[1:], kv_offsets[:-1], kv_offsets[1:], targets, shifts
        for q_start, q_end, kv_start, kv_end, *others in zip(
            *(x[:num_segments][present].tolist() for x in columns)
        ):
            if q_end > q_start and kv_end > kv_start:
                lengths = 1 if by_rows else q_end - q_start, kv_end - kv_start
                pairs = starts[(query_group, *lengths, *others)]
                if by_rows:
                    own_rows = range(q_start, q_end)
                    pairs += ((row, kv_start, q_start, row - q_start) for row in own_rows)
                else:
                    pairs.append((q_start, kv_start, q_start, 0))
    for (query_group, num_queries, num_keys, t, shift), pairs in starts.items():
        by_rows = is_by_rows(segments, params, query_group)
        at_a_time = 1
        if not batch_invariant:
            at_a_time = max(1, SCORES_AT_A_TIME // (num_heads * num_queries * num_keys))
        for first in range(0, len(pairs), at_a_time):
            q_starts, kv_starts, firsts, places = zip(*pairs[first : first + at_a_time])
            rows = Rows.of(q_starts, num_queries, batch_invariant)
            kv_rows = Rows.of(kv_starts, num_keys, batch_invariant)
            q_rows = Rows.of((0,), num_queries) if q_shared else rows
            scores = num_heads * num_queries * num_keys * len(q_starts)
            yield Group(
                rows, q_rows, kv_rows, (mask if query_group == 0 else None, t), query_group,
                query_group == 0 and not by_rows, shift, scores, firsts, places[0],
            )  # fmt: skip


def take(x: Tensor, rows: Rows) -> Tensor:
    """The rows of x `[rows, heads, dim]` as a block `[segments, heads, length, dim]`."""
    return rows.take(x).transpose(1, 2)


def put(x: Tensor, rows: Rows, block: Tensor) -> None:
    """Undo `take`: write a block to its rows of x."""
    rows.put(x, block.transpose(1, 2))
