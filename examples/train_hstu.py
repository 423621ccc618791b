"""Trains a next-item model on histories: python examples/train_hstu.py [--data PATH] [--model
hstu|sasrec] [--compare] [--seeds N]

data/logs.py lists the forms of --data. Without it the log is generated. Writes metrics.json,
curves.png and a checkpoint per trained model into --out. A run continued with --resume has the same
result as an uninterrupted run.

The last item of each user is the test target, the one before it the validation target. Targets are
ranked among all items that the user has not chosen before; one that was chosen before is missed.
Training stops when the validation result has not improved for --patience epochs, and the best
weights are tested.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trainer
from data.forms import form_of
from data.logs import read_log
from generated_log import generate_log
from ranking_data import make_loader
from sequence_data import SequenceBatch, SequenceDataset, Windows, make_datasets
from sequence_model import (
    ENCODERS,
    SCORES,
    SequenceModel,
    Vectors,
    generalised_bce,
    later_targets,
    make_logits,
    sampled_softmax,
)
from training import next_item_metrics, positive, rank_unseen

SELECTIVITY = 1.0  # selectivity of the generated users
BIASES = ("relative_position", "relative_time")  # options of hstu's attention
COLUMNS = {"hr@10": "test HR@10", "ndcg@10": "test NDCG@10", "mrr": "test MRR"}
LATER = 3  # items after the next one, with --ahead
LOSSES = {
    "softmax": "softmax over the target and the sampled items",
    "gbce": "generalised binary cross-entropy of Petrov and Macdonald (2023)",
    "bce": "binary cross-entropy",
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    defaults = dict(
        out=Path("runs/hstu"),
        epochs=100,
        patience=10,
        embedding_dim=128,
        num_heads=2,
        dropout=0.4,
        lr=2e-3,
        weight_decay=0.25,
    )
    parser = trainer.make_parser(__doc__.partition("\n\n")[0], **defaults)
    parser.add_argument(
        "--model", choices=ENCODERS, default="hstu", help="encoder of the sequences"
    )
    parser.add_argument(
        "--batch-events",
        type=int,
        default=1024,
        help="mean events per batch, if --batch-size is not given",
    )
    parser.add_argument("--num-layers", type=int, default=2, help="layers of the encoder")
    parser.add_argument(
        "--loss",
        choices=LOSSES,
        default="softmax",
        help="; ".join(f"{name}: {text}" for name, text in LOSSES.items()),
    )
    parser.add_argument(
        "--num-negatives",
        type=int,
        default=2048,
        help="items drawn for each batch, with which all its targets compete",
    )
    parser.add_argument(
        "--ahead",
        type=float,
        default=0.3,
        help=f"an input is trained on the items up to {LATER} after the next one too: weight of the"
        " first, whose powers are those of the others; 0: the next item only",
    )
    parser.add_argument(
        "--calibration", type=float, default=0.75, help="t of gbce, from 0 (bce) to 1"
    )
    parser.add_argument(
        "--scores", choices=SCORES, default="cosine", help="how a query scores an item"
    )
    parser.add_argument(
        "--temperature",
        type=positive,
        default=0.07,
        help="divisor of cosines in the loss; dot products are not divided",
    )
    parser.add_argument(
        "--intervals",
        action="store_true",
        help="add an embedding of the time since the previous event to each input",
    )
    parser.add_argument(
        "--relative-position",
        action="store_true",
        help="hstu: learn biases of attention by relative position",
    )
    parser.add_argument(
        "--relative-time",
        type=int,
        default=0,
        metavar="K",
        help="hstu: learn biases by K + 1 buckets of the time between events; 0: none",
    )
    return trainer.parse(
        parser, arguments, at_least_1=("batch_events", "num_layers", "num_negatives")
    )


def make_model(
    options: argparse.Namespace, encoder: str, num_items: int, device: torch.device
) -> SequenceModel:
    """The model of the options."""
    names = (
        "embedding_dim",
        "num_heads",
        "num_layers",
        "dropout",
        "max_history",
        "scores",
        "intervals",
        *BIASES,
    )
    return SequenceModel(
        num_items, encoder, **{name: getattr(options, name) for name in names}, device=device
    )


class Trainer(trainer.Trainer):
    """Trains a next-item model. Its name is that of its encoder."""

    metrics = {"ndcg@10": "NDCG@10", "hr@10": "HR@10"}
    own_settings = (
        "num_layers",
        "loss",
        "num_negatives",
        "ahead",
        "calibration",
        "scores",
        "temperature",
        "intervals",
        *BIASES,
    )

    def make_model(self, device: torch.device) -> SequenceModel:
        return make_model(self.options, self.name, self.num_items, device)

    @property
    def num_items(self) -> int:
        return self.datasets["train"].log.num_items

    def batches(self, split: str, shuffle_seed: int | None = None) -> Iterator[SequenceBatch]:
        """Batches whose targets compete with all items, or in training with items that are drawn
        for each batch, the same on all ranks."""
        everything = torch.arange(self.num_items)
        draw = None if shuffle_seed is None else torch.Generator().manual_seed(shuffle_seed)
        for batch in super().batches(split, shuffle_seed):
            yield batch.add_rivals(
                everything
                if draw is None
                else torch.randint(self.num_items, (self.options.num_negatives,), generator=draw)
            )

    def losses(self, vectors: Vectors, batch: SequenceBatch) -> torch.Tensor:
        options = self.options
        temperature = options.temperature if options.scores == "cosine" else 1.0
        number = LATER if options.ahead else 0
        targets = vectors._replace(targets=later_targets(vectors.targets, number))
        logits = make_logits(targets, batch.targets, batch.rivals, temperature)
        if options.loss == "softmax":
            losses = sampled_softmax(logits)
        else:
            calibration = options.calibration if options.loss == "gbce" else 0.0
            losses = generalised_bce(logits, self.num_items, calibration)
        steps = torch.arange(number + 1, device=losses.device)[:, None]
        position = batch.ids["position"].values()
        # k rows on, another window or the batch's begin has a position below k
        inside = later_targets(position, number) == position + steps
        return (options.ahead**steps * inside * losses).sum(dim=0)

    def predictions(self, vectors: Vectors, batch: SequenceBatch) -> torch.Tensor:
        last = batch.last_inputs()
        return rank_unseen(
            vectors.queries[last] @ vectors.rivals.T, batch.targets[last], batch.seen["seen"]
        )

    def score(self, ranks: torch.Tensor) -> dict[str, float]:
        return next_item_metrics(ranks)


def popularity(datasets: dict[str, SequenceDataset]) -> torch.Tensor:
    """Number of training events of each item, [num_items]: a ranking that is the same for all
    users."""
    log = datasets["train"].log
    held_out = np.concatenate([datasets[name].windows.end for name in ("valid", "test")])
    return torch.from_numpy(
        np.bincount(log.item, minlength=log.num_items)
        - np.bincount(log.item[held_out], minlength=log.num_items)
    )


def evaluate_popularity(datasets: dict[str, SequenceDataset]) -> dict[str, float]:
    """Test metrics of the ranking by popularity."""
    counts = popularity(datasets).float()
    batches = make_loader(datasets["test"], batch_size=64)
    ranks = [
        rank_unseen(counts.expand(batch.ids.stride(), -1), batch.next_items(), batch.seen["seen"])
        for batch in batches
    ]
    return next_item_metrics(torch.cat(ranks))


def load_datasets(options: argparse.Namespace) -> dict[str, SequenceDataset]:
    source = "generated log" if options.data is None else options.data
    if options.data is None:
        log = generate_log(num_users=options.users, selectivity=SELECTIVITY, seed=options.seed)
    else:
        log = read_log(options.data, form_of(options))
    if options.relative_time and log.timestamp is None:
        raise ValueError(
            f"{source}: --relative-time needs timestamps, which the file does not have"
        )
    try:
        datasets = make_datasets(
            log, options.max_history, options.intervals, timestamps=options.relative_time > 0
        )
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    tested = len(datasets["test"])
    print(
        f"{source}: {len(log):,} events of {log.num_items:,} items by {log.num_users:,} users, of"
        f" whom {tested:,} are tested"
    )
    return datasets


def choose_batch_size(num_events: int, windows: Windows) -> int:
    """The number of windows that have `num_events` inputs on average.

    Histories of one data set may be ten times as long as those of another. A batch of as many
    events then needs no other learning rate.
    """
    return max(1, round(num_events * len(windows) / int((windows.end - windows.start).sum())))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train the models that the options select and write the files. Returns the content of
    metrics.json."""
    device = trainer.prepare_device(options)
    if not 0 <= options.calibration <= 1:
        raise ValueError(f"calibration must lie in [0, 1], not {options.calibration}")
    if not 0 <= options.ahead <= 1:
        raise ValueError(f"--ahead must lie in [0, 1], not {options.ahead}")
    if options.relative_time < 0:
        raise ValueError(f"--relative-time must not be negative, not {options.relative_time}")
    if (
        options.model != "hstu"
        and not options.compare
        and any(getattr(options, name) for name in BIASES)
    ):
        raise ValueError(
            f"--relative-position and --relative-time need --model hstu, not {options.model}"
        )
    datasets = load_datasets(options)
    if not len(datasets["train"]):
        raise ValueError(
            f"{options.data}: nothing to train on: all users have 1 or 3 events, and the last 2 of"
            " 3 are held out"
        )
    if options.batch_size is None:
        options = trainer.variant(
            options, batch_size=choose_batch_size(options.batch_events, datasets["train"].windows)
        )
    unbiased = trainer.variant(options, relative_position=False, relative_time=0)
    models = {
        name: options if name == "hstu" else unbiased
        for name in (ENCODERS if options.compare else (options.model,))
    }
    baselines = {"popularity": evaluate_popularity(datasets)}
    return trainer.train_all(
        models, lambda name, own: Trainer(own, name, datasets, device), options, baselines
    )


def main(arguments: list[str] | None = None) -> None:
    trainer.main("train_hstu", run, parse_arguments(arguments), COLUMNS)


if __name__ == "__main__":
    main()
