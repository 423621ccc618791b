"""Deep Interest Network (Zhou et al. 2018, arXiv:1706.06978).

An MLP of candidate and event weights each event; the interest is the weighted sum. The published
model repeats the candidate for each event of a padded history. `JaggedDINAttention` has no row for
each pair.

Unlike the paper: a candidate has one history, of all kinds of events; Dice takes its statistics
over real events, not over padding.
"""

import torch
from ranking_model import RankingConfig

import jagged_modules as jm

from .head import Head


class DIN(Head):
    def __init__(self, config: RankingConfig, *features: int, device: torch.device | None = None):
        super().__init__(config, *features, device=device)
        self.attention = jm.JaggedDINAttention(
            config.embedding_dim, hidden=(80, 40), activation="dice", device=device
        )

    def interest(
        self, history: jm.Jagged, targets: torch.Tensor, candidates: jm.CandidateIndex
    ) -> torch.Tensor:
        return self.attention(targets[:, None], history, candidates)[:, 0]
