"""Helpers of the training programs: metrics, atomic file writes, curves, and measurements of a
step."""

import argparse
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import style
from matplotlib.figure import Figure
from torch.profiler import ProfilerActivity, profile
from torchmetrics.functional.classification import binary_auroc
from torchrec import JaggedTensor
from torchrec.metrics.ne import compute_ne, get_ne_states

# Suppress log lines that do not concern this program: two by the profiler at each use, and one by
# torch 2.13 about a function of torchrec.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to the text of each option. Where it is None, the text itself says what
    happens without the option."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def check_at_least_1(
    parser: argparse.ArgumentParser, options: argparse.Namespace, names: Iterable[str]
) -> None:
    """End the program with one line if an option of these names, or a part of it, is given and
    below 1 or does not fit into 32 bits."""
    for name in names:
        value = getattr(options, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not 1 <= number < 2**31:
                bound = "at least 1" if number < 1 else "below 2**31"
                parser.error(f"--{name.replace('_', '-')} must be {bound}, not {number}")


def seed_number(text: str) -> int:
    """The `type` of an option --seed, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {value}")
    if value >= 2**32:  # seed_epoch multiplies it
        raise argparse.ArgumentTypeError(f"must be below 2**32, not {value}")
    return value


def with_config(parser: argparse.ArgumentParser, arguments: list[str] | None) -> list[str]:
    """The arguments, after those of the file of their option --config. Its keys are names of
    options, without dashes before them.

    Ends the program with one line if the file cannot be read or has other keys.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    path = finder.parse_known_args(arguments)[0].config
    if path is None:
        return arguments
    try:
        values = read_config(path)
    except (OSError, ValueError) as error:
        parser.error(f"--config {path}: {error}")
    found = []
    for key, value in values.items():
        option = f"--{key.replace('_', '-')}"
        action = parser._option_string_actions.get(option)
        if action is None or option in ("--config", "--help"):
            parser.error(f"--config {path}: there is no option {key!r}")
        if isinstance(value, bool) and action.nargs == 0:
            off = f"--no-{option[2:]}"
            found += [option] if value else [off] if off in action.option_strings else []
        elif isinstance(value, list):
            found += [option, *map(str, value)]
        elif value is not None:
            found.append(f"{option}={value}")
    return found + arguments


def read_config(path: Path) -> dict[str, Any]:
    """The values of a JSON or TOML file. Raises ValueError if it has none."""
    if path.suffix == ".toml":
        try:
            import tomllib
        except ImportError as error:
            raise ValueError("TOML needs Python 3.11; give JSON") from error
        return tomllib.loads(path.read_text(encoding="utf-8"))
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"expected an object of options, not {type(values).__name__}")
    return values


def positive(text: str) -> float:
    """The `type` of an option that is a finite number above 0, for argparse."""
    value = float(text)
    if not 0 < value < math.inf:  # NaN too
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, not {value}")
    return value


def seconds(text: str) -> float:
    """The `type` of an option --timeout, for argparse."""
    value = positive(text)
    if value >= 2**31:  # gloo counts nanoseconds in 64 bits
        raise argparse.ArgumentTypeError(f"must be below 2**31, not {value}")
    return value


def pick_device(name: str) -> torch.device:
    """The torch device of this name. `auto` is the first GPU if there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda, cuda:0, ..., not {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r} but torch sees no GPU; use cpu or auto")
    return device


def seed_epoch(seed: int, epoch: int, rank: int = 0) -> int:
    """Seed torch from (seed, epoch, rank), so that a resumed run has the same random numbers.
    Returns the epoch's seed."""
    epoch_seed = seed * 100_003 + epoch
    torch.manual_seed(epoch_seed + rank * 1_000_000_007)
    return epoch_seed


