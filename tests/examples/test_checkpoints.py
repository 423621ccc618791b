import pytest
import torch
from checkpoints import (
    check_settings,
    export_weights,
    find_checkpoint,
    load_weights,
    save_checkpoint,
)
from published_ids import Vocabulary

SETTINGS, VOCABULARY = {"lr": 0.1, "seed": 0}, Vocabulary({"user": [2**70, "007"]})


def save(folder, epoch, value):
    save_checkpoint(
        folder,
        SETTINGS,
        VOCABULARY,
        [{"loss": 0.5}] * epoch,
        {"model": {"weight": torch.full((3, 2), float(value))}},
    )


def load(folder):
    weight = torch.zeros(3, 2)
    checkpoint = find_checkpoint(folder)
    checkpoint.load_into({"model": {"weight": weight}})
    return checkpoint, weight


def test_the_newest_is_kept(tmp_path):
    assert find_checkpoint(tmp_path) is None
    for epoch in (9, 10):
        save(tmp_path, epoch, value=epoch)
    checkpoint, weight = load(tmp_path)
    assert (checkpoint.settings, len(checkpoint.epochs)) == (SETTINGS, 10)
    assert (weight == 10).all()
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-10"]


def test_the_vocabulary_is_kept_with_the_weights(tmp_path):
    save(tmp_path, 1, value=1)
    assert (
        find_checkpoint(tmp_path).vocabulary().names
        == load_weights(export_weights(tmp_path)).vocabulary.names
        == VOCABULARY.names
    )


@pytest.mark.parametrize("text", [None, "", "[]"])
def test_a_vocabulary_that_cannot_be_read(tmp_path, text):
    save(tmp_path, 1, value=1)
    path = tmp_path / "epoch-1/vocabulary.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ValueError, match=r"epoch-1/vocabulary.json is missing or damaged: \S"):
        export_weights(tmp_path)


def test_an_interrupted_write_leaves_the_old_one(tmp_path, monkeypatch):
    save(tmp_path, 1, value=1)
    # which writes the last file
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.finish", None)
    with pytest.raises(
        OSError, match="epoch-2 cannot be written: 'NoneType' object is not callable$"
    ):
        save(tmp_path, 2, value=2)
    monkeypatch.undo()
    assert (tmp_path / "epoch-2").exists()
    checkpoint, weight = load(tmp_path)
    assert len(checkpoint.epochs) == 1 and (weight == 1).all()
    save(tmp_path, 2, value=3)
    assert (load(tmp_path)[1] == 3).all()


def test_an_interruption_before_the_old_ones_are_removed_leaves_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr("checkpoints._remove", lambda path: None)
    for epoch in (9, 10):
        save(tmp_path, epoch, value=epoch)
    assert len([*tmp_path.iterdir()]) == 2
    checkpoint, weight = load(tmp_path)
    assert len(checkpoint.epochs) == 10 and (weight == 10).all()


def test_an_interrupted_removal_leaves_no_complete_one(tmp_path, monkeypatch):
    save(tmp_path, 5, value=5)
    monkeypatch.setattr("checkpoints.shutil.rmtree", lambda path, **options: None)
    save(tmp_path, 1, value=1)
    assert (tmp_path / "epoch-5").exists()
    assert (load(tmp_path)[1] == 1).all()


def test_another_run_takes_the_folder(tmp_path):
    save(tmp_path, 5, value=5)
    save(tmp_path, 1, value=1)
    assert (load(tmp_path)[1] == 1).all()


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    save(tmp_path, 1, value=1)
    checkpoint = find_checkpoint(tmp_path)
    check_settings(checkpoint, SETTINGS)
    with pytest.raises(ValueError, match=r"epoch-1 is of a run with other settings: lr 0.1 -> 0.2"):
        check_settings(checkpoint, {**SETTINGS, "lr": 0.2})


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save(tmp_path, 1, value=1)
    checkpoint = find_checkpoint(tmp_path)
    with pytest.raises(
        ValueError,
        match="epoch-1 cannot be loaded: Missing key in checkpoint state_dict: model.bias",
    ):
        checkpoint.load_into({"model": {"bias": torch.zeros(3)}})
    with pytest.raises(ValueError, match="epoch-1 cannot be loaded: Size mismatch"):
        checkpoint.load_into({"model": {"weight": torch.zeros(3)}})


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"settings": [], "epochs": []}', '{"settings": {}, "epochs": 3}']
)
def test_a_damaged_description_of_the_run_is_named(tmp_path, text):
    save(tmp_path, 1, value=1)
    (tmp_path / "epoch-1/run.json").write_text(text)
    with pytest.raises(ValueError, match=r"epoch-1/run.json is damaged: \w"):
        find_checkpoint(tmp_path)


DAMAGES = [
    (".metadata", b""),
    (".metadata", b"\x80\x04X"),
    ("__0_0.distcp", b""),
    ("__0_0.distcp", b"PK"),
]


@pytest.mark.parametrize(("name", "content"), DAMAGES)
def test_damaged_tensors_are_refused_with_one_line(tmp_path, name, content, caplog):
    save(tmp_path, 1, value=1)
    (tmp_path / "epoch-1" / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"epoch-1 cannot be loaded: [^\n]+$") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)
    assert not [x for x in caplog.records if x.name == "root"]  # where torch warns with tracebacks


def test_a_copy_that_the_user_keeps_is_left_alone(tmp_path):
    save(tmp_path, 1, value=1)
    (tmp_path / "epoch-1").rename(tmp_path / "epoch-best")
    assert find_checkpoint(tmp_path) is None
    save(tmp_path, 2, value=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-2", "epoch-best"]
    assert (load(tmp_path)[1] == 2).all()


def test_an_interrupt_by_the_keyboard_stays_one(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    save(tmp_path, 1, value=1)
    monkeypatch.setattr(
        "torch.distributed.checkpoint.filesystem.FileSystemReader.read_data", interrupt
    )
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path)
