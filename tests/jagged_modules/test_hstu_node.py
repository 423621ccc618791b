"""HSTULayer as one autograd node: its mathematics, with stages in plain torch on the CPU in fp64,
equals that of the modules."""

import dataclasses

import pytest
import torch
from alive import Alive
from row_stages import STAGES, attention_arguments, kept
from tails import check as check_tail
from tails import layer_case
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

import jagged_modules as jm
from jagged_modules.layers import hstu, hstu_node

from .hstu_cases import HEADS, LENGTHS, TARGETS, WIDTH, config_of

RECOMPUTE = [(), ("norm",), ("activation",), ("norm", "activation"), ("projection",)]
RECOMPUTE += [("norm", "activation", "projection")]


@pytest.fixture
def as_node(monkeypatch):
    """Layers are one node, of plain torch."""
    monkeypatch.setattr(hstu_node, "stages", lambda: STAGES)
    monkeypatch.setattr(hstu, "attention_arguments", attention_arguments)
    monkeypatch.setattr(hstu, "takes_kernels", lambda layer, x: not layer.calls_modules)
    monkeypatch.setattr(hstu_node, "dropout_seed", dropout_seed)


@pytest.fixture
def rounded(monkeypatch):
    """As where autocast casts rows."""
    rule = hstu_node.rounded_rows
    monkeypatch.setattr(hstu_node, "rounded_rows", lambda x, *_: rule(x, None, torch.bfloat16))


def dropout_seed(layer, x):
    return torch.tensor(5) if layer.dropout.training and layer.dropout.p else None


class _Dropout(nn.Dropout):
    """Drops what the node drops."""

    def forward(self, x):
        return x * kept(torch.tensor(5), self.p, x) if self.training and self.p else x


def make(**fields):
    """A layer in fp64, and rows."""
    layer = jm.HSTULayer(WIDTH, HEADS, config_of(**fields)).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    layer.dropout.__class__ = _Dropout
    return layer, torch.randn(sum(LENGTHS), WIDTH, dtype=torch.float64)


def results(layer, x, offsets, calls_modules, frozen=(), **options):
    """The layer's result and all gradients."""
    layer.calls_modules = calls_modules
    x = x.detach().requires_grad_("x" not in frozen)
    parameters = dict(layer.named_parameters())
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in frozen)
    out = layer((x, offsets), torch.tensor(TARGETS), **options)[0]
    inputs = dict(x=x) | parameters
    inputs = {name: y for name, y in inputs.items() if y.requires_grad}
    grad = torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()
    grads = torch.autograd.grad(out, list(inputs.values()), grad) if inputs else ()
    return dict(zip(("out", *inputs), (out, *grads), strict=True))


