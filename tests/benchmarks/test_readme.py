"""The benchmark that kernels/README.md shows runs as it stands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import runner


def test_the_example_runs(tmp_path):
    folder = Path(runner.__file__).parent
    (example,) = re.findall(
        r"```python\n(.*?)```", (folder.parent / "README.md").read_text(), re.DOTALL
    )
    script = tmp_path / "bench_softmax.py"
    script.write_text(example)
    command = [
        sys.executable,
        str(script),
        "--tiny",
        "--device",
        "cpu",
        "--pause",
        "0",
        "--rep",
        "0.1",
        "--out",
        str(tmp_path),
    ]
    subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(folder)}, check=True, capture_output=True
    )
    (path,) = tmp_path.glob("*-softmax.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["implementation"], row["status"]) for row in rows] == [
        ("torch", "ok"),
        ("exp / sum", "ok"),
    ]
