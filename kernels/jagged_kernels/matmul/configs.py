"""Launch configurations of jagged matrix multiplications: static tables by size, dtype and GPU generation."""

from __future__ import annotations

from ..common.configs import ProductConfig, has_small_shared_memory, padded_dim


def jagged_matmul_config(kernel: str, itemsize: int, capability: tuple[int, int], rows: int, columns: int, precision: str) -> ProductConfig:
    """Launch configuration of a product of jagged tensors.

    Args:
        kernel: "dense", "jagged", "outer" or "array".
        rows, columns: of one segment's product, as far as shapes tell them: rows of "jagged", columns of all but "outer"; else 0.
        precision: of fp32 products, as `launch.precision` has it.
    """
    if itemsize == 4 and precision != "tf32":  # a product is six: registers bound the tiles
        return ProductConfig(_side(rows, 64), _side(columns, 64), depth=32, num_warps=4, num_stages=2)
    if kernel == "outer":
        small_memory = has_small_shared_memory(capability)
        return ProductConfig(64, 64, depth=256 // itemsize, num_warps=4, num_stages=2 if small_memory else 3)
    if itemsize == 4:
        # Hopper's own product of tf32 wants the summed dimension contiguous, and operands that lie otherwise are copied by 4 bytes; with
        # 32 rows or two warps the compiler takes the older one
        if kernel == "dense":
            return ProductConfig(32, _side(columns, 128), depth=32 if columns > 16 else 64, num_warps=4, num_stages=3)
        if kernel == "array":
            return ProductConfig(32, _side(columns, 256), depth=16, num_warps=4, num_stages=3)
        if rows <= 64 or columns <= 64:
            return ProductConfig(_side(rows, 64), _side(columns, 64), depth=16, num_warps=2, num_stages=3)
        return ProductConfig(32, 128, depth=16, num_warps=4, num_stages=3)
    if kernel == "jagged" and rows > 64 and columns > 64:
        return ProductConfig(128, 128, depth=32, num_warps=4 if capability >= (9, 0) else 8, num_stages=3)
    return ProductConfig(_side(rows, 64), _side(columns, 128), depth=32 if columns > 64 else 64, num_warps=4, num_stages=3)


def _side(size: int, most: int) -> int:
    return min(most, padded_dim(size)) if size else most
