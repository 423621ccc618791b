"""Ranges of users and candidates: the sizes of each operator, where each of two placements runs,
and exported programs of the ranges."""

import copy
import dataclasses
import itertools
import random

import pytest
import torch
from marks import slow_after
from torch import nn

from jagged_modules.transforms import fuse, fuse_broadcasts, placement, ranges
from jagged_modules.transforms.bags import select_rows
from jagged_modules.transforms.ranges import cheapest, corners_of

from .test_packages import Model, expected, inputs
from .test_replication import matmul_rows

LIMITS = (1, 64), (64, 4096)
ENDS = list(itertools.product(*LIMITS))


class Tower(nn.Module):
    """A layer of the user, and one of the user and the item: in parts it has fewer FLOPs and more
    kernels."""

    def __init__(self, width=32):
        super().__init__()
        self.user, self.head = nn.Linear(width, width), nn.Linear(2 * width, width)

    def forward(self, user, item):
        return self.head(torch.cat([self.user(user).relu(), item], 1))


def rows_of(users, candidates, *, width=32, dtype=torch.float64):
    """Inputs of the fused model."""
    index = torch.randint(users, (candidates,))
    user, item = (torch.randn(rows, width, dtype=dtype) for rows in (users, candidates))
    return dict(user=user, item=item, candidate_to_user=index)


def of_model(model, given):
    """The model's result on replicated rows."""
    index = given["candidate_to_user"]
    return model(given["user"][index], given["item"])


@pytest.fixture(scope="module")
def tower():
    torch.manual_seed(0)
    model = Tower().double().eval()
    example = torch.randn(64, 32).double(), torch.randn(64, 32).double()
    # of a processor where the model itself is as good wherever the head is whole
    slow = dataclasses.replace(placement.CPU, flops=3.75, kernel=60e3, view=0, vector=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "CPU", slow)
        fused = fuse_broadcasts(model, example, request_only=["user"], max_batch=LIMITS)
    return model, fused


# -- the sizes of each operator --------------------------------------------------------------------


def table(report):
    return [(x.operator, x.shape, x.sizes) for x in report.ranges.operators]


def test_each_operator_has_users_or_candidates_or_both(tower):
    of_user = ("users", "32"), ("users",)
    of_item = ("candidates", "32"), ("candidates",)
    gather = ("gather", ("candidates", "32"), ("users", "candidates"))
    first = [("linear", *of_user), ("relu", *of_user)]
    report = tower[1].report
    assert sorted(table(report)) == sorted(
        [*first, ("linear", *of_item), ("linear", *of_user), gather, ("add.Tensor", *of_item)]
    )
    joined = ("cat", ("candidates", "64"), ("candidates",))
    assert table(report.other) == [*first, gather, joined, ("linear", *of_item)]
    assert report.ranges.limits == dict(users=(1, 64), candidates=(64, 4096))
    printed = str(report.ranges).splitlines()
    assert printed[0].split() == ["operator", "line", "result", "sizes"]
    assert printed[1].endswith("[users, 32]       users 1 to 64")


def test_a_fusion_has_the_sizes_of_all_that_it_reads(monkeypatch):
    """The model is exported once for all placements."""
    exports, export = [], fuse.export
    monkeypatch.setattr(fuse, "export", lambda *args: exports.append(args) or export(*args))
    torch.manual_seed(0)
    given = inputs(64, 64, 7)
    del given["candidate_to_user"]
    auto = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    shapes = dict(history=auto, padding=auto, profile={0: auto[0]}, item={0: auto[0]})
    fused = fuse_broadcasts(
        Model().eval(),
        given,
        request_only=["history", "padding", "profile"],
        max_batch=((1, 8), (100, 2000)),
        dynamic_shapes=shapes,
    )
    assert len(exports) == 1
    found = {x.operator: x for x in fused.report.ranges.operators}
    assert found["target_attention"].sizes == ("users", "candidates", "history[1]")
    assert found["target_attention"].shape == ("2*candidates", "1", "8")
    own, events = fused.report.ranges, torch.export.Dim("events", max=99)
    assert own.limits["history[1]"] == (1, None)
    shapes = own.dynamic_shapes({"history[1]": events})
    assert shapes["padding"][1] is events and shapes["padding"][0].max == 8
    assert own.dynamic_shapes()["padding"][1] is torch.export.Dim.AUTO
    with pytest.raises(ValueError, match=r"others must have names of .*\['history\[1\]'\], got"):
        own.dynamic_shapes({"events": events})
    with pytest.raises(ValueError, match="other than users and candidates"):
        own.dynamic_shapes({"users": events})


