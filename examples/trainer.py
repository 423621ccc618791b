"""Code shared by the training programs: options, the loop over epochs, checkpoints, and output
files. training.py has the helpers."""

import argparse
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import sharding
import torch
from checkpoints import check_settings, export_weights, find_checkpoint, save_checkpoint
from data.forms import add_form_options
from ranking_data import make_loader
from sharding import OptimizerSpec
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import Dataset
from tqdm import tqdm
from trackers import check_tracker, track
from training import (
    HelpFormatter,
    check_at_least_1,
    peak_memory,
    pick_device,
    save_curves,
    save_json,
    seconds,
    seed_epoch,
    seed_number,
    time_steps,
    with_config,
)

# Options that must equal those of the checkpoint to resume from it.
SETTINGS = (
    "data",
    "columns",
    "separator",
    "header",
    "time_unit",
    "users",
    "seed",
    "batch_size",
    "max_history",
    "embedding_dim",
    "num_heads",
    "dropout",
    "lr",
    "table_lr",
    "weight_decay",
    "average_decay",
    "bf16",
)


def log_parser(description: str) -> argparse.ArgumentParser:
    """A parser of the options of a log."""
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)
    parser.add_argument("--data", help="log, or its folder; generated if not given")
    add_form_options(parser)
    parser.add_argument("--users", type=int, default=800, help="users of the generated log")
    return parser


