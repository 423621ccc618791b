"""Launch configurations of the kernels that take whole rows."""

from __future__ import annotations

import dataclasses

from ..common.configs import padded_dim

MAX_WIDTH = 4096  # columns of a group: a row of it is held in registers
TILE = 2048  # elements of a tile: 16 for each thread of four warps
PROGRAMS_PER_SM = 4  # of kernels that add up the gradients of a norm's parameters


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """Launch of a kernel: a tile is `rows` rows of `block` columns. Up to 512 columns, a row is in
    one warp, so that its sums need no shared memory."""

    rows: int
    block: int
    num_warps: int


def rows_config(width: int) -> RowsConfig:
    """Launch configuration for groups of `width` columns."""
    block = padded_dim(width)
    return RowsConfig(max(1, TILE // block), block, num_warps=8 if block > TILE else 4)
