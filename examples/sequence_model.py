"""Next-item models: TorchRec embeddings, causal encoders of jagged sequences, losses over sampled
items."""

from functools import partial
from typing import NamedTuple

import torch
from sequence_data import NUM_INTERVALS, SequenceBatch
from torch import nn
from torch.nn import functional
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor

import jagged_modules as jm

ENCODERS = ("hstu", "sasrec")
SCORES = ("cosine", "dot")


class SASRecBlock(nn.Module):
    """A transformer block of SASRec (Kang and McAuley 2018): causal softmax attention, then a
    feed-forward, each after a layer norm."""

    def __init__(
        self, embedding_dim: int, num_heads: int, dropout: float, device: torch.device | None = None
    ):
        super().__init__()
        mask, config = jm.AttentionMask(causal=True), jm.GDPAConfig(dropout=dropout)
        self.attention_norm, self.feed_forward_norm = (
            nn.LayerNorm(embedding_dim, device=device) for _ in range(2)
        )
        self.attention = jm.JaggedGDPA(
            embedding_dim, num_heads, activation="softmax", mask=mask, config=config, device=device
        )
        self.feed_forward = nn.Sequential(
            nn.Linear(embedding_dim, embedding_dim, device=device),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(embedding_dim, embedding_dim, device=device),
            nn.Dropout(dropout),
        )

    def forward(self, x: JaggedTensor) -> JaggedTensor:
        rows, lengths = x.values(), x.lengths()
        rows = (
            rows
            + self.attention(
                JaggedTensor(values=self.attention_norm(rows), lengths=lengths)
            ).values()
        )
        return JaggedTensor(
            values=rows + self.feed_forward(self.feed_forward_norm(rows)), lengths=lengths
        )


def make_encoder(
    name: str,
    embedding_dim: int,
    num_heads: int,
    num_layers: int,
    dropout: float,
    max_history: int,
    relative_position: bool = False,
    relative_time: int = 0,
    device: torch.device | None = None,
) -> nn.Module:
    """A causal encoder: a module from a JaggedTensor with values [L, E] to another. A row depends
    on itself and earlier rows only.

    With relative_time, it also takes `timestamps` and `query_timestamps` [L], and a row depends on
    its query timestamp too.
    """
    if name == "hstu":
        bias = dict(
            relative_position=max_history if relative_position else 0, relative_time=relative_time
        )
        config = jm.HSTUConfig(dropout=dropout, scaling_seqlen=max_history, **bias)
        return jm.HSTUStack(embedding_dim, num_heads, num_layers, config, device=device)
    if relative_position or relative_time:
        raise ValueError(
            f"only the encoder 'hstu' has relative_position and relative_time, not {name!r}"
        )
    if name == "sasrec":
        return nn.Sequential(
            *(SASRecBlock(embedding_dim, num_heads, dropout, device) for _ in range(num_layers))
        )
    raise ValueError(f"encoder must be one of {ENCODERS}, not {name!r}")


