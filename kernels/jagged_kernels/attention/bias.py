"""RelativeBias in the attention kernels: what the portable kernels (triton_bias.py) and those for
Hopper (hopper/bias.py) share.

    S[i, j] = scale · <q_i, k_j> + position[j - i + N - 1] + time[bucket(u_i - t_j)],  bucket(d) =
    number of boundaries <= |d|

The bias is divided by the scale and added to q kᵀ, so that what follows is the same with and
without a bias. The tables that the kernels read are copies that have been divided. Position tables
are padded with PAD copies of their first and last entries: a block that lies partly beyond N - 1
rows of distance needs no bounds check, and one that lies wholly beyond reads the copies
(`first_entry`).

The range of a block's buckets follows from the extremes of its timestamps, which may have any order
(`bucket_block`).

With several query groups, the bias is that of the first. For the others, blocks of 0 take its place
and no dS is summed; what it was computed from is in memory, with any values.
"""

from typing import NamedTuple

import triton
import triton.language as tl

PAD = tl.constexpr(256)  # at least the rows and columns of a block of scores together
# of a distance as fp32: its exponent and three bits of its mantissa are left
LEADING_SHIFT = tl.constexpr(20)
LEADING = tl.constexpr((127 + 31) * 8 + 1)  # values of these bits for distances up to 2^31
NEAR = tl.constexpr(2**31 - 1)  # distances below it are found by their leading bits
TIME_BLOCK = tl.constexpr(64)  # rows of a record of timestamps
TIME_RECORD = tl.constexpr(2 + 64 // 2)  # int64 words of it
# Row and column of each bit of a byte's number in a block of stored buckets. A thread's scores of
# Hopper's MMA then lie in 4 runs of 8 bytes; those of the transposed block, in 8 runs of 4.
BYTE_ORDER = (
    (8, 0), (0, 8), (0, 1), (1, 0), (0, 2), (0, 4), (2, 0), (4, 0), (16, 0), (0, 16), (32, 0),
    (0, 32),
)  # fmt: skip


class Bias(NamedTuple):
    """RelativeBias as the kernels take it. `KIND` (params.py) says what is there; the rest is None.

    Attributes:
        position_ptr, position_stride, num_positions: padded position table, divided by the scale;
            entries from one head's row to the next, 0 if heads share the table; entries of a row.
        time_ptr, time_stride: the time table likewise, without padding.
        boundaries_ptr, num_boundaries: int64, ascending.
        edges_ptr: int32, the boundaries, at most NEAR, and once more NEAR.
        leading_bits_ptr: int32 `[LEADING + 1]`: for each value of a distance's leading bits, the
            bucket of its smallest distance. Then by how much the bucket of another distance with
            these bits may be above it.
        entries_ptr, entries_stride: four words for each head or all, and each value of the leading
            bits: the first boundary above its smallest distance; the table's value below this
                boundary, and from it on; both buckets, in halves of a word. Then a word that is
            0 if a value of the bits has several boundaries. Only Hopper's kernels read entries.
        timestamps_ptr: of the keys. query_timestamps_ptr: None for the default. query_shift_ptr: of
            each segment.
        query_extremes_ptr, key_extremes_ptr: TIME_RECORD words for each TIME_BLOCK rows of a
            segment, from block `first_time_block` on: the earliest and the latest timestamp, and
            all less the earliest, modulo 2^32. Only Hopper's kernels read them.
        first_blocks_ptr: `StoredBuckets.first_blocks`. Hopper's kernels then read neither entries
            nor extremes.
    """

    position_ptr: tl.tensor
    position_stride: tl.tensor
    num_positions: tl.tensor
    time_ptr: tl.tensor
    time_stride: tl.tensor
    boundaries_ptr: tl.tensor
    num_boundaries: tl.tensor
    edges_ptr: tl.tensor
    leading_bits_ptr: tl.tensor
    entries_ptr: tl.tensor
    entries_stride: tl.tensor
    timestamps_ptr: tl.tensor
    query_timestamps_ptr: tl.tensor
    query_shift_ptr: tl.tensor
    query_extremes_ptr: tl.tensor
    key_extremes_ptr: tl.tensor
    first_blocks_ptr: tl.tensor


class TableSums(NamedTuple):
    """Memory of the table gradients, of which each program has its own part. None for a table
    without a gradient.

    position_ptr: `[programs, H or 1, num_positions]`; time_ptr: `[programs, H or 1, BUCKETS]`; both
    0 at first. scratch_ptr: a block of dS for each program. *_stride: elements of a program's part.
    time_head_stride: of a head's, 0 if heads share the table.
    """

    position_ptr: tl.tensor
    position_stride: tl.tensor
    time_ptr: tl.tensor
    time_stride: tl.tensor
    time_head_stride: tl.tensor
    scratch_ptr: tl.tensor


class Times(NamedTuple):
    """Timestamps of a vector of rows, and the extremes of the timestamps."""

    stamps: tl.tensor
    earliest: tl.tensor
    latest: tl.tensor


class BiasOfTile(NamedTuple):
    """The bias of a segment and head.

    position_ptr: the head's padded table, at distance 0, `middle` entries from either end.
    time_ptr, entries_ptr: the head's. timestamps_ptr: at the segment's first key.
    query_timestamps_ptr: at its first query. query_extremes_ptr, key_extremes_ptr: at its first
    blocks. shift: position of query 0. own: 1 for queries of the first query group, which have the
    bias. 0 stands for what is not there.
    """

    position_ptr: tl.tensor
    middle: tl.tensor
    time_ptr: tl.tensor
    boundaries_ptr: tl.tensor
    num_boundaries: tl.tensor
    edges_ptr: tl.tensor
    leading_bits_ptr: tl.tensor
    entries_ptr: tl.tensor
    timestamps_ptr: tl.tensor
    query_timestamps_ptr: tl.tensor
    query_extremes_ptr: tl.tensor
    key_extremes_ptr: tl.tensor
    shift: tl.tensor
    q_len: tl.tensor
    kv_len: tl.tensor
    own: tl.tensor


@triton.jit
def bias_of_tile(bias, tile, head, num_segments, KIND: tl.constexpr):
    """The BiasOfTile of a tile's segment of queries and a query head. tile: as ScheduledTile.
    num_segments: of a query group; None if there is one."""
    own, kv_segment = 1, tile.segment
    if num_segments is not None:
        own, kv_segment = (tile.segment < num_segments).to(tl.int32), tile.segment % num_segments
    shift = tile.kv_len - tile.q_len
    if KIND.shift:
        shift += tl.load(bias.query_shift_ptr + tile.segment).to(tl.int32)
    middle, position_ptr, time_ptr, entries_ptr = 0, 0, 0, 0
    boundaries_ptr, num_boundaries, edges_ptr, leading_bits_ptr = 0, 0, 0, 0
    timestamps_ptr, query_ptr, query_extremes_ptr, key_extremes_ptr = 0, 0, 0, 0
    if KIND.position:
        middle = bias.num_positions // 2  # the entry of distance 0
        position_ptr = bias.position_ptr + head.to(tl.int64) * bias.position_stride + middle
    if KIND.boundaries > 0:
        time_ptr = bias.time_ptr + head.to(tl.int64) * bias.time_stride
        boundaries_ptr, num_boundaries = bias.boundaries_ptr, bias.num_boundaries
        edges_ptr, leading_bits_ptr = bias.edges_ptr, bias.leading_bits_ptr
        timestamps_ptr = bias.timestamps_ptr + tile.kv_start
    if bias.entries_ptr is not None:
        entries_ptr = bias.entries_ptr + head.to(tl.int64) * bias.entries_stride
    if KIND.query_times:
        query_ptr = bias.query_timestamps_ptr + tile.q_start
    if bias.key_extremes_ptr is not None:
        query_block = first_time_block(tile.q_start, tile.segment)
        query_extremes_ptr = bias.query_extremes_ptr + TIME_RECORD * query_block
        key_block = first_time_block(tile.kv_start, kv_segment)
        key_extremes_ptr = bias.key_extremes_ptr + TIME_RECORD * key_block
    return BiasOfTile(
        position_ptr, middle, time_ptr, boundaries_ptr, num_boundaries, edges_ptr, leading_bits_ptr,
        entries_ptr, timestamps_ptr, query_ptr, query_extremes_ptr, key_extremes_ptr, shift,
        tile.q_len, tile.kv_len, own,
    )  # fmt: skip


@triton.jit
def first_time_block(start, segment):
    """Number of the first TIME_BLOCK rows of a segment that begins at row `start`."""
    return start // TIME_BLOCK + segment


@triton.jit
def key_times(bias, keys, KIND: tl.constexpr):
    """Times of a vector of keys of the segment; past its end, of the last key. Without a time table
    nothing reads them."""
    if KIND.boundaries > 0:
        return _times(load_key_times(bias, keys))
    else:
        return Times(keys, 0, 0)


@triton.jit
def _times(values):
    return Times(values, tl.min(values, 0), tl.max(values, 0))


@triton.jit
def load_key_times(bias, keys):
    """Timestamps of keys of the segment; past its end, of the last key."""
    return tl.load(
        bias.timestamps_ptr + tl.maximum(tl.minimum(keys, bias.kv_len - 1), 0),
        mask=(keys == keys) & (bias.kv_len > 0),
        other=0,
    )


@triton.jit
def query_times(bias, rows, KIND: tl.constexpr):
    """Times of a vector of query rows of the segment; past its end, of the last row. Without a time
    table nothing reads them."""
    if KIND.boundaries > 0:
        return _times(load_query_times(bias, rows, KIND))
    else:
        return Times(rows, 0, 0)


@triton.jit
def load_query_times(bias, rows, KIND: tl.constexpr):
    """Timestamps of query rows of the segment; past its end, of the last row."""
    rows = tl.maximum(tl.minimum(rows, bias.q_len - 1), 0)
    if KIND.query_times:
        return tl.load(
            bias.query_timestamps_ptr + rows, mask=(rows == rows) & (bias.q_len > 0), other=0
        )
    else:
        return load_key_times(bias, rows + bias.shift + 1)


@triton.jit
def first_entry(bias, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offset in the position table of a block's first query row and first key. It is limited so
    that the whole block, ROWS queries by COLUMNS keys, lies in the padded table; the entries are
    the same."""
    return tl.minimum(
        tl.maximum(column - row - bias.shift, ROWS - 1 - bias.middle), bias.middle - COLUMNS + 1
    )


@triton.jit
def bucket_block(rows, columns, bias, numbers):
    """Buckets of a block, int32 `[rows, columns]`, of two Times, one of queries and one of keys.
    numbers: 0, 1, 2, ..., at least as many as there are boundaries."""
    first, last, farthest = bucket_range(rows, columns, bias, numbers)
    return find_buckets(rows, columns, bias, first, last, farthest)


@triton.jit
def bucket_range(rows, columns, bias, numbers):
    """First and last bucket of the distances between two Times, and a bound of the distances."""
    nearest = tl.maximum(
        tl.maximum(rows.earliest - columns.latest, columns.earliest - rows.latest), 0
    )
    farthest = tl.maximum(rows.latest - columns.earliest, columns.latest - rows.earliest)
    boundaries = tl.load(
        bias.boundaries_ptr + numbers, mask=numbers < bias.num_boundaries, other=0x7FFFFFFFFFFFFFFF
    )
    # Both counts in one sum. A distance of 2^63 - 1 would count what is not there.
    both = tl.sum(
        (boundaries <= nearest).to(tl.int32) + ((boundaries <= farthest).to(tl.int32) << 16), 0
    )
    return (
        tl.minimum(both & 0xFFFF, bias.num_boundaries),
        tl.minimum(both >> 16, bias.num_boundaries),
        farthest,
    )


@triton.jit
def distances(rows, columns):
    """Distances of two Times, int32, if they are NEAR."""
    origin = columns.earliest
    return tl.abs(
        (rows.stamps - origin).to(tl.int32)[:, None]
        - (columns.stamps - origin).to(tl.int32)[None, :]
    )


@triton.jit
def leading_bits(distance):
    return distance.to(tl.float32).to(tl.int32, bitcast=True) >> LEADING_SHIFT


@triton.jit
def find_near_buckets(distance, bias):
    """Buckets of NEAR distances: by the table of their leading bits, and then by comparing with the
    boundaries that have these bits too."""
    bucket = tl.load(bias.leading_bits_ptr + leading_bits(distance))
    for _ in range(0, tl.load(bias.leading_bits_ptr + LEADING)):
        bucket += (tl.load(bias.edges_ptr + bucket) <= distance).to(tl.int32)
    return bucket


@triton.jit
def find_buckets(rows, columns, bias, first, last, farthest):
    """Buckets of a block, given their bucket_range.

    Few buckets are found by comparing with each boundary between them.
    """
    u, t = rows.stamps[:, None], columns.stamps[None, :]
    block = tl.where(u >= t, first, first)
    if (last - first > 3) & (farthest < NEAR):
        block = find_near_buckets(distances(rows, columns), bias)
    else:
        for bucket in range(first, last):
            edge = tl.load(bias.boundaries_ptr + bucket)
            block = tl.where((t <= u - edge) | (t >= u + edge), bucket + 1, block)
    return block
