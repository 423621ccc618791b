"""The host side of RelativeBias in the kernels: the table of leading bits, the kernels' argument, the final sums of gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad

import jagged_modules as jm

pytest.importorskip("triton")

from jagged_kernels.attention.bias import LEADING, LEADING_SHIFT, PAD  # noqa: E402
from jagged_kernels.attention.bias_tables import TableGradients, _bucket_tables, _entries, empty_table_gradients, kernel_bias  # noqa: E402
from jagged_kernels.attention.params import AttentionParams  # noqa: E402

LARGEST = 2**63 - 1
MOST = 2**31 - 2  # the kernels take greater distances elsewhere
MAGNITUDES = st.integers(0, 63).flatmap(lambda bits: st.integers(0, 2**bits - 1))  # as many small ones as large ones
SMALL_MAGNITUDES = st.integers(0, 31).flatmap(lambda bits: st.integers(0, min(2**bits - 1, MOST)))


def found_buckets(distances, edges, leading_bits):
    """As `bucket_block` finds them."""
    buckets = leading_bits[distances.int().float().view(torch.int32) >> LEADING_SHIFT.value]
    for _ in range(int(leading_bits[LEADING.value])):
        buckets = buckets + (edges[buckets.long()] <= distances)
    return buckets


def found_entries(distances, entries):
    """The values and buckets that the kernels for Hopper find in the entries of one head."""
    edge, below, above, buckets = entries[:-4].view(-1, 4)[distances.int().float().view(torch.int32) >> LEADING_SHIFT.value].unbind(1)
    reached = distances >= edge
    return torch.where(reached, above, below).view(torch.float32), torch.where(reached, buckets >> 16, buckets & 0xFFFF)


def assert_right(boundaries, distances):
    edges, leading_bits, last = _bucket_tables(boundaries)
    assert edges.dtype == leading_bits.dtype == torch.int32
    assert edges.shape == (len(boundaries) + 1,) and leading_bits.shape == (LEADING.value + 1,)
    expected = torch.bucketize(distances, boundaries, right=True)
    assert torch.equal(found_buckets(distances, edges, leading_bits).long(), expected)
    time = torch.randn(2, len(boundaries) + 1)
    entries = _entries(time, edges, leading_bits[:-1], last)
    assert entries.dtype == torch.int32 and entries.shape == (2, 4 * LEADING.value + 4)
    if entries[0, -1]:
        for head in range(2):
            values, buckets = found_entries(distances, entries[head])
            assert torch.equal(buckets.long(), expected) and torch.equal(values, time[head, expected])


@given(st.lists(MAGNITUDES, max_size=300), st.lists(SMALL_MAGNITUDES, min_size=1, max_size=100))
def test_buckets_are_those_of_bucketize(boundaries, distances):
    """Also at, below and above each boundary."""
    near = [edge + step for edge in boundaries for step in (-1, 0, 1) if 0 <= edge + step <= MOST]
    assert_right(torch.tensor(sorted(boundaries), dtype=torch.int64), torch.tensor([*distances, *near]))


@given(st.integers(0, MOST), st.integers(1, 300), st.integers(0, 3))
def test_many_boundaries_with_the_same_leading_bits(first, count, step):
    """All of them are compared. A step of 0: duplicates."""
    boundaries = first + step * torch.arange(count)
    distances = torch.cat([boundaries + by for by in (-1, 0, 1)]).clamp(0, MOST)
    assert_right(boundaries, distances)


def test_all_edges_of_the_leading_bits():
    """Distances whose rounding to fp32 crosses a power of 2, and every value of the leading bits."""
    powers = 2 ** torch.arange(31)
    steps = (powers[:, None] * torch.arange(8, 16) // 8).flatten()
    distances = torch.cat([x + by for x in (powers, steps) for by in range(-70, 71)]).clamp(0, MOST)
    for count in (0, 1, 7, 128, 145, 300):
        assert_right(jm.RelativeBias.log_boundaries(count), distances)
    assert_right(torch.tensor([-(2**40), -1, 0, 0, MOST, MOST + 1, 2**31, LARGEST]), distances)


def test_the_default_boundaries_need_few_comparisons():
    """At most as many as have the same three bits after the first."""
    for count in (1, 20, 128):
        edges, leading_bits, last = _bucket_tables(jm.RelativeBias.log_boundaries(count))
        assert int(leading_bits[LEADING.value]) <= 2
        assert _entries(torch.zeros(1, count + 1), edges, leading_bits[:-1], last)[0, -1], "no leading bits have two boundaries"
    edges, leading_bits, last = _bucket_tables(torch.tensor([1000, 1010, 1020]))
    assert not _entries(torch.zeros(1, 4), edges, leading_bits[:-1], last)[0, -1]


def params(position=None, time=None, **fields):
    return AttentionParams(0.25, False, "softmax", None, 1.0, False, True, None, None, position, time, **fields)


def test_the_kernels_argument():
    position, times = torch.arange(10.0).view(2, 5), torch.arange(3)
    assert kernel_bias(params()) is None
    bias = kernel_bias(params(position, query_shift=times))
    assert bias.num_positions == 5 + 2 * PAD.value == bias.position_stride and bias.inverse_scale == 4
    assert torch.equal(bias.position_ptr[:, PAD.value - 1 : PAD.value + 6], pad(position, (1, 1), mode="replicate"))
    assert bias.query_shift_ptr is times and bias.time_ptr is bias.boundaries_ptr is bias.edges_ptr is bias.timestamps_ptr is None
    bias = kernel_bias(params(position[:1], torch.zeros(1, 4), timestamps=times, boundaries=torch.arange(3)))
    assert bias.position_stride == bias.time_stride == 0 and bias.num_boundaries == 3 and bias.query_timestamps_ptr is None


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("threads", [None, 128])
def test_final_sums(threads, heads):
    """Of all parts; the padding's sums belong to the first and the last entry of a position table."""
    given = params(torch.zeros(heads, 9), torch.zeros(heads, 6), timestamps=torch.zeros(1).long(), boundaries=torch.arange(5))
    sums = TableGradients.empty(given, 4, torch.device("cpu"), threads, block=None if threads else 64)
    assert not sums.position.any() and not sums.time.any() and (sums.scratch is None) == (threads is not None)
    sums.position.copy_(torch.randint(9, sums.position.shape)), sums.time.copy_(torch.randint(9, sums.time.shape))
    dposition, dtime = sums.results(given, torch.zeros(1))
    total = sums.position.sum(0)
    first, last = total[:, : PAD.value + 1].sum(1), total[:, -PAD.value - 1 :].sum(1)
    assert torch.equal(dposition, torch.cat([first[:, None], total[:, PAD.value + 1 : -PAD.value - 1], last[:, None]], 1))
    of_buckets = sums.time.sum(0) if threads is None else sums.time.sum((0, 3))
    assert torch.equal(dtime, of_buckets[:, :6]) and dtime.is_contiguous()


def test_no_gradients():
    none = params(torch.zeros(1, 9))._replace(table_gradients=False)
    assert [x.shape for x in empty_table_gradients(none, torch.zeros(1))] == [(0,), (0,)]
    assert TableGradients.empty(params(torch.zeros(1, 9)), 4, torch.device("cpu"), block=64).buckets == 1
