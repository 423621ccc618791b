"""The zigzag tile schedule of jagged attention, built on the host from segment lengths (torch only,
no triton).

A tile is a block of query rows of a segment and head. Its work is the number of key blocks that it
visits. Tiles are sorted by work, most first (stable: ties keep segment, head, block order). Thread
blocks take them in waves of alternating direction: the one with the longest tile of a wave gets the
shortest of the next (Algorithm 3 of the GDPA post). Which tiles are a thread block's follows from
their positions in the list, so the kernels compute it (`zigzag_position`), and a schedule is the
list alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.device import cdiv
from ..common.one_thread import one_thread
from .cost import (
    Grouping,
    LoopedSide,
    MaskParams,
    grouping,
    is_short,
    sort_key,
    tile_work,
    work_class,
    work_of_segments,
)


class TileList(NamedTuple):
    """A schedule's tiles for kernels; None: not listed yet. block: a tile's rows; None: any."""

    tiles: Tensor | None = None
    num_tiles: Tensor | None = None
    block: int | None = None


NOT_LISTED = TileList()


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
        backward: the dk, dv kernel's schedule, with the roles of q and kv exchanged (tiles of key
            rows); None: built when needed.
        num_blocks: how many blocks of 64 by 64 scores the segments have, hidden ones too; None: the
            host does not know.
        ascending: whether the tiles of each segment and head are in ascending order, which Hopper's
            one-pass backward needs.
    """

    tiles: Tensor
    num_tiles: Tensor
    block_m: int
    block_n: int
    num_heads: int
    backward: TileSchedule | None = None
    ascending: bool = False
    num_blocks: int | None = None

    @property
    def tile_list(self) -> TileList:
        """The tiles as the kernels' operators take them."""
        return TileList(self.tiles, self.num_tiles, self.block_m)

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
    mask: Any = None,
    key_tiles: bool = False,
    head_dim: int = 0,
    num_other_heads: int | None = None,
) -> TileSchedule:
    """Build the zigzag schedule on the host.

    Args:
        q_lengths, kv_lengths: `[B]` integers per segment, host tensors or sequences. A segment with
            queries and no keys keeps its tiles, with work 0: its output rows have to be written
            too. One without queries has none. n query groups have `[n · B]` lengths: segments b,
            B + b, ... of the queries then read the keys of segment b.
        num_heads: heads per segment; each has ceil(q_length / block_m) tiles.
        block_m: query rows of a tile.
        block_n: columns of a key block.
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
            1, several query groups under a mask with targets.
    """
    q_lengths = _host_lengths("q_lengths", q_lengths)
    kv_lengths = _host_lengths("kv_lengths", kv_lengths)
    num_other_heads = num_heads if num_other_heads is None else num_other_heads
    sizes = dict(
        num_heads=num_heads, block_m=block_m, block_n=block_n, num_other_heads=num_other_heads
    )
    _check_options(sizes, head_dim, key_tiles, mask)
    sides = ("q_lengths", len(q_lengths)), ("kv_lengths", len(kv_lengths))
    queries, keys = reversed(sides) if key_tiles else sides
    groups = num_query_groups(*queries, *keys)
    num_targets = None if mask is None else mask.num_targets
    if num_targets is not None and len(num_targets) != len(q_lengths):
        raise ValueError(
            f"mask.num_targets must have one entry per segment, {len(q_lengths)}, got"
            f" {len(num_targets)}"
        )
    if num_targets is not None and num_targets.device.type != "cpu":
        num_targets = None
    params = None if mask is None else mask_of_groups(mask.params, groups)
    side = _Side(q_lengths, kv_lengths, (block_m, block_n), params, num_targets, key_tiles)
    in_groups = None
    if groups == 1 and head_dim:
        looped = LoopedSide(int(kv_lengths.sum()), num_other_heads, head_dim)
        in_groups = grouping(
            int(q_lengths.sum()), num_heads, looped, len(q_lengths), params, key_tiles
        )
    # sorted by work: the first keys have most of it under the causal mask
    ascending = params is None or (key_tiles and params.is_causal)
    if in_groups is not None:
        ascending = not in_groups.alternates
        tiles = _tiles_in_groups(side, num_heads, in_groups)
        num_long = len(tiles)
    elif mask is None or not len(q_lengths):
        tiles, num_long = _tiles(side, num_heads, groups)
    else:
        tiles, num_long = _masked_tiles(side, num_heads)
    num_tiles = torch.tensor([len(tiles), num_long], dtype=torch.int32, device="cpu")
    return TileSchedule(
        tiles, num_tiles, block_m, block_n, num_heads, ascending=ascending,
        num_blocks=count_blocks(q_lengths, kv_lengths),
    )  # fmt: skip


def count_blocks(q_lengths: Tensor, kv_lengths: Tensor) -> int:
    """Blocks of 64 by 64 scores of all segments, of the first query group."""
    num_segments = min(len(q_lengths), len(kv_lengths))
    of_queries, of_keys = (cdiv(x[:num_segments].long(), 64) for x in (q_lengths, kv_lengths))
    return int((of_queries * of_keys).sum())


