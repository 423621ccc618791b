"""Profiles the main kernels with ncu: attention's forward and backward, linear compression, block
attention.

    # under ncu: writes <date>-profile.csv among the runs
    python kernels/benchmarks/profile_kernels.py
    python kernels/benchmarks/profile_kernels.py --launch     # only the launches, which ncu runs

Needs ncu (Nsight Compute) on PATH. record.py makes a table of the latest such file. Clocks are left
as they are, as in the benchmarks.
"""

import argparse
import csv
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import report

LAUNCHES = 3
STALLS = (  # "gmma" exists on Hopper only: waiting for a warpgroup MMA
    *(
        "barrier",
        "branch_resolving",
        "dispatch_stall",
        "drain",
        "gmma",
        "imc_miss",
        "lg_throttle",
        "long_scoreboard",
        "membar",
        "misc",
    ),
    *(
        "math_pipe_throttle",
        "mio_throttle",
        "no_instruction",
        "short_scoreboard",
        "sleeping",
        "tex_throttle",
        "wait",
    ),
)
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
FIGURES = {  # heading -> metric
    "µs": "gpu__time_duration.sum",
    "tensor pipe %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "DRAM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
METRICS = (*FIGURES.values(), *(STALL.format(reason) for reason in STALLS))
# names of the main kernels, without helpers
KERNELS = "attention_fwd|attention_bwd|linear_compress_fwd|block_attention"
NANOSECONDS = {"nsecond": 1.0, "ns": 1.0, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6}


# -- the launches ----------------------------------------------------------------------------------


def kernels(device: str = "cuda", tiny: bool = False) -> dict[str, Callable[[], object]]:
    """A call for each kernel, on one shape of the benchmarks; on Hopper also for the portable
    kernels."""
    import bench_block_attention as blocks
    import bench_linear_compress as compress
    import torch
    from bench_attention import self_attention
    from inputs import our_kernels, uniform_lengths

    count, longest, batch, total = (4, 20, 10, 100) if tiny else (64, 2048, 1024, 704_106)
    attention = self_attention(
        device, torch.bfloat16, uniform_lengths(count, 1, longest), 4, 128
    ).implementations
    compression = compress.Problem(
        device, torch.float16, compress.TINY if tiny else compress.FULL, batch, 70
    )
    block = blocks.Problem(
        device, torch.bfloat16, blocks.lengths_of_total(18 * count, total), 4, 128, 64
    ).our_implementations()
    calls = {}
    for ours, implementation in our_kernels(device).items():
        calls |= {
            f"attention {key}, {ours}": attention[ours]().measured_call(key)
            for key in ("forward", "backward")
        }
        calls |= {
            f"block attention {key}, {ours}": block[ours]().measured_call(key)
            for key in ("forward", "backward")
        }
        calls[f"linear compression, {ours}"] = compression.ours(implementation).measured_call(
            "forward"
        )
    return calls


def launch() -> None:
    """Calls each kernel once to compile it, then a few times in the range that ncu profiles."""
    import torch

    for name, call in kernels().items():
        call()
        torch.cuda.synchronize()
        print(f"profiling {name}", file=sys.stderr)
        with torch.cuda.profiler.profile():
            for _ in range(LAUNCHES):
                call()
            torch.cuda.synchronize()


def ncu_command(output: Path) -> list[str]:
    options = [
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--csv",
        "--print-units",
        "base",
        "--log-file",
        str(output),
    ]
    options += ["--kernel-name", f"regex:{KERNELS}", "--metrics", ",".join(METRICS)]
    return ["ncu", *options, sys.executable, str(Path(__file__).resolve()), "--launch"]


# -- the table -------------------------------------------------------------------------------------


def parse(text: str) -> list[dict]:
    """A row for every kernel in the output of ``ncu --csv``: medians of its launches' metrics.

    The CSV begins at the line of headings, after messages of ncu and of the program. It has a line
    for each metric of a launch.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError('this is no output of ncu --csv: it has no line that begins with "ID"')
    values: dict[str, dict[str, list[float]]] = {}
    for line in csv.DictReader(lines[start:]):
        value = line["Metric Value"].replace(",", "")
        try:
            number = float(value)
        except ValueError:  # "n/a": the device has no such counter
            continue
        if line["Metric Name"] == FIGURES["µs"]:
            number *= NANOSECONDS[line["Metric Unit"]] / 1e3
        values.setdefault(line["Kernel Name"], {}).setdefault(line["Metric Name"], []).append(
            number
        )
    return [
        row_of(name, {metric: statistics.median(x) for metric, x in metrics.items()})
        for name, metrics in values.items()
    ]


def row_of(kernel: str, metrics: dict[str, float]) -> dict:
    """The figures, and the stall reasons (waiting warps per issued instruction), the longest
    first."""
    stalls = {
        reason: metrics[STALL.format(reason)]
        for reason in STALLS
        if STALL.format(reason) in metrics
    }
    longest = sorted(stalls.items(), key=lambda stall: -stall[1])
    return {
        "kernel": kernel,
        **{heading: metrics.get(metric) for heading, metric in FIGURES.items()},
        "stalls": dict(longest),
    }


def markdown(rows: list[dict]) -> list[str]:
    lines = ["", "## What limits the kernels", ""]
    if not rows:
        return [*lines, "missing: profile_kernels.py was not run."]
    lines += [
        "ncu without clock control, medians of a few launches. Stalls: waiting warps per issued"
        " instruction, the three largest."
    ]
    lines += ["", f"| kernel | {' | '.join(FIGURES)} | stalls |", f"|{'---|' * (len(FIGURES) + 2)}"]
    for row in rows:
        stalls = ", ".join(
            f"{reason.replace('_', ' ')} {value:.2f}"
            for reason, value in list(row["stalls"].items())[:3]
        )
        lines.append(
            f"| `{row['kernel']}` |"
            f" {' | '.join(report.number(row[heading]) for heading in FIGURES)} | {stalls} |"
        )
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Profiles the main kernels under ncu.")
    parser.add_argument(
        "--launch", action="store_true", help="only launch the kernels, for a running ncu"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the file (default: results/<device>/runs/ beside this file)",
    )
    options = parser.parse_args(argv)
    if options.launch:
        launch()
        return 0
    if shutil.which("ncu") is None:
        parser.error("ncu (Nsight Compute) is not on PATH")
    import torch

    folder = options.out or report.runs_folder(torch.cuda.get_device_name())
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        ncu_command(folder / f"{datetime.now(UTC):%Y-%m-%d}-profile.csv"), check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
