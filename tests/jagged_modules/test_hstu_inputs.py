"""HSTU under graph tools, and bad input."""

import dataclasses

import pytest
import torch
from marks import slow_after
from torch import nn

import jagged_modules as jm

from .graph_cases import compiled, random_offsets
from .hstu_cases import CONFIGS, HEADS, WIDTH, config_of

# -- graph tools -----------------------------------------------------------------------------------

SIZES = [(5, 41, 11), (6, 83, 23), (7, 59, 37), (13, 140, 15)]  # segments, rows, targets


@slow_after(1, "kind", ["pair", "Jagged", "JaggedTensor"])
@slow_after(1, "config", [CONFIGS["plain"], CONFIGS["all"]], ids=["plain", "all"])
def test_compiles_once(kind, config):
    wrap = {
        "pair": lambda values, offsets: (values, offsets),
        "Jagged": lambda values, offsets: jm.Jagged(values, offsets, max_seqlen=100),
        "JaggedTensor": lambda values, offsets: pytest.importorskip("torchrec").JaggedTensor(
            values, offsets=offsets
        ),
    }[kind]
    if kind == "Jagged":
        config = dataclasses.replace(config, scaling_seqlen=None)
    stack = jm.HSTUStack(WIDTH, HEADS, 2, config)
    graph, counter = compiled(stack)
    compilations = []
    for segments, rows, _ in SIZES:
        offsets = random_offsets(segments, rows)
        num_targets = torch.minimum(offsets.diff(), torch.randint(3, (segments,)))
        values = torch.randn(rows, WIDTH)
        results = []
        for call in (stack, graph):
            leaf = values.clone().requires_grad_()
            out = jm.Jagged.wrap(call(wrap(leaf, offsets), num_targets)).values
            results.append(
                [out, *torch.autograd.grad(out.square().sum(), [leaf, *stack.parameters()])]
            )
        torch.testing.assert_close(*results)
        compilations.append(counter.frame_count)
    assert set(compilations) == {1}


@slow_after(
    1, "config", [CONFIGS["plain"], CONFIGS["context-short"]], ids=["plain", "context-short"]
)
def test_scoring_compiles_once(config):
    stack = jm.HSTUStack(WIDTH, HEADS, 2, config)
    graph, counter = compiled(stack.score)
    compilations = []
    for segments, rows, count in SIZES:
        cache = stack.cache((torch.randn(rows, WIDTH), random_offsets(segments, rows)))
        targets = torch.randn(count, WIDTH), random_offsets(segments, count)
        torch.testing.assert_close(graph(targets, cache)[0], stack.score(targets, cache)[0])
        compilations.append(counter.frame_count)
    assert set(compilations) == {1}


@pytest.mark.parametrize("leaf", ["HSTULayer", "HSTUStack"])
def test_traced_by_torchrec_as_a_leaf(leaf, offsets_of):
    tracer = pytest.importorskip("torchrec.fx").Tracer(leaf_modules=[leaf])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.hstu = jm.HSTUStack(WIDTH, HEADS, 2, config_of())

        def forward(self, x, num_targets):
            return self.hstu(x, num_targets)[0].relu()

    model = Model()
    traced = torch.fx.GraphModule(model, tracer.trace(model))
    arguments = (torch.randn(5, WIDTH), offsets_of([2, 3])), torch.tensor([1, 2])
    assert torch.equal(traced(*arguments), model(*arguments))


# -- bad input -------------------------------------------------------------------------------------

BAD_STACKS = [
    (
        dict(embedding_dim=10, num_heads=4),
        ValueError,
        "embedding_dim must be a multiple of num_heads, got 10 and 4",
    ),
    (dict(embedding_dim="8"), TypeError, "embedding_dim must be an int, got str"),
    (dict(num_heads=0), ValueError, "num_heads must be at least 1, got 0"),
    (dict(num_layers=0), ValueError, "num_layers must be at least 1, got 0"),
    (
        dict(embedding_dim=1024),
        ValueError,
        "embedding_dim / num_heads must be at most 256, got 512",
    ),
    (dict(config=jm.HSTUConfig(head_dim=257)), ValueError, "head_dim must be at most 256, got 257"),
    (dict(config=dict(head_dim=4)), TypeError, "config must be an HSTUConfig, got dict"),
]


