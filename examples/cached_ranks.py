"""Compares the rankings of a next-item model with histories cached in 8 bits to those without a
cache: python examples/cached_ranks.py --weights FILE [--data PATH] [--json FILE]

FILE is a weights.pt of train_hstu.py. Each user's history without its last event is cached; the
last event comes with the request, attends to the cached keys and values, and the held-out item is
ranked among all that the user has not seen.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import Weights, load_weights
from sequence_model import ENCODERS
from serving_models import CACHE_DTYPES, DTYPES, make_ranker
from serving_rankers import Ranker, Request
from torchrec import JaggedTensor
from training import HelpFormatter, next_item_metrics, pick_device, rank_unseen, save_json

BATCH = 32  # users
CACHES = {"none": None, "as the model": None, **CACHE_DTYPES}
EVERYTHING = 2**62  # events


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=HelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True, help="weights.pt of train_hstu.py")
    parser.add_argument("--data", help="path of its log; the one that it had if not given")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--cache-mb", type=float, default=1000, help="budget of the cache")
    parser.add_argument("--page-rows", type=int, help="rows of the cache's pages, as served")
    parser.add_argument("--json", type=Path, help="file for the rows")
    return parser.parse_args(arguments)


def scores_of(ranker: Ranker) -> tuple[torch.Tensor, torch.Tensor, JaggedTensor]:
    """Scores [users, items] after the last event, the held-out items [users], and the items that
    each user has seen."""
    histories, items = ranker.histories, np.arange(ranker.histories.num_items)
    last = histories.take_last()
    users = [user for user in ranker.held_out if user in last]
    seen = [histories.window(user, last[user], EVERYTHING).item for user in users]
    scores = []
    for begin in range(0, len(users), BATCH):
        batch = users[begin : begin + BATCH]
        if ranker.cache is not None:
            ranker.score([Request(user, items[:1]) for user in batch if histories.length(user)])
        scores += ranker.score([Request(user, items, last[user]) for user in batch])
    targets = torch.tensor([ranker.held_out[user][0] for user in users])
    values = torch.from_numpy(np.concatenate(seen))
    lengths = torch.tensor([len(x) for x in seen])
    return torch.stack(scores), targets, JaggedTensor(values, lengths=lengths)


def best_unseen(scores: torch.Tensor, seen: JaggedTensor) -> torch.Tensor:
    """The 10 best unseen items of each user, or all of fewer, as a bool [users, items]."""
    owners = torch.arange(len(scores)).repeat_interleave(seen.lengths())
    scores = scores.index_put((owners, seen.values()), torch.tensor(-torch.inf))
    best = scores.topk(min(10, scores.shape[1]))
    return torch.zeros_like(scores, dtype=torch.bool).scatter(
        1, best.indices, best.values != -torch.inf
    )


def compare(weights: Weights, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each dtype of the model and each kind of cache. `equal_top_10`: share of users with
    the 10 items of the fp32 model without a cache; `top_10_in_common`: share of these items."""
    device, budget, rows, exact = pick_device(options.device), options.cache_mb * 1e6, [], None
    for dtype, cache in itertools.product(DTYPES, CACHES):
        kinds = dict(dtype=DTYPES[dtype], cache_dtype=CACHES[cache], page_rows=options.page_rows)
        cache_bytes = 0 if cache == "none" else int(budget)
        ranker = make_ranker(weights, device, cache_bytes, options.data, **kinds)
        scores, targets, seen = scores_of(ranker)
        best = best_unseen(scores, seen)
        exact = best if exact is None else exact
        if not exact.any():
            raise ValueError("each tested user has seen all items: there is nothing to rank")
        row = {"dtype": dtype, "cache": cache}
        row |= next_item_metrics(rank_unseen(scores, targets, seen), [10])
        row["equal_top_10"] = (best == exact).all(dim=1).double().mean().item()
        row["top_10_in_common"] = (best & exact).sum().item() / exact.sum().item()
        row |= {"appended": ranker.counts["appended"]}
        if ranker.cache is not None:
            kept = ranker.cache.statistics()
            row["users_per_gb"] = round(1e9 * kept.users / kept.bytes)
        rows.append(row)
        cells = (f"{x:.5g}" if isinstance(x, float) else x for x in row.values())
        print("  ".join(f"{name} {cell}" for name, cell in zip(row, cells)), flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    try:
        weights = load_weights(options.weights)
        if (model := weights.settings["model"]) not in ENCODERS:
            raise ValueError(f"{options.weights} must be of a next-item model, not {model}")
        rows = compare(weights, options)
    except (ValueError, OSError) as error:
        sys.exit(f"cached_ranks: {error}")
    if options.json is not None:
        save_json(options.json, {"torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    main()
