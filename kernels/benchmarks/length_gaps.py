"""How much faster attention is on synthetic lengths than on real ones of as many rows (after
Figures 2 and 11 of the GDPA post), from runs of `bench_everyday.py --lengths`.

    python kernels/benchmarks/bench_everyday.py --lengths FILE... --only "from FILE" --out FOLDER
    python kernels/benchmarks/length_gaps.py FOLDER/*-everyday.json --out gaps.png
    # instead of uniform lengths: equal ones, or lognormal ones fitted to the real ones
    python kernels/benchmarks/length_gaps.py FOLDER/*-everyday.json --out gaps.png --kind equal
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from bench_everyday import MEASURED, SYNTHETIC
from report import PICTURE_STYLE, draw_bars, write_atomically

PASSES = {"forward": "forward", "forward_backward": "forward + backward"}


def length_gaps(rows: Iterable[Mapping], kind: str) -> list[dict]:
    """A row for each file, head dim and implementation: TFLOP/s on lengths of this kind over those
    on the real ones, None without either."""
    measured = {
        (row["case"], row["implementation"]): row for row in rows if row["table"] == MEASURED
    }
    gaps = []
    for (case, name), real in measured.items():
        source, _, of_case = case.rpartition(", ")
        other = measured.get((f"{source}, {kind}", name))
        if of_case == "real" and other is not None:
            tflops = {x: (other.get(f"{x}_tflops"), real.get(f"{x}_tflops")) for x in PASSES}
            ratios = {x: a / b if a and b else None for x, (a, b) in tflops.items()}
            gaps.append({"case": source, "implementation": name, **ratios})
    return gaps


def save(gaps: list[dict], kind: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.style.use(PICTURE_STYLE)
    names = dict.fromkeys(row["implementation"] for row in gaps)
    colours = {name: f"C{index}" for index, name in enumerate(names)}
    figure, panels = plt.subplots(1, len(PASSES), figsize=(10, 4.2), sharey=True)
    for axes, (column, title) in zip(panels, PASSES.items()):
        draw_bars(axes, gaps, column, 1, colours)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(title)
    panels[0].set_ylabel(f"TFLOP/s, {kind} over real lengths")
    panels[0].legend()
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150))
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draws real beside synthetic lengths.")
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN.json", help="files of runs, or a record"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="PNG", help="the picture")
    parser.add_argument(
        "--kind",
        choices=SYNTHETIC,
        default="uniform",
        help="lengths beside the real ones (default: uniform)",
    )
    options = parser.parse_args(argv)
    for path in options.runs:
        if not path.is_file():
            parser.error(f"no file {path}")
    rows = [row for path in options.runs for row in json.loads(path.read_text())["rows"]]
    gaps = length_gaps(rows, options.kind)
    if not gaps:
        parser.error(f"no run has {MEASURED!r} with both real and {options.kind} lengths")
    save(gaps, options.kind, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
