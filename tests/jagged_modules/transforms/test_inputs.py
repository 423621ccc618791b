"""Bad arguments raise errors that name them, and leave the model as it was. The report."""

import copy
import pickle

import pytest
import torch
from torch import nn

from jagged_modules import transforms
from jagged_modules.transforms import fuse_broadcasts

from .test_replication import matmul_rows


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.over = nn.Linear(4, 8), nn.Linear(12, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, profile, item, scale=1.0):
        return self.over(torch.cat([self.user(profile).relu(), item], -1)) * scale


def inputs(rows=32):
    return torch.randn(rows, 4), torch.randn(rows, 4)


class Counting(Model):
    def forward(self, profile, item):
        self.calls += 1
        return super().forward(profile, item)


class ReturnsShape(Model):
    def forward(self, profile, item):
        return super().forward(profile, item), 3


class Writes(Model):
    def forward(self, profile, item):
        profile.add_(1)
        return super().forward(profile, item)


class TakesAny(Model):
    def forward(self, profile, *items):
        return super().forward(profile, *items)


MODEL = Model().eval()
BAD = {
    "no module": (lambda x: x, inputs(), {}, TypeError, "model must be an nn.Module, got function"),
    "training": (
        Model(),
        inputs(),
        {},
        ValueError,
        "model must be in eval mode, got the model in training mode",
    ),
    "a part in training": (
        nn.Sequential(nn.Dropout()).train().eval().append(nn.Dropout()),
        inputs(),
        {},
        ValueError,
        "got 1 in training mode",
    ),
    "no inputs": (MODEL, None, {}, ValueError, "example_inputs must be the inputs of forward"),
    "a tensor": (
        MODEL,
        torch.ones(3, 4),
        {},
        TypeError,
        "example_inputs must be a tuple of inputs or a dict of them by name, got Tensor",
    ),
    "a string": (
        MODEL,
        inputs(),
        dict(request_only="profile"),
        TypeError,
        "request_only must be a sequence of names.*got 'profile'",
    ),
    "unknown name": (
        MODEL,
        inputs(),
        dict(request_only=["user"]),
        ValueError,
        r"request_only must have names .*\['profile', 'item'\], got 'user'",
    ),
    "no tensor": (
        MODEL,
        (*inputs(), 2.0),
        dict(request_only=["scale"]),
        ValueError,
        "must name inputs that are tensors with rows, got 'scale'",
    ),
    "other rows": (
        MODEL,
        (torch.randn(2, 4), torch.randn(3, 4)),
        dict(request_only=["profile", "item"]),
        ValueError,
        "one row per candidate",
    ),
    "no names": (
        TakesAny().eval(),
        inputs(),
        dict(request_only=["profile"]),
        ValueError,
        r"inputs have names, but forward takes \*items",
    ),
    "max_batch": (
        MODEL,
        inputs(),
        dict(request_only=["profile"], max_batch=0),
        ValueError,
        "max_batch must be .*got 0",
    ),
    "max_batch of three": (
        MODEL,
        inputs(),
        dict(request_only=["profile"], max_batch=(1, 2, 3)),
        ValueError,
        "max_batch must be .*pair",
    ),
    "max_batch in the wrong order": (
        MODEL,
        inputs(),
        dict(request_only=["profile"], max_batch=(1024, 16)),
        ValueError,
        (
            r"max_batch must be \(users, candidates\) with no more users than candidates, got 1024"
            r" users and 16 candidates"
        ),
    ),
    "max_batch of a float": (
        MODEL,
        inputs(),
        dict(request_only=["profile"], max_batch=(2, 9.5)),
        TypeError,
        r"max_batch\[1\] must be an int",
    ),
    "max_batch alone": (
        MODEL,
        inputs(),
        dict(max_batch=1024),
        ValueError,
        "max_batch needs request_only.*Got max_batch=1024",
    ),
    "no tensor returned": (
        ReturnsShape().eval(),
        inputs(),
        {},
        ValueError,
        "model must return tensors, None, .* of them, got int 3 as output 1",
    ),
    "writes a buffer": (
        Counting().eval(),
        inputs(),
        {},
        ValueError,
        "must not write to its buffers or inputs.*calls",
    ),
    "writes an input": (
        Writes().eval(),
        inputs(),
        {},
        ValueError,
        "must not write to its buffers or inputs.*profile",
    ),
}


