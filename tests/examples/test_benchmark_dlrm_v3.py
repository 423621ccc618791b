"""The ranker of benchmark_dlrm_v3.py: cached histories and joined batches give the same logits; the
program."""

import json
from types import SimpleNamespace

import pytest
import torch

import jagged_modules as jm

pytest.importorskip("torchrec")  # which training.py imports

import benchmark_dlrm_v3 as bench


def test_cached_histories_and_the_gradient_of_tables():
    torch.manual_seed(0)
    options = bench.parse_arguments(["--device", "cpu"])
    model = bench.Ranker(options).double()
    batch = bench.random_batch(torch.tensor([3, 0, 5]), 4, options)
    expected = bench.score(model, batch)
    assert expected.shape == batch.labels.shape == (12,)
    ids, actions = batch.rows.values.unbind(1)
    is_event = torch.ones(len(ids), dtype=torch.bool).index_fill(0, batch.targets, False)
    history = jm.Jagged(batch.rows.values[is_event], torch.tensor([0, 4, 5, 11]))
    cache = model.keys_and_values(history)
    torch.testing.assert_close(bench.score_cached(model, cache, batch), expected)
    assert not actions[batch.targets].any() and actions[is_event].all()
    expected.sum().backward()
    assert set(model.ids.weight.grad.coalesce().indices()[0].tolist()) == set(ids.tolist())


def test_joined_batches():
    torch.manual_seed(0)
    options = bench.parse_arguments(["--device", "cpu"])
    model = bench.Ranker(options).double()
    batches = [
        bench.random_batch(torch.tensor(events), 4, options) for events in ([3, 0], [5], [1, 2])
    ]
    whole = bench.joined(batches, options.device)
    assert not len(whole.labels)
    expected = torch.cat([bench.score(model, x) for x in batches])
    torch.testing.assert_close(bench.score(model, whole), expected)
    assert whole.rows.offsets.tolist() == [0, 8, 13, 23, 29, 36]


def test_replayed_batches(padded):
    """The largest batch is not padded: its rows, cached rows and candidates have capacities."""
    torch.manual_seed(0)
    options = bench.parse_arguments(["--device", "cpu"])
    model = bench.Ranker(options).double().eval()
    computed: list[int] = []
    model.head.register_forward_hook(lambda head, inputs, output: computed.append(len(output)))
    graphs = bench.replayed(model, options)
    with torch.inference_mode():
        for count in (1, 4, 3, 4):
            events = torch.full((count,), options.history)
            batch = bench.random_batch(events, options.candidates, options)
            history = bench.random_batch(events, 0, options).rows
            cache = model.keys_and_values(history)
            torch.testing.assert_close(bench.score(graphs, batch), bench.score(model, batch))
            assert computed[-2:] == 2 * [len(batch.rows.values)]
            torch.testing.assert_close(
                bench.score_cached(graphs, cache, batch), bench.score_cached(model, cache, batch)
            )
            assert computed[-2:] == 2 * [len(batch.targets)]
    assert graphs.captures == 6  # of three numbers of requests


def test_a_server_answers_each_query_once():
    scored, answered = [], []

    def score(indices: list[int]) -> torch.Tensor:
        scored.append(indices)
        return torch.zeros(len(indices))

    server = bench.Server(score, 3, answered.extend)
    server.issue([SimpleNamespace(index=i, id=10 + i) for i in range(8)])
    server.close()
    assert sum(scored, []) == list(range(8)) and answered == list(range(10, 18))
    assert max(map(len, scored)) <= 3


