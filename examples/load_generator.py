"""Random requests, and ways to send them at given times: into the queue of a service, into those of
services in several processes, or over HTTP to a server in another process."""

import asyncio
import gc
import multiprocessing
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import aiohttp
import httpx
import numpy as np
from prometheus_client import generate_latest
from serving_app import Service
from serving_batcher import Overloaded
from serving_errors import STATUS
from serving_rankers import NONE, NewEvents, Ranker, Request

CONNECTIONS = 64  # that keep a server busy, to measure its capacity
FOREVER = 1e9  # a deadline
START_SECONDS = 300  # in which a server must answer
# that the thread which sends rests at least: each time that it wakes up, it holds up the one that
# scores. Requests that became due meanwhile are sent one after another
REST_SECONDS = 5e-4
# HTTP statuses, and seconds from the planned arrival to the answer if there are scores
Answers = tuple[list[int], list[float]]
Send = Callable[[Request], Awaitable[int]]  # the HTTP status of the answer


class Workload:
    """Random requests. The same seed gives the same requests.

    Args:
        ranker: its users, items and ratings.
        candidates: of each request.
        new_events: fraction of requests with a new event.
        zipf: exponent of the users' popularity.
    """

    def __init__(
        self, ranker: Ranker, candidates: int, new_events: float, zipf: float, seed: int = 0
    ):
        self.random, self.num_candidates, self.new_events = (
            np.random.default_rng(seed),
            candidates,
            new_events,
        )
        self.histories, self.num_ratings = ranker.histories, max(1, len(ranker.ratings))
        weights = 1 / np.arange(1, self.histories.num_users + 1) ** zipf
        self.popularity = self.random.permutation(weights / weights.sum())
        users = range(self.histories.num_users)
        self.has_events = np.array([self.histories.length(user) > 0 for user in users])

    def requests(self, count: int) -> list[Request]:
        users = self.random.choice(self.histories.num_users, count, p=self.popularity).tolist()
        return [Request(user, self._items(self.num_candidates), self._events()) for user in users]

    def batch(self, users: int, with_events: int, candidates: int) -> list[Request]:
        """Requests of different users who have a history, the first of whom have a new event."""
        known = self.popularity * self.has_events
        drawn = self.random.choice(len(known), users, replace=False, p=known / known.sum())
        return [
            Request(user, self._items(candidates), self._event() if i < with_events else NONE)
            for i, user in enumerate(drawn.tolist())
        ]

    def arrivals(self, rate: float, seconds: float) -> np.ndarray:
        """Times in seconds of a Poisson process."""
        times = np.cumsum(self.random.exponential(1 / rate, int(rate * seconds * 1.5) + 20))
        return times[times < seconds]

    def _items(self, count: int) -> np.ndarray:
        return self.random.integers(self.histories.num_items, size=count)

    def _events(self) -> NewEvents:
        return NONE if self.random.random() >= self.new_events else self._event()

    def _event(self) -> NewEvents:
        return NewEvents(self._items(1), self.random.integers(self.num_ratings, size=1))


class Target(Protocol):
    """What is measured."""

    def drive(self, requests: list[Request], arrivals: np.ndarray) -> Answers:
        """Send each request at its time, whether or not earlier ones are answered."""

    def capacity(self, requests: list[Request], seconds: float) -> float:
        """Answered requests per second, of as many of these, again and again, as it can take."""

    def metrics(self) -> dict[str, float]:
        """The server's metrics, with all that was answered."""


def parse_metrics(text: str) -> dict[str, float]:
    return {
        name: float(value) for name, value in re.findall(r"^([^#\s]\S*) (\S+)$", text, re.MULTILINE)
    }


def status_of(error: BaseException | None) -> int:
    """The HTTP status of an answer with this error."""
    return (
        200
        if error is None
        else next((status for kind, status in STATUS.items() if isinstance(error, kind)), 500)
    )


