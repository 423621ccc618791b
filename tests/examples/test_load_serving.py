"""The load generator: arrivals, users, statistics of a run, the knee, and the program."""

import asyncio
import gc
import json
import shutil
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from marks import PATIENCE, slow_after

for _name in ("fastapi", "uvicorn", "httpx", "aiohttp", "prometheus_client"):
    pytest.importorskip(_name, reason='needs the extra "serve"')

import load_generator
import load_serving
from load_generator import InProcess, OverHTTP, Workload, drive
from load_serving import Result, format_knees, knee, load_results, save_results
from serving_app import Service, ServiceLimits
from serving_batcher import Limits, Overloaded, Waiting

from .serving import ranker_of

LIMIT = 80.0
RESULT = Result(
    "Ranker",
    "cache",
    10,
    1.0,
    5.0,
    5,
    0,
    0,
    0,
    1.0,
    2.0,
    3.0,
    10.0,
    0.5,
    1.0,
    1.0,
    0.0,
    1.0,
    {"queue": 1.0},
)


@pytest.fixture(scope="module")
def ranker(served):
    return ranker_of(served["attention"])


def test_arrivals_are_a_poisson_process(ranker):
    """Gaps have the mean and the standard deviation of an exponential law, within 5 standard
    errors, and do not depend on one another."""
    times = Workload(ranker, 1, 0.0, 1.0).arrivals(1000, 20)
    gaps = np.diff(times)
    assert abs(len(times) - 20_000) < 5 * 20_000**0.5
    assert (
        abs(gaps.mean() * 1000 - 1) < 5 / len(gaps) ** 0.5
        and abs(gaps.std() * 1000 - 1) < 5 * (2 / len(gaps)) ** 0.5
    )
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 5 / len(gaps) ** 0.5
    assert times[-1] < 20


def test_users_follow_a_zipf_law(ranker):
    workload = Workload(ranker, 3, 0.25, 1.0)
    requests = workload.requests(8000)
    counts = np.sort(np.bincount([x.user for x in requests], minlength=25))[::-1]
    expected = 8000 / np.arange(1, 26) / (1 / np.arange(1, 26)).sum()
    assert (np.abs(counts - expected) < 5 * expected**0.5 + 5).all()
    assert abs(sum(len(x.events.item) for x in requests) - 2000) < 5 * 1500**0.5
    assert all(len(x.candidates) == 3 for x in requests)
    again = Workload(ranker, 3, 0.25, 1.0).requests(8000)
    assert all(
        x.user == y.user and (x.candidates == y.candidates).all() for x, y in zip(requests, again)
    )


def test_latency_counts_from_the_planned_arrival():
    """A sender that blocks the loop delays the next requests: their latency has the delay."""

    async def send(request):
        time.sleep(0.1)
        return 200

    statuses, seconds = asyncio.run(drive(send, [None] * 3, np.array([0.0, 0.01, 0.02])))
    assert statuses == [200] * 3 and seconds[0] >= 0.1 and seconds[2] >= 0.27


def test_the_queue_is_driven_at_the_planned_times(ranker, monkeypatch):
    """All requests are answered, those that are refused with 429; a batch of .05 s delays the
    answers of the next one.

    The first batch lasts until two requests were refused, and the last request comes when no other
    waits, however slow the machine is.
    """
    service = Service(
        ranker, ServiceLimits(Limits(max_queue=2, max_users=1, max_wait=0.0), deadline=PATIENCE)
    )
    requests, times, refused = Workload(ranker, 3, 0.0, 1.0).requests(6), [], threading.Semaphore(0)
    first_begins, third_begins = threading.Event(), threading.Event()
    submit = service.batcher.submit

    def watched(request, deadline):
        if request is not requests[0]:
            assert (third_begins if request is requests[5] else first_begins).wait(PATIENCE)
        try:
            return submit(request, deadline)
        except Overloaded:
            refused.release()
            raise

    def score(batch):
        times.append(time.perf_counter())
        if len(times) == 1:
            first_begins.set()
            assert refused.acquire(timeout=PATIENCE) and refused.acquire(timeout=PATIENCE)
        elif len(times) == 3:
            third_begins.set()
        time.sleep(0.05)
        return [x.candidates for x in batch]

    monkeypatch.setattr(service.batcher, "submit", watched)
    service.score = score
    begin = time.perf_counter()
    statuses, seconds = InProcess(service).drive(
        requests, np.array([0.0, 0.01, 0.02, 0.03, 0.04, 0.3])
    )
    service.batcher.close()
    assert statuses == [200, 200, 200, 429, 429, 200] and len(times) == 4
    assert seconds[1] >= 0.09 and seconds[2] >= 0.13
    assert times[3] - begin >= 0.3


