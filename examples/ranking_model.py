"""A DLRM-style ranking model in TorchRec that uses each layer of jagged_modules where it belongs.

    user features ──────────────────────────────┐
    stream of events ── stream: block attention, ┴─ user's vectors ─┬─────────────┐
                        pooled by learned queries                   │             │
    history of events ── gdpa: self-attention ── interformer ───────┴─ history    ├─ compress ── ...
                                                                       │          │
    candidates ─────────────────────────── interaction: target attention ─────────┘

    ... ── dot products, MLP ── logit

Each part can be left out; see `PARTS` and `INTERACTIONS`. Nothing of a user is repeated per
candidate, unless `compress` is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from ranking_data import RankingBatch, TableSizes
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedTensor,
)

import jagged_modules as jm

INTERACTIONS = ("attention", "mean", "padded")
PARTS = {
    "stream": (
        "BlockDiagonalSelfAttention over the user's long stream of events, which learned queries"
        " pool to a few user vectors"
    ),
    "gdpa": "GDPABlock, GELU self-attention of the events of the history",
    "interformer": (
        "JaggedInterFormer: the history and the user's vectors update one another, by a"
        " personalised feed-forward, self-attention, and summaries of both"
    ),
    "compress": (
        "LinearCompressEmbedding of the vectors of users and candidates; without it, users' vectors"
        " are repeated per candidate"
    ),
}


@dataclass(frozen=True)
class RankingConfig:
    """Options of the ranking model.

    Args:
        interaction: how a candidate uses its user's history, one of `INTERACTIONS`.
        parts: the parts of the model, of `PARTS`.
        kunlun: whether JaggedKunlun takes the place of JaggedInterFormer in its part.
        embedding_dim: width E of all vectors, a multiple of 2 · num_heads.
        num_heads: attention heads.
        num_layers: blocks of GDPA, one after another.
        dropout: dropout probability of events, vectors and the MLP's hidden layer.
        block_size: events of the stream that attend to one another: 16, 32, 64 or 128.
        num_seeds: vectors that the stream is pooled to.
        num_compressed: vectors that those of a user and a candidate are compressed to.
        max_history, max_stream, max_candidates: maximum numbers of events in a history and a
            stream, and of candidates of a user; max_candidates may be None for any number.
    """

    interaction: str = "attention"
    parts: Sequence[str] = tuple(PARTS)
    kunlun: bool = False
    embedding_dim: int = 64
    num_heads: int = 4
    num_layers: int = 1
    dropout: float = 0.3
    block_size: int = 64
    num_seeds: int = 4
    num_compressed: int = 8
    max_history: int = 200
    max_stream: int = 1000
    max_candidates: int | None = 8

    def __post_init__(self) -> None:
        if self.interaction not in INTERACTIONS:
            raise ValueError(f"interaction must be one of {INTERACTIONS}, not {self.interaction!r}")
        if unknown := set(self.parts) - set(PARTS):
            raise ValueError(f"parts must be of {tuple(PARTS)}, not {sorted(unknown)}")


class Inputs(NamedTuple):
    """The embeddings that the model computes with. B users have L events in their histories, S in
    their streams, and C candidates.

    longest: in place of `RankingConfig.max_history`, a bound of the histories in this batch.
    """

    history: torch.Tensor  # [L, E]
    history_offsets: torch.Tensor  # [B + 1]
    stream: torch.Tensor | None  # [S, E]
    stream_offsets: torch.Tensor | None  # [B + 1]
    items: torch.Tensor  # [C, E]
    item_features: torch.Tensor  # [C, features, E]
    item_offsets: torch.Tensor  # [B + 1]
    users: torch.Tensor  # [B, features, E]
    longest: int | None = None

    def to(self, dtype: torch.dtype) -> "Inputs":
        """With embeddings of this dtype."""
        return Inputs(
            *(
                x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                for x in self
            )
        )


class RankingModel(nn.Module):
    """Predicts the log-odds that the user likes the candidate: lookups, then a `RankingHead`.

    Histories, streams and candidates share one table of items. Histories and streams share a table
    of ratings. Side features are bags.

    Args:
        tables: sizes of the tables, and names of the side features.
        config: options; `RankingConfig()` if None.
        layers: implementation of the layers; `JAGGED` if None.
        device: device of the parameters; `torch.device("meta")` for DistributedModelParallel.
        head: makes the dense part, as those of models/; a `RankingHead` of the layers if None.
    """

    def __init__(
        self,
        tables: TableSizes,
        config: RankingConfig | None = None,
        layers: "Layers | None" = None,
        device: torch.device | None = None,
        head: Callable[..., nn.Module] | None = None,
    ):
        super().__init__()
        config = RankingConfig() if config is None else config
        stream = "stream" in config.parts
        sequences = {  # table: rows, features
            "item": (tables.items, ["history_item", "target_item", *["stream_item"] * stream]),
            "rating": (tables.ratings, ["history_rating", *["stream_rating"] * stream]),
            "age": (tables.ages, ["history_age"]),
        }
        configs = [
            EmbeddingConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=config.embedding_dim,
                feature_names=features,
                init_fn=init_table,
            )
            for name, (rows, features) in sequences.items()
        ]
        self.sequences = EmbeddingCollection(configs, device=device)
        self.user_bags = embedding_bags(tables.user_features, config.embedding_dim, device)
        self.item_bags = embedding_bags(tables.item_features, config.embedding_dim, device)
        self.unpack = Unpack(list(tables.user_features), list(tables.item_features), stream)
        features = len(tables.user_features), len(tables.item_features)
        make_head = partial(RankingHead, layers=layers) if head is None else head
        self.head = make_head(config, *features, device=device)

    def tables(self) -> list[nn.Parameter]:
        return [
            table
            for collection in (self.sequences, self.user_bags, self.item_bags)
            for table in collection.parameters()
        ]

    def forward(self, batch: RankingBatch) -> torch.Tensor:
        """Logits [C] of the batch's candidates, in the order of the rows."""
        # Only lookups: TorchRec's pipelines trace this method to find the inputs of the
        # collections.
        sequences = self.sequences(batch.ids)
        return self.head(
            self.unpack(sequences, self.user_bags(batch.users), self.item_bags(batch.items))
        )


