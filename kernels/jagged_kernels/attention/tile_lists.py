"""The zigzag schedule's tile lists built on the device, where only the device knows the offsets:
without a sync.

The operator `tile_lists` makes the lists of a forward and of its backward, tiles of queries and
tiles of keys, in one buffer and with one or two launches (tile_list_kernels.py). A backward that
leaves segments with few query rows to a kernel of their own has other lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.device import cdiv, device_properties
from ..common.ops import direct, operator
from ..schedule.cost import LoopedSide, MaskParams, grouping
from ..schedule.host import TileList, mask_of_groups, num_query_groups, tile_capacity
from .params import AttentionParams, Segments
from .tile_list_kernels import (
    BUCKETS,
    HEADER,
    SEGMENTS,
    Listed,
    grouped_list_kernel,
    log2_floor,
    masked_list_kernel,
    tile_list_kernel,
    tile_work_kernel,
)

CHUNK = 256  # virtual tiles that a program of masked_list_kernel writes
Offsets = tuple[Tensor, Tensor]  # of queries and of keys
Sides = tuple[Sequence[int], Sequence[int]]  # two TiledSides


class TiledSide(NamedTuple):
    """Queries or keys: their rows and heads, and the rows of a tile."""

    rows: int
    heads: int
    block: int


class Lists(NamedTuple):
    """Which lists an operator makes."""

    queries: bool
    keys: bool


class _Layout(NamedTuple):
    """The parts of the buffer, for the queries and for the keys; 0 of a side that is not listed.
    slots: tiles that there is room for. programs: under a mask, virtual tiles that there are chunks
    for. size: words of the buffer."""

    slots: tuple[int, int]
    programs: tuple[int, int]
    size: int

    @classmethod
    def of(cls, offsets: Offsets, sides: Sides, lists: Lists, masked: bool) -> _Layout:
        slots, programs, num_segments = [0, 0], [0, 0], offsets[1].shape[0] - 1
        for i, (rows, heads, block) in enumerate(sides):
            if lists[i]:
                segments = offsets[i].shape[0] - 1
                # Multiples of 4, as kernels are compiled for pointers to 16 bytes.
                slots[i] = (tile_capacity(rows, segments, heads, block) + 3) // 4 * 4
                # find_tile divides first and last rows, not lengths: hence one more
                programs[i] = (rows // (1 << log2_floor(block)) + segments + 1) if masked else 0
        size = cdiv(HEADER.value + 3 * sum(slots) + 2 * num_segments, 16) * 16
        if masked:
            size += sum(map(_num_chunks, programs)) * (BUCKETS.value + 3 * CHUNK)
        return cls((slots[0], slots[1]), (programs[0], programs[1]), size)


def _num_chunks(programs: int) -> int:
    return cdiv(programs, CHUNK)


def _empty_lists(q_offsets, kv_offsets, queries, keys, lists, mask=None, *options):
    layout = _Layout.of((q_offsets, kv_offsets), (queries, keys), lists, mask is not None)
    return q_offsets.new_empty((layout.size,), dtype=torch.int32)


@operator("tile_lists", fake=_empty_lists)
def tile_lists(
    q_offsets: Tensor,
    kv_offsets: Tensor,
    queries: list[int],
    keys: list[int],
    lists: list[bool],
    mask: list[int] | None = None,
    num_targets: Tensor | None = None,
    head_dim: int = 0,
) -> Tensor:
    """The tiles of `host.zigzag_schedule`, from offsets on the device.

    Args:
        q_offsets, kv_offsets: `[B + 1]`. Queries may have several groups, as in `zigzag_schedule`.
        queries, keys: `TiledSide`.
        lists: `Lists`.
        mask: `MaskParams`, with num_targets `[B]` if it has targets.
        head_dim: of the queries, for Hopper's kernels, whose tiles may be listed in groups of
            segments. 0: all tiles are sorted by work.

    Returns:
        int32, in which `list_tiles` finds the lists.
    """
    offsets, sides = (q_offsets, kv_offsets), (queries, keys)
    num_segments = kv_offsets.shape[0] - 1
    groups = num_query_groups("q_offsets", q_offsets.shape[0] - 1, "kv_offsets", num_segments)
    params = None if mask is None else mask_of_groups(mask, groups)
    if params is not None and params.has_targets and num_targets is None:
        raise ValueError("num_targets must be given, as the mask has targets, got None")
    layout = _Layout.of(offsets, sides, Lists(*lists), params is not None)
    ranked: list[Listed | None] = [None, None]  # lists that come from tile_list_kernel
    in_groups, counted, group_rows = [*ranked], [*ranked], [1, 1]
    for i, ((rows, heads, block), (other_rows, other_heads, other_block)) in enumerate(
        ((queries, keys), (keys, queries))
    ):
        if not lists[i]:
            continue
        blocks, key_tiles, found = (block, other_block), i == 1, None
        if groups == 1 and head_dim:
            looped = LoopedSide(other_rows, other_heads, head_dim)
            found = grouping(rows, heads, looped, num_segments, params, key_tiles)
        if found is not None:
            group_rows[i] = found.rows
            listed = Listed(*blocks, key_tiles, in_groups=True, alternates=found.alternates)
            ranked[i] = in_groups[i] = listed
        else:
            kinds = counted if params is not None and num_segments else ranked
            sides_in_groups = dict(other_groups=groups) if key_tiles else dict(groups=groups)
            kinds[i] = Listed(*blocks, key_tiles, **sides_in_groups)
    buffer = q_offsets.new_zeros((layout.size,), dtype=torch.int32)  # gaps too are defined
    heads = queries[1], keys[1]
    if any(ranked):
        _launch_tile_list(offsets, buffer, heads, layout.slots, ranked)
    if any(in_groups):
        grid = (num_segments * sum(map(bool, in_groups)),)
        constants = dict(zip(("QUERIES", "KEYS"), in_groups))
        grouped_list_kernel[grid](
            *offsets, buffer, num_segments, *heads, *layout.slots, *group_rows, **constants
        )
    if any(counted):
        _launch_masked_list(offsets, buffer, heads, layout, counted, params, num_targets)
    return buffer


def _launch_tile_list(
    offsets: Offsets,
    buffer: Tensor,
    heads: tuple[int, int],
    slots: tuple[int, int],
    listed: list[Listed | None],
) -> None:
    programs = 0
    for x, of_side in zip(offsets, listed):
        programs += max(1, cdiv(x.shape[0] - 1, SEGMENTS.value)) if of_side else 0
    queries, keys = listed
    tile_list_kernel[(programs,)](
        *offsets, buffer, offsets[1].shape[0] - 1, *heads, *slots, QUERIES=queries, KEYS=keys
    )


def _launch_masked_list(
    offsets: Offsets,
    buffer: Tensor,
    heads: tuple[int, int],
    layout: _Layout,
    listed: list[Listed | None],
    mask: MaskParams,
    num_targets: Tensor | None,
) -> None:
    num_targets = num_targets.contiguous() if num_targets is not None and mask.has_targets else None
    queries, keys = listed
    (slots, programs, _), num_segments = layout, offsets[1].shape[0] - 1
    chunks = [_num_chunks(x) for x in programs]
    constants = dict(QUERIES=queries, KEYS=keys, CHUNK=CHUNK)
    grid, grid_of_chunks = (
        sum(x for x, of_side in zip(sizes, listed) if of_side) for sizes in (programs, chunks)
    )
    tile_work_kernel[(grid,)](
        *offsets, num_targets, buffer, num_segments, programs[0], *slots,
        MASK=mask, **constants, num_warps=1,
    )  # fmt: skip
    masked_list_kernel[(grid_of_chunks,)](
        buffer, num_segments, *chunks, *heads, *slots, **constants, ROWS=8, num_warps=8
    )


def list_tiles(
    offsets: Offsets,
    queries: TiledSide,
    keys: TiledSide,
    lists: Lists,
    mask: Sequence[int] | None = None,
    num_targets: Tensor | None = None,
    head_dim: int = 0,
) -> list[tuple[Tensor, Tensor]]:
    """Make the lists of tiles by the operator `tile_lists`, with its arguments.

    Returns:
        For each list, queries first: tiles int32 `[capacity, 3]`, capacity as in
        `host.tile_capacity`; rows that do not count are 0. num_tiles int32 `[2]`, as in
        `TileSchedule`.
    """
    sides = list(queries), list(keys)
    mask = None if mask is None else list(mask)
    args = *offsets, *sides, list(lists), mask, num_targets, head_dim
    buffer = direct(tile_lists, args, offsets[:1])(*args)
    return _views(buffer, offsets, sides, lists)


def _views(
    buffer: Tensor, offsets: Offsets, sides: Sides, lists: Lists
) -> list[tuple[Tensor, Tensor]]:
    found, start = [], HEADER.value
    for i, (rows, heads, block) in enumerate(sides):
        if lists[i]:
            capacity = tile_capacity(rows, offsets[i].shape[0] - 1, heads, block)
            tiles = buffer.as_strided((capacity, 3), (3, 1), start)
            found.append((tiles, buffer.as_strided((2,), (1,), 4 * i)))
            start += 3 * ((capacity + 3) // 4 * 4)
    return found


def kernel_tiles(
    segments: Segments,
    config,
    total_rows: int,
    num_heads: int,
    params: AttentionParams,
    key_tiles: bool = False,
    looped: LoopedSide | None = None,
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """The tiles for a kernel, their number, and `grid_of` them. The tiles are the schedule's if its
    tile size is that of the launch configuration, else a new list. total_rows, num_heads: of the
    tiled side. key_tiles: the tiled side is the keys. looped: of Hopper's kernels."""
    tiles, num_tiles, block = segments.tiles
    if tiles is None or num_tiles is None or block != config.tile:
        if looped is None or params.batch_invariant:
            looped = LoopedSide(0, 0, 0)
        sides = (
            TiledSide(total_rows, num_heads, config.tile),
            TiledSide(looped.rows, looped.heads, config.block),
        )
        sides = reversed(sides) if key_tiles else sides
        offsets, lists = (segments.q_offsets, segments.kv_offsets), Lists(not key_tiles, key_tiles)
        [(tiles, num_tiles)] = list_tiles(
            offsets, *sides, lists, params.mask, params.num_targets, looped.head_dim
        )
    num_tiles = num_tiles[1:] if segments.long_only else num_tiles
    return tiles, num_tiles, grid_of(tiles, config)


