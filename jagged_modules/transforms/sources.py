"""Where lineages begin: operators that repeat rows of a tensor by a map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from .calls import Call, Moved, is_operator, is_tensor
from .lineage import Lineage, Map, Size
from .shape_rules import is_whole_slice

aten = torch.ops.aten
INDEX_DTYPES = (torch.int32, torch.int64)
CREATORS = [f"aten::{new}{name}" for new in ("", "new_") for name in ("zeros", "ones", "full")]


class Source:
    """A value that repeats rows of `operand`. operand: the tensor whose rows are repeated. lineage:
    of the value. It extends the operand's own lineage, if that is along the same dimension."""

    def __init__(self, operand: fx.Node, lineage: Lineage) -> None:
        self.operand, self.lineage = operand, lineage


def find_source(call: Call, estimate: Callable[[Size], int]) -> Source | None:
    """The source that a call is, or None. Maps to more rows than they have are none: all
    computations move to the smaller side."""
    found = _repeated(call)
    if found is None:
        return None
    operand, dim, kind, node, times = found
    rows_in, rows_out = call.shape(operand)[dim], call.shape()[dim]
    own, index = call.lineage(operand), call.lineage(node)
    # nested: the rows that the map holds are themselves repeated
    if kind == "index" and index is not None:
        if own is not None or index.is_folded or index.is_uniform:
            return None
        if estimate(rows_in) >= estimate(index.base_rows):
            return None
        outermost = Map("base", node, 0, rows_in, index.base_rows)
        return Source(operand, Lineage((outermost, *index.maps), dim))
    if estimate(rows_in) >= estimate(rows_out):
        return None
    maps: tuple[Map, ...] = (Map(kind, node, times, rows_in, rows_out),)
    if own is not None and own.dim == dim and not own.is_folded and not own.is_uniform:
        maps = (*own.maps, *maps)
    return Source(operand, Lineage(maps, dim))


def _repeated(call: Call) -> tuple[fx.Node, int, str, fx.Node | None, int] | None:
    """(operand, dimension, kind of map, its tensor, times) of a call that repeats rows."""
    arguments, target = call.arguments, call.target
    if target is aten.index_select.default:
        return _by_index(arguments["self"], call.dim("dim", len(call.shape())), arguments["index"])
    if target is aten.index.Tensor:
        used = [dim for dim, x in enumerate(arguments["indices"]) if x is not None]
        if len(used) == 1:
            return _by_index(arguments["self"], used[0], arguments["indices"][used[0]])
        return None
    if target is aten.embedding.default:
        return _by_index(arguments["weight"], 0, arguments["indices"])
    if target is aten.gather.default:
        dim = call.dim("dim", len(call.shape()))
        index = _expanded_from(arguments["index"], dim)
        others = [d for d in range(len(call.shape())) if d != dim]
        if index is None or any(
            call.shape()[d] != call.shape(arguments["self"])[d] for d in others
        ):
            return None
        return _by_index(arguments["self"], dim, index)
    if target in (aten.repeat_interleave.self_Tensor, aten.repeat_interleave.self_int):
        if arguments["dim"] is None:
            return None
        dim, repeats = call.dim("dim", len(call.shape())), arguments["repeats"]
        if isinstance(repeats, fx.Node):
            shape = call.shape(repeats) if is_tensor(repeats) else ()
            if len(shape) != 1 or shape[0] == 1:  # a number, or one for all rows
                return None
            return arguments["self"], dim, "counts", repeats, 0
        return arguments["self"], dim, "repeat", None, repeats
    return None


def _by_index(
    operand: fx.Node, dim: int, index: fx.Node
) -> tuple[fx.Node, int, str, fx.Node, int] | None:
    value = index.meta["val"]
    if value.dim() != 1 or value.dtype not in INDEX_DTYPES:
        return None
    return operand, dim, "index", index, 0


def _expanded_from(index: fx.Node, dim: int) -> fx.Node | None:
    """The 1-D tensor m with index[..., i, ...] = m[i], where i is along `dim`, as far as expand,
    unsqueeze and whole slices show it."""
    while is_operator(index) and index.meta["val"].dim() > 1:
        call = Call(index, {})
        operand: Any = call.arguments.get("self")
        if index.target is aten.expand.default:
            dim -= len(call.shape()) - len(call.shape(operand))
            if dim < 0 or call.shape(operand)[dim] == 1:
                return None
        elif index.target is aten.unsqueeze.default:
            added = call.dim("dim", len(call.shape()))
            if added == dim:
                return None
            dim -= added < dim
        elif index.target is aten.slice.Tensor:
            if not is_whole_slice(call.arguments):
                return None
        elif index.target in (aten.view.default, aten.reshape.default):
            if len(call.shape(operand)) != 1 or call.shape()[dim] != call.shape(operand)[0]:
                return None
            dim = 0
        else:
            return None
        index = operand
    return index if index.meta["val"].dim() == 1 and dim == 0 else None


def find_uniform(call: Call) -> Moved | None:
    """A result whose rows are all the same along a dimension: expand, repeat, zeros, ones, full.
    Its base has one row. x.new_zeros and the like read the dtype and the device of x alone."""
    name, shape = str(call.target._schema.name), call.shape()
    sizes_of = "repeats" if name == "aten::repeat" else "size"
    if name in ("aten::expand", "aten::repeat") and call.only():
        own = call.shape(call["self"])
        shift = len(shape) - len(own)
        dims = [
            d for d, size in enumerate(shape) if size != 1 and (d < shift or own[d - shift] == 1)
        ]
        if name == "aten::repeat":  # of a number of rows, it is a copy in the model too
            dims = [d for d in dims if not shape[d].is_Integer]
    elif name in CREATORS and call.only("self"):
        dims = [d for d, size in enumerate(shape) if not size.is_Integer]
    else:
        return None
    if not dims:
        return None
    dim = next((d for d in dims if not shape[d].is_Integer), dims[0])
    sizes: list[Any] = list(call[sizes_of])
    sizes[dim] = 1
    one = Map("one", rows_in=sympy.Integer(1), rows_out=shape[dim])
    return Moved(Lineage((one,), dim), {sizes_of: sizes})
