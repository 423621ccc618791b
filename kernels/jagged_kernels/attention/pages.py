"""Keys and values in pages. No triton import."""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_NUMBERS = (list, tuple, array, range)
# rows: the longest block of keys of a forward kernel, as a block lies in one page
SMALLEST_PAGE = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Pages:
    """Where the keys of an attention lie in a storage `[num_pages · page_rows, ...]`, whose pages
    many users share.

    Key n of segment b is the storage's row `page · page_rows + n % page_rows`, with

        page = table[kv_offsets[b] // page_rows + b + n // page_rows]

    So the table has `num_rows // page_rows + B` entries and needs no offsets of its own. At most
    one entry per segment is spare.

    Attributes:
        table: int32 `[num_rows // page_rows + B]`, page numbers. Spare entries may be any page's.
        page_rows: rows of a page: a power of 2, at least 128.
        num_rows: keys of all segments together, kv_offsets[-1].
        scales: fp32 `[num_pages · page_rows, heads]`, the factors of rows of a storage in 8 bits,
            which are then rounded to the dtype of the queries; None: the storage has their dtype.
    """

    table: Tensor
    page_rows: int
    num_rows: int
    scales: Tensor | None = None

    @classmethod
    def of(cls, pages: Iterable[Sequence[int]], lengths: Sequence[int], page_rows: int) -> Pages:
        """The pages of segments, with a table on the host.

        Args:
            pages: for each segment, the numbers of its pages in order; those past its last row are
                left out.
            lengths: number of keys of each segment.
            page_rows: rows of a page.

        Raises:
            TypeError: pages are not sequences of ints; a length or page_rows is no int.
            ValueError: page_rows below 1; not as many pages as lengths; a segment with too few
                pages.
        """
        for name, x, kind in (("pages", pages, Iterable), ("lengths", lengths, Sequence)):
            if isinstance(x, (str, bytes)) or not isinstance(x, kind):
                raise TypeError(
                    f"{name} must have an entry for each segment, got {type(x).__name__}"
                )
        for name, numbers in (("page_rows", (page_rows,)), ("lengths", lengths)):
            for x in numbers:
                if isinstance(x, bool) or not isinstance(x, int):
                    raise TypeError(f"{name} must be ints, got {x!r}")
        if page_rows < 1 or (lengths and min(lengths) < 0):
            raise ValueError(
                f"page_rows must be at least 1 and lengths not negative, got {page_rows} and"
                f" {list(lengths)}"
            )
        pages = list(pages)
        if len(pages) != len(lengths):
            raise ValueError(
                f"lengths must be one per segment of pages, {len(pages)}, got {len(lengths)}"
            )
        for segment, (numbers, length) in enumerate(zip(pages, lengths)):
            if not isinstance(numbers, _NUMBERS):
                raise TypeError(f"pages must be sequences of ints, got {numbers!r}")
            count = -(-length // page_rows)
            if len(numbers) < count:
                raise ValueError(
                    f"pages must have {count} pages for the {length} keys of segment {segment}, got"
                    f" {len(numbers)}"
                )
        try:
            needed = [
                array("i", numbers[: -(-length // page_rows)])
                for numbers, length in zip(pages, lengths)
            ]
        except TypeError as error:
            raise TypeError(f"pages must be sequences of ints: {error}") from None
        ends = [*itertools.accumulate(lengths)]
        return cls(table_of(needed, ends, page_rows), page_rows, ends[-1] if ends else 0)

    def to(self, device: torch.device) -> Pages:
        """The pages with their table on a device."""
        if self.table.device == device:
            return self
        return dataclasses.replace(self, table=self.table.to(device, non_blocking=True))


def table_of(pages: Sequence[array[int]], ends: Sequence[int], page_rows: int) -> Tensor:
    """`Pages.table` on the host. pages: for each segment, just those that it needs, as an array of
    type "i". ends: of the segments' keys among all keys."""
    size = ends[-1] // page_rows + len(ends) if ends else 0
    # a buffer without entries is an error
    table, first = array("i", [0]) * max(1, size), 0
    for segment, (numbers, end) in enumerate(zip(pages, ends), 1):
        table[first : first + len(numbers)] = numbers
        first = end // page_rows + segment
    return torch.frombuffer(table, dtype=torch.int32)[:size]
