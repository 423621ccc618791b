"""The CPU path: torch's fused attention on the rows of each segment, segments of equal lengths in one call.

Nothing is padded, so the work is that of the real rows. A segment, or a run of equal ones, is read where it lies; equal segments
scattered over the batch are gathered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.library.custom_op("jagged_modules::attention_cpu", mutates_args=(), device_types="cpu")
def attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, scale: float, q_shared: bool
) -> tuple[Tensor, Tensor]:
    """Jagged softmax attention `[rows, H, Dv]`, and the log-sum-exp of the scores `[rows, H, 1]` in fp32 or fp64.

    The arguments are those of `reference.attention_reference`. Low precision is computed in fp32 and rounded once.
    """
    out, lse = (x.zero_() for x in _empty_outputs(q, v, q_offsets, q_shared))
    queries, keys, values, results = _computable(q, k, v, out)
    for group in _groups(q_offsets, kv_offsets, q_shared):
        block, block_lse = _fused_attention(*group.operands(queries, keys, values), scale=scale)
        _put(results, group.rows, block)
        _put(lse, group.rows, block_lse[..., None])
    return _as(out, results), lse


@attention_cpu.register_fake
def _(q, k, v, q_offsets, kv_offsets, scale, q_shared):
    return _empty_outputs(q, v, q_offsets, q_shared)


@torch.library.custom_op("jagged_modules::attention_cpu_backward", mutates_args=(), device_types="cpu")
def attention_cpu_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    q_offsets: Tensor, kv_offsets: Tensor, scale: float, q_shared: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, each in its operand's shape and dtype."""
    queries, keys, values, results, grad = _computable(q, k, v, out, do)
    dq, dk, dv = (torch.zeros_like(x) for x in (queries, keys, values))
    for group in _groups(q_offsets, kv_offsets, q_shared):
        block, block_grad, block_lse = (_take(x, group.rows, group.num_queries) for x in (results, grad, lse))
        operands = group.operands(queries, keys, values)
        grads = _fused_attention_backward(block_grad, *operands, block, block_lse[..., 0], 0.0, False, scale=scale)
        if q_shared:
            dq += grads[0].sum(0).transpose(0, 1)
        else:
            _put(dq, group.q_rows, grads[0])
        _put(dk, group.kv_rows, grads[1])
        _put(dv, group.kv_rows, grads[2])
    return _as(q, dq), _as(k, dk), _as(v, dv)


@attention_cpu_backward.register_fake
def _(do, q, k, v, *args):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


class _Group(NamedTuple):
    """Segments of equal lengths: their rows of the output, of q, and of k and v."""

    num_queries: int
    num_keys: int
    rows: slice | Tensor
    q_rows: slice | Tensor
    kv_rows: slice | Tensor

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[segments, heads, rows, dim]` blocks of q, k and v; shared queries repeat without a copy."""
        keys, values = (_take(x, self.kv_rows, self.num_keys) for x in (k, v))
        return _take(q, self.q_rows, self.num_queries).expand(len(keys), -1, -1, -1), keys, values


def _groups(q_offsets: Tensor, kv_offsets: Tensor, q_shared: bool) -> Iterator[_Group]:
    """Every segment that has queries and keys, in one group each."""
    starts = defaultdict(list)
    q_bounds, kv_bounds = q_offsets.tolist(), kv_offsets.tolist()
    for q_start, q_end, kv_start, kv_end in zip(q_bounds, q_bounds[1:], kv_bounds, kv_bounds[1:]):
        if q_end > q_start and kv_end > kv_start:
            starts[q_end - q_start, kv_end - kv_start].append((q_start, kv_start))
    for (num_queries, num_keys), pairs in starts.items():
        q_starts, kv_starts = zip(*pairs)
        rows = _rows(q_starts, num_queries)
        yield _Group(num_queries, num_keys, rows, slice(0, num_queries) if q_shared else rows, _rows(kv_starts, num_keys))


def _rows(starts: tuple[int, ...], length: int) -> slice | Tensor:
    """Rows of segments of equal length: a slice where they lie one after the other."""
    if starts[-1] - starts[0] == (len(starts) - 1) * length:
        return slice(starts[0], starts[-1] + length)
    return (torch.tensor(starts)[:, None] + torch.arange(length)).flatten()


def _take(x: Tensor, rows: slice | Tensor, length: int) -> Tensor:
    """`[segments, heads, length, dim]` of `[rows, heads, dim]`; a view of a slice."""
    x = x[rows] if isinstance(rows, slice) else x.index_select(0, rows)
    return x.unflatten(0, (-1, length)).transpose(1, 2)


def _put(x: Tensor, rows: slice | Tensor, block: Tensor) -> None:
    """Undo `_take`: write a block to its rows of x."""
    block = block.transpose(1, 2).flatten(0, 1)
    if isinstance(rows, slice):
        x[rows] = block
    else:
        x.index_copy_(0, rows, block)


def _computable(*tensors: Tensor) -> Iterator[Tensor]:
    """What the fused kernels take: fp32 or fp64, one head dim (zeros change neither scores nor results), last stride 1."""
    width = max(x.shape[-1] for x in tensors)
    for x in tensors:
        x = x.to(_compute_dtype(x))
        x = pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
        yield x if x.stride(-1) == 1 else x.contiguous()


def _as(like: Tensor, x: Tensor) -> Tensor:
    """Undo `_computable`: the dtype and head dim of `like`."""
    return x[..., : like.shape[-1]].to(like.dtype).contiguous()


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _empty_outputs(q: Tensor, v: Tensor, q_offsets: Tensor, q_shared: bool) -> tuple[Tensor, Tensor]:
    rows = q.shape[0] * (q_offsets.shape[0] - 1) if q_shared else q.shape[0]
    return q.new_empty((rows, q.shape[1], v.shape[2])), q.new_empty((rows, q.shape[1], 1), dtype=_compute_dtype(q))


def _setup_context(ctx, inputs, output):
    q, k, v, q_offsets, kv_offsets, *flags = inputs
    ctx.save_for_backward(q, k, v, *output, q_offsets, kv_offsets)
    ctx.flags = flags


def _backward(ctx, do, _dlse):
    return *attention_cpu_backward(do, *ctx.saved_tensors, *ctx.flags), None, None, None, None


def _no_second_derivative(ctx, *grads):
    raise RuntimeError("jagged_attention is not differentiable twice")


attention_cpu.register_autograd(_backward, setup_context=_setup_context)
attention_cpu_backward.register_autograd(_no_second_derivative)
