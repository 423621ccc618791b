"""What the methods of an HSTULayer pass on: rows with their projections, and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jagged_kernels.attention.pages import Pages
from torch import Tensor

from ..bias import RelativeBias
from ..containers.history_cache import HistoryCache
from ..containers.jagged import Jagged
from ..functional.tail import leaving


class Rows(NamedTuple):
    """The rows of a call: their values, and the projections of these, which are finite behind
    `end`."""

    jagged: Jagged
    end: Tensor | None
    values: Tensor
    u: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    def keys_and_values(self) -> Tensor:
        return leaving(torch.cat([self.k, self.v], dim=2), self.end)


class Keys(NamedTuple):
    """What rows attend to: keys and values of these segments, in pages or not. k and v are None if
    a node computes them."""

    jagged: Jagged
    k: Any
    v: Any
    bias: RelativeBias | None
    pages: Pages | None = None


def joined(rows: Jagged, added: Jagged) -> Jagged:
    """Each segment's rows, then those that are added. Copies both."""
    return HistoryCache((rows,)).append(HistoryCache((added,))).layers[0]
