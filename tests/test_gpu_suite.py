"""The plugin of `make test-gpu`, on tests that need no GPU."""

import itertools
import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from .gpu_suite import in_order, matrix_lines, rotate_gpus, with_each_pair

CONFTEST = """
    import sys
    from types import ModuleType, SimpleNamespace

    torch = sys.modules["torch"] = ModuleType("torch")  # four processes would import it
    torch.cuda = SimpleNamespace(
        device_count=lambda: 0, memory_reserved=lambda: 0, synchronize=lambda: None
    )
    sys.path.insert(0, {folder!r})
    import gpu_suite

    def pytest_addoption(parser):
        for option in ("--gpu-suite", "--all-combinations"):
            parser.addoption(option, action="store_true")

    def pytest_configure(config):
        for marker in ("gpu", "large_memory"):
            config.addinivalue_line("markers", marker)
        gpu_suite.register(config)
"""
TESTS = """
    import pytest
    import torch
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget

    EXPECTED_CELLS = [f"sum|fp32|D{dim}|{option}" for dim in (16, 32) for option in ("plain", "masked")]
    pytestmark = pytest.mark.gpu

    STEP = tl.constexpr(1)

    @triton.jit
    def next_of(x):
        return x + STEP

    @triton.jit
    def kernel(ptr):
        tl.store(ptr, next_of(tl.load(ptr)))

    @pytest.mark.parametrize("number", range(4))
    def test_that_compiles(record_property, number):
        record_property("cell", "sum|fp32|D16|plain")
        for function in next_of, kernel:  # as in a new process
            function.hash, function.used_global_vals = None, {}
        if number % 2:
            assert next_of.cache_key
        source = triton.compiler.ASTSource(kernel, signature=dict(ptr="*fp32"), constexprs={})
        assert triton.compiler.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]

    def test_that_builds_a_launcher():
        from triton.backends.nvidia import driver
        source = (
            "#include <Python.h>\\n"
            "static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, \\"launcher\\"};"
            "static int unoptimised = __NO_INLINE__;"  # not defined where gcc optimises
            "PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }"
        )
        assert driver.compile_module_from_src(src=source, name="launcher")

    def test_that_fails(record_property):
        record_property("cell", "sum|fp32|D32|plain")
        assert False

    def test_that_skips(record_property):
        record_property("cell", "sum|fp32|D16|masked")
        pytest.skip("not here")

    @pytest.mark.large_memory
    def test_that_breaks_the_context(monkeypatch):
        def raises():
            raise RuntimeError("an illegal memory access was encountered")
        torch.cuda.synchronize = raises
"""  # noqa: E501


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """What a run of TESTS in two workers prints."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "conftest.py").write_text(
        textwrap.dedent(CONFTEST.format(folder=str(Path(__file__).parent)))
    )
    (folder / "test_of_the_cpu.py").write_text("import a_package_that_is_not_installed")
    (folder / "test_example.py").write_text(textwrap.dedent(TESTS))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "load",
        "--maxschedchunk",
        "1",
        "-p",
        "no:cacheprovider",
        "-p",
        "xdist",
        "-rf",
    ]
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "TRITON_INTERPRET": "0",
        "PYTHONUTF8": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    process = subprocess.run(
        [*command, str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return process.stdout + process.stderr


def test_a_kernel_is_compiled_once_for_all_workers(output):
    assert "1 kernels compiled in" in output, output


def test_a_test_that_breaks_its_context_is_named_and_others_run(output):
    assert "test_that_breaks_the_context broke the CUDA context" in output, output
    assert "an illegal memory access was encountered" in output
    assert "2 failed, 5 passed, 1 skipped" in output


def test_a_failure_is_named_at_once(output):
    """Not at the end alone, which a run that is ended by time does not reach."""
    named = output.index("FAILED test_example.py::test_that_fails: assert False")
    assert named < output.index("FAILED test_example.py::test_that_fails - assert False")


def test_the_matrix_shows_what_ran(output):
    lines = [line.split() for line in output.splitlines()]
    assert ["plain", "4", "F"] in lines and ["masked", "skip", "HOLE"] in lines, output
    assert "3 cells run, 1 holes" in output


def test_columns_are_in_the_order_of_types_and_head_dims():
    outcomes = {
        f"a|{dtype}|D{dim}|x": Counter(passed=dim)
        for dtype in ("bf16", "fp32")
        for dim in (100, 16, 64)
    }
    outcomes |= {"a|fp32|D128 Dv72|x": Counter(passed=1), "b|fp16|M64 K8 N65|y": Counter(passed=2)}
    lines = matrix_lines(outcomes, {"b|fp16|M1 K1 N1|y"})
    assert lines[2].split() == "a fp32 ≤16 fp32 ≤64 fp32 ≤128 bf16 ≤16 bf16 ≤64 bf16 ≤128".split()
    assert lines[3].split() == ["x", "16", "64", "101", "16", "64", "100"]
    assert lines[5].split() == ["b", "fp16", "sizes"] and lines[6].split() == ["y", "2+HOLE"]
    assert lines[-2:] == ["8 cells run, 1 holes", "b|fp16|M1 K1 N1|y"]


def test_tests_that_compile_most_come_first_and_large_ones_apart():
    class Item:
        def __init__(self, nodeid, large=False):
            self.nodeid, self.large = nodeid, large

        def get_closest_marker(self, name):
            return self.large or None

    items = [
        Item("test_sum"),
        *(Item(f"test_sum_{n}") for n in range(7)),
        Item("big_1", True),
        Item("big_2", True),
    ]
    ordered = [item.nodeid for item in in_order([*items, Item("test_attention[hopper]")])]
    assert ordered[0] == "test_attention[hopper]" and len(ordered) == len(items) + 1
    assert abs(ordered.index("big_1") - ordered.index("big_2")) > 2


class Item(SimpleNamespace):
    __hash__, __eq__ = object.__hash__, object.__eq__


def combinations(name, **values):
    """The items of a test function with all combinations of its parameters' values."""
    return [
        Item(
            nodeid=f"{name}[{'-'.join(map(str, x))}]",
            callspec=SimpleNamespace(params=dict(zip(values, x))),
        )
        for x in itertools.product(*values.values())
    ]


