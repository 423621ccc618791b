"""Threads that load kernels at the same time: each launches its own kernel, wholly loaded.

The threads meet at events: one stops where another would disturb it, until the other has run or
waits for the lock.
"""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")

from jagged_kernels.common import launch, ptxas
from triton import compiler, knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import build as c_extensions

HOPPER = GPUTarget("cuda", 90, 32)
# a launcher as Triton 3.6 makes them: of the same name whatever it launches
LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) {{ return PyLong_FromLong({number}); }}
static PyMethodDef functions[] = {{{{"launch", launch, METH_VARARGS, NULL}}, {{NULL}}}};
static struct PyModuleDef module = {{
  PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, functions
}};
PyMODINIT_FUNC PyInit___triton_launcher(void) {{ return PyModule_Create(&module); }}
"""


def launcher(number, metadata):
    """Compiles it or finds it in the cache, and imports it."""
    source = LAUNCHER.format(number=number)
    module = c_extensions.compile_module_from_src(src=source, name="__triton_launcher")
    return module.launch


class WatchedLock:
    """Sets an event when a thread is about to wait."""

    def __init__(self, waits):
        self.lock, self.waits = threading.RLock(), waits

    def __enter__(self):
        if not self.lock.acquire(blocking=False):
            self.waits.set()
            self.lock.acquire()

    def __exit__(self, *error):
        self.lock.release()


@pytest.fixture
def other(monkeypatch):
    """Starts a function in another thread, and returns when it has run or waits for the lock."""
    with ThreadPoolExecutor(1) as pool:
        ran_or_waits = threading.Event()
        monkeypatch.setattr(launch, "_loading", WatchedLock(ran_or_waits))

        def start(function):
            running = pool.submit(function)
            running.add_done_callback(lambda _: ran_or_waits.set())
            ran_or_waits.wait()
            return running

        yield start


@pytest.fixture
def gpu(monkeypatch):
    """A driver whose functions a test may replace."""
    utils = SimpleNamespace(load_binary=lambda *args: ("module", "function", 32, 0, 1024))
    active = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_target=lambda: HOPPER,
        launcher_cls=launcher,
        utils=utils,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(compiler.compiler, "max_shared_mem", lambda device: 1 << 17)
    return active


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Number of a launcher → a kernel that it launches, as `compile_kernel` returns it."""
    metadata = dict(name="kernel", num_warps=4, num_ctas=1, shared=0, tmem_size=None, warp_size=32)
    files = {"kernel.json": tmp_path / "kernel.json", "kernel.cubin": tmp_path / "kernel.cubin"}
    files["kernel.json"].write_text(json.dumps(metadata | {"target": vars(HOPPER)}))
    files["kernel.cubin"].touch()
    monkeypatch.setattr(
        compiler, "compile", lambda source, **options: CompiledKernel(source, files, "hash")
    )
    made = []

    def compiled(number):
        made.append(ptxas.compile_kernel(number, HOPPER, {}))
        return made[-1]

    yield compiled
    for kernel in made:
        kernel.module = None  # else newer Tritons unload it


def test_a_kernel_has_its_own_launcher(gpu, other, compiled, monkeypatch, tmp_path):
    """Two GPUs load two kernels whose launchers this process has imported before."""
    monkeypatch.delitem(sys.modules, "__triton_launcher", raising=False)
    first, second = compiled(1), compiled(2)
    load, running = c_extensions._load_module_from_path, []

    def interrupted(*path):
        module = load(*path)
        if not running:
            running.append(None)  # the other thread is not interrupted
            running[0] = other(lambda: second.run())
        return module

    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        assert [launcher(number, None)() for number in (1, 2)] == [1, 2]
        monkeypatch.setattr(c_extensions, "_load_module_from_path", interrupted)
        assert first.run() == 1
        assert running[0].result() == 2


def test_a_kernel_is_launched_once_it_is_loaded(gpu, other, compiled):
    """Two threads launch the same kernel first."""
    gpu.launcher_cls = lambda source, metadata: lambda function: function
    kernel, running = compiled(1), []

    def load_binary(*args):
        running.append(other(lambda: kernel.run(kernel.function)))
        return "module", "function", 32, 0, 1024

    gpu.utils.load_binary = load_binary
    assert kernel.run(kernel.function) == "function"
    assert [x.result() for x in running] == ["function"]
