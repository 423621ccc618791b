"""Calls for which the result of fuse_broadcasts runs the model itself, so that there is no loss:
with no fewer users than candidates, or all calls if nothing moved, or too little to save time, or
eager calls if the host issues the model faster.

The fused graph was placed for many candidates per user. With one, its gathers and additions of
parts save nothing. A graph in which nothing moved has more operators than the model, whose layers
it shows as torch's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..tracing import is_exporting
from .analysis import Analysis
from .bags import select_rows
from .capture import MAP_NAME, Captured, is_keyed_jagged, map_named, named
from .lineage import Size, shape_of
from .ranges import Guard
from .sources import INDEX_DTYPES

Rows = tuple[str, int]  # the name of an entry of forward's inputs, and a dimension of it


@dataclass(frozen=True)
class Replication:
    """How a model gets its replicated rows.

    Attributes:
        shared: names of entries of its inputs that its caller replicates.
        per_candidate: names of other entries with one row per candidate.
        keyed: those of `shared` that are KeyedJaggedTensors.
        pairs: where the model replicates rows itself: the sizes of an input before and after.
        for_all_calls: whether the model is as good as the graph for any number of users.
        eager_elements: the most elements of tensors, with one row per candidate, in eager calls for
            which the model is as good; empty for no such calls.
        guard: for which numbers of users and candidates the model is as good, None for no others.
    """

    shared: tuple[str, ...] = ()
    per_candidate: tuple[str, ...] = ()
    keyed: frozenset[str] = frozenset()
    pairs: tuple[tuple[Rows, Rows], ...] = ()
    for_all_calls: bool = False
    eager_elements: Mapping[str, int] = field(default_factory=dict)
    guard: Guard | None = None

    def runs_eagerly(self, entries: Mapping[str, Any], candidates: int | None = None) -> bool:
        """Whether this is an eager call for which the model is as good. candidates: whose rows the
        caller gave for users."""
        for name, most in self.eager_elements.items():
            x = entries.get(name)
            if not isinstance(x, Tensor) or not x.dim() or not _is_eager(x.device):
                return False
            rows = x.shape[0] if candidates is None else candidates
            if x.shape[1:].numel() * rows > most:
                return False
        return bool(self.eager_elements)

    def runs_model(self, users: int, candidates: int) -> bool:
        return (
            users >= candidates
            or self.for_all_calls
            or (self.guard is not None and self.guard(users, candidates))
        )


def own_replication(captured: Captured, analysis: Analysis) -> Replication | None:
    """The replication of a model that does it itself. None unless all numbers of rows are sizes of
    its inputs."""
    sizes: dict[Size, Rows] = {}
    for name, nodes in captured.inputs.items():
        value = nodes[0].meta.get("val") if len(nodes) == 1 else None
        if isinstance(value, Tensor):
            for dim, size in enumerate(shape_of(value)):
                sizes.setdefault(size, (name, dim))
    maps = [source.lineage.maps[-1] for source in analysis.sources.values()]
    if not maps or any(
        not size.is_Symbol or size not in sizes for x in maps for size in (x.rows_in, x.rows_out)
    ):
        return None
    return Replication(pairs=tuple({(sizes[x.rows_in], sizes[x.rows_out]): None for x in maps}))


def with_fallback(fused: fx.GraphModule, model: nn.Module, replication: Replication) -> None:
    """Let `fused` run the model if there are no fewer users than candidates, or always. Not in
    exported programs: their sizes are symbols, and their operators those of the graph. Calls that
    are no valid ones run the graph, which raises the errors."""
    parameters = inspect.signature(model.forward).parameters
    if any(x.kind not in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY) for x in parameters.values()):
        return
    by_position = [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
    inputs_of_model = partial(_gathered if replication.shared else _unchanged, replication)
    vars(fused)["_model"] = _sharing_state(model, fused)
    of_graph = type(fused).forward

    @functools.wraps(of_graph)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = vars(self).get("_model")
        if model is not None and len(args) <= len(by_position) and not is_exporting():
            given = kwargs.copy()
            if args:  # `dict(zip(...)) | kwargs` takes 3 µs more where all are given by name
                given.update(zip(by_position, args))
            of_model = inputs_of_model(given)
            if of_model is not None:
                return model(**of_model)
        return of_graph(self, *args, **kwargs)

    type(fused).forward = forward


def _is_eager(device: torch.device) -> bool:
    """Whether the host issues the call's operators one by one: no compiler traces them, and they go
    to the default stream. CUDA graphs are captured, and warmed up for, on others."""
    if torch.compiler.is_compiling():
        return False
    cuda = torch.cuda
    return device.type != "cuda" or cuda.current_stream(device) == cuda.default_stream(device)


def _unchanged(replication: Replication, given: dict[str, Any]) -> dict[str, Any] | None:
    """The inputs of a model that replicates rows itself, None with fewer users than candidates."""
    entries = named(given)
    if replication.for_all_calls or replication.runs_eagerly(entries):
        return given
    if not replication.pairs:
        return None
    for before, after in replication.pairs:
        if not _size(entries, before) >= _size(entries, after) > 0:
            return None
    return given


def _size(entries: Mapping[str, Any], rows: Rows) -> int:
    """A size of an entry; 0 unless it is a tensor with this dimension."""
    x = entries.get(rows[0])
    return x.shape[rows[1]] if isinstance(x, Tensor) and x.dim() > rows[1] else 0


def _gathered(replication: Replication, given: dict[str, Any]) -> dict[str, Any] | None:
    """The inputs of a model whose caller replicates rows, None if the graph is better or a number
    of rows is wrong. Writes to `given`."""
    index = given.pop(MAP_NAME, None)
    if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype not in INDEX_DTYPES:
        return None
    entries, num_candidates, num_users = named(given), index.shape[0], 0
    for name in replication.shared:
        rows = (
            _samples(entries.get(name)) if name in replication.keyed else _rows(entries.get(name))
        )
        num_users = num_users or rows
        if rows < 1 or rows != num_users:
            return None
    if not replication.runs_model(num_users, num_candidates) and not replication.runs_eagerly(
        entries, num_candidates
    ):
        return None
    for name in replication.per_candidate:
        if _rows(entries.get(name)) != num_candidates:
            return None
    nested = []
    try:
        for name in replication.shared:
            if name in given:
                given[name] = select(given[name], index)
            else:
                nested.append(name)
        return map_named(lambda x: select(x, index), given, nested) if nested else given
    except IndexError:
        return None


def select(x: Any, index: Tensor) -> Any:
    """The rows of candidates: of a tensor, or samples of a KeyedJaggedTensor."""
    return x.index_select(0, index) if isinstance(x, Tensor) else select_rows(x, index)


def _samples(x: Any) -> int:
    """The number of samples of a KeyedJaggedTensor; -1 under torch.compile, where select_rows has
    sizes that depend on data."""
    return x.stride() if not torch.compiler.is_compiling() and is_keyed_jagged(x) else -1


def _rows(x: Any) -> int:
    """The number of rows of a tensor, -1 of another input."""
    return x.shape[0] if isinstance(x, Tensor) and x.dim() else -1


def _sharing_state(model: nn.Module, fused: nn.Module | None) -> nn.Module:
    """A copy of the model whose parameters and buffers are those of `fused`, also after they are
    replaced, as `fused.to(...)` does."""
    copy = object.__new__(type(model))
    vars(copy).update(vars(model))
    for kind in ("_parameters", "_buffers"):
        own, other = vars(model)[kind], {} if fused is None else vars(fused)[kind]
        vars(copy)[kind] = other if own.keys() == other.keys() else dict(own)
    children = {} if fused is None else vars(fused)["_modules"]
    vars(copy)["_modules"] = {
        name: None if x is None else _sharing_state(x, children.get(name))
        for name, x in vars(model)["_modules"].items()
    }
    return copy