class Vectors(NamedTuple):
    """Queries and items. The score of an item is its dot product with a query.

    Args:
        queries: [L, E], one for each input.
        targets: [L, E], the item that follows each input; for `make_logits` also [K, L, E].
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
        scores: one of `SCORES`. "cosine": queries and items have norm 1.
        intervals: whether the batches have the key `interval`, whose embeddings are added to the
            inputs.
        relative_position: whether the encoder hstu learns biases by relative position.
        relative_time: number of boundaries between buckets of time differences, by which the
            encoder hstu learns biases; 0: none. The batches then have timestamps.
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
        scores: str = "cosine",
        intervals: bool = False,
        relative_position: bool = False,
        relative_time: int = 0,
        device: torch.device | None = None,
    ):
        super().__init__()
        if scores not in SCORES:
            raise ValueError(f"scores must be one of {SCORES}, not {scores!r}")
        # table: rows, features
        tables = {
            "item": (num_items, ["item", "target", "rival"]),
            "position": (max_history, ["position"]),
        }
        if intervals:
            tables["interval"] = (NUM_INTERVALS, ["interval"])
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
        layers = make_encoder(
            encoder,
            embedding_dim,
            num_heads,
            num_layers,
            dropout,
            max_history,
            relative_position,
            relative_time,
            device,
        )
        added = ("position", "interval") if intervals else ("position",)
        self.encoder = QueryEncoder(
            layers, added, embedding_dim, dropout, scores == "cosine", relative_time > 0, device
        )

    def tables(self) -> list[nn.Parameter]:
        return list(self.embeddings.parameters())

    def forward(self, batch: SequenceBatch) -> Vectors:
        # Only lookups: TorchRec's pipelines trace this method to find the inputs of the collection.
        return self.encoder(self.embeddings(batch.ids), batch.timestamps, batch.next_timestamps)


class QueryEncoder(nn.Module):
    """The dense part of the model. The encoder turns the sums of an input's embeddings into
    queries.

    Args:
        encoder: a causal encoder.
        added: the features whose embeddings are added to those of the items.
        embedding_dim, dropout: width of the embeddings, and dropout probability of their sums.
        unit_norm: whether queries and items are divided by their norms.
        timed: whether the encoder takes timestamps.
    """

    def __init__(
        self,
        encoder: nn.Module,
        added: tuple[str, ...],
        embedding_dim: int,
        dropout: float,
        unit_norm: bool,
        timed: bool = False,
        device: torch.device | None = None,
    ):
        super().__init__()
        self.encoder, self.added, self.dropout, self.unit_norm, self.timed = (
            encoder,
            added,
            nn.Dropout(dropout),
            unit_norm,
            timed,
        )
        self.norm = nn.LayerNorm(embedding_dim, device=device)

    def forward(
        self,
        embedded: dict[str, JaggedTensor],
        timestamps: torch.Tensor | None = None,
        next_timestamps: torch.Tensor | None = None,
    ) -> Vectors:
        """The vectors of a batch. As in HSTU's published protocol, an input knows the time of the
        event that is predicted from it."""
        times = dict(timestamps=timestamps, query_timestamps=next_timestamps) if self.timed else {}
        encoded = self.encoder(
            JaggedTensor(values=self.inputs(embedded), lengths=embedded["item"].lengths()), **times
        )
        return self.vectors(encoded.values(), embedded)

    def inputs(self, embedded: dict[str, JaggedTensor]) -> torch.Tensor:
        """The encoder's input rows [L, E]."""
        item = embedded["item"].values()
        rows = item * item.shape[1] ** 0.5
        for name in self.added:
            rows = rows + embedded[name].values()
        return self.dropout(rows)

    def vectors(self, encoded: torch.Tensor, embedded: dict[str, JaggedTensor]) -> Vectors:
        """The vectors of a batch, or of any rows that the encoder returned."""
        vectors = Vectors(
            self.norm(encoded), embedded["target"].values(), embedded["rival"].values()
        )
        return (
            Vectors(*(functional.normalize(x, dim=1) for x in vectors))
            if self.unit_norm
            else vectors
        )


class Logits(NamedTuple):
    """Scores divided by a temperature, fp32.

    Args:
        target: [L] or [K, L], of each input's targets.
        rivals: [L, N], of the rivals; -inf where a rival is the next item itself.
    """

    target: torch.Tensor
    rivals: torch.Tensor


def make_logits(
    vectors: Vectors, targets: torch.Tensor, rivals: torch.Tensor, temperature: float
) -> Logits:
    """The logits of the items that the losses compare.

    Args:
        targets, rivals: int64 [L] and [N], the items of `vectors.targets` and `vectors.rivals`.
    """
    target = (vectors.queries * vectors.targets).sum(dim=-1).float() / temperature
    others = (vectors.queries @ vectors.rivals.T).float() / temperature
    return Logits(target, others.masked_fill(targets[:, None] == rivals, -torch.inf))


def sampled_softmax(logits: Logits) -> torch.Tensor:
    """Cross-entropies of the softmax over each target and the rivals, of the shape of the targets:
    log(1 + sum exp(rival - target))."""
    return functional.softplus(logits.rivals.logsumexp(dim=1) - logits.target)


def later_targets(targets: torch.Tensor, number: int) -> torch.Tensor:
    """The targets of each input and of the `number` rows after it, [1 + number, *targets.shape]."""
    return torch.stack([targets.roll(-k, dims=0) for k in range(number + 1)])


def generalised_bce(logits: Logits, num_items: int, calibration: float) -> torch.Tensor:
    """The losses gBCE of Petrov and Macdonald (RecSys 2023, arXiv:2308.07192), the mean over
    each target and the rivals of

        -log(sigmoid(target) ^ beta)  and  -log(1 - sigmoid(rival)),  beta = alpha (calibration (1 -
        1 / alpha) + 1 / alpha)

    where alpha = N / (num_items - 1) is the sampling rate. A calibration of 0 gives the plain
    binary cross-entropy, because beta = 1.
    """
    num_rivals = logits.rivals.shape[1]
    # rivals are drawn with replacement, so there may be more than items
    alpha = min(num_rivals / max(num_items - 1, 1), 1.0)
    beta = alpha * (calibration * (1 - 1 / alpha) + 1 / alpha)
    return (
        beta * functional.softplus(-logits.target) + functional.softplus(logits.rivals).sum(dim=1)
    ) / (num_rivals + 1)
