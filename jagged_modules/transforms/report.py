"""What fuse_broadcasts did, and what it is estimated to save."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from .analysis import Analysis
from .calls import first_of, is_operator
from .placement import VIEWS, Cost, Costs, Fusion

HEADER = ("operator", "line", "decision", "rows", "MFLOP", "MB", "cost, MB")


@dataclass(frozen=True)
class Site:
    """An operator that reads replicated rows.

    Attributes:
        node: its name in the captured graph.
        operator: "gather" for the operators that replicate rows.
        line: where the model calls it: file, line number and function.
        decision: "moved", "fused" or "kept".
        reason: why it was kept, or what it was fused with.
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
class Report:
    """Printable. The sites in the order of the graph, the whole model's estimated costs, and the
    certificate.

    Attributes:
        sites: operators that read replicated rows, views left out.
        before, after: estimated costs of the whole model, gathers included. A key that a mask hides
            counts as any other.
        sizes: the sizes that the estimates are for.
        certificate: what was checked on the example inputs.
        runs_model: whether every call runs the model itself, because the new graph would take about
            as long, or longer.
    """

    sites: tuple[Site, ...]
    before: Cost
    after: Cost
    sizes: str
    certificate: str
    runs_model: bool = False

    @property
    def gain(self) -> float:
        """How many times as fast as the model the result is estimated to be."""
        return 1.0 if self.runs_model or not self.after.total else 1 / (1 - self.saved)

    @property
    def saved(self) -> float:
        """Share of the whole model's cost."""
        return 1 - self.after.total / self.before.total if self.before.total else 0.0

    def __str__(self) -> str:
        rows = [HEADER, *(_cells(site) for site in self.sites)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in rows
        ]
        lines.append(
            f"whole model, {self.sizes}: {_change(self.before.flops, self.after.flops)} MFLOP,"
            f" {_change(self.before.bytes, self.after.bytes)} MB read and written,"
            f" {self.before.kernels} → {self.after.kernels} kernels, cost"
            f" {_change(self.before.total, self.after.total)} MB (estimates; the cost has FLOPs,"
            " kernels and slow copies as bytes)"
        )
        lines.append(
            "every call runs the model itself: the new graph would take about as long, or longer"
            if self.runs_model
            else f"estimate: {self.gain:.2f} times as fast as the model"
        )
        return "\n".join([*lines, f"certificate: {self.certificate}"])


@dataclass(frozen=True)
class Decisions:
    """What was done.

    Attributes:
        moved: operators and sources on the smaller side.
        fused: operators that a fusion replaces.
        dead: operators without a use in the new graph.
        gathered: values that are gathered from their bases.
    """

    moved: set[fx.Node]
    fused: dict[fx.Node, Fusion]
    dead: set[fx.Node]
    gathered: set[fx.Node]


def make_report(
    graph: fx.Graph,
    analysis: Analysis,
    costs: Costs,
    decisions: Decisions,
    before: Cost,
    sizes: str,
    certificate: str,
) -> Report:
    """The report on a captured graph. `before` is the cost of the model as it was."""
    sites = [site for node in graph.nodes if (site := _site(node, analysis, costs, decisions))]
    computed = (
        _after(node, costs, decisions) for node in graph.nodes if node not in analysis.sources
    )
    gathered = (costs.gather(node) for node in decisions.gathered)
    return Report(tuple(sites), before, sum((*computed, *gathered), Cost()), sizes, certificate)


def _after(node: fx.Node, costs: Costs, decisions: Decisions) -> Cost:
    if node in decisions.fused:
        return costs.fused(node, decisions.fused[node])
    if node in decisions.dead:
        return Cost()
    return costs.base(node) if node in decisions.moved else costs.full(node)


def _site(node: fx.Node, analysis: Analysis, costs: Costs, decisions: Decisions) -> Site | None:
    if (
        not is_operator(node)
        or not isinstance(first_of(node.meta.get("val")), torch.Tensor)
        or (node in decisions.dead and node not in decisions.fused)
    ):
        return None
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
        decision, reason = "moved", ""
    name = "gather" if source else str(node.target).removeprefix("aten.").removesuffix(".default")
    before = costs.gather(node) if source else costs.full(node)
    if decision == "fused" and node is decisions.fused[node].node:
        before = sum(map(costs.full, decisions.fused[node].products), before)
    after = (
        costs.gather(node)
        if source and node in decisions.gathered
        else Cost()
        if source
        else _after(node, costs, decisions)
    )
    return Site(
        node.name,
        name,
        _line(node),
        decision,
        reason,
        full,
        base if decision == "moved" else full,
        before,
        after,
    )


def _not_worth_it(node: fx.Node, costs: Costs) -> str:
    saved = costs.full(node).least - costs.base(node).total
    gather = costs.gather(node).total if node in costs.analysis.moves else 0
    return (
        f"it saves at least {saved / 1e6:.3g} MB, and its result costs {gather / 1e6:.3g} MB to"
        " gather"
    )


def _line(node: fx.Node) -> str:
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


def _cells(site: Site) -> tuple[str, ...]:
    decision = f"{site.decision}: {site.reason}" if site.reason else site.decision
    rows = (
        f"{site.rows_before} → {site.rows_after}"
        if site.rows_after != site.rows_before
        else str(site.rows_before)
    )
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
