"""Hopper's kernel for all three gradients of attention. It serves long segments; here it also gets
short ones."""

import pytest
import torch
from marks import ON_HOPPER

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.schedule import host_schedule

pytestmark = ON_HOPPER
SELF = [3, 0, 1, 70, 5, 130, 64, 9, 257, 128, 400, 1000]
CASES = [((64, 64), torch.float16), ((128, 128), torch.bfloat16)]


@pytest.fixture
def check(check_attention, one_pass_calls):
    def check(lengths, dtype=torch.bfloat16, dims=(64, 64), **options):
        check_attention(lengths, dtype, "cuda", dims=dims, kernels="hopper", **options)
        assert one_pass_calls["one_pass"] == 1

    return check


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("dims", [(40, 64), (64, 64), (96, 96), (128, 72), (128, 128)], ids=str)
def test_head_dims(check, dims, mask):
    check((SELF, SELF), dims=dims, mask=mask)


@pytest.mark.parametrize(
    "lengths",
    [
        "mixed",
        "empty-ends",
        "skewed",
        ([3000], [2500]),
        ([4, 130, 5], [0, 0, 70]),
        ([0, 0, 9], [4, 130, 200]),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "case, mask",
    [(CASES[0], None), (CASES[0], "causal"), (CASES[1], None), (CASES[1], "causal")],
    ids=str,
)
def test_lengths(check, lengths, case, mask):
    check(lengths, case[1], case[0], mask=mask)


@pytest.mark.parametrize(
    "heads, mask", [((1, 1), "causal"), ((6, 6), None), ((8, 1), None), ((6, 3), "causal")], ids=str
)
def test_heads(check, heads, mask):
    check((SELF, SELF), heads=heads, mask=mask)


@pytest.mark.parametrize(
    "case, activation, mask",
    [
        (CASES[0], "silu", "causal"),
        (CASES[0], "gelu_tanh", None),
        (CASES[1], "silu", None),
        (CASES[1], "gelu_tanh", "causal"),
        (CASES[1], "sigmoid", None),
    ],
    ids=str,
)
def test_activations(check, activation, mask, case):
    output_scale = torch.rand(len(SELF), device="cuda") + 0.1
    check(
        (SELF, SELF),
        case[1],
        case[0],
        activation=activation,
        mask=mask,
        scale=0.3,
        output_scale=output_scale,
    )


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_scale(check, scale):
    check((SELF, SELF), scale=scale)


@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("mask", [None, jm.AttentionMask(causal=True)], ids=["", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_neighbours_nan_stays_where_it_is(offsets, one_pass_calls, dim, mask, activation):
    q, k, v = (
        torch.randn(300, heads, dim, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)
    )
    for x in (q, k, v):
        x[:70], x[170:] = float("nan"), float("nan")
        x.requires_grad_()
    out = F.jagged_attention(
        q,
        k,
        v,
        offsets([70, 100, 130], "cuda"),
        activation=activation,
        mask=mask,
        implementation="hopper",
    )
    grad = torch.randn_like(out)
    grad[:70], grad[170:] = float("nan"), float("nan")
    for x in torch.autograd.grad(out, (q, k, v), grad):
        assert x[70:170].isfinite().all() and x[:70].isnan().all() and x[170:].isnan().all()
    assert one_pass_calls["one_pass"] == 1


@pytest.mark.large_memory
@pytest.mark.parametrize(
    "dim, mask, heads, lengths",
    [
        (64, None, (8, 8), [1, 700, 1500, 600, 200, 1300, 129]),
        (64, "causal", (1, 1), [1, 3000, 4000, 2500]),
        (128, None, (8, 8), [410, 1, 900, 128, 300, 640] * 5 + [511]),
        (128, "causal", (4, 4), [2500, 100, 4000, 5000]),
    ],
    ids=str,
)
def test_long_segments_take_it(check_attention, one_pass_counts, dim, mask, heads, lengths):
    check_attention(
        (lengths, lengths),
        torch.bfloat16,
        "cuda",
        dims=(dim, dim),
        heads=heads,
        mask=mask,
        kernels="hopper",
    )
    assert one_pass_counts["one_pass"] == 1


@pytest.mark.large_memory
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [(8, 8), (16, 8)], ids=str)
def test_targets_on_long_histories_take_it(check_attention, one_pass_counts, dim, heads):
    queries, keys = [90, 1, 300, 128, 506, 0], [3000, 6000, 64, 1500, 2500, 129]
    check_attention(
        (queries, keys), torch.bfloat16, "cuda", dims=(dim, dim), heads=heads, kernels="hopper"
    )
    assert one_pass_counts["one_pass"] == 1


def test_a_workspace_without_room_for_its_sums(check_attention, one_pass_calls):
    with jm.backward_workspace(2**16):
        check_attention((SELF, SELF), torch.bfloat16, "cuda", dims=(64, 64), kernels="hopper")
    assert one_pass_calls["one_pass"] == 0


def random_batch(seed, num_segments, longest, dim):
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (num_segments,), generator=random)
    q, k, v = (
        torch.randn(int(lengths.sum()), heads, dim, device="cuda", dtype=torch.bfloat16)
        for heads in (4, 2, 2)
    )
    return lengths, [x.requires_grad_() for x in (q, k, v)]


@pytest.mark.parametrize("num_segments, longest", [(1, 9000), (5, 3000), (64, 400), (300, 130)])
@pytest.mark.parametrize("dim, mask", [(64, None), (64, "causal"), (128, None), (128, "causal")])
def test_the_same_bits_beside_other_kernels(
    offsets, one_pass_calls, check_bits_beside_other_kernels, dim, mask, num_segments, longest
):
    """With and without a schedule. Thread blocks wait for one another."""
    mask = None if mask is None else jm.AttentionMask(causal=True)
    lengths, leaves = random_batch(dim, num_segments, longest, dim)
    segments, do = offsets(lengths.tolist(), "cuda"), torch.randn_like(leaves[0])
    schedule = host_schedule(
        lengths, lengths, num_heads=4, num_kv_heads=2, head_dim=dim, dtype=torch.bfloat16, mask=mask
    ).to("cuda")

    def step(number):
        given = schedule if number % 2 else None
        out = F.jagged_attention(
            *leaves, segments, mask=mask, schedule=given, implementation="hopper"
        )
        return torch.autograd.grad(out, leaves, do)

    check_bits_beside_other_kernels(step, 30)
    assert one_pass_calls["one_pass"] == 60


def test_a_graph_serves_other_lengths(offsets, one_pass_calls):
    """A captured step, replayed with new offsets."""
    leaves = [
        torch.randn(300, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    ]
    segments, do = offsets([70, 100, 130], "cuda"), torch.randn_like(leaves[0])

    def step():
        return torch.autograd.grad(
            F.jagged_attention(*leaves, segments, implementation="hopper"), leaves, do
        )

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([70, 100, 130], [0, 300, 0], [299, 0, 1]):
        segments.copy_(offsets(lengths, "cuda"))
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, step()))
    assert one_pass_calls["one_pass"] == 5
