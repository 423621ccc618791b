"""OneTrans (Zhang et al. 2025, arXiv:2510.26104).

One transformer for events and features. A candidate's features and its user's become a few tokens
behind the events. Under the causal mask, tokens see all events and the earlier tokens of their
candidate. Events share weights, each token has its own. Upper layers update fewer of the events
(the pyramid). All candidates of a user share one sequence: its events are computed once.

Unlike the paper: one kind of events, so the sequence has no separators; the feed-forward has ReLU.
"""

import torch
from ranking_model import Inputs, RankingConfig, per_candidate
from torch import nn

import jagged_modules as jm
from jagged_modules import functional as F

from .head import Head


class MixedLinear(nn.Module):
    """A linear layer of events [L, in], and one for each of a candidate's tokens [C, T, in]."""

    def __init__(self, num_in: int, num_out: int, num_tokens: int, device=None):
        super().__init__()
        self.shared = nn.Linear(num_in, num_out, device=device)
        self.weight = nn.Parameter(torch.empty(num_tokens, num_in, num_out, device=device))
        self.bias = nn.Parameter(torch.empty(num_tokens, num_out, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.bias)

    def forward(self, events: torch.Tensor, tokens: torch.Tensor):
        out = torch.einsum("cti,tio->cto", tokens, self.weight)
        return self.shared(events), out + self.bias.to(out.dtype)


class OneTransBlock(nn.Module):
    """Updates the last `num_updated` events of each history, and all tokens."""

    def __init__(self, config: RankingConfig, num_tokens: int, num_updated: int, device=None):
        super().__init__()
        dim, self.num_heads = config.embedding_dim, config.num_heads
        self.num_tokens, self.num_updated = num_tokens, num_updated
        self.norm1, self.norm2 = (nn.RMSNorm(dim, eps=1e-6, device=device) for _ in range(2))
        sizes = dict(qkv=(dim, 3 * dim), out=(dim, dim), up=(dim, 2 * dim), down=(2 * dim, dim))
        for name, (num_in, num_out) in sizes.items():
            self.add_module(name, MixedLinear(num_in, num_out, num_tokens, device))

    def forward(self, events: jm.Jagged, tokens: torch.Tensor, candidates: jm.CandidateIndex):
        updated, offsets = F.jagged_last(events.values, events.offsets, self.num_updated)
        qkv = self.qkv(self.norm1(events.values), self.norm1(tokens))
        of_events, of_tokens = self.attend(events, offsets, updated.shape[0], *qkv, candidates)
        updated, tokens = self.update(updated, tokens, of_events, of_tokens)
        return jm.Jagged(updated, offsets, self.num_updated), tokens

    def update(self, events, tokens, of_events, of_tokens):
        """Both after attention's results [..., E] and the feed-forward."""
        of_events, of_tokens = self.out(of_events, of_tokens.view_as(tokens))
        rows = events + of_events, tokens + of_tokens
        hidden = self.up(*(self.norm2(x) for x in rows))
        changes = self.down(*(x.relu() for x in hidden))
        return [x + change for x, change in zip(rows, changes, strict=True)]

    def attend(self, events, updated_offsets, num_rows, of_events, of_tokens, candidates):
        """Attention of the last events [num_rows, E] and of the tokens [C · T, E], from queries,
        keys and values [L, 3 E] and [C, T, 3 E]."""
        token_offsets = candidates.offsets * self.num_tokens
        rows, offsets = F.jagged_concat(
            [of_events, of_tokens.flatten(0, 1)], [events.offsets, token_offsets]
        )
        q, k, v = rows.unflatten(1, (3, self.num_heads, -1)).unbind(1)
        counts, lengths = token_offsets.diff(), updated_offsets.diff()
        q, q_offsets = F.jagged_last(q, offsets, lengths + counts)
        mask = jm.AttentionMask(causal=True, num_targets=counts, target_group_size=self.num_tokens)
        out = F.jagged_attention(q, k, v, q_offsets, offsets, mask=mask).flatten(1)
        (first, _), (rest, _) = F.jagged_split(out, q_offsets, lengths, total_first=num_rows)
        # lengths on a device are not known here: there are rows behind the last token
        return first, rest[: of_tokens.shape[:2].numel()]


class OneTrans(Head):
    num_tokens, num_layers = 4, 2
    block = OneTransBlock

    def __init__(self, config: RankingConfig, *features: int, device: torch.device | None = None):
        super().__init__(config, *features, num_vectors=self.num_tokens, device=device)
        dim, depth = config.embedding_dim, self.num_layers
        self.split = nn.Linear((1 + sum(features)) * dim, self.num_tokens * dim, device=device)
        self.blocks = nn.ModuleList(
            self.block(config, self.num_tokens, config.max_history * left // depth, device)
            for left in range(depth - 1, -1, -1)
        )
        self.norm = nn.RMSNorm(dim, eps=1e-6, device=device)

    def forward(self, x: Inputs) -> torch.Tensor:
        candidates = jm.CandidateIndex.from_offsets(x.item_offsets)
        events, targets = self.history(x), self.targets(x)
        of_user = per_candidate(x.users.flatten(1), x.item_offsets, targets.shape[0])
        tokens = self.split(torch.cat([of_user, targets, x.item_features.flatten(1)], dim=1))
        tokens = tokens.unflatten(1, (self.num_tokens, -1))
        for block in self.blocks:
            events, tokens = block(events, tokens, candidates)
        return self.over(self.norm(tokens).flatten(1))[:, 0]
