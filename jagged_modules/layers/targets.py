"""The targets of a layer, parsed: query rows, the histories of each level, and their segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn

from ..containers.candidates import CandidateIndex
from ..containers.conversions import wait_for
from ..containers.jagged import Jagged, check_same_segments, wrap_rows
from ..functional.target_levels import Level
from ..scalars import is_sequence
from ..segments import RowSegments
from ..validation import check_layer_tensor

T = TypeVar("T")  # the container of the targets, or a dense tensor
LevelIndices = tuple[CandidateIndex | Tensor, ...] | list[CandidateIndex | Tensor]


class Targets(NamedTuple):
    """Targets as attention takes them, and the way back to the form they came in.

    Attributes:
        rows: `[N, E_t]` of a container, `[B, T, E_t]`, or `[num_candidates, n_q, E_t]`, as given.
        levels: their segments and histories. There are several only where candidates are indices of
            several.
        end: where the rows may have to be cleared, see `functional/tail.py`: those behind it have
            no history in any level.
        of_levels: whether the caller gave indices of levels, which may be one.
    """

    rows: Tensor
    levels: Sequence[Level]
    end: Tensor | None = None
    of_levels: bool = False

    def unwrap(self, x: Tensor) -> Any:
        """Results, in the form of the targets."""
        container = self.levels[0].container
        return x if container is None else container.unwrap(x)


def are_levels(candidates: object) -> TypeGuard[LevelIndices]:
    """Whether these are the indices of several levels. A list of users is not."""
    if not is_sequence(candidates):
        return False
    given = cast("list[object]", candidates)
    return all(isinstance(x, (CandidateIndex, Tensor)) for x in given)


def parse_histories(
    name: str, x: Any, candidates: object, parse: Callable[[str, Any], Jagged]
) -> dict[str, Jagged]:
    """The history of each level by its name in errors, of which `parse` makes it. ValueError if
    candidates are of several levels, and x is not a tuple of as many entries."""
    if not are_levels(candidates):
        return {name: parse(name, x)}
    if not is_sequence(x) or len(x) != len(candidates) or not candidates:
        got = f"{len(x)}" if is_sequence(x) else type(x).__name__
        raise ValueError(
            f"{name} must be a tuple with an entry for each level, as candidates, which have"
            f" {len(candidates)}, got {got}"
        )
    return {f"{name}[{i}]": parse(f"{name}[{i}]", entry) for i, entry in enumerate(x)}


def parse_targets(
    targets: Any,
    candidates: Any,
    histories: Mapping[str, Jagged],
    projection: nn.Module,
    width: int,
    *,
    may_be_equal: bool = True,
) -> Targets:
    """The targets of these histories. TypeError or ValueError unless all match.

    Args:
        histories: of `parse_histories`.
        projection, width: that of the targets, and E_t.
        may_be_equal: whether a dense tensor `[B, T, E_t]` without candidates is taken.
    """
    targets = wait_for(targets)
    if candidates is not None:
        return _with_candidates(targets, candidates, histories, projection, width)
    ((name, history),) = histories.items()
    num_segments = history.num_segments
    if isinstance(targets, Tensor) and not targets.is_nested:
        if not may_be_equal:
            raise TypeError(
                "targets must be a container of rows, or a dense tensor [num_candidates, n_q, E_t]"
                " with candidates, got a Tensor without candidates"
            )
        rows = _checked(targets, projection, width, "[B, T, E_t]")
        if rows.shape[0] != num_segments:
            raise ValueError(
                "targets without candidates must be one per history segment,"
                f" {num_segments}, got {rows.shape[0]}"
            )
        keys = history.parsed(name)
        queries = RowSegments.equal(rows.shape[1], num_segments, keys.offsets)
        level = Level(queries, keys, shape=rows.shape[:2], history=history)
        return Targets(rows, (level,))
    container = wrap_rows("targets", targets, width, projection)
    check_same_segments("targets", container, name, history)
    queries, keys = container.parsed("targets"), history.parsed(name)
    level = Level(queries, keys, container=container, history=history)
    return Targets(container.values, (level,), container.end("targets"))


def _with_candidates(
    targets: Any,
    candidates: Any,
    histories: Mapping[str, Jagged],
    projection: nn.Module,
    width: int,
) -> Targets:
    """Of one index, or of as many as there are histories."""
    of_levels = are_levels(candidates)
    given: Any = {"candidates": candidates}
    if of_levels:
        given = {f"candidates[{i}]": x for i, x in enumerate(candidates)}
    rows = _checked(targets, projection, width, "[num_candidates, n_q, E_t]")
    shape = rows.shape[:2]
    levels: list[Level] = []
    ends: list[Tensor] = []
    for (own, x), (name, history) in zip(given.items(), histories.items()):
        index, queries = CandidateIndex.parse(
            x, rows, history.num_segments, shape[1], "targets", own
        )
        levels.append(Level(queries, history.parsed(name), index, shape, None, history))
        # A map has one entry for each candidate, so no row is behind them.
        if queries.has_tail and index.order is None:
            ends.append(index.query_offsets(1))
    end = ends[0] if len(ends) == len(levels) else None
    if end is not None and len(ends) > 1:
        end = torch.stack([x[-1:] for x in ends]).amax(0)
    return Targets(rows, levels, end, of_levels)


def _checked(targets: Any, projection: nn.Module, width: int, shape: str) -> Any:
    """A dense tensor of targets, which the projection takes. Errors give `shape` as expected."""
    check_layer_tensor("targets", targets, shape, projection)
    if targets.dim() != 3 or targets.shape[-1] != width:
        raise ValueError(
            f"targets must have shape {shape} with E_t = {width}, got {list(targets.shape)}"
        )
    return targets
