"""Lineage of a value: which rows of a smaller tensor it repeats, and by which map.

A value with a lineage is G[map] along one dimension. Sizes are sympy expressions: two sizes that
happen to be equal in an example prove nothing. The dimension may be folded with others, as batch ×
heads is: its size is then pre · rows · post.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

import sympy
import torch
from torch import fx

Size: TypeAlias = sympy.Expr
# rows of the inputs that the caller no longer replicates
USERS = sympy.Symbol("users", integer=True, positive=True)


@dataclass(frozen=True)
class Map:
    """A map from rows of a value to rows of a smaller tensor.

    Attributes:
        kind: "index": `node` holds the row of G for each row of the value; "base": the same, but
            `node` has a lineage and its base holds the rows; "counts": `node` holds how often each
            row of G is repeated; "repeat": each row is repeated `times` times; "one": G has one
            row.
        node: the tensor of the original graph that defines the map.
        times: for "repeat".
        rows_in, rows_out: numbers of rows of G and of the value.
        is_narrowed: whether the map is shared by tensors of different sizes. Then negative entries
            would count from different ends.
    """

    kind: str
    node: fx.Node | None = None
    times: int = 0
    rows_in: Size = field(default=sympy.Integer(1), compare=False)
    rows_out: Size = field(default=sympy.Integer(1), compare=False)
    is_narrowed: bool = field(default=False, compare=False)


@final
@dataclass(frozen=True)
class Lineage:
    """The value is base[maps[0]][maps[1]]... along dimension `dim`, whose size is pre · rows ·
    post. `base` has `maps[0].rows_in` rows, the value `maps[-1].rows_out`. Several maps are nested
    levels: vendors of users of candidates."""

    maps: tuple[Map, ...]
    dim: int
    pre: Size = sympy.Integer(1)
    post: Size = sympy.Integer(1)

    @property
    def rows(self) -> Size:
        return self.maps[-1].rows_out

    @property
    def base_rows(self) -> Size:
        return self.maps[0].rows_in

    @property
    def is_uniform(self) -> bool:
        """Whether all rows are the same: G has one row."""
        return len(self.maps) == 1 and self.maps[0].kind == "one"

    @property
    def is_folded(self) -> bool:
        return not (self.pre == 1 and self.post == 1)

    def at(self, dim: int) -> Lineage:
        return replace(self, dim=dim)


def size_of(x: Any) -> Size:
    """A size as a sympy expression."""
    return x.node.expr if isinstance(x, torch.SymInt) else sympy.Integer(x)


def shape_of(value: torch.Tensor) -> tuple[Size, ...]:
    return tuple(map(size_of, value.shape))


def product(sizes: Sequence[Size]) -> Size:
    return math.prod(sizes, start=sympy.Integer(1))


def exact_quotient(a: Size, b: Size) -> Size | None:
    """a / b if algebra shows that it is an integer for all values of the symbols, else None."""
    if a == b:
        return sympy.Integer(1)
    quotient = sympy.cancel(a / b)
    return quotient if quotient.as_numer_denom()[1] == 1 else None


def refold(lineage: Lineage, before: Sequence[Size], after: Sequence[Size]) -> Lineage | None:
    """The lineage after a view from shape `before` to shape `after`, or None if the view splits
    rows. A view keeps the row-major order of elements. The elements before the rows in this order
    (all outer indices) and behind them (all inner ones) must be whole dimensions, or factors of the
    dimension that holds the rows. Only the value's own shape is used."""
    outer, prefix = product(before[: lineage.dim]) * lineage.pre, sympy.Integer(1)
    for dim, size in enumerate(after):
        pre = exact_quotient(outer, prefix)
        if pre is None:
            return None
        post = exact_quotient(size, pre * lineage.rows)
        if post is not None:
            return replace(lineage, dim=dim, pre=pre, post=post)
        prefix = prefix * size
    return None


def is_known(size: Size, known: Set[Size]) -> bool:
    """Whether a size is a sum, product or minimum of known symbols and numbers."""
    if size.is_Integer or size in known:
        return True
    return size.func.__name__ in ("Add", "Mul", "Min") and all(
        is_known(x, known) for x in terms(size)
    )


def terms(size: Size) -> list[Size]:
    """The arguments of a sum, product or minimum."""
    return [x for x in size.args if isinstance(x, sympy.Expr)]


def common(lineages: Sequence[Lineage]) -> Lineage | None:
    """The lineage of a result whose operands have these lineages, given by dimensions of the
    result; None if they do not match. Of nested maps, the common inner levels remain. A uniform
    operand matches any other. Bases of different sizes match if the map is the same: no index is
    past the smaller one."""
    real = [x for x in lineages if not x.is_uniform]
    if not real:
        first = lineages[0]
        return first if all(x == first and x.rows == first.rows for x in lineages) else None
    if any((x.dim, x.pre, x.post) != (real[0].dim, real[0].pre, real[0].post) for x in lineages):
        return None
    if real[0].is_folded and len(real) < len(lineages):
        return None
    depth = 0
    while (
        all(len(x.maps) > depth for x in real)
        and len({x.maps[len(x.maps) - 1 - depth] for x in real}) == 1
    ):
        depth += 1
    if not depth:
        return None
    outermost = [x.maps[len(x.maps) - depth] for x in real]
    rows = {x.rows_in for x in outermost}
    outer, *inner = real[0].maps[len(real[0].maps) - depth :]
    if len(rows) > 1 and (outer.kind in ("counts", "repeat") or real[0].is_folded):
        return None
    is_narrowed = len(rows) > 1 or any(x.is_narrowed for x in outermost)
    return replace(
        real[0], maps=(replace(outer, rows_in=sympy.Min(*rows), is_narrowed=is_narrowed), *inner)
    )
