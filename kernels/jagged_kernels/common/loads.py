"""Device functions shared by the kernels: tiles of the zigzag schedule, loads and stores of jagged
row blocks."""

from typing import NamedTuple

import triton
import triton.language as tl


class ScheduledTile(NamedTuple):
    """A tile of the schedule: the `block`-th of a segment and head.

    q_start, q_len, kv_start, kv_len: first row and number of rows of its query and key segments.
    First rows are int64, as a row times its stride may pass 2^31.
    """

    segment: tl.tensor
    head: tl.tensor
    block: tl.tensor
    q_start: tl.tensor
    q_len: tl.tensor
    kv_start: tl.tensor
    kv_len: tl.tensor


class Rows(NamedTuple):
    """An operand of jagged rows: pointer to its first element, TMA descriptor or None, strides of
    rows and heads in elements."""

    ptr: tl.tensor
    desc: tl.tensor
    stride_row: tl.tensor
    stride_head: tl.tensor


class Matrices(NamedTuple):
    """A batch of matrices: pointer to its first element, TMA descriptor or None, strides of
    matrices and rows in elements."""

    ptr: tl.tensor
    desc: tl.tensor
    stride_batch: tl.tensor
    stride_row: tl.tensor


@triton.jit
def zigzag_waves(num_tiles, worker, num_workers):
    """How many tiles `worker` gets of `num_tiles`: one in every full wave, and one in the last wave
    if it reaches the worker."""
    waves = num_tiles // num_workers
    lane = tl.where(waves % 2 == 0, worker, num_workers - 1 - worker)
    return waves + (lane < num_tiles - waves * num_workers).to(tl.int32)


@triton.jit
def zigzag_position(wave, worker, num_workers):
    """Position in the sorted tile list of `worker`'s tile in `wave`: ascending in even waves,
    descending in odd ones."""
    return wave * num_workers + tl.where(wave % 2 == 0, worker, num_workers - 1 - worker)


@triton.jit
def load_tile(
    tiles_ptr, wave, waves, worker, num_workers, q_offsets_ptr, kv_offsets_ptr, num_segments
):
    """`worker`'s ScheduledTile in `wave`. A wave past the last one repeats it, so that tiles can be
    read ahead.

    num_segments: number of key segments if there are several query groups; None: one query group.
    """
    position = zigzag_position(tl.maximum(tl.minimum(wave, waves - 1), 0), worker, num_workers)
    return load_listed_tile(tiles_ptr, position, q_offsets_ptr, kv_offsets_ptr, num_segments)


@triton.jit
def load_listed_tile(tiles_ptr, position, q_offsets_ptr, kv_offsets_ptr, num_segments):
    """The ScheduledTile at a position of the list."""
    tile_ptr = tiles_ptr + position * 3
    segment, head, block = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    kv_segment = segment
    if num_segments is not None:
        kv_segment = segment % num_segments
    q_start, kv_start = (
        tl.load(q_offsets_ptr + segment).to(tl.int64),
        tl.load(kv_offsets_ptr + kv_segment).to(tl.int64),
    )
    q_len = (tl.load(q_offsets_ptr + segment + 1) - q_start).to(tl.int32)
    kv_len = (tl.load(kv_offsets_ptr + kv_segment + 1) - kv_start).to(tl.int32)
    return ScheduledTile(segment, head, block, q_start, q_len, kv_start, kv_len)


@triton.jit
def load_page(tile, column, page_table_ptr, PAGE_ROWS: tl.constexpr):
    """The page of a tile's key, by the table of `Pages` (attention/pages.py). Past the segment's
    end page 0, of which nothing is used. PAGE_ROWS: None where the keys of a segment are
    adjacent."""
    if PAGE_ROWS is None:
        return 0
    else:
        entry = tile.kv_start // PAGE_ROWS + tile.segment + column // PAGE_ROWS
        return tl.load(page_table_ptr + entry, mask=column < tile.kv_len, other=0)


@triton.jit
def key_row(tile, column, page, PAGE_ROWS: tl.constexpr):
    """The row of k and v where a block of a tile's keys begins, at a column of its segment. page:
    of load_page, of the same column."""
    if PAGE_ROWS is None:
        return tile.kv_start + column
    else:
        return page.to(tl.int64) * PAGE_ROWS + column % PAGE_ROWS


