"""Hopper's kernels of DIN's attention on a CPU."""

import pytest
import torch
from din_problem import ACTIVATIONS, MASKS
from marks import slow_after

pytestmark = pytest.mark.usefixtures("hopper_din", "poisoned_memory")
SEGMENTS = dict(candidates=[0, 3, 1, 0, 4, 6, 4], lengths=[1, 64, 3, 65, 128, 0, 260])
SIZES = dict(width=64, hidden=(80, 40)) | SEGMENTS


@pytest.fixture
def check(check_din):
    def check(activation, **options):
        check_din(activation, torch.bfloat16, "cpu", v_width=None, **options)

    return check


@slow_after(1, "normalize", [None, "softmax"])
@pytest.mark.parametrize("activation", [x for x in ACTIVATIONS if x != "dice"])
def test_forward_and_gradients(check, activation, normalize):
    check(activation, normalize=normalize, **SIZES)


@slow_after(1, "normalize", ["softmax", None])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(check, mask, normalize):
    check("relu", normalize=normalize, mask=mask, **SIZES)


@pytest.mark.parametrize(
    "sizes", [((80, 64), 64), ((64, 32), 8), ((33, 16), 40), ((5, 3), 20)], ids=str
)
def test_sizes(check, sizes):
    hidden, width = sizes
    check("silu", hidden=hidden, width=width, candidates=[0, 1, 1], lengths=[2, 70])
