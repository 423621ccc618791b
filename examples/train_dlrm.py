"""Trains a DLRM-style ranking model on rating histories: python examples/train_dlrm.py [--data PATH] [--compare]

Without --data the log is generated. Writes into --out: metrics.json, curves.png and a checkpoint per trained model, from which
--resume continues to the same result as a run that was never interrupted.
"""

import argparse
import copy
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from generated_log import generate_log
from movielens import read_log
from ranking_data import SPLITS, RankingBatch, RankingDataset, add_popularity, make_chunks, make_loader, split_by_time
from ranking_model import INTERACTIONS, RankingModel
from torch.nn import functional
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from tqdm import tqdm
from training import (
    load_checkpoint,
    peak_memory,
    pick_device,
    ranking_metrics,
    save_checkpoint,
    save_curves,
    save_json,
    seed_epoch,
    time_steps,
)

# What a checkpoint must agree on to be resumed.
SETTINGS = (
    "data",
    "users",
    "seed",
    "batch_size",
    "chunk_size",
    "max_history",
    "embedding_dim",
    "num_heads",
    "dropout",
    "lr",
    "weight_decay",
    "average_decay",
    "bf16",
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", help="MovieLens log, or the folder it lies in; generated if not given")
    parser.add_argument("--users", type=int, default=800, help="users of the generated log")
    parser.add_argument("--interaction", choices=INTERACTIONS, default="attention", help="how a candidate meets its user's history")
    parser.add_argument("--compare", action="store_true", help="train all three interactions and print them side by side")
    parser.add_argument("--out", type=Path, default=Path("runs/dlrm"), help="folder for metrics, curves and checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints in --out")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="CPU threads; 1 where other programs keep the cores busy"
    )
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16 (GPU only)")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that build batches ahead")
    parser.add_argument("--batch-size", type=int, default=64, help="histories per batch")
    parser.add_argument("--chunk-size", type=int, default=8, help="most candidates that share a history")
    parser.add_argument("--max-history", type=int, default=200, help="most ratings in a history")
    parser.add_argument("--embedding-dim", type=int, default=64)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=1.0, help="of the embeddings, decoupled (AdamW)")
    parser.add_argument(
        "--average-decay", type=float, default=0.99, help="per step, of the running average of the weights that is evaluated"
    )
    options = parser.parse_args(arguments)
    for name in ("epochs", "batch_size", "embedding_dim", "num_heads", "users", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    if options.embedding_dim % options.num_heads:
        parser.error(f"--embedding-dim {options.embedding_dim} is not a multiple of --num-heads {options.num_heads}")
    return options


class Trainer:
    """A model, its optimizer, the running average of its weights, which is what gets evaluated, and the best average so far."""

    def __init__(self, options: argparse.Namespace, interaction: str, datasets: dict[str, RankingDataset], device: torch.device):
        self.options, self.datasets, self.device = options, datasets, device
        self.settings = {"interaction": interaction, **{name: getattr(options, name) for name in SETTINGS}}
        self.checkpoint = options.out / f"{interaction}.pt"
        torch.manual_seed(options.seed)
        self.model = RankingModel(datasets["train"], interaction, options.embedding_dim, options.num_heads, options.dropout).to(device)
        self.optimizer = self._make_optimizer()
        self.average, self.update_average = copy.deepcopy(self.model).eval(), get_ema_multi_avg_fn(options.average_decay)
        self.best_average = copy.deepcopy(self.average.state_dict())
        self.epochs: list[dict[str, float]] = []

    def _make_optimizer(self) -> torch.optim.Optimizer:
        tables = self.model.tables()
        others = [parameter for parameter in self.model.parameters() if parameter not in set(tables)]
        groups = [{"params": tables, "weight_decay": self.options.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.options.lr)

    def fit(self) -> None:
        """Trains what is missing of `epochs`; a checkpoint after each."""
        for epoch in range(len(self.epochs), self.options.epochs):
            begin = time.perf_counter()
            loss, examples = self._train_epoch(epoch)
            speed = examples / (time.perf_counter() - begin)
            held_out = self.evaluate("valid", self.average)
            if held_out["auc"] > max((past["valid_auc"] for past in self.epochs), default=0.0):
                self.best_average = copy.deepcopy(self.average.state_dict())
            self.epochs.append(
                {
                    "epoch": epoch + 1,
                    "loss": loss,
                    "valid_auc": held_out["auc"],
                    "valid_normalized_entropy": held_out["normalized_entropy"],
                    "examples_per_second": speed,
                }
            )
            self.save()
            tqdm.write(
                f"{self.settings['interaction']:>9}  epoch {epoch + 1}  loss {loss:.4f}  held-out AUC {held_out['auc']:.4f}"
                f"  normalised entropy {held_out['normalized_entropy']:.4f}  {speed:,.0f} examples/s"
            )

    def _train_epoch(self, epoch: int) -> tuple[float, int]:
        self.model.train()
        total, examples = torch.zeros((), device=self.device), 0
        loader = self.loader("train", shuffle_seed=seed_epoch(self.options.seed, epoch))
        with tqdm(loader, desc=f"epoch {epoch + 1}", leave=False) as progress:
            for batch in progress:
                batch = batch.to(self.device)
                loss = self.step(batch)
                total += loss * len(batch.labels)
                examples += len(batch.labels)
                if progress.n % 20 == 0:  # reading the loss waits for the device
                    progress.set_postfix(loss=f"{loss.item():.4f}")
        return total.item() / examples, examples

    def step(self, batch: RankingBatch) -> torch.Tensor:
        """One optimizer step; returns the mean log loss."""
        loss = functional.binary_cross_entropy_with_logits(self.logits(self.model, batch), batch.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.update_average(list(self.average.parameters()), list(self.model.parameters()), None)
        return loss.detach()

    def logits(self, model: RankingModel, batch: RankingBatch) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.bf16):
            return model(batch).float()

    @torch.no_grad()
    def evaluate(self, split: str, model: RankingModel) -> dict[str, float]:
        batches = (batch.to(self.device) for batch in self.loader(split))
        logits, labels = zip(*((self.logits(model, batch), batch.labels) for batch in batches), strict=True)
        return ranking_metrics(torch.cat(logits), torch.cat(labels))

    def test(self) -> dict[str, float]:
        """Metrics on the test split of the average that was best on the validation split."""
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


def load_datasets(options: argparse.Namespace) -> dict[str, RankingDataset]:
    """The datasets by split. Raises ValueError where a split lacks liked or disliked candidates."""
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
    """Trains what the options ask for and writes the files; returns what metrics.json holds."""
    torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    if options.bf16 and device.type != "cuda":
        raise ValueError(f"--bf16 needs a GPU; the device is {device}")
    datasets = load_datasets(options)
    trainers = {name: Trainer(options, name, datasets, device) for name in (INTERACTIONS if options.compare else (options.interaction,))}
    if options.resume:
        resumed = [trainer for trainer in trainers.values() if trainer.checkpoint.exists()]
        if not resumed:
            raise FileNotFoundError(f"--resume: no checkpoint {', '.join(f'{name}.pt' for name in trainers)} in {options.out}")
        for trainer in resumed:
            trainer.resume()

    results = {}
    for name, trainer in trainers.items():
        trainer.fit()
        results[name] = {"epochs": trainer.epochs, "test": trainer.test()}
    if options.compare:
        measure_steps(trainers, results, device)
    metrics = {"settings": {name: getattr(options, name) for name in (*SETTINGS, "epochs")}, "device": device.type, "results": results}
    save_json(options.out / "metrics.json", metrics)
    save_curves(options.out / "curves.png", {name: result["epochs"] for name, result in results.items()})
    return metrics


def measure_steps(trainers: dict[str, Trainer], results: dict[str, Any], device: torch.device, num_batches: int = 10) -> None:
    """Adds step time and peak memory to the results; training goes on in the measured steps, so this comes last."""
    loader = next(iter(trainers.values())).loader("train", shuffle_seed=0)
    batches = [batch.to(device) for batch, _ in zip(loader, range(num_batches), strict=False)]
    steps = {name: trainer.step for name, trainer in trainers.items()}
    seconds = time_steps(steps, batches, device)
    for name, step in steps.items():
        results[name]["step_ms"] = 1e3 * seconds[name]
        results[name]["peak_memory_mb"] = max(peak_memory(partial(step, batch), device) for batch in batches) / 1e6


def print_table(metrics: dict[str, Any]) -> None:
    """AUC and normalised entropy on the test split; where they were measured, milliseconds and peak tensor memory of a training step."""
    print(f"\n{'':>12}{'test AUC':>10}{'norm. entropy':>15}{'step ms':>10}{'peak MB':>10}")
    for name, result in metrics["results"].items():
        measured = [f"{result[key]:.1f}" if key in result else "-" for key in ("step_ms", "peak_memory_mb")]
        print(f"{name:>12}{result['test']['auc']:>10.4f}{result['test']['normalized_entropy']:>15.4f}{measured[0]:>10}{measured[1]:>10}")


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    try:
        metrics = run(options)
    except (ValueError, OSError) as error:
        sys.exit(f"train_dlrm: {error}")
    print_table(metrics)
    print(f"\nwritten to {options.out}: metrics.json, curves.png, {', '.join(f'{name}.pt' for name in metrics['results'])}")


if __name__ == "__main__":
    main()
