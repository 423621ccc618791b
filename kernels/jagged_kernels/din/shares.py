"""Which rows of q each program of Hopper's kernels computes: adjacent ones, with as many tiles of
events as those of any other program. A program of every n-th row has up to 1.3 times the mean."""

import triton
import triton.language as tl

from ..attention.mask import first_target_column, visible_runs
from ..common.loads import segment_lengths
from ..common.ptxas import safe_ptxas


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments"])
def din_costs_kernel(users, costs_ptr, num_segments, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """costs `[B + 1]`: the cost of all rows of q of the users before. A row's is the number of
    tiles that the user's last row sees, and one more."""
    total = tl.full([], 0, tl.int64)
    for first in range(0, num_segments, BLOCK):
        segment = first + tl.arange(0, BLOCK)
        real = segment < num_segments
        segment = tl.minimum(segment, num_segments - 1)
        rows = segment_lengths(users.q_offsets, segment, real)
        events = segment_lengths(users.kv_offsets, segment, real).to(tl.int32)
        if MASK is not None:
            first_target = first_target_column(users.num_targets, segment, events, MASK)
            runs = visible_runs(tl.maximum(events - 1, 0), first_target, MASK)
            events = events * 0
            for i in tl.static_range(len(runs)):
                events += runs[i][1] - runs[i][0]
        costs = rows.to(tl.int64) * (tl.cdiv(events, 64) + 1)
        tl.store(costs_ptr + 1 + segment, total + tl.cumsum(costs, 0), mask=real)
        total += tl.sum(costs, 0)
    tl.store(costs_ptr, 0)


@triton.jit
def first_row(costs_ptr, offsets_ptr, user, cost):
    """The first row of q whose rows before cost as much as `cost` or more. user: the last one
    before whom less or as much is spent; the number of users, behind the last one."""
    before = tl.load(costs_ptr + user)
    start = tl.load(offsets_ptr + user).to(tl.int64)
    if cost > before:  # then it has rows
        rows = tl.load(offsets_ptr + user + 1).to(tl.int64) - start
        of_row = (tl.load(costs_ptr + user + 1) - before) // rows
        start += (cost - before + of_row - 1) // of_row
    return start
