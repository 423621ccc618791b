"""The kernels' activations of fp32 and fp16 in Triton's interpreter, which has no inline assembly."""

import pytest

from jagged_modules.activations import POINTWISE


@pytest.mark.parametrize("name, bfloat16", [*((name, False) for name in POINTWISE), ("gelu", True)])
def test_value_and_derivative(check_activation, name, bfloat16):
    check_activation(name, bfloat16, "cpu")
