"""The CPU path: segments of similar length are attended to together, so that work follows the real rows.

Query rows are cut into pieces, each against its segment's keys; pieces whose rounded (rows, keys) agree form a bucket, a few
batched matrix products. Rounding wastes at most a quarter of a dimension and a bucket's scores stay within `MAX_SCORES`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

MAX_SCORES = 1 << 21  # elements of a bucket's score matrix: 8 MB in fp32, about a last-level cache
MAX_ROWS = 512  # query rows of a piece


@torch.library.custom_op("jagged_modules::attention_cpu", mutates_args=())
def attention_cpu(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, scale: float, q_shared: bool) -> Tensor:
    """Jagged softmax attention `[rows, H, Dv]`; the arguments are those of `reference.attention_reference`."""
    out = _empty_output(q, v, q_offsets, q_shared).zero_()
    for bucket in _buckets(q, k, q_offsets, kv_offsets, q_shared):
        queries, keys, values = bucket.gather_q(q, scale), bucket.gather_kv(k), bucket.gather_kv(v)
        bucket.scatter_out(out, bucket.softmax(queries @ keys.mT) @ values)
    return out


@attention_cpu.register_fake
def _(q, k, v, q_offsets, kv_offsets, scale, q_shared):
    return _empty_output(q, v, q_offsets, q_shared)


@torch.library.custom_op("jagged_modules::attention_cpu_backward", mutates_args=())
def attention_cpu_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, scale: float, q_shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v: dV = Pᵀ dO, dS = softmax'(dO Vᵀ), dQ = scale · dS K, dK = scale · dSᵀ Q."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=_compute_dtype(x), device=x.device) for x in (q, k, v))
    for bucket in _buckets(q, k, q_offsets, kv_offsets, q_shared):
        queries, keys, values = bucket.gather_q(q, scale), bucket.gather_kv(k), bucket.gather_kv(v)
        grad_out = bucket.gather_out(do)
        p = bucket.softmax(queries @ keys.mT)
        bucket.add_kv(dv, p.mT @ grad_out)
        ds = torch._softmax_backward_data(grad_out @ values.mT, p, -1, p.dtype)
        bucket.add_q(dq, ds @ keys * scale)
        bucket.add_kv(dk, ds.mT @ queries)  # the gathered queries carry the scale
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@attention_cpu_backward.register_fake
def _(do, q, k, v, *args):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


class _Bucket:
    """Pieces of equal rounded size: row indices `[G, n]` into q, k and v, and the output, and which of them are real.

    Tensors are gathered to `[G, Hkv, n, D]`, the query heads of one key head stacked along n.
    """

    def __init__(self, q_index, out_index, q_valid, kv_index, kv_valid, kv_heads):
        self.q_index, self.out_index, self.q_valid = q_index, out_index, q_valid
        self.kv_index, self.kv_valid = kv_index, kv_valid
        self.q_full, self.kv_full = bool(q_valid.all()), bool(kv_valid.all())
        self.kv_heads = kv_heads

    def gather_q(self, q: Tensor, scale: float) -> Tensor:
        return self._gather(q, self.q_index, self.q_valid, self.q_full) * scale

    def gather_out(self, x: Tensor) -> Tensor:
        return self._gather(x, self.out_index, self.q_valid, self.q_full)

    def gather_kv(self, x: Tensor) -> Tensor:
        return self._gather(x, self.kv_index, self.kv_valid, self.kv_full)

    def softmax(self, scores: Tensor) -> Tensor:
        if not self.kv_full:
            scores.masked_fill_(~self.kv_valid[:, None, None, :], float("-inf"))
        return torch.softmax(scores, dim=-1)

    def scatter_out(self, out: Tensor, x: Tensor) -> None:
        rows, index = self._scatter(x, self.out_index, self.q_valid, self.q_full)
        out.index_copy_(0, index, rows.to(out.dtype))

    def add_q(self, dq: Tensor, x: Tensor) -> None:
        rows, index = self._scatter(x, self.q_index, self.q_valid, self.q_full)
        dq.index_add_(0, index, rows)

    def add_kv(self, dx: Tensor, x: Tensor) -> None:
        rows, index = self._scatter(x, self.kv_index, self.kv_valid, self.kv_full)
        dx.index_add_(0, index, rows)

    def _gather(self, x: Tensor, index: Tensor, valid: Tensor, full: bool) -> Tensor:
        groups, rows = index.shape
        x = x.index_select(0, index.flatten()).to(_compute_dtype(x)).view(groups, rows, self.kv_heads, -1, x.shape[2])
        if not full:  # a neighbour's rows must not matter, NaN included
            x.masked_fill_(~valid[:, :, None, None, None], 0)
        return x.permute(0, 2, 3, 1, 4).reshape(groups, self.kv_heads, -1, x.shape[4])

    def _scatter(self, x: Tensor, index: Tensor, valid: Tensor, full: bool) -> tuple[Tensor, Tensor]:
        groups, rows = index.shape
        x = x.view(groups, self.kv_heads, -1, rows, x.shape[3]).permute(0, 3, 1, 2, 4).flatten(2, 3)
        return (x.flatten(0, 1), index.flatten()) if full else (x[valid], index[valid])


def _buckets(q: Tensor, k: Tensor, q_offsets: Tensor, kv_offsets: Tensor, q_shared: bool) -> Iterator[_Bucket]:
    """Cut, group and index the work of one call. Segments without queries or keys give none."""
    heads, kv_heads = q.shape[1], k.shape[1]
    q_starts, q_lengths = q_offsets[:-1].long(), q_offsets.diff().long()
    kv_starts, kv_lengths = kv_offsets[:-1].long(), kv_offsets.diff().long()
    keep = torch.nonzero((q_lengths > 0) & (kv_lengths > 0)).flatten()
    piece_rows = (MAX_SCORES // (heads * kv_lengths[keep])).clamp(16, MAX_ROWS)
    pieces = (q_lengths[keep] + piece_rows - 1) // piece_rows
    which = torch.repeat_interleave(torch.arange(len(keep)), pieces)
    within = torch.arange(len(which)) - (pieces.cumsum(0) - pieces)[which]
    segment, first = keep[which], within * piece_rows[which]
    rows = torch.minimum(q_lengths[segment] - first, piece_rows[which])
    keys = kv_lengths[segment]

    out_start = q_starts[segment] + first
    q_start = first if q_shared else out_start
    kv_start = kv_starts[segment]
    padded_rows, padded_keys = _round_up(rows), _round_up(keys)
    order = torch.argsort(padded_rows * (int(padded_keys.max()) + 1 if len(which) else 1) + padded_keys, stable=True)
    sizes = torch.stack([padded_rows, padded_keys], dim=1)[order]
    (shapes, counts) = torch.unique_consecutive(sizes, dim=0, return_counts=True)
    for (n, m), members in zip(shapes.tolist(), order.split(counts.tolist())):
        n, m = min(n, int(rows[members].max())), min(m, int(keys[members].max()))
        for part in members.split(max(1, MAX_SCORES // (heads * n * m))):
            row, q_valid = _index(torch.zeros_like(part), rows[part], n)
            kv_index, kv_valid = _index(kv_start[part], keys[part], m)
            yield _Bucket(row + q_start[part, None], row + out_start[part, None], q_valid, kv_index, kv_valid, kv_heads)


def _index(start: Tensor, length: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Row indices `[G, size]` from start on, padded ones repeating the last row, and which are real."""
    column = torch.arange(size)
    return start[:, None] + torch.minimum(column, length[:, None] - 1), column < length[:, None]


def _round_up(n: Tensor) -> Tensor:
    """Up to a multiple of a quarter of the power of two below: at most 25 % more, four sizes an octave."""
    step = 2 ** (torch.log2(n.double()).floor().long() - 2).clamp(min=0)
    return (n + step - 1) // step * step


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _empty_output(q: Tensor, v: Tensor, q_offsets: Tensor, q_shared: bool) -> Tensor:
    rows = q.shape[0] * (q_offsets.shape[0] - 1) if q_shared else q.shape[0]
    return q.new_empty((rows, q.shape[1], v.shape[2]))


def _setup_context(ctx, inputs, output):
    *tensors, scale, q_shared = inputs
    ctx.save_for_backward(*tensors)
    ctx.flags = scale, q_shared


def _backward(ctx, do):
    return *attention_cpu_backward(do, *ctx.saved_tensors, *ctx.flags), None, None, None, None


def _no_second_derivative(ctx, *grads):
    raise RuntimeError("jagged_attention is not differentiable twice")


attention_cpu.register_autograd(_backward, setup_context=_setup_context)
attention_cpu_backward.register_autograd(_no_second_derivative)
