"""RelativeBias in a consumer's registers: blocks of scores, in the layout of an MMA's result, from which the MMA of a block's scores starts.

A block of position biases has one value per diagonal. A thread holds scores of two rows, 8 apart, and of pairs of columns, 8 apart: its
scores lie on a quarter to a half as many diagonals, each of which it loads once. Their addresses differ by constants.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.pipeline import WARPGROUP_ROWS, mma_layout
from .bias import BiasOfTile, Times, bias_of_tile, first_entry, key_times, query_times, time_block


class RowBias(NamedTuple):
    """The bias of a consumer's 64 rows, queries or keys: that of their segment and head, the first row, and the rows' Times."""

    of_tile: BiasOfTile
    row: gl.tensor
    times: Times


@gluon.constexpr_function
def _load_diagonals(columns, transposed):
    """PTX that loads the position biases of a thread's scores in a block of 64 rows. The input is the address of its first score's."""
    registers, loaded, lines = columns // 2, {}, []
    for register in range(registers):
        pair, row, group = register & 1, register >> 1 & 1, register >> 2
        diagonal = (pair + 8 * group - 8 * row) * (-1 if transposed else 1)
        if diagonal in loaded:
            lines.append(f"mov.b32 ${register}, ${loaded[diagonal]};")
        else:
            loaded[diagonal] = register
            lines.append(f"ld.global.nc.f32 ${register}, [${registers} + {4 * diagonal}];")
    return "\n".join(lines)


@gluon.constexpr_function
def _constraints(columns):
    return ",".join(["=&f"] * (columns // 2) + ["l"] * (columns // 2))


@gluon.jit
def _position_block(ptr, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """The position biases `[64, COLUMNS]` of a block; ptr: to that of its first row and column. TRANSPOSED: its rows are the keys."""
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, COLUMNS)
    # Row and column of a thread's first score, in each of its registers: bit 3 of rows and bits 0 and 3 up of columns count registers.
    rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))[:, None] & 0x37
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :] & 0x6
    diagonals = columns - rows
    if TRANSPOSED:
        diagonals = rows - columns
    return gl.inline_asm_elementwise(
        _load_diagonals(COLUMNS, TRANSPOSED), _constraints(COLUMNS), [(ptr + diagonals).to(gl.int64)], dtype=gl.float32, is_pure=True,
        pack=COLUMNS // 2,
    )  # fmt: skip


@gluon.jit
def _row_indices(first):
    """The indices of a consumer's rows in the segment."""
    return first + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, mma_layout(WARPGROUP_ROWS, 64)))


@gluon.jit
def bias_of_queries(bias, tile, first, KIND: gl.constexpr):
    """RowBias of the query rows from `first` on."""
    of_tile = bias_of_tile(bias, tile.segment, tile.head, tile.q_start, tile.q_len, tile.kv_start, tile.kv_len, KIND)
    return RowBias(of_tile, first, query_times(of_tile, _row_indices(first), KIND))


@gluon.jit
def bias_of_keys(bias, tile, head, first, KIND: gl.constexpr):
    """RowBias of the keys from `first` on, for a query head."""
    of_tile = bias_of_tile(bias, tile.segment, head, tile.q_start, tile.q_len, tile.kv_start, tile.kv_len, KIND)
    return RowBias(of_tile, first, key_times(of_tile, _row_indices(first), KIND))


@gluon.jit
def bias_block(bias, first, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr, KIND: gl.constexpr):
    """The bias `[64, COLUMNS]` of a consumer's rows, and of COLUMNS keys from `first` on, divided by the scale. TRANSPOSED: the rows are the
    keys, and the columns query rows."""
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, COLUMNS)
    of_tile = bias.of_tile
    if KIND.position:
        if TRANSPOSED:
            entry = first_entry(of_tile, first, bias.row, COLUMNS, WARPGROUP_ROWS)
        else:
            entry = first_entry(of_tile, bias.row, first, WARPGROUP_ROWS, COLUMNS)
        block = _position_block(of_tile.position_ptr + entry, COLUMNS, TRANSPOSED)
    else:
        block = gl.zeros([WARPGROUP_ROWS, COLUMNS], gl.float32, L)
    if KIND.time:
        indices = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
        times = bias.times
        rows = Times(gl.convert_layout(times.stamps, gl.SliceLayout(1, L)), times.earliest, times.latest)
        if TRANSPOSED:
            block += time_block(rows, query_times(of_tile, indices, KIND), of_tile)
        else:
            block += time_block(rows, key_times(of_tile, indices, KIND), of_tile)
    return block * of_tile.inverse_scale
