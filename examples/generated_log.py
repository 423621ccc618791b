"""A rating log with known structure, for runs without a data set.

Items belong to clusters. A user likes some clusters and dislikes others, and this taste drifts from
rating to rating. The best predictor of a rating is therefore how the user rated *similar* items
*recently*. Target attention can learn this; an average over the whole history cannot. If users are
selective, recent items also predict which items they select next.
"""

import numpy as np
from data.event_log import RatingLog


def generate_log(
    num_users: int = 800,
    num_items: int = 1200,
    num_clusters: int = 24,
    mean_length: int = 100,
    drift: float = 0.15,
    selectivity: float = 0.0,
    seed: int = 0,
) -> RatingLog:
    """Generate a random log of about `num_users * mean_length` ratings.

    Each rating is 1 + 4 sigmoid(taste[cluster] + quality + noise), rounded. A user's `taste`
    [clusters] starts as N(0, 2²). After each rating it moves one step of an Ornstein-Uhlenbeck
    process, taste ← sqrt(1 - drift²) taste + drift N(0, 2²), which keeps its variance.

    Args:
        num_users, num_items, num_clusters: sizes. Each item belongs to one cluster, which is its
            side feature `genre`.
        mean_length: mean number of ratings per user. Lengths are log-normal, at least 20 (as in
            MovieLens) and at most `num_items`.
        drift: in [0, 1]; 0: tastes never change.
        selectivity: weight of taste, relative to popularity, in the choice of a user's next item;
            0: popularity alone.
        seed: seed of the random generator.

    Raises:
        ValueError: drift is not in [0, 1], or num_items is below 20.
    """
    if not 0 <= drift <= 1:
        raise ValueError(f"drift must lie in [0, 1], not {drift}")
    if num_items < 20:
        raise ValueError(
            f"num_items must be at least 20, the fewest ratings of a user, not {num_items}"
        )
    random = np.random.default_rng(seed)
    cluster = random.integers(num_clusters, size=num_items)
    quality = random.normal(0.0, 0.7, size=num_items)
    # Zipf-like popularity, so that some items have many ratings and most have few.
    popularity = 1.0 / (10.0 + random.permutation(num_items))
    lengths = np.clip(
        random.lognormal(np.log(mean_length) - 0.32, 0.8, size=num_users), 20, num_items
    ).astype(np.int64)

    columns: dict[str, list[np.ndarray]] = {"user": [], "item": [], "rating": [], "timestamp": []}
    for user, length in enumerate(lengths):
        # Sample items without replacement by popularity and taste: repeatedly take the largest
        # Gumbel-perturbed log weight.
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
        # includes ties
        columns["timestamp"].append(
            random.integers(10**9) + np.cumsum(random.integers(0, 90, size=length))
        )
    genre = {item: [f"{number:03d}"] for item, number in enumerate(cluster)}
    return RatingLog.from_columns(
        **{name: np.concatenate(parts) for name, parts in columns.items()},
        item_categories={"genre": genre},
    )


def _drifting_tastes(
    random: np.random.Generator, length: int, num_clusters: int, drift: float
) -> np.ndarray:
    tastes = random.normal(0.0, 2.0, size=(length, num_clusters))
    for step in range(1, length):
        tastes[step] = np.sqrt(1.0 - drift**2) * tastes[step - 1] + drift * tastes[step]
    return tastes
