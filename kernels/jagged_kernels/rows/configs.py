"""Launch configurations of the kernels that take whole rows."""

from __future__ import annotations

import dataclasses

from ..common.configs import padded_dim

MAX_WIDTH = 4096  # columns of a group: a row of it is held in registers
# Columns behind those of a GEMM's rows: 1, 0, 0, ... The gradient of its weight then has one more
# column, the bias's gradient, in less time than a pass over the gradient takes. 32: the width stays
# one that cuBLAS computes in its best tiles.
BIAS_COLUMNS = 32
# Elements of a tile for each thread in the gate's backward, which holds seven tiles in registers.
GATE_BACKWARD = 8
# Warps that a multiprocessor holds of kernels with up to 170 registers a thread; more would wait
# for these. The gate's backward where dropout and what the forward gave are computed again, a
# norm's that adds up three tensors, and a gated activation's that is computed again with dropout.
FEW_WARPS = 12

# Elements of a gradient from which it is cast by halves: the copy takes half the memory.
HALVED = 2**22


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """Launch of a kernel: a tile is `rows` rows of `block` columns.

    Attributes:
        warps_per_sm: of a kernel that adds up the gradients of a norm's parameters over many tiles.
    """

    rows: int
    block: int
    num_warps: int
    warps_per_sm: int = 16

    @property
    def programs_per_sm(self) -> int:
        return max(1, self.warps_per_sm // self.num_warps)


def rows_config(width: int, elements: int = 16) -> RowsConfig:
    """Launch configuration for groups of `width` columns. As few warps as possible share a row,
    because its sums wait for all of them. elements: of a tile, for each thread. `GATE_BACKWARD` for
    that kernel."""
    block = padded_dim(width)
    num_warps = max(1, block // (32 * elements))
    return RowsConfig(num_warps * 32 * elements // block, block, num_warps)


def activation_config(width: int) -> RowsConfig:
    """Launch configuration for activations of `width` columns: a warp's loads are of one row, or of
    as many as it takes."""
    block = min(padded_dim(width), 256)
    return RowsConfig(2048 // block, block, 4)


def padding_config(size: int, itemsize: int) -> RowsConfig:
    """Launch configuration for copies of rows of `size` elements: a tile of at most 16 KiB and 4096
    elements, and of at most 1024 rows, as each thread computes the addresses of its rows."""
    block = min(1 << (size - 1).bit_length(), 256)
    return RowsConfig(min(16384 // (max(4, itemsize) * block), 1024), block, 4)
