"""Products and sums of concatenations are computed in parts, the users' part once per user."""

import copy
import functools

import pytest
import torch
from torch import nn

from jagged_modules.transforms import fuse_broadcasts

from .test_replication import matmul_rows

USERS, CANDIDATES, WIDTH = 4, 200, 16


class Head(nn.Module):
    """linear([user | item])."""

    def __init__(self):
        super().__init__()
        self.over = nn.Sequential(nn.Linear(256 + 8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, item):
        return self.over(torch.cat([user.flatten(1), item.flatten(1)[:, :8]], -1))


class Addmm(Head):
    def forward(self, user, item):
        return torch.addmm(
            self.over[0].bias,
            torch.cat([item[:, 0, :8], user.flatten(1)], 1),
            self.over[0].weight.T,
        )


class Compress(nn.Module):
    """W @ [users; items]."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 18))

    def forward(self, user, item):
        return (self.weight @ torch.cat([user, item], 1)).relu()


class Flattened(nn.Module):
    """A linear layer on the flattened concatenation of features, transposed and activated on the
    way."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(18 * WIDTH, 7)

    def forward(self, user, item):
        return self.out(torch.cat([user, item], 1).relu().mul(2).flatten(1))


class Stacked(Flattened):
    """The same on features that were stacked one by one."""

    def forward(self, user, item):
        return self.out(torch.stack([*user.unbind(1), *item.unbind(1)], 1).flatten(1))


class Transposed(nn.Module):
    """linear over the features, as models write a compression of embeddings."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(18, 7, bias=False)

    def forward(self, user, item):
        return self.out(torch.cat([user, item], 1).mT)


class Interaction(nn.Module):
    """x xᵀ of wide features."""

    def forward(self, user, item):
        x = torch.cat([user.repeat(1, 1, 32), item.repeat(1, 1, 32)], 1)
        return torch.bmm(x, x.transpose(1, 2))


class FactorizationMachine(nn.Module):
    def forward(self, user, item):
        x = torch.cat([user, item], 1)
        return x.sum(1) ** 2 - (x * x).sum(1)


MODELS = dict(
    head=Head,
    addmm=Addmm,
    compress=Compress,
    flattened=Flattened,
    stacked=Stacked,
    transposed=Transposed,
    interaction=Interaction,
    machine=FactorizationMachine,
)


def inputs(users, candidates):
    return torch.randn(users, 16, WIDTH).double(), torch.randn(candidates, 2, WIDTH).double()


def fused_by_caller(model):
    return fuse_broadcasts(
        model, inputs(CANDIDATES, CANDIDATES), request_only=("user",), max_batch=(USERS, CANDIDATES)
    )


@functools.cache
def model_and_fused(name):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    return model, fused_by_caller(model)


def called(fused):
    return {getattr(node.target, "__name__", "") for node in fused.graph.nodes}


@pytest.mark.parametrize("name", MODELS)
def test_results(name):
    model, fused = model_and_fused(name)
    graph = copy.deepcopy(fused)  # without the calls of the model for U >= C
    for users, index in ((3, [2, 0, 2, 2, 0]), (1, [0, 0, 0]), (6, [4]), (1, [0])):
        index = torch.tensor(index)
        user, item = inputs(users, len(index))
        torch.testing.assert_close(
            graph(user, item, candidate_to_user=index),
            model(user[index], item),
            rtol=1e-10,
            atol=1e-10,
        )


@pytest.mark.parametrize(
    "name", ["head", "addmm", "compress", "flattened", "stacked", "transposed", "machine"]
)
def test_user_rows_are_not_gathered(name):
    """No gather of the users' features remains: what is gathered has the size of the result."""
    _, fused = model_and_fused(name)
    gathers = [
        node for node in fused.graph.nodes if node.target is torch.ops.aten.index_select.default
    ]
    assert all(
        node.args[0].name != "user" and "flatten" not in node.args[0].name for node in gathers
    )
    assert any(site.decision in ("moved", "fused") for site in fused.report.sites)
    assert fused.report.after.total < fused.report.before.total


def test_the_head_is_split():
    _, fused = model_and_fused("head")
    rows = matmul_rows(fused, *inputs(3, 50), candidate_to_user=torch.arange(50) % 3)
    assert sorted(rows) == [3, 50, 50]


def test_a_weight_is_split_once():
    graph = model_and_fused("head")[1].graph
    readers = [
        user.target
        for node in graph.find_nodes(op="get_attr")
        if node.target == "over.0.weight"
        for user in node.users
    ]
    assert readers == [torch.ops.aten.split_with_sizes.default]


def test_linear_compress_is_used():
    assert "compress_unchecked" in called(model_and_fused("compress")[1])


def test_the_block_of_users_is_computed_once_per_user():
    _, fused = model_and_fused("interaction")
    rows = matmul_rows(fused, *inputs(3, 50), candidate_to_user=torch.arange(50) % 3)
    # one of user × user, item × item, and user × item, whose transpose is not computed
    assert sorted(rows) == [3 * 16, 50 * 2, 50 * 16]


def test_a_concatenation_that_is_cheaper_whole_stays():
    """Two columns of the user's: splitting would gather and add the whole result."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.over = nn.Linear(2 + WIDTH, 512)

        def forward(self, user, item):
            return self.over(torch.cat([user[:, 0, :2], item[:, 0]], -1))

    fused = fused_by_caller(Model().double().eval())
    assert matmul_rows(fused, *inputs(3, 50), candidate_to_user=torch.arange(50) % 3) == [50]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bool])
def test_a_concatenation_that_converts_stays_whole(dtype):
    """Its parts have other dtypes than the weight."""
    model = Head().eval()
    user, item = torch.randn(USERS, 16, WIDTH).to(dtype), torch.randn(CANDIDATES, 2, WIDTH)
    index = torch.arange(CANDIDATES) % USERS
    fused = fuse_broadcasts(
        model, (user[index], item), request_only=("user",), max_batch=(USERS, CANDIDATES)
    )
    torch.testing.assert_close(fused(user, item, candidate_to_user=index), model(user[index], item))


@pytest.mark.parametrize("columns, dtype", [(1, torch.float64), (WIDTH, torch.float32)])
def test_a_sum_that_broadcasts_or_converts_is_no_compression(columns, dtype):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.user, self.item = (
                nn.Parameter(torch.randn(5, 16).double()),
                nn.Parameter(torch.randn(5, 2).to(dtype)),
            )

        def forward(self, user, item):
            return self.user @ user + self.item @ item

    model = Sum().eval()
    user, item = inputs(USERS, CANDIDATES)
    item, index = item[..., :columns].to(dtype), torch.arange(CANDIDATES) % USERS
    fused = fuse_broadcasts(
        model, (user[index], item), request_only=("user",), max_batch=(USERS, CANDIDATES)
    )
    assert "compress_unchecked" not in called(fused)
    torch.testing.assert_close(fused(user, item, candidate_to_user=index), model(user[index], item))


def test_lookups_in_small_tables_are_one_part():
    """They have maps of their own, but parts of their own never pay."""

    class SmallTables(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(500, 16) for _ in range(6))
            self.over = nn.Linear(256 + 6 * 16, 128)

        def forward(self, user, item):
            return self.over(
                torch.cat([user, *(table(item[:, i]) for i, table in enumerate(self.tables))], 1)
            ).relu()

    model = SmallTables().eval()
    example = torch.randn(1024, 256), torch.randint(500, (1024, 6))
    fused = fuse_broadcasts(model, example, request_only=["user"], max_batch=(15, 1024))
    graph, index = copy.deepcopy(fused), torch.arange(40) % 3
    user, item = torch.randn(3, 256), torch.randint(500, (40, 6))
    torch.testing.assert_close(graph(user, item, candidate_to_user=index), model(user[index], item))
    assert sorted(matmul_rows(graph, user, item, candidate_to_user=index)) == [3, 40]


class OneTable(nn.Module):
    """Fields of the user's and the item's in one table, from an offset on for each field. form: of
    the embeddings, of the ids of all fields."""

    def __init__(self, form):
        super().__init__()
        self.table, self.form = nn.Embedding(18 * 20, WIDTH), form
        self.register_buffer("offsets", torch.arange(18) * 20)
        self.positions = nn.Parameter(torch.randn(18, WIDTH))
        self.out = nn.Linear(18 * WIDTH, 7)

    def forward(self, user, item):
        x = self.form(self, torch.cat([user, item], 1))
        return self.out(x.flatten(1))


OF_ONE_TABLE = {
    "ids": lambda model, x: model.table(x),
    "offsets": lambda model, x: model.table(x + model.offsets),
    "offsets in a row": lambda model, x: model.table(x + model.offsets.clone().unsqueeze(0)),
    "one offset": lambda model, x: model.table(x + model.offsets[3:4]),
    "twice an offset": lambda model, x: model.table(x.add(model.offsets[:9].repeat(2), alpha=2)),
    "positions": lambda model, x: model.table(x) + model.positions,
}


@pytest.mark.parametrize("form", OF_ONE_TABLE)
def test_fields_of_one_table(form):
    model = OneTable(OF_ONE_TABLE[form]).double().eval()

    def ids(rows, fields):
        return torch.randint(20, (rows, fields))

    example = ids(CANDIDATES, 16), ids(CANDIDATES, 2)
    fused = fuse_broadcasts(model, example, request_only=["user"], max_batch=(USERS, CANDIDATES))
    graph = copy.deepcopy(fused)
    for users, index in ((3, [2, 0, 2, 2, 0]), (1, [0, 0, 0]), (6, [4])):
        index, user, item = torch.tensor(index), ids(users, 16), ids(len(index), 2)
        found = graph(user, item, candidate_to_user=index)
        torch.testing.assert_close(found, model(user[index], item), rtol=1e-10, atol=1e-10)
    rows = matmul_rows(fused, ids(3, 16), ids(50, 2), candidate_to_user=torch.arange(50) % 3)
    assert sorted(rows) == ([50] if form == "twice an offset" else [3, 50])
