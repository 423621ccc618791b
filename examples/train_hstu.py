"""Trains a next-item model on rating histories: python examples/train_hstu.py [--data PATH] [--model hstu|sasrec] [--compare]

Without --data the log is generated. Writes metrics.json, curves.png and a checkpoint per trained model into --out. A run continued with
--resume has the same result as an uninterrupted run.

The last item of each user is the test target, the one before it the validation target. Targets are ranked among all items that the user has
not rated before.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trainer
from generated_log import generate_log
from movielens import read_log
from ranking_data import make_loader
from sequence_data import SequenceBatch, SequenceDataset, make_datasets
from sequence_model import ENCODERS, SequenceModel
from torchrec import KeyedJaggedTensor
from training import next_item_metrics, rank_unseen

SELECTIVITY = 1.0  # selectivity of the generated users


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    defaults = dict(out=Path("runs/hstu"), epochs=20, batch_size=16, num_heads=2, dropout=0.2, weight_decay=1.0)
    parser = trainer.make_parser(__doc__.splitlines()[0], **defaults)
    parser.add_argument("--model", choices=ENCODERS, default="hstu", help="encoder of the sequences")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--num-negatives", type=int, default=512, help="sampled items in the softmax of a batch")
    parser.add_argument("--temperature", type=float, default=0.15, help="divisor of the cosines in the softmax")
    return trainer.parse(parser, arguments, at_least_1=("num_layers", "num_negatives"))


class Trainer(trainer.Trainer):
    """Trains a next-item model. Its name is that of its encoder."""

    metrics = {"ndcg@10": "NDCG@10", "hr@10": "HR@10"}
    own_settings = ("num_layers", "num_negatives", "temperature")

    def make_model(self) -> SequenceModel:
        sizes = ("embedding_dim", "num_heads", "num_layers", "dropout", "max_history", "temperature")
        num_items = self.datasets["train"].log.num_items
        return SequenceModel(num_items, self.name, **{name: getattr(self.options, name) for name in sizes})

    def loss(self, batch: SequenceBatch) -> torch.Tensor:
        with self.autocast():
            return self.model.loss(batch.ids, batch.targets, self.options.num_negatives)

    def evaluate(self, split: str, model: SequenceModel) -> dict[str, float]:
        with self.autocast():
            return evaluate(model.scores, (batch.to(self.device) for batch in self.loader(split)))


@torch.no_grad()
def evaluate(scores: Callable[[KeyedJaggedTensor], torch.Tensor], batches: Iterable[SequenceBatch]) -> dict[str, float]:
    """Metrics of `scores` [B, num_items]: the next item of each sequence is ranked among all items that the user has not rated before."""
    ranks = [rank_unseen(scores(batch.ids), batch.next_items(), batch.ids["seen"]) for batch in batches]
    return next_item_metrics(torch.cat(ranks))


def popularity(datasets: dict[str, SequenceDataset]) -> torch.Tensor:
    """Number of training ratings of each item, [num_items]: a ranking that is the same for all users."""
    log = datasets["train"].log
    held_out = np.concatenate([datasets[name].windows.end for name in ("valid", "test")])
    return torch.from_numpy(np.bincount(log.item, minlength=log.num_items) - np.bincount(log.item[held_out], minlength=log.num_items))


def evaluate_popularity(datasets: dict[str, SequenceDataset]) -> dict[str, float]:
    """Test metrics of the ranking by popularity."""
    counts = popularity(datasets).float()
    return evaluate(lambda ids: counts.expand(ids.stride(), -1), make_loader(datasets["test"], batch_size=64))


def load_datasets(options: argparse.Namespace) -> dict[str, SequenceDataset]:
    source = options.data or "generated log"
    log = read_log(options.data) if options.data else generate_log(num_users=options.users, selectivity=SELECTIVITY, seed=options.seed)
    try:
        datasets = make_datasets(log, options.max_history)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    tested = len(datasets["test"])
    print(f"{source}: {len(log):,} ratings of {log.num_items:,} items by {log.num_users:,} users, of whom {tested:,} are tested")
    return datasets


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train the models that the options select and write the files. Returns the content of metrics.json."""
    device = trainer.prepare_device(options)
    datasets = load_datasets(options)
    names = ENCODERS if options.compare else (options.model,)
    trainers = {name: Trainer(options, name, datasets, device) for name in names}
    return trainer.train_all(trainers, options, baselines={"popularity": evaluate_popularity(datasets)})


def main(arguments: list[str] | None = None) -> None:
    trainer.main("train_hstu", run, parse_arguments(arguments), {"hr@10": "test HR@10", "ndcg@10": "test NDCG@10"})


if __name__ == "__main__":
    main()
