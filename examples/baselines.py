"""Measures next-item models that are not trained: python examples/baselines.py [--data PATH] [--out
FILE]

Popularity, item-kNN (cosine similarity; older items of a user count less) and EASE (Steck 2019,
arXiv:1905.03375), with the split and the ranking of train_hstu.py. Each is fitted to the training
events, and to the validation events too. Its parameters are those with the best validation NDCG@10
when fitted to the training events.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trainer
from data.forms import add_form_options
from ranking_data import make_loader
from sequence_data import SequenceDataset
from train_hstu import COLUMNS, load_datasets
from training import (
    HelpFormatter,
    check_at_least_1,
    next_item_metrics,
    rank_unseen,
    save_json,
    seed_number,
)

USERS_AT_A_TIME = 512
GRID = {  # values of the parameters of each model
    "item-kNN": {
        "neighbours": (20, 50, 100, 200),
        "decay": (1.0, 0.98, 0.95, 0.9, 0.8, 0.7, 0.5),
        "shrink": (0, 10, 50),
    },
    "EASE": {"penalty": (20, 50, 100, 200, 500, 1000, 2000)},
}
Datasets = dict[str, SequenceDataset]


def counts(datasets: Datasets, with_valid: bool) -> torch.Tensor:
    """How often items were chosen by the same user, float64 [items, items]. An item that a user
    chose twice counts once."""
    log, held_out = datasets["train"].log, ("test",) if with_valid else ("valid", "test")
    fitted = np.ones(len(log), dtype=bool)
    for name in held_out:
        fitted[datasets[name].windows.end] = False
    events = torch.from_numpy(np.unique(np.stack([log.user, log.item])[:, fitted], axis=1))
    total = torch.zeros(log.num_items, log.num_items, dtype=torch.float64)
    for first in range(0, log.num_users, USERS_AT_A_TIME):
        near = (events[0] >= first) & (events[0] < first + USERS_AT_A_TIME)
        user, item = events[0, near] - first, events[1, near]
        chosen = torch.sparse_coo_tensor(
            torch.stack([item, user]),
            torch.ones(len(item), dtype=torch.float64),
            (log.num_items, USERS_AT_A_TIME),
            check_invariants=False,
        )
        total += torch.sparse.mm(chosen, chosen.to_dense().T)
    return total


def similarity(together: torch.Tensor, neighbours: int, shrink: float) -> torch.Tensor:
    """Item-kNN: cosines, shrunk towards 0 if few users chose the item, of the nearest `neighbours`
    of each item, [items, items]."""
    norm = together.diagonal().clamp(min=1).sqrt()
    cosine = together / (norm[:, None] * norm + shrink)
    cosine.fill_diagonal_(0)
    nearest = cosine.topk(min(neighbours, len(cosine)), dim=0)
    return torch.zeros_like(cosine).scatter_(0, nearest.indices, nearest.values)


def ease(together: torch.Tensor, penalty: float) -> torch.Tensor:
    """EASE: the linear model of each item by the others with the least squared error + penalty *
    squared weights, [items, items]."""
    inverse = torch.linalg.inv(together + penalty * torch.eye(len(together), dtype=torch.float64))
    weights = inverse / -inverse.diagonal()
    return weights.fill_diagonal_(0)


def evaluate(dataset: SequenceDataset, score: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Metrics of the scores [B, items] of users' ages [B, items]: the number of events since the
    user chose the item, infinite if never."""
    ranks = []
    for batch in make_loader(dataset, USERS_AT_A_TIME):
        seen = batch.seen["seen"]
        lengths, user = seen.lengths().long(), torch.arange(len(seen.lengths()))
        row = user.repeat_interleave(lengths)
        age = seen.offsets()[1:][row] - 1 - torch.arange(len(row))
        ages = torch.full((len(user), dataset.log.num_items), torch.inf, dtype=torch.float64)
        index = row * ages.shape[1] + seen.values()
        ages.view(-1).scatter_reduce_(0, index, age.double(), "amin")
        ranks.append(rank_unseen(score(ages), batch.next_items(), seen))
    return next_item_metrics(torch.cat(ranks))


def by_items(matrix: torch.Tensor, decay: float, ages: torch.Tensor) -> torch.Tensor:
    """The sum of the rows of a user's items, which are weighted by decay ** age."""
    weights = decay**ages if decay < 1 else (ages < torch.inf).double()
    return weights @ matrix


def scorers(name: str, together: torch.Tensor, settings: dict[str, Any]) -> Callable:
    """The scores of a model with these settings, for `evaluate`."""
    if name == "popularity":
        return lambda ages: together.diagonal().expand(len(ages), -1)
    if name == "EASE":
        return partial(by_items, ease(together, **settings), 1.0)
    own = {key: settings[key] for key in ("neighbours", "shrink")}
    return partial(by_items, similarity(together, **own), settings["decay"])


def choices(name: str) -> Iterable[dict[str, Any]]:
    grid = GRID.get(name, {})
    return (dict(zip(grid, values)) for values in product(*grid.values()))


def measure(datasets: Datasets) -> dict[str, dict[str, Any]]:
    """Settings and test metrics of each model, fitted without and with the validation events."""
    without, with_valid = (counts(datasets, each) for each in (False, True))
    results = {}
    for name in ("popularity", *GRID):
        best = max(
            choices(name),
            key=lambda own: evaluate(datasets["valid"], scorers(name, without, own))["ndcg@10"],
        )
        for label, together in ((name, without), (f"{name}, fitted to validation", with_valid)):
            test = evaluate(datasets["test"], scorers(name, together, best))
            results[label] = {"settings": best, "test": test}
    return results


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=HelpFormatter
    )
    parser.add_argument("--data", help="log, or its folder; generated if not given")
    add_form_options(parser)
    parser.add_argument("--users", type=int, default=800, help="users of the generated log")
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of the generated log")
    parser.add_argument("--out", type=Path, help="file for the metrics; none if not given")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.set_defaults(max_history=1, intervals=False, relative_time=0)
    options = parser.parse_args(arguments)
    check_at_least_1(parser, options, ("users", "threads"))
    torch.set_num_threads(options.threads)
    try:
        results = measure(load_datasets(options))
    except (ValueError, OSError) as error:
        sys.exit(f"baselines: {error}")
    trainer.print_table({"results": results}, COLUMNS)
    if options.out is not None:
        save_json(options.out, results)


if __name__ == "__main__":
    main()