def test_a_model_that_replicates_rows_itself_has_sizes_of_its_inputs():
    class Replicating(Tower):
        def forward(self, user, item, index):
            return super().forward(user[index], item)

    example = torch.randn(4, 32), torch.randn(900, 32), torch.arange(900) % 4
    report = fuse_broadcasts(Replicating().eval(), example).report
    assert {x.sizes for x in report.ranges.operators} == {
        ("user[0]",),
        ("item[0]",),
        ("item[0]", "user[0]"),
    }
    assert report.guard is None and report.ranges.limits["user[0]"] == (1, None)
    assert report.ranges.dynamic_shapes()["index"] == {0: torch.export.Dim.AUTO}


def test_operators_of_nested_levels_have_the_sizes_of_their_level():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.of_vendor, self.of_user = nn.Linear(32, 32), nn.Linear(64, 32)
            self.head = nn.Linear(64, 8)

        def forward(self, vendors, users, items, vendor_of_user, user_of_item):
            vendor = self.of_vendor(vendors)[vendor_of_user]
            user = self.of_user(torch.cat([vendor, users], 1))
            vendor = vendors.tanh()[vendor_of_user[user_of_item]]
            return self.head(torch.cat([user[user_of_item] * vendor, items], 1))

    torch.manual_seed(0)
    rows = [torch.randn(count, 32) for count in (3, 100, 2000)]
    maps = torch.randint(3, (100,)), torch.randint(100, (2000,))
    report = fuse_broadcasts(Nested().eval(), (*rows, *maps)).report
    sizes = {(x.operator, x.sizes) for x in report.ranges.operators}
    vendors, users, items = "vendors[0]", "users[0]", "items[0]"
    assert sizes == {
        ("linear", (vendors,)),
        ("tanh", (vendors,)),
        ("gather", (users, vendors)),
        ("cat", (users,)),
        ("linear", (users,)),
        ("mul.Tensor", (users,)),
        ("gather", (items, users)),
        ("linear", (items,)),
        ("add.Tensor", (items,)),
    }


# -- the guard -------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A random graph of the user and the item."""

    def __init__(self, rng):
        super().__init__()
        self.steps, self.layers = [], nn.ModuleList()
        widths, mixed = [16, 16], [False, True]
        for _ in range(rng.randrange(2, 6)):
            kind = rng.choice(["linear", "relu", "norm", "cat", "cat"])
            x, y = rng.randrange(len(widths)), rng.randrange(len(widths))
            width = widths[x] + widths[y] * (kind == "cat")
            out = rng.choice([8, 32, 128])
            layers = dict(relu=nn.ReLU(), norm=nn.LayerNorm(width))
            self.layers.append(layers.get(kind) or nn.Linear(width, out))
            self.steps.append((kind == "cat", x, y))
            widths.append(width if kind in layers else out)
            mixed.append(mixed[x] or (kind == "cat" and mixed[y]))
        of_users = max(i for i, x in enumerate(mixed) if not x)
        self.steps.append((True, of_users, max(i for i, x in enumerate(mixed) if x)))
        self.layers.append(nn.Linear(sum(widths[x] for x in self.steps[-1][1:]), 64))

    def forward(self, user, item):
        values = [user, item]
        for layer, (joins, x, y) in zip(self.layers, self.steps):
            values.append(layer(torch.cat([values[x], values[y]], 1) if joins else values[x]))
        return values[-1]


