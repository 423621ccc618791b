"""The ranker as deployments of Ray Serve: replicas, an ingress, and a store of events.
serving_ray.py runs them.

The replicas have the model, and each caches the histories of its users. Ray adds replicas under
load and removes idle ones. The ingress sends a request to the replica of its user, by Ray's
consistent hashing: a user's requests meet the same cache while the replicas stay the same, and of n
replicas a new one takes the users of about one in n.

The event store has the events that requests brought. A replica asks it before it scores, and tells
it before it answers. So a user who comes from another replica, or from one that died, has the whole
history. The store is in memory: it begins empty when it is started again.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable
from typing import Any
from weakref import WeakValueDictionary

import torch
from checkpoints import load_weights
from fastapi import FastAPI, HTTPException
from ray import serve
from ray.serve.config import AutoscalingConfig, BackpressureConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from serving_admission import Admission
from serving_app import Service, tune_process
from serving_batcher import Limits
from serving_bodies import Event, RankBody, ServiceLimits
from serving_errors import answer_errors, error_response, http_errors
from serving_models import ranker_from_options

# requests of a replica, the ingress or the store; the queue of the replica's service is shorter,
# and refuses with 429
MAX_ONGOING = 1000
# requests that wait at a sender because MAX_ONGOING are on their way; more are refused with 429
MAX_QUEUED = 1000
DRAIN_SECONDS = 30  # a replica that is removed has this time to answer what it was sent
STALE = -1
ROUTER = RequestRouterConfig(
    request_router_class=ConsistentHashRouter, request_router_kwargs={"num_fallback_replicas": 0}
)
app = FastAPI(title="ranker", docs_url=None, redoc_url=None, openapi_url=None)
answer_errors(app)  # FastAPI's own answer repeats the input: NaN in it would be an internal error
# bodies; Ray limits requests
app.add_middleware(
    Admission, limits=ServiceLimits(Limits(MAX_ONGOING + MAX_QUEUED)), answer=error_response
)


async def _with_status(answer: Awaitable[Any]) -> tuple[int, Any]:
    """200 and the answer, or the HTTP status of the error and its text. Exceptions lose their
    status on the way to the ingress."""
    try:
        with http_errors():
            return 200, await answer
    except HTTPException as error:
        return error.status_code, error.detail


def _checked(status: int, answer: Any) -> Any:
    """The answer. HTTPException if it is an error's text."""
    if status != 200:
        raise HTTPException(status, answer)
    return answer


@serve.deployment(max_ongoing_requests=MAX_ONGOING)
class EventStore:
    """The events that requests brought, by the text of the user's id."""

    def __init__(self) -> None:
        self.events: dict[str, list[dict[str, Any]]] = {}

    async def get(self, user: str, known: int) -> list[dict[str, Any]] | None:
        """The user's events; None if they are as many as the caller knows."""
        events = self.events.get(user, [])
        return None if len(events) == known else events

    async def add(self, user: str, events: list[dict[str, Any]]) -> int:
        """The number of the user's events, with these."""
        self.events[user] = [*self.events.get(user, []), *events]
        return len(self.events[user])


@serve.deployment(
    max_ongoing_requests=MAX_ONGOING,
    max_queued_requests=MAX_QUEUED,
    graceful_shutdown_timeout_s=DRAIN_SECONDS,
    request_router_config=ROUTER,
)
class Replica:
    """The service, with the histories of the users whose requests come here."""

    def __init__(self, store: Any, options: argparse.Namespace):
        torch.set_num_threads(options.threads)
        ranker = ranker_from_options(load_weights(options.weights), options)
        self.service = Service(
            ranker, ServiceLimits(), read_weights=lambda: load_weights(options.weights)
        )
        self.store, self.name = store, serve.get_replica_context().replica_id.unique_id
        # events of the store that the user's history has; STALE: the history may have others
        self.known: dict[str, int] = {}
        self.turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        tune_process()

    async def rank(self, body: dict[str, Any]) -> tuple[int, Any]:
        """The HTTP status and the answer, or the error's text."""
        return await _with_status(self._rank(body))

    async def _rank(self, fields: dict[str, Any]) -> dict[str, Any]:
        begin, body = time.monotonic(), RankBody(**fields)
        user, events = str(body.user), [event.model_dump() for event in body.events]
        row = self.service.to_row(body.user)
        async with self.turns.setdefault(user, asyncio.Lock()):  # one request of a user at a time
            known = await self._catch_up(user, row)
            self.known[user] = STALE  # if anything fails
            answer = await self.service.rank(body, begin=begin)
            total = await self.store.add.remote(user, events) if events else known
            if total == known + len(events):  # no other replica added events of this user
                self.known[user] = total
        return {**answer, "replica": self.name}

    async def _catch_up(self, user: str, row: int) -> int:
        """Give the user's history the events of the store. Returns their number."""
        known = self.known.get(user, 0)
        stored = await self.store.get.remote(user, known)
        if stored is None:
            return known
        events = self.service.to_events([Event(**event) for event in stored])
        await asyncio.wrap_future(
            self.service.batcher.between_batches(
                lambda: self.service.ranker.replace_events(row, events)
            )
        )
        return len(stored)

    async def reload(self) -> tuple[int, Any]:
        """The HTTP status and the version of the weights, or the error's text."""
        return await _with_status(self.service.reload())

    async def counts(self) -> dict[str, Any]:
        """The replica, the id of its process, and what happened to the histories of its
        requests."""
        return {"replica": self.name, "process": os.getpid(), **self.service.ranker.counts}

    def check_health(self) -> None:
        """Ray calls it, and replaces the replica if it raises."""
        if not self.service.batcher.is_alive():
            raise RuntimeError("the scoring thread has ended")


@serve.deployment(
    max_ongoing_requests=MAX_ONGOING,
    max_queued_requests=MAX_QUEUED,
    backpressure_config=BackpressureConfig(status_code=429),
)
@serve.ingress(app)
class Ingress:
    """Sends each request to the replica of its user."""

    def __init__(self, replicas: Any):
        self.replicas = replicas

    @app.post("/rank")
    async def rank(self, body: RankBody) -> dict[str, Any]:
        try:
            status, answer = await self.replicas.options(session_id=str(body.user)).rank.remote(
                body.model_dump()
            )
        except BackPressureError as error:
            raise HTTPException(
                429, f"{MAX_QUEUED} requests wait for the user's replica"
            ) from error
        return _checked(status, answer)

    @app.post("/reload")
    async def reload(self) -> dict[str, list[int]]:
        answers = await self.replicas.broadcast("reload").results_async()
        return {"weights_version": [_checked(status, version) for status, version in answers]}

    @app.get("/counts")
    async def counts(self) -> list[dict[str, Any]]:
        return await self.replicas.broadcast("counts").results_async()


def make_application(options: argparse.Namespace) -> Any:
    """The ingress, the replicas and the store, for `serve.run`."""
    options.weights = options.weights.resolve()
    scaling = AutoscalingConfig(
        min_replicas=options.min_replicas,
        max_replicas=options.max_replicas,
        target_ongoing_requests=options.target_ongoing_requests,
        look_back_period_s=options.look_back,
        upscale_delay_s=options.upscale_delay,
        downscale_delay_s=options.downscale_delay,
    )
    replicas = Replica.options(
        autoscaling_config=scaling,
        ray_actor_options={"num_gpus": options.gpus, "num_cpus": options.cpus},
    )
    store = EventStore.options(ray_actor_options={"num_cpus": 0})
    return Ingress.options(ray_actor_options={"num_cpus": 0}).bind(
        replicas.bind(store.bind(), options)
    )
