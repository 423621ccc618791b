"""Code shared by the training programs: options, the loop over epochs, checkpoints, and output files. training.py has the helpers."""

import argparse
import copy
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranking_data import make_loader
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from training import (
    load_checkpoint,
    peak_memory,
    pick_device,
    save_checkpoint,
    save_curves,
    save_json,
    seed_epoch,
    time_steps,
)

# Options that must equal those of the checkpoint to resume from it.
SETTINGS = (
    "data",
    "users",
    "seed",
    "batch_size",
    "max_history",
    "embedding_dim",
    "num_heads",
    "dropout",
    "lr",
    "weight_decay",
    "average_decay",
    "bf16",
)


def make_parser(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of the options that all programs have. `defaults`: default values that differ between programs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", help="MovieLens log, or its folder; generated if not given")
    parser.add_argument("--users", type=int, default=800, help="users of the generated log")
    parser.add_argument("--compare", action="store_true", help="train all the models and print them side by side")
    parser.add_argument("--out", type=Path, help="folder for metrics, curves and checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints in --out")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; more are slower if other programs keep the cores busy")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16 (GPU only)")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that build batches ahead")
    parser.add_argument("--batch-size", type=int, help="histories per batch")
    parser.add_argument("--max-history", type=int, default=200, help="maximum number of ratings in a history")
    parser.add_argument("--embedding-dim", type=int, default=64)
    parser.add_argument("--num-heads", type=int)
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, help="decoupled weight decay of the embeddings (AdamW)")
    parser.add_argument(
        "--average-decay", type=float, default=0.99, help="decay per step of the running average of weights, which is evaluated"
    )
    parser.set_defaults(**defaults)
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None, at_least_1: tuple[str, ...] = ()) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    for name in ("epochs", "batch_size", "embedding_dim", "num_heads", "users", "threads", *at_least_1):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    if options.embedding_dim % options.num_heads:
        parser.error(f"--embedding-dim {options.embedding_dim} is not a multiple of --num-heads {options.num_heads}")
    return options


class Trainer(ABC):
    """A model, its optimizer, the running average of its weights, and the best average so far. The average is evaluated.

    Programs subclass it and define the two class attributes, `make_model`, `loss` and `evaluate`.

    Args:
        options: options of the program.
        name: name of the model and of its checkpoint.
        datasets: datasets by split. A batch has `len`, the number of its examples, and `to(device)`.
        device: device to train on.
    """

    metrics: dict[str, str]  # metric of `evaluate` → label; the first decides which epoch is best, higher is better
    own_settings: tuple[str, ...]  # further options, besides `SETTINGS`, that must equal those of the checkpoint

    def __init__(self, options: argparse.Namespace, name: str, datasets: dict[str, Dataset], device: torch.device):
        self.options, self.name, self.datasets, self.device = options, name, datasets, device
        self.settings = {"model": name, **{setting: getattr(options, setting) for setting in (*SETTINGS, *self.own_settings)}}
        self.checkpoint = options.out / f"{name}.pt"
        torch.manual_seed(options.seed)
        self.model = self.make_model().to(device)
        self.optimizer = self._make_optimizer()
        self.average, self.update_average = copy.deepcopy(self.model).eval(), get_ema_multi_avg_fn(options.average_decay)
        self.best_average = copy.deepcopy(self.average.state_dict())
        self.epochs: list[dict[str, float]] = []

    @abstractmethod
    def make_model(self) -> nn.Module:
        """The model. Its `tables()` are the embedding tables, which have weight decay."""

    @abstractmethod
    def loss(self, batch) -> torch.Tensor:
        """The mean loss of the batch's examples."""

    @abstractmethod
    def evaluate(self, split: str, model: nn.Module) -> dict[str, float]:
        """The model's `metrics` on a split."""

    def _make_optimizer(self) -> torch.optim.Optimizer:
        tables = self.model.tables()
        others = [parameter for parameter in self.model.parameters() if parameter not in set(tables)]
        groups = [{"params": tables, "weight_decay": self.options.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.options.lr)

    def fit(self) -> None:
        """Train the remaining epochs, with a checkpoint after each."""
        first = f"valid_{next(iter(self.metrics))}"
        for epoch in range(len(self.epochs), self.options.epochs):
            begin = time.perf_counter()
            loss, examples = self._train_epoch(epoch)
            speed = examples / (time.perf_counter() - begin)
            held_out = self.evaluate("valid", self.average)
            valid = {f"valid_{name}": value for name, value in held_out.items()}
            if valid[first] > max((past[first] for past in self.epochs), default=0.0):
                self.best_average = copy.deepcopy(self.average.state_dict())
            self.epochs.append({"epoch": epoch + 1, "loss": loss, **valid, "examples_per_second": speed})
            self.save()
            values = "  ".join(f"{label} {held_out[name]:.4f}" for name, label in self.metrics.items())
            tqdm.write(f"{self.name:>9}  epoch {epoch + 1}  loss {loss:.4f}  held-out {values}  {speed:,.0f} examples/s")

    def _train_epoch(self, epoch: int) -> tuple[float, int]:
        self.model.train()
        total, examples = torch.zeros((), device=self.device), 0
        loader = self.loader("train", shuffle_seed=seed_epoch(self.options.seed, epoch))
        with tqdm(loader, desc=f"epoch {epoch + 1}", leave=False) as progress:
            for batch in progress:
                loss = self.step(batch.to(self.device))
                total += loss * len(batch)
                examples += len(batch)
                if progress.n % 20 == 0:  # not at each step, because reading the loss synchronises with the device
                    progress.set_postfix(loss=f"{loss.item():.4f}")
        return total.item() / examples, examples

    def step(self, batch) -> torch.Tensor:
        """Run one optimizer step. Returns the mean loss."""
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.update_average(list(self.average.parameters()), list(self.model.parameters()), None)
        return loss.detach()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.bf16)

    def test(self) -> dict[str, float]:
        """Metrics on the test split, with the average that was best on the validation split."""
        best = copy.deepcopy(self.average)
        best.load_state_dict(self.best_average)
        return self.evaluate("test", best)

    def loader(self, split: str, shuffle_seed: int | None = None) -> DataLoader:
        options, pin = self.options, self.device.type == "cuda"
        return make_loader(self.datasets[split], options.batch_size, shuffle_seed, options.num_workers, pin)

    def save(self) -> None:
        state = {name: getattr(self, name).state_dict() for name in ("model", "average", "optimizer")}
        save_checkpoint(self.checkpoint, {"settings": self.settings, "epochs": self.epochs, "best_average": self.best_average, **state})

    def resume(self) -> None:
        state = load_checkpoint(self.checkpoint, self.settings, self.device)
        self.epochs, self.best_average = state["epochs"], state["best_average"]
        for name in ("model", "average", "optimizer"):
            getattr(self, name).load_state_dict(state[name])


