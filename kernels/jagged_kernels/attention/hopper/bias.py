"""RelativeBias in the kernels for Hopper: blocks of biases in a consumer's registers, and sums of
dS for the gradients of the tables.

A block of position biases has one value per diagonal. A thread holds scores of two rows, 8 apart,
and of pairs of columns, 8 apart: its scores lie on about half as many diagonals, each of which it
loads once. Their addresses differ by constants.

The gradient of the position table is a sum over each diagonal of dS. A thread first adds its two
rows, whose diagonals meet if one row is moved by 8 columns: 18 sums of 32 elements. A consumer
writes them to shared memory in rows of 129 elements and reads them in rows of 130, so that a
diagonal becomes a column. Where Triton cannot express that, it writes the block to global memory
and reads it along the diagonals. It adds the columns' sums to its own part of global memory. Each
element there is only ever added to by one consumer, in the order of its blocks, so the result is
deterministic.

Sums of the time table's buckets are each thread's own. Neighbouring scores of a row are mostly in
one bucket: a thread sums them before it adds. In a block of few buckets, it sums each bucket.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.gluon_api import reinterpret, reinterprets_padding, thread_barrier
from ...common.pipeline import WARPGROUP_ROWS, mma_layout
from ..bias import (
    LEADING,
    NEAR,
    TIME_BLOCK,
    BiasOfTile,
    bias_of_tile,
    bucket_range,
    find_buckets,
    find_near_buckets,
    first_entry,
    first_time_block,
    key_times,
    leading_bits,
    load_key_times,
    load_query_times,
    query_times,
)
from .tile_source import load_word

THREADS = 128  # of a consumer
COMPARED = gl.constexpr(6)  # boundaries in a block up to which each score is compared with them
# buckets in a block up to which dS is summed for one after the other
SUMMED_ONE_BY_ONE = gl.constexpr(4)
SHARED_SCRATCH = gl.constexpr(reinterprets_padding)
# elements of global scratch memory of a consumer
BLOCK_OF_SCRATCH = None if reinterprets_padding else 64 * 64
RANGES = gl.constexpr(16)  # ranges of buckets that a consumer finds at a time
# one range per lane, all of them in each warp
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
WORDS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FOLDED_ROWS = gl.constexpr(32)  # half of a block's rows, 8 of each warp
COLUMNS_OF_SCRATCH = gl.constexpr(128)  # a block of 64 by 64 has 127 diagonals


class Buckets(NamedTuple):
    """Buckets of the time table in a block: of each score, and the first and last that there may
    be."""

    of_scores: gl.tensor
    first: gl.tensor
    last: gl.tensor


class ConsumerBias(NamedTuple):
    """The bias of a consumer's rows, queries or keys: that of their segment and head, the first
    row, their timestamps modulo 2^32, the number of their TIME_BLOCK in the batch, and the
    consumer's memory for `_range_of`. Only times need the last three."""

    of_tile: BiasOfTile
    row: gl.tensor
    stamps: gl.tensor
    block: gl.tensor
    ranges: gl.shared_memory_descriptor


@gluon.constexpr_function
def _load_diagonals(columns, transposed):
    """PTX that loads the position biases of a thread's scores in a block of 64 rows. The input is
    the address of its first score's."""
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
    """The position biases `[64, COLUMNS]` of a block; ptr: to that of its first row and column.
    TRANSPOSED: its rows are the keys."""
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, COLUMNS)
    # Row and column of a thread's first score, in each of its registers: bit 3 of rows and bits 0
    # and 3 up of columns count registers.
    rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))[:, None] & 0x37
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :] & 0x6
    diagonals = columns - rows
    if TRANSPOSED:
        diagonals = rows - columns
    return gl.inline_asm_elementwise(
        _load_diagonals(COLUMNS, TRANSPOSED), _constraints(COLUMNS),
        [(ptr + diagonals).to(gl.int64)], dtype=gl.float32, is_pure=True, pack=COLUMNS // 2,
    )  # fmt: skip


