import json
from pathlib import Path

import numpy as np
import pytest
import torch
import train_hstu
from generated_log import generate_log
from sequence_data import Windows, make_datasets
from sequence_model import ENCODERS, Vectors
from torch.nn import functional

from ..marks import SLOW

pytestmark = pytest.mark.usefixtures("few_measured_steps")
ROOT = Path(__file__).parents[2]
TINY = "--device cpu --users 25 --epochs 2 --embedding-dim 16 --num-negatives 64".split()
TINY += ["--max-history", "40", "--batch-events", "512"]
METRICS = ["hr@10", "ndcg@10", "hr@50", "ndcg@50", "hr@200", "ndcg@200", "mrr"]
COLUMNS = ["hr@10", "ndcg@10", "mrr"]


def train(out, *arguments):
    train_hstu.main([*TINY, "--out", str(out), *arguments])
    return json.loads((out / "metrics.json").read_text())


@pytest.mark.parametrize("model", ENCODERS)
def test_trains_and_writes_metrics_curves_and_checkpoint(tmp_path, model, capsys):
    metrics = train(tmp_path, "--model", model)
    result = metrics["results"][model]
    first, last = result["epochs"]
    assert last["loss"] < first["loss"]
    assert (
        list(result["test"]) == METRICS and 0 <= last["valid_ndcg@10"] <= last["valid_hr@10"] <= 1
    )
    assert last["examples_per_second"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["metrics.json", "curves.png", model]
    )
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert f"{metrics['results']['popularity']['test']['hr@10']:.4f}" in capsys.readouterr().out


def test_a_resumed_run_ends_as_an_uninterrupted_one(
    tmp_path, without_speed, assert_equal_checkpoints
):
    whole = train(tmp_path / "whole", "--epochs", "3")
    train(tmp_path / "parts", "--epochs", "1")
    resumed = train(tmp_path / "parts", "--epochs", "3", "--resume")
    assert without_speed(whole) == without_speed(resumed)
    assert_equal_checkpoints(tmp_path / "whole" / "hstu", tmp_path / "parts" / "hstu")


@pytest.mark.slow
def test_learns_more_than_popularity(tmp_path):
    log = generate_log(
        num_users=300,
        num_items=200,
        num_clusters=8,
        mean_length=40,
        selectivity=train_hstu.SELECTIVITY,
        seed=0,
    )
    datasets = make_datasets(log, max_history=40)
    sizes = ["--epochs", "6", "--embedding-dim", "32", "--batch-size", "8"]
    arguments = [
        *sizes,
        "--lr",
        "3e-3",
        "--dropout",
        "0.2",
        "--temperature",
        "0.15",
        "--out",
        str(tmp_path),
    ]
    trainer = train_hstu.Trainer(
        train_hstu.parse_arguments([*TINY, *arguments]), "hstu", datasets, torch.device("cpu")
    )
    trainer.fit()
    learned, popularity = trainer.test(), train_hstu.evaluate_popularity(datasets)
    assert all(learned[name] > 1.3 * popularity[name] for name in ("hr@10", "ndcg@10"))


@pytest.mark.parametrize("loss", ["softmax", "gbce"])
def test_an_input_is_trained_on_the_items_ahead_within_its_window(tmp_path, loss):
    datasets = make_datasets(generate_log(num_users=30, selectivity=1.0, seed=0), max_history=6)
    trainers = [
        train_hstu.Trainer(
            train_hstu.parse_arguments(
                [*TINY, "--batch-size", "16", "--loss", loss, "--ahead", ahead]
            ),
            "hstu",
            datasets,
            torch.device("cpu"),
        )
        for ahead in ("0", "0.5")
    ]
    batch = next(iter(trainers[0].batches("train", shuffle_seed=0)))
    num_rows, generator = len(batch), torch.Generator().manual_seed(0)
    queries, items = (
        functional.normalize(torch.randn(n, 8, generator=generator), dim=1)
        for n in (num_rows, trainers[0].num_items)
    )
    rivals = items[batch.rivals]
    ends = batch.ids["item"].offsets()[1:].tolist()
    # an input of a window of three has at most two later items
    assert {*batch.ids["item"].lengths().tolist()} == {3, 6}
    vectors = Vectors(queries, items[batch.targets], rivals)
    plain = trainers[0].losses(vectors, batch)
    expected = plain.clone()
    for k in (1, 2, 3):
        for row in range(num_rows - k):
            if any(row < end <= row + k for end in ends):
                continue
            # the rivals are those of the input, without its next item
            targets = items[batch.targets]
            targets[row] = items[batch.targets[row + k]]
            other = vectors._replace(targets=targets)
            expected[row] += 0.5**k * trainers[0].losses(other, batch)[row]
    torch.testing.assert_close(trainers[1].losses(vectors, batch), expected)
    assert (expected > plain).sum() > num_rows // 2


