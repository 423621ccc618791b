"""One call of an operator in a captured graph, as the rules see it."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from .lineage import Lineage, Size, common, shape_of

aten = torch.ops.aten
TO_SHAPE = aten.view.default, aten._unsafe_view.default, aten.reshape.default


@dataclass(frozen=True)
class Moved:
    """How a call computes its result from the bases of its operands.

    Attributes:
        lineage: of the result.
        edits: arguments, by name, that differ in the call on the bases: sizes, where -1 stands for
            the rows of the base.
        target: another operator or function for the call on the bases, with arguments of the same
            names.
        broadcasts: an operand of one row (a uniform one) need not be expanded to the rows of the
            others.
        in_full: operands that are used in full although they have a lineage.
        dims: the rows' dimension of each of several results, if they differ.
    """

    lineage: Lineage
    edits: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    broadcasts: bool = False
    in_full: frozenset[fx.Node] = frozenset()
    dims: tuple[int, ...] = ()


class Call:
    """A call_function node, with its arguments by the names of the operator's schema."""

    def __init__(self, node: fx.Node, lineages: dict[fx.Node, Lineage]) -> None:
        self.node, self._lineages = node, lineages
        self.target: Any = node.target
        self.arguments = bind(node)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def lineage(self, x: Any) -> Lineage | None:
        return self._lineages.get(x) if isinstance(x, fx.Node) else None

    def shape(self, x: Any = None) -> tuple[Size, ...]:
        """The shape of a tensor argument, or of the result or the first of several results."""
        return shape_of(first_of((self.node if x is None else x).meta["val"]))

    def dim(self, name: str, ndim: int) -> int:
        """An argument that is a dimension, counted from the front."""
        return self[name] % max(ndim, 1)

    def only(self, *names: str) -> bool:
        """Whether no other argument has a lineage."""
        return not any(
            self.lineage(x)
            for name, x in self.arguments.items()
            if name not in names
            for x in flat(x)
        )

    def broadcast(self, operands: Sequence[Any], skip: int = 0) -> Lineage | None:
        """The lineage of a result to which the operands broadcast. Their last `skip` dimensions do
        not take part.

        f(x[m], y[m], c) = f(x, y, c)[m] if f computes each row of the dimension from the same row
        of its operands, and c has one row.
        """
        ndim = len(self.shape())
        tensors = [x for x in operands if is_tensor(x)]
        moved = [(x, lineage) for x in tensors if (lineage := self.lineage(x)) is not None]
        if not moved or any(lineage.dim >= len(self.shape(x)) - skip for x, lineage in moved):
            return None
        result = common(
            [lineage.at(lineage.dim + ndim - len(self.shape(x))) for x, lineage in moved]
        )
        if result is None:
            return None
        for x in tensors:
            own = result.dim - ndim + len(self.shape(x))
            if self.lineage(x) is None and own >= 0 and self.shape(x)[own] != 1:
                return None
        return result


def bind(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of an operator by name, with the defaults of its schema."""
    target: Any = node.target
    schema = target._schema
    values = {x.name: x.default_value for x in schema.arguments if x.has_default_value()}
    values |= dict(zip((x.name for x in schema.arguments), node.args))
    return values | dict(node.kwargs)


def moved_call(
    node: fx.Node, moved: Moved, value: Callable[[fx.Node], Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The target and the arguments of a call on other operands. value: the one in place of each."""
    if node.target is operator.getitem:
        parent, item = positional(node)
        return node.target, (value(parent), item), {}
    target: Any = moved.target or node.target
    arguments = map_arg(bind(node) | moved.edits, value)
    if not isinstance(target, torch._ops.OpOverload):
        names = inspect.signature(target).parameters
        return target, (), {name: arguments[name] for name in names}
    return target, *_unbind(target, arguments)


def _unbind(target: Any, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call, without keywords that equal their default."""
    args, kwargs = [], {}
    for argument in target._schema.arguments:
        value = arguments[argument.name]
        if not argument.kwarg_only:
            args.append(value)
        elif (
            not argument.has_default_value()
            or isinstance(value, fx.Node)
            or value is not argument.default_value
        ):
            kwargs[argument.name] = value
    return tuple(args), kwargs


def flat(x: Any) -> list[Any]:
    """The entries of an argument that is a list, or the argument."""
    return list(x) if isinstance(x, (list, tuple)) else [x]


def positional(node: Any) -> list[Any]:
    """The positional arguments of a call."""
    return list(node.args)


def first_of(value: Any) -> Any:
    """The first of several results, or the result."""
    return value[0] if isinstance(value, (tuple, list)) and value else value


def is_tensor(x: Any) -> bool:
    return isinstance(x, fx.Node) and isinstance(x.meta.get("val"), torch.Tensor)


def is_operator(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def only_for(replaced: Sequence[fx.Node], reader: fx.Node) -> list[fx.Node]:
    """Those of the operators that nothing else than `reader` and one another reads."""
    kept = set(replaced)
    changed = True
    while changed:
        needed = {x for x in kept if not {*kept, reader}.issuperset(x.users)}
        kept, changed = kept - needed, bool(needed)
    return [x for x in replaced if x in kept]


Rule = Callable[[Call], "Moved | None"]
Condition = Callable[[Call, int, int], bool]
# by name: operators of this project are registered when their modules are imported
RULES: dict[str, Rule] = {}


def rule_of(target: Any) -> Rule | None:
    """The rule of an operator."""
    return RULES.get(str(target))


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for aten operators `name.overload`, several in a text, or for operators
    `namespace.name.overload` of this project."""

    def register(function: Rule) -> Rule:
        for name in " ".join(names).split():
            RULES[name if name.count(".") == 2 else f"aten.{name}"] = function
        return function

    return register


def row_by_row(
    operators: Iterable[tuple[str, Condition]], of: str = "self", alone: bool = True
) -> None:
    """Registers rules for operators, named as for `rule`, that compute each row of their operand
    `of` by itself, where a condition holds: of the call, the rows' dimension and the number of
    dimensions. The rows' dimension stays in place. alone: no other operand may have a lineage."""
    for names, condition in operators:

        @rule(names)
        def moved(call: Call, condition: Condition = condition) -> Moved | None:
            lineage, ndim = call.lineage(call[of]), len(call.shape(call[of]))
            if lineage is None or (alone and not call.only(of)):
                return None
            return Moved(lineage) if condition(call, lineage.dim, ndim) else None


def equal_segments(offsets: fx.Node) -> tuple[Size, int] | None:
    """(B, n) of offsets arange(B + 1) * n, else None."""
    step = 1
    if offsets.target is aten.mul.Tensor and isinstance(offsets.args[1], int):
        offsets, step = positional(offsets)
    if not is_operator(offsets):
        return None
    if offsets.target not in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        return None
    call = Call(offsets, {})
    start, stride = call.arguments.get("start", 0), call.arguments.get("step", 1)
    if start != 0 or not isinstance(stride, int) or stride * step <= 0:
        return None
    return call.shape()[0] - 1, stride * step
