"""Calls of fused models that take as long as the estimates say: no test depends on a clock."""

import contextlib

import pytest

from jagged_modules.transforms import fuse
from jagged_modules.transforms.timing import Times


class _Estimated:
    def __init__(self, placement):
        self.placement = placement

    def times(self, graph, through):
        own = Times(self.placement.plan.before.total, self.placement.after.total, "estimates")
        return own, Times(1, 1, "eager calls")


@contextlib.contextmanager
def estimated_times():
    """Eager calls are as fast as the model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuse.Placement, "_calls", lambda placement, *_: _Estimated(placement))
        yield
