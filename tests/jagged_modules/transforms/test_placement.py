"""Where operators are placed by estimated costs: of bytes and FLOPs, of kernels, and of elements
that are copied one by one."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from jagged_modules.transforms import fuse_broadcasts, placement
from jagged_modules.transforms.analysis import Analysis
from jagged_modules.transforms.capture import evaluate
from jagged_modules.transforms.clean_up import clean_up

pytest.importorskip("torchrec")

from .captured import capture
from .test_models import DENSE, TORCHREC, sparse
from .test_replication import matmul_rows

USERS, CANDIDATES = 15, 1024
aten = torch.ops.aten


@pytest.fixture
def gpu_costs(monkeypatch):
    """Estimates for a GPU, of models on the CPU."""
    monkeypatch.setattr(placement, "CPU", placement.GPU)


class Model(nn.Module):
    """A function of the user's and the item's features, and layers."""

    def __init__(self, function, *widths):
        super().__init__()
        self.function, self.layers = (
            function,
            nn.ModuleList(nn.Linear(*pair, bias=False) for pair in widths),
        )

    def forward(self, user, item):
        return self.function(user, item, *self.layers)


def fused_for(function, user, item, *widths, rows=8, dtype=torch.bfloat16):
    """A model fused for many candidates per user, with features of these shapes, after its results
    were compared with the model's."""
    torch.manual_seed(0)
    model = Model(function, *widths).to(dtype).eval()
    inputs = torch.randn(rows, *user).to(dtype), torch.randn(rows, *item).to(dtype)
    return fuse_broadcasts(model, inputs, request_only=("user",), max_batch=(USERS, CANDIDATES))


def called(fused, target):
    return [node for node in fused.graph.nodes if node.target is target]


def site(fused, operator):
    return next(site for site in fused.report.sites if site.operator == operator)


@pytest.mark.parametrize("width, vectors", [(64, True), (65, False), (8, True), (4, False)])
def test_a_gather_of_rows_that_are_no_whole_vectors_costs_more(gpu_costs, width, vectors):
    """16-bit elements: rows of a multiple of 8."""
    fused = fused_for(
        lambda user, item, layer: layer(user * 2) * item, (4 * width,), (width,), (4 * width, width)
    )
    site_of = site(fused, "linear")
    assert (site_of.decision, fused.report.sites[-1].operator) == ("moved", "mul.Tensor")
    elements, gpu = CANDIDATES * width, placement.GPU
    gather = fused.report.after.total - sum(x.after.total for x in fused.report.sites)
    assert gather == pytest.approx(gpu.kernel + elements * (4 if vectors else gpu.element))


def test_contiguous_slices():
    x = torch.empty(5, 6, 8)
    assert (
        placement.is_contiguous(x)
        and placement.is_contiguous(x[:, :4], 1)
        and placement.is_contiguous(x[:, 2:3, :4], 1)
    )
    assert (
        not placement.is_contiguous(x[:, :4])
        and not placement.is_contiguous(x[..., :4], 1)
        and not placement.is_contiguous(x.mT, 1)
    )
    assert not placement.is_contiguous(x[:, :, :1].expand(-1, -1, 8), 1)


def test_a_permutation_is_gathered_before_it(gpu_costs):
    """One gather gives a value and its transpose, in whole vectors."""

    def function(user, item, layer):
        hidden = layer(user)
        return item @ hidden.mT + (item @ hidden.mT).relu() + hidden.sum(1, keepdim=True)[..., :1]

    fused = fused_for(function, (64, 32), (2, 64), (32, 64))
    (gather,) = [
        x
        for x in called(fused, aten.index_select.default)
        if x.args[0].target is aten.linear.default
    ]
    assert all(x.args[0] is gather for x in called(fused, aten.transpose.int))


def test_sizes_need_no_gather():
    fused = fused_for(
        lambda user, item, layer: layer(user).relu().view(user.shape[0], -1).exp() + item,
        (64,),
        (64,),
        (64, 64),
    )
    (gather,) = called(fused, aten.index_select.default)
    assert gather.args[0].target is aten.exp.default


def interaction(user, item):
    x = torch.cat([user, item], 1)
    return torch.bmm(x, x.mT)


