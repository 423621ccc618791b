"""The choice of the ptxas for compute capability 9.0."""

import importlib
import pkgutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")

import jagged_kernels
from jagged_kernels.attention.triton_forward import attention_fwd_kernel
from jagged_kernels.common import ptxas
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction


def tool(version):
    return SimpleNamespace(path=f"/ptxas-{version}", version=version)


@pytest.fixture
def releases(monkeypatch):
    """(release of Triton's own ptxas, of the one for Blackwell) → replaces knobs.nvidia's tools by
    such ones."""

    def install(own, blackwell):
        tools = dict(ptxas=tool(own), ptxas_blackwell=tool(blackwell))
        monkeypatch.setattr(ptxas, "knobs", SimpleNamespace(nvidia=SimpleNamespace(**tools)))
        monkeypatch.setattr(ptxas, "get_ptxas", lambda capability: tools["ptxas"])
        return tools

    return install


def test_every_kernel_is_compiled_by_it():
    modules = [
        importlib.import_module(x.name)
        for x in pkgutil.walk_packages(jagged_kernels.__path__, "jagged_kernels.")
    ]
    kernels = {
        x
        for module in modules
        for x in vars(module).values()
        if isinstance(x, JITFunction) and x.__name__.endswith("_kernel")
    }
    assert len(kernels) > 20
    assert [x.__name__ for x in kernels if x.compile is not ptxas.compile_kernel] == []


def test_a_first_launch_in_another_thread_leaves_the_compiler(monkeypatch):
    """Triton sets a kernel's compiler at its first launch on a device, while another thread may be
    about to compile."""
    driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    attention_fwd_kernel.create_binder()
    assert attention_fwd_kernel.compile is ptxas.compile_kernel


@pytest.mark.parametrize(
    "own, blackwell, chosen",
    [("12.8", "12.9", "12.9"), ("12.8", "13.1", "13.1"), ("12.9", "13.3", "12.9")],
)
def test_the_first_sound_release_is_taken(releases, own, blackwell, chosen):
    releases(own, blackwell)
    assert ptxas.hopper_ptxas().version == chosen


def test_a_sound_own_release_needs_no_other(releases, monkeypatch):
    """Some builds of Triton have no ptxas for Blackwell; then the attribute raises an error."""
    releases("12.9", "13.3")
    del ptxas.knobs.nvidia.ptxas_blackwell
    assert ptxas.hopper_ptxas().version == "12.9"


def test_no_sound_release_is_an_error(releases):
    releases("12.8", "12.8")
    with pytest.raises(RuntimeError, match="ptxas 12.8 miscompiles wgmma; set TRITON_PTXAS_PATH"):
        ptxas.hopper_ptxas()


def test_settings_of_triton_are_left_as_they_were(monkeypatch):
    """Also if threads compile at the same time, and if the compiler fails."""
    before, seen = knobs.nvidia.ptxas, []

    def compile_with(source, target, options):
        seen.append((knobs.nvidia.ptxas.version, options.get("ptx_version")))
        if source == "bad":
            raise ValueError(source)
        return kernel

    kernel = object.__new__(CompiledKernel)
    kernel.module = None
    monkeypatch.setattr(ptxas.compiler, "compile", compile_with)
    hopper = GPUTarget("cuda", 90, 32)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: ptxas.compile_kernel(i, hopper, {}), range(32)))
    with pytest.raises(ValueError):
        ptxas.compile_kernel("bad", hopper, {})
    assert knobs.nvidia.ptxas == before and "ptxas" not in vars(knobs.nvidia)
    assert len(seen) == 33 and all(
        tuple(map(int, release.split("."))) >= (12, 9) for release, _ in seen
    )
    ptxas.compile_kernel("other", GPUTarget("cuda", 80, 32), {})
    assert seen[-1] == (before.version, None)
