"""Clean-ups of a captured graph: operators that change nothing, views of views, and operators that
were computed before.

A chain of views is what it does to the factors of its operand's dimensions: each view takes factors
apart, puts them in another order, or together again. So it is one reshape, one permutation and one
reshape, or fewer. As linear works on each row, the views that order its rows can follow it, where
they often cancel with others. nn.MultiheadAttention is captured with 3 to 6 views for each
projection.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from .calls import TO_SHAPE, bind, equal_segments, flat, is_operator, is_tensor, positional
from .lineage import Size, exact_quotient, product, shape_of
from .shape_rules import is_whole_slice, order_of

aten = torch.ops.aten
PERMUTATIONS = (aten.transpose.int, aten.permute.default, aten.t.default)
RESHAPES = (
    *TO_SHAPE, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.flatten.using_ints, aten.unflatten.int,
)  # fmt: skip
VIEWS = (*PERMUTATIONS, *RESHAPES)
COPIES = (aten.clone.default, aten.alias.default)
READ_STRIDES = (aten.view.dtype, aten.view_as_complex.default)


def clean_up(graph: fx.Graph, keep: Set[fx.Node] = frozenset()) -> None:
    """Do all in place. Nodes of `keep` stay as they are. Operands of views may have other strides,
    so emit.py writes views as reshapes."""
    _drop_identities(graph, keep)
    _read_parts(graph, keep)
    _fold_views(graph, keep)
    _read_whole_products(graph, keep)
    _drop_duplicates(graph, keep)
    graph.eliminate_dead_code()


def _drop_identities(graph: fx.Graph, keep: Set[fx.Node]) -> None:
    """Replace copies, slices of everything, views to the same shape and layers' clearing of no row
    by their operand. A copy stays if the caller, or an operator of another library, gets it or a
    view of it: they may write to it or need its strides."""
    for node in _operators(graph, keep):
        is_spare_copy = node.target in COPIES and not _is_handed_out(node)
        if is_spare_copy or _is_whole(node) or _clears_no_row(node):
            node.replace_all_uses_with(positional(node)[0])
            graph.erase_node(node)
        elif node.target is aten.slice_scatter.default and _writes_all(node):
            node.replace_all_uses_with(positional(node)[1])
            graph.erase_node(node)


def _writes_all(node: fx.Node) -> bool:
    """Whether a write to a slice writes to all rows of a tensor of the same kind."""
    x, source = (y.meta["val"] for y in positional(node)[:2])
    same = x.dtype == source.dtype and shape_of(x) == shape_of(source)
    return same and is_whole_slice(bind(node))


def _read_parts(graph: fx.Graph, keep: Set[fx.Node]) -> None:
    """Read indices of a concatenation from its part that has them: parts may have lineages, as the
    columns of users in a matrix of all features, and the fields of users in a tensor of all."""
    items = [x for x in graph.nodes if x.target is operator.getitem and is_operator(x.args[0])]
    for node in [*_operators(graph, keep), *items]:
        read = None if _is_handed_out(node) else _read_of(node)
        if read is None:
            continue
        target, arguments = read
        x, dim = arguments["self"], arguments["dim"]
        if x.target not in (aten.cat.default, aten.stack.default) or x in keep:
            continue
        is_stack = x.target is aten.stack.default
        ndim, (parts, own) = x.meta["val"].dim(), (bind(x)["tensors"], bind(x)["dim"])
        if dim % ndim != own % ndim or len({y.meta["val"].dtype for y in parts}) > 1:
            continue
        sizes = [1 if is_stack else shape_of(part.meta["val"])[dim] for part in parts]
        if not all(isinstance(size, int) or size.is_Integer for size in sizes):
            continue
        found = _part_of(arguments, list(map(int, sizes)))
        if found is None:
            continue
        part, numbers = found
        with graph.inserting_before(node):
            if not is_stack:
                _replace(graph, node, call(graph, target, parts[part], dim, *numbers, like=node))
            elif target is aten.slice.Tensor:
                one = call(graph, aten.unsqueeze.default, parts[part], dim % ndim, like=node)
                _replace(graph, node, one)
            else:
                _replace(graph, node, parts[part])


def _read_of(node: Any) -> tuple[Any, dict[str, Any]] | None:
    """A slice or a select and its arguments, also of what is one: an item of a split."""
    if node.target in (aten.slice.Tensor, aten.select.int):
        return node.target, bind(node)
    if node.target is not operator.getitem:
        return None
    whole, item = node.args
    arguments = bind(whole)
    if whole.target is aten.unbind.int:
        return aten.select.int, arguments | dict(index=item)
    if whole.target is aten.split.Tensor:
        sizes = [arguments["split_size"]] * (item + 1)
    elif whole.target is aten.split_with_sizes.default:
        sizes = arguments["split_sizes"][: item + 1]
    else:
        return None
    if not all(isinstance(size, int) for size in sizes):
        return None
    return aten.slice.Tensor, arguments | dict(start=sum(sizes[:-1]), end=sum(sizes))


def _part_of(arguments: dict[str, Any], sizes: list[int]) -> tuple[int, list[int]] | None:
    """The part of a concatenation that has all indices of a slice or a select, and the arguments
    behind `dim` of the same call on the part."""
    total = sum(sizes)
    names = ("index",) if "index" in arguments else ("start", "end")
    given = [arguments[name] for name in names]
    if given[0] is None:
        given[0] = 0
    if given[-1] is None:
        given[-1] = total
    if arguments.get("step", 1) != 1 or not all(isinstance(x, int) for x in given):
        return None
    numbers = [min(max(x + total if x < 0 else x, 0), total) for x in given]
    last = numbers[-1] + (len(numbers) == 1)
    start = 0
    for part, size in enumerate(sizes):
        if start <= numbers[0] < last <= start + size:
            return part, [number - start for number in numbers]
        start += size
    return None


def _is_whole(node: fx.Node) -> bool:
    """Whether a view is its operand."""
    if node.target is aten.slice.Tensor:
        return is_whole_slice(bind(node))
    if node.target not in (*RESHAPES, aten.expand.default) or _squeezes_any_size(node):
        return False
    return shape_of(node.meta["val"]) == shape_of(positional(node)[0].meta["val"])


def _clears_no_row(node: fx.Node) -> bool:
    """Whether rows behind the last segment are filled (functional/tail.py), of segments that have
    all rows."""
    if node.target is not aten.masked_fill.Scalar:
        return False
    x, behind, _ = positional(node)
    while behind.target in RESHAPES:
        behind = positional(behind)[0]
    if behind.target is not aten.ge.Tensor:
        return False
    rows, end = positional(behind)
    if end.target is not aten.select.int:
        return False
    offsets, dim, index = positional(end)
    segments = equal_segments(offsets)
    if segments is None or (dim, index) != (0, -1):
        return False
    num_rows = shape_of(x.meta["val"])[0]
    # The row numbers 0, 1, ... are captured as the offsets of segments of one row.
    return equal_segments(rows) == (num_rows - 1, 1) and segments[0] * segments[1] == num_rows


def _squeezes_any_size(node: Any) -> bool:
    """Whether a dimension that is squeezed may have any size. It goes in calls where the size is 1,
    unlike in the captured shape."""
    if node.target not in (aten.squeeze.dim, aten.squeeze.dims):
        return False
    x, dims = positional(node)
    shape = shape_of(x.meta["val"])
    return any(not shape[dim].is_Integer for dim in flat(dims))


def _is_handed_out(node: fx.Node) -> bool:
    """Whether a tensor in the memory of this one is a result, or the operand of an operator that
    reads strides or is not torch's."""
    for user in node.users:
        target: Any = user.target
        if user.op == "output" or target in READ_STRIDES:
            return True
        may_be_view = True
        if is_operator(user):
            if target.namespace != "aten":
                return True
            may_be_view = any(x.alias_info for x in target._schema.returns)
        if may_be_view and _is_handed_out(user):
            return True
    return False


