"""jm.graphed without a GPU: with `padded`, `direct_graphs` takes the place of CUDA graphs."""

import contextlib
import copy
import pickle
import warnings

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import jagged_modules as jm
from jagged_modules.padded_arguments import OFFSETS, Arguments, Buckets, capacities_of
from jagged_modules.padded_buffers import Buffers, pad

from ..compatibility.cases import (
    CASES,
    HEADS,
    HSTU,
    WIDTH,
    OnCandidates,
    OnRows,
    make,
    training_step,
)
from ..direct_graphs import poison

OF_VALUES = {"offsets": "values"}
BATCHES = [  # lengths of histories
    [3, 0, 5, 2],
    [0, 0, 17, 1, 4],
    [1],
    [16],  # exactly a capacity
    [0, 0, 0],
    [],
    [40, 1, 0, 9, 30, 2, 0, 0, 12],
    [2, 1, 5, 2],
]


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def compare(module, other, arguments, wanted=()):
    """Results, and gradients of the parameters and of `wanted`, of two modules that share
    parameters."""
    wanted, results = [*module.parameters(), *wanted], []
    for called in (module, other):
        torch.manual_seed(1)
        out = called(*arguments)
        out = (
            out.values
            if isinstance(out, jm.Jagged)
            else out[0]
            if isinstance(out, (tuple, list))
            else out
        )
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        results.append(
            [out, *torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True)]
        )
    for x, y in zip(*results):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.shape == y.shape and y.isfinite().all()
            torch.testing.assert_close(y, x, rtol=1e-10, atol=1e-12)


LAYERS = {
    "gdpa": lambda: jm.JaggedGDPA(WIDTH, HEADS, config=jm.GDPAConfig(qk_norm=True)),
    "gdpa-softmax-causal": lambda: jm.JaggedGDPA(
        WIDTH, HEADS, "softmax", jm.AttentionMask(causal=True)
    ),
    "pooling": lambda: jm.JaggedGDPA(WIDTH, HEADS, config=jm.GDPAConfig(num_seeds=3)),
    "weights": lambda: jm.JaggedGDPA(WIDTH, HEADS, config=jm.GDPAConfig(num_weights=5)),
    "block": lambda: jm.GDPABlock(WIDTH, HEADS),
    "hstu": lambda: jm.HSTUStack(WIDTH, HEADS, 2, HSTU),
    "hstu-relative-position": lambda: jm.HSTUStack(
        WIDTH, HEADS, 1, jm.HSTUConfig(scaling_seqlen=30, relative_position=40)
    ),
    "blocks": lambda: jm.BlockDiagonalSelfAttention(WIDTH, HEADS, 16, max_seqlen=40),
    "mlp": lambda: jm.JaggedMLP([WIDTH, 24, 40], "silu"),
}


@pytest.mark.parametrize("kind", ["pair", "Jagged"])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_on_rows(padded, poisoned_memory, offsets_of, layer, kind):
    module = LAYERS[layer]().double()
    graph = jm.graphed(module)
    for lengths in BATCHES:
        values, offsets = leaf(sum(lengths), WIDTH), offsets_of(lengths)
        poison(graph)
        compare(
            module,
            graph,
            [(values, offsets) if kind == "pair" else jm.Jagged(values, offsets)],
            [values],
        )
    assert 1 < len(graph._steps) < len(BATCHES)


def random_candidates(users, counts, width):
    """Dense targets, and candidates in each form that a layer takes: name → the first argument, its
    tensor, the last argument."""
    rows, map_ = (
        leaf(sum(counts), 2, width),
        torch.arange(users).repeat_interleave(torch.tensor(counts, dtype=torch.int64)),
    )
    offsets, shuffled = (
        jm.CandidateIndex.from_counts(torch.tensor(counts, dtype=torch.int64)).offsets,
        map_[torch.randperm(len(map_))],
    )
    dense, jagged = leaf(users, 3, width), leaf(sum(counts), width)
    return {
        "dense": (dense, dense, None),
        "jagged": (jm.Jagged(jagged, offsets), jagged, None),
        "sorted": (rows, rows, jm.CandidateIndex.from_offsets(offsets)),
        "unsorted": (rows, rows, jm.CandidateIndex.from_map(shuffled, users)),
        "map": (rows, rows, shuffled),
    }


