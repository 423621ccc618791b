"""Kernels that were compiled on another machine (`python -m jagged_modules.precompile`).

A folder holds `<kernel>-<hash>.json` and `.cubin`, and, under Triton's own keys, the C extensions
by which Triton launches kernels. A cubin is found by what it was compiled for and by the versions
in the folder's manifest. Triton's own key would take most of a second at the first launch: it reads
the compiler's libraries, runs ptxas, and parses the kernel.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib
import json
import os
import shutil
import sysconfig
import tempfile
import warnings
import zipfile
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.cache import CacheManager, FileCacheManager

MANIFEST = "kernels.json"
_folders: dict[Path, list[str]] = {}  # those in use → the compute capabilities that they have
_modules: set[str] = set()  # that the calls imported which they were made of


def versions() -> dict[str, str]:
    """What compiled kernels and their launchers depend on."""
    sources, root = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted(root.rglob("*.py")):
        sources.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return {
        "triton": triton.__version__,
        "python": sysconfig.get_config_var("EXT_SUFFIX"),
        "jagged_kernels": sources.hexdigest()[:16],
    }


def load(path: str | os.PathLike[str]) -> None:
    """As `jagged_modules.precompiled`."""
    folder = Path(path)
    if zipfile.is_zipfile(folder):
        folder = _unpacked(folder)
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"{path} is no output of python -m jagged_modules.precompile")
    manifest, here = json.loads((folder / MANIFEST).read_text()), versions()
    differences = [
        f"{name} {made} (here {here[name]})"
        for name, made in manifest["versions"].items()
        if made != here[name]
    ]
    if differences:
        _warn(f"kernels of {path} are not used, they were compiled for {', '.join(differences)}")
        return
    _folders[folder] = manifest["capabilities"]
    _modules.update(manifest["modules"])
    _ReadFirst.install()


def import_modules() -> None:
    """Import the kernels' modules and those that launch them, which the first launch would wait
    for."""
    for name in sorted(_modules):
        importlib.import_module(name)


def find(source, target: GPUTarget, options: dict) -> CompiledKernel | None:
    """The kernel that `triton.compile` would return, from a loaded folder. Warns if it must be
    compiled though there are such folders."""
    if not _folders or knobs.compilation.always_compile:
        return None
    name = entry_name(source, options)
    for folder in _folders:
        files = [folder / f"{name}.json", folder / f"{name}.cubin"]
        if files[0].exists():
            return CompiledKernel(source, {file.name: file for file in files}, name)
    capability, paths = f"{target.arch // 10}.{target.arch % 10}", ", ".join(map(str, _folders))
    if any(capability in capabilities for capabilities in _folders.values()):
        _warn(f"{source.name} is compiled: {paths} has it for other arguments or not at all")
    else:
        _warn(f"kernels are compiled: {paths} has none for compute capability {capability}")
    return None


def entry_name(source, options: dict) -> str:
    """Name of a kernel's files, by all that it is compiled for except `versions`. The options of a
    launch have the compute capability."""
    # the path of a library in Triton's own folder
    options = {name: x for name, x in options.items() if name != "extern_libs"}
    parts = source.signature, source.constants, source.attrs, options
    described = repr((source.fn, [sorted(part.items()) for part in parts]))
    return f"{source.name}-{hashlib.sha256(described.encode()).hexdigest()[:32]}"


class _ReadFirst(CacheManager):
    """Files of the loaded folders, else those of the cache manager that was in use before. That one
    is made when it is needed: Triton's makes a folder, which a read-only file system refuses."""

    before: type[CacheManager] = FileCacheManager

    @classmethod
    def install(cls) -> None:
        if knobs.cache.manager_class is not cls:
            cls.before = knobs.cache.manager_class or FileCacheManager
            knobs.cache.manager_class = cls

    def __init__(self, key: str, override: bool = False, dump: bool = False):
        self.key, self.options = key, dict(override=override, dump=dump)

    @functools.cached_property
    def other(self) -> CacheManager:
        return self.before(self.key, **self.options)

    def get_file(self, filename: str) -> str | None:
        files = (folder / self.key / filename for folder in _folders)
        found = next((str(file) for file in files if file.exists()), None)
        return found or self.other.get_file(filename)

    def put(self, data, filename: str, binary: bool = True) -> str:
        return self.other.put(data, filename, binary)

    def get_group(self, filename: str) -> dict[str, str] | None:
        return self.other.get_group(filename)

    def put_group(self, filename: str, group: dict[str, str]):
        return self.other.put_group(filename, group)


def _unpacked(file: Path) -> Path:
    """A folder with the files of a zip, removed when this process ends: the dynamic loader reads
    files only. Processes forked from this one may still use it when they end."""
    folder, owner = tempfile.mkdtemp(prefix="jagged-kernels-"), os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    zipfile.ZipFile(file).extractall(folder)
    return Path(folder)


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


if "JAGGED_KERNELS" in os.environ:
    load(os.environ["JAGGED_KERNELS"])
