"""The pictures of the record: speed-up ladders, TFLOP/s against length and on real lengths, % of
floor, latency against candidates per user.

Points without a measurement are left out; the record's tables say "missing".
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import length_gaps
import report
from names import DENSE, DENSE_FLASH, INPUT_REPLICATED, NO_WORKSPACE, OURS, PORTABLE, UNFUSED

NAMES = {
    OURS: "this project",
    PORTABLE: "this project, portable",
    UNFUSED: "jagged operators, unfused",
}
PUBLISHED_STAGES = {
    "decomposed": 1.944 / 1.389,
    "padded": 1.944 / 0.798,
    PORTABLE: 1.944 / 0.580,
    OURS: 1.944 / 0.482,
}
# the strongest peers, and what models usually do
COMPARED = (
    *(OURS, "FlashAttention-4, folded", "SDPA cuDNN, folded", "FBGEMM ikbo (Triton)"),
    *("padded", "replicate + SDPA cuDNN", INPUT_REPLICATED),
)
FLOORS = {  # op -> beginnings of the titles of the tables whose % of floor is drawn
    "linear_compress": ("batch size",),
    "attention": ("jagged self-attention", "target attention"),
    "gdpa": ("GDPA",),
    "block_attention": ("block attention", "with rotary"),
    "jagged_ops": ("operators",),
}


def series(
    rows: Iterable[Mapping], op: str, table: str, pattern: str, value: str
) -> dict[str, list[tuple[int, float]]]:
    """Implementation -> its points, sorted: the number that ``pattern`` finds in the case, and the
    value there.

    ``table``: the beginning of the table's title.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        found = re.fullmatch(pattern, row["case"])
        if (
            row["op"] == op
            and row["table"].startswith(table)
            and found
            and row.get(value) is not None
        ):
            points.setdefault(row["implementation"], []).append((int(found[1]), row[value]))
    return {implementation: sorted(xy) for implementation, xy in points.items()}


