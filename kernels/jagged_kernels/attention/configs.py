"""Tiles and launch configurations of attention: static tables by head dim, dtype and GPU
generation, which select.py reads. No tuning, and no triton import."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..common.configs import LaunchConfig, has_small_shared_memory, padded_dim
from ..schedule.cost import SHORT


class AttentionConfig(NamedTuple):
    """Launch configurations of the portable kernels. `fwd` and `dq` loop over blocks of keys,
    `dkdv` over blocks of queries."""

    fwd: LaunchConfig
    dq: LaunchConfig
    dkdv: LaunchConfig


class AttentionTile(NamedTuple):
    """Rows of a tile: `query` in the forward and dq kernels, `key` in the dk, dv kernel."""

    query: int
    key: int


def attention_tile(
    head_dim: int, itemsize: int, capability: tuple[int, int], mean_seqlen: float | None = None
) -> AttentionTile:  # fmt: skip
    """The largest tiles of the portable kernels. mean_seqlen: mean query rows of a segment; None:
    many. With few rows, a tile of 128 rows is mostly empty."""
    dim = padded_dim(head_dim)
    if itemsize == 4:  # the operands of a tile stay in shared memory: q and dO, or k and v
        rows = 64 if dim <= 128 else 32
        if dim >= 128 and has_small_shared_memory(capability):
            rows //= 2
        return AttentionTile(query=rows, key=rows)
    return AttentionTile(
        query=64 if dim > 64 or (mean_seqlen is not None and mean_seqlen <= 64) else 128, key=64
    )


def attention_config(
    head_dim: int, itemsize: int, capability: tuple[int, int], query_tile: int, long: bool
) -> AttentionConfig:
    """Launch configurations of the attention kernels.

    Args:
        head_dim: the larger of the query and the value head dim.
        itemsize: bytes of an input element, 2 or 4.
        capability: CUDA compute capability; (8, 6), (8, 9) and (12, 0) have 99 KB of shared memory
            per block, others 163 KB or more.
        query_tile: rows of a query tile, as the schedule has them.
        long: whether tiles loop over many rows, without a mask (`select.LONG`).
    """
    dim = padded_dim(head_dim)
    small_memory = has_small_shared_memory(capability)
    if itemsize == 4:  # an fp32 MMA is six bf16 MMAs: registers and shared memory limit the blocks
        warps = 4 if dim <= 64 else 8
        config = LaunchConfig(
            block=32 if dim <= 128 and not small_memory else 16,
            num_warps=warps,
            num_stages=2 if dim <= 64 else 1,
        )
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
            dkdv=LaunchConfig(
                block=32, num_warps=4, num_stages=2 if small_memory else 4, ctas_per_sm=2
            ),
        )
    return AttentionConfig(
        fwd=LaunchConfig(
            block=64, num_warps=4, num_stages=3, ctas_per_sm=3 if query_tile <= 64 else 2
        ),
        dq=LaunchConfig(block=64, num_warps=4, num_stages=3, ctas_per_sm=2),
        dkdv=LaunchConfig(block=64, num_warps=4, num_stages=3, ctas_per_sm=2),
    )


@functools.cache
def packed_config(kernel: str, head_dim: int) -> LaunchConfig:
    """Configuration of the kernels for short segments, "fwd" or "bwd". head_dim: the larger of the
    query and the value head dim."""
    ctas = (3 if kernel == "fwd" else 2) + (padded_dim(head_dim) <= 64)
    # of a thread, so that this many thread blocks of 128 threads fit
    registers = {2: None, 3: 168, 4: 128}[ctas]
    return LaunchConfig(
        block=SHORT, num_warps=4, num_stages=1, ctas_per_sm=ctas, max_registers=registers
    )


def biased_dq_config(config: LaunchConfig) -> LaunchConfig:
    """The configuration of a dq kernel with its tile, with a bias. The sums of dS take registers,
    so large blocks get more warps."""
    if (config.tile or 0) * config.block > 64 * 64:
        return config._replace(num_warps=8, ctas_per_sm=1)
    return config


class HopperConfig(NamedTuple):
    """Launch of a warp-specialised kernel.

    Attributes:
        consumers: warpgroups of a thread block that compute, 64 rows of a tile each.
        block, stages: rows of the blocks that a tile loops over, and their number of buffers.
        row_stages: buffers of a consumer's own rows.
        launch_registers, registers: registers per thread at launch, and of consumers.
        rows_in_registers: the forward holds q in registers.
        ctas_per_sm: thread blocks that run on a multiprocessor at a time.
        v_stages: buffers of the values in dq; 0: as many as `stages`.
        warps: of a consumer; 8 in dkdv: that of wide_dkdv.py.
        whole_blocks: in the forward and dq, without a mask: every segment has whole blocks of keys,
            at least one, and there is no code for other ends.
        dynamic_tiles: in the forward, thread blocks take tiles through a counter; otherwise the
            zigzag assigns them.
    """

    consumers: int
    block: int
    stages: int
    row_stages: int
    launch_registers: int
    registers: int
    rows_in_registers: bool = False
    ctas_per_sm: int = 1
    dynamic_tiles: bool = False
    whole_blocks: bool = False
    v_stages: int = 0
    warps: int = 4

    @property
    def tile(self) -> int:
        return 64 * self.consumers


def hopper_attention_config(
    kernel: str,
    head_dim: int,
    activation: str,
    masked: bool,
    biased: bool = False,
    long: bool = False,
    timed: bool = False,
    dropout: bool = False,
) -> HopperConfig:
    """Launch configuration of a warp-specialised attention kernel. Tiles depend on kernel and
    head_dim only, as a schedule made on the host knows no more; but with a time table, whose
    arithmetic takes longer than another list of tiles.

    Args:
        kernel: "fwd", "dq", "dkdv", or "one_pass", whose tiles are dkdv's.
        head_dim: of q and k, or of v: both are padded to the same size.
        biased, timed: whether there is a RelativeBias, and a time table in it.
        long: whether "fwd" loops over blocks of 128 keys instead of 64
            (`select.long_key_blocks_are_faster`).
        dropout: whether weights are dropped.
    """
    softmax = activation == "softmax"
    two = functools.partial(HopperConfig, consumers=2, launch_registers=168, registers=240)
    three = functools.partial(HopperConfig, consumers=3, launch_registers=128, registers=160)
    if padded_dim(head_dim) == 256:
        if kernel == "dkdv":  # two warpgroups share a tile
            return two(consumers=1, warps=8, block=64, stages=2, row_stages=1)
        return two(block=64, stages=2, row_stages=1, v_stages=1 if kernel == "dq" else 0)
    if kernel == "dkdv":
        if padded_dim(head_dim) == 128:  # stored buckets take shared memory
            return two(block=64, stages=2 if timed else 3, row_stages=1)
        # With a mask, a bias, dropout or an activation, blocks of 128 rows would need too many
        # registers.
        if softmax and not (masked or biased or dropout):
            return two(block=128, stages=2, row_stages=2)
        return two(block=64, stages=4, row_stages=2)
    narrow = padded_dim(head_dim) == 64
    if kernel == "one_pass":
        # beside the consumers, a warpgroup of its own computes dq. Long arithmetic would spill 192
        # registers.
        if narrow:
            registers = (
                208 if masked or activation in ("silu", "gelu", "gelu_tanh", "gelu_taylor") else 192
            )
            return HopperConfig(
                2, block=64, stages=3, row_stages=2, launch_registers=128, registers=registers
            )
        return two(block=64, stages=2, row_stages=1)
    # buckets take more registers than three warpgroups have
    if timed and narrow and kernel in ("fwd", "dq"):
        return two(block=64, stages=4, row_stages=2)
    if kernel == "dq":
        # the gradients of the bias tables take shared memory
        row_stages = 1 if biased and not narrow else 2
        if narrow:
            return three(block=64, stages=3, row_stages=row_stages)
        return two(block=64, stages=2, row_stages=row_stages)
    if narrow:
        long = long and activation != "gelu"  # its arithmetic takes many registers
        return three(block=128 if long else 64, stages=3 if long else 5, row_stages=2)
    if timed:  # stored buckets take shared memory
        return two(block=64, stages=3, row_stages=2, rows_in_registers=softmax)
    return two(
        block=128 if long else 64, stages=2 if long else 4, row_stages=2, rows_in_registers=softmax
    )


def small_hopper_config(
    kernel: str, head_dim: int, biased: bool = False, timed: bool = False, few_rows: bool = False
) -> HopperConfig:
    """As hopper_attention_config, for a thread block with one consumer. Two or three of them share
    a multiprocessor, and one computes while another waits for its tile's first rows or stores its
    last. A tile of 64 rows is also fuller where a segment ends.

    Args:
        kernel: "fwd", "dq", or at head dims up to 64 "dkdv".
        few_rows: whether "dkdv" loops over few query rows: blocks of 32 then leave registers for a
            third thread block.
    """
    two = functools.partial(
        HopperConfig, consumers=1, ctas_per_sm=2, launch_registers=128, registers=232
    )
    three = functools.partial(
        HopperConfig, consumers=1, ctas_per_sm=3, launch_registers=80, registers=136
    )
    if kernel == "dkdv":
        if few_rows:
            return three(block=32, stages=3, row_stages=1)
        return two(block=64, stages=3, row_stages=2)
    if padded_dim(head_dim) == 128:  # the gradients of the bias tables take shared memory in "dq"
        return two(block=64, stages=1 if biased and kernel == "dq" else 2, row_stages=1)
    if timed:  # buckets take registers
        return two(block=64, stages=3, row_stages=2 if kernel == "fwd" else 1)
    if kernel == "fwd":
        return three(block=64, stages=2, row_stages=2)
    return three(block=64, stages=2 if biased else 3, row_stages=1)


def dq_config(head_dim: int, consumers: int) -> HopperConfig:
    """The launch configuration of "dq" for so many consumers, without mask and bias."""
    if consumers == 1:
        return small_hopper_config("dq", head_dim)
    if consumers == 2 and padded_dim(head_dim) == 64:
        return HopperConfig(
            consumers=2, block=64, stages=4, row_stages=2, launch_registers=168, registers=240
        )
    return hopper_attention_config("dq", head_dim, "softmax", False)


def short_queries_config(head_dim: int, consumers: int) -> HopperConfig:
    """Launch configuration of the kernel for all gradients of segments with few query rows, 64 for
    each consumer. consumers: up to three, above head dim 64 two."""
    narrow = padded_dim(head_dim) == 64
    stages, row_stages = (3, 2) if narrow else (2, 1)
    if consumers == 1:
        return HopperConfig(
            1, 64, stages, row_stages, launch_registers=128, registers=232, ctas_per_sm=2
        )
    if consumers == 2:
        return HopperConfig(2, 64, stages, row_stages, launch_registers=168, registers=240)
    return HopperConfig(3, 64, stages, row_stages, launch_registers=128, registers=160)
