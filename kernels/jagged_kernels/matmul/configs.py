"""Launch configurations of jagged matrix multiplications: static tables by size, dtype and GPU
generation. Triton is their one backend."""

from __future__ import annotations

from ..common.configs import GemmConfig, has_small_shared_memory, padded_dim


def jagged_matmul_config(
    kernel: str, itemsize: int, capability: tuple[int, int], rows: int, columns: int, precision: str
) -> GemmConfig:
    """Launch configuration of a GEMM of jagged tensors.

    Args:
        kernel: "dense", "jagged", "outer" or "array".
        rows, columns: of one segment's result, where they follow from the shapes: rows for
            "jagged", columns for all but "outer"; else 0.
        precision: of fp32 MMAs, as `device.precision` returns it.
    """
    # an fp32 MMA is six of bf16: registers limit the tiles
    if itemsize == 4 and precision != "tf32":
        return GemmConfig(
            _side(rows, 64), _side(columns, 64), block_k=32, num_warps=4, num_stages=2
        )
    if kernel == "outer":
        small_memory = has_small_shared_memory(capability)
        return GemmConfig(
            64, 64, block_k=256 // itemsize, num_warps=4, num_stages=2 if small_memory else 3
        )
    if itemsize == 4:
        # Hopper's tf32 wgmma needs both operands contiguous along K; others would be copied 4 bytes
        # at a time. With tiles of 32 rows or with two warps, the compiler uses the older mma.
        if kernel == "dense":
            return GemmConfig(
                32,
                _side(columns, 128),
                block_k=32 if columns > 16 else 64,
                num_warps=4,
                num_stages=3,
            )
        if kernel == "array":
            return GemmConfig(32, _side(columns, 256), block_k=16, num_warps=4, num_stages=3)
        if rows <= 64 or columns <= 64:
            return GemmConfig(
                _side(rows, 64), _side(columns, 64), block_k=16, num_warps=2, num_stages=3
            )
        return GemmConfig(32, 128, block_k=16, num_warps=4, num_stages=3)
    if kernel == "jagged" and rows > 64 and columns > 64:
        return GemmConfig(
            128, 128, block_k=32, num_warps=4 if capability >= (9, 0) else 8, num_stages=3
        )
    return GemmConfig(
        _side(rows, 64),
        _side(columns, 128),
        block_k=32 if columns > 64 else 64,
        num_warps=4,
        num_stages=3,
    )


def _side(size: int, most: int) -> int:
    return min(most, padded_dim(size)) if size else most