def test_a_batch_has_the_given_number_of_events_on_average(tmp_path):
    windows = Windows(start=np.array([0, 10, 30, 40]), end=np.array([10, 29, 33, 48]))  # 40 events
    assert [train_hstu.choose_batch_size(events, windows) for events in (1, 20, 26, 1000)] == [
        1,
        2,
        3,
        100,
    ]
    metrics = train(
        tmp_path, "--data", str(write_sequences(tmp_path)), "--epochs", "1", "--batch-events", "40"
    )
    assert 5 < metrics["settings"]["batch_size"] < 20  # of 30 windows


def test_popularity_counts_what_is_trained_on():
    log = generate_log(num_users=20, num_items=60, mean_length=30, seed=0)
    last_two = {row for user in range(20) for row in np.flatnonzero(log.user == user)[-2:].tolist()}
    trained = [item for row, item in enumerate(log.item.tolist()) if row not in last_two]
    assert train_hstu.popularity(make_datasets(log)).tolist() == [
        trained.count(item) for item in range(log.num_items)
    ]


def test_compare_prints_a_row_of_each_model(tmp_path, capsys):
    metrics = train(tmp_path, "--compare", "--epochs", "1")
    assert list(metrics["results"]) == [*ENCODERS, "popularity"]
    table = capsys.readouterr().out.partition(
        "test HR@10  test NDCG@10  test MRR   step ms   peak MB\n"
    )[2]
    rows = [line.split() for line in table.splitlines()[:3]]
    for row, (name, result) in zip(rows, metrics["results"].items(), strict=True):
        assert row[0] == name
        assert [float(value) for value in row[1:4]] == pytest.approx(
            [result["test"][column] for column in COLUMNS], abs=1e-4
        )
        assert (row[4:] == ["-", "-"]) == (name == "popularity")


