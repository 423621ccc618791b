"""A linear of a concatenation as a sum of linears, one for each value that it is made of.

    x = [q | k | q - k | q ∘ k],  W x + b = A q + B k + D (q ∘ k) + b
    with A = W_q + W_d, B = W_k - W_d and D = W_p, the columns of W that belong to the blocks

Blocks are sums and differences of values. A value that repeats one row, as q does for all events,
is a term of one row, which broadcasts in the sum. A value that repeats the rows of users is a term
with a lineage, which can move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .calls import Call, is_tensor
from .lineage import Lineage, product, shape_of
from .placement import Cost, Costs

aten = torch.ops.aten
SIGNS: dict[Any, int] = {aten.add.Tensor: 1, aten.sub.Tensor: -1}


@dataclass(frozen=True)
class Part:
    """A part of a concatenation.

    Attributes:
        node: its value.
        width: its number of columns.
        lineage: of the value.
        pieces: values that it is a concatenation of.
    """

    node: fx.Node
    width: int
    lineage: Lineage | None
    pieces: int


@dataclass
class Term:
    """A value, and the columns of the weight that multiply it.

    Attributes:
        node: the value, without dimensions that were expanded.
        blocks: sign and first column of each block that has it.
        width: the number of columns of a block.
    """

    node: fx.Node
    width: int
    blocks: list[tuple[int, int]] = field(default_factory=list)


class Terms:
    """The terms of the last dimension of a value.

    Args:
        x: the value.
        is_whole: whether a value is not taken apart.

    Attributes:
        terms: all of them; one if x is none of these.
        replaced: operators that are not needed if nothing else reads x.
    """

    def __init__(self, x: fx.Node, is_whole: Callable[[fx.Node], bool]) -> None:
        self._is_whole = is_whole
        self.replaced: list[fx.Node] = []
        self._found: dict[tuple[fx.Node, int], Term] = {}
        self._column = 0
        self._add(x)

    @property
    def terms(self) -> list[Term]:
        return list(self._found.values())

    def _add(self, x: fx.Node) -> None:
        """Add x, the next columns."""
        if x.target is not aten.cat.default or self._is_whole(x):
            self._add_block(x)
            return
        call, value = Call(x, {}), x.meta["val"]
        parts = call["tensors"]
        own = {part.meta["val"].dtype for part in parts}
        if call.dim("dim", value.dim()) != value.dim() - 1 or own != {value.dtype}:
            self._add_block(x)
            return
        self.replaced.append(x)
        for part in parts:
            self._add(part)

    def _add_block(self, x: fx.Node) -> None:
        width = shape_of(x.meta["val"])[-1]
        if not width.is_Integer:
            raise UnknownWidth
        for sign, leaf in self._leaves(x):
            term = self._found.setdefault((leaf, int(width)), Term(leaf, int(width)))
            term.blocks.append((sign, self._column))
        self._column += int(width)

    def _leaves(self, x: fx.Node) -> list[tuple[int, fx.Node]]:
        """The values, with signs, that x is the sum of."""
        x = unexpanded(x)
        if x.target not in SIGNS or self._is_whole(x):
            return [(1, x)]
        call, value = Call(x, {}), x.meta["val"]
        operands = [call["self"], call["other"]]
        if call["alpha"] != 1 or not all(
            is_tensor(y)
            and y.meta["val"].dtype == value.dtype
            and y.meta["val"].dim() == value.dim()
            and shape_of(y.meta["val"])[-1] == shape_of(value)[-1]
            for y in operands
        ):
            return [(1, x)]
        self.replaced.append(x)
        first, second = map(self._leaves, operands)
        return [*first, *((SIGNS[x.target] * sign, leaf) for sign, leaf in second)]


class UnknownWidth(Exception):
    """The weight cannot be cut into columns."""


def unexpanded(x: fx.Node) -> fx.Node:
    """What x is an expansion of, where dimensions but the last one have one row."""
    while x.target is aten.expand.default:
        operand = Call(x, {})["self"]
        before, after = shape_of(operand.meta["val"]), shape_of(x.meta["val"])
        if len(before) != len(after) or before[-1] != after[-1]:
            break
        x = operand
    return x


@dataclass
class Group:
    """Terms with the same rows, which are one product.

    Attributes:
        terms: their values are concatenated.
        lineage: of the values.
        rows: rows of the values for each row of the linear's input.
        share: rows of the base for each row of the values.
    """

    terms: list[Term]
    lineage: Lineage | None
    rows: float
    share: float

    @property
    def width(self) -> int:
        return sum(term.width for term in self.terms)


def groups_of(x: fx.Node, costs: Costs) -> tuple[list[Group], list[fx.Node]]:
    """The terms of x by their rows, and the operators that make x of them. No groups unless some
    term has fewer rows than x, or is part of a sum. Candidates' terms come first, those of the most
    rows before the others, then the users'."""

    def lineage_of(node: fx.Node) -> Lineage | None:
        lineage = costs.analysis.lineages.get(node)
        return None if lineage is None or lineage.is_uniform else lineage

    try:
        found = Terms(x, lambda node: lineage_of(node) is not None)
    except UnknownWidth:
        return [], []
    shape, groups = shape_of(x.meta["val"])[:-1], dict[Any, Group]()
    for term in found.terms:
        own, lineage = shape_of(term.node.meta["val"])[:-1], lineage_of(term.node)
        key = own, lineage and lineage.maps
        if key not in groups:
            rows = costs.estimate(product(own)) / max(costs.estimate(product(shape)), 1)
            groups[key] = Group([], lineage, rows, costs.share(lineage))
        groups[key].terms.append(term)
    is_sum = any(node.target in SIGNS for node in found.replaced)
    has_all_rows = any(own == shape for own, _ in groups)
    if len(groups) < 2 or not has_all_rows or not (is_sum or len({x for x, _ in groups}) > 1):
        return [], []
    ordered = sorted(groups.values(), key=lambda group: (group.lineage is not None, -group.rows))
    return ordered, found.replaced


