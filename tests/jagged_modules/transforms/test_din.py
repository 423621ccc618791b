"""Attention of candidates with scores of an MLP becomes `din_attention` on the users' histories."""

import copy
import math
from functools import partial

import pytest
import torch
from marks import slow_after
from torch import fx, nn

from jagged_modules.transforms import fuse_broadcasts

WIDTH, EVENTS, USERS = 8, 7, 4
FEATURES = {
    "q": lambda q, k: q,
    "k": lambda q, k: k,
    "q-k": lambda q, k: q - k,
    "k-q": lambda q, k: k - q,
    "q*k": lambda q, k: q * k,
}


class Dice(nn.Module):
    def __init__(self, units, affine):
        super().__init__()
        self.norm = nn.BatchNorm1d(units, eps=1e-8, affine=affine)
        self.slope = nn.Parameter(torch.rand(units))
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, z):
        p = self.norm(z.flatten(0, -2)).view(z.shape).sigmoid()
        return (1 - p) * self.slope * z + p * z


class TransposedDice(Dice):
    """Units come before events, where a batch norm takes them."""

    def __init__(self, units):
        super().__init__(units, affine=True)
        self.slope = nn.Parameter(torch.rand(units, 1))

    def forward(self, z):
        z = z.transpose(1, 2)
        p = self.norm(z).sigmoid()
        return (self.slope * (1 - p) * z + p * z).transpose(1, 2)


class Normed(nn.Module):
    """A batch norm behind the linear, then an activation."""

    def __init__(self, units, activation, affine=True):
        super().__init__()
        self.norm, self.activation = nn.BatchNorm1d(units, affine=affine), activation(units)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        if affine:
            nn.init.normal_(self.norm.weight)
            nn.init.normal_(self.norm.bias)

    def forward(self, z):
        return self.activation(self.norm(z.flatten(0, -2))).view(z.shape)


class Flat(nn.Module):
    """PReLU with a slope for each unit: torch takes dimension 1 for the units."""

    def __init__(self, units):
        super().__init__()
        self.prelu = nn.PReLU(units)

    def forward(self, z):
        return self.prelu(z.flatten(0, 1)).view(z.shape)


ACTIVATIONS = {
    "sigmoid": lambda units: nn.Sigmoid(),
    "relu": lambda units: nn.ReLU(),
    "silu": lambda units: nn.SiLU(),
    "prelu": lambda units: nn.PReLU(),
    "prelu of units": Flat,
    "dice": partial(Dice, affine=False),
    "dice, affine": partial(Dice, affine=True),
    "dice, transposed": TransposedDice,
    "norm, relu": lambda units: Normed(units, lambda _: nn.ReLU()),
    "norm, dice": lambda units: Normed(units, partial(Dice, affine=True), affine=False),
    "identity": lambda units: nn.Identity(),
}


def shown(mask, events):
    """The bool mask of lengths, or itself."""
    return mask if mask.dim() == 2 else torch.arange(events) < mask[:, None]


