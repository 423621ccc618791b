"""Every function and layer on a GPU under torch.compile with symbolic sizes: one graph, and the
values and gradients of eager mode."""

import functools

import pytest
import torch

from .compiled_calls import FUNCTIONS, LAYERS, SIZES, assert_compiles_once, on_device

pytestmark = pytest.mark.gpu
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.05}


@pytest.mark.parametrize(
    "name, dtype", [(name, list(TOLERANCES)[i % 2]) for i, name in enumerate(FUNCTIONS)], ids=str
)
def test_function(name, dtype):
    function, make_inputs = FUNCTIONS[name]
    batches = [on_device(make_inputs(*sizes), "cuda", dtype) for sizes in SIZES]
    # with large biases, the roundings of dS in fp32 are 4e-6 of dk's largest element
    factor = 10 if "biased" in name else 1
    assert_compiles_once(function, batches, tolerance=factor * TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, dtype):
    make_layer, make_inputs, call = LAYERS[name]
    layer = make_layer("cuda").to(dtype)
    batches = [on_device(make_inputs(*sizes), "cuda", dtype) for sizes in SIZES]
    assert_compiles_once(
        functools.partial(call, layer=layer),
        batches,
        list(layer.parameters()),
        tolerance=TOLERANCES[dtype],
    )


@pytest.mark.parametrize(
    "name",
    ["JaggedTargetAttention", "HSTULayer", "BlockDiagonalSelfAttention", "LinearCompressEmbedding"],
)
def test_layer_with_inductor(name):
    make_layer, make_inputs, call = LAYERS[name]
    layer = make_layer("cuda")
    batches = [on_device(make_inputs(*sizes), "cuda") for sizes in SIZES]
    assert_compiles_once(
        functools.partial(call, layer=layer), batches, list(layer.parameters()), "inductor", 1e-4
    )
