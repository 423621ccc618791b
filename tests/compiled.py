"""Libraries in C++ that several tests need, in processes of their own: compiled once."""

import hashlib
import os
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
    """Run g++, each source by itself, or copy what it wrote for the same options, source and
    headers beside it. The last part of the command is the file to write."""
    *options, _, out = command
    objects = [object_file(Path(x), command) for x in options if x.endswith(".cpp")]
    options = [x for x in options if not x.endswith(".cpp")]
    run(["g++", *map(str, objects), *options[1:], "-o", str(out)], check=check)


def object_file(source: Path, command: Sequence[str]) -> Path:
    """The object file of a source of a command as above, which is compiled once, without
    warnings."""
    options = [x for x in command[:-2] if not x.startswith(("-l", "-L", "-Wl,")) and x != "-shared"]
    options = [x for x in options if not x.endswith(".cpp")]
    files = source, *sorted(source.parent.glob("*.h"))
    key = hashlib.sha256(
        repr(
            [
                options,
                *((x.name, x.read_bytes()) for x in files),
                # of -march=native
                (torch.__version__, torch.backends.cpu.get_cpu_capability()),
                run(["g++", "-dumpfullversion"], check=True, capture_output=True).stdout,
            ]
        ).encode()
    )
    KEPT.mkdir(exist_ok=True)
    kept = KEPT / f"{key.hexdigest()}.o"
    with locked(kept.with_suffix(".lock")):
        if not kept.exists():
            part = kept.with_suffix(".part")
            made = run([*options, "-c", str(source), "-o", str(part)], stderr=subprocess.PIPE)
            assert made.returncode == 0 and not made.stderr, made.stderr.decode()
            part.rename(kept)
    return kept


def library(out: Path) -> Path:
    """What `python -m jagged_modules.cpp_library` compiles, 10 s of a core."""
    with mock.patch.object(subprocess, "run", compiled):
        cpp_library.main(["--out", str(out)])
    return out
