"""Attention to keys in pages on a GPU. Both forms run the same blocks, so results have the same
bits."""

import pytest
import torch
from jagged_kernels.attention.params import AttentionCall, AttentionParams, Segments, TileList, pack
from paging import in_pages
from torch import library

import jagged_modules as jm

pytestmark = pytest.mark.gpu
# mean lengths for which the Hopper forward has blocks of 128 keys
LONG = [5, 700, 130, 0, 64], [3000, 1000, 129, 70, 128]
KERNELS = [
    ("triton", 64),
    ("triton", 128),
    ("triton", 256),
    ("hopper", 64),
    ("hopper", 128),
    ("hopper", 192),
]


@pytest.fixture(autouse=True)
def supported(request):
    if "hopper" in request.node.name and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels need compute capability 9.0")


@pytest.mark.parametrize(
    "lengths", ["mixed", "empty-ends", "no-keys", "no-queries", "nothing", LONG], ids=str
)
@pytest.mark.parametrize("kernels, dim", KERNELS)
def test_lengths(check_pages, kernels, dim, lengths):
    check_pages(lengths, torch.bfloat16, "cuda", dims=(dim, dim), kernels=kernels)


@pytest.mark.parametrize(
    "dtype, dims",
    [(torch.float32, (24, 40)), (torch.float16, (128, 72)), (torch.float32, (128, 128))],
    ids=str,
)
def test_portable_dtypes_and_dims(check_pages, dtype, dims):
    check_pages("mixed", dtype, "cuda", dims=dims)


@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_8_bits(check_pages, stored, dtype, dim, activation):
    if stored == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("these GPUs have no float8")
    for mask in (None, "hstu"):
        options = dict(stored=stored, activation=activation, mask=mask)
        check_pages(LONG, dtype, "cuda", dims=(dim, dim), **options)


@pytest.mark.parametrize(
    "mask, activation",
    [(None, "silu"), ("hstu", "silu"), ("semi-local", "softmax"), ("causal", "gelu_tanh")],
)
@pytest.mark.parametrize("kernels, dim", [("triton", 64), ("hopper", 64), ("hopper", 128)])
def test_masks_and_activations(check_pages, kernels, dim, mask, activation):
    for lengths in ("mixed", LONG):
        check_pages(
            lengths,
            torch.bfloat16,
            "cuda",
            heads=(4, 4),
            dims=(dim, dim),
            kernels=kernels,
            mask=mask,
            activation=activation,
        )


@pytest.mark.parametrize("kernels, dim", [("triton", 64), ("hopper", 64), ("hopper", 128)])
def test_bias(check_pages, kernels, dim):
    check_pages(
        "mixed", torch.bfloat16, "cuda", dims=(dim, dim), kernels=kernels, page_rows=256, bias=True
    )


@pytest.mark.parametrize("kernels, dim", [("triton", 64), ("hopper", 64)])
def test_one_graph_for_all_lengths(check_compiled_pages, kernels, dim):
    check_compiled_pages("cuda", dim, torch.bfloat16, kernels)


@pytest.mark.parametrize("kernels, dim", [("triton", 64), ("hopper", 64)])
def test_the_operator_passes_opcheck(offsets, kernels, dim):
    from jagged_kernels.attention.op import triton_paged_attention
    from jagged_kernels.attention.tile_lists import Lists, TiledSide, list_tiles

    lengths = [70, 200, 130]
    storage, pages = in_pages(
        torch.randn(400, 4, 2 * dim, device="cuda", dtype=torch.float16), lengths
    )
    q, segments = (
        torch.randn(300, 4, dim, device="cuda", dtype=torch.float16),
        (offsets([70, 100, 130], "cuda"), offsets(lengths, "cuda")),
    )
    params = AttentionParams(0.125, implementation=kernels)
    call = AttentionCall(q, *storage.split(dim, dim=2), Segments(*segments, pages=pages), params)
    [tiles] = list_tiles(segments, TiledSide(300, 4, 64), TiledSide(400, 4, 64), Lists(True, False))
    arguments = pack(call, TileList(*tiles, 64))
    library.opcheck(triton_paged_attention, arguments)


@pytest.mark.parametrize("dim", [64, 128])
def test_scores_of_a_paged_cache(offsets, dim):
    """In pages, the scores have the bits of those of copied rows, and no row is copied."""
    layer = jm.JaggedTargetAttention(2 * dim, 2, device="cuda", dtype=torch.bfloat16)
    lengths = [300, 1, 0, 128, 1000]
    history = (
        torch.randn(sum(lengths), 2 * dim, device="cuda", dtype=torch.bfloat16),
        offsets(lengths, "cuda"),
    )
    paged, copied = (jm.PagedHistoryCache(layer, 2**24, rows) for rows in (128, 16))
    targets, candidates = (
        torch.randn(50, 3, 2 * dim, device="cuda", dtype=torch.bfloat16),
        torch.randint(5, (50,), device="cuda"),
    )
    with torch.no_grad():
        for cache in (paged, copied):
            cache.put(list(range(5)), history)
        kv, rows = (cache.select([4, 2, 0, 3, 1]) for cache in (paged, copied))
        assert torch.equal(
            layer.score(targets, kv, candidates), layer.score(targets, rows, candidates)
        )
        assert "values" not in vars(kv.layers[0])


def test_a_write_on_another_stream_waits_for_those_that_read_the_page():
    layer = jm.JaggedTargetAttention(128, 2, device="cuda", dtype=torch.bfloat16)
    cache = jm.PagedHistoryCache(layer, 128 * 2 * 128 * 2, 128)  # one page
    first, second = (
        (
            torch.randn(128, 128, device="cuda", dtype=torch.bfloat16),
            torch.tensor([0, 128], device="cuda"),
        )
        for _ in range(2)
    )
    targets = torch.randn(1, 100, 128, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(targets, first)
        cache.put([1], first)
        layer.score(targets, cache.select([1]))  # compiles
        torch.cuda.synchronize()
        kv = cache.select([1])
        torch.cuda._sleep(10**8)
        found = layer.score(targets, kv)
        del kv
        with torch.cuda.stream(torch.cuda.Stream()):
            cache.put([2], second)
        torch.cuda.synchronize()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(layer.score(targets, cache.select([2])), layer(targets, second))
