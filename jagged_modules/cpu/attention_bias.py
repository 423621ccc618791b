"""RelativeBias on the CPU: biases of blocks of scores, and the gradients of its tables. Dropout of
blocks of weights."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from jagged_kernels.attention.params import AttentionParams, empty_table_gradients
from torch import Tensor

from ..bias import next_timestamps, position_index, time_buckets
from ..dropout import Dropout

# of a block of scores: (segment, key head) pairs, query rows and columns
Place = tuple[slice, slice, slice]


class _Entries(NamedTuple):
    """The entries of a table that a block of scores uses: table `[H or 1, entries]`, and indices
    `[segments or 1, rows, columns]`."""

    table: Tensor
    indices: Tensor


@dataclasses.dataclass(frozen=True)
class BlockBias:
    """The bias of segments of equal lengths. params: with the tables. first: position of the first
    query row. t `[segments, keys]`: timestamps of the keys. u `[segments, rows]`: of the queries;
    None: the default."""

    params: AttentionParams
    first: int
    t: Tensor | None
    u: Tensor | None

    def add(self, scores: Tensor, q: Tensor, k: Tensor, place: Place) -> None:
        """Add the bias to scores `[some, group · rows, columns]` of some (segment, key head) pairs,
        in place. q, k: `unfused_forward`'s."""
        some, rows, columns = place
        pairs = _Pairs.of(q, k, some)
        blocks = scores.unflatten(1, (pairs.group, -1))
        for table, index in filter(None, self.entries(pairs, rows, columns)):
            for head in range(pairs.group):
                blocks[:, head] += table.flatten()[pairs.flat_index(index, head, table)].to(
                    scores.dtype
                )

    def entries(
        self, pairs: _Pairs, rows: slice, columns: slice
    ) -> tuple[_Entries | None, _Entries | None]:
        """The entries of the position table and of the time table."""
        params, position, time = self.params, None, None
        i = torch.arange(rows.start, rows.stop, device="cpu") + self.first
        if params.position_bias is not None:
            max_seqlen = (params.position_bias.shape[1] + 1) // 2
            j = torch.arange(columns.start, columns.stop, device="cpu")
            position = _Entries(params.position_bias, position_index(i, j, max_seqlen)[None])
        if params.time_bias is not None and self.t is not None and params.boundaries is not None:
            t = self.t[pairs.segments]
            u = next_timestamps(i, t) if self.u is None else self.u[pairs.segments, rows]
            time = _Entries(params.time_bias, time_buckets(u, t[:, columns], params.boundaries))
        return position, time


class BlockDropout(NamedTuple):
    """Dropout of the weights of segments of equal lengths. starts: `[segments]`, see `Dropout`.
    first: the place of the first query row in its segment."""

    dropout: Dropout
    starts: Tensor
    first: int

    def dropped(self, q: Tensor, k: Tensor, place: Place) -> Tensor:
        """Which weights are dropped, `[some, group · rows, columns]`; see `BlockBias.add`."""
        some, rows, columns = place
        pairs = _Pairs.of(q, k, some)
        heads = pairs.kv_head[:, None] * pairs.group + torch.arange(pairs.group, device="cpu")
        places = slice(self.first + rows.start, self.first + rows.stop)
        start = self.starts[pairs.segments][pairs.segment, None]
        return self.dropout.dropped(start, heads, places, columns).flatten(1, 2)


class _Pairs(NamedTuple):
    """Consecutive (segment, key head) pairs: the segments that they belong to, each pair's segment
    among these, its key head, and the number of query heads of a key head."""

    segments: slice
    segment: Tensor
    kv_head: Tensor
    group: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, some: slice) -> _Pairs:
        segments, kv_heads = k.shape[:2]
        pairs = torch.arange(some.start, min(some.stop, segments * kv_heads), device="cpu")
        first = some.start // kv_heads
        return cls(
            slice(first, (int(pairs[-1]) // kv_heads) + 1),
            pairs // kv_heads - first,
            pairs % kv_heads,
            q.shape[1] // kv_heads,
        )

    def flat_index(self, index: Tensor, head: int, table: Tensor) -> Tensor:
        """Indices `[pairs, rows, columns]` into the flattened table, of one of the query heads of
        each pair's key head."""
        index = index if len(index) == 1 else index[self.segment]
        if len(table) == 1:
            return index
        return index + ((self.kv_head * self.group + head) * table.shape[1])[:, None, None]


@dataclasses.dataclass
class TableGradients:
    """Sums of dS over all scores of an entry, in fp64. None: no such table, or no gradient."""

    position: Tensor | None
    time: Tensor | None

    @classmethod
    def of(cls, params: AttentionParams) -> TableGradients:
        if not params.table_gradients:
            return cls(None, None)
        tables = params.position_bias, params.time_bias
        sums = (None if x is None else x.new_zeros(x.numel(), dtype=torch.float64) for x in tables)
        return cls(*sums)

    def add(self, ds: Tensor, bias: BlockBias, q: Tensor, k: Tensor, place: Place) -> None:
        """Add dS `[some, group · rows, columns]` of a block to the entries that its scores used."""
        some, rows, columns = place
        pairs = _Pairs.of(q, k, some)
        blocks = ds.unflatten(1, (pairs.group, -1))
        for total, entries in zip((self.position, self.time), bias.entries(pairs, rows, columns)):
            if total is None or entries is None:
                continue
            for head in range(pairs.group):
                index = pairs.flat_index(entries.indices, head, entries.table)
                block = blocks[:, head].double()
                if len(index) == 1:
                    block = block.sum(0, keepdim=True)
                total.index_add_(0, index.flatten(), block.flatten())

    def add_all(self, other: TableGradients) -> None:
        """Add the sums of other scores."""
        for total, others in ((self.position, other.position), (self.time, other.time)):
            if total is not None and others is not None:
                total += others

    def results(self, q: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor]:
        """The gradients, in the shapes and dtypes of the tables; `[0]` without one."""
        results = empty_table_gradients(params, q)
        for result, total in zip(results, (self.position, self.time)):
            if total is not None:
                result.copy_(total.view_as(result))
        return results
