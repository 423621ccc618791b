"""Layers as modules: modes, copies, states, the meta device, replaced Linears, nested tensors."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from .cases import (
    SIZES,
    USER_FEATURES,
    WIDTH,
    Compressed,
    Exchanged,
    OnCandidates,
    OnHistoryAndCandidates,
    OnRows,
    OnUsers,
    Pooled,
    assert_same_distribution,
    make,
    training_step,
)
from .table import feature


def inputs_of(case, size=SIZES[0]):
    torch.manual_seed(1)
    return case.model.inputs(*size)


def saved(x, **options):
    """x through torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **options)


def assert_same_steps(model, expected, case):
    inputs = inputs_of(case)
    for x, y in zip(training_step(model, inputs), training_step(expected, inputs), strict=True):
        assert torch.equal(x, y)


@feature("train, eval")
def test_modes(case):
    model, inputs = make(case), inputs_of(case)
    plain = model(*inputs)
    assert torch.equal(model.eval()(*inputs), plain)
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    for module in dropouts:
        module.p = 0.5
    assert torch.equal(model(*inputs), plain)
    with torch.inference_mode():
        assert torch.equal(model(*inputs), plain)
    assert torch.equal(model.train()(*inputs), plain) == (not dropouts)


@feature("state_dict")
def test_state_dict(case):
    state, other = make(case).state_dict(), case.model(case.build())
    other.load_state_dict(saved(state, weights_only=True))
    assert_same_steps(other, make(case), case)
    assert other.state_dict().keys() == state.keys()
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({})


def assert_copies(case, *ways):
    model = make(case)
    for way in ways:
        assert_same_steps(way(model), model, case)


@feature("pickle")
def test_pickle(case):
    assert_copies(
        case, lambda x: pickle.loads(pickle.dumps(x)), lambda x: saved(x, weights_only=False)
    )


@feature("deepcopy")
def test_deepcopy(case):
    assert_copies(case, copy.copy, copy.deepcopy)


@feature("functional_call")
def test_functional_call(case):
    model, other, inputs = make(case), case.model(case.build()), inputs_of(case)
    parameters = dict(other.named_parameters())
    out = torch.func.functional_call(model, parameters, inputs)
    grads = torch.autograd.grad(out.square().mean(), list(parameters.values()))
    # the step's last gradients are those of the inputs
    for x, y in zip([out, *grads], training_step(other, inputs), strict=False):
        assert torch.equal(x, y)


# -- the meta device -------------------------------------------------------------------------------


def reset_by_torchrec(layer):
    """As DistributedModelParallel does: parameters and buffers on meta module by module, reset
    where a module owns such parameters."""
    parallel = pytest.importorskip("torchrec.distributed.model_parallel").DistributedModelParallel
    wrapper = parallel.__new__(parallel)
    nn.Module.__init__(wrapper)
    wrapper.device = torch.device("cpu")
    wrapper._init_parameters(layer)
    return layer.to("cpu")


def reset_by_fsdp(layer):
    """As FullyShardedDataParallel does: every module that owns parameters or buffers is allocated
    and reset by itself."""
    for module in layer.modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()
    return layer


def reset_at_once(layer):
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    return layer


@pytest.mark.parametrize("materialise", [reset_by_torchrec, reset_by_fsdp, reset_at_once])
@feature("meta device")
def test_meta(case, materialise, poisoned_memory):
    layer = case.build(device="meta")
    assert all(x.is_meta for x in layer.parameters())
    layer, expected = materialise(layer), case.build()
    parameters, buffers = dict(expected.named_parameters()), dict(expected.named_buffers())
    assert (
        dict(layer.named_parameters()).keys() == parameters.keys()
        and dict(layer.named_buffers()).keys() == buffers.keys()
    )
    for name, x in layer.named_parameters():
        assert_same_distribution(x, parameters[name])
    assert all(torch.equal(x, buffers[name]) for name, x in layer.named_buffers())
    layer.load_state_dict(expected.state_dict())
    assert_same_steps(case.model(layer), case.model(expected), case)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@feature("dtype")
def test_dtype(case, dtype):
    """A layer that is built in the dtype, and one that is converted to it."""
    layer, expected = case.build(dtype=dtype), make(case).to(dtype)
    assert all(x.dtype == dtype for x in layer.parameters())
    assert {name: x.dtype for name, x in layer.named_buffers()} == {
        name: x.dtype for name, x in expected.layer.named_buffers()
    }
    layer.load_state_dict(expected.layer.state_dict())
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs_of(case)]
    for x, y in zip(
        training_step(case.model(layer), inputs), training_step(expected, inputs), strict=True
    ):
        assert x.dtype == dtype and torch.equal(x, y)
    for wrong, error in ((torch.int64, ValueError), ("float32", TypeError)):
        with pytest.raises(error, match="^dtype must be "):
            case.build(dtype=wrong)


