"""Serves a trained ranking or next-item model over HTTP: python examples/serve_ranking.py
[--weights FILE] [--data PATH]

FILE is the weights.pt that train_dlrm.py or train_hstu.py wrote. Without --weights, a small ranking
model is trained on generated data first, once, in --out. The histories are those of the training's
log, without its test split. docs/serving.md has the requests and figures.
"""

import argparse
import asyncio
import logging
import math
import sys
from pathlib import Path
from typing import Any

import torch
import train_dlrm
import uvicorn
from checkpoints import WEIGHTS, load_weights
from serving_app import Service, ServiceLimits, make_app, tune_process
from serving_batcher import Limits
from serving_models import add_cache_options, add_ranker_options, ranker_from_options
from training import HelpFormatter

# a server that stops waits this long for clients to read their answers; Kubernetes kills it after
# 30 by default
STOP_SECONDS = 25
# of a server that stops: new connections are refused, requests on open ones are read
DRAIN_SECONDS = 0.3
# of idle connections: a request on one that is being closed is lost, so clients and proxies should
# close them
KEEP_ALIVE_SECONDS = 75
# options of the model that is trained without --weights
TRAINED = ["--users", "300", "--epochs", "3", "--device", "cpu"]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--weights",
        type=Path,
        help="weights.pt of a training run; a small model is trained if not given",
    )
    add_ranker_options(parser)
    add_cache_options(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/serve"),
        help="folder of the model that is trained without --weights",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    parser.add_argument(
        "--max-queue",
        type=int,
        default=Limits.max_queue,
        help="requests that wait; more are answered with 429",
    )
    parser.add_argument(
        "--max-users", type=int, default=Limits.max_users, help="requests of a batch"
    )
    parser.add_argument(
        "--max-wait-ms",
        type=float,
        default=1e3 * Limits.max_wait,
        help="how long a request waits for others of its batch",
    )
    parser.add_argument(
        "--max-candidates",
        type=int,
        default=ServiceLimits.max_candidates,
        help="candidates of a request",
    )
    parser.add_argument(
        "--deadline-ms",
        type=float,
        default=1e3 * ServiceLimits.deadline,
        help="deadline of requests without one",
    )
    options = parser.parse_args(arguments)
    if options.threads < 1:
        parser.error(f"--threads must be at least 1, not {options.threads}")
    if not 0 <= options.port < 2**16:
        parser.error(f"--port must be at least 0 and below 65536, not {options.port}")
    if not 0 <= options.cache_mb < math.inf:
        parser.error(f"--cache-mb must be finite and at least 0, not {options.cache_mb}")
    return options


def train_small_model(out: Path) -> Path:
    """The weights of a small ranking model, trained on generated data unless `out` has them."""
    path = out / "attention" / WEIGHTS
    if not path.exists():
        print(f"no --weights: training a small model in {out}")
        train_dlrm.main([*TRAINED, "--out", str(out)])
    return path


def make_service(options: argparse.Namespace) -> Service:
    path = options.weights or train_small_model(options.out)
    batches = Limits(
        options.max_queue,
        options.max_users,
        max(2 * options.max_candidates, Limits.max_candidates),
        options.max_wait_ms / 1e3,
    )
    limits = ServiceLimits(batches, options.max_candidates, deadline=options.deadline_ms / 1e3)
    return Service(
        ranker_from_options(load_weights(path), options),
        limits,
        read_weights=lambda: load_weights(path),
    )


class Server(uvicorn.Server):
    """Prints its address, whose port the system may have chosen. When it is told to stop, it also
    answers requests that clients have sent and that it has not read."""

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        for server in self.servers[:1]:
            print(
                f"serving on http://{self.config.host}:{server.sockets[0].getsockname()[1]}",
                flush=True,
            )

    async def shutdown(self, sockets: Any = None) -> None:
        self.config.app.state.service.is_stopping = True
        # no client sends another one
        self.server_state.default_headers = [
            *self.server_state.default_headers,
            (b"connection", b"close"),
        ]
        await asyncio.sleep(0)  # accepts the connections that wait
        for server in self.servers:
            server.close()
        await self.drain()
        await super().shutdown(sockets)

    async def drain(self) -> None:
        """Wait for requests that clients have sent on open connections."""
        await asyncio.sleep(DRAIN_SECONDS)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    try:
        torch.set_num_threads(options.threads)
        app = make_app(make_service(options))
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"serve_ranking: {error}")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    tune_process()
    seconds = dict(timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=STOP_SECONDS)
    Server(
        uvicorn.Config(app, host=options.host, port=options.port, log_level="warning", **seconds)
    ).run()


if __name__ == "__main__":
    main()
