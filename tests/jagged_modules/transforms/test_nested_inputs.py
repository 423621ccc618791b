"""Models that take dicts and other containers: request_only names an argument, or entries of it."""

import copy
import sys
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

from jagged_modules.transforms import fuse_broadcasts

from .test_replication import matmul_rows


class Ids(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Features:
    user_id: torch.Tensor
    item: torch.Tensor
    history: list


torch.export.register_dataclass(Features, serialized_type_name="Features")


class OfDict(nn.Module):
    """Reads entries of a dict, some of them in containers of their own."""

    def __init__(self):
        super().__init__()
        self.ids, self.user, self.item = nn.Embedding(50, 8), nn.Linear(16, 8), nn.Linear(8, 8)

    def score(self, user_id, first, second, item):
        user = self.user(torch.cat([self.ids(user_id), first + second], 1)).relu()
        return (user * self.item(item)).sum(1)

    def forward(self, features, scale=1.0):
        return scale * self.score(features["user_id"], *features["history"], features["item"])


class OfTuples(OfDict):
    def forward(self, features, scale=1.0):
        return scale * self.score(
            features["user_id"],
            features["history"].first,
            features["history"].second,
            features["item"],
        )


class OfDataclass(OfDict):
    def forward(self, features, scale=1.0):
        return scale * self.score(features.user_id, *features.history, features.item)


def inputs(users, items):
    return (
        torch.randint(50, (users,)),
        torch.randn(users, 8),
        torch.randn(users, 8),
        torch.randn(items, 8),
    )


FORMS = {
    "dict": (
        OfDict,
        lambda user_id, first, second, item: dict(
            user_id=user_id, item=item, history=[first, second]
        ),
    ),
    "dict in another order": (
        OfDict,
        lambda user_id, first, second, item: dict(
            item=item, history=(first, second), user_id=user_id
        ),
    ),
    "named tuple": (
        OfTuples,
        lambda user_id, first, second, item: dict(
            user_id=user_id, item=item, history=Ids(first, second)
        ),
    ),
    "dataclass": (
        OfDataclass,
        lambda user_id, first, second, item: Features(user_id, item, [first, second]),
    ),
}
NAMES = ["features.user_id", "features.history"]


@pytest.mark.parametrize("form", FORMS)
def test_entries(form):
    """With fewer users than candidates and with no fewer, by position and by name; the graph alone
    and the model itself."""
    make, collect = FORMS[form]
    model = make().eval()
    fused = fuse_broadcasts(model, (collect(*inputs(64, 64)),), request_only=NAMES)
    assert any(site.decision == "moved" for site in fused.report.sites)
    for users, index in ((3, [2, 0, 2, 2, 0]), (3, [1, 0]), (1, [0, 0])):
        index, given = torch.tensor(index), inputs(users, len(index))
        *of_user, item = given
        expected = model(collect(*(x[index] for x in of_user), item))
        for module in (fused, copy.deepcopy(fused)):
            torch.testing.assert_close(module(collect(*given), candidate_to_user=index), expected)
            torch.testing.assert_close(
                module(features=collect(*given), candidate_to_user=index), expected
            )
    assert matmul_rows(fused, collect(*inputs(3, 50)), candidate_to_user=torch.arange(50) % 3) == [
        3,
        50,
    ]


def test_the_callers_containers_stay_as_they_are():
    fused = fuse_broadcasts(
        OfDict().eval(), (FORMS["dict"][1](*inputs(64, 64)),), request_only=NAMES
    )
    features = FORMS["dict"][1](*inputs(3, 2))
    before = dict(features, history=list(features["history"]))
    fused(features, candidate_to_user=torch.tensor([2, 0]))
    assert features.keys() == before.keys() and all(
        features[name] is before[name] for name in ("user_id", "item")
    )
    assert all(x is y for x, y in zip(features["history"], before["history"]))


def test_an_argument_names_all_its_entries():
    class TwoDicts(OfDict):
        def forward(self, user, item):
            return self.score(user["id"], user["first"], user["second"], item["item"])

    def collect(user_id, first, second, item):
        return dict(user=dict(id=user_id, first=first, second=second), item=dict(item=item))

    model, index, given = TwoDicts().eval(), torch.tensor([2, 0, 2, 2]), inputs(3, 4)
    expected = model(**collect(*(x[index] for x in given[:3]), given[3]))
    for names in (["user"], ["user.id", "user.first", "user.second"], ["user", "user.first"]):
        fused = fuse_broadcasts(model, collect(*inputs(64, 64)), request_only=names)
        torch.testing.assert_close(fused(**collect(*given), candidate_to_user=index), expected)


def test_compiled_and_exported():
    model, collect = OfDict().eval(), FORMS["dict"][1]
    fused = fuse_broadcasts(model, (collect(*inputs(64, 64)),), request_only=NAMES)
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, dynamic=True, backend="eager")
    users, candidates = (torch.export.Dim(name) for name in ("users", "candidates"))
    shapes = dict(user_id={0: users}, item={0: candidates}, history=[{0: users}, {0: users}])
    shapes = dict(features=shapes, candidate_to_user={0: candidates})
    example = collect(*inputs(3, 9)), dict(candidate_to_user=torch.arange(9) % 3)
    exported = torch.export.export(fused, example[:1], example[1], dynamic_shapes=shapes).module()
    with torch.no_grad():
        for num_users, index in ((3, [1, 0, 1, 2, 0]), (5, [1, 0, 2])):
            index, given = torch.tensor(index), inputs(num_users, len(index))
            expected = model(collect(*(x[index] for x in given[:3]), given[3]))
            for module in (compiled, exported):
                torch.testing.assert_close(
                    module(collect(*given), candidate_to_user=index), expected
                )


