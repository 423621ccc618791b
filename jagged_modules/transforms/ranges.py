"""Ranges of users and candidates: where a placement is the cheapest, and the sizes that each
operator of the new graph has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from ..scalars import check_size
from .calls import first_of, is_operator, is_tensor
from .capture import MAP_NAME, dims_of, named
from .lineage import USERS, Lineage, Size, shape_of
from .placement import VIEWS
from .report import RANGED, Decisions, OperatorSizes, Ranges, line_of, operator_name

if TYPE_CHECKING:
    from .fuse import Plan

Limits = tuple[int, int]
Point = tuple[int | None, int | None]  # numbers of users and candidates
MaxBatch = int | tuple[int, int] | tuple[Limits, Limits] | None


# -- max_batch -------------------------------------------------------------------------------------


def check_max_batch(max_batch: MaxBatch, names: Sequence[str]) -> None:
    """TypeError or ValueError unless it is a number of candidates, a pair of numbers of users and
    candidates or a pair of ranges, and there are inputs of users."""
    if max_batch is None:
        return
    if not names:
        raise ValueError(
            "max_batch needs request_only: without it, sizes are those of example_inputs. Got"
            f" max_batch={max_batch!r}"
        )
    if not isinstance(max_batch, tuple):
        return check_size("max_batch", max_batch)
    if len(max_batch) != 2 or len({isinstance(size, tuple) for size in max_batch}) > 1:
        raise ValueError(
            "max_batch must be a number of candidates, a pair (users, candidates) or two ranges"
            f" ((least, most), (least, most)), got {max_batch}"
        )
    for position, size in enumerate(max_batch):
        if isinstance(size, tuple) and (len(size) != 2 or size[0] > size[1]):
            raise ValueError(
                f"max_batch[{position}] must be (least, most) with least <= most, got {size}"
            )
        for entry in _limits(size):
            check_size(f"max_batch[{position}]", entry)
    for users, candidates in zip(*map(_limits, max_batch)):
        if users > candidates:
            raise ValueError(
                "max_batch must be (users, candidates) with no more users than candidates, got"
                f" {users} users and {candidates} candidates"
            )


def _limits(size: Any) -> Limits:
    return size if isinstance(size, tuple) else (size, size)


def limits_of(max_batch: MaxBatch) -> dict[str, Limits]:
    """The ranges of users and candidates, none if max_batch is one point."""
    if not isinstance(max_batch, tuple) or not isinstance(max_batch[0], tuple):
        return {}
    return dict(zip(RANGED, map(_limits, max_batch)))


def corners_of(max_batch: MaxBatch) -> list[Point]:
    """The ends of the ranges, with no more users than candidates: the most candidates per user
    first."""
    if not isinstance(max_batch, tuple):
        return [(None, max_batch)]
    users, candidates = map(_limits, max_batch)
    found = [(min(u, c), c) for c in reversed(candidates) for u in users]
    return list(dict.fromkeys(found))


# -- the guard -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Guard:
    """Where the second of two placements costs less: users · U + candidates · C + constant > 0,
    with numbers of bytes. Printable. Costs are sums of bytes and FLOPs of rows, taken for linear in
    the numbers of rows between the ends of the ranges."""

    users: int
    candidates: int
    constant: int

    def __call__(self, users: Any, candidates: Any) -> Any:
        return self.users * users + self.candidates * candidates + self.constant > 0

    def __str__(self) -> str:
        return (
            f"{self.users} · users {self.candidates:+} · candidates {self.constant:+} > 0".replace(
                "+", "+ "
            ).replace(" -", " - ")
        )


def guard_between(
    first: Mapping[Point, float], second: Mapping[Point, float], limits: Mapping[str, Limits]
) -> Guard:
    """The guard of two placements whose costs at the ends of the ranges are these."""
    (u0, u1), (c0, c1) = (limits[side] for side in RANGED)
    more = {point: first[point] - second[point] for point in first}
    of_users = (more[u1, c1] - more[u0, c1]) / max(u1 - u0, 1)
    of_candidates = (more[u0, c1] - more[u0, c0]) / max(c1 - c0, 1)
    constant = more[u0, c1] - of_users * u0 - of_candidates * c1
    return Guard(*map(round, (of_users, of_candidates, constant)))


def cheapest(costs: Sequence[Mapping[Point, float]], tolerance: float) -> tuple[int, ...]:
    """One placement if it costs at each point at most `tolerance` more than the best one there,
    else the two whose better one is closest to the best. costs: of each placement, at each
    point."""
    best = {point: min(own[point] for own in costs) for point in costs[0]}

    def excess(chosen: tuple[int, ...]) -> float:
        """How much the better of the chosen costs, relative to the best, where it is worst."""
        return max(
            min(costs[x][point] for x in chosen) / least if least else 1.0
            for point, least in best.items()
        )

    placements = range(len(costs))
    one = min(itertools.combinations(placements, 1), key=excess)
    if excess(one) <= 1 + tolerance:
        return one
    return min(itertools.combinations(placements, 2), key=excess)


# -- sizes of operators ----------------------------------------------------------------------------


class Sizes:
    """The sizes of the values of a new graph, which was made of these."""

    def __init__(self, plan: Plan, decisions: Decisions) -> None:
        self.captured, self.analysis, self.batch = plan.captured, plan.analysis, plan.batch
        self.decisions, batch = decisions, plan.batch
        self._users: dict[Size, Size] = {}
        labels: dict[Size, str] = dict(self.captured.labels)
        if batch is not None:
            inputs = batch.map, *batch.users, *batch.candidates
            rows = {batch.rows, *(shape_of(x.meta["val"])[0] for x in inputs)}
            self._users = dict.fromkeys(rows, USERS)
            labels |= dict.fromkeys(rows, "candidates")
        self._named: dict[Any, Any] = {
            symbol: sympy.Symbol(label, integer=True, positive=True)
            for symbol, label in labels.items()
        }

    def ranges(self, given: Mapping[str, Any], limits: Mapping[str, Limits]) -> Ranges:
        """For the report. given: the example's inputs."""
        operators = tuple(self._operators())
        names = {*map(str, self._named.values()), *(name for x in operators for name in x.sizes)}
        of_batch = [name for name in RANGED if self.batch is not None]
        sizes = [*of_batch, *sorted(names.difference(of_batch))]
        return Ranges(
            {name: limits.get(name, (1, None)) for name in sizes}, operators, self._inputs(given)
        )

    def _operators(self) -> Iterator[OperatorSizes]:
        for node in self.captured.graph.nodes:
            if self._is_launched(node):
                yield self._operator(node)
            lineage = self.analysis.lineages.get(node)
            if lineage is not None and not lineage.is_uniform:
                base = self._shape(node, lineage.base_rows)
                for levels in self.decisions.gathered.get(node, ()):
                    gathered = self._shape(node, lineage.maps[levels - 1].rows_out)
                    yield self._sizes(node, "gather", gathered, [base])

    def _is_launched(self, node: fx.Node) -> bool:
        decisions = self.decisions
        if not is_operator(node) or node.target in VIEWS:
            return False
        if not isinstance(first_of(node.meta.get("val")), torch.Tensor):
            return False
        if node in decisions.fused:
            return node is decisions.fused[node].node
        is_source = node in decisions.moved and node in self.analysis.sources
        return node not in decisions.dead and not is_source

    def _operator(self, node: fx.Node) -> OperatorSizes:
        fusion, lineage = self.decisions.fused.get(node), self.analysis.lineages.get(node)
        moved = node in self.decisions.moved
        if fusion is not None:
            name, read, bases, lineage = fusion.name, fusion.inputs, fusion.operands, fusion.lineage
        else:
            name, read = operator_name(node), node.all_input_nodes
            bases = self.analysis.operands(node) if moved else []
        operands = [
            self._shape(x, self._rows(x, lineage) if x in bases else None)
            for x in read
            if is_tensor(x)
        ]
        result = self._shape(node, lineage.base_rows if moved and lineage is not None else None)
        return self._sizes(node, name, result, operands)

    def _rows(self, x: fx.Node, lineage: Lineage | None) -> Size:
        """Of the base of x as an operator with a lineage reads it: of nested levels, its own."""
        own = self.analysis.lineages[x]
        if lineage is None or lineage.is_uniform or own.is_uniform:
            return own.base_rows
        return lineage.base_rows

    def _shape(self, x: fx.Node, rows: Size | None) -> list[Size]:
        """Of a value, if `rows` is given with this number of rows along its lineage. Sizes have
        the names of the report."""
        sizes: list[Any] = list(shape_of(first_of(x.meta["val"])))
        lineage = self.analysis.lineages.get(x)
        bags = None if self.batch is None else self.batch.bags
        if rows is not None and lineage is not None:
            move = self.analysis.moves.get(x)
            dim = move.dims[0] if move is not None and move.dims else lineage.dim
            sizes[dim] = lineage.pre * rows * lineage.post
        elif lineage is None and bags is not None and (x in bags.nodes or x in bags.leaves):
            sizes = [size.xreplace(self._users) for size in sizes]
        return [size.xreplace(self._named) for size in sizes]

    def _sizes(
        self, node: fx.Node, name: str, result: list[Size], operands: list[list[Size]]
    ) -> OperatorSizes:
        symbols = {
            str(x) for shape in (result, *operands) for size in shape for x in size.free_symbols
        }
        known = [*RANGED, *sorted({*map(str, self._named.values())}.difference(RANGED))]
        own = [x for x in known if x in symbols]
        # sizes that no input has
        data = ["data"] if symbols.difference(known) else []
        return OperatorSizes(node.name, name, line_of(node), tuple(map(str, result)), (*own, *data))

    # -- inputs ------------------------------------------------------------------------------------

    def _inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The symbols of each input's dynamic dimensions, in torch.export's format."""
        users = set(self.batch.users) if self.batch is not None else set()

        def of_input(name: str, x: Any) -> Any:
            nodes = [node for entry in named({name: x}) for node in self.captured.inputs[entry]]
            dims = iter([self._dims(node, users) for node in nodes])
            return dims_of(x, lambda _: next(dims))

        found = {name: of_input(name, x) for name, x in given.items()}
        if self.batch is not None:
            found[MAP_NAME] = {0: sympy.Symbol("candidates", integer=True, positive=True)}
        return found

    def _dims(self, node: fx.Node, users: set[fx.Node]) -> dict[int, Size] | None:
        if not is_tensor(node):
            return None
        shape = self._shape(node, USERS if node in users else None)
        return {dim: size for dim, size in enumerate(shape) if not size.is_Integer} or None
