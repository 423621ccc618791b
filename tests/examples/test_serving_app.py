"""The HTTP interface over real sockets: every fault gets a clear answer, is counted, and the next
request is served."""

import asyncio
import contextlib
import gc
import http.client
import inspect
import itertools
import json
import math
import platform
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import load_weights

from .serving import Requests, body_of, ranker_of

for _name in ("fastapi", "uvicorn", "httpx", "prometheus_client"):
    pytest.importorskip(_name, reason='needs the extra "serve"')

import httpx
import prometheus_client.parser
import pydantic
import serve_ranking
import serving_app
from load_generator import parse_metrics
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from published_ids import Vocabulary
from serving_admission import Admission
from serving_app import BUCKETS, Handover, Service, StageSeconds, tune_process
from serving_batcher import Limits
from serving_bodies import RankBody

from ..marks import PATIENCE
from .running import LIMITS, Running

GOOD = {"user": 3, "candidates": [4, 6, 8]}  # ids of both models' logs, which are not their rows


@pytest.fixture(scope="module")
def shared(served):
    """One service of the ranking model for tests that leave it as it was."""
    running = Running(Service(ranker_of(served["attention"]), LIMITS))
    yield running
    running.stop()


@pytest.fixture
def start(served):
    """name of a model, limits, read_weights → a service of its own."""
    with contextlib.ExitStack() as stack:

        def running(name="attention", limits=LIMITS, read_weights=None, cache_bytes=10**7):
            running = Running(Service(ranker_of(served[name], cache_bytes), limits, read_weights))
            stack.callback(running.stop)
            return running

        yield running


def assert_serves(running: Running, body=GOOD) -> list[float]:
    """The next request is served."""
    answer = running.rank(body)
    assert answer.status_code == 200, answer.text
    scores = answer.json()["scores"]
    assert len(scores) == len(body["candidates"]) and all(map(lambda x: x == x, scores))
    return scores


@pytest.mark.parametrize("name", ["attention", "hstu"])
def test_scores_are_those_of_the_ranker(start, served, name):
    """After new events too, which the next request finds in the history."""
    running, offline = start(name), ranker_of(served[name], 0)
    requests, scored = Requests(offline), 0
    for events in (0, 2, 0, 1):
        request = requests.of(3, events=events)
        scored += len(request.candidates)
        scores = assert_serves(running, body_of(request, offline))
        torch.testing.assert_close(torch.tensor(scores), offline.score([request])[0])
    assert running.metric('rank_requests_total{status="200"}') == 4
    assert running.metric("rank_candidates_total") == scored
    assert (
        running.metric('rank_stage_seconds_count{stage="score"}')
        == 4
        == running.metric("rank_seconds_count")
    )


MANY, NAN, NO_ID = list(range(51)), math.nan, "Input should be an id, an integer or text"
FAULTS = {  # a request → status, error
    "unknown user": ({**GOOD, "user": 25}, 404, "no user 25 in the log, whose first user is 0"),
    "negative user": ({**GOOD, "user": -1}, 404, "no user -1 in the log, whose first user is 0"),
    "a user with a leading zero": (
        {**GOOD, "user": "03"},
        404,
        "no user '03' in the log, whose first user is 0",
    ),
    "a large user": (
        {**GOOD, "user": 2**64 + 3},
        404,
        f"no user {2**64 + 3} in the log, whose first user is 0",
    ),
    "no candidates": (
        {**GOOD, "candidates": []},
        422,
        "body.candidates: List should have at least 1 item after validation, not 0",
    ),
    "too many candidates": (
        {**GOOD, "candidates": MANY},
        413,
        "candidates must be at most 50, got 51",
    ),
    "unknown item": (
        {**GOOD, "candidates": [1, 10**6]},
        422,
        "candidates must be items of the log, such as 0, got 1000000",
    ),
    "the row of an item": (
        {**GOOD, "candidates": [1, 5]},
        422,
        "candidates must be items of the log, such as 0, got 5",
    ),
    "unknown item of an event": (
        {**GOOD, "events": [{"item": "x"}]},
        422,
        "events must be items of the log, such as 0, got 'x'",
    ),
    "over-long history": (
        {**GOOD, "events": [{"item": 1, "rating": 4}] * 21},
        413,
        "events must be at most 20, got 21",
    ),
    "unknown rating": (
        {**GOOD, "events": [{"item": 1, "rating": 4.5}]},
        422,
        "ratings must be of [1.0, 2.0, 3.0, 4.0, 5.0], got 4.5",
    ),
    "no rating": (
        {**GOOD, "events": [{"item": 1}]},
        422,
        "ratings must be of [1.0, 2.0, 3.0, 4.0, 5.0], got None",
    ),
    "NaN rating": (
        {**GOOD, "events": [{"item": 1, "rating": NAN}]},
        422,
        "body.events.0.rating: Input should be a finite number",
    ),
    "infinite deadline": (
        {**GOOD, "deadline_ms": math.inf},
        422,
        "body.deadline_ms: Input should be a finite number",
    ),
    "a float item": ({**GOOD, "candidates": [4, 6.0]}, 422, f"body.candidates.1: {NO_ID}"),
    "a float user": ({**GOOD, "user": 3.0}, 422, f"body.user: {NO_ID}"),
    "no user": ({**GOOD, "user": None}, 422, f"body.user: {NO_ID}"),
    "a bool item": (
        {**GOOD, "events": [{"item": True, "rating": 4}]},
        422,
        f"body.events.0.item: {NO_ID}",
    ),
    "a bool rating": (
        {**GOOD, "events": [{"item": 1, "rating": True}]},
        422,
        "body.events.0.rating: Input should be a valid number",
    ),
    "unknown field": ({**GOOD, "pickle": "x"}, 422, "body.pickle: Extra inputs are not permitted"),
    "malformed JSON": ('{"user": 3, ', 400, None),
    "no JSON": (b"\x80\x04\x95pickle", 400, None),
    "large body": (
        {**GOOD, "candidates": [1] * 20_000},
        413,
        "the body must be at most 20000 bytes, got 60027",
    ),
}


