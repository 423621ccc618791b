"""The benchmark of block attention, end to end on the CPU with tiny sizes."""

import re

import bench_block_attention as bench
import inputs
import pytest
import runner
import torch
from torch.nn.attention.flex_attention import create_block_mask

from jagged_modules import functional as F

BENCHMARK = bench.__file__

ACCURACY = "absolute errors in bf16"
TABLES = {
    "block attention, B=6 H=2 D=16, blocks of 16": {bench.OURS},
    "with rotary, B=6 H=2 D=16, blocks of 16": {
        bench.OURS,
        bench.PRECISE,
        f"separate rotary + {bench.OURS}",
    },
    "backward of rotary, B=6 H=3 D=16, blocks of 16": {
        bench.OURS,
        bench.PRECISE,
        f"separate rotary + {bench.OURS}",
    },
    "lengths, about 100 rows, blocks of 16": {bench.OURS},
    "block sizes, B=6 H=2 D=16, 100 rows": {bench.OURS},
}
PROTOCOL = runner.Protocol("cpu", rounds=0)


@pytest.fixture(autouse=True)
def donated_buffer():
    """Restores the setting that the benchmark changes in its process."""
    with torch._functorch.config.patch(donated_buffer=True):
        yield


@pytest.mark.slow
def test_every_implementation_is_right_and_measured(tiny_run):
    results, path = tiny_run
    assert results["complete"]
    assert {row["table"] for row in results["rows"]} == set(TABLES)
    for case in {(row["table"], row["case"]) for row in results["rows"]}:
        rows = [row for row in results["rows"] if (row["table"], row["case"]) == case]
        assert {row["implementation"] for row in rows} == (
            {bench.OURS} if case[1].endswith("no rotary") else TABLES[case[0]]
        )
        for row in rows:
            assert row["status"] == "ok", row
            assert set(row["forward_backward_errors"]) == {
                f"{name}/sampled" for name in ("out", "dq", "dk", "dv")
            }
            assert (
                row["forward_gbytes_per_s"] > 0
                and row["backward_gbytes_per_s"] > 0
                and "forward_backward_ms" not in row
            )
    assert path.with_suffix(".png").exists()


@pytest.mark.slow
def test_absolute_errors_of_rotary_in_the_kernel_and_apart(tiny_run):
    results, path = tiny_run
    rows = results["other_tables"][ACCURACY]
    assert [row["rotary"] for row in rows] == ["qk"] * 4 + ["qkv"] * 4
    for ours, precise, *others in (rows[:4], rows[4:]):
        names = [
            f"separate rotary{arithmetic} + {bench.REFERENCE}" for arithmetic in ("", " in bf16")
        ]
        assert [row["implementation"] for row in (ours, precise, *others)] == [
            bench.OURS,
            bench.PRECISE,
            *names,
        ]
        for row in (ours, precise, *others):
            assert all(
                0 < row[f"mean {name}"] < row[f"max {name}"] < 0.1
                for name in ("out", "dq", "dk", "dv")
            )
            assert row["max dq of ours over it"] == ours["max dq"] / row["max dq"]
            assert row["of ours, precise"] == precise["max dq"] / row["max dq"]
    assert f"## {ACCURACY}" in path.with_suffix(".md").read_text()


# -- what needs CUDA -------------------------------------------------------------------------------


