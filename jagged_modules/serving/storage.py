"""RowStorage: the memory of the pages of a PagedHistoryCache."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jagged_kernels.attention.pages import table_of
from torch import Tensor

from ..containers.history_cache import HistoryCache
from ..containers.jagged import Jagged
from ..containers.pages import (
    DTYPES_OF_8_BITS,
    PagedRows,
    Room,
    UserTable,
    from_8_bits,
    gather_pages,
    write_rows,
)
from ..scalars import check_equal
from .pages import CacheFull, PageTable, RowRange, UserPages, ranges_of, row_indices, rows_on_host


class _Layer(NamedTuple):
    """Keys and values of a layer, and their scales: with the spare row, and without it. The tensors
    are always the same ones: `jm.graphed` takes tensors of one identity for one."""

    with_spare: Tensor
    all_scales: Tensor | None
    rows: Tensor
    scales: Tensor | None

    @classmethod
    def of(cls, values: Tensor, scales: Tensor | None) -> _Layer:
        return cls(values, scales, values[:-1], None if scales is None else scales[:-1])


class RowStorage:
    """The rows of all pages. PageTable says whose they are.

    stored_dtype: of the keys and values in 8 bits, which then have `scales`; None: theirs.
    values: keys and values `[rows, layers, H, width]`, with a spare row behind them for padding of
    `jm.graphed`; None before `allocate`.
    scales: `[rows, layers, H]` beside them. timestamps: `[rows]`, if the layer has them.
    dtype: of the layer's keys and values. device: of the rows, from `allocate` on.
    tables_on_host: whether rows in pages keep their tables on the host until they are used.
    """

    def __init__(
        self, page_rows: int, stored_dtype: torch.dtype | None, tables_on_host: bool
    ) -> None:
        self.page_rows, self.stored_dtype = page_rows, stored_dtype
        self.tables_on_host = tables_on_host
        self.dtype: torch.dtype | None = None
        self.device = torch.device("cpu")
        self.values: Tensor | None = None
        self.scales: Tensor | None = None
        self.timestamps: Tensor | None = None
        self._layers: list[_Layer] = []

    @property
    def page_bytes(self) -> int:
        parts = [x for x in (self.values, self.scales, self.timestamps) if x is not None]
        return self.page_rows * sum(x[0].nbytes for x in parts)

    def allocate(self, new: HistoryCache, max_bytes: int) -> int:
        """Allocate as many pages for rows of this kind as max_bytes holds. Returns their number."""
        first = new.layers[0].values
        if self.stored_dtype == torch.float8_e4m3fn and first.is_cuda:
            capability = torch.cuda.get_device_capability(first.device)
            if capability < (8, 9):
                raise ValueError(
                    "dtype must be None or int8 on a GPU of compute capability below 8.9, got"
                    f" float8_e4m3fn on {capability[0]}.{capability[1]}"
                )
        per_head = len(new.layers), *first.shape[1:2]
        stored, times = self.stored_dtype, new.timestamps is not None
        kinds: list[tuple[tuple[int, ...], torch.dtype] | None] = [
            ((*per_head, *first.shape[2:]), stored or first.dtype),
            (per_head, torch.float32) if stored else None,
            ((), torch.int64) if times else None,
        ]
        with torch.inference_mode(False):  # later calls may write outside of it
            row_bytes = sum(torch.empty(x[0], dtype=x[1], device="meta").nbytes for x in kinds if x)
            num_pages = max_bytes // (row_bytes * self.page_rows)
            if not num_pages:
                raise CacheFull(
                    f"max_bytes must be at least a page of {self.page_rows} rows,"
                    f" {row_bytes * self.page_rows}, got {max_bytes}"
                )
            rows = num_pages * self.page_rows + 1
            self.values, self.scales, self.timestamps = (
                torch.empty(rows, *x[0], dtype=x[1], device=first.device) if x else None
                for x in kinds
            )
            assert self.values is not None
            self.device = self.values.device
            values = self.values.unbind(1)
            scales = [None] * len(values) if self.scales is None else self.scales.unbind(1)
            self._layers = [_Layer.of(*both) for both in zip(values, scales)]
        self.dtype = first.dtype
        return num_pages

    def check_kind(self, rows: HistoryCache) -> None:
        """ValueError if the rows are not of the kind that was allocated."""
        if self.values is None:
            return
        pages, first = self.values, rows.layers[0].values
        shape, has_timestamps = (len(rows.layers), *first.shape[1:]), rows.timestamps is not None
        found = shape, first.dtype, first.device, has_timestamps
        expected = tuple(pages.shape[1:]), self.dtype, pages.device, self.timestamps is not None
        for name, x, own in zip(("shape", "dtype", "device", "timestamps"), found, expected):
            check_equal("the layer's keys and values", f"keep the {name} of the first put", own, x)

    def write(self, rows: HistoryCache, ranges: Sequence[RowRange]) -> None:
        """Copy the rows to these ranges."""
        # a copy in place of a dozen launches
        index = rows_on_host(ranges, self.page_rows).to(self.device, non_blocking=True)
        for own, layer in zip(self._layers, rows.layers):
            write_rows(own.with_spare, own.all_scales, index, layer.values)
        self.write_timestamps(index, rows.timestamps)

    def kept(self, ranges: Sequence[RowRange]) -> Callable[[], None]:
        """A function that writes the rows of these ranges as they are now."""
        index = rows_on_host(ranges, self.page_rows).to(self.device, non_blocking=True)
        tensors = [x for x in (self.values, self.scales, self.timestamps) if x is not None]
        # torch copies no float8
        tensors = [x.view(torch.int8) if x.dtype in DTYPES_OF_8_BITS else x for x in tensors]
        rows = [x.index_select(0, index) for x in tensors]

        def write() -> None:
            for x, kept in zip(tensors, rows):
                x.index_copy_(0, index, kept)

        return write

    def write_timestamps(self, index: Tensor, new: Tensor | None) -> None:
        if self.timestamps is not None and new is not None:
            self.timestamps.index_copy_(0, index.to(self.device, non_blocking=True), new)

    def gather(self, ranges: Sequence[RowRange], max_rows: int | None) -> HistoryCache:
        """A copy of these ranges."""
        index, offsets, lengths = row_indices(ranges, self.page_rows, self.device)
        assert self.values is not None and self.dtype is not None
        values, scales, times = (
            None if x is None else x.index_select(0, index)
            for x in (self.values, self.scales, self.timestamps)
        )
        assert values is not None
        layers = from_8_bits(values, scales, self.dtype).unbind(1)
        first = Jagged(layers[0], offsets, host_lengths=lengths)
        others = (first.with_values(x) for x in layers[1:])
        return HistoryCache((first, *others), times, max_rows)

    def in_pages(
        self,
        pages: PageTable,
        known: Sequence[UserPages],
        lengths: Sequence[int],
        events: tuple[Tensor, int] | None = None,
    ) -> tuple[PagedRows, ...]:
        """So many rows of each user, from the start of the pages, of each layer. events: of the
        `UserTable`."""
        assert self.dtype is not None
        users, tables = pages.rows_of(known, lengths), None
        if not self.tables_on_host:
            ends = array("q", itertools.accumulate(lengths, initial=0))
            entries = table_of([x.pages for x in known], ends[1:], self.page_rows)
            tables = torch.frombuffer(ends, dtype=torch.int64), entries
        table = UserTable(users, self.page_rows, sum(lengths), self.device, events, tables)
        layers = [PagedRows.of(x.rows, x.scales, table, self.dtype) for x in self._layers]
        if tables is not None:
            for x in layers:
                x.move()  # torch.compile cannot
        return tuple(layers)

    def with_room(
        self,
        pages: PageTable,
        known: Sequence[UserPages],
        lengths: Sequence[int],
        offsets: Tensor,
        new_timestamps: Any,
    ) -> tuple[PagedRows, ...]:
        """Of each layer, the users' rows and those of new events, with these lengths and offsets,
        as room. new_timestamps: of the events, which are written. A layer refuses wrong ones."""
        ends = [x.first + x.length + n for x, n in zip(known, lengths)]
        layers = self.in_pages(pages, known, ends, (offsets, sum(lengths)))
        if not self.tables_on_host or self.timestamps is not None:
            index = rows_on_host(ranges_of(known, lengths), self.page_rows)
            index = index.to(self.device, non_blocking=True)
            times, kind = new_timestamps, (index.shape, torch.int64)
            if isinstance(times, Tensor) and (times.shape, times.dtype) == kind:
                self.write_timestamps(index, times)
            if layers[0].host is not None:
                layers[0].host.room = index
        for rows, own in zip(layers, self._layers):
            rows.room = Room(own.with_spare, own.all_scales)
        return layers

    def history(self, layers: tuple[PagedRows, ...], max_rows: int | None) -> HistoryCache:
        """Layers in pages, with their timestamps."""
        times, first = None, layers[0]
        if self.timestamps is not None:
            (times,) = gather_pages(first.pages, first.offsets, self.timestamps)
        return HistoryCache(layers, times, max_rows)
