import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from .. import warm

ROOT = Path(__file__).parents[2]
# The programs in examples/ import the modules beside them, as Python does for a script it runs.
sys.path.insert(0, str(ROOT / "examples"))

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


@pytest.fixture
def run_on_a_log(tmp_path):
    """Runs train_<name>.py as a program, from another folder, on a log in it → what it prints."""

    def run(name, *arguments):
        rows = [
            f"{user}\t{(7 * user + 3 * step) % 40}\t{1 + (user + step) % 5}\t{100 * step}"
            for user in range(12)
            for step in range(20)
        ]
        (tmp_path / "u.data").write_text("\n".join(rows) + "\n")
        paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        program = str(ROOT / "examples" / f"train_{name}.py")
        environment = {**os.environ, "PYTHONPATH": paths}
        done = warm.run([program, "--data", "u.data", *arguments], cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        metrics = json.loads((tmp_path / "runs" / name / "metrics.json").read_text())
        assert metrics["settings"]["data"] == "u.data"
        return done.stdout

    return run
