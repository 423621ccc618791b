"""Attention of candidates to histories of several levels, one behind the other: of their user and
of their vendor, for example.

    k(cat([x[m], y[n]], T)) = cat([k(x)[m], k(y)[n]], T)

if k computes each row of T from the same row: if a rule says so for rows along T. Then keys and
values are computed at the batch of their level, and one attention reads all levels in place.
Otherwise rows of the coarser levels would be copied to the finest one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx
from torch.fx.node import map_arg

from .analysis import Analysis, analyse
from .attention import TargetAttention, find_unmasked
from .calls import Call, positional, unbind
from .clean_up import aten, call
from .lineage import Lineage, Map, Size, shape_of


@dataclass
class LevelAttention:
    """An attention whose keys and values are concatenations of G[map], with a map for each part.

    Attributes:
        node, query, transposed, scale, reads: as of `TargetAttention`.
        keys, values: the parts.
        heads: of the first dimension, if it is batch · heads, else None.
    """

    node: fx.Node
    query: fx.Node
    keys: list[fx.Node]
    values: list[fx.Node]
    transposed: bool
    scale: float
    heads: int | None
    reads: set[tuple[fx.Node, fx.Node]] = field(default_factory=set)
    lineage: Lineage | None = None  # each part has its own
    name = "target_attention"
    products = ()

    @property
    def inputs(self) -> list[fx.Node]:
        return [self.query, *self.operands]

    @property
    def operands(self) -> list[fx.Node]:
        return [*self.keys, *self.values]


def find_level_attentions(
    graph: fx.Graph, analysis: Analysis, estimate: Callable[[Size], int]
) -> dict[fx.Node, LevelAttention]:
    """All attentions to several levels, by the node of their result."""
    found: dict[fx.Node, LevelAttention] = {}
    for match in find_unmasked(graph, estimate):
        keys, values = (_parts(x) for x in (match.key, match.value))
        maps = [_levels(x, analysis, estimate) for x in (keys, values)]
        if maps[0] is None or maps[0] != maps[1] or match.node in analysis.lineages:
            continue
        ndim, post = match.key.meta["val"].dim(), analysis.lineages[keys[0]].post
        dims = [Call(x, {}).dim("dim", ndim) for x in (match.key, match.value)]
        if dims != [ndim - 1 if match.transposed else ndim - 2, ndim - 2] or (
            not post.is_Integer or (ndim == 4 and post != 1)
        ):
            continue
        reads = {(x, match.key) for x in keys} | {(x, match.value) for x in values} | match.reads
        own = match.node, match.query, keys, values, match.transposed, match.scale
        found[match.node] = LevelAttention(*own, int(post) if ndim == 3 else None, reads)
    return found


def _parts(x: fx.Node) -> list[fx.Node]:
    return list(positional(x)[0]) if x.target is aten.cat.default else []


def _levels(
    parts: list[fx.Node], analysis: Analysis, estimate: Callable[[Size], int]
) -> list[Any] | None:
    """The maps of the parts, if they are of levels of which each has fewer than half as many rows
    as the next finer one; else None."""
    lineages = [analysis.lineages.get(x) for x in parts]
    real = [x for x in lineages if x is not None and not x.is_uniform and (x.dim, x.pre) == (0, 1)]
    if len(real) < len(parts) or len({x.maps for x in real}) < 2 or len({x.post for x in real}) > 1:
        return None
    rows = sorted({estimate(size) for x in real for size in (x.base_rows, x.rows)})
    if any(2 * x > y for x, y in zip(rows, rows[1:])):
        return None
    return [x.maps for x in real]


def split_levels(graph: fx.Graph, analysis: Analysis, estimate: Callable[[Size], int]) -> bool:
    """Write keys and values of concatenated histories as concatenations. Whether there were some.
    `analysis` is that of the graph before."""
    changed = False
    for joined in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts, shape = _parts(joined), shape_of(joined.meta["val"])
        dim = Call(joined, {}).dim("dim", len(shape))
        sizes = [shape_of(x.meta["val"])[dim] for x in parts]
        if dim == 0 or not all(x.is_Integer and x > 0 for x in sizes):
            continue
        if _levels(parts, analysis, estimate) is None:
            continue
        map_ = Map(
            "index", joined, 0, sympy.Symbol("rows", integer=True, positive=True), shape[dim]
        )
        rows = analyse(graph, {joined: Lineage((map_,), dim)}, estimate, set())
        for match in find_unmasked(graph, estimate):
            changed |= _split(graph, match, joined, rows)
    return changed


def _split(graph: fx.Graph, match: TargetAttention, joined: fx.Node, rows: Analysis) -> bool:
    """Split key and value of an attention if they are computed from rows of `joined` one by one."""
    ndim = match.key.meta["val"].dim()
    dims = {match.key: ndim - 1 if match.transposed else ndim - 2, match.value: ndim - 2}
    for x, dim in dims.items():
        own = rows.lineages.get(x)
        if x is joined or own is None or own.is_folded or own.dim != dim:
            return False
        if any(map_.node is not joined for map_ in own.maps):
            return False
    with graph.inserting_before(match.node):
        copies = [_Copy(graph, joined, part, rows) for part in _parts(joined)]
        for x, reader in match.reads:
            pieces = [copy.of(x) for copy in copies]
            with graph.inserting_before(reader):
                new = call(graph, aten.cat.default, pieces, dims[x], like=x)
            reader.replace_input_with(x, new)
    return True


class _Copy:
    """The operators between `joined` and keys and values, on a part of `joined`."""

    def __init__(self, graph: fx.Graph, joined: fx.Node, part: fx.Node, rows: Analysis) -> None:
        self.graph, self.joined, self.rows = graph, joined, rows
        self._new = {joined: part}

    def of(self, x: fx.Node) -> fx.Node:
        if x not in self.rows.lineages:
            return x
        if x not in self._new:
            with self.graph.inserting_before(x):
                self._new[x] = self._copied(x)
        return self._new[x]

    def _copied(self, x: fx.Node) -> fx.Node:
        if x.target is operator.getitem:
            parent, item = positional(x)
            args, kwargs, target = (self.of(parent), item), {}, x.target
        else:
            moved = self.rows.moves[x]
            target = moved.target or x.target
            arguments: Any = map_arg(Call(x, {}).arguments | moved.edits, self.of)
            args, kwargs = unbind(target, arguments)
        new = call(self.graph, target, *args, like=self.joined, **kwargs)
        new.meta["stack_trace"] = x.meta.get("stack_trace")
        return new