def check(layer, x, offsets, **options):
    node, modules = (results(layer, x, offsets, own, **options) for own in (False, True))
    assert node.keys() == modules.keys()
    for name, value in node.items():
        torch.testing.assert_close(value, modules[name], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("recompute", RECOMPUTE, ids="-".join)
@pytest.mark.parametrize("norm", ["layer", "rms", "group"])
def test_equals_the_modules(as_node, offsets_of, norm, recompute):
    layer, x = make(norm=norm, recompute=recompute, dropout=0.3, head_dim=3, linear_dim=5)
    check(layer, x, offsets_of(LENGTHS))
    layer.eval()
    check(layer, x, offsets_of(LENGTHS))


def test_bias_tables(as_node, offsets_of):
    layer, x = make(relative_position=30, relative_time=8)
    check(layer, x, offsets_of(LENGTHS), timestamps=torch.randint(0, 1000, (len(x),)))


@pytest.mark.parametrize(
    "frozen",
    [
        {"x"},
        {"out_proj.weight"},
        {"uvqk_proj.weight", "uvqk_proj.bias"},
        {"x", "input_norm.weight", "input_norm.bias"},
        {"x", "input_norm.weight", "input_norm.bias", "uvqk_proj.weight", "uvqk_proj.bias"},
        {"output_norm.weight", "output_norm.bias"},
    ],
    ids=lambda names: "-".join(sorted(names)),
)
def test_frozen_parameters(as_node, offsets_of, frozen):
    layer, x = make(dropout=0.3)
    check(layer, x, offsets_of(LENGTHS), frozen=frozen)


def test_no_rows_and_no_gradients(as_node, offsets_of):
    layer, x = make()
    layer.calls_modules = False
    assert layer((x[:0], offsets_of([0, 0])))[0].shape == (0, WIDTH)
    with torch.no_grad():
        out = layer((x, offsets_of(LENGTHS)))[0]
    assert not out.requires_grad


def test_without_gradients_the_packed_projection_is_free_before_that_of_the_output(
    as_node, offsets_of, monkeypatch
):
    layer, x = make()
    layer.calls_modules, linear, results = False, hstu_node.linear, []

    def counted(*operands):
        alive.append(sum(not x.expired() for x in results))
        y = linear(*operands)
        results.append(StorageWeakRef(y.untyped_storage()))
        return y

    monkeypatch.setattr(hstu_node, "linear", counted)
    for enabled in (False, True):
        alive = []
        with torch.set_grad_enabled(enabled):
            out = layer((x, offsets_of(LENGTHS)))[0]
        assert alive == [0, int(enabled)] and out.requires_grad == enabled


@pytest.mark.parametrize("is_kept", [False, True])
def test_memory_of_a_step(as_node, offsets_of, monkeypatch, is_kept):
    """Numbers per row that are alive when a stage of the backward begins: da replaces a, and each
    tensor is free when it was read last, unless the graph is kept."""
    (layer, _), alive = make(dropout=0.3, head_dim=3, linear_dim=5), []
    x, dout = torch.randn(2, 1009, WIDTH, dtype=torch.float64)
    layer.calls_modules, x = False, x.clone().requires_grad_()

    def noting(stage):
        def noted(*args):
            alive.append(counter.bytes_per_row() // 8)
            with _disable_current_modes():
                return stage(*args)

        return noted

    names = "gate_linear_backward", "attention_backward", "row_norm_backward"
    noted = STAGES._replace(**{name: noting(getattr(STAGES, name)) for name in names})
    monkeypatch.setattr(hstu_node, "stages", lambda: noted)
    monkeypatch.setattr("jagged_modules.functional.nodes.SMALL", 0)
    with Alive(1009) as counter:
        out = layer((x, offsets_of([500, 0, 509])))[0]
        out.backward(dout, retain_graph=is_kept)
    packed, a, statistics = 2 * HEADS * (5 + 3), HEADS * 5, 4
    rows = 2 * WIDTH + statistics  # x and the result
    of_forward = WIDTH + packed + a  # normed rows
    before = [rows + of_forward + packed + (a if is_kept else 0)] * 2
    assert alive == [*before, rows + (of_forward if is_kept else 0) + WIDTH]


def test_the_graph_may_be_kept_but_not_differentiated_twice(as_node, offsets_of):
    layer, x = make(dropout=0.3)
    layer.calls_modules, x = False, x.requires_grad_()
    out = layer((x, offsets_of(LENGTHS)))[0].square().sum()
    first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    (dx,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dx.sum().backward()
    # also where the gradient of the node has no graph of its own
    (dx,) = torch.autograd.grad(layer((x, offsets_of(LENGTHS)))[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dx.sum().backward()


def test_cached_and_scored_rows(as_node, offsets_of):
    """The stages outside of the node."""
    layer, x = make(dropout=0.3, norm="group")

    def call(calls_modules):
        layer.calls_modules = calls_modules
        layer.zero_grad()
        history, targets = x[:20].clone().requires_grad_(), x[20:30].clone().requires_grad_()
        updated, kv = layer.cache((history, offsets_of([12, 8])))
        cache = jm.Jagged(kv, offsets_of([12, 8]))
        scored = layer.score((targets, offsets_of([4, 6])), cache)
        (updated[0].sin().sum() + scored[0].cos().sum()).backward()
        return (
            updated[0],
            scored[0],
            history.grad,
            targets.grad,
            *(p.grad for p in layer.parameters()),
        )

    node, modules = call(False), call(True)
    for own, expected in zip(node, modules, strict=True):
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("recompute", RECOMPUTE, ids="-".join)
@pytest.mark.parametrize("name", ["HSTULayer", "HSTUStack", "HSTUStack-score"])
def test_rows_behind_the_end(as_node, only_the_device_knows, name, recompute):
    """NaN in them, and in their gradients, reaches nothing."""
    layer, case = layer_case(name, dtype=torch.float64)
    for module in layer.modules():
        if isinstance(module, jm.HSTULayer):
            module.calls_modules = False
            module.config = dataclasses.replace(module.config, recompute=recompute)
    check_tail(case, case.call, torch.float64, parameters=layer.parameters())


@pytest.mark.parametrize("recompute", RECOMPUTE, ids="-".join)
def test_rows_of_zeros_behind(as_node, rounded, offsets_of, poisoned_memory, recompute):
    layer, x = make(recompute=recompute, dropout=0.3, head_dim=3, linear_dim=5)
    check(layer, x, offsets_of(LENGTHS))


@pytest.mark.parametrize("recompute", [(), RECOMPUTE[-1]], ids="-".join)
def test_rows_of_zeros_behind_rows_behind_the_end(
    as_node, rounded, only_the_device_knows, recompute
):
    test_rows_behind_the_end(as_node, only_the_device_knows, "HSTULayer", recompute)
