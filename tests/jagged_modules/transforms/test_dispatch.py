"""With no fewer users than candidates the model itself runs, on replicated inputs."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from jagged_modules.transforms import fuse_broadcasts


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Linear(4, 8), nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, profile, item):
        return self.norm(self.user(profile["profile"]).relu() * self.item(item)).sum(1)


class Replicating(Model):
    def forward(self, profile, item, index):
        return super().forward(dict(profile=profile[index]), item)


def inputs(rows):
    return dict(profile=torch.randn(rows, 4)), torch.randn(rows, 4)


def counted(model):
    """The rows of the users' layer in each call of the model's own forward."""
    rows = []
    model.user.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    return rows


@pytest.fixture
def case():
    torch.manual_seed(0)
    model = Model().eval()
    fused = fuse_broadcasts(model, inputs(32), request_only=["profile"], max_batch=4096)
    return model, fused, counted(model)


@pytest.mark.parametrize("index, calls", [([1, 0], 1), ([2, 2, 0], 1), ([2, 0, 1, 1], 0)])
def test_caller_replicates(case, index, calls):
    model, fused, rows = case
    index, (profile, _), item = torch.tensor(index), inputs(3), torch.randn(len(index), 4)
    found = fused(profile, item, candidate_to_user=index)
    assert rows == [len(index)] * calls
    torch.testing.assert_close(found, model(dict(profile=profile["profile"][index]), item))
    torch.testing.assert_close(fused(profile=profile, item=item, candidate_to_user=index), found)


class Head(Model):
    """Nothing to move: the only operator on users' rows also reads the candidates'."""

    def forward(self, profile, item):
        return self.user(profile["profile"] * item).sum(1)


class ReplicatingHead(Head):
    def forward(self, profile, item, index):
        return super().forward(dict(profile=profile[index]), item)


def test_nothing_moved():
    """The model runs for all numbers of users, but not in exported programs."""
    model, index, (profile, _), item = (
        Head().eval(),
        torch.tensor([2, 0, 1, 1]),
        inputs(3),
        torch.randn(4, 4),
    )
    fused = fuse_broadcasts(model, inputs(32), request_only=["profile"], max_batch=4096)
    rows = counted(model)
    given = dict(profile=profile, item=item, candidate_to_user=index)
    torch.testing.assert_close(fused(**given), model(dict(profile=profile["profile"][index]), item))
    assert rows == [4, 4]
    torch.export.export(fused, (), given)
    assert rows == [4, 4]

    model = ReplicatingHead().eval()
    fused = fuse_broadcasts(model, (torch.randn(3, 4), torch.randn(9, 4), torch.arange(9) % 3))
    rows = counted(model)
    torch.testing.assert_close(
        fused(profile["profile"], item, index), model(profile["profile"], item, index)
    )
    assert rows == [4, 4]


def test_model_replicates():
    model = Replicating().eval()
    fused = fuse_broadcasts(model, (torch.randn(3, 4), torch.randn(900, 4), torch.arange(900) % 3))
    rows = counted(model)
    for users, candidates in ((5, 4), (4, 4), (3, 4)):
        example = (
            torch.randn(users, 4),
            torch.randn(candidates, 4),
            torch.randint(users, (candidates,)),
        )
        rows.clear()
        found = fused(*example)
        assert rows == [candidates] * (users >= candidates)
        torch.testing.assert_close(found, model(*example))


def test_new_parameters_and_dtypes_are_used(case):
    """The fused model shares its parameters and buffers with the model that it calls, also after
    they are replaced."""
    model, fused, rows = case
    state = {
        name: x.double() * 2 if x.is_floating_point() else x
        for name, x in model.state_dict().items()
    }
    fused.double()
    fused.load_state_dict(state, assign=True)
    (profile, item), index = inputs(3), torch.tensor([1, 0, 1])
    profile, item = dict(profile=profile["profile"].double()), item.double()
    found = fused(profile, item, candidate_to_user=index)
    assert rows == [3]
    torch.testing.assert_close(found, copy.deepcopy(fused)(profile, item, candidate_to_user=index))
    assert rows == [3]  # a copy has the graph alone


def test_errors_are_those_of_the_graph(case):
    _, fused, _ = case
    profile, item = inputs(3)
    for index, message in (
        ([0, 3, 1], "0 to 2, the rows of profile.profile, got values 0 to 3"),
        ([0, -1, 1], "got values -1 to 1"),
        ([0], "got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            fused(profile, item, candidate_to_user=torch.tensor(index))


@torch.no_grad()
def test_compiled_and_exported(case):
    """torch.compile has a graph for each case. An exported program has the fused graph for all
    sizes."""
    model, fused, _ = case
    model.user._forward_hooks.clear()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(fused, fullgraph=True, dynamic=True, backend=counter)
    users, candidates = (torch.export.Dim(name) for name in ("users", "candidates"))
    shapes = dict(
        profile=dict(profile={0: users}), item={0: candidates}, candidate_to_user={0: candidates}
    )
    keywords = dict(candidate_to_user=torch.arange(9) % 3)
    exported = torch.export.export(
        fused, (inputs(3)[0], torch.randn(9, 4)), keywords, dynamic_shapes=shapes
    ).module()
    for num_users, index in (
        (3, [1, 0, 1, 2, 0]),
        (5, [1, 0, 2]),
        (6, [1, 0, 1, 2, 3, 5, 2]),
        (7, [4, 2]),
    ):
        index, (profile, _), item = (
            torch.tensor(index),
            inputs(num_users),
            torch.randn(len(index), 4),
        )
        expected = model(dict(profile=profile["profile"][index]), item)
        torch.testing.assert_close(compiled(profile, item, candidate_to_user=index), expected)
        torch.testing.assert_close(exported(profile, item, candidate_to_user=index), expected)
    assert counter.frame_count == 2
