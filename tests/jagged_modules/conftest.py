"""Fixtures of these tests."""

import sys

import pytest


@pytest.fixture(params=["fbgemm", "torch"])
def conversions(request, monkeypatch):
    """The test runs with FBGEMM's operators and without."""
    if request.param == "fbgemm":
        pytest.importorskip("fbgemm_gpu")
    else:
        monkeypatch.delitem(sys.modules, "fbgemm_gpu", raising=False)
