"""Launch configurations: static tables by head dim, dtype and GPU generation. No triton import, no tuning at run time."""

from __future__ import annotations

import dataclasses
import functools
import math


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """One kernel's launch: rows of the blocks that a tile loops over, warps, pipeline depth, resident CTAs per SM, and rows of a tile
    where they are not those of the schedule."""

    block: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1
    tile: int | None = None


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """`fwd` and `dq` loop over blocks of keys, `dkdv` over blocks of queries; their tiles are an `AttentionTile`'s."""

    fwd: LaunchConfig
    dq: LaunchConfig
    dkdv: LaunchConfig


@dataclasses.dataclass(frozen=True)
class AttentionTile:
    """Rows of a tile: `query` rows in the forward and dq kernels, `key` rows in the dk, dv kernel."""

    query: int
    key: int


def padded_dim(dim: int) -> int:
    """The power of two a kernel's tile gives to `dim`: at least 16, the smallest side a matrix instruction takes."""
    return max(16, 1 << (dim - 1).bit_length())


def attention_tile(head_dim: int, itemsize: int, mean_queries: float | None = None, hopper: bool = False) -> AttentionTile:
    """Block sizes of attention tile schedules. A data loader need not know the GPU: kernels that want another tile make their own list.

    Args:
        mean_queries: query rows of an average segment, where known; where they are few, a tile of 128 rows is mostly empty.
        hopper: whether the GPU is of compute capability 9.0, whose own kernels take what they can.
    """
    dim = padded_dim(head_dim)
    if hopper and itemsize == 2 and dim in (64, 128):
        query, key = (hopper_attention_config(kernel, dim, "softmax", False).tile for kernel in ("fwd", "dkdv"))
        return AttentionTile(query=query, key=key)
    if itemsize == 4:
        return AttentionTile(query=64, key=64) if dim <= 128 else AttentionTile(query=32, key=32)
    return AttentionTile(query=64 if dim > 64 or mean_queries is not None and mean_queries <= 64 else 128, key=64)


LONG = 768  # mean rows that a tile loops over, from which on larger blocks pay


def attention_config(head_dim: int, itemsize: int, capability: tuple[int, int], query_tile: int, long: bool) -> AttentionConfig:
    """Launch configurations of the attention kernels.

    Args:
        head_dim: the larger of the query and the value head dim.
        itemsize: bytes of an input element, 2 or 4.
        capability: CUDA compute capability; (8, 6), (8, 9) and (12, 0) parts have 99 KB of shared memory a block, others 163 KB or more.
        query_tile: rows of a query tile, as the schedule has them.
        long: whether there is no mask and a tile loops over `LONG` rows or more on average.
    """
    dim = padded_dim(head_dim)
    small_memory = capability[0] == 12 or capability[0] == 8 and capability[1] > 0
    if itemsize == 4:  # a fp32 product is six bf16 ones: registers and shared memory bound the blocks
        warps = 4 if dim <= 64 else 8
        config = LaunchConfig(block=32 if dim <= 128 and not small_memory else 16, num_warps=warps, num_stages=2 if dim <= 64 else 1)
        return AttentionConfig(fwd=config, dq=config, dkdv=config)
    if dim > 128:
        stages = 1 if small_memory else 2
        return AttentionConfig(
            fwd=LaunchConfig(block=32 if small_memory else 64, num_warps=4, num_stages=stages),
            dq=LaunchConfig(block=16 if small_memory else 32, num_warps=8, num_stages=1),
            dkdv=LaunchConfig(block=16 if small_memory else 32, num_warps=8, num_stages=stages),
        )
    if dim == 128:
        stages = 2 if small_memory else 3
        if long and not small_memory:
            return AttentionConfig(
                fwd=LaunchConfig(block=64, num_warps=4, num_stages=3, ctas_per_sm=2),
                dq=LaunchConfig(block=64, num_warps=8, num_stages=3, tile=128),
                dkdv=LaunchConfig(block=64, num_warps=4, num_stages=2, ctas_per_sm=2),
            )
        return AttentionConfig(
            fwd=LaunchConfig(block=64, num_warps=4, num_stages=stages, ctas_per_sm=2),
            dq=LaunchConfig(block=32, num_warps=4, num_stages=stages, ctas_per_sm=2),
            dkdv=LaunchConfig(block=32, num_warps=4, num_stages=2 if small_memory else 4, ctas_per_sm=2),
        )
    return AttentionConfig(
        fwd=LaunchConfig(block=64, num_warps=4, num_stages=3, ctas_per_sm=3 if query_tile <= 64 else 2),
        dq=LaunchConfig(block=64, num_warps=4, num_stages=3, ctas_per_sm=2),
        dkdv=LaunchConfig(block=64, num_warps=4, num_stages=3, ctas_per_sm=2),
    )


@dataclasses.dataclass(frozen=True)
class HopperConfig:
    """A warp-specialised kernel's launch: warpgroups that compute, each 64 rows of a tile; rows of the blocks that they loop over; buffers
    of such blocks, and of a warpgroup's own rows; registers of a thread at launch, and of one that computes; whether the forward keeps its
    rows in them."""

    consumers: int
    block: int
    stages: int
    row_stages: int
    launch_registers: int
    registers: int
    rows_in_registers: bool = False

    @property
    def tile(self) -> int:
        return 64 * self.consumers


