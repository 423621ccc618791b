"""The benchmark of everyday shapes, end to end on the CPU with tiny sizes."""

import re
import runpy
import sys

import attention_problem
import bench_everyday as bench
import inputs
import pytest
import torch
from attention_problem import Attention, Problem

import jagged_modules as jm
from jagged_modules import functional as F

BENCHMARK = bench.__file__

LENGTHS = torch.tensor([4, 9, 1, 3])
ATTENTIONS = {
    "self": Attention(LENGTHS, 2, 8),
    "causal": Attention(LENGTHS, 2, 8, causal=True),
    "HSTU": Attention(LENGTHS, 2, 8, causal=True, activation="silu"),
    "target": Attention(torch.tensor([2, 5, 1, 1]), 2, 8, kv_lengths=LENGTHS),
}


def make_problem(kind: str) -> Problem:
    return Problem("cpu", torch.float32, ATTENTIONS[kind])


@pytest.mark.slow
def test_every_implementation_is_right_and_measured(tiny_run):
    results, path = tiny_run
    assert results["complete"]
    names = {}
    for row in results["rows"]:
        assert row["status"] == "ok", row
        assert row["forward_ms"] > 0 and row["forward_backward_ms"] > 0
        assert (
            (row["forward_tflops"] is None)
            == (row["forward_gbytes"] is None)
            == (row["table"] in (bench.WALL, bench.FREE))
        )
        names.setdefault((row["table"], row["case"]), []).append(row["implementation"])
    softmax = [bench.OURS, bench.PADDED]
    given = [bench.OURS, bench.HOST, bench.DEVICE, bench.PADDED]
    layers = [bench.LAYER, bench.GRAPHED, bench.COMPILED, bench.PADDED_LAYER]
    expected = {
        bench.SELF: [softmax] * 4,
        bench.HSTU: [[bench.OURS, bench.PADDED_HSTU]],
        bench.TARGET: [softmax],
        bench.MEDIUM: [softmax] * 2,
        bench.LONG: [given],
        bench.WIDE: [softmax],
        bench.ORDER: [[bench.UNSORTED, bench.ROUND_ROBIN, bench.OURS]] * 2,
        bench.WALL: [
            [name for x in implementations for name in (x, f"{x}, {bench.CALLER}")]
            for implementations in (softmax, given, softmax, given, layers, layers)
        ],
        bench.FREE: [[bench.SAME, bench.LAYER, bench.ON_HOST, bench.GRAPHED, bench.PADDED_LAYER]],
    }
    assert {
        table: [x for (other, _), x in names.items() if other == table] for table, _ in names
    } == expected
    (line,) = results["summary"]
    assert re.match(
        r"jagged N20 D8: \d+ % of full segments' TFLOP/s forward, \d+ % forward\+backward", line
    )
    assert path.with_suffix(".png").exists()


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_the_reference_is_the_one_of_jagged_attention(kind):
    problem = make_problem(kind)
    expected = problem.reference(torch.float64)
    qkv = [x.detach().double().requires_grad_() for x in problem.inputs.values()]
    options = problem.attention.options | {"implementation": "reference"}
    out = F.jagged_attention(*qkv, problem.q_offsets, problem.kv_offsets, **options)
    results = dict(
        zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, qkv, problem.grad.double())))
    )
    # with a single key, dq and dk are 0
    assert set(problem.q_rows) > {1} and 2 not in problem.q_rows
    for b in problem.q_rows:
        for name, x in results.items():
            rows = (problem.q_rows if name in ("out", "dq") else problem.kv_rows)[b]
            torch.testing.assert_close(x[rows], expected[f"{name}/{b}"])


@pytest.mark.parametrize("kind", ["self", "HSTU"])
def test_another_mask_or_function_is_wrong(kind, run_setup):
    problem, other = make_problem(kind), make_problem("causal")
    rows = run_setup(
        problem.setup({"right": problem.ours, "padded": problem.padded, "other": other.ours})
    )
    assert [row["status"].split(":")[0] for row in rows] == ["ok", "ok", "wrong"]


