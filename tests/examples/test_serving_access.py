"""Names of requests, and the access log, over real sockets."""

import json
import logging
import re
import time

import pytest

for _name in ("fastapi", "uvicorn", "httpx", "prometheus_client"):
    pytest.importorskip(_name, reason='needs the extra "serve"')

import serving_access
from serving_app import Service

from ..marks import PATIENCE
from .running import LIMITS, Running
from .serving import ranker_of

GOOD = {"user": 3, "candidates": [4, 6, 8]}
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
LATER = "cc" + TRACE[2:] + "-fields"  # of a later version


@pytest.fixture(scope="module")
def running(served):
    running = Running(Service(ranker_of(served["attention"]), LIMITS))
    yield running
    running.stop()


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """The lines of the access log, parsed, once there are so many. They follow the answers."""
    logger, path = logging.Logger("serving.access"), tmp_path / "access.jsonl"
    monkeypatch.setattr(serving_access, "ACCESS", logger)
    serving_access.log_access(str(path))

    def read(count: int = 1) -> list[dict]:
        end = time.monotonic() + PATIENCE
        while len(found := path.read_text().splitlines()) < count:
            assert time.monotonic() < end
            time.sleep(0.005)
        assert len(found) == count
        return [json.loads(line) for line in found]

    yield read
    logger.handlers[0].close()


@pytest.mark.parametrize("body, status", [(GOOD, 200), ({**GOOD, "user": 99}, 404), ("{", 400)])
@pytest.mark.parametrize("trace", [TRACE, LATER], ids=["version 0", "a later version"])
def test_names_of_a_request_are_kept_returned_and_logged(
    running, lines, caplog, body, status, trace
):
    content = body if isinstance(body, str) else json.dumps(body)
    names = {"x-request-id": "of:ann/7", "traceparent": trace}
    headers = {"content-type": "application/json", **names}
    answer = running.client.post("/rank", content=content, headers=headers)
    assert answer.status_code == status
    assert {name: answer.headers.get_list(name) for name in names} == {
        name: [value] for name, value in names.items()
    }
    (line,) = lines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line.pop("time"))
    assert line.pop("ms") >= 0
    assert line == {
        "request_id": "of:ann/7",
        "trace_id": TRACE[3:35],
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/rank",
        "status": status,
    }
    refused = [x.request_id for x in caplog.records if x.name == "serving"]
    assert refused == ["of:ann/7"] * (status != 200)


@pytest.mark.parametrize(
    "trace",
    [
        "",
        "no trace",
        TRACE.upper(),
        "ff" + TRACE[2:],
        "ff" + LATER[2:],
        TRACE.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        TRACE.replace("00f067aa0ba902b7", "0" * 16),
        TRACE + "-fields",
        LATER + " x",
    ],
)
@pytest.mark.parametrize("request_id", ["", "two words", "x" * 129])
def test_a_request_without_good_names_gets_new_ones(running, lines, trace, request_id):
    headers = {"x-request-id": request_id, "traceparent": trace}
    answers = [running.client.get("/health", headers=headers).headers for _ in range(2)]
    assert all(re.fullmatch("[0-9a-f]{32}", x["x-request-id"]) for x in answers)
    assert all(re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", x["traceparent"]) for x in answers)
    for name in headers:
        assert answers[0][name] != answers[1][name]
    logged = [(x["request_id"], x["trace_id"]) for x in lines(2)]
    assert logged == [(x["x-request-id"], x["traceparent"][3:35]) for x in answers]


def test_a_long_path_is_cut_and_stays_on_a_line(running, lines):
    running.client.get("/" + "%0a" * 600)
    (line,) = lines()
    assert line["path"] == "/" + "\n" * 499 and line["status"] == 404


def test_an_error_that_nothing_answers(running, lines, caplog, monkeypatch):
    """A 500 as JSON with the request's id, which the log has too."""
    monkeypatch.setattr(running.service, "is_ready", lambda: 1 / 0)
    answer = running.client.get("/health", headers={"x-request-id": "broken"})
    assert answer.status_code == 500 and answer.json() == {"error": "internal error"}
    assert answer.headers["x-request-id"] == "broken" == lines()[0]["request_id"]
    (record,) = (x for x in caplog.records if x.name == "serving")
    assert record.request_id == "broken" and record.exc_info[0] is ZeroDivisionError


def test_a_span_of_opentelemetry_names_the_trace(running, lines, monkeypatch):
    """In place of the header. Middleware of `opentelemetry-instrument` is outside of the app's."""
    trace = pytest.importorskip("opentelemetry.trace", reason="optional")
    span = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0xDEF, False, trace.TraceFlags(1)))
    call = serving_access.Access.__call__

    async def in_span(self, scope, receive, send):
        with trace.use_span(span):
            await call(self, scope, receive, send)

    monkeypatch.setattr(serving_access.Access, "__call__", in_span)
    answer = running.client.get("/health", headers={"traceparent": TRACE})
    assert answer.headers["traceparent"] == f"00-{0xABC:032x}-{0xDEF:016x}-01"
    assert lines()[0]["trace_id"] == f"{0xABC:032x}"
