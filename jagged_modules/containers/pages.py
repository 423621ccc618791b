"""Rows of segments that lie in the pages of a storage."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any, NamedTuple

import torch
from jagged_kernels.attention.pages import Pages
from torch import Tensor

from ..scalars import check_equal
from ..segments import Segmentation, outside_inference_mode, segmentation_of
from .jagged import Jagged
from .offsets import segments_and_positions

DTYPES_OF_8_BITS = torch.int8, torch.float8_e4m3fn


@dataclasses.dataclass(eq=False)
class HostTables:
    """The offsets and the page table of rows in pages, on the host, where `jm.graphed` takes them
    from. All layers share them, and their copy on the rows' device, which the first use makes."""

    offsets: Tensor
    pages: Pages
    device: torch.device

    @functools.cached_property
    def moved(self) -> tuple[Tensor, Pages, Segmentation]:
        """Offsets, pages and segmentation, on the device."""
        with outside_inference_mode():
            offsets = self.offsets.to(self.device, non_blocking=True)
            pages = self.pages.to(self.device)
        own, copied = self.pages.table, pages.table
        if copied is not own:  # the pages are in use as long as either table exists
            weakref.finalize(copied.untyped_storage(), _forget, own).atexit = False
        return offsets, pages, segmentation_of(offsets, self.offsets.diff())


def _forget(table: Tensor) -> None:
    """Called with what was kept until now."""


class PagedRows(Jagged):
    """A Jagged whose rows lie in pages. Attention reads them there (`paged_operands`); what asks
    for `values` gets a copy, made once.

    storage: `[num_pages · page_rows, ...]`, on the device of the pages' table and of offsets.
    host: where these two come from at their first use; None: they are there.
    dtype: of `values`; another one than that of the storage if the pages have scales.
    room: for a layer's `append`, where it writes the keys and values of the new events. The
    offsets and the pages are those of all rows, with the events.
    """

    room: Room | None = None
    host: HostTables | None = None
    _scales: Tensor | None = None

    def __init__(
        self,
        storage: Tensor,
        offsets: Tensor,
        pages: Pages,
        segmentation: Segmentation,
        dtype: torch.dtype,
    ) -> None:
        self.storage, self.pages, self.offsets, self.max_seqlen = storage, pages, offsets, None
        self.dtype = dtype
        self._known, self._container, self.feature_keys = segmentation, None, None

    @classmethod
    def of(
        cls, storage: Tensor, scales: Tensor | None, tables: HostTables, dtype: torch.dtype
    ) -> PagedRows:
        """Rows whose tables are on the host. scales: as in `Pages`, on the storage's device."""
        rows = object.__new__(cls)
        rows.storage, rows.max_seqlen, rows.dtype, rows.host = storage, None, dtype, tables
        rows._scales, rows._container, rows.feature_keys = scales, None, None
        return rows

    @property
    def tables(self) -> tuple[Tensor, Pages, Tensor | None]:
        """The offsets, the pages and their scales. The first two are on the host, and without
        scales, if they were made there."""
        if self.host is None:
            return self.offsets, self.pages, self.pages.scales
        return self.host.offsets, self.host.pages, self._scales

    def __getattr__(self, name: str) -> Any:
        """`values`, and tables on the device, until the first use stores them."""
        if name in ("offsets", "pages", "_known") and self.host is not None:
            self.offsets, pages, self._known = self.host.moved
            self.pages = dataclasses.replace(pages, scales=self._scales)
            return vars(self)[name]
        if name != "values":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.values = gather_keys(self.pages, self.offsets, self.dtype, self.storage)[0]
        return self.values

    @property
    def num_segments(self) -> int:
        return self.tables[0].shape[0] - 1

    @property
    def num_rows(self) -> int:
        return self.tables[1].num_rows

    @property
    def device(self) -> torch.device:
        return self.storage.device

    def write(self, events: Tensor) -> None:
        """Write the events `[N, ...]` into the room. ValueError if they have another dtype."""
        assert self.room is not None
        must = "keep the dtype of the first put"
        check_equal("the layer's keys and values", must, self.dtype, events.dtype)
        rows, storage, scales = self.room
        write_rows(storage, scales, rows.to(storage.device, non_blocking=True), events)

    def __reduce__(self) -> tuple[object, ...]:
        """A copy has a storage with the pages of its table alone."""
        pages, entries = self.pages, self.pages.table.long()

        def own(x: Tensor) -> Tensor:
            by_page = torch.unflatten(x, 0, (-1, pages.page_rows))
            return by_page.index_select(0, entries).flatten(0, 1)

        pages = dataclasses.replace(
            pages,
            table=torch.arange(len(entries), dtype=torch.int32, device=entries.device),
            scales=None if pages.scales is None else own(pages.scales),
        )
        return PagedRows, (own(self.storage), self.offsets, pages, self.segmentation, self.dtype)