def test_only_requests_that_wait_are_kept():
    """Each is answered at once: none lives when the next comes, without a garbage collection."""
    alive, found = [], []

    class Batcher:
        def submit(self, request, deadline):
            found.append(sum(x() is not None for x in alive))
            waiting = Waiting(request, deadline)
            waiting.future.set_result(1)
            alive.append(weakref.ref(waiting))
            return waiting

    service = SimpleNamespace(batcher=Batcher(), limits=SimpleNamespace(deadline=PATIENCE))
    gc.disable()
    try:
        statuses, _ = InProcess(service).drive([None] * 9, np.zeros(9))
    finally:
        gc.enable()
    assert statuses == [200] * 9 and max(found) <= 1


def test_refused_requests_are_not_kept():
    """By their errors, whose tracebacks lead to all requests, without a garbage collection."""
    errors = []

    class Refused(Overloaded):
        def __init__(self):
            errors.append(weakref.ref(self))

    class Batcher:
        def submit(self, request, deadline):
            raise Refused

    service = SimpleNamespace(batcher=Batcher(), limits=SimpleNamespace(deadline=PATIENCE))
    gc.disable()
    try:
        statuses, _ = InProcess(service).drive([None] * 9, np.zeros(9))
        assert statuses == [429] * 9 and not any(x() for x in errors)
    finally:
        gc.enable()


def test_the_knee():
    """The last good rate before the first bad one."""
    rows = [
        replace(RESULT, rate=rate, p99_ms=p99) for rate, p99 in ((1, 5), (2, 80), (3, 81), (4, 10))
    ]
    assert knee(rows[::-1], LIMIT).rate == 2
    assert knee(rows[2:], LIMIT) is None
    for count in ("refused", "late", "failed"):
        assert knee([rows[0], replace(rows[1], **{count: 1})], LIMIT).rate == 1
    table = format_knees([*rows, replace(rows[0], way="no cache")], LIMIT).splitlines()
    assert (
        table[0]
        == "| candidates | requests/s at p99 ≤ 80 ms, cache | p50 ms | p99 ms | candidates/s | no"
        " cache | p99 ms |"
    )
    assert table[2] == "| 10 | 2 | 1.0 | 80.0 | 10 | 1 | 5.0 |"
    assert format_knees(rows[2:], LIMIT).splitlines()[2] == "| 10 | - | - | - | - |"


def test_results_are_read_as_they_were_written(tmp_path):
    results = [RESULT, replace(RESULT, way="no cache", p99_ms=1234.567)]
    save_results(tmp_path / "results.json", {"limit_ms": 80}, results)
    settings, found = load_results(tmp_path / "results.json")
    assert settings == {"limit_ms": 80} and found == [RESULT, replace(results[1], p99_ms=1234.6)]


@slow_after(1, "way", [[], ["--processes", "2"], ["--http"]], ids=["queue", "processes", "http"])
def test_a_short_run(served, tmp_path, capsys, way):
    """The queue has room for all requests, and no deadline passes, so that all are answered by the
    slowest machine."""
    arguments = [
        "--weights",
        str(served["attention"]),
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
        "--candidates",
        "7",
    ]
    arguments += ["--deadline-ms", str(1e3 * PATIENCE)]
    load_serving.main(
        [
            *arguments,
            "--rates",
            "30",
            "60",
            "--seconds",
            "0.5",
            "--warm-up",
            "0.1",
            "--new-events",
            "0.3",
            *way,
        ]
    )
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    ways = ["cache", "no cache"]
    assert [(x["way"], x["candidates"], x["rate"]) for x in results] == [
        (way, 7, rate) for way in ways for rate in (30, 60)
    ]
    answered = [x["answered"] for x in results]
    assert answered[:2] == answered[2:]
    for x in results:
        assert x["answered"] > 0.15 * x["rate"] and x["refused"] == x["late"] == x["failed"] == 0
        assert 0 < x["p50_ms"] <= x["p95_ms"] <= x["p99_ms"]
        assert x["candidates_per_second"] == x["answered"] * x["candidates"] / 0.5
        assert (0 < x["hit_rate"] < 1) == (x["way"] == "cache") == (
            x["stage_ms"]["cache"] > 0
        ) and x["memory_mb"] > 10
        assert all(x["stage_ms"][name] > 0 for name in ("queue", "lookup", "score"))
    output = capsys.readouterr().out
    assert output.count("\n| 7 | cache |") == 2 and "requests/s at p99" in output
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")
    load_serving.main(
        ["--from-json", str(tmp_path / "results.json"), "--picture", str(tmp_path / "again.png")]
    )
    assert (
        capsys.readouterr().out.splitlines()[1:4]
        == output[output.index("| candidates | requests/s") :].splitlines()[:3]
    )
    assert (tmp_path / "again.png").read_bytes().startswith(b"\x89PNG")


