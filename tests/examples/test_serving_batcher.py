"""Queue, batches, deadlines and failures of the batcher, with a score that is the sum of user and
candidate."""

import threading
import time

import numpy as np
import pytest
import torch
from serving_batcher import Batcher, Closed, Limits, Overloaded, TooLate, WorkerDied
from serving_rankers import NewEvents, Request

import jagged_modules as jm

from ..marks import PATIENCE

SOON = 2 * PATIENCE  # seconds to a deadline that no test reaches


def request(user: int, candidates=(1, 2), events: int = 0) -> Request:
    return Request(user, np.asanyarray(candidates), NewEvents(np.arange(events), np.arange(events)))


class Score:
    """Scores user + candidate. Records the users of each batch. `hold` keeps batches waiting until
    it is set."""

    def __init__(self):
        self.batches, self.events, self.hold, self.started = (
            [],
            [],
            threading.Event(),
            threading.Event(),
        )
        self.hold.set()

    def __call__(self, requests):
        self.started.set()
        assert self.hold.wait(PATIENCE)
        self.fail(requests)
        self.batches.append([x.user for x in requests])
        self.events += [(x.user, len(x.events.item)) for x in requests if x.stores_events]
        return [torch.from_numpy(x.user + x.candidates) for x in requests]

    def fail(self, requests):
        """Replaced by tests."""


@pytest.fixture
def score():
    return Score()


@pytest.fixture
def make(score):
    """limits → a batcher, closed after the test."""
    made = []

    def batcher(**limits):
        made.append(Batcher(score, Limits(**{"max_wait": 0.05, **limits})))
        return made[-1]

    yield batcher
    score.hold.set()
    for batcher in made:
        batcher.close()


def submit(batcher, *requests, seconds=SOON):
    return [batcher.submit(x, time.monotonic() + seconds).future for x in requests]


def busy(batcher, score):
    """Let the thread score a first request, of user 99, until score.hold is set."""
    score.hold.clear()
    (first,) = submit(batcher, request(99))
    assert score.started.wait(PATIENCE)
    return first


def results(futures):
    return [future.result(timeout=PATIENCE).tolist() for future in futures]


def test_requests_that_wait_together_are_one_batch(make, score):
    batcher = make()
    first = busy(batcher, score)
    waiting = submit(batcher, *(request(user) for user in range(5)))
    score.hold.set()
    assert results([first, *waiting]) == [[100, 101], *([user + 1, user + 2] for user in range(5))]
    assert score.batches == [[99], [0, 1, 2, 3, 4]] and batcher.counts.batches == 2


def test_a_batch_waits_for_others_but_not_longer_than_max_wait(make, score):
    """Its deadline would close it after the test had failed."""
    batcher = make(max_wait=0.2)
    begin = time.monotonic()
    results(submit(batcher, request(1)))
    assert score.batches == [[1]] and time.monotonic() - begin >= 0.19


class Counted(np.ndarray):
    """Candidates that count how often they are counted."""

    calls = 0

    def __len__(self):
        Counted.calls += 1
        return super().__len__()


def test_a_long_queue_is_not_walked_for_each_batch(make, score):
    """Of 60 batches, each looks at its own requests, and at one that waits for another batch."""
    Counted.calls, batcher = 0, make(max_users=2)
    first = busy(batcher, score)
    waiting = submit(batcher, *(request(user, np.array([1]).view(Counted)) for user in range(120)))
    score.hold.set()
    results([first, *waiting])
    assert score.batches == [[99], *([user, user + 1] for user in range(0, 120, 2))]
    assert Counted.calls <= 3 * 120


def test_a_full_batch_does_not_wait(make, score):
    batcher = make(max_wait=SOON, max_users=2)
    results(submit(batcher, request(1), request(2)))
    assert score.batches == [[1, 2]]


def test_a_deadline_closes_a_batch(make, score):
    """Two batches' time before it."""
    batcher = make(max_wait=SOON)
    batcher._batch_seconds = PATIENCE / 2
    results(submit(batcher, request(1), seconds=PATIENCE + 0.2))
    assert score.batches == [[1]]


