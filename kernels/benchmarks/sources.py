"""What a run measured: the commit, and the state of the kernels behind an operator's rows.

A row of a run with another state is older than the last change of its kernels; the record marks it.
"""

import hashlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels" / "jagged_kernels"
# benchmark -> folders of its kernels besides common/; of the other benchmarks, all folders
FOLDERS = {
    **dict.fromkeys(("attention", "bias", "gdpa", "levels"), ("attention", "schedule")),
    "block_attention": ("block_attention",),
    "din": ("din",),
    "jagged_ops": ("matmul", "softmax"),
    "jagged_rows": ("rows",),
    "linear_compress": ("linear_compress",),
}


def state(op: str) -> str:
    """A hash of the sources of a benchmark's kernels."""
    folders = ("common", *FOLDERS[op]) if op in FOLDERS else ("",)
    paths = sorted(path for folder in folders for path in (KERNELS / folder).rglob("*.py"))
    found = hashlib.sha256()
    for path in paths:
        found.update(path.relative_to(KERNELS).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def commit() -> str:
    """Of this checkout, with "+" where files differ from it. The environment variable COMMIT names
    that of a copy without git."""
    if named := os.environ.get("COMMIT"):
        return named
    git = ["git", "-C", str(ROOT)]
    head, changes = (
        subprocess.run([*git, *command], capture_output=True, text=True, check=False)
        for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    )
    return head.stdout.strip() + "+" * bool(changes.stdout) if head.returncode == 0 else "unknown"


def is_current(run: Mapping) -> bool:
    """Whether a run measured the kernels of this checkout."""
    return run["environment"].get("kernels") == state(run["op"])
