"""The targets of a layer, parsed: query rows and their segments, from each form they come in."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..containers.candidates import CandidateIndex
from ..containers.conversions import wait_for
from ..containers.jagged import Jagged, check_same_segments
from ..segments import Queries, RowSegments, check_dense
from ..validation import check_layer_input


class Targets(NamedTuple):
    """Targets as attention takes them, and the way back to the form they came in.

    Attributes:
        rows: `[N, E_t]` of a container, `[B, T, E_t]`, or `[num_candidates, n_q, E_t]`, as given.
        segments: of the query rows, grouped by user.
        end: where the rows may have to be cleared, see `functional/tail.py`.
        candidates: their index, on the rows' device, or None.
        container: whose values the rows are, or None.
    """

    rows: Tensor
    segments: RowSegments
    end: Tensor | None = None
    candidates: CandidateIndex | None = None
    container: Jagged | None = None

    @property
    def queries(self) -> Queries | int:
        """What `Jagged.schedule` calls queries."""
        if self.candidates is not None:
            return self.candidates
        return self.rows.shape[1] if self.container is None else self.container

    @property
    def rows_per_candidate(self) -> int:
        """n_q; 1 without candidates."""
        return 1 if self.candidates is None else self.rows.shape[1]

    def grouped(self, x: Tensor) -> Tensor:
        """x, with heads `[..., H, D]`, as queries `[rows, H, D]` grouped by user."""
        if self.candidates is not None:
            x = self.candidates.grouped(x)
        return x if self.container is not None else x.flatten(0, 1)

    def ungrouped(self, x: Tensor) -> Tensor:
        """Undo `grouped` for results `[rows, ...]`."""
        if self.container is not None:
            return x
        x = torch.unflatten(x, 0, self.rows.shape[:2])
        return x if self.candidates is None else self.candidates.ungrouped(x)

    def unwrap(self, x: Tensor) -> Any:
        """Results, in the form of the targets."""
        return x if self.container is None else self.container.unwrap(x)


def parse_targets(
    targets: Any,
    candidates: Any,
    history: Jagged,
    projection: nn.Module,
    width: int,
    *,
    history_name: str = "history",
    may_be_equal: bool = True,
) -> Targets:
    """The targets of the users whose histories these are.

    Args:
        projection, width: that of the targets, and E_t.
        history_name: what errors call the history.
        may_be_equal: whether a dense tensor `[B, T, E_t]` without candidates is taken.

    Raises:
        TypeError, ValueError: types, shapes, dtypes, devices or numbers of segments do not match.
    """
    targets = wait_for(targets)
    if candidates is not None:
        index = CandidateIndex.wrap(candidates, history.num_segments)
        shape = "[num_candidates, n_q, E_t]"
        rows = _checked(targets, projection, width, 3, shape)
        index = index.matched(rows, history.num_segments, "targets")
        segments = index.parsed(*rows.shape[:2])
        # A map has one entry for each candidate, so no row is behind them.
        ends = segments.has_tail and index.order is None
        return Targets(rows, segments, index.offsets.contiguous() if ends else None, index)
    if may_be_equal and isinstance(targets, Tensor) and not targets.is_nested:
        rows = _checked(targets, projection, width, 3, "[B, T, E_t]")
        if rows.shape[0] != history.num_segments:
            raise ValueError(
                "targets without candidates must be one per history segment,"
                f" {history.num_segments}, got {rows.shape[0]}"
            )
        like = history.parsed(history_name).offsets
        return Targets(rows, RowSegments.equal(rows.shape[1], history.num_segments, like))
    container = Jagged.wrap(targets, name="targets")
    check_same_segments("targets", container, history_name, history)
    rows = _checked(container.values, projection, width, 2, "[N, E_t]")
    end = container.end("targets")
    return Targets(rows, container.parsed("targets"), end, container=container)


def _checked(targets: Any, projection: nn.Module, width: int, dim: int, shape: str) -> Tensor:
    """Targets with `dim` dimensions, which the projection takes. Errors give `shape` as the
    expected shape."""
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets must be a torch.Tensor {shape}, got {type(targets).__name__}")
    check_dense("targets", targets)
    if targets.dim() != dim or targets.shape[-1] != width:
        raise ValueError(
            f"targets must have shape {shape} with E_t = {width}, got {list(targets.shape)}"
        )
    check_layer_input("targets", targets, projection)
    return targets