@pytest.mark.parametrize(
    "change, error, message", BAD_STACKS, ids=[message[:40] for _, _, message in BAD_STACKS]
)
def test_bad_constructor(change, error, message):
    with pytest.raises(error, match=message):
        jm.HSTUStack(**(dict(embedding_dim=WIDTH, num_heads=HEADS, num_layers=2) | change))


BAD_CONFIGS = [
    (dict(linear_dim=0), ValueError, "linear_dim must be at least 1, got 0"),
    (dict(dropout=-1), ValueError, "dropout must be 0 to 1, got -1"),
    (dict(scaling_seqlen=0), ValueError, "scaling_seqlen must be at least 1, got 0"),
    (dict(scaling_seqlen=10.0), TypeError, "scaling_seqlen must be an int, got float"),
    (dict(contextual_seqlen=-1), ValueError, "contextual_seqlen must be at least 0, got -1"),
    (dict(target_group_size=0), ValueError, "target_group_size must be at least 1, got 0"),
    (dict(global_prefix=-1), ValueError, "global_prefix must be at least 0, got -1"),
    (dict(recent_history=0.5), TypeError, "recent_history must be an int, got float"),
    (dict(norm="batch"), ValueError, "norm must be one of .*group.*, got 'batch'"),
    (dict(recompute="norm"), TypeError, "recompute must be a tuple of names, got str"),
    (dict(recompute=("norm", "y")), ValueError, "each of recompute must be one of .*, got 'y'"),
]


@pytest.mark.parametrize(
    "fields, error, message", BAD_CONFIGS, ids=[message[:40] for _, _, message in BAD_CONFIGS]
)
def test_bad_config(fields, error, message):
    with pytest.raises(error, match=message):
        jm.HSTUConfig(**fields)


X = torch.randn(5, WIDTH), torch.tensor([0, 2, 5])
BAD_FORWARDS = [
    (dict(x=torch.randn(5, WIDTH)), TypeError, "x must be a JaggedTensor.*got Tensor"),
    (
        dict(x=(X[0].half(), X[1])),
        ValueError,
        "x's values must have the layer's dtype, torch.float32, got torch.float16",
    ),
    (
        dict(x=(torch.randn(5, 9), X[1])),
        ValueError,
        r"x's values must have shape \[L, 8\], got \[5, 9\]",
    ),
    (
        dict(num_targets=torch.tensor([1])),
        ValueError,
        r"num_targets must have shape \[B\] = \[2\], got \[1\]",
    ),
    (
        dict(num_targets=torch.tensor([1, 4])),
        ValueError,
        "num_targets must be at most the segment's length, got 4 of 3 at segment 1",
    ),
    (dict(num_targets=[1, 1]), TypeError, "num_targets must be a torch.Tensor, got list"),
]


@pytest.mark.parametrize(
    "change, error, message", BAD_FORWARDS, ids=[message[:40] for _, _, message in BAD_FORWARDS]
)
def test_bad_forward(change, error, message):
    with pytest.raises(error, match=message):
        jm.HSTUStack(WIDTH, HEADS, 2, config_of())(**(dict(x=X) | change))


def test_an_unknown_scaling_length():
    stack = jm.HSTUStack(WIDTH, HEADS, 2)
    for call in (stack, stack.cache):
        with pytest.raises(
            ValueError,
            match="scaling_seqlen must be given if the container has no max_seqlen, got None",
        ):
            call(X)


def test_bad_cache():
    stack, shorter = (jm.HSTUStack(WIDTH, HEADS, layers, config_of()) for layers in (2, 1))
    assert isinstance(stack.cache(X), jm.HistoryCache)
    with pytest.raises(TypeError, match="cache must be a HistoryCache, got list"):
        stack.append(X, [])
    with pytest.raises(TypeError, match="cache_rows must be a torch.Tensor or a slice, got list"):
        stack.layers[0].cache(X, [0])
    with pytest.raises(TypeError, match="cache must be a HistoryCache, got tuple"):
        stack.score(X, X)
    with pytest.raises(ValueError, match="cache must have 2 layers, got 1"):
        stack.score(X, shorter.cache(X))
    with pytest.raises(ValueError, match="the same number of segments, got 1 and 2"):
        stack.score((torch.randn(1, WIDTH), torch.tensor([0, 1])), stack.cache(X))
