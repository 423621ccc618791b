"""The runner every ``bench_<op>.py`` shares: check, measure, save.

A benchmark lists its cases; the ``setup`` of a case makes the inputs and returns a :class:`Setup`.
For each case, the runner

1. builds every implementation, calls it once (compilation), fills its outputs with NaN and frees
   them, calls it again and compares output and gradients with a float64 reference on the sampled
   rows; a wrong implementation is not timed; prints the times of a first round;
2. measures the implementations in turn in the other rounds (``PROTOCOL`` in protocol.py);
3. saves the results, so that a killed run keeps every case it finished.
"""

import argparse
import gc
import json
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import report
import sources
import torch
from protocol import WALL_FACTOR, Protocol, add_options, choose, named, parse
from torch import Tensor
from tqdm import tqdm


@dataclass(frozen=True)
class Implementation:
    """One way to compute a case.

    Args:
        forward: computes the output from ``inputs``.
        inputs: the tensors ``forward`` reads, by name. Those that require a gradient are
            differentiated in forward+backward; where none does, the implementation is measured
            forward only.
        pick: ``pick(name, tensor)`` returns the rows of a result that the reference covers,
            ``{part: rows}``. ``name`` is "out", or "d" and the name of an input. The rows are
            compared with the reference's ``"name/part"``.
        grad_output: the gradient of the output, in its layout.
        note: a remark printed beside the figures.
        host_ms: times on the host outside the measured call, in ms, by name.
        whole: False for an implementation of a part of the case's work: only its times are
            reported, no rates or speed-ups.
        around: returns a context manager; each call runs in one.
        bound: the relative error that is allowed, where its inputs are rounded more than those of
            plain torch; None: that of the case.
    """

    forward: Callable[[], Tensor]
    inputs: Mapping[str, Tensor]
    pick: Callable[[str, Tensor], Mapping[object, Tensor]]
    grad_output: Tensor | None = None
    note: str = ""
    host_ms: Mapping[str, float] = field(default_factory=dict)
    whole: bool = True
    around: Callable[[], AbstractContextManager] = nullcontext
    bound: float | None = None

    @property
    def differentiable(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.inputs.items() if x.requires_grad}

    def run(self, backward: bool) -> dict[str, Tensor]:
        """Calls it once: the output, and with ``backward`` the gradients, by name."""
        with self.around(), torch.set_grad_enabled(backward):
            out = self.forward()
            gradients = self.gradients(out) if backward else ()
        return {
            "out": out.detach(),
            **{f"d{name}": x for name, x in zip(self.differentiable, gradients)},
        }

    def gradients(self, out: Tensor, **options) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            out, tuple(self.differentiable.values()), self.grad_output, **options
        )

    def measured_call(self, key: str) -> Callable[[], object]:
        """The call to time for the columns ``key``: "forward", "forward_backward" or "backward"."""
        if key != "backward":
            return partial(self.run, key == "forward_backward")
        with self.around():
            out = self.forward()

        def backward():
            with self.around():
                return self.gradients(out, retain_graph=True)

        return backward


@dataclass(frozen=True)
class Setup:
    """What a case's ``setup`` returns.

    Args:
        implementations: builders by name, so that one that cannot be built is reported and does not
            stop the others.
        reference: the definition in plain torch, ``reference(dtype)`` -> ``{"name/part": rows}``,
            on a cheap sample.
        dtype: of the inputs.
        flops: useful floating-point operations of the forward; 0: not reported.
        backward_flops: of the backward alone.
        bytes: the least that the forward can read and write.
        backward_bytes: the least that the backward can read and write.
        attainable: (bytes/s, FLOP/s) of the device, which give the shortest possible time; None for
            unknown devices.
        baseline: the implementation over which speed-ups are reported.
    """

    implementations: Mapping[str, Callable[[], Implementation]]
    reference: Callable[[torch.dtype], dict[str, Tensor]]
    dtype: torch.dtype
    flops: float = 0.0
    backward_flops: float = 0.0
    bytes: float = 0.0
    backward_bytes: float = 0.0
    attainable: tuple[float, float] | None = None
    baseline: str = ""