@gluon.jit
def _row_indices(first):
    """The indices of a consumer's rows in the segment."""
    return first + gl.arange(
        0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, mma_layout(WARPGROUP_ROWS, 64))
    )


@gluon.jit
def make_ranges(CONSUMERS: gl.constexpr, KIND: gl.constexpr):
    """Memory of each consumer for `_range_of`."""
    if KIND is None or KIND.boundaries == 0:
        return 0, 0, 0
    else:
        return _of_each_consumer(_no_ranges, CONSUMERS)


@gluon.jit
def _of_each_consumer(make: gl.constexpr, CONSUMERS: gl.constexpr):
    if CONSUMERS == 1:
        return (make(),)
    elif CONSUMERS == 2:
        return make(), make()
    else:
        return make(), make(), make()


@gluon.jit
def _no_ranges():
    words = gl.allocate_shared_memory(gl.int32, [2 * RANGES, 1], WORDS)
    reinterpret(words, gl.int32, [2 * RANGES], WORDS).store(
        gl.full([2 * RANGES], -1, gl.int32, LANES)
    )
    return words


@gluon.jit
def bias_of_queries(bias, tile, first, ranges, KIND: gl.constexpr):
    """ConsumerBias of the query rows from `first` on. ranges: the consumer's memory."""
    of_tile = bias_of_tile(
        bias, tile.segment, tile.head, tile.q_start, tile.q_len, tile.kv_start, tile.kv_len, KIND
    )
    rows = _row_indices(first)
    if KIND.boundaries > 0:
        rows = load_query_times(of_tile, rows, KIND).to(gl.int32)
    block = first_time_block(tile.q_start, tile.segment).to(gl.int32) + first // TIME_BLOCK
    return ConsumerBias(of_tile, first, rows, block, ranges)


@gluon.jit
def bias_of_keys(bias, tile, head, first, ranges, KIND: gl.constexpr):
    """ConsumerBias of the keys from `first` on, for a query head. ranges: the consumer's memory."""
    of_tile = bias_of_tile(
        bias, tile.segment, head, tile.q_start, tile.q_len, tile.kv_start, tile.kv_len, KIND
    )
    rows = _row_indices(first)
    if KIND.boundaries > 0:
        rows = load_key_times(of_tile, rows).to(gl.int32)
    block = first_time_block(tile.kv_start, tile.segment).to(gl.int32) + first // TIME_BLOCK
    return ConsumerBias(of_tile, first, rows, block, ranges)


