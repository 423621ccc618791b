"""Grids of large batches are within CUDA's limits, which `recorded_launches` checks: 65,535
programs in the second dimension."""

import pytest
import torch

pytest.importorskip("triton")

from jagged_kernels.precompile.recorder import recorded_launches

from jagged_modules import functional as F


@pytest.mark.parametrize("implementation", ["auto", "triton"])
def test_linear_compress_of_many_users(implementation):
    users, candidates, weights = (
        torch.randn(70_000, 2, 8),
        torch.randn(70_001, 3, 8),
        (torch.randn(1, 2), torch.randn(1, 3)),
    )
    operands = [x.bfloat16().requires_grad_() for x in (*weights, users, candidates)]
    index = torch.arange(70_001) % 70_000
    with recorded_launches() as launches:
        F.linear_compress(
            operands[:2], operands[2:], index, implementation=implementation
        ).sum().backward()
    assert "sum_groups_kernel" in {x.kernel for x in launches}
