"""Launch configurations of block attention: static tables by head dim, dtype and GPU generation."""

from __future__ import annotations

import dataclasses
import functools

from ..common.configs import has_small_shared_memory, padded_dim


@dataclasses.dataclass(frozen=True)
class BlockAttentionConfig:
    """Launch of a Triton kernel: a tile is [block_m, block_d], with block_m rows of one or more
    whole blocks."""

    block_m: int
    block_d: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1


@dataclasses.dataclass(frozen=True)
class HopperBlockAttentionConfig:
    """Launch of a Hopper kernel: a thread block computes heads_per_cta heads of one [block_m,
    block_d] tile, one after the other."""

    block_m: int
    block_d: int
    heads_per_cta: int
    num_warps: int
    max_registers: int | None


def block_attention_config(
    kernel: str,
    head_dim: int,
    itemsize: int,
    capability: tuple[int, int],
    block_size: int,
    group: int,
    rotary: str,
) -> BlockAttentionConfig:
    """Configuration of the Triton kernel "fwd" or "bwd". group: query heads per key head. rotary:
    "none", "relative" or "absolute" positions."""
    dim = padded_dim(head_dim)
    block_m = max(block_size, 64 if itemsize == 2 or dim <= 64 else 32)
    # MMAs over pairs: half of it, and at least 16
    config = functools.partial(BlockAttentionConfig, block_m, block_d=max(32, dim))
    if block_size > 64 or itemsize == 4 or dim > 128:
        return config(num_warps=8, num_stages=1)
    if capability < (9, 0) or capability[0] == 12:
        if kernel == "fwd" or dim <= 64:
            return config(num_warps=4, num_stages=1, ctas_per_sm=4)
        return config(num_warps=8, num_stages=1)
    if kernel == "fwd":
        if rotary == "none":
            return config(num_warps=4, num_stages=3)
        return config(num_warps=4, num_stages=2, ctas_per_sm=2)
    if rotary == "none" and group == 1:
        return config(num_warps=4, num_stages=3)
    if capability >= (10, 0) and rotary == "absolute" and group > 1:
        # Triton 3.6's pipeliner fails there if v is rotated
        return config(num_warps=8, num_stages=1)
    return config(num_warps=8, num_stages=2 if rotary == "absolute" else 3)


def hopper_block_attention_config(
    kernel: str, num_heads: int, head_dim: int, block_size: int
) -> HopperBlockAttentionConfig:
    """Configuration of the Hopper kernel "fwd" or "bwd"."""
    block_m, block_d = max(block_size, 64), 64 if head_dim <= 64 else 128
    three_per_sm = block_m == 64 and (kernel == "fwd" or block_d == 64)
    return HopperBlockAttentionConfig(
        block_m,
        block_d,
        heads_per_cta=max(n for n in (1, 2, 3, 4) if num_heads % n == 0),
        num_warps=block_m // 16,
        max_registers=168 if three_per_sm else None,
    )


def fits_shared_memory(
    head_dim: int, itemsize: int, capability: tuple[int, int], block_size: int, group: int
) -> bool:
    """Whether the Triton backward for blocks of block_size rows fits the shared memory of a thread
    block. group: query heads per key head. With more than one, the backward loops over them, and
    its pipeline needs more shared memory."""
    dim = padded_dim(head_dim)
    if has_small_shared_memory(capability):
        return block_size <= 64 and dim <= (32 if itemsize == 4 else 64 if group > 1 else 128)
    if capability < (9, 0):
        return block_size <= 64 and dim <= (64 if itemsize == 4 else 128)
    if block_size <= 32:
        return True
    if block_size == 64:
        return itemsize == 2 or dim <= 128
    return dim <= (32 if itemsize == 4 else 128)