class Unpack(nn.Module):
    """Turns the results of the collections into `Inputs`. Features are taken by name: a sharded
    collection returns its plan's order."""

    def __init__(self, user_features: list[str], item_features: list[str], stream: bool):
        super().__init__()
        self.user_features, self.item_features, self.stream = user_features, item_features, stream

    def forward(
        self, sequences: dict[str, JaggedTensor], user_bags: KeyedTensor, item_bags: KeyedTensor
    ) -> Inputs:
        """The item bags are those of the events of the histories, then of the candidates [L +
        C]."""
        past, targets = sequences["history_item"], sequences["target_item"]
        sides = stack_bags(item_bags, self.item_features)
        num_past, num_targets = past.values().shape[0], targets.values().shape[0]
        # without any item, there is a row without ids
        past_sides, sides = sides[:num_past], sides[num_past : num_past + num_targets]
        stream, stream_offsets = None, None
        if self.stream:
            events = sequences["stream_item"]
            stream = events.values() + sequences["stream_rating"].values()
            stream_offsets = events.offsets()
        return Inputs(
            history=past.values()
            + past_sides.sum(dim=1)
            + sequences["history_rating"].values()
            + sequences["history_age"].values(),
            history_offsets=past.offsets(),
            stream=stream,
            stream_offsets=stream_offsets,
            items=targets.values() + sides.sum(dim=1),
            item_features=sides,
            item_offsets=targets.offsets(),
            users=stack_bags(user_bags, self.user_features),
        )