def test_a_server_that_does_not_start(ranker, monkeypatch):
    """Its program ends at once here; its imports take seconds before."""
    monkeypatch.setattr(load_generator.sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="did not start with the options --weights=nowhere"):
        OverHTTP(ranker, "--weights=nowhere")


def test_times_of_batches(served, capsys):
    options = "--device cpu --candidates 3 7 --batches 2 --batch-users 1 4 --new-events 0.5".split()
    ways = "--cache-mb 3 0 --page-rows 128 16".split()
    padded = ["--padded", str(served["padded"])]
    load_serving.main(["--weights", str(served["attention"]), *options, *ways, *padded])
    header, _, *rows = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("|")
    ]
    assert (
        header == "| users | with a new event | candidates | cache, pages of 128, ms |"
        " cache, pages of 16, ms | no cache, ms | padded, ms | padded, fused, ms |"
    )
    cells = [[float(cell) for cell in row.strip("| ").split(" | ")] for row in rows]
    forms = [(1, 0), (1, 1), (4, 0), (4, 2), (4, 4)]
    assert [tuple(row[:3]) for row in cells] == [(*x, c) for x in forms for c in (3, 7)]
    assert all(x > 0 for row in cells for x in row[3:])


class Noting:
    """Notes its batches: the user, candidates, and how many users have events."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def score(self, batch):
        events = sum(len(x.events.item) for x in batch)
        self.calls.append((self.name, [x.user for x in batch], len(batch[0].candidates), events))

    def forget(self):
        self.calls.append((self.name, "forgets"))


def test_forms_of_batches_are_timed_in_turn(ranker):
    """Each round has all forms, each of which all rankers score in turn, just after its users were
    scored without events. All rounds are run once before."""
    calls, workload = [], Workload(ranker, 0, 0, 1.0)
    forms = [load_serving.Form(2, 0, 5), load_serving.Form(3, 2, 6)]
    rankers = [Noting("a", calls), Noting("b", calls)]
    found = load_serving.time_batches(rankers, forms, workload, 3)
    assert [*found] == forms and all(len(times) == 2 for times in found.values())
    assert len(calls) == 2 * 3 * (2 * 4 + 2) and calls[:30] == calls[30:]
    for first in range(0, 60, 10):
        batches = calls[first : first + 10]
        assert [x[0] for x in batches] == [*"aabbaabbab"]
        assert [x[2:] for x in batches[:8]] == [(5, 0)] * 4 + [(6, 0), (6, 2)] * 2
        assert [len(set(x[1])) for x in batches[:8]] == [2] * 4 + [3] * 4
        assert all(batches[i][1] == batches[i - i % 4][1] for i in range(8))
        assert all(ranker.histories.length(user) for x in batches[:8] for user in x[1])
        assert [x[1] for x in batches[8:]] == ["forgets"] * 2


def test_a_soak(served, tmp_path, capsys):
    arguments = [
        "--weights",
        str(served["attention"]),
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
        "--candidates",
        "3",
    ]
    load_serving.main(
        [
            *arguments,
            "--cache-mb",
            "1",
            "--soak",
            "3",
            "--seconds",
            "1",
            "--warm-up",
            "0.1",
            "--soak-fraction",
            "0.1",
        ]
    )
    assert "\nmemory: " in capsys.readouterr().out
    assert len(json.loads((tmp_path / "results.json").read_text())["results"]) == 3
