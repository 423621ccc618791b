"""Rows behind the last segment in layers: a layer clears them where its input enters and where its
result leaves.

In between, they are rows like others: finite, with gradients of 0 from the result on. So they add 0
to the gradients of the weights.
"""

from __future__ import annotations

from torch import Tensor

from ..containers.candidates import CandidateIndex
from ..containers.jagged import Jagged
from ..functional.tail import may_have_tail, with_clean_tail, without_tail
from ..validation import normal_form


def end_of(name: str, x: Jagged) -> Tensor | None:
    """The offsets, in their normal form, at whose end the rows of x end. None if the host knows it,
    or a caller has cleared those behind. Errors call x `name`."""
    if x.is_clean or not may_have_tail(f"{name}'s offsets", x.offsets, x.num_rows, x.device):
        return None
    return normal_form(x.offsets, x.device)


def end_of_candidates(candidates: CandidateIndex, targets: Tensor) -> Tensor | None:
    """The same for targets `[num_candidates, ...]` that are grouped by user. A map has one entry
    for each."""
    known = candidates.order is not None or not may_have_tail(
        "candidates", candidates.offsets, targets.shape[0], targets.device
    )
    return None if known else normal_form(candidates.offsets, targets.device)


def entering(x: Tensor, end: Tensor | None) -> Tensor:
    """A layer's input, cleared. Its gradient is 0 behind the end anyway, because that of the result
    is."""
    return x if end is None else without_tail(x, end, clears_gradient=False)


def leaving(x: Tensor, end: Tensor | None) -> Tensor:
    """A layer's result, cleared, and its gradient too."""
    return x if end is None else with_clean_tail(x, end)
