"""Rows behind the last segment: the kernels, in graphs that do not know the lengths."""

import pytest
import torch
from tails import ON_KERNELS, check, compiled


@pytest.fixture(autouse=True)
def _no_earlier_graphs():
    """Cases share code, whose constants differ."""
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ON_KERNELS)
def test_functions(poisoned_memory, name, dtype):
    check(ON_KERNELS[name], compiled(ON_KERNELS[name].call), dtype, implementation="triton")
