"""The benchmark of relative biases, end to end on the CPU with tiny sizes."""

import re
from functools import partial

import bench_bias as bench
import inputs
import pytest
import torch

import jagged_modules as jm
from jagged_modules import functional as F

BENCHMARK = bench.__file__

HSTU, SOFTMAX = "HSTU (silu, output_scale 1/N), causal", "softmax, causal"
GRADIENTS = {  # implementation -> the gradients that are checked
    bench.OURS: {"dq", "dk", "dv"},
    f"{bench.OURS}, position": {"dq", "dk", "dv", "dposition"},
    f"{bench.OURS}, position and time": {"dq", "dk", "dv", "dposition", "dtime"},
    "padded, bias materialised, position": {"dq", "dk", "dv", "dposition"},
    "padded, bias materialised, position and time": {"dq", "dk", "dv", "dposition", "dtime"},
}
LENGTHS = torch.tensor([4, 9, 1, 3])


def make_problem(activation: str) -> bench.Problem:
    return bench.Problem(
        "cpu", torch.float32, LENGTHS, num_heads=2, head_dim=8, activation=activation
    )


@pytest.mark.slow
def test_every_implementation_is_right_and_measured(tiny_run):
    results, path = tiny_run
    assert results["complete"]
    assert [(row["table"], row["case"], row["implementation"]) for row in results["rows"]] == [
        (table, case, name)
        for table in (HSTU, SOFTMAX)
        for case in ("B4 N20 D8", "B4 N1..20 D8")
        for name in GRADIENTS
    ]
    for row in results["rows"]:
        assert row["status"] == "ok", row
        assert {name.split("/")[0] for name in row["forward_backward_errors"]} == {
            "out"
        } | GRADIENTS[row["implementation"]]
        assert row["forward_ms"] > 0 and row["forward_backward_ms"] > 0
        assert {key for key in row if key.endswith("tflops")} == {
            "forward_tflops",
            "forward_backward_tflops",
        }
    assert path.with_suffix(".png").exists()


@pytest.mark.slow
def test_speed_ups_and_the_summary_are_over_ours_without_bias(tiny_run):
    results, path = tiny_run
    rows = {
        row["implementation"]: row
        for row in results["rows"]
        if row["table"] == HSTU and row["case"] == "B4 N1..20 D8"
    }
    alone, biased = rows[bench.OURS], rows[f"{bench.OURS}, position and time"]
    assert (
        biased["forward_backward_speedup"]
        == alone["forward_backward_ms"] / biased["forward_backward_ms"]
    )
    assert len(results["summary"]) == 4
    (line,) = (
        line for line in results["summary"] if line.startswith(f"{HSTU}, B4 N1..20 D8: position ")
    )
    assert line in path.with_suffix(".md").read_text()
    costs = [int(x) for x in re.findall(r"([+-]\d+) %", line.partition("; position and time")[2])]
    assert costs == [
        round(100 * (biased[key] / alone[key] - 1)) for key in ("forward_ms", "forward_backward_ms")
    ]


def test_the_reference_is_the_one_of_jagged_attention():
    for activation in ("silu", "softmax"):
        problem = make_problem(activation)
        expected = problem.reference(torch.float64)
        inputs = {
            name: x.detach().double().requires_grad_()
            for name, x in (problem.inputs | problem.tables).items()
        }
        bias = jm.RelativeBias(inputs["position"], inputs["time"], problem.timestamps)
        scale = 1.0 if activation == "softmax" else 1 / 9
        qkv = inputs["q"], inputs["k"], inputs["v"]
        options = dict(
            activation=activation, output_scale=scale, mask=jm.AttentionMask(causal=True), bias=bias
        )
        out = F.jagged_attention(*qkv, problem.offsets, implementation="reference", **options)
        gradients = torch.autograd.grad(out, list(inputs.values()), problem.grad.double())
        for name, x in zip(("dposition", "dtime"), gradients[3:]):
            torch.testing.assert_close(x, expected[f"{name}/position and time"])
        for b in problem.samples:
            for name, x in zip(("out", "dq", "dk", "dv"), (out, *gradients)):
                torch.testing.assert_close(
                    x[problem.rows[b]], expected[f"{name}/position and time {b}"]
                )