# -- nested tensors --------------------------------------------------------------------------------


@feature("nested tensors")
def test_nested_tensors(case):
    model, inputs = make(case), inputs_of(case)
    values, offsets = (
        inputs[1:3] if issubclass(case.model, OnCandidates) else OnRows.inputs(*SIZES[0])
    )
    rows = torch.nested.nested_tensor_from_jagged(values, offsets)
    if case.model is OnCandidates:
        out, expected = model.layer(inputs[0], rows, inputs[3]), model(*inputs)
    elif case.model is OnHistoryAndCandidates:
        out, of_targets = model.layer(rows, inputs[0], inputs[3])
        (expected, _), theirs = model.layer((values, offsets), inputs[0], inputs[3])
        assert out.is_nested and torch.equal(of_targets, theirs)
    elif case.model is Compressed:
        out, expected = model.layer(rows, *inputs[1:]), None
    elif issubclass(case.model, OnUsers):
        others = torch.randn(len(offsets) - 1, USER_FEATURES, WIDTH)
        out, expected = model.layer(rows, others), model.layer((values, offsets), others)
        out, (expected, _) = (out[0], expected[0]) if case.model is Exchanged else (out, expected)
    else:
        out, expected = model.layer(rows), model(values, offsets)
        assert out.is_nested == (case.model is not Pooled)
    assert torch.equal(out.values() if out.is_nested else out, expected)


# -- replaced Linears ------------------------------------------------------------------------------


class LoRA(nn.Module):
    """A Linear with a low-rank addition. It has none of a Linear's attributes."""

    def __init__(self, linear):
        super().__init__()
        self.base = linear
        self.down, self.up = (
            nn.Linear(linear.in_features, 2, bias=False),
            nn.Linear(2, linear.out_features, bias=False),
        )

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class LowRank(nn.Module):
    """A weight with a low-rank addition, as a parametrization."""

    def __init__(self, weight):
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(weight.shape[0], 2)),
            nn.Parameter(torch.randn(2, weight.shape[1])),
        )

    def forward(self, weight):
        return weight + self.up @ self.down


def linears(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def replaced(model, names, replace):
    model = copy.deepcopy(model)
    for name in names:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, replace(model.get_submodule(name)))
    return model


@feature("LoRA")
def test_lora(case):
    """Each Linear alone is replaced, then all. The addition is part of the result and learns.
    Resetting reaches the wrapped Linear."""
    model, inputs = make(case), inputs_of(case)
    expected, names = model(*inputs), linears(model)
    for chosen in (*([name] for name in names), names) if names else ():
        adapted = replaced(model, chosen, LoRA)
        out = adapted(*inputs)
        assert out.shape == expected.shape and not torch.allclose(out, expected)
        out.square().sum().backward()
        for name in chosen:
            wrapper = adapted.get_submodule(name)
            assert wrapper.up.weight.grad.any() and wrapper.base.weight.grad.any()
            before = wrapper.base.weight.clone()
            adapted.layer.reset_parameters()
            assert not torch.equal(wrapper.base.weight, before)
    if not names:
        weights = model.layer.weights
        additions = [LowRank(weight) for weight in weights]
        for i, addition in enumerate(additions):
            parametrize.register_parametrization(weights, str(i), addition)
        out = model(*inputs)
        assert not torch.allclose(out, expected)
        out.square().sum().backward()
        assert all(addition.up.grad.any() and addition.down.grad.any() for addition in additions)


def quantize_dynamic(model):
    with warnings.catch_warnings():
        # torch announces that quantisation moves to another package
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def quantized(linear):
    plain = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    plain.load_state_dict(linear.state_dict())
    return quantize_dynamic(nn.Sequential(plain))[0]


@feature("quantize_dynamic")
@torch.no_grad()
def test_quantize_dynamic(case):
    model, inputs = make(case).eval(), inputs_of(case)
    expected, names = model(*inputs), linears(model)
    whole = quantize_dynamic(model)
    assert linears(whole) == []
    if not names:
        assert torch.equal(whole(*inputs), expected)
        return
    for small in (whole, *(replaced(model, [name], quantized) for name in names)):
        assert 0 < (small(*inputs) - expected).norm() < 0.1 * expected.norm()
