"""Serves a ranker on Ray Serve, on any number of processes or machines: python
examples/serving_ray.py --weights FILE --max-replicas 4

serving_replicas.py says what is deployed.
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

from serving_models import add_cache_options, add_ranker_options
from training import HelpFormatter


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--weights",
        type=Path,
        required=True,
        help="weights.pt of a training run, at the same path on all machines",
    )
    add_ranker_options(parser)
    add_cache_options(parser)
    parser.add_argument(
        "--min-replicas", type=int, default=1, help="replicas without load, a process each"
    )
    parser.add_argument(
        "--max-replicas",
        type=int,
        default=4,
        help="replicas under load; as many as --min-replicas: no scaling",
    )
    parser.add_argument(
        "--target-ongoing-requests",
        type=float,
        default=16,
        help="requests of a replica at a time that scaling aims at",
    )
    parser.add_argument(
        "--look-back",
        type=float,
        default=30,
        help="seconds over which ongoing requests are averaged",
    )
    parser.add_argument(
        "--upscale-delay",
        type=float,
        default=30,
        help="seconds of more load before replicas are added",
    )
    parser.add_argument(
        "--downscale-delay",
        type=float,
        default=600,
        help="seconds of less load before replicas are removed",
    )
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of a replica")
    parser.add_argument(
        "--cpus", type=float, default=1, help="CPU cores that Ray reserves for a replica"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if not 1 <= options.min_replicas <= options.max_replicas:
        counts = f"{options.min_replicas} and {options.max_replicas}"
        sys.exit(
            "serving_ray: --min-replicas must be at least 1 and at most --max-replicas, not"
            f" {counts}"
        )
    if importlib.util.find_spec("ray") is None:
        sys.exit('serving_ray: Ray is not installed: pip install ".[serve-more]"')
    from ray import serve
    from serving_replicas import make_application

    serve.start(http_options={"port": options.port})
    serve.run(make_application(options))
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
