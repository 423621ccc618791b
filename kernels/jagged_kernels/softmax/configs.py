"""Launch configurations of jagged softmax."""

from __future__ import annotations

import dataclasses

from ..common.configs import padded_dim


@dataclasses.dataclass(frozen=True)
class SoftmaxConfig:
    """A softmax kernel's tile: lines, and elements along them that are held in registers at once; its launch."""

    lines: int
    length: int
    num_warps: int


def jagged_softmax_config(itemsize: int, lines: int) -> SoftmaxConfig:
    """Launch configuration for lines side by side in memory, 128 bytes of them or fewer."""
    return SoftmaxConfig(lines=min(128 // itemsize, padded_dim(lines)), length=64, num_warps=2 if itemsize == 4 else 4)


def jagged2_softmax_config(over_columns: bool) -> SoftmaxConfig:
    """Launch configuration for the rows or columns of jagged matrices. Nothing is known of their alignment, so that every element is
    loaded by itself: more of them in a thread's registers would leave the multiprocessor few warps. A warp alone waits for no other."""
    return SoftmaxConfig(lines=16 if over_columns else 4, length=128, num_warps=1)
