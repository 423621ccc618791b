"""RelativeBias in the kernels for Hopper: blocks of biases in a consumer's registers.

A block of position biases has one value per diagonal. A thread holds scores of two rows, 8 apart,
and of pairs of columns, 8 apart: its scores lie on about half as many diagonals, each of which it
loads once. Their addresses differ by constants.

Buckets of times are found for each block, or they are stored (stored_buckets.py): TMA then brings a
block's with the rows that the tile loops over, and a consumer looks the values up in shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.gluon_api import load_tile, reinterpret, thread_barrier
from ...common.pipeline import WARPGROUP_ROWS, mma_layout
from ..bias import (
    BYTE_ORDER,
    LEADING,
    NEAR,
    TIME_BLOCK,
    TIME_RECORD,
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

COMPARED = gl.constexpr(6)  # boundaries in a block up to which each score is compared with them
RANGES = gl.constexpr(16)  # ranges of buckets that a consumer finds at a time
# one range per lane, all of them in each warp
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
TABLE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
WORDS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Buckets(NamedTuple):
    """Buckets of the time table in a block: of each score, and the first and last that there may
    be."""

    of_scores: gl.tensor
    first: gl.tensor
    last: gl.tensor


class ConsumerBias(NamedTuple):
    """The bias of a consumer's rows, queries or keys: that of their segment and head, the first
    row, their timestamps modulo 2^32, the number of their TIME_BLOCK in the batch, and the
    consumer's memory for `_range_of`. Only times need the last three. table: with stored buckets,
    the head's time table, padded."""

    of_tile: BiasOfTile
    row: gl.tensor
    stamps: gl.tensor
    block: gl.tensor
    ranges: gl.shared_memory_descriptor
    table: gl.tensor


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
def _load_columns(registers):
    """PTX that loads a thread's columns of a row, pairs 8 columns apart. The input is the address
    of its first column's. Triton does not know that pairs are aligned."""
    return "\n".join(
        f"ld.global.nc.v2.b32 {{${pair}, ${pair + 1}}}, [${registers} + {16 * pair}];"
        for pair in range(0, registers, 2)
    )


