"""TransAct (Xia et al. 2023, arXiv:2306.00248).

Each event is concatenated with the candidate (early fusion), and a transformer encodes the result.
The interest is the newest events' outputs and the maximum over all outputs. In training, a random
number of the newest events is hidden, so that the model does not rely on them.

Events differ by candidate, so each candidate has a sequence of its own: `jagged_select` repeats the
rows of its user's history, without padding.

Unlike the paper: the random window is one of events, because batches have no times; events and
candidates are projected to E / 2 before they are concatenated; an MLP takes the place of DCN v2.
"""

import torch
from ranking_model import RankingConfig, per_candidate
from torch import nn

import jagged_modules as jm
from jagged_modules import functional as F

from .head import Head, histories_of


class TransAct(Head):
    num_newest = 10  # the paper's "first K", of histories from newest to oldest
    num_interests = num_newest + 1
    num_layers = 2
    window = 10  # how many of the newest events training may hide

    def __init__(self, config: RankingConfig, *features: int, device: torch.device | None = None):
        super().__init__(config, *features, device=device)
        dim = config.embedding_dim
        self.event_proj = nn.Linear(dim, dim // 2, device=device)
        self.target_proj = nn.Linear(dim, dim // 2, device=device)
        layers = [
            jm.JaggedEncoderLayer(dim, config.num_heads, dim, dropout=config.dropout, device=device)
            for _ in range(self.num_layers)
        ]
        self.encoder, self.pool_proj = jm.JaggedEncoder(layers), nn.Linear(dim, dim, device=device)

    def interest(
        self, history: jm.Jagged, targets: torch.Tensor, candidates: jm.CandidateIndex
    ) -> torch.Tensor:
        if self.training:
            history = self.hide_newest(history)
        events = history.with_values(self.event_proj(history.values))
        return self.pooled(events, self.target_proj(targets), candidates)

    def hide_newest(self, history: jm.Jagged) -> jm.Jagged:
        """Each history without up to `window` of its newest events."""
        lengths = history.offsets.diff()
        kept = (lengths - torch.randint_like(lengths, self.window + 1)).clamp(min=0)
        values, offsets = F.jagged_first(history.values, history.offsets, kept)
        return jm.Jagged(values, offsets, history.max_seqlen)

    def pooled(
        self, events: jm.Jagged, targets: torch.Tensor, candidates: jm.CandidateIndex
    ) -> torch.Tensor:
        """[C, num_interests · E], from events [L, E / 2] and targets [C, E / 2]."""
        rows = histories_of(candidates, events, targets.shape[0])
        fused = torch.cat([rows.values, per_candidate(targets, rows.offsets, rows.num_rows)], dim=1)
        encoded = self.encoder(rows.with_values(fused))
        newest = encoded.to_padded(self.num_newest, side="left", truncate="newest")
        pooled = self.pool_proj(F.jagged_max(encoded))
        return torch.cat([newest.flatten(1), pooled], dim=1)
