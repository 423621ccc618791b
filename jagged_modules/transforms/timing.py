"""How long calls of a model and of its fused graph take. Both are called in turn, with rows of the
example."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Sequence
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

WARM_UPS = 2  # the first call compiles kernels, the second has its memory from a cache
# rounds of one call of each, and the time that more of them may take, in seconds
ROUNDS, SECONDS = 3, 0.5
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
        device: of the inputs.
    """

    example: Example
    names: tuple[str, ...]
    users: int
    candidates: int
    device: torch.device

    def times(self, graph: nn.Module, through: Through | None) -> tuple[Times, Times]:
        """Of the calls that decide: `through`, or on a GPU those of the device alone, as in CUDA
        graphs; else eager ones. Then of eager calls."""
        model, sizes = self.example.model, ""
        if self.names:
            sizes = f" with {self.candidates} candidates of {self.users} users"
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            calls = self._calls(model, graph)
            own = least_seconds(calls, self.device)
            eager = Times(*own, f"eager calls{sizes}")
            if through is not None:
                name = getattr(through, "__name__", type(through).__name__)
                own = least_seconds(self._calls(through(model), through(graph)), self.device)
                return Times(*own, f"calls through {name}{sizes}"), eager
            if self.device.type != "cuda":
                return eager, eager
            busy = 2 * (eager.model + eager.graph)
            own = [device_seconds(x, self.device, busy) for x in calls]
            return Times(*own, f"the device's time, as in CUDA graphs,{sizes}"), eager

    def _calls(self, *both: Callable[..., Any]) -> list[Callable[[], Any]]:
        """Of the model, with the gathers of its inputs, and of the graph."""
        (model, graph), (own, args, kwargs) = both, self.example
        if not self.names:
            return [partial(model, *args, **kwargs), partial(graph, *args, **kwargs)]
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

        return [gathered, lambda: call(graph, given.copy(), **{MAP_NAME: index})]

    def _inputs(self) -> tuple[dict[str, Any], Tensor]:
        """Of the graph: rows of the example, repeated, and the user of each candidate."""
        given = self.example.inputs
        entries = named(given)
        rows = _rows(entries[self.names[0]])
        others = [x for x in entries if x not in self.names and _rows(entries[x]) == rows]
        users, candidates = torch.arange(self.users), torch.arange(self.candidates)
        given = map_named(lambda x: _repeated(x, users % rows), given, self.names)
        given = map_named(lambda x: _repeated(x, candidates % rows), given, others)
        return given, (candidates % self.users).to(self.device)


def _rows(x: Any) -> int:
    """Of a tensor or a KeyedJaggedTensor; -1 of another input."""
    if is_keyed_jagged(x):
        return x.stride()
    return len(x) if isinstance(x, Tensor) and x.dim() else -1


def _repeated(x: Any, rows: Tensor) -> Any:
    """These rows of an input. A vector that counts its rows, as offsets of bags of one id, counts
    on."""
    if isinstance(x, Tensor) and torch.equal(x, torch.arange(len(x)).to(x)):
        return torch.arange(len(rows)).to(x)
    return select_rows(x, rows)


def least_seconds(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """Of each, called in turn until the device is done: the least of at least ROUNDS, and of more
    for SECONDS. On a CPU with one thread, its own time: other programs do not count."""
    wait = torch.get_device_module(device).synchronize
    own = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if own else time.perf_counter
    for call in calls * WARM_UPS:
        call()
    wait()
    least, start, rounds = [math.inf] * len(calls), clock(), 0
    while rounds < ROUNDS or clock() - start < SECONDS:
        for position, call in enumerate(calls):
            before = clock()
            call()
            wait()
            least[position] = min(least[position], clock() - before)
        rounds += 1
    return least


def device_seconds(call: Callable[[], Any], device: torch.device, busy: float) -> float:
    """That a GPU takes for a call which was issued while it was busy, the least of ROUNDS. A call
    that waits for the device takes as long as an eager one. busy: in seconds."""
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