@pytest.fixture
def placements(monkeypatch):
    """All placements of the last fused model, and the chosen ones."""
    found, choose = {}, fuse._chosen

    def chosen(every):
        found.update(all=every, chosen=choose(every))
        return found["chosen"]

    monkeypatch.setattr(fuse, "_chosen", chosen)
    return found


# of the first, three have a guard
@slow_after(
    5,
    "seed, processor",
    [(seed, "CPU") for seed in (0, 7, 11, 2, 5, 4, 6)] + [(0, "GPU"), (4, "GPU")],
)
def test_each_call_takes_the_cheaper_placement(placements, monkeypatch, seed, processor):
    """Random graphs and ranges, in fp64: the guard says which of two placements the estimates say
    are cheaper, one placement is the cheapest for all sizes, and all results are the model's."""
    monkeypatch.setattr(placement, "CPU", getattr(placement, processor))
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Mixed(rng).double().eval()
    users = sorted(rng.choice([1, 2, 5, 16, 40]) for _ in range(2))
    candidates = sorted(users[1] + rng.choice([1, 30, 500, 3000]) for _ in range(2))
    example = torch.randn(32, 16).double(), torch.randn(32, 16).double()
    fused = fuse_broadcasts(
        model, example, request_only=["user"], max_batch=(tuple(users), tuple(candidates))
    )
    graph, report, (first, *others) = copy.deepcopy(fused), fused.report, placements["chosen"]
    points = [(rng.randint(*users), rng.randint(*candidates)) for _ in range(8)]
    for point in [*points, *corners_of((tuple(users), tuple(candidates)))]:
        costs = [x.cost(point) for x in (first, *others)]
        if others and abs(costs[0] - costs[1]) > 1e-3 * costs[0]:
            assert report.guard(*point) == (costs[1] < costs[0])
        best = min(x.cost(point) for x in placements["all"])
        if not others:
            assert costs[0] <= (1 + fuse.WORTHWHILE + 1e-6) * best
        given = rows_of(*point, width=16)
        for module in (fused, graph):
            torch.testing.assert_close(module(**given), of_model(model, given))


@pytest.mark.parametrize("users, candidates", [*ENDS, (63, 64), (60, 119), (60, 121), (10, 80)])
def test_the_guard_decides_which_graph_runs(tower, users, candidates):
    """The head whole, or in parts."""
    model, fused = tower
    given, whole = rows_of(users, candidates), fused.report.guard(users, candidates)
    rows = [users, candidates] if whole else [users, candidates, users]
    assert sorted(matmul_rows(copy.deepcopy(fused), **given)) == sorted(rows)
    # where it is whole, the model itself is as good
    own = [candidates, candidates] if whole else rows
    assert sorted(matmul_rows(fused, **given)) == sorted(own)
    torch.testing.assert_close(fused(**given), of_model(model, given))


def test_a_guard_holds_where_the_second_placement_costs_less():
    limits = dict(users=(2, 5), candidates=(10, 30))
    points = corners_of(tuple(limits.values()))
    first = {point: 100 + 7 * point[0] + 3 * point[1] for point in points}
    second = {point: 50 + 9 * point[0] + 4 * point[1] for point in points}
    guard = ranges.guard_between(first, second, limits)
    assert (guard.users, guard.candidates, guard.constant) == (-2, -1, 50)
    assert str(guard) == "-2 · users - 1 · candidates + 50 > 0"
    assert guard(2, 45) and not guard(2, 46)


def test_two_placements_only_if_one_costs_more_than_one_percent_more():
    assert cheapest([{1: 100, 2: 100.9}, {1: 200, 2: 100}], 0.01) == (0,)
    assert cheapest([{1: 100, 2: 102}, {1: 200, 2: 100}], 0.01) == (0, 1)
    assert cheapest([{1: 1, 2: 9}, {1: 5, 2: 5}, {1: 9, 2: 1}], 0.01) == (0, 2)