class RankingHead(nn.Module):
    """The dense part of the ranking model. See the picture at the top of this file.

    The last step is an MLP of the candidate, its interaction's result, and the dot products of all
    pairs of vectors.

    Args:
        config: options.
        num_user_features, num_item_features: numbers of side features.
        layers, device: as in `RankingModel`.
    """

    def __init__(
        self,
        config: RankingConfig,
        num_user_features: int,
        num_item_features: int,
        layers: "Layers | None" = None,
        device: torch.device | None = None,
    ):
        super().__init__()
        layers = JAGGED if layers is None else layers
        self.config, self.sequence = config, layers.sequence
        dim, heads, parts = config.embedding_dim, config.num_heads, config.parts
        # vectors of a user and of a candidate
        num_users, num_candidates = num_user_features, 2 + num_item_features

        self.dropout = nn.Dropout(config.dropout)
        self.events, self.item_norm = EventTokens(dim, device), nn.LayerNorm(dim, device=device)
        self.stream = self.gdpa = self.interformer = self.compress = None
        if "stream" in parts:
            self.stream_events, self.stream = (
                EventTokens(dim, device),
                layers.stream(config, device),
            )
            num_users += config.num_seeds
        if "gdpa" in parts:
            # GELU weights do not sum to 1, so sums over a history are divided by its maximum
            # length.
            gelu = jm.GDPAConfig(qk_norm=True, output_scale=1 / config.max_history)
            blocks = [
                layers.gdpa(dim, heads, "gelu_tanh", config=gelu, device=device)
                for _ in range(config.num_layers)
            ]
            self.gdpa = blocks[0] if len(blocks) == 1 else nn.Sequential(*blocks)
        if "interformer" in parts:
            if config.kunlun and layers is not JAGGED:
                raise ValueError("kunlun must be False with other layers than JAGGED, not True")
            make = jm.JaggedKunlun if config.kunlun else layers.interformer
            self.interformer = make(dim, heads, num_users, device=device)
        self.interaction = layers.interaction(config.interaction, dim, heads, device=device)
        num_vectors = num_users + num_candidates
        if "compress" in parts:
            self.compress = layers.compress(
                num_candidates, config.num_compressed, num_users, device=device
            )
            num_vectors = config.num_compressed
        self.over = nn.Sequential(
            nn.Linear(2 * dim + num_vectors**2, 64, device=device),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(64, 1, device=device),
        )

    def forward(self, x: Inputs) -> torch.Tensor:
        """Logits [C]."""
        history, users = self.encode(x)
        targets = self.targets(x)
        return self.logits(x, users, targets.values, self.interaction(targets, history).values)

    def encode(self, x: Inputs) -> tuple[Any, torch.Tensor]:
        """What depends on the users alone: the histories, with values [L, E], and the users'
        vectors [B, K, E]."""
        config, users = self.config, x.users
        if self.stream is not None:
            stream = self.dropout(self.stream_events(x.stream))
            summary = self.stream(self.sequence(stream, x.stream_offsets, config.max_stream))
            users = torch.cat([users, summary], dim=1)  # [B, user vectors, E]

        longest = config.max_history if x.longest is None else x.longest
        history = self.sequence(self.dropout(self.events(x.history)), x.history_offsets, longest)
        if self.gdpa is not None:
            history = self.gdpa(history)
        if self.interformer is not None:
            history, users = self.interformer(history, users)
        return history, users

    def targets(self, x: Inputs) -> jm.Jagged:
        """The queries of the interaction, with values [C, E]."""
        return jm.Jagged(
            self.dropout(self.item_norm(x.items)), x.item_offsets, self.config.max_candidates
        )

    def logits(
        self, x: Inputs, users: torch.Tensor, items: torch.Tensor, interest: torch.Tensor
    ) -> torch.Tensor:
        """Logits [C] from the users' vectors [B, K, E], and from the targets and the interaction's
        results, both [C, E]."""
        users = self.dropout(users)
        candidates = self.dropout(
            torch.cat([items[:, None], interest[:, None], x.item_features], dim=1)
        )
        if self.compress is not None:
            vectors = self.compress(
                candidates, users, jm.CandidateIndex.from_offsets(x.item_offsets)
            )
        else:
            vectors = torch.cat(
                [candidates, per_candidate(users, x.item_offsets, candidates.shape[0])], dim=1
            )
        products = (vectors @ vectors.mT).flatten(1)
        return self.over(
            torch.cat([items, interest, products], dim=1).to(self.over[0].weight.dtype)
        )[:, 0]


