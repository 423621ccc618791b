"""Targets with histories in several levels: the kernels' log-sum-exp is in base 2."""

import pytest
import torch

from tests.jagged_modules.test_target_levels import Case


@pytest.mark.parametrize("name", ["two", "empty level", "no histories"])
def test_kernels(name):
    case = Case(name, heads=(4, 2), dims=(16, 16))
    found = case.run(torch.float32, implementation="triton")
    for x, y in zip(found, case.run(), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
