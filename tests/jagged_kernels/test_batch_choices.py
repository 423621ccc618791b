"""Choices that depend on the sizes of a batch, and do not under batch_invariant; without a GPU."""

import pytest
import torch
from jagged_kernels.common import device as launch

from jagged_modules.schedule import host_schedule


def test_parts_of_long_segments():
    def parts(num_rows, batch_invariant, max_seqlen=None):
        return launch.chunk_shift(num_rows, max_seqlen, 8, torch.device("cpu"), batch_invariant)

    assert parts(1000, False) != parts(100_000, False)
    assert (
        parts(10, True) == parts(1000, True) == parts(10_000_000, True) == parts(1000, True, 5000)
    )
    # no segment is longer: none is split
    assert parts(1000, True, 2**launch.INVARIANT_SHIFT) > parts(1000, True)


def test_a_single_row_is_aligned_as_many_are():
    rows, batch = torch.empty(9, 1, 5), (slice(1), slice(9))
    single, many = (launch.aligned_strides((rows[some], 0), (rows[some], 1)) for some in batch)
    assert single == many == (1, [5, 0])


def test_strides_past_int32_reach_kernels_whole():
    """Kernels multiply a stride by `align` in the stride's own type, which is int32 below 2^31."""
    # the stride of a head is 2^31
    heads_first = torch.empty(2, 2**28, 8, device="meta").transpose(0, 1)
    assert launch.row_and_head_strides(heads_first) == (1, [8, 2**31])
    assert launch.aligned_strides((heads_first, 0), (heads_first, 1)) == (1, [8, 2**31])
    assert launch.row_and_head_strides(heads_first[1:, :, :4].contiguous()) == (4, [2, 1])


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_tiles_of_schedules(capability):
    sizes = dict(
        num_heads=2, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, capability=capability
    )
    short, long = torch.tensor([3, 5]), torch.tensor([600, 700])
    by_length = [host_schedule(x, x, **sizes).block_m for x in (short, long)]
    fixed = [host_schedule(x, x, **sizes, batch_invariant=True).block_m for x in (short, long)]
    assert (
        by_length == ([64, 192] if capability == (9, 0) else [64, 128])
        and fixed == [by_length[1]] * 2
    )
