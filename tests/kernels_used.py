"""docs/kernels-used.md: which kernels run for which input, printed from the selectors. No GPU and
no triton.

    python -m tests.kernels_used docs/kernels-used.md

Each operator with a selector has a section: a function that returns Markdown, in `SECTIONS`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from jagged_kernels.attention.select import AttentionProblem, Selection, select
from jagged_kernels.block_attention.configs import fits_shared_memory
from jagged_kernels.block_attention.select import BlockAttentionProblem, select_block_attention
from jagged_kernels.din import configs as din_configs
from jagged_kernels.linear_compress.select import (
    LinearCompressProblem,
    select_backward,
    select_forward,
)
from jagged_kernels.matmul.configs import jagged_matmul_config
from jagged_kernels.rows.configs import (
    GATE_BACKWARD,
    RowsConfig,
    activation_config,
    padding_config,
    rows_config,
)
from jagged_kernels.softmax.configs import jagged2_softmax_config, jagged_softmax_config

TYPICAL_BLOCKS = BlockAttentionProblem(
    num_heads=4,
    num_kv_heads=4,
    head_dim=128,
    dtype=torch.bfloat16,
    block_size=64,
    rotary="none",
    aligned=True,
    device_type="cuda",
    capability=(9, 0),
)
GPUS = {
    "A100": (8, 0),
    "RTX 3090, 4090, L4": (8, 9),
    "H100, H200": (9, 0),
    "B200": (10, 0),
    "RTX 5090": (12, 0),
}
GPU_COLUMNS = [f"{name} ({major}.{minor})" for name, (major, minor) in GPUS.items()]
DTYPES = {"fp16, bf16": torch.bfloat16, "fp32": torch.float32}
DIMS = {"1 to 32": 32, "33 to 64": 64, "65 to 128": 128, "129 to 256": 256}


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head, *lines = ("| " + " | ".join(cells) + " |" for cells in (list(header), *rows))
    return "\n".join([head, re.sub(r"[^|]+", "---", head), *lines])


def merged(header: list[str], columns: Iterable[str], rows: Iterable[list[str]]) -> str:
    """A table whose rows have a label for each name of the header, then a cell for each column.
    Equal columns are one, and so are equal rows, whatever their last labels are."""
    last = len(header) - 1
    names: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        names.setdefault((*row[:last], *row[last + 1 :]), []).append(row[last])
    cells = list(zip(*names))
    shared: dict[tuple[str, ...], list[str]] = {}
    for name, column in zip(columns, cells[last:]):
        shared.setdefault(column, []).append(name)
    labels = *cells[:last], map(", ".join, names.values())
    return table([*header, *map("; ".join, shared.values())], zip(*labels, *shared))


def by_gpu(
    label: str,
    inputs: Mapping[str, Any],
    kernels: Callable[[torch.dtype, tuple[int, int], Any], str],
) -> str:
    """A table of what `kernels` gives for each dtype, GPU and input, whose name `label` is."""
    rows = [
        [dtype, name, *(kernels(kind, gpu, given) for gpu in GPUS.values())]
        for dtype, kind in DTYPES.items()
        for name, given in inputs.items()
    ]
    return merged(["dtype", label], GPU_COLUMNS, rows)


def _rows(queries: int, keys: int, segments: int = 64) -> dict[str, int]:
    """Segments of so many rows."""
    sizes = dict(q_rows=segments * queries, kv_rows=segments * keys)
    return sizes | dict(q_segments=segments, kv_segments=segments)


def attention() -> str:
    """The section on attention."""
    long = _rows(500, 500)
    all_gpus = by_gpu(
        "head dim",
        DIMS,
        lambda dtype, gpu, dim: _kernels(select(AttentionProblem(dim, dim, dtype, gpu, **long))),
    )
    h100 = (
        dict(head_dim=128, v_dim=128, dtype=torch.bfloat16, capability=(9, 0), num_sms=132) | long
    )
    four_heads = dict(num_heads=4, num_kv_heads=4)
    cases = {
        "head dim 36, no multiple of 8": dict(head_dim=36, v_dim=36),
        "head dim 64, value head dim 128": dict(head_dim=64),
        "rows that do not begin at 16-byte boundaries": dict(misaligned=("q",)),
        "segments of 10 by 200 rows": _rows(10, 200),
        "1024 segments of 10 by 300 rows, 4 heads": _rows(10, 300, 1024) | four_heads,
        "4096 segments of 5 by 20 rows, 4 heads": _rows(5, 20, 4096) | four_heads,
        "2048 segments of 55 rows, 4 heads, self-attention": (
            _rows(55, 55, 2048) | four_heads | dict(self_attention=True)
        ),
        "segments of 25 by 25 rows, batch-invariant": _rows(25, 25) | dict(batch_invariant=True),
        'activation "gelu_taylor"': dict(activation="gelu_taylor"),
        "a mask": dict(masked=True),
        "dropout of weights": dict(dropout=True),
        "segments of 4096 rows": _rows(4096, 4096),
        "segments of 4096 rows, head dim 64, causal": (
            _rows(4096, 4096) | dict(head_dim=64, v_dim=64, masked=True, causal=True)
        ),
    }
    on_h100 = [
        [case, _kernels(select(AttentionProblem(**(h100 | change))))]
        for case, change in cases.items()
    ]
    return f"""## Attention

