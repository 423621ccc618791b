"""The kernels' activations on a GPU."""

import pytest

from jagged_modules.activations import POINTWISE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bfloat16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", POINTWISE)
def test_value_and_derivative(check_activation, name, bfloat16):
    check_activation(name, bfloat16, "cuda")
