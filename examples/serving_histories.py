"""The users' events, those of the log and those of requests, on the host."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from data.event_log import EventLog


class NewEvents(NamedTuple):
    """Events of a user, from oldest to newest. item, rating: int64 [N]; ratings are indices into
    `Ranker.ratings`, 0 without ratings."""

    item: np.ndarray
    rating: np.ndarray


NONE = NewEvents(np.zeros(0, np.int64), np.zeros(0, np.int64))
_NOTHING = np.empty((2, 0), np.int64), 0, 0


@dataclass(frozen=True)
class Request:
    """Score candidates, items int64 [C], for a user after these new events. stores_events: whether
    the history then has them.

    Users and items are rows, not ids: see `Histories`.
    """

    user: int
    candidates: np.ndarray
    events: NewEvents = NONE
    stores_events: bool = True


class Histories:
    """The events of all users: those of a log, then those of requests. Users and items are rows of
    `users` and `items`, the log's ids. Rows from `num_users` on are users without a history.

    Args:
        log: the log.
        rating: int64, for each event of the log the index of its rating.
        kept: bool, the events of the log that are known at the start.
    """

    def __init__(self, log: EventLog, rating: np.ndarray, kept: np.ndarray):
        self.users, self.items, self.num_users, self.num_items = (
            log.users,
            log.items,
            log.num_users,
            log.num_items,
        )
        self._item, self._rating = log.item[kept], rating[kept]
        self._offsets = np.concatenate(
            [[0], np.bincount(log.user[kept], minlength=log.num_users + 1).cumsum()]
        )
        # of the events that were added, items and ratings [2, capacity], the first column of the
        # last ones, and that behind them, from which on no view reads
        self._added: dict[int, tuple[np.ndarray, int, int]] = {}

    def length(self, user: int) -> int:
        row, offset = min(user, self.num_users), self._offsets.item
        _, begin, end = self._added.get(user, _NOTHING)
        return offset(row + 1) - offset(row) + end - begin

    def longest(self) -> int:
        """The user of the longest history of the log."""
        return int(np.diff(self._offsets).argmax())

    @cached_property
    def popularity(self) -> np.ndarray:
        """How many of the log's events have each item, [num_items]."""
        return np.bincount(self._item, minlength=self.num_items)

    def add(self, user: int, events: NewEvents, keep: int) -> None:
        """Add a user's events. Of all that were added, the last `keep` remain."""
        if not len(events.item):
            return
        room, begin, end = self._added.get(user, _NOTHING)
        last = end + len(events.item)
        if last > room.shape[1]:  # views of the old columns stay as they are
            size, known = last - begin, room[:, begin:end]
            room = np.empty((2, 2 * size + 6), np.int64)
            room[:, : end - begin] = known
            begin, end, last = 0, end - begin, size
        room[0, end:last], room[1, end:last] = events
        self._added[user] = room, max(begin, last - keep), last

    def forget(self) -> None:
        """Forget the events of all requests."""
        self._added.clear()

    def replace(self, user: int, events: NewEvents) -> None:
        """Replace the events that were added."""
        self._added[user] = np.stack(events), 0, len(events.item)

    def take_last(self) -> dict[int, NewEvents]:
        """Take each user's last event of the log out of the histories. Users without one have no
        entry."""
        lengths = np.diff(self._offsets)
        users = lengths.nonzero()[0]
        last = self._offsets[users + 1] - 1
        taken = [NewEvents(self._item[i : i + 1], self._rating[i : i + 1]) for i in last.tolist()]
        self._item, self._rating = (np.delete(x, last) for x in (self._item, self._rating))
        self._offsets = np.concatenate([[0], (lengths - (lengths > 0)).cumsum()])
        return dict(zip(users.tolist(), taken, strict=True))

    def window(self, user: int, events: NewEvents, count: int) -> NewEvents:
        """The last `count` events of a user's history and these new ones."""
        items, ratings = list[np.ndarray](), list[np.ndarray]()
        self.collect(user, events, count, items, ratings)
        return NewEvents(np.concatenate(items), np.concatenate(ratings))

    def collect(
        self,
        user: int,
        events: NewEvents,
        count: int,
        items: list[np.ndarray],
        ratings: list[np.ndarray] | None = None,
    ) -> int:
        """`window`, in parts behind those of other users: a batch joins them at once. Returns its
        length."""
        row, offset = min(user, self.num_users), self._offsets.item
        first, last = offset(row), offset(row + 1)
        room, begin, end = self._added.get(user, _NOTHING)
        length = last - first + end - begin + len(events.item)
        if length > count:  # the oldest are left out, of the log's first
            left, length = length - count, count
            first, left = min(first + left, last), max(0, left - (last - first))
            begin, left = min(begin + left, end), max(0, left - (end - begin))
            events = NewEvents(events.item[left:], events.rating[left:])
        items.append(self._item[first:last])
        items += [room[0, begin:end], events.item] if end > begin else [events.item]
        if ratings is not None:
            ratings.append(self._rating[first:last])
            ratings += [room[1, begin:end], events.rating] if end > begin else [events.rating]
        return length
