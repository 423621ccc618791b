"""The zigzag schedule's tile list built on the device, where only the device knows the offsets: one launch, no sync."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.params import AttentionParams, MaskParams
from ..common.loads import segment_lengths
from ..common.ops import operator
from ..common.ptxas import safe_ptxas
from .host import Segments, masked_tiles, num_query_groups, tile_capacity


@triton.jit
def _segment_tiles(
    offsets_ptr, other_offsets_ptr, segments, num_segments, num_heads,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, OTHER_GROUPS: tl.constexpr,
):  # fmt: skip
    """Blocks per head, tiles and work of each tile, for a vector of segments; 0 past the last one."""
    real = segments < num_segments
    rows, others = segment_lengths(offsets_ptr, segments, real), segments
    if GROUPS > 1:
        others = segments % (num_segments // GROUPS)
    columns = segment_lengths(other_offsets_ptr, others, real)
    blocks = tl.cdiv(rows.to(tl.int32), BLOCK_M)
    tiles, work = blocks * num_heads, tl.cdiv(columns.to(tl.int32), BLOCK_N)
    for other_group in tl.static_range(1, OTHER_GROUPS):
        work += tl.cdiv(segment_lengths(other_offsets_ptr, others + other_group * num_segments, real).to(tl.int32), BLOCK_N)
    return blocks, tiles, work


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "num_heads"])
def _tile_list_kernel(
    offsets_ptr, other_offsets_ptr, tiles_ptr, num_tiles_ptr, num_segments, num_heads,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEGMENTS: tl.constexpr, CHUNK: tl.constexpr,
    GROUPS: tl.constexpr, OTHER_GROUPS: tl.constexpr,
):  # fmt: skip
    """Each program writes the tiles of SEGMENTS segments. A segment's first position is the number of tiles of the segments that a stable
    sort by work, longest first, puts before it. Comparing with all segments is cheaper here than sorting."""
    segments = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    blocks, tiles, work = _segment_tiles(
        offsets_ptr, other_offsets_ptr, segments, num_segments, num_heads, BLOCK_M, BLOCK_N, GROUPS, OTHER_GROUPS
    )  # fmt: skip
    first = tl.zeros([SEGMENTS], tl.int32)
    total = 0
    for start in range(0, num_segments, CHUNK):
        others = start + tl.arange(0, CHUNK)
        _, other_tiles, other_work = _segment_tiles(
            offsets_ptr, other_offsets_ptr, others, num_segments, num_heads, BLOCK_M, BLOCK_N, GROUPS, OTHER_GROUPS
        )  # fmt: skip
        longer = other_work[None, :] > work[:, None]
        earlier = (other_work[None, :] == work[:, None]) & (others[None, :] < segments[:, None])
        first += tl.sum(tl.where(longer | earlier, other_tiles[None, :], 0), 1)
        total += tl.sum(other_tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(num_tiles_ptr, total)

    blocks = tl.maximum(blocks, 1)[:, None]
    for start in range(0, tl.max(tiles, 0), SEGMENTS):
        within = start + tl.arange(0, SEGMENTS)[None, :]
        row_ptr = tiles_ptr + (first[:, None] + within).to(tl.int64) * 3
        mask = within < tiles[:, None]
        tl.store(row_ptr, segments[:, None], mask=mask)
        tl.store(row_ptr + 1, within // blocks, mask=mask)
        tl.store(row_ptr + 2, within % blocks, mask=mask)


def _empty_list(offsets, other_offsets, total_rows, num_heads, block_m, block_n, *mask):
    capacity = tile_capacity(total_rows, offsets.shape[0] - 1, num_heads, block_m)
    return offsets.new_zeros((capacity, 3), dtype=torch.int32), offsets.new_zeros((1,), dtype=torch.int32)


@operator("tile_list", fake=_empty_list)
def tile_list(
    offsets: Tensor, other_offsets: Tensor, total_rows: int, num_heads: int, block_m: int, block_n: int,
    mask: list[int] | None = None, num_targets: Tensor | None = None, key_tiles: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The tiles of `host.zigzag_schedule`, from offsets on the device.

    Args:
        offsets: `[B + 1]` of the tiled side, `total_rows` rows together. other_offsets: `[B + 1]` of the side a tile loops over. Queries
            may have several groups, as in `zigzag_schedule`.
        num_heads, block_m, block_n, key_tiles: as in `zigzag_schedule`.
        mask: `MaskParams`, with num_targets `[B]` if it has targets. The list is then built by torch operators, many launches.

    Returns:
        tiles int32 `[capacity, 3]`, capacity as in `host.tile_capacity`, and num_tiles int32 `[1]`: rows past it are 0.
    """
    tiles, num_tiles = _empty_list(offsets, other_offsets, total_rows, num_heads, block_m, block_n)
    num_segments = offsets.shape[0] - 1
    sides = ("offsets", num_segments), ("other_offsets", other_offsets.shape[0] - 1)
    queries, keys = reversed(sides) if key_tiles else sides
    groups = num_query_groups(*queries, *keys, mask)
    if mask is not None and len(tiles):
        lengths, other_lengths = offsets.diff().to(torch.int32), other_offsets.diff().to(torch.int32)
        tiles, _, count = masked_tiles(
            lengths, other_lengths, len(tiles) // num_heads, num_heads, block_m, block_n, MaskParams(*mask), num_targets, key_tiles
        )
        return tiles, count
    segments = 32
    _tile_list_kernel[(max(1, triton.cdiv(num_segments, segments)),)](
        offsets, other_offsets, tiles, num_tiles, num_segments, num_heads,
        BLOCK_M=block_m, BLOCK_N=block_n, SEGMENTS=segments, CHUNK=256,
        GROUPS=1 if key_tiles else groups, OTHER_GROUPS=groups if key_tiles else 1,
    )  # fmt: skip
    return tiles, num_tiles


def kernel_tiles(
    segments: Segments, config, total_rows: int, num_heads: int, params: AttentionParams, key_tiles: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The tiles for a kernel and their number: the schedule's if its tile size is that of the launch configuration, else a new list.

    total_rows, num_heads: of the tiled side. key_tiles: the tiled side is the keys.
    """
    tiles, num_tiles, block = segments.tiles
    if tiles is not None and block == config.tile:
        return tiles, num_tiles
    offsets = segments.q_offsets, segments.kv_offsets
    offsets = reversed(offsets) if key_tiles else offsets
    return tile_list(*offsets, total_rows, num_heads, config.tile, config.block, params.mask, params.num_targets, key_tiles)
