"""The benchmark of the batch-invariant mode, end to end on the CPU with tiny sizes."""

import bench_batch_invariant as bench
import pytest

import jagged_modules as jm

BENCHMARK = bench.__file__


@pytest.mark.slow
def test_every_case_is_right_and_measured_in_both_modes(tiny_run):
    results, _ = tiny_run
    assert results["complete"]
    cases = {(row["table"], row["case"]) for row in results["rows"]}
    assert {table for table, _ in cases} > {"jagged self-attention", "operators", "projections"}
    for case in cases:
        rows = {
            row["implementation"]: row
            for row in results["rows"]
            if (row["table"], row["case"]) == case
        }
        assert set(rows) == {bench.OURS, bench.INVARIANT}
        assert all(row["status"] == "ok" and row["forward_ms"] > 0 for row in rows.values())


def test_the_mode_is_on_where_it_is_measured_and_nowhere_else():
    seen = []
    build = bench.projection("cpu", 2, 3, 4).implementations[bench.OURS]
    built = bench.invariant(lambda: seen.append(jm.batch_invariant.current()) or build())
    assert seen == [True] and not jm.batch_invariant.current()
    with built.around():
        assert jm.batch_invariant.current()
    assert not jm.batch_invariant.current()
