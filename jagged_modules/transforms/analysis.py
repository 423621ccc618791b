"""The lineage of each value of a captured graph, if every operator that has a rule moved to the
smaller side."""

from __future__ import annotations

import operator
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from . import rules as _rules  # noqa: F401  # pyright: ignore[reportUnusedImport] - fills the table
from . import shape_rules as _shape_rules  # noqa: F401  # pyright: ignore[reportUnusedImport] - fills the table
from .calls import Call, Moved, Rule, first_of, is_operator, positional, rule_of
from .clean_up import PERMUTATIONS
from .lineage import Lineage, Size, is_known
from .sources import Source, find_source, find_uniform

FIRST_RESULT_ONLY = (torch.ops.aten._native_batch_norm_legit_no_training.default,)


@dataclass
class Analysis:
    """What is known about the values of a graph.

    Attributes:
        lineages: of all values that have one.
        moves: for results of operators: how they are computed from bases.
        sources: where rows are repeated. Inputs of the caller's are in `lineages` only.
        refused: why an operator whose operands have lineages cannot be moved, or one of `whole` is
            not written in parts.
        whole: operators that have no lineage, but could be written in parts of which some have: the
            lineage of a part.
    """

    lineages: dict[fx.Node, Lineage] = field(default_factory=dict)
    moves: dict[fx.Node, Moved] = field(default_factory=dict)
    sources: dict[fx.Node, Source] = field(default_factory=dict)
    refused: dict[fx.Node, str] = field(default_factory=dict)
    whole: dict[fx.Node, Lineage] = field(default_factory=dict)

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """A node's operands with a lineage, without those that it uses in full where it moves."""
        in_full = self.moves[node].in_full if node in self.moves else ()
        return [x for x in node.all_input_nodes if x in self.lineages and x not in in_full]

    def permutes_gathered(self, node: fx.Node) -> bool:
        """Whether a moved value is needed in full as the permutation of its gathered operand, which
        costs nothing: of a permuted base, elements would be gathered one by one."""
        return (
            node in self.moves
            and node.target in PERMUTATIONS
            and positional(node)[0] in self.lineages
        )


def analyse(
    graph: fx.Graph,
    inputs: dict[fx.Node, Lineage],
    estimate: Callable[[Size], int],
    known: Set[Size],
) -> Analysis:
    """The lineages of all values, from those of the inputs and from operators that repeat rows.
    known: the symbols that are a size of an input. A lineage that needs another size for its gather
    is none."""
    result = Analysis(lineages=dict(inputs))
    for node in graph.nodes:
        if node.op != "call_function" or node in result.lineages:
            continue
        if node.target is operator.getitem:
            _item(node, result)
        elif is_operator(node) and isinstance(first_of(node.meta.get("val")), torch.Tensor):
            _operator(node, result, estimate, known)
    return result


def _item(node: fx.Node, result: Analysis) -> None:
    parent, position = positional(node)
    if parent in result.lineages:
        lineage = result.lineages[parent]
        dims = result.moves[parent].dims if parent in result.moves else ()
        result.lineages[node] = lineage.at(dims[position]) if dims else lineage
        result.moves[node] = Moved(result.lineages[node])


def _operator(
    node: fx.Node, result: Analysis, estimate: Callable[[Size], int], known: Set[Size]
) -> None:
    call, rule = Call(node, result.lineages), rule_of(node.target)
    operands = result.operands(node)
    source = find_source(call, estimate)
    if source is not None and (
        len(source.lineage.maps) > 1 or source.operand not in result.lineages
    ):
        result.sources[node], result.lineages[node] = source, source.lineage
        return
    moved = _apply(rule, node, result) if rule is not None and operands else None
    if (
        moved is not None
        and node.target in FIRST_RESULT_ONLY
        and any(user.args[1] != 0 for user in node.users)
    ):
        moved = None
    if moved is None:
        moved = find_uniform(call)
    if moved is not None and all(is_known(size, known) for size in _needed(moved.lineage)):
        result.moves[node], result.lineages[node] = moved, moved.lineage
    elif operands:
        result.refused[node] = "it mixes rows, or its operands do not share one map"
        if rule is None:
            result.refused[node] = "no rule for this operator"


def _apply(rule: Rule, node: fx.Node, result: Analysis) -> Moved | None:
    """The rule's answer. A repeated constant along another dimension than the rows' must not
    prevent a move, so it may be used in full."""
    moved = rule(Call(node, result.lineages))
    uniform = frozenset(x for x in result.operands(node) if result.lineages[x].is_uniform)
    if moved is not None or not uniform:
        return moved
    moved = rule(
        Call(node, {x: lineage for x, lineage in result.lineages.items() if x not in uniform})
    )
    return moved and replace(moved, in_full=uniform)


def _needed(lineage: Lineage) -> list[Size]:
    """The sizes that a gather from a base, or a smaller base, needs besides the map."""
    needed = [lineage.pre, lineage.post]
    if lineage.is_uniform:
        return [*needed, lineage.rows]
    return needed if lineage.base_rows.is_Symbol else [*needed, lineage.base_rows]
