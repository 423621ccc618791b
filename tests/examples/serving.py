"""Trained models, rankers and requests for tests of serving."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import train_dlrm
import train_hstu
from checkpoints import load_weights
from serving_models import make_ranker
from serving_rankers import NONE, NewEvents, Ranker, Request

TINY = (
    "--device cpu --users 25 --epochs 1 --embedding-dim 16 --num-heads 2 --max-history 60".split()
)
PROGRAMS = {"attention": train_dlrm, "hstu": train_hstu}
CACHE = 10**7
CPU = torch.device("cpu")


def train(out: Path, name: str, *arguments: str) -> Path:
    """The file of weights of a small model."""
    PROGRAMS.get(name, train_dlrm).main([*TINY, "--out", str(out), *arguments])
    return out / name / "weights.pt"


def ranker_of(
    weights: Path,
    cache_bytes: int = CACHE,
    page_rows: int | None = None,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Ranker:
    options |= dict(page_rows=page_rows, dtype=dtype)
    return make_ranker(load_weights(weights), device, cache_bytes, **options)


def body_of(request: Request, ranker: Ranker, **fields: Any) -> dict[str, Any]:
    """The request as JSON, with the published ids, and further fields."""
    histories, ratings = ranker.histories, ranker.ratings or [None]
    events = [
        {"item": histories.items[i], "rating": ratings[r]}
        for i, r in zip(*request.events, strict=True)
    ]
    candidates = [histories.items[i] for i in request.candidates]
    return {
        "user": histories.users[request.user],
        "candidates": candidates,
        "events": events,
        **fields,
    }


class Requests:
    """Random requests for a ranker."""

    def __init__(self, ranker: Ranker, seed: int = 0):
        self.histories, self.num_ratings = ranker.histories, max(1, len(ranker.ratings))
        self.random = np.random.default_rng(seed)

    def of(self, user: int, events: int = 0, candidates: int | None = None) -> Request:
        count = int(self.random.integers(1, 9)) if candidates is None else candidates
        items = self.random.integers(self.histories.num_items, size=count + events)
        new = (
            NewEvents(items[count:], self.random.integers(self.num_ratings, size=events))
            if events
            else NONE
        )
        return Request(user, items[:count], new)

    def batch(self, size: int = 5) -> list[Request]:
        """Requests of distinct users, half of them with new events."""
        users = self.random.choice(self.histories.num_users, size, replace=False).tolist()
        return [
            self.of(user, events=int(self.random.integers(1, 4)) * int(self.random.integers(2)))
            for user in users
        ]
