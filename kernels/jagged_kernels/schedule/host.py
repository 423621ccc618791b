"""The zigzag tile schedule of jagged attention, built on the host from segment lengths (torch only,
no triton).

A tile is a block of query rows of a segment and head. Its work is the number of key blocks that it
visits. Tiles are sorted by work, most first (stable: ties keep segment, head, block order), and
assigned to workers in waves of alternating direction: the worker with the longest tile of a wave
gets the shortest of the next (Algorithm 3 of the GDPA post). A tile's worker follows from its
position in the list, so only the list goes to the device: the kernels compute which tiles are
theirs, for the GPU's number of workers (`zigzag_position`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.pages import Pages
from ..attention.params import MaskParams, TileList
from ..common.device import cdiv
from ..common.one_thread import one_thread
from .cost import (
    Grouping,
    LoopedSide,
    grouping,
    is_short,
    key_tile_work,
    query_tile_work,
    sort_key,
    work_class,
)


class Segments(NamedTuple):
    """Offsets `[B + 1]` of queries and keys, and the tiles of one of the two sides. Several query
    groups have offsets `[n · B + 1]`: their segments b, B + b, 2B + b, ... read the keys of segment
    b. long_only: kernels leave out the tiles of short segments. pages: None where the keys of
    segment b are the rows from kv_offsets[b] on; otherwise they lie in pages, and there is one
    query group. q_shared: every segment takes all rows of q; q_offsets count output rows."""

    q_offsets: Tensor
    kv_offsets: Tensor
    tiles: TileList
    long_only: bool = False
    pages: Pages | None = None
    q_shared: bool = False

    def num_keys(self, k: Tensor) -> int:
        """Keys of all segments together."""
        return k.shape[0] if self.pages is None else self.pages.num_rows

    @property
    def query_groups(self) -> int:
        if self.q_offsets is self.kv_offsets:
            return 1
        return num_query_groups(
            "q_offsets", self.q_offsets.shape[0] - 1, "kv_offsets", self.kv_offsets.shape[0] - 1
        )

    @property
    def segments_per_group(self) -> int | None:
        """What kernels call `num_segments`: None with one query group."""
        return None if self.query_groups == 1 else self.kv_offsets.shape[0] - 1


@dataclasses.dataclass(frozen=True)
class TileSchedule:
    """Tiles of one attention call: those of long segments, then those of short ones
    (cost.is_short), each longest first. Or they are listed in groups of segments (cost.grouping);
    then all count as tiles of long segments.

    Attributes:
        tiles: int32 `[T, 3]`, rows (segment, head, block); block counts blocks of `block_m` rows
            from the segment's start.
        num_tiles: int32 `[2]`, how many rows of `tiles` count (a schedule built on the device has
            spare capacity), and how many of them are tiles of long segments.
        block_m, block_n: rows and columns of a block.
        num_heads: heads that the tiles enumerate.
        num_workers: workers of `worker` and `loads()`. Kernels use the number of workers that the
            GPU has.
        work: int32 `[T]`, key blocks of `block_n` columns that a tile visits, on the host wherever
            the schedule is; None in a schedule built on the device.
        backward: the dk, dv kernel's schedule, with the roles of q and kv exchanged (tiles of key
            rows); None: built when needed.
        ascending: whether the tiles of each segment and head are in ascending order, which Hopper's
            one-pass backward needs.
    """

    tiles: Tensor
    num_tiles: Tensor
    block_m: int
    block_n: int
    num_heads: int
    num_workers: int
    work: Tensor | None = None
    backward: TileSchedule | None = None
    ascending: bool = False

    @property
    def tile_list(self) -> TileList:
        """The tiles as the kernels' operators take them."""
        return TileList(self.tiles, self.num_tiles, self.block_m)

    @property
    def worker(self) -> Tensor:
        """int32 `[T]` on the host: the worker that each tile is assigned to, of `num_workers`.
        Computed at each call."""
        position = torch.arange(len(self.tiles), dtype=torch.int32, device="cpu")
        lane = position % self.num_workers
        return torch.where(position // self.num_workers % 2 == 0, lane, self.num_workers - 1 - lane)

    def loads(self) -> Tensor:
        """int64 `[num_workers]` on the host: total work of each worker, in key blocks. ValueError:
        a schedule built on the device."""
        if self.work is None:
            raise ValueError(
                "work of a schedule built on the device is not known; build it from host lengths"
                " with zigzag_schedule"
            )
        return torch.zeros(self.num_workers, dtype=torch.int64, device="cpu").index_add_(
            0, self.worker, self.work.long()
        )

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> TileSchedule:
        """The schedule with its tiles on `device`; self where they are there already. non_blocking
        is that of `Tensor.to`."""
        if self.tiles.device == torch.device(device):
            return self
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TileSchedule:
        """The schedule in page-locked memory, from which `to(device, non_blocking=True)` does not
        stall. DataLoader calls it."""
        return self._map(Tensor.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """`Tensor.record_stream(stream)` of the tensors on a device."""
        for x in (self.tiles, self.num_tiles):
            if x.device.type != "cpu":
                x.record_stream(stream)
        if self.backward is not None:
            self.backward.record_stream(stream)

    def _map(self, move: Callable[[Tensor], Tensor]) -> TileSchedule:
        backward = None if self.backward is None else self.backward._map(move)
        return dataclasses.replace(
            self, tiles=move(self.tiles), num_tiles=move(self.num_tiles), backward=backward
        )


@one_thread()
def zigzag_schedule(
    q_lengths: Tensor | Sequence[int],
    kv_lengths: Tensor | Sequence[int],
    *,
    num_heads: int,
    block_m: int,
    block_n: int,
    num_workers: int,
    mask: Any = None,
    key_tiles: bool = False,
    head_dim: int = 0,
    num_other_heads: int | None = None,
) -> TileSchedule:
    """Build the zigzag schedule on the host.

    Args:
        q_lengths, kv_lengths: `[B]` integers per segment, host tensors or sequences. A segment with
            queries and no keys keeps its
            tiles, with work 0: its output rows have to be written too. One without queries has
                none. n query groups have `[n · B]` lengths:
            segments b, B + b, ... of the queries then read the keys of segment b.
        num_heads: heads per segment; each has ceil(q_length / block_m) tiles.
        block_m: query rows of a tile.
        block_n: columns of a key block.
        num_workers: thread blocks that the tiles are assigned to.
        mask: an `AttentionMask`, whose hidden blocks are no work. Its num_targets are used if they
            are on the host.
        key_tiles: the roles are exchanged, as in the backward's dk, dv: q_lengths are those of the
            keys, and tiles are of key rows.
        head_dim: of the queries, for Hopper's kernels, whose tiles may be listed in groups of
            segments. 0: all tiles are sorted by work.
        num_other_heads: heads of the side that a tile loops over, with a head_dim. None: num_heads.

    Returns:
        TileSchedule with host tensors.

    Raises:
        TypeError: lengths or sizes that are not integers.
        ValueError: lengths whose counts do not fit together, negative or on a device, sizes below
            1, several query groups under a mask.
    """
    q_lengths, kv_lengths = (
        _host_lengths("q_lengths", q_lengths),
        _host_lengths("kv_lengths", kv_lengths),
    )
    num_other_heads = num_heads if num_other_heads is None else num_other_heads
    sizes = dict(
        num_heads=num_heads,
        block_m=block_m,
        block_n=block_n,
        num_workers=num_workers,
        num_other_heads=num_other_heads,
    )
    for name, value in (*sizes.items(), ("head_dim", head_dim)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        at_least = 1 if name in sizes else 0
        if value < at_least:
            raise ValueError(f"{name} must be at least {at_least}, got {value}")
    if not isinstance(key_tiles, bool):
        raise TypeError(f"key_tiles must be a bool, got {type(key_tiles).__name__}")
    if mask is not None and not hasattr(mask, "params"):
        raise TypeError(f"mask must be an AttentionMask, got {type(mask).__name__}")
    sides = ("q_lengths", len(q_lengths)), ("kv_lengths", len(kv_lengths))
    queries, keys = reversed(sides) if key_tiles else sides
    groups = num_query_groups(*queries, *keys, mask)
    num_targets = None if mask is None else mask.num_targets
    if num_targets is not None and len(num_targets) != len(q_lengths):
        raise ValueError(
            f"mask.num_targets must have one entry per segment, {len(q_lengths)}, got"
            f" {len(num_targets)}"
        )
    params = None if mask is None else MaskParams(*mask.params)
    in_groups = None
    if groups == 1 and head_dim:
        looped = LoopedSide(int(kv_lengths.sum()), num_other_heads, head_dim)
        in_groups = grouping(
            int(q_lengths.sum()), num_heads, looped, len(q_lengths), params, key_tiles
        )
    num_targets = (
        num_targets if num_targets is not None and num_targets.device.type == "cpu" else None
    )
    tile_sizes = num_heads, block_m, block_n
    # sorted by work: the first keys have most of it under the causal mask
    ascending = params is None or key_tiles and params.is_causal
    if in_groups is not None:
        ascending = not in_groups.alternates
        tiles, work = _tiles_in_groups(
            q_lengths, kv_lengths, *tile_sizes, params, num_targets, key_tiles, in_groups
        )
        num_long = len(tiles)
    elif mask is None or not len(q_lengths):
        tiles, work, num_long = _tiles(
            q_lengths, kv_lengths, *((1, groups) if key_tiles else (groups, 1)), *tile_sizes
        )
    else:
        tiles, work, num_long = _masked_tiles(
            q_lengths, kv_lengths, *tile_sizes, params, num_targets, key_tiles
        )
    return TileSchedule(
        tiles=tiles,
        num_tiles=torch.tensor([len(tiles), num_long], dtype=torch.int32, device="cpu"),
        block_m=block_m,
        block_n=block_n,
        num_heads=num_heads,
        num_workers=num_workers,
        work=work,
        ascending=ascending,
    )


def _tiles(
    q_lengths: Tensor,
    kv_lengths: Tensor,
    groups: int,
    other_groups: int,
    num_heads: int,
    block_m: int,
    block_n: int,
) -> tuple[Tensor, Tensor, int]:
    """Sorted tiles, the work of each, and the number of those of long segments. All tiles of a
    segment cost the same, so sorting segments and expanding them equals a stable sort of the
    tiles."""
    segment_work = (
        cdiv(kv_lengths, block_n).view(other_groups, -1).sum(0, dtype=torch.int32).repeat(groups)
    )
    short = torch.zeros_like(q_lengths, dtype=torch.bool)
    if groups == other_groups == 1:
        short = is_short(q_lengths, kv_lengths)
    order = torch.argsort(sort_key(segment_work, short), descending=True, stable=True)
    segment_work = segment_work[order]
    blocks = cdiv(q_lengths, block_m)[order]
    tiles_per_segment = blocks * num_heads
    num_long = int(tiles_per_segment[~short[order]].sum())
    rank = torch.repeat_interleave(
        torch.arange(len(order), dtype=torch.int32, device="cpu"), tiles_per_segment
    )
    first = (tiles_per_segment.cumsum(0) - tiles_per_segment).to(torch.int32)
    within = torch.arange(len(rank), dtype=torch.int32, device="cpu") - first[rank]
    tiles = torch.empty(len(rank), 3, dtype=torch.int32, device="cpu")
    tiles[:, 0] = order.to(torch.int32)[rank]
    blocks = blocks[rank]
    torch.div(within, blocks, rounding_mode="floor", out=tiles[:, 1])
    torch.remainder(within, blocks, out=tiles[:, 2])
    return tiles, segment_work[rank], num_long


def num_query_groups(
    queries: str, num_queries: int, keys: str, num_keys: int, mask: object = None
) -> int:
    """The number of query groups: num_queries / num_keys, 1 if both are 0. queries, keys: names of
    the arguments in errors.

    ValueError if it is not an integer, or if there are several groups and a mask.
    """
    if num_queries == num_keys:
        return 1
    if num_queries == 0 or num_keys == 0 or num_queries % num_keys:
        raise ValueError(
            f"{queries} must describe as many segments as {keys}, or a multiple of them, got"
            f" {num_queries} and {num_keys}"
        )
    if mask is not None:
        raise ValueError(
            f"mask must be None with several query groups, got {num_queries} segments of {queries},"
            f" {num_keys} of {keys}"
        )
    return num_queries // num_keys


def _masked_tiles(
    lengths: Tensor,
    other_lengths: Tensor,
    num_heads: int,
    block_m: int,
    block_n: int,
    mask: MaskParams,
    num_targets: Tensor | None,
    key_tiles: bool,
) -> tuple[Tensor, Tensor, int]:
    """Sorted tiles under a mask, the work of each, and the number of those of long segments. The
    heads of a block, which cost the same, follow one another.

    lengths, other_lengths: of the tiled side and of the side that a tile loops over. num_targets:
    `[B]` or None.
    """
    segment, block = _blocks_of_segments(cdiv(lengths, block_m))
    work = _masked_work(
        segment, block, lengths, other_lengths, block_m, block_n, mask, num_targets, key_tiles
    )
    short = is_short(lengths[segment], other_lengths[segment])
    order = torch.argsort(sort_key(work_class(work), short), descending=True, stable=True)
    return (
        _with_heads(segment[order], block[order], num_heads),
        work[order].repeat_interleave(num_heads),
        int((~short).sum()) * num_heads,
    )


def _masked_work(
    segment: Tensor,
    block: Tensor,
    lengths: Tensor,
    other_lengths: Tensor,
    block_m: int,
    block_n: int,
    mask: MaskParams,
    num_targets: Tensor | None,
    key_tiles: bool,
) -> Tensor:
    """The work of tiles under a mask."""
    targets = 0 if num_targets is None else num_targets.to(torch.int32)[segment]
    sides = lengths[segment], other_lengths[segment]
    if key_tiles:
        return key_tile_work(block, *reversed(sides), targets, mask, block_m, block_n)
    return query_tile_work(block, *sides, targets, mask, block_m, block_n)


def _tiles_in_groups(
    lengths: Tensor,
    other_lengths: Tensor,
    num_heads: int,
    block_m: int,
    block_n: int,
    mask: MaskParams | None,
    num_targets: Tensor | None,
    key_tiles: bool,
    grouping: Grouping,
) -> tuple[Tensor, Tensor]:
    """Tiles in groups of segments, longest segments first, and the work of each. The heads of a
    block follow one another.

    The segments, longest first, lie on a line of the rows that the tiles loop over. Those with
    their middles in the same `grouping.rows` rows are a group. A group lists the blocks of one
    number of all its segments, then those of the next number. It starts with the blocks that have
    most work under a causal mask: the first ones of keys, the last ones of queries. If groups
    alternate, every other one starts at the other end.
    """
    blocks = cdiv(lengths, block_m)
    order = torch.argsort(blocks, descending=True, stable=True)
    blocks, looped = blocks[order].long(), other_lengths[order].long()
    middles = looped.cumsum(0) - looped + torch.div(looped, 2, rounding_mode="floor")
    rank, block = _blocks_of_segments(blocks)
    group = torch.div(middles, grouping.rows, rounding_mode="floor")[rank]
    heaviest_first = (group % 2 == 0) | (not grouping.alternates)
    number = torch.where(heaviest_first == key_tiles, block, blocks.max() - block)
    key = (group * (blocks.max() + 1) + number) * len(blocks) + rank
    sorted_tiles = torch.argsort(key)
    segment, block = order.to(torch.int32)[rank[sorted_tiles]], block[sorted_tiles]
    if mask is None:
        work = cdiv(other_lengths[segment], block_n)
    else:
        work = _masked_work(
            segment, block, lengths, other_lengths, block_m, block_n, mask, num_targets, key_tiles
        )
    return _with_heads(segment, block, num_heads), work.repeat_interleave(num_heads)


def _blocks_of_segments(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Segment and block of each block, given the number of blocks of each segment."""
    segment = torch.repeat_interleave(
        torch.arange(len(blocks), dtype=torch.int32, device="cpu"), blocks
    )
    first = (blocks.cumsum(0) - blocks).to(torch.int32)
    return segment, torch.arange(len(segment), dtype=torch.int32, device="cpu") - first[segment]


def _with_heads(segment: Tensor, block: Tensor, num_heads: int) -> Tensor:
    """Tiles: each block, for one head after another."""
    tiles = torch.empty(len(segment), num_heads, 3, dtype=torch.int32, device="cpu")
    tiles[:, :, 0] = segment[:, None]
    tiles[:, :, 1] = torch.arange(num_heads, dtype=torch.int32, device="cpu")
    tiles[:, :, 2] = block[:, None]
    return tiles.flatten(0, 1)


def tile_capacity(total_q: int, num_segments: int, num_heads: int, block_m: int) -> int:
    """Upper bound on the number of tiles of `num_segments` segments with `total_q` rows in total; 0
    without segments."""
    return num_heads * (cdiv(total_q, block_m) + num_segments) if num_segments else 0


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _host_lengths(name: str, lengths: Any) -> Tensor:
    try:
        lengths = lengths if isinstance(lengths, Tensor) else torch.as_tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must hold integers, got {lengths!r}") from error
    if lengths.numel() and lengths.dtype not in _INTEGERS:
        raise TypeError(f"{name} must hold integers, got {lengths.dtype}")
    if lengths.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got {lengths.layout}")
    if lengths.dim() != 1:
        raise ValueError(f"{name} must have shape [B], got {list(lengths.shape)}")
    if lengths.device.type != "cpu":
        raise ValueError(f"{name} must be on the host, got device {lengths.device}")
    if lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"{name} must not be negative, got {int(lengths.min())}")
    if lengths.numel() and int(lengths.max()) >= 2**31:
        raise ValueError(f"{name} must be below 2^31, got {int(lengths.max())}")
    return lengths.to(torch.int32)
