"""Runs random cases of every public function against float64 models, forward and gradients.
`make fuzz SECONDS=60 SEED=1 ARGS=...`

Each worker process has a thread that draws cases and sends them one at a time. A worker may die (an
illegal memory access makes its CUDA context unusable): then the running case is reported and a new
worker started. A failing case is shrunk as long as it fails in the same way, and printed as one
command that repeats it.

On a GPU, compiling kernels would take most of the time. So each configuration (dtype, sizes and the
options that decide which kernel is compiled) runs with many lengths, values and forms of tensors of
indices before the next one. Workers share the GPUs evenly, and Triton's disk cache. 20,000 cases
with 500 configurations, on a machine with several GPUs:

    python tests/fuzz.py --device cuda --cases 20000 --workers 64
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

from cases import Case, random_configuration, smaller_cases, with_random_data
from space import OPERATORS, leave_out_hopper

DEVICES = ("cpu", "interpreter", "cuda")
CASES = dict(cpu=3, interpreter=1, cuda=40)  # successive cases of one configuration
RESERVED_BYTES = 2**31  # limit of the GPU memory that a worker's allocator keeps


@dataclasses.dataclass(frozen=True)
class Failure:
    """kind: "wrong", an exception's name, "crash" or "timeout"."""

    case: Case
    kind: str
    message: str

    @property
    def command(self) -> str:
        return shlex.join([sys.executable, sys.argv[0], "--case", self.case.to_json()])


# -- the worker process ----------------------------------------------------------------------------


def run_case(case: Case) -> dict | None:
    """Run the case in this process. The failure as {kind, message}, or None."""
    from calls import check

    try:
        check(case)
    except AssertionError as error:
        return dict(kind="wrong", message=str(error))
    except Exception as error:  # whatever the library raises for a legal call
        return dict(kind=type(error).__name__, message=str(error))
    return None


def serve() -> None:
    """Read a case from each line of stdin. Write the result of `run_case` to stdout, as one line of
    JSON."""
    import calls  # noqa: F401  imports all that a case needs
    import torch

    if os.environ["TRITON_INTERPRET"] == "1":
        from checked_memory import check_memory
        from faster_interpreter import make_faster

        make_faster()
        check_memory()
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print to stdout must not disturb the responses
    torch.set_num_threads(1)
    print("ready", file=responses, flush=True)
    for line in sys.stdin:
        failure = run_case(Case.from_json(line))
        print(json.dumps(failure), file=responses, flush=True)
        if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > RESERVED_BYTES:
            torch.cuda.empty_cache()


class Worker:
    """A process that runs cases of one device; replaced by a new one when it dies. number: of the
    worker, which decides its GPU."""

    def __init__(self, timeout: float, number: int = 0):
        self.timeout, self.number = timeout, number
        self.process: subprocess.Popen | None = None

    def run(self, case: Case) -> Failure | None:
        if self.process is None:
            self._start(case.device)
        killed = threading.Event()
        watchdog = threading.Timer(self.timeout, lambda: (killed.set(), self.process.kill()))
        watchdog.start()
        try:
            self.process.stdin.write(case.to_json() + "\n")
            self.process.stdin.flush()
            response = self.process.stdout.readline()
        except BrokenPipeError:
            response = ""
        finally:
            watchdog.cancel()
        if not response:
            kind, message = (
                ("timeout", f"took more than {self.timeout} s")
                if killed.is_set()
                else ("crash", self._last_words())
            )
            self.stop()
            return Failure(case, kind, message)
        failure = json.loads(response)
        if failure is None:
            return None
        if "CUDA" in failure["message"]:
            self.stop()  # its context may be unusable
        return Failure(case, **failure)

    def _start(self, device: str) -> None:
        environment = os.environ | dict(
            OMP_NUM_THREADS="1", TRITON_INTERPRET="1" if device == "interpreter" else "0"
        )
        if device == "cuda":
            gpus = _gpus()
            environment["CUDA_VISIBLE_DEVICES"] = gpus[self.number % len(gpus)]
        self.stderr = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, sys.argv[0], "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            env=environment,
        )
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError(f"a worker for {device} does not start: {self._last_words()}")

    def _last_words(self) -> str:
        code = self.process.wait()
        self.stderr.seek(0)
        return f"the process ended with {code}: {self.stderr.read()[-1500:]}"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@functools.cache
