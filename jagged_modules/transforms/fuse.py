"""fuse_broadcasts: the public function, and the order of its steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from .analysis import Analysis, analyse
from .attention import find_attentions
from .bags import Batch, find_bags, num_rows, with_checked_entries
from .calls import is_tensor
from .capture import (
    MAP_NAME,
    Captured,
    Example,
    captured_from,
    evaluate,
    example_of,
    export,
    is_keyed_jagged,
    named,
)
from .certificate import certify, coarsest_eps
from .clean_up import clean_up
from .compress import find_compressions
from .din import find_din_attentions
from .dispatch import Replication, own_replication, with_fallback
from .distribute import Distributor
from .eager import with_eager_form
from .emit import Emitter
from .guarded import guarded, results_of
from .levels import find_level_attentions, split_levels
from .lineage import USERS, Size, shape_of
from .own_operators import find_segment_attentions
from .placement import Cost, Costs, Fusion, by_cost
from .ranges import (
    Guard,
    Limits,
    MaxBatch,
    Point,
    Sizes,
    cheapest,
    check_max_batch,
    corners_of,
    guard_between,
    limits_of,
)
from .report import Decisions, Report, cost_after, sites
from .timing import MOST_BYTES, Calls, Through, Times

CANDIDATES_PER_USER = 16  # assumed for the estimates if the sizes do not say
UNKNOWN_SIZE = 4096  # assumed for sizes that depend on data
# share of a call's time. Calls that save less take as long as the model, or longer
WORTHWHILE = 0.01


if TYPE_CHECKING:  # torch makes a class for each graph

    class FusedModel(fx.GraphModule):
        report: Report


def fuse_broadcasts(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    request_only: Sequence[str] | None = None,
    max_batch: MaxBatch = None,
    dynamic_shapes: Any = None,
    through: Through | None = None,
) -> FusedModel:
    """The model with everything that depends only on a user computed once per user instead of once
    per candidate. For inference.

    An operator moves to the users' rows if a rule proves that its result is the same there, and if
    it is clearly cheaper by the estimated bytes, FLOPs and kernels on the model's device. All
    others stay as they are. The model itself is not changed. Then calls of both are timed in turn,
    with rows of the example in the numbers of max_batch, or fewer if those would take long: for a
    second, or five calls of each if that is longer. A call with no fewer users than candidates runs
    the model's own forward, and so does every call if the graph saves less than 1 % of the time,
    and an eager call no larger than the timed ones, if the graph takes longer there. On a GPU eager
    calls are those on the default stream: CUDA graphs have the new graph. Copies of the result and
    exported programs always run it. `.report.gain` is the speed-up of the timed calls, 1 if every
    call runs the model. train() does not change what the result computes. To save it, export it: it
    cannot be pickled.

    Args:
        model: in eval mode. torch.export must be able to capture it. It replicates the rows of
            users itself, by `index_select`, `x[map]`, `embedding`, `repeat_interleave`, `expand`
            and `reshape`, or `gather`; or its caller does, see request_only.
        example_inputs: the inputs of forward: a tuple of positional ones, or a dict of keyword
            ones. At least two rows in each dimension that may vary, except with request_only.
        request_only: names of forward's inputs whose rows the caller replicates, one per candidate.
            "features" names all entries of an argument that is a dict or another container,
            "features.user.0" one of them, by keys, positions and fields. The result takes them with
            one row per user, and `candidate_to_user` `[C]` (int32 or int64, any order, keyword)
            besides. The first dimension of all these inputs is the batch. A KeyedJaggedTensor, read
            by an EmbeddingBagCollection alone, gets one sample per user. For any numbers U >= 1 and
            C >= 1 afterwards.
        max_batch: sizes of the estimates and of the timed calls, with request_only: the number of
            candidates C, or (U, C), where U <= C, or ranges of both,
            ((U_min, U_max), (C_min, C_max)), of which the most candidates are timed. By default
            C is the example's and U = C / 16. Without request_only, sizes are the example's, and
            max_batch must be None. With ranges, one placement serves all if it is the cheapest at
            their ends, within 1 %. Else there are two, and each call takes one by its numbers of
            users and candidates, as `.report.guard` says.
        dynamic_shapes: as in torch.export. By default the first dimension of each tensor is
            dynamic. Calls with other sizes of constant dimensions, or other values of inputs that
            are no tensors, are an error, unless they run the model.
        through: makes of a module what calls run, for instance torch.compile: the timed calls are
            of what it makes of the model and of the graph. By default they are eager; on a GPU the
            time is that of the device alone, as in CUDA graphs.

    Returns:
        A GraphModule with the parameters and buffers of the model under the same names. They are
        shared with the model. Buffers that are replaced later are not, as by to(): convert the
        model first, or fuse it again. `.report` is a printable `Report`, of which `.ranges` tells
        the sizes of each operator and makes dynamic_shapes for torch.export.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an unknown name in request_only; inputs without rows; max_batch with U > C, with
            an empty range, or without request_only; a model in training mode, that torch.export
            cannot capture, that branches on sizes, that writes to its buffers or inputs, or that
            returns something other than tensors, None, bools, strings and containers of them; with
            request_only, a model that takes variadic arguments; a KeyedJaggedTensor with another
            use; the result differs from the model on the example inputs.
    """
    example = example_of(model, example_inputs)
    names = _checked_names(example, request_only)
    check_max_batch(max_batch, names)
    if names:
        example = _several_rows(example)
    arguments, limits = example.inputs, limits_of(max_batch)
    given, points = named(arguments), corners_of(max_batch)
    placements: list[Placement] = []
    exported = _checked_export(example, dynamic_shapes, names)
    for point in points:  # each changes the graph that it is made of
        captured = captured_from(exported, example)
        batch = _batch(captured, names, given) if names else None
        placements.append(Placement(captured, batch, point, points))
    keyed = frozenset(name for name in names if is_keyed_jagged(given[name]))
    chosen = _chosen(placements)

    def complete(module: fx.GraphModule, chosen: list[Placement], guard: Guard | None) -> None:
        """What calls of `module` do besides its graph. Again, what an earlier call did is lost."""
        module.recompile()
        with_eager_form(module)
        with_checked_entries(module, given, names, list(arguments))
        if (replication := _replication(chosen, names, keyed, guard, given)) is not None:
            with_fallback(module, model, replication)

    for x in chosen:
        x.certificate = certify(example, x.module, names, x.eps)
        complete(x.module, [x], None)
        x.time(example, names, chosen, through)
    loses = all(x.runs_model or x.loses_in_eager_calls for x in chosen)
    for x in chosen:
        x.eager_calls_run_model = loses and not x.runs_model
        x.module.report = x.report(arguments, limits)
    chosen.sort(key=lambda x: x.runs_model)
    module, guard = chosen[0].module, _join(chosen, limits)
    complete(module, chosen, guard)
    return module


def _join(chosen: list[Placement], limits: Mapping[str, Limits]) -> Guard | None:
    """Make the first placement's graph that of both, if there are two. The guard."""
    if len(chosen) < 2:
        return None
    first, second = chosen
    module, guard = first.module, guard_between(first.costs, second.costs, limits)
    module.graph = guarded(module.graph, second.module.graph, guard, *first.users())
    module.report = replace(module.report, guard=guard, other=second.module.report)
    return guard


