"""The files of a benchmark run: JSON with everything, a markdown table, a picture.

``python report.py results.json`` writes table and picture from the JSON, for example of a run that
was killed.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path

MISSING = "–"
PICTURE_STYLE = Path(__file__).parents[2] / "examples" / "pictures.mplstyle"


def device_folder(device: str) -> Path:
    """Where the record of a device is."""
    return Path(__file__).parent / "results" / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def runs_folder(device: str) -> Path:
    """Where runs on a device are saved, for record.py to merge. git ignores it."""
    return device_folder(device) / "runs"


def write_atomically(path: Path, write) -> None:
    """Calls ``write(temporary_path)`` and moves the file into place: a reader sees the old or the
    new file, never a partial one."""
    temporary = path.with_name(f".{path.name}.partial{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save(results: dict, stem: Path) -> None:
    """Writes ``<stem>.json`` and ``<stem>.md``."""
    write_atomically(
        stem.with_suffix(".json"),
        lambda path: path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n"),
    )
    write_atomically(stem.with_suffix(".md"), lambda path: path.write_text(markdown(results)))


# -- table -----------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Three significant digits or more, no exponent."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def megabytes(value: int | None) -> str:
    return MISSING if value is None else number(value / 1e6)


def plain_cell(value: str | float | None) -> str:
    return shorten(value).replace("|", "\\|") if isinstance(value, str) else number(value)


def shorten(text: str, width: int = 100) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def worst_error(row: dict) -> str:
    errors = [
        *row.get("forward_errors", {}).values(),
        *row.get("forward_backward_errors", {}).values(),
    ]
    return f"{max(errors):.1e}" if errors else MISSING


def remarks(row: dict) -> str:
    host = [f"{name} {number(ms)} ms" for name, ms in row.get("host_ms", {}).items()]
    return "; ".join(
        filter(
            None,
            ["" if row["status"] == "ok" else shorten(row["status"]), row.get("note", ""), *host],
        )
    ).replace("|", "\\|")


COLUMNS = {  # heading -> text of a cell
    "case": lambda row: row["case"],
    "implementation": lambda row: row["implementation"],
    "forward ms": lambda row: number(row.get("forward_ms")),
    "backward ms": lambda row: number(row.get("backward_ms")),
    "fwd+bwd ms": lambda row: number(row.get("forward_backward_ms")),
    "forward host ms": lambda row: number(row.get("forward_host_ms")),
    "backward host ms": lambda row: number(row.get("backward_host_ms")),
    "fwd+bwd host ms": lambda row: number(row.get("forward_backward_host_ms")),
    "forward TFLOP/s": lambda row: number(row.get("forward_tflops")),
    "backward TFLOP/s": lambda row: number(row.get("backward_tflops")),
    "fwd+bwd TFLOP/s": lambda row: number(row.get("forward_backward_tflops")),
    "forward GB/s": lambda row: number(row.get("forward_gbytes_per_s")),
    "backward GB/s": lambda row: number(row.get("backward_gbytes_per_s")),
    "fwd+bwd GB/s": lambda row: number(row.get("forward_backward_gbytes_per_s")),
    "forward GB": lambda row: number(row.get("forward_gbytes")),
    "backward GB": lambda row: number(row.get("backward_gbytes")),
    "fwd+bwd GB": lambda row: number(row.get("forward_backward_gbytes")),
    "forward floor ms": lambda row: number(row.get("forward_floor_ms")),
    "backward floor ms": lambda row: number(row.get("backward_floor_ms")),
    "fwd+bwd floor ms": lambda row: number(row.get("forward_backward_floor_ms")),
    "forward % of floor": lambda row: number(row.get("forward_floor_percent")),
    "backward % of floor": lambda row: number(row.get("backward_floor_percent")),
    "fwd+bwd % of floor": lambda row: number(row.get("forward_backward_floor_percent")),
    "forward speed-up": lambda row: number(row.get("forward_speedup")),
    "backward speed-up": lambda row: number(row.get("backward_speedup")),
    "fwd+bwd speed-up": lambda row: number(row.get("forward_backward_speedup")),
    "inputs MB": lambda row: megabytes(row.get("input_bytes")),
    "forward peak MB": lambda row: megabytes(row.get("forward_peak_bytes")),
    "fwd+bwd peak MB": lambda row: megabytes(row.get("forward_backward_peak_bytes")),
    "error": worst_error,
    "remarks": remarks,
}


def by_table(results: dict) -> dict[str, list[dict]]:
    tables = {}
    for row in results["rows"]:
        tables.setdefault(row["table"], []).append(row)
    return tables


def markdown(results: dict) -> str:
    """The tables of a run, without empty columns."""
    facts = ", ".join(
        f"{name} {value}"
        for name, value in results["environment"].items()
        if name not in ("command", "device")
    )
    lines = [
        f"# {results['op']} on {results['environment']['device']}",
        "",
        f"`{results['environment']['command']}`; {facts}.",
    ]
    lines += ["", results["protocol"]["text"]]
    if not results["complete"]:
        lines += ["", "**The run did not finish: these are the cases it completed.**"]
    for line in results.get("summary", []):
        lines += ["", line]
    for table, rows in by_table(results).items():
        lines += table_lines(table, columns(rows))
    for table, rows in results.get("other_tables", {}).items():
        headings = dict.fromkeys(
            heading for row in rows for heading in row if heading != "traceback"
        )
        lines += table_lines(
            table, {heading: [plain_cell(row.get(heading)) for row in rows] for heading in headings}
        )
    return "\n".join(lines) + "\n"


def columns(rows: list[dict]) -> dict[str, list[str]]:
    """Heading -> cells, without empty columns."""
    cells = {heading: [text(row) for row in rows] for heading, text in COLUMNS.items()}
    return {heading: texts for heading, texts in cells.items() if set(texts) - {MISSING, ""}}


def table_lines(title: str, columns: dict[str, list[str]]) -> list[str]:
    lines = ["", f"## {title}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(cells)} |" for cells in zip(*columns.values())]


# -- picture ---------------------------------------------------------------------------------------

# axis label -> (column, unit, factor); the first measured one that the case allows is drawn
PANELS = {
    **{
        title: [
            (f"{key}_tflops", "TFLOP/s", 1),
            (f"{key}_gbytes_per_s", "GB/s", 1),
            (f"{key}_ms", "ms", 1),
            (f"{key}_speedup", "speed-up", 1),
        ]
        for title, key in (
            ("forward", "forward"),
            ("backward", "backward"),
            ("forward + backward", "forward_backward"),
        )
    },
    "peak memory of a training step": [
        ("forward_backward_peak_bytes", "MB above the inputs", 1e-6)
    ],
}


def measured_panels(rows: list[dict]) -> list[tuple[str, str, str, float]]:
    """(title, column, unit, factor) of the panels that are not empty."""
    panels = []
    chosen = rows[0].get("picture", "")
    for title, choices in PANELS.items():
        choices = [
            choice
            for choice in choices
            if choice[0].endswith(chosen) and any(row.get(choice[0]) is not None for row in rows)
        ]
        panels += [(title, *choices[0])] if choices else []
    return panels


def draw_bars(axes, rows: list[dict], column: str, factor: float, colours: dict) -> None:
    """Grouped bars: a group per case, a bar per implementation in a fixed colour; no bar without a
    measurement."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    width = 0.8 / len(colours)
    for index, (name, colour) in enumerate(colours.items()):
        values = {
            row["case"]: row[column] * factor
            for row in rows
            if row["implementation"] == name and row.get(column) is not None
        }
        if not values:
            continue
        positions = [
            cases.index(case) + (index - (len(colours) - 1) / 2) * width for case in values
        ]
        axes.bar(positions, list(values.values()), width, color=colour, label=name)
    axes.set_xticks(range(len(cases)), cases, rotation=15, ha="right")
    axes.set_xlim(-0.5, len(cases) - 0.5)


