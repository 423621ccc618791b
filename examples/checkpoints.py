"""Checkpoints in the format of torch.distributed.checkpoint, which any number of processes and any
sharding plan can load.

A checkpoint is a folder MODEL/epoch-N. `run.json` has the settings and the metrics of the epochs,
`vocabulary.json` the ids that the rows of the tables stand for, and the other files have the
tensors. It is complete once it has the file `.metadata`, which torch writes last. Then the older
ones are removed. So an interrupted write leaves the old checkpoint intact.

`.metadata` is a pickle, which may run code when it is read. So programs that serve a model read
MODEL/weights.pt instead, one file with the settings, the vocabulary and the best weights. The
training programs write it; `python examples/checkpoints.py MODEL` writes it for a run of torchrun.
"""

import argparse
import json
import pickle
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sharding
import torch
import torch.distributed.checkpoint as dcp
from published_ids import Vocabulary
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, Metadata
from training import write_atomically

WEIGHTS, VOCABULARY = "weights.pt", "vocabulary.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on the disk."""

    folder: Path
    settings: dict[str, Any]
    epochs: list[dict[str, float]]

    def load_into(self, state: dict[str, Any]) -> None:
        """Fill the tensors of a (nested) dictionary, whole ones and this rank's shards. All ranks
        call it.

        Raises ValueError if the checkpoint lacks some of them or cannot be read.
        """
        self.metadata()  # torch would log two tracebacks if it cannot be read
        try:
            with warnings.catch_warnings():
                # notes that one process is one process, and on classes that torch uses itself
                warnings.simplefilter("ignore")
                dcp.load(_without_empty(state), checkpoint_id=self.folder)
        except CheckpointException as error:  # not an Exception
            raise ValueError(f"{self.folder} cannot be loaded: {_causes(error)}") from error

    def vocabulary(self) -> Vocabulary:
        """What the rows of the tables stand for. Raises ValueError if the file cannot be read."""
        try:
            return Vocabulary.from_text((self.folder / VOCABULARY).read_text())
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{self.folder / VOCABULARY} is missing or damaged: {error}"
            ) from error

    def metadata(self) -> Metadata:
        """torch's description of the tensors. Raises ValueError if it cannot be read."""
        try:
            return FileSystemReader(self.folder).read_metadata()
        except Exception as error:  # of any kind: the file is a pickle
            raise ValueError(
                f"{self.folder} cannot be loaded: its file .metadata is damaged: {error!r}"
            ) from error


def find_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint in the folder. Raises ValueError if its run.json cannot be
    read."""
    complete = [path for path in _epoch_folders(folder) if (path / ".metadata").exists()]
    if not complete:
        return None
    newest = max(complete, key=lambda path: int(path.name.removeprefix("epoch-")))
    try:
        run = json.loads((newest / "run.json").read_text())
        settings, epochs = run["settings"], run["epochs"]
        if not isinstance(settings, dict) or not isinstance(epochs, list):
            raise TypeError("it has no dictionary of settings and list of epochs")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{newest / 'run.json'} is damaged: {error!r}") from error
    return Checkpoint(newest, settings, epochs)


def _epoch_folders(folder: Path) -> list[Path]:
    """Not those of other names, which are the user's own."""
    return [path for path in folder.glob("epoch-*") if path.name.removeprefix("epoch-").isdecimal()]


def save_checkpoint(
    folder: Path,
    settings: dict[str, Any],
    vocabulary: Vocabulary,
    epochs: list[dict[str, float]],
    state: dict[str, Any],
) -> None:
    """Write a checkpoint, then remove the older ones. All ranks call it. Raises OSError if it
    cannot be written.

    Args:
        settings, epochs: what JSON can hold.
        vocabulary: what the rows of the tables stand for.
        state: (nested) dictionary of tensors. Each rank writes its own shards; one rank writes what
            all have.
    """
    target = folder / f"epoch-{len(epochs)}"
    if sharding.rank() == 0:
        _remove(target)  # what an interrupted write left
        target.mkdir(parents=True)
        (target / VOCABULARY).write_text(vocabulary.text)
        (target / "run.json").write_text(
            json.dumps({"settings": settings, "epochs": epochs}, indent=2) + "\n"
        )
    sharding.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.save(_without_empty(state), checkpoint_id=target)
        except CheckpointException as error:  # of a full disk, for example
            raise OSError(f"{target} cannot be written: {_causes(error)}") from error
    if sharding.rank() == 0:
        for old in _epoch_folders(folder):
            if old != target:
                _remove(old)


