import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import train_hstu
from generated_log import generate_log
from sequence_data import make_datasets
from sequence_model import ENCODERS

ROOT = Path(__file__).parents[2]
TINY = ["--device", "cpu", "--users", "25", "--epochs", "2", "--embedding-dim", "16", "--num-negatives", "64", "--max-history", "40"]


def train(out, *arguments):
    train_hstu.main([*TINY, "--out", str(out), *arguments])
    return json.loads((out / "metrics.json").read_text())


@pytest.mark.parametrize("model", ENCODERS)
def test_trains_and_writes_metrics_curves_and_checkpoint(tmp_path, model, capsys):
    metrics = train(tmp_path, "--model", model)
    result = metrics["results"][model]
    first, last = result["epochs"]
    assert last["loss"] < first["loss"]
    assert list(result["test"]) == ["hr@10", "ndcg@10"] and 0 <= last["valid_ndcg@10"] <= last["valid_hr@10"] <= 1
    assert last["examples_per_second"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["metrics.json", "curves.png", model])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert f"{metrics['results']['popularity']['test']['hr@10']:.4f}" in capsys.readouterr().out


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path, without_speed, assert_equal_checkpoints):
    whole = train(tmp_path / "whole", "--epochs", "3")
    train(tmp_path / "parts", "--epochs", "1")
    resumed = train(tmp_path / "parts", "--epochs", "3", "--resume")
    assert without_speed(whole) == without_speed(resumed)
    assert_equal_checkpoints(tmp_path / "whole" / "hstu", tmp_path / "parts" / "hstu")


@pytest.mark.slow
def test_learns_more_than_popularity(tmp_path):
    log = generate_log(num_users=300, num_items=200, num_clusters=8, mean_length=40, selectivity=train_hstu.SELECTIVITY, seed=0)
    datasets = make_datasets(log, max_history=40)
    arguments = ["--epochs", "6", "--embedding-dim", "32", "--batch-size", "8", "--lr", "3e-3", "--out", str(tmp_path)]
    trainer = train_hstu.Trainer(train_hstu.parse_arguments([*TINY, *arguments]), "hstu", datasets, torch.device("cpu"))
    trainer.fit()
    learned, popularity = trainer.test(), train_hstu.evaluate_popularity(datasets)
    assert all(learned[name] > 1.3 * popularity[name] for name in ("hr@10", "ndcg@10"))


def test_popularity_counts_what_is_trained_on():
    log = generate_log(num_users=20, num_items=60, mean_length=30, seed=0)
    last_two = {row for user in range(20) for row in np.flatnonzero(log.user == user)[-2:].tolist()}
    trained = [item for row, item in enumerate(log.item.tolist()) if row not in last_two]
    assert train_hstu.popularity(make_datasets(log)).tolist() == [trained.count(item) for item in range(log.num_items)]


def test_compare_prints_a_row_of_each_model(tmp_path, capsys):
    metrics = train(tmp_path, "--compare", "--epochs", "1")
    assert list(metrics["results"]) == [*ENCODERS, "popularity"]
    table = capsys.readouterr().out.partition("test HR@10  test NDCG@10   step ms   peak MB\n")[2]
    rows = [line.split() for line in table.splitlines()[:3]]
    for row, (name, result) in zip(rows, metrics["results"].items(), strict=True):
        assert row[0] == name
        assert [float(value) for value in row[1:3]] == pytest.approx([result["test"]["hr@10"], result["test"]["ndcg@10"]], abs=1e-4)
        assert (row[3:] == ["-", "-"]) == (name == "popularity")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "train_hstu: no file or folder nowhere"),
        (["--resume"], "--resume: no checkpoint hstu in"),
        (["--bf16"], "--bf16 needs a GPU"),
        (["--max-history", "0"], "generated log: max_history must be at least 1, not 0"),
        (["--temperature", "0"], "temperature must be positive, not 0.0"),
    ],
)
def test_bad_input_ends_with_one_line_and_writes_nothing(tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=message):
        train(tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_log_too_small_to_test_on_is_refused(tmp_path):
    (tmp_path / "u.data").write_text("1\t1\t5\t1\n1\t2\t1\t2\n")
    with pytest.raises(SystemExit, match="none of the 1 users has 3 ratings"):
        train(tmp_path / "out", "--data", str(tmp_path / "u.data"))


def test_settings_of_the_checkpoint_must_agree(tmp_path):
    train(tmp_path, "--epochs", "1")
    with pytest.raises(SystemExit, match="other settings: temperature 0.15 -> 0.2"):
        train(tmp_path, "--resume", "--temperature", "0.2")


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--embedding-dim", "9"], "not a multiple of --num-heads 2"), (["--num-negatives", "0"], "at least 1")]
)
def test_bad_options(arguments, message, capsys):
    with pytest.raises(SystemExit):
        train_hstu.parse_arguments(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_runs_as_a_program_from_anywhere_on_a_given_log(tmp_path):
    rows = [f"{user}\t{(7 * user + 3 * step) % 40}\t{1 + (user + step) % 5}\t{100 * step}" for user in range(12) for step in range(20)]
    (tmp_path / "u.data").write_text("\n".join(rows) + "\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, str(ROOT / "examples" / "train_hstu.py"), "--data", "u.data", *TINY]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "u.data: 240 ratings of 40 items by 12 users, of whom 12 are tested" in done.stdout
    assert json.loads((tmp_path / "runs" / "hstu" / "metrics.json").read_text())["settings"]["data"] == "u.data"
