"""The blocks that tiles visit under a mask, against the mask's dense form."""

import itertools
import random

import pytest
import torch
import triton
import triton.language as tl
from jagged_kernels.attention.mask import (
    column_blocks,
    first_query_row,
    first_target_column,
    is_visible,
    masked_block,
    num_masked_blocks,
    row_blocks,
    visible_columns,
    visible_runs,
)
from jagged_kernels.schedule.cost import key_tile_work, query_tile_work

import jagged_modules as jm


@triton.jit
def _visit_kernel(
    visits_ptr, full_ptr, targets_ptr, q_len, kv_len, num_blocks,
    MASK: tl.constexpr, KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr = 0,
):  # fmt: skip
    tile = tl.program_id(0)
    first_target = first_target_column(targets_ptr, SEGMENT, kv_len, MASK, 1)
    if KEYS:
        blocks = row_blocks(tile * BLOCK_N, q_len, kv_len, first_target, MASK, BLOCK_M, BLOCK_N)
    else:
        shift = kv_len - q_len
        first = first_query_row(tile, q_len, MASK, BLOCK_M, BLOCK_N) + shift
        last = tl.minimum(first + BLOCK_M, kv_len) - 1
        blocks = column_blocks(tl.maximum(first, shift), last, kv_len, first_target, MASK, BLOCK_N)
    for number in range(0, num_masked_blocks(blocks)):
        at = tile * num_blocks + masked_block(number, blocks)
        tl.store(visits_ptr + at, tl.load(visits_ptr + at) + 1)
    for block in range(blocks.full_first, blocks.full_first + blocks.full_count):
        at = tile * num_blocks + block
        tl.store(visits_ptr + at, tl.load(visits_ptr + at) + 1)
        tl.store(full_ptr + at, 1)


def random_case(choose: random.Random):
    num_keys = choose.randint(1, 14)
    num_queries = choose.choice([num_keys, num_keys, choose.randint(1, 16)])
    max_attn_len = choose.choice([0, 0, 1, 3, 9])
    num_targets = choose.choice([None, choose.randint(0, num_keys)])
    mask = jm.AttentionMask(
        causal=choose.random() < 0.6,
        window=choose.choice([None, None, (2, 1), (None, 2), (3, None)]),
        num_targets=None if num_targets is None else torch.tensor([num_targets]),
        target_group_size=choose.choice([1, 1, 3]),
        contextual_seqlen=choose.choice([0, 0, 2, 5]),
        max_attn_len=max_attn_len,
        min_full_attn_seqlen=choose.choice([0, 3]) if max_attn_len else 0,
        global_prefix=choose.choice([0, 0, 1, 4, 20]),
        recent_history=choose.choice([0, 0, 1, 3, 6]),
    )
    return mask, num_queries, num_keys, num_targets or 0


def no_block_is_visited_in_vain(mask, keys):
    """Whether tiles of keys, or of queries, visit no block that is hidden from all of their
    rows."""
    if keys:
        return not (mask.contextual_seqlen or mask.max_attn_len or mask.num_targets is not None)
    return (
        bool(mask.global_prefix or mask.recent_history)
        or mask.num_targets is None
        or mask.window is None
    )


@pytest.mark.parametrize("seed", range(100))
def test_tiles_visit_what_they_see_and_mask_what_they_must(seed):
    check_tiles(
        *random_case(random.Random(seed)), *random.Random(seed).choice([(2, 2), (4, 2), (2, 4)])
    )


@pytest.mark.parametrize("seed", range(40))
def test_tiles_of_other_query_groups_visit_all(seed):
    """Once each, and without masking up to the segment's end."""
    choose = random.Random(seed)
    mask, num_queries, num_keys, _ = random_case(choose)
    block_m, block_n = choose.choice([(2, 2), (4, 2), (2, 4)])
    params = mask.params._replace(has_targets=0, grouped=1)
    blocks = triton.cdiv(num_queries, block_m), triton.cdiv(num_keys, block_n)
    for keys in (False, True):
        visits, full = torch.zeros(2, *(reversed(blocks) if keys else blocks), dtype=torch.int32)
        sizes = num_queries, num_keys, visits.shape[1]
        constants = dict(MASK=params, KEYS=keys, BLOCK_M=block_m, BLOCK_N=block_n, SEGMENT=1)
        _visit_kernel[(len(visits),)](visits, full, None, *sizes, **constants)
        assert bool((visits == 1).all())
        whole = num_queries // block_m if keys else num_keys // block_n
        assert bool((full[:, :whole] == 1).all()) and not full[:, whole:].any()


