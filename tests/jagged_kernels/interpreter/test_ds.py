"""The Triton kernels beside the dS workspace of Hopper's backward, in Triton's interpreter."""

import pytest
import torch


@pytest.mark.parametrize("query_block", [64, 128])
@pytest.mark.parametrize("capacity", [0, 3, 40, 10_000])
def test_first_blocks_of_ds(check_ds_blocks, capacity, query_block):
    check_ds_blocks(capacity, query_block, "cpu")


def test_delta(check_delta):
    check_delta(torch.float16, "cpu")
