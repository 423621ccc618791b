"""What a schedule sorts tiles by, and how many blocks they visit under a mask, in torch: the
numbers of `mask.column_blocks` and `mask.row_blocks` in the kernels.

All tensors are int32, one element per tile. Positions are columns of the segment.
docs/decisions/mask-rule.md: why this is written again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.params import MaskParams
from ..common.configs import padded_dim
from ..common.device import cdiv

SHORT = 64  # rows of a short segment at most; also those of a packed tile (packed.py)
EXACT_WORK, WORK_CLASSES = 512, 958
# of a tensor that the tiles of a group loop over: 8 MiB of 16-bit numbers. The L2 cache of an H100
# holds 50 MB.
GROUP_ELEMENTS = 2**22
# mean rows of a segment from which on tiles under a mask are listed in groups; packed tiles are for
# shorter ones
GROUPED_SEQLEN = 256
LONGEST_CAUSAL_KEYS = 2048  # mean keys up to which causal key tiles are
# where the exponent and six bits of the mantissa of an fp32 number begin: 64 steps for each power
# of two
TOP_BITS = 17
EXACT_TOP_BITS = (127 + 9) * 64  # those of EXACT_WORK, 2^9


def work_class(work: Tensor) -> Tensor:
    """The class by which tiles are sorted under a mask: the work itself below EXACT_WORK, then 64
    classes for each power of two.

    Works of a class differ by less than 1/64, except in the last class: 64,000 blocks and more. The
    number of classes is bounded so that the device can sort by counting. `_work_class` in device.py
    is the same function.
    """
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
    """From what sizes on Hopper's one-pass backward is faster. docs/decisions/one-pass-backward.md
    has figures.

    queries, keys, scores: of a segment and head on average; scores are queries times keys.
    all_queries, all_keys: rows of all segments and heads. Fewer do not fill the GPU, and tiles of a
    segment wait for one another.
    """

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
    which the kernel needs.

    causal: whether the mask is the causal one.
    """
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
    """How tiles are listed in groups of segments.

    rows: how many rows the segments of a group have together on the side that the tiles loop over.
    alternates: whether every other group is in reverse order.
    """

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
    a tile waits for its predecessors. docs/decisions/tiles-in-groups.md has figures.

    Args:
        rows, num_heads: of the tiled side.
        looped: the other side; None for kernels that gain nothing.
    """
    if looped is None or not num_segments or not rows:
        return None
    head_dim, causal = looped.head_dim, mask is not None and mask.is_causal
    alternates, elements = True, GROUP_ELEMENTS
    if key_tiles and one_pass_may_run(
        looped, rows, num_heads, num_segments, mask is not None, causal
    ):
        alternates, elements = (
            False,
            one_pass_elements(rows / num_segments, head_dim, mask is not None),
        )
    elif mask is None or not may_alternate(head_dim) or rows < num_segments * GROUPED_SEQLEN:
        return None
    elif key_tiles and causal and rows > num_segments * LONGEST_CAUSAL_KEYS:
        return None
    return Grouping(max(1, elements // (looped.heads * padded_dim(head_dim))), alternates)


def is_short(q_len: Tensor, kv_len: Tensor) -> Tensor:
    """Whether a segment has at most SHORT queries and SHORT keys."""
    return torch.maximum(q_len, kv_len) <= SHORT


def sort_key(work: Tensor, short: Tensor) -> Tensor:
    """What tiles are sorted by, largest first, given their work or its class. Tiles of short
    segments come last, so that kernels can leave them to the kernels of packed tiles. A short
    segment has at most SHORT blocks."""
    return torch.where(short, work, work + (SHORT + 1))


def query_tile_work(
    block: Tensor,
    q_len: Tensor,
    kv_len: Tensor,
    num_targets: Tensor | int,
    mask: MaskParams,
    block_m: int,
    block_n: int,
) -> Tensor:
    """Key blocks that the block-th tile of `block_m` query rows visits.

    The smallest low and the largest high of its rows belong to its first or last row, the last row
    of the context, or the first row exempt from max_attn_len.
    """
    first_target = (kv_len - num_targets).clamp(min=0)
    first = block * block_m
    ends = torch.stack([first, torch.minimum(first + block_m, q_len) - 1]) + kv_len - q_len
    steps = torch.stack(
        [torch.full_like(first, mask.context - 1), first_target - mask.full_attn_len]
    ).clamp(*ends)
    low, high, own_low = _visible_columns(torch.cat([ends, steps]), first_target, mask)
    if mask.global_prefix or mask.recent_history:
        zero, own_low, own_end, lowest, highest = (
            torch.zeros_like(first),
            own_low.amin(0),
            ends[1] + 1,
            low.amin(0),
            high.amax(0),
        )
        prefix = first_target.clamp(max=mask.global_prefix)
        prefix = torch.minimum(prefix, own_end) if mask.causal else prefix
        own_is_second = own_low < lowest
        second = (
            torch.where(own_is_second, own_low, lowest),
            torch.where(own_is_second, own_end, highest),
        )
        third = (
            torch.where(own_is_second, lowest, own_low),
            torch.where(own_is_second, highest, own_end),
        )
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
    """(low, high, own_low): a row sees the columns [low, high) and [own_low, row]."""
    causal, left, right, has_targets, group_size, context, max_attn_len, full, _, recent_history = (
        mask
    )
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
    """Query blocks of `block_n` rows that the block-th tile of `block_m` keys visits."""
    (
        causal,
        left,
        right,
        _,
        group_size,
        context,
        max_attn_len,
        full,
        global_prefix,
        recent_history,
    ) = mask
    first_target = (kv_len - num_targets).clamp(min=0)
    shift, column = kv_len - q_len, block * block_m
    last = torch.minimum(column + block_m, kv_len) - 1
    start, end = column if causal else shift, kv_len
    context_end, exempt = (
        shift + 0 * column if not context else torch.full_like(column, context),
        kv_len,
    )
    recent = first_target - recent_history
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
    start, context_end = (
        torch.where(of_targets, column, start),
        torch.where(of_targets, shift, context_end),
    )
    end = torch.where(
        of_targets, first_target + ((last - first_target) // group_size + 1) * group_size, end
    )
    exempt = torch.where(of_targets, kv_len, exempt)
    if recent_history:
        truncated = last < recent
        start, end = torch.where(truncated, column, start), torch.where(truncated, last + 1, end)
        context_end, exempt = (
            torch.where(truncated, shift, context_end),
            torch.where(truncated, kv_len, exempt),
        )
    nearest = torch.minimum(column, nearest - right) if recent_history else column - right
    lowest = torch.maximum(shift, nearest) if right >= 0 else shift
    highest = torch.minimum(kv_len, last + left + 1) if left >= 0 else kv_len
    if global_prefix:
        of_prefix = column < first_target.clamp(max=global_prefix)
        start, end = (
            torch.where(of_prefix, column if causal else shift, start),
            torch.where(of_prefix, kv_len, end),
        )
        lowest, highest = (
            lowest if causal else torch.where(of_prefix, shift, lowest),
            torch.where(of_prefix, kv_len, highest),
        )
    return _count_blocks(
        ((shift, context_end), (start, end), (exempt, kv_len)), shift, lowest, highest, block_n
    )


def _count_blocks(
    runs: Iterable[tuple[Tensor, Tensor]],
    shift: Tensor,
    lowest: Tensor,
    highest: Tensor,
    block: int,
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
