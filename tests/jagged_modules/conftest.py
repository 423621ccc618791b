"""Fixtures of these tests."""

import sys

import pytest

from jagged_modules import segments
from jagged_modules.containers import schedules


@pytest.fixture(params=["fbgemm", "torch"])
def conversions(request, monkeypatch):
    """The test runs with FBGEMM's operators and without."""
    if request.param == "fbgemm":
        pytest.importorskip("fbgemm_gpu")
    else:
        monkeypatch.delitem(sys.modules, "fbgemm_gpu", raising=False)


@pytest.fixture
def only_the_device_knows(monkeypatch):
    """Calls take the path of CUDA tensors whose offsets the host has not seen."""
    monkeypatch.setattr(segments, "values_are_checkable", lambda x: False)
    monkeypatch.setattr(segments.Segmentation, "lengths_on_host", lambda *_: None)


class Builds(list):
    """Names of the schedule builders that Jagged called, and the schedules that they built."""

    def __init__(self):
        super().__init__()
        self.schedules = []

    def counted(self, name):
        builder = getattr(schedules, name)

        def build(*args, **kwargs):
            self.append(name)
            self.schedules.append(builder(*args, **kwargs))
            return self.schedules[-1]

        return build


@pytest.fixture
def builds(monkeypatch):
    builds = Builds()
    for name in ("host_schedule", "device_schedule"):
        monkeypatch.setattr(schedules, name, builds.counted(name))
    return builds