OF_TARGETS = {
    "attention": lambda: jm.JaggedTargetAttention(WIDTH, HEADS),
    "masked DIN": lambda: jm.JaggedDINAttention(
        WIDTH, (20, 9), mask=jm.AttentionMask(causal=True, window=(20, None))
    ),
}
FORMS = ["dense", "jagged", "sorted", "unsorted", "map"]
# padding of a map counts as targets of the first user, of whom a mask counts all
CASES_OF_TARGETS = [(layer, x) for layer in OF_TARGETS for x in FORMS]
CASES_OF_TARGETS.remove(("masked DIN", "map"))


@pytest.mark.parametrize("layer, targets", CASES_OF_TARGETS)
def test_target_attention(padded, poisoned_memory, offsets_of, layer, targets):
    module = OF_TARGETS[layer]().double()
    graph = jm.graphed(module)
    for lengths in BATCHES:
        values, counts = leaf(sum(lengths), WIDTH), [(3 * b + 1) % 5 for b in range(len(lengths))]
        first, tensor, candidates = random_candidates(len(lengths), counts, WIDTH)[targets]
        poison(graph)
        compare(module, graph, [first, (values, offsets_of(lengths)), candidates], [tensor, values])


def test_linear_compression(padded, poisoned_memory):
    module = jm.LinearCompressEmbedding(3, 4, 5).double()
    graph = jm.graphed(module)
    for counts in ([2, 0, 3], [1], [0, 0], [8], [9, 1, 1, 4]):
        users, candidates = leaf(len(counts), 5, 8), leaf(sum(counts), 3, 8)
        index = jm.CandidateIndex.from_counts(torch.tensor(counts))
        shuffled = index.candidate_to_user[torch.randperm(sum(counts))]
        for given_index in (index, jm.CandidateIndex.from_map(shuffled, len(counts)), shuffled):
            poison(graph)
            compare(module, graph, [candidates, users, given_index], [candidates, users])


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"JaggedDINAttention-mask"}))
def test_models_of_plain_tensors(padded, name):
    case = CASES[name]
    model = make(case)
    graph = jm.graphed(
        model,
        offsets=OF_VALUES
        if issubclass(case.model, OnRows) and case.layer != "LinearCompressEmbedding"
        else None,
    )
    for size in [(5, 41, 11), (6, 83, 23), (5, 43, 11), (7, 59, 37)]:
        inputs = case.model.inputs(*size)
        torch.testing.assert_close(training_step(graph, inputs), training_step(model, inputs))
    assert graph._steps


def test_hstu_with_targets_and_times(padded, offsets_of):
    config = jm.HSTUConfig(scaling_seqlen=30, relative_position=40, relative_time=8, max_attn_len=6)
    module = jm.HSTUStack(WIDTH, HEADS, 2, config).double()
    graph = jm.graphed(module)
    for lengths in BATCHES:
        values, offsets = leaf(sum(lengths), WIDTH), offsets_of(lengths)
        times = torch.randint(1000, (sum(lengths),))
        num_targets = torch.tensor(lengths, dtype=torch.int64) // 3

        results = [
            called((values, offsets), num_targets, timestamps=times)[0]
            for called in (module, graph)
        ]
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
        wanted = [*module.parameters(), values]
        gradients = [
            torch.autograd.grad(out.square().sum(), wanted, allow_unused=True) for out in results
        ]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


class Ranker(nn.Module):
    """Several layers and containers, several results."""

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(50, WIDTH)
        self.encoder = jm.GDPABlock(WIDTH, HEADS)
        self.attention = jm.JaggedTargetAttention(WIDTH, HEADS)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, history, candidates, users):
        ids, offsets = history
        encoded, _ = self.encoder((self.items(ids), offsets))
        targets = self.items(candidates)
        interest = self.attention(
            targets.unsqueeze(1),
            (encoded, offsets),
            jm.CandidateIndex.from_map(users, len(offsets) - 1),
        )
        return {
            "logits": self.head(interest.squeeze(1)).squeeze(1),
            "history": jm.Jagged(encoded, offsets),
            "name": "ranker",
        }


def ranker_batch(offsets_of, lengths):
    rows = sum(lengths)
    users = torch.randint(len(lengths), (2 * len(lengths) + 1,))
    return (
        (torch.randint(50, (rows,)), offsets_of(lengths)),
        torch.randint(50, (len(users),)),
        users,
    )


