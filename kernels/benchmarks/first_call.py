"""First-call latency: the kernels that the first training step of each layer compiles, and its
time.

    # every layer in bf16 and fp32
    python kernels/benchmarks/first_call.py
    python kernels/benchmarks/first_call.py --only "HSTU.*bfloat16"

Each layer is measured in two processes: one starts with an empty Triton cache, the other with the
cache of the first. With --kernels, in a third, which reads kernels compiled before, without a C
compiler and without a cache that can be written:

    python -m jagged_modules.precompile --capability 9.0 \\
        --configs kernels/benchmarks/first_call.json --out kernels.zip
    python kernels/benchmarks/first_call.py --kernels kernels.zip

Writes <date>-first_call.json and .md among the runs. Exit status 1: a later
step compiled a kernel. Needs a GPU.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report
import runner
import torch
from protocol import choose
from training_steps import training_steps

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
BATCH = [200] * 64, [20] * 64  # rows of each user's history, candidates
TEXT = (
    "One training step (forward, backward, SGD) of 64 users with 200 rows of history and 20"
    " candidates each, in a process whose CUDA context and cuBLAS are ready. Empty cache: Triton"
    " compiles every kernel; warm cache: it loads them from disk. Kernels are chosen by the mean"
    " length of segments: batches of very different means compile others at their first step, once."
)


def measure(name: str, dtype: torch.dtype) -> dict:
    """Measure in this process: kernels and seconds of the first step, milliseconds of a later
    one."""
    from triton import knobs

    compiled = []
    knobs.compilation.listener = lambda *, cache_hit, times, **_: compiled.append(
        (cache_hit, times.total / 1e6)
    )
    warm = torch.randn(64, 64, device="cuda", dtype=dtype, requires_grad=True)
    (warm @ warm).sum().backward()
    step = training_steps("cuda", dtype)[name]()
    first = _seconds(step)
    kernels = len(compiled)
    later = min(_seconds(step) for _ in range(5))
    return dict(
        kernels=kernels,
        compiled=sum(not hit for hit, _ in compiled),
        compile_seconds=sum(seconds for _, seconds in compiled),
        first_seconds=first,
        later_ms=later * 1e3,
        compiled_later=len(compiled) - kernels,
    )


def _seconds(step) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step(*BATCH)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_in_processes(name: str, dtype: str, compiled: Path | None) -> dict:
    """A row of the table. compiled: kernels compiled before."""
    with tempfile.TemporaryDirectory() as cache:
        empty, warm = (_in_a_process(name, dtype, TRITON_CACHE_DIR=cache) for _ in range(2))
    row = {
        "layer": name,
        "dtype": dtype,
        "kernels": empty["kernels"],
        "compilation s": empty["compile_seconds"],
        "first step s, empty cache": empty["first_seconds"],
        "first step s, warm cache": warm["first_seconds"],
        "later step ms": empty["later_ms"],
        "compiled in later steps": empty["compiled_later"],
    }
    if compiled is not None:
        environment = dict(JAGGED_KERNELS=str(compiled.resolve()), PATH="")
        # no folder can be made below a device
        found = _in_a_process(name, dtype, TRITON_CACHE_DIR="/dev/null/cache", **environment)
        row |= {
            "first step s, compiled before": found["first_seconds"],
            "compiled then": found["compiled"] + found["compiled_later"],
        }
    return row


def _in_a_process(name: str, dtype: str, **environment: str) -> dict:
    command = [sys.executable, __file__, "--layer", name, "--dtype", dtype]
    process = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(process.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        default="",
        type=re.compile,
        help="regular expression: layers and dtypes to measure (default: all)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the results (default: results/<device>/runs/ beside this file)",
    )
    parser.add_argument(
        "--kernels", type=Path, help="kernels compiled before (default: no third process)"
    )
    parser.add_argument("--layer", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    if options.layer is not None:
        print(json.dumps(measure(options.layer, DTYPES[options.dtype])))
        return 0
    names = training_steps("cpu", torch.float32)
    cases = choose(
        parser, options, {f"{name}, {dtype}": (name, dtype) for dtype in DTYPES for name in names}
    )
    start = time.perf_counter()
    rows = []
    results = dict(
        op="first_call", environment=runner.environment("cuda"), protocol=dict(text=TEXT), rows=[]
    )
    folder = options.out or report.runs_folder(runner.device_name("cuda"))
    folder.mkdir(parents=True, exist_ok=True)
    stem = runner.free_stem(folder, results["environment"]["date"][:10], "first_call")
    for case in cases.values():
        rows.append(measure_in_processes(*case, options.kernels))
        results |= dict(
            complete=len(rows) == len(cases),
            seconds=time.perf_counter() - start,
            other_tables={"first call": rows},
        )
        report.save(results, stem)
    print(report.markdown(results))
    return int(any(row["compiled in later steps"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
