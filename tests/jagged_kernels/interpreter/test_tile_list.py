"""The device-built tile list in Triton's interpreter."""

import pytest
import torch

SIZES = dict(num_heads=3, block_m=16, block_n=8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_segments, longest", [(0, 0), (1, 0), (7, 100), (40, 20), (300, 9)])
def test_tile_list_is_the_hosts(check_tile_list, num_segments, longest, dtype):
    check_tile_list(num_segments, longest, dtype, "cpu", SIZES)


@pytest.mark.parametrize("groups", [(2, 1), (1, 2), (3, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("num_segments, longest", [(1, 0), (7, 100), (40, 20), (300, 9)])
def test_tile_list_of_several_groups_is_the_hosts(check_tile_list, num_segments, longest, groups):
    check_tile_list(num_segments, longest, torch.int64, "cpu", SIZES, groups=groups, key_tiles=groups[1] > 1)


@pytest.mark.parametrize("key_tiles", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("num_segments, longest", [(0, 0), (1, 0), (1, 90), (40, 200)])
def test_masked_tile_list_is_the_hosts(check_tile_list, num_segments, longest, key_tiles):
    for masked in (True, dict(global_prefix=20, recent_history=30)):
        check_tile_list(num_segments, longest, torch.int64, "cpu", SIZES, masked=masked, key_tiles=key_tiles)
