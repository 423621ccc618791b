"""PagedHistoryCache: keys and values of many users' histories, kept between requests."""

from __future__ import annotations

import contextlib
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from typing import Any

import torch
from jagged_kernels.attention.pages import SMALLEST_PAGE
from torch import Tensor, nn

from ..containers.history_cache import HistoryCache
from ..containers.jagged import Jagged
from ..containers.pages import DTYPES_OF_8_BITS
from ..dtypes import names
from ..scalars import check_kind, check_size, to_ints
from ..submodules import Members
from .cached import CacheStatistics, CachingLayer
from .fused_steps import count_fused_steps
from .pages import (
    CacheFull,
    PageTable,
    RowRange,
    UserPages,
    check_keys,
    check_sequence,
    check_users,
    listed_users,
    ranges_of,
)
from .storage import RowStorage

__all__ = ["CacheFull", "CacheStatistics", "PagedHistoryCache"]


class PagedHistoryCache:
    """Keys and values of many users' histories, in pages, with a budget of bytes and
    least-recently-used eviction.

    The cache belongs to one layer. A user's rows are valid for the weights that computed them:
    after a change of the layer's parameters (also in place), all users count as not cached until
    `put` computes their histories anew. Only writes through `.data`, as those of other libraries'
    optimizers may be, and in-place ones to parameters that were made in inference mode leave no
    trace in torch: call `clear` after them.

    With page_rows of 128, 256, 512, ..., attention reads the rows of a batch in their pages,
    without a copy. Otherwise, and where a history begins within a page (after max_attn_len has cut
    it), `select` gathers the rows into one jagged tensor with one index_select. It reads and writes
    each selected row once: for R rows, 2 · R · layers · H · (key width + value width) elements.

    All methods are safe to call from several threads. Later calls do not change the result of
    `select`: the pages that it reads are not written to as long as it exists, and count as used.
    Calls that write (`put`, `append`, `evict`, `clear`) wait for one another; `select` waits for
    their page table and their copies, not for their layers.

    Gradients are not supported.

    Args:
        layer: an `HSTUStack`, `JaggedTargetAttention` or `JaggedGDPA`. Call its `eval()` first if
            it has dropout.
        max_bytes: budget of the pages, which are allocated at the first write, on the device of the
            layer's keys.
        page_rows: rows of a page. A user's last page is filled in part, on average by half. From
            128 on, in powers of 2, attention reads the pages.
        dtype: torch.int8 or torch.float8_e4m3fn to keep keys and values in 8 bits, with one fp32
            factor for each row and head, which half as many bytes hold; None: in their own dtype.
            An element of int8 is rounded by at most 1/254 of the largest of its row and head; one
            of float8, which GPUs have from compute capability 8.9 on, by 1/16 of itself. An inf or
            a NaN makes its row and head NaN. Scores are those of the rounded rows.

    Raises:
        TypeError, ValueError: an argument has another type or is out of range.

    Example::

        config = jm.HSTUConfig(scaling_seqlen=100)
        hstu = jm.HSTUStack(32, num_heads=4, num_layers=2, config=config).eval()
        cache = jm.PagedHistoryCache(hstu, max_bytes=2**20)
        cache.put(["ann", "bob"], (torch.randn(5, 32), torch.tensor([0, 2, 5])))  # 2 and 3 events
        cache.append(["bob"], (torch.randn(1, 32), torch.tensor([0, 1])))  # a new event
        targets = torch.randn(4, 32), torch.tensor([0, 3, 4])  # 3 targets of bob, 1 of ann
        values, offsets = hstu.score(targets, cache.select(["bob", "ann"]))  # [4, 32]
    """

    def __init__(
        self,
        layer: CachingLayer,
        max_bytes: int,
        page_rows: int = 16,
        dtype: torch.dtype | None = None,
    ) -> None:
        module: Any = layer
        check_kind("layer", module, nn.Module, "a layer with cache and append")
        for name in ("cache", "append", "append_reads_cache", "max_cached_rows"):
            if not hasattr(layer, name):
                raise TypeError(
                    "layer must be an HSTUStack, JaggedTargetAttention or JaggedGDPA, got"
                    f" {type(layer).__name__}"
                )
        check_size("max_bytes", max_bytes)
        check_size("page_rows", page_rows)
        if dtype is not None and dtype not in DTYPES_OF_8_BITS:
            raise ValueError(f"dtype must be None or {names(DTYPES_OF_8_BITS)}, got {dtype}")
        self._members = Members(module)
        count_fused_steps(module, self)
        self.layer, self.max_bytes, self.page_rows = layer, max_bytes, page_rows
        self._version, self._weights = 0, tuple[object, ...]()
        self._storages: list[torch.UntypedStorage] = []
        on_host = getattr(layer, "takes_host_tables", False)
        self._rows = RowStorage(page_rows, dtype, on_host)
        self._table = PageTable(0, page_rows)  # until `_allocate`
        self._hits = self._misses = 0
        # the second guards all attributes
        self._writer, self._lock = threading.Lock(), threading.Lock()
        # after the copies of the last call that made some, and its stream
        self._last_copy: tuple[Any, torch.Stream] | None = None
        # Pinned pages of selected histories that exist no more, with the stream that read them; and
        # such streams, for the next write.
        self._read = deque[tuple[list[int], torch.Stream | None]]()
        self._readers = set[torch.Stream]()

    # -- users -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        with self._lock:
            return len(self._table.users)

    def __contains__(self, user: Hashable) -> bool:
        check_keys([user])
        with self._lock:
            return self._is_cached(user, self._current_weights())

    def users(self) -> list[Hashable]:
        """The users cached with the layer's present weights, the least recently used first."""
        with self._lock:
            weights = self._current_weights()
            return [user for user, x in self._table.users.items() if x.weights == weights]

    def missing(self, users: Iterable[Hashable]) -> list[Hashable]:
        """The users of these that are not cached with the layer's present weights, in their order.
        Counts hits and misses.

        The other users become the most recently used ones, so the next `put` evicts them last.

        Raises:
            TypeError: users are a single string, or one of them is not hashable.
        """
        users = listed_users(users)
        with self._lock:
            weights, known = self._current_weights(), self._table.users
            missing: list[Hashable] = []
            get, move = known.get, known.move_to_end
            for user in users:
                x = get(user)
                if x is not None and x.weights == weights:
                    move(user)
                else:
                    missing.append(user)
            self._hits += len(users) - len(missing)
            self._misses += len(missing)
            return missing

    def statistics(self) -> CacheStatistics:
        """Sizes and counts."""
        with self._lock:
            table = self._table
            size = (table.num_pages - table.num_free) * self._rows.page_bytes
            held, counts = (len(table.users), table.num_rows), (self._hits, self._misses)
            return CacheStatistics(*held, size, self.max_bytes, *counts, table.evictions)

    # -- rows --------------------------------------------------------------------------------------

    @torch.no_grad()
    def put(self, users: Sequence[Hashable], history: Any, **timestamps: Tensor | None) -> None:
        """Compute and keep the whole histories of users, in place of what is cached of them.

        Args:
            users: one hashable key per segment of the history, without repetition.
            history, timestamps: arguments of the layer's `cache`. A segment may be empty: `append`
                then adds all its events.

        Raises:
            TypeError, ValueError: as the layer's `cache`; users are repeated, or not one per
                segment.
            ValueError: the layer's dtype, device or sizes are no longer those of the first put.
            CacheFull: the histories, and the pages that selected histories read, need more than
                max_bytes. Nothing has changed; a part of the users may fit.
        """
        with self._writer:
            with self._lock:
                weights = self._current_weights()
            rows = self.layer.cache(history, **timestamps)
            check_users(users, rows.num_segments, "history")
            with self._ordered():
                table = self._allocate(rows)
                self._write(users, rows, table.replace(users, _lengths(rows.layers[0]), weights))

    def append(
        self,
        users: Sequence[Hashable],
        events: Any,
        *,
        anew: Sequence[Hashable] = (),
        **others: Any,
    ) -> Any:
        """Compute and keep the next events of cached users. A call that fails, in a layer too,
        leaves all users as they were, except those of anew.

        Args:
            users: one key per segment of the events, without repetition. All must be cached: `put`
                the histories of others first.
            events, others: arguments of the layer's `append`, such as timestamps.
            anew: those of the users whose histories begin with these events. What is cached of them
                is dropped; they need not be cached, but something must be. They are not cached
                while the call runs, nor if it fails.

        Returns:
            What the layer's `append` returns for the events: for an HSTUStack, and for a
            JaggedSelfTargetAttention under a causal mask, the container with their rows, else None.

        Raises:
            KeyError: a user is not cached with the layer's present weights.
            TypeError, ValueError: as the layer's `append`; users are repeated, or not one per
                segment; anew are not of the users.
            CacheFull: the histories, and the pages that selected histories read, need more than
                max_bytes. Nothing has changed.
        """
        if torch.is_grad_enabled():  # a decorator takes longer than the check
            with torch.no_grad():
                return self.append(users, events, anew=anew, **others)
        if type(anew) not in (list, tuple):  # users must have these keys, which are checked
            check_sequence(anew)
        in_pages = (
            self.layer.append_reads_cache
            and self.reads_pages
            and getattr(self.layer, "append_writes_pages", False)
        )
        run = self._append_in_pages if in_pages else self._append_copies
        with self._writer:
            try:
                return run(users, events, anew, **others)
            except BaseException:
                with self._lock:
                    self._drop(anew)
                raise

    def _append_copies(
        self, users: Sequence[Hashable], events: Any, anew: Sequence[Hashable], **others: Any
    ) -> Any:
        """`append` of a layer that returns the keys and values of the events."""
        check_users(users, Jagged.wrap(events, name="events").num_segments, "events")
        if self.layer.append_reads_cache:
            in_pages = self.reads_pages and self.layer.max_cached_rows is None
            cached = self._select(users, in_pages, anew)
        else:
            cached = self._empty(users, anew)
        outputs, added = self.layer.append(events, cached, **others)
        del cached  # its pages
        lengths = _lengths(added.layers[0])
        with self._ordered():
            table, restore = self._allocate(added), None
            known = [table.users[user] for user in users]
            evicted = table.reserve(users, known, lengths)
            try:
                ranges = ranges_of(known, lengths)
                if evicted:
                    restore = self._rows.kept(ranges)
                self._rows.write(added, ranges)
            except BaseException:
                _cancel(table, users, evicted, restore)
                raise
            table.count(known, lengths)
            self._keep_last(table, users)
        return outputs

    def _append_in_pages(
        self, users: Sequence[Hashable], events: Any, anew: Sequence[Hashable], **others: Any
    ) -> Any:
        """`append` of a layer that writes the keys and values of the events into reserved rows
        before it attends to them."""
        wrapped = events if isinstance(events, Jagged) else Jagged.wrap(events, name="events")
        lengths = _lengths(wrapped)
        check_users(users, len(lengths), "events")
        with self._ordered(copies=False):
            table, known = self._check_cached(users, anew)
            self._wait_for_readers()
            evicted, restore = table.reserve(users, known, lengths), None
        try:
            if evicted:
                restore = self._rows.kept(ranges_of(known, lengths))
            with self._lock:
                layers = self._rows.with_room(
                    table, known, lengths, wrapped.offsets, others.get("timestamps")
                )
            cached = self._rows.history(layers, self.layer.max_cached_rows)
            outputs, _ = self.layer.append(events, cached, **others)
            with self._ordered():
                table.count(known, lengths)
                if self.layer.max_cached_rows is not None:
                    self._keep_last(table, users)
        except BaseException:
            with self._ordered():
                _cancel(table, users, evicted, restore)
            raise
        return outputs

    @torch.no_grad()
    def select(self, users: Sequence[Hashable]) -> HistoryCache:
        """The keys and values of these users, for the layer's `score`. They become the most
        recently used ones.

        Args:
            users: keys of cached users, in any order, also repeated.

        Returns:
            One segment per user. If page_rows is a power of 2 from 128 on, its layers are in pages.
            A `score` under `torch.no_grad()` reads them there. A layer's `values`, and a score that
            computes gradients, copy the rows at their first use. On a GPU, use it on the stream
            that is current now. Drop it after the score: until then its pages are used, also if
            their users are evicted.

        Raises:
            KeyError: a user is not cached with the layer's present weights.
            TypeError: users are no list or tuple.
        """
        check_sequence(users)
        return self._select(users, self.reads_pages)

    def slots(self, users: Sequence[Hashable]) -> Tensor:
        """A number of each cached user, for what a caller keeps beside the rows in a tensor of
        1 + `num_slots` rows: 1 to `num_slots`, and of no other user. It stays until an `append`, a
        `put` or an eviction of this user; an `append` that fails may have lent it to another user.
        0: the user has no rows.

        Returns:
            int64 `[users]` on the host.

        Raises:
            KeyError: a user is not cached, with any weights.
        """
        with self._lock:
            known = map(self._table.users.__getitem__, users)
            slots = array("q", [x.pages[-1] + 1 if x.pages else 0 for x in known])
        if not slots:  # an empty buffer is an error
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return torch.frombuffer(slots, dtype=torch.int64)

    @property
    def num_slots(self) -> int:
        """The largest number of `slots`. 0 before the first put."""
        return self._table.num_pages

    def evict(self, users: Iterable[Hashable]) -> None:
        """Forget users. Those that are not cached are ignored.

        Raises:
            TypeError: users are a single string, or one of them is not hashable.
        """
        users = listed_users(users)
        with self._writer, self._lock:
            self._drop(users)

    def clear(self) -> None:
        """Forget all users. The pages stay allocated."""
        with self._writer, self._lock:
            self._drop(list(self._table.users))

    @property
    def reads_pages(self) -> bool:
        """Whether attention can read the pages where they are."""
        return self.page_rows >= SMALLEST_PAGE and self.page_rows.bit_count() == 1

    # -- inside ------------------------------------------------------------------------------------

    def _select(
        self, users: Sequence[Hashable], in_pages: bool, anew: Sequence[Hashable] = ()
    ) -> HistoryCache:
        """The rows of users, if wanted in pages: unless a history begins within a page."""
        with self._ordered():
            table, known = self._check_cached(users, anew)
            move = table.users.move_to_end
            for user in users:
                move(user)
            if in_pages and not any(x.first for x in known):
                return self._pin(table, known)
            ranges = [RowRange(x.pages, x.first, x.length) for x in known]
            return self._rows.gather(ranges, self.layer.max_cached_rows)

    @contextlib.contextmanager
    def _ordered(self, copies: bool = True) -> Generator[None]:
        """Hold the lock. On a GPU, copies of one call also wait for those of the call before, which
        may be on another stream. copies: whether this call makes some in the block."""
        with self._lock:
            if self._read:
                self._unpin()
            last, stream = self._last_copy, None
            if last is not None:
                stream = torch.cuda.current_stream(self._rows.device)
                if stream != last[1]:
                    stream.wait_event(last[0])
            try:
                yield
            finally:
                if copies and self._rows.values is not None and self._rows.device.type == "cuda":
                    stream = stream or torch.cuda.current_stream(self._rows.device)
                    event = stream.record_event(None if last is None else last[0])
                    self._last_copy = event, stream

    def _current_weights(self) -> int:
        """The version of the layer's parameters and buffers: equal while nobody writes to them or
        replaces them."""
        members = self._members.refresh()
        tensors = members.parameters + members.buffers
        try:
            versions = [x._version for x in tensors]
        except RuntimeError:  # those made in inference mode have none
            versions = [0 if x.is_inference() else x._version for x in tensors]
        weights = (*map(Tensor.data_ptr, tensors), *versions)
        if weights != self._weights:
            self._version, self._weights = self._version + 1, weights
            # kept, or new weights could get the addresses of these
            self._storages = [x.untyped_storage() for x in tensors]
        return self._version

    def _drop(self, users: Iterable[Hashable]) -> None:
        for user in users:
            if user in self._table.users:
                self._table.drop(user)

    def _is_cached(self, user: Hashable, weights: int) -> bool:
        return user in self._table.users and self._table.users[user].weights == weights

    def _check_cached(
        self, users: Sequence[Hashable], anew: Sequence[Hashable] = ()
    ) -> tuple[PageTable, list[UserPages]]:
        """The page table, and the pages of the users, who must be cached. Those of anew have no
        rows first, and are not cached to others."""
        weights, table = self._current_weights(), self._table
        if anew and table.num_pages:
            if strangers := set(anew).difference(users):
                raise ValueError(f"anew must be of the users, got {strangers.pop()!r}")
            table.restart(anew, weights)
        get, accepted = table.users.get, {weights, ~weights} if anew else {weights}
        known = [x for x in map(get, users) if x is not None]
        if len(known) < len(users) or not {x.weights for x in known} <= accepted:
            held = [(user, get(user)) for user in users]
            user, x = next((u, x) for u, x in held if x is None or x.weights not in accepted)
            is_stale = x is not None and x.weights >= 0
            state = "was cached with other weights" if is_stale else "is not cached"
            raise KeyError(f"user {user!r} {state}: put the history first")
        if not table.num_pages:
            raise KeyError("no user is given, and nothing is cached yet: put a history first")
        return table, known

    def _allocate(self, rows: HistoryCache) -> PageTable:
        """The page table, for a write; the first call allocates it and the pages. ValueError if the
        rows do not fit the pages."""
        self._rows.check_kind(rows)
        self._wait_for_readers()
        if not self._table.num_pages:
            self._table = PageTable(self._rows.allocate(rows, self.max_bytes), self.page_rows)
        return self._table

    def _wait_for_readers(self) -> None:
        """Before a write: wait for the streams that read pages of histories that are gone."""
        while self._readers:
            stream = self._readers.pop()
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _keep_last(self, table: PageTable, users: Sequence[Hashable]) -> None:
        if self.layer.max_cached_rows is not None:
            for user in users:
                table.keep_last(user, self.layer.max_cached_rows)

    def _write(
        self, users: Sequence[Hashable], rows: HistoryCache, ranges: Sequence[RowRange]
    ) -> None:
        """Copy the rows of whole histories to these ranges. If that fails, for example without
        memory, the users are forgotten."""
        try:
            self._rows.write(rows, ranges)
        except BaseException:
            for user in users:
                self._table.drop(user)
            raise

    def _pin(self, table: PageTable, known: Sequence[UserPages]) -> HistoryCache:
        """The users' rows in their pages, which are pinned as long as their page table exists."""
        layers = self._rows.in_pages(table, known, [x.length for x in known])
        pinned = [page for x in known for page in x.pages]
        device = self._rows.device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        table.pin(pinned)
        # which all layers, and what is mapped to other tensors of them, share
        assert layers[0].host is not None
        shared = layers[0].host.users.untyped_storage()
        weakref.finalize(shared, self._read.append, (pinned, stream)).atexit = False
        return self._rows.history(layers, self.layer.max_cached_rows)

    def _unpin(self) -> None:
        """Unpin the pages of selected histories that exist no more. Not where these are destroyed:
        that may be anywhere in any thread."""
        while self._read:
            pages, stream = self._read.popleft()
            self._table.unpin(pages)
            if stream is not None:
                self._readers.add(stream)

    def _empty(self, users: Sequence[Hashable], anew: Sequence[Hashable]) -> HistoryCache:
        """No rows of these users, who must be cached, or of anew."""
        with self._ordered(copies=False):
            self._check_cached(users, anew)
            ranges = [RowRange(array("i"), 0, 0)] * len(users)
            return self._rows.gather(ranges, self.layer.max_cached_rows)


def _cancel(
    table: PageTable,
    users: Sequence[Hashable],
    evicted: Sequence[tuple[Hashable, UserPages]],
    restore: Callable[[], None] | None,
) -> None:
    """Undo a `reserve`, which evicted these users. restore: writes what their pages had."""
    table.trim(users)
    if restore is not None:
        restore()
    table.give_back(evicted)


def _lengths(rows: Jagged) -> list[int]:
    if rows.offsets.is_cpu:
        ends = to_ints(rows.offsets)
        return [end - begin for begin, end in zip(ends, ends[1:])]
    lengths = rows.host_lengths
    lengths = rows.offsets.diff() if lengths is None else lengths
    if lengths.is_meta:
        raise ValueError(
            "offsets must be on a device with values, because the cache counts rows, got meta"
        )
    return to_ints(lengths)