def test_training_a_whole_model(padded, offsets_of):
    """Parameters after some steps are those of the plain model. Gradients accumulate over two
    batches."""
    torch.manual_seed(0)
    model = Ranker().double()
    other = copy.deepcopy(model)
    graph = jm.graphed(other)
    parameters = []
    for called in (model, graph):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(called.parameters(), lr=1e-2)
        for number in range(6):
            for lengths in ([3, 0, 5, 2, 1], [1 + number, 7, 0, 2]):
                out = called(*ranker_batch(offsets_of, lengths))
                assert list(out) == ["logits", "history", "name"] and out["name"] == "ranker"
                assert out["logits"].shape == (2 * len(lengths) + 1,) and out[
                    "history"
                ].values.shape[0] == sum(lengths)
                (out["logits"].square().mean() + out["history"].values.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        parameters.append(dict(called.named_parameters()))
    assert graph._steps
    torch.testing.assert_close(*parameters, rtol=1e-8, atol=1e-8)


def test_what_the_loss_does_not_use_gets_no_gradient(padded):
    """Not zeros, for which an optimizer with weight decay would change a weight."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, y, z):
            x = self.trunk(x)
            return self.first(x) + y, self.second(x), z

    model = Heads().double()
    graph = jm.graphed(model)
    arguments = [leaf(5, 8), leaf(5, 8), leaf(5, 8)]
    for used in ([0], [1], [0, 1], [2], [1, 2]):
        gradients = []
        for called in (model, graph):
            results = called(*arguments)
            loss = sum(results[i].square().sum() for i in used)
            gradients.append(
                torch.autograd.grad(loss, [*arguments, *model.parameters()], allow_unused=True)
            )
        expected, found = gradients
        assert [x is None for x in found] == [x is None for x in expected]
        torch.testing.assert_close(
            [x for x in found if x is not None], [x for x in expected if x is not None]
        )
    assert len(graph._steps) == 1


def test_offsets_in_results_are_the_callers(padded, offsets_of):
    offsets, values = offsets_of([3, 4]), torch.randn(7, WIDTH)
    graph = jm.graphed(jm.JaggedMLP([WIDTH, 8]))
    assert graph((values, offsets))[1] is offsets
    jagged = jm.Jagged(values, offsets, max_seqlen=4, host_lengths=torch.tensor([3, 4]))
    out = graph(jagged)
    assert isinstance(out, jm.Jagged) and out.offsets is offsets and out.max_seqlen == 4
    assert out.segmentation_id == jagged.segmentation_id and torch.equal(
        out.host_lengths, jagged.host_lengths
    )


def test_same_bits_when_batch_invariant(padded, offsets_of):
    """Segments are computed alone there, so the padding changes no bit."""
    module = jm.JaggedGDPA(WIDTH, HEADS, "softmax")
    graph = jm.graphed(module)
    for lengths in BATCHES[:3]:
        results = []
        values = torch.randn(sum(lengths), WIDTH, requires_grad=True)
        for called in (module, graph):
            with jm.batch_invariant(True):
                out = called((values, offsets_of(lengths)))[0]
            results += out, *torch.autograd.grad(out.square().sum(), values)
        assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


def test_a_nan_stays_in_its_segment_and_its_call(padded, offsets_of):
    module = jm.JaggedGDPA(WIDTH, HEADS)
    graph = jm.graphed(module)
    values, offsets = torch.randn(60, WIDTH), offsets_of([30, 30])
    values[30:] = float("nan")
    out = graph((values, offsets))[0]
    assert out[:30].isfinite().all() and out[30:].isnan().all()
    out.sum().backward()
    module.zero_grad()
    out = graph((torch.randn(58, WIDTH), offsets_of([29, 29])))[0]
    out.sum().backward()
    assert len(graph._steps) == 1
    assert out.isfinite().all() and all(
        x.grad.isfinite().all() for x in module.parameters() if x.grad is not None
    )


# -- modes -----------------------------------------------------------------------------------------


@pytest.fixture
def mlp(padded):
    return jm.graphed(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))


def test_modes_have_graphs_of_their_own(mlp):
    x = torch.randn(5, 8)
    assert (mlp(x) == 0).any()
    mlp.eval()
    linear, dropout = mlp.children()
    assert not dropout.training and not (mlp(x) == 0).any()
    with torch.no_grad():
        assert not mlp(x).requires_grad
    with torch.inference_mode():
        mlp(x)
    linear.weight.requires_grad_(False)
    out = mlp(x)
    out.sum().backward()
    assert linear.weight.grad is None and linear.bias.grad is not None
    assert len(mlp._steps) == 4
    for y in (x.requires_grad_(), x.detach().double()):
        (mlp.double() if y.dtype == torch.float64 else mlp)(y).sum().backward()
    assert x.grad is not None and len(mlp._steps) == 1  # another dtype dropped the others
    mlp.requires_grad_(False)
    assert not mlp(torch.randn(5, 8).double()).requires_grad


def test_settings_have_graphs_of_their_own(padded):
    module = nn.Linear(8, 8)
    graph, x = jm.graphed(module), torch.randn(5, 8)
    settings = (
        contextlib.nullcontext,
        lambda: jm.batch_invariant(True),
        lambda: jm.backward_workspace(0),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
    )
    for number, setting in enumerate(settings, start=1):
        with setting():
            assert graph(x).dtype == module(x).dtype
        assert len(graph._steps) == number


def test_autocast(padded):
    module = nn.Linear(8, 8)
    graph, x = jm.graphed(module), torch.randn(5, 8)
    assert graph(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = graph(x), module(x)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    out.sum().backward()
    assert module.weight.grad.dtype == torch.float32
    with torch.no_grad():
        module.weight.zero_()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(graph(x), module(x))


def test_parameters_may_change_between_calls(padded):
    module = nn.Linear(8, 8)
    graph, x = jm.graphed(module), torch.randn(5, 8)
    graph(x).sum().backward()
    torch.optim.SGD(graph.parameters(), lr=1.0).step()
    torch.testing.assert_close(graph(x), module(x))
    graph.load_state_dict(nn.Linear(8, 8).state_dict())
    torch.testing.assert_close(graph(x), module(x))
    assert len(graph._steps) == 1
    graph.load_state_dict(nn.Linear(8, 8).state_dict(), assign=True)  # other tensors
    torch.testing.assert_close(graph(x), module(x))
    module.weight = nn.Parameter(torch.zeros(8, 8))
    torch.testing.assert_close(graph(x), module(x))
    graph(x).sum().backward()
    assert module.weight.grad is not None
    with torch.no_grad():
        swapped = {"weight": torch.ones(8, 8), "bias": torch.zeros(8)}
        torch.testing.assert_close(
            torch.func.functional_call(graph, swapped, x), x.sum(1, keepdim=True).expand(5, 8)
        )


def test_hooks_of_parameters_run_once(padded):
    module, seen = nn.Linear(8, 8), []
    module.weight.register_hook(seen.append)
    module.bias.register_post_accumulate_grad_hook(seen.append)
    graph = jm.graphed(module)
    for _ in range(2):
        graph(torch.randn(5, 8)).sum().backward()
    assert len(seen) == 4


def test_several_calls_before_a_backward(padded):
    """The second runs without a graph."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    graph, (x, y) = jm.graphed(module), torch.randn(2, 5, 8)
    expected = torch.autograd.grad((module(x) * module(y)).sum(), [*module.parameters()])
    first = graph(x)
    with pytest.warns(
        UserWarning, match="a call before the backward of the last one runs without a graph"
    ):
        second = graph(y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph(y)
        with torch.no_grad():
            graph(-y)
    torch.testing.assert_close(
        torch.autograd.grad((first * second).sum(), [*module.parameters()]), expected
    )
    first = graph(x)
    del first
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    graph(x)  # the results of the last call are gone, so none is waited for
    assert graph._last() is None and len(graph._steps) == 1


def test_a_second_backward_is_an_error(padded):
    graph = jm.graphed(nn.Linear(8, 8))
    out = graph(torch.randn(5, 8))
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a graphed module's backward runs once for each call"):
        out.sum().backward()
    (gradient,) = torch.autograd.grad(
        graph(x := torch.randn(5, 8, requires_grad=True)).sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        gradient.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(padded, use_reentrant):
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    graph = jm.graphed(module)
    for rows in (5, 6):
        x = torch.randn(rows, 8, requires_grad=True)
        out = torch.utils.checkpoint.checkpoint(graph, x, use_reentrant=use_reentrant)
        (expected,) = torch.autograd.grad(module(x).square().sum(), x)
        out.square().sum().backward()
        torch.testing.assert_close(x.grad, expected)
    assert graph._steps


def test_results_that_get_no_gradient(padded):
    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), x * 2, x > 0

    module = Two(8, 8)
    graph, x = jm.graphed(module), torch.randn(5, 8, requires_grad=True)
    for which in (0, 1, 0):
        expected = torch.autograd.grad(
            module(x)[which].square().sum(), [x, module.weight], allow_unused=True
        )
        out = graph(x)
        assert not out[2].requires_grad and torch.equal(out[2], x > 0)
        found = torch.autograd.grad(
            out[which].square().sum(), [x, module.weight], allow_unused=True
        )
        torch.testing.assert_close(found, expected)


def test_the_first_call_in_inference_mode(padded, offsets_of):
    module = jm.JaggedGDPA(WIDTH, HEADS)
    graph, x = jm.graphed(module), (torch.randn(5, WIDTH), offsets_of([2, 3]))
    with torch.inference_mode():
        assert graph((torch.randn(5, WIDTH), offsets_of([1, 4])))[0].is_inference()
    out = graph(x)[0]
    torch.testing.assert_close(out, module(x)[0])
    out.sum().backward()
    assert len(graph._steps) == 2


def test_nested_arguments_and_scalars(padded):
    class Nested(nn.Module):
        def forward(self, parts, *, scale, names=()):
            (values, offsets), others = parts["x"], parts["others"]
            return {
                "x": [jm.Jagged(values * scale, offsets), (others[0] + 1,)],
                "y": others[1],
                "names": names[0],
            }

    module = Nested()
    graph = jm.graphed(module)
    for rows, scale in ((5, 2.0), (6, -1.0), (6, float("nan"))):
        others = [torch.randn(3), torch.randn(rows, 2).to(torch.float64)]
        values, factor = (
            torch.randn(rows, 2, requires_grad=True),
            torch.tensor(scale, requires_grad=True),
        )
        parts = {"x": (values, torch.tensor([0, 2, rows])), "others": others}
        found, expected = (
            called(parts, scale=factor, names=["a", 1, None]) for called in (graph, module)
        )
        assert (
            isinstance(found["x"], list)
            and isinstance(found["x"][1], tuple)
            and found["names"] == "a"
        )
        for x, y in (
            (found["x"][0].values, expected["x"][0].values),
            (found["x"][1][0], others[0] + 1),
            (found["y"], others[1]),
        ):
            torch.testing.assert_close(x, y, equal_nan=True)
        gradients = [
            torch.autograd.grad(out["x"][0].values.square().sum(), [values, factor])
            for out in (found, expected)
        ]
        torch.testing.assert_close(*gradients, equal_nan=True)
    assert len(graph._steps) == 1


# -- as a module -----------------------------------------------------------------------------------


def test_it_looks_like_the_module(padded):
    module = jm.HSTUStack(WIDTH, HEADS, 2, HSTU)
    graph = jm.graphed(module)
    parent = nn.ModuleDict({"layer": graph})
    assert list(graph.state_dict()) == list(module.state_dict())
    assert list(parent.state_dict()) == [f"layer.{name}" for name in module.state_dict()]
    assert [name for name, _ in parent.named_parameters()] == [
        f"layer.{name}" for name, _ in module.named_parameters()
    ]
    assert (
        graph.config is module.config
        and graph.layers is module.layers
        and "graphed(HSTUStack)" in repr(graph)
    )
    parent.load_state_dict(
        nn.ModuleDict({"layer": jm.HSTUStack(WIDTH, HEADS, 2, HSTU)}).state_dict()
    )
    parent.eval()
    assert not module.training and not module.layers[0].training
    with torch.no_grad():
        assert graph.cache((torch.randn(5, WIDTH), torch.tensor([0, 5]))).layers
    assert not hasattr(graph, "nothing")


@pytest.mark.parametrize(
    "way",
    [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))],
    ids=["deepcopy", "copy", "pickle"],
)
def test_copies_have_no_graphs(padded, way):
    graph = jm.graphed(jm.JaggedMLP([8, 8]))
    x = torch.randn(5, 8), torch.tensor([0, 5])
    graph(x)[0].sum().backward()
    other = way(graph)
    assert graph._steps and not other._steps
    torch.testing.assert_close(other(x), graph(x))
    other.layers[0].weight.data.zero_()
    assert other._steps or other(x) is not None
    assert other._inner.layers[0].weight is other.layers[0].weight
    assert (graph.layers[0].weight is other.layers[0].weight) == (way is copy.copy)