def ranking_metrics(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """AUC and normalised entropy: the mean log loss divided by that of always predicting the mean
    label (He et al. 2014, section 3.1).

    Args:
        logits, labels: [N]. Labels are 0 or 1, and both must occur.
    """
    if not 0 < labels.sum() < len(labels):
        raise ValueError(
            f"AUC needs liked and disliked candidates; all {len(labels)} labels are equal"
        )
    if logits.isnan().any():  # the training diverged; AUC would be a number all the same
        raise ValueError(
            f"{int(logits.isnan().sum())} of {len(logits)} logits are NaN: the training diverged,"
            " try a lower learning rate"
        )
    probabilities = logits.double().sigmoid()
    states = get_ne_states(
        labels.double()[None], probabilities[None], torch.ones_like(probabilities)[None], eta=1e-12
    )
    entropy = compute_ne(
        states["cross_entropy_sum"],
        states["weighted_num_samples"],
        states["pos_labels"],
        states["neg_labels"],
        eta=1e-12,
    )
    # AUC depends on the order alone, and above 37 all probabilities are 1
    _, rank = logits.unique(return_inverse=True)
    return {
        "auc": binary_auroc(rank.double() / len(rank), labels.long()).item(),
        "normalized_entropy": entropy.item(),
    }


# rank of a target that is not in the ranking: in no metric it counts
MISSED = torch.iinfo(torch.int64).max


def rank_unseen(scores: torch.Tensor, targets: torch.Tensor, seen: JaggedTensor) -> torch.Tensor:
    """The rank of each target among the user's unseen items, from 0, int64 [B]: how many others do
    not score below it. Ties and NaN count.

    Seen items are in no ranking, be they the target or not. So a target that the user has seen
    before is missed: its rank is `MISSED`. To rank it all the same would leave out the items that
    compete with it most, the others seen before.

    Args:
        scores: [B, items].
        targets: int64 [B], the target items.
        seen: B rows of items that are left out of the ranking.
    """
    rows = torch.arange(len(targets), device=targets.device)
    own = scores[rows, targets, None]
    unseen = torch.ones_like(scores, dtype=torch.bool)
    unseen[rows.repeat_interleave(seen.lengths()), seen.values()] = False
    rank = (~(scores < own) & unseen).sum(dim=1) - 1  # without the target itself
    return rank.where(unseen[rows, targets], MISSED)


def next_item_metrics(
    ranks: torch.Tensor, cutoffs: Sequence[int] = (10, 50, 200)
) -> dict[str, float]:
    """Mean hit rate and NDCG at each cutoff, and mean reciprocal rank, for rankings with one target
    each, at `ranks` [N] counted from 0.

    A rank may be `MISSED`, which is no hit and adds 0 to all means. These are torchmetrics'
    values, as a test checks; its functions sort the items of one user at a time.
    """
    gains = 1 / torch.log2(ranks.double() + 2)
    metrics = {}
    for k in cutoffs:
        hits = ranks < k
        metrics |= {
            f"hr@{k}": hits.double().mean().item(),
            f"ndcg@{k}": (hits * gains).mean().item(),
        }
    return metrics | {"mrr": (1 / (ranks.double() + 1)).mean().item()}


# -- files -----------------------------------------------------------------------------------------


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` with a temporary path beside `path`, then rename it. An interrupted write leaves
    the old file intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.unfinished{path.suffix}")
    write(unfinished)
    os.replace(unfinished, path)


def save_json(path: Path, content: Any) -> None:
    write_atomically(path, lambda file: file.write_text(json.dumps(content, indent=2) + "\n"))


def save_curves(
    path: Path, curves: dict[str, list[dict[str, float]]], metric: str = "auc", label: str = "AUC"
) -> None:
    write_atomically(path, lambda file: draw_curves(curves, metric, label).savefig(file, dpi=120))


PICTURE_STYLE = Path(__file__).with_name("pictures.mplstyle")


@style.context(PICTURE_STYLE)
def draw_curves(
    curves: dict[str, list[dict[str, float]]], metric: str = "auc", label: str = "AUC"
) -> Figure:
    """Plot the training loss and the validation `metric` (axis title: `label`) by epoch, with one
    line per name in `curves`."""
    figure = Figure(figsize=(10, 4))
    titles = {"loss": "training loss", f"valid_{metric}": f"held-out {label} (validation)"}
    for axis, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for name, epochs in curves.items():
            axis.plot(
                [epoch["epoch"] for epoch in epochs],
                [epoch[key] for epoch in epochs],
                marker="o",
                label=name,
            )
        axis.set(title=title, xlabel="epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.axes[1].legend()
    return figure


# -- measurements ----------------------------------------------------------------------------------


def time_steps(
    steps: dict[str, Callable[[Any], Any]],
    batches: Sequence[Any],
    device: torch.device,
    rounds: int = 3,
) -> dict[str, float]:
    """Median seconds of each step over `rounds` passes through `batches`, after one untimed call.

    The steps alternate on each batch, so that other load on the machine affects all of them
    equally.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step(batches[0])
    for _ in range(rounds):
        for batch in batches:
            for name, step in steps.items():
                synchronize(device)
                begin = time.perf_counter()
                step(batch)
                synchronize(device)
                seconds[name].append(time.perf_counter() - begin)
    return {name: torch.tensor(values).median().item() for name, values in seconds.items()}


def peak_memory(step: Callable[[], Any], device: torch.device) -> int:
    """Peak bytes of tensors on `device` during `step`, above those at its start.

    On a GPU, this is the peak of the caching allocator. On a CPU, it is the peak of the running sum
    of torch's allocations and frees, as recorded by its profiler. Memory that libraries allocate
    themselves is not included.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    changes = [
        event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak


def synchronize(device: torch.device) -> None:
    """Wait for the device, if it is a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