def _check_options(sizes: dict[str, int], head_dim: int, key_tiles: bool, mask: Any) -> None:
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


class _Side(NamedTuple):
    """The side whose tiles are listed. lengths, other_lengths: of its segments, and of those that a
    tile loops over. blocks: rows of a tile and of a block that it visits. key_tiles: whether it is
    the keys."""

    lengths: Tensor
    other_lengths: Tensor
    blocks: tuple[int, int]
    mask: MaskParams | None
    num_targets: Tensor | None
    key_tiles: bool

    @property
    def blocks_of_segments(self) -> Tensor:
        return cdiv(self.lengths, self.blocks[0])


def _tiles(side: _Side, num_heads: int, query_groups: int) -> tuple[Tensor, int]:
    """Sorted tiles, and the number of those of long segments. All tiles of a segment cost the same,
    so sorting segments and expanding them equals a stable sort of the tiles."""
    lengths = side.lengths
    work = work_of_segments(side.other_lengths, len(lengths), side.blocks[1])
    short = torch.zeros_like(lengths, dtype=torch.bool)
    if query_groups == 1:
        short = is_short(lengths, side.other_lengths)
    order = torch.argsort(sort_key(work, short), descending=True, stable=True)
    blocks = side.blocks_of_segments[order]
    tiles_per_segment = blocks * num_heads
    num_long = int(tiles_per_segment[~short[order]].sum())
    rank, within = _blocks_of_segments(tiles_per_segment)
    tiles = torch.empty(len(rank), 3, dtype=torch.int32, device="cpu")
    tiles[:, 0] = order.to(torch.int32)[rank]
    blocks = blocks[rank]
    torch.div(within, blocks, rounding_mode="floor", out=tiles[:, 1])
    torch.remainder(within, blocks, out=tiles[:, 2])
    return tiles, num_long


def num_query_groups(queries: str, num_queries: int, keys: str, num_keys: int) -> int:
    """The number of query groups: num_queries / num_keys, 1 if both are 0. queries, keys: names of
    the arguments in errors. ValueError if it is not an integer."""
    if num_queries == num_keys:
        return 1
    # Of 2 s + 2 and s + 1, a trace knows the quotient. It would guard on the remainder.
    if num_queries == 0 or num_keys == 0 or num_queries // num_keys * num_keys != num_queries:
        raise ValueError(
            f"{queries} must describe as many segments as {keys}, or a multiple of them, got"
            f" {num_queries} and {num_keys}"
        )
    return num_queries // num_keys


def mask_of_groups(mask: Sequence[int], groups: int) -> MaskParams:
    """The mask of the first query group. ValueError if it has targets and there are several."""
    params = MaskParams(*mask)
    if groups > 1 and params.has_targets:
        raise ValueError(
            f"mask.num_targets must be None with several query groups, got {groups} groups"
        )
    return params._replace(grouped=int(groups > 1))


def _masked_tiles(side: _Side, num_heads: int) -> tuple[Tensor, int]:
    """Sorted tiles under a mask, and the number of those of long segments. The heads of a block,
    which cost the same, follow one another."""
    lengths, other_lengths, *_ = side
    segment, block = _blocks_of_segments(side.blocks_of_segments)
    work = tile_work((segment, block), *side)
    short = torch.zeros_like(work, dtype=torch.bool)
    if not side.mask.grouped:
        short = is_short(lengths[segment], other_lengths[segment])
    order = torch.argsort(sort_key(work_class(work), short), descending=True, stable=True)
    return (_with_heads(segment[order], block[order], num_heads), int((~short).sum()) * num_heads)


def _tiles_in_groups(side: _Side, num_heads: int, grouping: Grouping) -> Tensor:
    """Tiles in groups of segments, longest segments first. The heads of a block follow one another.

    The segments, longest first, lie on a line of the rows that the tiles loop over. Those with
    their middles in the same `grouping.rows` rows are a group. A group lists the blocks of one
    number of all its segments, then those of the next number. It starts with the blocks that have
    most work under a causal mask: the first ones of keys, the last ones of queries. If groups
    alternate, every other one starts at the other end.
    """
    blocks = side.blocks_of_segments
    order = torch.argsort(blocks, descending=True, stable=True)
    blocks, looped = blocks[order].long(), side.other_lengths[order].long()
    middles = looped.cumsum(0) - looped + torch.div(looped, 2, rounding_mode="floor")
    rank, block = _blocks_of_segments(blocks)
    group = torch.div(middles, grouping.rows, rounding_mode="floor")[rank]
    heaviest_first = (group % 2 == 0) | (not grouping.alternates)
    number = torch.where(heaviest_first == side.key_tiles, block, blocks.max() - block)
    key = (group * (blocks.max() + 1) + number) * len(blocks) + rank
    sorted_tiles = torch.argsort(key)
    return _with_heads(order.to(torch.int32)[rank[sorted_tiles]], block[sorted_tiles], num_heads)


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