# how events that do not count are left out of the sum: [B, T], [B, T]
MASKS = {
    "times": lambda s, mask: s * mask,
    "times numbers": lambda s, mask: mask.to(s.dtype) * s,
    "filled": lambda s, mask: s.masked_fill(~mask, 0.0),
    "where": lambda s, mask: torch.where(mask, s, torch.zeros_like(s)),
    "softmax": lambda s, mask: s.masked_fill(~mask, -math.inf).softmax(-1),
    "softmax, where": lambda s, mask: torch.where(mask, s, -math.inf).softmax(-1),
    "softmax of all": lambda s, mask: s.softmax(-1),
    "all": lambda s, mask: s,
    "scaled": lambda s, mask: s * mask / 2,
    "softmax, scaled": lambda s, mask: (s.masked_fill(~mask, -math.inf) / 4 * 3).softmax(-1),
    "softmax, constant": lambda s, mask: s.masked_fill(~mask, torch.tensor(-math.inf)).softmax(-1),
}
# where the model hides events by a large number, a user without any gets the mean of all
FINITE = {
    "filled": lambda s, mask: s.masked_fill(~mask, -1e9).softmax(-1),
    "ones": lambda s, mask: torch.where(mask, s, torch.ones_like(s) * (-(2**32) + 1)).softmax(-1),
    "full": lambda s, mask: torch.where(~mask, torch.full_like(s, -1e9), s).softmax(-1),
    "scalar first": lambda s, mask: torch.where(~mask, -1e9, s).softmax(-1),
    "constant": lambda s, mask: torch.where(mask, s, torch.tensor(-1e9, dtype=s.dtype)).softmax(-1),
    "scaled": lambda s, mask: (s.masked_fill(~mask, -(2**20)) / 8).softmax(-1),
    "product": lambda s, mask: (s * mask + -1e9 * (1 - mask.to(s.dtype))).softmax(-1),
    "product less": lambda s, mask: (s * mask - (1 - mask.to(s.dtype)) * 1e9).softmax(-1),
}
# scores of hidden events are rounded away, in fp32
ADDED = {
    "added": lambda s, mask: (s + (mask.to(s.dtype) - 1) * 1e9).softmax(-1),
    "added, filled": lambda s, mask: (
        torch.zeros(s.shape[0], EVENTS).masked_fill(~mask, -1e9) + s
    ).softmax(-1),
    "less": lambda s, mask: (s - 1e9 * (~mask).to(s.dtype)).softmax(-1),
}
SUMS = {
    "sum": lambda s, v: (s.unsqueeze(-1) * v).sum(1),
    "kept dimension": lambda s, v: (v * s.view(-1, EVENTS, 1)).sum(-2, keepdim=True),
    "product": lambda s, v: torch.bmm(s.unsqueeze(1), v).squeeze(1),
    "transposed": lambda s, v: s.unsqueeze(-1).transpose(1, 2) @ v,
}


class DIN(nn.Module):
    def __init__(
        self,
        activation="sigmoid",
        mask="times",
        total="sum",
        features=("q", "k", "q-k", "q*k"),
        flat=False,
        bias=True,
        hidden=(16, 6),
    ):
        super().__init__()
        make = ACTIVATIONS.get(activation, activation)
        sizes, layers = [len(features) * WIDTH, *hidden], []
        for columns, units in zip(sizes, sizes[1:]):
            layers += [nn.Linear(columns, units, bias=bias), make(units)]
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden[-1], 1))
        self.mask, self.total, self.flat = MASKS.get(mask, mask), SUMS.get(total, total), flat
        self.features = [FEATURES.get(x, x) for x in features]

    def scores(self, q, k):
        q = q.unsqueeze(1).expand(-1, k.shape[1], -1)
        x = torch.cat([feature(q, k) for feature in self.features], -1)
        x = x.view(-1, x.shape[-1]) if self.flat else x
        return self.mlp(x)[..., 0].view(-1, k.shape[1])

    def forward(self, history, mask, item):
        scores = self.mask(self.scores(item, history), shown(mask, history.shape[1]))
        return self.total(scores, history)


class RepeatedQuery(DIN):
    """The query is repeated along its columns."""

    def scores(self, q, k):
        q = q.repeat(1, EVENTS).view(-1, EVENTS, WIDTH)
        return self.mlp(torch.cat([q, k, k - q, q * k], -1)).view(-1, EVENTS)


class Embedded(DIN):
    """Of ids; the values are a linear of the events."""

    def __init__(self, **options):
        super().__init__(**options)
        self.items, self.values = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, history, mask, item):
        k = self.items(history)
        scores = self.mask(self.scores(self.items(item), k), shown(mask, EVENTS))
        return self.total(scores, self.values(k))


def inputs(users, candidates, model=None, lengths=False):
    """With hidden events, and a user of whom all are visible."""
    generator = torch.Generator().manual_seed(users + candidates)
    rand = partial(torch.randn, generator=generator)
    if isinstance(model, Embedded):
        rand = lambda *sizes: torch.randint(0, 20, sizes[:2] if len(sizes) > 2 else sizes[:1])  # noqa: E731
    mask = torch.rand(users, EVENTS, generator=generator) < 0.6
    mask[:, 2] = True
    mask[0] = True
    return dict(
        history=rand(users, EVENTS, WIDTH),
        mask=mask.sum(1) if lengths else mask,
        item=rand(candidates, WIDTH),
    )


