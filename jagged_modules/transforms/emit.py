"""Writes the fused graph: moved operators on the bases of their operands, gathers where a value is
needed in full."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ..functional.linear_compress import compress_unchecked
from . import runtime
from .attention import TargetAttention
from .calls import TO_SHAPE, flat, is_tensor, moved_call, positional
from .compress import Compression
from .din import DINAttention
from .levels import LevelAttention
from .lineage import USERS, Lineage, Map, Size, is_known, shape_of, size_of, terms
from .own_operators import SegmentAttention
from .placement import Fusion
from .report import Decisions

if TYPE_CHECKING:
    from .fuse import Plan

aten = torch.ops.aten
ASSERTIONS = (aten._assert_tensor_metadata.default,)


class Emitter:
    """Copies a captured graph into a new one, as a plan says. Of its fusions, those are computed
    whose bases are."""

    def __init__(self, plan: Plan) -> None:
        self.source, self.analysis, batch = plan.captured.graph, plan.analysis, plan.batch
        self.moved, self.batch = plan.moved, batch
        self._bags = None if batch is None else batch.bags
        self._per_user = frozenset() if self._bags is None else self._bags.nodes
        self._of_users: dict[fx.Node, Any] = {}
        given = {*self.moved, *(batch.users if batch else ())}
        self.fusions = {
            node: match for node, match in plan.fusions.items() if given.issuperset(match.operands)
        }
        self.graph = fx.Graph()
        self.graph._codegen = self.source._codegen
        self._plain: dict[fx.Node, Any] = {}
        self._bases: dict[fx.Node, fx.Node] = {}
        self._advanced: dict[tuple[fx.Node, int], fx.Node] = {}
        self._made: dict[Any, fx.Node] = {}  # of `_once`
        self._symbols: dict[Size, tuple[fx.Node, int]] = {}

    def emit(self) -> fx.Graph:
        """The new graph, without dead code."""
        placeholders = self.source.find_nodes(op="placeholder")
        for node in self.source.nodes:
            before = len(self.graph.nodes)
            self._node(node)
            if node is placeholders[-1]:
                self._check_inputs(placeholders)
            for new in list(self.graph.nodes)[before:]:
                new.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
        for match in self.fusions.values():
            if isinstance(match, TargetAttention):
                self._join(match)
        self.graph.eliminate_dead_code(
            lambda node: (
                node.is_impure() or node.target in (runtime.checked_map, runtime.check_inputs)
            )
        )
        self.graph.lint()
        return self.graph

    def _node(self, node: fx.Node) -> None:
        lineages = self.analysis.lineages
        if node.op == "placeholder":
            self._placeholder(node)
        elif node in self._per_user:
            self._of_users[node] = self.graph.node_copy(node, self._value_of_users)
            if node in lineages:
                self._bases[node] = self._of_users[node]
        elif node in self.moved:
            is_source = node in self.analysis.sources
            self._bases[node] = self._source(node) if is_source else self._base(node)
        elif node.target is aten.sym_size.int and node.args[0] in lineages:
            self._plain[node] = self._size(*positional(node))
        elif node in self.fusions:
            self._plain[node] = self._fused(self.fusions[node])
        elif node.target not in ASSERTIONS:
            self._plain[node] = self.graph.node_copy(node, self.value)
            # the strides of a gathered operand may be others
            if node.target in TO_SHAPE:
                self._plain[node].target = aten.reshape.default

    def _placeholder(self, node: fx.Node) -> None:
        new = self.graph.node_copy(node)
        lineage = self.analysis.lineages.get(node)
        if self._bags is not None and node in self._bags.leaves:
            self._of_users[node] = new
            return
        (self._plain if lineage is None else self._bases)[node] = new
        if self.batch is not None and node is self.batch.map:
            users = {name: self._bases[x] for x, name in self.batch.users.items()}
            if self._bags is not None:
                lengths, keys = self._bags.lengths
                by_key = self.call(aten.reshape.default, self._of_users[lengths], [keys, -1])
                users[lengths.name] = self.call(aten.select.int, by_key, 0, 0)
                self._symbols.setdefault(USERS, (users[lengths.name], 0))
            candidates = {name: self._plain[x] for x, name in self.batch.candidates.items()}
            self._plain[node] = self.call(runtime.checked_map, new, users, candidates)
            # inputs that the model never joins have sizes of their own in the captured graph
            for x in self.batch.users:
                self._symbols.setdefault(shape_of(x.meta["val"])[0], (new, 0))
        if is_tensor(node):
            for dim, size in enumerate(shape_of(node.meta["val"])):
                own = size if lineage is None or dim != lineage.dim else lineage.base_rows
                if own.is_Symbol:
                    self._symbols.setdefault(own, (new, dim))

    def _check_inputs(self, placeholders: Sequence[fx.Node]) -> None:
        """Check what the capture holds for: numbers among the inputs and their sizes, and sizes
        that occur twice. Those of the batch are compared by checked_map."""
        of_batch: set[Size] = set()
        if self.batch is not None:
            inputs = self.batch.map, *self.batch.users, *self.batch.candidates
            of_batch = {shape_of(x.meta["val"])[0] for x in inputs}
        shapes = {node: shape_of(node.meta["val"]) for node in placeholders if is_tensor(node)}
        times = Counter(size for shape in shapes.values() for size in shape)

        def expected_size(size: Size) -> int | str | None:
            """A number, the name of a size that occurs again, or None for any size."""
            if size.is_Integer:
                return int(size)
            occurs_again = times[size] > 1 and size not in of_batch
            return str(size) if size.is_Symbol and occurs_again else None

        given: dict[str, Any] = {}
        expected: dict[str, Any] = {}
        for node in placeholders:
            name = node.meta.get("input", node.name)
            given[name] = self._of_users.get(node) or self._bases.get(node) or self._plain[node]
            expected[name] = node.meta.get("val")
            if node in shapes:
                expected[name] = [expected_size(size) for size in shapes[node]]
        self.call(runtime.check_inputs, given, expected)

    def decisions(self) -> Decisions:
        """What `emit` did."""
        alive = set(self.graph.nodes)
        bases = {x: self._bases[x] for x in self.moved if x in self._bases}
        new = self._plain | self._of_users | bases
        dead = {x for x in self.source.nodes if x.op == "call_function" and new.get(x) not in alive}
        gathered: dict[fx.Node, list[int]] = {}
        for (x, levels), node in self._advanced.items():
            if levels and node in alive:
                gathered.setdefault(x, []).append(levels)
        fused: dict[fx.Node, Fusion] = {}
        for node, match in self.fusions.items():
            fused[node] = match
            fused.update((reader, match) for _, reader in match.reads)
        joined = {x.own.node for x in fused.values() if isinstance(x, TargetAttention) and x.own}
        return Decisions(self.moved | self._per_user, fused, joined, dead, gathered)

    def _value_of_users(self, x: fx.Node) -> Any:
        """What an embedding bag of the users reads: values of their input, sizes with U for C, and
        weights."""
        if x in self._of_users:
            return self._of_users[x]
        assert self.batch is not None
        size = x.meta.get("val")
        if isinstance(size, torch.SymInt):
            return self._expression(size_of(size).subs(self.batch.rows, USERS))
        return self.value(x)

    # -- values in full ----------------------------------------------------------------------------

    def value(self, node: fx.Node) -> Any:
        """The value of a node of the captured graph, gathered from its base at the first use."""
        if node in self._plain:
            return self._plain[node]
        if node in self._per_user and isinstance(node.meta["val"], torch.SymInt):
            new = self._expression(size_of(node.meta["val"]))
        elif self.analysis.permutes_gathered(node):
            new = self.graph.node_copy(node, self.value)
        else:
            new = self.gathered(node, len(self.analysis.lineages[node].maps))
        self._plain[node] = new
        return new

    def gathered(self, node: fx.Node, levels: int) -> fx.Node:
        """The base of a node, gathered by the first `levels` of its maps."""
        key = node, levels
        if key not in self._advanced:
            lineage, x = self.analysis.lineages[node], self._bases[node]
            if levels:
                x = self._gather(x, lineage, lineage.maps[:levels], node)
            self._advanced[key] = x
        return self._advanced[key]

    def _gather(
        self, x: fx.Node, lineage: Lineage, maps: tuple[Map, ...], node: fx.Node
    ) -> fx.Node:
        dim = lineage.dim
        if lineage.is_folded:
            parts = [self._expression(lineage.pre), -1, self._expression(lineage.post)]
            x = self.call(aten.unflatten.int, x, dim, parts)
            dim += 1
        outermost = next(iter(maps))
        if outermost.kind == "one":
            ndim = len(shape_of(flat(node.meta["val"])[0])) + 2 * lineage.is_folded
            sizes: list[Any] = [-1] * ndim
            sizes[dim] = self._expression(outermost.rows_out)
            x = self.call(aten.expand.default, x, sizes)
        else:
            # A narrowed map has no negative entries.
            wraps = len(maps) > 1 or (self._may_wrap(outermost) and not outermost.is_narrowed)
            x = self.select(x, dim, self._composed(maps, node), wraps)
        return self.call(aten.flatten.using_ints, x, dim - 1, dim + 1) if lineage.is_folded else x

    def _composed(self, maps: tuple[Map, ...], like: fx.Node) -> fx.Node:
        """maps[0][maps[1]]..., one map from the value to the base."""
        index, *outer = (self.index(map_, like) for map_ in reversed(maps))
        for other in outer:
            index = self.call(aten.index.Tensor, other, [index])
        return index

    def _row_numbers(self, maps: tuple[Map, ...], like: fx.Node) -> fx.Node:
        """As `_composed`, without negative entries: they count from the end."""
        index = self._composed(maps, like)
        if not any(map(self._may_wrap, maps)):
            return index
        from_end = self.call(aten.add.Tensor, index, self._expression(maps[0].rows_in))
        return self.call(aten.where.self, self.call(aten.lt.Scalar, index, 0), from_end, index)

    def select(self, x: fx.Node, dim: int, index: fx.Node, wraps: bool) -> fx.Node:
        """x[index] along a dimension. wraps: whether negative indices count from the end, as they
        do for index.Tensor."""
        if wraps:
            return self.call(aten.index.Tensor, x, [None] * dim + [index])
        return self.call(aten.index_select.default, x, dim, index)

    def _may_wrap(self, map_: Map) -> bool:
        users = () if map_.node is None else map_.node.users
        return map_.kind == "base" or any(user.target is aten.index.Tensor for user in users)

    def index(self, map_: Map, like: fx.Node) -> fx.Node:
        """The rows of G for each row of the value."""
        # equal repeats of tensors of different sizes are different maps
        key = map_, map_.rows_out, map_.is_narrowed
        return self._once(key, lambda: self._index(map_, flat(like.meta["val"])[0].device))

    def _index(self, map_: Map, device: torch.device) -> fx.Node:
        if map_.kind == "repeat":
            rows = self.call(aten.arange.default, self._expression(map_.rows_out), device=device)
            return self.call(aten.floor_divide.default, rows, map_.times)
        assert map_.node is not None
        if map_.kind == "counts":
            known = is_known(map_.rows_out, self._symbols.keys())
            counts = self.value(map_.node)
            size = self._expression(map_.rows_out) if known else None
            return self.call(aten.repeat_interleave.Tensor, counts, output_size=size)
        index = self._bases[map_.node] if map_.kind == "base" else self.value(map_.node)
        if map_.is_narrowed and self._may_wrap(map_):
            return self.call(runtime.without_negative, index, map_.node.name)
        return index

    def _fused(self, match: Fusion) -> fx.Node:
        if isinstance(match, TargetAttention):
            return self._attention(match)
        if isinstance(match, LevelAttention):
            return self._level_attention(match)
        if isinstance(match, SegmentAttention):
            return self._segment_attention(match)
        if isinstance(match, DINAttention):
            return self._din_attention(match)
        return self._compression(match)

    def _level_attention(self, match: LevelAttention) -> fx.Node:
        """The attention on the bases of each level's keys and values."""
        keys, values = ([self._bases[x] for x in own] for own in (match.keys, match.values))
        maps = [self._row_numbers(self.analysis.lineages[x].maps, x) for x in match.keys]
        options = match.transposed, match.heads, match.scale
        query = self.value(match.query)
        return self.call(runtime.attend_levels_in_place, query, keys, values, maps, *options)

    def _segment_attention(self, match: SegmentAttention) -> fx.Node:
        """As `_attention`, of this project's operator."""
        options = {name: x for name, x in match.options.items() if name != "mask"}
        given = self.value(match.query), *self._keys(match)
        return self.call(runtime.attend_segments_in_place, *given, **options)

    def _attention(self, match: TargetAttention) -> fx.Node:
        """The attention on the bases of its keys, values and mask."""
        key, *others = self._keys(match)
        if match.transposed:
            key = self.call(aten.transpose.int, key, -2, -1)
        own = self.analysis.lineages[match.key]
        heads = None if len(shape_of(match.query.meta["val"])) == 4 else int(own.post)
        given = self.value(match.query), key, *others, self._hidden(match)
        return self.call(runtime.attend_in_place, *given, heads, match.scale, match.empty)

    def _din_attention(self, match: DINAttention) -> fx.Node:
        """As `_attention`, of scores of an MLP."""
        given = self.value(match.query), *self._keys(match), self._hidden(match)
        out = self.call(runtime.attend_by_mlp_in_place, *given, **map_arg(match.mlp, self.value))
        one_row = len(shape_of(match.node.meta["val"])) == 3
        return out if one_row else self.call(aten.squeeze.dim, out, 1)

    def _join(self, match: TargetAttention) -> None:
        """Compute the attention together with its `own`, unless one of them needs the other."""
        own, later = match.own, self._plain[match.node]
        match.own = None
        if own is None or own.node not in self.moved or match.lineage is None:
            return
        earlier, nodes = self._bases[own.node], list(self.graph.nodes)
        first, last = sorted((earlier, later), key=nodes.index)
        readers, between = {first}, []
        for node in nodes[nodes.index(first) + 1 : nodes.index(last) + 1]:
            if not readers.isdisjoint(node.all_input_nodes):
                readers.add(node)
                between.append(node)
        if last in readers:
            return
        match.own = own
        with self.graph.inserting_after(last):
            given = self._bases[own.query], *later.args
            both = self.call(runtime.attend_with_users, *given, causal=own.causal)
        with self.graph.inserting_after(both):
            of_users, of_candidates = (self.call(operator.getitem, both, i) for i in range(2))
        for old, new, node in ((earlier, of_users, own.node), (later, of_candidates, match.node)):
            old.replace_all_uses_with(new)
            self.graph.erase_node(old)
            new.meta["stack_trace"] = node.meta.get("stack_trace")
        self._bases[own.node], self._plain[match.node] = of_users, of_candidates
        for node in reversed(between):
            of_users.append(node)  # which comes after of_candidates

    def _compression(self, match: Compression) -> fx.Node:
        users = self.operand(match.user_embeddings, match.lineage)
        index = self._row_numbers(match.lineage.maps, match.user_embeddings)
        own = match.user_weight, match.weight, match.embeddings
        user_weight, weight, embeddings = (self.value(x) for x in own)
        return self.call(compress_unchecked, [user_weight, weight], [users, embeddings], [index])

    def _keys(
        self, match: TargetAttention | SegmentAttention | DINAttention
    ) -> tuple[fx.Node, fx.Node, fx.Node]:
        """The bases of keys and values, and the index of the candidates by user, one for all
        attentions with these maps."""
        lineage, own = match.lineage, self.analysis.lineages[match.operands[0]]
        assert lineage is not None
        key, value = (self.operand(x, lineage) for x in match.operands[:2])

        def group() -> fx.Node:
            index, users = self._row_numbers(lineage.maps, match.node), value
            if own.post != 1:
                users = self.call(aten.unflatten.int, value, 0, [-1, int(own.post)])
            return self.call(runtime.group_candidates, index, users)

        maps = tuple((x, x.rows_in, x.rows_out) for x in lineage.maps)
        return key, value, self._once(maps, group)

    def _hidden(self, match: TargetAttention | DINAttention) -> fx.Node | None:
        """The base of the mask, True for hidden keys."""
        if match.hidden is None or match.lineage is None:
            return None
        mask: fx.Node = self.operand(match.hidden, match.lineage)
        return self.call(aten.bitwise_not.default, mask) if match.hidden_is_visible else mask

    # -- bases -------------------------------------------------------------------------------------

    def _source(self, node: fx.Node) -> fx.Node:
        source = self.analysis.sources[node]
        own = self.analysis.lineages.get(source.operand)
        extends = (
            own is not None
            and source.lineage.maps[: len(own.maps)] == own.maps
            and len(source.lineage.maps) > len(own.maps)
        )
        return self._bases[source.operand] if extends else self.value(source.operand)

    def _base(self, node: fx.Node) -> Any:
        """The base of an operator's result: the operator on the bases of its operands."""
        moved = self.analysis.moves[node]
        rows = None if moved.broadcasts else self._rows_node(node, moved.lineage)

        def operand(x: fx.Node) -> Any:
            if x in moved.in_full:
                return self.value(x)
            return self.operand(x, moved.lineage, rows)

        target, args, kwargs = moved_call(node, moved, operand)
        return self.call(target, *args, **kwargs)

    def operand(self, x: fx.Node, lineage: Lineage, rows: Any = None) -> Any:
        """The base of an operand at the level and with the rows of the result's lineage. Operands
        without a lineage are as they are."""
        own = self.analysis.lineages.get(x)
        if own is None or not is_tensor(x):
            return self.value(x) if own is None else self._bases[x]
        if own.is_uniform and not lineage.is_uniform:
            if rows is None:
                return self._bases[x]
            sizes: list[Any] = [-1] * len(shape_of(x.meta["val"]))
            sizes[own.dim] = rows
            return self.call(aten.expand.default, self._bases[x], sizes)
        if lineage.is_uniform:
            return self._bases[x]
        levels = len(own.maps) - len(lineage.maps)
        base = self.gathered(x, levels)
        if own.maps[levels].rows_in != lineage.base_rows:
            end = self._expression(lineage.base_rows * own.post)
            narrowed = aten.slice.Tensor, base, own.dim, 0, end
            return self._once((x, levels, lineage.base_rows), lambda: self.call(*narrowed))
        return base

    def _rows_node(self, node: fx.Node, lineage: Lineage) -> Any:
        """The number of rows of the result's base, if an operand must be expanded to it."""
        operands = self.analysis.operands(node)
        if lineage.is_uniform or not any(self.analysis.lineages[x].is_uniform for x in operands):
            return None
        real = next(x for x in operands if not self.analysis.lineages[x].is_uniform)
        return self.call(
            aten.sym_size.int, self.operand(real, lineage), self.analysis.lineages[real].dim
        )

    # -- sizes -------------------------------------------------------------------------------------

    def _size(self, x: fx.Node, dim: int) -> Any:
        """A size of a value: along other dimensions, its base's."""
        lineage, ndim = self.analysis.lineages[x], len(shape_of(x.meta["val"]))
        if x in self._plain:
            return self.call(aten.sym_size.int, self._plain[x], dim)
        if dim % ndim != lineage.dim and x in self._bases:
            return self.call(aten.sym_size.int, self._bases[x], dim)
        size = shape_of(x.meta["val"])[dim]
        if is_known(size, self._symbols.keys()):
            return self._expression(size)
        return self.call(aten.sym_size.int, self.value(x), dim)

    def _expression(self, size: Size) -> Any:
        """A size as an int or a node."""
        if size.is_Integer:
            return int(size)
        return self._once(size, lambda: self._new_size(size))

    def _new_size(self, size: Size) -> fx.Node:
        if size.is_Symbol:
            return self.call(aten.sym_size.int, *self._symbols[size])
        function = {"Mul": operator.mul, "Add": operator.add, "Min": torch.sym_min}[
            size.func.__name__
        ]
        return functools.reduce(
            lambda x, y: self.call(function, x, y), map(self._expression, terms(size))
        )

    def _once(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        """What `make` makes at the first use of a key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)
