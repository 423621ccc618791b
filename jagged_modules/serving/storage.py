"""RowStorage: the memory of the pages of a PagedHistoryCache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from jagged_kernels.attention.pages import Pages
from torch import Tensor

from ..containers.history_cache import HistoryCache
from ..containers.jagged import Jagged
from ..containers.pages import PagedRows, gather_pages
from ..segments import segmentation_of
from .pages import CacheFull, RowRange, UserPages, row_indices


class RowStorage:
    """The rows of all pages. PageTable says whose they are.

    columns: keys and values `[rows, layers, H, width]`, and timestamps `[rows]` if the layer has
    them; empty before `allocate`.
    with_spare: the keys and values with a spare row behind them, for padding of `jm.graphed`.
    """

    def __init__(self, page_rows: int) -> None:
        self.page_rows, self.columns = page_rows, list[Tensor]()
        self.with_spare: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.columns[0].device

    @property
    def page_bytes(self) -> int:
        return self.page_rows * sum(x[0].numel() * x.element_size() for x in self.columns)

    def allocate(self, new: HistoryCache, max_bytes: int) -> int:
        """Allocate as many pages for rows of this kind as max_bytes holds. Returns their number."""
        first = new.layers[0].values
        kinds: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((len(new.layers), *first.shape[1:]), first.dtype)
        ]
        if new.timestamps is not None:
            kinds.append(((), torch.int64))
        with torch.inference_mode(False):  # later calls may write outside of it
            row_bytes = sum(torch.empty(x, dtype=y, device="meta").nbytes for x, y in kinds)
            num_pages = max_bytes // (row_bytes * self.page_rows)
            if not num_pages:
                raise CacheFull(
                    f"max_bytes must be at least a page of {self.page_rows} rows,"
                    f" {row_bytes * self.page_rows}, got {max_bytes}"
                )
            rows = num_pages * self.page_rows
            whole = [
                torch.empty(rows + 1, *x, dtype=dtype, device=first.device) for x, dtype in kinds
            ]
            self.with_spare, self.columns = whole[0], [x[:rows] for x in whole]
        return num_pages

    def check_kind(self, rows: HistoryCache) -> None:
        """ValueError if the rows are not of the kind that was allocated."""
        if not self.columns:
            return
        pages, first = self.columns[0], rows.layers[0].values
        shape, has_timestamps = (len(rows.layers), *first.shape[1:]), rows.timestamps is not None
        found = shape, first.dtype, first.device, has_timestamps
        expected = tuple(pages.shape[1:]), pages.dtype, pages.device, len(self.columns) > 1
        for name, x, own in zip(("shape", "dtype", "device", "timestamps"), found, expected):
            if x != own:
                raise ValueError(
                    f"the layer's keys and values must keep the {name} of the first put, {own},"
                    f" got {x}"
                )

    def indices(self, ranges: Sequence[RowRange]) -> tuple[Tensor, Tensor, Tensor]:
        """`row_indices` of these ranges, on the device."""
        return row_indices(ranges, self.page_rows, self.device)

    def write(self, rows: HistoryCache, ranges: Sequence[RowRange]) -> None:
        """Copy the rows to these ranges."""
        index, _, _ = self.indices(ranges)
        for i, layer in enumerate(rows.layers):
            self.columns[0][:, i].index_copy_(0, index, layer.values)
        if rows.timestamps is not None:
            self.columns[1].index_copy_(0, index, rows.timestamps)

    def gather(self, ranges: Sequence[RowRange], max_rows: int | None) -> HistoryCache:
        """A copy of these ranges."""
        index, offsets, lengths = self.indices(ranges)
        values, *times = (x.index_select(0, index) for x in self.columns)
        layers = values.unbind(1)
        first = Jagged(layers[0], offsets, host_lengths=lengths)
        others = (first.with_values(x) for x in layers[1:])
        return HistoryCache((first, *others), times[0] if times else None, max_rows)

    def in_pages(self, known: Sequence[UserPages], lengths: list[int]) -> tuple[PagedRows, ...]:
        """So many rows of each user, from the start of the pages, of each layer."""
        storage = self.columns[0]
        pages = Pages.of([x.pages for x in known], lengths, self.page_rows).to(storage.device)
        ends = torch.tensor([0, *itertools.accumulate(lengths)], device="cpu")
        offsets = ends.to(storage.device, non_blocking=True)
        host_lengths = torch.tensor(lengths, dtype=torch.int64, device="cpu")
        segmentation = segmentation_of(offsets, host_lengths)
        return tuple(PagedRows(x, offsets, pages, segmentation) for x in storage.unbind(1))

    def history(self, layers: tuple[PagedRows, ...], max_rows: int | None) -> HistoryCache:
        """Layers in pages, with their timestamps."""
        times = [gather_pages(layers[0].pages, layers[0].offsets, x)[0] for x in self.columns[1:]]
        return HistoryCache(layers, times[0] if times else None, max_rows)
