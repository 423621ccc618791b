"""Runs MLPerf's LoadGen on a ranker: python examples/mlperf_serving.py --weights FILE --qps 20
[--candidates 2048 --limit-ms 80]

The Server scenario: LoadGen sends queries as a Poisson process, and a run is valid if 99 % of them
are answered within the limit. The defaults are those of DLRMv3. Neither this model nor a run of
less than ten minutes is an official result.
"""

import argparse
from pathlib import Path
from typing import Any

import mlperf_scenario
import torch
from checkpoints import load_weights
from load_generator import FOREVER, Workload
from serving_app import Service, ServiceLimits, tune_process
from serving_batcher import Limits
from serving_models import add_cache_options, add_ranker_options, ranker_from_options
from serving_rankers import Ranker
from training import HelpFormatter


class SystemUnderTest:
    """Puts LoadGen's queries into the queue of a service and reports when they are answered."""

    def __init__(self, service: Service, workload: Workload, num_samples: int):
        self.service, self.requests = service, workload.requests(num_samples)
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
        mlperf_scenario.complete([id])


def measure(ranker: Ranker, options: argparse.Namespace) -> dict[str, str]:
    """The summary of a run. Raises RuntimeError if a query failed, and ImportError without
    LoadGen."""
    batches = Limits(
        max_queue=10**9,
        max_users=options.max_users,
        max_candidates=options.max_users * options.candidates,
    )
    service = Service(ranker, ServiceLimits(batches))
    workload = Workload(ranker, options.candidates, 0.0, options.zipf)
    system = SystemUnderTest(service, workload, options.samples)
    summary = mlperf_scenario.serve(system.issue, options.qps, options, options.out)
    service.batcher.close()
    if system.failed:
        raise RuntimeError(f"{system.failed} queries failed")
    return summary


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
    mlperf_scenario.add_options(parser, samples=1000, seconds=60)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the users' popularity")
    parser.add_argument("--max-users", type=int, default=8, help="queries of a batch")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    mlperf_scenario.require("mlperf_serving")
    torch.set_num_threads(options.threads)
    ranker = ranker_from_options(load_weights(options.weights), options)
    tune_process()
    for name, value in measure(ranker, options).items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
