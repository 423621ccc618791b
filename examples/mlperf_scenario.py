"""Runs of MLPerf's LoadGen, the package mlcommons-loadgen, in its Server scenario."""

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SUMMARY = {
    "result": r"Result is : (\w+)",
    "scheduled queries/s": r"Scheduled samples per second : (\S+)",
    "completed queries/s": r"Completed samples per second\s+: (\S+)",
    "p50 ns": r"50.00 percentile latency \(ns\)\s+: (\d+)",
    "p99 ns": r"99.00 percentile latency \(ns\)\s+: (\d+)",
}


def add_options(parser: argparse.ArgumentParser, samples: int, seconds: float) -> None:
    """samples, seconds: defaults."""
    parser.add_argument(
        "--limit-ms", type=float, default=80, help="limit of the latency at the 99th percentile"
    )
    parser.add_argument("--seconds", type=float, default=seconds, help="least duration of a run")
    parser.add_argument("--samples", type=int, default=samples, help="different queries")


def require(program: str) -> None:
    """Ends the program if LoadGen is not installed."""
    if importlib.util.find_spec("mlperf_loadgen") is None:
        sys.exit(f'{program}: LoadGen is not installed: pip install ".[serve-more]"')


def complete(ids: Iterable[int]) -> None:
    """Tells LoadGen that these queries are answered."""
    import mlperf_loadgen as loadgen

    loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(id, 0, 0) for id in ids])


def serve(
    issue: Callable[[list[Any]], None], qps: float, options: argparse.Namespace, folder: Path
) -> dict[str, str]:
    """The summary of a run, in which queries come as a Poisson process.

    Args:
        issue: takes queries, which have an index below options.samples, and an id for `complete`.
        qps: queries per second.
        folder: for LoadGen's files.
    """
    import mlperf_loadgen as loadgen

    settings, log = loadgen.TestSettings(), loadgen.LogSettings()
    settings.scenario, settings.mode = loadgen.TestScenario.Server, loadgen.TestMode.PerformanceOnly
    settings.server_target_qps = qps
    settings.server_target_latency_ns = int(options.limit_ms * 1e6)
    settings.server_target_latency_percentile = 0.99
    settings.min_duration_ms, settings.min_query_count = int(options.seconds * 1e3), 1
    folder.mkdir(parents=True, exist_ok=True)
    log.log_output.outdir, log.log_output.copy_summary_to_stdout = str(folder), False
    system = loadgen.ConstructSUT(issue, lambda: None)
    samples = loadgen.ConstructQSL(
        options.samples, options.samples, lambda indices: None, lambda indices: None
    )
    loadgen.StartTestWithLogSettings(system, samples, settings, log)
    loadgen.DestroyQSL(samples)
    loadgen.DestroySUT(system)
    summary = (folder / "mlperf_log_summary.txt").read_text()
    return {
        name: found[1]
        for name, pattern in SUMMARY.items()
        if (found := re.search(pattern, summary))
    }
