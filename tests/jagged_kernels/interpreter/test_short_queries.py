"""Lists of tiles for a backward that leaves segments with few query rows to a kernel of their
own."""

import pytest
import torch
from jagged_kernels.attention.params import Segments
from jagged_kernels.attention.tile_lists import list_short_queries
from jagged_kernels.schedule.host import zigzag_schedule


def expected_tiles(lengths, other_lengths, queries, rows, heads, block, short):
    """The tiles of long segments, then of short ones, each in the order of the zigzag schedule."""
    tiles = zigzag_schedule(
        lengths, other_lengths, num_heads=heads, block_m=rows, block_n=block, head_dim=0
    ).tiles
    work = (other_lengths[tiles[:, 0].long()] + block - 1) // block
    tiles = tiles[torch.argsort(work * 10_000 - tiles[:, 0], descending=True, stable=True)]
    is_short = (queries > 0) & (queries <= short)
    of_short = is_short[tiles[:, 0].long()]
    return tiles[~of_short], tiles[of_short]


@pytest.mark.parametrize("rows, keys", [(64, 64), (192, 128)])
@pytest.mark.parametrize("num_segments", [1, 70])
def test_lists(offsets, num_segments, rows, keys):
    random = torch.Generator().manual_seed(num_segments + rows)
    q_lengths, kv_lengths = (
        torch.randint(0, longest, (num_segments,), generator=random) for longest in (300, 500)
    )
    q_lengths[::7], kv_lengths[3::9], q_lengths[5::10] = 0, 0, rows
    segments = Segments(offsets(q_lengths.tolist()), offsets(kv_lengths.tolist()))
    lists = list_short_queries(
        segments, (int(q_lengths.sum()), int(kv_lengths.sum())), (4, 2), rows, keys, 64
    )
    assert lists.next_tile.tolist() == [0]
    for actual, sides, heads, tile in (
        (lists.queries, (q_lengths, kv_lengths), 4, rows),
        (lists.keys, (kv_lengths, q_lengths), 2, keys),
    ):
        assert actual.long_only and actual.tiles.block == tile
        long, short = expected_tiles(*sides, q_lengths, tile, heads, 64, rows)
        tiles, num_tiles, _ = actual.tiles
        assert num_tiles.tolist() == [len(long) + len(short), len(long)]
        assert tiles[: len(long) + len(short)].tolist() == torch.cat([long, short]).tolist()
        assert not tiles[len(long) + len(short) :].any()