@triton.jit
def row_offsets(stride, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK, BLOCK_D] element offsets of a block of rows from its first element."""
    return tl.arange(0, BLOCK)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_rows(
    rows, row, head, num_rows,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """The [BLOCK, BLOCK_D] block of Rows from (row, head) on.

    Columns past DIM read as 0. RAGGED: rows past num_rows read as 0 too. Otherwise rows past a
    segment's end are the next segment's, and a descriptor loads the block by TMA.
    """
    if rows.desc is not None and not RAGGED:
        return tl.reshape(rows.desc.load([head, row.to(tl.int32), 0]), BLOCK, BLOCK_D)
    else:
        ptrs = (
            rows.ptr
            + row * rows.stride_row
            + head.to(tl.int64) * rows.stride_head
            + row_offsets(rows.stride_row, BLOCK, BLOCK_D)
        )
        in_rows = tl.arange(0, BLOCK)[:, None] < num_rows
        in_columns = tl.arange(0, BLOCK_D)[None, :] < DIM
        if RAGGED and DIM == BLOCK_D:
            return tl.load(ptrs, mask=in_rows, other=0.0)
        elif RAGGED:
            return tl.load(ptrs, mask=in_rows & in_columns, other=0.0)
        elif DIM == BLOCK_D:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, mask=in_columns, other=0.0)


@triton.jit
def store_rows(
    rows, row, head, block, num_rows, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store the rows below num_rows and the columns below DIM of a [BLOCK, BLOCK_D] block to Rows,
    from (row, head) on."""
    ptrs = (
        rows.ptr
        + row * rows.stride_row
        + head.to(tl.int64) * rows.stride_head
        + row_offsets(rows.stride_row, BLOCK, BLOCK_D)
    )
    mask = tl.arange(0, BLOCK)[:, None] < num_rows
    if DIM != BLOCK_D:
        mask = mask & (tl.arange(0, BLOCK_D)[None, :] < DIM)
    tl.store(ptrs, block.to(rows.ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_pairs(
    rows, row, head, num_rows,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Even and odd columns [BLOCK, PAIRS] of a block of Rows. Rows past num_rows and columns past
    DIM read as 0. PACKED: a pair of 16-bit elements is loaded as one 4-byte word."""
    stride_row = rows.stride_row
    ptr = rows.ptr + (row * stride_row + head.to(tl.int64) * rows.stride_head)
    mask = (tl.arange(0, BLOCK)[:, None] < num_rows) & (tl.arange(0, PAIRS)[None, :] < DIM // 2)
    if PACKED:
        words_ptr = ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row_offsets(
            stride_row // 2, BLOCK, PAIRS
        )
        words = tl.load(words_ptr, mask=mask, other=0)
        dtype: tl.constexpr = ptr.dtype.element_ty
        return (words & 0xFFFF).to(tl.int16).to(dtype, bitcast=True), (words >> 16).to(tl.int16).to(
            dtype, bitcast=True
        )
    else:
        ptrs = ptr + tl.arange(0, BLOCK)[:, None] * stride_row + 2 * tl.arange(0, PAIRS)[None, :]
        return tl.load(ptrs, mask=mask, other=0.0), tl.load(ptrs + 1, mask=mask, other=0.0)


@triton.jit
def store_pairs(
    rows, row, head, even, odd, num_rows,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Store what load_pairs loads."""
    stride_row = rows.stride_row
    ptr = rows.ptr + (row * stride_row + head.to(tl.int64) * rows.stride_head)
    mask = (tl.arange(0, BLOCK)[:, None] < num_rows) & (tl.arange(0, PAIRS)[None, :] < DIM // 2)
    even, odd = even.to(ptr.dtype.element_ty), odd.to(ptr.dtype.element_ty)
    if PACKED:
        words_ptr = ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row_offsets(
            stride_row // 2, BLOCK, PAIRS
        )
        low = even.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        tl.store(words_ptr, low | odd.to(tl.int16, bitcast=True).to(tl.int32) << 16, mask=mask)
    else:
        ptrs = ptr + tl.arange(0, BLOCK)[:, None] * stride_row + 2 * tl.arange(0, PAIRS)[None, :]
        tl.store(ptrs, even, mask=mask)
        tl.store(ptrs + 1, odd, mask=mask)


@triton.jit
def load_block(
    matrices, batch, row, column,
    NUM_ROWS: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """[BLOCK_R, BLOCK_C] block of one of the Matrices from (row, column) on. Elements outside its
    NUM_ROWS rows and NUM_COLUMNS columns read as 0."""
    if matrices.desc is not None:
        return tl.reshape(
            matrices.desc.load([tl.cast(batch, tl.int32), row, column]), BLOCK_R, BLOCK_C
        )
    else:
        ptrs, mask = _block_ptrs(
            matrices, batch, row, column, NUM_ROWS, NUM_COLUMNS, BLOCK_R, BLOCK_C
        )
        return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def store_block(
    matrices, batch, row, column, block,
    NUM_ROWS: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store a block to one of the Matrices, from (row, column) on: the part that lies in the
    matrix."""
    ptrs, mask = _block_ptrs(matrices, batch, row, column, NUM_ROWS, NUM_COLUMNS, BLOCK_R, BLOCK_C)
    tl.store(ptrs, block.to(matrices.ptr.dtype.element_ty), mask=mask)


@triton.jit
def _block_ptrs(
    matrices, batch, row, column,
    NUM_ROWS: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Pointers [BLOCK_R, BLOCK_C] to a block's elements, and a mask of those in the matrix."""
    rows, columns = row + tl.arange(0, BLOCK_R), column + tl.arange(0, BLOCK_C)
    ptr = matrices.ptr + tl.cast(batch, tl.int64) * matrices.stride_batch
    ptrs = ptr + rows.to(tl.int64)[:, None] * matrices.stride_row + columns[None, :]
    return ptrs, (rows < NUM_ROWS)[:, None] & (columns < NUM_COLUMNS)[None, :]


@triton.constexpr_function
def log2(size):
    """log2 of a power of two."""
    return size.bit_length() - 1


@triton.jit
def find_segment(index, offsets_ptr, num_segments, shift, SPACED: tl.constexpr):
    """The segment of a virtual tile: the last one whose first tile is not past `index`. Segment b's
    first tile is offsets[b] // 2^shift, plus b where SPACED: every segment then owns as many
    virtual tiles as it has tiles of 2^shift rows, and at least one.

    A step compares 32 segments at once, which a warp does without shared memory: two steps for a
    thousand segments, where a binary search waits for memory ten times. It shifts because a 64-bit
    division by a number unknown to the compiler takes longer than all the rest.
    """
    low, size = 0, num_segments
    while size > 1:
        step = (size + 31) // 32
        segments = low + tl.arange(0, 32) * step
        inside = segments < low + size
        first = tl.load(offsets_ptr + segments, mask=inside, other=0).to(tl.int64) >> shift
        if SPACED:
            first += segments
        skipped = (tl.sum((inside & (first <= index)).to(tl.int32), 0) - 1) * step
        low += skipped
        size = tl.minimum(step, size - skipped)
    return low


@triton.jit
def segment_lengths(offsets_ptr, segments, real):
    """Rows of a vector of segments; 0 of those that are not real."""
    return tl.load(offsets_ptr + segments + 1, mask=real, other=0) - tl.load(
        offsets_ptr + segments, mask=real, other=0
    )


@triton.jit
def load_segment(offsets_ptr, segment):
    """First row, int64, and number of rows, int32."""
    start, end = (
        tl.load(offsets_ptr + segment).to(tl.int64),
        tl.load(offsets_ptr + segment + 1).to(tl.int64),
    )
    return start, (end - start).to(tl.int32)


@triton.jit
def find_tile(index, offsets_ptr, num_segments, shift):
    """The tile of 2^shift rows with a virtual index: its segment, the segment's first row and
    number of rows, and the tile's first row in the segment, which is past the last one if there is
    no such tile."""
    segment = find_segment(index, offsets_ptr, num_segments, shift, True)
    start, num_rows = load_segment(offsets_ptr, segment)
    return segment, start, num_rows, ((index - (start >> shift) - segment) << shift).to(tl.int32)


@triton.jit
def load_matrix(
    ptr, row, column, stride, num_rows, num_columns,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The [BLOCK_R, BLOCK_C] block from (row, column) on of a matrix with a row stride. Elements
    outside the matrix read as 0. TRANSPOSED: the memory holds the matrix's transpose."""
    if TRANSPOSED:
        return tl.trans(
            load_matrix(ptr, column, row, stride, num_columns, num_rows, BLOCK_C, BLOCK_R, False)
        )
    else:
        rows, columns = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
        ptrs = (
            ptr
            + tl.cast(row, tl.int64) * stride
            + column
            + rows[:, None] * stride
            + columns[None, :]
        )
        return tl.load(
            ptrs,
            mask=(row + rows < num_rows)[:, None] & (column + columns < num_columns)[None, :],
            other=0.0,
        )


@triton.jit
def store_matrix(ptr, row, column, stride, block, num_rows, num_columns):
    """Store the part of a block, from (row, column) on, that lies in the matrix."""
    rows, columns = tl.arange(0, block.shape[0]), tl.arange(0, block.shape[1])
    ptrs = (
        ptr + tl.cast(row, tl.int64) * stride + column + rows[:, None] * stride + columns[None, :]
    )
    mask = (row + rows < num_rows)[:, None] & (column + columns < num_columns)[None, :]
    tl.store(ptrs, block.to(ptr.dtype.element_ty), mask=mask)
