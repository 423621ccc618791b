"""What the kernels and the CPU path share of their results. Needs torch alone."""

from __future__ import annotations

import torch
from torch import Tensor


def joined_moments(parts: Tensor) -> Tensor:
    """Numbers, means and variances `[3, H]` of all, of parts `[n, 3, H]` with sums of squared
    deviations from their means in place of variances (Chan et al. 1979). 0 where there are none."""
    counts, means, squares = parts.unbind(1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count.clamp(min=1)
    squares = squares.sum(0) + (counts * (means - mean) ** 2).sum(0)
    return torch.stack([count, mean, squares / count.clamp(min=1)])


def empty_gradients(
    operands: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    tables: list[Tensor | None],
    dtype: torch.dtype,
    layer: int,
) -> list[Tensor]:
    """The results of the backward, not written: of the operands, and in dtype of weights, biases
    and tables; of one layer its sums `[3, H]` alone, unless it is -1."""
    like = operands[0]
    if layer >= 0:
        return [like.new_empty((3, weights[layer].shape[0]), dtype=dtype)]
    rows = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in operands]
    others = [torch.empty_like(x, dtype=dtype) for x in (*weights, *biases)]
    sums = [like.new_empty((3, x.shape[1]), dtype=dtype) for x in tables if x is not None]
    return [*rows, *others, *sums]
