"""Two placements in one graph, of which each call runs one."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..tracing import is_exporting
from .capture import MAP_NAME
from .eager import copy_others
from .ranges import Guard


class Choice:
    """Two graphs with the same inputs, and the guard that holds where the second one costs less.

    Args:
        guard: of numbers of users and candidates.
        first, second: graphs that take their parameters as inputs.
        per_user: rows of `either`'s `users` for each user.
    """

    def __init__(self, guard: Guard, first: nn.Module, second: nn.Module, per_user: int) -> None:
        self.guard, self.first, self.second, self.per_user = guard, first, second, per_user

    def either(self, index: Any, users: Any, *inputs: Any) -> Any:
        """The results of one of the graphs. An exported program has both in a `torch.cond`, unless
        one is the better one for all sizes that it takes."""
        if not all(isinstance(x, Tensor) and x.dim() for x in (index, users)):
            return self.first(*inputs)  # which raises an error
        takes_second = self.guard(users.shape[0] // self.per_user, index.shape[0])
        if is_exporting() and isinstance(takes_second, torch.SymBool):
            always = statically_known_true(takes_second)
            if not always and not statically_known_true(torch.sym_not(takes_second)):
                return self._both(takes_second, inputs)
            takes_second = always
        return (self.second if takes_second else self.first)(*inputs)

    def _both(self, takes_second: Any, inputs: tuple[Any, ...]) -> Any:
        tensors = tuple(x for x in inputs if isinstance(x, Tensor))
        others = [None if isinstance(x, Tensor) else (x,) for x in inputs]

        def called(graph: nn.Module, tensors: tuple[Tensor, ...]) -> Any:
            rest = iter(tensors)
            # the results of both must have the same strides
            return [
                x.contiguous() for x in graph(*(next(rest) if x is None else x[0] for x in others))
            ]

        return torch.cond(
            takes_second,
            lambda *x: called(self.second, x),
            lambda *x: called(self.first, x),
            tensors,
        )


def guarded(first: fx.Graph, second: fx.Graph, guard: Guard, users: str, per_user: int) -> fx.Graph:
    """A graph that runs `second` where the guard holds, else `first`. users: the name of an input
    of both with `per_user` rows for each user."""
    attributes = [x for graph in (first, second) for x in graph.find_nodes(op="get_attr")]
    paths = list(dict.fromkeys(str(x.target) for x in attributes))
    choice = Choice(guard, _without_state(first, paths), _without_state(second, paths), per_user)
    graph = fx.Graph()
    graph.set_codegen(first._codegen)
    inputs = [graph.node_copy(x) for x in first.find_nodes(op="placeholder")]
    state = [graph.create_node("get_attr", path) for path in paths]
    by_name = {x.name: x for x in inputs}
    found = graph.call_function(choice.either, (by_name[MAP_NAME], by_name[users], *inputs, *state))
    results = results_of(first)
    tensors = [x for x in results if isinstance(x, fx.Node)]
    items = (graph.call_function(operator.getitem, (found, i)) for i in range(len(tensors)))
    graph.output([next(items) if isinstance(x, fx.Node) else x for x in results])
    return graph


def results_of(graph: fx.Graph) -> list[Any]:
    """The results of a graph, nodes and constants."""
    (output,) = graph.find_nodes(op="output")
    results: Any = output.args[0]
    return list(results)


def _without_state(source: fx.Graph, paths: Iterable[str]) -> fx.GraphModule:
    """The graph with the attributes at `paths` as inputs behind its own ones, and without results
    that are no tensors."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in source.find_nodes(op="placeholder"):
        new[node] = graph.placeholder(node.name)
    state = {path: graph.placeholder(path.replace(".", "_")) for path in paths}
    new |= {node: state[str(node.target)] for node in source.find_nodes(op="get_attr")}
    copy_others(source, graph, new)
    (output,) = graph.find_nodes(op="output")
    output.args = ([x for x in results_of(graph) if isinstance(x, fx.Node)],)
    return fx.GraphModule(nn.Module(), graph)
