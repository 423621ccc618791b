"""The form of a fused graph that eager calls run.

It computes the same, in less time of the host: it reads the parameters from the dicts of their
modules, and calls torch's functions. An `nn.Module` takes 0.5 µs for each level of
`self.encoder.layers.0.norm1.weight`, and an operator of `torch.ops` 1 µs more than its function.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx, nn

aten = torch.ops.aten
# Operators whose functions take the same arguments in the same order.
NAMES = (
    "relu sigmoid tanh matmul mm bmm addmm baddbmm cat layer_norm index_select reshape permute"
    " unsqueeze split_with_sizes"
)
FUNCTIONS: dict[Any, Any] = {
    getattr(aten, name).default: getattr(torch, name) for name in NAMES.split()
}
FUNCTIONS |= {
    aten.add.Tensor: torch.add,
    aten.mul.Tensor: torch.mul,
    aten.sum.dim_IntList: torch.sum,
    aten.mean.dim: torch.mean,
    aten.softmax.int: torch.softmax,
    aten.transpose.int: torch.transpose,
    aten.select.int: torch.select,
    aten.squeeze.dims: torch.squeeze,
    aten.linear.default: nn.functional.linear,
    aten.gelu.default: nn.functional.gelu,
    aten.scaled_dot_product_attention.default: nn.functional.scaled_dot_product_attention,
}


def copy_others(source: fx.Graph, graph: fx.Graph, new: dict[fx.Node, fx.Node]) -> None:
    """Copy the nodes of `source` that are not in `new`, as calls of torch's functions."""
    for node in source.nodes:
        if node not in new:
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].target = FUNCTIONS.get(node.target, node.target)


class State:
    """Parameters and buffers of a module by their paths. They are read again in each call, because
    they may be replaced."""

    def __init__(self, root: nn.Module, paths: list[str]) -> None:
        self.root, self.paths = root, paths
        self._modules = {"": 0}
        # for each module but the root: its parent, and its name there
        self._steps: list[tuple[int, str]] = []
        self._leaves: list[tuple[int, str, str]] = []
        for path in paths:
            parent, _, name = path.rpartition(".")
            module = root.get_submodule(parent)
            kind = next(
                (kind for kind in ("_parameters", "_buffers") if name in getattr(module, kind)),
                "__dict__",
            )
            self._leaves.append((self._add(parent), kind, name))

    def _add(self, path: str) -> int:
        if path not in self._modules:
            parent, _, name = path.rpartition(".")
            self._steps.append((self._add(parent), name))
            self._modules[path] = len(self._steps)
        return self._modules[path]

    def read(self) -> list[Any]:
        """The tensors, in the order of the paths."""
        modules: list[Any] = [self.root]
        try:
            for parent, name in self._steps:
                modules.append(modules[parent]._modules[name])
            return [getattr(modules[module], kind)[name] for module, kind, name in self._leaves]
        except KeyError:  # another kind of attribute now, for instance parametrized
            return [operator.attrgetter(path)(self.root) for path in self.paths]


def with_eager_form(fused: fx.GraphModule) -> None:
    """Let eager calls of `fused` run this form. torch.compile, torch.export and copies have the
    graph."""
    eager = _eager_form(fused)
    of_graph, of_eager = type(fused).forward, type(eager).forward

    @functools.wraps(of_graph)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self is not fused:
            return of_graph(self, *args, **kwargs)
        return of_eager(eager, *args, **kwargs)

    type(fused).forward = forward
    # that of fx shows the graph's code in tracebacks, and takes 4 µs more than nn.Module's
    del type(fused).__call__


def _eager_form(fused: fx.GraphModule) -> fx.GraphModule:
    """A module without state, which reads that of `fused`."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.set_codegen(fused.graph._codegen)
    attributes = fused.graph.find_nodes(op="get_attr")
    for node in fused.graph.find_nodes(op="placeholder"):
        new[node] = graph.node_copy(node)
    state = graph.call_function(State(fused, [str(node.target) for node in attributes]).read)
    new |= {
        node: graph.call_function(operator.getitem, (state, position))
        for position, node in enumerate(attributes)
    }
    copy_others(fused.graph, graph, new)
    eager = fx.GraphModule(nn.Module(), graph)
    eager._in_spec, eager._out_spec = fused._in_spec, fused._out_spec
    return eager
