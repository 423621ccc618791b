"""Rows of segments that lie in the pages of a storage."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any, NamedTuple

import torch
from jagged_kernels.attention.pages import Pages
from torch import Tensor
from torch.nn.functional import pad

from ..scalars import check_equal
from ..segments import Segmentation, outside_inference_mode, segmentation_of
from .jagged import Jagged
from .offsets import segments_and_positions

DTYPES_OF_8_BITS = torch.int8, torch.float8_e4m3fn


@dataclasses.dataclass(eq=False)
class UserTable:
    """Which pages have the rows of which user, on the host, where `jm.graphed` takes it from. All
    layers share it, and what follows from it on the rows' device, which the first use makes.

    users: int32 `[B, 2 + P]`, of each user the number of rows, `PagedHistoryCache.slots`, the
        pages, and zeros behind them.
    num_rows: of all users. device: of the rows.
    events: offsets `[B + 1]` and number of the new events, which are the last rows of the users.
    tables: offsets and table of `Pages` on the host, if they are made there.
    """

    users: Tensor
    page_rows: int
    num_rows: int
    device: torch.device
    events: tuple[Tensor, int] | None = None
    tables: tuple[Tensor, Tensor] | None = None

    @functools.cached_property
    def moved(self) -> tuple[Tensor, Pages, Segmentation]:
        """Offsets, pages and segmentation, on the device."""
        with outside_inference_mode():
            if self.tables is None:
                users = self.users.to(self.device, non_blocking=True)
                offsets, table = tables_of(users, self.page_rows, self.num_rows)
            else:
                offsets, table = (x.to(self.device, non_blocking=True) for x in self.tables)
        # the pages are in use as long as either table exists
        weakref.finalize(table.untyped_storage(), _forget, self.users).atexit = False
        pages = Pages(table, self.page_rows, self.num_rows)
        return offsets, pages, segmentation_of(offsets, self.users[:, 0].long())

    @functools.cached_property
    def room(self) -> Tensor:
        """The rows that the new events are written to, on the device."""
        assert self.events is not None
        users, offsets = (
            x.to(self.device, non_blocking=True) for x in (self.users, self.events[0])
        )
        return rows_of_events(users, offsets, self.events[1], self.page_rows, spare=-1)


def _forget(table: Tensor) -> None:
    """Called with what was kept until now."""


def tables_of(users: Tensor, page_rows: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Offsets `[B + 1]` and table of `Pages` of the users, for graphs by few operators."""
    size, width = users.shape[0], users.shape[1] - 2
    offsets = pad(users[:, 0].cumsum(0), (1, 0))
    segments = torch.arange(size, device=users.device)
    first = offsets[:-1].div(page_rows, rounding_mode="trunc") + segments
    entries = torch.arange(num_rows // page_rows + size, device=users.device)
    segments = torch.searchsorted(first[1:], entries, right=True)
    within = (entries - first[segments]).clamp(max=width - 1)  # spare entries: any page
    return offsets, users[:, 2:][segments, within]


def rows_of_events(
    users: Tensor, offsets: Tensor, count: int, page_rows: int, spare: int
) -> Tensor:
    """The rows of a storage that so many events with these offsets are written to: the last rows of
    the users. Those of users without rows, which are padding, are written to the spare row."""
    events = torch.arange(count, device=users.device)
    ends = offsets[1:].long()
    segments = torch.searchsorted(ends, events, right=True)
    rows = events + (users[:, 0] - ends)[segments]
    known = rows.clamp(min=0)
    pages = users[:, 2:][segments, known.div(page_rows, rounding_mode="trunc")]
    return torch.where(rows < 0, spare, (known % page_rows).add(pages, alpha=page_rows))


class PagedRows(Jagged):
    """A Jagged whose rows lie in pages. Attention reads them there (`paged_operands`); what asks
    for `values` gets a copy, made once.

    storage: `[num_pages · page_rows, ...]`, on the device of the pages' table and of offsets.
    host: where these two come from at their first use, and graphs' tables; None: they are there.
    scales: of `host`, as in `Pages`.
    dtype: of `values`; another one than that of the storage if the pages have scales.
    room: for a layer's `append`, where it writes the keys and values of the new events. The
    offsets and the pages are those of all rows, with the events.
    slots: of a cache, int64 `[B]` on the device: see `PagedHistoryCache.slots`. 0 of padding.
    """

    room: Room | None = None
    host: UserTable | None = None
    scales: Tensor | None = None

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
        cls, storage: Tensor, scales: Tensor | None, tables: UserTable, dtype: torch.dtype
    ) -> PagedRows:
        """Rows whose tables are on the host."""
        rows = object.__new__(cls)
        rows.storage, rows.max_seqlen, rows.dtype, rows.host = storage, None, dtype, tables
        rows.scales, rows._container, rows.feature_keys = scales, None, None
        return rows

    def move(self) -> None:
        """Make the tables on the device."""
        assert self.host is not None
        self.offsets, pages, self._known = self.host.moved
        self.pages = dataclasses.replace(pages, scales=self.scales)

    def __getattr__(self, name: str) -> Any:
        """`values`, and what is made of `host`, until the first use stores them."""
        if name in ("offsets", "pages", "_known") and self.host is not None:
            self.move()
            return vars(self)[name]
        if name == "slots" and self.host is not None:
            self.slots = self.host.users[:, 1].to(self.device, torch.int64, non_blocking=True)
            return self.slots
        if name != "values":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.values = gather_keys(self.pages, self.offsets, self.dtype, self.storage)[0]
        return self.values

    @property
    def num_segments(self) -> int:
        if self.host is None or self.host.tables is not None:  # which torch.compile reads
            return self.offsets.shape[0] - 1
        return self.host.users.shape[0]

    @property
    def num_rows(self) -> int:
        return self.pages.num_rows if self.host is None else self.host.num_rows

    @property
    def device(self) -> torch.device:
        return self.storage.device

    def write(self, events: Tensor) -> None:
        """Write the events `[N, ...]` into the room. ValueError if they have another dtype."""
        assert self.room is not None
        must = "keep the dtype of the first put"
        check_equal("the layer's keys and values", must, self.dtype, events.dtype)
        storage, scales, rows = self.room
        write_rows(storage, scales, self.host.room if self.host else rows, events)

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
    """Where the last events of `PagedRows` are to be written. storage, scales: those of the rows
    with a spare row behind them, which no page has. rows: int64 `[N]` of the storage, on its
    device, in the order of the events, if they are not in a `UserTable`."""

    storage: Tensor
    scales: Tensor | None
    rows: Any = None


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
    # of rows behind the last segment, which graphs have, any entry
    entries = (first + segments + within).clamp(max=pages.table.shape[0] - 1)
    rows = pages.table[entries].long() * pages.page_rows + positions % pages.page_rows
    return [x.index_select(0, rows) for x in storages]
