"""RelativeBias in the portable attention kernels: biases of blocks of scores, and sums of dS for
the gradients of the tables."""

from typing import NamedTuple

import triton
import triton.language as tl

from .bias import BiasOfTile, Times, bias_of_tile, bucket_block, first_entry, key_times, query_times


class RowBias(NamedTuple):
    """The bias of a tile's rows, queries or keys: that of their segment and head, the first row,
    and the rows' Times."""

    of_tile: BiasOfTile
    row: tl.tensor
    times: Times


@triton.jit
def bias_of_rows(bias, tile, row, num_segments, ROWS: tl.constexpr, KIND: tl.constexpr):
    """RowBias of a tile of query rows from `row` on, or None."""
    if KIND is not None:
        of_tile = bias_of_tile(bias, tile, tile.head, num_segments, KIND)
        return RowBias(of_tile, row, query_times(of_tile, row + tl.arange(0, ROWS), KIND))


@triton.jit
def bias_of_keys(bias, tile, head, num_segments, ROWS: tl.constexpr, KIND: tl.constexpr):
    """RowBias of a tile of keys, for its segment of queries and a query head, or None."""
    if KIND is not None:
        of_tile = bias_of_tile(bias, tile, head, num_segments, KIND)
        row = tile.block * ROWS
        return RowBias(of_tile, row, key_times(of_tile, row + tl.arange(0, ROWS), KIND))


@triton.jit
def bias_block(
    bias, row, column, row_times, column_times,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The bias of the block from (query row, key column) on, divided by the scale:
    `[ROWS, COLUMNS]`. TRANSPOSED: its rows are the keys."""
    block = tl.zeros([ROWS, COLUMNS], tl.float32)
    if KIND.position:
        rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
        if TRANSPOSED:
            block = tl.load(
                bias.position_ptr + first_entry(bias, row, column, COLUMNS, ROWS) + (rows - columns)
            )
        else:
            block = tl.load(
                bias.position_ptr + first_entry(bias, row, column, ROWS, COLUMNS) + (columns - rows)
            )
    if KIND.boundaries > 0:
        block += tl.load(
            bias.time_ptr
            + bucket_block(row_times, column_times, bias, tl.arange(0, KIND.boundaries))
        )
    return tl.where(bias.own > 0, block, 0.0)


# -- gradients of the tables -----------------------------------------------------------------------


class TileSums(NamedTuple):
    """Where a tile of query rows adds its dS, times `factor`: the position table at distance 0,
    scratch memory for a block, and the time table, each this program's own part and the tile's
    head. num_rows: rows of the tile in the segment."""

    position_ptr: tl.tensor
    scratch_ptr: tl.tensor
    time_ptr: tl.tensor
    num_rows: tl.tensor
    factor: tl.tensor


@triton.jit
def sums_of_tile(sums, tile, num_rows, factor, bias, SCORES: tl.constexpr, KIND: tl.constexpr):
    """TileSums of a tile of query rows. SCORES: scores in a block."""
    program = tl.program_id(0).to(tl.int64)
    position_ptr, scratch_ptr, time_ptr = 0, 0, 0
    if KIND.position:
        of_head = tile.head.to(tl.int64) * bias.position_stride + bias.num_positions // 2
        position_ptr = sums.position_ptr + program * sums.position_stride + of_head
        scratch_ptr = sums.scratch_ptr + program * SCORES
    if KIND.boundaries > 0:
        time_ptr = (
            sums.time_ptr
            + program * sums.time_stride
            + tile.head.to(tl.int64) * sums.time_head_stride
        )
    return TileSums(position_ptr, scratch_ptr, time_ptr, num_rows, factor)


@triton.jit
def add_to_tables(ds, block, bias, sums, buckets, KIND: tl.constexpr):
    """Add dS of a key block to the sums of the position table, in memory, and to those of the time
    table, `buckets`."""
    ROWS: tl.constexpr = ds.shape[0]
    COLUMNS: tl.constexpr = ds.shape[1]
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    num_rows = tl.where(bias.of_tile.own > 0, sums.num_rows, 0)
    ds = tl.where((rows < num_rows) & (columns < block.num_keys), ds, 0.0)
    if KIND.position:
        entry = first_entry(bias.of_tile, bias.row, block.column, ROWS, COLUMNS)
        _add_diagonals(ds, sums.scratch_ptr, sums.position_ptr + entry, sums.factor, ROWS, COLUMNS)
    if KIND.boundaries > 0:
        times = key_times(bias.of_tile, block.column + tl.arange(0, COLUMNS), KIND)
        buckets = _add_bucket_sums(
            buckets, ds, bias.times, times, bias.of_tile, buckets.shape[0], KIND
        )
    return buckets


@triton.jit
def store_buckets(sums, buckets, KIND: tl.constexpr):
    """Add a tile's sums of dS by bucket to the program's own."""
    if KIND.boundaries > 0:
        ptrs = sums.time_ptr + tl.arange(0, buckets.shape[0])
        tl.store(ptrs, tl.load(ptrs) + sums.factor * buckets)
        tl.debug_barrier()


@triton.jit
def _add_diagonals(ds, scratch_ptr, sums_ptr, factor, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """sums[column - row] += factor · dS[row, column]; sums_ptr points to the entry of row 0 and
    column 0.

    The rows are rotated by their number, through scratch memory, so that a diagonal of the block
    becomes a column, or two parts of one.
    """
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    tl.store(scratch_ptr + rows * COLUMNS + columns, ds)
    tl.debug_barrier()
    rotated = tl.load(scratch_ptr + rows * COLUMNS + (columns + rows) % COLUMNS)
    laps = (columns + rows) // COLUMNS  # a rotated row begins lap 0 and ends in the next
    for lap in tl.static_range(0, (ROWS + COLUMNS - 2) // COLUMNS + 1):
        diagonals = tl.arange(0, COLUMNS) - lap * COLUMNS
        # the last lap has others too, whose entries may be another program's, or not in memory
        inside = diagonals > -ROWS
        sums = tl.load(sums_ptr + diagonals, mask=inside) + factor * tl.sum(
            tl.where(laps == lap, rotated, 0.0), 0
        )
        tl.store(sums_ptr + diagonals, sums, mask=inside)
        tl.debug_barrier()


@triton.jit
def _add_bucket_sums(sums, ds, rows, columns, bias, BUCKETS: tl.constexpr, KIND: tl.constexpr):
    """sums `[BUCKETS]` plus the sums of dS of each bucket; rows, columns: Times."""
    block = bucket_block(rows, columns, bias, tl.arange(0, KIND.boundaries))
    buckets = tl.arange(0, BUCKETS)
    for bucket in range(tl.min(tl.min(block, 1), 0), tl.max(tl.max(block, 1), 0) + 1):
        # Triton 3.6 does not compile a sum over one dimension and then the other for compute
        # capability 10.0.
        sums += tl.where(buckets == bucket, tl.sum(tl.where(block == bucket, ds, 0.0)), 0.0)
    return sums
