"""A DLRM-style ranking model in TorchRec, with a choice of three interactions between a candidate and its user's history."""

import torch
from movielens import Categorical
from ranking_data import RankingBatch, RankingDataset
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, JaggedTensor

from jagged_modules import JaggedTargetAttention

INTERACTIONS = ("attention", "mean", "padded")


class MeanPooling(nn.Module):
    """The baseline without attention: each candidate gets the mean of its user's history, after a value and an output projection."""

    def __init__(self, embedding_dim: int):
        super().__init__()
        self.v_proj = nn.Linear(embedding_dim, embedding_dim)
        self.out_proj = nn.Linear(embedding_dim, embedding_dim)

    def forward(self, targets: JaggedTensor, history: JaggedTensor) -> JaggedTensor:
        lengths, counts = history.lengths(), targets.lengths()
        means = torch.segment_reduce(self.v_proj(history.values()), "mean", lengths=lengths.long(), axis=0, unsafe=True, initial=0)
        return JaggedTensor(values=per_candidate(self.out_proj(means), targets), lengths=counts)


class PaddedTargetAttention(nn.Module):
    """The usual implementation: pad the histories, repeat each once per candidate, mask the padding, call `nn.MultiheadAttention`."""

    def __init__(self, embedding_dim: int, num_heads: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(embedding_dim, num_heads, batch_first=True)

    def forward(self, targets: JaggedTensor, history: JaggedTensor) -> JaggedTensor:
        # Each candidate sees at least one column, because softmax over none is undefined. Results without a history are replaced below.
        longest = max(int(history.lengths().max()), 1)
        padded = per_candidate(history.to_padded_dense(longest), targets)  # [C, longest, E]
        lengths = per_candidate(history.lengths(), targets)[:, None]
        hidden = torch.arange(longest, device=lengths.device) >= lengths.clamp(min=1)
        output, _ = self.attention(targets.values()[:, None], padded, padded, key_padding_mask=hidden, need_weights=False)
        output = torch.where(lengths > 0, output[:, 0], self.attention.out_proj.bias)
        return JaggedTensor(values=output, lengths=targets.lengths())


def make_interaction(name: str, embedding_dim: int, num_heads: int) -> nn.Module:
    """A module from (targets, history), JaggedTensors of B rows with values [C, E] and [L, E], to a JaggedTensor of values [C, E]."""
    if name == "attention":
        return JaggedTargetAttention(embedding_dim, num_heads)
    if name == "mean":
        return MeanPooling(embedding_dim)
    if name == "padded":
        return PaddedTargetAttention(embedding_dim, num_heads)
    raise ValueError(f"interaction must be one of {INTERACTIONS}, not {name!r}")


def per_candidate(rows: torch.Tensor, targets: JaggedTensor) -> torch.Tensor:
    """Row b of `rows` [B, ...], repeated for each of the n_b targets of b: [C, ...]."""
    return rows.repeat_interleave(targets.lengths(), dim=0, output_size=len(targets.values()))


class RankingModel(nn.Module):
    """Predicts the log-odds that the user likes the candidate.

    - Embeddings: histories and candidates share one table of items. Histories also have tables of ratings and ages. Side features are bags.
    - An item vector is the item's embedding plus those of its side features.
    - A past rating becomes a token x + MLP(x), with x = item + rating + age. The MLP can encode "liked such an item", so a mean of tokens
      can too.
    - The interaction combines the candidate with the tokens.
    - An MLP takes the dot products of all pairs of vectors, the candidate's vector and the interaction's result.

    Args:
        dataset: defines the sizes of the tables and the side features.
        interaction: one of `INTERACTIONS`.
        embedding_dim: width E of all embeddings, a multiple of num_heads.
        num_heads: attention heads.
        dropout: dropout probability of tokens, vectors and the MLP's hidden layer.
    """

    def __init__(self, dataset: RankingDataset, interaction: str, embedding_dim: int = 64, num_heads: int = 4, dropout: float = 0.3):
        super().__init__()
        log = dataset.log
        sequences = {  # table: rows, features
            "item": (log.num_items, ["history_item", "target_item"]),
            "rating": (dataset.num_ratings, ["history_rating"]),
            "age": (dataset.num_ages, ["history_age"]),
        }
        self.sequences = EmbeddingCollection(
            [
                EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=embedding_dim, feature_names=features)
                for name, (rows, features) in sequences.items()
            ]
        )
        self.user_bags = embedding_bags(dataset.user_features, embedding_dim)
        self.item_bags = embedding_bags(log.item_features, embedding_dim)
        for table in self.tables():
            nn.init.normal_(table, std=0.05)

        self.token_mlp = nn.Sequential(nn.Linear(embedding_dim, embedding_dim), nn.ReLU(), nn.Linear(embedding_dim, embedding_dim))
        self.token_norm, self.target_norm = nn.LayerNorm(embedding_dim), nn.LayerNorm(embedding_dim)
        self.interaction = make_interaction(interaction, embedding_dim, num_heads)
        num_vectors = 2 + len(dataset.user_features) + len(log.item_features)
        self.register_buffer("pairs", torch.triu_indices(num_vectors, num_vectors, offset=1), persistent=False)
        self.over = nn.Sequential(nn.Linear(2 * embedding_dim + self.pairs.shape[1], 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 1))
        self.dropout = nn.Dropout(dropout)

    def tables(self) -> list[nn.Parameter]:
        return [table for collection in (self.sequences, self.user_bags, self.item_bags) for table in collection.parameters()]

    def forward(self, batch: RankingBatch) -> torch.Tensor:
        """Logits [C] of the batch's candidates, in the order of the rows."""
        embedded = self.sequences(batch.ids)
        past, candidates = embedded["history_item"], embedded["target_item"]
        sides = split_bags(self.item_bags(batch.items))  # [L + C, features, E]
        past_sides, sides = sides.split([len(past.values()), len(candidates.values())])

        tokens = past.values() + past_sides.sum(dim=1) + embedded["history_rating"].values() + embedded["history_age"].values()
        tokens = self.dropout(self.token_norm(tokens + self.token_mlp(tokens)))
        items = self.dropout(self.target_norm(candidates.values() + sides.sum(dim=1)))
        history = JaggedTensor(values=tokens, lengths=past.lengths())
        targets = JaggedTensor(values=items, lengths=candidates.lengths())
        interest = self.interaction(targets, history).values()

        users = per_candidate(split_bags(self.user_bags(batch.users)), targets)
        vectors = self.dropout(torch.cat([items[:, None], interest[:, None], users, sides], dim=1))
        products = (vectors @ vectors.mT)[:, self.pairs[0], self.pairs[1]]
        return self.over(torch.cat([items, interest, products], dim=1))[:, 0]


def embedding_bags(features: dict[str, Categorical], embedding_dim: int) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=f"{name}_table", num_embeddings=feature.cardinality, embedding_dim=embedding_dim, feature_names=[name])
            for name, feature in features.items()
        ]
    )


def split_bags(bags) -> torch.Tensor:
    """The values [rows, features, E] of a KeyedTensor whose features have the same width."""
    return bags.values().unflatten(1, (len(bags.keys()), -1))