def _read_whole_products(graph: fx.Graph, keep: Set[fx.Node]) -> None:
    """Read the product with some rows of a weight from the one with all rows. Where a history and
    targets attend to the history, nn.MultiheadAttention has both."""
    nodes = [x for x in _operators(graph, keep) if x.target is aten.linear.default]
    whole_ones = (x for x in reversed(nodes) if x.args[1].target is not operator.getitem)
    products = {(*positional(x), None)[:3]: x for x in whole_ones}
    for node in nodes:
        x, *weights = positional(node)
        bases, firsts = zip(*(_rows_of(y) for y in weights if y is not None))
        whole, first = products.get((x, *bases, None)[:3], node), firsts[0]
        if whole is node or set(firsts) != {first} or _is_handed_out(node):
            continue
        if node < whole:
            node.prepend(whole)
        columns = -1, first, first + node.meta["val"].shape[-1]
        users = [y for y in node.users if y.target is aten.reshape.default and y not in keep]
        with graph.inserting_before(node):
            _replace(graph, node, call(graph, aten.slice.Tensor, whole, *columns, like=node))
        for user in users:
            _select_of_whole(graph, user, whole, first)


def _rows_of(x: Any) -> tuple[Any, int]:
    """What a weight has some rows of, and the first of them."""
    split = x.args[0] if x.target is operator.getitem else x
    if split.target is not aten.split_with_sizes.default or len(split.args) > 2:
        return x, 0
    return split.args[0], sum(split.args[1][: x.args[1]])


