"""The CPU path of the jagged matrix multiplications and softmaxes. Segments with equal lengths are
computed together, without padding.

All operators work on a flat buffer p. In it, segment b is a row-major matrix `[N_b, M_b]`: the
scores of N_b rows of x with M_b rows of y. A flattened jagged tensor `[L, D]` is such a buffer too,
with matrices of N_b rows and D columns. The gradients of the two matrix multiplications are again
these operators. batch_invariant: segments are computed one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jagged_kernels.common.autograd import (
    differentiate_by,
    differentiate_by_result,
    refuse_derivative,
)
from jagged_kernels.common.one_thread import one_thread
from torch import Tensor

from .buckets import Rows, compute_dtype, groups, softmax_gradient
from .one_query import CHUNK, Chunk, bags, chunks, segment_softmax
from .operators import host_operator
from .shares import in_shares

EXPONENTIAL = 16  # the time of an element of a softmax in multiplications of a GEMM
# up to this many, a softmax over the rows of all segments takes less time than one for each length
FEW_COLUMNS = 32


@host_operator("outer_cpu", lambda x, *others: x.new_empty(others[4]))
def outer_cpu(
    x: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor,
    p_offsets: Tensor,
    total: int,
    batch_invariant: bool = False,
) -> Tensor:
    """p[b] = x[b] @ y[b]ᵀ: `[total]`."""
    p = x.new_zeros(total)

    def compute(rows: Rows, columns: Rows, scores: Rows) -> None:
        scores.put(p, torch.bmm(_take(x, rows), _take(y, columns).mT))

    _for_each_group(compute, x.shape[1], x_offsets, y_offsets, p_offsets, batch_invariant)
    return p


@host_operator("matmul_cpu", lambda p, y, *others: y.new_empty(others[3], y.shape[1]))
def matmul_cpu(
    p: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor,
    p_offsets: Tensor,
    out_rows: int,
    transposed: bool,
    batch_invariant: bool = False,
) -> Tensor:
    """out[b] = p[b] @ y[b]: `[out_rows, D]`. If transposed, out[b] = p[b]ᵀ @ y[b], where y has the
    rows of x."""
    out = y.new_zeros(out_rows, y.shape[1])

    def compute(rows: Rows, columns: Rows, scores: Rows) -> None:
        block = _take(p, scores).view(-1, rows.length, columns.length)
        if transposed:
            columns.put(out, torch.bmm(block.mT, _take(y, rows)))
        else:
            rows.put(out, torch.bmm(block, _take(y, columns)))

    _for_each_group(compute, y.shape[1], x_offsets, y_offsets, p_offsets, batch_invariant)
    return out


@host_operator("softmax_cpu", lambda p, *_: p.new_empty(p.shape))
def softmax_cpu(
    p: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor,
    p_offsets: Tensor,
    columns: bool,
    batch_invariant: bool = False,
) -> Tensor:
    """Softmax of each row, or column if `columns`, of p[b]: `[total]`. 0 where all are -inf."""
    out, dim = p.new_zeros(p.shape), 1 if columns else 2
    if columns and not batch_invariant and (width := _few_columns(y_offsets)):

        def of_chunk(chunk: Chunk, block: Tensor) -> Tensor:
            return segment_softmax(block.clone(), chunk.offsets, chunk.segment)[0]

        _in_chunks(of_chunk, x_offsets, width, out, p)
        return out

    def compute(x_rows: Rows, y_rows: Rows, scores: Rows) -> None:
        block = _take(p, scores).view(-1, x_rows.length, y_rows.length)
        nothing_seen = block.amax(dim, keepdim=True) == -math.inf
        scores.put(out, block.softmax(dim).masked_fill_(nothing_seen, 0))

    _for_each_group(compute, EXPONENTIAL, x_offsets, y_offsets, p_offsets, batch_invariant)
    return out


@host_operator("softmax_backward_cpu", lambda grad, out, *_: out.new_empty(out.shape))
def softmax_backward_cpu(
    grad: Tensor,
    out: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor,
    p_offsets: Tensor,
    columns: bool,
    batch_invariant: bool = False,
) -> Tensor:
    """dp = out ∘ (grad − Σ out ∘ grad), where Σ is over a row, or over a column if `columns`."""
    dp = out.new_zeros(out.shape)
    if columns and not batch_invariant and (width := _few_columns(y_offsets)):

        def of_chunk(chunk: Chunk, block_grad: Tensor, block: Tensor) -> Tensor:
            sums = bags(block_grad * block, chunk.offsets)
            return block_grad.sub(sums.index_select(0, chunk.segment)).mul_(block)

        _in_chunks(of_chunk, x_offsets, width, dp, grad, out)
        return dp

    def compute(x_rows: Rows, y_rows: Rows, scores: Rows) -> None:
        shape = -1, x_rows.length, y_rows.length
        block, block_grad = (_take(x, scores).view(shape) for x in (out, grad))
        scores.put(dp, softmax_gradient(block_grad, block, 1 if columns else 2, block.dtype))

    _for_each_group(compute, EXPONENTIAL, x_offsets, y_offsets, p_offsets, batch_invariant)
    return dp


def _for_each_group(
    compute: Callable[[Rows, Rows, Rows], None],
    width: int,
    x_offsets: Tensor,
    y_offsets: Tensor,
    p_offsets: Tensor,
    batch_invariant: bool,
) -> None:
    """compute(rows of x, rows of y, elements of p) for each group of segments. width:
    multiplications per element of p."""

    def compute_share(share: list[tuple[Rows, ...]]) -> None:
        for group in share:
            compute(*group)

    with one_thread() as threads:
        items = list(groups(x_offsets, y_offsets, p_offsets, batch_invariant=batch_invariant))
        in_shares(compute_share, items, lambda group: group[2].num_rows * width, threads)


def _few_columns(offsets: Tensor) -> int:
    """The width of the matrices if it is one and small, otherwise 0."""
    widths = offsets.diff()
    width = int(widths[0]) if len(widths) else 0
    return width if width <= FEW_COLUMNS and bool((widths == width).all()) else 0


def _in_chunks(
    compute: Callable[..., Tensor], offsets: Tensor, width: int, out: Tensor, *operands: Tensor
) -> None:
    """Write compute(chunk, its rows of each operand) to its rows of out, for chunks of segments of
    any lengths. out, operands: `[rows * width]`."""
    rows = [x.view(-1, width) for x in (out, *operands)]

    def compute_share(share: list[Chunk]) -> None:
        for chunk in share:
            found, *given = (x[chunk.keys] for x in rows)
            found.copy_(compute(chunk, *(x.to(compute_dtype(x)) for x in given)))

    with one_thread() as threads:
        items, cost = list(chunks(offsets, CHUNK // width)), width * EXPONENTIAL
        in_shares(compute_share, items, lambda chunk: chunk.num_keys * cost, threads, False)


def _take(x: Tensor, rows: Rows) -> Tensor:
    return rows.take(x).to(compute_dtype(x))


def _outer_gradients(
    dp: Tensor, needs: Sequence[bool], x: Tensor, y: Tensor, *others: Any
) -> tuple[Tensor | None, ...]:
    """dx[b] = dp[b] @ y[b],  dy[b] = dp[b]ᵀ @ x[b]."""
    (*offsets, _), options = others[:4], others[4:]
    dx = matmul_cpu(dp, y, *offsets, x.shape[0], False, *options) if needs[0] else None
    return dx, matmul_cpu(dp, x, *offsets, y.shape[0], True, *options) if needs[1] else None


def _matmul_gradients(
    do: Tensor, needs: Sequence[bool], p: Tensor, y: Tensor, *others: Any
) -> tuple[Tensor | None, ...]:
    """dp[b] = do[b] @ y[b]ᵀ and dy[b] = p[b]ᵀ @ do[b]. If transposed, dp[b] = y[b] @ do[b]ᵀ and
    dy[b] = p[b] @ do[b]."""
    (*offsets, _, transposed), options = others[:5], others[5:]
    pair = (y, do) if transposed else (do, y)
    dp = outer_cpu(*pair, *offsets, p.shape[0], *options) if needs[0] else None
    of_y = y.shape[0], not transposed, *options
    return dp, matmul_cpu(p, do, *offsets, *of_y) if needs[1] else None


differentiate_by(outer_cpu, _outer_gradients)
differentiate_by(matmul_cpu, _matmul_gradients)
differentiate_by_result(softmax_cpu, softmax_backward_cpu, 3)
refuse_derivative(softmax_backward_cpu, "the jagged softmaxes are not differentiable twice")
