"""The benchmark of fused models, end to end on the CPU with tiny sizes."""

import json
import sys

import bench_broadcast as bench
import broadcast_models
import pytest
import torch

FAST = ["--tiny", "--device", "cpu", "--pause", "0", "--warmup", "0", "--rep", "0.1"]


def run(folder, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [bench.__file__, *FAST, *arguments, "--out", str(folder)])
    assert bench.main("broadcast", bench.make_cases, summary=bench.table_of_forms) == 0
    (path,) = folder.glob("*-broadcast.json")
    return json.loads(path.read_text())


@pytest.mark.slow
def test_every_model_is_right_and_measured_in_all_forms(tmp_path, monkeypatch):
    results = run(tmp_path, monkeypatch, "--impl", "eager")
    assert [row["status"] for row in results["rows"]] == ["ok"] * len(results["rows"])
    forms = {}
    for row in results["rows"]:
        forms.setdefault((row["table"], row["case"]), set()).add(
            row["implementation"].removesuffix(", eager")
        )
    models = {key: found for key, found in forms.items() if key[0].startswith(bench.MODELS)}
    assert len(models) == 2 * len(broadcast_models.NETS)
    for (_, name), found in models.items():
        assert found == {
            bench.LEFT_IN,
            bench.FUSED,
            *([] if name in ("Wukong", "examples/ranking_model.py") else [bench.SPLIT]),
        }
    (table,) = results["summary"]
    assert len(table.splitlines()) == len(forms) + 2


@pytest.mark.slow
def test_compiled(tmp_path, monkeypatch):
    torch._dynamo.reset()
    results = run(
        tmp_path,
        monkeypatch,
        "--impl",
        "compiled",
        "--only",
        "models.* 2 users: (TorchRec DLRM|examples.*)$",
    )
    assert {(row["implementation"], row["status"]) for row in results["rows"]} == {
        (f"{form}, compiled", "ok") for form in (bench.LEFT_IN, bench.SPLIT, bench.FUSED)
    }


@pytest.mark.slow
def test_one_candidate_per_user_is_measured_in_turn():
    torch._dynamo.reset()
    rows = bench.compare_in_turn("cpu", tiny=True)
    assert [(row["model"], row["mode"]) for row in rows] == [
        (name, mode) for name in broadcast_models.NETS for mode in ("eager", "compiled")
    ]
    assert all(row["left in, ms"] > 0 and row["fused, ms"] > 0 for row in rows)


def test_the_table_compares_within_a_mode():
    def row(form, mode, ms):
        return dict(table="models, t", case="c", implementation=f"{form}, {mode}", forward_ms=ms)

    rows = [
        row(bench.LEFT_IN, "eager", 4.0),
        row(bench.SPLIT, "eager", 2.0),
        row(bench.FUSED, "eager", 1.0),
        row(bench.FUSED, "graphs", 1.0),
    ]
    (table,) = bench.table_of_forms(rows)
    assert table.splitlines()[2] == "| t: c | 4.000 | 2.000 | 1.000 | +75 % |  |  | 1.000 |  |"
    (table,) = bench.table_of_forms([rows[0] | dict(host_ms={"host": 3.0}), rows[2]])
    assert table.splitlines()[2] == "| t: c | 4.000 / 3.000 |  | 1.000 | +75 % |"


@pytest.mark.parametrize("name", broadcast_models.NETS)
def test_split_by_hand_computes_the_same(name):
    torch.manual_seed(0)
    net = broadcast_models.NETS[name](bench.TINY.sizes)
    if net.split is not None:
        given, index = net.inputs(*bench.TINY.batch), bench.candidates_of(bench.TINY.batch)
        torch.testing.assert_close(
            net.split(**given, candidate_to_user=index), bench.LeftIn(net)(index, **given)
        )
