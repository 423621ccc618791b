"""Exported models for CUDA, without a GPU: what they launch, through a library in place of CUDA's
driver."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from jagged_kernels.precompile import traced
from jagged_kernels.precompile.recorder import variant_of
from triton.backends.nvidia import driver

import jagged_modules as jm
from jagged_modules import cpp_library, validation
from jagged_modules import functional as F

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SIZES = {"w": 8, "r": 8, "l": 8, "i": 4, "f": 4}
OFFSETS = torch.tensor([0, 5, 5, 19, 37])
KERNEL = "k.cubin k 96 1000 "


class Library:
    """The operator `launch` on host tensors, with a driver that writes down what it does."""

    def __init__(self, folder: Path):
        self.folder, self.record = folder, folder / "record.txt"
        source = Path(__file__).with_name("recording_driver.cpp")
        self.driver, library = folder / "libcuda.so.1", folder / "launch.so"
        shared = "g++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"
        subprocess.run([*shared, source, "-o", self.driver], check=True)
        ctypes.CDLL(str(self.driver), mode=ctypes.RTLD_GLOBAL)
        command = [x for x in cpp_library.command(library) if not x.endswith("attention.cpp")]
        subprocess.run([*command, '-DLAUNCHES_ON="CPU"'], check=True)
        traced._operator()
        torch.ops.load_library(str(library))

    def recorded(self) -> list[str]:
        """Since the last call."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        self.record.unlink(missing_ok=True)
        return lines

    def describe(self, file: str, letters: str) -> None:
        sizes = " ".join(str(SIZES[x.lower()]) for x in letters)
        (self.folder / file).write_text(f"{sizes} 8 8")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return Library(tmp_path_factory.mktemp("launches"))


@pytest.fixture
def library(built, monkeypatch):
    monkeypatch.setenv("DRIVER_RECORD", str(built.record))
    monkeypatch.setenv("JAGGED_CUBINS", str(built.folder))
    built.recorded()
    return built


def launch(letters, written=(), read=(), integers=(), factors=(), grid=(1, 1, 1), kernel=KERNEL):
    written = [torch.empty(4), *written]
    arguments = kernel + "w" + letters, written, list(read), integers, factors, grid
    torch.ops.jagged_kernels.launch(*arguments)
    return written


def attend():
    """With all that has parameters of its own, and lists of tiles."""
    q, kv = torch.randn(37, 4, 24), torch.randn(37, 2, 48)
    k, v = kv.chunk(2, 2)
    bias = jm.RelativeBias(torch.randn(4, 39), torch.randn(4, 6), torch.arange(37))
    mask = jm.AttentionMask(causal=True, num_targets=torch.tensor([1, 0, 3, 2]))
    return F.jagged_attention(q, k, v, OFFSETS, mask=mask, bias=bias, implementation="triton")


def compress():
    index = jm.CandidateIndex.from_offsets(OFFSETS)
    weights = torch.randn(4, 9), torch.randn(4, 10)
    rows = torch.randn(4, 9, 8), torch.randn(37, 10, 8)
    return F.linear_compress(weights, rows, index, implementation="triton")


def blocks():
    q, k, v = torch.randn(3, 37, 2, 16)
    return F.block_diagonal_attention(q, k, v, OFFSETS, block_size=16, implementation="triton")


def by_triton(library, variant, args, grid, file):
    """Launches what was compiled as Triton does."""
    compiled, kernel, stand_in = variant.compile(), variant.source.fn, ctypes.CDLL(library.driver)
    run = driver.CudaLauncher(compiled.src, compiled.metadata)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    stand_in.cuModuleLoadData(ctypes.byref(module), (library.folder / file).read_bytes())
    name, metadata = compiled.metadata.name.encode(), compiled.metadata
    stand_in.cuModuleGetFunction(ctypes.byref(function), module, name)
    packed = metadata.num_warps, metadata.num_ctas, metadata.shared
    constants = (None,) * (len(kernel.params) - len(args))
    grid = (*grid, 1, 1)[:3]
    run(*grid, 0, function.value, packed, None, None, None, *args, *constants)


@pytest.mark.parametrize("call", [attend, compress, blocks])
def test_parameters_are_those_of_tritons_launcher(library, monkeypatch, call):
    """Byte by byte, with tensors instead of a trace's."""
    monkeypatch.setattr(driver, "library_dirs", lambda: [str(library.folder)])
    compiled, launched, described = traced._Trace._compiled, traced._Trace.launch, []

    def described_to_the_driver(*args):
        described.append(compiled(*args))
        file, *_, letters = described[-1].split()
        library.describe(file, letters)
        return described[-1]

    def twice(trace, kernel, args, grid, options):
        launched(trace, kernel, args, grid, options)
        ours = [x for x in library.recorded() if "attribute" not in x]
        variant = variant_of(kernel, trace.binder(kernel), trace.target, args, options)
        with torch._C.DisableTorchFunction():  # a trace counts addresses from 0
            by_triton(library, variant, args, grid, described[-1].split()[0])
        assert ours == library.recorded()

    monkeypatch.setattr(validation, "_triton_interprets", lambda: True)  # takes host tensors
    monkeypatch.setattr(traced._Trace, "_compiled", described_to_the_driver)
    monkeypatch.setattr(traced._Trace, "launch", twice)
    with traced.traced_launches(library.folder, (9, 0)):
        call()
    assert described
