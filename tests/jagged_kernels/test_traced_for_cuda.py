"""torch.compile traces every function and layer for CUDA tensors, without a GPU: with fake tensors
and the compute capability of each GPU generation. Only the forward, because autograd needs a
device."""

import functools
import types

import pytest
import torch
from jagged_kernels.common import device as launch
from marks import SLOW
from torch._subclasses import FakeTensorMode

import jagged_modules as jm
from jagged_modules import functional as F

from .compiled_calls import (
    DIM,
    FUNCTIONS,
    HEADS,
    LAYERS,
    SIZES,
    compiled,
    on_device,
    random_offsets,
)

CALLS = [*FUNCTIONS, *LAYERS]
DEVICE = torch.device("cuda", 0)


GENERATIONS = [
    pytest.param(((8, 0), torch.bfloat16), marks=SLOW),
    ((9, 0), torch.bfloat16),
    pytest.param(((9, 0), torch.float32), marks=SLOW),
    pytest.param(((10, 0), torch.float32), marks=SLOW),
]


@pytest.fixture(
    params=GENERATIONS, ids=lambda x: "sm{}{}-{}".format(*x[0], str(x[1]).removeprefix("torch."))
)
def dtype(request, monkeypatch):
    """The dtype of inputs and layers. torch reports a GPU of each generation."""
    capability, dtype = request.param
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device=None: types.SimpleNamespace(multi_processor_count=100),
    )
    launch.device_properties.cache_clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield dtype
    torch.set_default_dtype(before)
    launch.device_properties.cache_clear()


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_for_all_lengths_and_batch_sizes(name, dtype):
    indexes = name in LAYERS or name.startswith("self_target_attention")
    if indexes and not torch.backends.cuda.is_built():
        pytest.skip(
            "a build of torch without CUDA cannot index tensors of its devices, even those without"
            " memory"
        )
    call, make_inputs, *layer = FUNCTIONS[name] if name in FUNCTIONS else LAYERS[name]
    batches = [make_inputs(*sizes) for sizes in SIZES]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        if layer:
            call = functools.partial(*layer, layer=call(DEVICE))
        graph, counter = compiled(call, "eager")
        for inputs in batches:
            out = graph(*on_device(inputs, DEVICE))
            assert out.device == DEVICE and out.dtype == dtype
        assert counter.frame_count == 1


@pytest.mark.parametrize("bits", [False, True], ids=["dtype", "8-bits"])
def test_one_graph_for_keys_in_pages(bits, dtype):
    """No key is gathered: the kernel gets the storage and the table."""

    def attend(q, kv, q_offsets, offsets, table, num_rows, scales):
        k, v = kv.chunk(2, dim=2)
        pages = jm.Pages(table, 128, num_rows, scales)
        return F.jagged_attention(q, k, v, q_offsets, offsets, pages=pages)

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        graph, counter = compiled(attend, "eager")
        for segments, rows, candidates in SIZES:
            offsets = [random_offsets(segments, 10 * n) for n in (candidates, rows)]
            entries, storage = 10 * rows // 128 + segments, 128 * (9 + segments)
            q, kv = torch.randn(10 * candidates, HEADS, DIM), torch.randn(storage, HEADS, 2 * DIM)
            table, scales = torch.zeros(entries, dtype=torch.int32), torch.ones(storage, HEADS)
            inputs = q, kv.to(torch.int8) if bits else kv, *offsets, table
            inputs = [x.to(DEVICE) for x in inputs]
            out = graph(*inputs, 10 * rows, scales.float().to(DEVICE) if bits else None)
            assert out.device == DEVICE and out.dtype == dtype
    assert counter.frame_count == 1
    (recorded,) = counter.graphs
    assert not any("index" in str(node.target) for node in recorded.graph.nodes)
