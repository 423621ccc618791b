"""All forms of replication are found: each moves the layers behind it to the smaller side."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from jagged_modules.transforms import fuse_broadcasts

WIDTH = 6
FORMS = {
    "index_select": lambda x, index: x.index_select(0, index),
    "fancy index": lambda x, index: x[index],
    "fancy index of another dimension": lambda x, index: x.mT[..., index].mT,
    "embedding": lambda x, index: nn.functional.embedding(index, x),
    "expanded gather": lambda x, index: x.gather(0, index[:, None].expand(-1, WIDTH)),
    "expanded gather by a view": lambda x, index: x.gather(0, index.view(-1, 1).expand(-1, WIDTH)),
    "a number of times": lambda x, index: x.repeat_interleave(4, 0),
    "expand and reshape": lambda x, index: x[:, None].expand(-1, 4, -1).reshape(-1, WIDTH),
    "expand in front": lambda x, index: x.expand(4, -1, -1).reshape(-1, WIDTH),
    "nested": lambda x, index: x[index][torch.arange(12) % 5],
    "nested maps": lambda x, index: x[index[torch.arange(12) % 5]],
    "int32": lambda x, index: x[index.int()],
}


class Rows(TorchDispatchMode):
    """The rows of all matrix multiplications."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (
            torch.ops.aten.mm.default,
            torch.ops.aten.addmm.default,
            torch.ops.aten.bmm.default,
        ):
            self.rows.append(result.numel() // result.shape[-1])
        return result


def matmul_rows(model, *args, **kwargs):
    with torch.no_grad(), Rows() as mode:
        model(*args, **kwargs)
    return mode.rows


class Tower(nn.Module):
    def __init__(self, replicate):
        super().__init__()
        self.replicate = replicate
        self.tower = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3)).double()

    def forward(self, x, index):
        return self.tower(self.replicate(x, index))


@pytest.mark.parametrize("form", FORMS)
def test_form(form):
    model = Tower(FORMS[form]).eval()
    fused = fuse_broadcasts(model, (torch.randn(3, WIDTH).double(), torch.tensor([2, 0, 2, 2, 0])))
    for users, index in ((3, [2, 0, 2, 2, 0, 1]), (3, [1] * 5), (3, [0, 2, 2, 2, 1, 1, 1, 0])):
        x, index = torch.randn(users, WIDTH).double(), torch.tensor(index)
        torch.testing.assert_close(fused(x, index), model(x, index), rtol=1e-12, atol=1e-12)
        # of a few rows, little is saved, so `fused` itself may run the model: a copy has the graph
        assert matmul_rows(copy.deepcopy(fused), x, index) == [users, users]
    assert {name for name, _ in fused.named_parameters()} == {
        name for name, _ in model.named_parameters()
    }


@pytest.mark.parametrize("sized", [True, False])
def test_counts(sized):
    def replicate(x, counts):
        counts, index = counts
        return x.repeat_interleave(counts, 0, output_size=index.shape[0] if sized else None)

    def inputs(*counts):
        return torch.randn(len(counts), WIDTH).double(), (
            torch.tensor(counts),
            torch.zeros(sum(counts)),
        )

    model = Tower(replicate).eval()
    users = torch.export.Dim("users")
    shapes = dict(x={0: users}, index=({0: users}, {0: torch.export.Dim("candidates")}))
    fused = fuse_broadcasts(model, inputs(2, 0, 5), dynamic_shapes=shapes)
    for counts in ((2, 0, 5), (0, 9), (4, 4, 4, 1)):
        x, index = inputs(*counts)
        torch.testing.assert_close(fused(x, index), model(x, index), rtol=1e-12, atol=1e-12)
        assert matmul_rows(copy.deepcopy(fused), x, index) == [len(counts), len(counts)]


