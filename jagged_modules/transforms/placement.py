"""Which operators run on the smaller side: a minimum cut of estimated costs.

A value is either computed from bases, or from gathered operands. The estimate of a choice is the bytes that operators and gathers read and
write, plus their FLOPs at `FLOPS_PER_BYTE`. An operator can only be moved if all its operands with a lineage are, so the choice is a
closure with costs, which a minimum cut solves exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .analysis import Analysis
from .calls import Call, first_of, flat, is_operator, is_tensor
from .lineage import Lineage, Size, product, shape_of
from .own_operators import ATTENTIONS, LINEAR_COMPRESS, attention_flops

FLOPS_PER_BYTE = 16  # fp32 FLOPs that a processor computes while it moves a byte: 10 to 20 on CPUs and GPUs, more with 16-bit MMAs
aten = torch.ops.aten
VIEWS = {
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim),
    *(aten.squeeze.dims, aten.transpose.int, aten.permute.default, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.t.default),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int, aten.alias.default, aten.detach.default),
    *(aten.flatten.using_ints, aten.unflatten.int, aten.lift_fresh_copy.default, aten.diagonal.default),
}
LOOKUPS = {aten.index_select.default, aten.index.Tensor, aten.embedding.default, aten.embedding_bag.padding_idx, aten.gather.default}
PRODUCTS = {aten.linear.default: "input", aten.matmul.default: "self", aten.mm.default: "self", aten.bmm.default: "self"}
PRODUCTS |= {aten.addmm.default: "mat1", aten.baddbmm.default: "batch1"}


@dataclass(frozen=True)
class Cost:
    """Estimated work: floating-point operations, and bytes read and written."""

    flops: float = 0
    bytes: float = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def total(self) -> float:
        """In bytes."""
        return self.bytes + self.flops / FLOPS_PER_BYTE


class Costs:
    """Costs of the values of a graph.

    Args:
        analysis: of the graph.
        estimate: the value of a size.
    """

    def __init__(self, analysis: Analysis, estimate: Callable[[Size], int]) -> None:
        self.analysis, self.estimate = analysis, estimate

    def bytes(self, node: Any) -> float:
        value = node.meta.get("val")
        return float(sum(self.elements(x) * x.element_size() for x in flat(value) if isinstance(x, torch.Tensor)))

    def elements(self, value: torch.Tensor) -> int:
        return self.estimate(product(shape_of(value)))

    def share(self, lineage: Lineage | None) -> float:
        """Rows of the base per row of the value."""
        return 1.0 if lineage is None else self.estimate(lineage.base_rows) / max(self.estimate(lineage.rows), 1)

    def full(self, node: fx.Node) -> Cost:
        """Of a value that is computed from gathered operands."""
        return self._operator(node, lambda x: 1.0)

    def base(self, node: fx.Node) -> Cost:
        """Of the base of a value."""
        return self._operator(node, lambda x: self.share(self.analysis.lineages.get(x)))

    def fused(self, node: fx.Node) -> Cost:
        """Of a value that is computed in full from the bases of its operands, read in place."""
        full = self._operator(node, lambda x: self.share(self.analysis.lineages.get(x)) if x is not node else 1.0)
        return Cost(self.full(node).flops, full.bytes)

    def gather(self, node: fx.Node) -> Cost:
        """Of the gather from a base to the value."""
        lineage = self.analysis.lineages[node]
        return Cost() if lineage.is_uniform and not lineage.is_folded else Cost(0, 2 * self.bytes(node))

    def whole(self, graph: fx.Graph) -> Cost:
        """Of the captured model as it is."""
        return sum((self.gather(x) if x in self.analysis.sources else self.full(x) for x in graph.nodes), Cost())

    def _operator(self, node: fx.Node, share: Callable[[fx.Node], float]) -> Cost:
        if not is_operator(node) or node.target in VIEWS or not isinstance(first_of(node.meta.get("val")), torch.Tensor):
            return Cost()
        operands = {x for x in node.all_input_nodes if is_tensor(x)}
        if node.target in LOOKUPS:  # reads as much as it writes, not the whole table
            return Cost(0, 2 * self.bytes(node) * share(node))
        moved = sum(self.bytes(x) * share(x) for x in operands) + self.bytes(node) * share(node)
        return Cost(self._flops(node) * share(node), moved)

    def _flops(self, node: fx.Node) -> float:
        target: Any = node.target
        value, arguments = flat(node.meta["val"])[0], Call(node, {}).arguments
        elements = float(self.elements(value))
        if (left := PRODUCTS.get(target)) is not None:
            return 2 * elements * self.estimate(shape_of(arguments[left].meta["val"])[-1])
        if node.target is aten.scaled_dot_product_attention.default:
            keys, width = (self.estimate(size) for size in shape_of(arguments["key"].meta["val"])[-2:])
            return 2 * elements * keys + 2 * elements / max(value.shape[-1], 1) * keys * width
        if str(target) in ATTENTIONS:
            return attention_flops(node, self.estimate)
        if str(target) == LINEAR_COMPRESS:
            return 2 * elements * sum(self.estimate(shape_of(x.meta["val"])[1]) for x in arguments["weights"])
        return elements


def everything(analysis: Analysis, costs: Costs, read_in_place: Set[tuple[fx.Node, fx.Node]] = frozenset()) -> set[fx.Node]:
    """Moves all operators that can be moved. For tests of the rules."""
    return set(analysis.moves) | set(analysis.sources)


def by_cost(analysis: Analysis, costs: Costs, read_in_place: Set[tuple[fx.Node, fx.Node]] = frozenset()) -> set[fx.Node]:
    """The nodes to compute on the smaller side, sources included, at the least estimated cost.

    read_in_place: pairs of a value and an operator that reads its base if there is one, instead of the gathered value.
    """
    import networkx

    graph, inside = networkx.DiGraph(), analysis.lineages
    for node in inside:
        _add_choice(graph, node, analysis, costs, read_in_place)
    if not graph.has_node("base") or not graph.has_node("full"):
        return set()
    _, (_, full) = networkx.minimum_cut(graph, "base", "full")
    return {node for node in (*analysis.moves, *analysis.sources) if node not in full}


def _add_choice(graph: Any, node: fx.Node, analysis: Analysis, costs: Costs, read_in_place: Set[tuple[fx.Node, fx.Node]]) -> None:
    """Edges of a node, which is on the side "base" or "full" of the cut. An edge is paid if it goes from base to full."""

    def add(start: Any, end: Any, cost: float) -> None:
        if graph.has_edge(start, end):
            cost += graph[start][end]["capacity"]
        graph.add_edge(start, end, capacity=cost)

    given = node not in analysis.moves
    if given:
        add("base", node, math.inf)
        for operand in _moved_operands(node, analysis):
            add(node, operand, math.inf)
    else:
        add("base", node, costs.full(node).total * (1 + 1e-6) + 1e-3)
        add(node, "full", costs.base(node).total)
        for operand in analysis.operands(node):
            add(node, operand, math.inf)
    several = not isinstance(node.meta.get("val"), torch.Tensor)
    gather = ("gather", node)
    add(node, gather, math.inf if several else costs.gather(node).total)
    for user in node.users:
        moves = user in analysis.lineages and (user not in analysis.moves or node not in analysis.moves[user].in_full)
        if (node, user) not in read_in_place:
            add(gather, user if moves else "full", math.inf)


def _moved_operands(node: fx.Node, analysis: Analysis) -> list[fx.Node]:
    """The operands whose bases a source needs: those of a nested map."""
    source = analysis.sources.get(node)
    if source is None or len(source.lineage.maps) == 1:
        return []
    return [x for x in node.all_input_nodes if x in analysis.lineages]
