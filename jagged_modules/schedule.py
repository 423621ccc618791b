"""Attention tile schedules. They are built on the host if it knows the lengths, otherwise on the
device, without a sync."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jagged_kernels.attention.params import MaskParams
from jagged_kernels.attention.select import AttentionProblem, Selection, select
from jagged_kernels.common.device import device_properties, gpu_capability
from jagged_kernels.schedule.cost import LoopedSide, may_alternate, one_pass_may_run
from jagged_kernels.schedule.host import TileSchedule, zigzag_schedule
from torch import Tensor

from .masks import AttentionMask

# for `TileSchedule.worker` before CUDA is initialised; the kernels assign tiles to the actual
# number of SMs
NUM_WORKERS = 132


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
    schedule_of = partial(
        zigzag_schedule, num_workers=workers, mask=mask, head_dim=_grouped_dim(problem, selection)
    )
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
    return schedule.pin_memory() if initialized else schedule


class _Side(NamedTuple):
    """The queries or the keys of a call. block: rows of a tile."""

    offsets: Tensor
    rows: int
    heads: int
    block: int


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
    """Schedules from offsets on a device, built by an operator that torch.compile and CUDA graphs
    can record.

    Args:
        problem: head dims, dtype and options. This function fills in the numbers of rows, segments
            and heads, and the compute capability.
        q_offsets, kv_offsets: `[B + 1]` int32 or int64.
        q_rows, kv_rows: total number of rows.
        num_heads, num_kv_heads: heads of the queries, and of keys and values.
        mask: `AttentionMask.params`. num_targets: `[B]`, on the offsets' device.
        backward: also list the tiles of the backward. If False, the backward lists them when it
            runs.
    """
    from jagged_kernels.common.ops import capability
    from jagged_kernels.schedule.device import list_tiles

    params = None if mask is None else MaskParams(*mask)
    known: dict[str, Any] = dict(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        causal=params is not None and params.is_causal,
    )
    if q_offsets.is_cuda:
        known |= dict(capability=capability(q_offsets.device))
    # sizes are symbols there, and a choice that depends on them would recompile
    if not torch.compiler.is_compiling():
        known |= dict(
            q_rows=q_rows,
            kv_rows=kv_rows,
            q_segments=q_offsets.shape[0] - 1,
            kv_segments=kv_offsets.shape[0] - 1,
        )
    problem = problem._replace(**known)
    selection = select(problem)
    tile = selection.tile

    head_dim = _grouped_dim(problem, selection)

    def build(side: _Side, other: _Side, key_tiles: bool) -> TileSchedule:
        options = mask, num_targets, key_tiles, other.rows, other.heads, head_dim
        tiles, num_tiles = list_tiles(
            side.offsets, other.offsets, side.rows, side.heads, side.block, other.block, *options
        )
        ascending = (
            params is None
            or key_tiles
            and params.is_causal
            and _causal_keys_ascend(side, other, head_dim)
        )
        return TileSchedule(
            tiles, num_tiles, side.block, other.block, side.heads, NUM_WORKERS, ascending=ascending
        )

    queries, keys = (
        _Side(q_offsets, q_rows, num_heads, tile.query),
        _Side(kv_offsets, kv_rows, num_kv_heads, tile.key),
    )
    schedule = build(queries, keys, False)
    return (
        dataclasses.replace(schedule, backward=build(keys, queries, True)) if backward else schedule
    )


def _causal_keys_ascend(keys: _Side, queries: _Side, head_dim: int) -> bool:
    """Whether the key tiles of each segment and head are listed in ascending order under the causal
    mask."""
    if not may_alternate(head_dim):
        return True
    if torch.compiler.is_compiling():  # sizes are symbols there
        return False
    looped, segments = LoopedSide(queries.rows, queries.heads, head_dim), keys.offsets.shape[0] - 1
    return one_pass_may_run(looped, keys.rows, keys.heads, segments, masked=True, causal=True)


def _grouped_dim(problem: AttentionProblem, selection: Selection) -> int:
    """head_dim of `zigzag_schedule`: 0 for kernels that gain nothing from groups of segments."""
    return problem.head_dim if selection.backend == "hopper" and not problem.batch_invariant else 0