def test_compiled_and_traced_as_the_module(padded):
    module = jm.JaggedMLP([8, 8])
    graph, x = jm.graphed(module), (torch.randn(5, 8), torch.tensor([0, 5]))
    compiled = torch.compile(graph, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), module(x))
    parent = nn.Sequential(graph)
    assert any(
        node.op == "call_module" and node.target == "0"
        for node in torch.fx.symbolic_trace(parent).graph.nodes
    )
    assert not graph._steps


def test_on_the_cpu_it_is_the_module():
    module = jm.JaggedMLP([8, 8])
    graph, x = jm.graphed(module), (torch.randn(5, 8), torch.tensor([0, 5]))
    assert torch.equal(graph(x)[0], module(x)[0]) and not graph._steps
    with jm.debug_checks(True):
        assert torch.equal(graph(x)[0], module(x)[0])


# -- buckets ---------------------------------------------------------------------------------------


def test_capacities_of_sizes():
    buckets = Buckets(8)
    assert [buckets.of(x) for x in (0, 8, 9, 64, 65, 1000, 1024, 1025, 100_000)] == [
        (0, 8),
        (0, 8),
        (9, 16),
        (57, 64),
        (65, 72),
        (961, 1024),
        (961, 1024),
        (1025, 1152),
        (98_305, 106_496),
    ]
    listed = Buckets(8, (10, 20))
    assert [listed.of(x) for x in (0, 10, 11, 20, 21)] == [
        (0, 10),
        (0, 10),
        (11, 20),
        (11, 20),
        None,
    ]


