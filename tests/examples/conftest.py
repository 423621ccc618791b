import sys
from pathlib import Path

import pytest
import torch

# The programs in examples/ import the modules beside them, as Python does for a script it runs.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

# A second thread does not make such small models faster, and on a busy machine threads that wait for one another cost minutes.
torch.set_num_threads(1)


def _without_speed(metrics):
    return {
        name: {
            "test": result["test"],
            "epochs": [{key: epoch[key] for key in epoch if key != "examples_per_second"} for epoch in result.get("epochs", [])],
        }
        for name, result in metrics["results"].items()
    }


@pytest.fixture(scope="session")
def without_speed():
    """What metrics.json holds → its results, without the time they took."""
    return _without_speed


def _assert_equal_checkpoints(first, second):
    first, second = (torch.load(path, weights_only=True) for path in (first, second))
    assert first["settings"] == second["settings"]
    for part in ("model", "average", "best_average"):
        assert first[part].keys() == second[part].keys()
        for name, tensor in first[part].items():
            assert torch.equal(tensor, second[part][name]), name


@pytest.fixture(scope="session")
def assert_equal_checkpoints():
    """Two paths of checkpoints → fails unless they hold the same settings and weights."""
    return _assert_equal_checkpoints
