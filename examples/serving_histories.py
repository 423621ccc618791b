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
_NO_ROOM = np.empty((2, 0), np.int64), 0


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
        self._added: dict[int, NewEvents] = {}
        # [2, capacity], whose columns before the number have all events that were added last
        self._room: dict[int, tuple[np.ndarray, int]] = {}

    def length(self, user: int) -> int:
        rows = self._rows(user)
        return rows.stop - rows.start + len(self._added.get(user, NONE).item)

    def longest(self) -> int:
        """The user of the longest history of the log."""
        return int(np.diff(self._offsets).argmax())

    @cached_property
    def popularity(self) -> np.ndarray:
        """How many of the log's events have each item, [num_items]."""
        return np.bincount(self._item, minlength=self.num_items)

    def add(self, user: int, events: NewEvents, keep: int) -> None:
        """Add a user's events. Of all that were added, the last `keep` remain."""
        count = len(events.item)
        if not count:
            return
        known, (room, end) = self._added.get(user, NONE), self._room.get(user, _NO_ROOM)
        size = len(known.item)
        if end + count > room.shape[1]:  # views of the old columns stay as they are
            room = np.empty((2, 2 * (size + count) + 6), np.int64)
            room[:, :size] = known
            end = size
        begin, end = end - size, end + count
        room[0, end - count : end], room[1, end - count : end] = events
        begin = max(begin, end - keep)
        self._added[user] = NewEvents(room[0, begin:end], room[1, begin:end])
        self._room[user] = room, end

    def forget(self) -> None:
        """Forget the events of all requests."""
        self._added.clear()
        self._room.clear()

    def replace(self, user: int, events: NewEvents) -> None:
        """Replace the events that were added."""
        self._added[user] = events
        self._room.pop(user, None)

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
        return joined(*self.parts(user, events, count))

    def parts(self, user: int, events: NewEvents, count: int) -> list[NewEvents]:
        """`window` in parts, which are views: a batch joins those of all its users at once."""
        parts = []
        for part in (events, self._added.get(user, NONE)):
            if len(part.item) and count:
                parts.append(_last(part, count))
                count -= len(parts[-1].item)
        rows = self._rows(user)
        rows = slice(max(rows.start, rows.stop - count), rows.stop)
        return [NewEvents(self._item[rows], self._rating[rows]), *reversed(parts)]

    def _rows(self, user: int) -> slice:
        """The rows of the user's events of the log."""
        user = min(user, self.num_users)
        return slice(self._offsets.item(user), self._offsets.item(user + 1))


def _last(events: NewEvents, count: int) -> NewEvents:
    first = len(events.item) - count
    return NewEvents(events.item[first:], events.rating[first:]) if first > 0 else events


def joined(*events: NewEvents) -> NewEvents:
    items, ratings = zip(*events, strict=True)
    return NewEvents(np.concatenate(items), np.concatenate(ratings))
