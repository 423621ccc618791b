"""Fixtures of these tests."""

import pytest
from estimated_times import estimated_times


@pytest.fixture(scope="module", autouse=True)
def times():
    with estimated_times():
        yield
