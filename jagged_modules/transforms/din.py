"""DIN's attention of candidates to their user's events, found in a captured graph.

    s = MLP([q | k | q - k | q ∘ k])        for each pair of candidate and event
    out = Σ s v    or    Σ softmax(s) v     over the events that a mask shows

Libraries have a batch norm behind each linear and a factor of the scores, too, and hide events from
the softmax by a large negative number: a user without events then gets the mean of all values.

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
from .calls import Call, is_operator, is_tensor, only_for, positional
from .capture import BATCH_NORM
from .choices import ARITHMETIC, FILLS, KEEPS_ORDER, choice, fill_of, is_mask
from .lineage import Lineage, Size, common, product, shape_of

aten = torch.ops.aten
ACTIVATIONS: dict[Any, str] = {
    aten.sigmoid.default: "sigmoid", aten.relu.default: "relu", aten.silu.default: "silu",
    aten.prelu.default: "prelu",
}  # fmt: skip
# what UnitParameters has, by the arguments of a batch norm
OF_NORMS = {
    "norm_weights": "weight", "norm_biases": "bias",
    "running_means": "running_mean", "running_vars": "running_var",
}  # fmt: skip
PAIRS: dict[Any, str] = {aten.sub.Tensor: "q-k", aten.mul.Tensor: "q*k"}
REPEATS = aten.expand.default, aten.repeat.default
# a number that no score reaches: at most this, an event has no weight in the softmax
HIDES = -1e4
# added to scores of less than 16, a number that this times smaller rounds to itself
ABSORBS = 64
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
    norm: Call | None  # of its results
    activation: _Activation | None  # of the layer before


class _Hidden(NamedTuple):
    """How events are hidden."""

    mask: fx.Node  # bool, with the order of the pairs
    is_visible: bool
    number: float  # of the scores of hidden events


@dataclass
class DINAttention:
    """An attention with scores of an MLP, whose keys and values are G[map].

    Attributes:
        node: its result, `[B, Ev]` or `[B, 1, Ev]`.
        query: `[B, 1, E]` or `[B, E]`.
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
    def hidden(self) -> fx.Node | None:
        return self.operands[2] if len(self.operands) > 2 else None

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
        self.batch, self.events = shape_of(value.meta["val"])[:2]
        self.pairs = self.batch * self.events
        _need(self.node.meta["val"].is_floating_point())
        _need(self.events != 1 and not self.pairs.is_Integer and _size(scores) == self.pairs)
        scores, normalize = self.in_order(scores), None
        if scores.target is aten.softmax.int:
            self.seen.append(scores)
            shape, dim = shape_of(scores.meta["val"]), scores.args[1] % scores.meta["val"].dim()
            _need((product(shape[:dim]), shape[dim]) == (self.batch, self.events))
            normalize, scores = "softmax", self.in_order(scores.args[0])
        scores, outer = self._factor(scores)
        scores, hidden = self._masked(scores, normalize is not None)
        scores, inner = self._factor(scores)
        layers, x = self._layers(scores)
        _need(shape_of(x.meta["val"])[-1] == shape_of(layers[0].weight.meta["val"])[1])
        features, query, key = self._features(x)
        mlp = self._mlp(layers) | dict(features=features, normalize=normalize)
        mlp |= dict(factor=outer * inner, mean_of_hidden=False)
        operands = [key, value]
        if hidden is not None:
            _need(shape_of(hidden.mask.meta["val"]) == (self.batch, self.events))
            _need(hidden.number * outer <= HIDES if normalize else hidden.number == 0)
            operands.append(hidden.mask)
            least = torch.finfo(self.node.meta["val"].dtype).min
            mlp["mean_of_hidden"] = normalize is not None and hidden.number >= least
        self._need_supported([query, key, value], mlp)
        _need(len(only_for(self.seen, self.node)) == len(self.seen))
        readers = [self.node, *self.seen]
        reads = {(x, y) for x in (key, value) for y in readers if x in y.all_input_nodes}
        products, lineage = tuple(x.node for x in layers), self._lineage(operands)
        return DINAttention(
            self.node,
            query,
            operands,
            hidden is None or hidden.is_visible,
            mlp,
            products,
            tuple(self.activations),
            self.reads | reads,
            lineage,
        )

    def _need_supported(self, operands: list[fx.Node], mlp: dict[str, Any]) -> None:
        """One dtype, statistics apart, and on a GPU a dtype and sizes that the kernels take."""
        of_norms = [x for x in mlp["norms"] if x is not None]
        running = [*mlp["units"].get("running_means", ()), *mlp["units"].get("running_vars", ())]
        running += [norm[name] for norm in of_norms for name in ("running_mean", "running_var")]
        given = [*operands, *mlp["weights"], *mlp["biases"], *sum(mlp["units"].values(), [])]
        given += [norm[name] for norm in of_norms for name in ("weight", "bias")]
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

    def _factor(self, x: fx.Node) -> tuple[fx.Node, float]:
        """What x is a multiple of, and the factor."""
        factor = 1.0
        while x.target in (aten.mul.Tensor, aten.div.Tensor):
            first, number = positional(x)[:2]
            if not isinstance(number, (int, float)):
                break
            _need(0 < number < math.inf)
            factor = factor * number if x.target is aten.mul.Tensor else factor / number
            self.seen.append(x)
            x = self.in_order(first)
        return x, factor

    def _masked(self, scores: fx.Node, softmax: bool) -> tuple[fx.Node, _Hidden | None]:
        """The scores before a mask sets some to a number, and how it does. softmax: whether they go
        into one."""
        if scores.target in FILLS:
            x, mask, fill, keeps = fill_of(scores)
            chosen, filled = choice(mask), choice(fill)
            if chosen is None or chosen.mask is None or filled is None or filled.mask is not None:
                raise _NoMatch
            self.seen += filled.constants
            hidden = _Hidden(chosen.mask, keeps == (chosen.if_true == 1), filled.if_true)
            return self._read(scores, x, mask), hidden
        if not softmax:
            return self._multiplied(scores)
        if scores.target not in (aten.add.Tensor, aten.sub.Tensor):
            return scores, None
        call = Call(scores, {})
        x, term = call["self"], call["other"]
        if scores.target is aten.add.Tensor and choice(term) is None:
            x, term = term, x
        added = choice(term)
        if added is None or added.mask is None or call["alpha"] != 1 or not is_tensor(x):
            return scores, None
        shown, number = sorted((added.if_false, added.if_true), key=abs)
        number = number if scores.target is aten.add.Tensor else -number
        hidden = _Hidden(added.mask, added.if_true == 0, number)
        _need(shown == 0 and scores.meta["val"].is_floating_point())
        of_product, cleared = self._multiplied(self._read(scores, x, term))
        # else the scores of hidden events could matter if all events are hidden
        absorbs = -number * torch.finfo(scores.meta["val"].dtype).eps >= ABSORBS
        _need(cleared == hidden._replace(number=0.0) or (cleared is None and absorbs))
        return of_product, hidden

    def _multiplied(self, scores: fx.Node) -> tuple[fx.Node, _Hidden | None]:
        """The scores before a product with a mask of 0 and 1."""
        if scores.target is not aten.mul.Tensor or not all(map(is_tensor, positional(scores)[:2])):
            return scores, None
        x, mask = positional(scores)[:2]
        x, mask = (x, mask) if is_mask(mask) else (mask, x)
        chosen = choice(mask)
        if chosen is None or chosen.mask is None or not is_mask(mask):
            raise _NoMatch
        return self._read(scores, x, mask), _Hidden(chosen.mask, chosen.if_true == 1, 0.0)

    def _read(self, reader: fx.Node, scores: Any, mask: fx.Node) -> fx.Node:
        """The scores, of which reader hides some by the mask."""
        _need(is_tensor(scores))
        _need(_size(reader) == _size(mask) == _size(scores) == self.pairs)
        self.seen.append(reader)
        self.reads.add((mask, reader))
        return self.in_order(scores)

    # -- the MLP -----------------------------------------------------------------------------------

    def _layers(self, scores: fx.Node) -> tuple[list[_Layer], fx.Node]:
        """The linears from the first to the last one, and the input of the first one."""
        layers: list[_Layer] = []
        x, units, norm, activation = scores, 1, None, None
        while x.target is aten.linear.default:
            call = Call(x, {})
            weight, bias = call["weight"], call["bias"]
            columns = call.shape(weight)[-1]
            _need(columns.is_Integer and call.shape(weight) == (units, columns))
            _need(bias is None or call.shape(bias) == (units,))
            self.seen.append(x)
            layers.insert(0, _Layer(x, weight, bias, norm, activation))
            x, units = self.in_order(call["input"]), int(columns)
            if x.target is not aten.cat.default:
                first = len(self.seen)
                activation = self._activation(x, units)
                x, norm = self._normed(activation.node, units)
                self.activations |= dict.fromkeys(self.seen[first:])
        _need(len(layers) > 1 and x.target is aten.cat.default)
        return layers, x

    def _normed(self, x: fx.Node, units: int) -> tuple[fx.Node, Call | None]:
        """The linear whose results a batch norm x takes, if it is one."""
        norm = self._norm(x)
        if norm is None:
            return x, None
        _need(shape_of(x.meta["val"])[1:] == (units,))
        self.seen += [x, norm.node]
        return self.in_order(norm["input"]), norm

    def _norm(self, x: fx.Node) -> Call | None:
        """The batch norm in eval mode that x is the result of."""
        if x.target is not operator.getitem or positional(x)[0].target is not BATCH_NORM:
            return None
        return Call(positional(x)[0], {}) if x.args[1] == 0 else None

    def _activation(self, x: fx.Node, units: int) -> _Activation:
        """What computes x of a linear's result, or of a norm of it."""
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
        """z p + slope z (1 - p), however it is written, with p = sigmoid(batch_norm(z)). All may be
        transposed: units before events."""
        self._found: dict[Any, fx.Node] = {}
        own = self._transposed(x, units)
        before_events = own is not x
        formula = self._formula(own, units, before_events)
        _need(self._found.keys() == {Z, GATE, SLOPE})
        _need(sympy.expand(formula - Z * GATE - SLOPE * Z * (1 - GATE)) == 0)
        norm = Call(self._found[GATE], {})
        z, normed = self._found[Z], norm["input"]
        if before_events:
            _need(shape_of(normed.meta["val"]) == (self.batch, units, self.events))
            normed = self._transposed(normed, units)
        else:
            _need(shape_of(normed.meta["val"])[1:] == (units,))
        _need(self.in_order(normed) is z)
        return _Activation(z, "dice", self._found[SLOPE], norm)

    def _transposed(self, x: fx.Node, units: int) -> fx.Node:
        """The operand of x, if x exchanges events and units."""
        if x.target is not aten.transpose.int:
            return x
        operand, *dims = positional(x)
        if {dim % 3 for dim in dims} != {1, 2}:
            return x
        expected = (self.batch, self.events, units), (self.batch, units, self.events)
        _need(shape_of(x.meta["val"]) in expected)
        self.seen.append(x)
        return operand

    def _formula(self, x: Any, units: int, before_events: bool) -> Any:
        """x as a formula of the symbols, which `_found` then has."""
        if isinstance(x, (int, float)):
            return sympy.sympify(x)
        _need(is_tensor(x))
        if _size(x).is_Integer:
            _need(x not in self.analysis.lineages and _size(x) in (1, units))
            own = shape_of(x.meta["val"])
            _need(_size(x) == 1 or own[-1 - before_events :] == (units, 1)[: 1 + before_events])
            return self._symbol(SLOPE, x)
        x = self.in_order(self._transposed(x, units) if before_events else x)
        if x.target is aten.linear.default or self._norm(x):
            return self._symbol(Z, x)
        self.seen.append(x)
        if x.target is aten.sigmoid.default:
            part = self.in_order(x.args[0])
            norm = self._norm(part)
            if norm is None:
                raise _NoMatch
            self.seen += [part, norm.node]
            return self._symbol(GATE, norm.node)
        operation = ARITHMETIC.get(x.target)
        if operation is None or Call(x, {}).arguments.get("alpha", 1) != 1:
            raise _NoMatch
        shape = shape_of(x.meta["val"])
        _need(_size(x) == self.pairs * units)
        _need(shape == (self.batch, units, self.events) if before_events else shape[-1] == units)
        first, second = (self._formula(y, units, before_events) for y in positional(x)[:2])
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
        of_norm = "weight", "bias", "running_mean", "running_var", "eps"
        own = [x.norm and {name: x.norm[name] for name in of_norm} for x in layers]
        # all layers or none
        _need(all(None not in x or not any(x) for x in units.values()))
        return dict(
            weights=[x.weight for x in layers],
            biases=[x.bias for x in layers],
            norms=own,
            activation=hidden[0].name,
            units={name: x for name, x in units.items() if any(x)},
            eps=norms[0]["eps"] if norms else 0.0,
        )

    def _features(self, x: fx.Node) -> tuple[list[str], fx.Node, fx.Node]:
        """The names of the parts of a concatenation, the query and the key."""
        call, shape = Call(x, {}), _shape(x)
        parts = call["tensors"]
        width = shape[-1] / len(parts)
        _need(shape[:2] == (self.batch, self.events) and call.dim("dim", 3) == 2)
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
            _need(len(own) == 1 or order[0] != order[1])
            name = "k-q" if name == "q-k" and order[0] else name
            names.append(name or ("k" if order[0] else "q"))
            for y, is_key in sides:
                (keys if is_key else queries).add(y)
        _need(len(keys) == len(queries) == 1 and len({*names}) == len(names))
        (query,), (key,) = queries, keys
        _need(shape_of(query.meta["val"]) in ((self.batch, 1, width), (self.batch, width)))
        _need(shape_of(key.meta["val"]) == (self.batch, self.events, width))
        return names, query, key

    def _side(self, x: fx.Node) -> tuple[fx.Node, bool]:
        """The query that x repeats for the events, or the key, and whether it is."""
        repeated = positional(x)[0] if x.target in KEEPS_ORDER else x
        if repeated is not x and repeated.target is aten.repeat.default:
            operand, times = positional(repeated)
            if operand.meta["val"].dim() == 2 and times == [1, self.events]:
                self.seen += [x, repeated]
                return operand, False
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