def test_an_interaction_stays_whole_on_a_gpu(gpu_costs):
    """In blocks, the transposed ones and rows of 74 elements would be copied one by one. The report
    tells both costs."""
    fused = fused_for(interaction, (64, 128), (10, 128))
    assert matmul_rows(
        fused,
        torch.randn(3, 64, 128).bfloat16(),
        torch.randn(8, 10, 128).bfloat16(),
        candidate_to_user=torch.arange(8) % 3,
    ) == [8 * 74]
    site_of = site(fused, "bmm")
    assert site_of.decision == "kept" and site_of.reason.startswith("in parts it costs ")
    assert (site_of.rows_before, site_of.rows_after) == (CANDIDATES, CANDIDATES)


def cross(user, item, layer, readers):
    """A product with a concatenation, and other readers of it."""
    x = torch.cat([user, item], 1)
    return layer(x) * readers(x)


@pytest.mark.parametrize("name", ["another reader", "another product"])
def test_a_product_is_split_if_the_concatenation_is_not_needed_otherwise(gpu_costs, name):
    widths = [(9216, 128), *[(9216, 128)] * (name == "another product")]

    def function(user, item, layer, *others):
        return cross(user, item, layer, others[0] if others else lambda x: x.square()[:, :128])

    fused = fused_for(function, (8192,), (1024,), *widths)
    if name == "another product":
        assert len(called(fused, aten.linear.default)) == 4
        assert [x.decision for x in fused.report.sites if x.operator == "linear"] == ["moved"] * 2
    else:
        assert len(called(fused, aten.linear.default)) == 1
        assert "in parts it costs" in site(fused, "linear").reason


def test_concatenations_of_concatenations_are_one():
    """Users' features are concatenated once per user, and gathered together."""

    def function(user, item, layer):
        x = torch.cat([user.relu(), torch.cat([user.tanh(), item], 1)], 1)
        return x.exp() * x

    fused = fused_for(function, (64,), (64,), (64, 64), dtype=torch.float32)
    first, second = called(fused, aten.cat.default)
    (gather,) = called(fused, aten.index_select.default)
    assert gather.args[0] is first and second.args[0][0] is gather
    index, user, item = torch.tensor([2, 0, 2, 2, 0]), torch.randn(3, 64), torch.randn(5, 64)
    torch.testing.assert_close(
        fused(user, item, candidate_to_user=index),
        function(user[index], item, None),
        rtol=0,
        atol=0,
    )