CORNERS = [  # mask, queries, keys, targets, block_m, block_n
    # truncated columns that are farther from the reach of the others than the rows of a block
    (jm.AttentionMask(max_attn_len=1, recent_history=5), 8, 8, 0, 2, 4),
    # full blocks in the last run, after a masked one
    (jm.AttentionMask(recent_history=5, global_prefix=1), 10, 10, 0, 2, 2),
    # more full blocks in the prefix than in the recent history
    (jm.AttentionMask(recent_history=4, global_prefix=6), 12, 12, 0, 2, 2),
    # full blocks of a window that begins within the prefix
    (jm.AttentionMask(window=(4, None), global_prefix=5), 12, 12, 0, 2, 2),
    # rows before the first column
    (jm.AttentionMask(window=(0, None), global_prefix=5, recent_history=2), 9, 3, 0, 2, 2),
]


@pytest.mark.parametrize("case", CORNERS, ids=str)
def test_corner_cases_of_a_prefix_and_truncation(case):
    check_tiles(*case)


def shift_of_tiles(mask, num_queries, block_m, block_n):
    """How many rows before a segment its tiles of queries begin: under a causal mask so many, in
    whole 64s, that the last tile ends where the segment does, or less than 64 rows behind it. Tiles
    of whole blocks of 128 keys begin with one."""
    unit = 128 if block_n == 128 and block_m % 128 == 0 else 64
    strips = -(-num_queries // unit)
    return unit * (-strips % (block_m // unit)) if mask.causal and block_m > unit else 0


@pytest.mark.parametrize("block_m, block_n", [(128, 64), (192, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("num_queries, num_keys", [(64, 64), (65, 300), (257, 257), (449, 449)])
@pytest.mark.parametrize("causal, num_targets", [(True, None), (True, 70), (False, 70)])
def test_the_first_tile_under_a_causal_mask_is_the_one_that_is_not_full(
    causal, num_targets, num_queries, num_keys, block_m, block_n
):
    targets = None if num_targets is None else torch.tensor([num_targets])
    mask = jm.AttentionMask(causal=causal, num_targets=targets)
    check_tiles(mask, num_queries, num_keys, num_targets or 0, block_m, block_n)


def check_tiles(mask, num_queries, num_keys, num_targets, block_m, block_n):
    """Checks which blocks all tiles of queries and of keys visit, and which of them are full."""
    keep = mask.keep(num_queries, num_keys, num_targets)
    blocks = triton.cdiv(num_queries, block_m), triton.cdiv(num_keys, block_n)
    targets = torch.tensor([num_targets])
    sizes = dict(MASK=mask.params, BLOCK_M=block_m, BLOCK_N=block_n)
    for keys, work_of in ((False, query_tile_work), (True, key_tile_work)):
        visits, full = torch.zeros(2, *(reversed(blocks) if keys else blocks), dtype=torch.int32)
        _visit_kernel[(len(visits),)](
            visits, full, targets, num_queries, num_keys, visits.shape[1], KEYS=keys, **sizes
        )
        tiles = torch.arange(len(visits), dtype=torch.int32)
        lengths = (torch.full_like(tiles, length) for length in (num_queries, num_keys))
        own, other = (block_n, block_m) if keys else (block_m, block_n)
        assert torch.equal(
            work_of(tiles, *lengths, num_targets, mask.params, own, other),
            visits.sum(1, dtype=torch.int32),
        )
        if keys:
            visits, full = visits.T, full.T
        skips_all = no_block_is_visited_in_vain(mask, keys)
        for m in range(blocks[0]):
            first = 0 if keys else shift_of_tiles(mask, num_queries, block_m, block_n)
            rows = range(num_queries)[max(0, m * block_m - first) : (m + 1) * block_m - first]
            for n in range(blocks[1]):
                seen = keep[rows.start : rows.stop, n * block_n : (n + 1) * block_n]
                assert visits[m, n] <= 1 and visits[m, n] >= int(seen.any())
                assert not skips_all or visits[m, n] == int(seen.any())
                if full[m, n]:
                    assert seen.all() and seen.shape[keys - 1] == (block_m if keys else block_n)


@pytest.mark.parametrize("causal_window", [None, 100])
def test_causal_tiles_skip_what_is_hidden(causal_window):
    """A causal mask leaves 36 of 8 x 8 blocks. A window of 100 columns back leaves at most 3 blocks
    per tile."""
    mask = jm.AttentionMask(
        causal=True, window=None if causal_window is None else (causal_window, None)
    )
    visits, full = torch.zeros(2, 8, 8, dtype=torch.int32)
    _visit_kernel[(8,)](
        visits, full, None, 512, 512, 8, MASK=mask.params, KEYS=False, BLOCK_M=64, BLOCK_N=64
    )
    assert visits.sum(1).tolist() == (
        [1, 2, 3, 3, 3, 3, 3, 3] if causal_window else list(range(1, 9))
    )
    assert full.sum() == (0 if causal_window else 28)


# fields, blocks that each query tile visits, those that each key tile visits, full blocks of all
# query tiles
LONG = [
    (
        dict(causal=True, window=(100, None), global_prefix=70),
        [1, 2, 3, 4, 5, 5, 5, 5],
        [8, 7, 3, 3, 3, 3, 2, 1],
        7,
    ),
    (dict(causal=True, recent_history=200), [1, 1, 1, 1, 1, 2, 3, 4], [1, 1, 1, 1, 4, 3, 2, 1], 3),
    (
        dict(causal=True, recent_history=200, global_prefix=64),
        [1, 2, 2, 2, 2, 3, 4, 5],
        [8, 1, 1, 1, 4, 3, 2, 1],
        8,
    ),
    (
        dict(recent_history=200, global_prefix=70),
        [6, 6, 7, 7, 6, 6, 6, 6],
        [8, 8, 1, 1, 8, 8, 8, 8],
        24,
    ),
    (
        dict(max_attn_len=10, global_prefix=128),
        [2, 3, 4, 5, 5, 5, 5, 4],
        [8, 8, 3, 3, 3, 3, 3, 2],
        16,
    ),
]


@pytest.mark.parametrize("fields, of_queries, of_keys, num_full", LONG, ids=str)
def test_tiles_skip_what_a_prefix_and_truncation_leave_hidden(
    fields, of_queries, of_keys, num_full
):
    mask = jm.AttentionMask(**fields)
    for keys, expected, work_of in (
        (False, of_queries, query_tile_work),
        (True, of_keys, key_tile_work),
    ):
        visits, full = torch.zeros(2, 8, 8, dtype=torch.int32)
        _visit_kernel[(8,)](
            visits, full, None, 512, 512, 8, MASK=mask.params, KEYS=keys, BLOCK_M=64, BLOCK_N=64
        )
        assert visits.sum(1).tolist() == expected and visits.max() == 1
        tiles = torch.arange(8, dtype=torch.int32)
        lengths = torch.full_like(tiles, 512)
        assert work_of(tiles, lengths, lengths, 0, mask.params, 64, 64).tolist() == expected
        assert keys or full.sum() == num_full


@triton.jit
def _seen_kernel(seen_ptr, targets_ptr, q_len, kv_len, MASK: tl.constexpr, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    position = row + kv_len - q_len
    first_target = first_target_column(targets_ptr, 0, kv_len, MASK)
    seen = is_visible(column, position, visible_columns(position, first_target, MASK), MASK)
    tl.store(
        seen_ptr + row * kv_len + column, seen.to(tl.int32), mask=(row < q_len) & (column < kv_len)
    )


@pytest.mark.parametrize("seed", range(100))
def test_rows_see_what_the_rule_says(seed):
    mask, num_queries, num_keys, num_targets = random_case(random.Random(seed))
    seen = torch.full((num_queries, num_keys), -1, dtype=torch.int32)
    _seen_kernel[(1,)](
        seen, torch.tensor([num_targets]), num_queries, num_keys, MASK=mask.params, SIZE=16
    )
    assert torch.equal(seen, mask.keep(num_queries, num_keys, num_targets).int()), mask


@triton.jit
def _runs_kernel(runs_ptr, targets_ptr, q_len, kv_len, MASK: tl.constexpr):
    row = tl.program_id(0)
    first_target = first_target_column(targets_ptr, 0, kv_len, MASK)
    runs = visible_runs(row + kv_len - q_len, first_target, MASK)
    for i in tl.static_range(len(runs)):
        ptr = runs_ptr + (row * 3 + i) * 2
        tl.store(ptr, runs[i][0])
        tl.store(ptr + 1, runs[i][1])


@pytest.mark.parametrize("seed", range(100))
def test_runs_that_rows_see(seed):
    """They ascend, and between two of them there are hidden columns."""
    mask, num_queries, num_keys, num_targets = random_case(random.Random(seed))
    runs = torch.zeros(num_queries, 3, 2, dtype=torch.int32)
    _runs_kernel[(num_queries,)](
        runs, torch.tensor([num_targets]), num_queries, num_keys, MASK=mask.params
    )
    for row, keep in zip(runs.tolist(), mask.keep(num_queries, num_keys, num_targets)):
        found = [(first, end) for first, end in row if first < end]
        assert [x for run in found for x in range(*run)] == keep.nonzero()[:, 0].tolist(), mask
        assert all(end < first for (_, end), (first, _) in itertools.pairwise(found)), mask


@pytest.mark.parametrize(
    "fields", [dict(), dict(recent_history=3), dict(recent_history=3, global_prefix=2)], ids=str
)
def test_rows_under_a_plain_causal_mask(fields):
    """Alone, causal has a rule of its own in is_visible."""
    mask = jm.AttentionMask(causal=True, **fields)
    seen = torch.full((9, 9), -1, dtype=torch.int32)
    _seen_kernel[(1,)](seen, None, 9, 9, MASK=mask.params, SIZE=16)
    assert torch.equal(seen, mask.keep(9, 9).int())
