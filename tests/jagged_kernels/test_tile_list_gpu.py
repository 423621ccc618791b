"""The device-built tile list on a GPU."""

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_segments, longest", [(0, 0), (1, 0), (7, 100), (1152, 512), (5000, 60)])
def test_tile_list_is_the_hosts(check_tile_list, num_segments, longest, dtype):
    check_tile_list(num_segments, longest, dtype, "cuda", dict(num_heads=3, block_m=16, block_n=8))
