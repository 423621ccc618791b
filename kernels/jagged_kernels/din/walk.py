"""Which tiles of events hopper_forward.py computes for a row of q, and which it loads ahead.

Functions of numbers alone, which Triton's interpreter runs too.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..attention.mask import visible_runs
from ..common.loads import load_segment
from .configs import HOPPER_STAGES
from .mlp import load_column

BLOCK = tl.constexpr(64)  # events of a tile
AHEAD = tl.constexpr(HOPPER_STAGES - 1)  # tiles that are loaded before their turn


class Events(NamedTuple):
    """The events that a row of q sees, from a tile on: the first one, and how many follow it.

    others: under a mask that may leave gaps, (start, end) of each later run of events. A run begins
    with a tile of its own. If the tile at a column, counted from the first tile on, is a run's, it
    begins with the event start + column, and the run's last tile ends before `end`.
    """

    start: tl.tensor
    length: tl.tensor
    others: tl.tuple


@triton.jit
def find_events(row, user, num_rows, num_segments, users, MASK: tl.constexpr):
    """The Events of a row of q, of a user; none from num_rows on, and behind the last segment."""
    start, length = load_segment(users.kv_offsets, user)
    there = (row < num_rows) & (row < tl.load(users.q_offsets + num_segments))
    if MASK is None:
        return Events(start, tl.where(there, length, 0), ())
    else:
        column, first_target = load_column(row, user, length, users, MASK)
        runs = visible_runs(column, first_target, MASK)
        start = start.to(tl.int32)  # as TMA takes it
        length, others = tl.where(there, runs[0][1] - runs[0][0], 0), ()
        end = length
        for i in tl.static_range(1, len(runs)):
            number = tl.where(there, runs[i][1] - runs[i][0], 0)
            tile = tl.cdiv(end, BLOCK) * BLOCK
            end = tl.where(number > 0, tile + number, end)
            others = others + ((start + runs[i][0] - tile, end),)
        return Events(start + runs[0][0], length, others)


@triton.jit
def end_of(events):
    """The column where the last tile's events end."""
    if len(events.others) == 0:
        return events.length
    else:
        return events.others[len(events.others) - 1][1]


@triton.jit
def find_tile(events, column):
    """The first event of the tile at a column, and how many its run has from there on."""
    start, end = events.start, events.length
    for i in tl.static_range(len(events.others)):
        behind = column >= end
        start = tl.where(behind, events.others[i][0], start)
        end = tl.where(behind, events.others[i][1], end)
    return start + column, end - column


@triton.jit
def without_tile(events):
    """The Events from the second tile on."""
    others = ()
    for i in tl.static_range(len(events.others)):
        others = others + ((events.others[i][0] + BLOCK, events.others[i][1] - BLOCK),)
    return Events(events.start + BLOCK, events.length - BLOCK, others)


@triton.jit
def num_missing(events):
    """How many of the next row's first AHEAD tiles are not loaded while those of a row are
    computed."""
    return tl.maximum(AHEAD - (end_of(events) + BLOCK - 1) // BLOCK, 0)


@triton.jit
def find_tile_ahead(events, next_events, step):
    """The tile that is AHEAD of the first one, whose step is given: its first event, its step, and
    whether there is one. It may be one of the next row's Events."""
    tiles = (end_of(events) + BLOCK - 1) // BLOCK
    column = BLOCK * (AHEAD - tiles)
    inside = tiles > AHEAD
    row = find_tile(events, BLOCK * AHEAD)[0]
    row = tl.where(inside, row, find_tile(next_events, column)[0])
    return row, step + AHEAD, inside | (column < end_of(next_events))
