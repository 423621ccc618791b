from dataclasses import replace

import numpy as np
import pytest
import torch
from data.event_log import EventLog, RatingLog
from generated_log import generate_log
from hypothesis import given, settings
from hypothesis import strategies as st
from ranking_data import make_loader
from sequence_data import (
    NUM_INTERVALS,
    SequenceDataset,
    leave_one_out,
    make_datasets,
    time_intervals,
)


@st.composite
def rating_logs(draw):
    """Small logs, users of one and two ratings included."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    user = np.repeat(np.arange(len(lengths)), lengths)
    return RatingLog.from_columns(
        user, np.arange(len(user)) % 7, np.full(len(user), 3.0), np.arange(len(user))
    )


@settings(max_examples=200, deadline=None)
@given(rating_logs(), st.integers(1, 5))
def test_the_last_item_is_tested_the_one_before_validated_and_the_others_are_trained_on_once(
    log, max_history
):
    expected = {"train": [], "valid": [], "test": []}  # (target row, input rows)
    for user in range(log.num_users):
        rows = np.flatnonzero(log.user == user).tolist()
        held_out = len(rows) >= 3
        if held_out:
            for name, back in (("valid", 2), ("test", 1)):
                expected[name].append((rows[-back], rows[:-back][-max_history:]))
        trained = rows[: len(rows) - 2 * held_out]
        # Counted from the latest input back, the windows hold `max_history` inputs each; an input
        # sees its window up to itself.
        for position, row in enumerate(trained[:-1]):
            from_the_end = len(trained) - 1 - position
            window_start = max(len(trained) - 1 - -(-from_the_end // max_history) * max_history, 0)
            expected["train"].append((row + 1, trained[window_start : position + 1]))
    for name, windows in leave_one_out(log, max_history).items():
        spans = [
            (int(start), int(end)) for start, end in zip(windows.start, windows.end, strict=True)
        ]
        if name == "train":
            found = [
                (row + 1, list(range(start, row + 1)))
                for start, end in spans
                for row in range(start, end)
            ]
        else:
            found = [(end, list(range(start, end))) for start, end in spans]
        assert sorted(found) == sorted(expected[name])
        assert all(0 < end - start <= max_history for start, end in spans)


def test_batch_equals_a_loop_over_the_log():
    log = generate_log(num_users=20, num_items=60, mean_length=30, seed=0)
    for dataset in make_datasets(log, max_history=9).values():
        picked = [3, 0, 11, 4]
        batch = dataset[picked]
        assert len(batch) == len(batch.targets)
        targets, next_items = [], []
        for row, index in enumerate(picked):
            start, end = int(dataset.windows.start[index]), int(dataset.windows.end[index])
            own = np.flatnonzero(log.user == log.user[start])
            jagged = {
                key: ids[key].to_dense()[row].tolist()
                for ids in (batch.ids, batch.seen)
                for key in ids.keys()
            }
            assert jagged["item"] == log.item[start:end].tolist()
            assert jagged["position"] == list(range(end - start))
            assert jagged["seen"] == log.item[own[own < end]].tolist()
            targets += log.item[start + 1 : end + 1].tolist()
            next_items.append(log.item[end])
        assert batch.targets.tolist() == targets
        assert batch.next_items().tolist() == next_items


def test_inputs_do_not_depend_on_the_held_out_items():
    log = generate_log(num_users=20, num_items=60, mean_length=30, seed=0)
    datasets = make_datasets(log, max_history=9)
    held_out = {"train": ("valid", "test"), "valid": ("valid", "test"), "test": ("test",)}
    for name, dataset in datasets.items():
        altered = log.item.copy()
        for split in held_out[name]:
            altered[datasets[split].windows.end] = 59 - altered[datasets[split].windows.end]
        everything = list(range(len(dataset)))
        before, after = (
            each[everything]
            for each in (dataset, SequenceDataset(replace(log, item=altered), dataset.windows))
        )
        for key in ("item", "position"):
            assert torch.equal(before.ids[key].values(), after.ids[key].values())
        assert torch.equal(before.seen.values(), after.seen.values())
        assert torch.equal(before.targets, after.targets) == (name == "train")


def test_interval_is_the_log_of_the_time_since_the_previous_event():
    seconds = [3.0, 3.0, 4.0, 7.0, 1e40, 0.0, 1024.0]
    log = RatingLog.from_columns(
        np.array([0, 0, 0, 0, 0, 1, 1]), np.arange(7), np.ones(7), np.array(seconds)
    )
    # Differences 0, 1, 3, too large for a bucket of their own, and 1024; the first of a user has no
    # previous event.
    assert time_intervals(log).tolist() == [0, 1, 2, 3, NUM_INTERVALS - 1, 0, 11]
    dataset = make_datasets(log, max_history=2, intervals=True)["valid"]
    assert dataset[[0]].ids["interval"].values().tolist() == [1, 2]
    untimed = EventLog(
        user=log.user, item=log.item, timestamp=None, users=log.users, items=log.items
    )
    assert "interval" not in make_datasets(untimed)["train"][[0]].ids.keys()
    with pytest.raises(ValueError, match="time intervals need timestamps"):
        make_datasets(untimed, intervals=True)


def test_intervals_of_large_timestamps():
    """float64 would round the first two to equal ones, and the difference of the last two is no
    int64."""
    times = np.array([2**60, 2**60 + 1, -(2**63), 2**63 - 1])
    log = RatingLog.from_columns(np.array([0, 0, 1, 1]), np.arange(4), np.ones(4), times)
    assert time_intervals(log).tolist() == [0, 2, 0, NUM_INTERVALS - 1]


def test_timestamps_are_those_of_inputs_and_targets_in_whole_seconds():
    log = RatingLog.from_columns(
        np.array([0] * 5 + [1] * 4), np.arange(9), np.ones(9), np.arange(9) ** 2 + 0.75
    )
    for name, dataset in make_datasets(log, max_history=2, timestamps=True).items():
        batch = dataset[list(range(len(dataset)))].add_rivals(torch.arange(3))
        item, target = batch.ids["item"].values(), batch.targets
        assert batch.timestamps.dtype == torch.int64
        assert torch.equal(batch.timestamps, item**2) and torch.equal(
            batch.next_timestamps, target**2
        ), name
        moved = batch.to(torch.device("meta"))
        assert [x.device.type for x in (moved.timestamps, moved.next_timestamps)] == ["meta"] * 2
    empty = dataset[[]]
    assert empty.timestamps.shape == empty.next_timestamps.shape == (0,)
    untimed = make_datasets(log)["train"][[0]].to(torch.device("cpu"))
    assert untimed.timestamps is untimed.next_timestamps is None
    with pytest.raises(ValueError, match="the log has no timestamps"):
        make_datasets(
            EventLog(
                user=log.user, item=log.item, timestamp=None, users=log.users, items=log.items
            ),
            timestamps=True,
        )


def test_loader_serves_every_window_once():
    dataset = make_datasets(
        generate_log(num_users=20, num_items=60, mean_length=30, seed=0), max_history=9
    )["train"]
    shuffled, in_order = (
        torch.cat([batch.targets for batch in make_loader(dataset, 8, seed)]) for seed in (1, None)
    )
    assert torch.equal(shuffled.sort().values, in_order.sort().values) and not torch.equal(
        shuffled, in_order
    )


def test_bad_arguments():
    log = generate_log(num_users=2, num_items=30, mean_length=20)
    with pytest.raises(ValueError, match="max_history must be at least 1, not 0"):
        leave_one_out(log, 0)
    with pytest.raises(ValueError, match="none of the 2 users has 3 events"):
        make_datasets(
            RatingLog.from_columns(np.array([0, 0, 1]), np.arange(3), np.full(3, 3.0), np.arange(3))
        )


def test_an_empty_share_of_a_batch_has_no_examples():
    dataset = make_datasets(generate_log(num_users=20, num_items=60, mean_length=30, seed=0))[
        "train"
    ]
    batch = dataset[[]].add_rivals(torch.arange(5))
    assert (
        len(batch) == len(batch.targets) == len(batch.last_inputs()) == len(batch.next_items()) == 0
    )
    assert batch.rivals.tolist() == [0, 1, 2, 3, 4]
