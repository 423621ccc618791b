"""How tests that need a GPU run side by side, for `make test-gpu`, and what the run says at its
end.

Compilation takes most of the time. So workers share Triton's disk cache, each kernel is compiled by
one worker while others that need it wait, and tests that compile most run first. Slow tests run
too. Of tests with three or more parameters, a choice of combinations runs in which each pair of
values occurs (`with_each_pair`); `--all-combinations` runs all. What a module's `applies`
(conftest.py) refuses is dropped before. Tests marked `large_memory` run one at a time. A worker
whose CUDA context is broken exits, so that xdist reports the test and starts another worker: every
later test would fail in that context.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import re
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

# (part of a test's name, factor of its cost): tests that compile most, and the longest: a soak
# test, one that builds a package, whole layers in Inductor.
COMPILE_COST = {"grows_on_a_gpu": 100.0, "package_for_cuda": 100.0, "compiled_to_cuda_graphs": 50.0}
COMPILE_COST |= {
    "both_bias": 4.0,
    "tensors_of_their_own": 4.0,
    "hopper": 3.0,
    "din_gpu": 3.0,
    "linear_compress": 2.0,
    "attention": 2.0,
    "float32": 1.5,
    "fp32": 1.5,
}
# parameters that name the implementation; values equal before the first hyphen are one, as "hopper"
# and "hopper-long"
IMPLEMENTATIONS = ("kernels", "implementation")
REPORT = "gpu-suite-report"  # name of the plugin GpuReport
SLOWEST = 30  # test functions that the report names
# limit of what a worker's allocator keeps between tests: up to 32 workers share the GPU's memory
RESERVED_BYTES = 2**30


@dataclass
class CompileTimes:
    """Kernels that a process compiled, the seconds it took, and the seconds it waited for other
    processes to compile the same kernel."""

    kernels: int = 0
    seconds: float = 0.0
    waited: float = 0.0


@dataclass
class Cost:
    """Cost of one test function: number of tests, their seconds, kernels compiled for them."""

    tests: int = 0
    seconds: float = 0.0
    kernels: int = 0


class SharedCompilation:
    """Triton's compiler with a lock per kernel and per launcher, a C extension of some types of
    arguments: one of the processes that share a disk cache compiles it, the others load it."""

    def __init__(self):
        from triton import compiler, knobs
        from triton.backends.nvidia import driver
        from triton.runtime import build
        from triton.runtime.jit import DependenciesFinder

        self.times, self._compile, self._knobs = CompileTimes(), compiler.compile, knobs
        self._was_cached = False
        knobs.compilation.listener = self._listen
        compiler.compile = self  # read by JITFunction at its first launch
        driver.compile_module_from_src = self._compile_launcher
        self._compile_extension = build.compile_module_from_src
        DependenciesFinder._update_hash = with_constants(DependenciesFinder._update_hash)

    def __call__(self, src, target=None, options=None, **rest):
        start = time.perf_counter()
        with self._locked(f"{src.hash()}{target}{sorted((options or {}).items(), key=str)}"):
            begun = time.perf_counter()
            kernel = self._compile(src, target=target, options=options, **rest)
        self.times.waited += begun - start
        if not self._was_cached:
            self.times.kernels += 1
            self.times.seconds += time.perf_counter() - begun
        return kernel

    def _compile_launcher(self, src, name, ccflags=(), **options):
        """Optimised, it would take the C compiler four times as long. The comment gives it a place
        of its own in the cache, where benchmarks do not find it."""
        src = f"{src}\n// -O0"
        with self._locked(src):
            return self._compile_extension(src, name, ccflags=[*ccflags, "-O0"], **options)

    def _locked(self, text: str) -> contextlib.AbstractContextManager[None]:
        name = hashlib.sha256(text.encode()).hexdigest()
        return locked(Path(self._knobs.cache.dir) / "locks" / name)

    def _listen(self, *, cache_hit: bool, **_):
        self._was_cached = cache_hit


def with_constants(update_hash: Callable) -> Callable:
    """A kernel's key has the global constants of what it calls. Triton 3.6 knows them once the
    callee has a key: they were missing where no other kernel had asked for it before."""

    def update(finder, callee):
        assert callee.cache_key
        update_hash(finder, callee)

    return update


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the system releases it when a process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class GpuWorker:
    """The plugin of each process that runs tests."""

    def __init__(self, config: pytest.Config):
        self.config, self.compilation = config, SharedCompilation()
        if hasattr(config, "workerinput"):
            rotate_gpus(config.workerinput["workerid"])

    def pytest_ignore_collect(self, collection_path):
        """Files without GPU tests are not imported: their dependencies may not be installed."""
        files = (
            collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
        )
        return None if any("mark.gpu" in file.read_text() for file in files) else True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        chosen = [item for item in items if item.get_closest_marker("gpu")]
        if not config.getoption("--all-combinations"):
            chosen = with_each_pair(chosen)
        config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
        items[:] = in_order(chosen)
        expected = {cell for item in items for cell in getattr(item.module, "EXPECTED_CELLS", ())}
        if hasattr(config, "workeroutput"):
            config.workeroutput["expected_cells"] = sorted(expected)
        else:
            config.pluginmanager.get_plugin(REPORT).expected |= expected

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        before = asdict(self.compilation.times)
        item.compile_times_before = before
        with (
            locked(Path(tempfile.gettempdir()) / "large_memory.lock")
            if is_large(item)
            else contextlib.nullcontext()
        ):
            result = yield
            if torch.cuda.memory_reserved() > RESERVED_BYTES:
                torch.cuda.empty_cache()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        try:
            return (yield)
        finally:
            self._end_if_broken(item)

    def _end_if_broken(self, item):
        try:
            torch.cuda.synchronize()
        except Exception:
            if not hasattr(self.config, "workerinput"):
                raise
            capture = self.config.pluginmanager.get_plugin("capturemanager")
            with capture.global_and_fixture_disabled():
                print(
                    f"\n{item.nodeid} broke the CUDA context:\n{traceback.format_exc()}",
                    file=sys.stderr,
                    flush=True,
                )
            os._exit(1)

    def pytest_runtest_teardown(self, item):
        times = asdict(self.compilation.times)
        item.user_properties.append(
            (
                "compiled",
                {name: times[name] - before for name, before in item.compile_times_before.items()},
            )
        )


def rotate_gpus(worker: str) -> None:
    """Make another GPU the first one that CUDA shows a worker, so that workers share the memory of
    all. CUDA is not initialised yet."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
        map(str, range(torch.cuda.device_count()))
    )
    gpus, first = gpus.split(","), int(worker.removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
        gpus[(first + i) % len(gpus)] for i in range(len(gpus))
    )


