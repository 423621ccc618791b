"""Device functions of attention masks: which columns a row sees, and which blocks a tile visits.

`MASK` is a MaskParams (params.py), or None. Rows are numbered as columns of the segment: query row
i is at column i + kv_len - q_len. A row sees the columns [low, high) and [own_low, row], and of the
prefix [0, prefix), under a causal mask up to its own column. They follow from AttentionMask.rule.
docs/decisions/mask-rule.md has the other copies.

With MASK.grouped, there are several query groups, and the mask is that of the first. Rows of the
others see all keys: their segments have -1 - kv_len for the first target's column.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Blocks(NamedTuple):
    """The blocks that a tile visits: three runs in ascending order, each of `count` blocks from
    `first` on. A run may be empty.

    Every row of the tile sees all of a full block. There are full_count of them, from full_first
    on; full_index visited blocks come before. The other visited blocks are masked blocks.
    """

    first: tl.tensor
    count: tl.tensor
    second_first: tl.tensor
    second_count: tl.tensor
    third_first: tl.tensor
    third_count: tl.tensor
    full_index: tl.tensor
    full_first: tl.tensor
    full_count: tl.tensor


@triton.jit
def first_target_column(num_targets_ptr, segment, kv_len, MASK: tl.constexpr, num_segments=None):
    """First target column of the segment of queries; its end if it has no targets. num_segments: of
    a query group, with MASK.grouped."""
    if MASK is None:
        return kv_len
    elif MASK.grouped:
        return tl.where(segment < num_segments, kv_len, -1 - kv_len)
    elif MASK.has_targets:
        return tl.maximum(kv_len - tl.load(num_targets_ptr + segment).to(tl.int32), 0)
    else:
        return kv_len


@triton.jit
def _row_id(row, first_target, MASK: tl.constexpr):
    """HSTU's id of a row or column: context is 0, history counts up from there, targets share the
    last one."""
    if MASK.context > 0:
        return tl.minimum(tl.maximum(row - MASK.context + 1, 0), first_target - MASK.context + 1)
    else:
        return tl.minimum(row, first_target)


@triton.jit
def visible_columns(row, first_target, MASK: tl.constexpr):
    """(low, high, own_low, prefix): each row sees the columns [low, high), [own_low, row] and [0,
    prefix); `prefix` is one for all rows."""
    id = _row_id(row, first_target, MASK)
    last_id = _row_id(first_target, first_target, MASK)
    low, high = row * 0, row * 0 + first_target
    if MASK.causal:
        high = tl.minimum(row, first_target)
    if MASK.max_attn_len > 0:
        far = id > MASK.max_attn_len
        if MASK.full_attn_len > 0:
            far = far & (id < last_id - MASK.full_attn_len)
        low = tl.where(far, tl.minimum(row, first_target) - MASK.max_attn_len, low)
        if not MASK.causal:
            near_end = id + MASK.max_attn_len + tl.where(MASK.context > 0, MASK.context, 1)
            if MASK.full_attn_len > 0:
                near_end = tl.where(id >= last_id - MASK.full_attn_len, first_target, near_end)
            high = tl.minimum(high, near_end)
    # context sees all of context and history; without history, all share one id
    if MASK.context > 0:
        if MASK.causal:
            high = tl.where(last_id > 0, tl.where(row < MASK.context, first_target, high), 0)
        else:
            high = tl.where((row < MASK.context) & (last_id > 0), first_target, high)
        low = tl.where((row < MASK.context), 0, low)
    own_low = row
    if MASK.has_targets:
        target = row - first_target
        own_low = tl.where(
            target >= 0, first_target + target // MASK.group_size * MASK.group_size, row
        )
    if MASK.left >= 0:
        low, own_low = tl.maximum(low, row - MASK.left), tl.maximum(own_low, row - MASK.left)
    if MASK.right >= 0:
        high = tl.minimum(high, row + MASK.right + 1)
    if MASK.recent_history > 0:
        low = tl.maximum(low, first_target - MASK.recent_history)
    prefix = first_target * 0  # a tensor, as a function that is called takes no int in a tuple
    if MASK.global_prefix > 0:
        prefix = tl.minimum(first_target, MASK.global_prefix)
    if MASK.grouped:
        low = tl.where(first_target < 0, 0, low)
        high = tl.where(first_target < 0, -1 - first_target, high)
    return low, high, own_low, prefix


@triton.jit
def is_visible(column, row, bounds, MASK: tl.constexpr):
    """Whether each row sees each column; `bounds` of the rows from visible_columns, broadcast
    against the columns."""
    low, high, own_low, prefix = bounds
    LIMITED: tl.constexpr = (
        MASK.left >= 0 or MASK.right >= 0 or MASK.max_attn_len > 0 or MASK.recent_history > 0
    )
    if (
        MASK.causal
        and not LIMITED
        and not MASK.has_targets
        and MASK.context == 0
        and MASK.global_prefix == 0
        and not MASK.grouped
    ):
        return column <= row
    seen = ((column >= low) & (column < high)) | ((column >= own_low) & (column <= row))
    if MASK.global_prefix > 0:
        if MASK.causal:
            seen = seen | ((column < prefix) & (column <= row))
        else:
            seen = seen | (column < prefix)
    return seen


@triton.jit
def visible_runs(row, first_target, MASK: tl.constexpr):
    """The columns that a row sees, as ascending runs (first, end), of which some may be empty. One
    run or two are [low, high) with [own_low, row]; one more comes first with a prefix."""
    low, high, own_low, _ = visible_columns(row, first_target, MASK)
    own_low, own_end = tl.maximum(own_low, 0), tl.maximum(row + 1, 0)
    hidden = high <= tl.maximum(low, 0)
    low, high = tl.where(hidden, own_low, tl.maximum(low, 0)), tl.where(hidden, own_low, high)
    runs = ()
    if MASK.global_prefix > 0:
        end = _prefix_end(row, first_target, MASK)
        end = tl.where(low <= end, tl.maximum(high, end), end)
        end = tl.where(own_low <= end, tl.maximum(own_end, end), end)
        end = tl.where(low <= end, tl.maximum(high, end), end)  # own columns may reach up to low
        runs = ((0, end),)
        low, high = tl.maximum(low, end), tl.maximum(high, end)
        own_low, own_end = tl.maximum(own_low, end), tl.maximum(own_end, end)
    first, last = tl.minimum(low, own_low), tl.maximum(high, own_end)
    if not (MASK.has_targets or MASK.recent_history > 0):  # they are adjacent
        return runs + ((first, last),)
    else:
        end, second = tl.minimum(high, own_end), tl.maximum(low, own_low)
        apart = end < second
        return runs + ((first, tl.where(apart, end, last)), (tl.where(apart, second, last), last))


@triton.jit
def first_query_row(block, q_len, MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """First row of a segment's block-th tile of ROWS query rows, which loops over blocks of BLOCK
    keys.

    Under a causal mask the last tile visits the most keys. So it is full there, but for less than a
    UNIT of rows, and the first tile is not: it begins at a negative row, a multiple of UNIT. A tile
    of whole blocks stays one: else its own columns would lie in one block more.
    """
    UNIT: tl.constexpr = BLOCK if BLOCK > 64 and ROWS % BLOCK == 0 else 64
    row = block * ROWS
    if MASK is not None and ROWS > UNIT:
        if MASK.causal:
            row -= tl.cdiv(q_len, ROWS) * ROWS - tl.cdiv(q_len, UNIT) * UNIT
    return row


@triton.jit
def column_blocks(
    first_row, last_row, kv_len, first_target, MASK: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The Blocks of keys that the query rows first_row to last_row visit: first those of [low,
    high), then those of [own_low, row]."""
    if MASK is None:
        return Blocks(0, tl.cdiv(kv_len, BLOCK_N), 0, 0, 0, 0, 0, 0, kv_len // BLOCK_N)
    else:
        low, high, own_low, _ = visible_columns(first_row, first_target, MASK)
        extremes = _extend(
            last_row, (low, low, high, high), first_row, last_row, first_target, MASK
        )
        # low and high increase with the row, except after the context and at the first row exempt
        # from max_attn_len.
        if MASK.context > 0:
            extremes = _extend(MASK.context - 1, extremes, first_row, last_row, first_target, MASK)
            extremes = _extend(MASK.context + 0, extremes, first_row, last_row, first_target, MASK)
        if MASK.full_attn_len > 0:
            exempt = first_target - MASK.full_attn_len
            extremes = _extend(exempt - 1, extremes, first_row, last_row, first_target, MASK)
            extremes = _extend(exempt, extremes, first_row, last_row, first_target, MASK)
        if MASK.global_prefix > 0 or MASK.recent_history > 0:
            return _three_runs_of_columns(
                extremes, own_low, first_row, last_row, kv_len, first_target, MASK, BLOCK_N
            )
        else:
            lowest, low, high, highest = extremes
            first = tl.maximum(lowest, 0) // BLOCK_N
            count = tl.maximum(tl.cdiv(tl.maximum(highest, 0), BLOCK_N) - first, 0)
            own_first = tl.maximum(first + count, tl.maximum(own_low, 0) // BLOCK_N)
            own_count = tl.maximum(tl.cdiv(tl.maximum(last_row + 1, 0), BLOCK_N) - own_first, 0)
            full = tl.cdiv(tl.maximum(low, 0), BLOCK_N)
            full_count = tl.maximum(tl.maximum(high, 0) // BLOCK_N - full, 0)
            return Blocks(first, count, own_first, own_count, 0, 0, full - first, full, full_count)


@triton.jit
def _extend(row, extremes, first_row, last_row, first_target, MASK: tl.constexpr):
    """(min low, max low, min high, max high) including one more row, clamped to the tile's rows."""
    lowest, low, high, highest = extremes
    row_low, row_high, _, _ = visible_columns(
        tl.minimum(tl.maximum(row, first_row), last_row), first_target, MASK
    )
    return (
        tl.minimum(lowest, row_low),
        tl.maximum(low, row_low),
        tl.minimum(high, row_high),
        tl.maximum(highest, row_high),
    )


@triton.jit
def _three_runs_of_columns(
    extremes, own_low, first_row, last_row, kv_len, first_target,
    MASK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """column_blocks under a mask with a prefix or a truncated history: the blocks of the prefix, of
    [low, high), and of [own_low, row].

    Rows whose own columns are truncated have these before [low, high). `extremes`: of the tile's
    rows, from _extend. own_low: of its first row.
    """
    lowest, low, high, highest = extremes
    own_end = last_row + 1
    own_is_second = own_low < lowest
    second, second_end = (
        tl.where(own_is_second, own_low, lowest),
        tl.where(own_is_second, own_end, highest),
    )
    third, third_end = (
        tl.where(own_is_second, lowest, own_low),
        tl.where(own_is_second, highest, own_end),
    )
    stop = tl.cdiv(_prefix_end(last_row, first_target, MASK), BLOCK_N)
    second, second_stop = _blocks(second, second_end, 0, 0, kv_len, stop, BLOCK_N)
    third, third_stop = _blocks(third, third_end, 0, 0, kv_len, second_stop, BLOCK_N)

    full = tl.cdiv(tl.maximum(low, 0), BLOCK_N)
    full_count = tl.maximum(tl.maximum(high, 0) // BLOCK_N - full, 0)
    # all rows see [0, end): the prefix, with [low, high) if that begins in it or where it ends
    if MASK.global_prefix > 0:
        end = _prefix_end(first_row, first_target, MASK)
        full_prefix = tl.where(end >= low, tl.maximum(end, high), end) // BLOCK_N
        full = tl.where(full_prefix >= full_count, 0, full)
        full_count = tl.maximum(full_prefix, full_count)
    before = tl.minimum(full, stop) + tl.minimum(tl.maximum(full - second, 0), second_stop - second)
    before += tl.minimum(tl.maximum(full - third, 0), third_stop - third)
    return Blocks(
        0, stop, second, second_stop - second, third, third_stop - third, before, full, full_count
    )


@triton.jit
def _prefix_end(row, first_target, MASK: tl.constexpr):
    """End of the prefix that a row sees."""
    end = tl.minimum(first_target, MASK.global_prefix)
    if MASK.causal:
        end = tl.minimum(end, row + 1)
    return tl.maximum(end, 0)


@triton.jit
def _rows_within_reach(near, far, first_target, shift, kv_len, MASK: tl.constexpr):
    """Rows that max_attn_len lets see columns near to far: the first row that sees the first one,
    the end of those that see the last one, and of those that see the first one."""
    # All columns of the context have one id: they count as its last column.
    near, far = tl.maximum(near, MASK.context - 1), tl.maximum(far, MASK.context - 1)
    start = near - MASK.max_attn_len
    end, near_end = far + MASK.max_attn_len + 1, near + MASK.max_attn_len + 1
    return (
        tl.where(start < MASK.context, shift, start),
        tl.where(end > first_target, kv_len, end),
        tl.where(near_end > first_target, kv_len, near_end),
    )


@triton.jit
def row_blocks(
    column, q_len, kv_len, first_target,
    MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The Blocks of query rows that see a column of the key tile that begins at `column`.

    The three runs are the rows of the context, the rows within reach, and the rows exempt from
    max_attn_len. A column of the prefix reaches all rows that may see it. A truncated column
    reaches only its own row.
    """
    if MASK is None:
        return Blocks(0, tl.cdiv(q_len, BLOCK_M), 0, 0, 0, 0, 0, 0, q_len // BLOCK_M)
    else:
        shift = kv_len - q_len
        last = tl.minimum(column + BLOCK_N, kv_len) - 1
        # Rows are half-open ranges: context [shift, context_end), reach [start, end), exempt
        # [exempt, kv_len), full [full, full_end).
        start, end, context_end, exempt = shift, kv_len, shift, kv_len
        full, full_end = shift, kv_len
        nearest = column  # the tile's first column that is not truncated
        if MASK.recent_history > 0:
            recent = first_target - MASK.recent_history
            nearest = tl.maximum(column, recent)
        if MASK.causal:
            start, full = column, last
        if MASK.max_attn_len > 0:
            far = tl.minimum(last, first_target - 1)
            rows = _rows_within_reach(nearest, far, first_target, shift, kv_len, MASK)
            first_reached, end, full_end = rows
            if not MASK.causal:
                start = first_reached
                if MASK.recent_history > 0:
                    start = tl.minimum(start, column)
                full = tl.maximum(last, MASK.context - 1) - MASK.max_attn_len
            if MASK.full_attn_len > 0:
                exempt = first_target - MASK.full_attn_len
                if not MASK.causal:
                    start = tl.minimum(start, exempt)
        if MASK.context > 0:
            context_end = MASK.context
            # without history all share one id
            full_end = tl.where(first_target < MASK.context, full, full_end)
        if MASK.has_targets:
            if column >= first_target:  # targets are seen by their own group alone
                start, context_end, exempt = column, shift, kv_len
                groups = (last - first_target) // MASK.group_size + 1
                end = first_target + groups * MASK.group_size
            full_end = tl.where(last >= first_target, full, full_end)
        if MASK.recent_history > 0:
            full_end = tl.where(column < recent, full, full_end)
            if last < recent:  # all columns are truncated
                start, end, context_end, exempt = column, last + 1, shift, kv_len
        lowest, highest = shift, kv_len
        if MASK.right >= 0:
            if MASK.recent_history > 0:
                lowest = tl.maximum(lowest, tl.minimum(column, nearest - MASK.right))
            else:
                lowest = tl.maximum(lowest, column - MASK.right)
            full = tl.maximum(full, last - MASK.right)
        if MASK.left >= 0:
            highest = tl.minimum(highest, last + MASK.left + 1)
            full_end = tl.minimum(full_end, column + MASK.left + 1)
        if MASK.global_prefix > 0:
            prefix = tl.minimum(first_target, MASK.global_prefix)
            if column < prefix:
                end, highest = kv_len, kv_len
                start = column if MASK.causal else shift
                lowest = lowest if MASK.causal else shift
            if last < prefix:
                full, full_end = last if MASK.causal else shift, kv_len
        if MASK.grouped:
            if first_target < 0:
                start, full, lowest, context_end = shift, shift, shift, shift
                end, full_end, highest, exempt = kv_len, kv_len, kv_len, kv_len

        return _blocks_of_runs(
            (shift, context_end), (start, end), (exempt, kv_len), (full, full_end),
            (shift, lowest, highest), q_len, BLOCK_M,
        )  # fmt: skip


@triton.jit
def _blocks_of_runs(context, reach, exempt, full, within, q_len, BLOCK: tl.constexpr):
    """The Blocks of three runs of rows, each from its first row to its end. full: the rows whose
    blocks need no mask. within: the shift, and the first row and the end of all that may see a
    column."""
    shift, lowest, highest = within
    first, stop = _blocks(context[0], context[1], shift, lowest, highest, 0, BLOCK)
    second, second_stop = _blocks(reach[0], reach[1], shift, lowest, highest, stop, BLOCK)
    third, third_stop = _blocks(exempt[0], exempt[1], shift, lowest, highest, second_stop, BLOCK)
    full_first = tl.maximum(tl.cdiv(tl.maximum(full[0] - shift, 0), BLOCK), second)
    full_count = tl.minimum(tl.maximum(full[1] - shift, 0), q_len) // BLOCK - full_first
    full_count = tl.minimum(tl.maximum(full_count, 0), tl.maximum(second_stop - full_first, 0))
    count = stop - first
    return Blocks(
        first, count, second, second_stop - second, third, third_stop - third,
        count + full_first - second, full_first, full_count,
    )  # fmt: skip


@triton.jit
def _blocks(start, end, shift, lowest, highest, not_before, BLOCK: tl.constexpr):
    """First block and end of the blocks of the rows [start, end) that lie in [lowest, highest);
    none before `not_before`."""
    start, end = tl.maximum(start, lowest) - shift, tl.minimum(end, highest) - shift
    first = tl.where(end > start, tl.maximum(start // BLOCK, not_before), not_before)
    return first, tl.where(end > start, tl.maximum(tl.cdiv(end, BLOCK), first), first)


@triton.jit
def is_visited(block, blocks):
    """Whether a block is among the Blocks."""
    return (
        ((block >= blocks.first) & (block < blocks.first + blocks.count))
        | ((block >= blocks.second_first) & (block < blocks.second_first + blocks.second_count))
        | ((block >= blocks.third_first) & (block < blocks.third_first + blocks.third_count))
    )


@triton.jit
def num_masked_blocks(blocks):
    """How many of the visited blocks are masked."""
    return blocks.count + blocks.second_count + blocks.third_count - blocks.full_count


@triton.jit
def masked_block(number, blocks):
    """The number-th masked block, in ascending order."""
    number = tl.where(number < blocks.full_index, number, number + blocks.full_count)
    late = tl.where(
        number < blocks.count + blocks.second_count,
        blocks.second_first + number - blocks.count,
        blocks.third_first + number - blocks.count - blocks.second_count,
    )
    return tl.where(number < blocks.count, blocks.first + number, late)
