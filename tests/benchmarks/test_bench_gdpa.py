"""The benchmark of pointwise activations and masks, end to end on the CPU with tiny sizes."""

import re

import bench_gdpa
import pytest
import runner
import torch
from inputs import uniform_lengths

from jagged_modules import functional as F

BENCHMARK = bench_gdpa.__file__

TABLES = {
    "GDPA (gelu_tanh)": {"forward_tflops", "backward_tflops"},
    "activations, q and kv jagged L=20 B=4": {"forward_tflops", "backward_tflops"},
    "HSTU (silu, causal, 3 targets)": {"forward_tflops", "forward_backward_tflops"},
    "shared operands": {"forward_tflops", "forward_backward_tflops"},
}


@pytest.mark.slow
def test_every_table_is_measured_and_ours_is_right_everywhere(tiny_run):
    results, path = tiny_run
    assert results["complete"]
    assert {row["table"] for row in results["rows"]} == set(TABLES)
    ours = [row for row in results["rows"] if row["implementation"] == bench_gdpa.OURS]
    assert len(ours) == len({(row["table"], row["case"]) for row in results["rows"]})
    for row in ours:
        assert row["status"] == "ok"
        assert {key for key in row if key.endswith("tflops")} == TABLES[row["table"]]
        assert {name.split("/")[0] for name in row["forward_backward_errors"]} == {
            "out",
            "dq",
            "dk",
            "dv",
        }
    assert {row["case"] for row in ours if row["table"].startswith("activations")} == set(
        bench_gdpa.SWEPT
    )
    assert path.with_suffix(".png").exists()


@pytest.mark.slow
def test_fa2_needs_cuda_and_the_rest_runs(tiny_run):
    results, _ = tiny_run
    for row in results["rows"]:
        assert row["status"].split(":")[0] == (
            "unavailable" if row["implementation"] == bench_gdpa.FA2 else "ok"
        ), row


@pytest.mark.slow
def test_the_summary_compares_jagged_with_full_segments(tiny_run):
    results, path = tiny_run
    tflops = {
        row["case"]: row
        for row in results["rows"]
        if row["table"] == bench_gdpa.GDPA and row["implementation"] == bench_gdpa.OURS
    }
    jagged, full = tflops["q and kv jagged L=20"], tflops["q and kv full L=20"]
    (line,) = results["summary"]
    assert line in path.with_suffix(".md").read_text()
    forward, backward = (int(x) for x in re.findall(r"(\d+) %", line))
    assert forward == round(100 * jagged["forward_tflops"] / full["forward_tflops"])
    assert backward == round(100 * jagged["backward_tflops"] / full["backward_tflops"])


def problem(**extra) -> bench_gdpa.Problem:
    lengths = torch.tensor([4, 9, 1, 3])
    return bench_gdpa.Problem(
        "cpu", torch.float32, lengths, lengths, num_heads=2, head_dim=8, **extra
    )


@pytest.mark.parametrize(("activation", "status"), [("softmax", "ok"), ("gelu_tanh", "wrong")])
def test_an_implementation_of_another_function_is_checked_against_that_function(
    activation, status, monkeypatch
):
    def attention(q, k, v, q_offsets, kv_offsets, max_q, max_kv):
        return F.jagged_attention(
            q, k, v, q_offsets, kv_offsets, activation=activation, implementation="reference"
        )

    monkeypatch.setattr(bench_gdpa, "varlen_attention", attention)
    case = runner.Case("", "", lambda: bench_gdpa.gdpa(problem, padded=False, note=""))
    (row,) = runner.run_case(case, runner.Protocol("cpu", rounds=0), re.compile("FA2"))
    assert row["status"].split(":")[0] == status
    assert row["note"] == bench_gdpa.SOFTMAX_NOTE


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_keeps_segments_and_targets_apart(monkeypatch):
    """Forward, without compilation: flex_attention has no backward on the CPU."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(
        bench_gdpa,
        "leaves",
        lambda **tensors: {name: x.detach().contiguous() for name, x in tensors.items()},
    )
    masked = problem(num_targets=torch.tensor([1, 4, 1, 2]))
    setup = masked.setup((masked.softmax,), {"flex": masked.flex})
    (row,) = runner.run_case(
        runner.Case("", "", lambda: setup), runner.Protocol("cpu", rounds=0), re.compile("")
    )
    assert row["status"] == "ok", row
    assert len(row["forward_errors"]) == len(masked.samples)


def test_useful_flops_count_the_pairs_that_see_one_another():
    assert bench_gdpa.gdpa(problem, padded=False, note="").flops == 4 * 2 * 8 * (16 + 81 + 1 + 9)
    targets = torch.tensor([1, 4, 1, 2])
    setup = bench_gdpa.hstu(lambda: problem(num_targets=targets), softmax=False)
    history = torch.tensor([3, 5, 0, 1])
    pairs = history * (history + 1) // 2 + targets * (history + 1)
    assert setup.flops == 4 * 2 * 8 * int(pairs.sum())
    assert setup.backward_flops == 2.5 * setup.flops
    lengths = torch.tensor([5, 2])
    for pma in (True, False):
        setup = bench_gdpa.shared_operand(
            "cpu", torch.float32, lengths, num_shared=3, num_heads=2, head_dim=8, pma=pma
        )
        assert setup.flops == 4 * 2 * 8 * 3 * (5 + 2)


def test_full_sizes_are_those_of_the_tables():
    """Figures are only comparable over time if the shapes stay."""
    cases = bench_gdpa.make_cases("cuda", tiny=False)
    assert [case.name for case in cases if case.table == bench_gdpa.GDPA] == [
        *(f"q and kv full L={length}" for length in (2048, 1024, 512, 256)),
        *(f"q jagged, kv full L={length}" for length in (512, 1024)),
        *(f"q and kv jagged L={length}" for length in (256, 512, 1024, 2048)),
        *(f"cross, q={length} kv=256 full" for length in (512, 1024, 2048)),
    ]
    assert [case.name for case in cases if "HSTU" in case.table] == [
        f"B128 N{n} D{d}" for d in (64, 128) for n in (512, 1024, 2048)
    ]
    for shape in bench_gdpa.FULL.gdpa:
        q, kv = shape.lengths()
        assert len(q) == len(kv) == (576 if shape.max_q == shape.max_kv == 2048 else 1152)
        assert (q.max(), kv.max()) == (shape.max_q, shape.max_kv)
        for lengths, jagged in ((q, shape.jagged), (kv, shape.jagged == "both")):
            assert lengths.double().mean().item() / lengths.max().item() == pytest.approx(
                0.5 if jagged else 1.0, abs=0.01
            )
        if shape.jagged == "both":
            assert q.equal(uniform_lengths(shape.batch, 1, shape.max_q)) and kv.equal(q)
