"""Hopper's attention kernels on a CPU, with their warpgroups."""

import pytest
import torch
from emulated_hopper import hopper_attention  # noqa: F401
from marks import slow_after
from space import MASKS

FP16, BF16 = torch.float16, torch.bfloat16
SELF = [3, 0, 1, 70, 5, 130, 64, 9, 257]
pytestmark = pytest.mark.usefixtures("hopper_attention")


@pytest.fixture
def check(check_attention):
    def check(lengths, dims=(64, 64), dtype=BF16, **options):
        check_attention(lengths, dtype, "cpu", dims=dims, kernels="hopper", **options)

    return check


@pytest.mark.parametrize("lengths", ["mixed", "empty-ends", "no-keys", "no-queries"])
def test_lengths(check, lengths):
    check(lengths)


@slow_after(
    5,
    "dims",
    [(40, 56), (128, 128), (96, 72), (192, 192), (256, 136), (72, 128), (160, 256)],
    ids=str,
)
def test_head_dims(check, dims):
    check(([3, 70, 0, 140], [65, 20, 4, 200]), dims, FP16)


@slow_after(6, "activation", ["softmax", "silu"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(check, mask, activation):
    check((SELF, SELF), mask=mask, activation=activation)


@slow_after(2, "shared", ["q", "kv", "two-groups"])
def test_shared_operands(check, shared):
    if shared == "two-groups":
        check(shared)
    else:
        check("mixed", shared=shared)