`jagged_kernels.attention.select` decides. A cell has the kernels ("hopper": `attention/hopper/`,
"triton": `attention/triton_*.py`) and their tiles, rows × rows of the blocks: forward, dq, dk and
dv. One kernel for all gradients has one entry; that of segments with few queries follows the
forward's. "packed": short segments share tiles (`attention/triton_packed.py`).

Segments of 500 rows, softmax, no mask, query and value head dims alike (multiples of 8):

{all_gpus}

Other inputs on an H100, bf16, head dim 128:

{table(["input", "kernels"], on_h100)}
"""


def _kernels(selection: Selection) -> str:
    backward = [selection.one_pass] if selection.one_pass else [selection.dq, selection.dkdv]
    if selection.short_queries:
        backward.insert(0, selection.short_queries)
    tiles = ", ".join(f"{config.tile}×{config.block}" for config in (selection.fwd, *backward))
    packed = {"packed_fwd": "forward", "packed_bwd": "backward"}
    packed = [name for field, name in packed.items() if getattr(selection, field)]
    return f"{selection.backend} {tiles}" + (f"; packed {' and '.join(packed)}" if packed else "")


def block_attention() -> str:
    """The section on block attention."""
    all_gpus = by_gpu(
        "head dim",
        DIMS,
        lambda dtype, gpu, dim: _block_kernels(head_dim=dim, dtype=dtype, capability=gpu),
    )
    cases = {
        "head dim 36, no multiple of 8": dict(head_dim=36),
        "rows that do not begin at 16-byte boundaries": dict(aligned=False),
        "two query heads per key head": dict(num_kv_heads=2),
        "blocks of 128 rows, head dim 256": dict(block_size=128, head_dim=256),
    }
    on_h100 = [[case, _block_kernels(**change)] for case, change in cases.items()]
    return f"""## Block attention

`jagged_kernels.block_attention.select` decides. Tiles are rows × columns, for the forward and the
backward. "attention": shared memory is too small, so jagged attention runs, with a segment for each
block.

Blocks of 64 rows, no rotary, as many key heads as query heads:

{all_gpus}

Other inputs on an H100, bf16, head dim 128:

{table(["input", "kernels"], on_h100)}
"""


def _block_kernels(**change) -> str:
    problem = TYPICAL_BLOCKS._replace(**change)
    sizes = problem.block_size, problem.num_heads // problem.num_kv_heads
    if not fits_shared_memory(problem.head_dim, problem.dtype.itemsize, problem.capability, *sizes):
        return "attention"
    forward, backward = (
        select_block_attention(kernel, problem, "auto") for kernel in ("fwd", "bwd")
    )
    return f"{forward.backend} " + ", ".join(
        f"{choice.config.block_m}×{choice.config.block_d}" for choice in (forward, backward)
    )


def linear_compress() -> str:
    """The section on linear compression."""
    problem = LinearCompressProblem(
        n=256,
        dtype=torch.bfloat16,
        aligned=True,
        nonempty=True,
        device_type="cuda",
        capability=(9, 0),
    )
    all_gpus = by_gpu(
        "N",
        {"64": 64, "128": 128, "129 or more": 256},
        lambda dtype, gpu, n: _gemm(problem, n=n, dtype=dtype, capability=gpu),
    )
    cases = {
        "N = 250, no multiple of 8": dict(n=250),
        'N = 64, implementation="hopper"': dict(n=64, implementation="hopper"),
        "embeddings whose rows do not begin at 16-byte boundaries": dict(aligned=False),
    }
    on_h100 = [[case, _gemm(problem, **change)] for case, change in cases.items()]
    gradients = by_gpu(
        "M × K",
        {"512 × 896": (512, 896), "384 × 1024": (384, 1024)},
        lambda dtype, gpu, size: _weight_gradient(
            problem._replace(dtype=dtype, capability=gpu), *size
        ),
    )
    return f"""## Linear compression

`jagged_kernels.linear_compress.select` decides. The forward's largest tiles are M × N × K.

{all_gpus}

Other inputs on an H100, bf16, N = 256:

{table(["input", "kernel"], on_h100)}

With "triton", a shared level is a GEMM of its own: "triton" if it has more tiles of 128 × 256 than
the GPU has multiprocessors, or with `jm.batch_invariant`; else cuBLAS, also in fp32. In the
backward, cuBLAS computes the embeddings' gradients, and "triton" with `jm.batch_invariant`. The
Triton GEMM for a weight's gradient `[M, K]` has tiles of M × K, and sums over N in blocks:

{gradients}
"""


def _gemm(problem: LinearCompressProblem, implementation: str = "auto", **change) -> str:
    choice = select_forward(problem._replace(**change), implementation)
    # Hopper's tiles have up to three M tiles of 64
    rows = 64 * 3 if choice.backend == "hopper" else choice.config.block_m
    return f"{choice.backend} {rows}×{choice.config.block_n}×{choice.config.block_k}"


def _weight_gradient(problem: LinearCompressProblem, m: int, k: int) -> str:
    (config,) = select_backward(problem, m, (k,), False).weights
    return f"{config.block_m}×{config.block_n}×{config.block_k}"


def matmul() -> str:
    """The section on jagged matrix multiplications."""
    # name → kernel, and result rows and columns that follow from the shapes, given a feature
    # dimension
    operators = {
        "`jagged_dense_bmm`, `jagged_linear`": ("dense", lambda dim: (0, dim)),
        "`jagged_jagged_bmm`": ("jagged", lambda dim: (dim, dim)),
        "`jagged_jagged_bmm_jagged_out`": ("outer", lambda dim: (0, 0)),
        "`array_jagged_bmm_jagged_out`": ("array", lambda dim: (0, dim)),
    }
    precisions = {"fp16, bf16": (2, "bf16x6"), "fp32 with tf32": (4, "tf32"), "fp32": (4, "bf16x6")}
    rows = [
        [
            name,
            precision,
            *(_matmul_tile(kernel, sizes(dim), itemsize, mma) for dim in (16, 64, 128, 256)),
        ]
        for name, (kernel, sizes) in operators.items()
        for precision, (itemsize, mma) in precisions.items()
    ]
    return f"""## Jagged matrix multiplications

`jagged_kernels.matmul.configs` decides. Tiles, M × N × K, on an H100, by feature dimension. "fp32
with tf32": after `torch.set_float32_matmul_precision("high")`.