class ReturnsDict(nn.Module):
    """The dict of a multi-task library: with tasks' names, and None for an auxiliary loss."""

    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Linear(32, 256), nn.Linear(32, 256)
        self.deep, self.head = nn.Linear(256, 256), nn.Linear(256, 1)

    def forward(self, user, item):
        hidden = (self.deep(self.user(user).relu()) + self.item(item)).relu()
        return dict(loss=None, click=self.head(hidden), more=(True, "like", hidden, None))


@pytest.mark.parametrize("max_batch", [(1, 64), ((1, 64), (64, 4096))], ids=["", "guard"])
def test_results_that_are_no_tensors(max_batch):
    model, example = ReturnsDict().eval(), (torch.randn(8, 32), torch.randn(8, 32))
    fused = fuse_broadcasts(model, example, request_only=["user"], max_batch=max_batch)
    has_guard = isinstance(max_batch[0], tuple)
    assert (fused.report.guard is not None) == has_guard
    index = torch.arange(90) % 3
    given, shapes = (torch.randn(3, 32), torch.randn(90, 32)), None
    if has_guard:
        shapes = fused.report.ranges.dynamic_shapes()
    exported = torch.export.export(
        fused, given, dict(candidate_to_user=index), dynamic_shapes=shapes
    )
    compiled = torch.compile(fused, fullgraph=True, dynamic=True, backend="eager")
    expected = model(given[0][index], given[1])
    for module in (fused, exported.module(), compiled):
        found = module(*given, candidate_to_user=index)
        assert found["loss"] is None and found["more"][:2] == (True, "like")
        assert found.keys() == expected.keys() and found["more"][3] is None
        torch.testing.assert_close(found["click"], expected["click"])
        torch.testing.assert_close(found["more"][2], expected["more"][2])


def test_a_model_that_replicates_entries_itself():
    class Replicates(OfDict):
        def forward(self, features, index):
            return self.score(
                *(features[name][index] for name in ("user_id", "first", "second")),
                features["item"],
            )

    def collect(user_id, first, second, item):
        return dict(user_id=user_id, first=first, second=second, item=item)

    model, rows = Replicates().eval(), []
    fused = fuse_broadcasts(model, (collect(*inputs(3, 90)), torch.arange(90) % 3))
    model.user.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    for users, candidates in ((3, 8), (8, 3)):
        index, given = torch.randint(users, (candidates,)), collect(*inputs(users, candidates))
        expected = model(given, index)
        rows.clear()
        torch.testing.assert_close(fused(given, index), expected)
        assert rows == [candidates] * (users >= candidates)  # the model's own forward


