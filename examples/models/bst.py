"""Behavior Sequence Transformer (Chen et al. 2019, arXiv:1905.06874).

The candidate is the last event of the sequence, which a transformer layer encodes. All candidates
of a user share one sequence: events see events, a candidate sees the events and itself. With one
layer, the paper's choice, the candidate's result is that of a sequence of its own, in which events
see the candidate too: nobody reads the events' results.

Unlike the paper: the MLP gets the candidate's result, not those of a fixed number of events; the
layer has ReLU for LeakyReLU; positions are the log's ages of events.
"""

import torch
from ranking_model import RankingConfig

import jagged_modules as jm
from jagged_modules import functional as F

from .head import Head


class BST(Head):
    def __init__(self, config: RankingConfig, *features: int, device: torch.device | None = None):
        super().__init__(config, *features, device=device)
        self.layer = jm.JaggedEncoderLayer(
            config.embedding_dim,
            config.num_heads,
            4 * config.embedding_dim,
            dropout=config.dropout,
            device=device,
        )

    def interest(
        self, history: jm.Jagged, targets: torch.Tensor, candidates: jm.CandidateIndex
    ) -> torch.Tensor:
        rows, offsets = F.jagged_concat(
            [history.values, targets], [history.offsets, candidates.offsets]
        )
        encoded = self.layer(jm.Jagged(rows, offsets), num_targets=candidates.offsets.diff())
        _, (results, _) = F.jagged_split(
            encoded.values, offsets, history.offsets.diff(), total_first=history.num_rows
        )
        return results
