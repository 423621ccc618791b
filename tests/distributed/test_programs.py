"""The training programs under torchrun, and what becomes of them when a process is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ..marks import PATIENCE, SLOW
from .ranks import one_rank

pytest.importorskip("torchrec")

import sharding
from checkpoints import find_checkpoint

from .test_plans import PROGRAMS, make_trainer

ROOT = Path(__file__).parents[2]
TINY = "--device cpu --users 25 --batch-size 8 --embedding-dim 16 --num-heads 2 --dropout 0".split()
TINY += ["--timeout", str(PATIENCE)]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    "OMP_NUM_THREADS": "1",
}


def command(processes: int, program: str, out: Path, *arguments: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [
        sys.executable,
        *launcher,
        str(ROOT / "examples" / program),
        *TINY,
        "--out",
        str(out),
        *arguments,
    ]


def train_here(program: str, out: Path, *arguments: str) -> None:
    """The program in this process, with the group that the process has. Its imports are there
    already, which take most of a run's time."""
    PROGRAMS[program][0].main([*TINY, "--out", str(out), *arguments])


def results(out: Path) -> dict:
    (result, *_) = json.loads((out / "metrics.json").read_text())["results"].values()
    return result


@SLOW
@pytest.mark.parametrize("program", ["dlrm", "hstu"])
def test_a_run_is_resumed_on_another_number_of_processes_and_plan(two_ranks, tmp_path, program):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    two_ranks.run(train_here, program, whole, "--sharding", "row_wise", "--epochs", "2")
    run = command(2, f"train_{program}.py", parts, "--sharding", "row_wise", "--epochs", "1")
    done = subprocess.run(run, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 1  loss") == 1  # rank 0 alone prints
    with one_rank():
        train_here(program, parts, "--sharding", "column_wise", "--epochs", "2", "--resume")
    for first, second in zip(results(whole)["epochs"], results(parts)["epochs"], strict=True):
        # The optimizers of the program magnify roundings of tiny gradients, so this is no bound on
        # roundings: test_plans.py has that.
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-3)


@SLOW
def test_a_killed_process_ends_the_run_which_can_be_resumed(two_ranks, tmp_path):
    run = subprocess.Popen(
        command(2, "train_dlrm.py", tmp_path, "--epochs", "1000"),
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + PATIENCE
    while find_checkpoint(tmp_path / "attention") is None:
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, errors = run.communicate(timeout=PATIENCE)
    assert run.returncode != 0
    assert "Signal 9 (SIGKILL) received" in errors
    saved = find_checkpoint(tmp_path / "attention").epochs
    two_ranks.run(train_here, "dlrm", tmp_path, "--epochs", str(len(saved) + 2), "--resume")
    assert results(tmp_path)["epochs"][: len(saved)] == saved


def until_killed(batches: Iterable) -> Iterator:
    """The batches. Rank 1 is killed at the fourth."""
    for step, batch in enumerate(batches):
        if step == 3 and sharding.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


def train_until_killed(folder: Path) -> None:
    trainer = make_trainer("dlrm", folder, "row_wise")
    trainer.model.train()
    list(trainer.run(until_killed(trainer.batches("train"))))


def test_the_other_processes_notice_by_themselves(two_ranks, tmp_path):
    """Without torchrun, which ends them: it does not run on the other machines of a group. The
    error is not that of a timeout."""
    with pytest.raises(
        RuntimeError,
        match=r"(?s)rank 0: .*Connection (closed|reset) by peer.*rank 1: the process ended",
    ):
        two_ranks.run(train_until_killed, tmp_path)
