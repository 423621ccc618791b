"""Next-item models: TorchRec embeddings, causal encoders of jagged sequences, sampled softmax and full ranking."""

import torch
from torch import nn
from torch.nn import functional
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

import jagged_modules as jm

ENCODERS = ("hstu", "sasrec")


class SASRecBlock(nn.Module):
    """A transformer block of SASRec (Kang and McAuley 2018): causal softmax attention, then a feed-forward, each after a layer norm."""

    def __init__(self, embedding_dim: int, num_heads: int, dropout: float):
        super().__init__()
        mask, config = jm.AttentionMask(causal=True), jm.GDPAConfig(dropout=dropout)
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(embedding_dim), nn.LayerNorm(embedding_dim)
        self.attention = jm.JaggedGDPA(embedding_dim, num_heads, activation="softmax", mask=mask, config=config)
        self.feed_forward = nn.Sequential(
            nn.Linear(embedding_dim, embedding_dim),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(embedding_dim, embedding_dim),
            nn.Dropout(dropout),
        )

    def forward(self, x: JaggedTensor) -> JaggedTensor:
        rows, lengths = x.values(), x.lengths()
        rows = rows + self.attention(JaggedTensor(values=self.attention_norm(rows), lengths=lengths)).values()
        return JaggedTensor(values=rows + self.feed_forward(self.feed_forward_norm(rows)), lengths=lengths)


def make_encoder(name: str, embedding_dim: int, num_heads: int, num_layers: int, dropout: float, max_history: int) -> nn.Module:
    """A causal encoder: a module from a JaggedTensor with values [L, E] to another. A row depends on itself and earlier rows only."""
    if name == "hstu":
        return jm.HSTUStack(embedding_dim, num_heads, num_layers, jm.HSTUConfig(dropout=dropout, scaling_seqlen=max_history))
    if name == "sasrec":
        return nn.Sequential(*(SASRecBlock(embedding_dim, num_heads, dropout) for _ in range(num_layers)))
    raise ValueError(f"encoder must be one of {ENCODERS}, not {name!r}")


class SequenceModel(nn.Module):
    """Scores items as a user's next item.

    An input is the sum of its item's and its position's embedding. The encoder turns it into a query. A score is the cosine of a query and
    an item's embedding, divided by the temperature in the loss.

    Args:
        num_items: number of items.
        encoder: one of `ENCODERS`.
        embedding_dim, num_heads, num_layers, dropout: sizes and dropout probability of the encoder.
        max_history: maximum number of inputs in a sequence.
        temperature: divisor of the cosines in the loss.
    """

    def __init__(
        self,
        num_items: int,
        encoder: str,
        embedding_dim: int = 64,
        num_heads: int = 2,
        num_layers: int = 2,
        dropout: float = 0.2,
        max_history: int = 200,
        temperature: float = 0.15,
    ):
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, not {temperature}")
        self.num_items, self.temperature = num_items, temperature
        tables = {"item": num_items, "position": max_history}
        self.embeddings = EmbeddingCollection(
            [
                EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=embedding_dim, feature_names=[name])
                for name, rows in tables.items()
            ]
        )
        for table in self.tables():
            nn.init.normal_(table, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.encoder = make_encoder(encoder, embedding_dim, num_heads, num_layers, dropout, max_history)

    def tables(self) -> list[nn.Parameter]:
        return list(self.embeddings.parameters())

    def forward(self, ids: KeyedJaggedTensor) -> JaggedTensor:
        """A query of norm 1 for each input: values [L, E]."""
        embedded = self.embeddings(ids)
        items = embedded["item"].values()
        rows = items * items.shape[1] ** 0.5 + embedded["position"].values()
        encoded = self.encoder(JaggedTensor(values=self.dropout(rows), lengths=embedded["item"].lengths()))
        return JaggedTensor(values=functional.normalize(encoded.values(), dim=1), lengths=encoded.lengths())

    def vectors(self, items: torch.Tensor) -> torch.Tensor:
        """Normalised embeddings [..., E] of `items` [...]."""
        return functional.normalize(functional.embedding(items, self.embeddings.embeddings["item"].weight), dim=-1)

    def loss(self, ids: KeyedJaggedTensor, targets: torch.Tensor, num_negatives: int) -> torch.Tensor:
        """Sampled softmax: the mean cross-entropy of each input's target against `num_negatives` items, sampled uniformly per batch."""
        queries = self(ids).values()
        negatives = torch.randint(self.num_items, (num_negatives,), device=targets.device)
        positive = (queries * self.vectors(targets)).sum(dim=1, keepdim=True)
        negative = (queries @ self.vectors(negatives).T).masked_fill(targets[:, None] == negatives, -torch.inf)
        logits = torch.cat([positive, negative], dim=1).float() / self.temperature
        return functional.cross_entropy(logits, torch.zeros_like(targets))

    def scores(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Cosines [B, num_items] of all items with the query of each sequence's last input."""
        queries = self(ids)
        last = queries.values()[queries.offsets()[1:].long() - 1]
        return last @ self.vectors(torch.arange(self.num_items, device=last.device)).T