def fused_of(model, lengths=False):
    """For more events than the tests have."""
    given = inputs(16, 16, model, lengths)
    dtype = next(model.parameters()).dtype
    given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
    return fuse_broadcasts(
        model.eval(), given, request_only=("history", "mask"), max_batch=(20, 4000)
    )


def uses_din_attention(fused):
    names = [getattr(node.target, "__name__", "") for node in fused.graph.nodes]
    return "attend_by_mlp_in_place" in names


def results(run, given, index=None):
    """The result and the gradients of its square by inputs and parameters."""
    leaves = [*run.parameters()]
    given = dict(given)
    for name, x in given.items():
        if x.is_floating_point():
            given[name] = x.clone().requires_grad_()
            leaves.append(given[name])
    replicated = {
        name: x if index is None or name == "item" else x[index] for name, x in given.items()
    }
    out = run(**replicated) if index is not None else run(**given)
    return out, torch.autograd.grad(out.square().sum(), leaves)


def assert_same(fused, model, lengths=False, users=USERS, candidates=11):
    dtype = next(model.parameters()).dtype
    given = inputs(users, candidates, model, lengths)
    given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
    index = torch.arange(candidates) * 5 % users
    graph = copy.deepcopy(fused)  # without the calls of the model for U >= C
    out, grads = results(partial_of(graph, index), given)
    expected, expected_grads = results(model, given, index)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert out.shape == expected.shape
    for x, y in zip((out, *grads), (expected, *expected_grads), strict=True):
        scale = max(float(y.detach().abs().max()), 1.0)
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * scale)


def partial_of(graph, index):
    """The graph as a model of users' and candidates' rows."""

    class Run(nn.Module):
        def __init__(self):
            super().__init__()
            self.graph = graph

        def forward(self, **given):
            return self.graph(**given, candidate_to_user=index)

    return Run()


CASES = [
    *[dict(activation=x) for x in ACTIVATIONS],
    *[dict(activation="dice", mask=x) for x in MASKS],
    *[
        dict(activation="dice, transposed", mask=FINITE[x], total="product")
        for x in ("ones", "product")
    ],
    *[dict(features=x) for x in (("q", "k", "k-q", "q*k"), ("k-q", "q-k"))],
    *[dict(activation="relu", mask="softmax", total=x) for x in SUMS],
    dict(flat=True, activation="dice, affine", bias=False),
    dict(features=("q*k", "k", "q")),
    dict(features=("k", "q-k")),
    dict(features=("q*k",), flat=True, mask="softmax"),
    dict(hidden=(4,)),
]


@slow_after(1, "dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda x: " ".join("a function" if callable(y) else str(y) for y in x.values()),
)
def test_results_and_gradients(case, dtype):
    torch.manual_seed(0)
    model = DIN(**case).to(dtype)
    fused = fused_of(model)
    assert uses_din_attention(fused)
    assert "din_attention" in str(fused.report)
    assert_same(fused, model)


@pytest.mark.parametrize("mask", ["times", "softmax"])
def test_lengths(mask):
    torch.manual_seed(0)
    model = DIN("relu", mask)
    fused = fused_of(model, lengths=True)
    assert uses_din_attention(fused)
    assert_same(fused, model, lengths=True)


@pytest.mark.parametrize("mask", ["times", "softmax"])
def test_embeddings_and_other_values(mask):
    torch.manual_seed(0)
    model = Embedded(mask=mask).double()
    fused = fused_of(model)
    assert uses_din_attention(fused)
    assert_same(fused, model)


@pytest.mark.parametrize("mask", ["times", "softmax"])
def test_a_user_without_visible_events_is_as_in_the_model(mask):
    """0, or a softmax's NaN. Other users are not affected."""
    torch.manual_seed(0)
    model = DIN("relu", mask).double()
    given = inputs(USERS, 11)
    given = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
    given["mask"][1], index = False, torch.arange(11) % USERS
    graph = copy.deepcopy(fused_of(model))
    expected = model(given["history"][index], given["mask"][index], given["item"])
    found = graph(**given, candidate_to_user=index)
    assert bool(expected[index == 1].isnan().all()) == (mask == "softmax")
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [*FINITE, *ADDED])
def test_events_hidden_by_a_number(name):
    """A user without visible events gets the mean of the values."""
    torch.manual_seed(0)
    model, given = DIN("relu", (FINITE | ADDED)[name]), inputs(USERS, 11)
    given["mask"][1], index = False, torch.arange(11) % USERS
    fused = fused_of(model)
    assert uses_din_attention(fused)
    expected = model(given["history"][index], given["mask"][index], given["item"])
    found = copy.deepcopy(fused)(**given, candidate_to_user=index)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    mean = given["history"].mean(1)[1]
    torch.testing.assert_close(found[index == 1], mean.expand(3, -1), rtol=0, atol=1e-5)


