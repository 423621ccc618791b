"""Softmax attention on the CPU to rows x that are the keys and the values of all heads.

    P = softmax(scale · Q Xᵀ),  U = P X
    dS = scale · softmax'(dU Xᵀ),  dQ = dS X,  dX = dSᵀ Q + Pᵀ dU

Q has a row for each query and head of a segment, X the segment's rows. Segments of equal lengths
are adjacent, and one batched GEMM.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jagged_kernels.common.one_thread import one_thread
from torch import Tensor

from .buckets import Rows, softmax_gradient
from .shares import in_shares

Block = tuple[Rows, ...]  # adjacent segments of equal lengths: their rows of q and of x


def pool(q: Tensor, x: Tensor, blocks: list[Block], scale: float) -> tuple[Tensor, Tensor]:
    """u `[N, H, E]` of q `[N, H, E]` and x `[L, E]`, fp32 or fp64, 0 for queries of no block; and P
    of all blocks."""
    u, p = torch.zeros_like(q), q.new_empty(sum(_sizes(blocks, q)))

    def compute(items: list[tuple[Block, Tensor]]) -> None:
        for (queries, keys), weights in items:
            rows = keys.take(x)
            scores = torch.bmm(_all_heads(queries, q), rows.mT).mul_(scale)
            torch.softmax(scores, -1, out=weights)
            torch.bmm(weights, rows, out=_all_heads(queries, u))

    _in_shares(compute, blocks, p, q)
    return u, p


def pooled_gradients(
    du: Tensor,
    operands: tuple[Tensor, Tensor, Tensor],
    blocks: list[Block],
    scale: float,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """dq and dx of `pool`, where they are wanted. operands: q, x and P."""
    q, x, p = operands
    dq, dx = (torch.zeros_like(y) if of_y else None for y, of_y in zip((q, x), wanted))

    def compute(items: list[tuple[Block, Tensor]]) -> None:
        for (queries, keys), weights in items:
            rows, of_u = keys.take(x), _all_heads(queries, du)
            ds = softmax_gradient(torch.bmm(of_u, rows.mT), weights, -1, p.dtype).mul_(scale)
            if dq is not None:
                torch.bmm(ds, rows, out=_all_heads(queries, dq))
            if dx is not None:
                of_rows = keys.take(dx)
                torch.bmm(ds.mT, _all_heads(queries, q), out=of_rows)
                of_rows.baddbmm_(weights.mT, of_u)

    _in_shares(compute, blocks, p, q)
    return dq, dx


def _all_heads(queries: Rows, q: Tensor) -> Tensor:
    """The rows of q of each segment: `[segments, queries · H, E]`."""
    return queries.take(q).flatten(1, 2)


def _sizes(blocks: list[Block], q: Tensor) -> list[int]:
    """Elements of each block's P."""
    return [queries.length * q.shape[1] * keys.num_rows for queries, keys in blocks]


def _in_shares(
    compute: Callable[[list[tuple[Block, Tensor]]], None], blocks: list[Block], p: Tensor, q: Tensor
) -> None:
    """With each block's P `[segments, queries · H, rows]`."""
    items = [
        (block, weights.view(-1, block[0].length * q.shape[1], block[1].length))
        for block, weights in zip(blocks, p.split(_sizes(blocks, q)))
    ]
    with one_thread() as threads:
        in_shares(compute, items, lambda item: 2 * item[1].numel() * q.shape[2], threads)