@pytest.fixture
def as_on_cuda(monkeypatch):
    """setup of a table → its rows with the implementations that it has on CUDA, uncompiled; FA2 has
    the CPU path's attention."""

    def attention(q, k, v, q_offsets, kv_offsets, max_q, max_kv):
        assert int(q_offsets.diff().max()) == max_q and int(q_offsets.diff().min()) > 0
        return F.jagged_attention(
            q, k, v, q_offsets, kv_offsets, max_seqlen_q=max_q, max_seqlen_kv=max_kv
        )

    def run(setup, rotate=""):
        problem = make_problem(rotate)
        problem.device = "cuda"
        monkeypatch.setattr(
            problem, "reference", lambda dtype: make_problem(rotate).reference(dtype)
        )
        work = setup(lambda: problem)
        return runner.run_case(runner.Case("", "", lambda: work), PROTOCOL, re.compile(""))

    monkeypatch.setattr(inputs, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(bench, "varlen_attention", attention)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return run


def make_problem(rotate: str = "") -> bench.Problem:
    lengths = torch.tensor([70, 1, 16, 40, 33])
    return bench.Problem(
        "cpu", torch.float32, lengths, num_heads=2, head_dim=8, block_size=16, rotate=rotate
    )


def test_fa2_gets_a_segment_per_block(as_on_cuda):
    rows = as_on_cuda(bench.without_rotary)
    assert [(row["implementation"], row["status"]) for row in rows] == [
        (bench.OURS, "ok"),
        (bench.FA2, "ok"),
    ]


@pytest.mark.parametrize("rotate", ["qk", "qkv"])
def test_separate_rotary_computes_the_same(rotate, as_on_cuda):
    rows = as_on_cuda(bench.with_rotary, rotate)
    names = [
        bench.OURS,
        bench.PRECISE,
        f"separate rotary + {bench.OURS}",
        f"separate rotary + {bench.FA2}",
    ]
    assert [(row["implementation"], row["status"]) for row in rows] == [
        (name, "ok") for name in names
    ]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_keeps_blocks_apart(monkeypatch):
    """Forward, without compilation: flex_attention has no backward on the CPU."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(
        bench,
        "leaves",
        lambda **tensors: {name: x.detach().contiguous() for name, x in tensors.items()},
    )
    reference = make_problem().reference
    problem = make_problem()
    monkeypatch.setattr(problem, "inputs", {name: x.detach() for name, x in problem.inputs.items()})
    setup = runner.Setup({bench.FLEX: problem.flex}, reference, torch.float32)
    (row,) = runner.run_case(runner.Case("", "", lambda: setup), PROTOCOL, re.compile(""))
    assert row["status"] == "ok", row


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("total", [1, 128, 700, 1024])
def test_the_block_mask_is_the_one_that_torch_makes(total, block_size):
    lengths = bench.lengths_of_total(min(total, 5), total)
    problem = bench.Problem(
        "cpu", torch.float32, lengths, num_heads=1, head_dim=2, block_size=block_size
    )
    mask = problem.flex_mask()
    torch_makes = create_block_mask(mask.mask_mod, None, None, total, total, device="cpu")
    assert mask.shape == torch_makes.shape and mask.to_dense().equal(torch_makes.to_dense())
    assert mask.q_num_blocks.equal(torch_makes.q_num_blocks + torch_makes.full_q_num_blocks)


def test_what_is_compiled_is_checked_and_then_timed_on_a_kept_graph():
    x, grad = torch.randn(8, 8, requires_grad=True), torch.ones(8, 8)
    forward = bench.compiled(lambda x: (x @ x).softmax(-1) @ x, backend="aot_eager")
    implementation = runner.Implementation(lambda: forward(x), {"x": x}, lambda name, x: {}, grad)
    checked = implementation.run(backward=True)["dx"]
    call = implementation.measured_call("backward")
    for _ in range(2):
        torch.testing.assert_close(call()[0], checked)


# -- work and sizes --------------------------------------------------------------------------------


def test_useful_flops_count_pairs_of_a_block_and_bytes_every_tensor_once():
    work = bench.without_rotary(make_problem)
    pairs = (4 * 16**2 + 6**2) + 1 + 16**2 + (2 * 16**2 + 8**2) + (2 * 16**2 + 1)
    assert work.flops == 4 * 2 * 8 * pairs
    assert work.backward_flops == 2.5 * work.flops
    assert (work.bytes, work.backward_bytes) == (4 * 160 * 2 * 8 * 4, 7 * 160 * 2 * 8 * 4)


@pytest.mark.parametrize(("count", "total"), [(1152, 704_106), (1152, 1_609_731), (6, 100), (1, 1)])
def test_lengths_of_a_total(count, total):
    lengths = bench.lengths_of_total(count, total)
    assert (len(lengths), lengths.sum()) == (count, total) and lengths.min() >= 1
    assert lengths.max() <= 2.01 * total / count


@pytest.mark.parametrize("mean", [0.3, 0.5, 0.7, 1.0])
def test_lengths_of_a_mean(mean):
    lengths = bench.lengths_of_mean(400, 2048, mean)
    assert (lengths.max(), len(lengths)) == (2048, 400) and lengths.min() >= 1
    assert lengths.double().mean().item() / 2048 == pytest.approx(mean, abs=0.01)


def test_full_sizes_are_those_of_the_tables():
    """Figures are only comparable over time if the shapes stay."""
    cases = bench.make_cases("cuda", tiny=False)
    tables = {}
    for case in cases:
        tables.setdefault(case.table, []).append(case.name)
        assert case.backward_alone
    assert tables == {
        "block attention, B=1152 H=4 D=128, blocks of 64": ["704106 rows", "1609731 rows"],
        "with rotary, B=1152 H=4 D=128, blocks of 64": [
            f"{n} rows, {rotate}" for n in (704106, 1609731) for rotate in ("qk", "qkv")
        ],
        "backward of rotary, B=1152 H=3 D=128, blocks of 64": [
            "1735537 rows, no rotary",
            "1735537 rows, qkv",
        ],
        "lengths, about 400000 rows, blocks of 64": [
            *(
                f"D=128, N=2048, mean {mean} N, B={count}"
                for mean, count in ((0.3, 651), (0.5, 391), (0.7, 279), (1.0, 195))
            ),
            *(
                f"D=128, N={n}, mean 0.5 N, B={count}"
                for n, count in ((512, 1562), (1024, 781), (4096, 195), (7168, 112))
            ),
            *(
                f"D=64, N={n}, mean 0.5 N, B={count}"
                for n, count in ((512, 1562), (2048, 391), (7168, 112))
            ),
        ],
        "block sizes, B=1152 H=4 D=128, 704106 rows": [f"blocks of {n}" for n in (16, 32, 64, 128)],
    }
