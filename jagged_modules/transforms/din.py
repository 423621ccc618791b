"""DIN's attention of candidates to their user's events, found in a captured graph.

    s = MLP([q | k | q - k | q ∘ k])        for each pair of candidate and event
    out = Σ s v    or    Σ softmax(s) v     over the events that a mask shows

If events and mask are G[map], `din_attention` reads their bases. Operators on rows of pairs are
compared by the order of their elements, which views keep: element b · T + t is of event t.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from jagged_kernels.din.configs import MAX_WEIGHTS, has_kernels
from torch import fx

from .analysis import Analysis
from .attention import KEEPS_VALUES, ZEROS
from .calls import Call, is_operator, is_tensor, only_for, positional
from .lineage import Lineage, Size, common, product, shape_of

aten = torch.ops.aten
KEEPS_ORDER = (
    *KEEPS_VALUES, aten.view.default, aten._unsafe_view.default, aten.reshape.default,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
)  # fmt: skip
ACTIVATIONS: dict[Any, str] = {
    aten.sigmoid.default: "sigmoid", aten.relu.default: "relu", aten.silu.default: "silu",
    aten.prelu.default: "prelu",
}  # fmt: skip
ARITHMETIC: dict[Any, Callable[[Any, Any], Any]] = {
    aten.add.Tensor: operator.add, aten.sub.Tensor: operator.sub, aten.mul.Tensor: operator.mul,
    aten.rsub.Scalar: lambda x, y: y - x,
}  # fmt: skip
# what UnitParameters has, by the arguments of a batch norm
OF_NORMS = {
    "norm_weights": "weight", "norm_biases": "bias",
    "running_means": "running_mean", "running_vars": "running_var",
}  # fmt: skip
PAIRS: dict[Any, str] = {aten.sub.Tensor: "q-k", aten.mul.Tensor: "q*k"}
REPEATS = aten.expand.default, aten.repeat.default
NOTS = aten.bitwise_not.default, aten.logical_not.default
TO_NUMBERS = aten._to_copy.default
FILLS = aten.masked_fill.Scalar, aten.where.ScalarOther, aten.where.self
Z, GATE, SLOPE = sympy.symbols("z gate slope")


class _Activation(NamedTuple):
    """What comes before a linear: of the result of another one, `node`."""

    node: fx.Node
    name: str
    slope: fx.Node | None = None
    norm: Call | None = None


class _Layer(NamedTuple):
    node: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    activation: _Activation | None  # of the layer before


@dataclass
class DINAttention:
    """An attention with scores of an MLP, whose keys and values are G[map].

    Attributes:
        node: its result, `[B, Ev]` or `[B, 1, Ev]`.
        query: `[B, 1, E]`.
        operands: key, value and, if there is a mask, the bool `[B, T]` that it is made of.
        hidden_is_visible: whether this mask is True for visible events.
        mlp: the other arguments of `attend_by_mlp_in_place`.
        products: the linears, the first one first.
        activations: the operators between them.
        reads: as of `TargetAttention`.
        lineage: of the operands.
    """

    node: fx.Node
    query: fx.Node
    operands: list[fx.Node]
    hidden_is_visible: bool
    mlp: dict[str, Any]
    products: tuple[fx.Node, ...]
    activations: tuple[fx.Node, ...]
    reads: set[tuple[fx.Node, fx.Node]]
    lineage: Lineage
    name = "din_attention"

    @property
    def inputs(self) -> list[fx.Node]:
        return [self.query, *self.operands, *self.mlp["weights"]]

    @property
    def replaced(self) -> set[fx.Node]:
        """The operators that read operands, and the linears."""
        return {reader for _, reader in self.reads}.union(self.products)


def find_din_attentions(
    graph: fx.Graph, analysis: Analysis, estimate: Callable[[Size], int]
) -> dict[fx.Node, DINAttention]:
    """All such attentions with fewer than half as many users as there are candidates."""
    found = {}
    for node in graph.nodes:
        if node in analysis.lineages or not is_operator(node):
            continue
        try:
            match = _Reader(node, analysis).match()
        except _NoMatch:
            continue
        if 2 * estimate(match.lineage.base_rows) <= estimate(match.lineage.rows):
            found[node] = match
    return found


class _NoMatch(Exception):
    """The operators compute something else."""


def _need(condition: Any) -> None:
    if not condition:
        raise _NoMatch


def _size(x: fx.Node) -> Size:
    return product(shape_of(x.meta["val"]))


def _shape(x: fx.Node) -> tuple[Size, Size, Size]:
    """Of three dimensions."""
    shape = shape_of(x.meta["val"])
    if len(shape) != 3:
        raise _NoMatch
    return shape[0], shape[1], shape[2]


class _Reader:
    """Reads the operators from the result back to the events."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.node, self.analysis = node, analysis
        self.seen: list[fx.Node] = []  # the operators that are replaced, besides node
        self.reads = set[tuple[fx.Node, fx.Node]]()
        self.activations: dict[fx.Node, None] = {}

    def match(self) -> DINAttention:
        scores, value = self._weighted_sum()
        batch, events = shape_of(value.meta["val"])[:2]
        self.pairs = batch * events
        _need(events != 1 and not self.pairs.is_Integer and _size(scores) == self.pairs)
        scores = self.in_order(scores)
        normalize = None
        if scores.target is aten.softmax.int:
            self.seen.append(scores)
            shape, dim = shape_of(scores.meta["val"]), scores.args[1] % scores.meta["val"].dim()
            _need((product(shape[:dim]), shape[dim]) == (batch, events))
            normalize, scores = "softmax", self.in_order(scores.args[0])
        scores, mask, visible = self._masked(scores, -math.inf if normalize else 0.0)
        layers, x = self._layers(scores)
        _need(shape_of(x.meta["val"])[-1] == shape_of(layers[0].weight.meta["val"])[1])
        features, query, key = self._features(x, batch, events)
        mlp = self._mlp(layers) | dict(features=features, normalize=normalize)
        operands = [key, value, *([] if mask is None else [mask])]
        _need(mask is None or shape_of(mask.meta["val"]) == (batch, events))
        self._need_supported([query, key, value], mlp)
        _need(len(only_for(self.seen, self.node)) == len(self.seen))
        readers = [self.node, *self.seen]
        reads = {(x, y) for x in (key, value) for y in readers if x in y.all_input_nodes}
        products, lineage = tuple(x.node for x in layers), self._lineage(operands)
        return DINAttention(
            self.node,
            query,
            operands,
            visible,
            mlp,
            products,
            tuple(self.activations),
            self.reads | reads,
            lineage,
        )

    def _need_supported(self, operands: list[fx.Node], mlp: dict[str, Any]) -> None:
        """One dtype, statistics apart, and on a GPU a dtype and sizes that the kernels take."""
        running = [*mlp["units"].get("running_means", ()), *mlp["units"].get("running_vars", ())]
        given = [*operands, *mlp["weights"], *mlp["biases"], *sum(mlp["units"].values(), [])]
        given = [x for x in given if x is not None and x not in running]
        _need({x.meta["val"].dtype for x in given} == {self.node.meta["val"].dtype})
        _need(all(x.meta["val"].dtype in (torch.float32, torch.float64) for x in running))
        value = self.node.meta["val"]
        widths = [int(x.meta["val"].shape[-1]) for x in operands[1:]]
        hidden = tuple(int(x.meta["val"].shape[0]) for x in mlp["weights"][:-1])
        size = value.element_size()
        has_own = size in MAX_WEIGHTS and has_kernels(widths[0], widths[1], hidden, size)
        _need(value.is_floating_point() and (has_own or value.device.type == "cpu"))

    def in_order(self, x: Any) -> fx.Node:
        """What x is a view of, with the same order of elements."""
        _need(is_tensor(x))
        while x.target in KEEPS_ORDER or _has_one_row(x):
            self.seen.append(x)
            x = x.args[0]
        return x

    def _lineage(self, operands: list[fx.Node]) -> Lineage:
        lineages = [self.analysis.lineages.get(x) for x in operands]
        known = [x for x in lineages if x and not (x.dim or x.is_folded or x.is_uniform)]
        _need(len(known) == len(operands))
        result = common(known)
        if result is None:
            raise _NoMatch
        return result

    def _weighted_sum(self) -> tuple[fx.Node, fx.Node]:
        """The weights and the values of the sum over events that node is."""
        x, node = self.node, self.node
        if node.target is aten.sum.dim_IntList:
            call = Call(node, {})
            x = call["self"]
            _need(x.target is aten.mul.Tensor and x.meta["val"].dim() == 3)
            _need([dim % 3 for dim in call["dim"] or ()] == [1] and call["dtype"] is None)
            self.seen.append(x)
        else:
            _need(node.target in (aten.bmm.default, aten.matmul.default))
        first, second = positional(x)
        _need(is_tensor(first) and is_tensor(second))
        if x is not node and shape_of(second.meta["val"])[-1] == 1:
            first, second = second, first
        batch, events, width = _shape(second)
        expected = (batch, 1, events) if x is node else (batch, events, 1)
        _need(_shape(first) == expected and width.is_Integer)
        return first, second

    def _masked(self, scores: fx.Node, fill: float) -> tuple[fx.Node, fx.Node | None, bool]:
        """The scores before a mask sets them to fill, and the mask and whether it shows events."""
        reader, shown = scores, True
        if scores.target in FILLS:
            given = Call(scores, {}).arguments
            shown = "condition" in given
            mask, value = (
                (given["condition"], given["other"]) if shown else (given["mask"], given["value"])
            )
            _need(value == fill or (fill == 0 and is_tensor(value) and value.target in ZEROS))
            self.seen += [value] if is_tensor(value) else []
            scores = given["self"]
        elif scores.target is aten.mul.Tensor and fill == 0:
            first, second = positional(scores)
            _need(is_tensor(first) and is_tensor(second))
            scores, mask = (first, second) if self._is_mask(second) else (second, first)
        else:
            return scores, None, True
        _need(self._is_mask(mask))
        _need(_size(reader) == _size(mask) == _size(scores) == self.pairs)
        self.seen.append(reader)
        self.reads.add((mask, reader))
        return self.in_order(scores), *self._source(mask, shown)

    def _is_mask(self, x: fx.Node) -> bool:
        return self._source(x)[0].meta["val"].dtype == torch.bool

    def _source(self, mask: fx.Node, visible: bool = True) -> tuple[fx.Node, bool]:
        """The bool tensor `[B, T]` that a mask of 0 and 1 is made of."""
        while True:
            is_bool = mask.meta["val"].dtype == torch.bool
            if mask.target in NOTS and is_bool:
                visible = not visible
            elif mask.target not in KEEPS_ORDER and (is_bool or mask.target != TO_NUMBERS):
                return mask, visible
            mask = positional(mask)[0]

    # -- the MLP -----------------------------------------------------------------------------------

    def _layers(self, scores: fx.Node) -> tuple[list[_Layer], fx.Node]:
        """The linears from the first to the last one, and the input of the first one."""
        layers: list[_Layer] = []
        x, units, activation = scores, 1, None
        while x.target is aten.linear.default:
            call = Call(x, {})
            weight, bias = call["weight"], call["bias"]
            columns = call.shape(weight)[-1]
            _need(columns.is_Integer and call.shape(weight) == (units, columns))
            _need(bias is None or call.shape(bias) == (units,))
            self.seen.append(x)
            layers.insert(0, _Layer(x, weight, bias, activation))
            x, units = self.in_order(call["input"]), int(columns)
            if x.target is not aten.cat.default:
                first = len(self.seen)
                activation = self._activation(x, units)
                self.activations |= dict.fromkeys(self.seen[first:])
                x = activation.node
        _need(len(layers) > 1 and x.target is aten.cat.default)
        return layers, x

    def _activation(self, x: fx.Node, units: int) -> _Activation:
        """What computes x of a linear's result."""
        if x.target is aten.linear.default:
            return _Activation(x, "identity")
        if x.target not in ACTIVATIONS:
            return self._dice(x, units)
        slope = None
        if x.target is aten.prelu.default:  # dimension 1 has the units
            slope = positional(x)[1]
            _need(_size(slope) == 1 or shape_of(x.meta["val"])[1:] == (units,))
        self.seen.append(x)
        return _Activation(self.in_order(x.args[0]), ACTIVATIONS[x.target], slope)

    def _dice(self, x: fx.Node, units: int) -> _Activation:
        """z p + slope z (1 - p), however it is written, with p = sigmoid(batch_norm(z))."""
        self._found: dict[Any, fx.Node] = {}
        formula = self._formula(x, units)
        _need(self._found.keys() == {Z, GATE, SLOPE})
        _need(sympy.expand(formula - Z * GATE - SLOPE * Z * (1 - GATE)) == 0)
        norm = Call(self._found[GATE], {})
        _need(self.in_order(norm["input"]) is self._found[Z])
        _need(shape_of(norm["input"].meta["val"])[1:] == (units,))
        return _Activation(self._found[Z], "dice", self._found[SLOPE], norm)

    def _formula(self, x: Any, units: int) -> Any:
        """x as a formula of the symbols, which `_found` then has."""
        if isinstance(x, (int, float)):
            return sympy.sympify(x)
        _need(is_tensor(x))
        if _size(x).is_Integer:
            _need(x not in self.analysis.lineages and _size(x) in (1, units))
            _need(shape_of(x.meta["val"])[-1:] in ((), (_size(x),)))
            return self._symbol(SLOPE, x)
        x = self.in_order(x)
        if x.target is aten.linear.default:
            return self._symbol(Z, x)
        self.seen.append(x)
        if x.target is aten.sigmoid.default:
            part = self.in_order(x.args[0])
            _need(part.target is operator.getitem and part.args[1] == 0)
            norm = positional(part)[0]
            _need(norm.target is aten._native_batch_norm_legit_no_training.default)
            self.seen += [part, norm]
            return self._symbol(GATE, norm)
        operation = ARITHMETIC.get(x.target)
        if operation is None or Call(x, {}).arguments.get("alpha", 1) != 1:
            raise _NoMatch
        _need((_size(x), shape_of(x.meta["val"])[-1]) == (self.pairs * units, units))
        first, second = (self._formula(y, units) for y in positional(x)[:2])
        return operation(first, second)

    def _symbol(self, symbol: Any, x: fx.Node) -> Any:
        _need(self._found.setdefault(symbol, x) is x)
        return symbol

    def _mlp(self, layers: list[_Layer]) -> dict[str, Any]:
        """The arguments of `attend_by_mlp_in_place` that the layers have."""
        hidden = [x.activation for x in layers if x.activation is not None]
        norms = [x.norm for x in hidden if x.norm is not None]
        _need(len({x.name for x in hidden}) == 1 and len({x["eps"] for x in norms}) <= 1)
        units: dict[str, Any] = {name: [x[own] for x in norms] for name, own in OF_NORMS.items()}
        units["slopes"] = [x.slope for x in hidden if x.slope is not None]
        # all layers or none
        _need(all(None not in x or not any(x) for x in units.values()))
        return dict(
            weights=[x.weight for x in layers],
            biases=[x.bias for x in layers],
            activation=hidden[0].name,
            units={name: x for name, x in units.items() if any(x)},
            eps=norms[0]["eps"] if norms else 0.0,
        )

    def _features(
        self, x: fx.Node, batch: Size, events: Size
    ) -> tuple[list[str], fx.Node, fx.Node]:
        """The names of the parts of a concatenation, the query and the key."""
        call, shape = Call(x, {}), _shape(x)
        parts = call["tensors"]
        width = shape[-1] / len(parts)
        _need(shape[:2] == (batch, events) and call.dim("dim", 3) == 2)
        _need(all(_shape(y)[2] == width for y in parts))
        self.seen.append(x)
        names, queries, keys = list[str](), set[fx.Node](), set[fx.Node]()
        for part in parts:
            name, own = "", [part]
            if part.target in PAIRS and part not in self.analysis.lineages:
                name, own = PAIRS[part.target], positional(part)[:2]
                _need(Call(part, {}).arguments.get("alpha", 1) == 1)
                _need(all(map(is_tensor, own)))
                self.seen.append(part)
            sides = [self._side(y) for y in own]
            order = [is_key for _, is_key in sides]
            _need(len(own) == 1 or order == [False, True] or (name == "q*k" and order[0]))
            names.append(name or ("k" if order[0] else "q"))
            for y, is_key in sides:
                (keys if is_key else queries).add(y)
        _need(len(keys) == len(queries) == 1 and len({*names}) == len(names))
        (query,), (key,) = queries, keys
        _need(shape_of(query.meta["val"]) == (batch, 1, width))
        _need(shape_of(key.meta["val"]) == (batch, events, width))
        return names, query, key

    def _side(self, x: fx.Node) -> tuple[fx.Node, bool]:
        """The query `[B, 1, E]` that x repeats for the events, or the key, and whether it is."""
        if x.target in REPEATS:
            self.seen.append(x)
            x = positional(x)[0]
        return x, _shape(x)[1] != 1


def _has_one_row(x: fx.Node) -> bool:
    """Whether x exchanges two neighbouring dimensions of which one has size 1, or selects from a
    dimension of size 1."""
    if x.target is aten.select.int:
        operand, dim, _ = positional(x)
        return bool(shape_of(operand.meta["val"])[dim] == 1)
    if x.target is not aten.transpose.int:
        return False
    shape = shape_of(x.meta["val"])
    first, second = (dim % len(shape) for dim in positional(x)[1:])
    return abs(first - second) == 1 and 1 in (shape[first], shape[second])
