"""Launch configurations: static tables by head dim, dtype and GPU generation. No triton import, no tuning at run time."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """One kernel's launch: rows of its own tile, columns of the blocks it loops over, warps, pipeline depth, resident CTAs per SM."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """`fwd` and `dq` tile query rows and loop over keys; `dkdv` tiles key rows (its block_m) and loops over queries."""

    fwd: LaunchConfig
    dq: LaunchConfig
    dkdv: LaunchConfig


def padded_dim(dim: int) -> int:
    """The power of two a kernel's tile gives to `dim`: at least 16, the smallest side a matrix instruction takes."""
    return max(16, 1 << (dim - 1).bit_length())


def attention_tile(head_dim: int, itemsize: int) -> tuple[int, int]:
    """(block_m, block_n) of attention tile schedules. Free of the GPU's generation, so that a data loader can build them."""
    row_bytes = padded_dim(head_dim) * itemsize
    return (128, 64) if row_bytes <= 256 else (64, 32) if row_bytes <= 512 else (32, 32)


def attention_config(head_dim: int, itemsize: int, capability: tuple[int, int]) -> AttentionConfig:
    """Launch configurations of the attention kernels.

    Args:
        head_dim: the larger of the query and the value head dim.
        itemsize: bytes of an input element, 2 or 4.
        capability: CUDA compute capability; (8, 6) and (8, 9) parts have 99 KB of shared memory a block, others 163 KB or more.
    """
    dim = padded_dim(head_dim)
    small_memory = capability[0] == 8 and capability[1] in (6, 7, 9) or capability[0] == 12
    if itemsize == 4:  # fp32 products on the ordinary cores: registers bound the tile
        block_m, block_n = attention_tile(head_dim, itemsize)
        block_n = min(block_n, 32)
        warps = 8 if block_m == 128 else 4
        config = LaunchConfig(block_m, block_n, num_warps=warps, num_stages=1)
        return AttentionConfig(fwd=config, dq=config, dkdv=config)
    if dim > 128:
        stages = 1 if small_memory else 2
        return AttentionConfig(
            fwd=LaunchConfig(64, 32, num_warps=4, num_stages=stages),
            dq=LaunchConfig(64, 32, num_warps=8, num_stages=1),
            dkdv=LaunchConfig(64, 32, num_warps=8, num_stages=1),
        )
    if dim == 128:
        stages = 2 if small_memory else 3
        return AttentionConfig(
            fwd=LaunchConfig(128, 64, num_warps=8, num_stages=stages),
            dq=LaunchConfig(128, 64, num_warps=8, num_stages=2 if not small_memory else 1),
            dkdv=LaunchConfig(128, 64, num_warps=8, num_stages=2 if not small_memory else 1),
        )
    return AttentionConfig(
        fwd=LaunchConfig(128, 64, num_warps=4, num_stages=3, ctas_per_sm=2),
        dq=LaunchConfig(128, 64, num_warps=8, num_stages=2, ctas_per_sm=1),
        dkdv=LaunchConfig(128, 64, num_warps=8, num_stages=2, ctas_per_sm=1),
    )