def with_each_pair(items: list) -> list:
    """A greedy choice of the items: for each test function and implementation, each pair of values
    of two parameters that occurs in the items occurs in the choice."""
    of_functions = defaultdict(dict)
    for item in items:
        of_functions[item.nodeid.partition("[")[0]][item] = _pairs(item)
    chosen = set()
    for pairs in of_functions.values():
        missing = set().union(*pairs.values())
        while missing:
            item = max(pairs, key=lambda item: len(pairs[item] & missing))
            missing -= pairs[item]
            chosen.add(item)
    return [item for item in items if item in chosen]


def _pairs(item) -> set[tuple]:
    """Pairs of parameters' values. An item with fewer than three parameters is always chosen."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if len(params) < 3:
        return {(item.nodeid,)}
    code = tuple(str(params.get(name)).partition("-")[0] for name in IMPLEMENTATIONS)
    values = sorted((name, repr(value)) for name, value in params.items())
    return {(code, *pair) for pair in itertools.combinations(values, 2)}


def is_large(item) -> bool:
    return item.get_closest_marker("large_memory") is not None


def in_order(items: list) -> list:
    """Tests that compile most come first. Tests of one function, which need the same kernels, are
    spread out, and so are large ones: workers then wait less for one another."""
    items = sorted(items, key=lambda item: (-_compile_cost(item), zlib.crc32(item.nodeid.encode())))
    large, others = [x for x in items if is_large(x)], [x for x in items if not is_large(x)]
    distance = max(1, len(others) // (len(large) + 1))
    for number, item in enumerate(large, 1):
        others.insert(number * (distance + 1) - 1, item)
    return others


def _compile_cost(item) -> float:
    cost = 1.0
    for name, factor in COMPILE_COST.items():
        cost *= factor if name in item.nodeid else 1
    return cost


class GpuReport:
    """The plugin of the process that reports: kernels compiled, and the matrix of cells.

    A test records the cells that it covers as properties "cell", "operator|dtype|sizes|option", for
    example "attention|bf16|D80|causal" or "linear_compress|fp16|M64 K8 N65|2 levels". A test
    module's EXPECTED_CELLS are those that some test must cover.
    """

    def __init__(self, config: pytest.Config):
        self.config, self.times = config, CompileTimes()
        self.of_functions: dict[str, Cost] = defaultdict(Cost)
        self.expected: set[str] = set()
        self.outcomes: dict[str, Counter] = defaultdict(Counter)  # cell → outcome → tests
        self._outcome: dict[str, str] = {}  # of tests that run now

    def pytest_testnodedown(self, node):
        self.expected |= set(getattr(node, "workeroutput", {}).get("expected_cells", ()))

    def pytest_runtest_logreport(self, report):
        cost = self.of_functions[report.nodeid.partition("[")[0]]
        cost.tests += report.when == "call"
        cost.seconds += report.duration
        if report.failed:  # at once, because a run may be ended by time
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            crash = getattr(report.longrepr, "reprcrash", None)
            terminal.write_line(
                f"\nFAILED {report.nodeid}:"
                f" {crash.message.splitlines()[0] if crash else report.longreprtext[-200:]}"
            )
        if report.outcome != "passed" or report.when == "setup":
            self._outcome[report.nodeid] = report.outcome
        if report.when != "teardown":
            return
        outcome = self._outcome.pop(report.nodeid, "passed")
        for name, value in report.user_properties:
            if name == "compiled":
                cost.kernels += value["kernels"]
                for field, amount in value.items():
                    setattr(self.times, field, getattr(self.times, field) + amount)
        for cell in {value for name, value in report.user_properties if name == "cell"}:
            self.outcomes[cell][outcome] += 1

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("GPU suite")
        times = self.times
        terminalreporter.write_line(
            f"{times.kernels} kernels compiled in {times.seconds:.0f} s of all workers, who waited"
            f" {times.waited:.0f} s for one another"
        )
        terminalreporter.write_line(
            "Test functions that took most: seconds of all workers, kernels compiled, tests"
        )
        for name, cost in sorted(self.of_functions.items(), key=lambda item: -item[1].seconds)[
            :SLOWEST
        ]:
            terminalreporter.write_line(
                f"{cost.seconds:8.0f} {cost.kernels:6} {cost.tests:6}  {name}"
            )
        for line in matrix_lines(self.outcomes, self.expected):
            terminalreporter.write_line(line)


def matrix_lines(outcomes: dict[str, Counter], expected: set[str]) -> list[str]:
    """One table per operator: a line per option, a column per dtype and class of head dims."""
    tables: dict[str, dict[str, dict[str, Counter]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(Counter))
    )
    for cell in sorted({*outcomes, *expected}):
        operator, dtype, sizes, option = cell.split("|")
        tables[operator][option][f"{dtype} {size_class(sizes)}"].update(
            outcomes.get(cell, {"hole": 1})
        )
    lines = [
        "Tests that passed in each cell; F: some failed, skip: all skipped, HOLE: expected and not"
        " run, –: not expected."
    ]
    for operator, options in tables.items():
        lines += ["", *_table_lines(operator, options)]
    holes = sorted(expected - outcomes.keys())
    return lines + ["", f"{len(outcomes)} cells run, {len(holes)} holes", *holes]


def size_class(sizes: str) -> str:
    """The column of a cell: of head dims "D80" or "D64 Dv40", the first one padded to a power of
    two; "sizes" for other sizes."""
    head_dim = re.match(r"D(\d+)\b", sizes)
    return f"≤{max(16, 1 << (int(head_dim[1]) - 1).bit_length())}" if head_dim else "sizes"


def _table_lines(operator: str, options: dict[str, dict[str, Counter]]) -> list[str]:
    dtypes = "fp64 fp32 fp16 bf16".split()
    columns = sorted(
        {column for cells in options.values() for column in cells},
        key=lambda x: (dtypes.index(x[:4]), len(x), x),
    )
    name_width = max(len(x) for x in (operator, *options))
    lines = [f"{operator:{name_width}}  " + "  ".join(columns)]
    for option, cells in options.items():
        texts = (f"{_cell_text(cells[x]) if x in cells else '–':>{len(x)}}" for x in columns)
        lines.append(f"{option:{name_width}}  " + "  ".join(texts))
    return lines


def _cell_text(outcomes: Counter) -> str:
    if outcomes["failed"]:
        return "F"
    if outcomes["passed"]:
        return f"{outcomes['passed']}{'+HOLE' if outcomes['hole'] else ''}"
    return "HOLE" if outcomes["hole"] else "skip"


def register(config: pytest.Config) -> None:
    """Register the plugin that reports, the one that runs tests, or both if there are no
    workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(GpuReport(config), REPORT)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(GpuWorker(config))
