"""The segments of an attention as its kernels take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..schedule.host import TileList, num_query_groups
from .pages import Pages


class TiledSegments(NamedTuple):
    """Offsets `[B + 1]` of queries and keys, and the tiles of one of the two sides. Several query
    groups have offsets `[n · B + 1]`: their segments b, B + b, 2B + b, ... read the keys of segment
    b. long_only: kernels leave out the tiles of short segments. pages: None where the keys of
    segment b are the rows from kv_offsets[b] on; otherwise they lie in pages, and there is one
    query group. q_shared: every segment takes all rows of q; q_offsets count output rows."""

    q_offsets: Tensor
    kv_offsets: Tensor
    tiles: TileList
    long_only: bool = False
    pages: Pages | None = None
    q_shared: bool = False

    def num_keys(self, k: Tensor) -> int:
        """Keys of all segments together."""
        return k.shape[0] if self.pages is None else self.pages.num_rows

    @property
    def query_groups(self) -> int:
        queries, keys = self.q_offsets.shape[0] - 1, self.kv_offsets.shape[0] - 1
        return 1 if queries == keys else num_query_groups("q_offsets", queries, "kv_offsets", keys)

    @property
    def segments_per_group(self) -> int | None:
        """What kernels call `num_segments`: None with one query group."""
        return None if self.query_groups == 1 else self.kv_offsets.shape[0] - 1
