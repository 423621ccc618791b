"""A cache of one output for each user, for models that score candidates by a query of the history
alone: jm.PagedHistoryCache keeps what each event needs, so that new events can be appended.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch

import jagged_modules as jm


class OutputCache:
    """Which row of a tensor has the output of which user. The rows of the least recently used users
    are given to others. What `jm.PagedHistoryCache` has too does the same. Not safe to call from
    several threads.

    Args:
        max_bytes: budget of the tensor, which has one row more.
        row_bytes: bytes of a row.
    """

    reads_pages = True  # one step encodes and scores

    def __init__(self, max_bytes: int, row_bytes: int) -> None:
        self.max_bytes, self._row_bytes = max_bytes, row_bytes
        self.num_slots = max_bytes // row_bytes
        self._rows: OrderedDict[int, int] = OrderedDict()
        self._free: list[int] = []
        self._taken = 0  # rows that were ever given
        self._hits = self._misses = self._evictions = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, user: int) -> bool:
        return user in self._rows

    def missing(self, users: Sequence[int]) -> list[int]:
        """The users of these who have no row. The others become the most recently used ones."""
        known, missing = self._rows, list[int]()
        for user in users:
            if user in known:
                known.move_to_end(user)
            else:
                missing.append(user)
        self._hits += len(users) - len(missing)
        self._misses += len(missing)
        return missing

    def slots(self, users: Sequence[int]) -> torch.Tensor:
        """int64 [users] on the host, the users' rows, 1 to `num_slots`. Those who have none get
        one, and `missing` does not return them any more: call it first. CacheFull if there are
        fewer rows than users."""
        known = self._rows
        if len(users) > self.num_slots:
            raise jm.CacheFull(
                f"max_bytes allows {self.num_slots} rows, but there are {len(users)} users"
            )
        for user in users:
            if user not in known:
                known[user] = self._free_row()
        return torch.frombuffer(array("q", [known[user] for user in users]), dtype=torch.int64)

    def _free_row(self) -> int:
        if self._free:
            return self._free.pop()
        if self._taken < self.num_slots:
            self._taken += 1
            return self._taken
        self._evictions += 1
        return self._rows.popitem(last=False)[1]

    def evict(self, users: Iterable[int]) -> None:
        """Forget users. Those without a row are ignored."""
        self._free += [self._rows.pop(user) for user in users if user in self._rows]

    def clear(self) -> None:
        """Forget all users."""
        self.evict(list(self._rows))

    def statistics(self) -> jm.CacheStatistics:
        """Sizes and counts."""
        count = len(self._rows)
        counts = self._hits, self._misses, self._evictions
        return jm.CacheStatistics(count, count, count * self._row_bytes, self.max_bytes, *counts)