def check_settings(checkpoint: Checkpoint, settings: dict[str, Any]) -> None:
    """Raises ValueError if the run that wrote the checkpoint had other settings."""
    old = checkpoint.settings
    changed = [
        f"{name} {old.get(name)!r} -> {value!r}"
        for name, value in settings.items()
        if old.get(name) != value
    ]
    if changed:
        raise ValueError(
            f"{checkpoint.folder} is of a run with other settings: {', '.join(changed)}"
        )


def _causes(error: CheckpointException) -> str:
    """One line. Raises what is no Exception, such as KeyboardInterrupt."""
    causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        if not isinstance(cause, Exception):
            raise cause
    return "; ".join({(str(cause) or repr(cause)).split("\n")[0] for cause in causes})


def _without_empty(state: dict[str, Any]) -> dict[str, Any]:
    """torch takes an empty dictionary for a value."""
    return {name: part for name, part in state.items() if not (isinstance(part, dict) and not part)}


def _remove(checkpoint: Path) -> None:
    # first, so that what an interruption leaves is not complete
    (checkpoint / ".metadata").unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


# -- weights to serve ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """The settings of a run, what the rows of its model's tables stand for, and the tensors of the
    model."""

    settings: dict[str, Any]
    vocabulary: Vocabulary
    tensors: dict[str, torch.Tensor]


def export_weights(folder: Path) -> Path:
    """Write the best weights of the newest checkpoint in the folder, of any number of processes, to
    one file there. Returns its path.

    Raises FileNotFoundError if there is no checkpoint.
    """
    checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        raise FileNotFoundError(f"no checkpoint in {folder}")
    stored = checkpoint.metadata().state_dict_metadata
    tensors = {}
    # the second lacks the buffers that are not floating-point, and replaces the rest
    for part in ("model.", "best_average."):
        state = {
            name: torch.empty(x.size, dtype=x.properties.dtype)
            for name, x in stored.items()
            if name.startswith(part)
        }
        checkpoint.load_into(state)
        tensors |= {name.removeprefix(part): x for name, x in state.items()}
    content = {
        "settings": checkpoint.settings,
        "vocabulary": checkpoint.vocabulary().text,
        "tensors": tensors,
    }
    write_atomically(folder / WEIGHTS, lambda file: torch.save(content, file))
    return folder / WEIGHTS


def load_weights(path: Path) -> Weights:
    """The content of a file of `export_weights`, on the CPU. Nothing but tensors and plain data is
    read from it, and no code is run.

    Raises ValueError if it is no such file, or if a weight is NaN.
    """
    if path.is_dir():
        files = ", ".join(map(str, sorted(path.rglob(WEIGHTS)))) or "none"
        raise ValueError(f"{path} is a folder, not a file of weights; in it: {files}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        settings, tensors = content["settings"], content["tensors"]
        if (
            not isinstance(settings, dict)
            or not isinstance(tensors, dict)
            or not all(map(torch.is_tensor, tensors.values()))
        ):
            raise TypeError("it has no dictionary of settings and of tensors")
        if wrong := [name for name, x in tensors.items() if bool(x.isnan().any())]:
            raise ValueError(f"NaN in {', '.join(wrong[:5])}")
        if "vocabulary" not in content:
            raise ValueError("it has no ids, as those of earlier versions; train the model anew")
        return Weights(settings, Vocabulary.from_text(content["vocabulary"]), tensors)
    except OSError:
        raise
    except pickle.UnpicklingError as error:  # its text says how to run the code of the file
        raise ValueError(
            f"{path} is not a file of weights: it has more than tensors and plain data, or was not"
            " written by torch.save"
        ) from error
    except Exception as error:  # of any kind: the file may hold anything
        raise ValueError(f"{path} is not a file of weights: {error}") from error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Write weights.pt from the newest checkpoint of a training run."
    )
    parser.add_argument(
        "folder", type=Path, help="folder of the checkpoints, for example runs/dlrm/attention"
    )
    try:
        print(export_weights(parser.parse_args().folder))
    except (OSError, ValueError) as error:
        parser.error(str(error))
