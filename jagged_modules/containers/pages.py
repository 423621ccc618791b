"""Rows of segments that lie in the pages of a storage."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jagged_kernels.attention.pages import Pages
from torch import Tensor

from ..segments import Segmentation
from .jagged import Jagged
from .offsets import segments_and_positions


class PagedRows(Jagged):
    """A Jagged whose rows lie in pages. Attention reads them there (`paged_operands`); what asks
    for `values` gets a copy, made once.

    storage: `[num_pages · page_rows, ...]`, on the device of the pages' table and of offsets.
    room: where an HSTU's `append` writes the keys and values of the events that follow; None:
    nowhere.
    """

    room: Room | None = None

    def __init__(
        self, storage: Tensor, offsets: Tensor, pages: Pages, segmentation: Segmentation
    ) -> None:
        self.storage, self.pages, self.offsets, self.max_seqlen = storage, pages, offsets, None
        self._known, self._container, self.feature_keys = segmentation, None, None

    def __getattr__(self, name: str) -> Tensor:
        """`values`, until the first use stores it."""
        if name != "values":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.values = gather_pages(self.pages, self.offsets, self.storage)[0]
        return self.values

    @property
    def num_rows(self) -> int:
        return self.pages.num_rows

    @property
    def device(self) -> torch.device:
        return self.storage.device

    def __reduce__(self) -> tuple[object, ...]:
        return Jagged.unchecked, (self.values, self.offsets, self.max_seqlen, self.segmentation)


class Room(NamedTuple):
    """Reserved rows for the events that follow those of `PagedRows`.

    rows: int64 `[N]` of the storage, in the order of the events. grown: the rows and the events
    after them. storage: that of the rows with a spare row behind it, which no page has.
    """

    rows: Tensor
    grown: PagedRows
    storage: Tensor

    def write(self, events: Tensor) -> PagedRows:
        """Write the events `[N, ...]`. Returns all rows. ValueError if the events have another
        dtype."""
        storage = self.storage
        if events.dtype != storage.dtype:
            raise ValueError(
                "the layer's keys and values must keep the dtype of the first put,"
                f" {storage.dtype}, got {events.dtype}"
            )
        storage.index_copy_(0, self.rows, events)
        return self.grown


def paged_operands(rows: Jagged) -> tuple[Tensor, Pages | None]:
    """What attention reads the keys and values of: `values`, or the storage and its pages where no
    gradient is computed."""
    if isinstance(rows, PagedRows) and not torch.is_grad_enabled():
        return rows.storage, rows.pages
    return rows.values, None


def room_of(rows: Jagged) -> Room | None:
    """The room for events that follow these rows."""
    return rows.room if isinstance(rows, PagedRows) else None


def gather_pages(pages: Pages, offsets: Tensor, *storages: Tensor) -> list[Tensor]:
    """The rows `[num_rows, ...]` of each storage, segment by segment."""
    offsets = offsets.to(storages[0].device, non_blocking=True)
    pages = pages.to(storages[0].device)
    segments, positions = segments_and_positions(offsets, pages.num_rows)
    entries = offsets[segments] // pages.page_rows + segments + positions // pages.page_rows
    rows = pages.table[entries].long() * pages.page_rows + positions % pages.page_rows
    return [x.index_select(0, rows) for x in storages]
