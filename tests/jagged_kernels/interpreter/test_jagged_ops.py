"""The public functions of the jagged operators on their kernels, in Triton's interpreter."""

import functools

import accuracy
import pytest
import torch
from calls.jagged_ops import shared_linear

from jagged_modules import functional as F
from jagged_modules.activations import POINTWISE

LENGTHS, OTHERS = [3, 0, 40, 1, 17], [5, 4, 33, 0, 8]


def cases(offsets):
    """Name → function, tensors by name, and the function's bounds: tensors, do → bounds."""
    x_offsets, y_offsets = offsets(LENGTHS), offsets(OTHERS)
    plan = F.ScorePlan.from_offsets(x_offsets, y_offsets)
    rows, others, triton = sum(LENGTHS), sum(OTHERS), dict(implementation="triton")
    x = torch.randn(rows, 12)
    y = torch.randn(rows, 7)
    other = torch.randn(others, 12)
    p = torch.randn(plan.total)
    matrices, bias = torch.randn(5, 12, 7), torch.randn(5, 7)
    return {
        "dense": (
            lambda x, y: F.jagged_dense_bmm(x, y, x_offsets, **triton),
            dict(x=x, y=matrices),
            lambda x, y, do: accuracy.jagged_dense_bmm(x, y, x_offsets, do),
        ),
        "jagged": (
            lambda x, y: F.jagged_jagged_bmm(x, y, x_offsets, **triton),
            dict(x=x, y=y),
            lambda x, y, do: accuracy.jagged_jagged_bmm(x, y, x_offsets, do),
        ),
        "softmax": (
            lambda x: F.jagged_softmax(x, x_offsets, **triton),
            dict(x=x),
            lambda x, do: accuracy.jagged_softmax(x, x_offsets, do),
        ),
        "out": (
            lambda x, y: F.jagged_jagged_bmm_jagged_out(x, y, plan, **triton),
            dict(x=x, y=other),
            lambda x, y, do: accuracy.jagged_outer(x, y, *plan.offsets, do),
        ),
        "array": (
            lambda p, y: F.array_jagged_bmm_jagged_out(p, y, plan, **triton),
            dict(p=p, y=other),
            lambda p, y, do: accuracy.array_jagged_bmm(p, y, *plan.offsets, do),
        ),
        "transposed": (
            lambda p, y: F.array_jagged_bmm_jagged_out(p, y, plan, transposed=True, **triton),
            dict(p=p, y=x),
            lambda p, y, do: accuracy.array_jagged_bmm(p, y, *plan.offsets, do, transposed=True),
        ),
        "softmax2": (
            lambda p: F.jagged2_softmax(p, plan, **triton),
            dict(p=p),
            lambda p, do: accuracy.jagged2_softmax(p, *plan.offsets, do),
        ),
        "softmax2-columns": (
            lambda p: F.jagged2_softmax(p, plan, dim=-2, **triton),
            dict(p=p),
            lambda p, do: accuracy.jagged2_softmax(p, *plan.offsets, do, dim=-2),
        ),
        "linear": (
            lambda x, y, bias: F.jagged_linear(x, y, bias, x_offsets, "silu", **triton),
            dict(x=x, y=matrices, bias=bias),
            lambda x, y, bias, do: accuracy.jagged_dense_bmm(
                x, y, x_offsets, do, bias=bias, activation="silu"
            ),
        ),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "dense",
        "jagged",
        "softmax",
        "out",
        "array",
        "transposed",
        "softmax2",
        "softmax2-columns",
        "linear",
    ],
)
def test_functions(offsets, name, dtype):
    function, tensors, bounds = cases(offsets)[name]
    tensors = {of: x.to(dtype) for of, x in tensors.items()}
    actual, do = accuracy.results(function, tensors)
    accuracy.assert_accurate(actual, bounds(*tensors.values(), do))


def test_attention_in_three_steps(offsets):
    """Scores, their softmax and the multiplication with values equal jagged attention, with its
    gradients."""
    segments = offsets(LENGTHS)
    plan, scale = F.ScorePlan.from_offsets(segments), 8**-0.5
    q, k, v = (torch.randn(sum(LENGTHS), 8, requires_grad=True) for _ in range(3))
    options = dict(implementation="triton")
    weights = F.jagged2_softmax(
        F.jagged_jagged_bmm_jagged_out(q, k, plan, **options) * scale, plan, **options
    )
    out = F.array_jagged_bmm_jagged_out(weights, v, plan, **options)
    whole = F.jagged_attention(*(x[:, None] for x in (q, k, v)), segments)[:, 0]
    grad = torch.randn_like(out)
    torch.testing.assert_close(
        [out, *torch.autograd.grad(out, (q, k, v), grad)],
        [whole, *torch.autograd.grad(whole, (q, k, v), grad)],
    )


@pytest.fixture
def of_all_rows(monkeypatch):
    """`jagged_linear` with one weight and its kernels for the activation."""
    monkeypatch.setattr("jagged_modules.functional.linear.runs_row_kernels", lambda x: True)
    return lambda x, weight, *bias, activation: F.jagged_linear(
        x, weight, *bias, activation=activation
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("activation", POINTWISE)
def test_linear_of_all_rows(poisoned_memory, of_all_rows, activation, dtype):
    tensors = dict(x=torch.randn(37, 5), weight=torch.randn(12, 5))
    for bias in ({}, dict(bias=torch.randn(12))):
        accuracy.check(
            functools.partial(of_all_rows, activation=activation),
            lambda x, weight, *rest: shared_linear(x, weight, rest[:-1], rest[-1], activation),
            {name: x.to(dtype) for name, x in (tensors | bias).items()},
        )


@pytest.mark.parametrize("activation", ["relu", "gelu", "sigmoid"])
def test_second_derivatives_of_a_linear_of_all_rows(
    of_all_rows, assert_second_derivatives, activation
):
    assert_second_derivatives(
        functools.partial(of_all_rows, activation=activation),
        lambda x, weight, bias: POINTWISE[activation].function(x @ weight.mT + bias),
        [torch.randn(size) for size in ((7, 5), (3, 5), (3,))],
    )
