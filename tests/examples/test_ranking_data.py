from dataclasses import replace

import numpy as np
import pytest
import torch
from data.event_log import RatingLog
from generated_log import generate_log
from hypothesis import given, settings
from hypothesis import strategies as st
from ranking_data import (
    SPLITS,
    RankingDataset,
    add_popularity,
    make_chunks,
    make_loader,
    split_by_time,
)


@st.composite
def rating_logs(draw):
    """Small logs with many ties in time, users of one rating included."""
    rating = st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(1, 5), st.integers(0, 12))
    rows = draw(st.lists(rating, min_size=1, max_size=80))
    return RatingLog.from_columns(*(np.array(column) for column in zip(*rows, strict=True)))


def parts(log):
    return {name: split_by_time(log) == index for index, name in enumerate(SPLITS)}


@settings(max_examples=200, deadline=None)
@given(rating_logs(), st.integers(1, 5), st.integers(1, 7))
def test_no_candidate_sees_its_own_time_or_later(log, chunk_size, max_history):
    for selected in parts(log).values():
        chunks = make_chunks(log, selected, chunk_size, max_history)
        candidates = np.concatenate(
            [np.arange(*span) for span in zip(chunks.start, chunks.end, strict=True)] or [[]]
        )
        assert candidates.tolist() == np.flatnonzero(selected).tolist()  # each exactly once
        for history_start, history_end, start, end in zip(*vars(chunks).values(), strict=True):
            assert 1 <= end - start <= chunk_size
            assert len(set(log.user[start:end])) == 1
            history = np.arange(history_start, history_end)
            earlier = np.flatnonzero(
                (log.user == log.user[start]) & (log.timestamp < log.timestamp[start])
            )
            assert history.tolist() == earlier[-max_history:].tolist()
            assert (log.timestamp[history][:, None] < log.timestamp[start:end]).all()


@settings(max_examples=200, deadline=None)
@given(rating_logs())
def test_split_is_by_time_within_each_user(log):
    part = split_by_time(log)
    for user in range(log.num_users):
        own, times = part[log.user == user], log.timestamp[log.user == user]
        assert (np.diff(own) >= 0).all()
        assert own[0] == 0
        for earlier, later in ((0, 1), (0, 2), (1, 2)):
            assert not set(times[own == earlier]) & set(times[own == later])


def test_split_sizes_without_ties():
    log = RatingLog.from_columns(np.zeros(50), np.arange(50), np.full(50, 3.0), np.arange(50))
    assert np.bincount(split_by_time(log)).tolist() == [40, 5, 5]


def batch_inputs(batch):
    return [
        tensor
        for keyed in (batch.ids, batch.users, batch.items)
        for tensor in (keyed.values(), keyed.lengths())
    ]


def test_inputs_do_not_depend_on_ratings_from_the_candidates_on():
    log = generate_log(num_users=20, num_items=60, mean_length=30, seed=0)
    chunks = make_chunks(log, parts(log)["test"], chunk_size=4)
    for index in range(len(chunks)):
        later = np.arange(len(log)) >= chunks.start[index]
        altered = replace(log, rating=np.where(later, 6.0 - log.rating, log.rating))
        before, after = (RankingDataset(each, chunks)[[index]] for each in (log, altered))
        for expected, actual in zip(batch_inputs(before), batch_inputs(after), strict=True):
            assert torch.equal(expected, actual)


def test_batch_equals_a_loop_over_the_log():
    log = generate_log(num_users=20, num_items=60, mean_length=30, seed=0)
    chunks = make_chunks(log, parts(log)["train"], chunk_size=5, max_history=9)
    picked = [3, 0, 11, 4]
    batch = RankingDataset(log, chunks)[picked]
    genre = log.item_features["genre"]
    rows, past = [], []
    for row, index in enumerate(picked):
        history = range(chunks.history_start[index], chunks.history_end[index])
        targets = range(chunks.start[index], chunks.end[index])
        rows.extend(targets)
        past.extend(history)
        jagged = {key: batch.ids[key].to_dense()[row].tolist() for key in batch.ids.keys()}
        assert jagged["history_item"] == log.item[list(history)].tolist()
        assert jagged["history_rating"] == (log.rating[list(history)] - 1).tolist()
        assert jagged["history_age"] == [
            int(np.log2(chunks.history_end[index] - position)) for position in history
        ]
        assert jagged["target_item"] == log.item[list(targets)].tolist()
        assert batch.users["user"].to_dense()[row].tolist() == [log.user[chunks.start[index]]]
    assert batch.labels.tolist() == (log.rating[rows] >= 4).astype(float).tolist()
    assert [bag.tolist() for bag in batch.items["genre"].to_dense()] == [
        genre.values[log.item[row], None].tolist() for row in past + rows
    ]


def test_popularity_counts_the_selected_ratings_in_powers_of_two():
    log = RatingLog.from_columns(
        np.arange(9), np.array([0, 0, 0, 0, 1, 1, 1, 2, 2]), np.full(9, 3.0), np.arange(9)
    )
    popularity = add_popularity(log, np.arange(9) < 7).item_features["popularity"]
    assert (popularity.values.tolist(), popularity.offsets.tolist(), popularity.cardinality) == (
        [2, 2, 0],
        [0, 1, 2, 3],
        3,
    )


def test_loader_visits_every_chunk_once_in_an_order_given_by_the_seed():
    log = generate_log(num_users=20, num_items=60, mean_length=30, seed=0)
    dataset = RankingDataset(log, make_chunks(log, parts(log)["train"]))

    def targets(seed, num_workers=0):
        return torch.cat(
            [
                batch.ids["target_item"].values()
                for batch in make_loader(dataset, 8, seed, num_workers)
            ]
        )

    assert torch.equal(targets(1), targets(1))
    assert torch.equal(targets(1), targets(1, num_workers=2))
    assert not torch.equal(targets(1), targets(2))
    assert torch.equal(targets(1).sort().values, targets(None).sort().values)
    assert torch.equal(targets(None), torch.from_numpy(log.item[parts(log)["train"]]))


@pytest.mark.parametrize("arguments", [{"chunk_size": 0}, {"max_history": 0}])
def test_bad_chunk_arguments(arguments):
    log = generate_log(num_users=2, num_items=30, mean_length=20)
    with pytest.raises(ValueError, match=f"{[*arguments][0]} must be at least 1, not 0"):
        make_chunks(log, np.ones(len(log), dtype=bool), **arguments)


def test_bad_split_fractions():
    log = generate_log(num_users=2, num_items=30, mean_length=20)
    with pytest.raises(
        ValueError, match="must be positive and leave some to train on, not 0.5 and 0.5"
    ):
        split_by_time(log, 0.5, 0.5)
