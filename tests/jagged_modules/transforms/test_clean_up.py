"""Clean-ups of captured graphs: the same results with fewer operators."""

import math
import random

import pytest
import torch
from torch import library, nn

from jagged_modules.transforms.clean_up import VIEWS, _shape_of_product, clean_up

from .captured import capture

aten = torch.ops.aten


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def cleaned(function, dynamic=True):
    """The cleaned module of a function of [B, 4, 6], and its operators."""
    model = function if isinstance(function, nn.Module) else Function(function)
    captured = capture(model.eval(), (torch.randn(3, 4, 6),), {}, None if dynamic else dict(x=None))
    clean_up(captured.graph)
    for node in captured.graph.nodes:  # as in emit.py
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
    captured.module.graph = captured.graph
    for rows in (3, 5) if dynamic else (3,):
        given = torch.randn(rows, 4, 6)
        torch.testing.assert_close(captured.module(given), model(given))
    return captured.module, [
        node.target
        for node in captured.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    ]


CHAINS = {
    "back and forth": (lambda x: x.transpose(1, 2).transpose(1, 2), []),
    "a dimension of size 1": (lambda x: x.unsqueeze(1).transpose(0, 1).squeeze(0), []),
    "two permutations": (lambda x: x.permute(1, 2, 0).permute(2, 1, 0), ["transpose"]),
    "several reshapes": (
        lambda x: x.reshape(-1, 8, 3).reshape(-1, 24).reshape(-1, 2, 12),
        ["reshape"],
    ),
    "heads": (
        lambda x: x.view(-1, 4, 2, 3).transpose(1, 2).reshape(-1, 4, 3).view(-1, 2, 4, 3),
        ["reshape", "transpose"],
    ),
    "last of one": (lambda x: x.flatten(1).unsqueeze(1)[:, 0], ["reshape"]),
    "rows and heads": (
        lambda x: x.mT.mT.transpose(0, 1).reshape(4, -1, 3).transpose(0, 1),
        ["reshape", "transpose", "reshape"],
    ),
    "parts of dimensions": (
        lambda x: x.reshape(-1, 3, 8).transpose(1, 2).reshape(-1, 6, 4),
        ["reshape", "transpose", "reshape"],
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_views(name):
    function, expected = CHAINS[name]
    _, found = cleaned(lambda x: function(x).sin())
    assert [x._schema.name.removeprefix("aten::") for x in found if x in VIEWS] == expected


@pytest.mark.parametrize("seed", range(12))
def test_random_chains_of_views(seed):
    """Each function is a random sequence of permutations and reshapes, of known sizes: torch.export
    branches by others."""
    random.seed(seed)
    steps, dims = [], [None, 2, 2, 2, 3]
    for _ in range(5):
        order = random.sample(range(5), 5)
        dims = [dims[i] for i in order]
        cuts = [0, *sorted(random.sample(range(1, 5), random.randint(0, 4))), 5]
        steps.append((order, list(dims), cuts))

    def function(x):
        rows = x.shape[0]
        x = x.reshape(rows, 2, 2, 2, 3)
        for order, sizes, cuts in steps:
            x = x.permute(order)
            merged = [math.prod(x.shape[start:end]) for start, end in zip(cuts, cuts[1:])]
            x = x.reshape(merged).reshape([rows if size is None else size for size in sizes])
        return x.exp()

    _, found = cleaned(function, dynamic=False)
    assert len(found) <= 4


def test_copies_and_slices_that_change_nothing():
    function = Function(
        lambda x: (
            nn.functional.dropout(x[:].sin(), training=False).expand(-1, -1, -1).contiguous().cos()
        )
    )
    assert cleaned(function)[1] == [aten.sin.default, aten.cos.default]


def test_the_caller_gets_tensors_of_its_own():
    module, found = cleaned(lambda x: (x.clone(), x.clone().flatten(1), x.sin(), x.sin()))
    assert found.count(aten.clone.default) == found.count(aten.sin.default) == 2
    x = torch.randn(3, 4, 6)
    results = module(x)
    assert len({y.untyped_storage().data_ptr() for y in (x, *results)}) == 5


@library.custom_op("test_clean_up::is_contiguous", mutates_args=())
def is_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.new_full((x.shape[0],), x.is_contiguous())


@is_contiguous.register_fake
def _(x):
    return x.new_empty((x.shape[0],))


def test_other_operators_get_the_strides_of_the_model():
    module, _ = cleaned(lambda x: is_contiguous(x.transpose(1, 2).contiguous()))
    assert module(torch.randn(3, 4, 6)).all()


def test_duplicates():
    _, found = cleaned(
        lambda x: x.sum(1) + x.sum(1) + x.sum(1, dtype=torch.float64) + x.sum(2).sum(1, True)
    )
    assert found.count(aten.sum.dim_IntList) == 4
    captured = capture(
        Function(lambda x: torch.rand_like(x) - torch.rand_like(x)), (torch.randn(3, 4),), {}
    )
    clean_up(captured.graph)
    assert sum(node.target is aten.rand_like.default for node in captured.graph.nodes) == 2


def test_kept_nodes_stay():
    captured = capture(
        Function(lambda x: (x.clone() * 2).clone() + x.clone()), (torch.randn(3, 4),), {}
    )
    kept = {node for node in captured.graph.nodes if node.target is aten.clone.default}
    clean_up(captured.graph, kept)
    assert kept <= set(captured.graph.nodes)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


def test_multihead_attention():
    """The projections take [B, T, E] as it is. Without heads and the packed projection, no views
    are left."""
    _, found = cleaned(SelfAttention())
    assert len(found) <= 16
    assert aten.clone.default not in found and aten.permute.default not in found
    assert found[0] is aten.linear.default


def test_linear_keeps_the_order_of_rows():
    """Rows that linear gets in another order, and results that are used in that order."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 5)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            rows = self.layer(x.transpose(0, 1).reshape(-1, 6))
            return rows.reshape(4, -1, 5).cumsum(0), self.layer(x.transpose(1, 2).reshape(-1, 4, 6))

    cleaned(Model())


def test_a_dimension_of_any_size_is_squeezed_where_its_size_is_one():
    module, targets = cleaned(lambda x: x.squeeze(0).exp())
    assert aten.squeeze.dim in targets
    given = torch.randn(1, 4, 6)
    torch.testing.assert_close(module(given), given[0].exp())


@pytest.mark.parametrize(
    "left, right",
    [
        ((4, 3), (3, 5)),
        ((2, 4, 3), (3, 5)),
        ((4, 3), (2, 3, 5)),
        ((2, 4, 3), (2, 3, 5)),
        ((7, 2, 4, 3), (3, 5)),
    ],
)
def test_shapes_of_products(left, right):
    given = torch.randn(left), torch.randn(right)
    assert _shape_of_product(aten.matmul.default, given) == tuple(torch.matmul(*given).shape)
    if len(right) == 2:
        weight = given[1].T
        assert _shape_of_product(aten.linear.default, (given[0], weight)) == tuple(
            nn.functional.linear(given[0], weight).shape
        )


PARTS = {
    "a slice of a part": (lambda x: torch.cat([x, x.sin()], 1)[:, 5:7].cos(), ["sin", "slice"]),
    "a part": (lambda x: torch.cat([x, x.sin()], 1)[:, 4:].cos(), ["sin", "slice"]),
    "from the end": (lambda x: torch.cat([x.sin(), x], 2)[:, :, -6:-2].cos(), ["slice"]),
    "an index": (lambda x: torch.cat([x.sin(), x], 1)[:, 6].cos(), ["select"]),
    "an index from the end": (lambda x: torch.cat([x.sin(), x], -1)[..., -1].cos(), ["select"]),
    "of two parts": (lambda x: torch.cat([x, x.sin()], 1)[:, 3:5].cos(), ["sin", "cat", "slice"]),
    "an item of a split": (lambda x: torch.cat([x, x.sin()], 1).split(3, 1)[0].cos(), ["slice"]),
    "the last item of a split": (
        lambda x: torch.cat([x, x.sin()], 1).split(5, 1)[-1].cos(),
        ["sin", "slice"],
    ),
    "an item of two parts": (
        lambda x: torch.cat([x, x.sin()], 1).split(3, 1)[1].cos(),
        ["sin", "cat", "split"],
    ),
    "an item of sizes": (
        lambda x: torch.cat([x, x.sin()], 1).split([1, 3, 4], 1)[2].cos(),
        ["sin", "slice"],
    ),
    "an item of unbind": (
        lambda x: torch.cat([x, x.sin()], 1).unbind(1)[6].cos(),
        ["sin", "select"],
    ),
    "a field": (lambda x: torch.stack([x, x.sin()], 1)[:, 1].cos(), ["sin"]),
    "a field from the end": (lambda x: torch.stack([x.sin(), x], -1).select(-1, -1).cos(), []),
    "an item of fields": (
        lambda x: torch.stack([x.sin(), x], 1).split(1, 1)[1].cos(),
        ["unsqueeze"],
    ),
    "an item of unbound fields": (lambda x: torch.stack([x.sin(), x], 1).unbind(1)[1].cos(), []),
    "two fields": (
        lambda x: torch.stack([x.sin(), x, x], 1).split(2, 1)[0].cos(),
        ["sin", "stack", "split"],
    ),
    "with a step": (lambda x: torch.cat([x, x.sin()], 1)[:, 4::2].cos(), ["sin", "cat", "slice"]),
    "of rows": (lambda x: torch.cat([x, x.sin()], 0)[:2].cos(), ["sin", "cat", "slice"]),
    "of another dimension": (
        lambda x: torch.cat([x, x.sin()], 1)[:, :, :2].cos(),
        ["sin", "cat", "slice"],
    ),
    "of parts that are converted": (
        lambda x: torch.cat([x, x > 0], 1)[:, 4:].cos(),
        ["gt", "cat", "slice"],
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_indices_of_a_concatenation(name):
    function, expected = PARTS[name]
    _, found = cleaned(function)
    names = [x._schema.name.removeprefix("aten::") for x in found if x is not aten.cos.default]
    assert [x for x in names if x != "slice" or "slice" in expected] == expected


class Writes(nn.Module):
    def forward(self, x):
        x = x.sin()
        x[:, 0] = 0
        x[:] = x + 1
        return x.cos()


def test_a_write_to_all_rows_is_what_is_written():
    _, found = cleaned(Writes())
    assert aten.slice_scatter.default not in found
    assert aten.select_scatter.default in found


def packed(x, width=3):
    """Columns in runs of a width, as nn.MultiheadAttention takes q, k and v apart."""
    return x.unflatten(-1, (-1, width)).unsqueeze(0).transpose(0, -2).squeeze(-2)


linear = nn.functional.linear
PRODUCTS = {  # the operators afterwards
    "columns": (
        lambda x, whole, parts: whole.sum() + linear(x, *parts[1]).cos(),
        ["linear", "sum", "slice", "cos", "add"],
    ),
    "before all columns": (
        lambda x, whole, parts: linear(x, *parts[2]).cos() + whole()[..., :3],
        ["linear", "slice", "cos", "slice", "add"],
    ),
    "a head": (
        lambda x, whole, parts: packed(whole)[2] * packed(linear(x, *parts[1]))[-1],
        ["linear", "reshape", "select", "mul"],
    ),
    "a head of another width": (
        lambda x, whole, parts: whole.sum() + packed(linear(x, *parts[1]), 2)[-1].cos(),
        ["linear", "sum", "slice", "reshape", "select", "cos", "add"],
    ),
    "without the bias": (
        lambda x, whole, parts: whole.sum() + linear(x, parts[1][0]).cos(),
        ["split_with_sizes", "linear", "sum", "linear", "cos", "add"],
    ),
    "the bias of another part": (
        lambda x, whole, parts: whole.sum() + linear(x, parts[0][0], parts[2][1]).cos(),
        ["split_with_sizes"] * 2 + ["linear", "sum", "linear", "cos", "add"],
    ),
    "of other rows": (
        lambda x, whole, parts: whole.sum() + linear(x.sin(), *parts[1]).cos(),
        ["split_with_sizes"] * 2 + ["linear", "sum", "sin", "linear", "cos", "add"],
    ),
    "a result": (
        lambda x, whole, parts: (whole, linear(x, *parts[1])),
        ["split_with_sizes"] * 2 + ["linear", "linear"],
    ),
}


class Products(nn.Module):
    """`read` of x, a product of x, or a function that computes it, and parts of the weight and the
    bias."""

    def __init__(self, name):
        super().__init__()
        self.name, self.all = name, nn.Linear(6, 12)

    def forward(self, x):
        weights, biases = (y.split([3, 6, 3]) for y in (self.all.weight, self.all.bias))
        whole = (lambda: self.all(x)) if "before" in self.name else self.all(x)
        return PRODUCTS[self.name][0](x, whole, list(zip(weights, biases)))


@pytest.mark.parametrize("name", PRODUCTS)
def test_columns_of_a_product(name):
    """A product with some rows of a weight is read from the one with all rows."""
    _, found = cleaned(Products(name))
    assert [x._schema.name.removeprefix("aten::") for x in found] == PRODUCTS[name][1]