@dataclass(frozen=True)
class Case:
    """A case of a table, with a row for each implementation.

    Args:
        timed: False: only peak memory is measured.
        backward_alone: the backward is timed instead of forward+backward.
        wall: steps from one synchronisation to the next, on CUDA: their time on host and device
            together is measured instead of the device's. 0: the device's.
        picture: column that the picture shows, "ms" or "speedup"; empty: work per time, and memory.
    """

    table: str
    name: str
    setup: Callable[[], Setup]
    timed: bool = True
    backward_alone: bool = False
    wall: int = 0
    picture: str = ""


class WrongResult(Exception):
    """A result that differs from the reference by more than the bound."""


# -- correctness -----------------------------------------------------------------------------------


def worst_row_error(actual: Tensor, expected: Tensor) -> float:
    """The largest error of a row (last dimension) over that row's norm, or over the rows' RMS norm
    where a row is smaller than that."""
    if actual.shape != expected.shape:
        raise WrongResult(
            f"has shape {tuple(actual.shape)} where the reference has {tuple(expected.shape)}"
        )
    expected = expected.double()
    norms = expected.norm(dim=-1)
    floor = norms.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return ((actual.double() - expected).norm(dim=-1) / norms.maximum(floor)).max().item()


def poison_and_free(results: dict[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
    """Fills results with NaN and frees them.

    The next call most likely gets the same memory, so a row that it does not write is NaN.
    """
    kept = {x.untyped_storage().data_ptr() for x in inputs.values()}
    while results:
        _, x = results.popitem()
        if x.untyped_storage().data_ptr() not in kept and 0 not in x.stride():
            with torch.inference_mode():  # Meta's gradients are inference tensors
                x.fill_(float("nan"))


def compare(
    implementation: Implementation,
    results: dict[str, Tensor],
    expected: dict[str, Tensor],
    bounds: dict[str, float],
) -> dict[str, float]:
    """The relative error of every part the implementation picks. Raises WrongResult above a bound
    or where a result is not finite."""
    errors = {}
    for name, tensor in results.items():
        if not tensor.isfinite().all():
            raise WrongResult(f"{name} is not finite everywhere")
        picked = implementation.pick(name, tensor)
        if not picked:
            raise ValueError(f"pick({name!r}, ...) returned nothing to compare with the reference")
        for part, rows in picked.items():
            key = f"{name}/{part}"
            errors[key] = worst_row_error(rows, expected[key])
            bound = bounds[key] if implementation.bound is None else implementation.bound
            if not errors[key] <= bound:
                raise WrongResult(f"{key} has relative error {errors[key]:.2e}, bound {bound:.2e}")
    return errors


def peak_bytes(
    call: Callable[[], dict[str, Tensor]], device: str
) -> tuple[dict[str, Tensor], int | None]:
    """The results of a call, and its peak memory above what was allocated before; None on the CPU,
    where torch does not count."""
    if device != "cuda":
        return call(), None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    return results, torch.cuda.max_memory_allocated() - before


def check(
    implementation: Implementation,
    backward: bool,
    expected: dict[str, Tensor],
    bounds: dict[str, float],
    device: str,
) -> dict:
    """Calls it twice, the second time on memory filled with NaN, and compares: peak memory and
    errors, as columns of the row."""
    poison_and_free(implementation.run(backward), implementation.inputs)
    results, peak = peak_bytes(partial(implementation.run, backward), device)
    errors = compare(implementation, results, expected, bounds)
    poison_and_free(results, implementation.inputs)
    return {"peak_bytes": peak, "errors": errors}


# -- measurement -----------------------------------------------------------------------------------


def passes(implementation: Implementation) -> dict[str, bool]:
    """The passes to check: column prefix -> whether it has a backward."""
    return (
        {"forward": False, "forward_backward": True}
        if implementation.differentiable
        else {"forward": False}
    )


def host_median_ms(
    call: Callable[[], object], rep_ms: float = 50.0, warmup_ms: float = 0.0
) -> float:
    """Median time of ``call`` on the host, of at least 3 samples, after at least one call to warm
    up."""
    start = time.perf_counter()
    call()
    while (time.perf_counter() - start) * 1e3 < warmup_ms:
        call()
    samples = []
    while len(samples) < 3 or sum(samples) < rep_ms:
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples)


CACHE_BYTES = 256 * 2**20  # more than the L2 cache of any GPU
CYCLES_PER_MS = 2e6  # of the device, at its highest clock rate


def device_median_ms(
    call: Callable[[], object], rep_ms: float, warmup_ms: float
) -> tuple[float, float]:
    """Median times in ms: of the device to run ``call``, with a cold L2 cache, once all of it is
    issued; of the host to issue it."""
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device="cuda")

    def sample(head_start_ms: float) -> tuple[float, float]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        cache.zero_()
        torch.cuda._sleep(int(head_start_ms * CYCLES_PER_MS))
        start.record()
        begin = time.perf_counter()
        call()
        host_ms = (time.perf_counter() - begin) * 1e3
        end.record()
        end.synchronize()
        return start.elapsed_time(end), host_ms

    def medians(for_ms: float, head_start_ms: float) -> list[float]:
        samples, begin = [], time.perf_counter()
        while len(samples) < 3 or (time.perf_counter() - begin) * 1e3 < for_ms:
            samples.append(sample(head_start_ms))
        return [statistics.median(times) for times in zip(*samples)]

    _, host_ms = medians(warmup_ms, 0.0)
    return tuple(medians(rep_ms, 2 * host_ms))


