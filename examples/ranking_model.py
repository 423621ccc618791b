"""A DLRM-style ranking model in TorchRec, with a choice of three interactions between a candidate and its user's history."""

from functools import partial

import torch
from movielens import Categorical
from ranking_data import RankingBatch, RankingDataset
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedTensor

from jagged_modules import JaggedTargetAttention

INTERACTIONS = ("attention", "mean", "padded")


class MeanPooling(nn.Module):
    """The baseline without attention: each candidate gets the mean of its user's history, after a value and an output projection."""

    def __init__(self, embedding_dim: int, device: torch.device | None = None):
        super().__init__()
        self.v_proj = nn.Linear(embedding_dim, embedding_dim, device=device)
        self.out_proj = nn.Linear(embedding_dim, embedding_dim, device=device)

    def forward(self, targets: JaggedTensor, history: JaggedTensor) -> JaggedTensor:
        lengths, counts = history.lengths(), targets.lengths()
        means = torch.segment_reduce(self.v_proj(history.values()), "mean", lengths=lengths.long(), axis=0, unsafe=True, initial=0)
        return JaggedTensor(values=per_candidate(self.out_proj(means), targets), lengths=counts)


class MultiheadAttention(nn.MultiheadAttention):
    """With the method by which DistributedModelParallel initialises what was built on the meta device."""

    def reset_parameters(self) -> None:
        self._reset_parameters()


class PaddedTargetAttention(nn.Module):
    """The usual implementation: pad the histories, repeat each once per candidate, mask the padding, call `nn.MultiheadAttention`."""

    def __init__(self, embedding_dim: int, num_heads: int, device: torch.device | None = None):
        super().__init__()
        self.attention = MultiheadAttention(embedding_dim, num_heads, batch_first=True, device=device)

    def forward(self, targets: JaggedTensor, history: JaggedTensor) -> JaggedTensor:
        # Each candidate sees at least one column, because softmax over none is undefined. Results without a history are replaced below.
        longest = max([1, *history.lengths().tolist()])
        padded = per_candidate(history.to_padded_dense(longest), targets)  # [C, longest, E]
        lengths = per_candidate(history.lengths(), targets)[:, None]
        hidden = torch.arange(longest, device=lengths.device) >= lengths.clamp(min=1)
        output, _ = self.attention(targets.values()[:, None], padded, padded, key_padding_mask=hidden, need_weights=False)
        output = torch.where(lengths > 0, output[:, 0], self.attention.out_proj.bias)
        return JaggedTensor(values=output, lengths=targets.lengths())


def make_interaction(name: str, embedding_dim: int, num_heads: int, device: torch.device | None = None) -> nn.Module:
    """A module from (targets, history), JaggedTensors of B rows with values [C, E] and [L, E], to a JaggedTensor of values [C, E]."""
    if name == "attention":
        return JaggedTargetAttention(embedding_dim, num_heads, device=device)
    if name == "mean":
        return MeanPooling(embedding_dim, device=device)
    if name == "padded":
        return PaddedTargetAttention(embedding_dim, num_heads, device=device)
    raise ValueError(f"interaction must be one of {INTERACTIONS}, not {name!r}")


def per_candidate(rows: torch.Tensor, targets: JaggedTensor) -> torch.Tensor:
    """Row b of `rows` [B, ...], repeated for each of the n_b targets of b: [C, ...]."""
    return rows.repeat_interleave(targets.lengths(), dim=0, output_size=len(targets.values()))


class RankingModel(nn.Module):
    """Predicts the log-odds that the user likes the candidate: embeddings, then a `RankingHead`.

    Histories and candidates share one table of items. Histories also have tables of ratings and ages. Side features are bags.

    Args:
        dataset: defines the sizes of the tables and the side features.
        interaction: one of `INTERACTIONS`.
        embedding_dim: width E of all embeddings, a multiple of num_heads.
        num_heads: attention heads.
        dropout: dropout probability of tokens, vectors and the MLP's hidden layer.
        device: device of the parameters; `torch.device("meta")` for DistributedModelParallel.
    """

    def __init__(
        self,
        dataset: RankingDataset,
        interaction: str,
        embedding_dim: int = 64,
        num_heads: int = 4,
        dropout: float = 0.3,
        device: torch.device | None = None,
    ):
        super().__init__()
        log = dataset.log
        sequences = {  # table: rows, features
            "item": (log.num_items, ["history_item", "target_item"]),
            "rating": (dataset.num_ratings, ["history_rating"]),
            "age": (dataset.num_ages, ["history_age"]),
        }
        configs = [
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=embedding_dim, feature_names=features, init_fn=init_table)
            for name, (rows, features) in sequences.items()
        ]
        self.sequences = EmbeddingCollection(configs, device=device)
        self.user_bags = embedding_bags(dataset.user_features, embedding_dim, device)
        self.item_bags = embedding_bags(log.item_features, embedding_dim, device)
        features = list(dataset.user_features), list(log.item_features)
        self.head = RankingHead(*features, interaction, embedding_dim, num_heads, dropout, device)

    def tables(self) -> list[nn.Parameter]:
        return [table for collection in (self.sequences, self.user_bags, self.item_bags) for table in collection.parameters()]

    def forward(self, batch: RankingBatch) -> torch.Tensor:
        """Logits [C] of the batch's candidates, in the order of the rows."""
        # Only lookups: TorchRec's pipelines trace this method to find the inputs of the collections.
        sequences = self.sequences(batch.ids)
        return self.head(sequences, self.user_bags(batch.users), self.item_bags(batch.items))


