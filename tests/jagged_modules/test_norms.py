"""RMSNorm on the CPU is one autograd node, equal to torch's."""

import pytest
import torch
from torch import nn

from jagged_modules.layers import norms

EPS = 0.1


def pair(width=5):
    own, torchs = (kind(width, eps=EPS).double() for kind in (norms.RMSNorm, nn.RMSNorm))
    nn.init.normal_(own.weight)
    torchs.load_state_dict(own.state_dict())
    return own, torchs


def results(norm, x, frozen=False):
    norm.weight.requires_grad_(not frozen)
    x, inputs = x.detach().requires_grad_(), [] if frozen else [norm.weight]
    y = norm(x)
    return y, *torch.autograd.grad(y, [x, *inputs], y.detach().cos())


@pytest.mark.parametrize("shape", [(7, 5), (7, 2, 5), (5,), (0, 5)], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_results_and_gradients(shape, frozen):
    x = torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64)[..., ::2]
    own, expected = (results(norm, x, frozen) for norm in pair())
    assert "CPUNorm" in own[0].grad_fn.name()
    torch.testing.assert_close(own, expected)


def test_second_derivatives():
    own, _ = pair()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    inputs = x, own.weight.detach().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda *given: norms._CPUNorm.apply(*given, EPS), inputs)


def test_a_rows_nan_stays_there():
    own, _ = pair()
    x = torch.randn(6, 5, dtype=torch.float64)
    clean = results(own, x, frozen=True)
    x[2] = torch.nan
    for given, found in zip(clean, results(own, x, frozen=True)):
        rows = torch.arange(6) != 2
        assert torch.equal(found[rows], given[rows]) and found[2].isnan().all()


def test_torch_computes_narrow_rows_and_transforms():
    """Rows of 16 bits are computed in fp32, and torch.func sees its operators."""
    own = norms.RMSNorm(5)
    x = torch.randn(4, 5)
    assert torch.equal(own.bfloat16()(x.bfloat16()), nn.RMSNorm(5).bfloat16()(x.bfloat16()))
    own, torchs = pair()
    x = x.double()
    for call in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(call(own)(x), call(torchs)(x))
