"""Trains a DLRM-style ranking model on rating histories: python examples/train_dlrm.py [--data PATH] [--compare]

Without --data the log is generated. Writes into --out: metrics.json, curves.png and a checkpoint per trained model, from which
--resume continues to the same result as a run that was never interrupted.
"""

import argparse
import copy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from tqdm import tqdm

from generated_log import generate_log
from movielens import RatingLog, read_log
from ranking_data import SPLITS, RankingBatch, RankingDataset, make_chunks, make_loader, split_by_time
from ranking_model import INTERACTIONS, RankingModel
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
SETTINGS = ("data", "users", "seed", "batch_size", "chunk_size", "max_history", "embedding_dim", "num_heads", "dropout", "lr", "weight_decay", "bf16")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", help="MovieLens log, or the folder it lies in; generated if not given")
    parser.add_argument("--users", type=int, default=800, help="users of the generated log")
    parser.add_argument("--interaction", choices=INTERACTIONS, default="attention", help="how a candidate meets its user's history")
    parser.add_argument("--compare", action="store_true", help="train all three interactions and print them side by side")
    parser.add_argument("--out", type=Path, default=Path("runs/dlrm"), help="folder for metrics, curves and checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints in --out")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16 (GPU only)")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that build batches ahead")
    parser.add_argument("--batch-size", type=int, default=32, help="histories per batch")
    parser.add_argument("--chunk-size", type=int, default=16, help="most candidates that share a history")
    parser.add_argument("--max-history", type=int, default=200, help="most ratings in a history")
    parser.add_argument("--embedding-dim", type=int, default=64)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.3, help="of the embeddings, decoupled (AdamW)")
    options = parser.parse_args(arguments)
    for name in ("epochs", "batch_size", "embedding_dim", "num_heads", "users"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    if options.embedding_dim % options.num_heads:
        parser.error(f"--embedding-dim {options.embedding_dim} is not a multiple of --num-heads {options.num_heads}")
    return options


class Trainer:
    """A model with its optimizer, curves and best weights so far; everything a checkpoint holds."""

    def __init__(self, options: argparse.Namespace, interaction: str, datasets: dict[str, RankingDataset], device: torch.device):
        self.options, self.datasets, self.device = options, datasets, device
        self.settings = {"interaction": interaction, **{name: getattr(options, name) for name in SETTINGS}}
        self.checkpoint = options.out / f"{interaction}.pt"
        torch.manual_seed(options.seed)
        self.model = RankingModel(datasets["train"], interaction, options.embedding_dim, options.num_heads, options.dropout).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameter_groups(options.weight_decay), lr=options.lr, weight_decay=0.0)
        self.epochs: list[dict[str, float]] = []
        self.best_model = copy.deepcopy(self.model.state_dict())

    def fit(self) -> None:
        """Trains what is missing of `epochs`; a checkpoint after each."""
        for epoch in range(len(self.epochs), self.options.epochs):
            begin = time.perf_counter()
            loss, examples = self._train_epoch(epoch)
            speed = examples / (time.perf_counter() - begin)
            held_out = self.evaluate("valid")
            if held_out["auc"] > max((past["valid_auc"] for past in self.epochs), default=0.0):
                self.best_model = copy.deepcopy(self.model.state_dict())
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
        with tqdm(self.batches("train", shuffle_seed=seed_epoch(self.options.seed, epoch)), desc=f"epoch {epoch + 1}", leave=False) as progress:
            for batch in progress:
                loss = self.step(batch)
                total += loss * len(batch.labels)
                examples += len(batch.labels)
                if progress.n % 20 == 0:  # reading the loss waits for the device
                    progress.set_postfix(loss=f"{loss.item():.4f}")
        return total.item() / examples, examples

    def step(self, batch: RankingBatch) -> torch.Tensor:
        """One optimizer step; returns the mean log loss."""
        loss = functional.binary_cross_entropy_with_logits(self.logits(batch), batch.labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def logits(self, batch: RankingBatch) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.bf16):
            return self.model(batch).float()

    @torch.no_grad()
    def evaluate(self, split: str) -> dict[str, float]:
        self.model.eval()
        logits, labels = zip(*((self.logits(batch), batch.labels) for batch in self.batches(split)), strict=True)
        return ranking_metrics(torch.cat(logits), torch.cat(labels))

    def batches(self, split: str, shuffle_seed: int | None = None) -> Iterator[RankingBatch] | DataLoader:
        options = self.options
        return make_loader(self.datasets[split], options.batch_size, self.device, shuffle_seed, options.num_workers)

    def save(self) -> None:
        state = {"settings": self.settings, "epochs": self.epochs, "best_model": self.best_model}
        save_checkpoint(self.checkpoint, {**state, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def resume(self) -> None:
        state = load_checkpoint(self.checkpoint, self.settings, self.device)
        self.epochs, self.best_model = state["epochs"], state["best_model"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