def costs_of_terms(node: fx.Node, x: fx.Node, groups: Sequence[Group], costs: Costs) -> list[Cost]:
    """Of linear(x) as a sum of the groups' products: of the products, the concatenations, the
    gathers, the additions and the weights, which are sums of columns."""
    whole, of_x, result = costs.full(node), costs.bytes(x), costs.bytes(node)
    width = int(shape_of(x.meta["val"])[-1])
    element = node.meta["val"].element_size()
    of_weight = element * width * int(shape_of(node.meta["val"])[-1])
    after = [costs.of(node, 0, 3 * result)] * (len(groups) - 1)
    for group in groups:
        size, rows = group.width / width, group.rows * group.share
        moved = rows * (size * of_x + result) + size * of_weight
        after.append(costs.of(node, size * costs.of_rows(node, rows) * whole.flops, moved))
        blocks = sum(len(term.blocks) - 1 for term in group.terms)
        after += [costs.of(node, 0, 3 * size * of_weight)] * blocks
        if len(group.terms) > 1:
            after.append(costs.of(node, 0, 2 * size * (rows * of_x + of_weight)))
        if group.lineage is not None:
            after.append(costs.gather_along(node, group.lineage))
    return after


def sum_of_terms(
    groups: Sequence[Group], weight: fx.Node, bias: Any, new: Callable[..., fx.Node]
) -> fx.Node:
    """The sum of the groups' products, by `new`, which makes an operator. The bias joins the
    product of the fewest rows."""

    def columns(term: Term) -> fx.Node:
        total: fx.Node | None = None
        for sign, first in sorted(term.blocks, reverse=True):
            block = new(aten.slice.Tensor, weight, 1, first, first + term.width)
            if total is None:
                total = block if sign > 0 else new(aten.neg.default, block)
            else:
                total = new(aten.add.Tensor if sign > 0 else aten.sub.Tensor, total, block)
        assert total is not None
        return total

    def joined(nodes: list[fx.Node], like: fx.Node | None = None) -> fx.Node:
        """The nodes side by side."""
        if len(nodes) == 1:
            return nodes[0]
        return new(aten.cat.default, nodes, nodes[0].meta["val"].dim() - 1, lineage_of=like)

    fewest, total = min(groups, key=lambda group: group.rows * group.share), None
    for group in groups:
        values = [term.node for term in group.terms]
        x = joined(values, values[0] if group.lineage else None)
        own = joined([columns(term) for term in group.terms])
        y = new(aten.linear.default, x, own, bias if group is fewest else None)
        total = y if total is None else new(aten.add.Tensor, total, y)
    assert total is not None
    return total