@pytest.mark.parametrize("tables", [bench.POSITION, bench.POSITION_AND_TIME], ids=" and ".join)
def test_a_bias_that_is_left_out_is_wrong(tables, run_setup):
    problem = make_problem("silu")

    def without_bias(q, k, v, **tables):
        return problem.ours(bench.NO_BIAS).forward()

    unbiased = partial(problem.implementation, tables, without_bias)
    rows = run_setup(problem.setup({"biased": partial(problem.ours, tables), "unbiased": unbiased}))
    assert [row["status"].split(":")[0] for row in rows] == ["ok", "wrong"]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("lengths", [LENGTHS, torch.full((3,), 9)], ids=["jagged", "full"])
def test_what_runs_on_cuda(lengths, monkeypatch, run_setup):
    """Without compilation. flex_attention runs forward only: it has no backward on the CPU."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(inputs, "device_name", lambda device: "NVIDIA H200")
    problem = bench.Problem(
        "cpu", torch.float32, lengths, num_heads=2, head_dim=8, activation="softmax"
    )
    problem.device = "cuda"
    setup = bench.biases(lambda: problem)
    flex = {bench.name_of(bench.FLEX, x): x for x in (bench.POSITION, bench.POSITION_AND_TIME)}
    assert list(setup.implementations) == [*GRADIENTS, *flex]
    *others, _, _ = run_setup(setup)
    assert [row["status"] for row in others] == ["ok"] * len(GRADIENTS)
    assert [row["note"] for row in others] == [""] * 3 + ["padded inputs, compiled"] * 2

    monkeypatch.setattr(
        inputs,
        "leaves",
        lambda **tensors: {name: x.detach().contiguous() for name, x in tensors.items()},
    )
    monkeypatch.setattr(problem, "tables", {name: x.detach() for name, x in problem.tables.items()})
    rows = run_setup(
        problem.setup({name: partial(problem.flex, tables) for name, tables in flex.items()})
    )
    for row, tables in zip(rows, flex.values(), strict=True):
        assert row["status"] == "ok", row
        part = " and ".join(tables)
        assert set(row["forward_errors"]) == {f"out/{part} {b}" for b in problem.samples}


def test_timestamps_increase_within_segments_and_queries_know_the_next():
    problem = make_problem("silu")
    for rows in problem.rows:
        t, u = problem.timestamps[rows], problem.next_timestamps[rows]
        assert t[0] > 0 and (t.diff() > 0).all()
        assert u.equal(torch.cat([t[1:], t[-1:]]))
    steps = bench.random_timestamps(torch.full((400,), 50)).view(400, 50).diff(dim=1).double().log()
    assert steps.mean().item() == pytest.approx(6, abs=0.1) and steps.std().item() == pytest.approx(
        2, abs=0.1
    )


def test_useful_flops_count_the_pairs_that_see_one_another():
    setup = bench.biases(lambda: make_problem("silu"))
    assert setup.flops == 4 * 2 * 8 * (10 + 45 + 1 + 6)
    assert setup.backward_flops == 2.5 * setup.flops


def test_full_sizes_are_those_of_the_tables():
    """Figures are only comparable over time if the shapes stay."""
    cases = [(case.table, case.name) for case in bench.make_cases("cuda", tiny=False)]
    assert cases == [
        *((table, f"B128 N1024 D{dim}") for table in (HSTU, SOFTMAX) for dim in (64, 128)),
        *((table, "B128 N1..1024 D64") for table in (HSTU, SOFTMAX)),
        (HSTU, "B32 N1024 D64"),
        *((table, f"B128 mean 474 N1024 D{dim}") for table in (HSTU, SOFTMAX) for dim in (64, 128)),
    ]
    for shape in bench.FULL:
        lengths = shape.lengths()
        assert (len(lengths), lengths.max()) == (shape.batch, 1024)
        # lognormal lengths above the longest are cut
        share = 0.35 if shape.mean else 0.5 if shape.jagged else 1.0
        assert lengths.double().mean().item() / 1024 == pytest.approx(share, abs=0.01)