def test_counts_of_one_candidate_and_of_none():
    """Sizes that torch.export asserts to be at least 2. A copy runs the graph also with fewer
    candidates than users."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, item, counts):
            return self.linear(x.repeat_interleave(counts, 0)) * item

    def inputs(*counts):
        return (
            torch.randn(len(counts), WIDTH),
            torch.randn(sum(counts), WIDTH),
            torch.tensor(counts),
        )

    model = Model().eval()
    fused = fuse_broadcasts(model, inputs(10, 10, 10, 10))
    for counts in ((1, 0, 0), (1,), (0, 0)):
        for module in (fused, copy.deepcopy(fused)):
            given = inputs(*counts)
            torch.testing.assert_close(module(*given), model(*given))


def test_equal_repeats_of_tensors_of_different_sizes():
    class Model(nn.Module):
        def forward(self, x, y):
            return (
                x.repeat_interleave(4, 0).exp(),
                y.repeat_interleave(4, 0).exp(),
                y.repeat_interleave(4, 1).exp(),
            )

    # the certificate cannot see a mistake
    example = torch.randn(8, WIDTH).double(), torch.randn(8, WIDTH).double()
    fused = fuse_broadcasts(Model().eval(), example)
    for sizes in ((3, 5), (5, 3), (8, 8)):
        given = [torch.randn(size, WIDTH).double() for size in sizes]
        torch.testing.assert_close(fused(*given), Model()(*given))


def test_negative_indices_of_two_attentions():
    """Each counts from the end of its own table, so they need two groupings of the candidates."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16).double()

        def forward(self, x, y, item, index):
            x, y = (self.linear(table)[index].view(-1, 2, 2, 4) for table in (x, y))
            item = item.view(-1, 2, 2, 4)
            return sum(
                nn.functional.scaled_dot_product_attention(item, keys, keys) for keys in (x, y)
            )

    def inputs(users, others, candidates, lowest):
        tables = [torch.randn(rows, 16).double() for rows in (users, others, candidates)]
        return *tables, torch.randint(lowest, min(users, others), (candidates,))

    model = Model().eval()
    fused = fuse_broadcasts(model, inputs(7, 20, 64, 0))
    assert sum(site.decision == "fused" for site in fused.report.sites) == 2
    for users, others in ((7, 20), (9, 3)):
        given = inputs(users, others, 30, -min(users, others))
        torch.testing.assert_close(fused(*given), model(*given))


def test_negative_indices_count_from_the_end():
    model = Tower(FORMS["fancy index"]).eval()
    fused = fuse_broadcasts(model, (torch.randn(3, WIDTH).double(), torch.tensor([2, 0, 2, 2, 0])))
    x, index = torch.randn(3, WIDTH).double(), torch.tensor([-1, 0, -3, 2])
    torch.testing.assert_close(fused(x, index), model(x, index))


class TwoLevels(nn.Module):
    """Vendors of users of candidates."""

    def __init__(self):
        super().__init__()
        self.vendor, self.user, self.both, self.item = (
            nn.Linear(WIDTH, WIDTH).double() for _ in range(4)
        )

    def forward(self, vendors, users, items, vendor_of_user, user_of_item):
        vendors, users = vendors[vendor_of_user][user_of_item], users[user_of_item]
        return (
            self.both(self.vendor(vendors).relu() + self.user(users)).relu() + self.item(items)
        ).relu()


def test_nested_levels_compute_each_at_its_own_rows():
    def inputs(num_vendors, num_users, num_items):
        x = (torch.randn(n, WIDTH).double() for n in (num_vendors, num_users, num_items))
        return *x, torch.randint(num_vendors, (num_users,)), torch.randint(num_users, (num_items,))

    model = TwoLevels().eval()
    fused = copy.deepcopy(fuse_broadcasts(model, inputs(2, 5, 20)))  # a copy has the graph alone
    for sizes in ((2, 5, 20), (3, 4, 9), (1, 1, 1), (4, 3, 2)):
        example = inputs(*sizes)
        torch.testing.assert_close(fused(*example), model(*example), rtol=1e-12, atol=1e-12)
        vendors, users, items = sizes
        assert sorted(matmul_rows(fused, *example)) == sorted([vendors, users, users, items])


class Ranking(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1
        )
        self.cls = nn.Parameter(torch.randn(1, 1, 8))
        self.profile, self.over = (
            nn.Linear(4, 8),
            nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 1)),
        )

    def forward(self, history, profile, item):
        tokens = torch.cat([self.cls.expand(history.shape[0], -1, -1), history], 1)
        user = self.encoder(tokens)[:, 0]
        return self.over(torch.cat([user, self.profile(profile), item], -1))[:, 0]


