"""Which operators run on the smaller side: a minimum cut of estimated costs.

A value is either computed from bases, or from gathered operands. The estimate of a choice is the
bytes that operators and gathers read and write, plus their FLOPs, kernels and slow copies, in bytes
that the `Processor` moves in the same time. An operator can only be moved if all its operands with
a lineage are, so the choice is a closure with costs, which a minimum cut solves exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, fields, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import FlopCounterMode

from .analysis import Analysis
from .attention import TargetAttention
from .calls import TO_SHAPE, Call, first_of, flat, is_operator, is_tensor, positional
from .compress import Compression
from .din import DINAttention
from .levels import LevelAttention
from .lineage import Lineage, Size, product, shape_of, size_of
from .own_operators import ATTENTIONS, LINEAR_COMPRESS, SegmentAttention
from .processors import CPU, GPU, Processor

Fusion = TargetAttention | LevelAttention | SegmentAttention | Compression | DINAttention

# of estimates of work, at least: values that were just written are read from a cache. A smaller
# gain may be a loss
ERROR = 0.25
# of the cost of an element of a softmax: in rows that fill no vector
ONE_BY_ONE = 25
# that a thread of torch's CUDA kernels copies at once, if slices of rows are contiguous and a
# multiple of it
VECTOR_BYTES = 16


ONE = sympy.Integer(1)
aten = torch.ops.aten
VIEWS = {
    *TO_SHAPE, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.transpose.int, aten.permute.default, aten.expand.default, aten.slice.Tensor,
    aten.select.int, aten.t.default, aten.split.Tensor, aten.split_with_sizes.default,
    aten.chunk.default, aten.unbind.int, aten.alias.default, aten.detach.default,
    aten.flatten.using_ints, aten.unflatten.int, aten.lift_fresh_copy.default,
    aten.diagonal.default,
}  # fmt: skip
LOOKUPS = {
    aten.index_select.default,
    aten.index.Tensor,
    aten.embedding.default,
    aten.embedding_bag.padding_idx,
    aten.gather.default,
}
PRODUCTS = {
    aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default,
    aten.baddbmm.default,
}  # fmt: skip
GEMMS = {
    *PRODUCTS,
    aten.scaled_dot_product_attention.default,
    aten.einsum.default,
    aten.tensordot.default,
    aten.inner.default,
}
GEMMS |= {
    getattr(getattr(aten, f"conv{dims}d"), overload)
    for dims in (1, 2, 3)
    for overload in ("default", "padding")
}
GEMMS |= {aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input}
RECURRENCES = {aten.gru.input, aten.lstm.input}


@dataclass(frozen=True)
class Cost:
    """Estimated work.

    Attributes:
        flops: floating-point operations of GEMMs, a multiplication and an addition as two, as
            torch's FlopCounterMode counts them.
        bytes: read and written.
        kernels: calls of operators other than views.
        work: FLOPs, bytes and slow copies, in bytes that the processor moves in the same time.
        starts: kernels, in the same unit.
    """

    flops: float = 0
    bytes: float = 0
    kernels: int = 0
    work: float = 0
    starts: float = 0

    @property
    def total(self) -> float:
        """In bytes."""
        return self.work + self.starts

    @property
    def least(self) -> float:
        """If the work is overestimated. The number of kernels is exact."""
        return (1 - ERROR) * self.work + self.starts

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(Cost))
        )


def _processor(value: torch.Tensor) -> Processor:
    return CPU if value.device.type == "cpu" else GPU


class Costs:
    """Costs of the values of a graph. analysis: of the graph. estimate: the value of a size."""

    def __init__(self, analysis: Analysis, estimate: Callable[[Size], int]) -> None:
        self.analysis, self.estimate = analysis, estimate
        self._counted: dict[fx.Node, float] = {}

    def of(
        self,
        node: fx.Node,
        flops: float,
        bytes: float,
        one_by_one: float = 0,
        computed: float = 0,
        scores: float = 0,
    ) -> Cost:
        """Of one kernel, on the device and in the dtype of a node. one_by_one: elements that are
        copied by themselves. computed: elements on which the node's operator computes. scores: of
        an attention."""
        value = flat(node.meta["val"])[0]
        processor = _processor(value)
        rate = processor.flops_16_bit if value.element_size() == 2 else processor.flops
        work = max(bytes, one_by_one * processor.element) + max(bytes - processor.cache, 0)
        work += flops * self._whole_vectors(node, processor) / rate
        work += computed * processor.elements.get(node.target, 0) + scores * processor.score
        return Cost(flops, bytes, 1, work, processor.kernel)

    def _whole_vectors(self, node: fx.Node, processor: Processor) -> float:
        """How many FLOPs a product takes for one that it needs: its columns fill vectors. With a
        vector it reads a matrix once, and its bytes are nearly all."""
        value = flat(node.meta["val"])[0]
        if node.target not in PRODUCTS or value.dim() < 2:
            return 1.0
        *rows, columns = map(self.estimate, shape_of(value))
        lanes = max(processor.vector // value.element_size(), 1)
        return 1.0 if min(columns, rows[-1]) < 2 else -(-columns // lanes) * lanes / columns

    def of_rows(self, node: fx.Node, share: float) -> float:
        """The share of a product's time that a product of a share of its rows takes."""
        value = node.meta["val"]
        processor = _processor(value)
        least = processor.wave if value.element_size() == 4 else 0
        return max(share, least / max(self.elements(value), 1))

    def bytes(self, node: Any) -> float:
        tensors = [x for x in flat(node.meta.get("val")) if isinstance(x, torch.Tensor)]
        return float(sum(self.elements(x) * x.element_size() for x in tensors))

    def elements(self, value: torch.Tensor) -> int:
        return self.estimate(product(shape_of(value)))

    def share(self, lineage: Lineage | None) -> float:
        """Rows of the base per row of the value."""
        if lineage is None:
            return 1.0
        return self.estimate(lineage.base_rows) / max(self.estimate(lineage.rows), 1)

    def full(self, node: fx.Node) -> Cost:
        """Of a value that is computed from gathered operands."""
        return self._operator(node, lambda x: 1.0)

    def base(self, node: fx.Node) -> Cost:
        """Of the base of a value."""
        return self._operator(node, lambda x: self.share(self.analysis.lineages.get(x)))

    def fused(self, node: fx.Node, fusion: Fusion) -> Cost:
        """Of what a fusion does for an operator that it replaces: the FLOPs, and, for its result,
        all that it reads and writes."""
        flops = self._fused_flops(node)
        if node is not fusion.node:
            return replace(self.of(node, flops, 0), kernels=0, starts=0)
        shares = {
            x: self.share(fusion.lineage or self.analysis.lineages.get(x)) for x in fusion.operands
        }
        read = sum(self.bytes(x) * shares.get(x, 1.0) for x in fusion.inputs)
        if not isinstance(fusion, DINAttention):
            flops += sum(map(self._fused_flops, fusion.products))
            attends = isinstance(fusion, (TargetAttention, LevelAttention))
            scores = self._scores(node) if attends else 0
            return self.of(node, flops, read + self.bytes(node), scores=scores)
        # each product at its own rate; the first linear multiplies q ∘ k alone
        shares_of = [1 / len(fusion.mlp["features"]), *[1.0] * len(fusion.products)]
        products = [
            self.of(x, self._fused_flops(x) * share, 0)
            for x, share in zip(fusion.products, shares_of)
        ]
        total = sum(products, self.of(node, 0, read + self.bytes(node)))
        return replace(total, kernels=1, starts=total.starts / total.kernels)

    def _scores(self, attention: fx.Node) -> float:
        """How many scores an attention, or the product with its values, has."""
        value = attention.meta["val"]
        products = 1 + (attention.target is aten.scaled_dot_product_attention.default)
        return self._flops(attention) / (2 * products * max(self.estimate(shape_of(value)[-1]), 1))

    def _fused_flops(self, node: fx.Node) -> float:
        """On the base, if there is one."""
        return self._flops(node) * self.share(self.analysis.lineages.get(node))

    def gather(self, node: fx.Node, levels: int | None = None) -> Cost:
        """Of the gather from a base to the value, or by the first `levels` of its maps."""
        lineage = self.analysis.lineages[node]
        if lineage.is_uniform:  # an expansion: a view, or the model copies it too
            return Cost()
        rows = lineage.rows if levels is None else lineage.maps[levels - 1].rows_out
        share = self.estimate(rows) / max(self.estimate(lineage.rows), 1)
        return self.gather_along(node, lineage, share)

    def gather_along(self, node: fx.Node, lineage: Lineage, share: float = 1.0) -> Cost:
        """Of a gather of a value's rows, whose position the lineage tells. share: of the rows."""
        value = flat(node.meta["val"])[0]
        outer = product(shape_of(value)[: lineage.dim]) * lineage.pre
        vectors = outer == 1 and self.is_vector(value, lineage.dim + 1, lineage.post)
        elements = 0 if vectors else self.elements(value)
        return self.of(node, 0, 2 * self.bytes(node) * share, elements * share)

    def is_vector(self, value: torch.Tensor, dim: int, times: Size = ONE) -> bool:
        """Whether slices over the dimensions from `dim` on are contiguous and whole vectors. times:
        slices that follow one another."""
        size = product(shape_of(value)[dim:]) * times
        return (
            is_contiguous(value, dim)
            and self.estimate(size) * value.element_size() % VECTOR_BYTES == 0
        )

    def whole(self, graph: fx.Graph) -> Cost:
        """Of the captured model as it is, and of the gathers of its inputs."""
        given = {
            x for x in self.analysis.lineages if x in self.analysis.sources or x.op == "placeholder"
        }
        costs = (self.gather(x) if x in given else self.full(x) for x in graph.nodes)
        return sum(costs, Cost())

    def _operator(self, node: fx.Node, share: Callable[[fx.Node], float]) -> Cost:
        if not is_operator(node) or not isinstance(first_of(node.meta.get("val")), torch.Tensor):
            return Cost()
        if node.target in VIEWS:
            operand = positional(node)[0].meta["val"]
            expanded = any(size_of(stride) == 0 for stride in operand.stride())
            # of an expansion, see gather
            copies = node.target in TO_SHAPE and not expanded and self._needs_copy(operand, node)
            if copies:
                return self.of(node, 0, 2 * self.bytes(node) * share(node))
            return Cost(starts=_processor(operand).view)
        if node.target in LOOKUPS:  # reads as much as it writes, not the whole table
            given = first_of(node.meta["val"])
            indices = list(filter(is_tensor, flat(positional(node)[1])))
            one = len(indices) == 1 and node.target is aten.index.Tensor  # then whole rows
            computed = 0 if one else self.elements(given) * share(node)
            return self.of(node, 0, 2 * self.bytes(node) * share(node), computed=computed)
        operands = {x for x in node.all_input_nodes if is_tensor(x)}
        moved = sum(self.bytes(x) * share(x) for x in operands) + self.bytes(node) * share(node)
        if node.target is not aten.cat.default:
            computed = max(self.elements(first_of(x.meta["val"])) for x in (*operands, node))
            own = share(node)
            if node.target is aten.softmax.int and self._is_short(node):
                computed *= ONE_BY_ONE
            attends = node.target is aten.scaled_dot_product_attention.default
            scores = own * self._scores(node) if attends else 0
            flops = self._flops(node) * own
            return self.of(node, flops, moved, computed=computed * own, scores=scores)
        value = node.meta["val"]
        dim = Call(node, {}).dim("dim", value.dim())
        vectors = all(self.is_vector(x.meta["val"], dim) for x in operands)
        return self.of(node, 0, moved, 0 if vectors else self.elements(value) * share(node))

    def _is_short(self, node: fx.Node) -> bool:
        """Whether the node's rows fill no vector."""
        value = node.meta["val"]
        processor = _processor(value)
        columns = self.estimate(shape_of(value)[-1]) if value.dim() else 1
        return columns * value.element_size() < processor.vector

    def _needs_copy(self, operand: torch.Tensor, reshape: fx.Node) -> bool:
        """Whether no view of the operand has the shape."""
        if is_contiguous(operand):
            return False
        sizes, strides, shape = (
            [self.estimate(x) for x in given]
            for given in (
                shape_of(operand), map(size_of, operand.stride()), shape_of(reshape.meta["val"])
            )
        )  # fmt: skip
        try:
            torch.empty_strided(sizes, strides, device="meta").view(shape)
        except RuntimeError:
            return True
        return False

    def _flops(self, node: fx.Node) -> float:
        if node not in self._counted:
            self._counted[node] = float(self._count(node))
        return self._counted[node]

    def _count(self, node: fx.Node) -> float:
        if node.target in GEMMS:
            return self._measured(node)
        if node.target in RECURRENCES:  # not measured: torch would run all steps
            call = Call(node, {})
            *steps, _ = call.shape(call["input"])
            weights = (x.meta["val"] for x in call["params"])
            elements = sum(self.elements(x) for x in weights if x.dim() == 2)
            return 2 * self.estimate(product(steps)) * elements
        if str(node.target) in (*ATTENTIONS, LINEAR_COMPRESS):
            from .. import flops as _flops  # noqa: F401  # pyright: ignore[reportUnusedImport] - registers the formulas; it imports triton

            return self._measured(node)
        return 0

    def _measured(self, node: fx.Node) -> int:
        """What torch counts for operands of the estimated sizes."""

        def sized(x: fx.Node) -> Any:
            value = x.meta["val"]
            if not isinstance(value, torch.Tensor):
                return self.estimate(size_of(value))
            return torch.empty(
                [self.estimate(size) for size in shape_of(value)], dtype=value.dtype, device="meta"
            )

        target: Any = node.target
        args, kwargs = map_arg((node.args, node.kwargs), sized)
        with FlopCounterMode(display=False) as counter:
            target(*args, **kwargs)
        return counter.get_total_flops()


