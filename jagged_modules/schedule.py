"""Attention tile schedules. The device makes them without a sync; `Jagged.prepare` makes them on
the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jagged_kernels.attention.select import AttentionProblem, Selection, select
from jagged_kernels.common.device import gpu_capability
from jagged_kernels.schedule.cost import LoopedSide, MaskParams, may_alternate, one_pass_may_run
from jagged_kernels.schedule.host import TileSchedule, zigzag_schedule
from torch import Tensor

from .masks import AttentionMask


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
    """Zigzag schedules of the forward and the backward, built from lengths on the host.

    The tile sizes are those that `select` chooses for these lengths, without knowledge of the
    activation. A kernel that needs another tile size builds its own list.

    Args:
        q_lengths, kv_lengths: `[B]` integers on the host, the rows of each segment. q_lengths may
            have several query groups, as in `zigzag_schedule`.
        num_heads, num_kv_heads: heads of the queries, and of keys and values.
        head_dim: the larger of the query and the value head dim.
        dtype: dtype of q, k and v.
        mask: blocks that it hides count as no work.
        batch_invariant: the tile sizes do not depend on the lengths.
        implementation: the implementation of the attention.
        capability: compute capability of the GPU. None: that of the machine's first GPU.

    Returns:
        The forward's schedule, with the backward's as `backward`. Its tensors are in page-locked
        memory if CUDA is initialised.
    """
    mask = None if mask is None or mask.hides_nothing() else mask
    problem = AttentionProblem(
        head_dim,
        head_dim,
        dtype,
        capability or gpu_capability(),
        implementation,
        masked=mask is not None,
        causal=mask is not None and MaskParams(*mask.params).is_causal,
        batch_invariant=batch_invariant,
        q_rows=int(q_lengths.sum()),
        q_segments=len(q_lengths),
        kv_rows=int(kv_lengths.sum()),
        kv_segments=len(kv_lengths),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )
    selection = select(problem)
    tile = selection.tile
    schedule_of = partial(zigzag_schedule, mask=mask, head_dim=_grouped_dim(problem, selection))
    forward = schedule_of(
        q_lengths,
        kv_lengths,
        num_heads=num_heads,
        num_other_heads=num_kv_heads,
        block_m=tile.query,
        block_n=tile.key,
    )
    backward = schedule_of(
        kv_lengths,
        q_lengths,
        num_heads=num_kv_heads,
        num_other_heads=num_heads,
        block_m=tile.key,
        block_n=tile.query,
        key_tiles=True,
    )
    schedule = dataclasses.replace(forward, backward=backward)
    return schedule.pin_memory() if torch.cuda.is_initialized() else schedule


def device_schedule(
    problem: AttentionProblem,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    *,
    mask: Sequence[int] | None = None,
    num_targets: Tensor | None = None,
    backward: bool = True,
) -> TileSchedule:
    """Schedules from offsets on a device, built by one operator that torch.compile and CUDA graphs
    can record.

    Args:
        problem: head dims, dtype, options, and the numbers of rows, of all segments, and heads.
            This function fills in the numbers of segments and the compute capability.
        q_offsets, kv_offsets: `[B + 1]` int32 or int64.
        mask: `AttentionMask.params`. num_targets: `[B]`, on the offsets' device.
        backward: also list the tiles of the backward, in the same launches. If False, the backward
            lists them when it runs.
    """
    from jagged_kernels.attention.tile_lists import Lists, TiledSide, list_tiles
    from jagged_kernels.common.ops import capability

    assert problem.q_rows is not None and problem.kv_rows is not None
    q_rows, kv_rows = problem.q_rows, problem.kv_rows
    num_heads, num_kv_heads = problem.num_heads, problem.num_kv_heads
    params = None if mask is None else MaskParams(*mask)
    # sizes are symbols there, and a choice that depends on them would recompile
    if torch.compiler.is_compiling():
        sizes: dict[str, Any] = dict(q_rows=None, kv_rows=None)
    else:
        sizes = dict(q_segments=q_offsets.shape[0] - 1, kv_segments=kv_offsets.shape[0] - 1)
    problem = problem._replace(
        capability=capability(q_offsets.device) if q_offsets.is_cuda else problem.capability,
        causal=params is not None and params.is_causal,
        **sizes,
    )
    selection = select(problem)
    tile, head_dim = selection.tile, _grouped_dim(problem, selection)
    offsets, lists = (q_offsets, kv_offsets), Lists(queries=True, keys=backward)
    sides = TiledSide(q_rows, num_heads, tile.query), TiledSide(kv_rows, num_kv_heads, tile.key)
    of_queries, *of_keys = list_tiles(offsets, *sides, lists, mask, num_targets, head_dim)
    ascending, keys = params is None, None
    if backward:
        ascend = ascending or (problem.causal and _causal_keys_ascend(problem, head_dim))
        keys = TileSchedule(*of_keys[0], tile.key, tile.query, num_kv_heads, ascending=ascend)
    sizes_of_tiles = tile.query, tile.key, num_heads
    return TileSchedule(*of_queries, *sizes_of_tiles, backward=keys, ascending=ascending)


def _causal_keys_ascend(problem: AttentionProblem, head_dim: int) -> bool:
    """Whether the key tiles of each segment and head are listed in ascending order under the causal
    mask. head_dim: of `zigzag_schedule`."""
    if not may_alternate(head_dim):
        return True
    p = problem
    if p.q_rows is None or p.kv_rows is None or p.kv_segments is None:  # where sizes are symbols
        return False
    queries = LoopedSide(p.q_rows, p.num_heads, head_dim)
    return one_pass_may_run(
        queries, p.kv_rows, p.num_kv_heads, p.kv_segments, masked=True, causal=True
    )


def _grouped_dim(problem: AttentionProblem, selection: Selection) -> int:
    """head_dim of `zigzag_schedule`: 0 for kernels that gain nothing from groups of segments."""
    return problem.head_dim if selection.backend == "hopper" and not problem.batch_invariant else 0