def test_replication_by_the_caller():
    model = Ranking().eval()
    inputs = torch.randn(32, 5, 8), torch.randn(32, 4), torch.randn(32, 8)
    fused = fuse_broadcasts(model, inputs, request_only=("history", "profile"))
    graph = copy.deepcopy(fused)
    for users, index in ((3, [2, 0, 2, 2, 0]), (1, [0, 0, 0]), (6, [4]), (1, [0]), (2, [1, 0])):
        index = torch.tensor(index)
        history = torch.randn(users, 5, 8)
        profile = torch.randn(users, 4)
        item = torch.randn(len(index), 8)
        expected = model(history[index], profile[index], item)
        torch.testing.assert_close(graph(history, profile, item, candidate_to_user=index), expected)
        torch.testing.assert_close(
            fused(history, profile, item, candidate_to_user=index.int()), expected
        )
    rows = matmul_rows(
        fused,
        torch.randn(2, 5, 8),
        torch.randn(2, 4),
        torch.randn(9, 8),
        candidate_to_user=torch.arange(9) % 2,
    )
    assert max(rows[:-2]) == 2 * 6  # users, tokens
    assert fused.state_dict().keys() == model.state_dict().keys()
    assert all(x is y for x, y in zip(fused.parameters(), model.parameters()))


class Routing(nn.Module):
    """Capsules of a history, as in MIND: each begins with the same logits. form: how the logits
    are repeated for the batch."""

    def __init__(self, form):
        super().__init__()
        self.logits, self.form = nn.Parameter(torch.randn(4, 5)), form

    def forward(self, history, item):
        logits = self.form(self.logits, history.shape[0])
        capsules = logits.softmax(2) @ history
        logits = logits + capsules @ history.transpose(1, 2)
        return ((logits.softmax(2) @ history) * item[:, None]).sum(2).amax(1)


@pytest.mark.parametrize(
    "form",
    [
        lambda x, batch: x.expand(batch, -1, -1),
        lambda x, batch: x.repeat(batch, 1, 1),
        lambda x, batch: torch.tile(x, (batch, 1, 1)),
        lambda x, batch: torch.tile(x[None].expand(batch, -1, -1), (1, 1)),
    ],
    ids=["expand", "repeat", "tile", "tile of the last dimensions"],
)
def test_a_constant_that_is_repeated_for_the_batch(form):
    model = Routing(form).eval()
    example = torch.randn(32, 5, 8), torch.randn(32, 8)
    fused = fuse_broadcasts(model, example, request_only=["history"])
    history, item, index = torch.randn(3, 5, 8), torch.randn(50, 8), torch.arange(50) % 3
    found = fused(history, item, candidate_to_user=index)
    torch.testing.assert_close(found, model(history[index], item))
    products = [site for site in fused.report.sites if site.operator.startswith("matmul")]
    assert len(products) == 3 and {site.decision for site in products} == {"moved"}


def test_one_row_in_the_example_is_enough():
    model = Ranking().eval()
    fused = fuse_broadcasts(
        model,
        (torch.randn(1, 5, 8), torch.randn(1, 4), torch.randn(1, 8)),
        request_only=("history", "profile"),
    )
    history = torch.randn(2, 5, 8)
    profile = torch.randn(2, 4)
    item = torch.randn(3, 8)
    index = torch.tensor([1, 0, 1])
    torch.testing.assert_close(
        fused(history, profile, item, candidate_to_user=index),
        model(history[index], profile[index], item),
    )


def test_equal_sizes_prove_nothing():
    """Two maps of equal length: the sum of x[m] and y[n] must not be computed as (x + y)[m]."""

    class Model(nn.Module):
        def forward(self, x, y, m, n):
            return (x[m] + y[n]).tanh()

    model = Model().eval()
    x = torch.randn(3, 4)
    y = torch.randn(3, 4)
    m = torch.tensor([0, 1, 2, 0, 1])
    n = torch.tensor([2, 2, 1, 0, 0])
    fused = fuse_broadcasts(model, (x, y, m, n))
    torch.testing.assert_close(fused(x, y, m, n), model(x, y, m, n))


def test_no_loss_where_there_are_as_many_users_as_candidates():
    model = Ranking().eval()
    inputs = torch.randn(8, 5, 8), torch.randn(8, 4), torch.randn(8, 8)
    fused = fuse_broadcasts(model, inputs, request_only=("history", "profile"), max_batch=(8, 8))
    assert {site.decision for site in fused.report.sites} == {"kept"}
    gathers = [
        node for node in fused.graph.nodes if node.target is torch.ops.aten.index_select.default
    ]
    assert [node.args[0].name for node in gathers] == ["history", "profile"]


class Sum(nn.Module):
    """Rows of two tensors by one map."""

    def forward(self, x, y, index):
        return (x[index] + y[index]).exp().sum(1)


