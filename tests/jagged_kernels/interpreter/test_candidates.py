"""Candidates grouped by user in one launch, beside a stable sort."""

import pytest
import torch
from jagged_kernels.schedule.candidates import group_candidates


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_candidates, num_users", [(1, 1), (64, 5), (300, 130), (700, 3)])
def test_groups_are_those_of_a_stable_sort(num_candidates, num_users, dtype):
    """Also of candidates of no user, whose index is out of range: they come last."""
    users = torch.randint(-1, num_users + 2, (num_candidates,), dtype=dtype)
    offsets, order, inverse = group_candidates(users, num_users)
    known = torch.where((users < 0) | (users >= num_users), num_users, users)
    expected, expected_order = torch.sort(known, stable=True)
    assert torch.equal(order, expected_order)
    assert torch.equal(order[inverse], torch.arange(num_candidates))
    steps = torch.arange(num_users + 1, dtype=dtype)
    assert torch.equal(offsets, torch.searchsorted(expected, steps))