lengths = st.lists(st.integers(0, 300), max_size=60)


@given(lengths, st.sampled_from([1, 4, 8]), st.booleans())
def test_padded_batches_are_batches(histories, steps, shuffled):
    """Offsets end at the capacity, no padding segment is longer than the longest real one, and
    sizes have their own capacities. Arguments on the host are padded as those on a device."""
    users, counts = (
        len(histories),
        torch.tensor([(5 * b) % 7 for b in range(len(histories))], dtype=torch.int64),
    )
    index = jm.CandidateIndex.from_counts(counts)
    if shuffled:
        index = jm.CandidateIndex.from_map(
            index.candidate_to_user[torch.randperm(int(counts.sum()))], users
        )
    offsets = torch.tensor([0, *histories]).cumsum(0)
    offsets = offsets.int() if shuffled else offsets
    arguments = Arguments(
        (torch.randn(sum(histories), 1), offsets, torch.randn(int(counts.sum())), index),
        {},
        "xoti",
        {"o": "x"},
    )
    capacities = capacities_of(arguments.leaves, Buckets(steps))
    of_size = {
        size: capacity
        for leaf, both in zip(arguments.leaves, capacities)
        for size, capacity in zip((leaf.size, leaf.rows), both)
        if size >= 0
    }
    assert len(set(of_size.values())) == len(of_size)
    buffers = Buffers(arguments.leaves, capacities, torch.device("cpu"))
    buffers._on_host.fill_(255)
    buffers.pad(arguments.leaves, capacities)
    for leaf, both, padded in zip(arguments.leaves, capacities, buffers.tensors):
        capacity = both.size
        buffer = torch.full(
            (capacity + (leaf.kind == OFFSETS), *leaf.tensor.shape[1:]), -1, dtype=leaf.tensor.dtype
        )
        pad(buffer, leaf, both)
        assert torch.equal(padded, buffer)
        if leaf.kind == OFFSETS:
            assert torch.equal(buffer[: leaf.size + 1], leaf.tensor) and buffer[-1] == both.rows
            added = buffer.diff()[leaf.size :]
            assert added.min() >= 0 and added.max() <= max([1, *leaf.tensor.diff().tolist()])
        else:
            assert torch.equal(buffer[: leaf.size], leaf.tensor)
            if leaf.kind == "order":
                assert torch.equal(buffer.sort().values, torch.arange(capacity))
            else:
                assert not buffer[leaf.size :].any()
        if leaf.kind != OFFSETS and leaf.size != users:
            assert capacity <= max(leaf.size * (1 + 1 / steps), leaf.size + 8) + 8 * len(of_size)


