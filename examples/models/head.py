"""What the published models share: tokens of events and candidates, the MLP that gives the logit,
and rows of users for their candidates."""

import torch
from ranking_model import EventTokens, Inputs, RankingConfig, per_candidate
from torch import nn

import jagged_modules as jm
from jagged_modules import functional as F


class Head(nn.Module):
    """The dense part of a ranking model, for `RankingModel(tables, config, head=...)`. A model
    defines `interest`.

    The last step is an MLP of the interest, the candidate, and the side features of both.

    Args:
        config: options, of which embedding_dim E, num_heads, dropout, max_history and
            max_candidates are read.
        num_user_features, num_item_features: numbers of side features; a model's `features`.
        num_vectors: vectors of the MLP's input; those named above if None.
        device: device of the parameters.
    """

    num_interests = 1  # vectors of width E that `interest` returns

    def __init__(
        self,
        config: RankingConfig,
        num_user_features: int,
        num_item_features: int,
        num_vectors: int | None = None,
        device: torch.device | None = None,
    ):
        super().__init__()
        dim = config.embedding_dim
        if num_vectors is None:
            num_vectors = self.num_interests + 1 + num_item_features + num_user_features
        self.config, self.dropout = config, nn.Dropout(config.dropout)
        self.events, self.item_norm = EventTokens(dim, device), nn.LayerNorm(dim, device=device)
        self.over = nn.Sequential(
            nn.Linear(num_vectors * dim, 64, device=device),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(64, 1, device=device),
        )

    def forward(self, x: Inputs) -> torch.Tensor:
        """Logits [C]."""
        candidates = jm.CandidateIndex.from_offsets(x.item_offsets)
        targets = self.targets(x)
        interest = self.interest(self.history(x), targets, candidates)
        of_user = per_candidate(x.users.flatten(1), x.item_offsets, targets.shape[0])
        vectors = [interest, targets, self.dropout(x.item_features.flatten(1)), of_user]
        return self.over(torch.cat(vectors, dim=1).to(self.over[0].weight.dtype))[:, 0]

    def history(self, x: Inputs) -> jm.Jagged:
        """The events of B users, from oldest to newest, with values [L, E]."""
        return jm.Jagged(
            self.dropout(self.events(x.history)), x.history_offsets, self.config.max_history
        )

    def targets(self, x: Inputs) -> torch.Tensor:
        """The candidates [C, E], grouped by user."""
        return self.dropout(self.item_norm(x.items))

    def interest(
        self, history: jm.Jagged, targets: torch.Tensor, candidates: jm.CandidateIndex
    ) -> torch.Tensor:
        """What the candidates' users want of them, [C, num_interests · E]."""
        raise NotImplementedError


@torch.compiler.disable  # the number of rows depends on lengths
def histories_of(
    candidates: jm.CandidateIndex, history: jm.Jagged, num_candidates: int
) -> jm.Jagged:
    """The history of each candidate's user, for models that update events by the candidate. On a
    GPU it waits for the number of rows."""
    users = candidates.users(num_candidates)
    total = int(history.offsets.diff()[users].sum())
    values, offsets = F.jagged_select(history.values, history.offsets, users, total)
    return jm.Jagged(values, offsets, history.max_seqlen)


def ages(history: jm.Jagged) -> torch.Tensor:
    """How many events of its history follow each event, int64 [L]: 0 for the newest."""
    rows = torch.arange(history.num_rows, device=history.device)
    return per_candidate(history.offsets[1:], history.offsets, len(rows)) - 1 - rows
