import json

import pytest
import schedule_picture
import torch


def test_every_way_deals_the_same_work_and_zigzag_deals_it_best():
    lengths = torch.randint(0, 300, (200,), generator=torch.Generator().manual_seed(0))
    loads = schedule_picture.loads_per_worker(lengths, max_length=1024, num_heads=2, block_m=128, block_n=64, num_workers=16)
    total = sum(2 * -(-n // 128) * -(-n // 64) for n in lengths.tolist())
    assert {name: int(load.sum()) for name, load in loads.items()} == dict.fromkeys(("dense enumeration", "valid tiles", "zigzag"), total)
    dense, valid, zigzag = map(schedule_picture.imbalance, loads.values())
    assert 1 <= zigzag < valid < dense


def test_loads_by_hand():
    """Two segments of 2 and 1 blocks, one head, room for 3 blocks: slots are [2, 2, -] and [1, -, -]."""
    loads = schedule_picture.loads_per_worker(torch.tensor([8, 4]), max_length=12, num_heads=1, block_m=4, block_n=4, num_workers=3)
    assert {name: load.tolist() for name, load in loads.items()} == {
        "dense enumeration": [3, 2, 0],
        "valid tiles": [2, 2, 1],
        "zigzag": [2, 2, 1],
    }


@pytest.mark.parametrize("sparsity", [0.1, 0.3, 0.5, 0.7, 1.0])
def test_lengths_have_the_mean_asked_for(sparsity):
    low, high = schedule_picture.length_range(512, sparsity)
    assert 1 <= low <= high <= 512
    assert (low + high) / 2 == pytest.approx(512 * sparsity, abs=1)


@pytest.mark.parametrize("sparsity", [0.0, -1.0, 1.5])
def test_a_sparsity_outside_its_range_is_refused(sparsity):
    with pytest.raises(ValueError, match=r"sparsity must be in \(0, 1\]"):
        schedule_picture.length_range(512, sparsity)


def test_the_command_writes_picture_and_figures(tmp_path, capsys):
    assert schedule_picture.main(["--batch", "64", "--max-length", "256", "--workers", "8", "--out", str(tmp_path)]) == 0
    (figures,) = tmp_path.glob("*.json")
    ratios = json.loads(figures.read_text())["makespan_over_mean"]
    assert list(ratios) == ["dense enumeration", "valid tiles", "zigzag"]
    assert figures.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert f"{ratios['zigzag']:.3f}" in capsys.readouterr().out
