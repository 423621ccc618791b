"""Small kernels of RelativeBias, for any GPU: the tables that a call makes before its attention
kernels run, and the final sums of the gradients."""

import triton
import triton.language as tl

from ..common.loads import ScheduledTile, load_segment
from ..common.ptxas import safe_ptxas
from .bias import (
    LEADING,
    LEADING_SHIFT,
    NEAR,
    PAD,
    TIME_BLOCK,
    TIME_RECORD,
    bias_of_tile,
    bucket_block,
    key_times,
    load_key_times,
    load_query_times,
    query_times,
)

# lanes, one for each value of the leading bits
VALUES = tl.constexpr(triton.next_power_of_2(LEADING.value))
PADDED = tl.constexpr(1024)  # entries of a padded position table that a program writes
SUMMED = tl.constexpr(32)  # entries of a table's gradient that a program sums
TIME_BLOCKS = tl.constexpr(16)  # whose extremes a program finds at a time
TERMS = tl.constexpr(32768)  # that a program adds at a time


# -- tables ----------------------------------------------------------------------------------------


@safe_ptxas
@triton.jit(
    do_not_specialize=["num_segments", "inverse_scale", "time_programs", "padding_programs"]
)
def bias_tables_kernel(
    position_ptr, time_ptr, q_offsets_ptr, kv_offsets_ptr, num_segments, bias, inverse_scale,
    time_programs, padding_programs,
    BITS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Write the tables of a `Bias`: the given ones times `inverse_scale`, that of positions padded,
    and what finds buckets.

    time_programs: one for each head of the time table; then padding_programs pad. The others, one
    for each segment, find extremes of timestamps. BITS: of the number of boundaries.
    """
    program = tl.program_id(0)
    if bias.boundaries_ptr is not None:
        if program < time_programs:
            _make_time_tables(time_ptr, program.to(tl.int64), bias, inverse_scale, BITS)
    if bias.position_ptr is not None:
        if (program >= time_programs) & (program < time_programs + padding_programs):
            _pad_positions(
                position_ptr, program - time_programs, bias.position_ptr, bias.num_positions,
                inverse_scale,
            )  # fmt: skip

    if bias.key_extremes_ptr is not None:
        segment = program - time_programs - padding_programs
        if segment >= 0:
            _find_extremes(q_offsets_ptr, kv_offsets_ptr, segment, bias, num_segments, KIND)


@triton.jit
def _find_extremes(q_offsets_ptr, kv_offsets_ptr, segment, bias, num_segments, KIND: tl.constexpr):
    """query_extremes and key_extremes of a segment of queries. Those of its keys are the same in
    each query group."""
    kv_segment = segment
    if num_segments is not None:
        kv_segment = segment % num_segments
    q_start, q_len = load_segment(q_offsets_ptr, segment)
    kv_start, kv_len = load_segment(kv_offsets_ptr, kv_segment)
    tile = ScheduledTile(segment, 0 * segment, 0, q_start, q_len, kv_start, kv_len)
    of_segment = bias_of_tile(bias, tile, tile.head, num_segments, KIND)
    for first in range(0, q_len, TIME_BLOCKS * TIME_BLOCK):
        rows = _rows_of_blocks(first)
        _store_extremes(
            of_segment.query_extremes_ptr, first, load_query_times(of_segment, rows, KIND), q_len
        )
    for first in range(0, kv_len, TIME_BLOCKS * TIME_BLOCK):
        rows = _rows_of_blocks(first)
        _store_extremes(
            of_segment.key_extremes_ptr, first, load_key_times(of_segment, rows), kv_len
        )


@triton.jit
def _rows_of_blocks(first):
    return (
        first + tl.arange(0, TIME_BLOCKS)[:, None] * TIME_BLOCK + tl.arange(0, TIME_BLOCK)[None, :]
    )


@triton.jit
def _store_extremes(ptr, first, times, num_rows):
    """times: `[TIME_BLOCKS, TIME_BLOCK]`, of the rows of a segment from `first` on. ptr: at the
    segment's first block."""
    blocks = first // TIME_BLOCK + tl.arange(0, TIME_BLOCKS)
    inside = blocks * TIME_BLOCK < num_rows
    records, earliest = ptr + TIME_RECORD * blocks, tl.min(times, 1)
    tl.store(records, earliest, mask=inside)
    tl.store(records + 1, tl.max(times, 1), mask=inside)
    words = (records + 2).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(
        words[:, None] + tl.arange(0, TIME_BLOCK)[None, :],
        (times - earliest[:, None]).to(tl.int32),
        mask=inside[:, None],
    )


@triton.jit
def _pad_positions(position_ptr, program, padded_ptr, num_positions, inverse_scale):
    """num_positions: with the padding."""
    blocks = tl.cdiv(num_positions, PADDED)
    head = (program // blocks).to(tl.int64)
    entries = program % blocks * PADDED + tl.arange(0, PADDED)
    given = num_positions - 2 * PAD
    values = tl.load(
        position_ptr + head * given + tl.minimum(tl.maximum(entries - PAD, 0), given - 1)
    )
    tl.store(
        padded_ptr + head * num_positions + entries,
        values * inverse_scale,
        mask=entries < num_positions,
    )


@triton.jit
def _make_time_tables(time_ptr, head, bias, inverse_scale, BITS: tl.constexpr):
    """edges and leading_bits, which the first program stores, and the time table and entries of a
    head. Each program finds all buckets."""
    boundaries_ptr, num_boundaries = bias.boundaries_ptr, bias.num_boundaries
    lanes = tl.arange(0, VALUES)
    is_value, bits = lanes < LEADING, tl.minimum(lanes, LEADING - 1)
    # The least and the greatest distance that may have given these bits. Rounding to fp32 may move
    # a distance up, by 2^-24 of itself, to the next bits; never down, as fp32 has every number at
    # which bits begin. Bits of fractions have no distance: the greatest is below the least, and the
    # last bucket then is the first.
    lowest = tl.ceil(_first_number(bits) * (1 - 2**-22)).to(tl.int64)
    highest = tl.ceil(_first_number(bits + 1)).to(tl.int64) - 1
    first = _count_reached(boundaries_ptr, num_boundaries, lowest, BITS)
    last = tl.maximum(_count_reached(boundaries_ptr, num_boundaries, highest, BITS), first)
    time_ptr += head * (num_boundaries + 1)
    numbers = tl.arange(0, 1 << BITS)
    values = tl.load(time_ptr + numbers, mask=numbers <= num_boundaries, other=0.0) * inverse_scale
    tl.store(
        bias.time_ptr + head * bias.time_stride + numbers, values, mask=numbers <= num_boundaries
    )
    if head == 0:
        tl.store(
            bias.edges_ptr + numbers,
            _load_edges(boundaries_ptr, num_boundaries, numbers),
            mask=numbers <= num_boundaries,
        )
        tl.store(bias.leading_bits_ptr + bits, first, mask=is_value)
        tl.store(bias.leading_bits_ptr + LEADING, tl.max(last - first, 0))
    if bias.entries_ptr is not None:
        entries_ptr = bias.entries_ptr + head * bias.entries_stride
        edge = _load_edges(boundaries_ptr, num_boundaries, first)
        tl.store(entries_ptr + 4 * bits, edge, mask=is_value)
        tl.store(
            entries_ptr + 4 * bits + 1,
            (tl.load(time_ptr + first) * inverse_scale).to(tl.int32, bitcast=True),
            mask=is_value,
        )
        tl.store(
            entries_ptr + 4 * bits + 2,
            (tl.load(time_ptr + last) * inverse_scale).to(tl.int32, bitcast=True),
            mask=is_value,
        )
        tl.store(entries_ptr + 4 * bits + 3, first | last << 16, mask=is_value)
        last_edge = _load_edges(boundaries_ptr, num_boundaries, tl.maximum(last - 1, 0))
        one_boundary = tl.min(((edge == last_edge) | (first == last)).to(tl.int32), 0)
        tl.store(entries_ptr + 4 * LEADING + tl.arange(0, 4), one_boundary)


@triton.jit
def _first_number(bits):
    """The least number, fp64, with these leading bits."""
    return (bits << LEADING_SHIFT).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _count_reached(boundaries_ptr, num_boundaries, distances, BITS: tl.constexpr):
    """How many boundaries are at most each distance, int32: one bit of the count after the other.
    BITS: of num_boundaries."""
    count = tl.zeros([VALUES], tl.int32)
    for bit in tl.static_range(BITS):
        more = count + (1 << (BITS - 1 - bit))
        boundary = tl.load(
            boundaries_ptr + more - 1, mask=more <= num_boundaries, other=0x7FFFFFFFFFFFFFFF
        )
        count = tl.where(boundary <= distances, more, count)
    return count


@triton.jit
def _load_edges(boundaries_ptr, num_boundaries, numbers):
    """Boundaries as int32, at most NEAR, which also is the edge after the last."""
    return tl.minimum(
        tl.load(boundaries_ptr + numbers, mask=numbers < num_boundaries, other=NEAR), NEAR
    ).to(tl.int32)


# -- stored buckets --------------------------------------------------------------------------------


@safe_ptxas
@triton.jit(do_not_specialize=["num_blocks"])
def stored_buckets_kernel(
    q_offsets_ptr, kv_offsets_ptr, first_blocks_ptr, buckets_ptr, num_blocks, bias,
    KIND: tl.constexpr,
):  # fmt: skip
    """Write the buckets of `StoredBuckets`. The programs of a segment take its blocks in turns.
    num_blocks: for which there is memory."""
    segment = tl.program_id(0)
    q_start, q_len = load_segment(q_offsets_ptr, segment)
    kv_start, kv_len = load_segment(kv_offsets_ptr, segment)
    tile = ScheduledTile(segment, 0 * segment, 0, q_start, q_len, kv_start, kv_len)
    of_segment = bias_of_tile(bias, tile, tile.head, None, KIND)
    first = tl.load(first_blocks_ptr + segment)
    of_keys = tl.cdiv(kv_len, TIME_BLOCK)
    count = tl.minimum(tl.cdiv(q_len, TIME_BLOCK) * of_keys, num_blocks - first)
    lanes = tl.arange(0, TIME_BLOCK)
    for number in range(tl.program_id(1), count, tl.num_programs(1)):
        rows = number // of_keys * TIME_BLOCK + lanes
        columns = number % of_keys * TIME_BLOCK + lanes
        block = bucket_block(
            query_times(of_segment, rows, KIND), key_times(of_segment, columns, KIND), of_segment,
            tl.arange(0, KIND.boundaries),
        )  # fmt: skip
        ptr = buckets_ptr + (first + number).to(tl.int64) * (TIME_BLOCK * TIME_BLOCK)
        tl.store(ptr + tl.arange(0, TIME_BLOCK * TIME_BLOCK), _in_byte_order(block.to(tl.uint8)))


@triton.jit
def _in_byte_order(block):
    """A block `[64, 64]` in the order of BYTE_ORDER, `[64 · 64]`."""
    bits = block.reshape([2, 2, 2, 4, 2, 2, 2, 2, 4, 2])
    bits = tl.permute(bits, (5, 0, 6, 1, 3, 8, 4, 9, 7, 2))
    return bits.reshape([TIME_BLOCK * TIME_BLOCK])


# -- gradients -------------------------------------------------------------------------------------


@safe_ptxas
@triton.jit(do_not_specialize=["num_positions", "num_buckets", "position_programs", "parts"])
def sum_tables_kernel(
    sums, dposition_ptr, num_positions, dtime_ptr, num_buckets, position_programs, parts,
    BUCKETS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """The gradients of the tables, `[H or 1, num_positions]` and `[H or 1, num_buckets]`: the sums
    of the parts of a `TableSums`.

    position_programs: as many sum the position table; the others sum the time table. BUCKETS:
    entries of a head of the time table in a part; THREADS: sums of each.
    """
    program = tl.program_id(0)
    if sums.position_ptr is not None:
        if program < position_programs:
            _sum_entries(
                sums.position_ptr, sums.position_stride, parts, num_positions + 2 * PAD, program,
                dposition_ptr, num_positions, PAD,
            )  # fmt: skip
    if sums.time_ptr is not None:
        if program >= position_programs:
            if THREADS == 1:
                _sum_entries(
                    sums.time_ptr, sums.time_stride, parts, BUCKETS, program - position_programs,
                    dtime_ptr, num_buckets, 0,
                )  # fmt: skip
            else:
                bucket = (program - position_programs).to(tl.int64)
                total = _add_parts(
                    sums.time_ptr + bucket * THREADS, sums.time_stride, parts,
                    tl.arange(0, THREADS), THREADS,
                )  # fmt: skip
                tl.store(dtime_ptr + bucket, tl.sum(total))


@triton.jit
def _sum_entries(
    ptr, stride, parts, head_stride, program, gradient_ptr, num_entries, PADDING: tl.constexpr
):
    """SUMMED entries of a head. The sums of PADDING entries before the first entry and after the
    last belong to these two."""
    blocks = tl.cdiv(num_entries, SUMMED)
    head, block = (program // blocks).to(tl.int64), program % blocks
    entries = block * SUMMED + tl.arange(0, SUMMED)
    ptr += head * head_stride
    total = tl.sum(_add_parts(ptr + PADDING, stride, parts, entries, num_entries), 0)
    if PADDING > 0:
        if block == 0:
            before = tl.sum(_add_parts(ptr, stride, parts, tl.arange(0, PADDING), PADDING))
            total += tl.where(entries == 0, before, 0.0)
        if block == blocks - 1:
            after = tl.sum(
                _add_parts(
                    ptr + PADDING + num_entries, stride, parts, tl.arange(0, PADDING), PADDING
                )
            )
            total += tl.where(entries == num_entries - 1, after, 0.0)
    tl.store(gradient_ptr + head * num_entries + entries, total, mask=entries < num_entries)


@triton.jit
def _add_parts(ptr, stride, parts, columns, num_columns):
    """The sums of every ROWS-th part, `[ROWS, columns]`, in the order of the parts."""
    ROWS: tl.constexpr = TERMS // columns.shape[0]
    total = tl.zeros([ROWS, columns.shape[0]], tl.float32)
    for first in range(0, parts, ROWS):
        part = (first + tl.arange(0, ROWS))[:, None]
        inside = (part < parts) & (columns < num_columns)[None, :]
        total += tl.load(
            ptr + part.to(tl.int64) * stride + columns[None, :], mask=inside, other=0.0
        )
    return total
