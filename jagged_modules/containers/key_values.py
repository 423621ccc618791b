"""KeyValues: keys and values of the histories of a batch."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from .jagged import Jagged


@dataclasses.dataclass(frozen=True, eq=False)
class KeyValues:
    """Keys and values of B histories. A layer's `cache` returns them and its `score` takes them. `HistoryCache` keeps those of many users.

    layers: one Jagged of B segments per layer, with values `[L, H, key width + value width]`: keys and values of the rows that targets see.
        Its max_seqlen is that of the histories.
    timestamps: int64 `[L]` of these rows, for an HSTU with config.relative_time; else None.
    """

    layers: tuple[Jagged, ...]
    timestamps: Tensor | None = None

    @property
    def num_segments(self) -> int:
        """The number B of histories."""
        return self.layers[0].num_segments
