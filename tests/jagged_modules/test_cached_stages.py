"""Cached histories without gradients: layers compute from parameters that they cast once, and give
what their modules give."""

import pytest
import torch
from torch import nn

import jagged_modules as jm

WIDTH = 16
HISTORY, TARGETS, EVENTS = [4, 0, 5], [2, 1, 2], [0, 3, 1]
LAYERS = {
    "targets": lambda: jm.JaggedTargetAttention(WIDTH, 2),
    "gdpa": lambda: jm.JaggedGDPA(WIDTH, 4, config=jm.GDPAConfig(num_kv_heads=2)),
    "normed": lambda: jm.JaggedGDPA(WIDTH, 4, config=jm.GDPAConfig(qk_norm=True)),
    "hstu": lambda: jm.HSTUStack(WIDTH, 2, 2, jm.HSTUConfig(scaling_seqlen=10)),
}
# linear layers that are called although nothing has gradients: of keys with a norm, and out_proj
CALLED = {"targets": 0, "gdpa": 0, "normed": 1, "hstu": 2}


@pytest.fixture
def linears(monkeypatch):
    """The calls of modules."""
    calls, forward = [], nn.Linear.forward

    def counted(module, x):
        calls.append(module)
        return forward(module, x)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    return calls


def rows(lengths):
    return torch.randn(sum(lengths), WIDTH), torch.tensor([0, *lengths]).cumsum(0)


def results(layer, history, targets, events):
    """Of scores after the events, and the cache."""
    cache = layer.cache(history)
    cache = cache.append(layer.append(events, cache)[1])
    return [layer.score(targets, cache)[0], *(x.values for x in cache.layers)]


@pytest.mark.parametrize("name", LAYERS)
def test_equal_to_the_modules(linears, name):
    torch.manual_seed(0)
    layer, inputs = LAYERS[name]().eval(), [rows(x) for x in (HISTORY, TARGETS, EVENTS)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(layer, *inputs)
        assert expected[0].requires_grad
        linears.clear()
        with torch.no_grad():
            found = results(layer, *inputs)
        called = set(linears)
        with torch.no_grad():
            for module in layer.modules():
                module.register_forward_hook(lambda *_: None)
            hooked = results(layer, *inputs)
    assert all(map(torch.equal, found, expected)) and all(map(torch.equal, hooked, expected))
    assert len(called) == CALLED[name]


@pytest.mark.parametrize("name", ["targets", "gdpa", "hstu"])
def test_scores_are_those_of_the_forward(name):
    """In fp64, where nothing is cast: the caches' layout alone differs."""
    torch.manual_seed(0)
    layer = LAYERS[name]().double().eval()
    (history, offsets), (targets, target_offsets) = (
        (x.double(), ends) for x, ends in (rows(HISTORY), rows(TARGETS))
    )
    with torch.no_grad():
        scores = layer.score((targets, target_offsets), layer.cache((history, offsets)))[0]
        if name == "targets":
            expected = layer((targets, target_offsets), (history, offsets))[0]
        elif name == "gdpa":
            expected = layer((targets, target_offsets), (history, offsets))[0]
        else:
            pairs = zip(history.split(HISTORY), targets.split(TARGETS))
            both = torch.cat([torch.cat(pair) for pair in pairs])
            out = layer((both, offsets + target_offsets), torch.tensor(TARGETS))[0]
            lengths = [x + y for x, y in zip(HISTORY, TARGETS)]
            expected = torch.cat([x[-n:] for x, n in zip(out.split(lengths), TARGETS)])
    torch.testing.assert_close(scores, expected)