class InProcess:
    """A service in this process, without HTTP."""

    def __init__(self, service: Service):
        self.service = service

    def drive(self, requests: list[Request], arrivals: np.ndarray) -> Answers:
        # not the errors: their tracebacks would keep the requests
        answers: list[tuple[int, float, int]] = []

        def record(place: int, future: Future) -> None:
            answers.append((place, time.monotonic(), status_of(future.exception())))

        gc.freeze()  # the requests, of which a server has but those that wait
        begin = time.monotonic()
        planned = (begin + arrivals).tolist()
        for place, (request, arrival) in enumerate(zip(requests, planned, strict=True)):
            early = arrival - time.monotonic()
            if early > 0:
                time.sleep(max(early, REST_SECONDS))
            try:
                deadline = time.monotonic() + self.service.limits.deadline
                waiting = self.service.batcher.submit(request, deadline)
            except Exception as error:
                answers.append((place, arrival, status_of(error)))
            else:
                # Only what waits is kept: a collection of garbage that visits all requests since
                # the first, 13,000 after a second, would take 20 ms, in which none is scored.
                waiting.future.add_done_callback(partial(record, place))
        while len(answers) < len(requests):
            time.sleep(REST_SECONDS)
        statuses, seconds = [0] * len(requests), [0.0] * len(requests)
        for place, answered, status in answers:
            statuses[place], seconds[place] = status, answered - planned[place]
        return statuses, seconds

    def capacity(self, requests: list[Request], seconds: float) -> float:
        """Of a full queue, until there is at least one answer. Refused requests are sent again."""
        waiting, answered, begin = None, list[float](), time.monotonic()
        for request in cycle(requests):
            while (taken := time.monotonic() - begin) < seconds or not answered:
                try:
                    waiting = self.service.batcher.submit(request, FOREVER)
                    waiting.future.add_done_callback(lambda _: answered.append(time.monotonic()))
                    break
                except Overloaded:
                    time.sleep(0.0005)
            else:
                break
        rate = len(answered) / taken
        if waiting is not None:
            waiting.future.exception()  # the last one
        return rate

    def metrics(self) -> dict[str, float]:
        # Requests are answered before they are in the metrics.
        self.service.batcher.between_batches(lambda: None).result()
        return parse_metrics(generate_latest(self.service.metrics.registry).decode())


