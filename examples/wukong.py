"""Trains a small Wukong (Zhang et al. 2024, arXiv:2403.02545) on generated rating histories: python
examples/wukong.py [--epochs 4]

The first layer's linear compression combines users and candidates. It computes the part of a user
once for all of the user's candidates, so no user is replicated. Prints the held-out AUC, and that
of ranking items by their share of likes.
"""

import argparse
import sys
from functools import partial

import numpy as np
import torch
from generated_log import generate_log
from ranking_data import (
    LIKED,
    SPLITS,
    RankingBatch,
    RankingDataset,
    add_popularity,
    make_chunks,
    make_loader,
    split_by_time,
)
from torch import nn
from torch.nn import functional
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)
from tqdm import tqdm
from training import (
    HelpFormatter,
    check_at_least_1,
    pick_device,
    ranking_metrics,
    seed_epoch,
    seed_number,
)

from jagged_modules import CandidateIndex, LinearCompressEmbedding


class WukongLayer(nn.Module):
    """LayerNorm([FM block(x); linear compression(x)] + x): maps n embeddings of width d to n
    embeddings.

    If users are given, x is itself a linear compression of the users' and the candidates'
    embeddings, and one GEMM computes both.

    Args:
        num_embeddings: n. The FM block and the linear compression return n / 2 embeddings each.
        embedding_dim: d.
        num_candidate_embeddings, num_user_embeddings: numbers of input embeddings, if the input is
            not n embeddings.
        rank: columns k of the projection Y; the interactions X Xᵀ Y are [n, k].
        features: candidate_features and user_features of `LinearCompressEmbedding`, if the inputs
            are KeyedTensors.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        num_candidate_embeddings=None,
        num_user_embeddings=0,
        rank: int = 8,
        **features,
    ):
        super().__init__()
        half = num_embeddings // 2
        self.sizes = [num_embeddings, half] if num_user_embeddings else [half]
        sizes = num_candidate_embeddings or num_embeddings, sum(self.sizes), num_user_embeddings
        self.compress = LinearCompressEmbedding(*sizes, **features)
        self.project = LinearCompressEmbedding(num_embeddings, rank)  # Yᵀ
        self.mlp = nn.Sequential(
            nn.Flatten(),
            nn.LayerNorm(num_embeddings * rank),
            nn.Linear(num_embeddings * rank, 128),
            nn.ReLU(),
            nn.Linear(128, half * embedding_dim),
            nn.Unflatten(1, (half, embedding_dim)),
        )
        self.norm = nn.LayerNorm(embedding_dim)

    def forward(self, x, users=None, candidates: CandidateIndex | None = None) -> torch.Tensor:
        """[C, n, d], from x [C, n, d], or from the embeddings of the candidates and of the users,
        each with its own batch size."""
        *merged, compressed = self.compress(x, users, candidates).split(self.sizes, dim=1)
        x = merged[0] if merged else x
        interactions = x @ self.project(x).mT
        return self.norm(torch.cat([self.mlp(interactions), compressed], dim=1) + x)


class Wukong(nn.Module):
    """Predicts the log-odds that the user likes the candidate.

    A past rating has two embeddings: one for each pair of item and rating, and one for each pair of
    genre and rating.
    """

    def __init__(
        self,
        dataset: RankingDataset,
        num_embeddings: int = 16,
        embedding_dim: int = 32,
        num_layers: int = 2,
    ):
        super().__init__()
        log, self.num_ratings = dataset.log, dataset.num_ratings
        popularity, genres = (
            log.item_features[name].cardinality for name in ("popularity", "genre")
        )
        items = {"item": log.num_items, "popularity": popularity, "genre": genres}
        users = {
            "user": log.num_users,
            "rated_items": log.num_items * self.num_ratings,
            "rated_genres": genres * self.num_ratings,
        }
        self.item_bags, self.user_bags = (
            bag_collection(items, embedding_dim),
            bag_collection(users, embedding_dim),
        )
        features = dict(candidate_features=list(items), user_features=list(users))
        first = WukongLayer(num_embeddings, embedding_dim, len(items), len(users), **features)
        self.layers = nn.ModuleList(
            [first, *(WukongLayer(num_embeddings, embedding_dim) for _ in range(num_layers - 1))]
        )
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(num_embeddings * embedding_dim, 64),
            nn.ReLU(),
            nn.Linear(64, 1),
            nn.Flatten(0),
        )

    def tables(self) -> list[nn.Parameter]:
        return [*self.item_bags.parameters(), *self.user_bags.parameters()]

    def forward(self, batch: RankingBatch) -> torch.Tensor:
        """Logits [C] of the batch's candidates."""
        history, targets = batch.ids["history_item"], batch.ids["target_item"]
        past, popularity, genre = (
            len(history.values()),
            batch.items["popularity"].values(),
            batch.items["genre"].values(),
        )
        items = {"item": targets.values(), "popularity": popularity[past:], "genre": genre[past:]}
        one_each = torch.ones_like(targets.values(), dtype=torch.int32)
        rated = {"rated_items": history.values(), "rated_genres": genre[:past]}
        rated = {
            name: ids * self.num_ratings + batch.ids["history_rating"].values()
            for name, ids in rated.items()
        }
        users = {"user": batch.users["user"]} | {
            name: JaggedTensor(ids, lengths=history.lengths()) for name, ids in rated.items()
        }

        item_bags = {name: JaggedTensor(ids, lengths=one_each) for name, ids in items.items()}
        embedded = (
            bags(KeyedJaggedTensor.from_jt_dict(x))
            for bags, x in ((self.item_bags, item_bags), (self.user_bags, users))
        )
        first, *others = self.layers
        x = first(*embedded, CandidateIndex.from_jagged(targets))
        for layer in others:
            x = layer(x)
        return self.head(x)


