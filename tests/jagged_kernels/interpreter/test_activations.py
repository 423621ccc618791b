"""The kernels' activations of fp32 and fp16 in Triton's interpreter, which has no inline assembly."""

import pytest

from jagged_modules.activations import POINTWISE


@pytest.mark.parametrize("name", POINTWISE)
def test_value_and_derivative(check_activation, name):
    check_activation(name, False, "cpu")
