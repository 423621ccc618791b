"""Launch configurations of linear compression: static tables by size, dtype and GPU generation."""

from __future__ import annotations

import dataclasses
import math

from ..common.configs import GemmConfig, has_small_shared_memory, padded_dim


def linear_compress_config(itemsize: int, capability: tuple[int, int], n: int) -> GemmConfig:
    """Launch configuration of the Triton GEMM W @ E[b] with N columns."""
    if itemsize == 4:
        return GemmConfig(
            block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=2, ctas_per_sm=2
        )
    if capability < (9, 0) or has_small_shared_memory(capability) or n <= 128:
        return GemmConfig(
            block_m=128,
            block_n=min(128, padded_dim(n)),
            block_k=32,
            num_warps=4,
            num_stages=3,
            ctas_per_sm=2,
        )
    return GemmConfig(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4)


@dataclasses.dataclass(frozen=True)
class HopperGemmConfig:
    """Launch of the Hopper kernel: tiles of block_n columns, K steps of block_k, stages in shared
    memory, and staging buffers of each consumer for its epilogue."""

    block_n: int
    block_k: int
    num_stages: int
    num_buffers: int


def hopper_gemm_config(n: int) -> HopperGemmConfig:
    """Launch configuration for N columns: stages and buffers fill an SM's shared memory."""
    if n <= 128:
        return HopperGemmConfig(block_n=128, block_k=64, num_stages=4, num_buffers=3)
    return HopperGemmConfig(block_n=256, block_k=64, num_stages=3, num_buffers=3)


def weight_gradient_config(
    itemsize: int, capability: tuple[int, int], m: int, k: int
) -> GemmConfig:
    """Launch configuration of the Triton GEMM Σ_b G[b] @ E[b]ᵀ, the gradient of a weight `[M, K]`.
    Its tiles are block_m x block_n of `[M, K]`, summed in blocks of block_k of N."""
    if itemsize == 4:
        return GemmConfig(
            block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=2, ctas_per_sm=2
        )
    if capability < (9, 0):
        return GemmConfig(
            block_m=64, block_n=128, block_k=32, num_warps=4, num_stages=3, ctas_per_sm=2
        )
    shapes = (256, 128), (128, 256)
    tile = min(
        shapes,
        key=lambda tile: math.prod(
            math.ceil(size / side) * side for size, side in zip((m, k), tile)
        ),
    )
    return GemmConfig(*tile, block_k=64, num_warps=8, num_stages=3)