@pytest.mark.parametrize("body, status, error", FAULTS.values(), ids=FAULTS)
def test_bad_requests(shared, body, status, error):
    """Each is answered, counted, and does not change the user's history."""
    length, before = (
        shared.service.ranker.histories.length(3),
        shared.metric(f'rank_requests_total{{status="{status}"}}'),
    )
    content = body if isinstance(body, (str, bytes)) else json.dumps(body)
    answer = shared.client.post(
        "/rank", content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status, answer.text
    found = answer.json()["error"]
    assert found == error if error else found
    counted = shared.metric(f'rank_requests_total{{status="{status}"}}') - before
    assert counted == 1
    assert shared.service.ranker.histories.length(3) == length
    assert_serves(shared)


@pytest.mark.parametrize(
    "fields",
    [
        {"candidates": [None] * 1000},
        {"events": [{}] * 1000},
        {str(i): 1 for i in range(1000)},
        {"events": [dict.fromkeys("abcdefgh", 1)]},
    ],
    ids=["candidates", "events", "unknown fields", "unknown fields of an event"],
)
def test_a_body_of_many_faults_is_not_searched_for_all(fields):
    """To list 300,000 faults would stop the event loop for two seconds."""
    with pytest.raises(pydantic.ValidationError) as caught:
        RankBody.model_validate({**GOOD, **fields})
    assert caught.value.error_count() <= 2


def test_an_error_does_not_repeat_a_long_name(shared):
    answer = shared.rank({**GOOD, "x" * 5000: 1})
    assert answer.status_code == 422 and answer.json()["error"] == f"body.{'x' * 495}..."
    assert_serves(shared)


@pytest.mark.parametrize(
    "headers",
    [{}, {"content-type": "application/x-www-form-urlencoded"}],
    ids=["no type", "of curl -d"],
)
def test_a_body_that_is_not_declared_as_json(shared, headers):
    answer = shared.client.post("/rank", content=json.dumps(GOOD), headers=headers)
    assert answer.status_code == 415
    assert (
        answer.json()["error"]
        == "the body must be JSON, with the header content-type: application/json"
    )
    assert_serves(shared)


def test_a_body_of_unknown_length_is_limited(shared):
    answer = shared.client.post(
        "/rank", content=iter([b" " * 5000] * 10), headers={"content-type": "application/json"}
    )
    assert (
        answer.status_code == 413
        and answer.json()["error"] == "the body must be at most 20000 bytes"
    )
    assert_serves(shared)


def test_a_user_without_events_of_a_next_item_model(start):
    running = start("hstu")
    running.service.ranker.histories._offsets[:] = 0
    answer = running.rank(GOOD)
    assert (
        answer.status_code == 422
        and answer.json()["error"] == "user 3 has no events yet: send some in 'events'"
    )
    assert_serves(running, {**GOOD, "events": [{"item": 4}]})


def test_counts_are_counters(shared):
    """What may fall again is a gauge."""
    text = shared.client.get("/metrics").text
    kinds = {
        x.name: x.type
        for x in prometheus_client.parser.text_string_to_metric_families(text)
        if x.type in ("counter", "gauge")
    }
    kinds = {name: kind for name, kind in kinds.items() if not name.endswith("_created")}
    counters = {
        f"rank_{name}"
        for name in (
            "requests",
            "candidates",
            "unknown_users",
            "batches",
            "splits",
            "restarts",
            "late",
            "cancelled",
            "graph_captures",
        )
    }
    counters |= {f"rank_histories_{name}" for name in ("reused", "appended", "encoded")}
    counters |= {f"history_cache_{name}" for name in ("hits", "misses", "evictions")}
    gauges = {
        "rank_queue_length",
        "rank_weights_version",
        *(f"history_cache_{name}" for name in ("users", "rows", "bytes", "max_bytes")),
    }
    own = {name: kind for name, kind in kinds.items() if not name.startswith("process_")}
    assert own == dict.fromkeys(counters, "counter") | dict.fromkeys(gauges, "gauge")


def test_seconds_by_stage_are_those_of_a_histogram():
    """As Prometheus's own, which observes one after another."""
    registries, stages = [CollectorRegistry(), CollectorRegistry()], StageSeconds()
    registries[0].register(stages)
    own = Histogram(
        "rank_stage_seconds", "Seconds by stage", ["stage"], buckets=BUCKETS, registry=registries[1]
    )
    for seconds in (
        [],
        [1.0, *BUCKETS, 0.0],
        [3e-3, 9.0],
        np.random.default_rng(0).random(50).tolist(),
    ):
        for stage in ("queue", "score"):
            stages.observe(stage, seconds)
            for x in seconds:
                own.labels(stage).observe(x)
    found, expected = (
        {k: v for k, v in parse_metrics(generate_latest(x).decode()).items() if "_created" not in k}
        for x in registries
    )
    assert len(found) == 2 * (len(BUCKETS) + 3) and found == pytest.approx(
        {k: v for k, v in expected.items() if v or k in found}
    )


def test_one_call_wakes_the_loop_for_all_of_a_batch(monkeypatch):
    """A thread gives results, errors and what was cancelled to the futures of an event loop."""

    async def ask():
        loop, futures, wakes = asyncio.get_running_loop(), [Future() for _ in range(5)], []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *x: wakes.append(x) or wake(*x))
        handover = Handover(loop)
        for _ in range(2):
            futures, wakes[:] = [Future() for _ in range(5)], []
            results = [handover.wrap(x) for x in futures]
            results[3].cancel()
            await asyncio.sleep(0)
            assert futures[3].cancelled()

            def answer(futures=futures):
                for i in (0, 1, 4):
                    futures[i].set_result(i)
                futures[2].set_exception(KeyError("no"))

            thread = threading.Thread(target=answer)
            thread.start()
            thread.join()  # the loop does not run meanwhile
            assert [await results[i] for i in (0, 1, 4)] == [0, 1, 4]
            with pytest.raises(KeyError, match="no"):
                await results[2]
            assert results[3].cancelled() and len(wakes) <= 2  # one for what was cancelled

    asyncio.run(ask())


