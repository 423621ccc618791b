"""The kernels for short segments on a GPU."""

import pytest
import torch

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.activations import ACTIVATIONS
from jagged_modules.schedule import host_schedule

from .fixtures.packed import EVERY_KIND

pytestmark = pytest.mark.gpu
HALVES = [torch.float16, torch.bfloat16]
HEADS = [(2, 2), (4, 2), (3, 1)]
MANY = EVERY_KIND * 30
MASKS = [
    "causal", "window", "causal-window", "targets", "grouped-targets", "hstu", "long-context", "band", "open-targets",
    "semi-local", "truncated", "open-truncated",
]  # fmt: skip


DIMS = [(8, 8), (24, 40), (40, 64), (64, 64), (96, 96), (128, 72), (128, 128)]


@pytest.mark.parametrize("dims, heads, dtype", [(dims, HEADS[i % 3], dtype) for i, dims in enumerate(DIMS) for dtype in HALVES], ids=str)
def test_head_dims(check_packed, heads, dims, dtype):
    check_packed(MANY, dtype, "cuda", heads=heads, dims=dims, kernels="auto")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(check_packed, activation, dtype):
    scale = 1.0 if activation == "softmax" else torch.rand(len(MANY), device="cuda") + 0.1
    dims = (64, 64) if dtype == torch.float16 else (128, 128)
    check_packed(MANY, dtype, "cuda", dims=dims, activation=activation, scale=0.3, output_scale=scale, kernels="auto")


@pytest.mark.parametrize("mask, activation", [(mask, ("softmax", "silu")[i % 2]) for i, mask in enumerate(MASKS)])
def test_masks(check_packed, mask, activation):
    dims, dtype = ((64, 64), torch.float16) if activation == "silu" else ((128, 128), torch.bfloat16)
    check_packed(MANY, dtype, "cuda", dims=dims, mask=mask, activation=activation, kernels="auto")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("options", [dict(), dict(activation="silu")], ids=str)
def test_a_segments_values_stay_in_it(check_packed_neighbours, dtype, options):
    check_packed_neighbours(dtype, "cuda", heads=(4, 2), dims=(64, 64), **options)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("num_segments, longest", [(1, 64), (65, 90), (5000, 30), (3000, 200), (20_000, 5)])
def test_packed_tiles(check_packed_tiles, num_segments, longest, dtype):
    check_packed_tiles(torch.randint(0, longest + 1, (num_segments,)).tolist(), "cuda", dtype)


def test_a_graph_serves_other_lengths(check_cuda_graph, packed_launches):
    check_cuda_graph(lambda q, k, v, offsets: F.jagged_attention(q, k, v, offsets, offsets))
    assert packed_launches["forward"] > 0


def everyday(segments, mean, longest, dim, seed):
    """Lengths, log-normal, and a batch of four heads that need gradients."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randn(segments, generator=random).mul(1.1).exp()
    lengths = (lengths / lengths.mean() * mean).round().long().clamp(1, longest)
    q, k, v = (torch.randn(int(lengths.sum()), 4, dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    return lengths, q, k, v


@pytest.mark.parametrize("segments, mean, longest, dim", [(2048, 55, 500, 128), (1024, 107, 1000, 64), (8192, 20, 100, 64)])
@pytest.mark.parametrize("mask", [None, jm.AttentionMask(causal=True)], ids=["full", "causal"])
def test_steps_that_follow_one_another_at_once(offsets, segments, mean, longest, dim, mask):
    """Thousands of thread blocks, with and without a schedule, for batches of changing lengths: the same bits every time."""
    for seed in range(4):
        lengths, q, k, v = everyday(segments, mean, longest, dim, seed)
        of_segments = offsets(lengths.tolist(), "cuda")
        schedule = host_schedule(lengths, lengths, num_heads=4, num_kv_heads=4, head_dim=dim, dtype=q.dtype, mask=mask).to("cuda")
        do, first = torch.randn_like(v), None
        for step in range(20):
            out = F.jagged_attention(q, k, v, of_segments, of_segments, mask=mask, schedule=schedule if step % 2 else None)
            results = out.detach(), *torch.autograd.grad(out, (q, k, v), do)
            first = first or results
            assert all(torch.equal(x, y) for x, y in zip(results, first))


def test_the_same_as_without_packed_tiles(offsets, packed_launches, change_selection):
    """Within two roundings to bfloat16, and the rows of long segments bit for bit."""
    lengths, q, k, v = everyday(2048, 55, 500, 128, 0)
    of_segments = offsets(lengths.tolist(), "cuda")
    packed = F.jagged_attention(q, k, v, of_segments, of_segments)
    assert packed_launches["forward"] == 1
    for limits in ("PACKED_MEAN", "PACKED_MEAN_OF_HOPPER"):
        change_selection(limits, (0, 0))
    other = F.jagged_attention(q, k, v, of_segments, of_segments)
    assert packed_launches["forward"] == 1
    long = (lengths > 64).repeat_interleave(lengths).cuda()
    assert torch.equal(packed[long], other[long]) and not torch.equal(packed, other)
    torch.testing.assert_close(packed, other, rtol=2**-7, atol=2**-9)
