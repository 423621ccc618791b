"""The benchmarks are scripts beside one another, not a package: their folder goes on the path, as when one of them is run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "kernels" / "benchmarks"))

import runner  # noqa: E402


@pytest.fixture(scope="module")
def tiny_run(request, tmp_path_factory) -> tuple[dict, Path]:
    """Results of the test module's BENCHMARK, run as a user runs it, and the path of its JSON."""
    out = tmp_path_factory.mktemp("results")
    fast = ["--pause", "0", "--warmup", "0", "--rep", "0.1"]
    command = [sys.executable, request.module.BENCHMARK, "--tiny", "--device", "cpu", *fast, "--out", str(out)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    (path,) = out.glob(f"*-{Path(request.module.BENCHMARK).stem.removeprefix('bench_')}.json")
    return json.loads(path.read_text()), path


@pytest.fixture
def run_setup():
    """setup → its rows: each implementation is checked and, as there are no rounds, not timed."""

    def run(setup: runner.Setup) -> list[dict]:
        return runner.run_case(runner.Case("", "", lambda: setup), runner.Protocol("cpu", rounds=0), re.compile(""))

    return run