def test_each_refused_request_has_a_line_in_the_log(shared, caplog):
    """Of one line, whatever the client sends."""
    shared.rank({**GOOD, "user": 99})
    shared.rank({**GOOD, "user": "a\nb"})
    shared.client.get("/nowhere")
    shared.admin.post("/reload")
    messages = [x.getMessage() for x in caplog.records if x.name == "serving"]
    assert messages[:2] == [
        "404 for '/rank': 'no user 99 in the log, whose first user is 0'",
        """404 for '/rank': "no user 'a\\\\nb' in the log, whose first user is 0\"""",
    ]
    assert [message.split(":")[0] for message in messages[2:]] == [
        "404 for '/nowhere'",
        "409 for '/reload'",
    ]
    caplog.clear()
    assert_serves(shared)
    assert not [x for x in caplog.records if x.name == "serving"]


def test_health_page_and_unknown_paths(shared):
    assert shared.client.get("/health").json() == {"status": "ok", "weights_version": 1, "queue": 0}
    page = shared.client.get("/")
    assert page.headers["content-type"].startswith("text/html") and "<html" in page.text
    assert shared.client.get("/nowhere").status_code == 404
    assert shared.client.get("/rank").status_code == 405


def test_the_events_of_a_user_and_attention_weights(shared):
    found = shared.client.get("/users/3", params={"candidates": [4, 6]}).json()
    assert found["user"] == 3 and len(found["events"]) == 50 and found["held_out"]
    assert set(found["events"][0]) == {"item", "rating"}
    assert [len(x) for x in found["attention"]] == [50, 50] and all(
        0 < sum(x) <= 1.0001 for x in found["attention"]
    )
    assert "attention" not in shared.client.get("/users/3").json()
    assert (
        shared.client.get("/users/99").status_code
        == shared.client.get("/users/03").status_code
        == 404
    )
    assert shared.client.get("/users/3", params={"candidates": [-5]}).status_code == 422
    assert shared.client.get("/users/3", params={"candidates": MANY}).json() == {
        "error": "candidates must be at most 50, got 51"
    }