def test_least_recently_used_graphs_are_dropped(padded):
    graph = jm.graphed(nn.Linear(8, 8), max_graphs=2)
    for rows in (5, 10, 4, 20, 8):
        graph(torch.randn(rows, 8)).sum().backward()
    assert [step.buffers[0].shape[0] for step in graph._steps.values()] == [24, 8]


class TwoMLPs(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = jm.JaggedMLP([8, 8])

    def forward(self, x, y):
        return self.mlp(x), self.mlp(y)


def test_rows_of_named_arguments(padded):
    """A graph for each combination of capacities, whichever sizes are equal by chance; the results
    of the module."""
    module = TwoMLPs()
    graph = jm.graphed(module, capacities=[8, 16], rows=dict(x=[4, 32], y=[16, 64]))
    sizes = [([3], [2]), ([2, 0], [1, 1]), ([4], [4]), ([1, 0, 0], [1, 1, 1]), ([0], [0])]
    sizes += [([8], [10]), ([4, 4], [17, 17]), ([20, 12], [32, 0])]
    with torch.no_grad():
        for both in sizes:
            x, y = ((torch.randn(sum(n), 8), torch.tensor([0, *n]).cumsum(0)) for n in both)
            for found, expected in zip(graph(x, y), module(x, y)):
                torch.testing.assert_close(found[0], expected[0])
    assert graph.captures == 3
    with pytest.warns(UserWarning, match="sizes above capacities run without a graph"):
        graph(
            (torch.randn(33, 8), torch.tensor([0, 33])), (torch.randn(1, 8), torch.tensor([0, 1]))
        )


def test_sizes_above_the_capacities(padded):
    module = nn.Linear(8, 8)
    graph = jm.graphed(module, capacities=[4, 16])
    graph(torch.randn(5, 8))
    x = torch.randn(17, 8)
    with pytest.warns(
        UserWarning, match=r"sizes above capacities run without a graph: \[17\] for \[4, 16\]"
    ):
        assert torch.equal(graph(x), module(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph(x)
    assert len(graph._steps) == 1


def test_the_first_batch_is_not_kept(padded):
    import weakref

    graph, x = jm.graphed(nn.Linear(8, 8)), torch.randn(5, 8)
    kept = weakref.ref(x)
    graph(x).sum().backward()
    del x
    assert kept() is None


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(module="x"), TypeError, "module must be a torch.nn.Module, got str"),
        (
            dict(module=nn.Sequential(nn.BatchNorm1d(8))),
            ValueError,
            "module must compute each row by itself, but it has a BatchNorm1d",
        ),
        (dict(steps_per_octave=0), ValueError, "steps_per_octave must be at least 1, got 0"),
        (dict(max_graphs=0), ValueError, "max_graphs must be at least 1, got 0"),
        (dict(capacities=8), TypeError, "capacities must be a sequence of ints, got int"),
        (
            dict(capacities=[8, 8]),
            ValueError,
            r"capacities must be one or more sizes in ascending order, got \[8, 8\]",
        ),
        (dict(rows=8), TypeError, "rows must be a mapping of names to capacities, or None"),
        (
            dict(rows={"x": [8, 4]}),
            ValueError,
            r"rows\['x'\] must be one or more sizes in ascending order, got \[8, 4\]",
        ),
        (dict(capacities=[0]), ValueError, r"capacities\[0\] must be at least 1, got 0"),
        (
            dict(offsets="x"),
            TypeError,
            "offsets must be a mapping of names to names, or None, got str",
        ),
        (
            dict(offsets={"o": "input"}),
            ValueError,
            r"offsets must name arguments of the module's forward, \['input'\], got 'o'",
        ),
    ],
)
def test_bad_options(options, error, message):
    options = dict(module=nn.Linear(8, 8)) | options
    with pytest.raises(error, match=message):
        jm.graphed(options.pop("module"), **options)


