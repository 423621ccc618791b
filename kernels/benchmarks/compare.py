"""The kernels of several checkouts, measured in turn on one card.

    git worktree add ../before main~1
    python kernels/benchmarks/compare.py attention before=../before after=. --only "target
    attention: history"

Cases are those of this checkout's ``bench_<op>.py``; only this project's implementations are
measured. Each checkout has a process of its own, which checks a case against float64 and measures
it. The processes take turns; every other round is in reverse order. The better round counts, as in
all tables. A process that does not respond in time, because a kernel hangs for example, is killed,
and its checkout is not measured any further.
"""

import argparse
import importlib
import json
import os
import re
import selectors
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import report
from protocol import Protocol, add_options, choose, named, parse
from runner import environment, release_memory, run_case
from tqdm import tqdm

NO_RESPONSE = "(none)"  # in place of an implementation

# -- a checkout's process --------------------------------------------------------------------------


def serve(op: str, tiny: bool, protocol: Protocol, implementations: str) -> None:
    """Reads names of cases from stdin, a line each, and writes a JSON line with the rows of each.
    Other output goes to stderr."""
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cases = cases_of(op, protocol.device, tiny)
    for line in sys.stdin:
        release_memory(protocol.device)
        rows = run_case(
            cases[line.rstrip("\n")], replace(protocol, rounds=1), re.compile(implementations)
        )
        print(json.dumps(rows), file=responses, flush=True)


class Checkout:
    """A process that imports the packages of a checkout."""

    def __init__(self, root: str, op: str, tiny: bool, protocol: Protocol, implementations: str):
        arguments = json.dumps([op, tiny, asdict(protocol), implementations])
        paths = [root, str(Path(root, "kernels")), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def rows(self, case: str, limit_s: float) -> list[dict]:
        """The rows of a case; one row with NO_RESPONSE if the process has ended or does not respond
        within ``limit_s``."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            try:
                self.process.stdin.write(case + "\n")
                if not selector.select(limit_s):
                    return [
                        {"implementation": NO_RESPONSE, "status": f"no response in {limit_s:g} s"}
                    ]
            except BrokenPipeError:
                pass
            response = self.process.stdout.readline()
        return (
            json.loads(response)
            if response
            else [{"implementation": NO_RESPONSE, "status": f"ended with {self.process.wait()}"}]
        )

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


# -- the comparison --------------------------------------------------------------------------------


def cases_of(op: str, device: str, tiny: bool) -> dict:
    return named(importlib.import_module(f"bench_{op}").make_cases(device, tiny))


def compare(
    checkouts: dict[str, Checkout], cases: list[str], rounds: int, limit_s: float
) -> list[dict]:
    """A row for every case, implementation and pass: milliseconds by checkout, or for the pass
    "failed" the status."""
    table: dict[tuple[str, str, str], dict] = {}
    running = dict(checkouts)
    for number, case in tqdm([(number, case) for number in range(rounds) for case in cases]):
        for name in list(running)[:: -1 if number % 2 else 1]:
            for row in running[name].rows(case, limit_s):
                found = {
                    key.removesuffix("_ms"): row[key]
                    for key in ("forward_ms", "forward_backward_ms", "backward_ms")
                    if key in row
                }
                if row["status"] != "ok":
                    found["failed"] = row["status"]
                for measured, value in found.items():
                    cells = table.setdefault((case, row["implementation"], measured), {})
                    cells[name] = (
                        value if measured == "failed" else min(value, cells.get(name, value))
                    )
                if row["implementation"] == NO_RESPONSE:
                    running.pop(name).end()
    return [
        dict(zip(("case", "implementation", "pass"), key), cells=cells)
        for key, cells in table.items()
    ]


def markdown(rows: list[dict], names: list[str]) -> str:
    """Milliseconds, and the speed-up of each checkout over the first."""
    lines = [
        f"| case | implementation | pass | {' | '.join(names)} |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for row in rows:
        first, cells = row["cells"].get(names[0]), []
        for name in names:
            ms = row["cells"].get(name, "")
            both = isinstance(ms, float) and isinstance(first, float) and name != names[0]
            cells.append(report.plain_cell(ms) + (f" ({first / ms:.3f}×)" if both else ""))
        lines.append(
            f"| {row['case']} | {row['implementation']} | {row['pass'].replace('_', '+')} |"
            f" {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def checkout_folder(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not folder or not all(
        Path(folder, package, "__init__.py").exists()
        for package in ("jagged_modules", "kernels/jagged_kernels")
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=FOLDER with the folder of a checkout"
        )
    return name, folder


def main(argv: list[str] | None = None) -> int:
    """The exit status is 1 if something failed in a checkout."""
    parser = argparse.ArgumentParser(
        description="Measures the kernels of several checkouts in turn."
    )
    ops = sorted(
        path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py")
    )
    parser.add_argument("op", choices=ops, help="the benchmark, bench_<op>.py")
    parser.add_argument(
        "checkouts",
        nargs="+",
        metavar="NAME=FOLDER",
        type=checkout_folder,
        help="the others are compared with the first",
    )
    add_options(parser, implementations="^jagged_modules")
    parser.add_argument("--out", type=Path, help="JSON file for the results; none if not given")
    parser.add_argument(
        "--limit",
        type=float,
        default=300.0,
        help="seconds that a case may take, compilation included (default: %(default)s)",
    )
    options, protocol = parse(parser, argv)
    cases = choose(parser, options, cases_of(options.op, options.device, options.tiny))

    folders = dict(options.checkouts)
    checkouts = {
        name: Checkout(folder, options.op, options.tiny, protocol, options.impl.pattern)
        for name, folder in folders.items()
    }
    try:
        rows = compare(checkouts, list(cases), options.rounds, options.limit)
    finally:
        for checkout in checkouts.values():
            checkout.end()
    print(markdown(rows, list(folders)))
    if options.out:
        results = {
            "environment": environment(options.device),
            "protocol": asdict(protocol),
            "rows": rows,
        }
        report.write_atomically(
            options.out, lambda path: path.write_text(json.dumps(results, indent=1) + "\n")
        )
    return int(any(isinstance(cell, str) for row in rows for cell in row["cells"].values()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        op, tiny, protocol, implementations = json.loads(sys.argv[2])
        serve(op, tiny, Protocol(**protocol), implementations)
    else:
        sys.exit(main())