class RankingHead(nn.Module):
    """The dense part of the ranking model.

    - An item vector is the item's embedding plus those of its side features.
    - A past rating becomes a token x + MLP(x), with x = item + rating + age. The MLP can encode "liked such an item", so a mean of tokens
      can too.
    - The interaction combines the candidate with the tokens.
    - An MLP takes the dot products of all pairs of vectors, the candidate's vector and the interaction's result.

    Args:
        user_features, item_features: names of the side features.
        interaction, embedding_dim, num_heads, dropout, device: as in `RankingModel`.
    """

    def __init__(
        self,
        user_features: list[str],
        item_features: list[str],
        interaction: str,
        embedding_dim: int,
        num_heads: int,
        dropout: float,
        device: torch.device | None = None,
    ):
        super().__init__()
        self.user_features, self.item_features = user_features, item_features
        layers = nn.Linear(embedding_dim, embedding_dim, device=device), nn.ReLU(), nn.Linear(embedding_dim, embedding_dim, device=device)
        self.token_mlp = nn.Sequential(*layers)
        self.token_norm, self.target_norm = (nn.LayerNorm(embedding_dim, device=device) for _ in range(2))
        self.interaction = make_interaction(interaction, embedding_dim, num_heads, device=device)
        self.num_vectors = 2 + len(user_features) + len(item_features)
        width = 2 * embedding_dim + self.num_vectors * (self.num_vectors - 1) // 2
        self.over = nn.Sequential(nn.Linear(width, 64, device=device), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 1, device=device))
        self.dropout = nn.Dropout(dropout)

    def forward(self, sequences: dict[str, JaggedTensor], user_bags: KeyedTensor, item_bags: KeyedTensor) -> torch.Tensor:
        """Logits [C] from the embeddings of ids, of users [B] and of the items of histories and candidates [L + C]."""
        past, candidates = sequences["history_item"], sequences["target_item"]
        sides = stack_bags(item_bags, self.item_features)  # [L + C, features, E]
        num_past, num_candidates = len(past.values()), len(candidates.values())
        past_sides, sides = sides[:num_past], sides[num_past : num_past + num_candidates]

        tokens = past.values() + past_sides.sum(dim=1) + sequences["history_rating"].values() + sequences["history_age"].values()
        tokens = self.dropout(self.token_norm(tokens + self.token_mlp(tokens)))
        items = self.dropout(self.target_norm(candidates.values() + sides.sum(dim=1)))
        history = JaggedTensor(values=tokens, lengths=past.lengths())
        targets = JaggedTensor(values=items, lengths=candidates.lengths())
        interest = self.interaction(targets, history).values()

        users = per_candidate(stack_bags(user_bags, self.user_features), targets)
        vectors = self.dropout(torch.cat([items[:, None], interest[:, None], users, sides], dim=1))
        first, second = torch.triu_indices(self.num_vectors, self.num_vectors, offset=1, device=vectors.device)
        products = (vectors @ vectors.mT)[:, first, second]
        return self.over(torch.cat([items, interest, products], dim=1))[:, 0]


init_table = partial(nn.init.normal_, std=0.05)


def embedding_bags(features: dict[str, Categorical], embedding_dim: int, device: torch.device | None = None) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=f"{name}_table",
            num_embeddings=feature.cardinality,
            embedding_dim=embedding_dim,
            feature_names=[name],
            init_fn=init_table,
        )
        for name, feature in features.items()
    ]
    return EmbeddingBagCollection(configs, device=device)


def stack_bags(bags: KeyedTensor, features: list[str]) -> torch.Tensor:
    """The embeddings [rows, features, E] of the features, by name: a sharded collection has them in the order of its plan."""
    return torch.stack([bags[name] for name in features], dim=1)
