"""The table of rules for views, selections, concatenations and look-ups. See rules.py.

Sizes in the arguments of a view may have been computed from another tensor, so they are never used:
the size of the rows' dimension becomes -1, which the operator infers from its own operand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from .calls import Call, Moved, flat, is_tensor, positional, row_by_row, rule
from .lineage import Lineage, Size, common, refold

WHOLE = 2**62  # an end of a slice that no dimension reaches


@rule("view.default", "_unsafe_view.default", "reshape.default")
def view(call: Call) -> Moved | None:
    """Keeps the order of elements: the rows stay one factor of one dimension, or there is no
    rule."""
    lineage = call.lineage(call["self"])
    after = lineage and refold(lineage, call.shape(call["self"]), call.shape())
    if after is None or any(size == 0 for size in call.shape()):  # -1 would be any size
        return None
    given = call["shape"] if "shape" in call.arguments else call["size"]
    sizes = _sizes(call, given, after.dim, after.pre * after.base_rows * after.post)
    if sizes is None:
        return None
    return Moved(after, dict(shape=sizes), target=torch.ops.aten.reshape.default)


def _sizes(call: Call, sizes: Any, dim: int, rows: Size) -> list[Any] | None:
    """The sizes of a view with -1 for the dimension `dim`, or `rows` if another size is unknown;
    None if both are."""
    result = list(sizes)
    result[dim] = -1
    for other, size in enumerate(sizes):
        if isinstance(size, int) and size == -1 and other != dim:
            known = call.shape()[other]
            if known.is_Integer:
                result[other] = int(known)
            elif rows.is_Integer:
                result[dim] = int(rows)
            else:
                return None
    return result


@rule("unsqueeze.default")
def unsqueeze(call: Call) -> Moved | None:
    """Dimensions from `dim` on move back."""
    lineage = call.lineage(call["self"])
    return lineage and Moved(
        lineage.at(lineage.dim + (call.dim("dim", len(call.shape())) <= lineage.dim))
    )


@rule("squeeze.dim", "squeeze.dims")
def squeeze(call: Call) -> Moved | None:
    """Named dimensions of size 1 go. A named one of any size has no rule, nor has squeeze() without
    names: it goes where its size is 1."""
    lineage, shape = call.lineage(call["self"]), call.shape(call["self"])
    if lineage is None:
        return None
    named = [dim % len(shape) for dim in flat(call["dim"])]
    if not all(shape[dim].is_Integer for dim in named):
        return None
    gone = [dim for dim in named if shape[dim] == 1]
    after = lineage.at(lineage.dim - sum(dim < lineage.dim for dim in gone))
    return Moved(after, dict(dim=gone), target=torch.ops.aten.squeeze.dims)


@rule("transpose.int", "permute.default", "t.default")
def permute(call: Call) -> Moved | None:
    """Permutes the dimensions."""
    lineage = call.lineage(call["self"])
    return lineage and Moved(lineage.at(order_of(call.node).index(lineage.dim)))


def order_of(permutation: fx.Node) -> list[int]:
    """For each dimension of a permutation's result, that of its operand."""
    x, *dims = positional(permutation)
    ndim = x.meta["val"].dim()
    if permutation.target is torch.ops.aten.permute.default:
        return [dim % ndim for dim in dims[0]]
    order = list(range(ndim))
    if permutation.target is torch.ops.aten.t.default:
        return order[::-1]
    first, second = (dim % ndim for dim in dims)
    order[first], order[second] = second, first
    return order


@rule("expand.default", "repeat.default")
def expand(call: Call) -> Moved | None:
    """Repeats other dimensions, and adds dimensions in front."""
    lineage, ndim = call.lineage(call["self"]), len(call.shape())
    if lineage is None:
        return None
    after = lineage.at(lineage.dim + ndim - len(call.shape(call["self"])))
    if "repeats" in call.arguments:
        return Moved(after) if call["repeats"][after.dim] == 1 else None
    sizes = list(call["size"])
    sizes[after.dim] = -1
    return Moved(after, dict(size=sizes))


