"""Which tiles of events a program computes for a row of q, and which ones Hopper's loads ahead.

The events that the row sees have columns: first those of the first run of adjacent events, then
those of the next one. A tile is a number of adjacent columns.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..attention.mask import first_target_column, visible_runs
from ..common.loads import load_segment
from .configs import HOPPER_STAGES

AHEAD = tl.constexpr(HOPPER_STAGES - 1)  # tiles that Hopper's forward loads before their turn


class Seen(NamedTuple):
    """The events that a row of q sees, from a tile on, which begins at column 0.

    start, length: the first event of the first run, and how many it has from there on. others:
    under a mask that may leave gaps, (start, end) of each later run, whose event at a column is
    start + column, up to the column `end`.
    """

    start: tl.tensor
    length: tl.tensor
    others: tl.tuple


@triton.jit
def find_seen(row, user, num_rows, num_segments, users, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """The Seen of a row of q, of a user; none behind the last segment, and from num_rows on. BLOCK:
    columns of a tile, if each run begins with a tile of its own. 1: columns have no gaps."""
    start, length = load_segment(users.kv_offsets, user)
    if num_rows is None:
        there = row < tl.load(users.q_offsets + num_segments)
    else:
        there = (row < num_rows) & (row < tl.load(users.q_offsets + num_segments))
    if MASK is None:
        return Seen(start, tl.where(there, length, 0), ())
    else:
        q_start, q_len = load_segment(users.q_offsets, user)
        column = (row - q_start).to(tl.int32) + length - q_len
        first_target = first_target_column(users.num_targets, user, length, MASK)
        runs = visible_runs(column, first_target, MASK)
        length, others = tl.where(there, runs[0][1] - runs[0][0], 0), ()
        end = length
        for i in tl.static_range(1, len(runs)):
            number = tl.where(there, runs[i][1] - runs[i][0], 0)
            tile = tl.cdiv(end, BLOCK) * BLOCK
            end = tile + number
            others = others + ((start + runs[i][0] - tile, end),)
        return Seen(start + runs[0][0], length, others)


@triton.jit
def end_of(seen):
    """The column where the last run ends. If it is empty, no tile begins between its end and that
    of the run before."""
    if len(seen.others) == 0:
        return seen.length
    else:
        return seen.others[len(seen.others) - 1][1]


@triton.jit
def find_tile(seen, column):
    """The event at a column, and how many its run has from there on."""
    start, end = seen.start, seen.length
    for i in tl.static_range(len(seen.others)):
        behind = column >= end
        start = tl.where(behind, seen.others[i][0], start)
        end = tl.where(behind, seen.others[i][1], end)
    return start + column, end - column


@triton.jit
def without_tile(seen, BLOCK: tl.constexpr):
    """The Seen from the second tile on."""
    others = ()
    for i in tl.static_range(len(seen.others)):
        others = others + ((seen.others[i][0] + BLOCK, seen.others[i][1] - BLOCK),)
    return Seen(seen.start + BLOCK, seen.length - BLOCK, others)


@triton.jit
def num_missing(seen, BLOCK: tl.constexpr):
    """How many of the next row's first AHEAD tiles are not loaded while those of a row are
    computed."""
    return tl.maximum(AHEAD - (end_of(seen) + BLOCK - 1) // BLOCK, 0)


@triton.jit
def find_tile_ahead(seen, next_seen, step, BLOCK: tl.constexpr):
    """The tile that is AHEAD of the first one, whose step is given: its first event, its step, and
    whether there is one. It may be one of the next row's."""
    tiles = (end_of(seen) + BLOCK - 1) // BLOCK
    column = BLOCK * (AHEAD - tiles)
    inside = tiles > AHEAD
    row = find_tile(seen, BLOCK * AHEAD)[0]
    row = tl.where(inside, row, find_tile(next_seen, column)[0])
    return row, step + AHEAD, inside | (column < end_of(next_seen))
