"""Compiles recorded launches into a folder that common/precompiled.py reads."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import triton
from triton import knobs
from triton.backends.nvidia import driver
from triton.runtime import build as c_extensions

from ..common.precompiled import MANIFEST, entry_name, versions
from .recorder import Launch

# packages of kernels, and of what launches them
FOLDERS = "attention", "block_attention", "din", "linear_compress", "matmul", "rows", "softmax"
LAUNCHING = tuple(f"jagged_kernels.{name}." for name in FOLDERS)
_launches: list[Launch] = []  # of the worker processes, which are forked: kernels do not pickle


def build(launches: Iterable[Launch], out: Path, jobs: int) -> str:
    """Compile launches, and what launches them, into a folder or a zip.

    Args:
        out: does not exist: a folder, or a file whose name ends with ".zip".
        jobs: number of processes.

    Returns:
        A line for the user.

    Raises:
        RuntimeError: the release of Triton is not 3.6.
    """
    if not triton.__version__.startswith("3.6."):
        raise RuntimeError(f"needs Triton 3.6, this is {triton.__version__}")
    # two keys of Triton's may be one variant: it describes the options of launches as given
    _launches[:] = {entry_name(x.source, x.options): x for x in launches}.values()
    with tempfile.TemporaryDirectory() as temporary, _triton_builds_into(Path(temporary)) as folder:
        _build_extension(folder, functools.partial(driver.CudaUtils.__init__, SimpleNamespace()))
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            pool.map(functools.partial(_compile, folder), range(len(_launches)), chunksize=1)
        targets = sorted({x.target.arch for x in _launches})
        capabilities = [f"{arch // 10}.{arch % 10}" for arch in targets]
        modules = sorted(name for name in sys.modules if name.startswith(LAUNCHING))
        manifest = dict(versions=versions(), capabilities=capabilities, modules=modules)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
        size = sum(file.stat().st_size for file in folder.rglob("*"))
        if out.suffix == ".zip":
            shutil.make_archive(str(out.with_suffix("")), "zip", folder)
        else:
            shutil.copytree(folder, out)
    return f"{len(_launches)} kernels, {size / 1e6:.1f} MB, in {out}"


def _compile(folder: Path, number: int) -> None:
    """Writes a kernel's cubin and metadata, and its launcher."""
    launch = _launches[number]
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True  # two thirds of a cubin
        kernel = launch.compile()
    file = folder / entry_name(launch.source, launch.options)
    file.with_suffix(".cubin").write_bytes(kernel.asm["cubin"])
    metadata = kernel.metadata._asdict()
    del metadata["extern_libs"]  # a path of this machine
    file.with_suffix(".json").write_text(json.dumps(metadata, default=vars))
    _build_extension(folder, functools.partial(driver.CudaLauncher, kernel.src, kernel.metadata))


def _build_extension(folder: Path, make: Callable) -> None:
    """Lets Triton build a C extension as it does for a launch, with the folder for its cache: once
    for machines with the program `file` and once for those without, since Triton's key has what
    that program says about Python."""
    *machine, _ = c_extensions.platform_key().split(",")
    for linkage in ("ELF", ""):
        key = functools.partial(",".join, [*machine, linkage])
        with knobs.cache.scope(), mock.patch.object(c_extensions, "platform_key", key):
            knobs.cache.dir = str(folder)
            make()


@contextlib.contextmanager
def _triton_builds_into(temporary: Path) -> Iterator[Path]:
    """A folder for the C extensions that Triton builds. They are linked with a library that has the
    name and the functions of CUDA's driver, and are not imported: there is no driver here."""
    folder, stub = temporary / "kernels", temporary / "stub"
    folder.mkdir()
    stub.mkdir()
    text = "".join(Path(driver.dirname, name).read_text() for name in ("driver.c", "driver.py"))
    functions = sorted(set(re.findall(r"\bcu[A-Z]\w+", text)))
    source = stub / "libcuda.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in functions))
    arguments = "libcuda", str(source), str(stub), [], [], [], ["-Wl,-soname,libcuda.so.1"]
    Path(c_extensions._build(*arguments)).rename(stub / "libcuda.so.1")
    with (
        mock.patch.object(driver, "library_dirs", lambda: [str(stub)]),
        mock.patch.object(c_extensions, "_load_module_from_path"),
    ):
        yield folder
