"""The benchmark that kernels/README.md shows runs as it stands."""

import re
from pathlib import Path

import runner

from .conftest import run_tiny


def test_the_example_runs(tmp_path):
    folder = Path(runner.__file__).parent
    (example,) = re.findall(
        r"```python\n(.*?)```", (folder.parent / "README.md").read_text(), re.DOTALL
    )
    script = tmp_path / "bench_softmax.py"
    script.write_text(example)
    results, _ = run_tiny(str(script), tmp_path)
    assert [(row["implementation"], row["status"]) for row in results["rows"]] == [
        ("torch", "ok"),
        ("exp / sum", "ok"),
    ]