@pytest.mark.parametrize("kind", ["self", "causal", "target"])
def test_flash_attention_gets_the_mask(kind, monkeypatch, run_setup):
    """FlashAttention needs a GPU, so jagged_attention stands in for it."""

    def attention(q, k, v, q_offsets, kv_offsets, max_q, max_kv, causal=False):
        return F.jagged_attention(
            q, k, v, q_offsets, kv_offsets, mask=jm.AttentionMask(causal=True) if causal else None
        )

    monkeypatch.setattr(attention_problem, "varlen_attention", attention)
    monkeypatch.setattr(
        attention_problem.peers,
        "flash_attention",
        lambda module, causal: lambda *arguments: attention(*arguments, causal=causal),
    )
    monkeypatch.setattr(inputs, "device_name", lambda device: "NVIDIA H200")
    problem = make_problem(kind)
    problem.device = "cuda"
    implementations = problem.flash()
    assert list(implementations) == [bench.FA2, *attention_problem.peers.FLASH_ATTENTION]
    assert [row["status"] for row in run_setup(problem.setup(implementations))] == ["ok"] * 3


def test_work_and_bytes():
    def totals(kind):
        setup = make_problem(kind).setup({})
        assert setup.backward_flops == 2.5 * setup.flops
        return (
            setup.flops / (4 * 2 * 8),
            setup.bytes / (4 * 2 * 8),
            setup.backward_bytes / (4 * 2 * 8),
        )

    assert totals("self") == (16 + 81 + 1 + 9, 4 * 17, 7 * 17)
    assert totals("causal") == totals("HSTU") == (10 + 45 + 1 + 6, 4 * 17, 7 * 17)
    assert totals("target") == (8 + 45 + 1 + 3, 2 * 9 + 2 * 17, 3 * 9 + 4 * 17)


def test_orders_of_tiles():
    lengths = inputs.lognormal_lengths(48, 100, 300, 1.1).clamp(min=65)
    sizes = {"num_heads": 2, "block_m": 16, "block_n": 32}
    zigzag = jm.zigzag_schedule(lengths, lengths, **sizes)
    # the last wave is not full, and ascends
    assert len(zigzag.tiles) % 10 and len(zigzag.tiles) // 10 % 2 == 0
    in_order = bench.reordered(zigzag, bench.unsorted)
    assert in_order.tiles.tolist() == sorted(zigzag.tiles.tolist())
    dealt = bench.reordered(zigzag, lambda x: bench.round_robin(x, 10))
    there_and_back = [*range(10), *reversed(range(10))]
    workers = {tuple(x): there_and_back[i % 20] for i, x in enumerate(dealt.tiles.tolist())}
    assert [workers[tuple(tile)] for tile in zigzag.tiles.tolist()] == [
        i % 10 for i in range(len(zigzag.tiles))
    ]
    assert bench.reordered(
        jm.zigzag_schedule(lengths, lengths, **sizes), lambda x: torch.arange(len(x.tiles))
    ).tiles.equal(zigzag.tiles)


def test_tiles_of_short_segments_stay_behind_the_others():
    lengths = inputs.lognormal_lengths(50, 50, 300, 1.1)
    zigzag = jm.zigzag_schedule(lengths, lengths, num_heads=2, block_m=16, block_n=32)
    long = int(zigzag.num_tiles[1])
    dealt = bench.reordered(zigzag, bench.unsorted)
    assert 0 < long < len(zigzag.tiles) and dealt.tiles[long:].equal(zigzag.tiles[long:])
    assert dealt.tiles[:long].tolist() == sorted(zigzag.tiles[:long].tolist())


def test_the_backward_runs_in_the_caller_s_thread_where_the_name_says_so(run_setup):
    setup = bench.in_both_threads(lambda: bench.everyday(lambda: make_problem("self")))
    for name, build in setup.implementations.items():
        with build().around():
            assert torch._C._is_multithreading_enabled() == (bench.CALLER not in name)
    assert torch._C._is_multithreading_enabled()
    assert [row["status"] for row in run_setup(setup)] == ["ok"] * 4