@gluon.constexpr_function
def _constraints(registers, kind):
    """Of PTX that loads so many registers of a thread."""
    return ",".join([f"=&{kind}"] * registers + ["l"] * registers)


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
        _load_diagonals(COLUMNS, TRANSPOSED), _constraints(COLUMNS // 2, "f"),
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
    if KIND is None or KIND.boundaries == 0 or KIND.stored:
        return 0, 0, 0
    else:
        return of_each_consumer(_no_ranges, CONSUMERS)


@gluon.jit
def of_each_consumer(make: gl.constexpr, CONSUMERS: gl.constexpr):
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
def bias_of_queries(kernel, tile, first, consumer: gl.constexpr, KIND: gl.constexpr):
    """ConsumerBias of a consumer's query rows, which begin at `first`, or None."""
    if KIND is not None:
        of_tile = bias_of_tile(kernel.bias, tile, tile.head, kernel.schedule.num_segments, KIND)
        rows = _row_indices(first)
        if KIND.boundaries > 0 and not KIND.stored:
            rows = load_query_times(of_tile, rows, KIND).to(gl.int32)
        block = first_time_block(tile.q_start, tile.segment).to(gl.int32) + first // TIME_BLOCK
        table = _time_table(of_tile, KIND)
        return ConsumerBias(of_tile, first, rows, block, kernel.ranges[consumer], table)


@gluon.jit
def _time_table(of_tile, KIND: gl.constexpr):
    """The time table of a head in registers, with zeros behind it; without stored buckets, any."""
    if KIND.stored:
        entries = gl.arange(0, 2 * KIND.boundaries, layout=TABLE)
        inside = entries <= of_tile.num_boundaries
        return gl.load(of_tile.time_ptr + entries, mask=inside, other=0.0)
    else:
        return of_tile.own


@gluon.jit
def bias_of_keys(kernel, tile, group_head, first, consumer: gl.constexpr, OPTIONS: gl.constexpr):
    """ConsumerBias of a consumer's keys, which begin at `first`, for the tile's segment of queries
    and a query head of the key head's group; or None."""
    KIND: gl.constexpr = OPTIONS.bias
    if KIND is not None:
        head = tile.head * OPTIONS.group + group_head
        of_tile = bias_of_tile(kernel.bias, tile, head, kernel.schedule.num_segments, KIND)
        rows = _row_indices(first)
        if KIND.boundaries > 0 and not KIND.stored:
            rows = load_key_times(of_tile, rows).to(gl.int32)
        block = first_time_block(tile.kv_start, tile.segment).to(gl.int32) + first // TIME_BLOCK
        block = gl.where(of_tile.own > 0, block, -2 - block)  # no number of a block of other keys
        table = _time_table(of_tile, KIND)
        return ConsumerBias(of_tile, first, rows, block, kernel.ranges[consumer], table)


@gluon.jit
def _find_ranges(of_tile, row, window, TRANSPOSED: gl.constexpr):
    """First and last bucket, in halves of a word, of the block of scores of the rows from `row` on
    with each of RANGES blocks of columns; negative if a distance is not NEAR. Bit 15: no query is
    earlier than a key."""
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
    earliest = gl.load(row_ptr + TIME_RECORD * (row // TIME_BLOCK))
    latest = gl.load(row_ptr + TIME_RECORD * (row // TIME_BLOCK) + 1)
    blocks = RANGES * window + gl.arange(0, RANGES, layout=LANES)
    inside = blocks * TIME_BLOCK < num_columns
    earliest_column = gl.load(column_ptr + TIME_RECORD * blocks, mask=inside, other=0)
    latest_column = gl.load(column_ptr + TIME_RECORD * blocks + 1, mask=inside, other=0)
    nearest = gl.maximum(gl.maximum(earliest - latest_column, earliest_column - latest), 0)
    farthest = gl.maximum(latest - earliest_column, latest_column - earliest)
    first = find_near_buckets(gl.minimum(nearest, NEAR - 1).to(gl.int32), of_tile)
    last = find_near_buckets(gl.minimum(farthest, NEAR - 1).to(gl.int32), of_tile)
    ordered = earliest >= latest_column
    if TRANSPOSED:
        ordered = earliest_column >= latest
    return gl.where(farthest < NEAR, first | ordered.to(gl.int32) << 15 | last << 16, -1)


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
def _times_of_block(bias, column, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Timestamps of rows `[64, 1]` and of columns `[1, COLUMNS]`, less the earliest of the columns'
    TIME_BLOCK, modulo 2^32."""
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, COLUMNS)
    record = bias.of_tile.key_extremes_ptr
    if TRANSPOSED:
        record = bias.of_tile.query_extremes_ptr
    record += TIME_RECORD * (column // TIME_BLOCK)
    words = (record + 2).to(gl.pointer_type(gl.int32), bitcast=True) + column % TIME_BLOCK
    columns = gl.inline_asm_elementwise(
        _load_columns(COLUMNS // 4), _constraints(COLUMNS // 4, "r"),
        [(words + (gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L)) & 0x6)).to(gl.int64)],
        dtype=gl.int32, is_pure=True, pack=COLUMNS // 4,
    )  # fmt: skip
    rows = gl.convert_layout(bias.stamps, gl.SliceLayout(1, L)) - gl.load(record).to(gl.int32)
    return rows[:, None], columns[None, :]


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
def _compare(bias, column, first, last, ordered, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Time biases and buckets of a block by a comparison with each boundary between two buckets."""
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, COLUMNS)
    edges_ptr, time_ptr = bias.of_tile.edges_ptr, bias.of_tile.time_ptr
    buckets = gl.full([WARPGROUP_ROWS, COLUMNS], first, gl.int32, L)
    time = gl.full([WARPGROUP_ROWS, COLUMNS], gl.load(time_ptr + first), gl.float32, L)
    if last > first:
        rows, columns = _times_of_block(bias, column, COLUMNS, TRANSPOSED)
        if ordered:  # no distance is computed
            for bucket in range(first, last):
                edge = gl.load(edges_ptr + bucket)
                reached = columns >= rows + edge if TRANSPOSED else columns <= rows - edge
                time = gl.where(reached, gl.load(time_ptr + bucket + 1), time)
                buckets = gl.where(reached, bucket + 1, buckets)
        else:
            distance = gl.abs(rows - columns)
            for bucket in range(first, last):
                reached = distance >= gl.load(edges_ptr + bucket)
                time = gl.where(reached, gl.load(time_ptr + bucket + 1), time)
                buckets = gl.where(reached, bucket + 1, buckets)
    return time, buckets


@gluon.jit
def _time_block(bias, column, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr, KIND: gl.constexpr):
    """The time biases of a block, and their Buckets. Few buckets are found by a comparison with
    each boundary between them. More are found by one load per score, of an entry of 16 bytes, if no
    leading bits have two boundaries."""
    of_tile = bias.of_tile
    found = _range_of(bias, column, TRANSPOSED)
    first, last = found & 0x7FFF, found >> 16
    if (found >= 0) & (last - first <= COMPARED):
        ordered = (found & 0x8000) != 0
        time, buckets = _compare(bias, column, first, last, ordered, COLUMNS, TRANSPOSED)
    elif (found >= 0) & (gl.load(of_tile.entries_ptr + 4 * LEADING) != 0):
        rows, columns = _times_of_block(bias, column, COLUMNS, TRANSPOSED)
        distance = gl.abs(rows - columns)
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


# -- stored buckets --------------------------------------------------------------------------------


@gluon.constexpr_function
def _layout_of_buckets():
    """Where the buckets of a block of stored_buckets.py are in shared memory, by TMA's swizzle of
    128 bytes: of each bit of an offset in bytes, row and column."""
    bases = [list(x) for x in BYTE_ORDER]
    for bit in (7, 8, 9):
        row, column = BYTE_ORDER[bit - 3]
        bases[bit] = [bases[bit][0] ^ row, bases[bit][1] ^ column]
    return gl.SharedLinearLayout(bases)


@gluon.constexpr_function
def _layout_of_bytes(columns, transposed):
    """mma_layout with a thread's registers in the order of the bytes in memory."""
    registers = [[8, 0], [0, 8], [0, 1], [0, 16], [0, 32]]
    if transposed:
        registers[:2] = [0, 8], [8, 0]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    registers = [x for x in registers if x[1] < columns]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16, 0], [32, 0]], [], [WARPGROUP_ROWS.value, columns]
    )


@gluon.jit
def make_buckets(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Memory of a block of stored buckets for each stage and consumer."""
    if desc is not None:
        box: gl.constexpr = desc.block_type.shape
        shape: gl.constexpr = [STAGES * CONSUMERS, box[0], box[1], box[2]]
        return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def first_stored_block(bias, tile, num_segments):
    """Number of the first stored block of a tile's segments, and how many blocks of keys each block
    of queries has. A query group but the first has no blocks: it takes others."""
    segment = tile.segment
    if num_segments is not None:
        segment = segment % num_segments
    return gl.load(bias.first_blocks_ptr + segment), gl.cdiv(tile.kv_len, TIME_BLOCK)


@gluon.constexpr_function
def bytes_of_buckets(desc, consumers):
    """Of the blocks that `load_buckets` loads."""
    return 0 if desc is None else consumers * desc.block_type.nbytes


@gluon.jit
def load_buckets(ring, buckets, desc, step, first, stride, CONSUMERS: gl.constexpr):
    """Load the consumers' blocks of stored buckets, `stride` blocks apart, for a step of a ring,
    whose barrier `producer_load` has told their bytes."""
    slot = step % ring.buffers.shape[0]
    for consumer in gl.static_range(CONSUMERS):
        load_tile(
            desc, [(first + consumer * stride).to(gl.int32), 0, 0], ring.full.index(slot),
            buckets.index(slot * CONSUMERS + consumer),
        )  # fmt: skip


@gluon.jit
def stored_buckets(
    rings, ring, step, first, consumer: gl.constexpr, CONSUMERS: gl.constexpr,
    COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """The stored buckets of a consumer's block in a full buffer of a ring, uint8 `[64, COLUMNS]`.
    Its columns begin at `first`."""
    BYTES: gl.constexpr = _layout_of_bytes(COLUMNS, TRANSPOSED)
    slot = step % ring.buffers.shape[0]
    block = reinterpret(
        rings.buckets.index(slot * CONSUMERS + consumer), gl.uint8, [TIME_BLOCK, TIME_BLOCK],
        _layout_of_buckets(),
    )  # fmt: skip
    if TRANSPOSED:
        block = block.permute((1, 0))
    if COLUMNS == TIME_BLOCK:
        buckets = block.load(BYTES)
    elif first % TIME_BLOCK == 0:
        buckets = block.slice(0, COLUMNS, 1).load(BYTES)
    else:
        buckets = block.slice(COLUMNS, COLUMNS, 1).load(BYTES)
    return buckets


@gluon.jit
def as_integers(buckets):
    """Stored buckets as int32, in mma_layout."""
    # A conversion of the type would take two instructions more for each.
    buckets = gl.inline_asm_elementwise(
        "prmt.b32 $0, $4, 0, 0x4440; prmt.b32 $1, $4, 0, 0x4441;"
        "prmt.b32 $2, $4, 0, 0x4442; prmt.b32 $3, $4, 0, 0x4443;",
        "=r,=r,=r,=r,r", [buckets], dtype=gl.int32, is_pure=True, pack=4,
    )  # fmt: skip
    return gl.convert_layout(buckets, mma_layout(WARPGROUP_ROWS, buckets.shape[1]))


# -- blocks ----------------------------------------------------------------------------------------


@gluon.jit
def bias_block(
    bias, first, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr, KIND: gl.constexpr, stored=None
):
    """The bias `[64, COLUMNS]` of a consumer's rows, and of COLUMNS keys from `first` on, divided
    by the scale, and with a time table its Buckets. TRANSPOSED: the rows are the keys, and the
    columns query rows. stored: the block's buckets, if they are stored."""
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
    if stored is not None:
        numbers = as_integers(stored).reshape([WARPGROUP_ROWS * COLUMNS])
        found = gl.gather(bias.table, numbers, 0)
        block += gl.convert_layout(found.reshape([WARPGROUP_ROWS, COLUMNS]), L, assert_trivial=True)
        buckets = Buckets(first, first, first)  # the caller has them
    elif KIND.boundaries > 0:
        time, buckets = _time_block(bias, first, COLUMNS, TRANSPOSED, KIND)
        block += time
    else:
        buckets = Buckets(first, first, first)  # nothing reads them
    return gl.where(of_tile.own > 0, block, 0.0), buckets
