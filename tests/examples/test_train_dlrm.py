import json
from pathlib import Path

import pytest
import train_dlrm
from models import MODELS
from ranking_model import INTERACTIONS, PARTS

pytestmark = pytest.mark.usefixtures("few_measured_steps")
ROOT = Path(__file__).parents[2]
TINY = "--device cpu --users 25 --epochs 2 --batch-size 8 --embedding-dim 16 --num-heads 2".split()

SMALL = ["--users", "8", "--epochs", "1", "--max-history", "20"]


def train(out, *arguments):
    train_dlrm.main([*TINY, "--out", str(out), *arguments])
    return json.loads((out / "metrics.json").read_text())


def check_table(printed, results):
    """The table has a row of each result, with its numbers."""
    table = printed.partition("test AUC  norm. entropy   step ms   peak MB\n")[2]
    rows = [line.split() for line in table.splitlines()[: len(results)]]
    for row, (name, result) in zip(rows, results.items(), strict=True):
        test, step = result["test"], (result["step_ms"], result["peak_memory_mb"])
        values = test["auc"], test["normalized_entropy"], *step
        assert row[0] == name
        assert [float(value) for value in row[1:]] == pytest.approx(values, abs=0.051)


@pytest.mark.parametrize("interaction", INTERACTIONS)
def test_trains_and_writes_metrics_curves_and_checkpoint(tmp_path, interaction, capsys):
    metrics = train(tmp_path, "--interaction", interaction)
    result = metrics["results"][interaction]
    first, last = result["epochs"]
    assert last["loss"] < first["loss"]
    assert 0 < result["test"]["auc"] < 1 and result["test"]["normalized_entropy"] > 0
    assert last["examples_per_second"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["metrics.json", "curves.png", interaction]
    )
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert f"{result['test']['auc']:.4f}" in capsys.readouterr().out


def test_ablation_prints_a_row_without_each_part(tmp_path, capsys):
    metrics = train(tmp_path, *SMALL, "--ablation", "--parts", "stream", "compress")
    assert list(metrics["results"]) == [
        "whole",
        "no-stream",
        "no-compress",
        "no-attention",
        "no-parts",
    ]
    check_table(capsys.readouterr().out, metrics["results"])
    assert (
        metrics["results"]["no-stream"]["peak_memory_mb"]
        < metrics["results"]["whole"]["peak_memory_mb"]
    )


def test_variants_of_an_ablation():
    variants = train_dlrm.variants(train_dlrm.parse_arguments(["--ablation"]))
    assert {
        name: (options.interaction, tuple(options.parts)) for name, options in variants.items()
    } == {
        "whole": ("attention", tuple(PARTS)),
        **{
            f"no-{part}": ("attention", tuple(other for other in PARTS if other != part))
            for part in PARTS
        },
        "no-attention": ("mean", tuple(PARTS)),
        "no-parts": ("attention", ()),
    }


def test_a_resumed_run_ends_as_an_uninterrupted_one(
    tmp_path, without_speed, assert_equal_checkpoints
):
    whole = train(tmp_path / "whole", *SMALL, "--epochs", "3")
    train(tmp_path / "parts", *SMALL)
    resumed = train(tmp_path / "parts", *SMALL, "--epochs", "3", "--resume")
    assert without_speed(whole) == without_speed(resumed)
    assert_equal_checkpoints(tmp_path / "whole" / "attention", tmp_path / "parts" / "attention")


def test_a_run_with_another_seed_ends_elsewhere(tmp_path, without_speed):
    first, second = (train(tmp_path / seed, *SMALL, "--seed", seed) for seed in "01")
    assert without_speed(first) != without_speed(second)


@pytest.mark.parametrize("name", MODELS)
def test_trains_a_published_model(tmp_path, name):
    metrics = train(tmp_path, "--model", name, *SMALL)
    assert 0 < metrics["results"][name]["test"]["auc"] < 1 and (tmp_path / name).is_dir()


def test_compare_of_a_published_model_has_a_row_of_its_padded_form(tmp_path, capsys):
    metrics = train(tmp_path, "--model", "din", "--compare", *SMALL)
    jagged, padded = (metrics["results"][name] for name in ("din", "din-padded"))
    # equal but for what is dropped, and the order of sums
    assert jagged["test"]["auc"] == pytest.approx(padded["test"]["auc"], abs=0.05)
    assert padded["peak_memory_mb"] > 1.2 * jagged["peak_memory_mb"]
    assert "din-padded" in capsys.readouterr().out


def test_compare_prints_a_row_of_each_interaction(tmp_path, capsys):
    metrics = train(tmp_path, "--compare", "--epochs", "1", "--parts")
    assert list(metrics["results"]) == list(INTERACTIONS)
    check_table(capsys.readouterr().out, metrics["results"])
    assert all(result["step_ms"] > 0 for result in metrics["results"].values())
    # The padded copies of the histories are the largest thing in a step.
    assert (
        metrics["results"]["padded"]["peak_memory_mb"]
        > 2 * metrics["results"]["attention"]["peak_memory_mb"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "train_dlrm: no file or folder nowhere"),
        (["--resume"], "--resume: no checkpoint attention in"),
        (["--bf16"], "--bf16 needs a GPU"),
        (["--data", ""], "train_dlrm: no log in "),
    ],
)
def test_bad_input_ends_with_one_line_and_writes_nothing(tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=message):
        train(tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_log_too_small_to_test_on_is_refused(tmp_path):
    (tmp_path / "u.data").write_text("1\t1\t5\t1\n1\t2\t1\t2\n")
    with pytest.raises(
        SystemExit, match="0 of 0 valid candidates are liked; training and AUC need both kinds"
    ):
        train(tmp_path / "out", "--data", str(tmp_path / "u.data"))


def test_settings_of_the_checkpoint_must_agree(tmp_path):
    train(tmp_path, "--epochs", "1")
    with pytest.raises(SystemExit, match="other settings: lr 0.001 -> 0.1"):
        train(tmp_path, "--resume", "--lr", "0.1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--embedding-dim", "10"], "not a multiple of --num-heads 4"),
        (["--epochs", "0"], "at least 1"),
        (["--chunk-size", "0"], "--chunk-size must be at least 1, not 0"),
        (["--chunk-size", str(2**63)], f"--chunk-size must be below 2**31, not {2**63}"),
        (["--seed", str(2**32)], f"--seed: must be below 2**32, not {2**32}"),
        (["--timeout", "nan"], "--timeout: must be a finite number above 0, not nan"),
        (["--timeout", "1e30"], "--timeout: must be below 2**31, not 1e+30"),
        (["--num-workers", "-1"], "--num-workers must be 0 to inf, not -1"),
        (["--compare", "--ablation"], "give one of them"),
        (["--model", "din", "--parts", "gdpa"], "--parts is an option of --model dlrm, not of din"),
        (["--model", "din", "--interaction", "mean"], "--interaction is an option of --model dlrm"),
        (["--model", "bst", "--ablation"], "--ablation is an option of --model dlrm, not of bst"),
    ],
)
def test_bad_options(arguments, message, capsys):
    with pytest.raises(SystemExit):
        train_dlrm.parse_arguments(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_runs_as_a_program_from_anywhere_on_a_given_log(run_on_a_log):
    out = run_on_a_log("dlrm", *TINY)
    assert "u.data: 240 ratings (192 train, 24 valid, 24 test) of 40 items by 12 users" in out