def draw_lines(
    axes,
    points: Mapping[str, list[tuple[int, float]]],
    title: str,
    xlabel: str,
    ylabel: str,
    wide: bool = False,
) -> None:
    """wide: the legend is beside the axes, not below."""
    others = (f"C{number}" for number in itertools.count(1))
    for name, xy in points.items():
        colour, width = ("C0", 2.5) if name == OURS else (next(others), 1.2)
        axes.plot(*zip(*xy), marker="o", color=colour, linewidth=width, label=NAMES.get(name, name))
    axes.set_xscale("log", base=2)
    ticks = sorted({x for xy in points.values() for x, _ in xy})
    axes.set_xticks(ticks, ticks)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if points:
        below = dict(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
        axes.legend(**dict(loc="center left", bbox_to_anchor=(1, 0.5)) if wide else below)


def ladders(figure, rows: list[dict]) -> None:
    left, right = figure.subplots(1, 2)
    of = {
        row["implementation"]: row.get("forward_ms")
        for row in rows
        if row["op"] == "linear_compress" and row["case"] == "B=1024"
    }
    baseline = of.get(INPUT_REPLICATED)
    here = {name: baseline / of[name] for name in PUBLISHED_STAGES if baseline and of.get(name)}
    stages = list(PUBLISHED_STAGES)
    for shift, label, heights, colour in (
        (-0.2, "published, H100", PUBLISHED_STAGES, "C7"),
        (0.2, NAMES[OURS], here, "C0"),
    ):
        left.bar(
            [stages.index(name) + shift for name in heights],
            list(heights.values()),
            0.4,
            label=label,
            color=colour,
        )
    left.set_xticks(range(4), ["1 decomposed", "2 padded", "3 fused", "4 one launch"])
    left.set_title("linear compression, forward, by stage")
    left.set_ylabel("speed-up over one GEMM")
    left.legend()
    ladder = series(rows, "attention", "ladder", r"B\d+ N(\d+) .*", "forward_ms")
    dense = dict(ladder.get(DENSE, ()))
    over = {
        name: [(x, dense[x] / y) for x, y in ladder.get(name, ()) if x in dense]
        for name in (UNFUSED, DENSE_FLASH, OURS)
    }
    over = {name: xy for name, xy in over.items() if xy}
    draw_lines(
        right,
        over,
        "jagged attention, forward",
        "maximum length, rows (lengths are uniform)",
        "speed-up over padded attention",
    )


def lengths(figure, rows: list[dict]) -> None:
    gaps = length_gaps.length_gaps(rows, "uniform")
    figure.set_size_inches(8, 12 if gaps else 9)
    panels = figure.subplots(4 if gaps else 3, 1)
    for axes, (table, op, pattern, value, title) in zip(
        panels[:3],
        (
            (
                "target attention",
                "attention",
                r"history (\d+)",
                "forward_tflops",
                "target attention, forward",
            ),
            (
                "GDPA",
                "gdpa",
                r"q and kv full L=(\d+)",
                "forward_tflops",
                "GDPA, full segments, forward",
            ),
            (
                "GDPA",
                "gdpa",
                r"q and kv jagged L=(\d+)",
                "backward_tflops",
                "GDPA, jagged segments, backward",
            ),
        ),
    ):
        points = series(rows, op, table, pattern, value)
        points.pop(NO_WORKSPACE, None)  # its forward is the same
        draw_lines(axes, points, title, "maximum length, rows", "TFLOP/s", wide=True)
    if gaps:
        real_lengths(panels[3], gaps)


def real_lengths(axes, found: list[dict]) -> None:
    """How much faster uniform lengths are than those of files, after GDPA's Figures 2 and 11."""
    gaps = []
    for gap in found:
        file, *_, head_dim = gap["case"].split()
        name = NAMES.get(gap["implementation"], gap["implementation"])
        for key, title in length_gaps.PASSES.items():
            case = f"{file} {head_dim}, {title}"
            gaps.append({"case": case, "implementation": name, "gap": gap[key]})
    names = dict.fromkeys(gap["implementation"] for gap in gaps)
    report.draw_bars(axes, gaps, "gap", 1, {name: f"C{i}" for i, name in enumerate(names)})
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_title("self-attention, lengths of public logs")
    axes.set_ylabel("TFLOP/s, uniform\nover real lengths")


def floors(figure, rows: list[dict]) -> None:
    axes = figure.subplots()
    drawn = [
        row
        for op, tables in FLOORS.items()
        for row in rows
        if row["op"] == op
        and row["table"].startswith(tables)
        and row["implementation"] == OURS
        and row.get("forward_floor_percent")
    ]
    backward = [
        row.get("backward_floor_percent") or row.get("forward_backward_floor_percent") or 0.0
        for row in drawn
    ]
    forward = [row["forward_floor_percent"] for row in drawn]
    for shift, label, widths in (
        (-0.2, "forward", forward),
        (0.2, "backward alone, or forward + backward", backward),
    ):
        axes.barh([position + shift for position in range(len(drawn))], widths, 0.4, label=label)
    axes.set_yticks(range(len(drawn)), [f"{row['op']}: {row['case']}" for row in drawn], fontsize=7)
    axes.set_ylim(max(len(drawn), 1) - 0.5, -0.5)
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_xlabel("% of floor: shortest possible over measured time")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=2)


def candidates(figure, rows: list[dict]) -> None:
    points = series(rows, "linear_compress", "candidates per user", r"(\d+) per user", "forward_ms")
    points.pop("padded, torch.matmul", None)  # so slow that the others would look flat
    draw_lines(
        figure.subplots(), points, "linear compression, forward", "candidates per user", "time, ms"
    )


def peers(figure, rows: list[dict]) -> None:
    """The README's picture. All was measured on one device."""
    left, right = figure.subplots(1, 2)
    attention = series(rows, "attention", "target attention", r"history (\d+)", "forward_tflops")
    compression = series(
        rows, "linear_compress", "candidates per user", r"(\d+) per user", "forward_tflops"
    )
    for axes, points, title, xlabel in (
        (left, attention, "target attention, forward", "history, rows"),
        (right, compression, "linear compression, forward", "candidates per user"),
    ):
        kept = {name: points[name] for name in COMPARED if name in points}
        draw_lines(axes, kept, title, xlabel, "TFLOP/s")


PICTURES = {  # file -> function that draws it, size in inches, of which pages have about nine
    "peers.png": (peers, (9, 4.2)),
    "ladders.png": (ladders, (9, 4.2)),
    "lengths.png": (lengths, (8, 9)),
    "floors.png": (floors, (8, 10)),
    "candidates.png": (candidates, (7, 5.2)),
}


def save(rows: list[dict], folder: Path, title: str) -> list[str]:
    """Writes the pictures; returns their names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.style.use(report.PICTURE_STYLE)
    for name, (draw, size) in PICTURES.items():
        figure = plt.figure(figsize=size)
        figure.suptitle(title)
        draw(figure, rows)
        report.write_atomically(
            folder / name, lambda path, figure=figure: figure.savefig(path, dpi=150)
        )
        plt.close(figure)
    return list(PICTURES)