def bag_collection(cardinalities: dict[str, int], embedding_dim: int) -> EmbeddingBagCollection:
    """A collection with one table per feature, which returns the mean of the embeddings of the
    feature's ids."""
    options = dict(
        embedding_dim=embedding_dim,
        pooling=PoolingType.MEAN,
        init_fn=partial(nn.init.normal_, std=0.05),
    )
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=name, num_embeddings=rows, feature_names=[name], **options)
            for name, rows in cardinalities.items()
        ]
    )


@torch.no_grad()
def held_out_auc(
    model: Wukong, dataset: RankingDataset, like_rate: np.ndarray, device: torch.device
) -> dict[str, float]:
    """AUC of the model, and of the candidate item's share of likes, `like_rate` [items]."""
    model.eval()
    batches = [batch.to(device) for batch in make_loader(dataset, batch_size=256)]
    labels = torch.cat([batch.labels for batch in batches])
    likes = torch.cat(
        [
            torch.from_numpy(like_rate).to(device)[batch.ids["target_item"].values()]
            for batch in batches
        ]
    )
    logits = {
        "Wukong": torch.cat([model(batch) for batch in batches]),
        "item's share of likes": likes.logit(),
    }
    return {name: ranking_metrics(scores, labels)["auc"] for name, scores in logits.items()}


def run(options: argparse.Namespace) -> dict:
    """Train the model. Returns the mean loss of each epoch and the held-out AUC by name."""
    device = pick_device(options.device)
    # slow drift: the model averages histories
    log = generate_log(num_users=options.users, drift=0.05, seed=options.seed)
    part = split_by_time(log)
    train, test = part == SPLITS.index("train"), part == SPLITS.index("test")
    log = add_popularity(log, train)
    datasets = [RankingDataset(log, make_chunks(log, selected)) for selected in (train, test)]
    torch.manual_seed(options.seed)
    model = Wukong(datasets[0]).to(device)
    tables = model.tables()
    others = [parameter for parameter in model.parameters() if parameter not in set(tables)]
    optimizer = torch.optim.AdamW(
        [{"params": tables, "weight_decay": 1.0}, {"params": others, "weight_decay": 0.0}], lr=1e-3
    )
    losses = []
    for epoch in range(options.epochs):
        model.train()
        total = torch.zeros((), device=device)
        loader = make_loader(
            datasets[0], options.batch_size, shuffle_seed=seed_epoch(options.seed, epoch)
        )
        for batch in tqdm(loader, desc=f"epoch {epoch + 1}", leave=False):
            batch = batch.to(device)
            loss = functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(batch)
        losses.append(total.item() / int(train.sum()))
        tqdm.write(f"epoch {epoch + 1}  loss {losses[-1]:.4f}")
    liked, rated = (
        np.bincount(log.item[train], weights, log.num_items)
        for weights in (log.rating[train] >= LIKED, None)
    )
    return {
        "loss": losses,
        "auc": held_out_auc(model, datasets[1], (liked + 1) / (rated + 2), device),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=HelpFormatter
    )
    parser.add_argument("--users", type=int, default=400, help="users of the generated log")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the training split")
    parser.add_argument("--batch-size", type=int, default=32, help="histories per batch")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="CPU threads; more are slower if other programs keep the cores busy",
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of the random numbers")
    options = parser.parse_args(arguments)
    check_at_least_1(parser, options, ("users", "epochs", "batch_size", "threads"))
    torch.set_num_threads(options.threads)
    try:
        results = run(options)
    except ValueError as error:
        sys.exit(f"wukong: {error}")
    for name, auc in results["auc"].items():
        print(f"held-out AUC {auc:.4f}  {name}")


if __name__ == "__main__":
    main()