def test_candidates_limit_a_batch(make, score):
    batcher = make(max_candidates=5)
    first = busy(batcher, score)
    waiting = submit(
        batcher, request(1, [1] * 3), request(2, [1] * 3), request(3, [1] * 2), request(4, [1] * 9)
    )
    score.hold.set()
    results([first, *waiting])
    assert score.batches == [[99], [1, 3], [2], [4]]


def test_requests_of_a_user_keep_their_order(make, score):
    batcher = make()
    first = busy(batcher, score)
    waiting = submit(
        batcher,
        request(1, events=1),
        request(2),
        request(1, events=2),
        request(1, events=3),
        request(3),
    )
    score.hold.set()
    results([first, *waiting])
    assert score.batches == [[99], [1, 2, 3], [1], [1]]
    assert [n for user, n in score.events if user == 1] == [1, 2, 3]


def test_requests_of_a_user_without_new_events_share_a_batch(make, score):
    batcher = make()
    first = busy(batcher, score)
    waiting = submit(
        batcher,
        request(1, events=1),
        request(1),
        request(2),
        request(1),
        request(1, events=1),
        request(1),
        request(2),
    )
    score.hold.set()
    results([first, *waiting])
    assert score.batches == [[99], [1, 1, 2, 1, 2], [1, 1]]


def test_a_full_queue_refuses(make, score):
    batcher = make(max_queue=2)
    first = busy(batcher, score)
    waiting = submit(batcher, request(1), request(2))
    with pytest.raises(Overloaded, match="^2 requests wait$"):
        submit(batcher, request(3))
    score.hold.set()
    assert len(results([first, *waiting])) == 3
    assert results(submit(batcher, request(3))) == [[4, 5]]


def test_a_request_whose_deadline_passed_is_not_scored(make, score):
    batcher = make()
    first = busy(batcher, score)
    late, other = submit(batcher, request(1), seconds=0.01) + submit(batcher, request(2))
    time.sleep(0.02)
    score.hold.set()
    with pytest.raises(TooLate, match=r"^the deadline passed in the queue, after \d+\.\d+ s$"):
        late.result(timeout=PATIENCE)
    results([first, other])
    assert score.batches == [[99], [2]] and batcher.counts.late == 1


def test_a_cancelled_request_is_not_scored(make, score):
    batcher = make()
    first = busy(batcher, score)
    gone, other = submit(batcher, request(1), request(2))
    assert gone.cancel()
    score.hold.set()
    results([first, other])
    assert score.batches == [[99], [2]] and batcher.counts.cancelled == 1


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("of the device"), MemoryError(), jm.CacheFull("of the cache")],
    ids=repr,
)
def test_out_of_memory_splits_batches_then_candidates(make, score, error):
    """Room for 4 candidates at a time: three requests of 3 candidates, then one of 10 with new
    events, which are added once."""

    def fail(requests):
        if sum(len(x.candidates) for x in requests) > 4:
            raise error

    score.fail, batcher = fail, make()
    first = busy(batcher, score)
    waiting = submit(
        batcher,
        request(1, range(3)),
        request(2, range(3)),
        request(3, range(3)),
        request(4, range(10), events=2),
    )
    score.hold.set()
    assert results([first, *waiting])[1:] == [
        [user + i for i in range(n)] for user, n in ((1, 3), (2, 3), (3, 3), (4, 10))
    ]
    assert batcher.counts.splits == 6
    assert sum(n for user, n in score.events if user == 4) == 2


def test_out_of_memory_for_one_candidate_is_an_error_of_that_request(make, score):
    def fail(requests):
        if any(x.user == 1 for x in requests):
            raise MemoryError("full")

    score.fail, batcher = fail, make()
    bad, good = submit(batcher, request(1), request(2))
    with pytest.raises(MemoryError, match="full"):
        bad.result(timeout=PATIENCE)
    assert results([good, *submit(batcher, request(3))]) == [[3, 4], [4, 5]]


def test_a_bad_request_fails_alone(make, score):
    def fail(requests):
        if any(x.user == 3 for x in requests):
            raise ValueError("no")

    score.fail, batcher = fail, make()
    first = busy(batcher, score)
    waiting = submit(batcher, *(request(user) for user in range(5)))
    score.hold.set()
    bad = waiting.pop(3)
    with pytest.raises(ValueError, match="no"):
        bad.result(timeout=PATIENCE)
    assert results([first, *waiting])[1:] == [[user + 1, user + 2] for user in (0, 1, 2, 4)]


