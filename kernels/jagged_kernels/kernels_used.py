"""docs/kernels-used.md: which kernels run for which input, printed from the selectors. No GPU and no triton.

    python -m jagged_kernels.kernels_used docs/kernels-used.md        # from kernels/, or with jagged-modules installed

Each operator with a selector has a section: a function that returns Markdown, in `SECTIONS`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from .attention.select import AttentionProblem, Selection, select

GPUS = {"A100": (8, 0), "RTX 3090, 4090, L4": (8, 9), "H100, H200": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0)}
LENGTHS = dict(q_segments=64, kv_segments=64)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    header = list(header)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def attention() -> str:
    """The section on attention."""
    dtypes = {"fp16, bf16": torch.bfloat16, "fp32": torch.float32}
    long = LENGTHS | dict(q_rows=64 * 500, kv_rows=64 * 500)
    by_gpu = [
        [name, f"{low} to {high}", *(_kernels(select(AttentionProblem(high, high, dtype, gpu, **long))) for gpu in GPUS.values())]
        for name, dtype in dtypes.items()
        for low, high in ((1, 32), (33, 64), (65, 128), (129, 256))
    ]
    h100 = dict(head_dim=128, v_dim=128, dtype=torch.bfloat16, capability=(9, 0)) | long
    cases = {
        "as above": {},
        "head dim 36, no multiple of 8": dict(head_dim=36, v_dim=36),
        "head dim 64, value head dim 128": dict(head_dim=64),
        "rows that do not begin at 16-byte boundaries": dict(misaligned=("q",)),
        "segments of 25 by 25 rows": dict(q_rows=64 * 25, kv_rows=64 * 25),
        "segments of 10 by 200 rows": dict(q_rows=64 * 10, kv_rows=64 * 200),
        "segments of 1 by 200 rows": dict(q_rows=64, kv_rows=64 * 200),
        "segments of 25 by 25 rows, batch-invariant": dict(q_rows=64 * 25, kv_rows=64 * 25, batch_invariant=True),
        'activation "gelu_taylor"': dict(activation="gelu_taylor"),
        'activation "gelu"': dict(activation="gelu"),
        'activation "gelu", head dim 64': dict(activation="gelu", head_dim=64, v_dim=64),
        "a mask": dict(masked=True),
        'implementation="triton"': dict(implementation="triton"),
    }
    on_h100 = [[case, _kernels(select(AttentionProblem(**(h100 | change))))] for case, change in cases.items()]
    return f"""## Attention

`jagged_kernels.attention.select` decides. A cell names the kernels ("hopper": `attention/hopper_*.py`, "triton":
`attention/triton_kernels.py`) and their tiles: rows of a tile × rows of the blocks that it loops over, for the forward, for dq, and for dk
and dv.

Segments of 500 rows, softmax, no mask, query and value head dims alike (multiples of 8):

{table(["dtype", "head dim", *(f"{name} ({major}.{minor})" for name, (major, minor) in GPUS.items())], by_gpu)}

On an H100, bf16, head dim 128:

{table(["input", "kernels"], on_h100)}
"""


def _kernels(selection: Selection) -> str:
    tiles = ", ".join(f"{config.tile}×{config.block}" for config in (selection.fwd, selection.dq, selection.dkdv))
    return f"{selection.backend} {tiles}"


SECTIONS = (attention,)


def document() -> str:
    """The whole page."""
    source = "Printed by `python -m jagged_kernels.kernels_used`; a test holds it to the code. Do not edit it by hand."
    title = f"# Which kernels run\n\n{source}\n"
    return "\n".join([title, *(section() for section in SECTIONS)])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document())