def wall_median_ms(
    call: Callable[[], object], rep_ms: float, warmup_ms: float, count: int = 1
) -> float:
    """Median time in ms, of each of ``count`` calls, from the start of the first one until the
    device has done all."""

    def steps():
        for _ in range(count):
            call()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return host_median_ms(steps, rep_ms, warmup_ms) / count


def measure_ms(
    call: Callable[[], object], protocol: Protocol, wall: int = 0
) -> tuple[float, float | None]:
    """One measurement after the protocol's pause: its time, and on CUDA the host's time to issue
    it, unless ``wall`` includes that."""
    time.sleep(protocol.pause_s)
    if protocol.device == "cpu":
        return host_median_ms(call, protocol.rep_ms, protocol.warmup_ms), None
    if wall:
        rep_ms, warmup_ms = (WALL_FACTOR * x for x in (protocol.rep_ms, protocol.warmup_ms))
        return wall_median_ms(call, rep_ms, warmup_ms, wall), None
    return device_median_ms(call, protocol.rep_ms, protocol.warmup_ms)


# -- one case --------------------------------------------------------------------------------------


def failure(error: Exception, during: str = "") -> dict:
    """Status columns of an implementation that failed in the pass ``during``, with relative
    paths."""
    kind, text = (
        ("wrong", "")
        if isinstance(error, WrongResult)
        else ("unavailable", f"{type(error).__name__}: ")
    )
    status = ": ".join(filter(None, [kind, during, text + " ".join(str(error).split())]))
    project = f"{Path(__file__).resolve().parents[2]}/"
    return {
        "status": status,
        "traceback": "".join(traceback.format_exception(error)).replace(project, ""),
    }


def build_and_check(
    build: Callable[[], Implementation], row: dict, *reference
) -> dict[str, Implementation]:
    """Checks an implementation and adds the findings to its row. Returns the implementation by the
    passes to measure: none if the forward failed, the forward alone if forward+backward failed."""
    right = {}
    during = ""
    try:
        implementation = build()
        inputs = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for x in implementation.inputs.values()
        }
        row |= {
            "note": implementation.note,
            "host_ms": dict(implementation.host_ms),
            "input_bytes": sum(inputs.values()),
        }
        for key, backward in passes(implementation).items():
            during = key.replace("_", "+")
            row |= {
                f"{key}_{column}": value
                for column, value in check(implementation, backward, *reference).items()
            }
            right[key] = implementation
    except Exception as error:  # noqa: BLE001 any exception is reported in its row
        row |= failure(error, during)
    return right