def rows_of(running: Running, *items) -> list[int]:
    return running.service.ranker.histories.items.rows(items).tolist()


class Hold:
    """Makes the ranker wait inside `score` until released."""

    def __init__(self, service: Service):
        self.released, self.entered, self.users = threading.Event(), threading.Event(), []
        score = service.ranker.score

        def held(requests):
            self.entered.set()
            assert self.released.wait(PATIENCE)
            self.users += [x.user for x in requests]
            return score(requests)

        service.ranker.score = held


def wait_until(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def refuses(running: Running) -> bool:
    """Whether the server takes no connection any more."""
    try:
        socket.create_connection(running.address).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_full_queue_is_answered_with_429(start):
    running = start()
    hold = Hold(running.service)
    with ThreadPoolExecutor(40) as threads:
        first = threads.submit(running.rank, {**GOOD, "user": 24})
        assert hold.entered.wait(PATIENCE)
        answers = [threads.submit(running.rank, {**GOOD, "user": user}) for user in range(20)]
        wait_until(lambda: sum(x.done() for x in answers) == 12)
        assert running.metric("rank_queue_length") == 8
        hold.released.set()
        statuses = [x.result().status_code for x in [first, *answers]]
    assert statuses.count(200) == 9 and statuses.count(429) == 12
    assert running.metric('rank_requests_total{status="429"}') == 12
    assert_serves(running)


def test_requests_that_wait_outside_of_the_queue_are_bounded(start, monkeypatch):
    """Five wait before they are in the queue, as requests do when the event loop is busy. Clients
    that send slowly take no place.

    Of the five, the queue then has room for three, and for a fourth one if the first is taken out
    in time.
    """
    running = start(limits=replace(LIMITS, batches=Limits(max_queue=3, max_users=1)))
    go, rank, entered = threading.Event(), running.service.rank, threading.Semaphore(0)

    async def slow(*arguments):
        entered.release()
        while not go.is_set():
            await asyncio.sleep(0.01)
        return await rank(*arguments)

    monkeypatch.setattr(running.service, "rank", slow)
    with ThreadPoolExecutor(5) as threads, contextlib.ExitStack() as stack:
        for _ in range(7):
            connection = stack.enter_context(socket.create_connection(running.address))
            connection.sendall(
                b"POST /rank HTTP/1.1\r\nhost: x\r\ncontent-type:"
                b" application/json\r\ncontent-length: 99\r\n\r\n{"
            )
        wait_until(lambda: len(running.server.server_state.tasks) == 7)
        waiting = [threads.submit(running.rank, {**GOOD, "user": user}) for user in range(5)]
        assert all(entered.acquire(timeout=PATIENCE) for _ in waiting)
        refused = running.rank(GOOD)
        assert refused.status_code == 429 and refused.json() == {
            "error": "5 requests are in progress"
        }
        assert running.client.get("/health").status_code == 200
        go.set()
        statuses = [x.result().status_code for x in waiting]
    assert statuses.count(200) >= 3 and running.metric(
        'rank_requests_total{status="429"}'
    ) == 1 + statuses.count(429)
    assert_serves(running)


def test_clients_that_do_not_read_take_no_place():
    """Their answers wait in the connections. Otherwise all other requests would get 429, as long as
    these clients stay."""

    async def app(scope, receive, send):
        assert (await receive())["type"] == "http.request"
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send_all() -> int:
        answering, admission = (
            [],
            Admission(app, replace(LIMITS, batches=Limits(max_queue=1, max_users=1)), None),
        )

        async def send(message):
            answering.append(message)
            await asyncio.Event().wait()

        tasks = [
            asyncio.create_task(
                admission({"type": "http", "path": "/rank", "headers": []}, receive, send)
            )
            for _ in range(9)
        ]
        while len(answering) < 9 and not any(task.done() for task in tasks):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert admission.ranking == 0
        return len(answering)

    assert asyncio.run(send_all()) == 9


def test_a_deadline(start):
    running = start()
    hold = Hold(running.service)
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(running.rank, GOOD)
        assert hold.entered.wait(PATIENCE)
        late = threads.submit(running.rank, {**GOOD, "user": 4, "deadline_ms": 10})
        wait_until(lambda: len(running.service.batcher) == 1)
        time.sleep(0.05)
        hold.released.set()
        assert first.result().status_code == 200 and late.result().status_code == 504
    assert "the deadline passed in the queue" in late.result().json()["error"]
    assert running.metric("rank_late_total") == 1 and hold.users == [3]
    assert_serves(running)


@pytest.mark.parametrize("half", [False, True], ids=["leaves", "closes its sending side"])
def test_a_client_that_leaves(start, half):
    """Its request is dropped from the queue."""
    running = start()
    hold = Hold(running.service)
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(running.rank, GOOD)
        assert hold.entered.wait(PATIENCE)

        async def leave():
            async with httpx.AsyncClient(base_url=running.client.base_url) as client:
                task = asyncio.create_task(client.post("/rank", json={**GOOD, "user": 4}))
                while len(running.service.batcher) == 0:
                    await asyncio.sleep(0.005)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

        def close_half():
            body = json.dumps({**GOOD, "user": 4})
            with socket.create_connection(running.address, timeout=PATIENCE) as connection:
                head = (
                    "POST /rank HTTP/1.1\r\nhost: x\r\ncontent-type:"
                    f" application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                )
                connection.sendall((head + body).encode())
                wait_until(lambda: len(running.service.batcher))
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(1) == b""

        close_half() if half else asyncio.run(leave())
        wait_until(lambda: running.metric('rank_requests_total{status="499"}') == 1)
        hold.released.set()
        assert first.result().status_code == 200
    assert_serves(running)
    assert hold.users == [3, 3] and running.metric("rank_cancelled_total") == 1


def test_a_client_that_leaves_before_the_body_is_complete(start):
    running = start()
    with socket.create_connection(running.address) as connection:
        connection.sendall(
            b"POST /rank HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length:"
            b" 99\r\n\r\n{"
        )
        wait_until(lambda: running.server.server_state.tasks)
    wait_until(lambda: running.metric('rank_requests_total{status="499"}') == 1)
    assert running.metric('rank_requests_total{status="400"}') == 0
    assert_serves(running)


def test_a_body_that_takes_too_long(start):
    """The connection is closed, so the client cannot hold up a server that stops either."""
    running = start(limits=replace(LIMITS, body_seconds=0.2))
    with socket.create_connection(running.address, timeout=PATIENCE) as connection:
        connection.sendall(
            b"POST /rank HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length:"
            b" 99\r\n\r\n{"
        )
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 408 and json.loads(answer.read()) == {
            "error": "the body must be complete within 0.2 s"
        }
        assert connection.recv(1) == b""
    assert running.metric('rank_requests_total{status="408"}') == 1


def test_a_request_may_take_longer_than_its_body():
    """The body comes at once, so its time cannot pass before, however slow the machine is."""
    sent = []

    async def app(scope, receive, send):
        assert (await receive())["type"] == "http.request"
        await asyncio.sleep(0.05)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message):
        sent.append(message["status"])

    admission = Admission(app, replace(LIMITS, body_seconds=0.001), None)
    asyncio.run(admission({"type": "http", "path": "/rank", "headers": []}, receive, send))
    assert sent == [200]


def no_memory_of_a_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    "fail",
    [no_memory_of_a_gpu, lambda: torch.empty(2**55), lambda: np.empty(2**55)],
    ids=["GPU", "CPU", "NumPy"],
)
def test_out_of_memory_is_split(start, fail):
    running = start()
    score = running.service.ranker.score

    def limited(requests):
        if sum(len(x.candidates) for x in requests) > 4:
            fail()
        return score(requests)

    body = {
        "user": 3,
        "candidates": [0, 1, 2, 3, 4, 6, 8, 9, 10, 11],
        "events": [{"item": 1, "rating": 4}] * 2,
    }
    length = running.service.ranker.histories.length(3)
    running.service.ranker.score = limited
    scores = assert_serves(running, body)
    assert (
        running.metric("rank_splits_total") == 3
        and running.service.ranker.histories.length(3) == length + 2
    )
    running.service.ranker.score = score
    assert assert_serves(running, {**body, "events": []}) == pytest.approx(
        scores, rel=1.3e-6, abs=1e-5
    )


