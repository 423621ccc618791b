"""Launch configurations of block attention: static tables by head dim, dtype and GPU generation."""

from __future__ import annotations

import functools

from ..common.configs import LaunchConfig, padded_dim


def block_attention_fits(head_dim: int, itemsize: int, capability: tuple[int, int], block_size: int, group: int) -> bool:
    """Whether the backward of a block of block_size rows fits the shared memory of a multiprocessor.

    group: query heads per key head. With more than one, the backward loops over them, and its pipeline needs more shared memory.
    """
    dim, small_memory = padded_dim(head_dim), capability[0] == 12 or capability[0] == 8 and capability[1] > 0
    if small_memory:
        return block_size <= 64 and dim <= (32 if itemsize == 4 else 64 if group > 1 else 128)
    if capability < (9, 0):
        return block_size <= 64 and dim <= (64 if itemsize == 4 else 128)
    if block_size <= 32:
        return True
    if block_size == 64:
        return itemsize == 2 or dim <= 128
    return dim <= (32 if itemsize == 4 else 128)


def block_attention_config(
    kernel: str, head_dim: int, itemsize: int, capability: tuple[int, int], block_size: int, group: int, rotary: str
) -> LaunchConfig:
    """Launch configuration of block attention's "fwd" or "bwd" kernel; `rotary`: "none", "relative" or "absolute" positions.

    A tile holds whole blocks, smaller ones several.
    """
    dim = padded_dim(head_dim)
    config = functools.partial(LaunchConfig, block=block_size, tile=max(block_size, 64 if itemsize == 2 or dim <= 64 else 32))
    if block_size > 64 or itemsize == 4 or dim > 128:
        return config(num_warps=8, num_stages=1)
    if capability < (9, 0) or capability[0] == 12:
        return config(num_warps=4, num_stages=1, ctas_per_sm=4) if kernel == "fwd" or dim <= 64 else config(num_warps=8, num_stages=1)
    if kernel == "fwd":
        return config(num_warps=4, num_stages=3) if rotary == "none" else config(num_warps=4, num_stages=2, ctas_per_sm=2)
    if rotary == "none" and group == 1:
        return config(num_warps=4, num_stages=3)
    if capability >= (10, 0) and rotary == "absolute" and group > 1:
        return config(num_warps=8, num_stages=1)  # the pipeliner of triton 3.6 fails there where values turn too
    return config(num_warps=8, num_stages=2 if rotary == "absolute" else 3)
