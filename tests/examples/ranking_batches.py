"""A small ranking model's config and tables, and batches of random ids for it."""

import torch
from ranking_data import RankingBatch, TableSizes, keyed
from ranking_model import RankingConfig

EMBEDDING_DIM, NUM_HEADS = 16, 2
CONFIG = RankingConfig(
    embedding_dim=EMBEDDING_DIM,
    num_heads=NUM_HEADS,
    dropout=0.0,
    block_size=16,
    max_history=12,
    max_stream=50,
    max_candidates=4,
)
TABLES = TableSizes(
    items=50,
    ratings=5,
    ages=6,
    user_features={"user": 9, "city": 7},
    item_features={"genre": 8, "price": 5},
)


def make_batch(past, stream, targets, seed=0):
    """A batch of random ids, with these numbers of events in histories and streams, and of
    candidates."""
    generator = torch.Generator().manual_seed(seed)

    def ids(rows, lengths):
        return torch.randint(rows, (sum(lengths),), generator=generator).numpy(), torch.tensor(
            lengths, dtype=torch.int64
        ).numpy()

    sequences = {
        **{
            f"history_{name}": ids(getattr(TABLES, f"{name}s"), past)
            for name in ("item", "rating", "age")
        },
        **{
            f"stream_{name}": ids(getattr(TABLES, f"{name}s"), stream)
            for name in ("item", "rating")
        },
        "target_item": ids(TABLES.items, targets),
    }
    return RankingBatch(
        ids=keyed(sequences),
        users=keyed(
            {name: ids(rows, [1] * len(past)) for name, rows in TABLES.user_features.items()}
        ),
        items=keyed(
            {
                name: ids(rows, [1] * (sum(past) + sum(targets)))
                for name, rows in TABLES.item_features.items()
            }
        ),
        labels=torch.randint(2, (sum(targets),), generator=generator).float(),
    )


BATCHES = {  # events of histories, of streams, candidates
    "of all lengths": ([5, 0, 12, 1], [33, 0, 50, 16], [2, 1, 4, 3]),
    "without candidates of a user": ([5, 7, 2], [20, 7, 17], [2, 0, 3]),
    "of one user": ([9], [40], [3]),
    "without events": ([0, 0], [0, 0], [1, 2]),
    "without anything": ([0], [0], [0]),
}
