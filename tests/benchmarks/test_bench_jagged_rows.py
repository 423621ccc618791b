"""The benchmark of conversions between jagged and padded rows, end to end on the CPU with tiny
sizes."""

import dataclasses
import importlib.util

import bench_jagged_rows as bench
import pytest
import torch

BENCHMARK = bench.__file__


def test_every_implementation_is_right_and_measured(tiny_run):
    results, path = tiny_run
    assert results["complete"]
    found = {(row["case"].split()[0], row["implementation"]): row for row in results["rows"]}
    names = bench.OURS, bench.TORCH, bench.FBGEMM
    assert set(found) == {(case, name) for case in bench.OPERATORS for name in names}
    for (_, name), row in found.items():
        if name == bench.FBGEMM and importlib.util.find_spec("fbgemm_gpu") is None:
            assert row["status"].startswith("unavailable: ModuleNotFoundError")
            continue
        assert row["status"] == "ok", row
        assert row["forward_gbytes_per_s"] > 0 and row["forward_backward_ms"] > 0
    assert path.with_suffix(".png").exists()


@pytest.mark.parametrize("operator", bench.OPERATORS)
def test_a_wrong_row_is_found(run_setup, operator):
    problem = bench.Problem("cpu", operator, *bench.TINY[0])
    setup = problem.setup()
    right = problem.implementation(problem.operator.torch, problem.index, problem.shape)

    def spoiled():
        out = right.forward()
        factors = torch.ones_like(out)
        factors[0] = 1.001
        return out * factors

    setup.implementations["wrong"] = lambda: dataclasses.replace(right, forward=spoiled)
    assert run_setup(setup)[-1]["status"].startswith("wrong: forward: out/all")


def test_bytes_are_those_of_real_rows():
    """Of B = 6 segments of 1 to 5 rows, 18 rows in all."""
    expected = dict(
        jagged_to_padded=(18 + 30, 36),
        padded_to_jagged=(36, 18 + 30),
        jagged_dense_add=(54, 18 + 30),
        jagged_dense_mul=(54, 72 + 30),
    )
    for name, rows in expected.items():
        setup = bench.Problem("cpu", name, *bench.TINY[0]).setup()
        assert (setup.bytes, setup.backward_bytes) == tuple(32 * n for n in rows)


def test_full_sizes_are_those_of_the_table():
    cases = [case.name for case in bench.make_cases("cuda", tiny=False)]
    sizes = "B1024 N≤100 D64", "B1024 N≤200 D256"
    assert cases == [f"{name} {size}" for name in bench.OPERATORS for size in sizes]
