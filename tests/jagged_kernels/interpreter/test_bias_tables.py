"""RelativeBias around the attention kernels: the tables that find buckets, the kernels' argument,
the final sums of gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad
from torch.testing import assert_close

import jagged_modules as jm

pytest.importorskip("triton")

from jagged_kernels.attention.bias import LEADING, LEADING_SHIFT, PAD
from jagged_kernels.attention.bias_tables import TableGradients, empty_table_gradients, kernel_bias
from jagged_kernels.attention.params import AttentionParams, Segments

SCALE = 0.25
LARGEST = 2**63 - 1
MOST = 2**31 - 2  # the kernels take greater distances elsewhere
# as many small ones as large ones
MAGNITUDES = st.integers(0, 63).flatmap(lambda bits: st.integers(0, 2**bits - 1))
SMALL_MAGNITUDES = st.integers(0, 31).flatmap(lambda bits: st.integers(0, min(2**bits - 1, MOST)))


def params(position=None, time=None, **fields):
    fields |= dict(position_bias=position, time_bias=time)
    return AttentionParams(SCALE, table_gradients=True, **fields)


# without segments there are no timestamps
NO_ROWS = Segments(torch.tensor([0]), torch.tensor([0]))


def bucket_tables(boundaries, time, entries=True):
    """edges, leading bits and entries as the kernel makes them."""
    given = params(None, time, boundaries=boundaries, timestamps=torch.zeros(0, dtype=torch.int64))
    bias = kernel_bias(given, NO_ROWS if entries else None)
    return bias.edges_ptr, bias.leading_bits_ptr, bias.entries_ptr


def found_buckets(distances, edges, leading_bits):
    """As `bucket_block` finds them."""
    buckets = leading_bits[distances.int().float().view(torch.int32) >> LEADING_SHIFT.value]
    for _ in range(int(leading_bits[LEADING.value])):
        buckets = buckets + (edges[buckets.long()] <= distances)
    return buckets


def found_entries(distances, entries):
    """The values and buckets that the kernels for Hopper find in the entries of one head."""
    edge, below, above, buckets = (
        entries[:-4]
        .view(-1, 4)[distances.int().float().view(torch.int32) >> LEADING_SHIFT.value]
        .unbind(1)
    )
    reached = distances >= edge
    return torch.where(reached, above, below).view(torch.float32), torch.where(
        reached, buckets >> 16, buckets & 0xFFFF
    )


def expected_tables(boundaries, time):
    """The tables, from the rule.

    The distances with some leading bits are an interval. Its ends' buckets are the first and the
    last that these distances have. Rounding to fp32 may move a distance up, to the next bits, so
    the interval begins 2^-22 of itself earlier.
    """
    begins = (
        (torch.arange(LEADING.value + 1, dtype=torch.int32) << LEADING_SHIFT.value)
        .view(torch.float32)
        .double()
    )
    lowest, highest = (begins[:-1] * (1 - 2**-22)).ceil().long(), begins[1:].ceil().long() - 1
    first = torch.bucketize(lowest, boundaries, right=True)
    last = torch.bucketize(highest, boundaries, right=True).maximum(first)
    edges = torch.cat([boundaries.clamp(max=2**31 - 1), torch.tensor([2**31 - 1])]).int()
    leading_bits = torch.cat([first, (last - first).max()[None]]).int()
    words = (time / SCALE).view(torch.int32)
    one_boundary = all(
        len(set(edges[a:b].tolist())) <= 1 for a, b in zip(first.tolist(), last.tolist())
    )
    entries = [
        torch.stack(
            [edges[first], of_head[first], of_head[last], (first + last * 2**16).int()], 1
        ).flatten()
        for of_head in words
    ]
    return (
        edges,
        leading_bits,
        torch.stack([torch.cat([x, torch.tensor(4 * [one_boundary])]) for x in entries]),
    )


def assert_right(boundaries, distances):
    """Two heads have tables of their own; a table that heads share has the entries of a table of
    one head."""
    time = torch.randn(2, len(boundaries) + 1)
    tables = edges, leading_bits, entries = bucket_tables(boundaries, time)
    assert all(
        x.dtype == torch.int32 and torch.equal(x, y)
        for x, y in zip(tables, expected_tables(boundaries, time), strict=True)
    )
    assert torch.equal(bucket_tables(boundaries, time[1:])[2], entries[1:])
    *same, none = bucket_tables(boundaries, time, entries=False)
    assert none is None and all(torch.equal(x, y) for x, y in zip(same, tables))
    expected = torch.bucketize(distances, boundaries, right=True)
    assert torch.equal(found_buckets(distances, edges, leading_bits).long(), expected)
    if entries[0, -1]:
        for head in range(2):
            values, buckets = found_entries(distances, entries[head])
            assert torch.equal(buckets.long(), expected) and torch.equal(
                values, time[head, expected] / SCALE
            )


@given(st.lists(MAGNITUDES, max_size=300), st.lists(SMALL_MAGNITUDES, min_size=1, max_size=100))
def test_buckets_are_those_of_bucketize(boundaries, distances):
    """Also at, below and above each boundary."""
    near = [edge + step for edge in boundaries for step in (-1, 0, 1) if 0 <= edge + step <= MOST]
    assert_right(
        torch.tensor(sorted(boundaries), dtype=torch.int64), torch.tensor([*distances, *near])
    )


@given(st.integers(0, MOST), st.integers(1, 300), st.integers(0, 3))
def test_many_boundaries_with_the_same_leading_bits(first, count, step):
    """All of them are compared. A step of 0: duplicates."""
    boundaries = first + step * torch.arange(count)
    distances = torch.cat([boundaries + by for by in (-1, 0, 1)]).clamp(0, MOST)
    assert_right(boundaries, distances)


EXTREMES = [
    [-(2**40), -1, 0, 0, MOST, MOST + 1, 2**31, LARGEST],
    [-LARGEST - 1],
    [-LARGEST - 1] * 3 + [LARGEST] * 14,
    [0],
    [MOST + 1] * 16,
    [LARGEST],
]


def test_all_edges_of_the_leading_bits():
    """Distances whose rounding to fp32 crosses a power of 2, and every value of the leading
    bits."""
    powers = 2 ** torch.arange(31)
    steps = (powers[:, None] * torch.arange(8, 16) // 8).flatten()
    distances = torch.cat([x + by for x in (powers, steps) for by in range(-70, 71)]).clamp(0, MOST)
    for count in (0, 1, 7, 128, 145, 300):
        assert_right(jm.RelativeBias.log_boundaries(count), distances)
    for boundaries in EXTREMES:
        assert_right(torch.tensor(boundaries), distances)
    assert_right(steps.unique(), distances)  # each first number with leading bits


def test_any_value_is_kept():
    """NaNs, infinities, zeros of both signs and denormal numbers."""
    boundaries = torch.tensor([3, 1000])
    time = torch.tensor([[math.nan, -math.inf, -0.0], [0.0, 2.0**-149, math.inf]])
    for table in (time, time[:1]):
        bias = kernel_bias(
            params(
                None, table, boundaries=boundaries, timestamps=torch.zeros(0, dtype=torch.int64)
            ),
            NO_ROWS,
        )
        assert_close(bias.time_ptr, table / SCALE, rtol=0, atol=0, equal_nan=True)
        for head, entries in enumerate(bias.entries_ptr):
            values, buckets = found_entries(torch.tensor([0, 2, 3, 999, 1000, MOST]), entries)
            assert_close(
                values, table[head, [0, 0, 1, 1, 2, 2]] / SCALE, rtol=0, atol=0, equal_nan=True
            )
            assert buckets.tolist() == [0, 0, 1, 1, 2, 2]


def test_the_default_boundaries_need_few_comparisons():
    """At most as many as have the same three bits after the first."""
    for count in (1, 20, 128):
        _, leading_bits, entries = bucket_tables(
            jm.RelativeBias.log_boundaries(count), torch.zeros(1, count + 1)
        )
        assert int(leading_bits[LEADING.value]) <= 2
        assert entries[0, -1], "no leading bits have two boundaries"
    assert not bucket_tables(torch.tensor([1000, 1010, 1020]), torch.zeros(1, 4))[2][0, -1]


def test_the_kernels_argument():
    position, times = torch.arange(10.0).view(2, 5), torch.arange(3)
    segments = Segments(torch.tensor([0, 2]), torch.tensor([0, 3]))
    assert kernel_bias(params(), segments, 2) is None
    bias = kernel_bias(params(position, query_shift=times), segments, 2)
    assert bias.num_positions == 5 + 2 * PAD.value == bias.position_stride
    assert torch.equal(
        bias.position_ptr[:, PAD.value - 1 : PAD.value + 6],
        pad(position / SCALE, (1, 1), mode="replicate"),
    )
    assert (
        bias.query_shift_ptr is times
        and bias.time_ptr is bias.boundaries_ptr is bias.edges_ptr is bias.timestamps_ptr is None
    )
    assert (
        bias.entries_ptr
        is bias.entries_stride
        is bias.query_extremes_ptr
        is bias.key_extremes_ptr
        is None
    )
    given = params(position[:1], torch.zeros(1, 4), timestamps=times, boundaries=torch.arange(3))
    bias = kernel_bias(given, segments, 2)
    assert bias.position_stride == bias.time_stride == bias.entries_stride == 0
    assert bias.num_boundaries == 3 and bias.query_timestamps_ptr is None
    portable = kernel_bias(given)
    assert portable.entries_ptr is portable.query_extremes_ptr is portable.key_extremes_ptr is None
    given = given._replace(time_bias=torch.zeros(2, 4))
    assert kernel_bias(given, segments, 2).entries_stride == 4 * LEADING.value + 4


@pytest.mark.parametrize("heads, entries", [(1, 1), (3, 5), (2, 601)])
def test_position_tables_are_padded_with_their_ends(heads, entries):
    """In one launch with the tables that find buckets, and alone."""
    position = torch.randn(heads, entries)
    time = torch.randn(2, 21)
    boundaries = jm.RelativeBias.log_boundaries(20)
    expected = pad(position / SCALE, (PAD.value, PAD.value), mode="replicate")
    assert torch.equal(kernel_bias(params(position)).position_ptr, expected)
    times = torch.arange(3)
    bias = kernel_bias(
        params(position, time, boundaries=boundaries, timestamps=times),
        Segments(*[torch.tensor([0, 3])] * 2),
        3,
    )
    assert torch.equal(bias.position_ptr, expected)
    tables = bias.edges_ptr, bias.leading_bits_ptr, bias.entries_ptr
    assert all(
        torch.equal(x, y) for x, y in zip(tables, expected_tables(boundaries, time), strict=True)
    )


@pytest.mark.parametrize("query_times", [False, True])
def test_extremes_of_timestamps(query_times):
    """And the timestamps after the earliest, of each 64 rows of a segment: empty, short and long
    ones, with timestamps in any order."""
    q_lens = [0, 5, 64, 65, 1500, 1]
    kv_lens = [3, 0, 200, 65, 1111, 70]
    shifts = [-2, 0, 100, 0, 3, 69]
    q_offsets, kv_offsets = (torch.tensor([0, *x]).cumsum(0).int() for x in (q_lens, kv_lens))
    times = torch.randint(-(2**62), 2**62, (sum(kv_lens),))
    of_queries = torch.randint(-(2**62), 2**62, (sum(q_lens),))
    # positions of the first queries, as kv_len - q_len + this
    shift = torch.tensor(shifts) - q_offsets.diff().neg().add(kv_offsets.diff())
    given = params(
        None,
        torch.zeros(1, 2),
        timestamps=times,
        boundaries=torch.tensor([5]),
        query_shift=shift.long(),
    )
    given = given._replace(query_timestamps=of_queries if query_times else None)
    bias = kernel_bias(given, Segments(q_offsets, kv_offsets), sum(q_lens))
    for segment, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens)):
        keys = times[kv_offsets[segment] : kv_offsets[segment + 1]]
        if query_times:
            queries = of_queries[q_offsets[segment] : q_offsets[segment + 1]]
        elif kv_len:
            queries = keys[(torch.arange(q_len) + shifts[segment] + 1).clamp(0, kv_len - 1)]
        else:
            queries = torch.zeros(q_len, dtype=torch.int64)
        for extremes, start, rows in (
            (bias.query_extremes_ptr, q_offsets, queries),
            (bias.key_extremes_ptr, kv_offsets, keys),
        ):
            for block, stamps in enumerate(rows.split(64) if len(rows) else ()):
                record = extremes[int(start[segment]) // 64 + segment + block]
                assert record[:2].tolist() == [int(stamps.min()), int(stamps.max())]
                after = (stamps - stamps.min()).to(torch.int32)
                after = torch.cat([after, after[-1:].expand(64 - len(after))])
                assert torch.equal(record[2:].view(torch.int32), after)


@pytest.mark.parametrize("threads", [None, 128])
@pytest.mark.parametrize(
    "parts, heads, positions, buckets",
    [
        (4, (1, 1), 9, 6),
        (300, (1, 2), 65, 2),
        (70, (3, 1), 1, 1),
        (3, (2, 3), 32, 33),
        (3, (2, None), 33, 0),
        (3, (None, 1), 0, 129),
        (0, (2, 1), 3, 3),
    ],
)
def test_final_sums(parts, heads, positions, buckets, threads):
    """Of all parts, at most 8192 numbers at a time; the padding's sums belong to the first and the
    last entry of a position table."""
    position, time = (
        None if n is None else torch.zeros(n, entries)
        for n, entries in zip(heads, (positions, buckets))
    )
    given = params(position, time)
    sums = TableGradients.empty(
        given, parts, torch.device("cpu"), threads, block=None if threads else 64
    )
    for x in sums[:2]:
        if x is not None:
            assert not x.any()
            x.copy_(torch.randint(9, x.shape))
    dposition, dtime = sums.results(given, torch.zeros(1))
    if position is None:
        assert dposition.shape == (0,) and sums.position is None
    else:
        index = (torch.arange(positions + 2 * PAD.value) - PAD.value).clamp(0, positions - 1)
        assert torch.equal(
            dposition, torch.zeros(heads[0], positions).index_add_(1, index, sums.position.sum(0))
        )
        assert (sums.scratch is None) == (threads is not None)
    if time is None:
        assert dtime.shape == (0,) and sums.time is None
    else:
        assert torch.equal(dtime, sums.time.sum((0, 3))[:, :buckets]) and dtime.is_contiguous()


def test_final_sums_are_accurate():
    """Each positive term is in at most 2 · 9 + 13 additions: of parts, of one tile of 8192 sums,
    and of the padding."""
    given = params(torch.zeros(1, 40), torch.zeros(2, 5))
    sums = TableGradients.empty(given, 300, torch.device("cpu"), 128)
    (
        sums.position.copy_(torch.randn(sums.position.shape).exp()),
        sums.time.copy_(torch.randn(sums.time.shape).exp()),
    )
    dposition, dtime = sums.results(given, torch.zeros(1))
    index = (torch.arange(40 + 2 * PAD.value) - PAD.value).clamp(0, 39)
    exact = (
        torch.zeros(1, 40).double().index_add_(1, index, sums.position.double().sum(0)),
        sums.time.double().sum((0, 3)),
    )
    for sum, expected in zip((dposition, dtime), exact):
        torch.testing.assert_close(sum.double(), expected, rtol=31 * 2**-24, atol=0)


def test_no_gradients():
    none = params(torch.zeros(1, 9))._replace(table_gradients=False)
    assert [x.shape for x in empty_table_gradients(none, torch.zeros(1))] == [(0,), (0,)]
    assert (
        TableGradients.empty(params(torch.zeros(1, 9)), 4, torch.device("cpu"), block=64).buckets
        == 1
    )