def test_a_thread_that_dies_is_replaced(make, score):
    """Its requests get an answer, the requests in the queue are scored by the next thread."""

    def fail(requests):
        if any(x.user == 99 for x in requests):
            raise SystemExit("killed")

    score.fail, batcher = fail, make()
    first = busy(batcher, score)
    waiting = submit(batcher, request(1))
    score.hold.set()
    with pytest.raises(WorkerDied, match="^the scoring thread ended: SystemExit$"):
        first.result(timeout=PATIENCE)
    assert results(waiting) == [[2, 3]]
    assert batcher.counts.restarts == 1 and batcher.is_alive()


def test_close_answers_what_waits(make, score):
    batcher = make()
    first = busy(batcher, score)
    waiting = submit(batcher, *(request(user) for user in range(70)))
    closing = threading.Thread(target=batcher.close)
    closing.start()
    while not batcher._closing:
        time.sleep(0.001)
    for call in (lambda: submit(batcher, request(1)), lambda: batcher.between_batches(int)):
        with pytest.raises(Closed, match="^the server stops$"):
            call()
    score.hold.set()
    closing.join(PATIENCE)
    assert [future.done() for future in [first, *waiting]] == [True] * 71
    assert len(results(waiting)) == 70 and not batcher.is_alive()


def test_a_job_runs_between_batches(make, score):
    batcher = make()
    first = busy(batcher, score)
    job = batcher.between_batches(lambda: (threading.current_thread().name, list(score.batches)))
    bad = batcher.between_batches(lambda: 1 / 0)
    waiting = submit(batcher, request(1))
    score.hold.set()
    assert job.result(timeout=PATIENCE) == ("batcher", [[99]])
    with pytest.raises(ZeroDivisionError):
        bad.result(timeout=PATIENCE)
    results([first, *waiting])


def test_a_cancelled_job_does_not_run(make, score):
    """It would end the thread: a cancelled future takes no result."""
    batcher, ran = make(), []
    first = busy(batcher, score)
    job, after = (
        batcher.between_batches(lambda name=name: ran.append(name))
        for name in ("cancelled", "after")
    )
    assert job.cancel()
    score.hold.set()
    after.result(timeout=PATIENCE)
    results([first])
    assert ran == ["after"] and batcher.counts.restarts == 0


def test_a_job_that_ends_the_thread(make, score):
    """It has an answer, and so has what waits behind it."""
    batcher = make()
    first = busy(batcher, score)

    def exit() -> None:
        raise SystemExit

    job, after = batcher.between_batches(exit), batcher.between_batches(lambda: "after")
    waiting = submit(batcher, request(1))
    score.hold.set()
    with pytest.raises(WorkerDied, match="^the scoring thread ended: SystemExit$"):
        job.result(timeout=PATIENCE)
    assert after.result(timeout=PATIENCE) == "after"
    assert results([first, *waiting]) == [[100, 101], [2, 3]] and batcher.counts.restarts == 1


@pytest.mark.parametrize("max_wait", [0.01, 0.0])
def test_jobs_without_end_do_not_keep_batches_waiting(make, score, max_wait):
    """Each job adds the next one. The queue of jobs is bounded, as that of requests."""
    batcher, done = make(max_wait=max_wait, max_queue=3), threading.Event()

    def job() -> None:
        time.sleep(0.005)
        if not done.is_set():
            batcher.between_batches(job)

    batcher.between_batches(job)
    assert results(submit(batcher, request(1), request(2))) == [[2, 3], [3, 4]]
    done.set()
    batcher.between_batches(int).result(timeout=PATIENCE)
    score.started.clear()
    first = busy(batcher, score)
    jobs = [batcher.between_batches(lambda: 1) for _ in range(3)]
    with pytest.raises(Overloaded, match="^3 jobs wait$"):
        batcher.between_batches(lambda: 1)
    score.hold.set()
    assert [x.result(timeout=PATIENCE) for x in jobs] == [1, 1, 1] and results([first])