def test_a_query_repeated_along_its_columns():
    torch.manual_seed(0)
    model = RepeatedQuery().double()
    fused = fused_of(model)
    assert uses_din_attention(fused)
    assert_same(fused, model)


class RepeatedRange(DIN):
    """The mask is of positions that are repeated for the batch."""

    def forward(self, history, mask, item):
        positions = torch.arange(EVENTS).repeat(item.shape[0], 1)
        return super().forward(history, positions < mask[:, None], item)


def test_a_mask_of_repeated_positions():
    torch.manual_seed(0)
    model = RepeatedRange("relu", FINITE["ones"])
    fused = fused_of(model, lengths=True)
    assert uses_din_attention(fused)
    assert_same(fused, model, lengths=True)


class Shapes(fx.Interpreter):
    """Records the shape of each value."""

    def __init__(self, graph):
        super().__init__(graph)
        self.shapes = []

    def run_node(self, n):
        out = super().run_node(n)
        self.shapes += [tuple(x.shape) for x in [out] if isinstance(x, torch.Tensor)]
        return out


@pytest.mark.parametrize("mask", ["times", "softmax"])
def test_no_value_has_a_row_for_each_pair(mask):
    graph, given = fused_of(DIN("dice", mask)), inputs(USERS, 11)
    run = Shapes(copy.deepcopy(graph))
    values = [
        given.get(x.name, torch.arange(11) % USERS)
        for x in graph.graph.find_nodes(op="placeholder")
    ]
    run.run(*values)
    assert len(run.shapes) > 5
    assert not [x for x in run.shapes if x[:2] == (11, EVENTS) or x[:1] == (11 * EVENTS,)]


class TwoMasks(DIN):
    def scores(self, q, k):
        return super().scores(q, k).masked_fill(k[..., 0] < 0, 0)


class ReturnsScores(DIN):
    def forward(self, history, mask, item):
        scores = self.scores(item, history) * mask
        return (scores.unsqueeze(-1) * history).sum(1), scores


class OfEachEvent(DIN):
    """The query is another one for each event."""

    def scores(self, q, k):
        q = q.unsqueeze(1) * torch.arange(1.0, EVENTS + 1)[:, None]
        return self.mlp(torch.cat([feature(q, k) for feature in self.features], -1)).squeeze(-1)


class Transposed(nn.Module):
    """Events and units are exchanged."""

    def forward(self, z):
        return z.transpose(1, 2).reshape(z.shape).sigmoid()


class EventsFirst(Dice):
    """A batch norm of events: here there are as many as units."""

    def __init__(self, units, affine):
        super().__init__(EVENTS, affine)
        self.slope = nn.Parameter(torch.rand(()))

    def forward(self, z):
        p = self.norm(z).sigmoid()
        return self.slope * (1 - p) * z + p * z


class OfZeros(Dice):
    """The gate is of another value."""

    def forward(self, z):
        p = self.norm(torch.zeros(z.shape[0] * EVENTS, z.shape[-1], dtype=z.dtype))
        p = p.view(z.shape).sigmoid()
        return (1 - p) * self.slope * z + p * z


class OtherDice(Dice):
    def __init__(self, units, formula, track=True):
        super().__init__(units, affine=False)
        self.formula = formula
        if not track:
            self.norm = nn.BatchNorm1d(units, affine=False, track_running_stats=False)

    def forward(self, z):
        p = self.norm(z.flatten(0, -2)).view(z.shape).sigmoid()
        return self.formula(p, self.slope, z)


def other_activations():
    model = DIN("relu")
    model.mlp[3] = nn.Sigmoid()
    return model


def other_eps():
    model = DIN("dice")
    model.mlp[3].norm.eps = 1e-3
    return model


