"""What the configurations of several operators share. No triton import."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


class LaunchConfig(NamedTuple):
    """Launch of a kernel. block: rows of the blocks that a tile loops over. ctas_per_sm: thread
    blocks per SM at a time. tile: rows of a tile; None: those of the schedule. max_registers: of a
    thread, so that as many blocks fit; None: the compiler's choice."""

    block: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1
    tile: int | None = None
    max_registers: int | None = None


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """The backend whose kernel runs, "triton" or "hopper", and its launch configuration."""

    backend: str
    config: Any


def has_small_shared_memory(capability: tuple[int, int]) -> bool:
    """Whether a thread block has 99 KiB of shared memory, as on 8.6, 8.9, 12.0, not 163 or more."""
    return capability[0] == 12 or (capability[0] == 8 and capability[1] > 0)


def padded_dim(dim: int) -> int:
    """The power of two to which tiles pad `dim`: at least 16, the smallest side of an MMA."""
    return max(16, 1 << (dim - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Launch of a GEMM: a tile of block_m x block_n, summed in blocks of block_k. uses_tma:
    operands with rows at 16-byte boundaries are loaded by the tensor memory accelerator."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1
    uses_tma: bool = False
