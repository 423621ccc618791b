"""The HTTP interface of a ranker.

| request | answer |
|---|---|
| `POST /rank` `{"user", "candidates", "events": [{"item", "rating"}], "deadline_ms"}` | scores;
then the events are stored | | `GET /users/{user}?candidates=...` | the user's latest events, and
attention weights of candidates over them | | `POST /reload` | reads the file of weights again, and
puts them in place between two batches if they are others | | `GET /health`, `GET /metrics`, `GET /`
| state, Prometheus metrics, a page for trying it out |

Users and items are ids of the log. An id is a JSON number or a string: 7 and "7" are the same.
Answers have it as in the log.

An error is `{"error": text}`: 400 or 422 for a malformed request, 404 for an unknown user, 408 for
a body that takes too long, 413 for a request that is too large, 415 for a body that is not declared
as JSON, 429 if the queue is full, 503 if the server stops or has no memory, 504 if the deadline
passed, 500 for scores that are not finite. Each has a line in the log of the process.
"""

import asyncio
import ctypes
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from checkpoints import Weights
from fastapi import FastAPI, HTTPException, Query
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from published_ids import Id
from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    GetPydanticSchema,
    ValidationError,
    model_validator,
)
from pydantic_core import core_schema, to_json
from serving_batcher import (
    OUT_OF_MEMORY,
    Batcher,
    Closed,
    Limits,
    Overloaded,
    TooLate,
    Waiting,
    WorkerDied,
    check_limits,
)
from serving_rankers import NewEvents, Ranker, Request
from starlette.exceptions import HTTPException as StarletteHTTPException

LOGGER = logging.getLogger("serving")
PAGE = Path(__file__).with_name("serving_page.html")
STATUS = {
    Overloaded: 429,
    Closed: 503,
    TooLate: 504,
    WorkerDied: 503,
    FloatingPointError: 500,
    **dict.fromkeys(OUT_OF_MEMORY, 503),
}
TRIM_SECONDS = 30  # between calls of trim_heap
MAX_ERROR = 500  # characters of an error's text
NOT_JSON = "the body must be JSON, with the header content-type: application/json"
CACHE_COUNTERS = ("hits", "misses", "evictions")  # of the cache's statistics, which has gauges too
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)  # seconds


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of a request. deadline: seconds, if the request has none. The body's bytes are checked
    before it is parsed.

    body_seconds: from the first to the last byte of the body.

    Raises ValueError for a limit that refuses all requests.
    """

    batches: Limits = field(default_factory=Limits)
    max_candidates: int = 10_000
    max_events: int = 1_000
    max_body: int = 1_000_000
    body_seconds: float = 10.0
    deadline: float = 1.0

    def __post_init__(self) -> None:
        check_limits(max_candidates=self.max_candidates, max_body=self.max_body)
        if not self.deadline > 0:
            raise ValueError(f"deadline must be positive, got {self.deadline} s")


STRICT = ConfigDict(extra="forbid", strict=True)  # otherwise true would be a rating of 1
ID_SCHEMA = core_schema.union_schema(
    # not true, which would be user or item 1
    [core_schema.int_schema(strict=True), core_schema.str_schema(strict=True)],
    mode="left_to_right",
    custom_error_type="id_type",
    custom_error_message="Input should be an id, an integer or text",
)
PublishedId = Annotated[Id, GetPydanticSchema(lambda source, handler: ID_SCHEMA)]


class Body(BaseModel):
    """Validation ends at the first fault of a list, and at the first unknown field. A megabyte of
    faults would take seconds to list."""

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_fields_but_one(cls, data: Any) -> Any:
        known = cls.model_fields
        if not isinstance(data, dict) or len(data) <= len(known) + 1:
            return data
        unknown = next(name for name in data if name not in known)
        return {name: value for name, value in data.items() if name in known or name is unknown}


class Event(Body):
    item: PublishedId
    rating: Annotated[float | None, Field(allow_inf_nan=False)] = None


class RankBody(Body):
    user: PublishedId
    candidates: Annotated[list[PublishedId], Field(min_length=1), FailFast()]
    events: Annotated[list[Event], FailFast()] = []
    deadline_ms: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None


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
        self.stages = Histogram(
            "rank_stage_seconds",
            "Seconds by stage",
            ["stage"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.batch = Histogram(
            "rank_batch_users",
            "Requests of a batch",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )
        self.candidates = Counter("rank_candidates", "Scored candidates", registry=self.registry)
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
    """

    def __init__(
        self,
        ranker: Ranker,
        limits: ServiceLimits | None = None,
        read_weights: Callable[[], Weights] | None = None,
    ):
        self.ranker, self.limits, self.version = ranker, limits or ServiceLimits(), 1
        self.read_weights = read_weights
        # otherwise weights that were read before others might be put in place after them
        self._reloading = asyncio.Lock()
        self.is_stopping = False
        self._trims_at = time.monotonic() + TRIM_SECONDS
        if ranker.device.type == "cuda":
            ranker.warm_up(self.limits.batches.max_users, self.limits.max_candidates)
        self.batcher = Batcher(
            lambda requests: self.score(requests),
            self.limits.batches,
            self._note_batch,
            lambda: self.version,
        )
        self.metrics = Metrics(self)

    def score(self, requests: list[Request]) -> list[torch.Tensor]:
        return self.ranker.score(requests)

    def _note_batch(self, batch: list[Waiting]) -> None:
        self.metrics.batch.observe(len(batch))
        self.metrics.candidates.inc(
            sum(len(x.request.candidates) for x in batch if x.future.exception() is None)
        )
        for waiting in batch:
            self.metrics.stages.labels("queue").observe(waiting.queued_seconds)
        for name, seconds in self.ranker.stages.seconds.items():
            self.metrics.stages.labels(name).observe(seconds)
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
        user, candidates = self.to_row(body.user), self._candidates(body.candidates)
        _check_count("events", len(body.events), self.limits.max_events)
        events = self.to_events(body.events)
        if self.ranker.needs_history and not self.ranker.histories.length(user) + len(body.events):
            raise HTTPException(422, f"user {body.user!r} has no events yet: send some in 'events'")
        return Request(user, candidates, events)

    def to_events(self, events: list[Event]) -> NewEvents:
        """The events, checked. HTTPException with what is wrong."""
        return NewEvents(
            self._items("events", [event.item for event in events]), self._ratings(events)
        )

    def to_row(self, user: Id) -> int:
        """The user's row. HTTPException if there is no such user."""
        users = self.ranker.histories.users
        row = int(users.rows([user])[0])
        if row < 0:
            raise HTTPException(
                404, f"no user {user!r} in the log, whose first user is {users[0]!r}"
            )
        return row

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
        waiting = self.batcher.submit(self.to_request(body), begin + seconds)
        scores = await _result(waiting, left)
        taken = time.monotonic() - begin
        self.metrics.latency.observe(taken)
        timing = {"queue_ms": 1e3 * waiting.queued_seconds, "latency_ms": 1e3 * taken}
        user = self.ranker.histories.users[waiting.request.user]
        return {
            "user": user,
            "scores": scores.tolist(),
            "weights_version": waiting.version,
            **timing,
        }

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


