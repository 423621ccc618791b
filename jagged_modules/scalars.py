"""Checks of arguments that are numbers, flags or names, and of an argument's type; tensors as lists
of ints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_ints(x: Tensor) -> list[int]:
    """The values of a 1-D integer or bool tensor. Reading them waits for a device."""
    values: Any = x  # torch types the result as a list of anything
    return values.tolist()


def bucket_of(size: int, steps: int, unit: int) -> tuple[int, int]:
    """size rounded up to a multiple of `unit` of which an octave has `steps`, and the distance to
    the next smaller one."""
    unit = max(unit, (1 << max(0, (size - 1).bit_length() - 1)) // steps)
    return max(1, -(-size // unit)) * unit, unit


def rounded_size(size: int, steps: int = 16) -> int:
    """A number of rows rounded up, so that cuBLAS sees `steps` different ones in an octave."""
    return bucket_of(size, steps, 8)[0]


def is_sequence(x: object) -> bool:
    """Whether x is a list or a tuple. A function, so that type checkers keep the declared type of
    x."""
    return isinstance(x, (list, tuple))


def check_size(name: str, value: object, at_least: int = 1) -> None:
    """TypeError unless value is an int or a symbolic int, ValueError if it is below `at_least`."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        jit: Any = torch.jit  # is_tracing has no annotation
        traced = isinstance(value, Tensor) and jit.is_tracing()
        hint = ": torch.jit.trace makes tensors of sizes; use torch.export" if traced else ""
        raise TypeError(f"{name} must be an int, got {type(value).__name__}{hint}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")


def check_sizes(owner: object, *names: str, at_least: int = 1, optional: bool = False) -> None:
    """`check_size` of these attributes. optional: None is allowed."""
    for name in names:
        value = getattr(owner, name)
        if value is not None or not optional:
            check_size(name, value, at_least)


def check_number(
    name: str, value: object, low: float = -math.inf, high: float = math.inf, what: str = "a number"
) -> None:
    """TypeError unless value is a number or a symbolic number, ValueError unless it is finite and
    low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be {what}, got {type(value).__name__}")
    # The largest float is written out: torch.compile would make a symbol of a constant of the
    # module, and compile twice.
    if not (low <= value <= high and -1.7976931348623157e308 <= value <= 1.7976931348623157e308):
        bounds = f"{low} to {high}"
        if high == math.inf:
            bounds = "finite" if low == -math.inf else f"finite and at least {low}"
        raise ValueError(f"{name} must be {bounds}, got {value}")


def check_choice(
    name: str, value: object, choices: Sequence[str | None], expected: str = ""
) -> None:
    """ValueError unless value is one of the choices, which the message lists, or calls
    `expected`."""
    # an array would compare its elements
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise ValueError(f"{name} must be {expected or f'one of {choices}'}, got {value!r}")


def possessive(name: str) -> str:
    """The name of an argument with the ending of the possessive, for messages: x's, targets'."""
    return f"{name}'" if name.endswith("s") else f"{name}'s"


def check_kind(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """TypeError unless value is an instance of `kind`, which the message calls `expected`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}")


def check_equal(name: str, must: str, expected: object, found: object) -> None:
    """ValueError unless both are equal. must: what the message says of `name` before `expected`,
    such as "have q's rows"."""
    if found != expected:
        raise ValueError(f"{name} must {must}, {expected}, got {found}")


def check_shape(name: str, x: Tensor, letters: str, *sizes: int) -> None:
    """ValueError unless x has these sizes, which the message calls `letters`, such as "[B, D]"."""
    if x.shape != sizes:
        raise ValueError(f"{name} must have shape {letters} = {list(sizes)}, got {list(x.shape)}")


def check_flag(name: str, value: object) -> None:
    """TypeError unless value is a bool. Other values, such as "off", would silently count as True
    or False."""
    check_kind(name, value, bool, "a bool")
