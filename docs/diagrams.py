"""Draws the diagrams of how-kernels-work.md: `python docs/diagrams.py` rewrites the files of
pictures/. Needs Python alone."""

from pathlib import Path

FOLDER = Path(__file__).parent / "pictures"
# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, YELLOW, GREY, INK = (
    "#56B4E9",
    "#E69F00",
    "#009E73",
    "#F0E442",
    "#DDDDDD",
    "#222222",
)


class Drawing:
    """An SVG on a white ground, in one font."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
                f' width="{width}" role="img" aria-label="{title}" font-family="sans-serif"'
                f' font-size="13" fill="{INK}">'
            ),
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def box(self, x: float, y: float, w: float, h: float, fill: str, label: str = "") -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" stroke="{INK}"'
            ' stroke-width="0.8"/>'
        )
        if label:
            self.text(x + w / 2, y + h / 2 + 4.5, label, "middle")

    def text(self, x: float, y: float, text: str, anchor: str = "start", size: int = 13) -> None:
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{text}</text>'
        )

    def legend(self, x: float, y: float, entries: dict[str, str]) -> None:
        for label, fill in entries.items():
            self.box(x, y, 14, 14, fill)
            self.text(x + 20, y + 12, label)
            x += 40 + 7 * len(label)

    def save(self, name: str) -> None:
        (FOLDER / name).write_text("\n".join([*self.parts, "</svg>", ""]), encoding="utf-8")


def draw_tiles() -> None:
    """Causal self-attention of three users: which blocks of keys each tile of queries visits."""
    drawing, side = Drawing(760, 280, "tiles and blocks of three users"), 30
    x = 60
    for user, blocks in enumerate((3, 1, 6)):
        drawing.text(x, 40, f"user {user}: {blocks} block{'s' if blocks > 1 else ''} of keys")
        for row in range(blocks):
            for column in range(blocks):
                fill = GREEN if column < row else ORANGE if column == row else GREY
                drawing.box(x + column * side, 50 + row * side, side, side, fill)
        x += blocks * side + 130
    drawing.text(8, 70, "queries")
    drawing.legend(
        60,
        250,
        {
            "full block: no mask": GREEN,
            "masked block: the mask is computed": ORANGE,
            "hidden block: skipped": GREY,
        },
    )
    drawing.save("tiles.svg")


def draw_warp_roles() -> None:
    """The loop of the Hopper forward at head dim 128."""
    drawing, width = Drawing(760, 270, "warp roles of the Hopper forward"), 96
    lanes = {"warp 8: producer": 40, "warps 0–3: consumer": 95, "warps 4–7: consumer": 160}
    for name, y in lanes.items():
        drawing.text(10, y + 20, name)
    for i in range(6):
        drawing.box(150 + i * width, 40, width / 2, 30, BLUE, f"K{i}")
        drawing.box(150 + (i + 0.5) * width, 40, width / 2, 30, BLUE, f"V{i}")
    for y in (95, 160):
        for i in range(5):
            x = 150 + (i + 1) * width
            drawing.box(x, y, width * 0.55, 22, GREEN, f"S{i}")
            drawing.box(x + width * 0.55, y, width * 0.45, 22, YELLOW, f"P{i}")
            if i:
                drawing.box(x, y + 22, width * 0.8, 22, ORANGE, f"P{i - 1}·V{i - 1}")
    drawing.text(150, 225, "time →")
    drawing.legend(
        150,
        238,
        {
            "TMA load": BLUE,
            "MMA: scores S = QKᵀ": GREEN,
            "softmax: P": YELLOW,
            "MMA: O += P·V": ORANGE,
        },
    )
    drawing.save("warp-roles.svg")


def draw_zigzag() -> None:
    """Tiles sorted by work, assigned to four workers in alternating direction."""
    work = [9, 8, 7, 6, 5, 4, 3, 2]
    workers, unit = 4, 20
    drawing = Drawing(760, 250, "zigzag assignment")
    for panel, (title, order) in enumerate(
        {
            "zigzag": [0, 1, 2, 3, 3, 2, 1, 0],
            "same direction in each wave": [0, 1, 2, 3, 0, 1, 2, 3],
        }.items()
    ):
        x0, ends = 90 + 380 * panel, [0] * workers
        drawing.text(x0, 30, title)
        for index, (worker, size) in enumerate(zip(order, work)):
            drawing.box(
                x0 + ends[worker] * unit,
                45 + worker * 34,
                size * unit,
                26,
                BLUE if index < workers else ORANGE,
                str(size),
            )
            ends[worker] += size
        for worker in range(workers):
            drawing.text(x0 - 70, 62 + worker * 34, f"worker {worker}")
        drawing.text(
            x0, 200, f"the longest takes {max(ends)} blocks, the mean is {sum(work) / workers:g}"
        )
    drawing.legend(90, 220, {"first wave": BLUE, "second wave": ORANGE})
    drawing.text(330, 232, "number: blocks of keys that the tile visits")
    drawing.save("zigzag.svg")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    draw_tiles()
    draw_warp_roles()
    draw_zigzag()
