"""Launch configurations of linear compression: static tables by size, dtype and GPU generation."""

from __future__ import annotations

import dataclasses
import math

from ..common.configs import ProductConfig, padded_dim


def linear_compress_config(itemsize: int, capability: tuple[int, int], columns: int) -> ProductConfig:
    """Launch configuration of the candidates' product, whose result has that many columns."""
    if itemsize == 4:
        return ProductConfig(rows=64, columns=64, depth=32, num_warps=4, num_stages=2, ctas_per_sm=2)
    if capability < (9, 0) or columns <= 128:
        return ProductConfig(rows=128, columns=min(128, padded_dim(columns)), depth=32, num_warps=4, num_stages=3, ctas_per_sm=2)
    return ProductConfig(rows=128, columns=256, depth=64, num_warps=8, num_stages=4)


@dataclasses.dataclass(frozen=True)
class HopperProductConfig:
    """Hopper's kernel of linear compression: columns of its tiles, the length of the blocks of its sums, how many are in shared memory at
    once, and the buffers that each group of warps stores through."""

    columns: int
    depth: int
    stages: int
    buffers: int


def hopper_product_config(columns: int) -> HopperProductConfig:
    """Launch configuration of a product with that many columns: blocks and buffers fill a multiprocessor's shared memory."""
    return HopperProductConfig(128, 64, 4, 3) if columns <= 128 else HopperProductConfig(256, 64, 3, 3)


def weight_gradient_config(itemsize: int, capability: tuple[int, int], rows: int, columns: int) -> ProductConfig:
    """Launch configuration of the gradient of a weight `[rows, columns]`; `depth` divides the embeddings' width."""
    if itemsize == 4:
        return ProductConfig(rows=64, columns=64, depth=32, num_warps=4, num_stages=2, ctas_per_sm=2)
    if capability < (9, 0):
        return ProductConfig(rows=64, columns=128, depth=32, num_warps=4, num_stages=3, ctas_per_sm=2)
    shapes = (256, 128), (128, 256)
    tile = min(shapes, key=lambda tile: math.prod(math.ceil(size / side) * side for size, side in zip((rows, columns), tile)))
    return ProductConfig(*tile, depth=64, num_warps=8, num_stages=3)