def first_of_two():
    model = DIN()
    model.mlp[4] = nn.Linear(6, 2)
    return model


def one_linear():
    model = DIN()
    model.mlp = nn.Linear(4 * WIDTH, 1)
    return model


def two_scores():
    model = DIN()
    model.mlp[4] = nn.Linear(6, 2)
    model.mlp.append(nn.Linear(2, 1))
    return model


NEAR_MISSES = {
    "q + k": lambda: DIN(features=("q", "k", lambda q, k: q + k)),
    "q - 2 k": lambda: DIN(features=("q", "k", lambda q, k: torch.sub(q, k, alpha=2))),
    "k · k": lambda: DIN(features=("q", "k", lambda q, k: k * k)),
    "q · q": lambda: DIN(features=("q", "k", lambda q, k: q * q)),
    "of another key": lambda: DIN(features=("q", "k", lambda q, k: q * k.relu())),
    "a feature twice": lambda: DIN(features=("q", "k", "k")),
    "tanh": lambda: DIN(activation=lambda units: nn.Tanh()),
    "two activations": other_activations,
    "two eps": other_eps,
    "identity behind sigmoid": two_scores,
    "one linear": one_linear,
    "the first of two scores": first_of_two,
    "slopes of events": lambda: DIN(activation=lambda units: nn.PReLU(EVENTS)),
    "dice of one gate": lambda: DIN(
        activation=partial(OtherDice, formula=lambda p, a, z: p * z + a * p * z)
    ),
    "dice of zeros": lambda: DIN(activation=partial(OfZeros, affine=False)),
    "transposed units": lambda: DIN(activation=lambda units: Transposed()),
    "dice of the batch": lambda: DIN(
        activation=partial(OtherDice, formula=lambda p, a, z: p * z + (1 - p) * a * z, track=False)
    ),
    "negative": lambda: DIN(mask=lambda s, mask: s * -0.5),
    "events before units": lambda: DIN(activation=partial(EventsFirst, affine=False)),
    "numbers": lambda: DIN(mask=lambda s, mask: (mask.to(s.dtype) + 1) * s),
    "hidden events are 1": lambda: DIN(mask=lambda s, mask: s.masked_fill(~mask, 1)),
    "a softmax of 0": lambda: DIN(mask=lambda s, mask: (s * mask).softmax(-1)),
    "a small number": lambda: DIN(mask=lambda s, mask: s.masked_fill(~mask, -100).softmax(-1)),
    "a number made small": lambda: DIN(
        mask=lambda s, mask: (s.masked_fill(~mask, -2e4) / 4).softmax(-1)
    ),
    "added in double": lambda: DIN(mask=ADDED["added"]),
    "a product with another mask": lambda: DIN(
        mask=lambda s, mask: (s * mask - 1e9 * mask.roll(1, 1).to(s.dtype)).softmax(-1)
    ),
    "visible events are shifted": lambda: DIN(
        mask=lambda s, mask: torch.where(mask, s, -1e9).add(mask.to(s.dtype)).softmax(-1)
    ),
    "softmax of candidates": lambda: DIN(mask=lambda s, mask: s.softmax(0)),
    "mean": lambda: DIN(total=lambda s, v: (s.unsqueeze(-1) * v).mean(1)),
    "sum of columns": lambda: DIN(total=lambda s, v: (s.unsqueeze(-1) * v).sum(2)),
    "two masks": TwoMasks,
    "scores are returned": ReturnsScores,
    "a query of each event": OfEachEvent,
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_no_din_attention_stays(name):
    torch.manual_seed(0)
    model = NEAR_MISSES[name]().double()
    given = {k: x.double() if x.is_floating_point() else x for k, x in inputs(USERS, 11).items()}
    index = torch.arange(11) * 5 % USERS
    graph = copy.deepcopy(fused_of(model))
    assert not uses_din_attention(graph)
    with torch.no_grad():
        found = graph(**given, candidate_to_user=index)
        expected = model(given["history"][index], given["mask"][index], given["item"])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_mask_of_candidates_stays():
    """It differs between candidates of a user."""
    torch.manual_seed(0)
    model, given = DIN().eval(), inputs(16, 16)
    fused = fuse_broadcasts(model, given, request_only=("history",), max_batch=(20, 4000))
    assert not uses_din_attention(fused)