def is_contiguous(value: torch.Tensor, dim: int = 0) -> bool:
    """Whether slices over the dimensions from `dim` on are."""
    length = ONE
    for size, stride in reversed(
        list(zip(shape_of(value)[dim:], map(size_of, value.stride()[dim:])))
    ):
        if size != 1 and stride != length:
            return False
        length *= size
    return True


def by_cost(
    analysis: Analysis, costs: Costs, read_in_place: Set[tuple[fx.Node, fx.Node]] = frozenset()
) -> set[fx.Node]:
    """The nodes to compute on the smaller side, sources included, at the least estimated cost.
    read_in_place: pairs of a value and an operator that reads its base if there is one, instead of
    the gathered value."""
    import networkx

    graph, inside = networkx.DiGraph(), analysis.lineages
    for node in inside:
        _add_choice(graph, node, analysis, costs, read_in_place)
    if not graph.has_node("base") or not graph.has_node("full"):
        return set()
    _, (_, full) = networkx.minimum_cut(graph, "base", "full")
    return {node for node in (*analysis.moves, *analysis.sources) if node not in full}


def _add_choice(
    graph: Any,
    node: fx.Node,
    analysis: Analysis,
    costs: Costs,
    read_in_place: Set[tuple[fx.Node, fx.Node]],
) -> None:
    """Edges of a node, which is on the side "base" or "full" of the cut. An edge is paid if it goes
    from base to full."""

    def add(start: Any, end: Any, cost: float) -> None:
        if graph.has_edge(start, end):
            cost += graph[start][end]["capacity"]
        graph.add_edge(start, end, capacity=cost)

    given = node not in analysis.moves
    if given:
        add("base", node, math.inf)
        source = analysis.sources.get(node)
        if source is not None and len(source.lineage.maps) > 1:  # it needs the bases of its map
            for operand in node.all_input_nodes:
                if operand in analysis.lineages:
                    add(node, operand, math.inf)
    else:
        add("base", node, costs.full(node).least)
        # equal costs: it stays
        add(
            node,
            "full",
            costs.base(node).total + 1e-3 if costs.share(analysis.lineages[node]) < 1 else math.inf,
        )
        for operand in analysis.operands(node):
            add(node, operand, math.inf)
    several = not isinstance(node.meta.get("val"), torch.Tensor)
    gather = ("gather", node)
    if analysis.permutes_gathered(node):
        add(("gather", positional(node)[0]), gather, math.inf)
    else:
        add(node, gather, math.inf if several else costs.gather(node).total)
    for user in node.users:
        moves = user in analysis.lineages and (
            user not in analysis.moves or node not in analysis.moves[user].in_full
        )
        if (node, user) not in read_in_place and user.target is not aten.sym_size.int:
            add(gather, user if moves else "full", math.inf)
