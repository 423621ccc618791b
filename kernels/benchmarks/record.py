"""The record of a day's benchmarks on a device: one JSON file, one README with the published headlines beside ours, pictures.

    python kernels/benchmarks/record.py                             # of the GPU that is here, its latest day
    python kernels/benchmarks/record.py FOLDER --date 2026-11-21    # of results that were brought here

Reads ``<date>-*.json`` in the folder, for cases that the day left out those of days before, and ``<date>-profile.csv`` where
profile_kernels.py left one. Of a case that several runs measured, the record has the rows of one: of the latest day that of the most
implementations, the latest of those. Ratios are of one run then.
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
import torch
from headline import Key
from published import HEADLINES

PREAMBLE = """\
What this project and its peers measure here, beside what the sources publish of theirs, on other devices: compare ratios. "missing": no
run of this record has it. "not installed": the peer. "unavailable": it does not run here. "% of floor": the time that the work and the
bytes counted would take at what long products and large copies attain on this device, over the time taken; a short call may attain
more. A run that "did not finish" was stopped, and holds the cases it completed."""
DATED = re.compile(r"(\d{4}-\d\d-\d\d)-")
RUN_FACTS = ("op", "file", "environment", "protocol", "complete", "seconds")


# -- collect -----------------------------------------------------------------------------------------------------------


def load_runs(folder: Path, date: str) -> list[dict]:
    """The day's runs and those before, the earliest first, each with the name of its ``file``; rows of tables of another form among the
    others."""
    paths = [path for path in folder.glob("*.json") if (found := DATED.match(path.name)) and found[1] <= date]
    if not any(path.name.startswith(date) for path in paths):
        raise FileNotFoundError(f"no {date}-*.json in {folder}")
    runs = [{"seconds": None, **json.loads(path.read_text()), "file": path.name} for path in paths]
    for run in runs:
        others = run.pop("other_tables", {})
        rows = [*run["rows"], *(other_row(table, row) for table, rows in others.items() for row in rows)]
        run["rows"] = [{"op": run["op"], **{key: value for key, value in row.items() if key != "traceback"}} for row in rows]
        run["environment"] = {**run["environment"], "command": re.sub(r" --out \S+", "", run["environment"].get("command", ""))}
    return sorted(runs, key=lambda run: (run["environment"]["date"], run["file"]))


def other_row(table: str, row: Mapping) -> dict:
    """A row of a table of another form: its texts, but for the implementation's, are the case."""
    texts = [value for key, value in row.items() if isinstance(value, str) and key not in ("implementation", "status", "traceback")]
    return {"table": table, "case": ", ".join(texts), "implementation": "(table)", "status": "ok", **row}


def day_and_size(rows: list[dict]) -> tuple[str, int]:
    return rows[0]["file"][:10], len(rows)


def merge(runs: Iterable[dict]) -> list[dict]:
    """All cases, each with the rows of the latest day's run that has most of them, the latest of those."""
    cases: dict[tuple[str, str, str], list[dict]] = {}
    for run in runs:
        of_run: dict[tuple[str, str, str], list[dict]] = {}
        for row in run["rows"]:
            of_run.setdefault((row["op"], row["table"], row["case"]), []).append({**row, "file": run["file"]})
        cases |= {case: rows for case, rows in of_run.items() if case not in cases or day_and_size(rows) >= day_and_size(cases[case])}
    return [row for rows in cases.values() for row in rows]


def make_record(folder: Path, date: str) -> dict:
    runs = load_runs(folder, date)
    profile = folder / f"{date}-profile.csv"
    rows = merge(runs)
    used = {row["file"] for row in rows}
    runs = [run for run in runs if run["file"].startswith(date) or run["file"] in used]
    return {
        "device": runs[-1]["environment"]["device"],
        "date": date,
        "runs": [{fact: run[fact] for fact in RUN_FACTS} for run in runs],
        "rows": rows,
        "profile": profile_kernels.parse(profile.read_text()) if profile.exists() else [],
    }


def by_key(rows: Iterable[dict]) -> dict[Key, dict]:
    return {(row["op"], row["table"], row["case"], row["implementation"]): row for row in rows}


# -- write -------------------------------------------------------------------------------------------------------------


def markdown(record: dict, pictures: Iterable[str]) -> str:
    """The README of a device's folder. ``pictures``: the files there are."""
    measured = by_key(record["rows"])
    newest = record["runs"][-1]["environment"]
    facts = ", ".join(f"{name} {value}" for name, value in newest.items() if name not in ("command", "device", "date"))
    file = f"{record['date']}.json"
    lines = [f"# The record of {record['device']}, {record['date']}", "", f"{facts}. All rows: [{file}]({file}).", "", PREAMBLE, ""]
    lines += [f"![{Path(name).stem}]({name})\n" for name in pictures]
    for table in HEADLINES:
        lines += headline.markdown(table, measured)
    lines += profile_kernels.markdown(record["profile"])
    lines += ["", "## Runs", "", "| run | begun | command | seconds | |", "|---|---|---|---|---|"]
    for run in record["runs"]:
        name, environment = run["file"].removesuffix(".json"), run["environment"]
        command = environment["command"].replace("|", r"\|")  # which would end the cell
        cells = [f"[{name}]({name}.md)", environment["date"], f"`{command}`", report.number(run["seconds"])]
        lines.append(f"| {' | '.join([*cells, '' if run['complete'] else 'did not finish'])} |")
    return "\n".join([*lines, "", record["runs"][-1]["protocol"]["text"]]) + "\n"


def save(record: dict, folder: Path) -> None:
    def write_json(path: Path) -> None:
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    report.write_atomically(folder / f"{record['date']}.json", write_json)
    pictures = record_pictures.save(record["rows"], folder, f"{record['device']}, {record['date']}")
    report.write_atomically(folder / "README.md", lambda path: path.write_text(markdown(record, pictures)))


def latest_date(folder: Path) -> str:
    dates = [found[1] for path in folder.glob("*.json") if (found := DATED.match(path.name))]
    if not dates:
        raise FileNotFoundError(f"no results in {folder}")
    return max(dates)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes the record of a device's benchmarks.")
    parser.add_argument("folder", type=Path, nargs="?", help="results of a device (default: results/<the GPU here>/)")
    parser.add_argument("--date", default="", help="default: the latest there is")
    options = parser.parse_args(argv)
    if options.folder is None and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device: name the folder of the results")
    folder = options.folder or report.results_folder(torch.cuda.get_device_name())
    record = make_record(folder, options.date or latest_date(folder))
    save(record, folder)
    print(f"{folder / 'README.md'}: {len(record['rows'])} rows of {len(record['runs'])} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
