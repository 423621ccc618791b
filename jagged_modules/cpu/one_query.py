"""Softmax attention on the CPU where each segment has one query row: a candidate per user.

A segment is then a matrix-vector product, which batched GEMMs compute one by one. Here the segments
of a chunk are computed together, whatever their lengths, by products of rows that stay in the
processor's cache and by sums over bags of rows. Rows are neither sorted nor padded.

    s = scale · Σ_d q k,  p = exp(s - lse),  out = Σ p v
    ds = p (Σ_d do v - Σ_d do out),  dq = scale · Σ ds k,  dk = scale · ds q,  dv = p do
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jagged_kernels.attention.params import AttentionCall
from torch import Tensor
from torch.nn.functional import embedding_bag

from ..segments import are_single
from .buckets import compute_dtype
from .shares import in_shares

CHUNK = 2**19  # elements of the keys of a chunk, which stay in the cache


def has_one_query_each(call: AttentionCall) -> bool:
    """Whether these functions compute the call, whose offsets are on the host."""
    params, segments = call.params, call.segments
    if params.activation != "softmax" or params.mask is not None or params.has_bias:
        return False
    if params.dropout_seed is not None:
        return False
    if params.batch_invariant or segments.q_shared or call.q.shape[1] != call.k.shape[1]:
        return False
    return are_single(segments.q_offsets, segments.kv_offsets)


class Chunk(NamedTuple):
    """Adjacent segments: their query rows, their keys' rows, the keys' offsets from the first row
    on, and the segment of each key from the first one on."""

    rows: slice
    keys: slice
    offsets: Tensor
    segment: Tensor

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start


def chunks(kv_offsets: Tensor, keys: int) -> Iterator[Chunk]:
    """Chunks of about so many keys, or of one segment's if those are more."""
    offsets = kv_offsets.long()
    pieces = offsets[:-1] // max(1, keys)  # by the chunk that a segment's first row is in
    counts = torch.unique_consecutive(pieces, return_counts=True)[1].tolist()
    first = 0
    for count in counts:
        bounds = offsets[first : first + count + 1]
        start, stop = int(bounds[0]), int(bounds[-1])
        segment = torch.repeat_interleave(torch.arange(count, device="cpu"), bounds.diff())
        yield Chunk(slice(first, first + count), slice(start, stop), bounds - start, segment)
        first += count


def forward(
    chunk: Chunk, operands: tuple[Tensor, Tensor, Tensor], scale: float, out: Tensor, lse: Tensor
) -> None:
    """Write the chunk's rows of out `[rows, H, Dv]` and of lse `[rows, H, 1]`. operands: q, k and v
    `[rows, H, D]`, fp32 or fp64, with a last stride of 1."""
    q, k, v = operands[0][chunk.rows], *(x[chunk.keys] for x in operands[1:])
    s = _products(q.index_select(0, chunk.segment), k).mul_(scale)
    p, lse[chunk.rows, :, 0] = segment_softmax(s, chunk.offsets, chunk.segment)
    _write_sums(out[chunk.rows], p, v, chunk.offsets)


def backward(
    chunk: Chunk,
    do: Tensor,
    results: tuple[Tensor, Tensor],
    operands: tuple[Tensor, Tensor, Tensor],
    scale: float,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write the chunk's rows of dq, dk and dv. do, results, operands: as in `forward`, of all
    chunks."""
    dq, (dk, dv) = gradients[0][chunk.rows], (x[chunk.keys] for x in gradients[1:])
    q, k, v = operands[0][chunk.rows], *(x[chunk.keys] for x in operands[1:])
    do, out, lse = (x[chunk.rows] for x in (do, *results))
    rows = q.index_select(0, chunk.segment)
    p = _products(rows, k).mul_(scale).sub_(lse[..., 0].index_select(0, chunk.segment)).exp_()
    grads = do.index_select(0, chunk.segment)
    delta = _products(do, out).index_select(0, chunk.segment)
    ds = _products(grads, v).sub_(delta).mul_(p).mul_(scale)
    torch.mul(grads, p[..., None], out=dv)
    torch.mul(rows, ds[..., None], out=dk)
    _write_sums(dq, ds, k, chunk.offsets)


def operands(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as the functions here take them."""
    dtype = compute_dtype(call.q)
    q, k, v = (x.to(dtype) for x in call[:3])
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


def in_chunks(compute: Callable[[list[Chunk]], object], call: AttentionCall, threads: int) -> None:
    """`in_shares` of the call's chunks."""
    _, heads, width = call.k.shape
    widths = width + call.v.shape[2]

    def cost(chunk: Chunk) -> int:
        return 8 * chunk.num_keys * heads * widths  # a product takes as long as 8 of a GEMM

    items = list(chunks(call.segments.kv_offsets, CHUNK // (heads * width)))
    in_shares(compute, items, cost, threads, False)


def _products(x: Tensor, y: Tensor) -> Tensor:
    """Dot products of rows `[rows, H, D]`: `[rows, H]`."""
    return (x * y).sum(-1)


def segment_softmax(s: Tensor, offsets: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """Over the rows of each segment, for each column of s, which is overwritten; and the
    log-sum-exp of each segment. Both are 0 where all of s is -inf, or there is no row. offsets,
    segment: as in Chunk."""
    top = torch.segment_reduce(s, "max", offsets=offsets, unsafe=True)
    top.masked_fill_(top == -math.inf, 0)
    p = s.sub_(top.index_select(0, segment)).exp_()
    total = torch.segment_reduce(p, "sum", offsets=offsets, unsafe=True)
    total.masked_fill_(total == 0, 1)
    p.div_(total.index_select(0, segment))
    return p, total.log_().add_(top)


def bags(x: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sums of each segment's rows of x `[rows, width]`, times weights `[rows]`; 0 without a row."""
    rows = torch.arange(x.shape[0], device="cpu")
    return embedding_bag(rows, x, offsets[:-1], mode="sum", per_sample_weights=weights)


def _write_sums(out: Tensor, weights: Tensor, x: Tensor, offsets: Tensor) -> None:
    """Σ weights `[keys, H]` · x `[keys, H, D]` over the rows of each segment, 0 without a row."""
    for head, of_head in enumerate(weights.t().contiguous()):
        out[:, head] = bags(x[:, head], offsets, of_head)
