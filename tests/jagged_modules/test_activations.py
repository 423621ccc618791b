"""The activations: their values against written formulas, gradients against torch's, stated bounds
of gelu_taylor."""

import math

import pytest
import torch
from torch.nn import functional as nnf

from jagged_modules.activations import ACTIVATIONS, POINTWISE, gelu_taylor

# name: (formula, torch's function, which defines the gradient at kinks)
EXPECTED = {
    "identity": (lambda x: x, lambda x: 1 * x),
    "relu": (lambda x: x * (x > 0), nnf.relu),
    "relu_squared": (lambda x: x * x * (x > 0), lambda x: nnf.relu(x).square()),
    "leaky_relu": (lambda x: torch.where(x > 0, x, 0.01 * x), nnf.leaky_relu),
    "silu": (lambda x: x / (1 + torch.exp(-x)), nnf.silu),
    "gelu": (lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2, nnf.gelu),
    "gelu_tanh": (
        lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
        lambda x: nnf.gelu(x, approximate="tanh"),
    ),
    "hardswish": (lambda x: x * (x + 3).clamp(0, 6) / 6, nnf.hardswish),
    "sigmoid": (lambda x: 1 / (1 + torch.exp(-x)), torch.sigmoid),
}
POINTS = torch.cat(
    [
        torch.linspace(-30, 30, 2401, dtype=torch.float64),
        torch.tensor([0.0, -0.0, 3.06, -3.06], dtype=torch.float64),
    ]
)


def gradient(function, x, grad=None):
    x = x.detach().requires_grad_()
    out = function(x)
    return torch.autograd.grad(out, x, torch.ones_like(x) if grad is None else grad)[0]


def test_every_activation_is_tested():
    assert {*EXPECTED, "gelu_taylor", "softmax"} == set(ACTIVATIONS)


@pytest.mark.parametrize("name", EXPECTED)
def test_values_and_gradients(name):
    formula, torchs = EXPECTED[name]
    function = POINTWISE[name].function
    torch.testing.assert_close(function(POINTS), formula(POINTS), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(function, POINTS), gradient(torchs, POINTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", POINTWISE)
def test_backward_is_the_gradient_of_the_function(name, dtype):
    x = POINTS.to(dtype)
    grad = torch.randn_like(x)
    torch.testing.assert_close(
        POINTWISE[name].backward(grad, x), gradient(POINTWISE[name].function, x, grad)
    )


# -- gelu_taylor -----------------------------------------------------------------------------------

DENSE = torch.linspace(-8, 8, 400_001, dtype=torch.float64)


def test_gelu_taylor_keeps_its_bounds():
    value_error = (gelu_taylor(DENSE) - nnf.gelu(DENSE)).abs().max()
    slope_error = (
        (
            POINTWISE["gelu_taylor"].backward(torch.ones_like(DENSE), DENSE)
            - gradient(nnf.gelu, DENSE)
        )
        .abs()
        .max()
    )
    assert 3e-3 < value_error < 4e-3 and 2e-2 < slope_error < 2.2e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gelu_taylor_in_16_bits_is_rounded_once(dtype):
    x = DENSE.to(dtype)
    assert torch.equal(gelu_taylor(x), gelu_taylor(x.float()).to(dtype))


def test_gelu_taylor_derivative_is_that_of_the_same_function():
    step = 1e-5
    differences = (gelu_taylor(DENSE + step) - gelu_taylor(DENSE - step)) / (2 * step)
    actual = POINTWISE["gelu_taylor"].backward(torch.ones_like(DENSE), DENSE)
    # A second derivative of at most 1 that jumps by at most 1 where the clamp begins.
    torch.testing.assert_close(actual, differences, rtol=0, atol=2 * step)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gelu_taylor_of_huge_scores(dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, largest / 2, 1e4, 30.0], dtype=dtype)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(gelu_taylor(x), x, rtol=eps, atol=4e-3)
    assert (gelu_taylor(-x).abs() <= 4e-3 + 4 * eps).all()  # four terms of at most 1.53 cancel
    slope = POINTWISE["gelu_taylor"].backward
    assert torch.equal(slope(torch.ones_like(x), x), torch.ones_like(x))
    assert torch.equal(slope(torch.ones_like(x), -x), torch.zeros_like(x))