# -- parts -----------------------------------------------------------------------------------------


class EventTokens(nn.Module):
    """norm(x + MLP(x)) of the sums x [N, E] of events' embeddings. The MLP can encode "liked such
    an item", so a mean of tokens can too."""

    def __init__(self, embedding_dim: int, device: torch.device | None = None):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(embedding_dim, embedding_dim, device=device),
            nn.ReLU(),
            nn.Linear(embedding_dim, embedding_dim, device=device),
        )
        self.norm = nn.LayerNorm(embedding_dim, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.mlp(x))


class StreamEncoder(nn.Module):
    """Summarises a user's long stream of events in a few vectors [B, num_seeds, E], in time that is
    linear in its length.

    Each event attends to those of its block. Then learned queries attend to all events (PMA).
    """

    def __init__(self, config: RankingConfig, device: torch.device | None = None):
        super().__init__()
        dim, heads = config.embedding_dim, config.num_heads
        self.norm = nn.RMSNorm(dim, device=device)
        self.attention = jm.BlockDiagonalSelfAttention(
            dim, heads, config.block_size, device=device, max_seqlen=config.max_stream
        )
        self.pool = jm.JaggedGDPA(
            dim, heads, "softmax", config=jm.GDPAConfig(num_seeds=config.num_seeds), device=device
        )

    def forward(self, stream: jm.Jagged) -> torch.Tensor:
        update = self.attention(stream.with_values(self.norm(stream.values)))
        return self.pool(stream.with_values(stream.values + update.values))


# -- interactions of a candidate with its user's history -------------------------------------------


def make_interaction(
    name: str, embedding_dim: int, num_heads: int, device: torch.device | None = None
) -> nn.Module:
    """A module from (targets, history), containers of B rows with values [C, E] and [L, E], to the
    targets' container of values [C, E]."""
    if name == "attention":
        return jm.JaggedTargetAttention(embedding_dim, num_heads, device=device)
    if name == "mean":
        return MeanPooling(embedding_dim, device=device)
    if name == "padded":
        return PaddedTargetAttention(embedding_dim, num_heads, device=device)
    raise ValueError(f"interaction must be one of {INTERACTIONS}, not {name!r}")


class MeanPooling(nn.Module):
    """The baseline without attention: each candidate gets the mean of its user's history, after a
    value and an output projection."""

    def __init__(self, embedding_dim: int, device: torch.device | None = None):
        super().__init__()
        self.v_proj = nn.Linear(embedding_dim, embedding_dim, device=device)
        self.out_proj = nn.Linear(embedding_dim, embedding_dim, device=device)

    def forward(self, targets: Any, history: Any) -> Any:
        targets, history = jm.Jagged.wrap(targets), jm.Jagged.wrap(history)
        values, lengths = self.v_proj(history.values), history.offsets.diff().long()
        means = torch.segment_reduce(
            values, "mean", lengths=lengths, axis=0, unsafe=True, initial=0
        )
        return targets.unwrap(
            per_candidate(self.out_proj(means), targets.offsets, targets.values.shape[0])
        )