def write_sequences(folder):
    """A sequence file: user u chooses items u, u + 3, u + 6, ... of 20, more often than not."""
    rows = [
        [user] + [100 + (user + 3 * step + step // 5) % 20 for step in range(3 + user % 9)]
        for user in range(30)
    ]
    (folder / "small.txt").write_text("".join(" ".join(map(str, row)) + "\n" for row in rows))
    return folder / "small.txt"


@pytest.mark.parametrize("models", [["--model", "sasrec"], pytest.param(["--compare"], marks=SLOW)])
def test_seeds_of_a_sequence_file_give_mean_and_deviation(tmp_path, models, capsys):
    arguments = [
        "--data",
        str(write_sequences(tmp_path)),
        *models,
        "--epochs",
        "1",
        "--batch-size",
        "30",
    ]
    single = [
        train(tmp_path / f"single-{seed}", *arguments, "--seed", f"{seed}")["results"]["sasrec"][
            "test"
        ]
        for seed in (3, 4)
    ]
    capsys.readouterr()
    metrics = train(tmp_path / "both", *arguments, "--seed", "3", "--seeds", "2")
    assert metrics["settings"]["seeds"] == 2
    result = metrics["results"]["sasrec"]
    assert [result["seeds"][seed]["test"] for seed in ("3", "4")] == single
    for name, mean in result["test"].items():
        first, second = (test[name] for test in single)
        assert mean == pytest.approx((first + second) / 2)
        assert result["test_deviation"][name] == pytest.approx(abs(first - second) / 2**0.5)
    printed = capsys.readouterr().out
    assert f"{result['test']['mrr']:.4f} ± {result['test_deviation']['mrr']:.4f}" in printed
    assert "metrics.json, curves.png, seed-3/, seed-4/" in printed
    for seed in (3, 4):
        trained = sorted(path.name for path in (tmp_path / "both" / f"seed-{seed}").iterdir())
        assert trained == sorted({*metrics["results"]} - {"popularity"})


def test_training_stops_after_epochs_without_a_better_result(tmp_path):
    # Without a learning rate the weights stay, so no epoch is better than the first.
    still = [
        "--data",
        str(write_sequences(tmp_path)),
        "--lr",
        "0",
        "--weight-decay",
        "0",
        "--epochs",
        "9",
    ]
    metrics = train(tmp_path / "out", *still, "--patience", "2")
    assert len(metrics["results"]["hstu"]["epochs"]) == 3
    # which has nothing left to train
    assert train(tmp_path / "out", *still, "--patience", "2", "--resume") == metrics
    assert (
        len(
            train(tmp_path / "out", *still, "--patience", "4", "--resume")["results"]["hstu"][
                "epochs"
            ]
        )
        == 5
    )


@pytest.mark.parametrize("loss", ["gbce", "bce"])
def test_other_losses_and_scores_train_too(tmp_path, loss):
    first, last = train(tmp_path, "--loss", loss, "--scores", "dot", "--intervals", "--lr", "1e-2")[
        "results"
    ]["hstu"]["epochs"]
    assert last["loss"] < first["loss"]


def test_intervals_need_timestamps(tmp_path):
    with pytest.raises(SystemExit, match="small.txt: time intervals need timestamps"):
        train(tmp_path / "out", "--data", str(write_sequences(tmp_path)), "--intervals")


@pytest.mark.parametrize(
    "options",
    [
        ["--relative-position", "--relative-time", "32"],
        pytest.param(["--relative-position"], marks=SLOW),
    ],
    ids=str,
)
def test_relative_biases_train_and_resume(tmp_path, options, without_speed):
    whole = train(tmp_path / "whole", *options)
    first, last = whole["results"]["hstu"]["epochs"]
    assert last["loss"] < first["loss"]
    train(tmp_path / "parts", *options, "--epochs", "1")
    assert without_speed(train(tmp_path / "parts", *options, "--resume")) == without_speed(whole)
    with pytest.raises(SystemExit, match="other settings: relative_position True -> False"):
        train(tmp_path / "parts", "--resume")


@pytest.mark.slow
def test_comparison_gives_the_biases_to_hstu_alone(tmp_path):
    results = [
        train(tmp_path / name, "--compare", "--epochs", "1", *options)["results"]
        for name, options in (
            ("plain", []),
            ("biased", ["--relative-position", "--relative-time", "32"]),
        )
    ]
    (plain, biased) = ([result[name]["test"] for name in ENCODERS] for result in results)
    assert [a == b for a, b in zip(plain, biased, strict=True)] == [False, True]


def test_relative_time_needs_timestamps(tmp_path):
    with pytest.raises(SystemExit, match="small.txt: --relative-time needs timestamps"):
        train(tmp_path / "out", "--data", str(write_sequences(tmp_path)), "--relative-time", "32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "train_hstu: no file or folder nowhere"),
        (["--resume"], "--resume: no checkpoint hstu in"),
        (["--bf16"], "--bf16 needs a GPU"),
        (["--data", ""], "train_hstu: no log in "),
        (["--max-history", "0"], "^2$"),
        (["--temperature", "0"], "^2$"),
        (["--relative-time", "-1"], "--relative-time must not be negative, not -1"),
        (
            ["--model", "sasrec", "--relative-position"],
            "--relative-position and --relative-time need --model hstu, not sasrec",
        ),
        (
            ["--model", "sasrec", "--relative-time", "8"],
            "--relative-position and --relative-time need --model hstu, not sasrec",
        ),
        (["--dropout", "nan"], "^2$"),
        (["--patience", "-1"], "^2$"),
        (["--calibration", "1.5"], r"calibration must lie in \[0, 1\], not 1.5"),
        (["--ahead", "nan"], r"--ahead must lie in \[0, 1\], not nan"),
    ],
)
def test_bad_input_ends_with_one_line_and_writes_nothing(tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=message):
        train(tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_log_too_small_to_test_on_is_refused(tmp_path):
    (tmp_path / "u.data").write_text("1\t1\t5\t1\n1\t2\t1\t2\n")
    with pytest.raises(SystemExit, match="none of the 1 users has 3 events"):
        train(tmp_path / "out", "--data", str(tmp_path / "u.data"))


@pytest.mark.parametrize("arguments", [[], ["--batch-size", "4"]])
def test_a_log_too_small_to_train_on_is_refused(tmp_path, arguments):
    (tmp_path / "log.txt").write_text("1 5 6 7\n2 6 7 8\n3 9\n")
    with pytest.raises(
        SystemExit, match="log.txt: nothing to train on: all users have 1 or 3 events"
    ):
        train(tmp_path / "out", "--data", str(tmp_path / "log.txt"), *arguments)
    assert not (tmp_path / "out").exists()


def test_settings_of_the_checkpoint_must_agree(tmp_path):
    train(tmp_path, "--epochs", "1")
    with pytest.raises(SystemExit, match="other settings: temperature 0.07 -> 0.2"):
        train(tmp_path, "--resume", "--temperature", "0.2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--embedding-dim", "9"], "not a multiple of --num-heads 2"),
        (["--num-negatives", "0"], "at least 1"),
    ],
)
def test_bad_options(arguments, message, capsys):
    with pytest.raises(SystemExit):
        train_hstu.parse_arguments(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_runs_as_a_program_from_anywhere_on_a_given_log(run_on_a_log):
    out = run_on_a_log("hstu", *TINY)
    assert "u.data: 240 events of 40 items by 12 users, of whom 12 are tested" in out
