"""The measurement protocol, and the command line of the benchmarks and compare.py: protocol and
choice of cases."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

PROTOCOL = """\
Random inputs. All implementations of a case are measured in turn in one process, for {rounds} rounds (every other round in reverse
order; the first one follows the check of each; on the leaderboard, unless --together,
each has a process of its own and measures all its rounds at once). Each measurement follows a pause of {pause_s} s and is the median over about {rep_ms} ms after {warmup_ms} ms of warm-up. The better
round is reported; all are saved. On CUDA, events around each call measure the device's time. Before each call the L2 cache is overwritten,
and the device waits until the host has issued the whole call, so that launch gaps do not count. The host's time to issue the call has
its own column. Tables of wall time measure host and device together, from one synchronisation to the next, {wall_factor} times as long; those
of free-running steps synchronise after 20 of them.
On the CPU: time.perf_counter. Forward runs without autograd. Forward+backward is forward, then torch.autograd.grad for all inputs; backward
alone is the latter on a retained graph. Peak memory is what one call allocates above its inputs at most. Errors are relative, of the worst
sampled row, against float64; the bound is {error_factor} times the error of plain torch in the case's dtype."""  # noqa: E501
ERROR_FACTOR = 3.0
WALL_FACTOR = 10  # the host's times scatter more than the device's


@dataclass(frozen=True)
class Protocol:
    """How measurements are taken; saved with the results."""

    device: str
    rounds: int = 2
    pause_s: float = 0.3
    warmup_ms: float = 10.0
    rep_ms: float = 50.0
    error_factor: float = ERROR_FACTOR

    def __str__(self):
        return " ".join(PROTOCOL.format(**asdict(self), wall_factor=WALL_FACTOR).split())


def add_options(parser: argparse.ArgumentParser, implementations: str = "") -> None:
    """Adds the options for device, cases and protocol. ``implementations``: the default of
    --impl."""
    protocol = Protocol("cpu")
    cuda, default = torch.cuda.is_available(), "(default: %(default)s)"
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda" if cuda else "cpu",
        help=f"device to measure {default}",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes, to try the benchmark itself"
    )
    parser.add_argument(
        "--only",
        default="",
        type=re.compile,
        help="regular expression: tables and cases to run, as 'table: case' (default: all)",
    )
    text = f"regular expression: implementations to run (default: {implementations or 'all'})"
    parser.add_argument("--impl", "--peers", default=implementations, type=re.compile, help=text)
    parser.add_argument(
        "--rounds",
        type=int,
        default=protocol.rounds,
        help=f"rounds, in each of which every implementation runs {default}",
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=protocol.pause_s,
        help=f"seconds before each measurement {default}",
    )
    parser.add_argument(
        "--warmup",
        type=float,
        default=protocol.warmup_ms,
        help=f"ms of calls before each measurement {default}",
    )
    parser.add_argument(
        "--rep",
        type=float,
        default=protocol.rep_ms,
        help=f"ms of calls that are measured {default}",
    )


def parse(
    parser: argparse.ArgumentParser, argv: list[str] | None
) -> tuple[argparse.Namespace, Protocol]:
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    return options, Protocol(
        options.device, options.rounds, options.pause, options.warmup, options.rep
    )


def named(cases: list) -> dict:
    """Cases by the text that --only is matched against."""
    return {f"{case.table}: {case.name}": case for case in cases}


def choose(parser: argparse.ArgumentParser, options: argparse.Namespace, cases: Mapping) -> dict:
    """The cases that --only selects; exits with an error if it selects none."""
    chosen = {name: case for name, case in cases.items() if options.only.search(name)}
    if not chosen:
        parser.error(f"--only {options.only.pattern!r} selects no case")
    return chosen
