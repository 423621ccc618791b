"""Checks of the users that a caller of PagedHistoryCache names."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from ..scalars import check_kind, is_sequence


def check_sequence(users: Any) -> None:
    """Others may end after one pass, or have no order. The characters of a text are no users."""
    if not is_sequence(users):
        raise TypeError(f"users must be a list or a tuple of keys, got {type(users).__name__}")
    check_keys(users)


def listed_users(users: Any) -> list[Hashable]:
    """The users of an iterable, which may be a generator."""
    if isinstance(users, (str, bytes)):
        raise TypeError(f"users must be an iterable of keys, got the one key {users!r}")
    if not is_sequence(users):
        check_kind("users", users, Iterable, "an iterable of keys")
    users = list(users)
    check_keys(users)
    return users


def check_keys(users: Sequence[object]) -> None:
    for kind in dict.fromkeys(map(type, users)):
        if kind.__hash__ is None:  # as isinstance(user, Hashable), which takes far longer
            raise TypeError(f"users must be hashable, got a {kind.__name__}")


def check_users(users: Sequence[Hashable], segments: int, name: str) -> None:
    """One user per segment of `name`, without repetition."""
    check_sequence(users)
    if len(users) != segments:
        raise ValueError(f"users must be one per segment of {name}, {segments}, got {len(users)}")
    if len(set(users)) != len(users):
        repeated = next(user for i, user in enumerate(users) if user in users[:i])
        raise ValueError(f"users must not be repeated, got {repeated!r} twice")
