"""Linears of concatenations that hold sums, differences and values of fewer rows: as sums of terms,
in results and gradients those of the model."""

import copy

import pytest
import torch
from torch import nn

from jagged_modules.transforms import fuse_broadcasts
from jagged_modules.transforms.report import Report

aten = torch.ops.aten
USERS, CANDIDATES, EVENTS, WIDTH, HIDDEN = 4, 200, 30, 64, 48


class Scores(nn.Module):
    """An MLP of features of an item and of each event of the user's history, then the events'
    sum, weighted by tanh of the scores (by the scores it is a `din_attention`)."""

    def __init__(self, features, activation=None, blocks=4):
        super().__init__()
        self.features = features
        self.first, self.last = nn.Linear(blocks * WIDTH, HIDDEN), nn.Linear(HIDDEN, 1)
        self.activation = activation or nn.Sigmoid()

    def forward(self, history, item):
        q = item[:, None].expand(-1, history.shape[1], -1)
        x = self.features(q, history)
        z = self.first(x.view(-1, x.shape[-1]))
        score = self.last(self.activation(z)).view(-1, history.shape[1], 1)
        return (score.tanh() * history).sum(1)


class Dice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN, affine=False)
        self.slope = nn.Parameter(torch.rand(HIDDEN))
        self.norm.running_mean.normal_()

    def forward(self, z):
        p = self.norm(z).sigmoid()
        return p * z + self.slope * (1 - p) * z


def joined(*values):
    return torch.cat(values, -1)


FEATURES = {
    "of DIN": lambda q, k: joined(q, k, q - k, q * k),
    "in another order": lambda q, k: joined(k - q, q * k, k, q),
    "without products": lambda q, k: joined(k, q - k, k + q, q),
    "nested": lambda q, k: joined(joined(q, k), q - (k - q), q + k),
    "parts of events": lambda q, k: joined(q, k[..., :8], k[..., 8:], q * k, q),
}


def inputs(users, candidates, events=EVENTS):
    generator = torch.Generator().manual_seed(users + candidates)
    return dict(
        history=torch.randn(users, events, WIDTH, generator=generator).double(),
        item=torch.randn(candidates, WIDTH, generator=generator).double(),
    )


def fused_of(model, **sizes):
    return fuse_broadcasts(
        model.double().eval(),
        inputs(8, 8),
        request_only=("history",),
        max_batch=sizes.get("max_batch", (USERS, CANDIDATES)),
    )


def assert_same(fused, model, users=3, candidates=11):
    """Results and gradients of all inputs and parameters."""
    given, index = inputs(users, candidates), torch.arange(candidates) * 5 % users
    found = {name: x.clone().requires_grad_() for name, x in given.items()}
    expected = {name: x.clone().requires_grad_() for name, x in given.items()}
    graph = copy.deepcopy(fused)  # always runs the new graph
    for run in (fused, graph):
        model.zero_grad()
        out = run(**found, candidate_to_user=index)
        out.square().sum().backward()
        of_fused = [x.grad for x in (*found.values(), *run.parameters())]
        model.zero_grad()
        whole = model(expected["history"][index], expected["item"])
        whole.square().sum().backward()
        torch.testing.assert_close(out, whole, rtol=1e-10, atol=1e-10)
        of_model = [x.grad for x in (*expected.values(), *model.parameters())]
        assert len(of_fused) == len(of_model)
        for x, y in zip(of_fused, of_model):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
        for x in (*found.values(), *expected.values(), *run.parameters()):
            x.grad = None


def linears(fused):
    return [node for node in fused.graph.nodes if node.target is aten.linear.default]


@pytest.mark.parametrize("name", FEATURES)
def test_results_and_gradients(name):
    torch.manual_seed(0)
    model = Scores(FEATURES[name])
    fused = fused_of(model)
    assert any(
        site.decision == "moved" and site.operator == "linear" for site in fused.report.sites
    )
    assert_same(fused, model)


@pytest.mark.parametrize("activation", [Dice, lambda: nn.PReLU(HIDDEN), nn.ReLU])
def test_activations(activation):
    torch.manual_seed(0)
    model = Scores(FEATURES["of DIN"], activation())
    assert_same(fused_of(model), model)


def test_the_work_of_din():
    """Only the products have a row for each pair: a quarter of the columns."""
    fused = fused_of(Scores(FEATURES["of DIN"]))
    pairs, columns = CANDIDATES * EVENTS, 2 * HIDDEN * WIDTH
    before = 4 * pairs * columns + 2 * HIDDEN * pairs
    after = (pairs + USERS * EVENTS + CANDIDATES) * columns + 2 * HIDDEN * pairs
    assert (fused.report.before.flops, fused.report.after.flops) == (before, after)
    assert len(linears(fused)) == 4
    assert not [node for node in fused.graph.nodes if node.target is aten.sub.Tensor and
                node.args[0].target is not aten.slice.Tensor]  # fmt: skip


class Repeated(nn.Module):
    """An item's features beside those of each event, as a Transformer of both takes them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8 * WIDTH, 64)

    def forward(self, history, item):
        q = item[:, None].expand(-1, history.shape[1], -1)
        of_events = [history, history.relu(), history.sin()] * 2
        return self.layer(joined(*of_events, q, q)).relu().sum(1)


def test_no_product_has_a_row_for_each_pair():
    model = Repeated()
    fused = fused_of(model)
    rows = 3 * USERS * EVENTS + CANDIDATES  # the columns of equal values are added
    assert fused.report.after.flops == 2 * WIDTH * 64 * rows
    assert_same(fused, model)


class KeepsConcatenation(Scores):
    """Another reader of the concatenation."""

    def forward(self, history, item):
        q = item[:, None].expand(-1, history.shape[1], -1)
        x = self.features(q, history)
        return self.last(self.activation(self.first(x))) * x.amax(-1, keepdim=True)


def test_a_concatenation_with_other_readers():
    torch.manual_seed(0)
    model = KeepsConcatenation(FEATURES["of DIN"])
    assert_same(fused_of(model), model)


@pytest.mark.parametrize(
    "features, blocks",
    [
        (lambda q, k: joined(q, k, k > 0), 3),
        (lambda q, k: joined(torch.sub(q, k, alpha=2), k, q * k), 3),
        (lambda q, k: joined(k, q - k.mean(-1, keepdim=True)), 2),
        (lambda q, k: joined(k, q - 1.0), 2),
        (lambda q, k: joined(k, q, k.new_ones(k.shape)), 3),
        (lambda q, k: joined(q, q - 1.0), 2),
        (lambda q, k: joined(joined(q, k) - joined(k, q), q * k, k), 4),
    ],
)
def test_what_is_no_sum_of_values_is_a_value(features, blocks):
    """Another dtype, a factor, a value that broadcasts over columns, and numbers."""
    torch.manual_seed(0)
    model = Scores(features, blocks=blocks)
    assert_same(fused_of(model), model)


def test_few_candidates_keep_the_concatenation():
    fused = fused_of(Scores(FEATURES["of DIN"]), max_batch=(3, 4))
    assert isinstance(fused.report, Report)
    assert len(linears(fused)) == 2