def save_picture(results: dict, stem: Path) -> None:
    """Writes ``<stem>.png``: a row of panels per table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.style.use(PICTURE_STYLE)
    tables = {
        table: (rows, panels)
        for table, rows in by_table(results).items()
        if (panels := measured_panels(rows))
    }
    width = max((len(panels) for _, panels in tables.values()), default=1)
    figure, grid = plt.subplots(
        max(len(tables), 1),
        width,
        figsize=(6 * width + 2, 3.4 * max(len(tables), 1)),
        squeeze=False,
    )
    for axes in grid.flat:
        axes.set_axis_off()
    for (table, (rows, panels)), line in zip(tables.items(), grid):
        colours = {
            name: f"C{index}"
            for index, name in enumerate(dict.fromkeys(row["implementation"] for row in rows))
        }
        for axes, (title, column, unit, factor) in zip(line, panels):
            axes.set_axis_on()
            draw_bars(axes, rows, column, factor, colours)
            axes.set_title(f"{table}: {title}")
            axes.set_ylabel(unit)
        # not every panel has all
        bars = {name: bar for axes in line for bar, name in zip(*axes.get_legend_handles_labels())}
        line[len(panels) - 1].legend(
            bars.values(), bars, loc="upper left", bbox_to_anchor=(1.01, 1.0)
        )
    figure.suptitle(
        f"{results['op']} on {results['environment']['device']},"
        f" {results['environment']['date'][:10]}"
    )
    write_atomically(stem.with_suffix(".png"), lambda path: figure.savefig(path, dpi=110))
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(
            "Writes table and picture of benchmark runs, for example of one that was killed."
        )
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN.json", help="the JSON file of a run"
    )
    options = parser.parse_args(argv)
    for path in options.runs:
        if not path.is_file():
            parser.error(f"no file {path}")
        loaded = json.loads(path.read_text())
        save(loaded, path.with_suffix(""))
        save_picture(loaded, path.with_suffix(""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
