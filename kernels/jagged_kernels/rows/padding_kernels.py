"""Device code of jagged rows and padded ones. The equations are in padding.py.

A program copies a tile of rows of one block of columns. Padded rows find their segment by a
division, jagged rows by a search.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.loads import find_segment
from ..common.ptxas import safe_ptxas


class PaddingOptions(NamedTuple):
    """Constants of the kernels. size: elements of a row. left: padding is before a segment's rows.
    newest: a longer segment keeps its last rows. multiplies: by the padded rows, which are added
    otherwise. align: elements that strides count. rows, block: of a tile."""

    size: int
    left: bool
    newest: bool
    multiplies: bool
    align: int
    rows: int
    block: int


@triton.jit
def _tile(num_rows, OPTIONS: tl.constexpr):
    """This program's first row, int64, its rows counted from there, which of them exist, and its
    columns."""
    blocks: tl.constexpr = (OPTIONS.size + OPTIONS.block - 1) // OPTIONS.block
    first = tl.cast(tl.program_id(0) // blocks, tl.int64) * OPTIONS.rows
    rows = tl.arange(0, OPTIONS.rows)
    columns = tl.program_id(0) % blocks * OPTIONS.block + tl.arange(0, OPTIONS.block)
    return first, rows, first + rows < num_rows, columns


@triton.jit
def _skipped(length, width, OPTIONS: tl.constexpr):
    """A row's index in its segment, less its place in the padded segment of `width` rows."""
    skipped = tl.zeros_like(length)
    if OPTIONS.left:
        skipped += tl.minimum(length - width, 0)
    if OPTIONS.newest:
        skipped += tl.maximum(length - width, 0)
    return skipped


@triton.jit
def _load(ptr, stride, rows, columns, mask, other, OPTIONS: tl.constexpr):
    ptrs = ptr + rows[:, None] * (stride * OPTIONS.align) + columns[None, :]
    mask = mask[:, None] & (columns < OPTIONS.size)[None, :]
    return tl.load(ptrs, mask=mask, other=tl.cast(other, ptr.dtype.element_ty))


@triton.jit
def _store(ptr, rows, columns, mask, x, OPTIONS: tl.constexpr):
    ptrs = ptr + rows[:, None] * OPTIONS.size + columns[None, :]
    tl.store(ptrs, x, mask=mask[:, None] & (columns < OPTIONS.size)[None, :])


@safe_ptxas
@triton.jit(do_not_specialize=["num_rows", "num_places", "width", "fill"])
def to_padded_kernel(
    x_ptr, factor_ptr, offsets_ptr, out_ptr, num_rows, num_places, width, fill, strides,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """out `[segments * width, size]`: x, or x times factor, at each row's place, else fill.

    num_rows: of x; num_places: of out. strides: of x and factor, in units of `align` elements.
    Grid: tiles and blocks of columns, which follow one another.
    """
    first, rows, exists, columns = _tile(num_places, OPTIONS)
    # one 64-bit division for all rows
    segment = first // width
    rows += (first - segment * width).to(tl.int32)
    segment, place = segment + rows // width, rows % width
    start = tl.load(offsets_ptr + segment, mask=exists, other=0).to(tl.int64)
    length = tl.load(offsets_ptr + segment + 1, mask=exists, other=0).to(tl.int64) - start
    place += _skipped(length, width, OPTIONS)
    row = start + place
    real = exists & (place >= 0) & (place < length) & (row < num_rows)
    x = _load(x_ptr, strides[0], row, columns, real, fill, OPTIONS)
    if factor_ptr is not None:
        x *= _load(factor_ptr, strides[1], row, columns, real, 0, OPTIONS)
    _store(out_ptr, first + tl.arange(0, OPTIONS.rows), columns, exists, x, OPTIONS)


@triton.jit
def _segments(first, row, last, offsets_ptr, num_segments):
    """The segment of each row of a tile, whose last row is `last`: a search among those of the
    tile, which are few."""
    low = find_segment(first, offsets_ptr, num_segments, 0, False)
    size = find_segment(last, offsets_ptr, num_segments, 0, False) - low + 1
    segment = tl.zeros_like(row) + low
    while size > 1:
        half = size // 2
        segment += tl.where(tl.load(offsets_ptr + segment + half) <= row, half, 0)
        size -= half
    return segment


@safe_ptxas
@triton.jit(do_not_specialize=["num_rows", "num_segments", "width"])
def to_jagged_kernel(
    x_ptr, y_ptr, offsets_ptr, out_ptr, num_rows, num_segments, width, strides,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """out `[num_rows, size]`: of each row of a segment, its row of the padded y `[segments * width,
    size]`, which is 0 where it has none; plus or times x, if there is one. Without y, x. Other rows
    are 0.

    strides: of x and y, in units of `align` elements. Grid: as `to_padded_kernel`.
    """
    first, rows, exists, columns = _tile(num_rows, OPTIONS)
    row = first + rows
    real = exists & (row < tl.load(offsets_ptr + num_segments))
    if y_ptr is None:
        out = _load(x_ptr, strides[0], row, columns, real, 0, OPTIONS)
    else:
        last = tl.minimum(first + OPTIONS.rows, num_rows) - 1
        segment = _segments(first, row, last, offsets_ptr, num_segments)
        start = tl.load(offsets_ptr + segment).to(tl.int64)
        length = tl.load(offsets_ptr + segment + 1).to(tl.int64) - start
        place = row - start - _skipped(length, width, OPTIONS)
        has_place = real & (place >= 0) & (place < width)
        out = _load(y_ptr, strides[1], segment * width + place, columns, has_place, 0, OPTIONS)
        if x_ptr is not None:
            x = _load(x_ptr, strides[0], row, columns, real, 0, OPTIONS)
            out = x * out if OPTIONS.multiplies else x + out
    _store(out_ptr, row, columns, exists, out, OPTIONS)
