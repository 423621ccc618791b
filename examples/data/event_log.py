"""An event log in memory: who chose which item, when, and how it was rated."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
from published_ids import Id, Ids, fingerprint

# feature name -> published id -> names of its categories
Categories = dict[str, dict[Id, list[str]]]


@dataclass(frozen=True)
class Categorical:
    """A side feature: user or item i has the categories `values[offsets[i]:offsets[i + 1]]`
    (int64). They may have names."""

    values: np.ndarray
    offsets: np.ndarray
    cardinality: int
    names: tuple[str, ...] = ()

    @cached_property
    def is_single(self) -> bool:
        """Whether each user or item has one category."""
        return np.array_equal(self.offsets, np.arange(len(self.values) + 1))

    @classmethod
    def single(cls, categories: np.ndarray) -> "Categorical":
        """One category for each user or item, int64 [N]."""
        return cls(categories, np.arange(len(categories) + 1), int(categories.max()) + 1)

    @classmethod
    def from_names(cls, ids: Iterable[Id], names: dict[Id, list[str]]) -> "Categorical":
        """Number the category names of `ids` [N] in sorted order. An id without names gets an empty
        bag."""
        by_text = {str(id): own for id, own in names.items()}
        bags = [by_text.get(str(id), []) for id in ids]
        vocabulary = {
            name: number
            for number, name in enumerate(sorted({name for bag in bags for name in bag}))
        }
        values = np.array([vocabulary[name] for bag in bags for name in bag], dtype=np.int64)
        return cls(
            values,
            np.cumsum([0, *map(len, bags)], dtype=np.int64),
            max(len(vocabulary), 1),
            tuple(vocabulary),
        )


@dataclass(frozen=True)
class EventLog:
    """Events, each of a user and an item, sorted by user, then by time.

    Args:
        user, item: int64 [N], rows of `users` and `items`.
        timestamp: int64 or float64 [N], in seconds; None if only the order of a user's events is
            known.
        users, items: the published ids.
    """

    user: np.ndarray
    item: np.ndarray
    timestamp: np.ndarray | None
    users: Ids
    items: Ids

    def __len__(self) -> int:
        return len(self.user)

    @property
    def num_users(self) -> int:
        return len(self.users)

    @property
    def num_items(self) -> int:
        return len(self.items)

    @cached_property
    def fingerprint(self) -> str:
        """It depends on all ids, events and side features, and on their order."""
        return fingerprint(_contents(self))


def _contents(value: Any) -> Iterator[bytes]:
    """The bytes of all fields of a log."""
    if isinstance(value, EventLog | Categorical):
        for each in fields(value):
            yield each.name.encode()
            yield from _contents(getattr(value, each.name))
    elif isinstance(value, dict):
        for name, part in value.items():
            yield name.encode()
            yield from _contents(part)
    elif isinstance(value, np.ndarray):
        yield value.dtype.str.encode()
        yield np.ascontiguousarray(value)
    else:
        yield repr(list(value) if isinstance(value, Ids) else value).encode()


@dataclass(frozen=True)
class RatingLog(EventLog):
    """Events with timestamps and ratings.

    Args:
        rating: float32 [N].
        user_features, item_features: side features by name, one bag per user or item.
    """

    timestamp: np.ndarray
    rating: np.ndarray
    user_features: dict[str, Categorical] = field(default_factory=dict)
    item_features: dict[str, Categorical] = field(default_factory=dict)

    @classmethod
    def from_columns(
        cls,
        user,
        item,
        rating,
        timestamp,
        user_categories: Categories | None = None,
        item_categories: Categories | None = None,
    ) -> "RatingLog":
        """Build a log from columns [N] in any order, with the published ids of users and items."""
        return sort_events(
            *Ids.of(user),
            *Ids.of(item),
            np.asarray(timestamp),
            np.asarray(rating),
            user_categories or {},
            item_categories or {},
        )


def sort_events(
    users: Ids,
    user: np.ndarray,
    items: Ids,
    item: np.ndarray,
    timestamp: np.ndarray | None,
    rating: np.ndarray | None,
    user_categories: Categories,
    item_categories: Categories,
) -> Any:
    """The log of events in any order: a RatingLog if they have ratings and timestamps, otherwise an
    EventLog.

    Events of a user with the same timestamp, or without, keep their order. Timestamps are all
    integers, or are rounded to float64.
    """
    order = np.lexsort((user,) if timestamp is None else (timestamp, user))
    if timestamp is not None:
        timestamp = timestamp[order].astype(np.int64 if timestamp.dtype.kind == "i" else np.float64)
    events = dict(user=user[order], item=item[order], timestamp=timestamp, users=users, items=items)
    if timestamp is None or rating is None:
        return EventLog(**events)
    user_features, item_features = (
        {name: Categorical.from_names(ids, names) for name, names in categories.items()}
        for ids, categories in ((users, user_categories), (items, item_categories))
    )
    return RatingLog(
        **events,
        rating=rating[order].astype(np.float32),
        user_features=user_features,
        item_features=item_features,
    )
