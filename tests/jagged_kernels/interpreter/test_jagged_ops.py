"""The public functions of the jagged operators on their kernels, in Triton's interpreter."""

import pytest
import torch

from jagged_modules import functional as F

LENGTHS, OTHERS = [3, 0, 40, 1, 17], [5, 4, 33, 0, 8]


def cases(offsets):
    """Name → function of tensors and an implementation, and the tensors."""
    segments, plan = offsets(LENGTHS), F.ScorePlan.from_offsets(offsets(LENGTHS), offsets(OTHERS))
    rows, others = sum(LENGTHS), sum(OTHERS)
    x, y, other, p = torch.randn(rows, 12), torch.randn(rows, 7), torch.randn(others, 12), torch.randn(plan.total)
    matrices, bias, weights = torch.randn(5, 12, 7), torch.randn(5, 7), torch.randn(5, 12, 7)
    return {
        "dense": (lambda *t, **i: F.jagged_dense_bmm(*t, segments, **i), (x, matrices)),
        "jagged": (lambda *t, **i: F.jagged_jagged_bmm(*t, segments, **i), (x, y)),
        "softmax": (lambda *t, **i: F.jagged_softmax(*t, segments, **i), (x,)),
        "out": (lambda *t, **i: F.jagged_jagged_bmm_jagged_out(*t, plan, **i), (x, other)),
        "array": (lambda *t, **i: F.array_jagged_bmm_jagged_out(*t, plan, **i), (p, other)),
        "transposed": (lambda *t, **i: F.array_jagged_bmm_jagged_out(*t, plan, transposed=True, **i), (p, x)),
        "softmax2": (lambda *t, **i: F.jagged2_softmax(*t, plan, **i), (p,)),
        "softmax2-columns": (lambda *t, **i: F.jagged2_softmax(*t, plan, dim=-2, **i), (p,)),
        "linear": (lambda *t, **i: F.jagged_linear(*t, segments, "silu", **i), (x, weights, bias)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dense", "jagged", "softmax", "out", "array", "transposed", "softmax2", "softmax2-columns", "linear"])
def test_functions(offsets, assert_accurate, name, dtype):
    function, tensors = cases(offsets)[name]
    tensors = [x.to(dtype) for x in tensors]
    assert_accurate(
        lambda *t: function(*t, implementation="triton"), lambda *t: function(*t, implementation="reference"), *tensors, fp32_roundings=4
    )


def test_attention_in_three_steps(offsets):
    """Scores, their softmax and their product with values are jagged attention, in value and gradient."""
    segments = offsets(LENGTHS)
    plan, scale = F.ScorePlan.from_offsets(segments), 8**-0.5
    q, k, v = (torch.randn(sum(LENGTHS), 8, requires_grad=True) for _ in range(3))
    options = dict(implementation="triton")
    weights = F.jagged2_softmax(F.jagged_jagged_bmm_jagged_out(q, k, plan, **options) * scale, plan, **options)
    out = F.array_jagged_bmm_jagged_out(weights, v, plan, **options)
    whole = F.jagged_attention(*(x[:, None] for x in (q, k, v)), segments)[:, 0]
    grad = torch.randn_like(out)
    torch.testing.assert_close([out, *torch.autograd.grad(out, (q, k, v), grad)], [whole, *torch.autograd.grad(whole, (q, k, v), grad)])
