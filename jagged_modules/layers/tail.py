"""Rows behind the last segment in layers: a layer clears them where its input enters and where its result leaves.

In between, they are rows like others: finite, with gradients of 0 from the result on. So they add 0 to the gradients of the weights.
"""

from __future__ import annotations

from torch import Tensor

from ..containers.candidates import CandidateIndex
from ..containers.jagged import Jagged
from ..functional.tail import End, may_have_tail, with_clean_tail, without_tail


def end_of(name: str, x: Jagged) -> End | None:
    """Where the rows of x end, if only the device knows it, and no caller has cleared those behind it. Errors call x `name`."""
    if x.is_clean or not may_have_tail(f"{name}'s offsets", x.offsets, x.num_rows, x.device):
        return None
    return End(x.offsets.to(x.device, non_blocking=True))


def end_of_candidates(candidates: CandidateIndex, targets: Tensor) -> End | None:
    """The same for targets `[num_candidates, ...]`. Candidates that belong to no user are behind the end in the index's order."""
    if not may_have_tail("candidates", candidates.offsets, targets.shape[0], targets.device):
        return None
    candidates = candidates.to(targets.device)
    return End(candidates.offsets, candidates.inverse)


def entering(x: Tensor, end: End | None) -> Tensor:
    """A layer's input, cleared. Its gradient is 0 behind the end anyway, because that of the result is."""
    return x if end is None else without_tail(x, end, clears_gradient=False)


def leaving(x: Tensor, end: End | None) -> Tensor:
    """A layer's result, cleared, and its gradient too."""
    return x if end is None else with_clean_tail(x, end)
