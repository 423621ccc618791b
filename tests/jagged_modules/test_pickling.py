"""Every public container goes through pickle, copy, deepcopy and torch.save."""

import copy
import dataclasses
import inspect
import io
import pickle

import pytest
import torch

import jagged_modules as jm
from jagged_modules import functional as F


def _offsets():
    return torch.tensor([0, 2, 2, 5])


def _rows():
    return torch.randn(5, 32), _offsets()


def _prepared():
    return jm.Jagged(*_rows(), max_seqlen=3).prepare(num_heads=2, head_dim=16)


def _cache():
    with torch.no_grad():
        return jm.HSTUStack(32, 2, 2, jm.HSTUConfig(scaling_seqlen=9)).eval().cache(_rows())


CONTAINERS = {
    "AttentionMask": lambda: jm.AttentionMask(causal=True, num_targets=torch.tensor([1, 0, 2])),
    "RelativeBias": lambda: jm.RelativeBias(
        torch.randn(5), torch.randn(4), timestamps=torch.arange(5)
    ),
    "CacheStatistics": lambda: jm.CacheStatistics(1, 2, 3, 4, 5, 6, 7),
    "CandidateIndex": lambda: jm.CandidateIndex.from_map(torch.tensor([2, 0, 2]), 3),
    "GDPAConfig": lambda: jm.GDPAConfig(num_seeds=2),
    "HistoryCache": _cache,
    "HSTUConfig": lambda: jm.HSTUConfig(scaling_seqlen=9),
    "InterFormerConfig": lambda: jm.InterFormerConfig(window=9),
    "KunlunConfig": lambda: jm.KunlunConfig(window=9),
    "Jagged": _prepared,
    "PaddedComparison": lambda: jm.PaddedComparison(1.0, 0.5, 0.25, 0.0, 0.125),
    "Pages": lambda: jm.Pages.of([[3, 1], []], [200, 0], 128),
    "Rotary": lambda: jm.Rotary.from_frequencies(8, 16),
    "ScorePlan": lambda: F.ScorePlan.from_offsets(_offsets()),
    "UnitParameters": lambda: jm.UnitParameters([torch.rand(3)], momentum=0.5),
    "TileSchedule": lambda: jm.zigzag_schedule(
        [3, 70], [5, 6], num_heads=2, block_m=64, block_n=64
    ),
}


def saved(x, **options):
    """x through torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **options)


WAYS = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": lambda x: saved(x, weights_only=False),
}


def assert_same(x, y) -> None:
    """Equal in everything that they hold, including segmentation ids."""
    assert type(x) is type(y)
    if isinstance(x, torch.Tensor):
        assert torch.equal(x, y)
    elif isinstance(x, dict):
        assert x.keys() == y.keys()
        for key in x:
            assert_same(x[key], y[key])
    elif isinstance(x, (list, tuple)):
        assert len(x) == len(y)
        for a, b in zip(x, y):
            assert_same(a, b)
    elif dataclasses.is_dataclass(x) or type(x).__module__.startswith("jagged_modules"):
        assert_same(vars(x), vars(y))
    else:
        assert x == y


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONTAINERS)
def test_container(name, way):
    x = CONTAINERS[name]()
    assert_same(WAYS[way](x), x)


@pytest.mark.parametrize("name", ["GDPAConfig", "HSTUConfig", "InterFormerConfig", "KunlunConfig"])
def test_checkpoints_with_configs_load_without_pickle(name):
    config = CONTAINERS[name]()
    assert saved({"config": config}, weights_only=True)["config"] == config


def test_a_copy_finds_the_schedules(builds):
    jagged = _prepared()
    builds.clear()
    for way in WAYS.values():
        twin = way(jagged)
        assert twin.to("meta").schedule(num_heads=2, head_dim=16, dtype=torch.float32) is not None
        assert twin.segmentation_id == jagged.segmentation_id and builds == []


def test_a_history_cache_stays_in_its_process():
    """It has locks, and its pages are as large as the budget."""
    cache = jm.PagedHistoryCache(jm.JaggedTargetAttention(8, 2), 1000)
    for way in (pickle.dumps, copy.deepcopy, saved):
        with pytest.raises(TypeError, match="cannot pickle"):
            way(cache)


def test_nothing_public_is_missing():
    """Switches, which are context managers, and exceptions hold no data; tests/compatibility has
    the layers."""
    classes = [getattr(jm, name) for name in jm.__all__ if inspect.isclass(getattr(jm, name))]
    public = [
        x.__name__
        for x in classes
        if not hasattr(x, "__enter__") and not issubclass(x, (torch.nn.Module, Exception))
    ]
    assert [name for name in public if name not in (*CONTAINERS, "PagedHistoryCache")] == []