def test_users_features_of_different_sizes_are_gathered_by_themselves():
    """Together they would be narrowed to the smaller one, where negative entries of the map are
    other rows."""

    class Concatenates(nn.Module):
        def forward(self, x, y, item, index):
            return torch.cat([x[index], torch.cat([y[index], item], 1)], 1)

    model = Concatenates().eval()
    fused = fuse_broadcasts(
        model, (torch.randn(3, 4), torch.randn(5, 4), torch.randn(9, 4), torch.arange(9) % 3)
    )
    inputs = (
        torch.randn(3, 4),
        torch.randn(4, 4),
        torch.randn(6, 4),
        torch.tensor([0, -1, 2, -3, 1, -2]),
    )
    torch.testing.assert_close(fused(*inputs), model(*inputs), rtol=0, atol=0)
    torch.testing.assert_close(copy.deepcopy(fused)(*inputs), model(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("processor", ["CPU", "GPU"])
@pytest.mark.parametrize("name", TORCHREC)
def test_no_model_gets_more_expensive(monkeypatch, name, processor):
    monkeypatch.setattr(placement, "CPU", getattr(placement, processor))
    fused = fuse_broadcasts(
        TORCHREC[name]().eval(),
        (torch.randn(64, DENSE), sparse(64)),
        request_only=("dense_features",),
    )
    assert fused.report.after.total < fused.report.before.total
    assert any(site.decision == "moved" for site in fused.report.sites)


def test_a_cost_is_the_sum_of_its_terms(gpu_costs):
    fused = fused_for(lambda user, item, layer: layer(user) * item, (64,), (64,), (64, 64))
    site_of, gpu = site(fused, "linear"), placement.GPU
    flops, moved = 2 * CANDIDATES * 64 * 64, 2 * (2 * CANDIDATES * 64 + 64 * 64)
    assert (site_of.before.flops, site_of.before.bytes, site_of.before.kernels) == (flops, moved, 1)
    assert site_of.before.total == moved + flops / gpu.flops_16_bit + gpu.kernel
    assert (
        site_of.before.least
        == (1 - placement.ERROR) * (moved + flops / gpu.flops_16_bit) + gpu.kernel
    )
    assert " kernels, cost " in str(fused.report)


def costs_of(function, *shapes, **hints):
    """Costs of the operators of a function of tensors of these shapes, on a CPU."""
    captured = capture(Model(function), tuple(map(torch.randn, shapes)), {})
    clean_up(captured.graph)
    costs = placement.Costs(Analysis(), partial(evaluate, hints=captured.hints, unknown=1))
    operators = [x for x in captured.graph.nodes if x.op == "call_function"]
    return [cost for cost in map(costs.full, operators) if cost.kernels]


@pytest.mark.parametrize("columns, computed", [(64, 64), (65, 80), (4, 16), (1, 1)])
def test_columns_of_a_gemm_fill_vectors(columns, computed):
    """On a CPU, of 16 elements. A product with a vector reads the matrix once."""
    (cost,) = costs_of(torch.matmul, (100, 32), (32, columns))
    moved = 4 * (100 * 32 + 32 * columns + 100 * columns)
    flops = 2 * 100 * 32 * computed
    assert cost.bytes == moved and cost.work == pytest.approx(moved + flops / placement.CPU.flops)


def test_what_a_cache_does_not_hold_takes_twice_the_time():
    for rows in (100, 100_000):
        (cost,) = costs_of(torch.add, (rows, 64), (rows, 64))
        moved = 4 * 3 * rows * 64
        assert cost.work == moved + max(moved - placement.CPU.cache, 0)
    assert moved > placement.CPU.cache


def test_an_attention_costs_its_scores():
    shape = (10, 4, 50, 16)
    (cost,) = costs_of(
        lambda x, y: nn.functional.scaled_dot_product_attention(x, y, y), *[shape] * 2
    )
    moved, scores = 3 * 4 * 10 * 4 * 50 * 16, 10 * 4 * 50 * 50
    expected = moved + scores * (4 * 16 / placement.CPU.flops + placement.CPU.score)
    assert cost.work == pytest.approx(expected)


@pytest.mark.parametrize("columns", [4, 15, 16])
def test_a_softmax_of_short_rows_costs_more(columns):
    """It computes them one by one."""
    (cost,) = costs_of(lambda x, y: x.softmax(1), (100, columns), (2, 2))
    times = placement.ONE_BY_ONE if columns < 16 else 1
    own = times * placement.CPU.elements[aten.softmax.int]
    assert cost.work == 100 * columns * (8 + own)


def test_reshapes_cost_nothing_where_a_view_has_the_shape():
    """Of slices of rows, but not of transposed ones."""
    model = Model(lambda user, item: (user[:, :, :8].reshape(-1, 5, 2, 4), user.mT.reshape(-1, 80)))
    captured = capture(model, (torch.randn(4, 5, 16), torch.randn(4, 1)), {})
    clean_up(captured.graph)
    costs = placement.Costs(Analysis(), partial(evaluate, hints=captured.hints, unknown=1))
    reshapes = [x for x in captured.graph.nodes if x.target in placement.TO_SHAPE]
    assert [costs.full(x).bytes for x in reshapes] == [0, 2 * 4 * 4 * 80]


def test_columns_of_a_single_field_are_parts():
    """As of models that keep a dimension for fields."""

    def function(user, item, layer):
        return layer(torch.cat([user, item], 2).flatten(1))

    fused = fused_for(function, (1, 512), (1, 32), (544, 64), dtype=torch.float32)
    assert len(called(fused, aten.linear.default)) == 2
    user, item, index = torch.randn(3, 1, 512), torch.randn(5, 1, 32), torch.arange(5) % 3
    weight = fused.get_parameter("layers.0.weight")
    expected = torch.cat([user[index], item], 2).flatten(1) @ weight.mT
    found = fused(user, item, candidate_to_user=index)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, parts", [(torch.float32, 1), (torch.bfloat16, 2)])
def test_a_gemm_of_few_rows_takes_as_long_as_a_tile_on_a_gpu(gpu_costs, dtype, parts):
    """In float32, where that was measured: a product is not split if it is no larger."""

    def function(user, item, layer):
        return layer(torch.cat([user, item], 1))

    fused = fused_for(function, (8192,), (512,), (8704, 512), dtype=dtype)
    assert len(called(fused, aten.linear.default)) == parts


def test_products_without_elements_have_costs():
    costs = costs_of(lambda x, y: (x @ y, y @ x), (3, 0), (0, 3))
    assert all(cost.work >= 0 for cost in costs)
