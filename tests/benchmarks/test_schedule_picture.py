import re

import pytest
import schedule_picture
import torch


def test_all_schedules_have_the_same_work_and_zigzag_is_the_most_even():
    lengths = torch.randint(0, 300, (200,), generator=torch.Generator().manual_seed(0))
    loads = schedule_picture.loads_per_worker(
        lengths, max_length=1024, num_heads=2, block_m=128, block_n=64, num_workers=16
    )
    total = sum(2 * -(-n // 128) * -(-n // 64) for n in lengths.tolist())
    assert {name: int(load.sum()) for name, load in loads.items()} == dict.fromkeys(
        ("dense enumeration", "valid tiles", "zigzag"), total
    )
    dense, valid, zigzag = map(schedule_picture.imbalance, loads.values())
    assert 1 <= zigzag < valid < dense


def test_loads_by_hand():
    """Two segments of 2 and 1 blocks, one head, room for 3 blocks: slots are [2, 2, -] and [1, -,
    -]."""
    loads = schedule_picture.loads_per_worker(
        torch.tensor([8, 4]), max_length=12, num_heads=1, block_m=4, block_n=4, num_workers=3
    )
    assert {name: load.tolist() for name, load in loads.items()} == {
        "dense enumeration": [3, 2, 0],
        "valid tiles": [2, 2, 1],
        "zigzag": [2, 2, 1],
    }


@pytest.mark.parametrize("num_workers", [1, 2, 7, 40])
@pytest.mark.parametrize("num_tiles", [0, 1, 7, 30])
def test_assignment_alternates_direction(num_tiles, num_workers):
    there_and_back = [*range(num_workers), *reversed(range(num_workers))]
    expected = [0] * num_workers
    for position in range(num_tiles):
        expected[there_and_back[position % len(there_and_back)]] += 2**position
    work = 2 ** torch.arange(num_tiles)
    assert schedule_picture.zigzag_loads(work, num_workers).tolist() == expected


@pytest.mark.parametrize("sparsity", [0.1, 0.3, 0.5, 0.7, 1.0])
def test_lengths_have_the_mean_asked_for(sparsity):
    low, high = schedule_picture.length_range(512, sparsity)
    assert 1 <= low <= high <= 512
    assert (low + high) / 2 == pytest.approx(512 * sparsity, abs=1)


@pytest.mark.parametrize("sparsity", [0.0, -1.0, 1.5])
def test_a_sparsity_outside_its_range_is_refused(sparsity):
    with pytest.raises(ValueError, match=r"sparsity must be in \(0, 1\]"):
        schedule_picture.length_range(512, sparsity)


def test_the_command_draws_and_prints_the_figures(tmp_path, capsys):
    picture = tmp_path / "new" / "schedule.png"
    assert (
        schedule_picture.main(
            ["--batch", "64", "--max-length", "256", "--workers", "8", "--out", str(picture)]
        )
        == 0
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = dict(
        re.findall(
            r"^(\w[\w ]*?) +makespan / mean ([\d.]+)$", capsys.readouterr().out, re.MULTILINE
        )
    )
    assert list(printed) == ["dense enumeration", "valid tiles", "zigzag"]
    assert 1 <= float(printed["zigzag"]) < float(printed["dense enumeration"])
