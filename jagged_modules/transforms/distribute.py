"""Operators on a concatenation, written as a sum or a concatenation of operators on its parts.

    linear([x | y], W)  = linear(x, W[:, :k]) + linear(y, W[:, k:])         the same for matmul with a weight on either side
    [x; y] [x; y]ᵀ      = [[x xᵀ, x yᵀ], [y xᵀ, y yᵀ]]
    Σ [x | y]           = Σ x + Σ y

If x = A[map] and y has one row per candidate, the concatenation has no lineage, but the terms of x alone do. They are then moved as any
other operator. The rewrites change the captured graph, before it is analysed again.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from .analysis import Analysis
from .calls import RULES, Call, is_operator, is_tensor, positional
from .clean_up import call
from .lineage import Lineage, shape_of
from .own_operators import LINEAR_COMPRESS
from .placement import FLOPS_PER_BYTE, Costs
from .rules import pointwise

aten = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """A part of a concatenation: its value, its number of columns, and its lineage."""

    node: fx.Node
    width: int
    lineage: Lineage | None


class Distributor:
    """Rewrites a captured graph.

    Args:
        graph: changed in place.
        analysis: of this graph. Nodes that the rewrites add are not in it.
        costs: of this graph.
    """

    def __init__(self, graph: fx.Graph, analysis: Analysis, costs: Costs) -> None:
        self.graph, self.analysis, self.costs = graph, analysis, costs
        self._rewriting: fx.Node | None = None
        self._sources: dict[fx.Node, Lineage] = {}  # of parts that the rewrites made: their maps are those of what they were made of

    def run(self) -> bool:
        """Rewrite what is cheaper in parts. Whether something was."""
        changed = False
        for node in list(self.graph.nodes):
            if not is_operator(node) or not is_tensor(node) or node in self.analysis.lineages:
                continue
            self._rewriting = node
            with self.graph.inserting_before(node):
                new = self._rewritten(node)
            if new is not None:
                changed = True
                node.replace_all_uses_with(new)
        self.graph.eliminate_dead_code()
        return changed

    def _rewritten(self, node: fx.Node) -> fx.Node | None:
        call = Call(node, {})
        if node.target is aten.linear.default:
            return self._sum_of_products(node, call["input"], -1, call["weight"], 1, call["bias"])
        if node.target in (aten.matmul.default, aten.bmm.default, aten.mm.default):
            left, right = map(self._unexpanded, positional(node)[:2])
            if self._is_weight(right):
                return self._sum_of_products(node, left, -1, right, 0)
            if self._is_weight(left):
                return self._sum_of_products(node, right, -2, left, 1)
            return self._self_interaction(node, left, right)
        if node.target is aten.addmm.default and call["beta"] == call["alpha"] == 1 and self._is_weight(call["mat2"]):
            return self._sum_of_products(node, call["mat1"], -1, call["mat2"], 0, call["self"])
        if str(node.target) == LINEAR_COMPRESS and len(call["weights"]) == 1 and self._is_weight(call["weights"][0]):
            return self._sum_of_products(node, call["embeddings"][0], -2, call["weights"][0], 1)
        if node.target is aten.sum.dim_IntList:
            return self._sum_of_sums(node, call)
        return None

    def _unexpanded(self, x: Any) -> Any:
        """The weight that is expanded to a batch of matrices, else x itself."""
        expanded = is_tensor(x) and x.target is aten.expand.default and x.meta["val"].dim() == 3 and self._is_weight(x.args[0])
        return x.args[0] if expanded else x

    def _is_weight(self, x: Any) -> bool:
        return (
            is_tensor(x)
            and x.meta["val"].dim() == 2
            and x not in self.analysis.lineages
            and all(s.is_Integer for s in shape_of(x.meta["val"]))
        )

    # -- parts -------------------------------------------------------------------------------------------------------------------------

    def parts(self, x: fx.Node, dim: int) -> list[Part]:
        """The parts of x along a dimension, neighbours of one lineage as one. Empty unless some but not all of them have one lineage."""
        ndim = x.meta["val"].dim()
        nodes = self._pieces(x, dim % ndim)
        groups: list[list[fx.Node]] = []
        for node in nodes:
            if groups and self._maps(groups[-1][0]) == self._maps(node):
                groups[-1].append(node)
            else:
                groups.append([node])
        kinds = {self._maps(group[0]) for group in groups}
        if len(kinds) < 2 or any(not shape_of(node.meta["val"])[dim % ndim].is_Integer for node in nodes):
            return []
        result = []
        for group in groups:
            lineage = self._lineage(group[0])
            node = group[0] if len(group) == 1 else self._new(aten.cat.default, group, dim % ndim)
            width = sum(int(shape_of(one.meta["val"])[dim % ndim]) for one in group)
            result.append(Part(node, width, None if self._maps(group[0]) is None else lineage))
        return result

    def _lineage(self, node: fx.Node) -> Lineage | None:
        return self.analysis.lineages.get(node) or self._sources.get(node)

    def _maps(self, node: fx.Node) -> Any:
        lineage = self._lineage(node)
        return None if lineage is None or lineage.is_uniform else lineage.maps

    def _pieces(self, x: fx.Node, dim: int) -> list[fx.Node]:
        """Values whose concatenation along `dim` is x. Views and unary operators are applied to each."""
        if not is_operator(x) or x in self.analysis.lineages:
            return [x]
        call, shape = Call(x, {}), shape_of(x.meta["val"])
        if x.target is aten.cat.default:
            own = call.dim("dim", len(shape))
            return [piece for part in call["tensors"] for piece in self._pieces(part, dim)] if own == dim else [x]
        operand: Any = x.args[0] if x.args else None
        if not is_tensor(operand):
            return [x]
        before = shape_of(operand.meta["val"])
        if RULES.get(x.target) is pointwise and x.all_input_nodes == [operand]:
            pieces = self._pieces(operand, dim)
            return [x] if len(pieces) == 1 else [self._like(x, operand, piece) for piece in pieces]
        if x.target is aten.transpose.int:
            first, second = (d % len(shape) for d in positional(x)[1:3])
            pieces = self._pieces(operand, {first: second, second: first}.get(dim, dim))
            return [x] if len(pieces) == 1 else [self._like(x, operand, piece) for piece in pieces]
        if (
            x.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
            and len(before) == 3
            and len(shape) == 2
            and dim == 1
            and before[0] == shape[0]
        ):
            pieces = self._pieces(operand, 1)  # [B, F, D] as [B, F · D]
            if len(pieces) == 1 or not before[2].is_Integer:
                return [x]
            widths = [shape_of(piece.meta["val"])[1] * before[2] for piece in pieces]
            return [self._new(aten.reshape.default, piece, [-1, int(width)], lineage_of=piece) for piece, width in zip(pieces, widths)]
        return [x]

    def _like(self, x: fx.Node, operand: fx.Node, piece: fx.Node) -> fx.Node:
        """The operator x on a piece of its operand."""
        args, kwargs = map_arg((x.args, x.kwargs), lambda node: piece if node is operand else node)
        return self._new(x.target, *args, lineage_of=piece, **kwargs)

    def _new(self, target: Any, *args: Any, lineage_of: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        """A new operator, with its fake result."""
        assert self._rewriting is not None
        node = call(self.graph, target, *args, like=self._rewriting, **kwargs)
        lineage = None if lineage_of is None else self._lineage(lineage_of)
        if lineage is not None:
            self._sources[node] = lineage
        return node

    # -- rewrites ----------------------------------------------------------------------------------------------------------------------

    def _sum_of_products(self, node: fx.Node, x: fx.Node, dim: int, weight: fx.Node, weight_dim: int, bias: Any = None) -> fx.Node | None:
        parts = self.parts(x, dim) if is_tensor(x) else []
        if not parts or not self._saves(node, x, parts):
            return None
        terms = []
        pieces = self._new(aten.split_with_sizes.default, weight, [part.width for part in parts], weight_dim)
        weights = [self._new(operator.getitem, pieces, position) for position in range(len(parts))]
        for part, columns in sorted(
            zip(parts, weights), key=lambda pair: pair[0].lineage is not None
        ):  # the bias joins the candidates' term
            if node.target is aten.linear.default:
                terms.append(self._new(aten.linear.default, part.node, columns, bias))
            elif bias is not None:
                terms.append(self._new(aten.addmm.default, bias, part.node, columns))
            else:
                operands = (columns, part.node) if dim == -2 else (part.node, columns)
                terms.append(self._new(aten.matmul.default, *operands))
            bias = None
        return self._added(terms)

    def _added(self, terms: list[fx.Node]) -> fx.Node:
        total = terms[0]
        for term in terms[1:]:
            total = self._new(aten.add.Tensor, total, term)
        return total

    def _self_interaction(self, node: fx.Node, left: Any, right: Any) -> fx.Node | None:
        """x xᵀ in blocks. The block of a part with a lineage and itself has that lineage."""
        if right.target is not aten.transpose.int or right.args[0] is not left or left.meta["val"].dim() != 3:
            return None
        if {d % 3 for d in right.args[1:3]} != {1, 2}:
            return None
        parts = self.parts(left, 1)
        if not parts or not self._saves_blocks(node, parts):
            return None
        columns = [self._new(aten.transpose.int, part.node, 1, 2) for part in parts]
        blocks: dict[tuple[int, int], fx.Node] = {}
        for row, part in enumerate(parts):
            for column in range(row, len(parts)):
                blocks[row, column] = self._new(aten.matmul.default, part.node, columns[column])
                if column > row:
                    blocks[column, row] = self._new(aten.transpose.int, blocks[row, column], 1, 2)
        count = range(len(parts))
        rows = [self._new(aten.cat.default, [blocks[row, column] for column in count], 2) for row in count]
        return self._new(aten.cat.default, rows, 1)

    def _sum_of_sums(self, node: fx.Node, call: Call) -> fx.Node | None:
        if not call["dim"] or len(call["dim"]) != 1 or call["dtype"] is not None:
            return None
        dim = call["dim"][0]
        parts = self.parts(call["self"], dim)
        if not parts:
            return None
        return self._added([self._new(aten.sum.dim_IntList, part.node, [dim], call["keepdim"]) for part in parts])

    # -- costs -------------------------------------------------------------------------------------------------------------------------

    def _saves(self, node: fx.Node, x: fx.Node, parts: list[Part]) -> bool:
        """Whether a product is cheaper in parts: each other part adds a gather and an addition of the result."""
        whole, flops, width = self.costs.bytes(x), self.costs.full(node).flops, sum(part.width for part in parts)
        result, saved = self.costs.bytes(node), 0.0
        for part in parts:
            if part.lineage is not None:
                less = (1 - self.costs.share(part.lineage)) * part.width / width
                saved += less * (flops / FLOPS_PER_BYTE + whole) - 5 * result
                if len(x.users) == 1:  # the part is neither gathered nor copied into the concatenation
                    saved += 4 * whole * part.width / width
        return saved > 0

    def _saves_blocks(self, node: fx.Node, parts: list[Part]) -> bool:
        flops, result, width = self.costs.full(node).flops, self.costs.bytes(node), sum(part.width for part in parts)
        saved = -2 * result
        for part in parts:
            if part.lineage is not None:
                square = (part.width / width) ** 2
                saved += (1 - self.costs.share(part.lineage)) * square * flops / FLOPS_PER_BYTE - 2 * square * result
                saved += sum(flops / FLOPS_PER_BYTE * part.width * other.width / width**2 for other in parts if other is not part)
        return saved > 0
