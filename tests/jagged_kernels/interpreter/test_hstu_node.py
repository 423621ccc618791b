"""HSTULayer as one autograd node on its kernels, in Triton's interpreter."""

import functools

import pytest
import torch
from functorch.compile import make_boxed_func
from marks import slow_after
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import jagged_modules as jm
from jagged_modules.layers import hstu
from jagged_modules.layers.hstu_config import RECOMPUTED

LENGTHS, TARGETS, WIDTH, HEADS = [5, 0, 70, 1], [1, 0, 3, 1], 48, 3


@pytest.fixture
def layer_and_rows(monkeypatch):
    """Makes a layer that runs as a node unless it has `calls_modules`, and rows."""
    monkeypatch.setattr(hstu, "takes_kernels", lambda layer, x: not layer.calls_modules)

    def make(**fields):
        layer = jm.HSTULayer(WIDTH, HEADS, jm.HSTUConfig(scaling_seqlen=20, **fields))
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.3)
        layer.calls_modules = False
        return layer, torch.randn(sum(LENGTHS), WIDTH)

    return make


@torch._dynamo.config.patch(specialize_float=True)  # otherwise most graphs are traced twice
def results(layer, x, offsets, compile=lambda layer: layer):
    """The layer's result and all gradients."""
    x = x.detach().requires_grad_()
    torch.manual_seed(1)
    out = compile(layer)((x, offsets), torch.tensor(TARGETS))[0]
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], out.detach().cos())]


@slow_after(3, "norm, recompute", [
    ("layer", ("norm", "activation")), ("rms", ()), ("group", ("projection",)),
    ("layer", ("norm", "activation", "projection")),
])  # fmt: skip
def test_equals_the_modules(layer_and_rows, offsets, norm, recompute):
    """In fp32, where both round alike but for the order of sums."""
    layer, x = layer_and_rows(norm=norm, recompute=recompute, relative_position=80)
    node = results(layer, x, offsets(LENGTHS))
    layer.calls_modules = True
    for own, expected in zip(node, results(layer, x, offsets(LENGTHS)), strict=True):
        torch.testing.assert_close(
            own, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
        )


def test_what_is_computed_again_is_the_same(layer_and_rows, offsets, poisoned_memory):
    """Of dropout too: kept and computed results have the same bits."""
    layer, x = layer_and_rows(dropout=0.4)
    found = []
    for recompute in ((), ("norm", "activation"), RECOMPUTED):
        object.__setattr__(layer.config, "recompute", recompute)
        found.append(results(layer, x, offsets(LENGTHS)))
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def test_compiles_without_a_graph_break(layer_and_rows, offsets):
    layer, x = layer_and_rows(dropout=0.4)
    eager = results(layer, x, offsets(LENGTHS))
    compile = functools.partial(torch.compile, fullgraph=True, dynamic=True, backend="aot_eager")
    assert all(map(torch.equal, eager, results(layer, x, offsets(LENGTHS), compile)))


def bytes_kept(layer, x, offsets, monkeypatch):
    """What a graph of torch.compile keeps for its backward, besides its inputs."""
    kept = []

    def compiler(graph, _):
        def run(*inputs):
            results = graph(*inputs)
            if not kept:  # in the forward
                tensors = [y for y in results[1:] if isinstance(y, torch.Tensor)]
                storages = {y.untyped_storage().data_ptr(): y.untyped_storage() for y in tensors}
                for y in inputs:
                    if isinstance(y, torch.Tensor):
                        storages.pop(y.untyped_storage().data_ptr(), None)
                kept.append(sum(y.nbytes() for y in storages.values()))
            return results

        return make_boxed_func(run)

    monkeypatch.setattr("jagged_modules.functional.tail._has_kernels", lambda x: True)
    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition
    )
    torch._dynamo.reset()
    compile = functools.partial(torch.compile, fullgraph=True, dynamic=True, backend=backend)
    graph, node = results(layer, x, offsets, compile), results(layer, x, offsets)
    torch.testing.assert_close(graph, node)
    return kept[0]


def test_a_graph_computes_again_what_the_node_does(layer_and_rows, offsets, monkeypatch):
    """torch.compile merges equal calls: it would keep the results of those of the forward."""
    sizes = []
    for recompute in ((), RECOMPUTED):
        layer, x = layer_and_rows(recompute=recompute)
        x = x[:12]
        sizes.append(bytes_kept(layer, x, offsets([5, 0, 6, 1]), monkeypatch))
    assert sizes[0] - sizes[1] == 8 * x.nbytes


def test_gradients_of_attention_in_columns_of_one_tensor(offsets):
    """Those of rows behind the last segment, which the host does not know, are 0."""
    from jagged_kernels.attention import op
    from jagged_kernels.attention.params import Options, SegmentTensors

    q, k, v, do = torch.randn(4, 12, 2, 16)
    ends = offsets([4, 3])
    tensors = SegmentTensors(ends, ends, *[None] * 7)
    options = Options(0, 0, 1, 0, 0, -1, -1, -1, -1, -1)
    rest = list(tensors), [None] * 6, None, list(options), [0.25, 0.1], "silu", "triton"
    out, columns = torch.full((12, 120), torch.nan), [80, 40, 4]
    given = do, [None, q.new_empty(2, 0)]
    op.triton_attention_packed_backward(*given, out, None, columns, q, k, v, *rest)
    for first, x in zip(columns, op.triton_attention_backward(*given, q, k, v, *rest)):
        assert torch.equal(out[:, first : first + 32], x.flatten(1))
    assert not out[7:].any() and out[:7, 36:40].isnan().all()


def test_gradients_of_two_lists_of_queries_in_columns_of_one_tensor(offsets):
    """The rows of the first list are those of the keys. Rows of no segment are 0."""
    from jagged_kernels.attention import op
    from jagged_kernels.attention.params import Options, SegmentTensors

    (q, do), (k, v) = torch.randn(2, 20, 2, 16), torch.randn(2, 9, 2, 16)
    ends = offsets([4, 3, 2, 3, 5, 3]), offsets([4, 3, 0])
    options = Options(0, 0, 1, 0, 0, -1, -1, -1, -1, -1)
    segments = list(SegmentTensors(*ends, *[None] * 7))
    rest = segments, [None] * 6, None, list(options), [0.25, 1.0], "softmax", "triton"
    results = op.triton_attention(q, k, v, *rest)
    out = torch.full((20, 96), torch.nan)
    given = do, list(results), out, None, [0, 32, 64]
    op.triton_attention_packed_backward(*given, q, k, v, *rest)
    expected = op.triton_attention_backward(*given[:2], q, k, v, *rest)
    for first, x in zip((0, 32, 64), expected):
        assert torch.equal(out[: len(x), first : first + 32], x.flatten(1))
    assert not out[7:9].any() and not out[17:, :32].any() and out[9:, 32:].isnan().all()
