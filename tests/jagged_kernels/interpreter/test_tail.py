"""Rows behind the last segment: the kernels, in graphs that do not know the lengths."""

import pytest
import torch
from marks import slow_after
from tails import ON_KERNELS, check, compiled


@slow_after(1, "dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ON_KERNELS)
def test_functions(poisoned_memory, name, dtype):
    check(ON_KERNELS[name], compiled(ON_KERNELS[name].call), dtype, implementation="triton")
