"""Marks of tests and parameters that `make test` leaves out and `make test-slow` runs."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import pytest
import torch

SLOW = pytest.mark.slow
# seconds after which a test that waits for something fails; one that passes takes a few, on a busy
# machine too
PATIENCE = 600.0
ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]


def slow_after(number: int, names: str, values: Iterable, **options) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` with the values after the first `number` marked slow."""
    values, several = list(values), "," in names
    slow = [pytest.param(*(x if several else [x]), marks=SLOW) for x in values[number:]]
    return pytest.mark.parametrize(names, values[:number] + slow, **options)


def diagonal_first(*lists: Iterable) -> list[tuple]:
    """All combinations of values of several lists, for `slow_after`. First the first values, then
    the second ones, and so on, a shorter list from its beginning again: so each value is in one of
    as many combinations as the longest list has. A value that is a tuple gives its elements."""
    values: list[Sequence] = [list(x) for x in lists]
    first = [tuple(x[i % len(x)] for x in values) for i in range(max(map(len, values)))]
    others = [x for x in itertools.product(*values) if x not in first]
    return [
        tuple(y for x in combination for y in (x if isinstance(x, tuple) else (x,)))
        for combination in first + others
    ]


def raising(error: type[Exception], cases: Mapping[str, object]) -> list[tuple]:
    """Rows for `pytest.mark.parametrize`, each (*cause, error, message), from message: cause. A
    cause that is a tuple is several values."""
    return [
        (*(x if isinstance(x, tuple) else (x,)), error, message) for message, x in cases.items()
    ]
