"""Tiles and launch configurations of attention: static tables by head dim, dtype and GPU generation. No triton import, no tuning."""

from __future__ import annotations

import dataclasses
import functools

from ..common.configs import LaunchConfig, has_small_shared_memory, padded_dim


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
    small_memory = has_small_shared_memory(capability)
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