class Any(nn.Module):
    """A module of any function of two arguments."""

    def __init__(self, function):
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones(()))

    def forward(self, values, offsets=None):
        return self.function(values) * self.scale


@pytest.mark.parametrize(
    "function, arguments, error, message",
    [
        (
            lambda x: x,
            (torch.randn(5), slice(3)),
            TypeError,
            "offsets must be a tensor, Jagged, .* got slice",
        ),
        (
            lambda x: x,
            (torch.randn(5), [torch.randn(2).to_sparse()]),
            TypeError,
            r"offsets\[0\] must be a dense tensor, got torch.sparse",
        ),
        (
            lambda x: x.mean(),
            (torch.randn(5, 2),),
            ValueError,
            r"module must return tensors with one row for each .* \[8\], got \[\]",
        ),
        (
            lambda x: x.T,
            (torch.randn(5, 2),),
            ValueError,
            r"one row for each .* \[8\], got \[2, 8\]",
        ),
        (
            lambda x: x,
            (torch.randn(5, 2), torch.tensor([0, 2, 5])),
            ValueError,
            "offsets must be padded as offsets .* got 0 to 5",
        ),
        (
            lambda x: x[0],
            ((torch.randn(5, 2), torch.tensor([0, 2, 4])),),
            ValueError,
            "values' offsets must end at the number of rows, 5",
        ),
    ],
)
def test_bad_arguments(padded, function, arguments, error, message):
    with pytest.raises(error, match=message):
        jm.graphed(Any(function))(*arguments)


