"""Pages: rows of many users in pages of fixed size, with a page table on the host and
least-recently-used eviction.

    user → the pages of the user    row r of a user is row  page[(first + r) // page_rows] ·
                                    page_rows + (first + r) % page_rows

A user's rows need not be adjacent, so that they can grow, and the pages of an evicted user serve
any other user.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..containers.offsets import rows_and_segments
from ..scalars import check_equal, check_kind, is_sequence


class CacheFull(ValueError):
    """The rows of one call need more pages than the budget has."""


@dataclasses.dataclass(slots=True)
class UserPages:
    """The pages of one user: rows first to first + length of them. weights: the version of the
    weights that computed the rows; its complement, which is negative, from `restart` to `count`.
    row: of a `UserTable`, made again when the pages change."""

    weights: int
    pages: array[int] = dataclasses.field(default_factory=lambda: array("i"))
    first: int = 0
    length: int = 0
    row: array[int] = dataclasses.field(default_factory=lambda: array("i"))


class RowRange(NamedTuple):
    """Rows begin to begin + length of a user's pages."""

    pages: array[int]
    begin: int
    length: int


class PageTable:
    """Which pages hold the rows of which user. Users are ordered by their last use.

    Pinned pages are being read: users may lose them, but they are not free until they are unpinned.
    Rows after a user's last one may be written in a pinned page, as no reader of the page reads
    these.

    Args:
        num_pages: number of pages.
        page_rows: rows of a page.
    """

    def __init__(self, num_pages: int, page_rows: int) -> None:
        self.num_pages, self.page_rows, self.num_rows, self.evictions = num_pages, page_rows, 0, 0
        self.width = 1  # a power of 2: at least the pages of each user until now
        self.users: OrderedDict[Hashable, UserPages] = OrderedDict()
        self._unused, self._freed = 0, list[int]()  # pages from _unused on were never used
        # what each reader reads; pinned pages of no user
        self._readers, self._waiting = dict[int, Sequence[int]](), set[int]()

    @property
    def num_free(self) -> int:
        return self.num_pages - self._unused + len(self._freed)

    def pin(self, pages: Sequence[int]) -> None:
        """Pages have one reader more."""
        self._readers[id(pages)] = pages

    def unpin(self, pages: Sequence[int]) -> None:
        """Undo a `pin` of this very object."""
        del self._readers[id(pages)]
        if self._waiting:
            waiting, self._waiting = self._waiting, set()
            self._free(waiting)

    @property
    def _pins(self) -> set[int]:
        """Pages that are read. Most writes find none, so they are not counted page by page."""
        return set(itertools.chain.from_iterable(self._readers.values()))

    def _free(self, pages: Collection[int]) -> None:
        if self._readers and pages:
            self._waiting |= self._pins.intersection(pages)
            pages = [page for page in pages if page not in self._waiting]
        self._freed.extend(pages)

    def drop(self, user: Hashable) -> None:
        x = self.users.pop(user)
        self._free(x.pages)
        self.num_rows -= x.length

    def replace(
        self, users: Sequence[Hashable], lengths: Sequence[int], weights: int
    ) -> list[RowRange]:
        """Give each user pages for a history of this length in place of those that the user has.
        Returns the rows to write."""
        self._check(sum(self._pages_of(length) for length in lengths), len(users), len(self._pins))
        self.restart(users, weights)
        known = [self.users[user] for user in users]
        self.reserve(users, known, lengths)
        ranges = ranges_of(known, lengths)
        self.count(known, lengths)
        return ranges

    def restart(self, users: Iterable[Hashable], weights: int) -> None:
        """Users have no rows, until `reserve` in the pages that they had, unless these are read.
        They are not cached until `count`: another thread would take them for users without
        events."""
        for user in users:
            x = self.users.get(user)
            if x is None or self._readers:
                if x is not None:
                    self.drop(user)
                self.users[user] = UserPages(~weights)
            else:
                self.num_rows -= x.length
                x.weights, x.first, x.length = ~weights, 0, 0

    def reserve(
        self, users: Sequence[Hashable], known: Sequence[UserPages], lengths: Sequence[int]
    ) -> list[tuple[Hashable, UserPages]]:
        """Give each user pages for so many more rows, which do not count until `count`. known: the
        pages of the users. Returns the users that are evicted for them, with their pages."""
        evicted = list[tuple[Hashable, UserPages]]()
        rows, move = self.page_rows, self.users.move_to_end
        for user in users:
            move(user)
        needs = [
            (x, more)
            for x, n in zip(known, lengths)
            if (n or not x.length) and (more := -(-(x.first + x.length + n) // rows) - len(x.pages))
        ]
        for x, more in needs:
            if more < 0:  # of a history before
                self._drop_pages(x, len(x.pages) + more)
        needs = [(x, more) for x, more in needs if more > 0]
        if needs:
            more, pinned = sum([more for _, more in needs]), self._pins
            if pinned:
                pinned.difference_update(*[x.pages for x in known])
            self._check(sum([len(x.pages) for x in known]) + more, len(users), len(pinned))
            keep = set(users)
            while self.num_free < more:  # evict the least recently used of the others
                user = next(user for user in self.users if user not in keep)
                evicted.append((user, self.users[user]))
                self.drop(user)
                self.evictions += 1
            for x, more in needs:
                x.pages.extend([self._take() for _ in range(more)])
                del x.row[:]
                while self.width < len(x.pages):
                    self.width *= 2
        return evicted

    def rows_of(self, known: Sequence[UserPages], lengths: Sequence[int]) -> Tensor:
        """The `UserTable.users` of these users, with so many rows each."""
        size = 2 + self.width
        rows: list[array[int]] = []
        for x, length in zip(known, lengths):
            row = x.row
            if len(row) != size:
                slot = x.pages[-1] + 1 if x.pages else 0
                row = x.row = array("i", [length, slot]) + x.pages
                row.extend([0] * (size - len(row)))
            row[0] = length
            rows.append(row)
        if not rows:  # an empty buffer is an error
            return torch.empty(0, size, dtype=torch.int32, device="cpu")
        return torch.frombuffer(bytearray().join(rows), dtype=torch.int32).view(-1, size)

    def count(self, known: Sequence[UserPages], lengths: Sequence[int]) -> None:
        """Users with these pages have so many more rows, for which they have pages."""
        for x, length in zip(known, lengths):
            x.length += length
            if x.weights < 0:
                x.weights = ~x.weights
        self.num_rows += sum(lengths)

    def trim(self, users: Iterable[Hashable]) -> None:
        """Free the pages after the users' last rows."""
        for user in users:
            x = self.users[user]
            self._drop_pages(x, self._pages_of(x.first + x.length))

    def give_back(self, evicted: Sequence[tuple[Hashable, UserPages]]) -> None:
        """Undo the evictions of `reserve`, after `trim`."""
        pages = {page for _, x in evicted for page in x.pages}
        self._freed = [page for page in self._freed if page not in pages]
        self._waiting -= pages
        for user, x in reversed(evicted):
            self.users[user] = x
            self.users.move_to_end(user, last=False)
            self.num_rows += x.length
        self.evictions -= len(evicted)

    def _drop_pages(self, x: UserPages, used: int) -> None:
        """Free all but the first pages of a user."""
        self._free(x.pages[used:])
        del x.pages[used:], x.row[:]

    def keep_last(self, user: Hashable, rows: int) -> None:
        """Drop all but the last rows of a user, and free the pages before them."""
        x = self.users[user]
        if x.length <= rows:
            return
        self.num_rows -= x.length - rows
        x.first, x.length = x.first + x.length - rows, rows
        unused = x.first // self.page_rows
        self._free(x.pages[:unused])
        x.pages, x.first = x.pages[unused:], x.first % self.page_rows
        del x.row[:]

    def _pages_of(self, rows: int) -> int:
        return -(-rows // self.page_rows)

    def _check(self, pages: int, users: int, pinned: int) -> None:
        """CacheFull unless so many pages can be had for these users. pinned: pages that they cannot
        have."""
        if pages > self.num_pages - pinned:
            read = f" of which selected histories read {pinned}," if pinned else ""
            raise CacheFull(
                f"max_bytes allows {self.num_pages} pages of {self.page_rows} rows,{read} but the"
                f" histories of these {users} users need {pages}"
            )

    def _take(self) -> int:
        if self._freed:
            return self._freed.pop()
        self._unused += 1
        return self._unused - 1


def ranges_of(known: Sequence[UserPages], lengths: Sequence[int]) -> list[RowRange]:
    """So many rows behind those of users, if there are some."""
    return [RowRange(x.pages, x.first + x.length, n) for x, n in zip(known, lengths) if n]


def row_indices(
    ranges: Sequence[RowRange], page_rows: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of storage of these ranges, one after another: int64 `[L]`; the offsets `[B + 1]` of
    the ranges, both on the device; and their lengths `[B]` on the host."""
    pages, ends, shifts = array("q"), array("q", [0]), array("q")
    for x in ranges:
        # from the row among the ranges to that in the concatenated pages
        shifts.append(len(pages) * page_rows + x.begin - ends[-1])
        ends.append(ends[-1] + x.length)
        pages.extend(x.pages.tolist())
    on_host = torch.frombuffer(ends + shifts + pages, dtype=torch.int64)
    # one copy to a device
    offsets, shift, table = on_host.to(device, non_blocking=True).split(
        [len(ends), len(shifts), len(pages)]
    )
    rows, segments = rows_and_segments(offsets, ends[-1])
    rows += shift[segments]
    return (
        table[rows // page_rows] * page_rows + rows % page_rows,
        offsets,
        on_host[: len(ends)].diff(),
    )


def rows_on_host(ranges: Sequence[RowRange], page_rows: int) -> Tensor:
    """The rows of `row_indices`, on the host: for those to write, which are new."""
    parts = list[memoryview]()
    for pages, begin, length in ranges:
        end = begin + length
        while begin < end:
            page, within = divmod(begin, page_rows)
            parts.append(_rows_of(pages[page], page_rows)[within : within + end - begin])
            begin += page_rows - within
    if not parts:  # an empty buffer is an error
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(bytearray().join(parts), dtype=torch.int64)


@functools.lru_cache(2**14)
def _rows_of(page: int, page_rows: int) -> memoryview:
    """The rows of a page. Kept, as to make them takes longer than all else that a write needs."""
    return memoryview(array("q", range(page * page_rows, (page + 1) * page_rows)))


# -- checks of the users that a caller names ------------------------------------------------------


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
    check_equal("users", f"be one per segment of {name}", segments, len(users))
    if len(set(users)) != len(users):
        repeated = next(user for i, user in enumerate(users) if user in users[:i])
        raise ValueError(f"users must not be repeated, got {repeated!r} twice")
