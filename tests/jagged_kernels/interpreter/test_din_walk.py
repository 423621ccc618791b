"""The tiles of events that Hopper's forward of DIN's attention loads and computes."""

import random

import pytest
import torch
import triton
import triton.language as tl
from jagged_kernels.common.loads import find_segment
from jagged_kernels.din.mlp import Users
from jagged_kernels.din.walk import (
    AHEAD,
    end_of,
    find_seen,
    find_tile,
    find_tile_ahead,
    num_missing,
    without_tile,
)

import jagged_modules as jm

STEPS = 512  # more than a program takes
BLOCK = tl.constexpr(64)


@triton.jit
def _find_seen(row, users, num_rows, num_segments, MASK: tl.constexpr):
    user = find_segment(tl.minimum(row, num_rows - 1), users.q_offsets, num_segments, 0, False)
    return find_seen(row, user, num_rows, num_segments, users, MASK, BLOCK)


@triton.jit
def _load(loads_ptr, row, step, wanted):
    """Note the first event, and count the loads."""
    tl.store(loads_ptr + 2 * step, row, mask=wanted)
    tl.store(loads_ptr + 2 * step + 1, tl.load(loads_ptr + 2 * step + 1) + 1, mask=wanted)


@triton.jit
def _walk_kernel(
    loads_ptr, tiles_ptr, users, num_rows, num_segments, MASK: tl.constexpr, STEPS: tl.constexpr
):
    """As a program of din_fwd_hopper_kernel. tiles: row, first event, and how many follow it."""
    loads_ptr += tl.program_id(0) * STEPS * 2
    tiles_ptr += tl.program_id(0) * STEPS * 3
    step, missing = 0, AHEAD
    next_seen = _find_seen(tl.program_id(0), users, num_rows, num_segments, MASK)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        seen = next_seen
        for i in tl.static_range(AHEAD):
            wanted = (i < missing) & (end_of(seen) > BLOCK * i)
            _load(loads_ptr, find_tile(seen, BLOCK * i)[0], step + i, wanted)
        next_row = row + tl.num_programs(0)
        next_seen = _find_seen(next_row, users, num_rows, num_segments, MASK)
        missing = num_missing(seen, BLOCK)
        while end_of(seen) > 0:
            first, number = find_tile(seen, 0)
            tl.store(tiles_ptr + 3 * step, row)
            tl.store(tiles_ptr + 3 * step + 1, first)
            tl.store(tiles_ptr + 3 * step + 2, number)
            first, ahead, wanted = find_tile_ahead(seen, next_seen, step, BLOCK)
            _load(loads_ptr, first, ahead, wanted)
            seen = without_tile(seen, BLOCK)
            step += 1


def runs_of(seen: list[int]) -> list[tuple[int, int]]:
    """(first, number) of the runs of ascending numbers."""
    runs = []
    for x in seen:
        if runs and x == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((x, 1))
    return runs


def check_walk(mask, candidates, lengths, targets, num_programs):
    """Each program loads each tile once, for its turn, and the tiles of a row of q are those of its
    runs of visible events."""
    q_offsets, kv_offsets = (torch.tensor([0, *x]).cumsum(0) for x in (candidates, lengths))
    num_rows = sum(candidates) + 2  # two behind the last segment
    users = Users(q_offsets, kv_offsets, None if targets is None else torch.tensor(targets))
    loads = torch.zeros(num_programs, STEPS, 2, dtype=torch.int32)
    tiles = torch.full((num_programs, STEPS, 3), -1, dtype=torch.int32)
    params = None if mask is None else mask.params
    _walk_kernel[(num_programs,)](
        loads, tiles, users, num_rows, len(lengths), MASK=params, STEPS=STEPS
    )
    expected = {}
    for b, (num_candidates, length) in enumerate(zip(candidates, lengths)):
        keep = torch.ones(num_candidates, length)
        if mask is not None:
            keep = mask.keep(num_candidates, length, targets[b] if targets else 0)
        for i, columns in enumerate(keep):
            runs = runs_of((columns.nonzero()[:, 0] + kv_offsets[b]).tolist())
            expected[int(q_offsets[b]) + i] = [
                (first + n, number - n) for first, number in runs for n in range(0, number, 64)
            ]
    for program in range(num_programs):
        rows = range(program, sum(candidates), num_programs)
        steps = [(row, *tile) for row in rows for tile in expected[row]]
        assert tiles[program, : len(steps)].tolist() == [list(x) for x in steps]
        assert loads[program, : len(steps)].tolist() == [[first, 1] for _, first, _ in steps]
        assert (tiles[program, len(steps) :] == -1).all()
        assert not loads[program, len(steps) :].any()


def test_without_a_mask():
    check_walk(None, [2, 3, 1, 4, 0, 5], [300, 0, 64, 65, 9, 128], None, 2)


def test_runs_of_whole_tiles():
    """The first run ends where its last tile ends."""
    mask = jm.AttentionMask(causal=True, window=(63, None), global_prefix=128)
    check_walk(mask, [1, 3], [300, 194], None, 1)


@pytest.mark.parametrize("seed", range(15))
def test_masks(seed):
    choose = random.Random(seed)
    lengths = [choose.choice([0, 1, 63, 64, 65, choose.randint(1, 400)]) for _ in range(4)]
    candidates = [choose.choice([0, 1, 2, 8, 80]) for _ in lengths]
    targets = choose.choice([None, [choose.randint(0, n) for n in candidates]])
    max_attn_len = choose.choice([0, 0, 0, 30, 100])
    mask = jm.AttentionMask(
        causal=choose.random() < 0.6,
        window=choose.choice([None, None, (20, 10), (None, 20), (150, None)]),
        num_targets=None if targets is None else torch.tensor(targets),
        target_group_size=choose.choice([1, 1, 30]),
        contextual_seqlen=choose.choice([0, 0, 5]),
        max_attn_len=max_attn_len,
        min_full_attn_seqlen=choose.choice([0, 3]) if max_attn_len else 0,
        global_prefix=choose.choice([0, 0, 4, 70]),
        recent_history=choose.choice([0, 0, 30, 150]),
    )
    check_walk(mask, candidates, lengths, targets, choose.choice([1, 3]))
