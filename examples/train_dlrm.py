"""Trains a DLRM-style ranking model on rating histories: python examples/train_dlrm.py [--data
PATH] [--model NAME] [--compare | --ablation]

--compare trains the model with each interaction, --ablation without each of its parts in turn. Both
print a table. --model trains a published model of models/, with --compare beside its padded form.
Without --data the log is generated. Writes metrics.json, curves.png and a checkpoint per trained
model into --out. A run continued with --resume has the same result as an uninterrupted run.
"""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import trainer
from data.forms import form_of
from data.logs import read_ratings
from generated_log import generate_log
from models import MODELS, PADDED
from ranking_data import (
    LIKED,
    SPLITS,
    RankingBatch,
    RankingDataset,
    TableSizes,
    add_popularity,
    make_chunks,
    split_by_time,
)
from ranking_model import INTERACTIONS, PARTS, RankingConfig, RankingModel
from torch.nn import functional
from trainer import variant
from training import ranking_metrics

# The part that raises the held-out AUC of MovieLens-100k and of the generated log. The others are
# for longer streams and more features.
DEFAULT_PARTS = ("compress",)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    defaults = dict(
        out=Path("runs/dlrm"), epochs=8, batch_size=64, num_heads=4, dropout=0.3, weight_decay=1.0
    )
    parser = trainer.make_parser(__doc__.partition("\n\n")[0], **defaults)
    parser.add_argument(
        "--model",
        dest="head",
        choices=("dlrm", *MODELS),
        default="dlrm",
        help="dlrm, which the following three options are for, or a published model",
    )
    parser.add_argument(
        "--interaction",
        choices=INTERACTIONS,
        help="how a candidate uses its user's history; default attention",
    )
    parts = "; ".join(f"{name}: {text}" for name, text in PARTS.items())
    parser.add_argument(
        "--parts",
        nargs="*",
        choices=PARTS,
        help=f"parts of the model; default {DEFAULT_PARTS}, all for --ablation. {parts}",
    )
    parser.add_argument(
        "--ablation",
        action="store_true",
        help="train the model with its parts, without each in turn, and without all",
    )
    parser.add_argument(
        "--chunk-size",
        type=int,
        default=8,
        help="maximum number of candidates that share a history",
    )
    parser.add_argument(
        "--max-stream", type=int, default=1000, help="maximum number of ratings in a stream"
    )
    parser.add_argument(
        "--block-size",
        type=int,
        choices=(16, 32, 64, 128),
        default=64,
        help="ratings of a stream that see one another",
    )
    parser.add_argument(
        "--liked", type=float, help=f"least rating of a liked item; {LIKED:g} if not given"
    )
    parser.set_defaults(padded=False)
    options = trainer.parse(parser, arguments, at_least_1=("max_stream", "chunk_size"))
    if options.head != "dlrm":
        for name in ("interaction", "parts", "ablation"):
            if getattr(options, name):
                parser.error(f"--{name} is an option of --model dlrm, not of {options.head}")
        options.parts = []
    options.interaction = options.interaction or "attention"
    if options.parts is None:
        options.parts = list(PARTS if options.ablation else DEFAULT_PARTS)
    if options.compare and options.ablation:
        parser.error("--compare and --ablation are two tables: give one of them")
    return options


def make_model(
    options: argparse.Namespace,
    tables: TableSizes,
    max_candidates: int | None,
    device: torch.device,
) -> RankingModel:
    """The model of the options, for at most `max_candidates` of a user, or any number."""
    names = {field.name for field in fields(RankingConfig)} & vars(options).keys()
    config = RankingConfig(
        max_candidates=max_candidates, **{name: getattr(options, name) for name in names}
    )
    forms = PADDED if options.padded else MODELS
    return RankingModel(tables, config, device=device, head=forms.get(options.head))


class Trainer(trainer.Trainer):
    """Trains a ranking model."""

    metrics = {"auc": "AUC", "normalized_entropy": "normalised entropy"}
    own_settings = ("interaction", "parts", "chunk_size", "max_stream", "block_size", "liked")

    def make_model(self, device: torch.device) -> RankingModel:
        return make_model(
            self.options, self.datasets["train"].tables, self.options.chunk_size, device
        )

    def losses(self, logits: torch.Tensor, batch: RankingBatch) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(
            logits.float(), batch.labels, reduction="none"
        )

    def predictions(self, logits: torch.Tensor, batch: RankingBatch) -> torch.Tensor:
        return torch.stack([logits.float(), batch.labels], dim=1)

    def score(self, predictions: torch.Tensor) -> dict[str, float]:
        return ranking_metrics(*predictions.unbind(1))


def load_datasets(options: argparse.Namespace) -> dict[str, RankingDataset]:
    """The datasets by split. Raises ValueError if a split has no liked or no disliked
    candidates."""
    source = "generated log" if options.data is None else options.data
    log = (
        generate_log(num_users=options.users, seed=options.seed)
        if options.data is None
        else read_ratings(options.data, form_of(options))
    )
    part = split_by_time(log)
    log = add_popularity(log, part == SPLITS.index("train"))
    max_stream = options.max_stream if "stream" in options.parts else 0
    datasets = {
        name: RankingDataset(
            log,
            make_chunks(log, part == index, options.chunk_size, options.max_history),
            max_stream,
            LIKED if options.liked is None else options.liked,
        )
        for index, name in enumerate(SPLITS)
    }
    labels = {name: dataset.labels() for name, dataset in datasets.items()}
    for name, liked in labels.items():
        if not 0 < liked.sum() < len(liked):
            raise ValueError(
                f"{source}: {liked.sum()} of {len(liked)} {name} candidates are liked; training and"
                " AUC need both kinds"
            )
    sizes = ", ".join(f"{len(liked):,} {name}" for name, liked in labels.items())
    features = ", ".join([*log.user_features, *log.item_features])
    print(
        f"{source}: {len(log):,} ratings ({sizes}) of {log.num_items:,} items by {log.num_users:,}"
        f" users; side features: {features}"
    )
    return datasets


def variants(options: argparse.Namespace) -> dict[str, argparse.Namespace]:
    """The options of each model to train, by the model's name."""
    if options.head != "dlrm":
        forms = {options.head: options, f"{options.head}-padded": variant(options, padded=True)}
        return forms if options.compare else {options.head: options}
    if options.compare:
        return {name: variant(options, interaction=name) for name in INTERACTIONS}
    if options.ablation:
        without = {
            f"no-{part}": variant(
                options, parts=[other for other in options.parts if other != part]
            )
            for part in options.parts
        }
        others = {
            "no-attention": variant(options, interaction="mean"),
            "no-parts": variant(options, parts=[]),
        }
        return {"whole": options, **without, **others}
    return {options.interaction: options}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train the models that the options select and write the files. Returns the content of
    metrics.json."""
    device = trainer.prepare_device(options)
    datasets = load_datasets(options)
    return trainer.train_all(
        variants(options), lambda name, own: Trainer(own, name, datasets, device), options
    )


def main(arguments: list[str] | None = None) -> None:
    trainer.main(
        "train_dlrm",
        run,
        parse_arguments(arguments),
        {"auc": "test AUC", "normalized_entropy": "norm. entropy"},
    )


if __name__ == "__main__":
    main()
