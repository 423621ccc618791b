"""Measures next-item models that are not trained: python examples/baselines.py [--data PATH] [--out
FILE]

Popularity, item-kNN (cosine similarity) and EASE (Steck 2019, arXiv:1905.03375), with the split and
the ranking of train_hstu.py. With a decay, older items of a user count less. Each model is fitted
to the training events, and to the validation events too. Its parameters are those with the best
validation NDCG@10 when it is fitted to the training events.
"""

import sys
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trainer
from ranking_data import make_loader
from sequence_data import SequenceBatch, SequenceDataset
from torch.nn import functional
from train_hstu import COLUMNS, load_datasets
from training import (
    check_at_least_1,
    next_item_metrics,
    pick_device,
    rank_unseen,
    save_json,
    seed_number,
)

USERS_AT_A_TIME = 512
MOST_ITEMS = 40_000  # a matrix of all pairs then takes 13 GB
DECAYS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
Datasets = dict[str, SequenceDataset]


def counts(datasets: Datasets, with_valid: bool, device: torch.device) -> torch.Tensor:
    """How often items were chosen by the same user, float64 [items, items]. An item that a user
    chose twice counts once."""
    log, held_out = datasets["train"].log, ("test",) if with_valid else ("valid", "test")
    fitted = np.ones(len(log), dtype=bool)
    for name in held_out:
        fitted[datasets[name].windows.end] = False
    events = torch.from_numpy(np.unique(np.stack([log.user, log.item])[:, fitted], axis=1))
    events = events.to(device)
    total = torch.zeros(log.num_items, log.num_items, dtype=torch.float64, device=device)
    for first in range(0, log.num_users, USERS_AT_A_TIME):
        near = (events[0] >= first) & (events[0] < first + USERS_AT_A_TIME)
        user, item = events[0, near] - first, events[1, near]
        chosen = torch.sparse_coo_tensor(
            torch.stack([item, user]),
            total.new_ones(len(item)),
            (log.num_items, USERS_AT_A_TIME),
            check_invariants=False,
        )
        total.addmm_(chosen, chosen.to_dense().T)
    return total


def similarity(together: torch.Tensor, neighbours: int, shrink: float) -> torch.Tensor:
    """Item-kNN: cosines, shrunk towards 0 if few users chose the item, of the nearest `neighbours`
    of each item, [items, items]."""
    norm = together.diagonal().clamp(min=1).sqrt()
    cosine = (norm[:, None] * norm).add_(shrink)
    torch.div(together, cosine, out=cosine).fill_diagonal_(0)
    nearest = cosine.topk(min(neighbours, len(cosine)))  # in rows, as it is symmetric
    return cosine.zero_().scatter_(0, nearest.indices.T, nearest.values.T)


def ease(together: torch.Tensor, penalty: float) -> torch.Tensor:
    """EASE: the linear model of each item by the others with the least squared error + penalty *
    squared weights, [items, items]."""
    gram = together.clone()  # which each step overwrites: it may take 13 GB
    gram.diagonal().add_(penalty)
    torch.linalg.cholesky(gram, out=gram)
    torch.cholesky_inverse(gram, out=gram)  # half the work of inv
    gram /= -gram.diagonal().clone()
    return gram.fill_diagonal_(0)


def popularity(together: torch.Tensor) -> torch.Tensor:
    """The number of users of each item, for whatever a user chose, [items, items]."""
    # contiguous, or embedding_bag copies it at each call
    return together.diagonal().expand_as(together).contiguous()


def batches_of(dataset: SequenceDataset, device: torch.device) -> list[SequenceBatch]:
    return [batch.to(device) for batch in make_loader(dataset, USERS_AT_A_TIME)]


def evaluate(batches: list[SequenceBatch], matrix: torch.Tensor, decay: float) -> dict[str, float]:
    """Metrics of scores that are the sum of the rows of a user's items in `matrix` [items, items],
    each times decay to the power of how many events of the user followed its last choice."""
    ranks = []
    for batch in batches:
        seen = batch.seen["seen"]
        lengths = seen.lengths().long()
        row = torch.arange(len(lengths), device=matrix.device).repeat_interleave(lengths)
        age = seen.offsets()[1:][row] - 1 - torch.arange(len(row), device=matrix.device)
        place = row * len(matrix) + seen.values()
        latest = age.new_full((len(lengths) * len(matrix),), len(row)).scatter_reduce_(
            0, place, age, "amin"
        )
        weights = decay ** age.to(matrix.dtype) * (age == latest[place])
        scores = functional.embedding_bag(
            seen.values(), matrix, seen.offsets()[:-1], mode="sum", per_sample_weights=weights
        )
        ranks.append(rank_unseen(scores, batch.next_items(), seen))
    return next_item_metrics(torch.cat(ranks))


MODELS = {  # fit: values of its parameters, decays by model
    popularity: ({}, {"popularity": DECAYS[:1]}),
    similarity: (
        {"neighbours": (20, 50, 100, 200, 500), "shrink": (0, 10, 50)},
        {"item-kNN": DECAYS},
    ),
    ease: (
        {"penalty": (10, 30, 100, 300, 1000, 3000)},
        {"EASE": DECAYS[:1], "EASE, decay": DECAYS[1:]},
    ),
}


def measure(datasets: Datasets, device: torch.device) -> dict[str, dict[str, Any]]:
    """Settings and test metrics of each model, fitted without and with the validation events.

    Raises ValueError if there are more than `MOST_ITEMS` items.
    """
    if (found := datasets["train"].log.num_items) > MOST_ITEMS:
        raise ValueError(f"a log must have at most {MOST_ITEMS:,} items, not {found:,}")
    without, with_valid = (counts(datasets, each, device) for each in (False, True))
    valid, test = (batches_of(datasets[name], device) for name in ("valid", "test"))
    results = {}
    for fit, (grid, models) in MODELS.items():
        best = dict.fromkeys(models, (-1.0, {}, 1.0))
        for values in product(*grid.values()):
            settings = dict(zip(grid, values))
            matrix = fit(without, **settings)
            for name, decays in models.items():
                for decay in decays:
                    found = evaluate(valid, matrix, decay)["ndcg@10"]
                    best[name] = max(best[name], (found, settings, decay), key=itemgetter(0))
        for name, (_, settings, decay) in best.items():
            for label, together in ((name, without), (f"{name}, fitted to validation", with_valid)):
                metrics = evaluate(test, fit(together, **settings), decay)
                results[label] = {"settings": {**settings, "decay": decay}, "test": metrics}
    return results


def main(arguments: list[str] | None = None) -> None:
    parser = trainer.log_parser(__doc__.partition("\n\n")[0])
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of the generated log")
    parser.add_argument("--out", type=Path, help="file for the metrics; none if not given")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.set_defaults(max_history=1, intervals=False, relative_time=0)
    options = parser.parse_args(arguments)
    check_at_least_1(parser, options, ("users", "threads"))
    torch.set_num_threads(options.threads)
    try:
        results = measure(load_datasets(options), pick_device(options.device))
    except (ValueError, OSError) as error:
        sys.exit(f"baselines: {error}")
    trainer.print_table({"results": results}, COLUMNS)
    if options.out is not None:
        save_json(options.out, results)


if __name__ == "__main__":
    main()
