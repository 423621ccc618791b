"""What fuse_broadcasts did, and what it is estimated to save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .calls import first_of, is_operator
from .lineage import Size
from .placement import VIEWS, Cost, Costs, Fusion

if TYPE_CHECKING:
    from .ranges import Guard
    from .timing import Times

RANGED = "users", "candidates"  # the sizes that max_batch is of
HEADER = ("operator", "line", "decision", "rows", "MFLOP", "MB", "cost, MB")


@dataclass(frozen=True)
class Site:
    """An operator that reads replicated rows.

    Attributes:
        node: its name in the captured graph.
        operator: "gather" for the operators that replicate rows.
        line: where the model calls it: file, line number and function.
        decision: "moved", "fused" or "kept".
        reason: why it was kept, or what it was fused or joined with.
        rows_before, rows_after: rows that it computes.
        before, after: estimated costs, without gathers. Those of a sum of two products that became
            `linear_compress` have the products'.
    """

    node: str
    operator: str
    line: str
    decision: str
    reason: str
    rows_before: int
    rows_after: int
    before: Cost
    after: Cost


@dataclass(frozen=True)
class OperatorSizes:
    """The sizes of an operator of the new graph.

    Attributes:
        node: its name in the captured graph.
        operator: "gather" for those that replicate rows.
        line: where the model calls it.
        shape: of its result, or of the first of several.
        sizes: names of the sizes that vary and that its result and its operands have: "users",
            "candidates", an input's dimension as "history[1]", or "data" if no input has it.
    """

    node: str
    operator: str
    line: str
    shape: tuple[str, ...]
    sizes: tuple[str, ...]


@dataclass(frozen=True)
class Ranges:
    """Printable. Which sizes each operator of the new graph has.

    Attributes:
        limits: the least and the most of each size, None for any.
        operators: in the order of the graph, views left out.
        inputs: symbols of the inputs' dimensions that vary.
    """

    limits: dict[str, tuple[int, int | None]]
    operators: tuple[OperatorSizes, ...]
    inputs: dict[str, Any]

    def dynamic_shapes(self, others: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """For torch.export.export of the fused model with the arguments of the example.

        Users and candidates have the ranges of max_batch. others: dimensions of other sizes, by
        their names, for instance {"history[1]": torch.export.Dim("events", max=500)}. By default
        they are Dim.AUTO.

        Raises:
            ValueError: no input has a size of this name.
        """
        auto: Any = torch.export.Dim.AUTO
        dims: dict[str, Any] = dict.fromkeys(self.limits, auto)
        for name in RANGED:
            if name in self.limits:
                least, most = self.limits[name]
                # torch.export takes a size of one value for a number
                same = least == most
                dims[name] = least if same else torch.export.Dim(name, min=least, max=most)
        free = [name for name in self.limits if name not in (*RANGED, "data")]
        if unknown := {*(others or ())}.difference(free):
            raise ValueError(
                f"others must have names of sizes other than users and candidates, {free}, got"
                f" {sorted(unknown)}"
            )
        dims |= others or {}

        def dim_of(size: Size | None) -> Any:
            if size is None:
                return None
            times, symbol = size.as_coeff_Mul()
            dim = dims[str(symbol)]
            return dim if times == 1 or dim is auto else int(times) * dim

        return pytree.tree_map(dim_of, self.inputs)

    def __str__(self) -> str:
        ranges = {
            name: name if most is None else f"{name} {least} to {most}"
            for name, (least, most) in self.limits.items()
        }
        rows = [("operator", "line", "result", "sizes")]
        for x in self.operators:
            sizes = ", ".join(ranges[name] for name in x.sizes) or "constant"
            rows.append((x.operator, x.line, f"[{', '.join(x.shape)}]", sizes))
        return "\n".join(_table(rows))


@dataclass(frozen=True)
class Report:
    """Printable. The sites in the order of the graph, the whole model's estimated costs, by which
    operators were placed, the certificate, and the times of calls.

    Attributes:
        sites: operators that read replicated rows, views left out.
        before, after: estimated costs of the whole model, gathers included.
        sizes: the sizes that the estimates are for.
        certificate: what was checked on the example inputs.
        runs_model: whether every call runs the model itself, because the new graph takes about as
            long, or longer.
        eager_calls_run_model: whether eager calls no larger than `sizes` do, because the host takes
            longer to issue the new graph. On a GPU those are calls on the default stream:
            torch.compile and CUDA graphs have the new graph.
        times: of calls with rows of the example: through `through`, else on a GPU the device's, as
            in CUDA graphs, else of eager calls. None if nothing moved, or `untimed` says why.
        eager_times: of eager calls.
        untimed: the error of a call.
        ranges: the sizes of each operator, and dynamic_shapes for torch.export.
        guard: where the placement of `other` runs instead. None if one is the cheapest over all
            ranges of max_batch.
        other: the report of the second placement.
    """

    sites: tuple[Site, ...]
    before: Cost
    after: Cost
    sizes: str
    certificate: str
    ranges: Ranges
    runs_model: bool = False
    eager_calls_run_model: bool = False
    times: Times | None = None
    eager_times: Times | None = None
    untimed: str = ""
    guard: Guard | None = None
    other: Report | None = None

    @property
    def gain(self) -> float:
        """How many times as fast as the model the result is: by its times, or by estimated costs if
        there are none."""
        if self.runs_model:
            return 1.0
        return self.times.gain if self.times is not None else self.before.total / self.after.total

    def __str__(self) -> str:
        lines = _table([HEADER, *(_cells(site) for site in self.sites)])
        lines.append(
            f"whole model, {self.sizes}: {_change(self.before.flops, self.after.flops)} MFLOP,"
            f" {_change(self.before.bytes, self.after.bytes)} MB read and written,"
            f" {self.before.kernels} → {self.after.kernels} kernels, cost"
            f" {_change(self.before.total, self.after.total)} MB (estimates; the cost has FLOPs,"
            " kernels and slow copies as bytes)"
        )
        if self.times is not None:
            lines.append(f"timed: {self.times}")
        elif self.untimed:
            lines.append(f"not timed, estimate: {self.gain:.2f} times as fast; {self.untimed}")
        if self.runs_model:
            lines.append("every call runs the model itself: the new graph is not faster")
        if self.eager_calls_run_model:
            lines.append("eager calls run the model itself: the host issues it faster")
        lines.append(f"certificate: {self.certificate}")
        if self.other is not None:
            lines += [f"second placement, if {self.guard}:", str(self.other)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Decisions:
    """What was done.

    Attributes:
        moved: operators and sources on the smaller side.
        fused: operators that a fusion replaces.
        joined: attentions of the users that a fusion computes too, on the smaller side.
        dead: operators without a use in the new graph.
        gathered: values that are gathered from their bases, by how many of their maps.
    """

    moved: set[fx.Node]
    fused: dict[fx.Node, Fusion]
    joined: set[fx.Node]
    dead: set[fx.Node]
    gathered: dict[fx.Node, list[int]]


def sites(graph: fx.Graph, costs: Costs, decisions: Decisions) -> tuple[Site, ...]:
    """The sites of a captured graph."""
    found = (_site(node, costs, decisions) for node in graph.nodes)
    return tuple(site for site in found if site is not None)


def cost_after(graph: fx.Graph, costs: Costs, decisions: Decisions) -> Cost:
    """Of the new graph."""
    sources = costs.analysis.sources
    computed = (_after(node, costs, decisions) for node in graph.nodes if node not in sources)
    gathered = (_gathers(node, costs, decisions) for node in decisions.gathered)
    return sum((*computed, *gathered), Cost())


def _gathers(node: fx.Node, costs: Costs, decisions: Decisions) -> Cost:
    """Of the gathers of a value, none if there are none."""
    levels = decisions.gathered.get(node, ())
    return sum((costs.gather(node, number) for number in levels), Cost())


def _after(node: fx.Node, costs: Costs, decisions: Decisions) -> Cost:
    if node in decisions.fused:
        return costs.fused(node, decisions.fused[node])
    if node in decisions.joined:
        return replace(costs.base(node), kernels=0, starts=0)
    if node in decisions.dead:
        return Cost()
    return costs.base(node) if node in decisions.moved else costs.full(node)


def _site(node: fx.Node, costs: Costs, decisions: Decisions) -> Site | None:
    if not is_operator(node) or not isinstance(first_of(node.meta.get("val")), torch.Tensor):
        return None
    if node in decisions.dead and node not in decisions.fused:
        return None
    analysis = costs.analysis
    lineage = analysis.lineages.get(node)
    if lineage is not None and lineage.is_uniform:
        return None
    source = node in analysis.sources
    # the users' embedding bags
    given = lineage is not None and not source and node not in analysis.moves
    operands = [
        x for x in map(analysis.lineages.get, analysis.operands(node)) if x and not x.is_uniform
    ]
    lineage = lineage or analysis.whole.get(node) or next(iter(operands), None)
    if lineage is None or (
        not source
        and not given
        and node not in analysis.whole
        and (node.target in VIEWS or not operands)
    ):
        return None
    full, base = costs.estimate(lineage.rows), costs.estimate(lineage.base_rows)
    reason = analysis.refused.get(node) or _not_worth_it(node, costs)
    decision = "kept"
    if node in decisions.fused:
        decision, reason = "fused", decisions.fused[node].name
    elif source and node in decisions.gathered:
        reason = "an operator reads it per candidate"
    elif node in decisions.moved:
        decision, reason = "moved", "self_target_attention" if node in decisions.joined else ""
    name = "gather" if source else operator_name(node)
    before = costs.gather(node) if source else costs.full(node)
    if decision == "fused" and node is decisions.fused[node].node:
        before = sum(map(costs.full, decisions.fused[node].products), before)
    after = _gathers(node, costs, decisions) if source else _after(node, costs, decisions)
    rows = full, base if decision == "moved" else full
    return Site(node.name, name, line_of(node), decision, reason, *rows, before, after)


def _not_worth_it(node: fx.Node, costs: Costs) -> str:
    saved = costs.full(node).least - costs.base(node).total
    gather = costs.gather(node).total if node in costs.analysis.moves else 0
    return (
        f"it saves at least {saved / 1e6:.3g} MB, and its result costs {gather / 1e6:.3g} MB to"
        " gather"
    )


def operator_name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").removesuffix(".default")


def line_of(node: fx.Node) -> str:
    """The innermost line outside of torch that called the operator, else the innermost one."""
    frames = [
        line.strip()
        for line in (node.stack_trace or "").splitlines()
        if line.strip().startswith("File ")
    ]
    own = [frame for frame in frames if "/torch/" not in frame] or frames
    if not own:
        return "-"
    path, line, function = own[-1].removeprefix("File ").split(", ", 2)
    file = path.strip('"').rsplit("/")[-1]
    return f"{file}:{line.removeprefix('line ')} {function}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of cells under one another."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ]


def _cells(site: Site) -> tuple[str, ...]:
    decision = f"{site.decision}: {site.reason}" if site.reason else site.decision
    rows = str(site.rows_before)
    if site.rows_after != site.rows_before:
        rows = f"{rows} → {site.rows_after}"
    return (
        site.operator,
        site.line,
        decision,
        rows,
        _change(site.before.flops, site.after.flops),
        _change(site.before.bytes, site.after.bytes),
        _change(site.before.total, site.after.total),
    )


def _change(before: float, after: float) -> str:
    first, second = (f"{x / 1e6:.3g}" for x in (before, after))
    return first if first == second else f"{first} → {second}"
