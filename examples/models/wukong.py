"""Wukong (Zhang et al. 2024, arXiv:2403.02545).

Each layer has a factorization machine and a linear compression of the embeddings. The first layer's
compression combines users and candidates: it computes the part of a user once for all of the user's
candidates, so no user is replicated.

Unlike the paper: the number of candidates' and users' embeddings is that of the log's features, and
the mean of a history's events is one of them.
"""

import torch
from ranking_model import Inputs, RankingConfig
from torch import nn

import jagged_modules as jm
from jagged_modules import CandidateIndex, LinearCompressEmbedding
from jagged_modules import functional as F

from .head import Head


class WukongLayer(nn.Module):
    """LayerNorm([FM block(x); linear compression(x)] + x): maps n embeddings of width d to n
    embeddings.

    If users are given, x is itself a linear compression of the users' and the candidates'
    embeddings, and one GEMM computes both.

    Args:
        num_embeddings: n. The FM block and the linear compression return n / 2 embeddings each.
        embedding_dim: d.
        num_candidate_embeddings, num_user_embeddings: numbers of input embeddings, if the input is
            not n embeddings.
        rank: columns k of the projection Y; the interactions X Xᵀ Y are [n, k].
        features: candidate_features and user_features of `LinearCompressEmbedding`, if the inputs
            are KeyedTensors.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        num_candidate_embeddings=None,
        num_user_embeddings=0,
        rank: int = 8,
        device: torch.device | None = None,
        **features,
    ):
        super().__init__()
        half = num_embeddings // 2
        self.sizes = [num_embeddings, half] if num_user_embeddings else [half]
        sizes = num_candidate_embeddings or num_embeddings, sum(self.sizes), num_user_embeddings
        self.compress = LinearCompressEmbedding(*sizes, device=device, **features)
        self.project = LinearCompressEmbedding(num_embeddings, rank, device=device)  # Yᵀ
        self.mlp = nn.Sequential(
            nn.Flatten(),
            nn.LayerNorm(num_embeddings * rank, device=device),
            nn.Linear(num_embeddings * rank, 128, device=device),
            nn.ReLU(),
            nn.Linear(128, half * embedding_dim, device=device),
            nn.Unflatten(1, (half, embedding_dim)),
        )
        self.norm = nn.LayerNorm(embedding_dim, device=device)

    def forward(self, x, users=None, candidates: CandidateIndex | None = None) -> torch.Tensor:
        """[C, n, d], from x [C, n, d], or from the embeddings of the candidates and of the users,
        each with its own batch size."""
        return self.interact(self.compress(x, users, candidates), x)

    def interact(self, compressed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The layer's result, from that of its linear compression."""
        *merged, compressed = compressed.split(self.sizes, dim=1)
        x = merged[0] if merged else x
        interactions = x @ self.project(x).mT
        return self.norm(torch.cat([self.mlp(interactions), compressed], dim=1) + x)


class Wukong(Head):
    num_embeddings, num_layers = 16, 2

    def __init__(self, config: RankingConfig, *features: int, device: torch.device | None = None):
        (num_users, num_items), n = features, self.num_embeddings
        super().__init__(config, *features, num_vectors=n, device=device)
        sizes = n, config.embedding_dim
        first = WukongLayer(*sizes, 1 + num_items, 1 + num_users, device=device)
        others = (WukongLayer(*sizes, device=device) for _ in range(self.num_layers - 1))
        self.layers = nn.ModuleList([first, *others])

    def forward(self, x: Inputs) -> torch.Tensor:
        users = self.dropout(torch.cat([x.users, self.mean(self.history(x))[:, None]], dim=1))
        items = torch.cat([self.targets(x)[:, None], self.dropout(x.item_features)], dim=1)
        vectors = self.combine(items, users, CandidateIndex.from_offsets(x.item_offsets))
        return self.over(self.dropout(vectors.flatten(1)))[:, 0]

    def mean(self, history: jm.Jagged) -> torch.Tensor:
        """[B, E]"""
        return F.jagged_mean(history)

    def combine(
        self, items: torch.Tensor, users: torch.Tensor, candidates: CandidateIndex
    ) -> torch.Tensor:
        """[C, num_embeddings, E]"""
        first, *others = self.layers
        x = first(items, users, candidates)
        for layer in others:
            x = layer(x)
        return x
