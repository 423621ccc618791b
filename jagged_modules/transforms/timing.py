"""How long calls of a model and of its fused graph take. Both are called in turn, with rows of the
example."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..tracing import rehearsal
from .bags import select_rows
from .capture import MAP_NAME, Example, is_keyed_jagged, map_named, named
from .dispatch import select

Through = Callable[[nn.Module], Callable[..., Any]]
Call = Callable[[], Any]

WARM_UPS = 2  # the first call compiles kernels, the second has its memory from a cache
# rounds of one call of each, and the time that more of them may take, in seconds
ROUNDS, SECONDS = 3, 1.0
# that a call of the model reads and writes, by estimate: more rows have the same gain
MOST_BYTES = 8e9
CYCLES = 2e9  # of a GPU, per second


@dataclass(frozen=True)
class Times:
    """Of a call, the least of several, in seconds.

    Attributes:
        model: of the model, with the rows of users gathered for the candidates.
        graph: of the new graph.
        calls: what was called.
    """

    model: float
    graph: float
    calls: str

    def __str__(self) -> str:
        return (
            f"{1e3 * self.model:.3g} → {1e3 * self.graph:.3g} ms, {self.gain:.2f} times as fast as"
            f" the model ({self.calls})"
        )

    @property
    def gain(self) -> float:
        return self.model / self.graph


@dataclass(frozen=True)
class Calls:
    """Calls of a model and of its new graph.

    Attributes:
        example: of the capture.
        names: of entries of its inputs, with one row per candidate, of which the graph takes one
            per user.
        users, candidates: numbers of rows of the calls. Without names, they are the example's.
        counting: names of other entries that count the candidates: offsets of bags of one id.
        device: of the inputs.
    """

    example: Example
    names: tuple[str, ...]
    users: int
    candidates: int
    counting: frozenset[str]
    device: torch.device

    def times(self, graph: nn.Module, through: Through | None) -> tuple[Times, Times]:
        """Of the calls that decide: `through`, or on a GPU those of the device alone, as in CUDA
        graphs; else eager ones. Then of eager calls."""
        model = self.example.model
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            calls = self._calls(model, graph)
            eager = self._times(least_seconds(*calls, self.device), "eager calls")
            if through is not None:
                name = getattr(through, "__name__", type(through).__name__)
                own = self._calls(through(model), through(graph))
                return self._times(least_seconds(*own, self.device), f"through {name}"), eager
            if self.device.type != "cuda":
                return eager, eager
            busy = 2 * max(eager.model, eager.graph)
            of_model, of_graph = (device_seconds(x, self.device, busy) for x in calls)
            return self._times((of_model, of_graph), "of the GPU, as in CUDA graphs"), eager

    def _times(self, seconds: tuple[float, float], calls: str) -> Times:
        sizes = f", {self.candidates} candidates of {self.users} users" if self.names else ""
        return Times(*seconds, calls + sizes)

    def _calls(self, *both: Callable[..., Any]) -> tuple[Call, Call]:
        """Of the model, with the gathers of its inputs, and of the graph."""
        (model, graph), (own, args, kwargs) = both, self.example
        if not self.names:
            return partial(model, *args, **kwargs), partial(graph, *args, **kwargs)
        given, index = self._inputs()
        parameters = inspect.signature(own.forward).parameters
        positional = [x for x in given if parameters[x].kind is inspect.Parameter.POSITIONAL_ONLY]

        def call(function: Callable[..., Any], inputs: dict[str, Any], **others: Any) -> Any:
            return function(*map(inputs.pop, positional), **inputs, **others)

        leaves, spec = pytree.tree_flatten(given, is_leaf=is_keyed_jagged)
        shared = [x in self.names for x in named(given)]

        def gathered() -> Any:
            rows = (select(x, index) if own else x for x, own in zip(leaves, shared))
            return call(model, pytree.tree_unflatten(rows, spec))

        return gathered, lambda: call(graph, given.copy(), **{MAP_NAME: index})

    def _inputs(self) -> tuple[dict[str, Any], Tensor]:
        """Of the graph: rows of the example, repeated, and the user of each candidate."""
        given = self.example.inputs
        entries = named(given)
        rows = _rows(entries[self.names[0]])
        others = [x for x in entries if x not in self.names and _rows(entries[x]) == rows]
        users, candidates = (torch.arange(x, device="cpu") for x in (self.users, self.candidates))
        given = map_named(lambda x: select_rows(x, users % rows), given, self.names)
        given = map_named(lambda x: select_rows(x, candidates % rows), given, others)
        given = map_named(lambda x: candidates.to(x), given, self.counting)
        return given, (candidates % self.users).to(self.device)


def _rows(x: Any) -> int:
    """Of a tensor or a KeyedJaggedTensor; -1 of another input."""
    if is_keyed_jagged(x):
        return x.stride()
    return len(x) if isinstance(x, Tensor) and x.dim() else -1


def least_seconds(model: Call, graph: Call, device: torch.device) -> tuple[float, float]:
    """Of each, called in turn until the device is done: the least of at least ROUNDS, and of more
    for SECONDS. On a CPU with one thread, its own time: other programs do not count."""
    wait = partial(torch.get_device_module(device).synchronize, device)
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if one_thread else time.perf_counter

    def seconds(call: Call) -> float:
        start = clock()
        call()
        wait()
        return clock() - start

    for call in (model, graph) * WARM_UPS:
        seconds(call)
    rounds: list[tuple[float, float]] = []
    while len(rounds) < ROUNDS or sum(map(sum, rounds)) < SECONDS:
        rounds.append((seconds(model), seconds(graph)))
    of_model, of_graph = map(min, zip(*rounds))
    return of_model, of_graph


def device_seconds(call: Call, device: torch.device, busy: float) -> float:
    """That a GPU takes for a call which the host issues while it is busy: the least of ROUNDS. The
    host of a call that waits for the device issues the rest of it afterwards. busy: in seconds."""
    least = math.inf
    with torch.cuda.device(device), rehearsal():
        for _ in range(WARM_UPS):
            call()
        for _ in range(ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(int(CYCLES * busy))
            start.record()
            call()
            end.record()
            end.synchronize()
            least = min(least, 1e-3 * start.elapsed_time(end))
    return least
