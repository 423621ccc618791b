"""Hopper's kernel for all three gradients of segments with few query rows, beside the kernels for
other segments."""

import pytest
import torch
from jagged_kernels.attention.hopper import launch as hopper
from marks import ON_HOPPER

from jagged_modules import functional as F

pytestmark = ON_HOPPER
QUERIES = [3, 0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 0, 300, 5]
KEYS = [70, 5, 1, 64, 65, 0, 200, 128, 333, 63, 100, 300, 0, 70, 650]
CONSUMERS = [((64, 64), 1), ((64, 64), 2), ((64, 64), 3), ((128, 128), 1), ((128, 128), 2)]


@pytest.fixture
def calls(monkeypatch):
    """Counts the kernel's calls."""
    calls = []
    launch = hopper._Backward.short_queries
    monkeypatch.setattr(
        hopper._Backward, "short_queries", lambda *args: calls.append(None) or launch(*args)
    )
    return calls


@pytest.fixture
def check(check_attention, change_selection, calls):
    def check(consumers, lengths=(QUERIES, KEYS), dtype=torch.bfloat16, heads=(3, 3), **options):
        change_selection("short_query_consumers", lambda *_: consumers)
        check_attention(lengths, dtype, "cuda", heads=heads, kernels="hopper", **options)
        assert len(calls) == 1

    return check


@pytest.mark.parametrize(
    "dims, consumers",
    [*CONSUMERS, ((40, 64), 3), ((64, 48), 2), ((72, 128), 1), ((96, 96), 2)],
    ids=str,
)
def test_head_dims(check, dims, consumers):
    check(consumers, dims=dims)


@pytest.mark.parametrize(
    "dims, consumers", [((64, 64), 1), ((40, 64), 3), ((128, 128), 2)], ids=str
)
def test_fp16(check, dims, consumers):
    check(consumers, dtype=torch.float16, dims=dims)


@pytest.mark.parametrize(
    "activation, case",
    [
        *(("silu", case) for case in CONSUMERS),
        *(("gelu_tanh", case) for case in CONSUMERS),
        ("gelu", CONSUMERS[2]),
        ("gelu", CONSUMERS[4]),
        ("gelu_taylor", CONSUMERS[1]),
        ("gelu_taylor", CONSUMERS[3]),
        ("sigmoid", CONSUMERS[0]),
        ("sigmoid", CONSUMERS[4]),
    ],
    ids=str,
)
def test_activations(check, activation, case):
    dims, consumers = case
    output_scale = torch.rand(len(QUERIES), device="cuda") + 0.1
    check(consumers, dims=dims, activation=activation, scale=0.3, output_scale=output_scale)


@pytest.mark.parametrize("dims, consumers", CONSUMERS, ids=str)
@pytest.mark.parametrize(
    "lengths",
    [
        ([1] * 300, [2] * 299 + [900]),
        ([500] * 4, [30] * 4),
        ([64], [2000]),
        ([9, 0], [0, 9]),
        ([128] * 9, [64] * 9),
    ],
    ids=str,
)
def test_lengths(check, lengths, dims, consumers):
    check(consumers, lengths, dims=dims)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_scale(check, scale):
    check(3, dims=(64, 64), scale=scale)


@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("dims, consumers", CONSUMERS, ids=str)
def test_a_neighbours_nan_stays_where_it_is(
    offsets, change_selection, calls, dims, consumers, activation
):
    change_selection("short_query_consumers", lambda *_: consumers)
    queries, keys = [40, 50, 70], [70, 100, 130]
    q, k, v = (
        torch.randn(sum(rows), 2, dims[0], device="cuda", dtype=torch.bfloat16)
        for rows in (queries, keys, keys)
    )
    for x, rows in ((q, queries), (k, keys), (v, keys)):
        x[: rows[0]], x[rows[0] + rows[1] :] = float("nan"), float("nan")
        x.requires_grad_()
    out = F.jagged_attention(
        q,
        k,
        v,
        offsets(queries, "cuda"),
        offsets(keys, "cuda"),
        activation=activation,
        implementation="hopper",
    )
    grad = torch.randn_like(out)
    grad[:40], grad[90:] = float("nan"), float("nan")
    for x, rows in zip(torch.autograd.grad(out, (q, k, v), grad), (queries, keys, keys)):
        start, end = rows[0], rows[0] + rows[1]
        assert x[start:end].isfinite().all() and x[:start].isnan().all() and x[end:].isnan().all()
    assert len(calls) == 1


@pytest.mark.parametrize("dims, consumers", CONSUMERS, ids=str)
def test_the_same_bits_beside_other_kernels(
    offsets, change_selection, calls, check_bits_beside_other_kernels, dims, consumers
):
    """Thread blocks take tiles in any order."""
    change_selection("short_query_consumers", lambda *_: consumers)
    random = torch.Generator().manual_seed(consumers)
    queries, keys = (
        torch.randint(0, longest, (400,), generator=random).tolist() for longest in (200, 500)
    )
    leaves = [
        torch.randn(sum(rows), 2, dims[0], device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for rows in (queries, keys, keys)
    ]
    segments, do = (offsets(queries, "cuda"), offsets(keys, "cuda")), torch.randn_like(leaves[0])

    def step(_):
        return torch.autograd.grad(
            F.jagged_attention(*leaves, *segments, implementation="hopper"), leaves, do
        )

    check_bits_beside_other_kernels(step, 20)
    assert len(calls) == 40


@pytest.mark.parametrize("dims, consumers", [CONSUMERS[2], CONSUMERS[3]], ids=str)
def test_a_graph_serves_other_lengths(offsets, change_selection, calls, dims, consumers):
    """A captured step, replayed with new offsets."""
    change_selection("short_query_consumers", lambda *_: consumers)
    leaves = [
        torch.randn(rows, 2, dims[0], device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for rows in (300, 700, 700)
    ]
    segments, do = (
        (offsets([70, 100, 130], "cuda"), offsets([0, 500, 200], "cuda")),
        torch.randn_like(leaves[0]),
    )

    def step():
        return torch.autograd.grad(
            F.jagged_attention(*leaves, *segments, implementation="hopper"), leaves, do
        )

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for queries, keys in (
        ([70, 100, 130], [1, 2, 697]),
        ([0, 300, 0], [350, 350, 0]),
        ([20, 17, 263], [0, 1, 699]),
    ):
        for x, lengths in zip(segments, (queries, keys)):
            x.copy_(offsets(lengths, "cuda"))
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, step()))
    assert len(calls) == 5


def test_many_targets_take_it(check_attention, calls):
    """By the rule: 600 users of 1 to 8 targets and histories of 128 to 256 events."""
    random = torch.Generator().manual_seed(0)
    queries, keys = (
        torch.randint(*limits, (600,), generator=random).tolist() for limits in ((1, 9), (128, 257))
    )
    check_attention(
        (queries, keys), torch.bfloat16, "cuda", heads=(4, 4), dims=(64, 64), kernels="auto"
    )
    assert len(calls) == 1
