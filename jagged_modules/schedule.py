"""Attention tile schedules: on the host from lengths where the host knows them, else on the device without a sync."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from jagged_kernels.attention.select import AttentionProblem, select
from jagged_kernels.common.device import device_properties, gpu_capability
from jagged_kernels.schedule.host import TileSchedule, zigzag_schedule
from torch import Tensor

from .masks import AttentionMask

NUM_WORKERS = 132  # of `TileSchedule.worker` on a host without a GPU; kernels use the number of workers that the GPU has


def host_schedule(
    q_lengths: Tensor,
    kv_lengths: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    mask: AttentionMask | None = None,
    batch_invariant: bool = False,
    implementation: str = "auto",
    capability: tuple[int, int] | None = None,
) -> TileSchedule:
    """Zigzag schedules of the forward and the backward from host lengths `[B]`; in page-locked memory where there is a GPU.

    The tiles are those of the kernels that `select` chooses for these lengths; it does not know the activation. Kernels that want another
    tile list their own.

    Args:
        q_lengths, kv_lengths: rows of each segment, host integers; of queries also several groups, as in `zigzag_schedule`.
        head_dim: the larger of the query and the value head dim. dtype: of q, k and v.
        mask: blocks that it hides cost nothing.
        batch_invariant: the tile does not depend on the lengths.
        implementation: that of the attention.
        capability: compute capability of the GPU; None: that of the machine's first one.
    """
    initialized = torch.cuda.is_initialized()
    workers = device_properties(torch.device("cuda", 0)).num_sms if initialized else NUM_WORKERS
    mask = None if mask is None or mask.hides_nothing() else mask
    problem = AttentionProblem(
        head_dim,
        head_dim,
        dtype,
        capability or gpu_capability(),
        implementation,
        masked=mask is not None,
        batch_invariant=batch_invariant,
        q_rows=int(q_lengths.sum()),
        q_segments=len(q_lengths),
        kv_rows=int(kv_lengths.sum()),
        kv_segments=len(kv_lengths),
    )
    tile = select(problem).tile
    forward = zigzag_schedule(
        q_lengths, kv_lengths, num_heads=num_heads, block_m=tile.query, block_n=tile.key, num_workers=workers, mask=mask
    )  # fmt: skip
    backward = zigzag_schedule(
        kv_lengths, q_lengths, num_heads=num_kv_heads, block_m=tile.key, block_n=tile.query, num_workers=workers, mask=mask, key_tiles=True
    )
    schedule = dataclasses.replace(forward, backward=backward)
    return schedule.pin_memory() if initialized else schedule


def device_schedule(
    problem: AttentionProblem,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    q_rows: int,
    kv_rows: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    mask: Sequence[int] | None = None,
    num_targets: Tensor | None = None,
    backward: bool = True,
) -> TileSchedule:
    """The same tiles from offsets on a device, through an operator that torch.compile and CUDA graphs can record.

    Args:
        problem: head dims, dtype and options; the numbers of rows and segments and the GPU are filled in here.
        q_rows, kv_rows: rows of all segments together.
        mask: `AttentionMask.params`, with num_targets on the offsets' device.
        backward: whether to list the backward's tiles too, or to leave them to the backward, which may never come.
    """
    from jagged_kernels.common.ops import capability
    from jagged_kernels.schedule.device import tile_list

    if q_offsets.is_cuda:
        problem = problem._replace(capability=capability(q_offsets.device))
    if not torch.compiler.is_compiling():  # there sizes are symbols, and choosing by them would recompile
        segments = dict(q_segments=q_offsets.shape[0] - 1, kv_segments=kv_offsets.shape[0] - 1)
        problem = problem._replace(q_rows=q_rows, kv_rows=kv_rows, **segments)
    tile = select(problem).tile

    def build(
        offsets: Tensor, other_offsets: Tensor, rows: int, heads: int, block_m: int, block_n: int, key_tiles: bool = False
    ) -> TileSchedule:
        tiles, num_tiles = tile_list(offsets, other_offsets, rows, heads, block_m, block_n, mask, num_targets, key_tiles)
        return TileSchedule(tiles, num_tiles, block_m, block_n, heads, NUM_WORKERS)

    schedule = build(q_offsets, kv_offsets, q_rows, num_heads, tile.query, tile.key)
    if not backward:
        return schedule
    of_keys = build(kv_offsets, q_offsets, kv_rows, num_kv_heads, tile.key, tile.query, key_tiles=True)
    return dataclasses.replace(schedule, backward=of_keys)