def test_a_request_in_halves_that_fails_stores_nothing(start):
    """The first half has scores, but that of item 40 is NaN."""
    running = start()
    ranker = running.service.ranker
    score, length = ranker.score, ranker.histories.length(3)
    with torch.no_grad():
        ranker.model.sequences.embeddings["item"].weight[rows_of(running, 40)] = float("nan")

    def limited(requests):
        if sum(len(x.candidates) for x in requests) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(requests)

    ranker.score = limited
    answer = running.rank(
        {"user": 3, "candidates": [4, 6, 40, 8], "events": [{"item": 1, "rating": 4}]}
    )
    assert (
        answer.status_code == 500 and answer.json()["error"] == "the model's scores are not finite"
    )
    assert running.metric("rank_splits_total") == 1 and ranker.histories.length(3) == length
    assert running.metric("rank_candidates_total") == 0
    ranker.score = score
    assert_serves(running)


@pytest.mark.parametrize(
    ("fail", "error"),
    [
        (no_memory_of_a_gpu, "CUDA out of memory"),
        (lambda: torch.empty(2**55), "the CPU is out of memory"),
    ],
)
def test_out_of_memory_without_end(start, fail, error):
    running = start()
    score = running.service.ranker.score
    running.service.ranker.score = lambda requests: fail()
    answer = running.rank(GOOD)
    assert answer.status_code == 503 and answer.json() == {"error": error}
    running.service.ranker.score = score
    assert_serves(running)


