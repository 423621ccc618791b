"""The benchmark of cached histories, end to end on the CPU with tiny sizes."""

import bench_pages as bench

BENCHMARK = bench.__file__


def test_all_forms_are_right_and_measured(tiny_run):
    results, _ = tiny_run
    assert results["complete"] and len({row["table"] for row in results["rows"]}) == 4
    for row in results["rows"]:
        assert row["status"] == "ok" and row["forward_ms"] > 0
    names = {row["implementation"] for row in results["rows"]}
    assert names == {
        bench.GATHERED,
        bench.IN_PAGES,
        bench.IN_8_BITS,
        bench.NO_GATHER,
        bench.APPENDED,
        bench.ANEW,
    }
