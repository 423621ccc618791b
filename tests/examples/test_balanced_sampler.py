import sys

import pytest
import torch
from balanced_sampler import (
    BalancedBatchSampler,
    ShuffledBatchSampler,
    attention_cost,
    idle,
    lognormal_lengths,
    main,
    rank_costs,
)
from torch.utils.data import DataLoader

LENGTHS = lognormal_lengths(1000, mean=300, sigma=1.0, longest=1000)


def epochs_of_all_ranks(costs, batch_size, world_size, **options):
    """The batches of each rank."""
    return [
        list(BalancedBatchSampler(costs, batch_size, rank, world_size, **options))
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 3, 56, 57, 300])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_sample_once_and_equal_counts(count, world_size, drop_last):
    ranks = epochs_of_all_ranks(LENGTHS[:count], 4, world_size, drop_last=drop_last)
    samples = [sample for batches in ranks for batch in batches for sample in batch]
    size = 4 * world_size
    assert len(set(samples)) == len(samples) == (count // size * size if drop_last else count)
    steps = list(zip(*ranks, strict=True))
    assert len(steps) == len(
        BalancedBatchSampler(LENGTHS[:count], 4, 0, world_size, drop_last=drop_last)
    )
    for i, step in enumerate(steps):
        counts = [len(batch) for batch in step]
        assert counts == [4] * world_size if i < count // size else max(counts) - min(counts) <= 1


def test_order_depends_on_seed_and_epoch_alone():
    sampler = BalancedBatchSampler(LENGTHS, 8, 1, 4, seed=5)
    first = list(sampler)
    assert list(sampler) == first == list(BalancedBatchSampler(LENGTHS.tolist(), 8, 1, 4, seed=5))
    torch.manual_seed(1)
    sampler.set_epoch(1)
    assert list(sampler) != first != list(BalancedBatchSampler(LENGTHS, 8, 1, 4, seed=6))
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_an_epoch_resumes_at_a_step():
    sampler = BalancedBatchSampler(LENGTHS, 8, 1, 4)
    sampler.set_epoch(2)
    whole = list(sampler)
    for step in (0, 5, len(whole), len(whole) + 1):
        sampler.set_epoch(2, step)
        assert list(sampler) == whole[step:] and len(sampler) == len(whole[step:])


def test_global_batches_are_those_of_a_shuffle():
    balanced, shuffled = (
        kind(LENGTHS, 8, 0, 4).assignment().flatten(1)
        for kind in (BalancedBatchSampler, ShuffledBatchSampler)
    )
    assert torch.equal(balanced.sort(dim=1).values, shuffled.sort(dim=1).values)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    # rank r has samples r, r + 4, r + 8, ...
    assert torch.equal(shuffled.view(-1, 4, 8).transpose(1, 2).flatten()[:1000], order)


@pytest.mark.parametrize("world_size, batch_size", [(2, 1), (2, 16), (8, 4), (64, 3)])
def test_costs_differ_by_at_most_the_range_of_a_round(world_size, batch_size):
    costs = attention_cost(LENGTHS.double(), 64)
    sampler = BalancedBatchSampler(costs, batch_size, 0, world_size)
    assigned = sampler.assignment()
    by_sample = torch.where(assigned >= 0, costs[assigned], 0)
    rounds = (
        by_sample.flatten(1)
        .sort(dim=1, descending=True)
        .values.unflatten(1, (batch_size, world_size))
    )
    spread = by_sample.sum(2).max(1).values - by_sample.sum(2).min(1).values
    assert (spread <= (rounds.max(2).values - rounds.min(2).values).max(1).values + 1e-6).all()


def test_ranks_wait_less():
    costs = attention_cost(LENGTHS.double(), 64)
    waits = [
        idle(rank_costs(kind(costs, 16, 0, 8, drop_last=True), costs))
        for kind in (ShuffledBatchSampler, BalancedBatchSampler)
    ]
    assert waits[1] < 0.03 < 0.25 < waits[0]


def test_a_rank_without_samples_has_an_empty_batch():
    assert epochs_of_all_ranks(torch.tensor([5, 9]), 2, 3) == [[[1]], [[0]], [[]]]


def test_data_loader_takes_its_batches():
    sampler = BalancedBatchSampler(LENGTHS, 8, 3, 4)
    loader = DataLoader(LENGTHS.tolist(), batch_sampler=sampler, collate_fn=list)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert list(loader) == [LENGTHS[batch].tolist() for batch in sampler]
    assert len(loader) == len(sampler) == 32


@pytest.mark.parametrize(
    "costs", [torch.ones(2, 2), torch.tensor([1.0, -1.0]), torch.tensor([float("nan")])]
)
def test_costs_must_be_numbers(costs):
    with pytest.raises(ValueError, match="^costs must be one number of 0 or more for each sample"):
        BalancedBatchSampler(costs, 1, 0, 1)


@pytest.mark.parametrize("sizes", [(0, 0, 1), (1, 1, 1), (1, -1, 1)])
def test_rank_is_one_of_the_ranks(sizes):
    with pytest.raises(
        ValueError, match="^batch_size must be 1 or more and rank one of world_size"
    ):
        BalancedBatchSampler(LENGTHS, *sizes)


@pytest.mark.parametrize(
    "options", [[], pytest.param(["--measure", "--steps", "2"], marks=pytest.mark.slow)]
)
def test_prints_idle_times(options, monkeypatch, capfd):
    sizes = "--samples 512 --mean 20 --longest 60 --width 16 --batch-size 4".split()
    monkeypatch.setattr(sys, "argv", ["balanced_sampler.py", *sizes, *options])
    main()
    out = capfd.readouterr().out
    assert out.count("tokens") == out.count("attention") == 4 and ("measured" in out) == bool(
        options
    )


def test_ranks_without_a_whole_step_have_no_idle_time(monkeypatch, capsys):
    arguments = "--samples 64 --mean 20 --longest 60 --width 16 --batch-size 4".split()
    monkeypatch.setattr(sys, "argv", ["balanced_sampler.py", *arguments])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        f"   64 | {cost:9} | needs --samples of at least 256" for cost in ("tokens", "attention")
    ]
    assert "nan" not in "".join(lines) and "%" in lines[-3]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--batch-size", "0"], "--batch-size must be at least 1, not 0"),
        (["--mean", "nan"], "--mean must be at least 1, not nan"),
        (["--sigma", "-1"], "--sigma must be a finite number of 0 or more, not -1.0"),
        (["--sigma", "inf"], "--sigma must be a finite number of 0 or more, not inf"),
        (
            ["--measure", "--samples", "671"],
            "--measure needs --samples of at least 2 * batch_size * (steps + 1) = 672, not 671",
        ),
    ],
)
def test_bad_options_end_with_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["balanced_sampler.py", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.endswith(f"error: {message}\n")
