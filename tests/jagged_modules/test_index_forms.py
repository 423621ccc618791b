"""Every tensor of indices in every form (`forms.py`) gives the plain form's results and gradients:
(function or layer) × argument × form, and under torch.compile and CUDA graphs all arguments in
different forms at once."""

import itertools

import pytest
import torch
from index_calls import (
    ELSEWHERE,
    FUNCTIONS,
    JOINT,
    LAYERS,
    arguments_of,
    check_function,
    check_function_with_defaults,
    check_joint_forms,
    check_layer,
    check_layer_in_mode,
    check_layer_with_defaults,
)
from marks import SLOW

OF_FUNCTIONS = [(name, argument) for name in FUNCTIONS for argument in arguments_of(name)]
OF_LAYERS = [(name, argument) for name, call in LAYERS.items() for argument in call.indices]
IN_ONE_GRAPH = [name for name, call in LAYERS.items() if call.compiles]
IN_CUDA_GRAPHS = [name for name in IN_ONE_GRAPH if name != "pages"]
GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
ON_A_GPU = [x for x in OF_FUNCTIONS if x[1] not in ELSEWHERE.get(x[0], ())]
ON_A_GPU += [x for x in OF_LAYERS if x[1] not in LAYERS[x[0]].elsewhere]
SLOW_LAYERS = LAYERS.keys() - {"JaggedTargetAttention", "HSTULayer"}  # torch.compile takes seconds


def cell(name: str, option: str) -> str:
    operator, _, variant = name.partition("-")
    dtype = "bf16" if name in FUNCTIONS else "fp32"
    return f"{operator}|{dtype}|forms|{variant or 'plain'}: {option}"


EXPECTED_CELLS = [
    *(cell(name, f"forms of {argument}") for name, argument in ON_A_GPU),
    *(
        cell(name, mode)
        for name, mode in itertools.product(FUNCTIONS, ("eager", "compile", "graph", "defaults"))
    ),
    *(cell(name, mode) for name, mode in itertools.product(LAYERS, ("eager", "defaults"))),
    *(cell(name, "compile") for name in IN_ONE_GRAPH),
    *(cell(name, "graph") for name in IN_CUDA_GRAPHS),
]


def on_devices(arguments):
    """Parameters: arguments of functions or of layers."""
    for name, argument in arguments:
        yield pytest.param(name, argument, "cpu")
        if (name, argument) in ON_A_GPU:
            yield pytest.param(name, argument, "cuda", marks=GPU)


@pytest.mark.parametrize("name, argument, device", list(on_devices(OF_FUNCTIONS)))
def test_an_argument_of_a_function(record_property, name, argument, device):
    record_property("cell", cell(name, f"forms of {argument}"))
    check_function(name, argument, device)


@pytest.mark.parametrize("name, argument, device", list(on_devices(OF_LAYERS)))
def test_an_argument_of_a_layer(record_property, name, argument, device):
    record_property("cell", cell(name, f"forms of {argument}"))
    check_layer(name, argument, device)


def in_modes(names, compiled, in_graphs):
    """Parameters: eager and compiled calls, and on a GPU those in CUDA graphs."""
    for name in names:
        yield pytest.param(name, "eager", "cpu")
        yield pytest.param(name, "eager", "cuda", marks=GPU)
        if name in compiled:
            yield pytest.param(
                name, "compile", "cpu", marks=SLOW if "-" in name or name in SLOW_LAYERS else ()
            )
            yield pytest.param(name, "compile", "cuda", marks=GPU)
        if name in in_graphs:
            yield pytest.param(name, "graph", "cuda", marks=GPU)


@pytest.mark.parametrize("name, mode, device", list(in_modes(FUNCTIONS, FUNCTIONS, FUNCTIONS)))
def test_all_arguments_of_a_function(record_property, name, mode, device):
    record_property("cell", cell(name, mode))
    check_joint_forms(name, device, mode, JOINT[:1] if mode == "compile" else JOINT)


@pytest.mark.parametrize("name, mode, device", list(in_modes(LAYERS, IN_ONE_GRAPH, IN_CUDA_GRAPHS)))
def test_all_arguments_of_a_layer(record_property, name, mode, device):
    record_property("cell", cell(name, mode))
    check_layer_in_mode(name, device, mode, JOINT[:1] if mode == "compile" else JOINT)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*FUNCTIONS, *LAYERS])
def test_default_device_and_dtype(record_property, name, device):
    """A default device of "meta" shows a tensor that is made without its operands' device."""
    record_property("cell", cell(name, "defaults"))
    check = check_function_with_defaults if name in FUNCTIONS else check_layer_with_defaults
    check(name, device)
    assert torch.get_default_dtype() == torch.float32