def _gpus() -> list[str]:
    """The GPUs that CUDA shows, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return shown.split(",") if shown else [str(i) for i in range(torch.cuda.device_count())]


# -- shrinking -------------------------------------------------------------------------------------


def shrink(failure: Failure, worker: Worker, seconds: float) -> Failure:
    """The smallest case found within `seconds` that fails in the same way."""
    deadline = time.monotonic() + seconds
    smaller = failure
    while smaller is not None:
        failure = smaller
        smaller = next(
            filter(
                None,
                (
                    _fails_alike(case, failure, worker, deadline)
                    for case in smaller_cases(failure.case)
                ),
            ),
            None,
        )
    return failure


def _fails_alike(case: Case, failure: Failure, worker: Worker, deadline: float) -> Failure | None:
    other = worker.run(case) if time.monotonic() < deadline else None
    return other if other is not None and other.kind == failure.kind else None


# -- the run ---------------------------------------------------------------------------------------


class Run:
    """Random cases until the time is over or all are run, by threads that each have a worker
    process for each of their devices.

    Configurations have numbers, which the threads take in turn, and their cases have seeds that
    follow from the number. So all cases of a run differ, whatever the number of workers.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.start = time.monotonic()
        self.deadline = self.start + options.seconds
        weights = {name: OPERATORS[name].weight for name in options.function}
        self.functions = [
            name for i in range(max(weights.values())) for name in weights if weights[name] > i
        ]
        self.numbers = {device: itertools.count() for device in options.device}
        self.counts, self.visited = collections.Counter(), collections.Counter()
        self.failures: list[Failure] = []
        self.lock = threading.Lock()

    def run(self) -> None:
        workers, devices = self.options.workers, self.options.device
        groups = (
            [devices[i::workers] for i in range(workers)]
            if workers < len(devices)
            else _shares(devices, workers)
        )
        with concurrent.futures.ThreadPoolExecutor(len(groups)) as pool:
            list(pool.map(self._explore, groups, itertools.count()))  # raises what a thread raised

    def _explore(self, devices: list[str], number: int) -> None:
        workers = {device: Worker(self.options.timeout, number) for device in devices}
        try:
            for device in itertools.cycle(devices):
                for case in self._cases(device):
                    if self._is_over():
                        return
                    self._note(case, workers[device].run(case), workers[device])
        finally:
            for worker in workers.values():
                worker.stop()

    def _cases(self, device: str):
        """The next configuration's cases. After the last one the first comes again, with other
        lengths and values."""
        with self.lock:
            number = next(self.numbers[device])
        limit = self.options.configurations or number + 1
        functions = [x for x in self.functions if self._dtypes(x, device)]
        if not functions:
            return
        function = functions[number % limit % len(functions)]
        seed = self.options.seed * 1_000_003 + number % limit
        dtypes = self._dtypes(function, device)
        configuration = random_configuration(
            function, seed, device, dtype=dtypes[seed // len(functions) % len(dtypes)]
        )
        for i in range(self.options.cases_per_configuration or CASES[device]):
            yield with_random_data(configuration, self.options.seed * 1_000_003 + number * 1009 + i)

    def _dtypes(self, function: str, device: str) -> list[str]:
        wanted = self.options.dtype
        return [
            x for x in OPERATORS[function].dtypes.get(device, ()) if wanted is None or x in wanted
        ]

    def _note(self, case: Case, failure: Failure | None, worker: Worker) -> None:
        with self.lock:
            self.counts[case.function, case.device, case.dtype] += 1
            self.visited.update(
                (case.function, case.device, name, str(value))
                for name, value in case.options.items()
            )
            known = {(x.case.function, x.case.device, x.kind) for x in self.failures}
            if failure is None:
                return
            self.failures.append(failure)
            number = len(self.failures) - 1
        print(
            f"FAILED {failure.kind}: {_first_line(failure.message)}\n  {failure.command}",
            flush=True,
        )
        if (case.function, case.device, failure.kind) not in known:
            self.failures[number] = small = shrink(failure, worker, self.options.shrink_seconds)
            print(
                f"SMALLER {small.kind}: {_first_line(small.message)}\n  {small.command}", flush=True
            )

    def _is_over(self) -> bool:
        all_run = self.options.cases is not None and self.counts.total() >= self.options.cases
        return (
            all_run
            or time.monotonic() > self.deadline
            or len(self.failures) >= self.options.max_failures
        )

    def summary(self) -> dict:
        failed = collections.Counter(
            (x.case.function, x.case.device, x.case.dtype) for x in self.failures
        )
        counts = [
            dict(function=f, device=d, dtype=t, cases=n, failed=failed[f, d, t])
            for (f, d, t), n in sorted(self.counts.items())
        ]
        failures = [
            dict(kind=x.kind, message=x.message, command=x.command, case=dataclasses.asdict(x.case))
            for x in self.failures
        ]
        return dict(
            seed=self.options.seed,
            seconds=time.monotonic() - self.start,
            cases=self.counts.total(),
            counts=counts,
            failures=failures,
            not_visited=self._not_visited(),
        )

    def _not_visited(self) -> list[str]:
        """Values of options that no case had, of the functions and devices that were run; size
        classes are not listed."""
        return [
            f"{function} {device} {name}={value}"
            for function, device in sorted({key[:2] for key in self.counts})
            for name in OPERATORS[function].names()
            for value in dict.fromkeys(OPERATORS[function].axis(name, device))
            if isinstance(value, (str, int, float, bool, type(None)))
            and not self.visited[function, device, name, str(value)]
        ]


def _shares(devices: list[str], workers: int) -> list[list[str]]:
    """A device for each worker: one for each, and the rest for the last, which is the GPU if there
    is one."""
    return [[device] for device in devices] + [[devices[-1]]] * (workers - len(devices))


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _table(counts: list[dict]) -> str:
    columns = sorted(
        {(x["device"], x["dtype"]) for x in counts},
        key=lambda column: (DEVICES.index(column[0]), column[1]),
    )
    cells = {(x["function"], x["device"], x["dtype"]): x["cases"] for x in counts}
    lines = [
        f"{'cases':34}{'all':<8}{'wrong':<8}"
        + "".join(f"{device[:6]} {dtype:<9}" for device, dtype in columns)
    ]
    for function in dict.fromkeys(x["function"] for x in counts):
        all_cases, wrong = (
            sum(x[key] for x in counts if x["function"] == function) for key in ("cases", "failed")
        )
        numbers = "".join(f"{cells.get((function, *column), 0):<16}" for column in columns)
        lines.append(f"{function:34}{all_cases:<8}{wrong:<8}{numbers}")
    return "\n".join(line.rstrip() for line in lines)


def _report(summary: dict) -> None:
    print(_table(summary["counts"]))
    if summary["not_visited"]:
        listed = summary["not_visited"][:12]
        print(
            f"{len(summary['not_visited'])} values of options in no case, among them: "
            + "; ".join(listed)
        )
    for failure in summary["failures"]:
        print(f"{failure['kind']}: {_first_line(failure['message'])}\n  {failure['command']}")
    print(
        f"{summary['cases']} cases in {summary['seconds']:.0f} s, {len(summary['failures'])}"
        f" failures, seed {summary['seed']}"
    )


def _repeat(case: Case) -> int:
    """Run one case in this process; a failure is printed in full."""
    os.environ["TRITON_INTERPRET"] = "1" if case.device == "interpreter" else "0"
    failure = run_case(case)
    print("right" if failure is None else f"{failure['kind']}: {failure['message']}")
    return int(failure is not None)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=None, help="stop after this number of cases")
    parser.add_argument(
        "--seconds",
        type=float,
        default=None,
        help="seconds after which no more cases are drawn (default: 60; no limit with --cases)",
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the cases (default: a random one)"
    )
    parser.add_argument(
        "--function",
        nargs="+",
        choices=OPERATORS,
        default=list(OPERATORS),
        metavar="NAME",
        help="functions (default: all)",
    )
    parser.add_argument("--dtype", nargs="+", default=None, help="dtypes (default: all)")
    parser.add_argument(
        "--device",
        nargs="+",
        choices=DEVICES,
        default=None,
        help="devices (default: all of this machine)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=None,
        help="processes (default: 2; with a GPU, the number of cores)",
    )
    parser.add_argument(
        "--configurations",
        type=int,
        default=None,
        help="repeat this number of configurations on each device",
    )
    parser.add_argument(
        "--cases-per-configuration",
        type=int,
        default=None,
        help=f"cases of a configuration before the next; default by device: {CASES}",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        help="seconds that a case may take, with compilation (default: %(default)s)",
    )
    parser.add_argument(
        "--shrink-seconds",
        type=float,
        default=60.0,
        help="seconds for shrinking a failing case (default: %(default)s)",
    )
    parser.add_argument(
        "--max-failures",
        type=int,
        default=30,
        help="stop after this number of failures (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=Path, default=None, help="also write the summary to this file"
    )
    parser.add_argument(
        "--case",
        type=Case.from_json,
        default=None,
        help="run only this case, as a failure prints it",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    # what torch's deterministic mode asks for
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if options.worker:
        serve()
        return 0
    if options.case is not None:
        return _repeat(options.case)

    import torch

    has_gpu = torch.cuda.is_available()
    if "cuda" in (options.device or ()) and not has_gpu:
        raise SystemExit("--device cuda: there is no CUDA device")
    if has_gpu and torch.cuda.get_device_capability() != (9, 0):
        leave_out_hopper()
    options.device = [
        x
        for x in DEVICES
        if (options.device is None and (x != "cuda" or has_gpu)) or x in (options.device or ())
    ]
    options.workers = options.workers or (os.cpu_count() if "cuda" in options.device else 2)
    if options.seconds is None:
        options.seconds = 60.0 if options.cases is None else float("inf")
    options.seed = int(time.time()) if options.seed is None else options.seed
    until = f"{options.seconds:.0f} s" if options.cases is None else f"{options.cases} cases"
    print(
        f"seed {options.seed}, devices {' '.join(options.device)}, {options.workers} workers,"
        f" {until}",
        flush=True,
    )
    run = Run(options)
    run.run()
    summary = run.summary()
    _report(summary)
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=1) + "\n")
    return int(bool(summary["failures"]) or not summary["cases"])


if __name__ == "__main__":
    sys.exit(main())