def _chosen(placements: list[Placement]) -> list[Placement]:
    """The placements that calls take."""
    return [placements[i] for i in cheapest([x.costs for x in placements], WORTHWHILE)]


def _replication(
    chosen: list[Placement],
    names: tuple[str, ...],
    keyed: frozenset[str],
    guard: Guard | None,
    given: Mapping[str, Any],
) -> Replication | None:
    """How the model gets the rows that the graph does not need."""
    plan, for_all_calls = chosen[0].plan, chosen[0].runs_model
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and x.dim()}
    rows = max(x.point[1] or 0 for x in chosen)
    eager = {x: t.shape[1:].numel() * (rows or len(t)) for x, t in tensors.items()}
    eager = eager if any(x.eager_calls_run_model for x in chosen) else {}
    if plan.batch is not None:
        candidates = tuple(plan.batch.candidates.values())
        own = guard if chosen[-1].runs_model else None
        return Replication(names, candidates, keyed, (), for_all_calls, eager, own)
    if for_all_calls:
        return Replication(for_all_calls=True)
    pairs = own_replication(plan.captured, plan.analysis)
    return replace(pairs or Replication(), eager_elements=eager) if eager else pairs


def _refuse_to_pickle(self: fx.GraphModule) -> Any:
    raise TypeError(
        "a result of fuse_broadcasts cannot be pickled: save it with torch.export, or save the"
        " model and fuse it again"
    )


