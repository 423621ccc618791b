"""The HTTP interface of a ranker.

| request | answer |
|---|---|
| `POST /rank` `{"user", "candidates", "events": [{"item", "rating"}], "deadline_ms"}` | scores;
then the events are stored | | `GET /users/{user}?candidates=...` | the user's latest events, and
attention weights of candidates over them | | `GET /health`, `GET /metrics`, `GET /`,
`GET /openapi.json` | state, Prometheus metrics, a page for trying it out, the OpenAPI document | |
`/v2/...` | KServe's protocol, see serving_kserve.py |

serving_admin.py has the admin's requests. Users and items are ids of the log. An id is a JSON
number or a string: 7 and "7" are the same. Answers have it as in the log. serving_errors.py says
how errors are answered.
"""

import asyncio
import ctypes
import gc
import html
import itertools
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from checkpoints import Weights
from fastapi import FastAPI, HTTPException, Query
from fastapi import Request as HTTPRequest
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString
from published_ids import Id
from serving_access import Access
from serving_admission import Admission
from serving_batcher import Batcher, Waiting
from serving_bodies import Asked, Error, Event, RankBody, Ranked, ServiceLimits, parse
from serving_errors import answer_errors, error_response, http_errors
from serving_events import EventStore
from serving_kserve import InferAnswer, InferBody, KServe
from serving_rankers import NewEvents, Ranker, Request
from serving_warm_up import warm_up

PAGE = Path(__file__).with_name("serving_page.html")
TRIM_SECONDS = 30  # between calls of trim_heap
CACHE_COUNTERS = ("hits", "misses", "evictions")  # of the cache's statistics, which has gauges too
UNKNOWN_USERS = ("error", "empty", "popular")
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)  # seconds


class StageSeconds:
    """The histogram rank_stage_seconds. The thread that scores observes all requests of a batch at
    once: one after another would take as long as a tenth of their scores."""

    def __init__(self) -> None:
        # by stage: how many seconds were in each bucket, and in none; and the sums
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, stage: str, seconds: list[float]) -> None:
        counts = self._counts.setdefault(stage, [0] * (len(BUCKETS) + 1))
        for x in seconds:
            counts[bisect_left(BUCKETS, x)] += 1
        self._sums[stage] = self._sums.get(stage, 0.0) + sum(seconds)

    def collect(self) -> Any:
        """Prometheus calls it."""
        family = HistogramMetricFamily("rank_stage_seconds", "Seconds by stage", labels=["stage"])
        names = [*map(floatToGoString, BUCKETS), "+Inf"]
        for stage, counts in list(self._counts.items()):
            buckets = [*zip(names, itertools.accumulate(counts), strict=True)]
            family.add_metric([stage], buckets, self._sums.get(stage, 0.0))
        yield family


class Metrics:
    """Prometheus metrics of one service."""

    def __init__(self, service: "Service"):
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "rank_requests",
            "Answers to /rank by HTTP status; 499: the client left",
            ["status"],
            registry=self.registry,
        )
        self.latency = Histogram(
            "rank_seconds",
            "Seconds from request to answer",
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.stages = StageSeconds()
        self.registry.register(self.stages)
        self.batch = Histogram(
            "rank_batch_users",
            "Requests of a batch",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )
        self.candidates = Counter("rank_candidates", "Scored candidates", registry=self.registry)
        self.unknown = Counter(
            "rank_unknown_users", "Answers to users who are not in the log", registry=self.registry
        )
        ProcessCollector(registry=self.registry)
        self._service = service
        self.registry.register(self)

    def collect(self) -> Any:
        """What is read when a scraper asks: gauges, and counters, whose names end in _total.
        Prometheus calls it."""
        service = self._service
        gauges = {
            "rank_queue_length": len(service.batcher),
            "rank_weights_version": service.version,
        }
        counters = {f"rank_{name}": value for name, value in asdict(service.batcher.counts).items()}
        counters |= {
            f"rank_histories_{name}": value for name, value in service.ranker.counts.items()
        }
        counters["rank_graph_captures"] = service.ranker.captures
        if service.ranker.device.type == "cuda":
            gauges["rank_device_bytes"] = torch.cuda.memory_allocated(service.ranker.device)
            gauges["rank_device_peak_bytes"] = torch.cuda.max_memory_allocated(
                service.ranker.device
            )
        if service.ranker.cache is not None:
            for name, value in asdict(service.ranker.cache.statistics()).items():
                (counters if name in CACHE_COUNTERS else gauges)[f"history_cache_{name}"] = value
        for kind, metrics in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, value in metrics.items():
                yield kind(name, name.replace("_", " "), value=value)


def tune_process() -> None:
    """Exclude all present objects from Python's garbage collection. Programs call it when the
    ranker is loaded.

    The model and the modules live as long as the process. Each collection of the oldest generation
    would visit all of their objects: .2 s in which no request is scored.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def trim_heap() -> None:
    """Give the free pages of glibc's heap back to the system, in about 2 ms.

    Each batch has tensors of other sizes. Small ones that stay leave holes between large ones that
    are freed, so the heap would grow.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)


