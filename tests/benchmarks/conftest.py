"""The benchmarks are scripts beside one another, not a package: their folder goes on the path, as
when one of them is run."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "kernels" / "benchmarks"))

import runner


def run_tiny(benchmark: str, out: Path, *arguments: str, as_program: bool = False):
    """Results of a benchmark and the path of its JSON. It runs in this process, which has its
    imports, or in one of its own."""
    fast = ["--pause", "0", "--warmup", "0", "--rep", "0.1"]
    command = [benchmark, "--tiny", "--device", "cpu", *fast, *arguments, "--out", str(out)]
    if as_program:
        process = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
    else:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
            patch.setattr(sys, "argv", command)
            runpy.run_path(benchmark, run_name="__main__")
        assert end.value.code == 0
    (path,) = out.glob(f"*-{Path(benchmark).stem.removeprefix('bench_')}.json")
    return json.loads(path.read_text()), path


@pytest.fixture(scope="module")
def tiny_run(request, tmp_path_factory) -> tuple[dict, Path]:
    """Results of the test module's BENCHMARK and the path of its JSON. With AS_PROGRAM it runs in a
    process of its own."""
    as_program = getattr(request.module, "AS_PROGRAM", False)
    out = tmp_path_factory.mktemp("results")
    return run_tiny(request.module.BENCHMARK, out, as_program=as_program)


@pytest.fixture
def run_setup():
    """setup → its rows: each implementation is checked and, as there are no rounds, not timed."""

    def run(setup: runner.Setup) -> list[dict]:
        return runner.run_case(
            runner.Case("", "", lambda: setup), runner.Protocol("cpu", rounds=0), re.compile("")
        )

    return run