def make_parser(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of the options that all programs that train have. `defaults`: default values that
    differ between programs."""
    parser = log_parser(description)
    parser.add_argument(
        "--compare", action="store_true", help="train all the models and print them side by side"
    )
    parser.add_argument("--out", type=Path, help="folder for metrics, curves and checkpoints")
    parser.add_argument(
        "--tracker",
        metavar="KIND[:PLACE]",
        help="write the curves by tensorboard[:FOLDER], wandb[:PROJECT] or mlflow[:ADDRESS] too",
    )
    parser.add_argument(
        "--config",
        type=Path,
        help="JSON or TOML file with values of options, which the command line overrides",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the checkpoints in --out"
    )
    parser.add_argument("--epochs", type=int, help="passes over the training split")
    parser.add_argument(
        "--patience",
        type=int,
        default=0,
        help="stop after this many epochs without a better held-out result; 0: never",
    )
    parser.add_argument(
        "--seed",
        type=seed_number,
        default=0,
        help="first seed of weights, dropout and the order of batches",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="train from this many seeds, --seed and following; report mean and deviation",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="CPU threads; more are slower if other programs keep the cores busy",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=30,
        help="seconds that processes of torchrun wait for one another",
    )
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16 (GPU only)")
    parser.add_argument(
        "--num-workers", type=int, default=0, help="processes that build batches ahead"
    )
    chosen = "" if "batch_size" in defaults else "; --batch-events chooses it if not given"
    parser.add_argument(
        "--batch-size", type=int, help=f"histories per batch, of all processes together{chosen}"
    )
    parser.add_argument(
        "--max-history", type=int, default=200, help="maximum number of ratings in a history"
    )
    parser.add_argument(
        "--embedding-dim", type=int, default=64, help="width of the embeddings and of the layers"
    )
    parser.add_argument("--num-heads", type=int, help="attention heads")
    parser.add_argument("--dropout", type=float, help="dropout probability")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (AdamW)")
    parser.add_argument(
        "--weight-decay",
        type=float,
        help="decoupled weight decay of the embeddings (AdamW), without torchrun",
    )
    parser.add_argument(
        "--table-lr",
        type=float,
        default=0.05,
        help="learning rate of the embeddings (Adagrad), with torchrun",
    )
    parser.add_argument(
        "--sharding",
        choices=sharding.PLANS,
        default="auto",
        help="how torchrun's processes share the embedding tables",
    )
    sharding.add_exchange_options(parser)
    parser.add_argument(
        "--average-decay",
        type=float,
        default=0.99,
        help="decay per step of the running average of weights, which is evaluated",
    )
    parser.set_defaults(**defaults)
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: list[str] | None, at_least_1: tuple[str, ...] = ()
) -> argparse.Namespace:
    options = parser.parse_args(with_config(parser, arguments))
    sizes = (
        "epochs",
        "seeds",
        "batch_size",
        "max_history",
        "embedding_dim",
        "num_heads",
        "users",
        "threads",
    )
    check_at_least_1(parser, options, (*sizes, *at_least_1))
    unlimited = dict.fromkeys(
        ("lr", "table_lr", "weight_decay", "patience", "num_workers"), math.inf
    )
    for name, most in dict(dropout=1, average_decay=1, **unlimited).items():
        if not 0 <= getattr(options, name) <= most:  # NaN too
            parser.error(
                f"--{name.replace('_', '-')} must be 0 to {most}, not {getattr(options, name)}"
            )
    if options.embedding_dim % options.num_heads:
        parser.error(
            f"--embedding-dim {options.embedding_dim} is not a multiple of --num-heads"
            f" {options.num_heads}"
        )
    return options


class WeightAverage:
    """The running average of a model's weights, which is evaluated, and the best such average so
    far.

    An average is elementwise, so each rank averages what it holds: the dense weights, and its
    shards of the tables. That takes a pass over the tables at each step. With a decay of 0 the
    average is the weights themselves, at no cost.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.weights = {name: x for name, x in model.state_dict().items() if x.is_floating_point()}
        self.average = sharding.clone(self.weights) if decay else self.weights
        self.best = sharding.clone(self.weights)
        self._update = get_ema_multi_avg_fn(decay) if decay else None
        self._local = [sharding.local_tensors(weights) for weights in (self.average, self.weights)]

    def update(self) -> None:
        if self._update is not None:
            self._update(*self._local, None)

    def keep_as_best(self) -> None:
        sharding.copy(self.average, self.best)

    @contextmanager
    def in_model(self, weights: dict[str, Any]) -> Iterator[None]:
        """The model with these weights, `average` or `best`, which hold the model's own
        meanwhile."""
        sharding.swap(self.weights, weights)
        try:
            yield
        finally:
            sharding.swap(self.weights, weights)


class Trainer(ABC):
    """A model, its optimizer and the running average of its weights.

    Under torchrun the tables are sharded, each rank trains on its share of each batch, and every
    method is called by all ranks.

    Programs subclass it and define the two class attributes, `make_model`, `losses`, `predictions`
    and `score`.

    Args:
        options: options of the program.
        name: name of the model and of its checkpoints.
        datasets: datasets by split, with a `log` and a `vocabulary`. A batch is `Pipelineable`, and
            `len` is the number of its examples.
        device: device to train on.
    """

    # metric of `score` → label; the first decides which epoch is best, higher is better
    metrics: dict[str, str]
    # further options, besides `SETTINGS`, that must equal those of the checkpoint
    own_settings: tuple[str, ...]

    def __init__(
        self,
        options: argparse.Namespace,
        name: str,
        datasets: dict[str, Dataset],
        device: torch.device,
    ):
        self.options, self.name, self.datasets, self.device = options, name, datasets, device
        own = {setting: getattr(options, setting) for setting in (*SETTINGS, *self.own_settings)}
        self.vocabulary, log = datasets["train"].vocabulary, datasets["train"].log.fingerprint
        # torchrun decides about the optimizers.
        self.settings = {
            "model": name,
            **own,
            "torchrun": sharding.is_distributed(),
            "log_fingerprint": log,
        }
        self.checkpoints = options.out / name
        # a seed per rank, or all shards of a table would start with equal rows
        torch.manual_seed(options.seed + sharding.rank())
        self.model, self.optimizer = sharding.build(
            self.make_model,
            device,
            options.sharding,
            *self.optimizers(),
            sharding.exchange_of(options),
        )
        self.pipeline = sharding.make_pipeline(self.model, self.optimizer, device, self._forward)
        self.average = WeightAverage(self.model, options.average_decay)
        self.epochs: list[dict[str, float]] = []

    @abstractmethod
    def make_model(self, device: torch.device) -> nn.Module:
        """The model. Its `tables()` are the embedding tables."""

    @abstractmethod
    def losses(self, outputs: Any, batch: Any) -> torch.Tensor:
        """The loss of each example of the batch, from what the model returns for the batch."""

    @abstractmethod
    def predictions(self, outputs: Any, batch: Any) -> torch.Tensor:
        """What `score` needs to know of the batch: one row for each of the examples that are
        scored."""

    @abstractmethod
    def score(self, predictions: torch.Tensor) -> dict[str, float]:
        """The `metrics` of the predictions of a split."""

    def optimizers(self) -> tuple[OptimizerSpec, OptimizerSpec]:
        """The optimizers of the embedding tables and of the other parameters."""
        options = self.options
        if sharding.is_distributed():
            tables = OptimizerSpec(torch.optim.Adagrad, dict(lr=options.table_lr, eps=1e-8))
        else:
            tables = OptimizerSpec(
                torch.optim.AdamW, dict(lr=options.lr, weight_decay=options.weight_decay)
            )
        return tables, OptimizerSpec(torch.optim.AdamW, dict(lr=options.lr, weight_decay=0.0))

    def fit(self) -> None:
        """Train the remaining epochs, with a checkpoint after each, or until `patience` epochs in a
        row were not better than the best."""
        tracker = None if sharding.rank() else self.options.tracker
        with track(tracker, self.options.out, self.name, self.settings) as log:
            for epoch in range(len(self.epochs), self.options.epochs):
                if self.options.patience and epoch - self.best_epoch() >= self.options.patience:
                    break
                values = self._fit_epoch(epoch)
                self.epochs.append({"epoch": epoch + 1, **values})
                if self.best_epoch() == epoch + 1:
                    self.average.keep_as_best()
                save_checkpoint(
                    self.checkpoints, self.settings, self.vocabulary, self.epochs, self._state()
                )
                log({name.replace("@", "_"): x for name, x in values.items()}, epoch + 1)
                shown = "  ".join(
                    f"{label} {values[f'valid_{name}']:.4f}" for name, label in self.metrics.items()
                )
                tqdm.write(
                    f"{self.name:>9}  epoch {epoch + 1}  loss {values['loss']:.4f}  held-out"
                    f" {shown}  {values['examples_per_second']:,.0f} examples/s"
                )

    def _fit_epoch(self, epoch: int) -> dict[str, float]:
        """Train for an epoch. Returns the loss, the held-out results, and the speed."""
        begin = time.perf_counter()
        loss, examples = self._train_epoch(epoch)
        speed = examples / (time.perf_counter() - begin)
        held_out = self.evaluate("valid", self.average.average)
        valid = {f"valid_{name}": value for name, value in held_out.items()}
        return {"loss": loss, **valid, "examples_per_second": speed}

    def best_epoch(self) -> int:
        """The first epoch with the best held-out result, counted from 1; 0 before training."""
        metric = f"valid_{next(iter(self.metrics))}"
        return max(self.epochs, key=lambda epoch: epoch[metric])["epoch"] if self.epochs else 0

    def _train_epoch(self, epoch: int) -> tuple[float, int]:
        """The mean loss and the number of examples."""
        self.model.train()
        total, examples = torch.zeros((), device=self.device), 0
        batches = self.batches(
            "train", shuffle_seed=seed_epoch(self.options.seed, epoch, sharding.rank())
        )
        hidden = {"disable": True} if sharding.rank() else {}  # otherwise TQDM_DISABLE decides
        with tqdm(
            self.run(batches),
            desc=f"epoch {epoch + 1}",
            total=self.num_steps("train"),
            leave=False,
            **hidden,
        ) as progress:
            for losses in progress:
                total += losses.sum()
                examples += len(losses)
                # not at each step, because reading the loss synchronises with the device
                if progress.n % 20 == 0 and len(losses):
                    progress.set_postfix(loss=f"{losses.mean().item():.4f}")
        loss, examples = sharding.all_sum(total.item(), examples, device=self.device)
        return loss / examples, int(examples)

    def run(self, batches: Iterable) -> Iterator[torch.Tensor]:
        """Run a step of the pipeline for each batch: in training mode an optimizer step, which
        gives the losses of this rank's examples, in eval mode a forward, which gives their
        predictions."""
        for output in sharding.run_pipeline(self.pipeline, batches):
            if self.model.training:
                self.average.update()
            yield output

    def _forward(self, batch: Any) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The loss to backpropagate, and what `run` gives."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.bf16):
            outputs = self.model(batch)
            if not self.model.training:
                return None, self.predictions(outputs, batch)
            losses = self.losses(outputs, batch)
        return sharding.global_mean(losses), losses.detach()

    def step(self, batch: Any) -> None:
        """One training step by itself."""
        self.model.train()
        list(self.run([batch]))

    @torch.no_grad()
    def evaluate(self, split: str, weights: dict[str, Any]) -> dict[str, float]:
        """Metrics on a split of the model with these weights. All ranks return the metrics of all
        examples."""
        self.model.eval()
        with self.average.in_model(weights):
            predictions = torch.cat(list(self.run(self.batches(split))))
        return self.score(sharding.gather_rows(predictions))

    def test(self) -> dict[str, float]:
        """Metrics on the test split, with the average that was best on the validation split."""
        return self.evaluate("test", self.average.best)

    def batches(self, split: str, shuffle_seed: int | None = None) -> Iterable:
        """This rank's shares of the batches."""
        options, pin = self.options, self.device.type == "cuda"
        share = dict(rank=sharding.rank(), world_size=sharding.world_size())
        return make_loader(
            self.datasets[split],
            options.batch_size,
            shuffle_seed,
            options.num_workers,
            pin,
            **share,
        )

    def num_steps(self, split: str) -> int:
        return -(-len(self.datasets[split]) // self.options.batch_size)

    def _state(self) -> dict[str, Any]:
        weights = {
            "model": self.model.state_dict(),
            "average": self.average.average,
            "best_average": self.average.best,
        }
        return {**weights, "optimizer": sharding.optimizer_state(self.optimizer)}

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        checkpoint = find_checkpoint(self.checkpoints)
        if checkpoint is not None:
            check_settings(checkpoint, self.settings)
            sharding.init_optimizer_state(self.optimizer)
            checkpoint.load_into(self._state())
            self.epochs = checkpoint.epochs


def prepare_device(options: argparse.Namespace) -> torch.device:
    """Set the number of threads. Returns the device of the options, of torchrun's processes the one
    that `process_group` chose."""
    torch.set_num_threads(options.threads)
    device = sharding.rank_device(pick_device(options.device))
    if options.bf16 and device.type != "cuda":
        raise ValueError(f"--bf16 needs a GPU; the device is {device}")
    return device


def variant(options: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    """The options with other values."""
    return argparse.Namespace(**{**vars(options), **changes})


def seed_variants(options: argparse.Namespace) -> list[argparse.Namespace]:
    """The options of the run of each seed. Each of several runs has its own folder."""
    if options.seeds == 1:
        return [options]
    seeds = range(options.seed, options.seed + options.seeds)
    return [variant(options, seed=seed, out=options.out / f"seed-{seed}") for seed in seeds]


def train_all(
    models: dict[str, argparse.Namespace],
    make_trainer: Callable[[str, argparse.Namespace], Trainer],
    options: argparse.Namespace,
    baselines: dict[str, dict[str, float]] | None = None,
) -> dict[str, Any]:
    """Resume (with --resume), train, test and write the files, for each seed. Returns the content
    of metrics.json.

    Args:
        models: options of each model by its name. If there are several, their steps are measured
            too.
        make_trainer: makes the trainer of a model from its name and options. Those of one seed
            exist at a time.
        baselines: test metrics of baselines without training, by name.
    """
    if options.tracker is not None:
        check_tracker(options.tracker)
    runs = {name: seed_variants(own) for name, own in models.items()}
    if options.resume and not any(
        find_checkpoint(own.out / name) for name, seeds in runs.items() for own in seeds
    ):
        raise FileNotFoundError(f"--resume: no checkpoint {', '.join(models)} in {options.out}")

    by_seed: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in models}
    for seeds in zip(*runs.values(), strict=True):
        trainers = {name: make_trainer(name, own) for name, own in zip(models, seeds, strict=True)}
        for name, trainer in trainers.items():
            if options.resume:
                trainer.resume()
            trainer.fit()
            by_seed[name][str(trainer.options.seed)] = {
                "epochs": trainer.epochs,
                "test": trainer.test(),
            }
            # whose tables may not fit into the memory of one process
            if not sharding.is_distributed():
                export_weights(trainer.checkpoints)
    results = {name: summarise_seeds(of_seeds) for name, of_seeds in by_seed.items()}
    if len(trainers) > 1:
        measure_steps(trainers, results)
    trainer = next(iter(trainers.values()))
    curves = {
        name if options.seeds == 1 else f"{name}, seed {seed}": result["epochs"]
        for name, of_seeds in by_seed.items()
        for seed, result in of_seeds.items()
    }
    if sharding.rank() == 0:
        save_curves(options.out / "curves.png", curves, *next(iter(trainer.metrics.items())))
    results |= {name: {"test": metrics} for name, metrics in (baselines or {}).items()}
    settings = {
        name: getattr(options, name)
        for name in (*SETTINGS, *trainer.own_settings, "epochs", "patience", "seeds")
    }
    metrics = {"settings": settings, "device": trainer.device.type, "results": results}
    if sharding.rank() == 0:
        save_json(options.out / "metrics.json", metrics)
    return metrics


def summarise_seeds(by_seed: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The result of the only seed, or the mean and the sample standard deviation of the test
    metrics, and the result of each seed."""
    first, *others = by_seed.values()
    if not others:
        return first
    values = {
        metric: [result["test"][metric] for result in by_seed.values()] for metric in first["test"]
    }
    mean, deviation = (
        {metric: summary(x) for metric, x in values.items()} for summary in (fmean, stdev)
    )
    return {"test": mean, "test_deviation": deviation, "seeds": by_seed}


def measure_steps(
    trainers: dict[str, Trainer], results: dict[str, dict[str, Any]], num_batches: int = 10
) -> None:
    """Add step time and peak memory to the results. Call it last: the measured steps train the
    models."""
    trainer = next(iter(trainers.values()))
    batches = [
        batch.to(trainer.device)
        for batch, _ in zip(
            trainer.batches("train", shuffle_seed=0), range(num_batches), strict=False
        )
    ]
    steps = {name: trainer.step for name, trainer in trainers.items()}
    medians = time_steps(steps, batches, trainer.device)
    for name, step in steps.items():
        results[name]["step_ms"] = 1e3 * medians[name]
        results[name]["peak_memory_mb"] = (
            max(peak_memory(partial(step, batch), trainer.device) for batch in batches) / 1e6
        )


def main(
    program: str,
    run: Callable[[argparse.Namespace], dict],
    options: argparse.Namespace,
    columns: dict[str, str],
) -> None:
    """Run the program. Print its test metrics, with `columns` (name: heading), and its files, or
    one line with the error."""
    with sharding.process_group(options.device, options.timeout):
        try:
            metrics = run(options)
        except (ValueError, OSError) as error:
            sys.exit(f"{program}: {error}")
        print_table(metrics, columns)
        trained = [
            name
            for name, result in metrics["results"].items()
            if "epochs" in result or "seeds" in result
        ]
        folders = (
            trained if options.seeds == 1 else [own.out.name for own in seed_variants(options)]
        )
        written = ["metrics.json", "curves.png", *(f"{folder}/" for folder in folders)]
        print(f"\nwritten to {options.out}: {', '.join(written)}")


def print_table(metrics: dict[str, Any], columns: dict[str, str]) -> None:
    """Print the columns, of several seeds their means and deviations, and if measured, milliseconds
    and peak memory of a training step."""
    deviates = any("test_deviation" in result for result in metrics["results"].values())
    widths = {
        name: max(17 if deviates else 10, len(heading) + 2) for name, heading in columns.items()
    }
    first = max(12, *map(len, metrics["results"]))
    print(
        f"\n{'':>{first}}"
        + "".join(f"{heading:>{widths[name]}}" for name, heading in columns.items())
        + f"{'step ms':>10}{'peak MB':>10}"
    )
    for name, result in metrics["results"].items():
        values = "".join(
            f"{format_metric(result, column):>{width}}" for column, width in widths.items()
        )
        measured = (
            f"{result[key]:.1f}" if key in result else "-" for key in ("step_ms", "peak_memory_mb")
        )
        print(f"{name:>{first}}{values}" + "".join(f"{value:>10}" for value in measured))


def format_metric(result: dict[str, Any], name: str) -> str:
    deviation = f" ± {result['test_deviation'][name]:.4f}" if "test_deviation" in result else ""
    return f"{result['test'][name]:.4f}{deviation}"
