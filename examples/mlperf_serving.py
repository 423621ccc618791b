"""Runs MLPerf's LoadGen on a ranker: python examples/mlperf_serving.py --weights FILE --qps 20
[--candidates 2048 --limit-ms 80]

The Server scenario: LoadGen sends queries as a Poisson process, and a run is valid if 99 % of them
are answered within the limit. The defaults are those of DLRMv3. Neither this model nor a run of
less than ten minutes is an official result.
"""

import argparse
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import torch
from checkpoints import load_weights
from load_generator import FOREVER, Workload
from serving_app import Service, ServiceLimits, tune_process
from serving_batcher import Limits
from serving_models import add_cache_options, add_ranker_options, ranker_from_options
from serving_rankers import Ranker
from training import HelpFormatter

SUMMARY = {
    "result": r"Result is : (\w+)",
    "scheduled queries/s": r"Scheduled samples per second : (\S+)",
    "completed queries/s": r"Completed samples per second\s+: (\S+)",
    "p50 ns": r"50.00 percentile latency \(ns\)\s+: (\d+)",
    "p99 ns": r"99.00 percentile latency \(ns\)\s+: (\d+)",
}


class SystemUnderTest:
    """Puts LoadGen's queries into the queue of a service and reports when they are answered."""

    def __init__(self, loadgen: Any, service: Service, workload: Workload, num_samples: int):
        self.loadgen, self.service, self.requests = loadgen, service, workload.requests(num_samples)
        self.failed = 0

    def issue(self, samples: list[Any]) -> None:
        for sample in samples:
            # LoadGen judges the latency of all queries
            waiting = self.service.batcher.submit(self.requests[sample.index], FOREVER)
            waiting.future.add_done_callback(
                lambda future, id=sample.id: self._complete(id, future.exception())
            )

    def _complete(self, id: int, error: BaseException | None) -> None:
        self.failed += error is not None
        self.loadgen.QuerySamplesComplete([self.loadgen.QuerySampleResponse(id, 0, 0)])


def measure(ranker: Ranker, options: argparse.Namespace) -> dict[str, str]:
    """The summary of a run. Raises RuntimeError if a query failed, and ImportError without
    LoadGen."""
    import mlperf_loadgen as loadgen

    batches = Limits(
        max_queue=10**9,
        max_users=options.max_users,
        max_candidates=options.max_users * options.candidates,
    )
    service = Service(ranker, ServiceLimits(batches))
    system = SystemUnderTest(
        loadgen, service, Workload(ranker, options.candidates, 0.0, options.zipf), options.samples
    )
    settings, log = loadgen.TestSettings(), loadgen.LogSettings()
    settings.scenario, settings.mode = loadgen.TestScenario.Server, loadgen.TestMode.PerformanceOnly
    settings.server_target_qps, settings.server_target_latency_ns = (
        options.qps,
        int(options.limit_ms * 1e6),
    )
    settings.server_target_latency_percentile = 0.99
    settings.min_duration_ms, settings.min_query_count = int(options.seconds * 1e3), 1
    options.out.mkdir(parents=True, exist_ok=True)
    log.log_output.outdir, log.log_output.copy_summary_to_stdout = str(options.out), False
    sut = loadgen.ConstructSUT(system.issue, lambda: None)
    samples = loadgen.ConstructQSL(
        options.samples, options.samples, lambda indices: None, lambda indices: None
    )
    loadgen.StartTestWithLogSettings(sut, samples, settings, log)
    loadgen.DestroyQSL(samples)
    loadgen.DestroySUT(sut)
    service.batcher.close()
    if system.failed:
        raise RuntimeError(f"{system.failed} queries failed")
    summary = (options.out / "mlperf_log_summary.txt").read_text()
    return {
        name: found[1]
        for name, pattern in SUMMARY.items()
        if (found := re.search(pattern, summary))
    }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=HelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True, help="weights.pt of a training run")
    add_ranker_options(parser)
    add_cache_options(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/mlperf"), help="folder for LoadGen's files"
    )
    parser.add_argument("--qps", type=float, required=True, help="queries per second")
    parser.add_argument("--candidates", type=int, default=2048, help="candidates of a query")
    parser.add_argument(
        "--limit-ms", type=float, default=80, help="limit of the latency at the 99th percentile"
    )
    parser.add_argument("--seconds", type=float, default=60, help="least duration of the run")
    parser.add_argument("--samples", type=int, default=1000, help="different queries")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the users' popularity")
    parser.add_argument("--max-users", type=int, default=8, help="queries of a batch")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if importlib.util.find_spec("mlperf_loadgen") is None:
        sys.exit('mlperf_serving: LoadGen is not installed: pip install ".[serve-more]"')
    torch.set_num_threads(options.threads)
    ranker = ranker_from_options(load_weights(options.weights), options)
    tune_process()
    for name, value in measure(ranker, options).items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