BAD_NAMES = {
    "an entry": (
        ["features.user"],
        (
            r"\['features.user_id', 'features.item', 'features.history.0', 'features.history.1',"
            r" 'scale'\], got 'features.user'"
        ),
    ),
    "an entry of no tensor": (
        ["scale"],
        "must name inputs that are tensors with rows, got 'scale' without",
    ),
    "an entry alone": (
        ["user_id"],
        "request_only must have names of forward's inputs, .* got 'user_id'",
    ),
}


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names(name):
    names, message = BAD_NAMES[name]
    with pytest.raises(ValueError, match=message):
        fuse_broadcasts(OfDict().eval(), (FORMS["dict"][1](*inputs(8, 8)), 2.0), request_only=names)


def test_two_entries_of_one_name():
    class Model(nn.Module):
        def forward(self, features):
            return features["a.b"] + features["a"]["b"]

    example = {"a.b": torch.randn(8, 4), "a": dict(b=torch.randn(8, 4))}
    with pytest.raises(
        ValueError, match="inputs must have entries of different names, but two are 'features.a.b'"
    ):
        fuse_broadcasts(Model().eval(), (example,), request_only=["features.a.b"])


BAD_CALLS = {
    "rows of a user": (
        dict(history=[torch.randn(3, 8), torch.randn(4, 8)]),
        ValueError,
        "features.history.1 must have one row per user, 3 as",
    ),
    "rows of an item": (
        dict(item=torch.randn(5, 8)),
        ValueError,
        "features.item must have one row per candidate, 4 as candidate_to_user, got 5",
    ),
    "dimensions": (
        dict(item=torch.randn(4, 8, 1)),
        ValueError,
        r"features.item must have 2 dimensions, as in example_inputs, got \[4, 8, 1\]",
    ),
    "no tensor": (dict(user_id=1), TypeError, "features.user_id must be a torch.Tensor, got int"),
    "entries for a tensor": (
        dict(user_id=[1, 2]),
        ValueError,
        "features must have the entries of example_inputs, .*user_id'.*, got .*user_id.0'",
    ),
    "an entry more": (
        dict(age=torch.ones(3)),
        ValueError,
        "features must have the entries of example_inputs, .*, got .*'features.age'",
    ),
    "an entry less": (
        {},
        ValueError,
        (
            r"must have the entries of example_inputs, .*'features.user_id'\], got .*history.1',"
            r" 'features.item'\]"
        ),
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name):
    change, error, message = BAD_CALLS[name]
    fused = fuse_broadcasts(
        OfDict().eval(), (FORMS["dict"][1](*inputs(64, 64)),), request_only=NAMES
    )
    features = FORMS["dict"][1](*inputs(3, 4)) | change
    if name == "an entry less":
        del features["user_id"]
    with pytest.raises(error, match=message):
        fused(features, candidate_to_user=torch.tensor([0, 2, 1, 0]))


class OfFields(nn.Module):
    def forward(self, fields):
        return sum(fields.values())


def test_calls_of_the_host_for_an_entry():
    """Of a call that runs the model: rows are gathered for candidates, entry by entry."""
    fields = {f"user{i}": torch.rand(8, 4) for i in range(40)}
    names = [f"fields.{name}" for name in fields]
    example = [{**fields, "item": torch.rand(8, 4)}]
    fused = fuse_broadcasts(OfFields().eval(), example, request_only=names, max_batch=(8, 8))
    index, calls = torch.arange(8), []
    sys.setprofile(lambda frame, event, _: event == "call" and calls.append(frame.f_code.co_name))
    try:
        result = fused(*example, candidate_to_user=index)
    finally:
        sys.setprofile(None)
    torch.testing.assert_close(result, sum(example[0].values()))
    assert len(calls) <= 10 * len(fields)  # pytree's paths of entries take 44
