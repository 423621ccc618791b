"""The kernels for short segments on a GPU."""

import pytest
import torch
from space import MASKS

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.activations import ACTIVATIONS
from jagged_modules.schedule import host_schedule

from .fixtures.packed import EVERY_KIND, EVERY_PAIR, LIMITS

pytestmark = pytest.mark.gpu
HALVES = [torch.float16, torch.bfloat16]
HEADS = [(2, 2), (4, 2), (3, 1)]
MANY = EVERY_KIND * 30
MANY_PAIRS = EVERY_PAIR[0] * 30, EVERY_PAIR[1] * 30


DIMS = [(8, 8), (24, 40), (40, 64), (64, 64), (96, 96), (128, 72), (128, 128)]


@pytest.mark.parametrize(
    "dims, heads, dtype",
    [(dims, HEADS[i % 3], dtype) for i, dims in enumerate(DIMS) for dtype in HALVES],
    ids=str,
)
def test_head_dims(check_packed, heads, dims, dtype):
    check_packed(MANY, dtype, "cuda", heads=heads, dims=dims, kernels="auto")


def with_scales(check_packed, lengths, num_segments, activation, dtype):
    scale = 1.0 if activation == "softmax" else torch.rand(num_segments, device="cuda") + 0.1
    dims = (64, 64) if dtype == torch.float16 else (128, 128)
    options = dict(dims=dims, activation=activation, scale=0.3, output_scale=scale)
    check_packed(lengths, dtype, "cuda", kernels="auto", **options)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(check_packed, activation, dtype):
    with_scales(check_packed, MANY, len(MANY), activation, dtype)


def under_a_mask(check_packed, lengths, mask, activation):
    dims, dtype = (
        ((64, 64), torch.float16) if activation == "silu" else ((128, 128), torch.bfloat16)
    )
    options = dict(dims=dims, mask=mask, activation=activation)
    check_packed(lengths, dtype, "cuda", kernels="auto", **options)


@pytest.mark.parametrize(
    "mask, activation", [(mask, ("softmax", "silu")[i % 2]) for i, mask in enumerate(MASKS)]
)
def test_masks(check_packed, mask, activation):
    under_a_mask(check_packed, MANY, mask, activation)


@pytest.mark.parametrize(
    "dims, heads, dtype",
    [(dims, HEADS[i % 3], HALVES[i % 2]) for i, dims in enumerate(DIMS)],
    ids=str,
)
def test_cross_attention(check_packed, heads, dims, dtype):
    check_packed(MANY_PAIRS, dtype, "cuda", heads=heads, dims=dims, kernels="auto")


@pytest.mark.parametrize(
    "activation, dtype",
    [(activation, HALVES[i % 2]) for i, activation in enumerate(ACTIVATIONS)],
    ids=str,
)
def test_activations_in_cross_attention(check_packed, activation, dtype):
    with_scales(check_packed, MANY_PAIRS, len(MANY_PAIRS[0]), activation, dtype)


@pytest.mark.parametrize(
    "mask, activation", [(mask, ("silu", "softmax")[i % 2]) for i, mask in enumerate(MASKS)]
)
def test_masks_in_cross_attention(check_packed, mask, activation):
    under_a_mask(check_packed, MANY_PAIRS, mask, activation)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "options",
    [dict(), dict(activation="silu"), dict(cross=True), dict(cross=True, activation="silu")],
    ids=str,
)
def test_a_segments_values_stay_in_it(check_packed_neighbours, dtype, options):
    check_packed_neighbours(dtype, "cuda", heads=(4, 2), dims=(64, 64), **options)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    "num_segments, longest", [(1, 64), (65, 90), (5000, 30), (3000, 200), (20_000, 5)]
)
def test_packed_tiles(check_packed_tiles, num_segments, longest, dtype):
    lengths, others = (
        torch.randint(0, n + 1, (num_segments,)).tolist() for n in (longest, 70 - longest % 67)
    )
    check_packed_tiles(lengths, "cuda", dtype)
    check_packed_tiles((lengths, others), "cuda", dtype)


def test_a_graph_serves_other_lengths(check_cuda_graph, packed_launches):
    check_cuda_graph(lambda q, k, v, offsets: F.jagged_attention(q, k, v, offsets, offsets))
    assert packed_launches["forward"] > 0


def test_a_graph_serves_other_queries(check_cuda_graph, offsets, packed_launches):
    targets = offsets([50, 60, 190], "cuda")
    check_cuda_graph(lambda q, k, v, offsets: F.jagged_attention(q, k, v, targets, offsets))
    assert packed_launches["forward"] > 0


