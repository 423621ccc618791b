"""Marks: of tests and parameters that `make test` leaves out and `make test-slow` runs, and of GPU tests that have not run yet."""

import os
from collections.abc import Callable, Iterable

import pytest

SLOW = pytest.mark.slow

# A GPU test that was written without a GPU: `make test-gpu` leaves it out. Mark it gpu once it has passed on one.
UNPROVEN = (
    pytest.mark.gpu,
    pytest.mark.skipif("JAGGED_UNPROVEN" not in os.environ, reason="has not run on a GPU yet; JAGGED_UNPROVEN=1 runs it"),
)


def unproven(test: Callable) -> Callable:
    """Decorator: the marks of `UNPROVEN`."""
    for mark in UNPROVEN:
        test = mark(test)
    return test


def slow_after(number: int, names: str, values: Iterable, **options) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` with the values after the first `number` marked slow."""
    values, several = list(values), "," in names
    slow = [pytest.param(*(x if several else [x]), marks=SLOW) for x in values[number:]]
    return pytest.mark.parametrize(names, values[:number] + slow, **options)
