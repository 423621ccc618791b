"""The limit of the memory that Hopper's backward takes besides its results, without a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from jagged_kernels.attention.hopper.launch import workspace_limit


def test_the_default_limit_is_2_gib_or_the_gradients_size():
    small, large = (torch.empty(rows, 1024, device="meta") for rows in (2, 2**20))
    assert workspace_limit(None, small, small, small) == 2**31
    assert workspace_limit(None, large, small, large) == 2 * 2**32 + 2**13


def test_a_limit_of_the_setting_holds():
    assert [workspace_limit(x, torch.empty(2, 1024)) for x in (0, 2**16, 2**40)] == [
        0,
        2**16,
        2**40,
    ]