def prepare_device(options: argparse.Namespace) -> torch.device:
    """Set the number of threads. Returns the device of the options."""
    torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    if options.bf16 and device.type != "cuda":
        raise ValueError(f"--bf16 needs a GPU; the device is {device}")
    return device


def train_all(trainers: dict[str, Trainer], options: argparse.Namespace, baselines: dict[str, dict[str, float]] | None = None) -> dict:
    """Resume (with --resume), train, test and write the files. Returns the content of metrics.json.

    Args:
        trainers: trainers by name. If there are several, their steps are measured too.
        baselines: test metrics of baselines without training, by name.
    """
    if options.resume:
        resumed = [trainer for trainer in trainers.values() if trainer.checkpoint.exists()]
        if not resumed:
            raise FileNotFoundError(f"--resume: no checkpoint {', '.join(f'{name}.pt' for name in trainers)} in {options.out}")
        for trainer in resumed:
            trainer.resume()

    results: dict[str, dict[str, Any]] = {}
    for name, trainer in trainers.items():
        trainer.fit()
        results[name] = {"epochs": trainer.epochs, "test": trainer.test()}
    if len(trainers) > 1:
        measure_steps(trainers, results)
    trainer = next(iter(trainers.values()))
    curves = {name: result["epochs"] for name, result in results.items()}
    save_curves(options.out / "curves.png", curves, *next(iter(trainer.metrics.items())))
    results |= {name: {"test": metrics} for name, metrics in (baselines or {}).items()}
    settings = {name: getattr(options, name) for name in (*SETTINGS, *trainer.own_settings, "epochs")}
    metrics = {"settings": settings, "device": trainer.device.type, "results": results}
    save_json(options.out / "metrics.json", metrics)
    return metrics


def measure_steps(trainers: dict[str, Trainer], results: dict[str, dict[str, Any]], num_batches: int = 10) -> None:
    """Add step time and peak memory to the results. Call it last: the measured steps train the models."""
    trainer = next(iter(trainers.values()))
    batches = [batch.to(trainer.device) for batch, _ in zip(trainer.loader("train", shuffle_seed=0), range(num_batches), strict=False)]
    steps = {name: trainer.step for name, trainer in trainers.items()}
    seconds = time_steps(steps, batches, trainer.device)
    for name, step in steps.items():
        results[name]["step_ms"] = 1e3 * seconds[name]
        results[name]["peak_memory_mb"] = max(peak_memory(partial(step, batch), trainer.device) for batch in batches) / 1e6


def main(program: str, run: Callable[[argparse.Namespace], dict], options: argparse.Namespace, columns: dict[str, str]) -> None:
    """Run the program. Print its test metrics, with `columns` (name: heading), and its files, or one line with the error."""
    try:
        metrics = run(options)
    except (ValueError, OSError) as error:
        sys.exit(f"{program}: {error}")
    print_table(metrics, columns)
    written = ["metrics.json", "curves.png", *(f"{name}.pt" for name, result in metrics["results"].items() if "epochs" in result)]
    print(f"\nwritten to {options.out}: {', '.join(written)}")


def print_table(metrics: dict[str, Any], columns: dict[str, str]) -> None:
    """Print the columns and, if measured, milliseconds and peak tensor memory of a training step."""
    widths = {name: max(10, len(heading) + 2) for name, heading in columns.items()}
    print(f"\n{'':>12}" + "".join(f"{heading:>{widths[name]}}" for name, heading in columns.items()) + f"{'step ms':>10}{'peak MB':>10}")
    for name, result in metrics["results"].items():
        values = "".join(f"{result['test'][column]:>{width}.4f}" for column, width in widths.items())
        measured = (f"{result[key]:.1f}" if key in result else "-" for key in ("step_ms", "peak_memory_mb"))
        print(f"{name:>12}{values}" + "".join(f"{value:>10}" for value in measured))