def run_case(case: Case, protocol: Protocol, implementation_filter: re.Pattern) -> list[dict]:
    """Checks and measures a case: a row for every implementation that the filter selects, also if
    it failed."""
    blank = {"table": case.table, "case": case.name, "picture": case.picture, "status": "ok"}
    try:
        setup = case.setup()
        expected = setup.reference(torch.float64)
        eager = setup.reference(setup.dtype)
    except Exception as error:  # noqa: BLE001 any exception is reported in its row
        return [{**blank, "implementation": "(setup)", **failure(error)}]
    # If plain torch happens to be exact in a row, others may still round once. The exponentials of
    # torch's fused CPU attention, which the CPU path calls, are off by up to 20 ulp of fp32.
    exact = max(
        torch.finfo(setup.dtype).eps,
        32 * torch.finfo(torch.float32).eps if protocol.device == "cpu" else 0.0,
    )
    bounds = {
        key: max(protocol.error_factor * worst_row_error(eager[key], expected[key]), exact)
        for key in expected
    }
    del eager

    chosen = {
        name: build
        for name, build in setup.implementations.items()
        if implementation_filter.search(name)
    }
    rows = {name: {**blank, "implementation": name} for name in chosen}
    ready: dict[str, dict[str, Implementation]] = {}
    # The first round follows the check of each: what is slow to compile holds up none before it.
    for name, build in chosen.items():
        ready[name] = build_and_check(build, rows[name], expected, bounds, protocol.device)
        if case.timed and protocol.rounds:
            measure_round(case, protocol, ready[name], rows[name])
            tqdm.write(progress(rows[name]), file=sys.stderr)
    del expected
    for number in range(1, protocol.rounds if case.timed else 0):
        for name in list(ready)[:: -1 if number % 2 else 1]:
            measure_round(case, protocol, ready[name], rows[name])
    baseline = rows[setup.baseline] if ready.get(setup.baseline) else {}
    for name, checked in ready.items():
        if checked:
            whole = all(implementation.whole for implementation in checked.values())
            derive(rows[name], setup, baseline, whole)
    return list(rows.values())


def measure_round(
    case: Case, protocol: Protocol, checked: dict[str, Implementation], row: dict
) -> None:
    """Adds a round of the passes to the row. Empties ``checked`` if one fails."""
    try:
        for name, implementation in checked.items():
            key = name.removeprefix("forward_") if case.backward_alone else name
            ms, host_ms = measure_ms(implementation.measured_call(key), protocol, case.wall)
            row.setdefault(f"{key}_rounds_ms", []).append(ms)
            if host_ms is not None:
                row.setdefault(f"{key}_host_rounds_ms", []).append(host_ms)
    except Exception as error:  # noqa: BLE001 any exception is reported in its row
        row |= failure(error, "timing")
        checked.clear()


def progress(row: dict) -> str:
    """A line about the first round."""
    times = {
        key.removesuffix("_rounds_ms").replace("_", "+"): f"{report.number(value[0])} ms"
        for key, value in row.items()
        if key.endswith("_rounds_ms") and "_host_" not in key
    }
    status = [row["status"]] if row["status"] != "ok" else []
    found = [*(f"{key} {value}" for key, value in times.items()), *status]
    return f"{row['case']}: {row['implementation']}: {', '.join(found)}"


def derive(row: dict, setup: Setup, baseline: dict, whole: bool) -> None:
    """Adds the reported figures: the better round, and, for an implementation of the ``whole``
    work, rates and speed-ups."""
    totals = {
        "forward": (setup.flops, setup.bytes),
        "backward": (setup.backward_flops, setup.backward_bytes),
        "forward_backward": (
            setup.flops + setup.backward_flops,
            setup.bytes + setup.backward_bytes,
        ),
    }
    for key, (flops, nbytes) in totals.items():
        if f"{key}_rounds_ms" not in row:
            continue
        ms = row[f"{key}_ms"] = min(row[f"{key}_rounds_ms"])
        if f"{key}_host_rounds_ms" in row:
            row[f"{key}_host_ms"] = min(row[f"{key}_host_rounds_ms"])
        if whole:
            row[f"{key}_tflops"] = flops / ms / 1e9 if flops else None
            row[f"{key}_gbytes"] = nbytes / 1e9 if nbytes else None
            row[f"{key}_gbytes_per_s"] = nbytes / ms / 1e6 if nbytes else None
            if setup.attainable:
                row[f"{key}_floor_ms"] = 1e3 * max(
                    work / rate for work, rate in zip((nbytes, flops), setup.attainable)
                )
                row[f"{key}_floor_percent"] = 100 * row[f"{key}_floor_ms"] / ms
            if f"{key}_rounds_ms" in baseline:
                row[f"{key}_speedup"] = min(baseline[f"{key}_rounds_ms"]) / ms


def release_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def other_table(table: Callable[[str, bool], list[dict]], device: str, tiny: bool) -> list[dict]:
    try:
        return table(device, tiny)
    except Exception as error:  # noqa: BLE001 any exception is reported in its place
        return [failure(error)]


# -- the run ---------------------------------------------------------------------------------------


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return f"CPU {models[0] if models else platform.machine()}, {torch.get_num_threads()} threads"


