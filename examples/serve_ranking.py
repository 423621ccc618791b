"""Serves a trained ranking or next-item model over HTTP: python examples/serve_ranking.py
[--weights FILE] [--data PATH]

FILE is the weights.pt that train_dlrm.py or train_hstu.py wrote. Without --weights, a small ranking
model is trained on generated data first, once, in --out. The histories are those of the training's
log, without its test split, or with --without-log empty. docs/serving.md has the requests and
figures.
"""

import argparse
import asyncio
import json
import logging
import math
import re
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import train_dlrm
import uvicorn
from checkpoints import WEIGHTS, load_weights
from serving_access import log_access
from serving_admin import ByPort, make_admin, read_token
from serving_app import UNKNOWN_USERS, Service, make_app, tune_process
from serving_batcher import Limits
from serving_bodies import ServiceLimits
from serving_events import SQLiteEvents
from serving_models import add_cache_options, add_ranker_options, ranker_from_options
from training import HelpFormatter, with_config

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
        description=__doc__.partition("\n\n")[0], formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--weights",
        type=Path,
        help="weights.pt of a training run; a small model is trained if not given",
    )
    add_ranker_options(parser)
    add_cache_options(parser)
    add_server_options(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/serve"),
        help="folder of the model that is trained without --weights",
    )
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
    options = parser.parse_args(with_config(parser, arguments))
    if options.threads < 1:
        parser.error(f"--threads must be at least 1, not {options.threads}")
    for name in ("port", "admin_port"):
        port = getattr(options, name)
        if not 0 <= port < 2**16:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} must be at least 0 and below 65536, not {port}")
    if options.cache_mb is not None and not 0 <= options.cache_mb < math.inf:
        parser.error(f"--cache-mb must be finite and at least 0, not {options.cache_mb}")
    if not re.fullmatch(r"[\w.-]+", options.name, re.ASCII):
        parser.error(f"--name must be letters, digits, '_', '.' or '-', not {options.name!r}")
    if options.without_log and (options.data or options.unknown_users == "popular"):
        parser.error("--without-log cannot be given with --data or --unknown-users popular")
    if (options.tls_certificate is None) != (options.tls_key is None):
        parser.error("--tls-key must be given together with --tls-certificate")
    return options


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """The options of the program beside those of its model and its limits."""
    parser.add_argument(
        "--config",
        type=Path,
        help="TOML or JSON file of options by their names; those of the command line win",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the options as TOML, and end"
    )
    parser.add_argument("--name", default="ranker", help="of the model, in the paths of KServe")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    parser.add_argument("--admin-host", default="127.0.0.1", help="address of the admin")
    parser.add_argument("--admin-port", type=int, default=8001, help="port of the admin")
    parser.add_argument(
        "--admin-token",
        type=Path,
        help="file of the admin's token; there is no admin interface if not given",
    )
    parser.add_argument(
        "--tls-certificate", type=Path, help="PEM file; HTTPS on both ports if given"
    )
    parser.add_argument("--tls-key", type=Path, help="PEM file of the certificate's key")
    parser.add_argument(
        "--without-log",
        action="store_true",
        help="read no log: users' events are those of their requests; for next-item models",
    )
    parser.add_argument(
        "--access-log",
        help="file to which a line of JSON is appended for each answer; -: standard error",
    )
    parser.add_argument(
        "--events",
        type=Path,
        help="SQLite file that keeps the events of requests; they end with the process if not"
        " given",
    )
    parser.add_argument(
        "--unknown-users",
        choices=UNKNOWN_USERS,
        default="error",
        help="what users who are not in the log get: 404, the scores of an empty history, or the"
        " popularity of the candidates",
    )


def as_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options that have values, by their names, as a file of --config has them."""
    return {
        name.replace("_", "-"): str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if value is not None and name not in ("config", "print_config")
    }


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
    ranker = ranker_from_options(load_weights(path), options, options.without_log)
    store = None
    if options.events is not None:
        log = ranker.settings["log_fingerprint"]
        store = SQLiteEvents(options.events, log, ranker.longest_window)
    return Service(ranker, limits, lambda: load_weights(path), store, options.unknown_users)


class Server(uvicorn.Server):
    """Prints its addresses, whose ports the system may have chosen. When it is told to stop, it
    also answers requests that clients have sent and that it has not read."""

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        scheme = "https" if self.config.is_ssl else "http"
        names = ("admin", "serving") if len(self.servers) == 2 else ("serving",)
        for name, server in zip(names, self.servers[::-1], strict=True):
            host, port, *_ = server.sockets[0].getsockname()
            print(f"{name} on {scheme}://{host}:{port}", flush=True)

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
    if options.print_config:
        for name, value in as_settings(options).items():
            print(f"{name} = {json.dumps(value, ensure_ascii=False)}")
        return
    try:
        torch.set_num_threads(options.threads)
        token = None if options.admin_token is None else read_token(options.admin_token)
        if options.access_log is not None:
            log_access(options.access_log)
        service = make_service(options)
        app, sockets = make_app(service, options.name), [listen(options.host, options.port)]
        if token is not None:
            sockets.append(listen(options.admin_host, options.admin_port))
            admin = make_admin(service, token, as_settings(options))
            app = ByPort(app, admin, sockets[1].getsockname()[1])
        config = uvicorn.Config(
            app,
            log_level="warning",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
            ssl_certfile=options.tls_certificate,
            ssl_keyfile=options.tls_key,
        )
        config.load()  # reads the certificate
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"serve_ranking: {error}")
    line = "%(asctime)s %(levelname)s %(name)s %(request_id)s: %(message)s"
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(line, defaults={"request_id": "-"}))
    logging.basicConfig(handlers=[handler])
    tune_process()
    Server(config).run(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address. OSError if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}") from error


if __name__ == "__main__":
    main()
