"""The matrix of cells that are tested on a GPU: operator × dtype × sizes × option.

Every distinct kernel takes seconds to compile. So not every combination of options is a cell: two
options span a table, and the others vary along its diagonals. `make fuzz` draws all combinations.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from cases import Case, legal, simplest_case
from space import HALVES, OPERATORS, POINTWISE

DTYPES = ("float32", *HALVES)
SHORT = dict(float64="fp64", float32="fp32", float16="fp16", bfloat16="bf16")
ACTIVATIONS = ("softmax", *POINTWISE)
MASKS = (
    None,
    "causal",
    "causal-window",
    "grouped-targets",
    "hstu",
    "band",
    "open-targets",
    "semi-local",
    "truncated",
)
HEAD_DIMS = (64, 128, 16, 80, 256)
HEADS = ((4, 2), (2, 2), (3, 1))
PAIRS = (  # lengths of queries and keys
    ([3, 0, 1, 70, 5, 130, 17, 0, 257], [5, 4, 0, 100, 33, 64, 16, 0, 300]),
    ([1, 1, 300, 1, 0], [2, 1, 500, 0, 3]),
    ([64, 128, 192, 63, 65], [128, 64, 1, 129, 191]),
)
# by mean length, other tiles and blocks of the Hopper kernels: PAIRS are the shortest
HOPPER_PAIRS = (([319, 257], [300, 290]), ([960, 449], [1000, 321]))
LENGTHS = [
    [x] for x in ([3, 0, 70, 5, 130, 0, 0, 64, 1, 400, 65], [128, 128, 128], [1, 1, 700, 0, 2])
]


class Cell(NamedTuple):
    """name: operator|dtype|sizes|option. cases: one for each list of lengths; the second one is
    repeated with NaN in one segment."""

    name: str
    cases: list[Case]


def cell(
    function: str,
    dtype: str,
    sizes: str,
    option: str,
    lengths: Sequence[Sequence[list[int]]],
    **options,
) -> Cell:
    simplest = simplest_case(function, "cuda", dtype, **options)
    cases = []
    for seed, lists in enumerate(lengths):
        own = [list(x) for x in lists][: len(simplest.lengths)]
        cases.append(
            legal(
                dataclasses.replace(
                    simplest, lengths=own, seed=seed, poison="nan" if seed == 1 else None
                )
            )
        )
    return Cell(f"{function}|{SHORT[dtype]}|{sizes}|{option}", cases)


attention = partial(cell, "jagged_attention")
blocks = partial(cell, "block_diagonal_attention")
outer, linear = partial(cell, "jagged_jagged_bmm_jagged_out"), partial(cell, "jagged_linear")


def attention_cells() -> Iterator[Cell]:
    """Activations × head dims; masks, dtypes and heads vary along the diagonals."""
    for (i, activation), (j, dim) in itertools.product(
        enumerate(ACTIVATIONS), enumerate(HEAD_DIMS)
    ):
        mask = MASKS[(i + j) % len(MASKS)]
        dtype = DTYPES[(i + 2 * j) % 3]
        heads = list(HEADS[(i // 3 + j) % 3])
        options = dict(
            activation=activation,
            mask=mask,
            head_dim=dim,
            heads=heads,
            operands="cross",
            implementation="triton",
        )
        yield attention(dtype, f"D{dim}", f"{activation} {mask or 'full'} triton", PAIRS, **options)


def hopper_cells() -> Iterator[Cell]:
    for i, activation in enumerate(ACTIVATIONS):
        for j, dim in enumerate((64, 128)):
            mask, dtype = MASKS[(i + 3 * j) % len(MASKS)], HALVES[(i + j) % 2]
            options = dict(activation=activation, mask=mask, head_dim=dim, heads=list(HEADS[i % 3]))
            options |= dict(operands="cross", implementation="hopper")
            yield attention(
                dtype,
                f"D{dim}",
                f"{activation} {mask or 'full'} hopper",
                PAIRS + HOPPER_PAIRS,
                **options,
            )
    for dtype, dims in zip(HALVES, ((80, 104), (40, 48))):
        options = dict(
            head_dim=dims[0], v_dim=dims[1], heads=[4, 2], operands="cross", implementation="hopper"
        )
        yield attention(
            dtype, f"D{dims[0]} Dv{dims[1]}", "softmax full hopper", PAIRS + HOPPER_PAIRS, **options
        )


def wide_cells() -> Iterator[Cell]:
    """Hopper's kernels at head dims above 128: others for up to 192 and above."""
    two = [(q, [n // 2 for n in q], kv) for q, kv in PAIRS]
    table = (  # dtype, head dims, activation, mask, other options
        ("bfloat16", (192, 192), "softmax", "causal", dict(operands="cross")),
        ("float16", (160, 224), "softmax", "causal-window", dict(operands="cross")),
        ("bfloat16", (256, 256), "silu", "hstu", dict(operands="cross")),
        ("float16", (136, 136), "gelu_tanh", None, dict(operands="cross")),
        ("bfloat16", (224, 192), "softmax", None, dict(operands="cross")),
        ("bfloat16", (256, 256), "silu", None, dict(operands="2 groups", output_scale="tensor")),
        ("float16", (192, 192), "softmax", None, dict(operands="q shared", shared_rows=70)),
        ("bfloat16", (256, 256), "gelu", None, dict(operands="kv shared", shared_rows=70)),
    )
    for i, (dtype, (dim, v_dim), activation, mask, others) in enumerate(table):
        options = dict(
            activation=activation, mask=mask, head_dim=dim, v_dim=v_dim, heads=list(HEADS[i % 3])
        )
        operands = others["operands"]
        lengths = {"cross": PAIRS + HOPPER_PAIRS, "2 groups": two}.get(operands, LENGTHS)
        yield attention(
            dtype,
            f"D{dim} Dv{v_dim}",
            f"{operands} {activation} {mask or 'full'} hopper",
            lengths,
            implementation="hopper",
            **options,
            **others,
        )


def bias_cells() -> Iterator[Cell]:
    """Hopper's kernels with a time table take ten seconds to compile: few cells, which differ in
    all options."""
    table = (  # bias, head dim, activation, mask, dtype, other options
        ("both", 64, "softmax", None, "bfloat16", dict(query_times=True, timestamps="huge")),
        ("both", 64, "silu", "hstu", "bfloat16", dict(buckets=128)),
        ("both", 64, "silu", "hstu", "bfloat16", dict(buckets=128, schedule=True)),
        (
            "both",
            128,
            "softmax",
            "causal",
            "float16",
            dict(schedule=True, query_times=True, query_shift=True, timestamps="huge"),
        ),
        ("both", 128, "silu", "causal", "bfloat16", dict(schedule=True, buckets=128)),
        ("time", 64, "softmax", None, "bfloat16", dict(schedule=True, timestamps="unsorted")),
        ("both", 128, "silu", None, "bfloat16", dict(buckets=128, query_shift=True)),
        (
            "both",
            128,
            "softmax",
            "causal",
            "float16",
            dict(buckets=128, query_times=True, timestamps="unsorted"),
        ),
        (
            "both",
            96,
            "gelu",
            "truncated",
            "bfloat16",
            dict(boundaries="duplicates", timestamps="equal"),
        ),
        ("time", 64, "gelu", None, "float16", dict(buckets=300, tables="shared")),
        ("position", 64, "silu", "causal", "bfloat16", dict(query_shift=True)),
        ("position", 64, "softmax", "semi-local", "float16", dict(positions="fewer")),
        ("position", 128, "softmax", None, "bfloat16", dict(tables="in the operands' dtype")),
        ("position", 96, "silu", "hstu", "float16", dict(positions="fewer", tables="shared")),
    )
    portable = (
        ("both", 64, "softmax", "causal", "float32", dict(query_times=True, timestamps="huge")),
        ("both", 128, "silu", None, "bfloat16", dict(buckets=128, query_shift=True)),
        ("both", 96, "gelu", "hstu", "float16", dict(buckets=1)),
        ("both", 200, "softmax", None, "bfloat16", dict(timestamps="far apart", buckets=300)),
        ("time", 20, "silu", "truncated", "float32", dict(buckets=0)),
        ("position", 200, "silu", "semi-local", "float32", dict(positions="fewer")),
        ("position", 64, "softmax", None, "float16", dict(tables="shared", query_shift=True)),
        ("position", 128, "gelu", "causal", "bfloat16", dict(positions="fewer")),
    )
    for implementation, rows in (("hopper", table), ("triton", portable)):
        for i, (bias, dim, activation, mask, dtype, others) in enumerate(rows):
            options = (
                dict(
                    bias=bias,
                    activation=activation,
                    mask=mask,
                    head_dim=dim,
                    heads=list(HEADS[i % 3]),
                    tables="per head",
                )
                | others
            )
            options |= dict(operands=("cross", "self")[i % 2], implementation=implementation)
            lengths = PAIRS if i % 2 == 0 else LENGTHS
            if implementation == "hopper":
                lengths = [
                    *lengths,
                    *(HOPPER_PAIRS if i % 2 == 0 else [[queries] for queries, _ in HOPPER_PAIRS]),
                ]
            yield attention(
                dtype,
                f"D{dim}",
                f"{bias} bias {activation} {mask or 'full'} {implementation}"
                + " stored" * others.get("schedule", False),
                lengths,
                **options,
            )


def operand_cells() -> Iterator[Cell]:
    two = [(q, [n // 2 for n in q], kv) for q, kv in PAIRS]
    lengths = {
        "q shared": LENGTHS,
        "kv shared": LENGTHS,
        "2 groups": two,
        "3 groups": [(q, half, q[::-1], kv) for q, half, kv in two],
    }
    for (i, operands), (j, dim) in itertools.product(enumerate(lengths), enumerate((20, 64, 128))):
        activation, dtype = ACTIVATIONS[(0, 5, 7)[(i + j) % 3]], DTYPES[(i + 2 * j) % 3]
        scale = 1 if activation == "softmax" else ("tensor", "tensor with gradient")[j % 2]
        options = dict(
            activation=activation,
            head_dim=dim,
            heads=list(HEADS[i % 3]),
            operands=operands,
            output_scale=scale,
            shared_rows=70,
        )
        yield attention(dtype, f"D{dim}", f"{operands} {activation}", lengths[operands], **options)
    for i, (function, dtype) in enumerate(
        itertools.product(("target_attention", "self_target_attention"), DTYPES)
    ):
        options = dict(
            activation=("softmax", "silu")[i % 2], head_dim=(32, 64, 96)[i % 3], heads=[4, 2]
        )
        options |= dict(index="shuffled map", rows=2) if function == "target_attention" else {}
        lengths = [(q[:4], kv[:4]) for q, kv in PAIRS]
        yield cell(
            function, dtype, f"D{options['head_dim']}", options["activation"], lengths, **options
        )


def block_attention_cells() -> Iterator[Cell]:
    for dim, block in itertools.product((16, 32), (16, 32, 64, 128)):  # the default layer's
        options = dict(
            head_dim=dim, block_size=block, rotary="qk", heads=[2, 2] if block < 64 else [5, 5]
        )
        yield blocks("float32", f"D{dim}", f"block {block} qk", LENGTHS, **options)
    rotaries = (
        (None, "linear"),
        ("qk", "linear"),
        ("qkv", "linear"),
        ("qk", "any"),
        ("qkv", "positions"),
    )
    for (i, (rotary, angles)), (j, dim) in itertools.product(
        enumerate(rotaries), enumerate(HEAD_DIMS)
    ):
        dtype = DTYPES[(i + j) % 3]
        block = (16, 32, 64, 128)[(i + 2 * j) % 4]
        heads = [[2, 2], [4, 2]][(i + j) % 2]
        kernels = "hopper" if dtype in HALVES and dim <= 128 and heads[0] == heads[1] else "triton"
        options = dict(
            head_dim=dim,
            block_size=block,
            rotary=rotary,
            angles=angles,
            heads=heads,
            implementation=kernels,
        )
        options["precise"] = rotary is not None and j % 2 == 0
        name = (
            f"block {block} {rotary or 'unrotated'} {angles}{' precise' * options['precise']}"
            f" {kernels}"
        )
        yield blocks(dtype, f"D{dim}", name, LENGTHS, **options)
    for dtype, dim in itertools.product(DTYPES, (32, 64)):
        options = dict(head_dim=dim, rotary="qk", heads=[2, 2])
        yield cell(
            "block_diagonal_attention_packed",
            dtype,
            f"D{dim}",
            "block 64 qk linear",
            LENGTHS,
            **options,
        )


def linear_compress_cells() -> Iterator[Cell]:
    heights, depths = (65, 129, 433, 64, 1), (8, 3, 1, 20, 100)
    counts = [[[3, 0, 1, 5]], [[1, 1, 12, 0]], [[0, 0]], [[40]]]

    def compress(
        dtype: str, width: int, depth: int, height: int, levels: int, implementation: str
    ) -> Cell:
        options = dict(
            levels=levels,
            compressed=height,
            depths=[max(1, depth - 1), depth, depth][-levels:] + [1] * (3 - levels),
        )
        options |= dict(
            columns=width, index=("map", "map", "counts")[levels - 1], implementation=implementation
        )
        options["dtype of indices[0]"] = "int32" if levels == 2 else "int64"
        return cell(
            "linear_compress",
            dtype,
            f"M{height} K{depth} N{width}",
            f"{levels} levels {implementation}",
            counts,
            **options,
        )

    for (i, width), j in itertools.product(
        enumerate((1, 60, 64, 65, 68, 100, 128, 136, 200, 256, 300)), range(2)
    ):
        depth, height = depths[(i + 2 * j) % 5], heights[(2 * i + j) % 5]
        yield compress(DTYPES[(i + j) % 3], width, depth, height, 1 + (i + j) % 3, "triton")
    # loads without descriptors
    for (i, width), (j, depth) in itertools.product(enumerate((65, 68, 100)), enumerate((1, 3, 8))):
        yield compress("bfloat16", width, depth, (129, 433)[(i + j) % 2], 1 + (i + j) % 2, "triton")
    for (i, width), (j, dtype) in itertools.product(
        enumerate((64, 128, 136, 200, 256)), enumerate(HALVES)
    ):
        yield compress(
            dtype, width, depths[(i + 2 * j) % 5], heights[(i + j) % 5], 1 + (i + j) % 3, "hopper"
        )


def jagged_op_cells() -> Iterator[Cell]:
    widths = ((64, 64), (20, 9), (128, 200), (65, 1), (8, 300))
    for (i, dtype), (j, (depth, columns)) in itertools.product(
        enumerate(DTYPES), enumerate(widths)
    ):
        if (i + j) % 2 == 0 or j == 0:
            sizes, options = f"D{depth} T{columns}", dict(depth=depth, columns=columns)
            yield cell("jagged_dense_bmm", dtype, sizes, "plain", LENGTHS, **options)
            yield cell("jagged_jagged_bmm", dtype, sizes, "plain", LENGTHS, **options)
            yield outer(dtype, f"D{depth}", "two tensors", PAIRS, depth=depth)
            yield outer(dtype, f"D{depth}", "one tensor", LENGTHS, depth=depth, operands="itself")
            for transposed in (False, True):
                option = "transposed" if transposed else "plain"
                yield cell(
                    "array_jagged_bmm_jagged_out",
                    dtype,
                    f"D{depth}",
                    option,
                    PAIRS,
                    depth=depth,
                    transposed=transposed,
                )
    for i, activation in enumerate((None, *POINTWISE)):
        options = dict(
            depth=40, columns=72, activation=activation, bias=i % 3 > 0, weights="per segment"
        )
        yield linear(DTYPES[i % 3], "D40 T72", f"{activation} per segment", LENGTHS, **options)
    for dtype in DTYPES:
        yield linear(
            dtype,
            "D40 T72",
            "silu shared",
            LENGTHS,
            depth=40,
            columns=72,
            activation="silu",
            weights="shared",
        )
        for columns in (1, 9, 130):
            yield cell("jagged_softmax", dtype, f"H{columns}", "plain", LENGTHS, columns=columns)
        for dim in (-1, -2):
            yield cell("jagged2_softmax", dtype, "flat", f"dim {dim}", PAIRS, dim=dim)


def row_cells() -> Iterator[Cell]:
    """Functions that take no `implementation`."""
    for function, operator in OPERATORS.items():
        if not operator.implementations:
            for dtype in operator.dtypes["cuda"]:
                lists = [[x, x[::-1], x] for (x,) in LENGTHS]
                size = {name: 40 for name in ("columns", "head_dim") if name in operator.axes}
                yield cell(function, dtype, "40", "plain", lists, **size)


CELLS = [
    cell
    for table in (
        hopper_cells,
        wide_cells,
        attention_cells,
        bias_cells,
        operand_cells,
        block_attention_cells,
        linear_compress_cells,
        jagged_op_cells,
        row_cells,
    )
    for cell in table()
]
