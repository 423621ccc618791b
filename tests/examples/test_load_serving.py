"""The load generator: arrivals, users, statistics of a run, the knee, and the program."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from marks import slow_after

for _name in ("fastapi", "uvicorn", "httpx", "prometheus_client"):
    pytest.importorskip(_name, reason='needs the extra "serve"')

import load_serving  # noqa: E402
from load_serving import Result, Workload, drive, format_knees, knee  # noqa: E402

from .serving import ranker_of  # noqa: E402

LIMIT = 80.0
RESULT = Result("Ranker", True, 10, 1.0, 5.0, 5, 0, 0, 0, 1.0, 2.0, 3.0, 10.0, 0.5, 1.0, 1.0, 1.0, {})


@pytest.fixture(scope="module")
def ranker(served):
    return ranker_of(served["attention"])


def test_arrivals_are_a_poisson_process(ranker):
    """Gaps have the mean and the standard deviation of an exponential law, within 5 standard errors, and do not depend on one another."""
    times = Workload(ranker, 1, 0.0, 1.0).arrivals(1000, 20)
    gaps = np.diff(times)
    assert abs(len(times) - 20_000) < 5 * 20_000**0.5
    assert abs(gaps.mean() * 1000 - 1) < 5 / len(gaps) ** 0.5 and abs(gaps.std() * 1000 - 1) < 5 * (2 / len(gaps)) ** 0.5
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
    assert all(x.user == y.user and (x.candidates == y.candidates).all() for x, y in zip(requests, again))


def test_latency_counts_from_the_planned_arrival():
    """A sender that blocks the loop delays the next requests: their latency has the delay."""
    import time

    async def send(request):
        time.sleep(0.1)
        return 200

    statuses, seconds = asyncio.run(drive(send, [None] * 3, np.array([0.0, 0.01, 0.02])))
    assert statuses == [200] * 3 and seconds[0] >= 0.1 and seconds[2] >= 0.27


def test_the_knee():
    """The last good rate before the first bad one."""
    rows = [replace(RESULT, rate=rate, p99_ms=p99) for rate, p99 in ((1, 5), (2, 80), (3, 81), (4, 10))]
    assert knee(rows[::-1], LIMIT).rate == 2
    assert knee(rows[2:], LIMIT) is None
    for count in ("refused", "late", "failed"):
        assert knee([rows[0], replace(rows[1], **{count: 1})], LIMIT).rate == 1
    table = format_knees([*rows, replace(rows[0], cache=False)], LIMIT)
    assert table.splitlines()[2] == "| 10 | 2 | 1.0 | 80.0 | 10 | 1 | 5.0 |"
    assert format_knees(rows[2:], LIMIT).splitlines()[2] == "| 10 | - | - | - | - | - | - |"


@slow_after(1, "way", [[], ["--http"]], ids=["queue", "http"])
def test_a_short_run(served, tmp_path, capsys, way):
    arguments = ["--weights", str(served["attention"]), "--out", str(tmp_path), "--device", "cpu", "--candidates", "7"]
    load_serving.main([*arguments, "--rates", "30", "60", "--seconds", "1", "--warm-up", "0.1", "--new-events", "0.3", *way])
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [(x["cache"], x["candidates"], x["rate"]) for x in results] == [(cache, 7, rate) for cache in (True, False) for rate in (30, 60)]
    for x in results:
        assert x["answered"] > 0.3 * x["rate"] and x["refused"] == x["late"] == x["failed"] == 0
        assert 0 < x["p50_ms"] <= x["p95_ms"] <= x["p99_ms"]
        assert x["candidates_per_second"] == x["answered"] * x["candidates"]
        assert (0 < x["hit_rate"] < 1) == x["cache"] == (x["stage_ms"]["cache"] > 0) and x["memory_mb"] > 10
        assert all(x["stage_ms"][name] > 0 for name in ("queue", "lookup", "score"))
    output = capsys.readouterr().out
    assert output.count("\n| 7 | yes |") == 2 and "requests/s at p99" in output
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


def test_times_of_batches(served, capsys):
    arguments = ["--weights", str(served["attention"]), "--device", "cpu", "--candidates", "3", "7", "--batches", "2", "--max-users", "4"]
    load_serving.main([*arguments, "--cache-mb", "1", "0"])
    header, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert header == "| candidates | cache of 1 MB, ms | cache of 0 MB, ms |"
    cells = [[float(cell) for cell in row.strip("| ").split(" | ")] for row in rows]
    assert [row[0] for row in cells] == [3, 7] and all(x > 0 for row in cells for x in row)


def test_a_soak(served, tmp_path, capsys):
    arguments = ["--weights", str(served["attention"]), "--out", str(tmp_path), "--device", "cpu", "--candidates", "3"]
    load_serving.main([*arguments, "--cache-mb", "1", "--soak", "3", "--seconds", "1", "--warm-up", "0.1", "--soak-fraction", "0.1"])
    assert "\nmemory: " in capsys.readouterr().out
    assert len(json.loads((tmp_path / "results.json").read_text())["results"]) == 3
