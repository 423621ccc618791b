"""torch.fx.symbolic_trace keeps the functions whole."""

import torch

import jagged_modules as jm
from jagged_modules import functional as F

from .graph_cases import SIZES, compress_inputs


def test_symbolic_trace_of_block_diagonal_attention(offsets_of):
    rotary = jm.Rotary.from_frequencies(4, 10)

    class Attention(torch.nn.Module):
        def forward(self, x, offsets):
            return F.block_diagonal_attention(x, x, x, offsets, rotary=rotary).relu()

    traced = torch.fx.symbolic_trace(Attention())
    inputs = torch.randn(9, 2, 4), offsets_of([4, 5])
    assert torch.equal(traced(*inputs), Attention()(*inputs))


def test_symbolic_trace_keeps_the_functions_whole(offsets_of):
    class Attention(torch.nn.Module):
        def forward(self, x, offsets):
            return F.jagged_attention(x, x, x, offsets).relu()

    traced = torch.fx.symbolic_trace(Attention())
    assert [node.target.__name__ for node in traced.graph.nodes if node.op == "call_function"] == ["jagged_attention"]
    x, offsets = torch.randn(9, 2, 4), offsets_of([4, 5])
    assert torch.equal(traced(x, offsets), Attention()(x, offsets))


def test_symbolic_trace_keeps_the_jagged_operators_whole(offsets_of):
    class Model(torch.nn.Module):
        def forward(self, x, y, offsets):
            return F.jagged_softmax(F.jagged_dense_bmm(x, y, offsets), offsets)

    traced = torch.fx.symbolic_trace(Model())
    names = [node.target.__name__ for node in traced.graph.nodes if node.op == "call_function"]
    assert names == ["jagged_dense_bmm", "jagged_softmax"]
    inputs = torch.randn(9, 4), torch.randn(2, 4, 3), offsets_of([4, 5])
    assert torch.equal(traced(*inputs), Model()(*inputs))


def test_symbolic_trace_of_a_mask(offsets_of):
    class Attention(torch.nn.Module):
        def forward(self, x, offsets, output_scale):
            mask = jm.AttentionMask(causal=True, window=(3, None))
            return F.jagged_attention(x, x, x, offsets, mask=mask, activation="relu", output_scale=output_scale)

    traced = torch.fx.symbolic_trace(Attention())
    inputs = torch.randn(9, 2, 4), offsets_of([4, 5]), torch.rand(2)
    assert torch.equal(traced(*inputs), Attention()(*inputs))


def test_symbolic_trace_of_linear_compress():
    layer = jm.LinearCompressEmbedding(10, 4, 9)
    traced = torch.fx.symbolic_trace(layer)
    assert [node.target.__name__ for node in traced.graph.nodes if node.op == "call_function"] == ["_dense", "_dense", "linear_compress"]
    candidates, shared, _, users_of, _ = compress_inputs(*SIZES[0])
    assert torch.equal(traced(candidates, shared, users_of), layer(candidates, shared, users_of))
