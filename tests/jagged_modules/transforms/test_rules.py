"""Each rule: the operator moves, and the result is that of the model, for maps with repeats, absent
users, U > C and U = 1."""

import pytest
import torch
from torch import nn

from jagged_modules.transforms.calls import RULES
from jagged_modules.transforms.fuse import make_plan

from .captured import capture, everything
from .rule_cases import CASES, KEPT

MAPS = ([2, 0, 2, 2, 0], [0, 0], [1], [4, 1, 1, 4, 2, 0, 3])
USERS = (3, 1, 6, 5)
NAMES = sorted(CASES)
GROUPS = [NAMES[start : start + 30] for start in range(0, len(NAMES), 30)]


class Calls(nn.Module):
    """The results of functions of x[map]."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def forward(self, x, y, index):
        x, y = x.index_select(0, index), y.index_select(0, index)
        return [function(x, y) for function in self.functions]


def example(users, index):
    return torch.randn(users, 4, 6).double(), torch.randn(users, 4, 6).double(), torch.tensor(index)


def assert_same(found, expected):
    found, expected = (torch.utils._pytree.tree_leaves(x) for x in (found, expected))
    assert len(found) == len(expected)
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.fixture(params=range(len(GROUPS)), scope="module")
def group(request):
    """Names of operators, and the model and plan of their calls."""
    torch.manual_seed(0)
    names = GROUPS[request.param]
    model = Calls([CASES[name] for name in names]).eval()
    captured = capture(model, example(3, MAPS[0]), {})
    plan = make_plan(captured, None, captured.hints, everything)
    moved = {str(node.target).removeprefix("aten.") for node in plan.moved}
    refused = {str(node.target).removeprefix("aten.") for node in plan.analysis.refused}
    return names, model, plan.apply()[0], moved, refused


def test_every_operator_with_a_rule_moves(group):
    names, _, _, moved, refused = group
    assert not refused
    assert set(names) <= moved


@pytest.mark.parametrize("users, index", zip(USERS, MAPS))
def test_the_rule_keeps_the_result(group, users, index):
    _, model, fused, *_ = group
    x, y, index = example(users, index)
    y = torch.cat([y, torch.full_like(y[:1], torch.nan)])  # one more row: no candidate has it
    assert_same(fused(x, y, index), model(x, y, index))


def test_every_rule_has_a_case():
    registered = {name.removeprefix("aten.") for name in RULES if name.startswith("aten.")}
    # only clean_up.py and distribute.py write it
    assert registered - set(CASES) == {"reshape.default"}


@pytest.mark.parametrize("name", KEPT)
def test_what_mixes_rows_stays(name):
    torch.manual_seed(0)

    class Model(nn.Module):
        def forward(self, x, other, index):
            return KEPT[name](x.index_select(0, index), other, index)

    model, index = Model().eval(), torch.tensor(MAPS[0])
    captured = capture(
        model, (torch.randn(3, 4, 6).double(), torch.randn(5, 4, 6).double(), index), {}
    )
    plan = make_plan(captured, None, captured.hints, everything)
    assert plan.analysis.refused
    fused = plan.apply()[0]
    for users, index in zip(USERS, MAPS):
        x, other = torch.randn(users, 4, 6).double(), torch.randn(len(index), 4, 6).double()
        assert_same(fused(x, other, torch.tensor(index)), model(x, other, torch.tensor(index)))