async def _result(waiting: Waiting, left: asyncio.Future | None) -> torch.Tensor:
    """The scores. HTTPException if the client leaves before."""
    result = asyncio.wrap_future(waiting.future)
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
    """`POST /rank`, an ASGI application.

    It parses the body and watches the connection itself. FastAPI's way takes three times as long,
    in the thread that holds up the model's.
    """

    def __init__(self, service: Service):
        self.service = service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = HTTPRequest(scope, receive)
        body = _parse(request.headers.get("content-type", ""), await request.body())
        # after the body, the server has nothing to tell but that the client left
        left = asyncio.ensure_future(receive())
        try:
            with http_errors():
                result = await self.service.rank(body, left)
        finally:
            left.cancel()
        self.service.metrics.requests.labels(200).inc()
        await Response(to_json(result), media_type="application/json")(scope, receive, send)


def _parse(content_type: str, content: bytes) -> RankBody:
    """The body of a request. HTTPException with what is wrong."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, NOT_JSON)
    try:
        return RankBody.model_validate_json(content)
    except ValidationError as error:
        raise HTTPException(*_fault(error, "body")) from error


def make_app(service: Service) -> FastAPI:
    """The application. At its shutdown all requests in the queue are answered."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.batcher.close)

    app = FastAPI(
        title="ranker", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.service = service

    def answer(status: int, text: str, path: str) -> Response:
        if path == "/rank":
            service.metrics.requests.labels(status).inc()
        return error_response(status, text, path)

    app.add_middleware(Admission, limits=service.limits, answer=answer)
    answer_errors(app, answer)
    app.add_route("/rank", RankEndpoint(service), methods=["POST"])

    @app.post("/reload")
    async def reload() -> dict[str, int]:
        with http_errors():
            return {"weights_version": await service.reload()}

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
        alive = service.batcher.is_alive() and not service.is_stopping
        content = {
            "status": "ok" if alive else "stopping",
            "weights_version": service.version,
            "queue": len(service.batcher),
        }
        return JSONResponse(content, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/")
    async def page() -> FileResponse:
        return FileResponse(PAGE, media_type="text/html")

    return app


def error_response(status: int, text: str, path: str) -> Response:
    """The error, which is also logged. A name or a number of the request in it may be as long as
    the request, and may have line ends."""
    text = text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}..."
    LOGGER.warning("%d for %r: %r", status, path[:MAX_ERROR], text)
    return JSONResponse({"error": text}, status)


def answer_errors(
    app: FastAPI, answer: Callable[[int, str, str], Response] = error_response
) -> None:
    """Let `answer(status, text, path)` make the app's answers to malformed requests and to
    HTTPExceptions."""

    @app.exception_handler(RequestValidationError)
    async def malformed(request: HTTPRequest, error: RequestValidationError) -> Response:
        if isinstance(error.body, bytes):  # not parsed
            return answer(415, NOT_JSON, request.url.path)
        return answer(*_fault(error), request.url.path)

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: HTTPRequest, error: StarletteHTTPException) -> Response:
        return answer(error.status_code, str(error.detail), request.url.path)


