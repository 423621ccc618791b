"""The ranker of benchmark_dlrm_v3.py: cached histories give the same logits; the program."""

import json

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
    expected = model(batch)
    assert expected.shape == batch.labels.shape == (12,)
    is_event = torch.ones(len(batch.ids), dtype=torch.bool).index_fill(0, batch.targets, False)
    history = batch._replace(ids=batch.ids[is_event], actions=batch.actions[is_event])
    rows = jm.Jagged(model.rows(history), torch.tensor([0, 4, 5, 11]))
    cache = model.hstu.cache(rows)
    torch.testing.assert_close(model.score_cached(model.hstu, cache, batch), expected)
    assert not batch.actions[batch.targets].any() and batch.actions[is_event].all()
    expected.sum().backward()
    assert set(model.ids.weight.grad.coalesce().indices()[0].tolist()) == set(batch.ids.tolist())


def test_the_program(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COMMIT", "0123abc")
    out = tmp_path / "results.json"
    bench.main(["--device", "cpu", "--batches", "1", "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["commit"] == "0123abc" and report["date"][:2] == "20" and report["device"]
    assert set(report["inference_ms"]) == {"eager", "cached"}
    assert report["training"]["samples_per_second"] > 0
    assert "requests, cached" in capsys.readouterr().out
