"""The size of the workspace for dS in Hopper's backward, without a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from jagged_kernels.attention.hopper_ds import plan_workspace


def test_workspace_of_ds():
    def plan(segments, rows, dim=128, workspace=None):
        q, offsets = (
            torch.empty(segments * rows, 4, dim, dtype=torch.bfloat16, device="meta"),
            torch.empty(segments + 1),
        )
        blocks, parts = plan_workspace(q, q, offsets, offsets, workspace, q, q, q)
        assert [start for start, _ in parts[1:]] == [end for _, end in parts[:-1]]
        assert not parts or (parts[0][0], parts[-1][1]) == (0, segments)
        return blocks * 8192, len(parts)

    size, parts = plan(64, 1024)
    assert 64 * 4 * 16**2 * 8192 < size < 2**31 and parts == 1
    assert plan(64, 200) == plan(4096, 100) == plan(64, 1024, dim=64) == plan(2, 30_000) == (0, 0)
    assert plan(64, 1024, workspace=2**29) == (2**29, 2)
    assert plan(64, 1024, workspace=0) == (0, 0)
    assert plan(32, 4096) == (2**31, 3)
    assert plan(576, 2048) == (3 * 576 * 2048 * 4 * 128 * 2 // 8192 * 8192, 8)