def test_a_worker_that_is_killed(start):
    running = start()
    score = running.service.ranker.score

    def killed(requests):
        running.service.ranker.score = score
        raise SystemExit

    running.service.ranker.score = killed
    answer = running.rank(GOOD)
    assert (
        answer.status_code == 503
        and answer.json()["error"] == "the scoring thread ended: SystemExit"
    )
    assert_serves(running)
    assert (
        running.metric("rank_restarts_total") == 1
        and running.client.get("/health").status_code == 200
    )


def test_scores_that_are_not_finite_fail_alone(start):
    """The embedding of item 40 is NaN: the request with it fails and stores nothing, another of the
    same batch does not fail."""
    running = start()
    hold = Hold(running.service)
    with torch.no_grad():
        running.service.ranker.model.sequences.embeddings["item"].weight[rows_of(running, 40)] = (
            float("nan")
        )
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(running.rank, {**GOOD, "user": 9})
        assert hold.entered.wait(PATIENCE)
        seen = {
            user
            for user in range(25)
            if rows_of(running, 40)[0]
            in running.service.ranker.histories.window(user, _none(), 200).item
        }
        bad_user, good_user = [user for user in range(9) if user not in seen][:2]
        events, lengths = (
            [{"item": 6, "rating": 4}],
            [running.service.ranker.histories.length(user) for user in (bad_user, good_user)],
        )
        bodies = (
            {"user": u, "candidates": c, "events": events}
            for u, c in ((bad_user, [4, 40]), (good_user, [4, 6]))
        )
        bad, good = (threads.submit(running.rank, body) for body in bodies)
        wait_until(lambda: len(running.service.batcher) == 2)
        hold.released.set()
        assert (
            bad.result().status_code == 500
            and bad.result().json()["error"] == "the model's scores are not finite"
        )
        assert good.result().status_code == first.result().status_code == 200
    assert [running.service.ranker.histories.length(user) for user in (bad_user, good_user)] == [
        lengths[0],
        lengths[1] + 1,
    ]
    assert_serves(running, {"user": bad_user, "candidates": [4, 6]})


def _none():
    from serving_rankers import NONE

    return NONE


def test_an_error_of_the_model(start):
    running = start()
    score = running.service.ranker.score
    running.service.ranker.score = lambda requests: 1 / 0
    answer = running.rank(GOOD)
    assert answer.status_code == 500 and answer.json()["error"] == "ZeroDivisionError in the model"
    running.service.ranker.score = score
    assert_serves(running)


