"""Hopper's forward with dynamic assignment of tiles. It is for long segments; here it also gets
short ones."""

import pytest
import torch
from jagged_kernels.attention.hopper import launch as hopper
from marks import ON_HOPPER

import jagged_modules as jm
from jagged_modules import functional as F

pytestmark = ON_HOPPER
SELF = [3, 0, 1, 70, 5, 130, 64, 9, 257, 128, 400, 1000]


@pytest.fixture
def dynamic(monkeypatch, change_selection):
    """Selects it for all lengths. Returns a list of whether each launch was dynamic."""
    change_selection("DYNAMIC_TILES", 0)
    change_selection("small_tiles_are_faster", lambda *_: (False, False))
    launches, launch = [], hopper.forward

    def recorded(operands, segments, params, config):
        launches.append(config.dynamic_tiles)
        return launch(operands, segments, params, config)

    monkeypatch.setattr(hopper, "forward", recorded)
    return launches


@pytest.fixture
def check(check_attention, dynamic):
    def check(lengths, dims=(64, 64), dtype=torch.bfloat16, **options):
        check_attention(lengths, dtype, "cuda", dims=dims, kernels="hopper", **options)
        assert all(dynamic) and dynamic

    return check


@pytest.mark.parametrize(
    "lengths",
    [
        "mixed",
        "empty-ends",
        "no-keys",
        "no-queries",
        "nothing",
        ([3000], [2500]),
        ([4, 130, 5], [0, 0, 70]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 128])
def test_lengths(check_attention, dynamic, lengths, dim):
    check_attention(lengths, torch.bfloat16, "cuda", dims=(dim, dim), kernels="hopper")
    assert all(dynamic)


@pytest.mark.parametrize(
    "dims, dtype",
    [((64, 40), torch.float16), ((72, 128), torch.bfloat16), ((128, 128), torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("mask", [None, "causal"])
def test_dtypes_and_masks(check, dims, dtype, mask):
    check((SELF, SELF), dims, dtype, mask=mask)


@pytest.mark.parametrize(
    "activation, dim, mask",
    [("silu", 64, "causal"), ("gelu_tanh", 64, None), ("silu", 128, "causal")],
)
def test_activations(check, activation, dim, mask):
    check((SELF, SELF), (dim, dim), mask=mask, activation=activation)


@pytest.mark.parametrize(
    "dim, mask, activation, biased",
    [
        (64, None, "softmax", False),
        (64, "causal", "softmax", False),
        (128, None, "softmax", False),
        (128, "causal", "softmax", False),
        (64, "causal", "silu", True),
        (64, None, "softmax", True),
        (128, "causal", "silu", True),
        (128, None, "softmax", True),
    ],
)
def test_the_same_bits_as_with_the_zigzag(
    offsets,
    dynamic,
    change_selection,
    check_bits_beside_other_kernels,
    dim,
    mask,
    activation,
    biased,
):
    """Beside other kernels, where thread blocks run in any number and order."""
    q, k, v = (
        torch.randn(sum(SELF), heads, dim, device="cuda", dtype=torch.bfloat16)
        for heads in (4, 2, 2)
    )
    segments, mask = offsets(SELF, "cuda"), mask and jm.AttentionMask(causal=True)
    bias = jm.RelativeBias(torch.randn(4, 2 * max(SELF) - 1, device="cuda")) if biased else None

    def step(number=0):
        return (
            F.jagged_attention(
                q,
                k,
                v,
                segments,
                activation=activation,
                mask=mask,
                bias=bias,
                implementation="hopper",
            ),
        )

    (out,) = step()
    check_bits_beside_other_kernels(step, 20)
    assert all(dynamic)
    change_selection("DYNAMIC_TILES", 2**30)
    assert torch.equal(out, step()[0]) and not dynamic[-1]


def test_a_graph_serves_other_lengths(check_cuda_graph, dynamic):
    """Each replay begins at the first tile."""
    check_cuda_graph(lambda *inputs: F.jagged_attention(*inputs, implementation="hopper"))
    assert all(dynamic) and dynamic
