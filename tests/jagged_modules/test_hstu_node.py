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
    layer.calls_modules, results = False, []
    linear, output = hstu_node.linear, hstu_node._sum

    def noted(*operands):
        y = linear(*operands)
        results.append(StorageWeakRef(y.untyped_storage()))
        return y

    def counted(*operands):
        alive.append(sum(not x.expired() for x in results))
        return output(*operands)

    monkeypatch.setattr(hstu_node, "linear", noted)
    monkeypatch.setattr(hstu_node, "_sum", counted)
    for enabled in (False, True):
        alive = []
        with torch.set_grad_enabled(enabled):
            out = layer((x, offsets_of(LENGTHS)))[0]
        assert alive == [int(enabled)] and out.requires_grad == enabled


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


# -- a stack without gradients adds to the rows between two layers in place -----------------------


class _Kept(jm.HSTULayer):
    """A user's layer, which keeps its results."""

    def forward(self, *args, **options):
        self.result = super().forward(*args, **options)
        return self.result


@pytest.fixture
def stack(as_node, monkeypatch):
    """Four layers in fp64, whose `in_place` tells for the layers of the last call whether each
    wrote its result to its input."""
    found = jm.HSTUStack(WIDTH, HEADS, 4, config_of()).double().eval()
    for layer in found.layers:
        layer.calls_modules = False
    found.in_place = []
    node = hstu.hstu_node

    def noted(layer, x, *others):
        out = node(layer, x, *others)
        found.in_place.append(out.data_ptr() == x.data_ptr())
        return out

    monkeypatch.setattr(hstu, "hstu_node", noted)
    return found


@pytest.fixture
def rows(offsets_of):
    x = torch.randn(sum(LENGTHS), WIDTH, dtype=torch.float64)
    return jm.Jagged(x, offsets_of(LENGTHS), max(LENGTHS))


def one_by_one(stack, rows):
    """The layers' results."""
    outs = []
    for layer in stack.layers:
        outs.append(layer(outs[-1] if outs else rows, torch.tensor(TARGETS)))
    assert not any(stack.in_place)
    stack.in_place.clear()
    return [x.values for x in outs]


@torch.no_grad()
def test_the_residual_in_place(stack, rows):
    before, expected = rows.values.clone(), one_by_one(stack, rows)
    out = stack(rows, torch.tensor(TARGETS)).values
    assert stack.in_place == [False, True, True, True]
    assert torch.equal(out, expected[-1]) and torch.equal(rows.values, before)


@pytest.mark.parametrize(
    "kind, in_place",
    [
        ("hook", [False, False, False, True]),
        ("hook before", [False, False, False, True]),
        ("class", [False, False, False, True]),
        ("own forward", [False, False, False, True]),
        ("global hook", [False, False, False, False]),
    ],
)
@torch.no_grad()
def test_rows_that_others_hold_are_not_overwritten(stack, rows, kind, in_place):
    """The result of the second layer, or its input."""
    expected, kept, layer = one_by_one(stack, rows), [], stack.layers[1]
    handle = None
    if kind == "hook":
        layer.register_forward_hook(lambda module, args, out: kept.append(out.values))
    elif kind == "hook before":
        layer.register_forward_pre_hook(lambda module, args: kept.append(args[0].values))
    elif kind == "class":
        layer.__class__ = _Kept
    elif kind == "own forward":
        layer.forward = lambda *args, **options: jm.HSTULayer.forward(layer, *args, **options)
    else:
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, out: kept.append(out.values) if module is layer else None
        )
    try:
        out = stack(rows, torch.tensor(TARGETS)).values
    finally:
        if handle is not None:
            handle.remove()
    if kind == "class":
        kept.append(layer.result.values)
    assert stack.in_place == in_place
    assert torch.equal(out, expected[-1])
    held = expected[0] if kind == "hook before" else expected[1]
    assert kind == "own forward" or torch.equal(kept[0], held)


def test_no_row_is_overwritten_that_a_backward_reads(stack, rows):
    """Nor where gradients are on, and nothing has one yet."""
    out = stack(rows, torch.tensor(TARGETS)).values
    assert out.requires_grad and stack.in_place == [False] * 4
    stack.in_place.clear()
    stack.requires_grad_(False)
    stack(rows, torch.tensor(TARGETS))
    assert stack.in_place == [False] * 4


class _Traced(jm.HSTUStack):
    def forward(self, x, num_targets):
        return super().forward(x, num_targets)


@torch.no_grad()
def test_a_trace_overwrites_nothing(stack, rows):
    """Its graph may run with gradients, and with hooks."""
    stack.__class__ = _Traced
    torch.fx.symbolic_trace(stack)(rows, torch.tensor(TARGETS))
    assert stack.in_place == [False] * 4


@torch.no_grad()
def test_rows_behind_the_end_in_place(stack, rows, only_the_device_knows):
    """Those of the input are not read, and those of the results are 0."""
    targets, tail = torch.tensor(TARGETS), torch.full((3, WIDTH), torch.nan, dtype=torch.float64)
    expected = stack((rows.values, rows.offsets), targets)[0]
    x = torch.cat([rows.values, tail])
    out = stack((x, rows.offsets), targets)[0]
    assert torch.equal(out[:-3], expected) and not out[-3:].any()
    assert x[-3:].isnan().all() and torch.equal(x[:-3], rows.values)