def hopper_attention_fits(head_dim: int, v_dim: int, itemsize: int, capability: tuple[int, int]) -> bool:
    """Whether the attention kernels for compute capability 9.0 take such head dims, where rows begin at 16-byte boundaries."""
    dim = padded_dim(head_dim)
    return capability == (9, 0) and itemsize == 2 and dim in (64, 128) and padded_dim(v_dim) == dim and head_dim % 8 == v_dim % 8 == 0


def hopper_attention_pays(
    query_rows: float | None, key_rows: float | None, head_dim: int = 128, activation: str = "softmax"
) -> bool:  # fmt: skip
    """Whether these kernels are faster, forward and backward together. query_rows, key_rows: mean rows per segment; None: assume many.

    Not where tiles are mostly empty: portable kernels took 25 % less time for 25 rows by 25 and 8 % less for 1 by 200; Hopper's took 8 %
    less for 10 by 200 and 13 % less for 50 by 50. Nor for activations of very many instructions, of which every warpgroup has a copy:
    portable kernels took 18 % less time for "gelu_taylor" and 2 % less for "gelu" at head dim 64; Hopper's took 10 % less at 128.
    """
    many = query_rows is None or key_rows is None or query_rows * key_rows >= 1024
    return many and activation != "gelu_taylor" and (activation != "gelu" or padded_dim(head_dim) == 128)


def score_gradients_pay(num_blocks: float, rows: float, head_dim: int) -> bool:
    """Whether the backward is faster where one kernel keeps so many blocks of 64 by 64 gradients of scores for another, 8 KB each.

    At head dim 128 that took 2 % more to 20 % less time, at 64, where as many bytes save half as much arithmetic, 6 to 8 % more. It is
    two or three launches more. `rows`: of queries or of keys in a segment on average, whichever are fewer; fewer than two blocks of
    them were not measured, and would leave blocks mostly empty.
    """
    return padded_dim(head_dim) == 128 and num_blocks >= 2**14 and rows >= 128


def hopper_keys_are_long(key_rows: float | None, head_dim: int, masked: bool) -> bool:
    """Whether the forward loops over blocks of 128 keys instead of 64. key_rows: mean keys per segment; None: assume few.

    A block costs its waits whatever its size; a smaller one leaves less of it past a segment's end or hidden by a mask. Both took the same
    time for about 320 keys at head dim 128 and 600 at 64 without a mask, and for four times as many under one.
    """
    return key_rows is not None and key_rows >= LONG * 64 / padded_dim(head_dim) * (4 if masked else 1)


def hopper_attention_config(kernel: str, head_dim: int, activation: str, masked: bool, long: bool = False) -> HopperConfig:
    """Launch configuration of a warp-specialised attention kernel, by either head dim: they are padded to the same.

    Args:
        kernel: "fwd", "dq", "dkdv", or "dq_of_kept", whose tiles are dq's. Tiles do not depend on the other arguments, of which a
            schedule knows nothing.
        long: whether `hopper_keys_are_long`, for "fwd".
    """
    softmax = activation == "softmax"
    two = functools.partial(HopperConfig, consumers=2, launch_registers=168, registers=240)
    three = functools.partial(HopperConfig, consumers=3, launch_registers=128, registers=160)
    if kernel == "dkdv":
        if padded_dim(head_dim) == 128:
            return two(block=64, stages=3, row_stages=1)
        # What a mask or an activation computes for a block of 128 rows takes more registers than there are.
        return two(block=128, stages=2, row_stages=2) if softmax and not masked else two(block=64, stages=4, row_stages=2)
    narrow = padded_dim(head_dim) == 64
    if kernel == "dq":
        return three(block=64, stages=3, row_stages=2) if narrow else two(block=64, stages=2, row_stages=2)
    if kernel == "dq_of_kept":
        return (three if narrow else two)(block=64, stages=4, row_stages=4)
    if narrow:
        long = long and activation != "gelu"  # its arithmetic takes many registers
        return three(block=128 if long else 64, stages=3 if long else 5, row_stages=2)
    return two(block=128 if long else 64, stages=2 if long else 4, row_stages=2, rows_in_registers=softmax)


@dataclasses.dataclass(frozen=True)
class ProductConfig:
    """A kernel of linear compression: rows and columns of its tiles, the length of the blocks of its sums, and its launch."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1


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
        small_memory = capability[0] == 12 or capability[0] == 8 and capability[1] > 0
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


@dataclasses.dataclass(frozen=True)
class SoftmaxConfig:
    """A softmax kernel's tile: lines, and elements along them that are held in registers at once; its launch."""

    lines: int
    length: int
    num_warps: int


def jagged_softmax_config(itemsize: int, lines: int) -> SoftmaxConfig:
    """Launch configuration for lines side by side in memory, 128 bytes of them or fewer."""
    return SoftmaxConfig(lines=min(128 // itemsize, padded_dim(lines)), length=64, num_warps=2 if itemsize == 4 else 4)


def jagged2_softmax_config(over_columns: bool) -> SoftmaxConfig:
    """Launch configuration for the rows or columns of jagged matrices. Nothing is known of their alignment, so that every element is
    loaded by itself: more of them in a thread's registers would leave the multiprocessor few warps. A warp alone waits for no other."""
    return SoftmaxConfig(lines=16 if over_columns else 4, length=128, num_warps=1)