def _select_of_whole(graph: fx.Graph, node: Any, whole: fx.Node, first: int) -> None:
    """Selects of reshaped columns, from `first` on, as selects of all columns of `whole`."""
    *rows, total = shape_of(whole.meta["val"])
    dim, (*own_rows, width) = len(rows), shape_of(node.meta["val"])
    if own_rows[:-1] != rows or first % width != 0 or total % width != 0:
        return
    shape = [*node.args[1][:-2], int(total // width), int(width)]
    for user in [x for x in node.users if x.target is aten.select.int and x.args[1] == dim]:
        index = int(first // width) + user.args[2] % int(own_rows[-1])
        with graph.inserting_before(user):
            new = call(graph, aten.reshape.default, whole, shape, like=user)
            _replace(graph, user, call(graph, aten.select.int, new, dim, index, like=user))


def _drop_duplicates(graph: fx.Graph, keep: Set[fx.Node]) -> None:
    """Replace each operator by an earlier one with the same arguments. Results that the caller gets
    stay tensors of their own."""
    seen: dict[Any, fx.Node] = {}
    for node in _operators(graph, keep):
        if torch.Tag.nondeterministic_seeded in node.target.tags or _is_handed_out(node):
            continue
        first = seen.setdefault(_key((node.target, node.args, node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _key(x: Any) -> Any:
    """Hashable, and different for 1, 1.0 and True."""
    if isinstance(x, (tuple, list)):
        return tuple(map(_key, x))
    if isinstance(x, dict):
        return tuple((name, _key(value)) for name, value in sorted(x.items()))
    return type(x), x


def _operators(graph: fx.Graph, keep: Set[fx.Node]) -> Iterable[Any]:
    return [
        node
        for node in graph.nodes
        if is_operator(node) and node not in keep and not node.is_impure()
    ]


# -- views -----------------------------------------------------------------------------------------


class Factor:
    """A factor of a dimension."""

    def __init__(self, size: Size) -> None:
        self.size = size


class Chain:
    """Views, one after another.

    Attributes:
        nodes: the views, the first one first.
        base: their first operand.
        factors: of each dimension of base.
        dims: the factors of each dimension of the result.
    """

    def __init__(self, base: fx.Node) -> None:
        self.base, self.nodes = base, list[fx.Node]()
        self.factors = [[Factor(size)] if size != 1 else [] for size in shape_of(base.meta["val"])]
        self.dims = [list(factors) for factors in self.factors]

    def add(self, node: fx.Node) -> bool:
        """Whether factors describe the view."""
        self.nodes.append(node)
        if node.target not in PERMUTATIONS:
            return self._reshape(shape_of(node.meta["val"]))
        self.dims = [self.dims[dim] for dim in order_of(node)]
        return True

    def _reshape(self, shape: Iterable[Size]) -> bool:
        rest = [factor for dim in self.dims for factor in dim]
        dims: list[list[Factor]] = []
        for size in shape:
            dims.append([])
            while size != 1:
                if not rest or size == 0 or rest[0].size == 0:
                    return False
                if (left := exact_quotient(size, rest[0].size)) is None:
                    left = exact_quotient(rest[0].size, size)
                    if left is None:
                        return False
                    rest.insert(1, self._split(rest[0], size, left))
                    left = size / size
                dims[-1].append(rest.pop(0))
                size = left
        self.dims = dims
        return not rest

    def _split(self, factor: Factor, outer: Size, inner: Size) -> Factor:
        factor.size, second = outer, Factor(inner)
        own = next(factors for factors in self.factors if factor in factors)
        own.insert(own.index(factor) + 1, second)
        return second

    def views(self) -> list[tuple[Any, list[Any]]] | None:
        """The fewest operators that do the same, with their arguments. None if more than one size
        of a reshape is unknown."""
        rank = {factor: i for i, factor in enumerate(sum(self.factors, []))}
        runs = [_runs(dim, rank) for dim in self.dims]
        # no second reshape: the first one makes the dimensions of size 1
        if all(len(dim) < 2 for dim in runs):
            runs = [dim or [[]] for dim in runs]
        parts = [run for dim in runs for run in dim]
        sizes = [product([factor.size for factor in run]) for run in parts]
        order = sorted(
            range(len(parts)), key=lambda i: rank[parts[i][0]] if parts[i] else len(rank)
        )
        before = [sizes[i] for i in order]
        after = [product([factor.size for factor in dim]) for dim in self.dims]
        permutation = [order.index(i) for i in range(len(order))]
        moved = [i for i, dim in enumerate(permutation) if i != dim]
        filled = [i for i in order if parts[i]]
        shape, result = list(shape_of(self.base.meta["val"])), list[tuple[Any, list[Any]]]()
        # Parts without a factor have no order. None stands for the permutation.
        steps = [after] if filled == sorted(filled) else [before, None, after]
        for wanted in steps:
            if wanted is None:
                swaps_two = len(moved) == 2
                permute = (aten.permute.default, [permutation])
                result.append((aten.transpose.int, moved) if swaps_two else permute)
                shape = sizes
                continue
            if shape != wanted:
                known = [int(size) if size.is_Integer else -1 for size in wanted]
                if known.count(-1) > 1:
                    return None
                result.append((aten.reshape.default, [known]))
            shape = wanted
        return result


def _runs(factors: Iterable[Factor], rank: dict[Factor, int]) -> list[list[Factor]]:
    """Neighbours that follow one another in the base, as one."""
    runs: list[list[Factor]] = []
    for factor in factors:
        if runs and rank[factor] == rank[runs[-1][-1]] + 1:
            runs[-1].append(factor)
        else:
            runs.append([factor])
    return runs


def _fold_views(graph: fx.Graph, keep: Set[fx.Node]) -> None:
    for node in _operators(graph, keep):
        if node.target is aten.linear.default:
            _order_rows_later(graph, node, keep)
    for _ in range(2):  # a select that comes first leaves a permutation, which may be folded again
        graph.eliminate_dead_code()
        for node in _operators(graph, keep):
            if _is_view(node) and not (len(node.users) == 1 and _is_view(next(iter(node.users)))):
                _fold(graph, node, keep)
        graph.eliminate_dead_code()
        for node in _operators(graph, keep):
            users = list(node.users)
            if node.target in PERMUTATIONS and all(x.target is aten.select.int for x in users):
                for user in users:
                    if user not in keep:
                        _select_first(graph, user)


def _fold(graph: fx.Graph, node: fx.Node, keep: Set[fx.Node]) -> None:
    chain = _chain(node, keep)
    views = None if chain is None else chain.views()
    if chain is not None and views is not None and len(views) < len(chain.nodes):
        with graph.inserting_before(node):
            new = _call_all(graph, views, chain.base, node)
        _replace(graph, node, new)


def _is_view(node: Any) -> bool:
    """Whether it is a view of the whole operand."""
    if node.target is aten.select.int:
        x, dim, _ = positional(node)
        return shape_of(x.meta["val"])[dim] == 1
    return node.target in VIEWS and not _squeezes_any_size(node)


def _chain(end: Any, keep: Set[fx.Node]) -> Chain | None:
    """The longest chain of views to `end` that factors describe, and whose other results nothing
    else reads."""
    nodes: list[fx.Node] = []
    while is_tensor(end) and _is_view(end) and end not in keep:
        if nodes and len(end.users) > 1:
            break
        nodes.append(end)
        end = end.args[0]
    while nodes:
        chain = Chain(positional(nodes[-1])[0])
        if all(chain.add(node) for node in reversed(nodes)):
            return chain
        nodes.pop()
    return None


def _order_rows_later(graph: fx.Graph, node: fx.Node, keep: Set[fx.Node]) -> None:
    """linear(views(x)) as views(linear(x)), if the views order rows, or x needs fewer of them."""
    chain = _chain(node.args[0], keep)
    if chain is None or len(positional(node)[0].users) > 1:
        return
    *leading, last = chain.dims
    # dimension by dimension of the base
    rows = [[factor for factor in factors if factor not in last] for factors in chain.factors]
    rows = [factors for factors in rows if factors]
    before = Chain(chain.base)
    before.factors, before.dims = chain.factors, [*rows, last]
    views = before.views()
    if not rows or views is None:
        return
    orders_rows = sum(rows, []) != sum(leading, [])
    if not orders_rows and len(views) >= len(chain.nodes):
        return
    with graph.inserting_before(node):
        x = _call_all(graph, views, chain.base, node)
        new = call(graph, aten.linear.default, x, *node.args[1:], like=node, **node.kwargs)
        after, column = Chain(new), [Factor(shape_of(node.meta["val"])[-1])]
        after.factors, after.dims = [*rows, column], [*leading, column]
        views = after.views()
        if views is not None:
            _replace(graph, node, _call_all(graph, views, new, node))


def _select_first(graph: fx.Graph, node: fx.Node) -> None:
    """select(permuted x) as the permuted select of x."""
    permuted, dim, index = positional(node)
    order = order_of(permuted)
    chosen = order.pop(dim)
    order = [i - (i > chosen) for i in order]
    with graph.inserting_before(node):
        new = call(graph, aten.select.int, permuted.args[0], chosen, index, like=node)
        if order != sorted(order):
            new = call(graph, aten.permute.default, new, order, like=node)
    _replace(graph, node, new)


def _call_all(
    graph: fx.Graph, views: list[tuple[Any, list[Any]]], x: fx.Node, like: fx.Node
) -> fx.Node:
    for target, args in views:
        x = call(graph, target, x, *args, like=like)
    return x


def call(graph: fx.Graph, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """A new operator with its fake result, for the line of the model that `like` comes from."""
    node = graph.call_function(target, args, kwargs)
    node.meta["stack_trace"] = like.stack_trace
    given, options = map_arg((args, kwargs), lambda x: x.meta["val"])
    with like.meta["val"].fake_mode:
        shape = _shape_of_product(target, given)
        node.meta["val"] = target(*given, **options) if shape is None else given[0].new_empty(shape)
    return node


def _shape_of_product(target: Any, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The shape of a product, None of other operators. In torch 2.11, linear and matmul read sizes
    of fake operands as numbers, and symbols become these. Batches of both operands are the same, or
    one has none."""
    if target is aten.linear.default:
        return (*given[0].shape[:-1], given[1].shape[0])
    if target is aten.matmul.default:
        left, right = given
        return (*max(left.shape, right.shape, key=len)[:-2], left.shape[-2], right.shape[-1])
    return None


def _replace(graph: fx.Graph, node: fx.Node, new: fx.Node) -> None:
    """Unless torch finds another shape, for instance because it does not simplify a quotient of
    sizes."""
    if shape_of(new.meta["val"]) == shape_of(node.meta["val"]):
        node.replace_all_uses_with(new)
        graph.erase_node(node)