class Room(NamedTuple):
    """The rows of the last events of `PagedRows`, which are to be written. rows: int64 `[N]` of the
    storage, on its device or on the host, in the order of the events. storage, scales: those of the
    rows with a spare row behind them, which no page has."""

    rows: Tensor
    storage: Tensor
    scales: Tensor | None = None


def paged_operands(rows: Jagged) -> tuple[Tensor, Pages | None]:
    """What attention reads the keys and values of: `values`, or the storage and its pages where no
    gradient is computed."""
    if isinstance(rows, PagedRows) and not torch.is_grad_enabled():
        return rows.storage, rows.pages
    return rows.values, None


def with_room(rows: Jagged) -> PagedRows | None:
    """The rows, if they have room for new events."""
    return rows if isinstance(rows, PagedRows) and rows.room is not None else None


def write_rows(storage: Tensor, scales: Tensor | None, rows: Tensor, new: Tensor) -> None:
    """Write new rows `[N, heads, width]` to these rows of the storage."""
    if scales is not None:
        new, of_rows = in_8_bits(new, storage.dtype)
        scales.index_copy_(0, rows, of_rows)
        storage, new = storage.view(torch.int8), new.view(torch.int8)  # torch copies no float8
    storage.index_copy_(0, rows, new)


def in_8_bits(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x `[..., width]` as numbers of dtype, and their factors `[...]` in fp32: the largest of a row
    and head becomes the dtype's largest number. An inf or a NaN makes its row and head NaN."""
    whole, x = not dtype.is_floating_point, x.float()
    scales = x.abs().amax(-1) / (127 if whole else torch.finfo(dtype).max)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    x = x / torch.where(scales > 0, scales, 1).unsqueeze(-1)
    return (x.round() if whole else x).to(dtype), scales


def from_8_bits(x: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Undo `in_8_bits`; without scales, x."""
    return x if scales is None else (x.float() * scales.unsqueeze(-1)).to(dtype)


def gather_keys(
    pages: Pages, offsets: Tensor, dtype: torch.dtype, *storages: Tensor
) -> list[Tensor]:
    """`gather_pages` of keys and values, in this dtype if their storages are in 8 bits."""
    if pages.scales is None:
        return gather_pages(pages, offsets, *storages)
    *rows, scales = gather_pages(pages, offsets, *storages, pages.scales)
    return [from_8_bits(x, scales, dtype) for x in rows]


def gather_pages(pages: Pages, offsets: Tensor, *storages: Tensor) -> list[Tensor]:
    """The rows `[num_rows, ...]` of each storage, segment by segment."""
    offsets = offsets.to(storages[0].device, non_blocking=True)
    pages = pages.to(storages[0].device)
    segments, positions = segments_and_positions(offsets, pages.num_rows)
    first, within = (  # not by //, at which torch.export.draft_export of 2.13 fails
        torch.div(x, pages.page_rows, rounding_mode="trunc") for x in (offsets[segments], positions)
    )
    entries = first + segments + within
    rows = pages.table[entries].long() * pages.page_rows + positions % pages.page_rows
    return [x.index_select(0, rows) for x in storages]
