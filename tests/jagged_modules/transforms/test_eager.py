"""The form that eager calls run has the results of the graph, with the parameters of the call."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from jagged_modules.transforms import fuse_broadcasts
from jagged_modules.transforms.eager import FUNCTIONS, with_eager_form
from jagged_modules.transforms.fuse import make_plan

from .captured import capture, everything
from .rule_cases import CASES
from .test_rules import Calls, example

NAMES = [name for name in CASES if any(str(target) == f"aten.{name}" for target in FUNCTIONS)]


def test_functions_are_their_operators():
    assert len(NAMES) > 20
    captured = capture(Calls([CASES[name] for name in NAMES]), example(3, [2, 0, 2, 2, 0]), {})
    fused = make_plan(captured, None, captured.hints, everything).apply()[0]
    inputs = example(3, [2, 1, 1, 0])
    expected = fused(*inputs)
    with_eager_form(fused)
    for x, y in zip(*map(pytree.tree_leaves, (fused(*inputs), expected)), strict=True):
        assert torch.equal(x, y) and x.dtype == y.dtype and x.stride() == y.stride()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.item = nn.Linear(4, 8)

    def forward(self, profile, item):
        return (self.user(profile) * self.item(item)).sum(1)


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def with_new_layer(fused):
    fused.item = nn.Linear(4, 8)


CHANGES = {
    "nothing": lambda fused: None,
    "dtype": lambda fused: fused.double(),
    "parameter": lambda fused: setattr(fused.item, "weight", nn.Parameter(torch.randn(8, 4))),
    "in place": lambda fused: nn.init.ones_(fused.item.weight),
    "module": with_new_layer,
    "state": lambda fused: fused.load_state_dict(
        {name: x + 1 for name, x in fused.state_dict().items()}, assign=True
    ),
    "parametrized": lambda fused: parametrize.register_parametrization(
        fused.item, "weight", Double()
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_state_is_that_of_the_call(name):
    torch.manual_seed(0)
    fused = fuse_broadcasts(
        Model().eval(),
        (torch.randn(32, 4), torch.randn(32, 4)),
        request_only=["profile"],
        max_batch=4096,
    )
    inputs, index = (torch.randn(3, 4), torch.randn(6, 4)), torch.tensor([2, 0, 1, 1, 0, 2])
    before = fused(*inputs, candidate_to_user=index)
    CHANGES[name](fused)
    dtype = next(fused.parameters()).dtype
    inputs = [x.to(dtype) for x in inputs]
    found = fused(*inputs, candidate_to_user=index)
    # a copy runs the graph
    torch.testing.assert_close(found, copy.deepcopy(fused)(*inputs, candidate_to_user=index))
    assert torch.allclose(found, before.to(dtype)) == (name in ("nothing", "dtype"))


def test_functional_call_and_gradients():
    torch.manual_seed(0)
    model = Model().eval()
    fused = fuse_broadcasts(
        model, (torch.randn(32, 4), torch.randn(32, 4)), request_only=["profile"], max_batch=4096
    )
    profile, item, index = torch.randn(3, 4), torch.randn(6, 4), torch.tensor([2, 0, 1, 1, 0, 2])
    state = {name: torch.randn_like(x, requires_grad=True) for name, x in model.named_parameters()}
    found = torch.func.functional_call(fused, state, (profile, item), dict(candidate_to_user=index))
    expected = torch.func.functional_call(model, state, (profile[index], item))
    torch.testing.assert_close(found, expected)
    for x, y in zip(
        *(torch.autograd.grad(out.sum(), list(state.values())) for out in (found, expected)),
        strict=True,
    ):
        torch.testing.assert_close(x, y)
