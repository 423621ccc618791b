"""Fixtures of these tests."""

import pytest

from jagged_modules.transforms import fuse


@pytest.fixture(autouse=True)
def eager_calls_run_the_graph(monkeypatch):
    """Also those of models so small that the host would issue the model faster: the graph is what
    is tested."""
    monkeypatch.setattr(fuse, "eager_calls_lose", lambda *_: False)
