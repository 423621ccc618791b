"""Libraries in C++ that several tests need, in processes of their own: compiled once."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch

from jagged_modules import cpp_library

from .gpu_suite import locked

KEPT = Path(tempfile.gettempdir()) / f"compiled-{os.getuid()}"
run = subprocess.run


def compiled(command: Sequence[str], check: bool = True) -> None:
    """Run g++, or copy what it wrote for the same options, sources and headers beside them."""
    *options, _, out = command
    sources = [Path(x) for x in options if x.endswith(".cpp")]
    files = sorted({file for x in sources for file in x.parent.glob("*.[ch]*")})
    key = hashlib.sha256(
        repr(
            [
                *(x for x in options if not x.endswith(".cpp")),
                *((x.name, x.read_bytes()) for x in (*sources, *files)),
                # of -march=native
                (torch.__version__, torch.backends.cpu.get_cpu_capability()),
                run(["g++", "-dumpfullversion"], check=True, capture_output=True).stdout,
            ]
        ).encode()
    )
    kept = KEPT / key.hexdigest()
    with locked(kept.with_suffix(".lock")):
        if not kept.exists():
            run(command, check=check)
            shutil.copy(out, kept.with_suffix(".part"))
            kept.with_suffix(".part").rename(kept)
            return
    shutil.copy(kept, out)


def library(out: Path) -> Path:
    """What `python -m jagged_modules.cpp_library` compiles, 20 s of a core."""
    with mock.patch.object(subprocess, "run", compiled):
        cpp_library.main(["--out", str(out)])
    return out
