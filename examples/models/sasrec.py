"""SASRec (Kang and McAuley 2018, arXiv:1808.09781) as a ranker.

A causal transformer encodes a history once for all of its candidates. The logit of a candidate is
its dot product with the state after the newest event. Learned positions count from the newest
event, as the published model's do, which pads on the left.

Unlike the paper: the log's liked and disliked items are the examples, not the next item and a
random one, so events have their ratings, and candidates a bias; a user's id is not used; keys and
values are normalised too (a common pre-norm layer). train_hstu.py has the next-item model.
"""

import torch
from ranking_model import Inputs, RankingConfig
from torch import nn

import jagged_modules as jm
from jagged_modules import functional as F

from .head import Head, ages


class SASRec(Head):
    num_layers = 2

    def __init__(self, config: RankingConfig, *features: int, device: torch.device | None = None):
        super().__init__(config, *features, num_vectors=1, device=device)
        dim = config.embedding_dim
        self.positions = nn.Embedding(config.max_history, dim, device=device)
        layers = [
            jm.JaggedEncoderLayer(
                dim,
                config.num_heads,
                dim,
                norm_first=True,
                mask=jm.AttentionMask(causal=True),
                dropout=config.dropout,
                device=device,
            )
            for _ in range(self.num_layers)
        ]
        self.encoder = jm.JaggedEncoder(layers, nn.LayerNorm(dim, device=device))

    def forward(self, x: Inputs) -> torch.Tensor:
        targets = self.targets(x)
        states = self.interest(
            self.history(x), targets, jm.CandidateIndex.from_offsets(x.item_offsets)
        )
        scores = (states * targets).sum(1) / targets.shape[1] ** 0.5
        return scores + self.over(targets.to(self.over[0].weight.dtype))[:, 0]

    def interest(
        self, history: jm.Jagged, targets: torch.Tensor, candidates: jm.CandidateIndex
    ) -> torch.Tensor:
        """The states after the users' newest events, [C, E]; 0 without events."""
        events = history.with_values(history.values + self.positions(ages(history)))
        users = candidates.users(targets.shape[0])
        return self.newest(events).index_select(0, users)

    def newest(self, events: jm.Jagged) -> torch.Tensor:
        """The states of B users, [B, E]."""
        states = self.encoder(events)
        return F.jagged_sum(F.jagged_last(states))
