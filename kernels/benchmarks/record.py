"""The record of a device's benchmarks: one JSON file, one README with the published headlines
beside ours, pictures.

    python kernels/benchmarks/record.py                             # of the GPU of this machine
    # of FOLDER/record.json and FOLDER/runs, without runs of later days
    python kernels/benchmarks/record.py FOLDER --date 2026-11-21

Merges the runs in ``runs/`` into ``record.json``, whose rows count as runs too. If several runs
measured a case, the record has the rows of one of them, so that ratios are of one run: of the
latest day, then with the most implementations, then the latest. The figures of ncu are those of the
latest ``runs/<date>-profile.csv``.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import headline
import profile_kernels
import record_pictures
import report
import sources
import torch
from headline import Key
from published import HEADLINES
from unpublished import TABLES

PREAMBLE = """\
Measurements of this project and its peers on this device, beside the figures that the sources publish for other devices: compare ratios.
"missing": no run measured it. "not installed": the peer is not installed. "unavailable": it does not run here. "% of floor": the shortest
time in which the device could do the counted work or move the counted bytes, over the measured time. The rates of long GEMMs and
large copies define the floor, so that a short call may exceed 100. A run that "did not finish" was stopped; its completed cases count.
"†": measured before the last change of a file of the operator's kernels, or by a run that did not note their state."""  # noqa: E501
RUN_FACTS = ("op", "environment", "protocol", "complete", "seconds")
NO_RECORD = {"runs": [], "rows": [], "profile": []}


# -- merge
# -------------------------------------------------------------------------------------------------------------  # noqa: E501


def load_run(path: Path) -> dict:
    """A run with the rows of all its tables; each row has the ``op`` and the ``date`` of its run,
    which identify the run."""
    run = {"seconds": None, **json.loads(path.read_text())}
    environment = {
        **run["environment"],
        "command": re.sub(r" --out \S+", "", run["environment"].get("command", "")),
    }
    others = [
        other_row(table, row) for table, rows in run.get("other_tables", {}).items() for row in rows
    ]
    origin = {"op": run["op"], "date": environment["date"]}
    rows = [
        {**origin, **{key: value for key, value in row.items() if key != "traceback"}}
        for row in (*run["rows"], *others)
    ]
    return {**run, "environment": environment, "rows": rows}


def other_row(table: str, row: Mapping) -> dict:
    """A row of a table with its own columns. Its texts, except the implementation, are the case."""
    texts = [
        value
        for key, value in row.items()
        if isinstance(value, str) and key not in ("implementation", "status", "traceback")
    ]
    return {
        "table": table,
        "case": ", ".join(texts),
        "implementation": "(table)",
        "status": "ok",
        **row,
    }


def rank(rows: list[dict]) -> tuple[str, int, str]:
    """The rank of a run of a case: its day, number of implementations and time. The run with the
    highest rank counts."""
    return rows[0]["date"][:10], len(rows), rows[0]["date"]


def merge(rows: Iterable[dict]) -> list[dict]:
    """All cases, each with the rows of one run. Cases keep the order in which they are first
    seen."""
    runs_of_case: dict[tuple[str, str, str], dict[str, dict[str, dict]]] = {}
    for row in rows:
        runs = runs_of_case.setdefault((row["op"], row["table"], row["case"]), {})
        runs.setdefault(row["date"], {})[row["implementation"]] = row
    return [
        row
        for runs in runs_of_case.values()
        for row in max((list(rows.values()) for rows in runs.values()), key=rank)
    ]


def identity(run: Mapping) -> tuple[str, str]:
    """What identifies a run: the time of its beginning and its operator."""
    return run["environment"]["date"], run["op"]