def test_example_inputs_with_gaps_between_rows():
    """torch.export takes their strides for conditions of the model."""
    rows = torch.randn(32, 3, 4)
    fused = fuse_broadcasts(MODEL, (rows[:, 0], rows[:, 1]), request_only=["profile"])
    profile, item, index = torch.randn(3, 4), torch.randn(9, 2, 4)[:, 1], torch.randint(3, (9,))
    torch.testing.assert_close(
        fused(profile, item, candidate_to_user=index), MODEL(profile[index], item)
    )


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    model, example, options, error, message = BAD[name]
    before = copy.deepcopy(model)
    with pytest.raises(error, match=message):
        fuse_broadcasts(model, example, **options)
    if isinstance(model, nn.Module):
        assert all(
            torch.equal(x, y)
            for x, y in zip(model.state_dict().values(), before.state_dict().values())
        )


@pytest.fixture(scope="module")
def fused():
    return fuse_broadcasts(MODEL, inputs(), request_only=["profile"])


BAD_CALLS = {
    "above": (
        3,
        4,
        [0, 1, 3, 0],
        ValueError,
        "candidate_to_user must be 0 to 2, the rows of profile, got values 0 to 3",
    ),
    "below": (
        3,
        4,
        [0, -1, 2, 0],
        ValueError,
        "candidate_to_user must be 0 to 2, the rows of profile, got values -1 to 2",
    ),
    "too few": (
        3,
        4,
        [0, 1],
        ValueError,
        "item must have one row per candidate, 2 as candidate_to_user, got 4",
    ),
    "floats": (
        3,
        2,
        [0.0, 1.0],
        TypeError,
        "candidate_to_user must be int32 or int64, got torch.float32",
    ),
    "two dimensions": (
        3,
        2,
        [[0], [1]],
        ValueError,
        r"candidate_to_user must be 1-D, got shape \[2, 1\]",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(fused, name):
    users, candidates, index, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        fused(
            torch.randn(users, 4), torch.randn(candidates, 4), candidate_to_user=torch.tensor(index)
        )


@pytest.mark.parametrize("name, position", [("profile", 0), ("item", 1)])
def test_calls_without_a_tensor(fused, name, position):
    given = [torch.randn(3, 4), torch.randn(4, 4)]
    for other, error, message in (
        ([1.0, 2.0], TypeError, "be a torch.Tensor, got list"),
        (torch.tensor(1.0), ValueError, "have rows"),
    ):
        given[position] = other
        with pytest.raises(error, match=f"{name} must {message}"):
            fused(*given, candidate_to_user=torch.tensor([0, 1, 2, 0]))


def test_the_model_is_unchanged_and_shares_its_parameters(fused):
    profile, item = inputs(5)
    assert MODEL(profile, item).shape == (5, 1)
    assert fused.state_dict().keys() == MODEL.state_dict().keys()
    assert all(x is y for x, y in zip(fused.parameters(), MODEL.parameters()))


def test_keyword_inputs():
    profile, item = inputs()
    fused = fuse_broadcasts(MODEL, dict(profile=profile, item=item), request_only=["profile"])
    index = torch.tensor([1, 0, 1])
    expected = MODEL(profile[index], item[:3])
    torch.testing.assert_close(
        fused(profile=profile[:2], item=item[:3], candidate_to_user=index), expected
    )


@pytest.mark.parametrize("users", [2, 9])  # the graph and the model
def test_a_part_of_a_model_that_is_trained(fused, users):
    index, (profile, item) = torch.tensor([1, 0, 1]), inputs(9)
    expected = fused(profile[:users], item[:3], candidate_to_user=index)
    whole = nn.ModuleDict(dict(fused=fused, head=nn.Linear(1, 1)))
    assert not fused.training
    for mode in (True, False):
        whole.train(mode)
        torch.testing.assert_close(
            whole.fused(profile[:users], item[:3], candidate_to_user=index), expected
        )
    copy.deepcopy(fused).eval()


def test_a_capture_under_autocast():
    """It is no part of the graph, which has the dtypes of the model, as calls that run the model
    do."""
    with torch.autocast("cpu", torch.bfloat16):
        fused = fuse_broadcasts(MODEL, inputs(), request_only=["profile"])
    index = torch.tensor([1, 0, 1])
    for users in (2, 9):
        profile, item = inputs(users)[0], inputs(3)[1]
        assert fused(profile, item, candidate_to_user=index).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            found = fused(profile, item, candidate_to_user=index)
            expected = MODEL(profile[index], item)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)


def test_a_compiled_part():
    model = Model().eval()
    model.user = torch.compile(model.user, backend="eager")
    fused, index, (profile, item) = (
        fuse_broadcasts(model, inputs(), request_only=["profile"]),
        torch.tensor([1, 0, 1]),
        inputs(9),
    )
    for users in (2, 9):
        torch.testing.assert_close(
            fused(profile[:users], item[:3], candidate_to_user=index),
            model(profile[index], item[:3]),
        )


def test_report(fused):
    report = fused.report
    assert isinstance(report, transforms.Report)
    text = str(report)
    for part in (
        "linear",
        "moved",
        "32 → 2",
        "test_inputs.py",
        "whole model",
        "users = 2",
        "certificate: results equal for 32 candidates",
    ):
        assert part in text
    site = next(site for site in report.sites if site.operator == "linear")
    assert (site.rows_before, site.rows_after, site.decision) == (32, 2, "moved")
    assert site.before.flops == 2 * 32 * 8 * 4 and site.after.flops == 2 * 2 * 8 * 4


def test_max_batch_sets_the_sizes_of_the_estimates():
    report = fuse_broadcasts(MODEL, inputs(), request_only=["profile"], max_batch=(10, 1000)).report
    site = next(site for site in report.sites if site.operator == "linear")
    assert (site.rows_before, site.rows_after) == (1000, 10)


def test_compile(fused):
    profile, item = inputs(3)
    index = torch.tensor([1, 0, 1])
    with torch.no_grad():
        compiled = torch.compile(fused, backend="eager", fullgraph=True, dynamic=True)
        torch.testing.assert_close(
            compiled(profile, item, candidate_to_user=index),
            fused(profile, item, candidate_to_user=index),
        )


def test_gradients(fused):
    """For checks only: the transformation is for inference. The parameters are the model's."""
    profile, item = inputs(3)
    assert matmul_rows(fused, profile, item, candidate_to_user=torch.tensor([1, 0, 1]))[0] == 3
    fused(profile, item, candidate_to_user=torch.tensor([1, 0, 1])).sum().backward()
    assert MODEL.user.weight.grad is not None
    MODEL.zero_grad()


def test_random_operators_stay():
    """Each candidate has random numbers of its own, as in the model."""

    class Random(Model):
        def forward(self, profile, item):
            user = nn.functional.dropout(self.user(profile).exp(), 0.5, training=True)
            return self.over(torch.cat([user, item], -1)) + torch.rand_like(user).sum(
                -1, keepdim=True
            )

    model = Random().eval()
    fused = fuse_broadcasts(model, inputs(), request_only=["profile"])
    profile, item = inputs(40)
    results = []
    for call in (
        lambda: model(profile[:1].expand(40, -1), item),
        lambda: fused(profile[:1], item, candidate_to_user=torch.zeros(40).long()),
    ):
        torch.manual_seed(3)
        results.append(call())
    torch.testing.assert_close(*results)


def test_control_flow_on_data():
    class Branches(Model):
        def forward(self, profile, item):
            return super().forward(profile, item) if profile.sum() > 0 else item[:, :1]

    with pytest.raises(ValueError, match="model must be one that torch.export captures"):
        fuse_broadcasts(Branches().eval(), inputs())


CONDITIONS = [
    lambda rows: rows % 2 == 0,
    lambda rows: rows % 3 == 0,
    lambda rows: rows % 3 == 2,
    lambda rows: rows > 20,
    lambda rows: rows != 7,
    lambda rows: rows <= 65535,
]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_control_flow_on_sizes(condition):
    """The capture has one of the branches. It would be wrong for other sizes."""

    class Branches(Model):
        def forward(self, profile, item):
            return super().forward(profile, item) if condition(profile.shape[0]) else item[:, :1]

    with pytest.raises(
        ValueError,
        match="model must compute the same for all sizes, but the capture holds only for",
    ):
        fuse_broadcasts(Branches().eval(), inputs(), request_only=["profile"])


class Mean(nn.Module):
    """What the capture makes numbers of: an option, an input that is None, sizes."""

    def forward(self, history, item, index, power=2, bias=None):
        x = (history**power).sum(1)[index] / history.shape[1] + item
        return x if bias is None else x + bias


OTHER_CALLS = {
    "a size": (
        dict(history=torch.randn(3, 9, 8)),
        r"history must have size 6 in dimension 1, .* got \[3, 9, 8\]",
    ),
    "dimensions": (
        dict(history=torch.randn(3, 6, 8, 1)),
        r"history must have 3 dimensions, .* got \[3, 6, 8, 1\]",
    ),
    "an option": (dict(power=3), "power must be as in example_inputs, 2, got 3"),
    "an input that was None": (
        dict(bias=torch.ones(8)),
        "bias must be as in example_inputs, None, got",
    ),
    "sizes that were equal": (
        dict(item=torch.randn(99, 8)),
        r"item must have size 2000|index must have size 99",
    ),
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_what_the_capture_takes_for_constant(name):
    """Another value would be ignored, so it is an error."""
    example = dict(
        history=torch.randn(3, 6, 8),
        item=torch.randn(2000, 8),
        index=torch.arange(2000) % 3,
        power=2,
        bias=None,
    )
    fused = fuse_broadcasts(Mean().eval(), example)
    torch.testing.assert_close(fused(**example), Mean()(**example))
    change, message = OTHER_CALLS[name]
    with pytest.raises(ValueError, match=message):
        fused(**example | change)


def test_sizes_that_the_model_makes_constant():
    class Loops(Mean):
        def forward(self, history, item, index):
            x = history[index].sum(1)
            for row in range(len(history)):
                x = x + row
            return x + item

    fused = fuse_broadcasts(
        Loops().eval(), (torch.randn(3, 6, 64), torch.randn(500, 64), torch.arange(500) % 3)
    )
    with pytest.raises(ValueError, match="history must have size 3 in dimension 0"):
        fused(torch.randn(4, 6, 64), torch.randn(500, 64), torch.arange(500) % 4)


def test_inputs_that_the_model_never_joins():
    """Each has a size of its own in the capture."""

    class Towers(nn.Module):
        def forward(self, profile, history, item):
            zeros = torch.zeros(history.shape[0], 4)
            return dict(
                profile=profile.exp() + profile.shape[0] * 0,
                history=torch.cat([history.sum(1), zeros], 1),
                item=item + 1,
            )

    example = torch.randn(32, 4), torch.randn(32, 5, 4), torch.randn(32, 4)
    fused = fuse_broadcasts(Towers().eval(), example, request_only=["profile", "history"])
    profile = torch.randn(3, 4)
    history = torch.randn(3, 5, 4)
    item = torch.randn(5, 4)
    index = torch.tensor([0, 2, 2, 0, 1])
    found = copy.deepcopy(fused)(profile, history, item, candidate_to_user=index)
    torch.testing.assert_close(found, Towers()(profile[index], history[index], item))


def test_the_result_is_not_pickled(fused):
    with pytest.raises(TypeError, match="cannot be pickled: save it with torch.export"):
        pickle.dumps(fused)


def test_strides():
    class Strided(Model):
        def forward(self, profile, item):
            return profile.mul(2).as_strided((profile.shape[0], 1), (4, 1)) + item

    with pytest.raises(ValueError, match="model must not call as_strided"):
        fuse_broadcasts(Strided().eval(), inputs(), request_only=["profile"])


def test_views_of_gathered_values():
    """A copy that is moved before an expansion leaves the gathered value with other strides."""

    class Views(nn.Module):
        def forward(self, profile, item):
            x = (
                profile[:, :, None]
                .expand(-1, -1, 3)
                .contiguous()
                .cumsum(0)[None]
                .expand(2, -1, -1, -1)
                .contiguous()
            )
            return x.view(-1, 12).cumsum(0) + item[:1, :1]

    fused = fuse_broadcasts(Views().eval(), inputs(), request_only=["profile"])
    profile, item = inputs(3)
    index = torch.tensor([2, 2, 0])
    torch.testing.assert_close(
        fused(profile, item, candidate_to_user=index), Views()(profile[index], item)
    )


def test_an_index_of_another_dimension_keeps_the_lineage():
    """x[m][:, longer] selects columns of user rows: it must not gather the users' rows first."""

    class Columns(nn.Module):
        def forward(self, profile, item):
            return profile[:, torch.arange(12) % 4].exp().sum(1, keepdim=True) + item

    fused = fuse_broadcasts(Columns().eval(), inputs(), request_only=["profile"])
    assert all(
        site.decision == "moved"
        for site in fused.report.sites
        if site.operator in ("index.Tensor", "exp")
    )
    profile, item = inputs(3)
    index = torch.tensor([2, 2, 0])
    torch.testing.assert_close(
        fused(profile, item, candidate_to_user=index), Columns()(profile[index], item)
    )


@pytest.mark.parametrize("nested", [False, True])
def test_a_column_that_the_candidate_chooses(nested):
    """gather allows fewer rows of the index, so the capture holds for candidates up to the rows of
    the users' input: both are the batch."""

    class Counters(nn.Module):
        def forward(self, profile, item):
            return profile["x" if nested else slice(None)].exp().gather(1, item[:, None])

    def users(profile):
        return dict(x=profile) if nested else profile

    model, example = Counters().eval(), torch.randint(4, (32,))
    fused = copy.deepcopy(
        fuse_broadcasts(model, (users(inputs()[0]), example), request_only=["profile"])
    )
    for rows, index in ((3, [2, 2, 0, 1, 2]), (5, [4]), (1, [0, 0])):
        profile, item, index = inputs(rows)[0], torch.randint(4, (len(index),)), torch.tensor(index)
        torch.testing.assert_close(
            fused(users(profile), item, candidate_to_user=index), model(users(profile[index]), item)
        )


def test_export_and_deepcopy(fused):
    """Users and candidates are independent sizes of the exported program."""
    users, candidates = torch.export.Dim("users", min=2), torch.export.Dim("candidates", min=2)
    profile, item = inputs(6)
    index = torch.tensor([1, 0, 1, 2, 2, 2])
    shapes = dict(profile={0: users}, item={0: candidates}, candidate_to_user={0: candidates})
    program = torch.export.export(
        fused, (profile[:3], item), dict(candidate_to_user=index), dynamic_shapes=shapes
    )
    expected = MODEL(profile[:5][index % 2], item)
    for module in (program.module(), copy.deepcopy(fused)):
        torch.testing.assert_close(module(profile[:5], item, candidate_to_user=index % 2), expected)
