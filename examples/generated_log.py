"""A rating log with known structure, for runs without a data set.

Items fall into clusters. A user likes some clusters and dislikes others, and that taste drifts from rating to rating, so
what the user thought of *similar* items *lately* tells most about the next one: the structure that target attention can use and
an average over the whole history blurs. Where users are selective, what they took lately also tells which items they take next.
"""

import numpy as np
from movielens import RatingLog


def generate_log(
    num_users: int = 800,
    num_items: int = 1200,
    num_clusters: int = 24,
    mean_length: int = 100,
    drift: float = 0.15,
    selectivity: float = 0.0,
    seed: int = 0,
) -> RatingLog:
    """Draws a log of about `num_users * mean_length` ratings.

    Each rating is 1 + 4 sigmoid(taste[cluster] + quality + noise), rounded. `taste` [clusters] of a user starts as N(0, 2²) and
    moves one step of an Ornstein-Uhlenbeck process per rating, taste ← sqrt(1 - drift²) taste + drift N(0, 2²), which keeps its spread.

    Args:
        num_users, num_items, num_clusters: sizes; every item belongs to one cluster, given as the side feature `genre`.
        mean_length: mean ratings per user; lengths are log-normal, at least 20, as in MovieLens, at most `num_items`.
        drift: in [0, 1]; 0 keeps every taste for ever.
        selectivity: how much taste decides which item a user takes next, against popularity; 0 not at all.
        seed: of the generator.
    """
    if not 0 <= drift <= 1:
        raise ValueError(f"drift must lie in [0, 1], not {drift}")
    if num_items < 20:
        raise ValueError(f"num_items must be at least 20, the fewest ratings of a user, not {num_items}")
    random = np.random.default_rng(seed)
    cluster = random.integers(num_clusters, size=num_items)
    quality = random.normal(0.0, 0.7, size=num_items)
    # Zipf-like popularity, so that some items have many ratings and most have few.
    popularity = 1.0 / (10.0 + random.permutation(num_items))
    lengths = np.clip(random.lognormal(np.log(mean_length) - 0.32, 0.8, size=num_users), 20, num_items).astype(np.int64)

    columns: dict[str, list[np.ndarray]] = {"user": [], "item": [], "rating": [], "timestamp": []}
    for user, length in enumerate(lengths):
        # Sampling without replacement by popularity and taste: the largest of Gumbel-perturbed log weights, one after the other.
        appeal = np.log(popularity) + random.gumbel(size=num_items)
        tastes = _drifting_tastes(random, length, num_clusters, drift)
        item = np.empty(length, dtype=np.int64)
        for step, taste in enumerate(tastes):
            item[step] = np.argmax(appeal + selectivity * taste[cluster])
            appeal[item[step]] = -np.inf
        score = tastes[np.arange(length), cluster[item]] + quality[item]
        score = score + random.normal(0.0, 0.7, size=length)
        columns["user"].append(np.full(length, user))
        columns["item"].append(item)
        columns["rating"].append(np.rint(1.0 + 4.0 / (1.0 + np.exp(-score))))
        columns["timestamp"].append(random.integers(10**9) + np.cumsum(random.integers(0, 90, size=length)))  # some ties
    genre = {item: [f"{number:03d}"] for item, number in enumerate(cluster)}
    return RatingLog.from_columns(**{name: np.concatenate(parts) for name, parts in columns.items()}, item_tokens={"genre": genre})


def _drifting_tastes(random: np.random.Generator, length: int, num_clusters: int, drift: float) -> np.ndarray:
    tastes = random.normal(0.0, 2.0, size=(length, num_clusters))
    for step in range(1, length):
        tastes[step] = np.sqrt(1.0 - drift**2) * tastes[step - 1] + drift * tastes[step]
    return tastes