def test_corners_have_no_more_users_than_candidates():
    assert corners_of(((1, 64), (8, 99))) == [(1, 99), (64, 99), (1, 8), (8, 8)]
    assert corners_of(((3, 3), (5, 5))) == [(3, 5)] == corners_of((3, 5))


def test_the_report_has_both_placements(tower):
    report = tower[1].report
    assert not report.runs_model and report.other.runs_model
    assert f"second placement, if {report.guard}:\n{report.other}" in str(report)


def test_new_parameters_reach_both_placements(tower):
    model, fused = map(copy.deepcopy, tower)
    assert fused.state_dict().keys() == model.state_dict().keys()
    for module in (model, fused):
        torch.manual_seed(1)
        for x in module.parameters():
            x.data = torch.randn_like(x)
    for point in ((1, 64), (63, 64)):
        given = rows_of(*point)
        torch.testing.assert_close(fused(**given), of_model(model, given))


def test_bags_of_users(monkeypatch):
    """KeyedJaggedTensors: the number of users is that of samples."""
    pytest.importorskip("torchrec")
    from .test_models import DIM, FEATURES, bags, sparse

    class OfBags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags, self.head = bags(), nn.Linear(len(FEATURES) * DIM + 16, 64)

        def forward(self, features, item):
            return self.head(torch.cat([self.bags(features).values(), item], 1))

    torch.manual_seed(0)
    monkeypatch.setattr(fuse, "cheapest", lambda costs, tolerance: (0, len(costs) - 1))
    model, example = OfBags().eval(), (sparse(64), torch.randn(64, 16))
    fused = fuse_broadcasts(model, example, request_only=["features"], max_batch=LIMITS)
    assert fused.report.guard is not None
    assert {x.sizes for x in fused.report.ranges.operators if x.operator == "gather"} == {
        ("users", "candidates")
    }
    shapes = fused.report.ranges.dynamic_shapes()
    lengths = next(x[0] for x in shapes["features"] if x and x[0] is not torch.export.Dim.AUTO)
    assert lengths.__name__ == f"{len(FEATURES)}*users"
    taken, holds = [], ranges.Guard.__call__
    monkeypatch.setattr(
        ranges.Guard, "__call__", lambda *args: taken.append(args[1:]) or holds(*args)
    )
    for users, candidates in [(1, 64), (63, 64), (3, 900)]:
        features, item = sparse(users), torch.randn(candidates, 16)
        index = torch.randint(users, (candidates,))
        for module in (fused, copy.deepcopy(fused)):
            found = module(features, item, candidate_to_user=index)
            torch.testing.assert_close(found, model(select_rows(features, index), item))
        assert set(taken) == {(users, candidates)}
        taken.clear()


# -- compiled and exported -------------------------------------------------------------------------


def exported(fused, given):
    with torch.no_grad():
        return torch.export.export(
            fused, (), given, dynamic_shapes=fused.report.ranges.dynamic_shapes()
        )


def conditions(program):
    return [x for x in program.graph.nodes if x.target is torch.ops.higher_order.cond]


@torch.no_grad()
def test_an_exported_program_has_the_ranges_and_the_guard(tower):
    model, fused = tower
    program = exported(fused, rows_of(5, 200))
    assert len(conditions(program)) == 1
    module = program.module()
    for point in [*ENDS, (63, 64), (60, 121)]:
        given = rows_of(*point)
        torch.testing.assert_close(module(**given), of_model(model, given))
    for point, message in [((65, 100), "user.*<= 64"), ((5, 63), "64"), ((5, 4097), "<= 4096")]:
        with pytest.raises((AssertionError, RuntimeError), match=message):
            module(**rows_of(*point))


@torch.no_grad()
@pytest.mark.parametrize("limits, whole", [(((1, 4), (90, 200)), 0), (((60, 64), (64, 99)), 1)])
def test_on_one_side_of_the_guard_a_program_has_one_placement(tower, limits, whole):
    model, fused = tower
    users, candidates = (
        torch.export.Dim(name, min=least, max=most)
        for name, (least, most) in zip(("users", "candidates"), limits)
    )
    shapes = dict(user={0: users}, item={0: candidates}, candidate_to_user={0: candidates})
    program = torch.export.export(fused, (), rows_of(*map(max, limits)), dynamic_shapes=shapes)
    products = [x for x in program.graph.nodes if x.target is torch.ops.aten.linear.default]
    assert not conditions(program) and len(products) == 3 - whole
    given = rows_of(*map(min, limits))
    torch.testing.assert_close(program.module()(**given), of_model(model, given))


