"""The device-built tile list on a GPU."""

import pytest
import torch

import jagged_modules as jm

pytestmark = pytest.mark.gpu
SIZES = dict(num_heads=3, block_m=16, block_n=8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "num_segments, longest", [(0, 0), (1, 0), (7, 100), (1152, 512), (5000, 60)]
)
def test_tile_list_is_the_hosts(check_tile_list, num_segments, longest, dtype):
    check_tile_list(num_segments, longest, dtype, "cuda", SIZES)


@pytest.mark.parametrize("groups", [(2, 1), (1, 2), (3, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("num_segments, longest", [(1, 0), (7, 100), (40, 20), (300, 9)])
def test_tile_list_of_several_groups_is_the_hosts(check_tile_list, num_segments, longest, groups):
    check_tile_list(
        num_segments, longest, torch.int64, "cuda", SIZES, groups=groups, key_tiles=groups[1] > 1
    )


@pytest.mark.parametrize("key_tiles", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize(
    "num_segments, longest", [(0, 0), (1, 0), (1, 90), (40, 200), (2048, 110), (9000, 200)]
)
def test_masked_tile_list_is_the_hosts(check_tile_list, num_segments, longest, key_tiles):
    for masked in (True, dict(global_prefix=20, recent_history=30)):
        check_tile_list(
            num_segments, longest, torch.int64, "cuda", SIZES, masked=masked, key_tiles=key_tiles
        )


@pytest.mark.parametrize("seed", range(60))
def test_random_masked_tiles_are_the_hosts(check_random_tiles, seed):
    check_random_tiles(seed, 3000, "cuda")


@pytest.mark.parametrize("seed", range(40))
def test_random_tiles_in_groups_of_segments_are_the_hosts(check_grouped_tiles, seed):
    check_grouped_tiles(seed, 3000, "cuda")


@pytest.mark.parametrize("key_tiles", [False, True], ids=["queries", "keys"])
def test_masked_tiles_of_much_work_are_the_hosts(check_tiles, key_tiles):
    """Tiles that visit more blocks than have a class of their own, and more than have a class at
    all."""
    sizes, lengths = dict(num_heads=2, block_m=192, block_n=1), [300_000, 5, 70_000, 1500]
    check_tiles(lengths, lengths, "cuda", sizes, jm.AttentionMask(causal=True), key_tiles)


def test_masked_tile_lists_in_a_graph(offsets, assert_no_synchronisation):
    """A captured list follows the lengths, and is built without waiting for the device."""
    from jagged_kernels.attention.tile_lists import Lists, TiledSide, list_tiles

    mask = jm.AttentionMask(causal=True, num_targets=torch.tensor([0])).params
    side = TiledSide(300, 4, 64)
    segments, targets = offsets([70, 100, 130], "cuda"), torch.tensor([5, 0, 9], device="cuda")

    def build():
        queries, keys = list_tiles(
            (segments, segments), side, side, Lists(True, True), mask, targets
        )
        return *queries, *keys

    assert_no_synchronisation(build)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = build()
    for lengths in ([70, 100, 130], [0, 300, 0], [299, 0, 1]):
        segments.copy_(offsets(lengths, "cuda"))
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, build()))