def test_negative_indices_of_tensors_of_different_sizes():
    """They would be the rows of one tensor only: an error, eager, compiled and exported."""
    x, y, index = torch.randn(4, WIDTH), torch.randn(3, WIDTH), torch.tensor([2, 0, 2, 2, 0, 1, 1])
    fused = fuse_broadcasts(Sum().eval(), (x, y, index))
    torch._dynamo.reset()
    dims = [{0: torch.export.Dim(name)} for name in ("first", "second", "rows")]
    exported = torch.export.export(fused, (x, y, index), dynamic_shapes=dims).module()
    for module in (fused, torch.compile(fused, backend="eager"), exported):
        torch.testing.assert_close(module(x, y, index), Sum()(x, y, index))
        with pytest.raises(
            (ValueError, RuntimeError),
            match="index must not have negative entries.* it indexes tensors of different sizes",
        ):
            module(x, y, index - 1)


def test_negative_indices_of_tables_of_different_sizes():
    """The same where both sizes are numbers."""
    x, y, index = torch.randn(4, WIDTH), torch.randn(3, WIDTH), torch.tensor([2, 0, 2, 2, 0, 1, 1])
    fused = fuse_broadcasts(
        Sum().eval(), (x, y, index), dynamic_shapes=(None, None, {0: torch.export.Dim.AUTO})
    )
    torch.testing.assert_close(fused(x, y, index), Sum()(x, y, index))
    with pytest.raises(ValueError, match="index must not have negative entries"):
        fused(x, y, index - 1)


def test_negative_indices_in_fusions():
    class Compress(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 18))

        def forward(self, user, item, index):
            return self.weight @ torch.cat([user[index], item], 1)

    model, index = Compress().eval(), torch.tensor([-1, 0, -3, 2] * 20)
    inputs = torch.randn(3, 16, 8), torch.randn(80, 2, 8), index
    fused = fuse_broadcasts(model, inputs)
    assert any(site.decision == "fused" for site in fused.report.sites)
    torch.testing.assert_close(fused(*inputs), model(*inputs))


@pytest.mark.parametrize("name", ["new_zeros", "new_ones"])
def test_constants_made_like_a_gathered_value(name):
    """They are the same for all rows, and keep no operator from moving."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2 * WIDTH, WIDTH).double()

        def forward(self, vendors, x, vendor_of_user, index):
            like = vendors[vendor_of_user[index]]
            rows = torch.cat([getattr(like, name)(index.shape[0], WIDTH), x[index]], 1)
            return self.linear(rows) + like

    model = Model().eval()

    def inputs(num_vendors, num_users, num_items):
        x = (torch.randn(n, WIDTH).double() for n in (num_vendors, num_users))
        return *x, torch.randint(num_vendors, (num_users,)), torch.randint(num_users, (num_items,))

    fused = fuse_broadcasts(model, inputs(2, 5, 400))
    graph = copy.deepcopy(fused)
    for sizes in ((2, 5, 400), (3, 4, 9), (1, 1, 7), (7, 6, 2)):
        given = inputs(*sizes)
        torch.testing.assert_close(graph(*given), model(*given))
    assert matmul_rows(graph, *inputs(2, 5, 400)) == [5]


@pytest.mark.parametrize(
    "join",
    [lambda x: torch.stack(x, 1), lambda x: torch.cat([y[:, None] for y in x], 1)],
    ids=["stack", "cat"],
)
def test_pairs_of_fields(join):
    """Of a tensor of all fields, split again: products of users' fields have users' rows."""

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.pairs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)).double()

        def forward(self, first, second, third, item):
            fields = join([first, second, third, item]).split(1, dim=1)
            pairs = itertools.combinations(fields, 2)
            return torch.cat([layer(x) * y for layer, (x, y) in zip(self.pairs, pairs)], 1)

    def inputs(users, candidates):
        rows = users, users, users, candidates
        return [torch.randn(x, WIDTH, dtype=torch.float64) for x in rows]

    model, names = Pairs().eval(), ["first", "second", "third"]
    example = tuple(inputs(64, 64))
    fused = fuse_broadcasts(model, example, request_only=names, max_batch=(4, 4096))
    given, index = inputs(3, 50), torch.arange(50) % 3
    expected = model(*(x[index] for x in given[:3]), given[3])
    torch.testing.assert_close(fused(*given, candidate_to_user=index), expected)
    assert matmul_rows(fused, *given, candidate_to_user=index) == [3] * 6
