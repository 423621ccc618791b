"""Walks over a module that are cheap enough for each call."""

from __future__ import annotations

import operator
from collections.abc import ValuesView
from itertools import chain
from typing import Any

from torch import Tensor, nn

_HELD = operator.itemgetter("_modules", "_parameters", "_buffers")  # of a module's attributes
_flat = chain.from_iterable


class Members:
    """The module and all modules inside of it, and their parameters and buffers, as lists. What
    several modules share comes several times. torch's iterators take far longer.

    ids: of all that the modules hold, None too, and how much each holds: a parameter may have moved
        to another module.
    """

    modules: list[nn.Module]
    parameters: list[Tensor]
    buffers: list[Tensor]
    ids: tuple[int, ...] = ()

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: list[dict[str, Any]] = []
        # what the modules hold. Kept alive: others could get the ids of these
        self._dicts: list[dict[str, Any]] = []
        self._held: list[Any] = []
        self._dict_ids: tuple[int, ...] | None = None
        # which see what the dictionaries have at any time
        self._views: list[ValuesView[Any]] = []

    def refresh(self) -> Members:
        """Make the lists again if a module holds something else than at the last call."""
        same = tuple(map(id, _flat(map(_HELD, self._parts)))) == self._dict_ids
        if not same or self._ids_now() != self.ids:
            self._list()
        return self

    def _ids_now(self) -> tuple[int, ...]:
        return *map(id, _flat(self._views)), *map(len, self._views)

    def _list(self) -> None:
        self.modules = [self._module]
        for part in self.modules:  # which grows meanwhile
            self.modules += [x for x in part.__dict__["_modules"].values() if x is not None]
        self._parts = [x.__dict__ for x in self.modules]
        self._dicts = [*_flat(map(_HELD, self._parts))]
        self._dict_ids = tuple(map(id, self._dicts))
        self._views = [x.values() for x in self._dicts]
        self._held, self.ids = [*_flat(self._views)], self._ids_now()
        self.parameters, self.buffers = (
            [x for part in self._parts for x in part[kind].values() if x is not None]
            for kind in ("_parameters", "_buffers")
        )