def make_record(folder: Path, date: str | None = None) -> dict:
    """The record of a device's folder with the runs until ``date``."""
    saved = folder / "record.json"
    record = json.loads(saved.read_text()) if saved.exists() else NO_RECORD
    runs = [load_run(path) for path in (folder / "runs").glob("*.json")]
    runs = [run for run in runs if date is None or run["environment"]["date"][:10] <= date]
    if not runs and not record["runs"]:
        raise FileNotFoundError(
            f"{folder} has no record.json and no runs/*.json" + (f" until {date}" if date else "")
        )
    runs.sort(key=identity)
    rows = merge([*record["rows"], *(row for run in runs for row in run["rows"])])
    used = {(row["date"], row["op"]) for row in rows}
    known = {
        identity(run): {fact: run[fact] for fact in RUN_FACTS} for run in (*record["runs"], *runs)
    }
    runs = [known[run] for run in sorted(used)]
    profiles = sorted(
        path
        for path in (folder / "runs").glob("*-profile.csv")
        if date is None or path.name[: len(date)] <= date
    )
    newest = runs[-1]["environment"]
    return {
        "device": newest["device"],
        "date": newest["date"][:10],
        "runs": runs,
        "rows": rows,
        "profile": (
            profile_kernels.parse(profiles[-1].read_text()) if profiles else record["profile"]
        ),
    }


def outdated(record: Mapping) -> set[tuple[str, str]]:
    """The runs of other kernels than those of this checkout."""
    return {identity(run) for run in record["runs"] if not sources.is_current(run)}


def by_key(rows: Iterable[dict]) -> dict[Key, dict]:
    return {(row["op"], row["table"], row["case"], row["implementation"]): row for row in rows}


# -- write
# -------------------------------------------------------------------------------------------------------------  # noqa: E501


def markdown(record: dict, pictures: Iterable[str]) -> str:
    """The README of a device's folder. ``pictures``: files beside it."""
    newest = record["runs"][-1]["environment"]
    facts = ", ".join(
        f"{name} {value}"
        for name, value in newest.items()
        if name not in ("command", "commit", "kernels", "device", "date")
    )
    lines = [
        f"# The record of {record['device']}, {record['date']}",
        "",
        f"{facts}. All rows: [record.json](record.json).",
    ]
    lines += (
        tables_of_cpu(record)
        if record["device"].startswith("CPU")
        else tables_of_gpu(record, pictures)
    )
    lines += [
        "",
        "## Runs",
        "",
        "| benchmark | begun | commit | command | seconds | |",
        "|---|---|---|---|---|---|",
    ]
    old = outdated(record)
    for run in record["runs"]:
        environment = run["environment"]
        command = environment["command"].replace("|", r"\|")  # which would end the cell
        begun = environment["date"] + (" †" if identity(run) in old else "")
        commit = environment.get("commit", "not noted")
        cells = [run["op"], begun, commit, f"`{command}`", report.number(run["seconds"])]
        lines.append(f"| {' | '.join([*cells, '' if run['complete'] else 'did not finish'])} |")
    for protocol in dict.fromkeys(run["protocol"]["text"] for run in record["runs"]):
        lines += ["", protocol]
    return "\n".join(lines) + "\n"


def tables_of_gpu(record: dict, pictures: Iterable[str]) -> list[str]:
    """The published headlines beside ours, and the tables without published figures."""
    old = outdated(record)
    rows = ({**row, "outdated": (row["date"], row["op"]) in old} for row in record["rows"])
    measured = by_key(rows)
    lines = ["", PREAMBLE, "", *(f"![{Path(name).stem}]({name})\n" for name in pictures)]
    for table in (*HEADLINES, *TABLES):
        lines += headline.markdown(table, measured)
    return lines + profile_kernels.markdown(record["profile"])


def tables_of_cpu(record: dict) -> list[str]:
    """All measured rows: nothing is published for CPUs."""
    return [
        line
        for table, rows in report.by_table(record).items()
        for line in report.table_lines(table, report.columns(rows))
    ]


def save(record: dict, folder: Path) -> None:
    def write_json(path: Path) -> None:
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    report.write_atomically(folder / "record.json", write_json)
    title, on_cpu = f"{record['device']}, {record['date']}", record["device"].startswith("CPU")
    pictures = [] if on_cpu else record_pictures.save(record["rows"], folder, title)
    report.write_atomically(
        folder / "README.md", lambda path: path.write_text(markdown(record, pictures))
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes the record of a device's benchmarks.")
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        help="folder of a device, with runs/ (default: results/<the GPU here>/)",
    )
    parser.add_argument("--date", help="leave out the runs of later days, YYYY-MM-DD")
    options = parser.parse_args(argv)
    if options.folder is None and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device: name the folder of the results")
    folder = options.folder or report.device_folder(torch.cuda.get_device_name())
    record = make_record(folder, options.date)
    save(record, folder)
    print(f"{folder / 'README.md'}: {len(record['rows'])} rows of {len(record['runs'])} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