def _fault(error: RequestValidationError | ValidationError, *place: str) -> tuple[int, str]:
    """Status and text of the first error in this place. The input is left out: it may be large, or
    NaN, which is no JSON."""
    first = error.errors()[0]
    return (
        400 if first["type"] == "json_invalid" else 422
    ), f"{'.'.join(map(str, (*place, *first['loc'])))}: {first['msg']}"


@contextmanager
def http_errors() -> Iterator[None]:
    """Turns errors into HTTPExceptions with the status of the kind of error. The text of unknown
    ones is not for clients."""
    try:
        yield
    except HTTPException:
        raise
    except Exception as error:
        known = [status for kind, status in STATUS.items() if isinstance(error, kind)]
        text = str(error) if known else f"{type(error).__name__} in the model"
        raise HTTPException(known[0] if known else 500, text) from error


class Admission:
    """Refuses requests before they are parsed.

    408: the body is not complete after body_seconds. The connection is closed.
    413: the body is larger than max_body. It is not read if it has a length, else until it gets too
    long.
    429: as many requests to /rank are in progress as the queue and two batches hold. More would
    wait to be parsed or answered, where the queue's limit and the deadlines do not see them. Once
    its answer begins a request does not count: the client may never read it.

    A client that leaves before the body is complete is counted as 499. FastAPI would take it for a
    malformed body.
    """

    def __init__(
        self, app: Any, limits: ServiceLimits, answer: Callable[[int, str, str], Response]
    ):
        self.app, self.max_body, self.body_seconds, self.answer = (
            app,
            limits.max_body,
            limits.body_seconds,
            answer,
        )
        self.ranking, self.max_ranking = 0, limits.batches.max_queue + 2 * limits.batches.max_users

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body:
            response = self.answer(
                413,
                f"the body must be at most {self.max_body} bytes, got {int(length)}",
                scope["path"],
            )
            return await response(scope, receive, send)
        request = _Arriving(self, scope["path"], receive, send)
        try:
            await self.app(scope, request.receive, request.send)
        except asyncio.CancelledError:
            if not request.is_late:
                raise
            response = self.answer(
                408, f"the body must be complete within {self.body_seconds:g} s", scope["path"]
            )
            response.headers["connection"] = "close"
            await response(scope, receive, send)
        finally:
            request.leave()


class _Arriving:
    """A request until its answer begins. It counts as in progress once its body is complete."""

    def __init__(self, admission: Admission, path: str, receive: Any, send: Any):
        self.admission, self.path, self._receive, self._send = admission, path, receive, send
        self.received, self.is_complete, self.counts, self.is_late = 0, False, False, False
        self.task, self.timer = asyncio.current_task(), None

    async def receive(self) -> Any:
        if self.timer is None:  # a request without a body has none
            self.timer = asyncio.get_running_loop().call_later(
                self.admission.body_seconds, self._end
            )
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self.is_complete:
            raise StarletteHTTPException(499, "the client left")
        self.received += len(message.get("body", b""))
        if self.received > self.admission.max_body:
            raise StarletteHTTPException(
                413, f"the body must be at most {self.admission.max_body} bytes"
            )
        if not (self.is_complete or message.get("more_body", False)):
            self.is_complete = True
            self.timer.cancel()
            self._enter()
        return message

    async def send(self, message: Any) -> None:
        self.leave()
        await self._send(message)

    def leave(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.admission.ranking -= self.counts
        self.counts = False

    def _enter(self) -> None:
        admission = self.admission
        if self.path == "/rank":
            if admission.ranking >= admission.max_ranking:
                raise StarletteHTTPException(429, f"{admission.ranking} requests are in progress")
            self.counts = True
            admission.ranking += 1

    def _end(self) -> None:
        self.is_late = self.task is not None and self.task.cancel()
