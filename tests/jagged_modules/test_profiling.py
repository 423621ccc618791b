"""A profile names the layers."""

import pytest
import torch
from torch.profiler import profile

import jagged_modules as jm

from ..compatibility.cases import CASES, SIZES, make


def ranges(model, inputs):
    with profile() as profiled:
        model(*inputs)
    return {
        event.key.removeprefix("jagged_modules.")
        for event in profiled.key_averages()
        if event.key.startswith("jagged_modules.")
    }


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_layer_is_a_range_of_a_profile(case):
    model, inputs = make(case), case.model.inputs(*SIZES[0])
    kinds = {type(module) for module in model.modules()}
    layers = {kind.__name__ for kind in kinds if getattr(jm, kind.__name__, None) is kind}
    assert layers and ranges(model, inputs) == layers


def test_a_profile_does_not_compile_again():
    case = CASES["JaggedMLP"]
    model = torch.compile(make(case), backend="eager", fullgraph=True)
    inputs = case.model.inputs(*SIZES[0])
    model(*inputs)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert ranges(model, inputs) == set()


def test_no_range_is_made_without_a_profile(monkeypatch):
    def fail(name):
        raise AssertionError(name)

    case = CASES["JaggedMLP"]
    monkeypatch.setattr("torch.autograd.profiler.record_function", fail)
    make(case)(*case.model.inputs(*SIZES[0]))
