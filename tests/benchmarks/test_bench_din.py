"""The benchmark of DIN's attention, end to end on the CPU with tiny sizes."""

import bench_din as bench
import torch

BENCHMARK = bench.__file__


def test_all_forms_are_right_and_measured(tiny_run):
    results, _ = tiny_run
    assert results["complete"]
    rows = {row["implementation"]: row for row in results["rows"]}
    assert set(rows) == {bench.OURS, bench.MATERIALIZED, bench.GEMM}
    for name, row in rows.items():
        assert row["status"] == "ok" and row["forward_ms"] > 0, row
        assert ("forward_backward_ms" in row) == (name != bench.GEMM)


def test_pairs_are_those_of_each_user():
    problem = bench.Problem("cpu", torch.float32, bench.TINY[0])
    i, j = problem.pairs(range(3))
    lengths, offsets = problem.lengths.tolist(), problem.offsets.tolist()
    expected = [
        (2 * user + c, offsets[user] + event)
        for user in range(3)
        for c in range(2)
        for event in range(lengths[user])
    ]
    assert list(zip(i.tolist(), j.tolist())) == expected
