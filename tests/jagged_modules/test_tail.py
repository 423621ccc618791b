"""Rows behind the last segment, where only a graph's device knows the lengths: the CPU path under torch.compile."""

import pytest
import torch
from marks import slow_after
from tails import LAYERS, ON_KERNELS, ON_TORCH, check, compiled, layer_case

CASES = ON_KERNELS | ON_TORCH


@slow_after(1, "dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_functions_in_a_graph(name, dtype):
    check(CASES[name], compiled(CASES[name].call), dtype)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_in_a_graph(name):
    layer, case = layer_case(name)
    check(case, compiled(case.call), torch.float32, parameters=layer.parameters())
