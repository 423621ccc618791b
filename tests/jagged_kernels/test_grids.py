"""Grids of large batches are within CUDA's limits, which `recorded_launches` checks: 65,535
programs in the second dimension."""

import pytest
import torch

pytest.importorskip("triton")

from jagged_kernels.precompile.recorder import recorded_launches

from jagged_modules import functional as F


@pytest.mark.parametrize("implementation", ["auto", "triton"])
def test_linear_compress_of_many_users(implementation):
    users = torch.randn(70_000, 2, 8)
    candidates = torch.randn(70_001, 3, 8)
    weights = (torch.randn(1, 2), torch.randn(1, 3))
    operands = [x.bfloat16().requires_grad_() for x in (*weights, users, candidates)]
    index = torch.arange(70_001) % 70_000
    with recorded_launches() as launches:
        F.linear_compress(
            operands[:2], operands[2:], index, implementation=implementation
        ).sum().backward()
    assert "sum_groups_kernel" in {x.kernel for x in launches}


@pytest.mark.parametrize("implementation", ["auto", "triton"])
@pytest.mark.parametrize("levels", [2, 3])
def test_compression_of_several_shared_levels_is_one_launch(implementation, levels):
    """In the backward, one launch sums the gradients of all of them."""
    depths, batches = [8, 24, 16, 40], [2, 3, 5, 9]
    weights = [torch.randn(4, k).bfloat16() for k in depths[-1 - levels :]]
    embeddings = [
        torch.randn(b, k, 128).bfloat16().requires_grad_() for b, k in zip(batches, depths)
    ]
    indices = [torch.arange(9) % b for b in batches[-1 - levels : -1]]
    with recorded_launches() as launches:
        F.linear_compress(
            weights, embeddings[-1 - levels :], indices, implementation=implementation
        ).sum().backward()
    names = [x.kernel for x in launches]
    assert sum("linear_compress_fwd" in name for name in names) == 1
    assert names.count("sum_groups_kernel") == 1