def environment(device: str) -> dict:
    """Date, commit, command, device and versions: what a figure depends on besides the code."""
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "commit": sources.commit(),
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "cuda":
        import triton

        facts["triton"] = triton.__version__
        if shutil.which("nvidia-smi"):
            query = [
                "nvidia-smi",
                "--query-gpu=driver_version,power.limit",
                "--format=csv,noheader",
                "--id=0",
            ]
            process = subprocess.run(query, capture_output=True, text=True, check=False)
            facts["driver and power limit"] = " ".join((process.stdout + process.stderr).split())
    return facts


def free_stem(folder: Path, date: str, op: str) -> Path:
    """``<folder>/<date>-<op>``, or with ``-2``, ``-3`` ... if that exists: results are never
    overwritten."""
    stem, number = folder / f"{date}-{op}", 1
    while stem.with_suffix(".json").exists():
        number += 1
        stem = folder / f"{date}-{op}-{number}"
    return stem


def measured_today(folder: Path, date: str, op: str) -> set[str]:
    """What runs of the day measured: "table: case", and the titles of other tables."""
    runs = [
        run
        for path in folder.glob(f"{date}-{op}*.json")
        if (run := json.loads(path.read_text()))["op"] == op
    ]
    rows = [row for run in runs for row in run["rows"]]
    return {f"{row['table']}: {row['case']}" for row in rows}.union(
        *(run.get("other_tables", {}) for run in runs)
    )


def main(
    op: str,
    make_cases: Callable[[str, bool], list[Case]],
    argv: list[str] | None = None,
    summary: Callable[[list[dict]], list[str]] = lambda rows: [],
    other_tables: Mapping[str, Callable[[str, bool], list[dict]]] | None = None,
    own_options: Sequence[argparse.ArgumentParser] = (),
    run: Callable[[Case, Protocol, re.Pattern], list[dict]] = run_case,
) -> int:
    """Runs a benchmark from its command line.

    Args:
        op: the operator's stem, as in ``bench_<op>.py``.
        make_cases: ``make_cases(device, tiny)`` lists the cases.
        argv: arguments; those of the command line where None.
        summary: ``summary(rows)`` -> lines above the tables, about several rows.
        other_tables: tables with columns of their own by title, ``table(device, tiny)`` -> rows,
            ``{heading: text or number}``.
        own_options: parsers, without help, of options that the benchmark has read itself.
        run: measures a case, as run_case does.

    Returns:
        The exit status: 1 if an implementation gave a wrong result, else 0.
    """
    parser = argparse.ArgumentParser(description=f"Benchmark of {op}.", parents=list(own_options))
    add_options(parser)
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the results (default: results/<device>/runs/ beside this file)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="skip the cases that runs of the same day in the folder have",
    )
    options, protocol = parse(parser, argv)
    folder = options.out or report.runs_folder(device_name(options.device))
    chosen = choose(
        parser, options, named(make_cases(options.device, options.tiny)) | dict(other_tables or {})
    )
    start = environment(options.device) | {"kernels": sources.state(op)}
    done = measured_today(folder, start["date"][:10], op) if options.resume else set()
    todo = {name: case for name, case in chosen.items() if name not in done}
    if not todo:
        print(f"{op}: nothing left to measure")
        return 0
    results = {
        "op": op,
        "environment": start,
        "protocol": {**asdict(protocol), "text": str(protocol)},
        "complete": False,
        "seconds": 0.0,
        "rows": [],
        "other_tables": {},
    }
    folder.mkdir(parents=True, exist_ok=True)
    stem = free_stem(folder, results["environment"]["date"][:10], op)
    begin = time.perf_counter()
    for name, case in tqdm(todo.items(), desc=op, unit="case"):
        release_memory(options.device)
        if isinstance(case, Case):
            results["rows"] += run(case, protocol, options.impl)
        else:
            results["other_tables"][name] = other_table(case, options.device, options.tiny)
        results |= {"summary": summary(results["rows"]), "seconds": time.perf_counter() - begin}
        report.save(results, stem)
    results["complete"] = True
    report.save(results, stem)
    report.save_picture(results, stem)

    print(report.markdown(results))
    failed = [row for row in results["rows"] if row["status"] != "ok"]
    for row in failed:
        print(
            f"{row['table']}: {row['case']}: {row['implementation']}:"
            f" {report.shorten(row['status'], 300)}",
            file=sys.stderr,
        )
    return int(any(row["status"].startswith("wrong") for row in failed))
