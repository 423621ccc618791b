"""Rows behind the last segment in layers: a layer clears them where its input enters and where its
result leaves.

In between, they are rows like others: finite, with gradients of 0 from the result on. So they add 0
to the gradients of the weights.
"""

from __future__ import annotations

from torch import Tensor

from ..containers.candidates import CandidateIndex
from ..containers.jagged import Jagged
from ..functional.tail import with_clean_tail, without_tail
from ..segments import RowSegments


def end_of(name: str, x: Jagged) -> Tensor | None:
    """The offsets, in their normal form, at whose end the rows of x end. None if the host knows it,
    or a caller has cleared those behind. Errors call x `name`."""
    return None if x.is_clean else x.parsed(name).end


def end_of_candidates(index: CandidateIndex, rows: RowSegments) -> Tensor | None:
    """The same for the rows of candidates, which are grouped by user. A map has one entry for
    each, so no row is behind them."""
    return index.offsets.contiguous() if rows.has_tail and index.order is None else None


def entering(x: Tensor, end: Tensor | None) -> Tensor:
    """A layer's input, cleared. Its gradient is 0 behind the end anyway, because that of the result
    is."""
    return x if end is None else without_tail(x, end, clears_gradient=False)


def leaving(x: Tensor, end: Tensor | None) -> Tensor:
    """A layer's result, cleared, and its gradient too."""
    return x if end is None else with_clean_tail(x, end)
