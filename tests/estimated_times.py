"""Calls of fused models that take as long as the estimates say: no test depends on a clock."""

import contextlib
import types

import pytest

from jagged_modules.transforms import fuse
from jagged_modules.transforms.timing import Times


@contextlib.contextmanager
def estimated_times():
    """Eager calls are as fast as the model."""
    before = {}

    class Placement(fuse.Placement):
        def __init__(self, captured, batch, point, points):
            super().__init__(captured, batch, point, points)
            before[point] = self.plan.before.total

        def _calls(self, example, names, point):
            own = Times(before[point], self.costs[point], "estimates"), Times(1, 1, "eager calls")
            return types.SimpleNamespace(times=lambda graph, through: own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuse, "Placement", Placement)
        yield
