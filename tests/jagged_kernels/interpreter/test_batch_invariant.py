"""A segment gives the same bits alone and in any batch under jm.batch_invariant(True): the portable
kernels in Triton's interpreter."""

import numpy as np
import pytest
import torch
from marks import slow_after

pytest.importorskip("triton")

from ...batch_invariance import check, names, operators

NOT_KERNELS = {"layer-norm", "concat", "dense-mul"}


@pytest.fixture(autouse=True)
def exact_dot(monkeypatch):
    """The interpreter's tl.dot calls BLAS. On some processors its last bits depend on the row's
    position in the tile; a GPU's do not."""
    matmul = np.matmul
    monkeypatch.setattr(
        np, "matmul", lambda a, b, dtype: matmul(a, b, dtype=np.float64).astype(dtype)
    )


@pytest.mark.parametrize(
    "name", names(x for x in operators("cpu", torch.float32) if x not in NOT_KERNELS)
)
def test_operators(name):
    check(
        operators("cpu", torch.float32, implementation="triton")[name],
        [0, 1, 17, 65],
        [5, 33],
        4,
        most=2,
    )


@slow_after(1, "name", ["jagged-bmm", "softmax", "linear-segments"])
def test_long_segments(name, monkeypatch):
    """Long segments are cut into parts. By default, the parts depend on the other rows of the
    batch."""
    monkeypatch.setattr("jagged_kernels.common.device.INVARIANT_SHIFT", 5)
    check(
        operators("cpu", torch.float32, implementation="triton")[name],
        [0, 1, 70, 300],
        [90],
        4,
        most=3,
    )


@pytest.mark.slow
def test_long_segments_of_16_bits():
    """By default, the tiles of their schedules depend on the mean length."""
    check(
        operators("cpu", torch.float16, dim=16, implementation="triton")["attention"],
        [1, 300],
        [130],
        3,
        most=2,
    )