class Processes(AbstractContextManager):
    """Services in processes of their own, which share the machine and its GPU, and the threads that
    send beside them. All requests of a user go to one process, where its history is.

    serve: makes the target of a process from these arguments, which are pickled.
    """

    def __init__(
        self, count: int, serve: Callable[..., AbstractContextManager[Target]], *arguments: Any
    ):
        spawn = multiprocessing.get_context("spawn")  # a fork cannot use CUDA
        self.connections, self.processes = [], []
        for _ in range(count):
            own, other = spawn.Pipe()
            process = spawn.Process(
                target=_answer_calls, args=(other, serve, *arguments), daemon=True
            )
            process.start()
            other.close()  # so that the end of the process is noticed
            self.connections.append(own)
            self.processes.append(process)
        self._results()

    def __exit__(self, *error: Any) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            connection.close()
            process.join()

    def drive(self, requests: list[Request], arrivals: np.ndarray) -> Answers:
        parts = self._parts(requests)
        answers = self._call(
            "drive", [([requests[i] for i in part], arrivals[part]) for part in parts]
        )
        statuses, seconds = [0] * len(requests), [0.0] * len(requests)
        for part, answer in zip(parts, answers, strict=True):
            for i, status, taken in zip(part.tolist(), *answer, strict=True):
                statuses[i], seconds[i] = status, taken
        return statuses, seconds

    def capacity(self, requests: list[Request], seconds: float) -> float:
        parts = self._parts(requests)
        return sum(
            self._call("capacity", [([requests[i] for i in part], seconds) for part in parts])
        )

    def metrics(self) -> dict[str, float]:
        """The sums."""
        total: Counter[str] = Counter()
        for found in self._call("metrics", [()] * len(self.processes)):
            total.update(found)
        return dict(total)

    def _parts(self, requests: list[Request]) -> list[np.ndarray]:
        """The places of the requests of each process."""
        process = np.array([x.user for x in requests]) % len(self.processes)
        return [np.flatnonzero(process == i) for i in range(len(self.processes))]

    def _call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The method in all processes at once."""
        for connection, given in zip(self.connections, arguments, strict=True):
            connection.send((name, given))
        return self._results()

    def _results(self) -> list[Any]:
        """EOFError if a process ended."""
        return [connection.recv() for connection in self.connections]


def _answer_calls(
    connection: Connection, serve: Callable[..., AbstractContextManager[Target]], *arguments: Any
) -> None:
    """What a process of `Processes` does, until the other end of the connection is closed."""
    with serve(*arguments) as target:
        connection.send(None)
        while True:
            try:
                name, given = connection.recv()
            except EOFError:
                return
            connection.send(getattr(target, name)(*given))


class OverHTTP(AbstractContextManager):
    """A server in another process, `serve_ranking.py` with these options, which ends with the
    context."""

    def __init__(self, ranker: Ranker, *options: str):
        self.ratings, self.users, self.items = (
            ranker.ratings or [None],
            ranker.histories.users,
            ranker.histories.items,
        )
        program = Path(__file__).with_name("serve_ranking.py")
        # The system chooses the port when the server takes it. One that was free before could be
        # taken meanwhile.
        command = [sys.executable, str(program), "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            self.url, _ = address_of(self.process, START_SECONDS)
        except RuntimeError as error:
            raise RuntimeError(
                f"the server did not start with the options {' '.join(options)}"
            ) from error

    def __exit__(self, *error: Any) -> None:
        self.process.terminate()
        self.process.wait()

    def drive(self, requests: list[Request], arrivals: np.ndarray) -> Answers:
        return asyncio.run(self._with_client(lambda send: drive(send, requests, arrivals)))

    def capacity(self, requests: list[Request], seconds: float) -> float:
        """Of `CONNECTIONS` clients that each send the next request when the last one was
        answered."""

        async def run(send: Send) -> float:
            begin, answered, endless = time.monotonic(), 0, cycle(requests)

            async def client() -> None:
                nonlocal answered
                while time.monotonic() - begin < seconds:
                    answered += await send(next(endless)) == 200

            await asyncio.gather(*(client() for _ in range(CONNECTIONS)))
            return answered / (time.monotonic() - begin)

        return asyncio.run(self._with_client(run))

    def metrics(self) -> dict[str, float]:
        # Answered between batches, when the metrics have the last one.
        httpx.get(f"{self.url}/users/{quote(str(self.users[0]), safe='')}", timeout=START_SECONDS)
        return parse_metrics(httpx.get(f"{self.url}/metrics", timeout=START_SECONDS).text)

    async def _with_client(self, use: Callable[[Send], Awaitable[Any]]) -> Any:
        async with aiohttp.ClientSession(
            self.url, connector=aiohttp.TCPConnector(limit=1000)
        ) as client:

            async def send(request: Request) -> int:
                events = [
                    {"item": self.items[i], "rating": self.ratings[r]}
                    for i, r in zip(*request.events, strict=True)
                ]
                body = {
                    "user": self.users[request.user],
                    "candidates": [self.items[i] for i in request.candidates],
                    "events": events,
                }
                async with client.post("/rank", json=body) as answer:
                    await answer.read()
                    return answer.status

            return await use(send)


async def drive(send: Send, requests: list[Request], arrivals: np.ndarray) -> Answers:
    """Send each request at its time."""
    begin = time.perf_counter()

    async def one(request: Request, arrival: float) -> tuple[int, float]:
        status = await send(request)
        return status, time.perf_counter() - begin - arrival

    tasks = []
    for request, arrival in zip(requests, arrivals.tolist(), strict=True):
        await asyncio.sleep(max(0.0, arrival - (time.perf_counter() - begin)))
        tasks.append(asyncio.create_task(one(request, arrival)))
    answers = await asyncio.gather(*tasks)
    return [status for status, _ in answers], [seconds for _, seconds in answers]


def address_of(process: subprocess.Popen, seconds: float) -> tuple[str, str]:
    """The address that serve_ranking.py prints when it serves to its standard output, a pipe, and
    what it printed before. RuntimeError with the output if it ends before, as it does after so many
    seconds."""
    limit = threading.Timer(seconds, process.kill)
    limit.start()
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("serving on "):
                return line.split()[-1], "".join(lines)
    finally:
        limit.cancel()
    raise RuntimeError("".join(lines))
