"""What a `PagedHistoryCache` needs of a layer, and what it says of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from ..containers.history_cache import HistoryCache


class CachingLayer(Protocol):
    """A layer with a cache: `HSTUStack`, `JaggedTargetAttention`, `JaggedGDPA`, or any module with
    these methods.

    append_reads_cache: whether the keys and values of new events depend on the cached rows. A layer
        may also have `append_writes_pages`: whether its `append` then takes `PagedRows` with room,
        and writes them there; and `takes_host_tables`: whether it copies tables of
        pages from the host itself, as graphs do.
    max_cached_rows: how many of the latest rows the next events and targets see; None: all.
    """

    append_reads_cache: bool

    @property
    def max_cached_rows(self) -> int | None: ...

    @property
    def cache(self) -> Callable[..., HistoryCache]: ...

    @property
    def append(self) -> Callable[..., tuple[Any, HistoryCache]]: ...


@dataclasses.dataclass(frozen=True)
class CacheStatistics:
    """The state of a PagedHistoryCache and its counts since it was made.

    users, rows: cached users and rows of all of them, those of other weights too.
    bytes: size of the pages in use.
    max_bytes: the budget of `PagedHistoryCache`.
    hits, misses: users that `missing` found cached, and those it returned.
    evictions: users that lost their pages to others.
    """

    users: int
    rows: int
    bytes: int
    max_bytes: int
    hits: int
    misses: int
    evictions: int