{merged(["operator", "dtype"], ["16", "64", "128", "256"], rows)}
"""


def _matmul_tile(kernel: str, sizes: tuple[int, int], itemsize: int, precision: str) -> str:
    config = jagged_matmul_config(kernel, itemsize, (9, 0), *sizes, precision)
    return f"{config.block_m}×{config.block_n}×{config.block_k}"


def softmax() -> str:
    """The section on jagged softmax."""
    rows = [
        [name, *(_softmax_tile(dtype.itemsize, columns) for columns in (1, 16, 32, 64))]
        for name, dtype in DTYPES.items()
    ]
    over_rows, over_columns = (jagged2_softmax_config(columns) for columns in (False, True))
    return f"""## Jagged softmax

`jagged_kernels.softmax.configs` decides, alike for all GPUs. Tiles of `jagged_softmax`, rows of a
segment × columns, by the number of columns:

{merged(["dtype"], ["1", "16", "32", "64"], rows)}

Tiles of `jagged2_softmax`: {over_rows.lines}×{over_rows.length} for rows,
{over_columns.length}×{over_columns.lines} for columns.
"""


def _softmax_tile(itemsize: int, columns: int) -> str:
    config = jagged_softmax_config(itemsize, columns)
    return f"{config.length}×{config.lines}"


def rows() -> str:
    """The section on norms, activations, gates and conversions of rows."""
    widths = 64, 128, 512, 1024, 4096
    kernels = {"norm, its backward, gate": 16, "backward of the gate": GATE_BACKWARD}
    lines = [
        [name, *(_row_tile(rows_config(width, elements)) for width in widths)]
        for name, elements in kernels.items()
    ]
    lines.append(["activation", *(_row_tile(activation_config(width)) for width in widths)])
    for itemsize, name in ((4, "to and from padded rows"), (8, "the same, 8-byte elements")):
        lines.append([name, *(_row_tile(padding_config(width, itemsize)) for width in widths)])
    return f"""## Rows

`jagged_kernels.rows.configs` decides, alike for all GPUs and dtypes. Rows × columns of a tile, and
warps, by the number of columns of a group:

{table(["kernel", *map(str, widths)], lines)}
"""


def _row_tile(config: RowsConfig) -> str:
    return f"{config.rows}×{config.block}, {config.num_warps}"


def din() -> str:
    """The section on DIN's attention."""
    kernels = {"forward": "fwd", "dq": "dq", "the MLP's gradients": "dmlp", "dk and dv": "dkdv"}
    sizes = {"E=64, (80, 40)": (64, (80, 40)), "E=128, (80, 40)": (128, (80, 40))}
    sizes["E=256, (128,)"] = (256, (128,))
    programs, hopper = din_configs.CTAS, din_configs.HOPPER_CTAS
    rows = [
        [dtype, name, *(_din_tile(kernel, kind.itemsize, *size) for size in sizes.values())]
        for dtype, kind in DTYPES.items()
        for name, kernel in kernels.items()
    ]
    return f"""## DIN's attention

`jagged_kernels.din.configs` decides. Events of a block, and warps. A multiprocessor gets at most
{programs["fwd"]} programs of the forward, {programs["dq"]} of dq and of the MLP's gradients; on
Hopper {hopper["fwd"]} of the forward and {hopper["mlp"]} of gradients but dk. In bf16, Hopper has
kernels of its own for two layers where v is k: a forward up to E=128, a backward up to E=64 and 80
units.

{merged(["dtype", "kernel"], sizes, rows)}
"""


def _din_tile(kernel: str, itemsize: int, width: int, hidden: tuple[int, ...]) -> str:
    if not din_configs.has_kernels(width, width, hidden, itemsize):
        return "none"
    config = din_configs.din_config(kernel, itemsize, width, hidden)
    return f"{config.block}, {config.num_warps}"


SECTIONS = attention, din, block_attention, linear_compress, matmul, softmax, rows


def document() -> str:
    """The whole page."""
    source = "`python -m tests.kernels_used docs/kernels-used.md` writes this page."
    return "\n".join([f"# Which kernels run\n\n{source}\n", *(section() for section in SECTIONS)])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document())