def test_new_weights_between_batches(start, served):
    """Under load, every answer has the scores of the version that it names."""

    def read_weights():
        weights = load_weights(served["attention"])
        weights.tensors["head.over.3.bias"] += 1
        return weights

    running = start(read_weights=read_weights)
    before = assert_serves(running)
    with ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(running.rank, GOOD) for _ in range(6)]
        answers[0].result()  # a slow thread may come after the reload
        for _ in range(2):  # the second reads what is in place
            assert running.admin.post("/reload").json() == {"weights_version": 2}
        answers += [threads.submit(running.rank, GOOD) for _ in range(6)]
        found = [x.result().json() for x in answers]
    assert {x["weights_version"] for x in found} == {1, 2}
    for answer in found:
        scores = [x + answer["weights_version"] - 1 for x in before]
        assert answer["scores"] == pytest.approx(scores, rel=1.3e-6, abs=1e-5)
    assert running.service.ranker.counts["encoded"] == 2, "the cached history was of other weights"


def changed(weights, by):
    return replace(
        weights,
        tensors={
            name: x + by if x.is_floating_point() else x for name, x in weights.tensors.items()
        },
    )


@pytest.mark.parametrize("name", ["attention", "hstu"])
def test_a_reload_of_the_same_weights_changes_nothing(start, served, name):
    """The version stays, and so do the cached histories."""
    running = start(name, read_weights=lambda: load_weights(served[name]))
    before = assert_serves(running)
    assert running.admin.post("/reload").json() == {"weights_version": 1}
    assert assert_serves(running) == before and running.service.ranker.counts["encoded"] == 1
    assert running.metric("rank_weights_version") == 1


def test_requests_are_answered_while_weights_are_read(start, served):
    reading, answered = threading.Event(), threading.Event()

    def read_weights():
        reading.set()
        assert answered.wait(PATIENCE)
        return changed(load_weights(served["attention"]), 0.01)

    running = start(read_weights=read_weights)
    with ThreadPoolExecutor(1) as threads:
        reload = threads.submit(running.admin.post, "/reload")
        assert reading.wait(PATIENCE)
        assert_serves(running)
        answered.set()
        assert reload.result().json() == {"weights_version": 2}


def test_weights_that_were_read_first_are_not_put_in_place_last(start, served):
    """Of two reloads at a time. The first one reads slowly."""
    weights, reads, second = load_weights(served["attention"]), [], threading.Event()

    def read_weights():
        reads.append(len(reads))
        if reads[-1] == 0:
            second.wait(1)  # in vain: the second reload reads after this one
            return changed(weights, 0.02)
        second.set()
        return changed(weights, 0.01)

    running = start(read_weights=read_weights)
    with ThreadPoolExecutor(2) as threads:
        reloads = [threads.submit(running.admin.post, "/reload")]
        wait_until(lambda: reads)
        reloads.append(threads.submit(running.admin.post, "/reload"))
        assert [x.result().json() for x in reloads] == [
            {"weights_version": 2},
            {"weights_version": 3},
        ]
    placed = running.service.ranker.model.state_dict()
    assert all(torch.equal(x, placed[name]) for name, x in read_weights().tensors.items())


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("other", "x is not a file of weights"),
        ("hstu", "the weights are of another model: model is 'hstu', not"),
        ("NaN", "NaN in head."),
        ("ids", "the weights are of a log with other ids: fingerprint "),
        ("no ids", "x is not a file of weights: it has no ids"),
    ],
)
def test_weights_that_cannot_be_loaded(start, served, tmp_path, content, error):
    """A file of something else, the weights of another model, and of a training that diverged."""
    path = served["hstu"] if content == "hstu" else tmp_path / "x"
    if content == "other":
        path.write_bytes(b"no weights")
    if content == "NaN":
        weights = load_weights(served["attention"])
        tensors = {
            name: x * math.nan if name.startswith("head.over") else x
            for name, x in weights.tensors.items()
        }
        torch.save(
            {
                "settings": weights.settings,
                "vocabulary": weights.vocabulary.text,
                "tensors": tensors,
            },
            path,
        )
    if content.endswith("ids"):
        weights = load_weights(served["attention"])
        names = weights.vocabulary.names
        vocabulary = Vocabulary({**names, "user": [*names["user"][1:], 25]})
        stored = {"settings": weights.settings, "tensors": weights.tensors}
        torch.save(
            stored if content == "no ids" else {**stored, "vocabulary": vocabulary.text}, path
        )
    running = start(read_weights=lambda: load_weights(path))
    before = assert_serves(running)
    answer = running.admin.post("/reload")
    assert answer.status_code == 409 and error in answer.json()["error"]
    assert (
        assert_serves(running) == before
        and running.client.get("/health").json()["weights_version"] == 1
    )
    running.service.read_weights = None
    assert running.admin.post("/reload").status_code == 409


