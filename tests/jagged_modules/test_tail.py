"""Rows behind the last segment, where only a graph's device knows the lengths: the CPU path under torch.compile."""

import pytest
import torch
from tails import ON_KERNELS, ON_TORCH, check, compiled

CASES = ON_KERNELS | ON_TORCH


@pytest.fixture(autouse=True)
def _no_earlier_graphs():
    """Cases share code, whose constants differ."""
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_functions_in_a_graph(name, dtype):
    check(CASES[name], compiled(CASES[name].call), dtype)
