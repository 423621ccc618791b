"""Trains a DLRM-style ranking model on rating histories: python examples/train_dlrm.py [--data PATH] [--compare]

Without --data the log is generated. Writes metrics.json, curves.png and a checkpoint per trained model into --out. A run continued with
--resume has the same result as an uninterrupted run.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import trainer
from generated_log import generate_log
from movielens import read_log
from ranking_data import SPLITS, RankingBatch, RankingDataset, add_popularity, make_chunks, split_by_time
from ranking_model import INTERACTIONS, RankingModel
from torch.nn import functional
from training import ranking_metrics


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    defaults = dict(out=Path("runs/dlrm"), epochs=8, batch_size=64, num_heads=4, dropout=0.3, weight_decay=1.0)
    parser = trainer.make_parser(__doc__.splitlines()[0], **defaults)
    parser.add_argument("--interaction", choices=INTERACTIONS, default="attention", help="how a candidate uses its user's history")
    parser.add_argument("--chunk-size", type=int, default=8, help="maximum number of candidates that share a history")
    return trainer.parse(parser, arguments)


class Trainer(trainer.Trainer):
    """Trains a ranking model. Its name is that of its interaction."""

    metrics = {"auc": "AUC", "normalized_entropy": "normalised entropy"}
    own_settings = ("chunk_size",)

    def make_model(self, device: torch.device) -> RankingModel:
        options = self.options
        return RankingModel(self.datasets["train"], self.name, options.embedding_dim, options.num_heads, options.dropout, device)

    def losses(self, logits: torch.Tensor, batch: RankingBatch) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(logits.float(), batch.labels, reduction="none")

    def predictions(self, logits: torch.Tensor, batch: RankingBatch) -> torch.Tensor:
        return torch.stack([logits.float(), batch.labels], dim=1)

    def score(self, predictions: torch.Tensor) -> dict[str, float]:
        return ranking_metrics(*predictions.unbind(1))


def load_datasets(options: argparse.Namespace) -> dict[str, RankingDataset]:
    """The datasets by split. Raises ValueError if a split has no liked or no disliked candidates."""
    source = options.data or "generated log"
    log = read_log(options.data) if options.data else generate_log(num_users=options.users, seed=options.seed)
    part = split_by_time(log)
    log = add_popularity(log, part == SPLITS.index("train"))
    datasets = {
        name: RankingDataset(log, make_chunks(log, part == index, options.chunk_size, options.max_history))
        for index, name in enumerate(SPLITS)
    }
    labels = {name: dataset.labels() for name, dataset in datasets.items()}
    for name, liked in labels.items():
        if not 0 < liked.sum() < len(liked):
            raise ValueError(f"{source}: {liked.sum()} of {len(liked)} {name} candidates are liked; training and AUC need both kinds")
    sizes = ", ".join(f"{len(liked):,} {name}" for name, liked in labels.items())
    features = ", ".join([*log.user_features, *log.item_features])
    print(f"{source}: {len(log):,} ratings ({sizes}) of {log.num_items:,} items by {log.num_users:,} users; side features: {features}")
    return datasets


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train the models that the options select and write the files. Returns the content of metrics.json."""
    device = trainer.prepare_device(options)
    datasets = load_datasets(options)
    names = INTERACTIONS if options.compare else (options.interaction,)
    return trainer.train_all({name: Trainer(options, name, datasets, device) for name in names}, options)


def main(arguments: list[str] | None = None) -> None:
    trainer.main("train_dlrm", run, parse_arguments(arguments), {"auc": "test AUC", "normalized_entropy": "norm. entropy"})


if __name__ == "__main__":
    main()
