"""What trackers get, from trackers that record it, and from TensorBoard if it is installed."""

import re
import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
import train_hstu

from .test_train_hstu import train

KEYS = {"loss", "valid_hr_10", "valid_ndcg_10", "valid_mrr", "examples_per_second"}


@pytest.fixture
def recorded(monkeypatch):
    """Modules wandb and mlflow. What they were called with, in order."""
    calls = []

    def record(name):
        return lambda *values, **named: calls.append((name, *values, named))

    @contextmanager
    def start(call, /, **named):
        calls.append((call, named))
        yield run
        calls.append(("end",))

    run, wandb, mlflow = ModuleType("run"), ModuleType("wandb"), ModuleType("mlflow")
    run.log = record("log")
    wandb.init = lambda **named: start("init", **named)
    mlflow.start_run = lambda **named: start("start_run", **named)
    for name in ("set_tracking_uri", "log_params", "log_metrics"):
        setattr(mlflow, name, record(name))
    for module in (wandb, mlflow):
        module.__spec__ = object()  # for find_spec
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_wandb(tmp_path, recorded):
    metrics = train(tmp_path / "out", "--tracker", "wandb:films")
    (name, start), *logs, end = recorded
    assert (name, start["project"], start["name"], end) == ("init", "films", "out/hstu", ("end",))
    assert start["config"]["model"] == "hstu" and start["config"]["lr"] == 2e-3
    check_epochs([(values, named["step"]) for _, values, named in logs], metrics)


def test_mlflow(tmp_path, recorded):
    metrics = train(tmp_path / "out", "--tracker", "mlflow:http://localhost:5000")
    address, start, (_, settings, _), *logs, end = recorded
    assert address == ("set_tracking_uri", "http://localhost:5000", {})
    assert (start, end) == (("start_run", {"run_name": "out/hstu"}), ("end",))
    assert settings["embedding_dim"] == 16
    check_epochs([(values, named["step"]) for _, values, named in logs], metrics)


def check_epochs(logs, metrics):
    epochs = metrics["results"]["hstu"]["epochs"]
    assert [step for _, step in logs] == [epoch["epoch"] for epoch in epochs] == [1, 2]
    for (values, _), epoch in zip(logs, epochs, strict=True):
        assert values.keys() >= KEYS and "epoch" not in values
        assert values == {key.replace("@", "_"): epoch[key] for key in epoch if key != "epoch"}


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = ["--tracker", f"tensorboard:{tmp_path / 'board'}"]
    metrics = train(tmp_path / "out", *tracker)
    train(tmp_path / "out", *tracker, "--epochs", "3", "--resume")
    board = EventAccumulator(str(tmp_path / "board" / "out" / "hstu")).Reload()
    losses = [epoch["loss"] for epoch in metrics["results"]["hstu"]["epochs"]]
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 3]
    assert [event.value for event in board.Scalars("loss")][:2] == pytest.approx(losses)
    assert KEYS <= set(board.Tags()["scalars"])


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        ("wandb", "--tracker wandb needs the package wandb, which is not installed"),
        ("paper:a", "--tracker must be tensorboard, wandb, mlflow or KIND:PLACE, not 'paper:a'"),
    ],
)
def test_a_tracker_that_is_not_there_ends_the_program(tmp_path, monkeypatch, tracker, message):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit, match=f"^train_hstu: {message}$"):
        train(tmp_path / "out", "--tracker", tracker)
    assert not (tmp_path / "out").exists()


# -- options from files ----------------------------------------------------------------------------

CONFIGS = {
    "a.json": '{"lr": 0.5, "batch-size": 7, "bf16": true, "compare": false, "header": false,'
    ' "columns": ["user=1", "item=2"], "data": null, "model": "sasrec", "dropout": 0.1}',
    "a.toml": "lr = 0.5\nbatch_size = 7\nbf16 = true\ncompare = false\nheader = false\n"
    "columns = ['user=1', 'item=2']\nmodel = 'sasrec'\ndropout = 0.1\n",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_command_line_overrides_the_file(tmp_path, name):
    if name == "a.toml" and sys.version_info < (3, 11):
        pytest.skip("needs tomllib")
    (tmp_path / name).write_text(CONFIGS[name])
    arguments = ["--dropout", "0.3", "--config", str(tmp_path / name)]
    options = train_hstu.parse_arguments(arguments)
    found = (options.lr, options.batch_size, options.bf16, options.compare, options.header)
    assert found == (0.5, 7, True, False, False)
    assert (options.columns, options.model) == (["user=1", "item=2"], "sasrec")
    assert (options.dropout, options.data) == (0.3, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"rate": 1}', "a.json: there is no option 'rate'"),
        ('{"config": "b.json"}', "a.json: there is no option 'config'"),
        ('{"lr": "fast"}', "argument --lr: invalid float value: 'fast'"),
        ('{"model": "other"}', "argument --model: invalid choice: 'other'"),
        ("[1]", "a.json: expected an object of options, not list"),
        ("{", "a.json: Expecting property name"),
        (None, "a.json: .*No such file"),
    ],
)
def test_bad_files(tmp_path, text, message, capsys):
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    with pytest.raises(SystemExit):
        train_hstu.parse_arguments(["--config", str(tmp_path / "a.json")])
    assert re.search(message, capsys.readouterr().err)
