"""Layers as one autograd node, with their kernels in Triton's interpreter, against float64."""

import copy

import pytest
import torch

import jagged_modules as jm
from jagged_modules.layers import block_attention, gdpa_node, one_node

LENGTHS, CONTEXTS, WIDTH = [3, 0, 1, 70], [5, 2, 0, 33], 32
LAYERS = {
    "block": lambda: jm.GDPABlock(WIDTH, 2),
    "softmax": lambda: jm.GDPABlock(WIDTH, 2, "softmax", jm.AttentionMask(causal=True)),
    "context": lambda: jm.JaggedGDPA(WIDTH, 2, "silu", config=jm.GDPAConfig(num_kv_heads=1)),
    "weights": lambda: jm.GDPABlock(WIDTH, 2, config=jm.GDPAConfig(num_weights=5)),
    "blocks": lambda: jm.BlockDiagonalSelfAttention(WIDTH, 2, 16),
}


def rms_norm_gradients(dy, x, weight, rstd, residual):
    """torch has no operator of this backward on the CPU."""
    normed, wide = x * rstd, dy * weight
    dx = rstd * (wide - normed * (wide * normed).mean(1, keepdim=True))
    return dx + residual, (dy * normed).sum(0)


@pytest.fixture
def nodes(monkeypatch):
    """fp32 layers on the CPU are nodes."""

    def may_be_one_node(x, *modules):
        return x.dtype == torch.float32

    monkeypatch.setattr(one_node, "may_be_one_node", may_be_one_node)
    monkeypatch.setattr(block_attention, "runs_kernels", lambda *_: True)
    monkeypatch.setattr(gdpa_node, "rms_norm_gradients", rms_norm_gradients)


@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients(nodes, poisoned_memory, offsets, name):
    layer = LAYERS[name]()
    rows = [sum(LENGTHS)] + ([sum(CONTEXTS)] if name == "context" else [])
    tensors, do = [torch.randn(n, WIDTH) for n in rows], torch.randn(rows[0], WIDTH)

    def results(layer, dtype):
        x, *contexts = inputs = [x.to(dtype).requires_grad_() for x in tensors]
        pairs = [(context, offsets(CONTEXTS)) for context in contexts]
        out = layer((x, offsets(LENGTHS)), *pairs)[0]
        wanted = [*inputs, *layer.parameters()]
        return type(out.grad_fn).__name__, [out, *torch.autograd.grad(out, wanted, do.to(dtype))]

    function, actual = results(layer, torch.float32)
    assert function == "_NodeBackward"
    _, expected = results(copy.deepcopy(layer).double(), torch.float64)
    for x, y in zip(actual, expected, strict=True):
        # sums of at most 74 rows, on a way of some ten operations
        assert (x - y).norm() <= 10 * 74**0.5 * torch.finfo(torch.float32).eps * y.norm()
