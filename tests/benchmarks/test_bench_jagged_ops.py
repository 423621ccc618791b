"""The benchmark of the jagged operators, end to end on the CPU with tiny sizes."""

import re

import bench_jagged_ops as bench
import pytest
import runner
import torch

BENCHMARK = bench.__file__

PAPER = "Table 1 of the paper: B=6, N≤14, D=24, T=8"
SKEWED = "skewed: 85 rows, D=T=8, 10 segments of 1..4 and one of 60, or all even"
ON_ROWS = ("jagged_dense_bmm", "jagged_jagged_bmm", "jagged_softmax")


@pytest.mark.slow
def test_every_implementation_is_right_and_measured(tiny_run):
    results, path = tiny_run
    assert results["complete"]
    assert {row["table"] for row in results["rows"]} == {"operators", PAPER, SKEWED}
    for table, case in {(row["table"], row["case"]) for row in results["rows"]}:
        rows = {
            row["implementation"]: row
            for row in results["rows"]
            if (row["table"], row["case"]) == (table, case)
        }
        converted = (
            {bench.CONVERTED} if case.startswith(tuple(f"{name} " for name in ON_ROWS)) else set()
        )
        assert set(rows) == (
            {bench.OURS} if table == SKEWED else {bench.OURS, bench.PADDED} | converted
        ), case
        (operator,) = (
            x for name, x in bench.OPERATORS.items() if case.startswith((f"{name} ", f"{name},"))
        )
        for row in rows.values():
            assert row["status"] == "ok", row
            results_of = {"out", *(f"d{name}" for name in operator.inputs)}
            assert set(row["forward_backward_errors"]) == {
                f"{x}/{part}" for x in results_of for part in ("longest", "others")
            }
            assert row["forward_gbytes_per_s"] > 0 and row["forward_backward_ms"] > 0
            assert (row["forward_tflops"] is None) == ("softmax" in case)
            assert ("forward_speedup" in row) == (table != SKEWED)
    assert path.with_suffix(".png").exists()


@pytest.mark.slow
def test_the_summary_states_the_precision_and_times_per_row(tiny_run):
    results, _ = tiny_run
    precision, *lines = results["summary"]
    assert precision == bench.PRECISION and [line.split(",")[0] for line in lines] == list(ON_ROWS)
    skewed, even = (
        row["forward_ms"] / 85 * 1e6
        for row in results["rows"]
        if row["case"] in ("jagged_softmax, skewed", "jagged_softmax, even")
    )
    assert f"forward {skewed:.3g} and {even:.3g}," in lines[-1]


@pytest.mark.parametrize("operator", bench.OPERATORS)
def test_one_wrong_sampled_row_is_found(operator):
    problem = bench.Problem("cpu", torch.tensor([2, 7, 1, 4]), operator, 8, 16)
    work = problem.setup()
    right = problem.ours()

    def spoiled():
        out = right.forward()
        factors = torch.ones_like(out)
        factors[-1:] = 1.001
        return out * factors

    work.implementations["wrong"] = lambda: runner.Implementation(
        spoiled, right.inputs, right.pick, right.grad_output
    )
    (row,) = runner.run_case(
        runner.Case("", "", lambda: work), runner.Protocol("cpu", rounds=0), re.compile("wrong")
    )
    assert row["status"].startswith("wrong: forward: out/others"), row


def test_useful_flops_and_bytes_count_no_padding():
    lengths = torch.tensor([2, 7, 1])
    rows, scores, padded_scores = 10, 4 + 49 + 1, 3 * 49

    def work(operator):
        problem = bench.Problem("cpu", lengths, operator, 8, 16)
        return problem.setup(), problem.flops(padded=True)

    dense, padded = work("jagged_dense_bmm")
    assert (dense.flops, dense.backward_flops, padded) == (
        2 * rows * 8 * 16,
        4 * rows * 8 * 16,
        2 * 21 * 8 * 16,
    )
    operands, out = rows * 8 + 3 * 8 * 16, rows * 16
    assert (dense.bytes, dense.backward_bytes) == (4 * (operands + out), 4 * (2 * operands + out))
    for name, inputs in (("itself", 1), ("another", 2)):
        outer, padded = work(f"{bench.OUTER} {name}")
        assert (outer.flops, padded, outer.bytes) == (
            2 * 8 * scores,
            2 * 8 * padded_scores,
            4 * (inputs * rows * 8 + scores),
        )
    softmax, padded = work("jagged2_softmax")
    assert (softmax.flops, padded, softmax.bytes, softmax.backward_bytes) == (
        0,
        0,
        8 * scores,
        12 * scores,
    )


def test_full_sizes_are_those_of_the_tables():
    """Figures are only comparable over time if the shapes stay."""
    tables = {}
    for case in bench.make_cases("cuda", tiny=False):
        tables.setdefault(case.table, []).append(case.name)
    assert tables == {
        "operators": [
            *(
                f"{name} {shape}"
                for name in ON_ROWS[:2]
                for shape in ("B1024 N≤100 D64 T64", "B1024 N≤200 D128 T128")
            ),
            *(f"{bench.OUTER} {y} B1024 N≤100 D1024" for y in ("itself", "another")),
            "array_jagged_bmm_jagged_out B1024 N≤100 D1024",
            "jagged_softmax B1024 N≤100 H64",
            "jagged2_softmax B1024 N≤100",
        ],
        "Table 1 of the paper: B=1024, N≤200, D=256, T=8": [
            *(f"{name} B1024 N≤200 D256 T8" for name in ON_ROWS[:2]),
            f"{bench.OUTER} another B1024 N≤200 D256",
            "array_jagged_bmm_jagged_out B1024 N≤200 D256",
            "jagged_softmax B1024 N≤200 H256",
            "jagged2_softmax B1024 N≤200",
            "jagged_softmax B1024 N≤200 H8",
        ],
        "skewed: 70500 rows, D=T=64, 1000 segments of 1..20 and one of 60000, or all even": [
            f"{name}, {kind}" for name in ON_ROWS for kind in ("skewed", "even")
        ],
    }
