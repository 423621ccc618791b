"""Operators on a concatenation, written as a sum or a concatenation of operators on its parts.

    linear([x | y], W)  = linear(x, W[:, :k]) + linear(y, W[:, k:])         also of x - y: terms.py
            [x | y] may be looked up in a table: [T[i] | T[j]] = T[[i | j]]
            the same for matmul with a weight on either side
    [x; y] [x; y]ᵀ      = [[x xᵀ, x yᵀ], [y xᵀ, y yᵀ]]
    Σ [x | y]           = Σ x + Σ y
    [x | [z | y]]       = [[x | z] | y]                                     x and z with one map:
                        one gather, and one large copy less

If x = A[map] and y has one row per candidate, the concatenation has no lineage, but the terms of x
alone do. They are then moved as any other operator. The rewrites change the captured graph, before
it is analysed again. Parts are more operators, so a rewrite must clearly cost less by the
estimates.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Set
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from .calls import TO_SHAPE, Call, is_operator, is_tensor, only_for, positional, rule_of
from .clean_up import call
from .lineage import Lineage, shape_of
from .own_operators import LINEAR_COMPRESS
from .placement import PRODUCTS, VECTOR_BYTES, VIEWS, Cost, Costs
from .rules import pointwise
from .terms import Part, costs_of_terms, groups_of, sum_of_terms

aten = torch.ops.aten


class Distributor:
    """Rewrites a captured graph.

    Args:
        graph: changed in place.
        costs: of this graph. Nodes that the rewrites add are not in their analysis.
        kept: operators to leave as they are.

    Attributes:
        whole, reasons: operators that could be written in parts: the lineage of a part, and why
            they are not.
    """

    def __init__(self, graph: fx.Graph, costs: Costs, kept: Set[fx.Node] = frozenset()) -> None:
        self.graph, self.analysis, self.costs, self.kept = graph, costs.analysis, costs, kept
        self.whole: dict[fx.Node, Lineage] = {}
        self.reasons: dict[fx.Node, str] = {}
        self._rewriting: fx.Node | None = None
        # parameters and buffers, and what is computed from them alone
        self._constants = set[fx.Node]()
        for node in graph.nodes:
            read = node.all_input_nodes
            if node.op == "get_attr" or (read and self._constants.issuperset(read)):
                self._constants.add(node)
        # of parts that the rewrites made: their maps are those of what they were made of
        self._sources: dict[fx.Node, Lineage] = {}

    def run(self) -> bool:
        """Rewrite what is cheaper in parts. Whether something was."""
        changed = False
        for node in list(self.graph.nodes):
            if not is_operator(node) or not is_tensor(node) or node in self.analysis.lineages:
                continue
            if node in self.kept:
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
            return self._sum_of_terms(node, call) or self._sum_of_products(
                node, call["input"], -1, call["weight"], 1, call["bias"]
            )
        if node.target in (aten.matmul.default, aten.bmm.default, aten.mm.default):
            left, right = map(self._unexpanded, positional(node)[:2])
            if self._is_weight(right):
                return self._sum_of_products(node, left, -1, right, 0)
            if self._is_weight(left):
                return self._sum_of_products(node, right, -2, left, 1)
            return self._self_interaction(node, left, right)
        if (
            node.target is aten.addmm.default
            and call["beta"] == call["alpha"] == 1
            and self._is_weight(call["mat2"])
        ):
            return self._sum_of_products(node, call["mat1"], -1, call["mat2"], 0, call["self"])
        if (
            str(node.target) == LINEAR_COMPRESS
            and len(call["weights"]) == 1
            and self._is_weight(call["weights"][0])
        ):
            return self._sum_of_products(node, call["embeddings"][0], -2, call["weights"][0], 1)
        if node.target is aten.sum.dim_IntList:
            return self._sum_of_sums(node, call)
        if node.target is aten.cat.default:
            return self._fewer_gathers(node, call.dim("dim", node.meta["val"].dim()))
        return None

    def _unexpanded(self, x: Any) -> Any:
        """The weight that is expanded to a batch of matrices, else x itself."""
        expanded = (
            is_tensor(x)
            and x.target is aten.expand.default
            and x.meta["val"].dim() == 3
            and self._is_weight(x.args[0])
        )
        return x.args[0] if expanded else x

    def _is_weight(self, x: Any) -> bool:
        return (
            is_tensor(x)
            and x.meta["val"].dim() == 2
            and x not in self.analysis.lineages
            and all(s.is_Integer for s in shape_of(x.meta["val"]))
        )

    # -- parts -------------------------------------------------------------------------------------

    def partitions(self, x: fx.Node, dim: int) -> list[list[Part]]:
        """Parts by all maps, and, if there are several, by that to the fewest rows alone: lookups
        in small tables have maps of their own, and each part costs an addition."""
        parts = self.parts(x, dim)
        shares = {
            self._maps(part.node): self.costs.share(part.lineage) for part in parts if part.lineage
        }
        if len(shares) < 2:
            return [parts]
        return [parts, self.parts(x, dim, min(shares, key=lambda maps: shares[maps]))]

    def parts(self, x: fx.Node, dim: int, only: Any = None) -> list[Part]:
        """The parts of x along a dimension, neighbours of one lineage as one. Empty unless some but
        not all of them have one lineage. only: the maps of which parts are set apart; None for
        all."""
        ndim = x.meta["val"].dim()
        groups = self._groups(self._pieces(x, dim % ndim), only)
        sizes = [[shape_of(node.meta["val"])[dim % ndim] for node in group] for group in groups]
        if len({self._maps(group[0], only) for group in groups}) < 2 or not all(
            size.is_Integer for group in sizes for size in group
        ):
            return []
        return [
            Part(
                self._joined(group, dim % ndim, only),
                sum(map(int, widths)),
                self._lineage(group[0]) if self._maps(group[0], only) else None,
                len(group),
            )
            for group, widths in zip(groups, sizes)
        ]

    def _groups(self, nodes: list[fx.Node], only: Any = None) -> list[list[fx.Node]]:
        """Neighbours with the same maps."""
        groups = itertools.groupby(nodes, lambda node: self._maps(node, only))
        return [list(group) for _, group in groups]

    def _joined(self, group: list[fx.Node], dim: int, only: Any = None) -> fx.Node:
        first = group[0]
        if len(group) == 1:
            return first
        like = first if self._maps(first, only) else None
        return self._new(aten.cat.default, group, dim, lineage_of=like)

    def _lineage(self, node: fx.Node) -> Lineage | None:
        return self.analysis.lineages.get(node) or self._sources.get(node)

    def _maps(self, node: fx.Node, only: Any = None) -> Any:
        lineage = self._lineage(node)
        if lineage is None or lineage.is_uniform:
            return None
        return lineage.maps if only in (None, lineage.maps) else None

    def _pieces(self, x: fx.Node, dim: int) -> list[fx.Node]:
        """Values whose concatenation along `dim` is x. Views and unary operators are applied to
        each."""
        if not is_operator(x) or self._lineage(x) is not None:
            return [x]
        call, shape = Call(x, {}), shape_of(x.meta["val"])
        if x.target is aten.cat.default:
            own = call.dim("dim", len(shape))
            # a concatenation may convert
            if own != dim or len({part.meta["val"].dtype for part in call["tensors"]}) > 1:
                return [x]
            return [piece for part in call["tensors"] for piece in self._pieces(part, dim)]
        if (
            x.target is aten.stack.default
            and call.dim("dim", len(shape)) == dim
            and len({y.meta["val"].dtype for y in call["tensors"]}) == 1
        ):
            return [self._unsqueezed(y, dim) for y in call["tensors"]]
        operand: Any = x.args[0] if x.args else None
        if x.target is aten.embedding.default:
            indices = call["indices"]
            is_table = call["weight"] in self._constants and dim < len(shape) - 1
            pieces = self._pieces(indices, dim) if is_table else [indices]
            return [x] if len(pieces) == 1 else [self._like(x, indices, piece) for piece in pieces]
        if x.target is aten.add.Tensor and call["other"] in self._constants:
            return self._sums(x, operand, call["other"], dim)
        if not is_tensor(operand):
            return [x]
        before = shape_of(operand.meta["val"])
        if rule_of(x.target) is pointwise and x.all_input_nodes == [operand]:
            pieces = self._pieces(operand, dim)
            return [x] if len(pieces) == 1 else [self._like(x, operand, piece) for piece in pieces]
        if x.target is aten.transpose.int:
            first, second = (d % len(shape) for d in positional(x)[1:3])
            pieces = self._pieces(operand, {first: second, second: first}.get(dim, dim))
            return [x] if len(pieces) == 1 else [self._like(x, operand, piece) for piece in pieces]
        if (
            x.target in TO_SHAPE
            and len(before) == 3
            and len(shape) == 2
            and dim == 1
            and before[0] == shape[0]
        ):
            # [B, F, D] as [B, F · D]: of fields, or of the columns of a single one
            inner, factor = (2, 1) if before[1] == 1 else (1, before[2])
            pieces = self._pieces(operand, inner)
            if len(pieces) == 1 or not before[2].is_Integer:
                return [x]
            widths = [shape_of(piece.meta["val"])[inner] * factor for piece in pieces]
            return [
                self._new(aten.reshape.default, piece, [-1, int(width)], lineage_of=piece)
                for piece, width in zip(pieces, widths)
            ]
        return [x]

    def _sums(self, x: fx.Node, operand: fx.Node, constant: fx.Node, dim: int) -> list[fx.Node]:
        """The pieces of operand + constant, as offsets of the fields' rows in one table."""
        shape, own = shape_of(x.meta["val"]), shape_of(constant.meta["val"])
        axis = dim - len(shape) + len(own)
        if Call(x, {})["alpha"] != 1 or shape_of(operand.meta["val"]) != shape:
            return [x]
        pieces = self._pieces(operand, dim)
        if len(pieces) == 1:
            return [x]
        widths = [shape_of(piece.meta["val"])[dim] for piece in pieces]
        if not all(width.is_Integer for width in widths):
            return [x]
        ends = list(itertools.accumulate(map(int, widths), initial=0))
        if axis < 0 or own[axis] == 1:
            parts = [constant for _ in pieces]
        else:
            parts = [
                self._new(aten.slice.Tensor, constant, axis, *both) for both in zip(ends, ends[1:])
            ]
        return [
            self._new(aten.add.Tensor, piece, part, lineage_of=piece)
            for piece, part in zip(pieces, parts)
        ]

    def _unsqueezed(self, x: fx.Node, dim: int) -> fx.Node:
        lineage = self._lineage(x)
        new = self._new(aten.unsqueeze.default, x, dim)
        if lineage is not None:
            self._sources[new] = lineage.at(lineage.dim + (dim <= lineage.dim))
        return new

    def _like(self, x: fx.Node, operand: fx.Node, piece: fx.Node) -> fx.Node:
        """The operator x on a piece of its operand."""
        args, kwargs = map_arg((x.args, x.kwargs), lambda node: piece if node is operand else node)
        return self._new(x.target, *args, lineage_of=piece, **kwargs)

    def _new(
        self, target: Any, *args: Any, lineage_of: fx.Node | None = None, **kwargs: Any
    ) -> fx.Node:
        """A new operator, with its fake result."""
        assert self._rewriting is not None
        node = call(self.graph, target, *args, like=self._rewriting, **kwargs)
        lineage = None if lineage_of is None else self._lineage(lineage_of)
        if lineage is not None:
            self._sources[node] = lineage
        return node

    # -- rewrites ----------------------------------------------------------------------------------

    def _sum_of_products(
        self,
        node: fx.Node,
        x: fx.Node,
        dim: int,
        weight: fx.Node,
        weight_dim: int,
        bias: Any = None,
    ) -> fx.Node | None:
        partitions = self.partitions(x, dim) if is_tensor(x) else []
        found = [
            (cost, parts)
            for parts in partitions
            if parts and (cost := self._saves(node, x, parts, weight, dim == -2)) is not None
        ]
        if not found:
            return None
        _, parts = min(found, key=operator.itemgetter(0))
        terms = []
        pieces = self._new(
            aten.split_with_sizes.default, weight, [part.width for part in parts], weight_dim
        )
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

    def _sum_of_terms(self, node: fx.Node, call: Call) -> fx.Node | None:
        """terms.py: of sums and differences, and of values of fewer rows."""
        x, weight = call["input"], call["weight"]
        groups, replaced = groups_of(x, self.costs)
        if not groups:
            return None
        whole = sum((self.costs.full(y) for y in only_for(replaced, node)), self.costs.full(node))
        after = costs_of_terms(node, x, groups, self.costs)
        moved = [group.lineage for group in groups if group.lineage]
        if self._pays(node, moved, whole.least, after) is None:
            return None
        return sum_of_terms(groups, weight, call["bias"], self._new)

    def _added(self, terms: list[fx.Node]) -> fx.Node:
        return functools.reduce(lambda x, y: self._new(aten.add.Tensor, x, y), terms)

    def _self_interaction(self, node: fx.Node, left: Any, right: Any) -> fx.Node | None:
        """x xᵀ in blocks. The block of a part with a lineage and itself has that lineage."""
        if right.target is not aten.transpose.int or right.args[0] is not left:
            return None
        if left.meta["val"].dim() != 3:
            return None
        if {d % 3 for d in right.args[1:3]} != {1, 2}:
            return None
        parts = self.parts(left, 1)
        if not parts or self._saves_blocks(node, left, right, parts) is None:
            return None
        columns = [self._new(aten.transpose.int, part.node, 1, 2) for part in parts]
        blocks: dict[tuple[int, int], fx.Node] = {}
        for row, part in enumerate(parts):
            for column in range(row, len(parts)):
                blocks[row, column] = self._new(aten.matmul.default, part.node, columns[column])
                if column > row:
                    blocks[column, row] = self._new(aten.transpose.int, blocks[row, column], 1, 2)
        count = range(len(parts))
        rows = [
            self._new(aten.cat.default, [blocks[row, column] for column in count], 2)
            for row in count
        ]
        return self._new(aten.cat.default, rows, 1)

    def _sum_of_sums(self, node: fx.Node, call: Call) -> fx.Node | None:
        if not call["dim"] or len(call["dim"]) != 1 or call["dtype"] is not None:
            return None
        dim = call["dim"][0]
        parts = self.parts(call["self"], dim)
        if not parts or self._saves(node, call["self"], parts) is None:
            return None
        return self._added(
            [self._new(aten.sum.dim_IntList, part.node, [dim], call["keepdim"]) for part in parts]
        )

    def _fewer_gathers(self, node: fx.Node, dim: int) -> fx.Node | None:
        """A concatenation of concatenations as one, in which neighbours with one map are
        concatenated before they are gathered."""
        operands: list[fx.Node] = []
        for group in self._groups(self._operands(node, dim)):
            lineages = [lineage for x in group if self._maps(x) and (lineage := self._lineage(x))]
            # bases of different sizes would be narrowed
            kinds = {(x.dim, x.pre, x.post, x.base_rows) for x in lineages}
            operands += (
                [self._joined(group, dim)] if len(kinds) == 1 and lineages[0].dim != dim else group
            )
        return (
            None if operands == positional(node)[0] else self._new(aten.cat.default, operands, dim)
        )

    def _operands(self, node: fx.Node, dim: int) -> list[fx.Node]:
        """Those of a concatenation, and of concatenations that are its operands alone."""
        operands: list[fx.Node] = []
        for x in positional(node)[0]:
            nested = (
                x.target is aten.cat.default
                and len(x.users) == 1
                and x not in self.analysis.lineages
            )
            nested = nested and Call(x, {}).dim("dim", x.meta["val"].dim()) == dim
            operands += self._operands(x, dim) if nested else [x]
        return operands

    # -- costs -------------------------------------------------------------------------------------

    def _saves(
        self,
        node: fx.Node,
        x: fx.Node,
        parts: list[Part],
        weight: fx.Node | None = None,
        compresses: bool = False,
    ) -> float | None:
        """The cost in parts of a product with a weight, or of a sum, if it is less. compresses: two
        parts are one operator."""
        costs, whole, result = self.costs, self.costs.full(node), self.costs.bytes(node)
        width, of_weight = sum(part.width for part in parts), costs.bytes(weight) if weight else 0
        shares = [costs.share(part.lineage) for part in parts]
        after = [costs.of(node, 0, 3 * result)] * (len(parts) - 1)  # additions
        for part, share in zip(parts, shares):
            size = part.width / width
            moved = size * (share * costs.bytes(x) + of_weight) + share * result
            after.append(costs.of(node, whole.flops * size * costs.of_rows(node, share), moved))
            if part.pieces > 1:
                after.append(costs.of(node, 0, 2 * size * share * costs.bytes(x)))
            if part.lineage is not None:
                after.append(costs.gather_along(node, part.lineage))
        if compresses and len(parts) == 2:
            rows = sum(share * part.width / width for part, share in zip(parts, shares))
            after = [costs.of(node, whole.flops * rows, rows * costs.bytes(x) + of_weight + result)]
        lineages = [part.lineage for part in parts if part.lineage]
        return self._pays(node, lineages, whole.least + self._concatenation(x, parts), after)

    def _saves_blocks(
        self, node: fx.Node, left: fx.Node, right: fx.Node, parts: list[Part]
    ) -> float | None:
        costs, whole = self.costs, self.costs.full(node)
        operand, result = costs.bytes(left), costs.bytes(node)
        width, element = sum(part.width for part in parts), node.meta["val"].element_size()
        after = list[Cost]()

        def are_vectors(size: int) -> bool:
            return size * element % VECTOR_BYTES == 0

        def copy(part: float, by_vectors: bool) -> Cost:
            elements = 0 if by_vectors else part * result / element
            return costs.of(node, 0, 2 * part * result, elements)

        for row, part in enumerate(parts):
            for other in parts[row:]:
                a, b = part.width / width, other.width / width
                share: float = 1
                if part.lineage and other.lineage and part.lineage.maps == other.lineage.maps:
                    share = costs.share(part.lineage)
                num_bytes = share * ((a + b) * operand + a * b * result)
                after.append(costs.of(node, a * b * share * whole.flops, num_bytes))
                if share < 1:
                    after.append(copy(a * b, are_vectors(part.width * other.width)))
            # rows of blocks but the first one have a transposed block
            after.append(
                copy(part.width / width, not row and all(are_vectors(x.width) for x in parts))
            )
        after.append(copy(1, all(are_vectors(part.width * width) for part in parts)))
        least = whole.least
        if left.target is aten.cat.default and left.users.keys() == {node, right}:
            least += costs.full(left).least  # it is not computed any more
        return self._pays(node, [part.lineage for part in parts if part.lineage], least, after)

    def _pays(
        self, node: fx.Node, moved: list[Lineage], whole: float, after: list[Cost]
    ) -> float | None:
        """The cost in parts if it is less. moved: the lineages of parts. whole: the least cost of
        the operator, and of operands that it alone needs."""
        total = sum(after, Cost()).total
        if total < whole:
            return total
        if not moved:
            return None
        self.whole[node] = moved[0]
        self.reasons[node] = (
            f"in parts it costs {total / 1e6:.3g} MB, whole at least {whole / 1e6:.3g} MB"
        )
        return None

    def _concatenation(self, x: fx.Node, parts: list[Part]) -> float:
        """Its cost for each reader, if all of them can be written in parts. Then it is not written,
        nor are its parts gathered for it."""
        while x.target not in (aten.cat.default, aten.stack.default):
            x = positional(x)[x.target is aten.embedding.default]
        gathers = [
            self.costs.of(part.node, 0, 2 * self.costs.bytes(part.node))
            for part in parts
            if part.lineage
        ]
        readers = self._readers(x)
        return sum(gathers, self.costs.full(x)).least / readers if readers else 0

    def _readers(self, x: fx.Node) -> int:
        """The operators that read x, a view of it, or x after a unary operator. 0 if one of them
        cannot be written in parts."""
        numbers = []
        for user in x.users:
            target, operands = user.target, [y for y in user.all_input_nodes if is_tensor(y)]
            is_product = target in PRODUCTS and any(
                self._is_weight(self._unexpanded(y)) for y in operands
            )
            if is_product or target is aten.sum.dim_IntList:
                numbers.append(1)
            elif {*operands} - self._constants == {x} and (
                target in (*VIEWS, aten.embedding.default) or rule_of(target) is pointwise
            ):
                numbers.append(self._readers(user))
            else:
                numbers.append(0)
        return sum(numbers) if all(numbers) else 0
