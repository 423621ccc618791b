"""Numbers that a mask chooses: what hides scores from a sum or a softmax.

Values are compared by the order of their elements, which views keep.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from .attention import KEEPS_VALUES, ZEROS
from .calls import TO_SHAPE, bind, is_tensor, positional

aten = torch.ops.aten
KEEPS_ORDER = (
    *KEEPS_VALUES, *TO_SHAPE, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims,
)  # fmt: skip
ARITHMETIC: dict[Any, Callable[[Any, Any], Any]] = {
    aten.add.Tensor: operator.add, aten.sub.Tensor: operator.sub, aten.mul.Tensor: operator.mul,
    aten.rsub.Scalar: lambda x, y: y - x,
}  # fmt: skip
NOTS = aten.bitwise_not.default, aten.logical_not.default
TO_NUMBERS = aten._to_copy.default
FILLS = (
    aten.masked_fill.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.self
)  # fmt: skip
ONES = aten.ones_like.default, aten.ones.default, aten.new_ones.default
FULL = aten.full_like.default, aten.full.default, aten.new_full.default


class Choice(NamedTuple):
    """Each element is one of two numbers.

    Attributes:
        mask: the bool tensor that chooses. None: both numbers are the same.
        if_false, if_true: the numbers.
        constants: the operators that make a tensor of one number.
    """

    mask: fx.Node | None
    if_false: float
    if_true: float
    constants: tuple[fx.Node, ...] = ()

    def swapped(self) -> Choice:
        return self._replace(if_false=self.if_true, if_true=self.if_false)


def choice(x: Any) -> Choice | None:
    """The numbers that x has, and the bool tensor with the same order of elements that chooses
    them. None if x is something else."""
    if isinstance(x, (int, float)):
        return Choice(None, x, x)
    if not is_tensor(x):
        return None
    if x.target in NOTS and x.meta["val"].dtype == torch.bool:
        found = choice(x.args[0])
        return found and found.swapped()
    if x.target in KEEPS_ORDER:
        return choice(x.args[0])
    if x.meta["val"].dtype == torch.bool:
        return Choice(x, 0.0, 1.0)
    if x.target == TO_NUMBERS:
        found = choice(x.args[0])
        return found if found and all(float(y).is_integer() for y in found[1:3]) else None
    if x.target in FILLS:
        return _filled(x)
    if x.target in ARITHMETIC and bind(x).get("alpha", 1) == 1:
        return _joined(ARITHMETIC[x.target], x, *map(choice, positional(x)[:2]))
    for targets, number in ((ZEROS, 0.0), (ONES, 1.0)):
        if x.target in targets:
            return Choice(None, number, number, (x,))
    fill = bind(x)["fill_value"] if x.target in FULL else None
    return Choice(None, fill, fill, (x,)) if isinstance(fill, (int, float)) else None


def fill_of(x: fx.Node) -> tuple[Any, Any, Any, bool]:
    """The operand of one of FILLS, the mask, what replaces elements, and whether True keeps one."""
    given = bind(x)
    if "condition" not in given:
        return given["self"], given["mask"], given["value"], False
    x, fill = given["self"], given["other"]
    is_fill = choice(x) is not None and choice(fill) is None
    return (fill, given["condition"], x, False) if is_fill else (x, given["condition"], fill, True)


def _filled(x: fx.Node) -> Choice | None:
    operand, mask, fill, keeps = fill_of(x)
    kept, chosen, other = map(choice, (operand, mask, fill))
    if kept is None or chosen is None or other is None or chosen.mask is None:
        return None
    if kept.mask or other.mask:
        return None
    found = Choice(chosen.mask, other.if_true, kept.if_true)
    return found if keeps == (chosen.if_true == 1) else found.swapped()


def _joined(
    operation: Callable[[Any, Any], Any], x: fx.Node, a: Choice | None, b: Choice | None
) -> Choice | None:
    if a is None or b is None or len({a.mask, b.mask} - {None}) > 1:
        return None
    mask, constants = a.mask or b.mask, (*a.constants, *b.constants, x)
    numbers = operation(a.if_false, b.if_false), operation(a.if_true, b.if_true)
    return Choice(mask, *numbers, () if mask else constants)


def is_mask(x: Any) -> bool:
    """Whether x is 0 where a mask hides and 1 where it shows."""
    found = choice(x) if is_tensor(x) else None
    return found is not None and found.mask is not None and {*found[1:3]} == {0, 1}
