"""Marks of tests and parameters that `make test` leaves out and `make test-slow` runs."""

from collections.abc import Iterable

import pytest

SLOW = pytest.mark.slow
# seconds after which a test that waits for something fails; one that passes takes a few, on a busy
# machine too
PATIENCE = 600.0


def slow_after(number: int, names: str, values: Iterable, **options) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` with the values after the first `number` marked slow."""
    values, several = list(values), "," in names
    slow = [pytest.param(*(x if several else [x]), marks=SLOW) for x in values[number:]]
    return pytest.mark.parametrize(names, values[:number] + slow, **options)
