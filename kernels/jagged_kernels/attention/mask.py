"""Device functions of attention masks: which columns a row sees, and which blocks a tile visits.

`MASK` is the constant tuple (causal, left, right, has targets, group size, context, max_attn_len, full) of `AttentionMask.spec`, or None.
Rows and columns are counted in columns of the segment: row i of a segment is at column i + kv_len - q_len. A row sees the columns
[low, high) and [own_low, row]; AttentionMask has the rule from which they follow.
"""

import triton
import triton.language as tl


@triton.jit
def first_target_column(num_targets_ptr, segment, kv_len, MASK: tl.constexpr):
    """First target column of the segment; its end where there are none."""
    if MASK is None:
        return kv_len
    elif MASK[3]:
        return tl.maximum(kv_len - tl.load(num_targets_ptr + segment).to(tl.int32), 0)
    else:
        return kv_len


@triton.jit
def _row_id(row, first_target, MASK: tl.constexpr):
    """HSTU's id of a row or column: context is 0, history counts up from there, targets share the last one."""
    if MASK[5] > 0:
        return tl.minimum(tl.maximum(row - MASK[5] + 1, 0), first_target - MASK[5] + 1)
    else:
        return tl.minimum(row, first_target)


@triton.jit
def visible_columns(row, first_target, MASK: tl.constexpr):
    """(low, high, own_low) of each row."""
    id = _row_id(row, first_target, MASK)
    last_id = _row_id(first_target, first_target, MASK)
    low, high = row * 0, row * 0 + first_target
    if MASK[0]:  # causal
        high = tl.minimum(row, first_target)
    if MASK[6] > 0:  # max_attn_len
        far = id > MASK[6]
        if MASK[7] > 0:
            far = far & (id < last_id - MASK[7])
        low = tl.where(far, tl.minimum(row, first_target) - MASK[6], low)
        if not MASK[0]:
            near_end = id + MASK[6] + tl.where(MASK[5] > 0, MASK[5], 1)
            if MASK[7] > 0:
                near_end = tl.where(id >= last_id - MASK[7], first_target, near_end)
            high = tl.minimum(high, near_end)
    if MASK[5] > 0:  # context sees all of context and history; without history, all share one id
        if MASK[0]:
            high = tl.where(last_id > 0, tl.where(row < MASK[5], first_target, high), 0)
        else:
            high = tl.where((row < MASK[5]) & (last_id > 0), first_target, high)
        low = tl.where((row < MASK[5]), 0, low)
    own_low = row
    if MASK[3]:
        target = row - first_target
        own_low = tl.where(target >= 0, first_target + target // MASK[4] * MASK[4], row)
    if MASK[1] >= 0:  # window
        low, own_low = tl.maximum(low, row - MASK[1]), tl.maximum(own_low, row - MASK[1])
    if MASK[2] >= 0:
        high = tl.minimum(high, row + MASK[2] + 1)
    return low, high, own_low


@triton.jit
def is_visible(column, row, bounds, MASK: tl.constexpr):
    """Whether each row sees each column; `bounds` of the rows from visible_columns, broadcast against the columns."""
    low, high, own_low = bounds
    if MASK[0] and MASK[1] < 0 and MASK[2] < 0 and not MASK[3] and MASK[5] == 0 and MASK[6] == 0:
        return column <= row
    return ((column >= low) & (column < high)) | ((column >= own_low) & (column <= row))


@triton.jit
def column_blocks(first_row, last_row, kv_len, first_target, MASK: tl.constexpr, BLOCK_N: tl.constexpr):
    """The key blocks that the tile of query rows first_row..last_row visits: those of [low, high), then those of own columns.

    Returns:
        (first, count) of up to three runs of blocks; then, of the blocks that every row sees whole, their place among the visited
        ones, first block and count. `partial_block` reads it.
    """
    if MASK is None:
        return 0, tl.cdiv(kv_len, BLOCK_N), 0, 0, 0, 0, 0, 0, kv_len // BLOCK_N
    else:
        low, high, own_low = visible_columns(first_row, first_target, MASK)
        extremes = _extend(last_row, (low, low, high, high), first_row, last_row, first_target, MASK)
        # Between the two ends, low and high rise but for the steps after the context and before the rows exempt from max_attn_len.
        if MASK[5] > 0:
            extremes = _extend(MASK[5] - 1, extremes, first_row, last_row, first_target, MASK)
            extremes = _extend(MASK[5] + 0, extremes, first_row, last_row, first_target, MASK)
        if MASK[7] > 0:
            extremes = _extend(first_target - MASK[7] - 1, extremes, first_row, last_row, first_target, MASK)
            extremes = _extend(first_target - MASK[7], extremes, first_row, last_row, first_target, MASK)
        lowest, low, high, highest = extremes
        first = tl.maximum(lowest, 0) // BLOCK_N
        count = tl.maximum(tl.cdiv(tl.maximum(highest, 0), BLOCK_N) - first, 0)
        own_first = tl.maximum(first + count, tl.maximum(own_low, 0) // BLOCK_N)
        own_count = tl.maximum(tl.cdiv(tl.maximum(last_row + 1, 0), BLOCK_N) - own_first, 0)
        full = tl.cdiv(tl.maximum(low, 0), BLOCK_N)
        full_count = tl.maximum(tl.maximum(high, 0) // BLOCK_N - full, 0)
        return first, count, own_first, own_count, 0, 0, full - first, full, full_count


@triton.jit
def _extend(row, extremes, first_row, last_row, first_target, MASK: tl.constexpr):
    """(least low, greatest low, least high, greatest high), with those of one more row, or of the tile's row nearest to it."""
    lowest, low, high, highest = extremes
    row_low, row_high, _ = visible_columns(tl.minimum(tl.maximum(row, first_row), last_row), first_target, MASK)
    return tl.minimum(lowest, row_low), tl.maximum(low, row_low), tl.minimum(high, row_high), tl.maximum(highest, row_high)


@triton.jit
def row_blocks(column, q_len, kv_len, first_target, MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The query blocks that see something of the key tile from `column` on; result as of `column_blocks`.

    Context rows see all, then come the rows within reach, then the rows exempt from max_attn_len.
    """
    if MASK is None:
        return 0, tl.cdiv(q_len, BLOCK_M), 0, 0, 0, 0, 0, 0, q_len // BLOCK_M
    else:
        shift = kv_len - q_len
        last = tl.minimum(column + BLOCK_N, kv_len) - 1
        # Rows are half-open ranges: context [shift, context_end), reach [start, end), exempt [exempt, kv_len), full [full, full_end).
        start, end, context_end, exempt = shift, kv_len, shift, kv_len
        full, full_end = shift, kv_len
        if MASK[0]:
            start, full = column, last
        if MASK[6] > 0:
            # A column of context has the id of the last one.
            near, far = tl.maximum(column, MASK[5] - 1), tl.maximum(tl.minimum(last, first_target - 1), MASK[5] - 1)
            end = tl.where(far + MASK[6] + 1 > first_target, kv_len, far + MASK[6] + 1)
            full_end = tl.where(near + MASK[6] + 1 > first_target, kv_len, near + MASK[6] + 1)
            if not MASK[0]:
                start = tl.where(near - MASK[6] < MASK[5], shift, near - MASK[6])
                full = tl.maximum(last, MASK[5] - 1) - MASK[6]
            if MASK[7] > 0:
                exempt = first_target - MASK[7]
                if not MASK[0]:
                    start = tl.minimum(start, exempt)
        if MASK[5] > 0:
            context_end = MASK[5]
            full_end = tl.where(first_target < MASK[5], full, full_end)  # without history all share one id
        if MASK[3]:
            if column >= first_target:  # targets are seen by their own group alone
                start, context_end, exempt = column, shift, kv_len
                end = first_target + ((last - first_target) // MASK[4] + 1) * MASK[4]
            full_end = tl.where(last >= first_target, full, full_end)
        lowest, highest = shift, kv_len
        if MASK[2] >= 0:
            lowest, full = tl.maximum(lowest, column - MASK[2]), tl.maximum(full, last - MASK[2])
        if MASK[1] >= 0:
            highest, full_end = tl.minimum(highest, last + MASK[1] + 1), tl.minimum(full_end, column + MASK[1] + 1)

        first, stop = _blocks(shift, context_end, shift, lowest, highest, 0, BLOCK_M)
        reach, reach_stop = _blocks(start, end, shift, lowest, highest, stop, BLOCK_M)
        exempt, exempt_stop = _blocks(exempt, kv_len, shift, lowest, highest, reach_stop, BLOCK_M)
        full = tl.maximum(tl.cdiv(tl.maximum(full - shift, 0), BLOCK_M), reach)
        full_count = tl.maximum(tl.minimum(tl.maximum(full_end - shift, 0), q_len) // BLOCK_M - full, 0)
        full_count = tl.minimum(full_count, tl.maximum(reach_stop - full, 0))
        count = stop - first
        return first, count, reach, reach_stop - reach, exempt, exempt_stop - exempt, count + full - reach, full, full_count


@triton.jit
def _blocks(start, end, shift, lowest, highest, not_before, BLOCK: tl.constexpr):
    """First block and end of the blocks of the rows [start, end) that lie in [lowest, highest); none before `not_before`."""
    start, end = tl.maximum(start, lowest) - shift, tl.minimum(end, highest) - shift
    first = tl.where(end > start, tl.maximum(start // BLOCK, not_before), not_before)
    return first, tl.where(end > start, tl.maximum(tl.cdiv(end, BLOCK), first), first)


@triton.jit
def is_visited(block, blocks):
    """Whether a block is among those of column_blocks or row_blocks."""
    first, count, second, second_count, third, third_count, _, _, _ = blocks
    return (
        ((block >= first) & (block < first + count))
        | ((block >= second) & (block < second + second_count))
        | ((block >= third) & (block < third + third_count))
    )


@triton.jit
def num_partial_blocks(blocks):
    """How many of the visited blocks are not among those that every row sees whole."""
    return blocks[1] + blocks[3] + blocks[5] - blocks[8]


@triton.jit
def partial_block(number, blocks):
    """The number-th of them: blocks in order of the three runs, without those seen whole."""
    first, count, second, second_count, third, _, full_at, _, full_count = blocks
    number = tl.where(number < full_at, number, number + full_count)
    late = tl.where(number < count + second_count, second + number - count, third + number - count - second_count)
    return tl.where(number < count, first + number, late)
