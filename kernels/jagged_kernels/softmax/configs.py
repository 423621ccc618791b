"""Launch configurations of jagged softmax."""

from __future__ import annotations

import dataclasses

from ..common.configs import padded_dim


@dataclasses.dataclass(frozen=True)
class SoftmaxConfig:
    """Launch of a softmax kernel: a tile is `lines` lines of `length` elements."""

    lines: int
    length: int
    num_warps: int


def jagged_softmax_config(itemsize: int, lines: int) -> SoftmaxConfig:
    """Launch configuration for `lines` columns: up to 128 contiguous bytes of a row in a tile."""
    return SoftmaxConfig(
        lines=min(128 // itemsize, padded_dim(lines)),
        length=64,
        num_warps=2 if itemsize == 4 else 4,
    )


def jagged2_softmax_config(over_columns: bool) -> SoftmaxConfig:
    """Launch configuration for the rows or columns of jagged matrices. Their alignment is unknown,
    so every load is of one element. Larger tiles would need more registers and leave an SM fewer
    warps. One warp needs no barriers."""
    return SoftmaxConfig(lines=16 if over_columns else 4, length=128, num_warps=1)
