"""Targets of a layer that have histories in several levels, for example of user and vendor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn

from ..containers.candidates import CandidateIndex
from ..containers.jagged import Jagged
from ..functional.attention_call import AttentionOptions
from ..functional.target_levels import Level, attend_each, attend_jointly
from ..scalars import is_sequence
from .targets import Targets, parse_targets

LevelIndices = tuple[CandidateIndex | Tensor, ...] | list[CandidateIndex | Tensor]


def are_levels(candidates: object) -> TypeGuard[LevelIndices]:
    """Whether these are the indices of several levels. A list of users is not."""
    if not is_sequence(candidates):
        return False
    given = cast("list[object]", candidates)
    return all(isinstance(x, (CandidateIndex, Tensor)) for x in given)


def histories_of_levels(
    name: str, x: Any, candidates: Sequence[Any], parse: Callable[[str, Any], Jagged]
) -> list[Jagged]:
    """The history of each level, by `parse` of its name in errors and of its entry in x.

    Raises:
        ValueError: x is not a tuple of as many entries as candidates.
    """
    if not is_sequence(x) or len(x) != len(candidates) or not candidates:
        got = f"{len(x)}" if is_sequence(x) else type(x).__name__
        raise ValueError(
            f"{name} must be a tuple with an entry for each level, as candidates, which have"
            f" {len(candidates)}, got {got}"
        )
    return [parse(f"{name}[{i}]", entry) for i, entry in enumerate(x)]


class LevelTargets(NamedTuple):
    """Targets with histories in several levels.

    Attributes:
        rows: `[num_candidates, n_q, E_t]`, as given.
        end: where rows may have to be cleared: those behind it have no parent in any level.
        of_levels: the targets grouped by the parents of each level.
        histories: of each level. name: what errors call them.
    """

    rows: Tensor
    end: Tensor | None
    of_levels: Sequence[Targets]
    histories: Sequence[Jagged]
    name: str

    @classmethod
    def parse(
        cls,
        targets: Any,
        candidates: Sequence[Any],
        histories: Sequence[Jagged],
        projection: nn.Module,
        width: int,
        name: str = "history",
    ) -> LevelTargets:
        """Of one index for each level. The other arguments and the errors are those of
        `parse_targets`."""
        of_levels = [
            parse_targets(targets, index, history, projection, width, history_name=f"{name}[{i}]")
            for i, (index, history) in enumerate(zip(candidates, histories))
        ]
        ends = [level.end[-1:] for level in of_levels if level.end is not None]
        end = torch.stack(ends).amax(0) if len(ends) == len(of_levels) else None
        return cls(of_levels[0].rows, end, of_levels, histories, name)

    def results_of(
        self,
        q: Tensor,
        keys_and_values: Sequence[Sequence[Tensor]],
        levels: str = "joint",
        dropout_p: float = 0,
    ) -> tuple[Tensor, ...]:
        """The attention of q `[num_candidates, n_q, H, D]` to k and v of the levels: one result, or
        one for each level.

        levels, dropout_p: those of `target_attention`.
        """
        parsed: list[Level] = []
        for i, (given, (k, v)) in enumerate(zip(self.of_levels, keys_and_values)):
            assert given.candidates is not None
            keys = self.histories[i].parsed(f"{self.name}[{i}]")
            parsed.append(Level(k, v, given.candidates, given.segments, keys))
        options = AttentionOptions(dropout_p=dropout_p)
        if levels == "joint":
            return (attend_jointly(q, parsed, options),)
        return attend_each(q, parsed, options)