class Service:
    """A ranker behind a queue. On a GPU it is warmed up first.

    Args:
        ranker: the ranker, which the batcher's thread alone calls from now on.
        limits: of requests.
        read_weights: reads new weights for a reload, in a thread of its own while batches are
            scored.
        store: where the events of requests outlive the process; they are in memory alone if None.
        unknown_users: what users who are not in the log get. "error": 404. "empty": the scores of a
            user without features, whose history is the request's events. "popular": for each
            candidate, how many of the log's events have it. Their events are not stored.
    """

    def __init__(
        self,
        ranker: Ranker,
        limits: ServiceLimits | None = None,
        read_weights: Callable[[], Weights] | None = None,
        store: EventStore | None = None,
        unknown_users: str = "error",
    ):
        if unknown_users not in UNKNOWN_USERS:
            raise ValueError(f"unknown_users must be of {UNKNOWN_USERS}, got {unknown_users!r}")
        self.store, self.unknown_users = store, unknown_users
        # rows of unknown users, each of one request
        self._unknown_rows = itertools.count(ranker.histories.num_users)
        self.ranker, self.limits, self.version = ranker, limits or ServiceLimits(), 1
        self.read_weights = read_weights
        self._handover: Handover | None = None
        # otherwise weights that were read before others might be put in place after them
        self._reloading = asyncio.Lock()
        self.is_stopping = False
        self._trims_at = time.monotonic() + TRIM_SECONDS
        if ranker.device.type == "cuda":
            batches = self.limits.batches
            most = max(batches.max_candidates, self.limits.max_candidates)
            warm_up(ranker, batches.max_users, most)
        if store is not None:
            ranker.keep_events(store)
        self.batcher = Batcher(
            lambda requests: self.score(requests),
            self.limits.batches,
            self._note_batch,
            lambda: self.version,
        )
        self.metrics = Metrics(self)

    def score(self, requests: list[Request]) -> list[torch.Tensor]:
        return self.ranker.score(requests)

    def is_ready(self) -> bool:
        return self.batcher.is_alive() and not self.is_stopping

    def close(self) -> None:
        """Answer the requests in the queue, and close the store."""
        self.batcher.close()
        if self.store is not None:
            self.store.close()

    def _note_batch(self, batch: list[Waiting]) -> None:
        self.metrics.batch.observe(len(batch))
        self.metrics.candidates.inc(sum([len(x.request.candidates) for x in batch if x.is_scored]))
        self.metrics.stages.observe("queue", [x.queued_seconds for x in batch])
        for name, seconds in self.ranker.stages.seconds.items():
            self.metrics.stages.observe(name, [seconds])
        if time.monotonic() >= self._trims_at:
            trim_heap()
            self._trims_at = time.monotonic() + TRIM_SECONDS

    async def reload(self) -> int:
        """Read the weights anew, and put them in place between two batches, if they are others.
        Returns the version of those in place.

        HTTPException if they do not fit.
        """
        if self.read_weights is None:
            raise HTTPException(409, "the server was started without a file of weights")
        try:
            async with self._reloading:
                weights = await asyncio.to_thread(self.read_weights)
                return await asyncio.wrap_future(
                    self.batcher.between_batches(lambda: self._replace_weights(weights))
                )
        except (ValueError, OSError) as error:
            raise HTTPException(409, str(error)) from error

    def _replace_weights(self, weights: Weights) -> int:
        self.version += self.ranker.load(weights)
        return self.version

    def to_request(self, body: RankBody) -> Request:
        """The request, checked. HTTPException with what is wrong."""
        is_known = self.unknown_users == "error" or self._row(body.user) >= 0
        user = self.to_row(body.user) if is_known else next(self._unknown_rows)
        candidates = self._candidates(body.candidates)
        _check_count("events", len(body.events), self.limits.max_events)
        events = self.to_events(body.events)
        has_events = self.ranker.histories.length(user) + len(body.events) > 0
        if self.ranker.needs_history and not has_events and not self._is_popular(user):
            raise HTTPException(422, f"user {body.user!r} has no events yet: send some in 'events'")
        return Request(user, candidates, events, stores_events=is_known)

    def to_events(self, events: list[Event]) -> NewEvents:
        """The events, checked. HTTPException with what is wrong."""
        return NewEvents(
            self._items("events", [event.item for event in events]), self._ratings(events)
        )

    def to_row(self, user: Id) -> int:
        """The user's row. HTTPException if there is no such user."""
        row, users = self._row(user), self.ranker.histories.users
        if row < 0:
            raise HTTPException(
                404, f"no user {user!r} in the log, whose first user is {users[0]!r}"
            )
        return row

    def _row(self, user: Id) -> int:
        return int(self.ranker.histories.users.rows([user])[0])

    def _is_popular(self, row: int) -> bool:
        """Whether the scores of this user are the popularity of the candidates."""
        return self.unknown_users == "popular" and row >= self.ranker.histories.num_users

    def _candidates(self, items: list[Id]) -> np.ndarray:
        _check_count("candidates", len(items), self.limits.max_candidates)
        return self._items("candidates", items)

    def _items(self, name: str, items: list[Id]) -> np.ndarray:
        known = self.ranker.histories.items
        rows = known.rows(items)
        if (rows < 0).any():
            raise HTTPException(
                422,
                f"{name} must be items of the log, such as {known[0]!r}, got"
                f" {items[rows.argmin()]!r}",
            )
        return rows

    def _ratings(self, events: list[Event]) -> np.ndarray:
        known = {rating: index for index, rating in enumerate(self.ranker.ratings)}
        if not known:
            return np.zeros(len(events), np.int64)
        wrong = [event.rating for event in events if event.rating not in known]
        if wrong:
            raise HTTPException(422, f"ratings must be of {self.ranker.ratings}, got {wrong[0]}")
        return np.array([known[event.rating] for event in events], dtype=np.int64)

    async def rank(
        self, body: RankBody, left: asyncio.Future | None = None, begin: float | None = None
    ) -> dict[str, Any]:
        """The answer, with the scores of the candidates.

        left: done when the client has left. A request in the queue is then dropped.
        begin: since when latency and deadline count; now if None.
        """
        begin = time.monotonic() if begin is None else begin
        seconds = self.limits.deadline if body.deadline_ms is None else body.deadline_ms / 1000
        request, histories = self.to_request(body), self.ranker.histories
        if self._is_popular(request.user):
            waiting = Waiting(request, begin + seconds, version=self.version)
            scores = histories.popularity[request.candidates].astype(float)
        else:
            waiting = self.batcher.submit(request, begin + seconds)
            loop, handover = asyncio.get_running_loop(), self._handover
            if handover is None or handover.loop is not loop:
                self._handover = handover = Handover(loop)
            scores = await _result(handover.wrap(waiting.future), left)
        taken = time.monotonic() - begin
        self.metrics.latency.observe(taken)
        is_known = request.user < histories.num_users
        self.metrics.unknown.inc(not is_known)
        return {
            "user": histories.users[request.user] if is_known else body.user,
            "scores": scores.tolist(),
            "weights_version": waiting.version,
            "queue_ms": 1e3 * waiting.queued_seconds,
            "latency_ms": 1e3 * taken,
        } | ({} if is_known else {"unknown_user": self.unknown_users})

    def user(self, user: Id, candidates: list[Id], count: int = 50) -> dict[str, Any]:
        """The latest events of a user, and attention weights of candidates over them."""
        row, rows = self.to_row(user), self._candidates(candidates)
        users, items = self.ranker.histories.users, self.ranker.histories.items
        window = self.ranker.histories.window(
            row, NewEvents(*np.zeros((2, 0), np.int64)), self.ranker.max_history
        )
        ratings = self.ranker.ratings
        events = [
            {"item": items[item], "rating": ratings[rating] if ratings else None}
            for item, rating in zip(window.item.tolist(), window.rating.tolist(), strict=True)
        ]
        held_out = [items[item] for item in self.ranker.held_out.get(row, [])]
        result = {"user": users[row], "events": events[-count:], "held_out": held_out}
        if candidates and events:
            weights = self.ranker.attention(row, rows)
            result["attention"] = None if weights is None else weights[:, -count:].tolist()
        return result


