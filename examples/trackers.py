"""Where the values of each epoch are written, besides metrics.json: `--tracker KIND[:PLACE]`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Log = Callable[[dict[str, float], int], Any]  # of values and the number of their epoch


def check_tracker(tracker: str) -> None:
    """ValueError unless the kind of tracker is known and its package is installed."""
    kind = tracker.partition(":")[0]
    if kind not in TRACKERS:
        raise ValueError(f"--tracker must be {', '.join(TRACKERS)} or KIND:PLACE, not {tracker!r}")
    if find_spec(kind) is None:
        raise ValueError(f"--tracker {kind} needs the package {kind}, which is not installed")


def track(
    tracker: str | None, out: Path, name: str, settings: dict[str, Any]
) -> AbstractContextManager[Log]:
    """A context that gives the function which writes values of the model `name` in the folder
    `out`."""
    if tracker is None:
        return nullcontext(lambda values, epoch: None)
    kind, _, place = tracker.partition(":")
    return TRACKERS[kind](place or None, f"{out.name}/{name}", settings)


@contextmanager
def _tensorboard(folder: str | None, run: str, settings: dict[str, Any]) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(f"{folder or 'runs/tensorboard'}/{run}") as board:
        yield lambda values, epoch: [board.add_scalar(key, values[key], epoch) for key in values]


@contextmanager
def _wandb(project: str | None, run: str, settings: dict[str, Any]) -> Iterator[Log]:
    import wandb

    with wandb.init(project=project, name=run, config=settings) as writer:
        yield lambda values, epoch: writer.log(values, step=epoch)


@contextmanager
def _mlflow(address: str | None, run: str, settings: dict[str, Any]) -> Iterator[Log]:
    import mlflow

    mlflow.set_tracking_uri(address)
    with mlflow.start_run(run_name=run):
        mlflow.log_params(settings)
        yield lambda values, epoch: mlflow.log_metrics(values, step=epoch)


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
