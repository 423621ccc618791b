"""What the tiles of an attention cost, and the order in which a schedule lists them.

The work of a tile is the number of blocks that it visits: of keys for a tile of queries, of queries
for a tile of keys. Under a mask it is computed here in torch, for all tiles at once, with the
results of `column_blocks` and `row_blocks` in attention/mask.py. docs/decisions/mask-rule.md: why
both exist.

All tensors are int32, one element per tile. Positions are columns of the segment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.configs import padded_dim
from ..common.device import cdiv

# rows of a short segment at most; also those of a packed tile (attention/packed_tiles.py)
SHORT = 64
# Works below EXACT_WORK are a class each.
EXACT_WORK, WORK_CLASSES = 512, 958
# Elements of the tensor that the tiles of a group loop over: 8 MiB of 16-bit numbers. The L2 cache
# of an H100 holds 50 MB.
GROUP_ELEMENTS = 2**22
# Under a mask, segments of fewer rows on average are not grouped: they may be in packed tiles.
GROUPED_SEQLEN = 256
# Under the causal mask, tiles of keys are not grouped if segments have more keys on average.
LONGEST_CAUSAL_KEYS = 2048
# An fp32 number without its last 17 bits has six bits of the mantissa: 64 steps for each power of
# two.
TOP_BITS = 17
EXACT_TOP_BITS = (127 + 9) * 64  # the other bits of EXACT_WORK, 2^9


class MaskParams(NamedTuple):
    """The fields of `AttentionMask` as integers, in the order of `AttentionMask.params`.

    left, right: of the window; -1: an open side. full_attn_len: min_full_attn_seqlen, 0 without
    max_attn_len. grouped: no field of `AttentionMask`; there are several query groups, and rows of
    all but the first see all keys. The last three have defaults because programs exported before
    they existed hold lists without them.
    """

    causal: int
    left: int
    right: int
    has_targets: int
    group_size: int
    context: int
    max_attn_len: int
    full_attn_len: int
    global_prefix: int = 0
    recent_history: int = 0
    grouped: int = 0

    @property
    def is_causal(self) -> bool:
        """Whether rows see exactly the columns up to their own."""
        return not self.has_targets and self.is_causal_with_targets

    @property
    def is_causal_with_targets(self) -> bool:
        """Whether rows see exactly the columns up to their own, but for targets of other groups."""
        limits = (
            self.context,
            self.max_attn_len,
            self.global_prefix,
            self.recent_history,
            self.grouped,
        )
        return bool(self.causal) and self.left < 0 and self.right < 0 and not any(limits)


# -- the order of tiles ----------------------------------------------------------------------------


def is_short(q_len: Tensor, kv_len: Tensor) -> Tensor:
    """Whether a segment has at most SHORT queries and SHORT keys."""
    return torch.maximum(q_len, kv_len) <= SHORT


def sort_key(work: Tensor, short: Tensor) -> Tensor:
    """What tiles are sorted by, largest first, given their work or its class. Tiles of short
    segments come last, so that kernels can leave them to the kernels of packed tiles. A short
    segment has at most SHORT blocks."""
    return torch.where(short, work, work + (SHORT + 1))


def work_class(work: Tensor) -> Tensor:
    """The class by which tiles are sorted under a mask: the work itself below EXACT_WORK, then 64
    classes for each power of two. Works of a class differ by less than 1/64, except in the last
    class: 64,000 blocks and more. The number of classes is bounded so that the device can sort by
    counting. `_work_class` in attention/tile_list_kernels.py is the same function."""
    top_bits = work.float().view(torch.int32) >> TOP_BITS
    return torch.where(work < EXACT_WORK, work, EXACT_WORK + top_bits - EXACT_TOP_BITS).clamp(
        max=WORK_CLASSES - 1
    )


class LoopedSide(NamedTuple):
    """The side that the tiles of Hopper's kernels loop over: queries or keys, their rows and heads,
    and the head dim of the queries."""

    rows: int
    heads: int
    head_dim: int


class OnePassMinimum(NamedTuple):
    """The sizes from which on Hopper's one-pass backward is faster.
    docs/decisions/one-pass-backward.md has figures. queries, keys, scores: of a segment and head on
    average; scores are queries times keys. all_queries, all_keys: rows of all segments and heads.
    Fewer do not fill the GPU, and tiles of a segment wait for one another."""

    queries: int
    keys: int
    scores: int = 0
    all_queries: int = 0
    all_keys: int = 0


def one_pass_minimum(head_dim: int, masked: bool) -> OnePassMinimum:
    """masked: under the causal mask."""
    if padded_dim(head_dim) <= 64:
        if masked:
            return OnePassMinimum(queries=1024, keys=1024)
        return OnePassMinimum(
            queries=80, keys=512, scores=5 * 2**16, all_queries=2**13, all_keys=2**15
        )
    if masked:
        return OnePassMinimum(queries=2560, keys=2560, all_keys=5 * 2**13)
    return OnePassMinimum(queries=80, keys=320, scores=2**17, all_queries=2**13, all_keys=3 * 2**15)


def one_pass_may_run(
    queries: LoopedSide,
    num_keys: int,
    num_kv_heads: int,
    num_segments: int,
    masked: bool,
    causal: bool,
) -> bool:
    """Whether Hopper's one-pass backward runs, unless a bias or another option excludes it. Its key
    tiles are then listed in groups of segments, and those of a segment and head in ascending order,
    which the kernel needs. causal: whether the mask is the causal one."""
    if padded_dim(queries.head_dim) > 128:
        return False
    minimum, segments = one_pass_minimum(queries.head_dim, masked), max(1, num_segments)
    long = queries.rows >= segments * minimum.queries and num_keys >= segments * minimum.keys
    long = long and queries.rows * num_keys >= segments * segments * minimum.scores
    fills_gpu = (
        queries.rows * queries.heads >= minimum.all_queries
        and num_keys * num_kv_heads >= minimum.all_keys
    )
    return (causal or not masked) and long and fills_gpu


def may_alternate(head_dim: int) -> bool:
    """Whether groups of tiles under a mask may be listed in alternating order."""
    return padded_dim(head_dim) > 64


class Grouping(NamedTuple):
    """How tiles are listed in groups of segments. rows: how many rows the segments of a group have
    together on the side that the tiles loop over. alternates: whether every other group is in
    reverse order."""

    rows: int
    alternates: bool


def one_pass_elements(num_keys: float, head_dim: int, masked: bool) -> int:
    """GROUP_ELEMENTS of the one-pass backward, whose key tiles read q and dO and add to fp32 sums
    of dq. num_keys: mean of a segment."""
    if masked:  # a key tile reads half of the rows on average
        return 2**23 if num_keys >= 4096 else 6 * 2**20
    return 3 * 2**20 if padded_dim(head_dim) <= 64 else 2**21


def grouping(
    rows: int,
    num_heads: int,
    looped: LoopedSide | None,
    num_segments: int,
    mask: MaskParams | None,
    key_tiles: bool,
) -> Grouping | None:
    """Whether and how tiles of Hopper's kernels are listed in groups of segments; None: all tiles
    are sorted by work.

    Thread blocks that run at the same time then read the same rows through the L2 cache. Tiles
    sorted by work do that too without a mask, where all tiles of a segment have the same work.
    Under a mask they are tiles of different segments: at head dim 128 they are bound by memory. At
    64 they are not, and a list sorted by work is balanced better. Every other group is in reverse
    order, so that neighbours in the list have about the same work, which the zigzag's balance
    needs.

    Key tiles of the one-pass backward are in groups with and without a mask, none in reverse order:
    a tile waits for its predecessors. docs/decisions/zigzag-schedule.md has figures.

    Args:
        rows, num_heads: of the tiled side.
        looped: the other side; None for kernels that gain nothing from groups.
    """
    if looped is None or not num_segments or not rows:
        return None
    head_dim, masked = looped.head_dim, mask is not None
    causal = mask is not None and mask.is_causal
    alternates, elements = True, GROUP_ELEMENTS
    if key_tiles and one_pass_may_run(looped, rows, num_heads, num_segments, masked, causal):
        alternates, elements = False, one_pass_elements(rows / num_segments, head_dim, masked)
    elif not masked or not may_alternate(head_dim) or rows < num_segments * GROUPED_SEQLEN:
        return None
    elif key_tiles and causal and rows > num_segments * LONGEST_CAUSAL_KEYS:
        return None
    return Grouping(max(1, elements // (looped.heads * padded_dim(head_dim))), alternates)


# -- the work of tiles -----------------------------------------------------------------------------


def work_of_segments(other_lengths: Tensor, num_segments: int, block: int) -> Tensor:
    """The work of each tile of a segment without a mask, `[num_segments]`: the blocks of the
    segment on the other side. With several query groups, num_segments is another number than that
    of other_lengths. Tiles of queries then visit the keys of their segment in its group; tiles of
    keys, all groups."""
    blocks, others = cdiv(other_lengths, block), len(other_lengths)
    if num_segments == others:
        return blocks
    if num_segments > others:
        return blocks.repeat(num_segments // others)
    return blocks.view(-1, num_segments).sum(0, dtype=torch.int32)


def tile_work(
    tiles: tuple[Tensor, Tensor],
    lengths: Tensor,
    other_lengths: Tensor,
    blocks: tuple[int, int],
    mask: MaskParams | None = None,
    num_targets: Tensor | None = None,
    key_tiles: bool = False,
) -> Tensor:
    """The work of tiles.

    Args:
        tiles: their segments, and the numbers of their blocks.
        lengths, other_lengths: of the segments on the tiled side, and on the side that a tile loops
            over.
        blocks: rows of a tile, and of a block that it visits.
        num_targets: of the segments; None: no targets.
        key_tiles: whether the tiled side is the keys.
    """
    segment, block = tiles
    if mask is None:
        return work_of_segments(other_lengths, len(lengths), blocks[1])[segment]
    targets = 0 if num_targets is None else num_targets.to(torch.int32)[segment]
    rows, others = lengths[segment], other_lengths[segment % len(other_lengths)]
    if key_tiles:
        work, others = key_tile_work(block, others, rows, targets, mask, *blocks), other_lengths
        if mask.grouped:
            work += work_of_segments(others[len(lengths) :], len(lengths), blocks[1])[segment]
        return work
    work = query_tile_work(block, rows, others, targets, mask, *blocks)
    if mask.grouped:
        work = torch.where(segment < len(other_lengths), work, cdiv(others, blocks[1]))
    return work


def query_tile_work(
    block: Tensor,
    q_len: Tensor,
    kv_len: Tensor,
    num_targets: Tensor | int,
    mask: MaskParams,
    block_m: int,
    block_n: int,
) -> Tensor:
    """How many blocks of `block_n` keys the block-th tile of `block_m` query rows visits. The
    bounds of what a row sees (`_visible_columns`) increase with the row, except behind the context
    and at the first row exempt from max_attn_len. So the extremes of a tile's bounds belong to its
    first row, its last row, or one of these two."""
    first_target = (kv_len - num_targets).clamp(min=0)
    first = block * block_m
    unit = 64 if block_m % block_n else max(64, block_n)  # of `first_query_row`
    if mask.causal and block_m > unit:
        first = first - (cdiv(q_len, block_m) * block_m - cdiv(q_len, unit) * unit)
    last = torch.minimum(first + block_m, q_len) - 1
    first = first.clamp(min=0)
    ends = torch.stack([first, last]) + kv_len - q_len
    steps = torch.stack(
        [torch.full_like(first, mask.context - 1), first_target - mask.full_attn_len]
    ).clamp(*ends)
    low, high, own_low = _visible_columns(torch.cat([ends, steps]), first_target, mask)
    if mask.global_prefix or mask.recent_history:
        # runs in ascending order: the prefix, then the own columns and [low, high) or vice versa
        zero = torch.zeros_like(first)
        own = torch.stack([own_low.amin(0), ends[1] + 1])
        others = torch.stack([low.amin(0), high.amax(0)])
        prefix = first_target.clamp(max=mask.global_prefix)
        prefix = torch.minimum(prefix, own[1]) if mask.causal else prefix
        own_is_second = own[0] < others[0]
        second = torch.where(own_is_second, own, others)
        third = torch.where(own_is_second, others, own)
        return _count_blocks(((zero, prefix), second, third), zero, zero, kv_len, block_n)
    start = low.amin(0).clamp(min=0) // block_n
    count = (cdiv(high.amax(0).clamp(min=0), block_n) - start).clamp(min=0)
    own_start = torch.maximum(start + count, own_low.amin(0).clamp(min=0) // block_n)
    return count + (cdiv((ends[1] + 1).clamp(min=0), block_n) - own_start).clamp(min=0)


def _row_id(row: Tensor, first_target: Tensor, context: int) -> Tensor:
    if context:
        return torch.minimum((row - context + 1).clamp(min=0), first_target - context + 1)
    return torch.minimum(row, first_target)


def _visible_columns(
    row: Tensor, first_target: Tensor, mask: MaskParams
) -> tuple[Tensor, Tensor, Tensor]:
    """(low, high, own_low): a row sees [low, high), [own_low, row] and the global prefix."""
    causal, left, right, has_targets, group_size, context, max_attn_len, full = mask[:8]
    recent_history = mask.recent_history
    id, last_id = _row_id(row, first_target, context), _row_id(first_target, first_target, context)
    end = torch.minimum(row, first_target)
    low, high = torch.zeros_like(row), end if causal else first_target.expand_as(row)
    if max_attn_len:
        near = id <= max_attn_len
        exempt = id >= last_id - full if full else torch.zeros_like(near)
        low = torch.where(near | exempt, 0, end - max_attn_len)
        if not causal:
            high = torch.where(
                exempt, high, torch.minimum(high, id + max_attn_len + max(context, 1))
            )
    if context:
        in_context = row < context
        sees_all = in_context & (last_id > 0)
        high = torch.where(
            sees_all, first_target, torch.where(last_id > 0, high, 0) if causal else high
        )
        low = torch.where(in_context, 0, low)
    own_low = row
    if has_targets:
        target = row - first_target
        own_low = torch.where(target >= 0, first_target + target // group_size * group_size, row)
    if left >= 0:
        low, own_low = torch.maximum(low, row - left), torch.maximum(own_low, row - left)
    if right >= 0:
        high = torch.minimum(high, row + right + 1)
    if recent_history:
        low = torch.maximum(low, first_target - recent_history)
    return low, high, own_low


def key_tile_work(
    block: Tensor,
    q_len: Tensor,
    kv_len: Tensor,
    num_targets: Tensor | int,
    mask: MaskParams,
    block_m: int,
    block_n: int,
) -> Tensor:
    """How many blocks of `block_n` query rows the block-th tile of `block_m` keys visits. Its
    columns are seen by three runs of rows: the context [shift, context_end), the rows within reach
    [start, end), and those exempt from max_attn_len [exempt, kv_len). A window cuts all three to
    [lowest, highest). `row_blocks` has the same names."""
    causal, left, right, _, group_size, context, max_attn_len, full, prefix, recent_history, _ = (
        mask
    )
    first_target = (kv_len - num_targets).clamp(min=0)
    shift, column = kv_len - q_len, block * block_m
    last = torch.minimum(column + block_m, kv_len) - 1
    start, end = column if causal else shift, kv_len
    context_end = torch.full_like(column, context) if context else shift
    exempt = kv_len
    recent = first_target - recent_history  # the first column that is not truncated
    nearest = torch.maximum(column, recent) if recent_history else column
    if max_attn_len:
        near = nearest.clamp(min=context - 1)
        far = torch.minimum(last, first_target - 1).clamp(min=context - 1) + max_attn_len + 1
        end = torch.where(far > first_target, kv_len, far)
        if not causal:
            start = torch.where(near - max_attn_len < context, shift, near - max_attn_len)
            start = torch.minimum(start, column) if recent_history else start
        exempt = first_target - full if full else kv_len
        start = start if causal else torch.minimum(start, exempt)
    of_targets = column >= first_target
    end_of_group = first_target + ((last - first_target) // group_size + 1) * group_size
    start = torch.where(of_targets, column, start)
    end = torch.where(of_targets, end_of_group, end)
    context_end = torch.where(of_targets, shift, context_end)
    exempt = torch.where(of_targets, kv_len, exempt)
    if recent_history:
        truncated = last < recent
        start, end = torch.where(truncated, column, start), torch.where(truncated, last + 1, end)
        context_end = torch.where(truncated, shift, context_end)
        exempt = torch.where(truncated, kv_len, exempt)
    nearest = torch.minimum(column, nearest - right) if recent_history else column - right
    lowest = torch.maximum(shift, nearest) if right >= 0 else shift
    highest = torch.minimum(kv_len, last + left + 1) if left >= 0 else kv_len
    if prefix:
        of_prefix = column < first_target.clamp(max=prefix)
        start = torch.where(of_prefix, column if causal else shift, start)
        lowest = lowest if causal else torch.where(of_prefix, shift, lowest)
        end, highest = (torch.where(of_prefix, kv_len, x) for x in (end, highest))
    return _count_blocks(
        ((shift, context_end), (start, end), (exempt, kv_len)), shift, lowest, highest, block_n
    )


def _count_blocks(
    runs: Iterable[Iterable[Tensor]], shift: Tensor, lowest: Tensor, highest: Tensor, block: int
) -> Tensor:
    """How many blocks, counted from `shift`, have a position of the ascending runs [start, end)
    that lies in [lowest, highest)."""
    work, stop = torch.zeros_like(shift), torch.zeros_like(shift)
    for start, end in runs:
        start, end = torch.maximum(start, lowest) - shift, torch.minimum(end, highest) - shift
        first = torch.maximum(start // block, stop)
        count = torch.where(end > start, cdiv(end, block) - first, 0).clamp(min=0)
        work, stop = work + count, torch.where(end > start, first + count, stop)
    return work