def test_a_shutdown_answers_all_requests(start):
    running = start()
    hold = Hold(running.service)
    with ThreadPoolExecutor(9) as threads:
        first = threads.submit(running.rank, GOOD)
        assert hold.entered.wait(PATIENCE)
        waiting = [threads.submit(running.rank, {**GOOD, "user": user}) for user in range(4, 12)]
        wait_until(lambda: len(running.service.batcher) == 8)
        running.server.should_exit = True
        wait_until(lambda: refuses(running))
        hold.released.set()
        assert [x.result().status_code for x in [first, *waiting]] == [200] * 9
    running.thread.join(PATIENCE)
    assert not running.thread.is_alive() and not running.service.batcher.is_alive()
    with pytest.raises(httpx.ConnectError):
        running.rank(GOOD)


def test_a_server_that_stops_reads_what_clients_have_sent(served):
    """On connections that were open, whether a request was sent on them before or not. It asks for
    no further one."""
    sent = threading.Event()

    class Server(serve_ranking.Server):
        async def drain(self):
            """Until all is sent, in place of a time."""
            while not sent.is_set():
                await asyncio.sleep(0.01)

    running = Running(Service(ranker_of(served["attention"]), LIMITS), Server)
    *connections, checker = [http.client.HTTPConnection(*running.address) for _ in range(3)]
    for connection in (*connections, checker):
        connection.connect()

    def rank(connection) -> http.client.HTTPResponse:
        connection.request("POST", "/rank", json.dumps(GOOD), {"content-type": "application/json"})
        return connection.getresponse()

    assert rank(connections[1]).read() and connections[1].sock is not None
    running.server.should_exit = True
    wait_until(lambda: refuses(running))
    checker.request("GET", "/health")
    answer = checker.getresponse()
    assert answer.status == 503 and json.loads(answer.read())["status"] == "stopping"
    for connection in connections:
        answer = rank(connection)
        assert (
            answer.status == 200
            and answer.getheader("connection") == "close"
            and len(json.loads(answer.read())["scores"]) == 3
        )
    sent.set()
    running.stop()
    assert not running.thread.is_alive() and not running.service.batcher.is_alive()


def test_a_service_trims_the_heap(start, monkeypatch):
    """Not at each batch: it takes as long as a small one."""
    trims = []
    monkeypatch.setattr(serving_app, "trim_heap", lambda: trims.append(time.monotonic()))
    monkeypatch.setattr(serving_app, "TRIM_SECONDS", 0.3)
    running, end = start(), time.monotonic() + PATIENCE
    while len(trims) < 3:
        assert_serves(running)
        assert time.monotonic() < end
    assert all(later - earlier >= 0.3 for earlier, later in itertools.pairwise(trims))


def test_collections_skip_the_objects_of_the_start():
    """They would visit a quarter of a million objects. Garbage that comes later is collected."""
    gc.unfreeze()  # what tests/conftest.py excludes
    tune_process()
    assert len(gc.get_objects()) < gc.get_freeze_count() / 10
    garbage = []
    garbage.append(garbage)
    del garbage
    assert gc.collect() > 0


FREED = """
import ctypes, os, pathlib, torch

def resident_mb():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

torch.ones(2**22)  # its end raises the size from which tensors are mappings of their own
before = resident_mb()
pairs = [(torch.ones(2**16), torch.ones(2**10)) for _ in range(400)]
print(resident_mb() - before)
kept = [small for _, small in pairs]
del pairs
trim_heap()
print(resident_mb() - before)
"""  # noqa: E501


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the function is glibc's")
def test_freed_tensors_return_to_the_system():
    """Even if small ones, which stay, lie between them. In a process of its own: the heap of this
    one has room for all of them. The function alone, as imports of the program take seconds."""
    program = inspect.getsource(serving_app.trim_heap) + FREED
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    used, left = map(float, run.stdout.split())
    assert used > 90 and left < 20