def pairs_of(items):
    return {
        pair for x in items for pair in itertools.combinations(sorted(x.callspec.params.items()), 2)
    }


def test_each_pair_of_values_runs():
    many = combinations("test_many", dim=[8, 64, 128], dtype=["a", "b", "c"], form=[1, 2], mask=[0])
    chosen = with_each_pair(many)
    assert len(chosen) == 9 and pairs_of(chosen) == pairs_of(many)
    kernels = ["a", "a-long", "b"]
    of_kernels = combinations("test_kernels", dim=[8, 64], x=[1, 2], y=[1, 2], kernels=kernels)
    chosen = with_each_pair(of_kernels)
    assert len(chosen) < len(of_kernels)
    for code in "ab":  # each of them by itself
        all_of_them, found = (
            pairs_of(x for x in items if x.callspec.params["kernels"].startswith(code))
            for items in (of_kernels, chosen)
        )
        assert found == all_of_them
    few = combinations("test_few", dim=[8, 64], dtype=["a", "b"])
    plain = [Item(nodeid="test_plain"), Item(nodeid="test_another")]
    assert with_each_pair(few + plain) == few + plain


@pytest.mark.parametrize(
    "visible, worker, expected",
    [("0,1", "gw0", "0,1"), ("0,1", "gw3", "1,0"), ("2,0,1", "gw4", "0,1,2"), ("5", "gw7", "5")],
)
def test_workers_take_turns_on_gpus(monkeypatch, visible, worker, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    rotate_gpus(worker)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