@torch.no_grad()
def test_a_size_of_one_value_is_a_number():
    torch.manual_seed(0)
    model = Tower().double().eval()
    example = torch.randn(8, 32).double(), torch.randn(8, 32).double()
    fused = fuse_broadcasts(model, example, request_only=["user"], max_batch=((1, 1), (64, 4096)))
    assert fused.report.ranges.dynamic_shapes()["user"] == {0: 1}
    module = exported(fused, rows_of(1, 100)).module()
    for candidates in (64, 4096):
        given = rows_of(1, candidates)
        torch.testing.assert_close(module(**given), of_model(model, given))
    with pytest.raises((AssertionError, RuntimeError), match="user"):
        module(**rows_of(2, 100))


@torch.no_grad()
def test_compiled(tower):
    """One graph for each placement, one for the model itself."""
    model, fused = tower
    torch._dynamo.reset()
    compiled = torch.compile(
        copy.deepcopy(fused), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for point in [(5, 200), (63, 64), (7, 300), (60, 70)]:
        given = rows_of(*point)
        torch.testing.assert_close(compiled(**given), of_model(model, given))


@pytest.fixture(scope="module")
def attention():
    """Two placements of a model with attention and a mask, whose costs differ little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuse, "cheapest", lambda costs, tolerance: (0, len(costs) - 1))
        torch.manual_seed(0)
        given, model = inputs(64, 64, 7), Model().eval()
        del given["candidate_to_user"]
        names = ["history", "padding", "profile"]
        fused = fuse_broadcasts(model, given, request_only=names, max_batch=((1, 8), (8, 300)))
    return model, fused


@torch.no_grad()
def test_attention_behind_a_guard(attention):
    model, fused = attention
    points = [(1, 8), (8, 8), (1, 300), (8, 300)]
    module = exported(fused, inputs(3, 20, 7)).module()
    for point in points:
        given = inputs(*point, 7)
        for found in (module(**given), copy.deepcopy(fused)(**given)):
            torch.testing.assert_close(found, expected(model, given), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_package(tower, tmp_path):
    """AOTInductor has both placements."""
    model, fused = tower
    path = torch._inductor.aoti_compile_and_package(
        exported(fused, rows_of(5, 200)), package_path=str(tmp_path / "model.pt2")
    )
    package = torch._inductor.aoti_load_package(path)
    for point in [*ENDS, (63, 64), (60, 121)]:
        given = rows_of(*point)
        torch.testing.assert_close(package(**given), of_model(model, given))


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "max_batch, error, message",
    [
        (((1, 64), 4096), ValueError, "two ranges"),
        (((1, 64),), ValueError, "two ranges"),
        (((64, 1), (64, 99)), ValueError, r"max_batch\[0\] must be \(least, most\)"),
        (((1, 2), (64, 99, 7)), ValueError, r"max_batch\[1\] must be \(least, most\)"),
        (((0, 64), (64, 99)), ValueError, r"max_batch\[0\] must be at least 1"),
        (((1, 64), (64, 99.0)), TypeError, r"max_batch\[1\] must be an int"),
        (((1, 64), (8, 32)), ValueError, "no more users than candidates, got 64 users and 32"),
        (((9, 64), (8, 99)), ValueError, "no more users than candidates, got 9 users and 8"),
    ],
)
def test_wrong_ranges(max_batch, error, message):
    with pytest.raises(error, match=message):
        fuse_broadcasts(
            Tower().eval(),
            (torch.randn(8, 32), torch.randn(8, 32)),
            request_only=["user"],
            max_batch=max_batch,
        )
