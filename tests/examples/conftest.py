import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

# The programs in examples/ import the modules beside them, as Python does for a script it runs.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

# A second thread does not make such small models faster, and on a busy machine threads that wait
# for one another cost minutes.
torch.set_num_threads(1)


@pytest.fixture
def few_measured_steps(monkeypatch):
    """The training programs measure steps of three batches, instead of ten, when they compare
    models."""
    import trainer

    monkeypatch.setattr(trainer, "measure_steps", partial(trainer.measure_steps, num_batches=3))


def _without_speed(metrics):
    return {
        name: {
            "test": result["test"],
            "epochs": [
                {key: epoch[key] for key in epoch if key != "examples_per_second"}
                for epoch in result.get("epochs", [])
            ],
        }
        for name, result in metrics["results"].items()
    }


@pytest.fixture(scope="session")
def without_speed():
    """What metrics.json holds → its results, without the time they took."""
    return _without_speed


def _assert_equal_checkpoints(first, second):
    from checkpoints import find_checkpoint

    first, second = (find_checkpoint(path) for path in (first, second))
    assert first.settings == second.settings
    tensors = []
    for checkpoint in (first, second):
        stored = FileSystemReader(checkpoint.folder).read_metadata().state_dict_metadata
        state = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in stored.items()}
        checkpoint.load_into(state)
        tensors.append(state)
    assert tensors[0].keys() == tensors[1].keys()
    assert {name.partition(".")[0] for name in tensors[0]} == {
        "model",
        "average",
        "best_average",
        "optimizer",
    }
    for name, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][name]), name


@pytest.fixture(scope="session")
def assert_equal_checkpoints():
    """Two folders of checkpoints → fails unless they hold the same settings, weights and states of
    the optimizer."""
    return _assert_equal_checkpoints


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """The files of weights of two ranking models, "attention" and "padded", and a next-item model,
    "hstu"."""
    from .serving import PROGRAMS, train

    class Trained(dict[str, Path]):
        """Models are trained when a test asks for them."""

        def __missing__(self, name: str) -> Path:
            self[name] = train(
                tmp_path_factory.mktemp("served"),
                name,
                *([] if name in PROGRAMS else ["--interaction", name]),
            )
            return self[name]

    return Trained()