def grid_of(tiles: Tensor, config) -> tuple[int, ...]:
    """As many programs as run on the GPU at a time, at most one for each tile; `()`, no launch,
    without tiles."""
    programs = min(device_properties(tiles.device).num_sms * config.ctas_per_sm, tiles.shape[0])
    return (programs,) if programs else ()


class ShortQueries(NamedTuple):
    """Two lists of tiles, those of long segments first, each longest first.

    Attributes:
        queries, keys: segments with the list of query tiles and with that of key tiles, of which
            kernels take the long segments.
        next_tile: int32 `[1]`, 0, a counter of the tiles that the short segments' kernel has begun.
    """

    queries: Segments
    keys: Segments
    next_tile: Tensor


def list_short_queries(
    segments: Segments,
    sizes: tuple[int, int],
    heads: tuple[int, int],
    rows: int,
    keys: int,
    block: int,
) -> ShortQueries:
    """List the tiles for a backward that leaves segments with 1 to `rows` query rows, which are
    short here, to a kernel of their own.

    Args:
        segments: with one query group, at least one segment.
        sizes, heads: rows and heads of the queries and of the keys.
        rows, keys: of a query tile and of a key tile.
        block: rows of the blocks in which work is counted.
    """
    offsets, lists = (segments.q_offsets, segments.kv_offsets), Lists(True, True)
    of_queries, of_keys = map(TiledSide, sizes, heads, (rows, keys))
    sides = of_queries, of_keys
    layout = _Layout.of(offsets, sides, lists, masked=False)
    buffer = segments.q_offsets.new_empty((layout.size,), dtype=torch.int32)
    listed: list[Listed | None] = [
        Listed(side.block, block, key_tiles, few_queries=rows)
        for side, key_tiles in zip(sides, (False, True))
    ]
    _launch_tile_list(offsets, buffer, heads, layout.slots, listed)
    found = (
        segments._replace(tiles=TileList(*tiles, side.block), long_only=True)
        for tiles, side in zip(_views(buffer, offsets, sides, lists), sides)
    )
    return ShortQueries(*found, buffer.as_strided((1,), (1,), 8))
