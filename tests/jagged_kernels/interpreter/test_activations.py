"""The kernels' activations of fp32 and fp16 in Triton's interpreter, which has no inline
assembly: they divide there."""

import pytest
import triton
import triton.language as tl
from jagged_kernels.common import activations

from jagged_modules.activations import POINTWISE


@pytest.mark.parametrize("name, bfloat16", [*((name, False) for name in POINTWISE), ("gelu", True)])
def test_value_and_derivative(check_activation, name, bfloat16):
    check_activation(name, bfloat16, "cpu")


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "sigmoid"])
def test_bfloat16_versions_with_another_tanh(check_activation, name, monkeypatch):
    """All of their formulas but the hardware's instruction."""
    monkeypatch.setattr(activations, "_fast_tanh", _tanh)
    check_activation(name, True, "cpu")