@gluon.jit
def _find_ranges(of_tile, row, window, TRANSPOSED: gl.constexpr):
    """First and last bucket, in halves of a word, of the block of scores of the rows from `row` on
    with each of RANGES blocks of columns; negative if a distance is not NEAR."""
    row_ptr, column_ptr, num_columns = (
        of_tile.query_extremes_ptr,
        of_tile.key_extremes_ptr,
        of_tile.kv_len,
    )
    if TRANSPOSED:
        row_ptr, column_ptr, num_columns = (
            of_tile.key_extremes_ptr,
            of_tile.query_extremes_ptr,
            of_tile.q_len,
        )
    earliest = gl.load(row_ptr + 2 * (row // TIME_BLOCK))
    latest = gl.load(row_ptr + 2 * (row // TIME_BLOCK) + 1)
    blocks = RANGES * window + gl.arange(0, RANGES, layout=LANES)
    inside = blocks * TIME_BLOCK < num_columns
    earliest_column = gl.load(column_ptr + 2 * blocks, mask=inside, other=0)
    latest_column = gl.load(column_ptr + 2 * blocks + 1, mask=inside, other=0)
    nearest = gl.maximum(gl.maximum(earliest - latest_column, earliest_column - latest), 0)
    farthest = gl.maximum(latest - earliest_column, latest_column - earliest)
    first = find_near_buckets(gl.minimum(nearest, NEAR - 1).to(gl.int32), of_tile)
    last = find_near_buckets(gl.minimum(farthest, NEAR - 1).to(gl.int32), of_tile)
    return gl.where(farthest < NEAR, first | last << 16, -1)


@gluon.jit
def _range_of(bias, column, TRANSPOSED: gl.constexpr):
    """`_find_ranges` of the block from `column` on. The ranges of the blocks around it are kept in
    shared memory, behind them the block of rows and the number of the window of columns. A load
    there takes a tenth of the time of finding a range."""
    words, window = bias.ranges, column // TIME_BLOCK // RANGES
    if (load_word(words, RANGES) != bias.block) | (load_word(words, RANGES + 1) != window):
        thread_barrier()  # all warps have compared the words
        ranges = _find_ranges(bias.of_tile, bias.row, window, TRANSPOSED)
        reinterpret(words, gl.int32, [2 * RANGES], WORDS).slice(0, RANGES).store(ranges)
        words.index(RANGES).store(gl.full([1], bias.block, gl.int32, LANES))
        words.index(RANGES + 1).store(gl.full([1], window, gl.int32, LANES))
        thread_barrier()
    return load_word(words, column // TIME_BLOCK % RANGES)


@gluon.jit
def _distances(bias, column, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr, KIND: gl.constexpr):
    """NEAR distances of a block: of timestamps modulo 2^32."""
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, COLUMNS)
    columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    if TRANSPOSED:
        stamps = load_query_times(bias.of_tile, columns, KIND)
    else:
        stamps = load_key_times(bias.of_tile, columns)
    return gl.abs(
        gl.convert_layout(bias.stamps, gl.SliceLayout(1, L))[:, None] - stamps.to(gl.int32)[None, :]
    )


@gluon.jit
def _find_any_buckets(
    row, column, of_tile, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr, KIND: gl.constexpr
):
    """The buckets of a block, whatever the distances and boundaries are, and the first and last
    that there may be."""
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, COLUMNS)
    rows = row + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))
    columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    if TRANSPOSED:
        row_times, column_times = (
            key_times(of_tile, rows, KIND),
            query_times(of_tile, columns, KIND),
        )
    else:
        row_times, column_times = (
            query_times(of_tile, rows, KIND),
            key_times(of_tile, columns, KIND),
        )
    numbers = gl.arange(
        0, KIND.boundaries, layout=gl.BlockedLayout([max(1, KIND.boundaries // 32)], [32], [4], [0])
    )
    first, last, farthest = bucket_range(row_times, column_times, of_tile, numbers)
    return find_buckets(row_times, column_times, of_tile, first, last, farthest), first, last


@gluon.jit
def _time_block(bias, column, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr, KIND: gl.constexpr):
    """The time biases of a block, and their Buckets. Few buckets are found by a comparison with
    each boundary between them. More are found by one load per score, of an entry of 16 bytes, if no
    leading bits have two boundaries."""
    of_tile = bias.of_tile
    found = _range_of(bias, column, TRANSPOSED)
    first, last = found & 0xFFFF, found >> 16
    if (found >= 0) & (last - first <= COMPARED):
        L: gl.constexpr = mma_layout(WARPGROUP_ROWS, COLUMNS)
        buckets = gl.full([WARPGROUP_ROWS, COLUMNS], first, gl.int32, L)
        time = gl.full([WARPGROUP_ROWS, COLUMNS], gl.load(of_tile.time_ptr + first), gl.float32, L)
        if last > first:
            distance = _distances(bias, column, COLUMNS, TRANSPOSED, KIND)
            for bucket in range(first, last):
                reached = distance >= gl.load(of_tile.edges_ptr + bucket)
                time = gl.where(reached, gl.load(of_tile.time_ptr + bucket + 1), time)
                buckets = gl.where(reached, bucket + 1, buckets)
    elif (found >= 0) & (gl.load(of_tile.entries_ptr + 4 * LEADING) != 0):
        distance = _distances(bias, column, COLUMNS, TRANSPOSED, KIND)
        entry = (of_tile.entries_ptr + 4 * leading_bits(distance)).to(gl.int64)
        time, buckets = gl.inline_asm_elementwise(
            """{ .reg .b32 edge, below, above, bucket, next; .reg .pred reached;
            ld.global.nc.v4.b32 {edge, below, above, bucket}, [$3];
            setp.ge.s32 reached, $2, edge;
            selp.b32 $0, above, below, reached;
            shr.u32 next, bucket, 16; and.b32 bucket, bucket, 0xffff;
            selp.b32 $1, next, bucket, reached; }""",
            "=f,=r,r,l", [distance, entry], dtype=(gl.float32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        buckets, first, last = _find_any_buckets(
            bias.row, column, of_tile, COLUMNS, TRANSPOSED, KIND
        )
        time = gl.load(of_tile.time_ptr + buckets)
    return time, Buckets(buckets, first, last)


@gluon.jit
def bias_block(bias, first, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr, KIND: gl.constexpr):
    """The bias `[64, COLUMNS]` of a consumer's rows, and of COLUMNS keys from `first` on, divided
    by the scale, and with a time table its Buckets. TRANSPOSED: the rows are the keys, and the
    columns query rows."""
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
    if KIND.boundaries > 0:
        time, buckets = _time_block(bias, first, COLUMNS, TRANSPOSED, KIND)
        block += time
    else:
        buckets = Buckets(first, first, first)  # nothing reads them
    return block, buckets


# -- gradients of the tables -----------------------------------------------------------------------


class SumsOfTile(NamedTuple):
    """Where a consumer adds its rows' dS, times `factor`: its part of the position table at
    distance 0, and of the time table, both at the tile's head, and its scratch memory. num_rows:
    its rows in the segment."""

    position_ptr: gl.tensor
    time_ptr: gl.tensor
    scratch: gl.shared_memory_descriptor
    num_rows: gl.tensor
    factor: gl.tensor


@gluon.constexpr_function
def _padded(shape, pad):
    """32 rows of 128 elements, each followed by padding. Further padding, behind 2 and 8 rows,
    keeps writes off each other's banks."""
    padding = [[128, pad], [2 * 128, 8], [8 * 128, 8 * pad]]
    return gl.PaddedSharedLayout.with_identity_for(padding, shape, list(range(len(shape)))[::-1])


@gluon.constexpr_function
def _column_layout(rows):
    """One column per thread of a warpgroup."""
    return gl.BlockedLayout([rows, 1], [1, 32], [1, 4], [1, 0])


@gluon.jit
def _zeroed_scratch():
    scratch = gl.allocate_shared_memory(
        gl.float32, [FOLDED_ROWS, COLUMNS_OF_SCRATCH], _padded([FOLDED_ROWS, COLUMNS_OF_SCRATCH], 2)
    )
    scratch.store(
        gl.zeros([FOLDED_ROWS, COLUMNS_OF_SCRATCH], gl.float32, _column_layout(FOLDED_ROWS))
    )
    return scratch


@gluon.jit
def make_scratch(CONSUMERS: gl.constexpr):
    """Shared scratch memory of each consumer, 0 at first."""
    if not SHARED_SCRATCH:
        return 0, 0, 0
    else:
        return _of_each_consumer(_zeroed_scratch, CONSUMERS)


@gluon.jit
def sums_of_tile(sums, bias, scratch, part, head, num_rows, factor, KIND: gl.constexpr):
    """The SumsOfTile of a consumer; part: its number among all consumers of the grid."""
    position_ptr, time_ptr = 0, 0
    if KIND.position and not SHARED_SCRATCH:
        scratch = sums.scratch_ptr + part.to(gl.int64) * (WARPGROUP_ROWS * WARPGROUP_ROWS)
    if KIND.position:
        of_head = head.to(gl.int64) * bias.position_stride + bias.num_positions // 2
        position_ptr = sums.position_ptr + part.to(gl.int64) * sums.position_stride + of_head
    if KIND.boundaries > 0:
        time_ptr = (
            sums.time_ptr
            + part.to(gl.int64) * sums.time_stride
            + head.to(gl.int64) * sums.time_head_stride
        )
    return SumsOfTile(position_ptr, time_ptr, scratch, num_rows, factor)


@gluon.jit
def add_to_tables(ds, buckets, first, bias, sums, KIND: gl.constexpr):
    """Add a consumer's dS of the key block from `first` on, `[64, 64]`, to its sums. buckets: with
    a time table, the block's Buckets."""
    if sums.num_rows < WARPGROUP_ROWS:
        rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, ds.type.layout))[:, None]
        ds = gl.where(rows < sums.num_rows, ds, 0.0)
    if KIND.position:
        _add_diagonals(
            ds,
            sums.position_ptr
            + first_entry(bias.of_tile, bias.row, first, WARPGROUP_ROWS, ds.shape[1]),
            sums,
        )
    if KIND.boundaries > 0:
        _add_bucket_sums(ds * sums.factor, buckets, sums.time_ptr)


@gluon.jit
def _column_groups(x):
    """The 8 column groups of `[..., 2, 2, 2]`, the bits of a group's number, the lowest first."""
    low, high = gl.split(x)
    low_0, low_1 = gl.split(low)
    high_0, high_1 = gl.split(high)
    x0, x1 = gl.split(low_0)
    x2, x3 = gl.split(low_1)
    x4, x5 = gl.split(high_0)
    x6, x7 = gl.split(high_1)
    return x0, x1, x2, x3, x4, x5, x6, x7


@gluon.jit
def _store_folded(scratch, columns, PARITY: gl.constexpr):
    """Add rows r and r + 8 of each warp, the latter moved by 8 columns so that diagonals meet, and
    store the 72 columns of the sums from 56 on. A thread holds both rows. columns: the even or the
    odd ones of a block, `[64, 32]`."""
    upper, lower = gl.split(columns.reshape([4, 2, 8, 2, 2, 2, 4]).permute((0, 2, 6, 5, 4, 3, 1)))
    u = _column_groups(upper)
    v = _column_groups(lower)
    sums = (
        v[0],
        u[0] + v[1],
        u[1] + v[2],
        u[2] + v[3],
        u[3] + v[4],
        u[4] + v[5],
        u[5] + v[6],
        u[6] + v[7],
        u[7],
    )
    for group in gl.static_range(9):
        scratch.slice(28 + 4 * group, 4, 1).slice(PARITY, 1, 2).store(
            sums[group].reshape([FOLDED_ROWS, 4, 1])
        )


@gluon.jit
def _add_diagonals(ds, ptr, sums):
    """ptr: to the sum of the block's first row and first column. Column s of the scratch, read in
    rows of 130, holds diagonal s - 64."""
    ROWS: gl.constexpr = FOLDED_ROWS if SHARED_SCRATCH else WARPGROUP_ROWS
    CHUNK: gl.constexpr = 16
    COLUMNS: gl.constexpr = _column_layout(CHUNK)
    L: gl.constexpr = gl.SliceLayout(0, COLUMNS)
    total = gl.zeros([COLUMNS_OF_SCRATCH], gl.float32, L)
    thread_barrier()  # the previous block has been read
    if SHARED_SCRATCH:
        SHAPE: gl.constexpr = [FOLDED_ROWS, COLUMNS_OF_SCRATCH // 2, 2]
        written = reinterpret(sums.scratch, gl.float32, SHAPE, _padded(SHAPE, 1))
        even, odd = gl.split(ds.reshape([WARPGROUP_ROWS, WARPGROUP_ROWS // 2, 2]))
        _store_folded(written, even, 0)
        _store_folded(written, odd, 1)
    else:
        rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, ds.type.layout))[:, None]
        columns = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(0, ds.type.layout))[None, :]
        gl.store(sums.scratch + rows * WARPGROUP_ROWS + columns, ds)
    thread_barrier()
    for chunk in gl.static_range(ROWS // CHUNK):
        if SHARED_SCRATCH:
            part = sums.scratch.slice(CHUNK * chunk, CHUNK).load(COLUMNS)
        else:
            row = CHUNK * chunk + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, COLUMNS))[:, None]
            column = row + gl.arange(0, COLUMNS_OF_SCRATCH, layout=L)[None, :] - 64
            inside = (column >= 0) & (column < WARPGROUP_ROWS)
            part = gl.load(sums.scratch + row * WARPGROUP_ROWS + column, mask=inside, other=0.0)
        total += gl.sum(part, 0)
    diagonals = gl.arange(0, COLUMNS_OF_SCRATCH, layout=L) - 64
    # Diagonal -64 does not exist. Its entry may be another consumer's, or not in memory.
    gl.atomic_add(ptr + diagonals, total * sums.factor, mask=diagonals > -64, sem="relaxed")


@gluon.constexpr_function
def _add_runs():
    """PTX that adds a thread's scores, of two rows, to its sums of each bucket. It sums runs of
    equal buckets in registers. Inputs: dS, the buckets, and the address of the sum of bucket 0."""
    lines = ["{ .reg .pred ends; .reg .b64 address; .reg .f32 run;"]
    for row in (0, 1):
        registers = [pair + 2 * row + 4 * group for group in range(8) for pair in (0, 1)]
        lines.append("mov.f32 run, 0f00000000;")
        for register, following in zip(registers, [*registers[1:], None]):
            lines.append(f"add.f32 run, run, ${32 + register};")
            ends = "" if following is None else "@ends "
            if following is not None:
                lines.append(f"setp.ne.s32 ends, ${64 + register}, ${64 + following};")
            lines.append(f"{ends}mad.wide.s32 address, ${64 + register}, {4 * THREADS}, $96;")
            lines.append(f"{ends}red.relaxed.gpu.global.add.f32 [address], run;")
            if following is not None:
                lines.append("@ends mov.f32 run, 0f00000000;")
    lines += [f"mov.b32 ${register}, 0;" for register in range(32)]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _add_bucket():
    """PTX that adds a thread's scores of one bucket to its sum of this bucket. Inputs: dS, the
    buckets, the bucket, and the address of the sum of bucket 0."""
    lines = ["{ .reg .pred same; .reg .b64 address; .reg .f32 sum;", "mov.f32 sum, 0f00000000;"]
    for register in range(32):
        lines += [
            f"setp.eq.s32 same, ${64 + register}, $96;",
            f"@same add.f32 sum, sum, ${32 + register};",
        ]
    lines += [
        f"mad.wide.s32 address, $96, {4 * THREADS}, $128;",
        "red.relaxed.gpu.global.add.f32 [address], sum;",
    ]
    lines += [f"mov.b32 ${register}, 0;" for register in range(32)]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _sum_constraints(*inputs):
    """Of PTX that writes nothing: its outputs are not used."""
    return ",".join(["=r"] * 32 + [kind for kind in inputs for _ in range(32)])


@gluon.jit
def _add_bucket_sums(ds, buckets, ptr):
    """Each thread adds its scores' dS to its own sums of the buckets, THREADS elements apart; ptr:
    to the consumer's first. It sums few buckets one by one, and runs of equal buckets if there may
    be more."""
    L: gl.constexpr = ds.type.layout
    rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))[:, None]
    columns = gl.arange(0, ds.shape[1], layout=gl.SliceLayout(0, L))[None, :]
    thread = ((rows >> 4) * 8 + (rows & 7)) * 4 + ((columns & 6) >> 1)
    sums = (ptr + thread).to(gl.int64)
    if buckets.last - buckets.first < SUMMED_ONE_BY_ONE:
        for bucket in range(buckets.first, buckets.last + 1):
            bucket_of_all = gl.full(ds.shape, bucket, gl.int32, L)
            gl.inline_asm_elementwise(
                _add_bucket(), _sum_constraints("f", "r", "r", "l"),
                [ds, buckets.of_scores, bucket_of_all, sums], dtype=gl.int32, is_pure=False,
                pack=32,
            )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            _add_runs(), _sum_constraints("f", "r", "l"), [ds, buckets.of_scores, sums],
            dtype=gl.int32, is_pure=False, pack=32,
        )  # fmt: skip