def test_a_server_issues_a_batch_before_it_waits_for_the_last_one(monkeypatch):
    """Two at a time: results are complete in the order of the queries."""
    happened: list[str] = []

    class OnDevice:
        device = torch.device("cuda")

        def to(self, device, non_blocking):
            assert non_blocking

    class Event:
        def record(self):
            self.number = sum(x.startswith("issued") for x in happened)

        def synchronize(self):
            happened.append(f"waited {self.number}")

    def score(indices):
        happened.append(f"issued {indices[0]}")
        if indices == [0]:  # the thread sees none of the others earlier
            server.issue([SimpleNamespace(index=i, id=i) for i in (1, 2)])
            server.waiting.put(None)
        return OnDevice()

    monkeypatch.setattr(bench.torch.cuda, "Event", Event)
    server = bench.Server(score, 1, lambda ids: happened.append(f"complete {ids[0]}"))
    server.issue([SimpleNamespace(index=0, id=0)])
    server.thread.join()
    assert server.failure is None
    assert happened == [
        *("issued 0", "issued 1", "waited 1", "complete 0"),
        *("issued 2", "waited 2", "complete 1", "waited 3", "complete 2"),
    ]


@pytest.mark.gpu
def test_joined_batches_and_a_server_on_a_gpu():
    torch.manual_seed(0)
    options = bench.parse_arguments(["--device", "cpu"])
    batches = [bench.random_batch(torch.tensor([events]), 4, options) for events in (3, 0, 5)]
    whole, expected = (bench.joined(batches, torch.device(x)) for x in ("cuda", "cpu"))
    assert torch.equal(whole.rows.offsets.cpu(), expected.rows.offsets)
    assert torch.equal(whole.rows.values.cpu(), expected.rows.values)
    for x, y in zip(whole[1:], expected[1:], strict=True):
        assert torch.equal(x.cpu(), y)
    answered: list[int] = []

    def score(indices: list[int]) -> torch.Tensor:
        return bench.joined([batches[i] for i in indices], torch.device("cuda")).targets

    server = bench.Server(score, 2, answered.extend)
    server.issue([SimpleNamespace(index=i % 3, id=i) for i in range(8)])
    server.close()
    assert answered == list(range(8))


def test_queries_of_a_failed_batch_are_complete():
    answered: list[int] = []
    server = bench.Server(lambda indices: 1 / 0, 3, answered.extend)
    server.issue([SimpleNamespace(index=0, id=7)])
    with pytest.raises(ZeroDivisionError):
        server.close()
    assert answered == [7]


@pytest.mark.slow
def test_a_server_under_loadgen(tmp_path, capsys):
    pytest.importorskip("mlperf_loadgen", reason="needs the package mlcommons-loadgen")
    out = tmp_path / "results.json"
    options = ["--qps", "50", "--seconds", "1", "--samples", "5", "--limit-ms", "5000"]
    bench.main(["--device", "cpu", "--batches", "1", *options, "--out", str(out)])
    server = json.loads(out.read_text())["server"]
    for runs in (server["eager"], server["cached"]):
        assert runs[0]["result"] in ("VALID", "INVALID") and int(runs[0]["p99 ns"]) > 0
    assert "Server scenario, cached" in capsys.readouterr().out


def test_each_way_is_warmed_up_and_served(tmp_path, monkeypatch):
    """With a stand-in for LoadGen, which not every machine has."""
    answered: list[int] = []

    def serve(issue, qps, options, folder):
        issue([SimpleNamespace(index=i, id=10 * qps + i) for i in range(options.samples)])
        return {"result": "VALID"}

    monkeypatch.setattr(bench.mlperf_scenario, "serve", serve)
    monkeypatch.setattr(bench.mlperf_scenario, "complete", answered.extend)
    options = ["--device", "cpu", "--qps", "1", "2", "--samples", "3"]
    results = bench.measure_server(
        bench.parse_arguments([*options, "--out", str(tmp_path / "results.json")])
    )
    assert results == {way: [{"result": "VALID"}] * 2 for way in ("eager", "cached")}
    assert sorted(answered) == sorted(2 * [10, 11, 12, 20, 21, 22])


def test_the_program(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COMMIT", "0123abc")
    out = tmp_path / "results.json"
    bench.main(["--device", "cpu", "--batches", "1", "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["commit"] == "0123abc" and report["date"][:2] == "20" and report["device"]
    assert set(report["inference_ms"]) == {"eager", "cached"}
    assert report["training"]["samples_per_second"] > 0
    assert "requests, cached" in capsys.readouterr().out
