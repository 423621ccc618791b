"""The first case of each benchmark, end to end on the CPU with tiny sizes. Tests of all cases are
slow."""

import importlib
import re
from pathlib import Path

import pytest
import runner

from .conftest import run_tiny

BENCHMARKS = sorted(Path(runner.__file__).parent.glob("bench_*.py"))
# whole models and layers take long to compile
OPTIONS = {
    "bench_broadcast": ["--impl", "eager"],
    "bench_layers": ["--impl", "modules$|floor"],
    "bench_user_blocks": ["--impl", "jagged_modules$"],
}


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_the_first_case(path, tmp_path):
    case = importlib.import_module(path.stem).make_cases("cpu", True)[0]
    only = f"^{re.escape(f'{case.table}: {case.name}')}$"
    results, json_path = run_tiny(str(path), tmp_path, "--only", only, *OPTIONS.get(path.stem, []))
    assert results["complete"] and results["rows"]
    for row in results["rows"]:
        assert (row["table"], row["case"]) == (case.table, case.name)
        assert row["status"].split(":")[0] in ("ok", "unavailable"), row
    assert json_path.with_suffix(".md").exists()