@dataclass
class Plan:
    """What will be done to a captured model.

    Attributes:
        captured: the model.
        batch: which inputs the caller replicated.
        analysis: the lineages of its values.
        costs: estimates for the sizes of the example or of max_batch.
        fusions: attentions and compressions that can be computed from bases.
        before: the cost of the model as it is.
        moved: the operators and sources to compute on the smaller side.
    """

    captured: Captured
    batch: Batch | None
    analysis: Analysis
    costs: Costs
    fusions: dict[fx.Node, Fusion]
    before: Cost
    moved: set[fx.Node]

    def apply(self) -> tuple[FusedModel, Decisions]:
        """The fused model, and what was done. The captured graph is kept for the report."""
        emitter = Emitter(self)
        self.captured.module.graph = emitter.emit()
        return cast("FusedModel", self.captured.module), emitter.decisions()


class Placement:
    """A plan for numbers of users and candidates, carried out.

    Attributes:
        point: these numbers.
        hints: the sizes that they give.
        plan: for them.
        module: the fused model.
        decisions: what was done.
        after: the cost of the fused model.
        eps: of the coarsest dtype that the model computes in.
        costs: of the fused model at each of `points`.
        certificate: what was checked.
        times, eager: of calls, and of eager ones. None if nothing moved, or calls failed.
        error: with which they failed.
        runs_model: whether the model itself is as good where this is the best placement.
        eager_calls_run_model: whether it is in eager calls.
    """

    certificate: str

    def __init__(
        self, captured: Captured, batch: Batch | None, point: Point, points: Iterable[Point]
    ) -> None:
        self.point, self.runs_model, self.eager_calls_run_model = point, False, False
        self.times: Times | None = None
        self.eager: Times | None = None
        self.error = ""
        self.eps = coarsest_eps(captured.graph)
        self.hints = _hints(captured, batch, point)
        self.plan = make_plan(captured, batch, self.hints)
        self.module, self.decisions = self.plan.apply()
        self.after = cost_after(captured.graph, self.plan.costs, self.decisions)
        self.costs = {x: self.cost(x) for x in points}
        for name in ("train", "eval"):  # torch.export's, which raise
            vars(self.module).pop(name, None)
        self.module.eval()
        own_class: Any = type(self.module)  # torch makes one for each graph
        own_class.__reduce__ = _refuse_to_pickle

    @property
    def nothing_moved(self) -> bool:
        moved = self.decisions.moved
        return not self.decisions.fused and moved <= self.plan.analysis.sources.keys()

    @property
    def loses_in_eager_calls(self) -> bool:
        return self.eager is not None and self.eager.gain < 1

    def time(
        self,
        example: Example,
        names: tuple[str, ...],
        chosen: Iterable[Placement],
        through: Through | None,
    ) -> None:
        """Time calls, and decide whether they run the model. Of the sizes for which this is the
        cheapest of the chosen placements, with the most candidates per user."""
        points = (p for p, cost in self.costs.items() if cost == min(x.costs[p] for x in chosen))
        saved = 0.0 if self.nothing_moved else 1 - self.after.total / self.plan.before.total
        if not self.nothing_moved:
            try:
                calls = self._calls(example, names, next(points, self.point))
                self.times, self.eager = calls.times(self.module, through)
                saved = 1 - 1 / self.times.gain
            except (RuntimeError, ValueError, IndexError) as error:  # no memory for so many rows
                self.error = f"{type(error).__name__}: {error}"
        self.runs_model = saved < WORTHWHILE

    def _calls(self, example: Example, names: tuple[str, ...], point: Point) -> Calls:
        captured, batch = self.plan.captured, self.plan.batch
        device = next(filter(is_tensor, captured.graph.nodes)).meta["val"].device
        if batch is None:
            return Calls(example, (), 0, 0, frozenset(), device)
        users, candidates = (_hints(captured, batch, point)[x] for x in (USERS, batch.rows))
        most = int(MOST_BYTES * self.hints[batch.rows] / max(self.plan.before.bytes, 1))
        fewer = min(candidates, max(most, 1))
        users = -(-users * fewer // candidates)
        return Calls(example, names, users, fewer, batch.offsets(example.inputs), device)

    def cost(self, point: Point) -> float:
        """Of the fused model for other numbers of users and candidates."""
        plan = self.plan
        hints = _hints(plan.captured, plan.batch, point)
        costs = Costs(plan.analysis, partial(evaluate, hints=hints, unknown=UNKNOWN_SIZE))
        return cost_after(plan.captured.graph, costs, self.decisions).total

    def users(self) -> tuple[str, int]:
        """The name of an input of the graph, and how many of its rows are of one user."""
        assert self.plan.batch is not None
        if self.plan.batch.users:
            return next(iter(self.plan.batch.users)).name, 1
        assert self.plan.batch.bags is not None
        lengths, keys = self.plan.batch.bags.lengths
        return lengths.name, keys

    def report(self, arguments: Mapping[str, Any], limits: Mapping[str, Limits]) -> Report:
        """arguments: the example's, by name. limits: of users and candidates."""
        plan, labels = self.plan, self.plan.captured.labels
        of_sizes = ", ".join(f"{labels.get(x, x)} = {value}" for x, value in self.hints.items())
        ranges = Sizes(plan, self.decisions).ranges(arguments, limits)
        found = sites(plan.captured.graph, plan.costs, self.decisions)
        return Report(
            found, plan.before, self.after, of_sizes, self.certificate, ranges, self.runs_model,
            self.eager_calls_run_model, self.times, self.eager, self.error,
        )  # fmt: skip


def make_plan(
    captured: Captured,
    batch: Batch | None,
    hints: Mapping[Size, int],
    place: Callable[..., set[fx.Node]] = by_cost,
) -> Plan:
    """Decides what moves, with costs for the sizes `hints`."""
    estimate = partial(evaluate, hints=hints, unknown=UNKNOWN_SIZE)
    bags = batch.bags.nodes if batch is not None and batch.bags is not None else frozenset()
    inputs, known = {} if batch is None else batch.lineages(USERS), {*captured.hints, USERS}

    def analysed() -> tuple[Analysis, Costs]:
        clean_up(captured.graph, bags)
        found = analyse(captured.graph, inputs, estimate, known)
        return found, Costs(found, estimate)

    analysis, costs = analysed()
    before = costs.whole(captured.graph)
    if split_levels(captured.graph, analysis, estimate):
        analysis, costs = analysed()
    attentions = find_din_attentions(captured.graph, analysis, estimate).values()
    kept = {x for match in attentions for x in match.replaced}
    distributor = Distributor(captured.graph, costs, kept)
    if distributor.run():
        analysis, costs = analysed()
    analysis.refused |= distributor.reasons
    analysis.whole = distributor.whole
    fusions: dict[fx.Node, Fusion] = {
        **find_attentions(captured.graph, analysis, estimate),
        **find_din_attentions(captured.graph, analysis, estimate),
        **find_level_attentions(captured.graph, analysis, estimate),
        **find_compressions(captured.graph, analysis),
    }
    fusions |= find_segment_attentions(captured.graph, analysis, estimate)
    read_in_place = {read for match in fusions.values() for read in match.reads}
    return Plan(
        captured, batch, analysis, costs, fusions, before, place(analysis, costs, read_in_place)
    )


# -- arguments -------------------------------------------------------------------------------------


def _checked_names(example: Example, request_only: Sequence[str] | None) -> tuple[str, ...]:
    """The names of all entries of the inputs that request_only names."""
    if request_only is None:
        return ()
    if (
        isinstance(request_only, str)
        or not isinstance(request_only, Iterable)
        or not all(isinstance(name, str) for name in request_only)
    ):
        raise TypeError(
            f"request_only must be a sequence of names of forward's inputs, got {request_only!r}"
        )
    given, names = example.inputs, dict[str, None]()
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    for name, x in inspect.signature(example.model.forward).parameters.items():
        if name in given and x.kind in stars:
            raise ValueError(
                "request_only needs a model whose inputs have names, but forward takes"
                f" {stars[x.kind]}{name}"
            )
    entries = named(given)
    for name in request_only:
        found = [x for x in entries if x == name or x.startswith(f"{name}.")]
        if not found:
            raise ValueError(
                f"request_only must have names of forward's inputs, {list(entries)}, got {name!r}"
            )
        tensors = [
            x for x in found if isinstance(entries[x], torch.Tensor) or is_keyed_jagged(entries[x])
        ]
        if not tensors or any(
            isinstance(entries[x], torch.Tensor) and not entries[x].dim() for x in tensors
        ):
            raise ValueError(
                f"request_only must name inputs that are tensors with rows, got {name!r} without"
            )
        names |= dict.fromkeys(tensors)
    rows = {name: size for name in names for size in num_rows(entries[name])}
    if len(set(rows.values())) > 1:
        raise ValueError(
            "request_only inputs must have one row per candidate in example_inputs, as the model"
            f" takes them, got rows {rows}"
        )
    if MAP_NAME in given:
        raise ValueError(f"request_only adds an input {MAP_NAME!r}, which forward has already")
    return tuple(names)


def _several_rows(example: Example) -> Example:
    """Inputs of one row repeated: torch.export would take a size of 1 for a constant."""
    given = example[1:]
    if any(map(is_keyed_jagged, pytree.tree_leaves(given, is_leaf=is_keyed_jagged))):
        return example
    given = pytree.tree_map_only(
        torch.Tensor,
        lambda x: x.repeat(3, *[1] * (x.dim() - 1)) if x.dim() and len(x) == 1 else x,
        given,
    )
    return Example(example.model, *given)


def _checked_export(
    example: Example, shapes: Any, names: Sequence[str]
) -> torch.export.ExportedProgram:
    exported = export(example, shapes, names)
    for position, x in enumerate(results_of(exported.graph)):
        if isinstance(x, fx.Node):
            is_valid = isinstance(x.meta.get("val"), torch.Tensor)
        else:
            is_valid = x is None or isinstance(x, (bool, str))
        if not is_valid:
            raise ValueError(
                "model must return tensors, None, bools, strings and containers of them, got"
                f" {type(x).__name__} {x} as output {position}"
            )
    return exported


# -- replication by the caller ---------------------------------------------------------------------


def _batch(captured: Captured, names: tuple[str, ...], given: dict[str, Any]) -> Batch:
    """The inputs by the rows that the result takes of them, with a new input for the map."""
    keyed = [name for name in names if is_keyed_jagged(given[name])]
    bags = find_bags(captured, keyed)
    shared = {x: name for name in names if name not in keyed for x in captured.inputs[name]}
    first = next(iter([*shared, *(bags.results if bags else ())]))
    for x, name in shared.items():
        if not shape_of(x.meta["val"])[0].is_Symbol:
            raise ValueError(
                f"request_only input {name!r} must have a batch of any size, but the model takes"
                f" {x.meta['val'].shape[0]} only"
            )
    map_node = captured.add_map(torch.int64, first)
    # inputs that the model never joins have sizes of their own
    rows = {shape_of(x.meta["val"])[0] for x in (first, *shared)}
    others = {
        x: name
        for name, nodes in captured.inputs.items()
        for x in nodes
        if x not in shared
        and name not in keyed
        and is_tensor(x)
        and rows.intersection(shape_of(x.meta["val"])[:1])
    }
    return Batch(map_node, shared, others, bags, shape_of(first.meta["val"])[0])


def _hints(captured: Captured, batch: Batch | None, point: Point) -> dict[Size, int]:
    """The sizes to estimate costs for: the example's, with these numbers of users and
    candidates."""
    if batch is None:
        return captured.hints
    rows = {batch.rows, *(shape_of(x.meta["val"])[0] for x in (*batch.users, *batch.candidates))}
    users, candidates = point
    candidates = candidates or max(captured.hints.get(size, 1) for size in rows)
    users = users or -(-candidates // CANDIDATES_PER_USER)
    return captured.hints | dict.fromkeys(rows, candidates) | {USERS: users}