def is_whole_slice(arguments: Mapping[str, Any]) -> bool:
    """Whether a call of slice.Tensor returns all of its operand."""
    start, end, step = (arguments[name] for name in ("start", "end", "step"))
    has_last_row = end is None or (isinstance(end, int) and end > WHOLE)
    return start in (None, 0) and step == 1 and has_last_row


row_by_row(
    [
        (  # indices of another dimension; a slice of all rows is the identity
            "slice.Tensor",
            lambda call, dim, ndim: call.dim("dim", ndim) != dim or is_whole_slice(call.arguments),
        ),
        (  # cut another dimension
            "split.Tensor split_with_sizes.default unsafe_split.Tensor",
            lambda call, dim, ndim: call.dim("dim", ndim) != dim,
        ),
        (  # pad other dimensions, counted from the last
            "constant_pad_nd.default pad.default",
            lambda call, dim, ndim: dim < ndim - len(call["pad"]) // 2,
        ),
        # each matrix of the last two dimensions
        ("tril.default triu.default", lambda call, dim, ndim: dim < ndim - 2),
    ],
    alone=False,
)


@rule("select.int", "unbind.int")
def select(call: Call) -> Moved | None:
    """Selects one index of another dimension, or each of them. That dimension goes."""
    lineage = call.lineage(call["self"])
    if lineage is None:
        return None
    dim = call.dim("dim", len(call.shape(call["self"])))
    return None if dim == lineage.dim else Moved(lineage.at(lineage.dim - (dim < lineage.dim)))


@rule("cat.default")
def cat(call: Call) -> Moved | None:
    """Concatenates along another dimension, row by row. All operands need the same map, or one row
    that is repeated."""
    dim, ndim = call.dim("dim", len(call.shape())), len(call.shape())
    return _join(
        call, dim, [call.lineage(x) for x in call["tensors"] if len(call.shape(x)) == ndim]
    )


@rule("stack.default")
def stack(call: Call) -> Moved | None:
    """As cat, along a new dimension."""
    dim = call.dim("dim", len(call.shape()))
    moved = [call.lineage(x) for x in call["tensors"]]
    return _join(call, dim, [x and x.at(x.dim + (dim <= x.dim)) for x in moved])


def _join(call: Call, dim: int, lineages: list[Lineage | None]) -> Moved | None:
    if len(lineages) != len(call["tensors"]) or not all(lineages):
        return None
    lineage = common([x for x in lineages if x])
    return Moved(lineage) if lineage and lineage.dim != dim else None


@rule("diagonal.default")
def diagonal(call: Call) -> Moved | None:
    """Takes the diagonal of two other dimensions, which go; it is appended."""
    lineage, ndim = call.lineage(call["self"]), len(call.shape(call["self"]))
    gone = {call["dim1"] % ndim, call["dim2"] % ndim}
    if lineage is None or lineage.dim in gone:
        return None
    return Moved(lineage.at(lineage.dim - sum(d < lineage.dim for d in gone)))


@rule("index_select.default")
def index_select(call: Call) -> Moved | None:
    """Selects indices of another dimension, the same for all rows; or rows of a constant by indices
    that have a lineage."""
    lineage, index = call.lineage(call["self"]), call.lineage(call["index"])
    dim = call.dim("dim", len(call.shape(call["self"])))
    if lineage is None and index is not None and len(call.shape(call["index"])) == 1:
        return Moved(index.at(dim))
    return Moved(lineage) if lineage and index is None and dim != lineage.dim else None


