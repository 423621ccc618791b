"""torch.fx.symbolic_trace keeps functions, layers and constructors of containers whole."""

import pickle

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
    assert [node.target.__name__ for node in traced.graph.nodes if node.op == "call_function"] == [
        "jagged_attention"
    ]
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
            return F.jagged_attention(
                x, x, x, offsets, mask=mask, activation="relu", output_scale=output_scale
            )

    traced = torch.fx.symbolic_trace(Attention())
    inputs = torch.randn(9, 2, 4), offsets_of([4, 5]), torch.rand(2)
    assert torch.equal(traced(*inputs), Attention()(*inputs))


def test_symbolic_trace_of_linear_compress():
    layer = jm.LinearCompressEmbedding(10, 4, 9)
    traced = torch.fx.symbolic_trace(layer)
    assert [node.target.__name__ for node in traced.graph.nodes if node.op == "call_function"] == [
        "_dense",
        "_dense",
        "compress_levels",
    ]
    candidates, shared, _, users_of, _ = compress_inputs(*SIZES[0])
    assert torch.equal(traced(candidates, shared, users_of), layer(candidates, shared, users_of))


class EveryLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.gdpa, self.gdpa_block = (
            jm.BlockDiagonalSelfAttention(8, 2),
            jm.JaggedGDPA(8, 2),
            jm.GDPABlock(8, 2),
        )
        self.mlp = jm.JaggedMLP([8, 4, 8])
        self.hstu = jm.HSTUStack(8, 2, 2, jm.HSTUConfig(scaling_seqlen=10))
        self.layer = jm.HSTULayer(8, 2, jm.HSTUConfig(scaling_seqlen=10))
        self.attention, self.compress = (
            jm.JaggedTargetAttention(8, 2),
            jm.LinearCompressEmbedding(1, 4, 1),
        )

    def forward(self, values, offsets, targets, candidate_to_user):
        history = self.mlp(self.gdpa_block(self.gdpa(self.block(jm.Jagged(values, offsets)))))
        history = self.layer(self.hstu(history, num_targets=None))
        index = jm.CandidateIndex.from_map(candidate_to_user, num_users=3)
        own = jm.CandidateIndex.from_counts(jm.Jagged.wrap((values, offsets)).offsets.diff())
        out = self.attention(targets.unsqueeze(1), history, candidates=index)
        of_own = self.attention(values.unsqueeze(1), (values, offsets), own)
        return (
            self.compress(out, values[:3].unsqueeze(1), index),
            of_own,
            jm.CandidateIndex.from_offsets(offsets).offsets,
        )


def test_symbolic_trace_of_containers_and_layers(offsets_of):
    model = EveryLayer()
    traced = torch.fx.symbolic_trace(model)
    layers = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert layers == [
        "block",
        "gdpa",
        "gdpa_block",
        "mlp",
        "hstu",
        "layer",
        "attention",
        "attention",
        "compress",
    ]
    inputs = torch.randn(8, 8), offsets_of([3, 0, 5]), torch.randn(4, 8), torch.tensor([2, 0, 1, 2])
    for graph in (traced, pickle.loads(pickle.dumps(traced))):
        for x, expected in zip(graph(*inputs), model(*inputs), strict=True):
            assert torch.equal(x, expected)
