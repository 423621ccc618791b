"""What a type checker knows of a user's model. `make lint` checks this file, and test_user_model.py
runs it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import jagged_modules as jm
from jagged_modules import functional as F

Pair = tuple[Tensor, Tensor]


class Ranker(nn.Module):
    """A model as users write it, with annotations."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.encoder = jm.GDPABlock(dim, num_heads=4, mask=jm.AttentionMask(causal=True))
        self.attention = jm.JaggedTargetAttention(dim, num_heads=4)
        self.head = nn.Linear(dim, 1)

    def forward(self, history: jm.Jagged, targets: Tensor, candidates: jm.CandidateIndex) -> Tensor:
        encoded = self.encoder(history)
        assert_type(encoded, jm.Jagged)
        interest = self.attention(targets.unsqueeze(1), encoded, candidates)
        assert_type(interest, Tensor)
        return self.head(interest.squeeze(1)).squeeze(1)


def pair() -> Pair:
    return torch.randn(5, 32), torch.tensor([0, 2, 5])


def containers() -> jm.Jagged:
    jagged = jm.Jagged(*pair(), max_seqlen=3)
    assert_type(jagged, jm.Jagged)
    assert_type(jm.Jagged.wrap(pair()), jm.Jagged)
    assert_type(jagged.with_values(torch.randn(5, 8)), jm.Jagged)
    assert_type(jagged.values, Tensor)
    assert_type(jagged.max_seqlen, int | None)
    assert_type(jagged.to("cpu"), jm.Jagged)
    index = jm.CandidateIndex.from_map(torch.tensor([0, 1, 1]), num_users=2)
    assert_type(index, jm.CandidateIndex)
    assert_type(index.candidate_to_user, Tensor)
    assert_type(jm.AttentionMask(causal=True).picture(3), str)
    return jagged


def layers(jagged: jm.Jagged) -> None:
    """The container that goes in comes out."""
    mlp = jm.JaggedMLP([32, 16])
    assert_type(mlp(jagged), jm.Jagged)
    assert_type(mlp(pair()), Pair)
    assert_type(mlp.forward(pair()), Pair)
    values, offsets = jm.BlockDiagonalSelfAttention(32, num_heads=4)(pair())
    assert_type(values, Tensor)
    assert_type(offsets, Tensor)
    assert_type(jm.GDPABlock(32, num_heads=4)(pair(), context=jagged), Pair)
    attention = jm.JaggedGDPA(32, num_heads=4, mask=jm.AttentionMask(causal=True))
    assert_type(attention(jagged), jm.Jagged)
    assert_type(attention(pair(), jagged), Pair)
    pooling = jm.JaggedGDPA(32, num_heads=4, config=jm.GDPAConfig(num_seeds=2))
    assert cast(Tensor, pooling(jagged)).shape == (2, 2, 32)  # no checker knows the config

    target = jm.JaggedTargetAttention(32, num_heads=4)
    assert_type(target(torch.randn(2, 3, 32), pair()), Tensor)
    assert_type(target(pair(), jagged), Pair)
    assert_type(target(torch.randn(3, 1, 32), jagged, torch.tensor([0, 1, 1])), Tensor)

    both = jm.JaggedSelfTargetAttention(32, num_heads=4)
    assert_type(both(jagged, pair()), tuple[jm.Jagged, Pair])
    assert_type(
        both(jagged, torch.randn(3, 1, 32), torch.tensor([0, 1, 1])), tuple[jm.Jagged, Tensor]
    )

    hstu = jm.HSTUStack(32, num_heads=4, num_layers=2, config=jm.HSTUConfig(scaling_seqlen=10))
    assert_type(hstu(jagged, torch.tensor([1, 0])), jm.Jagged)
    layer = jm.HSTULayer(32, num_heads=4, config=jm.HSTUConfig(scaling_seqlen=10))
    assert_type(layer(pair()), Pair)
    assert_type(layer.cache(pair(), slice(0, 2)), tuple[Pair | None, Tensor])

    compress = jm.LinearCompressEmbedding(3, 4, num_user_embeddings=6)
    assert_type(
        compress(torch.randn(3, 3, 16), torch.randn(2, 6, 16), torch.tensor([0, 1, 1])), Tensor
    )