@rule("index.Tensor")
def index(call: Call) -> Moved | None:
    """As index_select, for indices of one or several other dimensions, or rows of a constant by one
    index that has a lineage."""
    indices, lineage = call["indices"], call.lineage(call["self"])
    used = [dim for dim, x in enumerate(indices) if x is not None]
    moved = [call.lineage(indices[dim]) for dim in used]
    if any(_is_mask(indices[dim]) for dim in used):
        return None
    if lineage is None:
        return Moved(moved[0].at(used[0] + moved[0].dim)) if len(used) == 1 and moved[0] else None
    if any(moved) or lineage.dim in used:
        return None
    # dimensions of the broadcast indices
    width = max(len(call.shape(indices[dim])) for dim in used)
    adjacent = used == list(range(used[0], used[-1] + 1))
    if not adjacent:  # the indices' dimensions go to the front
        return Moved(lineage.at(width + lineage.dim - sum(d < lineage.dim for d in used)))
    return Moved(lineage if lineage.dim < used[0] else lineage.at(lineage.dim - len(used) + width))


def _is_mask(x: fx.Node) -> bool:
    return x.meta["val"].dtype in (torch.bool, torch.uint8)


@rule("embedding.default", "one_hot.default")
def embedding(call: Call) -> Moved | None:
    """Looks up each index by itself in a table that is the same for all rows. The dimensions of a
    row are appended."""
    indices = call["indices"] if "indices" in call.arguments else call["self"]
    lineage, table = call.lineage(indices), call.arguments.get("weight")
    is_shared = not is_tensor(table) or call.lineage(table) is None
    return Moved(lineage) if lineage and is_shared else None


@rule("gather.default")
def gather(call: Call) -> Moved | None:
    """Selects indices of another dimension, row by row."""
    lineage, index = call.lineage(call["self"]), call.lineage(call["index"])
    if lineage is None or index is None or call.dim("dim", len(call.shape())) == lineage.dim:
        return None
    joined = common([lineage, index])
    return joined and Moved(joined)


@rule("scatter.value", "scatter.src", "scatter_add.default")
def scatter(call: Call) -> Moved | None:
    """Writes to indices of another dimension, row by row. The result has all rows of `self`, of
    which the index may have fewer."""
    operands = [call[name] for name in ("self", "index", "src") if name in call.arguments]
    lineages = [x for operand in operands if (x := call.lineage(operand))]
    lineage = None
    if len(lineages) == len(operands) and len({x.rows for x in lineages}) == 1:
        lineage = common(lineages)
    return Moved(lineage) if lineage and call.dim("dim", len(call.shape())) != lineage.dim else None


@rule("copy.default")
def copy(call: Call) -> Moved | None:
    """Values of `src`, broadcast to the shape of `self`."""
    lineage = call.broadcast([call["self"], call["src"]])
    return Moved(lineage) if lineage and call.lineage(call["self"]) else None


@rule("select_scatter.default", "slice_scatter.default")
def write_part(call: Call) -> Moved | None:
    """Writes one or several indices of another dimension, row by row."""
    own, part = call.lineage(call["self"]), call.lineage(call["src"])
    dim = call.dim("dim", len(call.shape()))
    if own is None or part is None or own.dim == dim:
        return None
    is_one = "index" in call.arguments  # then `src` lacks the dimension
    lineage = common([own, part.at(part.dim + (is_one and dim <= part.dim))])
    return lineage and Moved(lineage)


@rule("index_put.default")
def put_masked(call: Call) -> Moved | None:
    """Writes one number where a mask is true, row by row."""
    indices, own = call["indices"], call.lineage(call["self"])
    used = [dim for dim, x in enumerate(indices) if x is not None]
    if own is None or call["accumulate"] or len(used) != 1 or not _is_mask(indices[used[0]]):
        return None
    if math.prod(call.shape(call["values"])) != 1 or not call.only("self", "indices"):
        return None
    first, mask = used[0], indices[used[0]]
    masked, last = call.lineage(mask), first + len(call.shape(mask))
    if masked is None:  # the same for all rows
        return None if first <= own.dim < last else Moved(own)
    lineage = common([own, masked.at(masked.dim + first)])
    return lineage and Moved(lineage)
