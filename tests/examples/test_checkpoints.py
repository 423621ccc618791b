import pytest
import torch
from checkpoints import check_settings, find_checkpoint, save_checkpoint

SETTINGS = {"lr": 0.1, "seed": 0}


def save(folder, epoch, value):
    save_checkpoint(folder, SETTINGS, [{"loss": 0.5}] * epoch, {"model": {"weight": torch.full((3, 2), float(value))}})


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


def test_an_interrupted_write_leaves_the_old_one(tmp_path, monkeypatch):
    save(tmp_path, 1, value=1)
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.finish", None)  # which writes the last file
    with pytest.raises(BaseException):  # noqa: B017, PT011 a CheckpointException is no Exception
        save(tmp_path, 2, value=2)
    monkeypatch.undo()
    assert (tmp_path / "epoch-2").exists()
    checkpoint, weight = load(tmp_path)
    assert len(checkpoint.epochs) == 1 and (weight == 1).all()
    save(tmp_path, 2, value=3)
    assert (load(tmp_path)[1] == 3).all()


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
    with pytest.raises(ValueError, match="epoch-1 cannot be loaded: Missing key in checkpoint state_dict: model.bias"):
        checkpoint.load_into({"model": {"bias": torch.zeros(3)}})
    with pytest.raises(ValueError, match="epoch-1 cannot be loaded: Size mismatch"):
        checkpoint.load_into({"model": {"weight": torch.zeros(3)}})