class PaddedTargetAttention(nn.Module):
    """The usual implementation: pad the histories, repeat each once per candidate, mask the
    padding, call `nn.MultiheadAttention`.

    pads_to_bound: whether histories are padded to their `max_seqlen`, not to the longest one, which
        would have to be read from the device.
    """

    def __init__(self, embedding_dim: int, num_heads: int, device: torch.device | None = None):
        super().__init__()
        self.attention = AttentionToPadded(
            embedding_dim, num_heads, batch_first=True, device=device
        )
        self.pads_to_bound, self._fused = False, None

    def fuse_broadcasts(self) -> None:
        """Projects each history once, and never repeats it, from now on. For inference: call it in
        eval mode, on the final device."""
        weight, auto = self.attention.in_proj_weight, torch.export.Dim.AUTO
        histories = torch.randn(16, 64, weight.shape[1]).to(weight)
        lengths = torch.arange(16, device=weight.device)[:, None]
        fused = jm.transforms.fuse_broadcasts(
            self.attention,
            dict(targets=histories[:, 0], histories=histories, lengths=lengths),
            request_only=("histories", "lengths"),
            max_batch=(16, 1024),
            dynamic_shapes=dict(targets={0: auto}, histories={0: auto, 1: auto}, lengths={0: auto}),
        )
        vars(self)["_fused"] = fused  # no submodule: it has the parameters of `attention`

    def forward(self, targets: Any, history: Any) -> Any:
        targets, history = jm.Jagged.wrap(targets), jm.Jagged.wrap(history)
        lengths = history.offsets.diff()[:, None]
        longest = history.max_seqlen if self.pads_to_bound else max([1, *lengths[:, 0].tolist()])
        padded = jm.functional.jagged_to_padded(history.values, history.offsets, longest)
        num_candidates = targets.values.shape[0]
        if self._fused is None:
            padded, lengths = (
                per_candidate(rows, targets.offsets, num_candidates) for rows in (padded, lengths)
            )
            return targets.unwrap(self.attention(targets.values, padded, lengths))
        users = per_candidate(
            torch.arange(len(padded), device=padded.device), targets.offsets, num_candidates
        )
        return targets.unwrap(self._fused(targets.values, padded, lengths, candidate_to_user=users))


class AttentionToPadded(nn.MultiheadAttention):
    """Each target [C, E] attends to the first rows of its padded history [C, N, E], as many as
    lengths [C, 1] says."""

    def forward(
        self, targets: torch.Tensor, histories: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        # Each target sees at least one row, because softmax over none is undefined. Results without
        # a history are replaced.
        hidden = torch.arange(histories.shape[1], device=lengths.device) >= lengths.clamp(min=1)
        output, _ = super().forward(
            targets[:, None], histories, histories, key_padding_mask=hidden, need_weights=False
        )
        return torch.where(lengths > 0, output[:, 0], self.out_proj.bias)

    def reset_parameters(self) -> None:
        """DistributedModelParallel calls this to initialise what was built on the meta device."""
        self._reset_parameters()


def per_candidate(rows: torch.Tensor, offsets: torch.Tensor, num_candidates: int) -> torch.Tensor:
    """Row b of `rows` [B, ...], repeated for each candidate of user b, which has those from
    offsets[b] to offsets[b + 1]: [C, ...]."""
    return rows.repeat_interleave(offsets.diff(), dim=0, output_size=num_candidates)


# -- implementations of the layers -----------------------------------------------------------------


class Layers(NamedTuple):
    """Constructors of the layers. `JAGGED` has those of jagged_modules; padded_layers.py has the
    same layers by hand, with padding."""

    # the layers' input, from values [L, E], offsets and the maximum length
    sequence: Callable[[torch.Tensor, torch.Tensor, int], Any]
    interaction: Callable[..., nn.Module]
    stream: Callable[..., nn.Module]
    gdpa: Callable[..., nn.Module]
    interformer: Callable[..., nn.Module]
    compress: Callable[..., nn.Module]


JAGGED = Layers(
    jm.Jagged,
    make_interaction,
    StreamEncoder,
    jm.GDPABlock,
    jm.JaggedInterFormer,
    jm.LinearCompressEmbedding,
)


# -- embeddings ------------------------------------------------------------------------------------

init_table = partial(nn.init.normal_, std=0.05)


def embedding_bags(
    cardinalities: dict[str, int], embedding_dim: int, device: torch.device | None = None
) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=f"{name}_table",
            num_embeddings=rows,
            embedding_dim=embedding_dim,
            feature_names=[name],
            init_fn=init_table,
        )
        for name, rows in cardinalities.items()
    ]
    return EmbeddingBagCollection(configs, device=device)


def stack_bags(bags: KeyedTensor, features: list[str]) -> torch.Tensor:
    """The embeddings [rows, features, E] of the features, by name: a sharded collection has them in
    the order of its plan."""
    return torch.stack([bags[name] for name in features], dim=1)
