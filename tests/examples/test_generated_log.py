import numpy as np
import pytest
from generated_log import generate_log


def same_cluster_agreement(log, min_gap, max_gap):
    """Correlation of a user's ratings of one cluster, `min_gap` to `max_gap` ratings apart, after
    subtracting each item's mean."""
    cluster = log.item_features["genre"].values[log.item_features["genre"].offsets[log.item]]
    residual = log.rating - (np.bincount(log.item, log.rating) / np.bincount(log.item))[log.item]
    pairs = []
    for gap in range(min_gap, max_gap):
        same = (log.user[gap:] == log.user[:-gap]) & (cluster[gap:] == cluster[:-gap])
        pairs.append(np.stack([residual[gap:][same], residual[:-gap][same]]))
    return np.corrcoef(np.concatenate(pairs, axis=1))[0, 1]


def test_log_depends_on_the_seed_only():
    first, again, other = (
        generate_log(num_users=20, num_items=60, mean_length=30, seed=seed) for seed in (3, 3, 4)
    )
    for name in ("user", "item", "rating", "timestamp"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert not np.array_equal(first.rating, other.rating[: len(first)])


def test_log_has_the_form_of_a_published_one():
    log = generate_log(num_users=30, num_items=60, mean_length=30, seed=0)
    assert set(np.unique(log.rating)) <= {1.0, 2.0, 3.0, 4.0, 5.0}
    # nobody rates an item twice
    assert len(np.unique(np.stack([log.user, log.item]), axis=1).T) == len(log)
    assert np.bincount(log.user).min() >= 20
    assert (np.diff(log.timestamp)[np.diff(log.user) == 0] >= 0).all()


def test_clusters_predict_and_tastes_drift():
    drifting, steady = (generate_log(num_users=300, drift=drift, seed=0) for drift in (0.3, 0.0))
    near, far = same_cluster_agreement(drifting, 1, 6), same_cluster_agreement(drifting, 60, 80)
    assert near > 0.5 and far < near / 3
    assert same_cluster_agreement(steady, 60, 80) > 0.5


def test_selective_users_stay_with_their_recent_clusters():
    def share_of_neighbours_in_one_cluster(selectivity):
        log = generate_log(num_users=50, selectivity=selectivity, seed=0)
        cluster = log.item_features["genre"].values[log.item]
        return (np.diff(cluster) == 0)[np.diff(log.user) == 0].mean()

    assert (
        share_of_neighbours_in_one_cluster(0.0)
        < 0.06
        < 0.12
        < share_of_neighbours_in_one_cluster(1.0)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"drift": 1.5}, "drift must lie in"), ({"num_items": 5}, "num_items must be at least 20")],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate_log(**arguments)
