"""examples/benchmark_scaling.py: what it measures and prints on two processes, and the comparison
with a baseline."""

import contextlib
import io
import json

import pytest
import torch

from .ranks import one_rank

pytest.importorskip("torchrec")

import benchmark_scaling as bench
import communication
from benchmark_dlrm import set_sizes

TINY = """--device cpu --batch-size 6 --history 6 20 --stream 12 40 --candidates 2 6 --items 50 --features 2 3 --feature-rows 30
    --embedding-dim 16 --num-heads 2 --block-size 16 --num-batches 2 --num-compressed 4 --passes 2""".split()  # noqa: E501
SHORT = "--num-batches", "1", "--passes", "1"
TABLE_BYTES = 4 * 16 * (50 + 5 + 16 + (2 + 3) * 30)


def check_report(report: dict, world_size: int) -> None:
    assert report["world_size"] == world_size
    steps_per_second = 1e3 / report["step_ms"]
    assert report["samples_per_second"] == pytest.approx(
        report["samples_per_step"] * steps_per_second
    )
    assert 2 * 6 * world_size / 2 <= report["samples_per_step"] <= 6 * 6 * world_size
    assert len(report["table_mb"]) == world_size
    assert sum(report["table_mb"]) == pytest.approx(
        TABLE_BYTES / 1e6 * (world_size if report["settings"]["plan"] == "data_parallel" else 1)
    )
    assert report["peak_memory_mb"] > 0
    assert list(report["stages_ms"]) == list(bench.ALL_STAGES)
    assert min(report["stages_ms"][stage] for stage in ("embeddings", "optimizer", "dense")) > 0
    assert (report["stages_ms"]["our kernels"] > 0) == (report["settings"]["model"] == "jagged")
    assert report["collectives_ms"] >= report["stages_ms"]["exposed collectives"]
    assert list(report["traffic_bytes"]) == list(communication.Traffic._fields)
    assert (report["traffic_bytes"]["dense"] > 0) == (world_size > 1)


def measure(plan: str, model: str) -> dict:
    options = bench.parse_arguments([*TINY, "--plan", plan, "--model", model])
    set_sizes(options, communication.SIZES["cpu"])
    return bench.measure(options, torch.device("cpu"))


@pytest.mark.parametrize(("plan", "model"), [("row_wise", "jagged"), ("data_parallel", "padded")])
def test_two_processes_measure_the_same(two_ranks, plan, model):
    first, second = two_ranks.run(measure, plan, model)
    assert first["lengths"] != second["lengths"]  # each has its own batches
    for name in ("samples_per_second", "table_mb", "stages_ms", "peak_memory_mb"):
        assert first[name] == second[name]
    check_report(first, 2)


def report(world_size: int, samples_per_second: float, step_ms: float) -> dict:
    stages = {name: float(world_size * place) for place, name in enumerate(bench.ALL_STAGES)}
    traffic = dict.fromkeys(communication.Traffic._fields, 0.0) | {
        "embeddings": 1e6,
        "gradients": 2e6,
    }
    return {
        "world_size": world_size,
        "samples_per_second": samples_per_second,
        "step_ms": step_ms,
        "stages_ms": stages,
        "traffic_bytes": traffic,
        "settings": {"plan": "auto", "batch_size": 6},
    }


def test_scaling_compares_with_one_process():
    result = bench.scaling(report(4, 3000, 12), report(1, 1000, 9), bandwidth=1e9)
    assert result["speed_up"] == 3 and result["efficiency"] == 0.75
    assert result["lost_ms"] == {name: 3.0 * place for place, name in enumerate(bench.ALL_STAGES)}
    assert result["predicted"]["step_ms"] == pytest.approx(9 + 1 + 2)
    assert result["predicted"]["efficiency"] == pytest.approx(9 / 12)


def test_scaling_from_more_processes_is_not_predicted():
    result = bench.scaling(report(8, 3000, 12), report(2, 1000, 9), bandwidth=1e9)
    assert result["speed_up"] == 3 and result["efficiency"] == 0.75 and result["predicted"] is None


def test_a_baseline_must_be_comparable(tmp_path):
    path, settings = tmp_path / "baseline.json", {"plan": "auto", "batch_size": 6}
    path.write_text(json.dumps(report(2, 1000, 9)))
    assert bench.read_baseline(path, 4, settings)["step_ms"] == 9
    with pytest.raises(
        ValueError, match="--baseline must be a run on fewer than 2 processes, not on 2"
    ):
        bench.read_baseline(path, 2, settings)
    with pytest.raises(ValueError, match="--baseline must have the same plan, row_wise, not auto"):
        bench.read_baseline(path, 4, settings | {"plan": "row_wise"})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"world_size": 1}'])
def test_a_file_that_is_no_baseline_is_named(tmp_path, text):
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=r"--baseline: .*baseline\.json is not a file of this program"
    ):
        bench.read_baseline(path, 4, {})


def test_without_torchrun_it_says_how_to_start():
    with pytest.raises(SystemExit, match="benchmark_scaling: start it with torchrun"):
        bench.main(TINY)


def printed(*arguments: str) -> str:
    """What the program prints in a process of the group, as under torchrun."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        bench.main([*TINY, *arguments])
    return out.getvalue()


def test_program_compares_two_processes_with_one(two_ranks, tmp_path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    with one_rank():
        bench.main([*TINY, *SHORT, "--out", str(one)])
    check_report(json.loads(one.read_text()), 1)
    against = *SHORT, "--out", str(two), "--baseline", str(one), "--bandwidth", "1e8"
    stdout, of_rank_1 = two_ranks.run(printed, *against)
    assert not of_rank_1
    result = json.loads(two.read_text())
    check_report(result, 2)
    baseline = json.loads(one.read_text())
    assert result["scaling"] == bench.scaling(result, baseline, 1e8)
    assert stdout.count("speed-up from 1 to 2 processes") == 1
    assert f"efficiency {result['scaling']['predicted']['efficiency']:.3f}, step" in stdout
    with pytest.raises(
        SystemExit,
        match="benchmark_scaling: --baseline must have the same plan, row_wise, not auto",
    ):
        two_ranks.run(printed, *against, "--plan", "row_wise")
