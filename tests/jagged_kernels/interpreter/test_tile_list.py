"""The device-built tile list in Triton's interpreter."""

import pytest
import torch
from marks import slow_after

import jagged_modules as jm

tile_lists = pytest.importorskip("jagged_kernels.attention.tile_lists")

import triton
import triton.language as tl
from jagged_kernels.common.loads import zigzag_position, zigzag_waves

SIZES = dict(num_heads=3, block_m=16, block_n=8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_segments, longest", [(0, 0), (1, 0), (7, 100), (40, 20), (300, 9)])
def test_tile_list_is_the_hosts(check_tile_list, num_segments, longest, dtype):
    check_tile_list(num_segments, longest, dtype, "cpu", SIZES)


GROUPS = [(2, 1), (1, 2), (3, 1), (1, 3)]


@pytest.mark.parametrize("masked", [False, True])
@slow_after(
    13,
    "num_segments, longest, groups",
    [(*sizes, x) for sizes in ((1, 0), (7, 100), (40, 20), (300, 9)) for x in GROUPS],
    ids=str,
)
def test_tile_list_of_several_groups_is_the_hosts(
    check_tile_list, num_segments, longest, groups, masked
):
    options = dict(groups=groups, key_tiles=groups[1] > 1)
    check_tile_list(num_segments, longest, torch.int64, "cpu", SIZES, masked, **options)


@pytest.mark.parametrize("key_tiles", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("num_segments, longest", [(0, 0), (1, 0), (1, 90), (20, 100)])
def test_masked_tile_list_is_the_hosts(check_tile_list, num_segments, longest, key_tiles):
    for masked in (True, dict(global_prefix=20, recent_history=30)):
        check_tile_list(
            num_segments, longest, torch.int64, "cpu", SIZES, masked=masked, key_tiles=key_tiles
        )


@slow_after(8, "seed", range(40))
def test_random_masked_tiles_are_the_hosts(check_random_tiles, seed):
    check_random_tiles(seed, 200, "cpu")


@slow_after(6, "seed", range(40))
def test_random_tiles_in_groups_of_segments_are_the_hosts(check_grouped_tiles, seed):
    check_grouped_tiles(seed, 150, "cpu")


@pytest.mark.parametrize("key_tiles", [False, True], ids=["queries", "keys"])
def test_masked_tiles_of_much_work_are_the_hosts(check_tiles, key_tiles):
    """Tiles that visit more blocks than have a class of their own."""
    sizes = dict(num_heads=2, block_m=64, block_n=1)
    check_tiles(
        [1500, 10, 700], [1500, 10, 700], "cpu", sizes, jm.AttentionMask(causal=True), key_tiles
    )


def test_masked_tiles_of_many_chunks_are_the_hosts(check_tiles, monkeypatch):
    monkeypatch.setattr(tile_lists, "CHUNK", 32)
    lengths = torch.randint(0, 30, (150,)).tolist()
    check_tiles(lengths, lengths, "cpu", SIZES, jm.AttentionMask(causal=True))


@pytest.mark.parametrize("first, lengths", [(37, [50, 0, 21]), (15, [1, 2])])
def test_masked_tiles_of_a_part_of_the_segments(offsets, first, lengths):
    """Offsets that do not start at 0. With the second ones, the last tile has the largest virtual
    index that there can be."""
    mask, sizes = jm.AttentionMask(causal=True).params, (sum(lengths), 2)
    of_all, of_part = offsets([first, *lengths])[1:], offsets(lengths)
    of_all, of_part = (
        tile_lists.list_tiles(
            (x, x),
            tile_lists.TiledSide(*sizes, 16),
            tile_lists.TiledSide(*sizes, 8),
            tile_lists.Lists(True, True),
            mask,
        )
        for x in (of_all, of_part)
    )
    for x, y in zip(of_all, of_part, strict=True):
        assert all(torch.equal(*pair) for pair in zip(x, y))


def test_missing_targets_are_an_error(offsets):
    mask, side = list(jm.AttentionMask(num_targets=torch.tensor([1])).params), [5, 2, 16]
    with pytest.raises(ValueError, match="num_targets must be given, as the mask has targets"):
        tile_lists.tile_lists(offsets([5]), offsets([5]), side, side, [True, False], mask)


@triton.jit
def _workers_kernel(workers_ptr, num_tiles, num_workers):
    worker = tl.program_id(0)
    for wave in range(0, zigzag_waves(num_tiles, worker, num_workers)):
        tl.store(workers_ptr + zigzag_position(wave, worker, num_workers), worker)


@pytest.mark.parametrize("num_tiles", [0, 1, 4, 5, 7, 8, 9, 23])
def test_workers_take_tiles_in_waves_of_alternating_direction(num_tiles):
    workers = torch.full((num_tiles + 4,), -1, dtype=torch.int32)
    _workers_kernel[(4,)](workers, num_tiles, 4)
    there_and_back = [0, 1, 2, 3, 3, 2, 1, 0]
    assert workers.tolist() == [*(there_and_back * 3)[:num_tiles], *[-1] * 4]
