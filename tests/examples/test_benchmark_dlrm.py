import json

import benchmark_dlrm as bench
import numpy as np
import pytest
import step_profile
import torch
from padded_layers import PADDED
from ranking_model import PARTS, RankingModel
from torch.utils.flop_counter import FlopCounterMode

TINY = """--device cpu --batch-size 6 --history 6 20 --stream 12 40 --candidates 2 6 --items 50 --features 2 2 --embedding-dim 16
    --num-heads 2 --block-size 16 --num-batches 2 --num-compressed 4""".split()  # noqa: E501


@pytest.mark.parametrize(("mean", "longest"), [(30, 100), (600, 2000), (1, 5), (4, 4)])
def test_lengths_have_the_stated_mean_and_maximum(mean, longest):
    lengths = bench.lognormal_lengths(np.random.default_rng(0), 4000, mean, longest)
    assert lengths.min() >= 1 and lengths.max() <= longest
    assert lengths.mean() == pytest.approx(mean, abs=0.5)  # of the rounding
    if 1 < mean < longest:
        assert lengths.max() == longest and np.median(lengths) < 0.8 * mean  # skewed


def test_a_mean_above_the_maximum_is_refused():
    with pytest.raises(ValueError, match="between 1 and the maximum, 10, not 11"):
        bench.lognormal_lengths(np.random.default_rng(0), 4, 11, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--history", "4", "0"], "error: --history must be at least 1, not 0"),
        (["--items", str(2**31)], f"error: --items must be below 2**31, not {2**31}"),
        (
            ["--history", "11", "10"],
            "benchmark_dlrm: the mean length must be between 1 and the maximum, 10, not 11",
        ),
        (["--data", "nowhere"], "benchmark_dlrm: no file or folder nowhere"),
        (
            ["--device", "tpu"],
            "benchmark_dlrm: device must be auto, cpu, cuda, cuda:0, ..., not 'tpu'",
        ),
        (
            ["--model", "bst", "--models", "jagged", "baseline"],
            "error: --models must be jagged or padded with --model bst, not baseline",
        ),
    ],
)
def test_bad_options_end_with_one_line(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main([*TINY, "--out", str(tmp_path / "out.json"), *arguments])
    assert message in f"{stopped.value} {capsys.readouterr().err}" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("law", ["uniform", "zipf"])
def test_ids_follow_the_law(law):
    rows, size = 1000, 100_000
    counts = np.bincount(bench.draw_ids(np.random.default_rng(0), rows, size, law), minlength=rows)
    assert len(counts) == rows
    # The ids from the k-th to the 2k-th most frequent one have log(2) / log(rows) of the draws
    # under Zipf's law.
    first, second = (np.sort(counts)[::-1][k : 2 * k].sum() / size for k in (50, 200))
    expected = (np.log(2) / np.log(rows),) * 2 if law == "zipf" else (50 / rows, 200 / rows)
    assert (first, second) == pytest.approx(expected, rel=0.25)
    # in all parts of the table
    assert np.bincount(np.argsort(-counts)[:100] // 100, minlength=10).min() > 0


@pytest.mark.parametrize("layers", ["1", "3"])
def test_flops_are_those_that_torch_counts_when_nothing_is_padded(layers):
    lengths = ["--history", "20", "20", "--stream", "48", "48", "--candidates", "6", "6"]
    options = bench.parse_arguments([*TINY, *lengths, "--num-layers", layers])
    tables, (batch, *_) = bench.random_batches(options)
    config = bench.make_config(options)
    model = RankingModel(tables, config, PADDED)
    with (
        FlopCounterMode(display=False) as counter,
        torch.no_grad(),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(batch)
    counted = {
        name: sum(counter.get_flop_counts()[f"RankingModel.head.{name}"].values())
        for name in [*PARTS, "interaction"]
    }
    assert bench.layer_flops(RankingModel(tables, config), batch) == counted


def test_flops_are_those_of_the_rows_that_exist():
    options = bench.parse_arguments(TINY)
    tables, (batch, *_) = bench.random_batches(options)
    flops, dim = bench.layer_flops(bench.make_model("jagged", tables, options), batch), 16
    past, targets = (batch.ids[x].lengths().long() for x in ("history_item", "target_item"))
    projected = 4 * dim**2 * (targets.sum() + past.sum())
    assert flops["interaction"] == projected + 4 * dim * (targets * past).sum()
    assert flops["gdpa"] == 8 * dim**2 * past.sum() + 4 * dim * past.square().sum()


def test_claims_compare_the_fastest_of_each_kind():
    def result(step_ms, memory, utilisation):
        return {
            "step_ms": step_ms,
            "samples_per_second": 1000 / step_ms,
            "peak_memory_mb": memory,
            "layer_mfu": {"stream": utilisation},
        }

    results = {
        "jagged": result(5, 40, 0.2),
        "jagged-compiled": result(4, 60, 0.1),
        "padded": result(8, 99, 0.1),
        "padded-compiled": result(6, 80, 0.08),
        "baseline": result(5, 48, 0.16),
    }
    assert [(x["over"], x["ours"]) for x in bench.compare_with_claims(results)] == [
        *(("padded", change) for change in ("+50.0 %", "+50.0 %", "-25.0 %", "+100.0 %")),
        *(("baseline", change) for change in ("+25.0 %", "+25.0 %", "+25.0 %", "+25.0 %")),
    ]
    assert bench.compare_with_claims({"jagged": result(5, 40, 0.2)}) == []


def check_report(path, models, printed, parts=tuple(PARTS)):
    report = json.loads(path.read_text())
    assert list(report["results"]) == models
    for result in report["results"].values():
        assert result["step_ms"] > 0 and result["peak_memory_mb"] > 0
        assert result["samples_per_second"] == pytest.approx(
            1e3 * report["samples_per_step"] / result["step_ms"]
        )
        assert (
            list(result["stages_ms"]) == list(step_profile.STAGES)
            and result["stages_ms"]["embeddings"] > 0
        )
        assert (
            set(result["layer_mfu"]) == {*parts, "interaction"}
            and min(result["layer_mfu"].values()) > 0
        )
    assert (
        report["results"]["jagged"]["stages_ms"]["our kernels"]
        > 0
        == report["results"]["padded"]["stages_ms"]["our kernels"]
    )
    for claim in report["claims"]:
        assert claim["published"] in printed and claim["ours"] in printed
    assert len(report["claims"]) == 4 * len(
        {name.split("-")[0] for name in models[1:]} - {"jagged"}
    )
    return report


def test_program_measures_each_kind_of_model(tmp_path, capsys):
    models = ["jagged", "padded", "baseline"]
    arguments = ["--models", *models, "--num-batches", "1"]
    bench.main([*TINY, *arguments, "--out", str(tmp_path / "report.json")])
    report = check_report(tmp_path / "report.json", models, capsys.readouterr().out)
    assert report["lengths"]["stream"]["max"] <= 40
    assert (
        report["results"]["padded"]["peak_memory_mb"]
        > report["results"]["jagged"]["peak_memory_mb"]
    )


def test_program_measures_the_lengths_of_a_log(tmp_path, capsys):
    rows = [
        f"{user}\t{(7 * user + 3 * step) % 40}\t{1 + (user + step) % 5}\t{100 * step}"
        for user in range(5)
        for step in range(10 * user + 5)
    ]
    (tmp_path / "u.data").write_text("\n".join(rows) + "\n")
    arguments = [
        "--data",
        str(tmp_path / "u.data"),
        "--parts",
        "compress",
        "--num-batches",
        "1",
        "--models",
        "jagged",
        "padded",
    ]
    bench.main([*TINY, *arguments, "--out", str(tmp_path / "report.json")])
    report = check_report(
        tmp_path / "report.json", ["jagged", "padded"], capsys.readouterr().out, parts=("compress",)
    )
    assert report["settings"]["data"].endswith("u.data")


def test_program_measures_a_published_model(tmp_path, capsys):
    arguments = ["--model", "bst", "--num-batches", "1", "--models", "jagged", "padded"]
    bench.main([*TINY, *arguments, "--out", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["claims"] == [] == list(report["forward_gflops"])
    printed = capsys.readouterr().out
    for result in report["results"].values():
        assert result["peak_memory_mb"] > 0 and f"{result['step_ms']:.1f}" in printed


@pytest.mark.slow
def test_program_measures_compiled_models(tmp_path, capsys):
    # Compilations take nearly all of the time. Other parts have more of them, and batches of other
    # sizes repeat them.
    parts = ("compress",)
    bench.main(
        [*TINY, "--parts", *parts, "--num-batches", "1", "--out", str(tmp_path / "report.json")]
    )
    check_report(tmp_path / "report.json", list(bench.MODELS), capsys.readouterr().out, parts)


@pytest.mark.parametrize("model", ["dlrm", "din", "onetrans"])
def test_all_take_the_same_steps(model):
    options = bench.parse_arguments([*TINY, "--dropout", "0", "--model", model])
    tables, batches = bench.random_batches(options)
    initial = bench.make_model("jagged", tables, options).state_dict()
    names = ("jagged", "padded", "baseline")[: 3 if model == "dlrm" else 2]
    steps = {name: bench.Step(name, tables, options, initial) for name in names}
    losses = {
        name: [step(batch).item() for batch in batches for _ in range(2)]
        for name, step in steps.items()
    }
    for name in names[1:]:
        assert losses["jagged"] == pytest.approx(losses[name], abs=1e-5)
    assert losses["jagged"][1] < losses["jagged"][0]