class Handover:
    """Results of the scoring thread as futures of an event loop. `asyncio.wrap_future` wakes the
    loop for each one, by a system call at which the thread waits; this, once for those of a batch.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._done: deque[tuple[Future, asyncio.Future]] = deque()
        self._is_called = False  # and has not begun yet

    def wrap(self, future: Future) -> asyncio.Future:
        """A future with the same result. If it is cancelled, so is the other."""
        result = self.loop.create_future()
        future.add_done_callback(lambda done: self._add(done, result))
        result.add_done_callback(lambda done: done.cancelled() and future.cancel())
        return result

    def _add(self, future: Future, result: asyncio.Future) -> None:
        self._done.append((future, result))
        if not self._is_called and not self.loop.is_closed():
            self._is_called = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_called = False
        while self._done:
            future, result = self._done.popleft()
            if result.done() or future.cancelled():
                result.cancel()
            elif (error := future.exception()) is None:
                result.set_result(future.result())
            else:
                result.set_exception(error)


async def _result(result: asyncio.Future, left: asyncio.Future | None) -> torch.Tensor:
    """The scores. HTTPException if the client leaves before."""
    if left is not None:
        await asyncio.wait([result, left], return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            result.cancel()
            raise HTTPException(499, "the client left")
    return await result


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise HTTPException(413, f"{name} must be at most {most}, got {count}")


class RankEndpoint:
    """A request to rank, as an ASGI application.

    It parses the body and watches the connection itself. FastAPI's way takes three times as long,
    in the thread that holds up the model's.

    read: reads a request from its headers and its body.
    """

    def __init__(self, service: Service, read: Callable[[Mapping[str, str], bytes], Asked]):
        self.service, self.read = service, read

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = HTTPRequest(scope, receive)
        asked = self.read(request.headers, await request.body())
        # after the body, the server has nothing to tell but that the client left
        left = asyncio.ensure_future(receive())
        try:
            with http_errors():
                result = await self.service.rank(asked.body, left)
        finally:
            left.cancel()
        self.service.metrics.requests.labels(200).inc()
        await asked.answer(result)(scope, receive, send)


def make_app(service: Service, name: str = "ranker") -> FastAPI:
    """The application, whose model has this name. At its shutdown all requests in the queue are
    answered."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    errors = {422: {"model": Error}, "default": {"model": Error}}
    app = FastAPI(title=name, lifespan=lifespan, docs_url=None, redoc_url=None, responses=errors)
    app.state.service = service
    infer = f"/v2/models/{name}/infer"

    def answer(status: int, text: str, path: str) -> Response:
        if path in ("/rank", infer):
            service.metrics.requests.labels(status).inc()
        return error_response(status, text, path)

    app.add_middleware(Admission, limits=service.limits, answer=answer, paths=("/rank", infer))
    app.add_middleware(Access)
    answer_errors(app, answer)
    endpoint = RankEndpoint(service, lambda *content: Asked(parse(RankBody, *content)))
    app.add_route("/rank", endpoint, methods=["POST"])
    kserve = KServe(service, name)
    app.add_route(infer, RankEndpoint(service, kserve.read), methods=["POST"])

    # The routes above answer. The two functions are for the OpenAPI document.
    @app.post("/rank")
    async def rank(body: RankBody) -> Ranked: ...

    @app.post(infer)
    async def infer_(body: InferBody) -> InferAnswer: ...

    app.include_router(kserve.router)

    @app.get("/users/{user:path}")  # an id may have slashes
    async def user(
        user: str,
        candidates: Annotated[list[str], Query()] = [],  # noqa: B006 - pydantic copies it
    ) -> dict[str, Any]:
        with http_errors():
            return await asyncio.wrap_future(
                service.batcher.between_batches(lambda: service.user(user, candidates))
            )

    @app.get("/health")
    async def health() -> Response:
        ready = service.is_ready()
        content = {
            "status": "ok" if ready else "stopping",
            "weights_version": service.version,
            "queue": len(service.batcher),
        }
        return JSONResponse(content, 200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        first = html.escape(str(service.ranker.histories.users[0]))
        return HTMLResponse(PAGE.read_text(encoding="utf-8").replace("FIRST_USER", first))

    return app
