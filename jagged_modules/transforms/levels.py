"""Attention of candidates to histories of several levels, one behind the other: of their user and
of their vendor, for example.

    k(cat([x[m], y[n]], T)) = cat([k(x)[m], k(y)[n]], T)

if k computes each row of T from the same row: if a rule says so for rows along T. Then keys and
values are computed at the batch of their level, and one attention reads all levels in place.
Otherwise rows of the coarser levels would be copied to the finest one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from .analysis import Analysis, analyse
from .attention import TargetAttention, find_unmasked
from .calls import Call, moved_call, positional
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
        lineages = [[analysis.lineages.get(x) for x in own] for own in (keys, values)]
        maps = [_levels(own, estimate) for own in lineages]
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


def _levels(lineages: list[Lineage | None], estimate: Callable[[Size], int]) -> list[Any] | None:
    """The maps of parts with these lineages, if they are of levels of which each has at most half
    as many rows as the next finer one; else None."""
    real = [x for x in lineages if x is not None and _is_of_rows(x)]
    if len(real) < len(lineages) or len({x.maps for x in real}) < 2:
        return None
    rows = sorted({estimate(size) for x in real for size in (x.base_rows, x.rows)})
    if len({x.post for x in real}) > 1 or any(2 * x > y for x, y in zip(rows, rows[1:])):
        return None
    return [x.maps for x in real]


def split_levels(graph: fx.Graph, analysis: Analysis, estimate: Callable[[Size], int]) -> bool:
    """Write keys and values of concatenated histories as concatenations. Whether there were some.
    `analysis` is that of the graph before."""
    changed = False
    for node in list(graph.nodes):
        joined = _joined(node, analysis)
        if joined is None or _levels(joined.lineages, estimate) is None:
            continue
        dim, size = joined.dim, shape_of(node.meta["val"])[joined.dim]
        rows = [
            Lineage((Map("index", node, 0, shape_of(x.meta["val"])[dim], size),), dim)
            for x in joined.parts
        ]
        of_parts = [analyse(graph, {node: x}, estimate, set()) for x in rows]
        for match in find_unmasked(graph, estimate):
            changed |= _split(graph, match, joined, of_parts)
    return changed


@dataclass
class _Joined:
    """Histories behind one another.

    Attributes:
        node: their concatenation, or rows of it.
        parts: what is concatenated.
        whole: the concatenation, if `node` is rows of it.
        dim: of the concatenation.
        lineages: of the parts, or of these rows of them.
    """

    node: fx.Node
    parts: list[fx.Node]
    whole: fx.Node | None
    dim: int
    lineages: list[Lineage | None]

    def part(self, graph: fx.Graph, x: fx.Node) -> fx.Node:
        """A part with the rows of `node`."""
        if self.whole is None:
            return x
        args, kwargs = map_arg(
            (self.node.args, self.node.kwargs), lambda y: x if y is self.whole else y
        )
        return call(graph, self.node.target, *args, like=self.node, **kwargs)


def _joined(node: fx.Node, analysis: Analysis) -> _Joined | None:
    """None if the node is no such concatenation. Rows of one are those of its parts:
    cat([x, y])[n] = cat([x[n], y[n]])."""
    source = analysis.sources.get(node)
    nested = source is not None and source.lineage.dim == 0 and len(source.lineage.maps) == 1
    whole = source.operand if source is not None and nested else node
    parts = _parts(whole)
    if not parts:
        return None
    dim = Call(whole, {}).dim("dim", whole.meta["val"].dim())
    sizes = [shape_of(x.meta["val"])[dim] for x in parts]
    if dim == 0 or not all(x.is_Integer and x > 0 for x in sizes):
        return None
    lineages = [analysis.lineages.get(x) for x in parts]
    if source is None or whole is node:
        return _Joined(node, parts, None, dim, lineages)
    outer = [() if x is None else x.maps for x in lineages if x is None or _is_of_rows(x)]
    if len(outer) < len(parts):
        return None
    of_rows = [Lineage((*maps, *source.lineage.maps), 0) for maps in outer]
    return _Joined(node, parts, whole, dim, list(of_rows))


def _is_of_rows(lineage: Lineage) -> bool:
    return not lineage.is_uniform and (lineage.dim, lineage.pre) == (0, 1)


def _split(graph: fx.Graph, match: TargetAttention, joined: _Joined, rows: list[Analysis]) -> bool:
    """Split key and value of an attention if they are computed from rows of `joined` one by one."""
    ndim = match.key.meta["val"].dim()
    dims = {match.key: ndim - 1 if match.transposed else ndim - 2, match.value: ndim - 2}
    for x, dim in dims.items():
        own = rows[0].lineages.get(x)
        if own is None or own.is_folded or own.dim != dim:
            return False
        if any(map_.node is not joined.node for map_ in own.maps):
            return False
    with graph.inserting_after(joined.node):
        parts = [joined.part(graph, part) for part in joined.parts]
    copies = [_Copy(graph, joined.node, part, own) for part, own in zip(parts, rows)]
    for x, reader in match.reads:
        if x is joined.node and joined.whole is None:
            continue  # a concatenation already
        pieces = [copy.of(x) for copy in copies]
        with graph.inserting_before(reader):
            new = call(graph, aten.cat.default, pieces, dims[x], like=joined.node)
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
            target, args, kwargs = moved_call(x, self.rows.moves[x], self.of)
            with self.graph.inserting_before(x):
                new = call(self.graph, target, *args, like=self.joined, **kwargs)
            new.meta["stack_trace"] = x.meta.get("stack_trace")
            self._new[x] = new
        return self._new[x]