def test_lengths_of_a_file(tmp_path, run_setup):
    file = tmp_path / "shop.txt"
    file.write_text("3 0 5\n7\n")
    name, lengths = bench.read_lengths(str(file))
    assert (name, lengths.tolist()) == ("shop", [3, 5, 7])
    cases = [
        case
        for case in bench.make_cases("cpu", True, {name: lengths})
        if case.table == bench.MEASURED
    ]
    first, *_ = (case.name for case in cases)
    source = first.removesuffix(", real")
    assert re.fullmatch(r"shop B5 mean [3-7] max [57] D8", source)
    kinds = ("real", *bench.SYNTHETIC, "real, causal")
    assert [case.name for case in cases] == [f"{source}, {kind}" for kind in kinds]
    for case in cases[:2]:
        assert [row["status"] for row in run_setup(case.setup())] == ["ok"] * 2
    assert not any(case.table == bench.MEASURED for case in bench.make_cases("cpu", True))


def test_synthetic_lengths_have_as_many_rows():
    """Of a lognormal distribution, the fitted lengths have its figures."""
    real = inputs.lognormal_lengths(4000, 100, 10**6, 1.1)
    kinds = bench.real_and_synthetic(real)
    assert list(kinds) == ["real", *bench.SYNTHETIC] and kinds["real"].equal(real)
    rows = {name: int(x.sum()) for name, x in kinds.items()}
    assert rows == pytest.approx(dict.fromkeys(kinds, rows["real"]), rel=0.02)
    assert {len(x) for x in kinds.values()} == {4000}
    deviation = [kinds[name].double().log().std().item() for name in ("real", "lognormal")]
    assert deviation[0] == pytest.approx(deviation[1], rel=0.05)
    assert (kinds["uniform"].min(), kinds["uniform"].max()) == (1, 2 * kinds["equal"][0] - 1)


def test_help_has_its_own_option(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [BENCHMARK, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(BENCHMARK, run_name="__main__")
    assert end.value.code == 0 and "--lengths FILE" in capsys.readouterr().out


def test_lognormal_lengths():
    lengths = inputs.lognormal_lengths(20000, 107, 1000, 1.1)
    assert lengths.min() >= 1 and lengths.max() == 1000
    assert lengths.double().mean().item() == pytest.approx(105, abs=3)  # a little is clipped
    assert lengths[lengths < 1000].double().log().std().item() == pytest.approx(1.1, abs=0.1)


def test_full_sizes_are_those_of_the_tables():
    """Figures are only comparable over time if the shapes stay."""
    cases = [(case.table, case.name) for case in bench.make_cases("cuda", tiny=False)]
    shapes = [
        "B2048 mean 55 max 500 sigma 1.1 D128",
        "B1024 mean 107 max 1000 sigma 1.1 D64",
        "B4096 mean 30 max 300 sigma 1.1 D64",
        "B512 mean 200 max 2000 sigma 1.1 D96",
        "B1024 mean 107 max 1000 sigma 0.6 D64",
        "B1024 mean 107 max 1000 sigma 1.6 D64",
    ]
    assert cases == [
        *((bench.SELF, f"{shape}{mask}") for shape in shapes for mask in ("", ", causal")),
        *((bench.HSTU, shape) for shape in shapes[:2]),
        *(
            (bench.TARGET, f"B512 mean 300 max 3000 sigma 1.1 D{dim}, 1..200 candidates")
            for dim in (64, 128)
        ),
        *(
            (bench.MEDIUM, f"{kind} N{longest} D{dim}")
            for dim in (64, 128)
            for longest in (1000, 512)
            for kind in ("jagged", "full")
        ),
        (bench.LONG, "B8 N4096..8192 D64"),
        *((bench.WIDE, f"B64 N1024..1024 D{dim}") for dim in (192, 256, 136, 160, 224)),
        *((bench.ORDER, shape) for shape in shapes[:2]),
        *(
            (bench.WALL, f"{mask}attention, {shape}")
            for shape in (shapes[1], "B32 N96..96 D128")
            for mask in ("", "causal ")
        ),
        (bench.WALL, "target attention layer, new offsets, B512 mean 300 max 3000 sigma 1.1 D64"),
        (bench.WALL, "target attention layer, new offsets, B64 mean 100 max 1000 sigma 1.1 D64"),
        (bench.FREE, "B64 N1..99 D32 H2, 10 candidates each"),
        (bench.FREE, "B512 N1..199 D32 H4, 20 candidates each"),
    ]
    for shape in bench.FULL.medium:
        work = [lengths.square().sum().item() for lengths in (shape.lengths(), shape.full())]
        assert work[0] == pytest.approx(work[1], rel=0.005)
