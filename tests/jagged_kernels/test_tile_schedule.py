"""The zigzag schedule: which tiles, in which order, for which worker, how evenly, at what cost."""

import dataclasses
import itertools
import pickle
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jagged_kernels.schedule import cost
from jagged_kernels.schedule.cost import EXACT_WORK, SHORT, WORK_CLASSES, tile_work, work_class
from jagged_kernels.schedule.host import tile_capacity, zigzag_schedule
from marks import raising

import jagged_modules as jm

SIZES = dict(num_heads=2, block_m=16, block_n=8)


def work_of(schedule, q_lengths, kv_lengths, mask=None, key_tiles=False):
    """The work of a schedule's tiles. q_lengths: of the tiled side."""
    segment, _, block = schedule.tiles.unbind(1)
    lengths = [torch.as_tensor(x, dtype=torch.int32) for x in (q_lengths, kv_lengths)]
    of_mask = () if mask is None else (mask.params, mask.num_targets, key_tiles)
    return tile_work((segment, block), *lengths, (schedule.block_m, schedule.block_n), *of_mask)


def loads_of(work, num_workers):
    """Work of each worker, where workers take tiles in waves of alternating direction."""
    there_and_back = torch.cat([torch.arange(num_workers), torch.arange(num_workers).flip(0)])
    workers = there_and_back.repeat(len(work) // (2 * num_workers) + 1)[: len(work)]
    return torch.zeros(num_workers, dtype=torch.int64).index_add_(0, workers, work.long())


def expected_tiles(q_lengths, kv_lengths, num_heads, block_m, block_n, short_last=True):
    """(segment, head, block) and work of every tile, by the definition: enumerate, then sort stably
    by work, longest first, short segments after the others."""
    tiles = [
        ((segment, head, block), -(-kv_lengths[segment] // block_n))
        for segment, rows in enumerate(q_lengths)
        for head in range(num_heads)
        for block in range(-(-rows // block_m))
    ]
    return sorted(
        tiles,
        key=lambda tile: (
            short_last and max(q_lengths[tile[0][0]], kv_lengths[tile[0][0]]) <= SHORT,
            -tile[1],
        ),
    )


@st.composite
def problems(draw):
    """Lengths (empty segments, no segments included) and sizes."""
    segments = draw(st.integers(0, 12))
    lengths = st.lists(st.integers(0, 100), min_size=segments, max_size=segments)
    sizes = dict(
        num_heads=draw(st.integers(1, 4)),
        block_m=draw(st.sampled_from([1, 16, 64])),
        block_n=draw(st.sampled_from([1, 8, 32])),
    )
    return draw(lengths), draw(lengths), sizes


@given(problem=problems())
def test_every_tile_once_longest_first_and_stable(problem):
    q_lengths, kv_lengths, sizes = problem
    schedule = zigzag_schedule(q_lengths, kv_lengths, **sizes)
    expected = expected_tiles(q_lengths, kv_lengths, **sizes)
    assert [tuple(tile) for tile in schedule.tiles.tolist()] == [tile for tile, _ in expected]
    work = work_of(schedule, q_lengths, kv_lengths)
    assert work.tolist() == [work for _, work in expected]
    long = [
        max(q_lengths[segment], kv_lengths[segment]) > SHORT
        for segment, _, _ in schedule.tiles.tolist()
    ]
    assert schedule.num_tiles.tolist() == [len(expected), sum(long)] and long == sorted(
        long, reverse=True
    )
    assert len(set(map(tuple, schedule.tiles.tolist()))) == len(expected)
    for tensor in (schedule.tiles, work, schedule.num_tiles):
        assert tensor.dtype == torch.int32 and tensor.device.type == "cpu"
    assert schedule.tiles.shape == (len(expected), 3)


@given(problem=problems(), num_workers=st.integers(1, 40))
def test_loads_differ_by_at_most_the_longest_tiles(problem, num_workers):
    """Two workers' tiles of one wave differ by at most the wave's spread, with alternating sign
    from wave to wave; the waves' spreads lie one after the other in the sorted list, so they add up
    to at most its longest tile. Short segments are a list of their own."""
    q_lengths, kv_lengths, sizes = problem
    schedule = zigzag_schedule(q_lengths, kv_lengths, **sizes)
    work, num_long = work_of(schedule, q_lengths, kv_lengths), int(schedule.num_tiles[1])
    loads = loads_of(work, num_workers)
    assert loads.shape == (num_workers,) and loads.sum() == work.sum()
    parts = work.split([num_long, len(work) - num_long])
    longest = sum(part.max() for part in parts if len(part))
    assert loads.max() - loads.min() <= longest
    assert loads.max() - loads.double().mean() <= longest


@pytest.mark.parametrize("segments, longest, allowed", [(1152, 512, 1.01), (64, 1024, 1.07)])
def test_makespan_over_mean(segments, longest, allowed):
    """Lengths as in the GDPA post: mean over longest length 0.3, 4 heads, 132 workers, 128 query
    rows against blocks of 64 keys."""
    ratios = []
    for seed in range(10):
        lengths = torch.randint(
            1,
            int(2 * 0.3 * longest) + 1,
            (segments,),
            generator=torch.Generator().manual_seed(seed),
        )
        schedule = zigzag_schedule(lengths, lengths, num_heads=4, block_m=128, block_n=64)
        loads = loads_of(work_of(schedule, lengths, lengths), 132).double()
        ratios.append((loads.max() / loads.mean()).item())
    assert sum(ratios) / len(ratios) <= allowed


@pytest.mark.parametrize("mask", [None, jm.AttentionMask(causal=True)], ids=["no mask", "causal"])
def test_python_does_not_run_per_segment_or_tile(mask):
    """As many lines run for 40,000 tiles as for 30."""
    lines = []

    def trace(frame, event, arg):
        lines[-1] += event == "line"
        return trace

    for segments, longest, at_least in ((7, 100, 28), (2400, 1000, 40_000)):
        lengths = torch.randint(1, longest, (segments,))
        lines.append(0)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            schedule = zigzag_schedule(
                lengths, lengths, num_heads=4, block_m=128, block_n=64, mask=mask
            )
        finally:
            sys.settrace(before)
        assert len(schedule.tiles) >= at_least
    assert lines[0] == lines[1] > 20


def test_capacity_is_reached():
    """One row more than whole blocks in every segment but the last: the bound is tight up to the
    rounding of the total."""
    lengths, sizes = [17] * 8, dict(num_heads=3, block_m=16, block_n=8)
    assert int(zigzag_schedule(lengths, lengths, **sizes).num_tiles[0]) == 3 * 16
    assert tile_capacity(sum(lengths), 8, 3, 16) == 3 * (9 + 8)


def test_queries_without_keys_keep_their_tiles():
    schedule = zigzag_schedule([20, 0, 3], [0, 9, 8], **SIZES)
    assert schedule.tiles.tolist() == [
        [2, 0, 0],
        [2, 1, 0],
        [0, 0, 0],
        [0, 0, 1],
        [0, 1, 0],
        [0, 1, 1],
    ]
    assert work_of(schedule, [20, 0, 3], [0, 9, 8]).tolist() == [1, 1, 0, 0, 0, 0]


@given(problem=problems(), groups=st.integers(2, 3))
def test_several_query_groups(problem, groups):
    """The work of a query tile is the blocks of its keys; that of a key tile, the blocks of all
    query groups."""
    lengths, more, sizes = problem
    queries = [n for i in range(groups) for n in more[i:] + more[:i]]
    schedule = zigzag_schedule(queries, lengths, **sizes)
    expected = expected_tiles(queries, lengths * groups, **sizes, short_last=False)
    work = work_of(schedule, queries, lengths).tolist()
    assert list(zip(map(tuple, schedule.tiles.tolist()), work)) == expected
    keys = zigzag_schedule(lengths, queries, **sizes, key_tiles=True)
    blocks = [
        sum(-(-n // sizes["block_n"]) for n in queries[b :: len(lengths)])
        for b in range(len(lengths))
    ]
    expected = expected_tiles(
        lengths, blocks, sizes["num_heads"], sizes["block_m"], 1, short_last=False
    )
    work = work_of(keys, lengths, queries).tolist()
    assert list(zip(map(tuple, keys.tiles.tolist()), work)) == expected


@given(problem=problems())
def test_a_mask_of_several_query_groups(problem):
    """It is the first group's: tiles of the second visit all keys, tiles of keys the rows of
    both."""
    lengths, others, sizes = problem
    mask = jm.AttentionMask(causal=True, window=(20, None))
    expected = {}
    for group, (queries, rule) in enumerate(((lengths, mask), (others, None))):
        for key_tiles, sides in ((False, (queries, lengths)), (True, (lengths, queries))):
            alone = zigzag_schedule(*sides, **sizes, mask=rule, key_tiles=key_tiles)
            for tile, work in zip(alone.tiles.tolist(), work_of(alone, *sides, rule, key_tiles)):
                tile[0] += 0 if key_tiles else group * len(lengths)
                tile = key_tiles, *tile
                expected[tile] = expected.get(tile, 0) + int(work)
    queries = lengths + others
    for key_tiles, sides in ((False, (queries, lengths)), (True, (lengths, queries))):
        tiles = zigzag_schedule(*sides, **sizes, mask=mask, key_tiles=key_tiles).tiles.tolist()
        found = {(key_tiles, *tile): expected.pop((key_tiles, *tile)) for tile in tiles}
        assert list(found.values()) == sorted(found.values(), reverse=True)
    assert not expected


def test_no_segments():
    schedule = zigzag_schedule([], [], **SIZES)
    assert schedule.tiles.shape == (0, 3) and schedule.num_tiles.tolist() == [0, 0]
    assert work_of(schedule, [], []).tolist() == []


def test_a_moved_schedule_keeps_its_backward():
    schedule = zigzag_schedule([20, 3], [9, 8], **SIZES)
    schedule = dataclasses.replace(schedule, backward=zigzag_schedule([9, 8], [20, 3], **SIZES))
    moved = schedule.to("meta")
    assert moved.tiles.is_meta and moved.backward.tiles.is_meta and moved.backward.backward is None
    assert moved.num_tiles.is_meta and moved.backward.num_tiles.is_meta
    assert schedule.to("cpu") is schedule
    restored = pickle.loads(pickle.dumps(schedule))
    assert torch.equal(restored.tiles, schedule.tiles) and torch.equal(
        restored.backward.tiles, schedule.backward.tiles
    )


def test_a_mask_changes_what_tiles_cost():
    """A causal query tile visits the blocks up to its diagonal. A key tile visits the rows from its
    own on."""
    mask = jm.AttentionMask(causal=True)
    schedule = zigzag_schedule([64], [64], num_heads=2, block_m=16, block_n=16, mask=mask)
    assert schedule.tiles.tolist() == [
        [0, head, block] for block in (3, 2, 1, 0) for head in (0, 1)
    ]
    assert work_of(schedule, [64], [64], mask).tolist() == [4, 4, 3, 3, 2, 2, 1, 1]
    keys = zigzag_schedule(
        [64], [64], num_heads=1, block_m=16, block_n=16, mask=mask, key_tiles=True
    )
    assert keys.tiles[:, 2].tolist() == [0, 1, 2, 3]
    assert work_of(keys, [64], [64], mask, key_tiles=True).tolist() == [4, 3, 2, 1]


@given(problem=problems(), key_tiles=st.booleans())
def test_masked_tiles_are_sorted_by_work(problem, key_tiles):
    """Stably: segments, then blocks, then heads. Short segments come last."""
    q_lengths, kv_lengths, sizes = problem
    mask = jm.AttentionMask(causal=True)
    schedule = zigzag_schedule(q_lengths, kv_lengths, **sizes, mask=mask, key_tiles=key_tiles)
    works = work_of(schedule, q_lengths, kv_lengths, mask, key_tiles).tolist()
    order = [
        (max(q_lengths[segment], kv_lengths[segment]) <= SHORT, -work, segment, block, head)
        for work, (segment, head, block) in zip(works, schedule.tiles.tolist())
    ]
    assert order == sorted(order)
    assert sorted(map(tuple, schedule.tiles.tolist())) == sorted(
        tile for tile, _ in expected_tiles(q_lengths, kv_lengths, **sizes)
    )


def test_works_of_a_class_are_nearly_equal():
    work = torch.cat(
        [
            torch.arange(2**18, dtype=torch.int32),
            torch.tensor([2**30, 2**31 - 1], dtype=torch.int32),
        ]
    )
    classes = work_class(work)
    assert torch.equal(classes[:EXACT_WORK], work[:EXACT_WORK])
    assert classes.dtype == torch.int32 and classes.unique().tolist() == list(
        range(WORK_CLASSES)
    ), "none is left out"
    assert (classes.diff() >= 0).all(), "they ascend"
    below = 64_000  # the last class
    first = torch.searchsorted(classes, classes[:below])
    assert (work[:below] < work[first] * (1 + 1 / 64)).logical_or(work[:below] == work[first]).all()


def test_masked_tiles_of_much_work_are_sorted_by_its_class():
    sizes = dict(num_heads=1, block_m=16, block_n=1)
    mask = jm.AttentionMask(causal=True)
    schedule = zigzag_schedule([3000], [3000], **sizes, mask=mask)
    work = work_of(schedule, [3000], [3000], mask)
    classes = work_class(work)
    order = [
        (-of_work, block) for of_work, block in zip(classes.tolist(), schedule.tiles[:, 2].tolist())
    ]
    assert order == sorted(order) and work[0] > EXACT_WORK


@pytest.mark.parametrize("key_tiles", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("num_targets", [None, 7])
def test_tiles_that_a_prefix_and_truncation_leave_hidden_are_no_work(num_targets, key_tiles):
    """The work of a tile is the number of blocks that one of its rows sees."""
    length, block, targets = 128, 16, None if num_targets is None else torch.tensor([num_targets])
    fields = dict(causal=True, window=(20, None)), dict(causal=True), dict(window=(9, 30)), dict()
    changes = (
        dict(global_prefix=18),
        dict(recent_history=40),
        dict(global_prefix=18, recent_history=40),
    )
    for others, change in itertools.product(fields, changes):
        mask = jm.AttentionMask(**others, **change, num_targets=targets)
        sizes = dict(num_heads=1, block_m=block, block_n=block)
        schedule = zigzag_schedule([length], [length], **sizes, mask=mask, key_tiles=key_tiles)
        seen = (
            mask.keep(length, length, num_targets or 0)
            .unflatten(0, (-1, block))
            .unflatten(2, (-1, block))
            .any(3)
            .any(1)
        )
        expected = seen.sum(0 if key_tiles else 1)
        work = work_of(schedule, [length], [length], mask, key_tiles).long()
        work = torch.empty_like(expected).index_copy_(0, schedule.tiles[:, 2].long(), work)
        assert torch.equal(work, expected), mask


@pytest.mark.parametrize("targets", [None, 20])
def test_masked_schedules_are_balanced(targets):
    lengths = torch.randint(30, 1025, (128,))
    both = lengths, lengths
    mask = jm.AttentionMask(
        causal=True, num_targets=None if targets is None else torch.full((128,), targets)
    )
    sizes = dict(num_heads=4, block_m=64, block_n=64)
    loads, dense = (
        loads_of(work_of(zigzag_schedule(*both, **sizes, mask=m), *both, m), 264)
        for m in (mask, None)
    )
    assert loads.sum() < 0.65 * dense.sum()
    assert loads.max() <= 1.05 * loads.double().mean() + 1


BAD = [
    *raising(
        TypeError,
        {
            "mask must be an AttentionMask, got str": dict(mask="causal"),
            "q_lengths must hold integers, got torch.float32": dict(q_lengths=[1.5]),
            "q_lengths must hold integers, got torch.bool": dict(q_lengths=torch.tensor([True])),
            "q_lengths must hold integers, got None": dict(q_lengths=None),
            "q_lengths must hold integers, got 'abc'": dict(q_lengths="abc"),
            "block_n must be an int, got float": dict(block_n=2.0),
        },
    ),
    *raising(
        ValueError,
        {
            "must have one entry per segment, 1, got 2": dict(
                mask=jm.AttentionMask(num_targets=torch.tensor([1, 2]))
            ),
            "q_lengths must describe as many segments as kv_lengths, .*, got 3 and 2": dict(
                q_lengths=[1, 2, 3], kv_lengths=[1, 2]
            ),
            "q_lengths must describe as many .*, or a multiple of them, got 1 and 2": dict(
                kv_lengths=[1, 2]
            ),
            "kv_lengths must describe as many .*, or a multiple of them, got 1 and 2": dict(
                q_lengths=[1, 2], key_tiles=True
            ),
            "q_lengths must describe as many segments .*, got 0 and 1": dict(q_lengths=[]),
            "mask.num_targets must be None with several query groups, got 2 groups": dict(
                q_lengths=[1, 2], mask=jm.AttentionMask(num_targets=torch.tensor([1, 1]))
            ),
            "q_lengths must not be negative, got -1": dict(q_lengths=[-1]),
            "kv_lengths must not be negative, got -3": dict(kv_lengths=torch.tensor([-3])),
            r"q_lengths must have shape \[B\], got \[1, 1\]": dict(q_lengths=torch.tensor([[1]])),
            "q_lengths must be on the host, got device meta": dict(
                q_lengths=torch.tensor([1], device="meta")
            ),
            "num_heads must be at least 1, got 0": dict(num_heads=0),
            "block_m must be at least 1, got -16": dict(block_m=-16),
            "block_n must be at least 1, got 0": dict(block_n=0),
        },
    ),
    (dict(block_n=0), ValueError, "block_n must be at least 1, got 0"),
]


@pytest.mark.parametrize("change, error, message", BAD, ids=[message[:40] for _, _, message in BAD])
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        zigzag_schedule(**(dict(q_lengths=[1], kv_lengths=[1]) | SIZES | change))


@pytest.mark.parametrize("mask", [None, jm.AttentionMask(causal=True)], ids=["", "causal"])
def test_key_tiles_of_long_histories_are_listed_in_groups(monkeypatch, mask):
    """The longest segments come first. A group has its segments' first blocks, then the second
    ones, and so on."""
    # middles at rows 17408, 4096, 10240, 14336 and 18582
    lengths, heads, head_dim = [2048, 8192, 4096, 4096, 300], 2, 64
    elements = 12800 * heads * head_dim
    monkeypatch.setattr(cost, "one_pass_elements", lambda *_: elements)
    sizes = dict(num_heads=heads, block_m=128, block_n=64)
    schedule = zigzag_schedule(
        lengths, lengths, **sizes, mask=mask, key_tiles=True, head_dim=head_dim
    )
    expected = []
    for group in [(1, 2), (3, 0, 4)]:
        for block in range(64):
            expected += [
                [segment, head, block]
                for segment in group
                if 128 * block < lengths[segment]
                for head in range(heads)
            ]
    assert schedule.tiles.tolist() == expected
    assert schedule.num_tiles.tolist() == [len(expected)] * 2
    assert work_of(schedule, lengths, lengths, mask, key_tiles=True).tolist() == [
        -(-lengths[segment] // 64) - (2 * block if mask else 0) for segment, _, block in expected
    ]


@pytest.mark.parametrize("key_tiles", [False, True])
def test_tiles_under_a_mask_are_listed_in_groups_of_alternating_order(monkeypatch, key_tiles):
    """The first group begins with the blocks that have most work, the second one with those that
    have least."""
    # middles at rows 2198, 512, 1280, 1792 and 2398
    lengths, heads, head_dim = [300, 1024, 512, 512, 100], 2, 128
    monkeypatch.setattr(cost, "GROUP_ELEMENTS", 1536 * heads * head_dim)
    sizes = dict(num_heads=heads, block_m=128, block_n=64, mask=jm.AttentionMask(causal=True))
    schedule = zigzag_schedule(lengths, lengths, **sizes, key_tiles=key_tiles, head_dim=head_dim)
    expected = []
    for group, is_reversed in [((1, 2), False), ((3, 0, 4), True)]:
        for block in range(8) if key_tiles != is_reversed else reversed(range(8)):
            expected += [
                [segment, head, block]
                for segment in group
                if 128 * block < lengths[segment]
                for head in range(heads)
            ]
    assert schedule.tiles.tolist() == expected
    assert schedule.num_tiles.tolist() == [len(expected)] * 2
    by_work = zigzag_schedule(lengths, lengths, **sizes, key_tiles=key_tiles)
    works, of_groups = (
        work_of(x, lengths, lengths, sizes["mask"], key_tiles).tolist() for x in (by_work, schedule)
    )
    work = dict(zip(map(tuple, by_work.tiles.tolist()), works))
    assert of_groups == [work[tuple(tile)] for tile in expected]


@pytest.mark.parametrize("head_dim", [0, 64, 128])
@pytest.mark.parametrize(
    "mask, by_work",
    [
        (None, True),
        (jm.AttentionMask(causal=True), True),
        (jm.AttentionMask(causal=True, window=(500, None)), False),
        (jm.AttentionMask(window=(None, 300)), False),
    ],
    ids=str,
)
def test_which_lists_of_key_tiles_ascend(mask, by_work, head_dim):
    """Hopper's one-pass backward would be a deadlock with another list."""
    lengths, sizes = ([300, 700, 0, 2500, 128, 900], dict(num_heads=2, block_m=64, block_n=64))
    schedule = zigzag_schedule(
        lengths, lengths, **sizes, mask=mask, key_tiles=True, head_dim=head_dim
    )
    assert schedule.ascending == (by_work and (mask is None or head_dim < 128))
    blocks = {}
    for segment, head, block in schedule.tiles.tolist():
        blocks.setdefault((segment, head), []).append(block)
    if schedule.ascending:
        assert all(x == sorted(x) for x in blocks.values())


@pytest.mark.parametrize(
    "queries, num_other_heads, first",
    [([64] * 8, 2, 4), ([64] * 8, 4, 2), ([10, 200, 20, 300] * 2, None, 3)],
    ids=str,
)
def test_a_group_is_counted_by_the_rows_that_its_tiles_loop_over(
    monkeypatch, queries, num_other_heads, first
):
    """Targets: a history has 4,096 keys, 32 blocks, and a group 256 rows of queries of 2 heads, or
    as many rows of other heads."""
    monkeypatch.setattr(cost, "one_pass_elements", lambda *_: 256 * 2 * 64)
    monkeypatch.setattr(cost, "one_pass_minimum", lambda *_: cost.OnePassMinimum(0, 0))
    sizes = dict(
        num_heads=2,
        block_m=128,
        block_n=64,
        key_tiles=True,
        head_dim=64,
        num_other_heads=num_other_heads,
    )
    tiles = zigzag_schedule([4096] * 8, queries, **sizes).tiles
    assert (
        tiles[: first * 2 * 32, 0].unique().tolist() == list(range(first))
        and tiles[: first * 2, 2].tolist() == [0] * first * 2
    )


@pytest.mark.parametrize(
    "change",
    [
        dict(head_dim=0),
        dict(key_tiles=False),
        dict(lengths=[570, 900, 245]),
        dict(lengths=[360, 420, 306], head_dim=128),
        dict(lengths=[2559, 3000, 2000], head_dim=128, mask=jm.AttentionMask(causal=True)),
        dict(lengths=[2049] * 2, head_dim=128, mask=jm.AttentionMask(causal=True)),
        dict(lengths=[200, 300, 250], head_dim=128, mask=jm.AttentionMask(causal=True)),
        dict(lengths=[500], mask=jm.AttentionMask(causal=True)),
        dict(lengths=[500], mask=jm.AttentionMask(causal=True), key_tiles=False),
        dict(mask=jm.AttentionMask(window=(9, None))),
    ],
    ids=str,
)
def test_other_tiles_are_sorted_by_work(change):
    options = dict(lengths=[2048, 4096, 2048], head_dim=64, key_tiles=True, mask=None) | change
    lengths, sizes = (options.pop("lengths"), dict(num_heads=128, block_m=128, block_n=64))
    schedule = zigzag_schedule(lengths, lengths, **sizes, **options)
    assert torch.equal(
        schedule.tiles,
        zigzag_schedule(lengths, lengths, **sizes, **options | dict(head_dim=0)).tiles,
    )
    work = work_of(schedule, lengths, lengths, options["mask"], options["key_tiles"])
    assert work.diff().max() <= 0
