"""A DLRM-style ranking model whose interest stage is one of three exchangeable modules."""

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, JaggedTensor

from jagged_modules import JaggedTargetAttention
from ranking_data import RankingBatch, RankingDataset

INTERACTIONS = ("attention", "mean", "padded")


class MeanPooling(nn.Module):
    """The baseline without attention: every candidate gets the mean of its user's history, through value and output projections."""

    def __init__(self, embedding_dim: int, device: torch.device | None = None):
        super().__init__()
        self.value_projection = nn.Linear(embedding_dim, embedding_dim, device=device)
        self.output_projection = nn.Linear(embedding_dim, embedding_dim, device=device)

    def forward(self, targets: JaggedTensor, history: JaggedTensor) -> JaggedTensor:
        values, lengths = self.value_projection(history.values()), history.lengths()
        pooled = torch.segment_reduce(values, "mean", lengths=lengths.long(), axis=0, unsafe=True, initial=0)
        counts = targets.lengths()
        output = torch.repeat_interleave(self.output_projection(pooled), counts, dim=0, output_size=len(targets.values()))
        return JaggedTensor(values=output, lengths=counts)


class PaddedTargetAttention(nn.Module):
    """The usual way: pad the histories, repeat each once per candidate, mask the padding, call `nn.MultiheadAttention`."""

    def __init__(self, embedding_dim: int, num_heads: int, device: torch.device | None = None):
        super().__init__()
        self.attention = nn.MultiheadAttention(embedding_dim, num_heads, batch_first=True, device=device)

    def forward(self, targets: JaggedTensor, history: JaggedTensor) -> JaggedTensor:
        counts, lengths = targets.lengths(), history.lengths()
        # One column at least: softmax over none is undefined. A user without history gets 0, as from JaggedTargetAttention.
        longest = max(int(lengths.max()), 1)
        padded = history.to_padded_dense(longest).repeat_interleave(counts, dim=0)  # [C, longest, E]
        lengths = lengths.repeat_interleave(counts)[:, None]
        hidden = torch.arange(longest, device=lengths.device) >= lengths.clamp(min=1)
        output, _ = self.attention(targets.values()[:, None], padded, padded, key_padding_mask=hidden, need_weights=False)
        return JaggedTensor(values=output[:, 0] * (lengths > 0), lengths=counts)


def make_interest(interaction: str, embedding_dim: int, num_heads: int, device: torch.device | None = None) -> nn.Module:
    """What turns (targets, history), JaggedTensors of B rows with values [C, E] and [L, E], into a JaggedTensor of values [C, E]."""
    if interaction == "attention":
        return JaggedTargetAttention(embedding_dim, num_heads, device=device)
    if interaction == "mean":
        return MeanPooling(embedding_dim, device=device)
    if interaction == "padded":
        return PaddedTargetAttention(embedding_dim, num_heads, device=device)
    raise ValueError(f"interaction must be one of {INTERACTIONS}, not {interaction!r}")


class RankingModel(nn.Module):
    """Logits of the candidates of a RankingBatch."""

    def __init__(self, dataset: RankingDataset, interaction="attention", embedding_dim=64, num_heads=4, dropout=0.1, device=None,
                 mode="sum", user_id=True):
        super().__init__()
        log = dataset.log
        self.mode=mode
        tables = {
            "item": (log.num_items, ["history_item", "target_item"]),
            "rating": (dataset.num_ratings, ["history_rating"]),
            "age": (dataset.num_ages, ["history_age"]),
        }
        self.embeddings = EmbeddingCollection(
            [EmbeddingConfig(name=n, num_embeddings=s, embedding_dim=embedding_dim, feature_names=f) for n, (s, f) in tables.items()], device=device)
        uf = {k: f for k, f in dataset.user_features.items() if user_id or k != "user"}
        self.user_bags = _bags(uf, embedding_dim, device)
        self.item_bags = _bags(log.item_features, embedding_dim, device)
        D = embedding_dim
        for t in [*self.embeddings.parameters(), *self.user_bags.parameters(), *self.item_bags.parameters()]:
            nn.init.normal_(t, std=0.05)
        self.event = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)) if 'mlp' in mode else nn.Identity()
        self.norm = nn.LayerNorm(D) if 'norm' in mode else nn.Identity()
        self.tnorm = nn.LayerNorm(D) if 'norm' in mode else nn.Identity()
        self.interest = make_interest(interaction, D, num_heads)
        n = 2 + len(uf) + len(log.item_features)
        self.over = nn.Sequential(nn.Dropout(dropout), nn.Linear(2*D + n*(n-1)//2, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 1))
        self.n = n
        self.drop = nn.Dropout(dropout)
        self.itembias = nn.Embedding(log.num_items,1); nn.init.zeros_(self.itembias.weight)

    def forward(self, batch):
        e = self.embeddings(batch.ids)
        hist = e["history_item"]
        if 'prod' in self.mode:
            hv = hist.values() * (1+e["history_rating"].values()) + e["history_rating"].values() + e["history_age"].values()
        else:
            hv = hist.values() + e["history_rating"].values() + e["history_age"].values()
        if 'mlp' in self.mode: hv = hv + self.event(hv)
        hv = self.drop(self.norm(hv))
        history = JaggedTensor(values=hv, lengths=hist.lengths())
        t = e["target_item"]
        ib = self.item_bags(batch.items)
        tv = t.values()
        if 'side' in self.mode: tv = tv + ib.values().unflatten(-1,(len(ib.keys()),-1)).sum(1)
        tv = self.drop(self.tnorm(tv))
        targets = JaggedTensor(values=tv, lengths=t.lengths())
        i = self.interest(targets, history).values()
        D = i.shape[-1]
        u = self.user_bags(batch.users).values().unflatten(-1, (-1, D)).repeat_interleave(t.lengths(), 0)
        f = torch.cat([tv[:, None], i[:, None], u, ib.values().unflatten(-1, (-1, D))], 1)
        f = self.drop(f)
        dots = torch.einsum("bnd,bmd->bnm", f, f)
        r, c = torch.triu_indices(self.n, self.n, 1)
        x = torch.cat([tv, i, dots[:, r, c]], -1)
        return self.over(x)[:, 0]


def _bags(features, embedding_dim, device):
    return EmbeddingBagCollection([EmbeddingBagConfig(name=f"t_{n}", num_embeddings=f.cardinality, embedding_dim=embedding_dim, feature_names=[n]) for n, f in features.items()], device=device)