def everyday(segments, mean, longest, dim, seed):
    """Lengths, log-normal, and a batch of four heads that need gradients."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randn(segments, generator=random).mul(1.1).exp()
    lengths = (lengths / lengths.mean() * mean).round().long().clamp(1, longest)
    q, k, v = (
        torch.randn(
            int(lengths.sum()), 4, dim, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        for _ in range(3)
    )
    return lengths, q, k, v


@pytest.mark.parametrize(
    "segments, mean, longest, dim",
    [(2048, 55, 500, 128), (1024, 107, 1000, 64), (8192, 20, 100, 64)],
)
@pytest.mark.parametrize("mask", [None, jm.AttentionMask(causal=True)], ids=["full", "causal"])
def test_steps_that_follow_one_another_at_once(offsets, segments, mean, longest, dim, mask):
    """Thousands of thread blocks, with and without a schedule, for batches of changing lengths: the
    same bits every time."""
    for seed in range(4):
        lengths, q, k, v = everyday(segments, mean, longest, dim, seed)
        of_segments = offsets(lengths.tolist(), "cuda")
        schedule = host_schedule(
            lengths, lengths, num_heads=4, num_kv_heads=4, head_dim=dim, dtype=q.dtype, mask=mask
        ).to("cuda")
        do, first = torch.randn_like(v), None
        for step in range(20):
            out = F.jagged_attention(
                q,
                k,
                v,
                of_segments,
                of_segments,
                mask=mask,
                schedule=schedule if step % 2 else None,
            )
            results = out.detach(), *torch.autograd.grad(out, (q, k, v), do)
            first = first or results
            assert all(torch.equal(x, y) for x, y in zip(results, first))


def test_the_same_as_without_packed_tiles(offsets, packed_launches, change_selection):
    """Within two roundings to bfloat16, and the rows of long segments bit for bit."""
    lengths, q, k, v = everyday(2048, 55, 500, 128, 0)
    of_segments = offsets(lengths.tolist(), "cuda")
    packed = F.jagged_attention(q, k, v, of_segments, of_segments)
    assert packed_launches["forward"] == 1
    for limits in LIMITS:
        change_selection(limits, (0, 0))
    other = F.jagged_attention(q, k, v, of_segments, of_segments)
    assert packed_launches["forward"] == 1
    long = (lengths > 64).repeat_interleave(lengths).cuda()
    assert torch.equal(packed[long], other[long]) and not torch.equal(packed, other)
    torch.testing.assert_close(packed, other, rtol=2**-7, atol=2**-9)


def targets(dim):
    """1 to 20 candidates each of 2,048 users with histories of 0 to 80 events: lengths, q, k, v."""
    lengths = torch.randint(1, 21, (2048,)), torch.randint(0, 81, (2048,))
    shapes = ((int(x.sum()), 4, dim) for x in (lengths[0], lengths[1], lengths[1]))
    return lengths, *(
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes
    )


@pytest.mark.parametrize("dim", [64, 128])
def test_targets_of_short_histories(offsets, packed_launches, change_selection, dim):
    """With and without a schedule the same bits; without packed tiles the same output within two
    roundings, and the rows of long segments bit for bit."""
    lengths, q, k, v = targets(dim)
    of_queries, of_keys = (offsets(x.tolist(), "cuda") for x in lengths)
    schedule = host_schedule(*lengths, num_heads=4, num_kv_heads=4, head_dim=dim, dtype=q.dtype).to(
        "cuda"
    )
    do = torch.randn_like(q)

    def results(schedule=None):
        out = F.jagged_attention(q, k, v, of_queries, of_keys, schedule=schedule)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), do)

    packed = results()
    for step in range(20):
        assert all(
            torch.equal(x, y) for x, y in zip(results(schedule if step % 2 else None), packed)
        )
    assert packed_launches == dict(forward=21, backward=21)
    for limits in LIMITS:
        change_selection(limits, (0, 0))
    other, *_ = results()
    assert packed_launches == dict(forward=21, backward=21)
    long = (lengths[1] > 64).repeat_interleave(lengths[0]).cuda()
    assert torch.equal(packed[0][long], other[long]) and not torch.equal(packed[0], other)
    torch.testing.assert_close(packed[0], other, rtol=2**-7, atol=2**-9)


def test_targets_do_not_synchronise(assert_no_synchronisation, offsets, packed_launches):
    lengths, q, k, v = targets(64)
    of_queries, of_keys = (offsets(x.tolist(), "cuda") for x in lengths)
    assert_no_synchronisation(
        lambda: F.jagged_attention(q, k, v, of_queries, of_keys).sum().backward()
    )
    assert packed_launches == dict(forward=2, backward=2)
