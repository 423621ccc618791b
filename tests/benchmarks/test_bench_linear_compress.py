"""The benchmark of linear compression, end to end on the CPU with tiny sizes."""

import re

import bench_linear_compress as bench
import pytest
import runner
import torch

from jagged_modules.functional.linear_compress import COMPRESS_IMPLEMENTATIONS

BENCHMARK, AS_PROGRAM = bench.__file__, True

PLAIN = {"replicated", bench.INPUT_REPLICATED, "decomposed", "padded", "padded, torch.matmul"}
STAGES = {f"{bench.OURS}, reference", bench.THREE_LEVELS}


@pytest.mark.slow
def test_every_implementation_is_right_and_measured_in_both_tables(tiny_run):
    results, path = tiny_run
    assert results["complete"]
    assert {(row["table"], row["picture"]) for row in results["rows"]} == {
        ("batch size, 7 candidates per user", "ms"),
        ("candidates per user, B=10", "speedup"),
    }
    for case in {(row["table"], row["case"]) for row in results["rows"]}:
        rows = {
            row["implementation"]: row
            for row in results["rows"]
            if (row["table"], row["case"]) == case
        }
        assert set(rows) == {bench.OURS} | PLAIN | STAGES
        for name, row in rows.items():
            assert row["status"] == "ok", row
            if name == bench.INPUT_REPLICATED:
                assert (
                    set(row["forward_errors"]) == {"out/sampled"}
                    and "forward_backward_ms" not in row
                )
                continue
            levels = ("first", "second") if name == bench.THREE_LEVELS else ("user",)
            weights = {f"dw_{x}" for x in (*levels, "cand")}
            assert {key.split("/")[0] for key in row["forward_backward_errors"]} == {
                "out", *(f"de_{x}" for x in (*levels, "cand")),
            } | ({"dw"} if name == "replicated" else weights)  # fmt: skip
            for key in ("forward", "forward_backward"):
                assert row[f"{key}_speedup"] == pytest.approx(
                    rows["replicated"][f"{key}_ms"] / row[f"{key}_ms"]
                )
                assert row[f"{key}_tflops"] > 0 and f"{key}_floor_percent" not in row
    assert path.with_suffix(".png").exists()


def setup(
    batch: int, ratio: int, sizes: bench.Sizes = bench.TINY
) -> tuple[bench.Problem, runner.Setup]:
    problem = bench.Problem("cpu", torch.float32, sizes, batch, ratio)
    return problem, problem.setup("")


def test_useful_flops_and_bytes_count_no_padding():
    _, work = setup(batch=20, ratio=7)
    users, m, n, k_user, k_cand = 3, 13, 8, 22, 18
    assert work.flops == 2 * m * n * (k_cand * 20 + k_user * users)
    assert work.backward_flops == 2 * work.flops
    operands, out = m * (k_user + k_cand) + n * (users * k_user + 20 * k_cand), 20 * m * n
    assert work.bytes == 4 * (operands + out) + 8 * 20
    assert work.backward_bytes == 4 * (2 * operands + out)


def test_ours_gets_the_inputs_as_they_are_and_the_padded_stage_padded_ones():
    problem, _ = setup(batch=20, ratio=7)
    weight = problem.ours("auto").inputs["w_user"]
    assert weight.shape == (13, 22) and weight.is_contiguous() and weight.is_leaf
    padded = problem.plain(bench.gemm).inputs
    assert {name: x.shape[1] for name, x in padded.items()} == {
        "w_user": 24,
        "w_cand": 24,
        "e_user": 24,
        "e_cand": 24,
    }
    assert padded["e_cand"].untyped_storage().nbytes() == 20 * 24 * 8 * 4


def test_the_candidate_gemm_reports_its_time_alone():
    problem, work = setup(batch=20, ratio=7)
    work.implementations[bench.CUBLAS] = problem.candidate_gemm
    (row,) = runner.run_case(
        runner.Case("", "", lambda: work),
        runner.Protocol("cpu", rounds=1, pause_s=0),
        re.compile("cuBLAS"),
    )
    assert row["status"] == "ok" and row["forward_ms"] > 0
    assert not [
        key
        for key in row
        if key.endswith(("tflops", "gbytes", "speedup")) or key.startswith("forward_backward")
    ]


def test_the_sample_covers_the_edges():
    problem, _ = setup(batch=20, ratio=7)
    assert problem.index.tolist() == [0] * 7 + [1] * 7 + [2] * 6
    assert problem.sampled["out"][0].tolist() == [*range(7), *range(14, 20)]
    assert problem.sampled["dw"][0].tolist() == [0, 6, 12]


def test_a_wrong_weight_gradient_of_one_candidate_is_found():
    problem, work = setup(batch=20, ratio=7)

    def forward(w_user, w_cand, e_user, e_cand):
        out = bench.decomposed(torch.matmul, problem.index, w_user, w_cand, e_user, e_cand)
        # candidate 10 is not in the sample
        return torch.cat([out[:10], out[10:11].detach(), out[11:]])

    work.implementations["wrong"] = lambda: problem.implementation(forward, problem.inputs)
    (row,) = runner.run_case(
        runner.Case("", "", lambda: work), runner.Protocol("cpu", rounds=0), re.compile("wrong")
    )
    assert row["status"].startswith("wrong: forward+backward: dw_user/sampled")


@pytest.mark.parametrize(
    ("batch", "ratio", "note"),
    [
        (
            1024,
            70,
            (
                "not measured in this run but earlier on an H200, forward: FBGEMM Triton 0.567 ms,"
                " Meta TLX 0.494 ms"
            ),
        ),
        (
            1024,
            1000,
            (
                "not measured in this run but earlier on an H200, forward: FBGEMM Triton 0.57 ms,"
                " Meta TLX 0.498 ms"
            ),
        ),
        (512, 70, ""),
    ],
)
def test_peers_measured_earlier_are_in_the_remarks(batch, ratio, note):
    assert bench.peers_note(batch, ratio) == note


def test_full_sizes_are_those_of_the_tables():
    """Figures are only comparable over time if the shapes stay."""
    full = bench.FULL
    assert (full.m, full.n, full.k_user, full.k_cand) == (433, 256, 1178, 866)
    assert [(case.table, case.name) for case in bench.make_cases("cuda", tiny=False)] == [
        *(
            ("batch size, 70 candidates per user", f"B={batch}")
            for batch in (512, 1024, 2048, 3072)
        ),
        *(
            ("candidates per user, B=1024", f"{ratio} per user")
            for ratio in (2, 5, 10, 50, 100, 1000)
        ),
        *(("many candidates", f"{ratio} per user, B=10000") for ratio in (10, 100, 1000, 10_000)),
        ("many candidates", "10000 per user, B=30000"),
    ]
    shapes = {(batch, full.ratio) for batch in full.batches} | {
        (full.ratio_batch, ratio) for ratio in full.ratios
    }
    assert bench.PEERS.keys() <= shapes


def test_the_portable_kernel_is_a_stage_on_hopper(monkeypatch):
    kernels = {bench.OURS: "auto", "portable": "triton"}
    assert set(kernels.values()) <= set(COMPRESS_IMPLEMENTATIONS)
    monkeypatch.setattr(bench, "our_kernels", lambda device: dict(kernels))
    problem = bench.Problem("cpu", torch.float32, bench.TINY, 10, 7)
    assert set(kernels) <= set(problem.setup("").implementations)