def caches(jagged: jm.Jagged) -> None:
    attention = jm.JaggedGDPA(32, num_heads=4, mask=jm.AttentionMask(causal=True))
    target = jm.JaggedTargetAttention(32, num_heads=4)
    hstu = jm.HSTUStack(
        32, num_heads=4, num_layers=2, config=jm.HSTUConfig(scaling_seqlen=10)
    ).eval()
    assert_type(hstu, jm.HSTUStack)

    cache = hstu.cache(jagged)
    assert_type(cache, jm.HistoryCache)
    assert_type(cache.select([1]), jm.HistoryCache)
    assert_type(hstu.score(pair(), cache), Pair)
    assert_type(hstu.append(pair(), cache), tuple[Pair, jm.HistoryCache])
    assert_type(target.cache(jagged), jm.HistoryCache)
    assert_type(target.score(pair(), target.cache(jagged)), Pair)
    assert_type(target.append(pair(), target.cache(jagged)), tuple[None, jm.HistoryCache])
    assert_type(attention.cache(jagged), jm.HistoryCache)
    assert_type(attention.score(pair(), attention.cache(jagged)), Pair)
    assert_type(attention.append(pair(), attention.cache(jagged)), tuple[None, jm.HistoryCache])

    for layer in (hstu, target, attention):
        pages = jm.PagedHistoryCache(layer, max_bytes=2**20)
        assert_type(pages.missing(["ann", "bob"]), list[Hashable])
        pages.put(["ann", "bob"], jagged)
        pages.append(["bob", "ann"], pair())
        assert_type(pages.select(["bob"]), jm.HistoryCache)
        assert_type(pages.statistics().hits, int)


def whole_models(jagged: jm.Jagged) -> None:
    """A graphed module is called as the module itself."""
    assert_type(jm.graphed(jm.JaggedMLP([32, 16]))(jagged), jm.Jagged)
    assert_type(
        jm.graphed(jm.JaggedTargetAttention(32, num_heads=4))(torch.randn(2, 3, 32), jagged), Tensor
    )
    graphed = jm.graphed(
        jm.HSTUStack(32, num_heads=4, num_layers=2, config=jm.HSTUConfig(scaling_seqlen=10))
    )
    assert_type(graphed(pair()), Pair)
    assert_type(graphed.score(pair(), graphed.cache(jagged)), Pair)

    fused = jm.transforms.fuse_broadcasts(
        nn.Linear(32, 1).eval(), (torch.randn(6, 32),), request_only=["input"]
    )
    assert_type(fused.report, jm.transforms.Report)
    assert_type(fused.report.sites, tuple[jm.transforms.Site, ...])
    assert_type(fused.graph.python_code("self").src, str)


def functions() -> None:
    q, k, v = torch.randn(3, 5, 2, 8).unbind(0)
    offsets = torch.tensor([0, 2, 5])
    assert_type(F.jagged_attention(q, k, v, offsets, mask=jm.AttentionMask(causal=True)), Tensor)
    assert_type(F.jagged_softmax(torch.randn(5, 2), offsets), Tensor)
    assert_type(F.jagged_concat([q, k], [offsets, offsets]), Pair)
    padded = F.jagged_to_padded(torch.randn(5, 8), offsets, max_seqlen=3)
    assert_type(padded, Tensor)
    assert_type(F.padded_to_jagged(padded, offsets), Tensor)
    assert_type(F.jagged_dense_add(torch.randn(5, 8), padded, offsets), Tensor)
    assert_type(F.jagged_dense_mul(torch.randn(5, 8), padded, offsets), Tensor)
    assert_type(F.jagged_split(q, offsets, 1), tuple[Pair, Pair])
    assert_type(F.jagged_linear(torch.randn(5, 8), torch.randn(4, 8)), Tensor)
    assert_type(F.jagged_layer_norm(torch.randn(5, 8)), Tensor)
    candidates = jm.CandidateIndex.from_counts(torch.tensor([1, 2]))
    assert_type(F.target_attention(torch.randn(3, 1, 2, 8), k, v, candidates, offsets), Tensor)
    assert_type(F.target_attention(torch.randn(3, 1, 2, 8), k, v, candidates, "shared"), Tensor)
    assert_type(
        F.self_target_attention(q, torch.randn(3, 2, 8), k, v, offsets, torch.tensor([0, 1, 3])),
        Pair,
    )
    assert_type(F.block_diagonal_attention(q, k, v, offsets), Tensor)
    assert_type(F.block_diagonal_attention_packed(torch.randn(5, 3, 2, 8), offsets), Tensor)
    assert_type(F.linear_compress([torch.randn(4, 3)], [torch.randn(5, 3, 16)], []), Tensor)
    plan = F.ScorePlan.from_offsets(offsets)
    assert_type(F.jagged_jagged_bmm_jagged_out(torch.randn(5, 8), torch.randn(5, 8), plan), Tensor)
    scores = F.jagged2_softmax(torch.randn(13), plan)
    assert_type(scores, Tensor)
    assert_type(F.array_jagged_bmm_jagged_out(scores, torch.randn(5, 8), plan), Tensor)
    assert_type(F.jagged_jagged_bmm(torch.randn(5, 8), torch.randn(5, 8), offsets), Tensor)
    assert_type(F.jagged_dense_bmm(torch.randn(5, 8), torch.randn(2, 8, 4), offsets), Tensor)


def settings() -> None:
    with jm.debug_checks(True), jm.batch_invariant(False), jm.backward_workspace(0):
        functions()


def main() -> None:
    jagged = containers()
    layers(jagged)
    caches(jagged)
    whole_models(jagged)
    settings()
    scores = Ranker()(
        jagged, torch.randn(3, 32), jm.CandidateIndex.from_counts(torch.tensor([1, 2]))
    )
    assert scores.shape == (3,)
