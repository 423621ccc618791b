"""Parameters that `make test` leaves out."""

from collections.abc import Sequence

import pytest

SLOW = pytest.mark.slow


def slow_after(number: int, names: str, values: Sequence, **options) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` with all values after the first `number` marked slow: they test other numbers, not other code."""
    several = "," in names
    values = list(values)
    others = [pytest.param(*(x if several else (x,)), marks=SLOW) for x in values[number:]]
    return pytest.mark.parametrize(names, values[:number] + others, **options)