def test_candidates_of_an_unknown_argument(padded, monkeypatch):
    """Counts on a device, as a sorted index on a GPU has, and two arguments whose rows they may
    count."""

    class Two(nn.Module):
        def forward(self, x, y, z, index):
            return y * index.offsets[-1]

    monkeypatch.setattr(jm.CandidateIndex, "host_counts", None)
    arguments = (
        torch.randn(2, 1),
        torch.randn(5, 1),
        torch.randn(6, 1),
        jm.CandidateIndex.from_counts(torch.tensor([2, 3])),
    )
    with pytest.raises(
        ValueError,
        match=r"index must be a CandidateIndex of known length .* offsets=\{'index': \.\.\.\}",
    ):
        jm.graphed(Two())(*arguments)
    torch.testing.assert_close(
        jm.graphed(Two(), offsets={"index": "y"})(*arguments), arguments[1] * 8
    )
    with pytest.raises(
        TypeError, match="y must be a tensor with rows, which index count, got NoneType"
    ):
        jm.graphed(Two(), offsets={"index": "y"})(arguments[0], None, *arguments[2:])
    one = arguments[0], arguments[1], None, arguments[3]
    torch.testing.assert_close(jm.graphed(Two())(*one), arguments[1] * 8)


def test_numbers_are_no_results(padded):
    """They may be sizes, which are those of the padding."""

    class Sized(nn.Linear):
        def forward(self, x):
            return super().forward(x), len(x)

    with pytest.raises(
        ValueError,
        match="module must return tensors, None, bools and strings, and containers of them, "
        "got int",
    ):
        jm.graphed(Sized(8, 8))(torch.randn(5, 8))


def test_many_captures_are_noticed(padded):
    graph = jm.graphed(nn.Linear(8, 8), max_graphs=1)
    with pytest.warns(UserWarning, match="most batches may need new graphs: 5 captured, 1 kept"):
        for rows in (5, 10, 5, 10, 5):
            graph(torch.randn(rows, 8)).sum().backward()


def test_sparse_gradients_are_refused(padded):
    graph = jm.graphed(nn.Embedding(9, 4, sparse=True))
    with pytest.raises(ValueError, match="module must have dense gradients, got sparse ones"):
        graph(torch.tensor([1, 2])).sum().backward()


def test_plain_models_name_their_offsets(padded):
    graph = jm.graphed(make(CASES["JaggedTargetAttention"]))
    with pytest.raises(
        ValueError,
        match=r"offsets must be padded as offsets .* graphed\(..., offsets=\{'offsets': ...\}\)",
    ):
        graph(*OnCandidates.inputs(5, 41, 11))


def test_a_map_that_looks_like_offsets(padded):
    """The error says what to pass instead."""
    graph, history = (
        jm.graphed(jm.JaggedTargetAttention(8, 2)),
        (torch.randn(1, 8), torch.tensor([0, 0, 1])),
    )
    with pytest.raises(
        ValueError,
        match="candidates must be padded as offsets .* pass a map of candidates as a "
        "CandidateIndex",
    ):
        graph(torch.randn(2, 1, 8), history, torch.tensor([0, 1]))
    graph(torch.randn(2, 1, 8), history, jm.CandidateIndex.from_map(torch.tensor([0, 1]), 2))
