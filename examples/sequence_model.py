"""Next-item models: TorchRec embeddings, causal encoders of jagged sequences, sampled softmax."""

from functools import partial
from typing import NamedTuple

import torch
from sequence_data import SequenceBatch
from torch import nn
from torch.nn import functional
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor

import jagged_modules as jm

ENCODERS = ("hstu", "sasrec")


class SASRecBlock(nn.Module):
    """A transformer block of SASRec (Kang and McAuley 2018): causal softmax attention, then a feed-forward, each after a layer norm."""

    def __init__(self, embedding_dim: int, num_heads: int, dropout: float, device: torch.device | None = None):
        super().__init__()
        mask, config = jm.AttentionMask(causal=True), jm.GDPAConfig(dropout=dropout)
        self.attention_norm, self.feed_forward_norm = (nn.LayerNorm(embedding_dim, device=device) for _ in range(2))
        self.attention = jm.JaggedGDPA(embedding_dim, num_heads, activation="softmax", mask=mask, config=config, device=device)
        self.feed_forward = nn.Sequential(
            nn.Linear(embedding_dim, embedding_dim, device=device),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(embedding_dim, embedding_dim, device=device),
            nn.Dropout(dropout),
        )

    def forward(self, x: JaggedTensor) -> JaggedTensor:
        rows, lengths = x.values(), x.lengths()
        rows = rows + self.attention(JaggedTensor(values=self.attention_norm(rows), lengths=lengths)).values()
        return JaggedTensor(values=rows + self.feed_forward(self.feed_forward_norm(rows)), lengths=lengths)


def make_encoder(
    name: str,
    embedding_dim: int,
    num_heads: int,
    num_layers: int,
    dropout: float,
    max_history: int,
    device: torch.device | None = None,
) -> nn.Module:
    """A causal encoder: a module from a JaggedTensor with values [L, E] to another. A row depends on itself and earlier rows only."""
    if name == "hstu":
        config = jm.HSTUConfig(dropout=dropout, scaling_seqlen=max_history)
        return jm.HSTUStack(embedding_dim, num_heads, num_layers, config, device=device)
    if name == "sasrec":
        return nn.Sequential(*(SASRecBlock(embedding_dim, num_heads, dropout, device) for _ in range(num_layers)))
    raise ValueError(f"encoder must be one of {ENCODERS}, not {name!r}")


class Vectors(NamedTuple):
    """Vectors of norm 1; a score is the cosine of a query and an item.

    Args:
        queries: [L, E], one for each input.
        targets: [L, E], the item that follows each input.
        rivals: [N, E], the items that all targets compete with.
    """

    queries: torch.Tensor
    targets: torch.Tensor
    rivals: torch.Tensor


class SequenceModel(nn.Module):
    """Queries for a user's next item: embeddings, then a `QueryEncoder`.

    Args:
        num_items: number of items.
        encoder: one of `ENCODERS`.
        embedding_dim, num_heads, num_layers, dropout: sizes and dropout probability of the encoder.
        max_history: maximum number of inputs in a sequence.
        device: device of the parameters; `torch.device("meta")` for DistributedModelParallel.
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
        device: torch.device | None = None,
    ):
        super().__init__()
        tables = {"item": (num_items, ["item", "target", "rival"]), "position": (max_history, ["position"])}  # table: rows, features
        configs = [
            EmbeddingConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=embedding_dim,
                feature_names=features,
                init_fn=partial(nn.init.normal_, std=0.02),
            )
            for name, (rows, features) in tables.items()
        ]
        self.embeddings = EmbeddingCollection(configs, device=device)
        self.encoder = QueryEncoder(make_encoder(encoder, embedding_dim, num_heads, num_layers, dropout, max_history, device), dropout)

    def tables(self) -> list[nn.Parameter]:
        return list(self.embeddings.parameters())

    def forward(self, batch: SequenceBatch) -> Vectors:
        # Only lookups: TorchRec's pipelines trace this method to find the inputs of the collection.
        return self.encoder(self.embeddings(batch.ids))


class QueryEncoder(nn.Module):
    """The dense part of the model. The encoder turns the sums of an item's and its position's embedding into queries."""

    def __init__(self, encoder: nn.Module, dropout: float):
        super().__init__()
        self.encoder, self.dropout = encoder, nn.Dropout(dropout)

    def forward(self, embedded: dict[str, JaggedTensor]) -> Vectors:
        item = embedded["item"]
        rows = item.values() * item.values().shape[1] ** 0.5 + embedded["position"].values()
        encoded = self.encoder(JaggedTensor(values=self.dropout(rows), lengths=item.lengths()))
        vectors = encoded.values(), embedded["target"].values(), embedded["rival"].values()
        return Vectors(*(functional.normalize(x, dim=1) for x in vectors))


def sampled_softmax(vectors: Vectors, targets: torch.Tensor, rivals: torch.Tensor, temperature: float) -> torch.Tensor:
    """Cross-entropies [L] of each input's target against the rivals other than the target, of the cosines divided by the temperature.

    Args:
        targets, rivals: int64 [L] and [N], the items of `vectors.targets` and `vectors.rivals`.
    """
    positive = (vectors.queries * vectors.targets).sum(dim=1, keepdim=True)
    negative = (vectors.queries @ vectors.rivals.T).masked_fill(targets[:, None] == rivals, -torch.inf)
    logits = torch.cat([positive, negative], dim=1).float() / temperature
    return functional.cross_entropy(logits, torch.zeros_like(targets), reduction="none")
