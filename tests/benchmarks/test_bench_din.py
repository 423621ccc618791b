"""The benchmark of DIN's attention, end to end on the CPU with tiny sizes."""

import time
from dataclasses import replace
from functools import partial

import bench_din as bench
import torch

BENCHMARK = bench.__file__


def test_all_forms_are_right_and_measured(tiny_run):
    results, _ = tiny_run
    assert results["complete"]
    rows = {(row["case"], row["implementation"]): row for row in results["rows"]}
    forms = bench.OURS, bench.MATERIALIZED, bench.GEMM
    assert set(rows) == {(sizes.name, form) for sizes in bench.TINY for form in forms}
    for (_, form), row in rows.items():
        assert row["status"] == "ok" and row["forward_ms"] > 0, row
        assert ("forward_backward_ms" in row) == (form != bench.GEMM)


def test_a_peer_that_compiles_too_long_is_given_up(monkeypatch, run_setup):
    def compiler(function):
        def forward(*args, **kwargs):
            while True:
                try:
                    time.sleep(60)
                except Exception:  # noqa: BLE001 as compilers do
                    pass

        return forward

    monkeypatch.setattr(torch, "compile", compiler)
    problem = bench.Problem("cpu", torch.float32, bench.TINY[0])
    setup = problem.setup(compile_limit=0.1)
    peer = partial(problem.materialized, compile_limit=0.1)
    setup = replace(setup, implementations=setup.implementations | {bench.COMPILED: peer})
    *others, row = run_setup(setup)
    assert row["status"] == "unavailable: TimeoutError: not compiled within 0.1 s"
    assert all(x["status"] == "ok" for x in others)


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


def test_pairs_under_a_mask_are_those_that_it_shows():
    sizes = bench.Sizes(3, 4, 70, 8, "relu", (7, 5), "window")
    problem = bench.Problem("cpu", torch.float32, sizes)
    i, j = problem.pairs(range(3))
    expected = []
    for user, length in enumerate(problem.lengths.tolist()):
        keep = problem.mask.keep(4, length)
        rows, events = keep.nonzero(as_tuple=True)
        found = zip(rows + 4 * user, events + problem.offsets[user])
        expected += [(int(row), int(event)) for row, event in found]
        assert int(keep.sum()) < 4 * length
    assert list(zip(i.tolist(), j.tolist())) == expected
