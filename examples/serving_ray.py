"""Serves a ranker on Ray Serve, on any number of processes or machines: python examples/serving_ray.py --weights FILE --shards 2

Each shard is a deployment with one replica that owns a part of the users: it has their new events and their cached histories. The ingress
sends a request to the shard of its user, `user % shards`, so a user's requests always meet the same state. Ray restarts a replica that
dies; the events that its requests brought are then lost, because this example stores them in memory only. For the same reason the number of
shards is fixed: replicas that come and go need an event store outside of them.
"""

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from checkpoints import load_weights
from fastapi import FastAPI, HTTPException
from ray import serve
from serving_app import RankBody, Service, ServiceLimits, exclude_from_collection, http_errors
from serving_rankers import make_ranker
from training import pick_device

app = FastAPI(title="ranker", docs_url=None, redoc_url=None, openapi_url=None)


class Connected:
    """Stands for the client's connection, which the ingress watches."""

    async def is_disconnected(self) -> bool:
        return False


@serve.deployment(max_ongoing_requests=1000)
class Shard:
    """The service of a part of the users."""

    def __init__(self, weights: str, data: str | None, device: str, cache_bytes: int, threads: int):
        torch.set_num_threads(threads)
        ranker = make_ranker(load_weights(Path(weights)), pick_device(device), cache_bytes, data)
        self.service = Service(ranker, ServiceLimits(), reload=lambda: ranker.load(load_weights(Path(weights))))
        exclude_from_collection()

    async def rank(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The HTTP status and the answer. Exceptions would lose their status on the way to the ingress."""
        try:
            with http_errors():
                return 200, await self.service.rank(RankBody(**body), Connected())
        except HTTPException as error:
            return error.status_code, {"error": error.detail}

    async def reload(self) -> int:
        return await self.service.reload()

    async def counts(self) -> dict[str, int]:
        """The id of the shard's process, and what happened to the histories of its requests."""
        return {"process": os.getpid(), **self.service.ranker.counts}

    def check_health(self) -> None:
        """Ray calls it, and replaces the replica if it raises."""
        if not self.service.batcher.is_alive():
            raise RuntimeError("the scoring thread has ended")


@serve.deployment
@serve.ingress(app)
class Ingress:
    """Sends each request to the shard of its user."""

    def __init__(self, *shards: Any):
        self.shards = shards

    @app.post("/rank")
    async def rank(self, body: RankBody) -> dict[str, Any]:
        shard = body.user % len(self.shards)
        status, answer = await self.shards[shard].rank.remote(body.model_dump())
        if status != 200:
            raise HTTPException(status, answer["error"])
        return {**answer, "shard": shard}

    @app.post("/reload")
    async def reload(self) -> dict[str, list[int]]:
        return {"weights_version": await asyncio.gather(*(shard.reload.remote() for shard in self.shards))}

    @app.get("/counts")
    async def counts(self) -> list[dict[str, int]]:
        return await asyncio.gather(*(shard.counts.remote() for shard in self.shards))


def make_application(options: argparse.Namespace) -> Any:
    """The ingress and the shards, for `serve.run`."""
    settings = (str(options.weights.resolve()), options.data, options.device, int(options.cache_mb * 1e6), options.threads)
    resources = {"num_gpus": options.gpus, "num_cpus": options.cpus}
    shards = [Shard.options(name=f"shard-{i}", ray_actor_options=resources).bind(*settings) for i in range(options.shards)]
    return Ingress.bind(*shards)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="weights.pt of a training run, at the same path on all machines")
    parser.add_argument("--data", help="log of the users' histories; that of the training run if not given")
    parser.add_argument("--shards", type=int, default=2, help="parts of the users, a process each")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch in each shard")
    parser.add_argument("--cache-mb", type=float, default=256, help="budget of the history cache of a shard; 0: no cache")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of a shard")
    parser.add_argument("--cpus", type=float, default=1, help="CPU cores that Ray reserves for a shard")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if options.shards < 1:
        sys.exit(f"serving_ray: --shards must be at least 1, not {options.shards}")
    serve.start(http_options={"port": options.port})
    serve.run(make_application(options))
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
