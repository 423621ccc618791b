"""This project's layers on replicated rows: they move to the users' rows, or read the users' rows
in place."""

import functools

import pytest
import torch
from torch import nn

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.transforms import calls, own_operators
from jagged_modules.transforms.fuse import make_plan

from .captured import capture, everything
from .test_rules import MAPS, USERS, assert_same

aten = torch.ops.aten
WIDTH, HEADS, EVENTS, FEATURES = 8, 2, 5, 3


def segments(x, step=None):
    """A dense batch as a jagged one."""
    rows = x.shape[1]
    offsets = (
        torch.arange(x.shape[0] + 1) * rows
        if step is None
        else torch.arange(0, x.shape[0] * rows + 1, rows)
    )
    return x.flatten(0, 1), offsets


class OnReplicated(nn.Module):
    """function(layer, history[map], user[map], item)."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, history, user, item, index):
        return self.function(
            self.layer, history.index_select(0, index), user.index_select(0, index), item
        )


def gdpa(activation, mask=None):
    return lambda: jm.JaggedGDPA(WIDTH, HEADS, activation, mask)


# All that they compute depends on the user.
MOVED = {
    "gdpa": (gdpa("gelu_tanh"), lambda layer, h, u, i: layer(segments(h))[0]),
    "gdpa, softmax": (gdpa("softmax"), lambda layer, h, u, i: layer(segments(h, "one arange"))[0]),
    "gdpa, mask": (
        gdpa("silu", jm.AttentionMask(causal=True, window=(2, 0))),
        lambda layer, h, u, i: layer(segments(h))[0],
    ),
    "gdpa, context": (
        gdpa("relu"),
        lambda layer, h, u, i: layer(segments(u), context=segments(h))[0],
    ),
    "hstu": (
        lambda: jm.HSTULayer(WIDTH, HEADS, jm.HSTUConfig(scaling_seqlen=10)),
        lambda layer, h, u, i: layer(segments(h))[0],
    ),
    "target attention": (
        lambda: jm.JaggedTargetAttention(WIDTH, HEADS),
        lambda layer, h, u, i: layer(u, segments(h)),
    ),
    "linear compress": (
        lambda: jm.LinearCompressEmbedding(FEATURES, 2),
        lambda layer, h, u, i: layer(u),
    ),
    "mlp": (lambda: jm.JaggedMLP([WIDTH, 4]), lambda layer, h, u, i: layer(segments(h))[0]),
    "linear and norm": (
        lambda: nn.Linear(WIDTH, 4),
        lambda layer, h, u, i: F.jagged_layer_norm(
            F.jagged_linear(h.flatten(0, 1), layer.weight, layer.bias), None, None
        ),
    ),
}
# Queries of candidates, keys and values of their users.
FUSED = {
    "target attention": MOVED["target attention"][0],
    "gdpa": gdpa("gelu_tanh"),
    "gdpa, softmax": gdpa("softmax"),
}


def example(users, index, width=WIDTH):
    x = (
        torch.randn(n, rows, width).double()
        for n, rows in ((users, EVENTS), (users, FEATURES), (len(index), 2))
    )
    return *x, torch.tensor(index)


def planned(make, function):
    torch.manual_seed(0)
    model = OnReplicated(make(), function).double().eval()
    captured = capture(model, example(3, MAPS[0] * 4), {})
    plan = make_plan(captured, None, captured.hints, everything)
    return model, plan, plan.apply()[0]


def names(graph):
    return [
        getattr(node.target, "__name__", str(node.target))
        for node in graph.nodes
        if node.op == "call_function"
    ]


def assert_same_for_all_maps(model, fused):
    for users, index in zip(USERS, MAPS):
        history, user, item, index = example(users, index)
        # one more row: no candidate has it
        given = torch.cat([history, torch.full_like(history[:1], torch.nan)])
        assert_same(fused(given, user, item, index), model(given, user, item, index))


def last_operator(graph):
    """The operator that computes the result, without views."""
    (output,) = graph.find_nodes(op="output")
    (node,) = output.all_input_nodes
    while node.target in (aten.flatten.using_ints, aten.reshape.default):
        node = node.all_input_nodes[0]
    return node


@pytest.mark.parametrize("name", MOVED)
def test_layers_move(name):
    model, plan, fused = planned(*MOVED[name])
    assert not plan.analysis.refused
    gathers = [node for node in fused.graph.nodes if node.target is aten.index_select.default]
    assert gathers == [last_operator(fused.graph)]
    assert_same_for_all_maps(model, fused)


@pytest.mark.parametrize("name", FUSED)
def test_candidates_read_their_users_rows_in_place(name):
    def function(layer, h, u, i):
        return layer(segments(i), segments(h))[0]

    model, _, fused = planned(FUSED[name], function)
    assert "attend_segments_in_place" in names(fused.graph)
    assert not fused.graph.find_nodes(op="call_function", target=aten.index_select.default)
    assert_same_for_all_maps(model, fused)


KEPT = {
    "other offsets": lambda layer, h, u, i: layer(
        i, (h.flatten(0, 1), (torch.arange(h.shape[0] + 1) * EVENTS) * 1)
    ),
    "cut elsewhere": lambda layer, h, u, i: layer(
        i.repeat(5, 1, 1), (h.flatten(0, 1), torch.arange(h.shape[0] * EVENTS + 1))
    ),
    "history of the candidate": lambda layer, h, u, i: layer(u, segments(i)),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_segments_keep_the_operator(name):
    model, plan, fused = planned(MOVED["target attention"][0], KEPT[name])
    assert plan.analysis.refused and any(
        str(node.target) in own_operators.ATTENTIONS for node in fused.graph.nodes
    )
    assert "attend_segments_in_place" not in names(fused.graph)
    assert_same_for_all_maps(model, fused)


@functools.cache
def compressed():
    function = lambda layer, h, u, i: layer(torch.cat([u.repeat(1, 40, 1), i], 1))
    torch.manual_seed(0)
    model = OnReplicated(jm.LinearCompressEmbedding(40 * FEATURES + 2, 3), function).double().eval()
    captured = capture(model, example(3, MAPS[3] * 40), {})
    return model, make_plan(captured, None, captured.hints).apply()[0]


def test_linear_compress_of_users_and_candidates():
    model, fused = compressed()
    assert "compress_unchecked" in names(fused.graph)
    assert_same_for_all_maps(model, fused)


def test_every_rule_has_a_case():
    """Those of kernels are tested on a GPU: in a graph that is captured on the host, the same
    layers call other operators."""
    registered = {name for name in calls.RULES if not name.startswith("aten.")}
    assert registered == {*own_operators.ATTENTIONS, own_operators.LINEAR_COMPRESS}


def test_offsets():
    def offsets(x):
        n = x.shape[0]
        return [
            torch.arange(n + 1) * 3,
            torch.arange(0, 3 * n + 1, 3),
            torch.arange(1, n + 1),
            x,
            torch.arange(n) * 2,
        ]

    class Model(nn.Module):
        def forward(self, x):
            return offsets(x)

    graph = capture(Model().eval(), (torch.arange(7),), {}).graph
    (output,) = graph.find_nodes(op="output")
    found = [own_operators.equal_segments(x) for x in output.args[0]]
    assert [x and x[1] for x in found] == [3, 3, None, None, 2]
    assert found[0][0] == found[4][0] + 1
