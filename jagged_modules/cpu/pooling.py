"""Softmax attention on the CPU where each segment has one query row, and a segment's rows are the
keys and the values of all heads.

    s = scale · x q,  p = exp(s - lse),  u = Σ p x
    ds = scale · p (x du - u du),  dq = Σ ds x,  dx = Σ_h ds q + p du

A segment and a head are a bag of `embedding_bag`, which reads the rows of x in place; the scores
are its gradients of a bag's weights. dx is a bag of queries and gradients for each row. So no
tensor holds a query once per row of its segment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jagged_kernels.common.one_thread import one_thread
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from .one_query import CHUNK, Chunk, chunks, segment_softmax
from .shares import in_shares

# torch has no public name for it: dot products of a bag's gradient and the rows of the bag
_dot_products = torch.ops.aten._embedding_bag_per_sample_weights_backward.default


def pool(q: Tensor, x: Tensor, offsets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """u `[H, B, E]` and lse `[H, B]` of q `[H, B, E]` and contiguous x `[L, E]`, fp32 or fp64. u is
    0 for a segment without rows."""
    u, lse = torch.empty_like(q), q.new_empty(q.shape[:2])

    def compute(items: list[Chunk]) -> None:
        for chunk in items:
            bags, rows = _Bags.of(chunk, q, x), chunk.rows
            s = bags.products(q[:, rows]).mul_(scale)
            p, sums = segment_softmax(s, bags.offsets, bags.segment)
            lse[:, rows] = sums.view(len(q), -1)
            u[:, rows] = bags.sums(p).view(len(q), -1, x.shape[1])

    _in_chunks(compute, q, offsets)
    return u, lse


def pooled_gradients(
    du: Tensor,
    results: tuple[Tensor, Tensor],
    operands: tuple[Tensor, Tensor],
    offsets: Tensor,
    scale: float,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """dq and dx of `pool`, whose results are u and lse, where they are wanted."""
    (u, lse), (q, x) = results, operands
    dq, dx = (torch.empty_like(y) if of_y else None for y, of_y in zip(operands, wanted))
    delta = (du * u).sum(-1)

    def compute(items: list[Chunk]) -> None:
        for chunk in items:
            bags, rows = _Bags.of(chunk, q, x), chunk.rows
            p = bags.products(q[:, rows]).mul_(scale).sub_(bags.of_rows(lse[:, rows])).exp_()
            ds = bags.products(du[:, rows]).sub_(bags.of_rows(delta[:, rows])).mul_(p).mul_(scale)
            if dq is not None:
                dq[:, rows] = bags.sums(ds).view(len(q), -1, x.shape[1])
            if dx is not None:
                dx[chunk.keys] = bags.sums_of_rows((q[:, rows], ds), (du[:, rows], p))

    _in_chunks(compute, q, offsets)
    return dq, dx


class _Bags(NamedTuple):
    """The segments of a chunk for each head, one head after another.

    Attributes:
        x: the chunk's rows. entries: which of them the bags hold.
        offsets: of the bags, and the end of the last. segment: the bag of each entry.
    """

    x: Tensor
    entries: Tensor
    offsets: Tensor
    segment: Tensor

    @classmethod
    def of(cls, chunk: Chunk, q: Tensor, x: Tensor) -> _Bags:
        heads, head = len(q), torch.arange(len(q), device="cpu")[:, None]
        starts = (chunk.offsets[:-1] + head * chunk.num_keys).flatten()
        offsets = pad(starts, (0, 1), value=heads * chunk.num_keys)
        segment = (chunk.segment + head * (len(chunk.offsets) - 1)).flatten()
        entries = torch.arange(chunk.num_keys, device="cpu").repeat(heads)
        return cls(x[chunk.keys], entries, offsets, segment)

    def products(self, y: Tensor) -> Tensor:
        """Dot products of y `[H, segments, E]` and the rows of its segment: `[H * rows]`."""
        y, starts = y.flatten(0, 1), self.offsets[:-1]
        return _dot_products(y, self.x, self.entries, starts, self.segment, 0)

    def sums(self, weights: Tensor) -> Tensor:
        """Σ weights `[H * rows]` · rows of each bag: `[H * segments, E]`."""
        starts = self.offsets[:-1]
        return embedding_bag(self.entries, self.x, starts, mode="sum", per_sample_weights=weights)

    def sums_of_rows(self, *terms: tuple[Tensor, Tensor]) -> Tensor:
        """Σ weights · y of a row's segment, over the heads and the terms (y `[H, segments, E]`,
        weights `[H * rows]`): `[rows, E]`."""
        table = torch.cat([y.flatten(0, 1) for y, _ in terms])
        starts = range(0, len(table), len(self.offsets) - 1)
        index = torch.cat([self.segment + start for start in starts])
        weights = torch.cat([of_term for _, of_term in terms])
        shape = sum(len(y) for y, _ in terms), len(self.x)
        index, weights = (z.view(shape).t().contiguous() for z in (index, weights))
        return embedding_bag(index, table, mode="sum", per_sample_weights=weights)

    def of_rows(self, y: Tensor) -> Tensor:
        """y `[H, segments]` of the segment of each row: `[H * rows]`."""
        return y.flatten().index_select(0, self.segment)


def _in_chunks(compute: Callable[[list[Chunk]], object], q: Tensor, offsets: Tensor) -> None:
    heads, _, width = q.shape

    def cost(chunk: Chunk) -> int:
        return 8 * chunk.num_keys * heads * width  # a product takes as long as 8 of a GEMM

    with one_thread() as threads:
        in_shares(compute, list(chunks(offsets, CHUNK // width)), cost, threads, False)
