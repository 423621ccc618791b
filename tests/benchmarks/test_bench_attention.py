"""The attention benchmark, end to end on the CPU with tiny sizes."""

import re

import bench_attention
import inputs
import names
import pytest
import runner
import torch
from torch.nn.attention import SDPBackend

import jagged_modules as jm
from jagged_modules.schedule import host_schedule

BENCHMARK = bench_attention.__file__

LADDER = "ladder: dense, jagged, each unfused and fused"
CUDA_ONLY = ("varlen_attn", "SDPA cuDNN", "replicate + SDPA cuDNN", "FlashAttention", "FBGEMM")


@pytest.mark.slow
def test_every_table_is_measured_and_ours_is_right_everywhere(tiny_run):
    results, path = tiny_run
    assert results["complete"]
    assert {row["table"] for row in results["rows"]} == {
        "jagged self-attention, padding included",
        "jagged self-attention",
        "target attention",
        "target attention, jagged histories, odd groups",
        "self and target attention in one launch",
        "target attention, memory of a training step",
        LADDER,
    }
    ours = [row for row in results["rows"] if row["implementation"] == names.OURS]
    assert len(ours) == len({(row["table"], row["case"]) for row in results["rows"]})
    for row in ours:
        assert row["status"] == "ok"
        assert row["host_ms"]["schedule on the host"] > 0
        assert {name.split("/")[0] for name in row["forward_backward_errors"]} == {
            "out",
            "dq",
            "dk",
            "dv",
        }
        assert ("forward_ms" in row) == ("memory" not in row["table"])
    assert path.with_suffix(".md").exists() and path.with_suffix(".png").exists()


@pytest.mark.slow
def test_what_needs_cuda_is_reported_and_the_rest_runs(tiny_run):
    results, _ = tiny_run
    for row in results["rows"]:
        expected = "unavailable" if row["implementation"].startswith(CUDA_ONLY) else "ok"
        assert row["status"].split(":")[0] == expected, row


@pytest.mark.slow
def test_the_ladder_has_attention_dense_and_jagged_unfused_and_fused(tiny_run):
    results, _ = tiny_run
    ladder = [row for row in results["rows"] if row["table"] == LADDER]
    steps = {names.DENSE, names.UNFUSED, names.DENSE_FLASH, names.OURS}
    assert {(row["case"], row["implementation"]) for row in ladder} == {
        (f"B4 N{n} H1 D16", step) for n in (12, 24) for step in steps
    }
    cases = [
        case.name for case in bench_attention.make_cases("cuda", tiny=False) if case.table == LADDER
    ]
    assert cases == [f"B256 N{n} H1 D128" for n in (128, 256, 512, 1024)]


WITH_PEERS = [
    case for case in bench_attention.make_cases("cpu", True) if "one launch" not in case.table
]


@pytest.mark.parametrize(
    "case", WITH_PEERS, ids=lambda case: f"{case.table}-{case.name}".replace(" ", "_")
)
def test_the_peers_that_need_cudnn_compute_the_same(case, monkeypatch):
    """Their layouts, replication and picked rows, with torch's plain backend instead of cuDNN's."""
    backends = type(
        "Backends", (), {"CUDNN_ATTENTION": SDPBackend.MATH, "FLASH_ATTENTION": SDPBackend.MATH}
    )
    monkeypatch.setattr(bench_attention, "SDPBackend", backends)
    rows = runner.run_case(case, runner.Protocol("cpu", rounds=0), re.compile("SDPA"))
    assert rows
    assert [row["status"] for row in rows] == ["ok"] * len(rows)


def test_useful_flops_count_real_rows_only():
    lengths = torch.tensor([4, 1, 3])
    setup = bench_attention.self_attention("cpu", torch.float32, lengths, num_heads=2, head_dim=8)
    assert setup.flops == 4 * 2 * 8 * (16 + 1 + 9)
    assert setup.backward_flops == 2.5 * setup.flops
    counts, histories = torch.tensor([2, 1]), torch.tensor([5, 3])
    setup = bench_attention.target_attention(
        "cpu", torch.float32, counts, histories, num_queries=3, num_heads=2, head_dim=8
    )
    assert setup.flops == 4 * 2 * 8 * 3 * (2 * 5 + 1 * 3)
    setup = bench_attention.self_and_target_attention(
        "cpu", torch.float32, counts, histories, num_queries=3, num_heads=2, head_dim=8
    )
    assert setup.flops == 4 * 2 * 8 * ((5 + 6) * 5 + (3 + 3) * 3)


@pytest.mark.parametrize(
    ("device", "capability", "count"),
    [("cuda", (9, 0), 2), ("cuda", (8, 0), 1), ("cpu", (9, 0), 1)],
)
def test_the_portable_kernels_are_measured_where_there_are_others(
    monkeypatch, device, capability, count
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    kernels = {names.OURS: "auto", names.PORTABLE: "triton"}
    assert inputs.our_kernels(device) == dict(list(kernels.items())[:count])


def test_backward_workspace_0_is_measured_for_wide_heads(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    limits = []
    x = torch.ones(3, requires_grad=True)

    def build(kernels):
        assert kernels == "auto"

        def forward():
            limits.append(jm.backward_workspace.current())
            return 2 * x

        return runner.Implementation(forward, {"x": x}, lambda name, value: {}, torch.ones(3))

    assert names.NO_WORKSPACE not in inputs.our_implementations("cuda", 64, build)
    implementation = inputs.our_implementations("cuda", 128, build)[names.NO_WORKSPACE]()
    for key in ("forward", "forward_backward", "backward"):
        implementation.measured_call(key)()
    assert set(limits) == {0} and jm.backward_workspace.current() is None


def test_the_schedule_has_the_tile_of_the_kernels_that_are_measured():
    lengths = torch.tensor([300, 200])
    sizes = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16}
    choices = {"implementation": "triton"}, {"capability": (9, 0)}, {}
    portable, hopper, here = (
        host_schedule(lengths, lengths, **sizes, **choice).block_m for choice in choices
    )
    assert portable == here != hopper  # no GPU is in use here
    assert (
        inputs.timed_schedule(
            lengths, lengths, torch.empty(500, 2, 64).half(), implementation="triton"
        )[0].block_m
        == portable
    )


def test_full_sizes_are_those_of_the_tables():
    """Figures are only comparable over time if the shapes stay."""
    cases = bench_attention.make_cases("cuda", tiny=False)
    names = [case.name for case in cases if case.table == "jagged self-attention"]
    assert names == [
        "B128 N1024 H4 D64",
        "B64 N2048 H4 D64",
        "B64 N2048 H4 D128",
        "B1024 N256 H4 D128",
    ]
    assert [case.name for case in cases if case.table == "target attention"] == [
        f"history {2**n}" for n in range(9, 15)
    ]
    for longest in (512, 4096):
        lengths = inputs.uniform_lengths(32, int(0.4 * longest), longest)
        assert lengths.max() == longest
        assert lengths.double().mean().item() / longest == pytest.approx(0.7, abs=0.01)
    counts = bench_attention.odd_counts(2048, 32)
    assert (counts % 2 == 1).all()
    assert counts.sum().item() == pytest.approx(2048, rel=0.05)
