"""Dynamic batching: requests wait in a bounded queue for a short time, and one thread scores them
in batches.

A batch closes when it is full, when its first request has waited `max_wait` seconds, or when its
earliest deadline leaves just the time that two batches take. Requests of one user keep their order,
and one with new events is never behind another request in a batch.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from serving_rankers import Request

import jagged_modules as jm

FIRST_BATCH_SECONDS = 0.02  # a guess, until batches are measured
OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError, jm.CacheFull)
Score = Callable[[Sequence[Request]], list[torch.Tensor]]


class Overloaded(Exception):
    """The queue is full."""


class Closed(Exception):
    """The server stops."""


class TooLate(Exception):
    """The deadline passed while the request was in the queue."""


class WorkerDied(Exception):
    """The thread that scored the request, or called the job, ended."""


@dataclass(frozen=True)
class Limits:
    """Limits of the queue and of batches.

    max_queue: requests that wait, and jobs.
    max_users, max_candidates: requests of a batch and their candidates. A request with more
    candidates is a batch by itself. max_wait: seconds that the first request of a batch waits for
    others.

    Raises ValueError for a limit under which no request is scored.
    """

    max_queue: int = 960  # 80 ms at 12,000 requests/s
    max_users: int = 32
    max_candidates: int = 20_000
    max_wait: float = 0.004

    def __post_init__(self) -> None:
        check_limits(
            max_queue=self.max_queue, max_users=self.max_users, max_candidates=self.max_candidates
        )
        if not 0 <= self.max_wait < math.inf:
            raise ValueError(f"max_wait must be finite and at least 0, got {self.max_wait} s")


def check_limits(**limits: int) -> None:
    """ValueError unless all are at least 1."""
    for name, limit in limits.items():
        if limit < 1:
            raise ValueError(f"{name} must be at least 1, got {limit}")


@dataclass
class Counts:
    """What happened, for metrics and tests."""

    batches: int = 0
    splits: int = 0  # batches or requests that were out of memory and were tried again in halves
    restarts: int = 0  # of the thread
    late: int = 0
    cancelled: int = 0


@dataclass
class Waiting:
    """A request in the queue. Times are of `time.monotonic`; answered: when a batch with it ended.
    is_scored: whether it then had scores. version: the weights that scored it."""

    request: Request
    deadline: float
    arrived: float = field(default_factory=time.monotonic)
    future: Future = field(default_factory=Future)
    queued_seconds: float = 0.0
    answered: float = 0.0
    is_scored: bool = False
    version: int = 0


class Batcher:
    """Scores requests in batches, in a thread of its own.

    Args:
        score: the scores of several requests. Only a user's first one has new events. It is called
            by one thread at a time.
        limits: of queue and batches.
        on_batch: called after each batch with its requests.
        version: the version of the weights, which only jobs between batches change.
    """

    def __init__(
        self,
        score: Score,
        limits: Limits,
        on_batch: Callable[[list[Waiting]], None] = lambda batch: None,
        version: Callable[[], int] = lambda: 0,
    ):
        self.score, self.limits, self.on_batch, self.version = score, limits, on_batch, version
        self.counts = Counts()
        self._queue: deque[Waiting] = deque()
        self._queued_candidates = 0
        # when the batch that the thread collects closes, unless it is full before
        self._closes = 0.0
        self._jobs: deque[tuple[Callable[[], Any], Future]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._batch_seconds = FIRST_BATCH_SECONDS  # moving average
        self._current: list[Waiting] = []
        self._start()

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, request: Request, deadline: float) -> Waiting:
        """Add a request to the queue. The result of its future is the scores.

        Raises:
            Overloaded: max_queue requests wait. Closed: `close` was called.
        """
        with self._changed:
            if self._closing:
                raise Closed("the server stops")
            if len(self._queue) >= self.limits.max_queue:
                raise Overloaded(f"{self.limits.max_queue} requests wait")
            waiting = Waiting(request, deadline)
            self._queue.append(waiting)
            self._queued_candidates += len(request.candidates)
            if (
                len(self._queue) == 1
                or self._is_full()
                or self._closing_time(waiting) < self._closes
            ):
                self._changed.notify_all()  # otherwise the thread need not wake up
            return waiting

    def between_batches(self, job: Callable[[], Any]) -> Future:
        """Call job() in the thread, when it scores nothing. After jobs of max_wait seconds a batch
        has its turn.

        Raises:
            Overloaded: max_queue jobs wait. Closed: `close` was called.
        """
        with self._changed:
            if self._closing:
                raise Closed("the server stops")
            if len(self._jobs) >= self.limits.max_queue:
                raise Overloaded(f"{self.limits.max_queue} jobs wait")
            future: Future = Future()
            self._jobs.append((job, future))
            self._changed.notify_all()
            return future

    def close(self) -> None:
        """Accept no more requests, answer those in the queue, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        while self._thread.is_alive():  # a thread that dies is replaced
            self._thread.join(timeout=0.1)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # -- the thread --------------------------------------------------------------------------------

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._step():
                pass
        # a thread that ends for whatever reason leaves no request without an answer
        except BaseException as error:
            batch, self._current = self._current, []
            for waiting in batch:
                if not waiting.future.done():
                    waiting.future.set_exception(_died(error))
            self.counts.restarts += 1
            self._start()

    def _step(self) -> bool:
        """Run jobs for max_wait seconds, and a batch. False at the end."""
        with self._changed:
            while not (self._queue or self._jobs or self._closing):
                self._changed.wait()
            if not (self._queue or self._jobs):
                return False
        end = time.monotonic() + self.limits.max_wait
        while self._jobs:
            _run_job(*self._jobs.popleft())  # no other thread takes jobs
            if time.monotonic() >= end:
                break
        with self._changed:
            batch = self._collect() if self._queue else []
        if batch:
            self._answer(batch)
        return True

    def _collect(self) -> list[Waiting]:
        """Wait until the batch closes, and take it from the queue."""
        while not (self._closing or self._jobs or self._is_full()):
            self._closes = min(map(self._closing_time, self._queue))
            left = self._closes - time.monotonic()
            if left <= 0:
                break
            self._changed.wait(left)
        batch, users, passed, candidates, later = [], set(), set(), 0, []
        max_users, max_candidates = self.limits.max_users, self.limits.max_candidates
        # a long queue is not walked to its end
        while self._queue and len(batch) < max_users and candidates < max_candidates:
            waiting = self._queue.popleft()
            request = waiting.request
            total = candidates + len(request.candidates)
            if (
                (batch and total > max_candidates)
                or request.user in passed
                or (request.user in users and len(request.events.item))
            ):
                later.append(waiting)
                passed.add(request.user)  # a user's later requests stay behind this one
                continue
            batch.append(waiting)
            users.add(request.user)
            candidates = total
        self._queue.extendleft(reversed(later))
        self._queued_candidates -= candidates
        return batch

    def _closing_time(self, waiting: Waiting) -> float:
        """When a batch with this request closes at the latest."""
        return min(
            waiting.arrived + self.limits.max_wait, waiting.deadline - 2 * self._batch_seconds
        )

    def _is_full(self) -> bool:
        return (
            len(self._queue) >= self.limits.max_users
            or self._queued_candidates >= self.limits.max_candidates
        )

    def _answer(self, batch: list[Waiting]) -> None:
        begin = time.monotonic()
        self._current = batch
        self._current = [waiting for waiting in batch if self._is_wanted(waiting, begin)]
        if not self._current:
            return
        results = self._results([waiting.request for waiting in self._current])
        version, end = self.version(), time.monotonic()
        for waiting, result in zip(self._current, results, strict=True):
            waiting.version, waiting.answered = version, end
            waiting.is_scored = not isinstance(result, Exception)
            if isinstance(result, Exception):
                waiting.future.set_exception(result)
            else:
                waiting.future.set_result(result)
        self.counts.batches += 1
        self._batch_seconds += 0.1 * (end - begin - self._batch_seconds)
        self.on_batch(self._current)
        self._current = []

    def _is_wanted(self, waiting: Waiting, now: float) -> bool:
        waiting.queued_seconds = now - waiting.arrived
        if not waiting.future.set_running_or_notify_cancel():
            self.counts.cancelled += 1
            return False
        if now > waiting.deadline:
            self.counts.late += 1
            waiting.future.set_exception(
                TooLate(f"the deadline passed in the queue, after {waiting.queued_seconds:.3f} s")
            )
            return False
        return True

    def _results(self, requests: list[Request]) -> list[torch.Tensor | Exception]:
        """Scores or the error of each request. Errors of a batch are found again in its halves, so
        that no request fails for another."""
        try:
            return list(self.score(requests))
        except Exception as caught:
            error = _with_class(caught)
            self.counts.splits += isinstance(error, OUT_OF_MEMORY)
            if len(requests) == 1:
                return [
                    self._in_halves(requests[0], error)
                    if isinstance(error, OUT_OF_MEMORY)
                    else error
                ]
        half = len(requests) // 2
        return self._results(requests[:half]) + self._results(requests[half:])

    def _in_halves(self, request: Request, error: Exception) -> torch.Tensor | Exception:
        """The scores of one request whose candidates need too much memory at once. Its new events
        are stored with the last half."""
        half = len(request.candidates) // 2
        if not half:
            return error
        parts = []
        for part in (
            replace(request, candidates=request.candidates[:half], stores_events=False),
            replace(request, candidates=request.candidates[half:]),
        ):
            (result,) = self._results([part])
            if isinstance(result, Exception):
                return result
            parts.append(result)
        return torch.cat(parts)


def _with_class(error: Exception) -> Exception:
    """The error. A MemoryError for the plain RuntimeError that torch raises if a CPU has no
    memory."""
    return (
        MemoryError("the CPU is out of memory")
        if type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)
        else error
    )


def _run_job(job: Callable[[], Any], future: Future) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job()
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:  # ends the thread
        future.set_exception(_died(error))
        raise
    else:
        future.set_result(result)


def _died(error: BaseException) -> WorkerDied:
    return WorkerDied(f"the scoring thread ended: {type(error).__name__}")
