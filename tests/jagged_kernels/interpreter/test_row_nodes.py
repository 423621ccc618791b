"""Layers as one autograd node, with their row kernels in Triton's interpreter. Attention runs on
the CPU."""

import functools

import pytest
import torch
from functorch.compile import make_boxed_func
from marks import slow_after
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import jagged_modules as jm
from jagged_modules.functional import tail
from jagged_modules.layers import one_node

LENGTHS, CONTEXTS, WIDTH = [5, 0, 30, 2], [3, 2, 0, 9], 48
NORMED = jm.GDPAConfig(qk_norm=True, num_kv_heads=1)
LAYERS = {
    "block": lambda: jm.GDPABlock(WIDTH, 3),
    "qk-norm": lambda: jm.GDPABlock(WIDTH, 3, "silu", config=NORMED),
    "context": lambda: jm.JaggedGDPA(WIDTH, 3, "softmax", config=NORMED),
    "seeds": lambda: jm.JaggedGDPA(
        WIDTH, 3, "softmax", config=jm.GDPAConfig(qk_norm=True, num_seeds=4)
    ),
    "mlp": lambda: jm.JaggedMLP([WIDTH, 40, 9], "gelu_tanh"),
    "swiglu": lambda: jm.JaggedMLP([WIDTH, 40, 9], "swiglu"),
    "encoder-first": lambda: jm.JaggedEncoderLayer(
        WIDTH, 3, 40, norm_first=True, norm="rms", activation="swiglu"
    ),
    "encoder-behind": lambda: jm.JaggedEncoderLayer(WIDTH, 3, 40, activation="gelu"),
    "encoder-relu": lambda: jm.JaggedEncoderLayer(WIDTH, 3, 40, norm_first=True),
    "encoder-queries": lambda: jm.JaggedEncoderLayer(WIDTH, 3, 40, norm_first="queries"),
    "encoder-dropout": lambda: jm.JaggedEncoderLayer(
        WIDTH, 3, 40, norm_first=True, activation="gelu", dropout=0.3
    ),
    "encoder-relu-dropout": lambda: jm.JaggedEncoderLayer(WIDTH, 3, 40, dropout=0.3),
    "encoder-rms": lambda: jm.JaggedEncoderLayer(WIDTH, 3, 40, norm="rms"),
}


# the last ones: others have norms of queries and keys, SwiGLU, and these norms and places of them
@slow_after(10, "name", sorted(LAYERS, key=("qk-norm", "swiglu", "encoder-rms").__contains__))
def test_equals_the_modules(monkeypatch, offsets, name):
    """In fp32, also in a graph, which does not know the end of the rows."""
    layer = LAYERS[name]()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    pairs = [(torch.randn(sum(LENGTHS), WIDTH), offsets(LENGTHS))]
    if name == "context":
        pairs.append((torch.randn(sum(CONTEXTS), WIDTH), offsets(CONTEXTS)))

    def results(call):
        leaves = [x.clone().requires_grad_() for x, _ in pairs]
        torch.manual_seed(1)  # of dropout
        out = call(*((x, ends) for x, (_, ends) in zip(leaves, pairs)))[0]
        return [out, *torch.autograd.grad(out, [*leaves, *layer.parameters()], out.detach().cos())]

    expected = results(layer)
    monkeypatch.setattr(one_node, "may_be_one_node", lambda *_, **__: True)
    monkeypatch.setattr(tail, "_has_kernels", lambda x: True)
    compile = functools.partial(torch.compile, fullgraph=True, dynamic=True, backend="aot_eager")
    torch._dynamo.reset()
    for found in (results(layer), results(compile(layer))):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(
                x, y, rtol=1e-4, atol=1e-5 * float(1 + y.detach().abs().max())
            )


@pytest.mark.parametrize("name", ["encoder-first", "encoder-behind"])
def test_a_kept_graph_gives_the_same_gradients_again(monkeypatch, poisoned_memory, offsets, name):
    """Only the last backward replaces what the forward saved. Dropout is drawn once."""
    monkeypatch.setattr(one_node, "may_be_one_node", lambda *_, **__: True)
    layer = LAYERS[name]()
    layer.dropout.p = 0.3
    x = torch.randn(sum(LENGTHS), WIDTH, requires_grad=True)
    out, wanted = layer((x, offsets(LENGTHS)))[0], [x, *layer.parameters()]
    first = torch.autograd.grad(out, wanted, out.detach(), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out, wanted, out.detach())))


def test_a_graph_computes_the_activation_again(monkeypatch, offsets):
    """With its gradient, and not from what the forward kept."""
    monkeypatch.setattr(one_node, "may_be_one_node", lambda *_, **__: True)
    calls = []

    def compiler(graph, _):
        calls.append(graph.code)
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition
    )
    torch._dynamo.reset()
    compiled = torch.compile(LAYERS["encoder-behind"](), fullgraph=True, backend=backend)
    compiled((torch.randn(sum(LENGTHS), WIDTH), offsets(LENGTHS)))[0].sum().backward()
    forward, backward = calls
    name, again = "jagged_kernels.activation.default(", "jagged_kernels.activation_again_backward"
    assert forward.count(name) == 1 and name not in backward and again in backward
