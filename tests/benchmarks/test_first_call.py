"""First-call latency: the table, from what processes say, and a layer's processes on a GPU."""

import json
from types import SimpleNamespace

import first_call
import pytest
import runner
import torch

KERNELS = "BlockDiagonalSelfAttention(128, 2)"


def run(tmp_path, monkeypatch, compiled_later, *arguments):
    """Exit status and JSON of a run whose processes print figures instead of measuring."""

    def process(command, env, **_):
        figures = dict(
            kernels=4,
            compiled=4,
            compile_seconds=2.5,
            first_seconds=3.5,
            later_ms=1.25,
            compiled_later=compiled_later,
        )
        return SimpleNamespace(stdout="a warning\n" + json.dumps(figures) + "\n")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(first_call.subprocess, "run", process)
    monkeypatch.setattr(runner, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(
        runner,
        "environment",
        lambda device: dict(date="2026-11-22T00:00:00", command="", device="a GPU"),
    )
    status = first_call.main(["--out", str(tmp_path), *arguments])
    return status, json.loads((tmp_path / "2026-11-22-first_call.json").read_text())


def test_a_row_for_each_layer_and_type(tmp_path, monkeypatch):
    status, results = run(tmp_path, monkeypatch, 0)
    rows = results["other_tables"]["first call"]
    assert (
        status == 0
        and results["complete"]
        and len(rows) == 2 * len(first_call.training_steps("cpu", torch.float32))
    )
    assert (
        rows[0]["kernels"] == 4
        and rows[0]["compilation s"] == 2.5
        and rows[0]["later step ms"] == 1.25
    )
    assert (
        "| JaggedTargetAttention(64, 2) | bfloat16 | 4 | 2.5 |"
        in (tmp_path / "2026-11-22-first_call.md").read_text()
    )


def test_some_layers_alone(tmp_path, monkeypatch):
    _, results = run(tmp_path, monkeypatch, 0, "--only", "HSTU.*float32")
    assert [row["dtype"] for row in results["other_tables"]["first call"]] == ["float32"]


def test_the_exit_status_says_that_a_later_step_compiled(tmp_path, monkeypatch):
    status, _ = run(tmp_path, monkeypatch, 1, "--only", "HSTU")
    assert status == 1


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        first_call.main([])
    assert "torch sees no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_processes_of_a_layer():
    row = first_call.measure_in_processes(KERNELS, "bfloat16", None)
    # three clear rows behind the last segment; the few rows of the result are cleared before
    assert row["kernels"] == 2 + 3 and row["compiled in later steps"] == 0
    first, loaded = row["first step s, empty cache"], row["first step s, warm cache"]
    assert 0 < row["compilation s"] < first and loaded < first
