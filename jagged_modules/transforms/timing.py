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
        """How many times as fast as the model the graph is."""
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
        model, args, kwargs = self.example
        if self.names:
            model, (args, kwargs) = LeftIn(model, self.names), self._inputs()
        both = model, graph
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            calls = [partial(x, *args, **kwargs) for x in both]
            eager = self._times(least_seconds(calls, self.device), "eager calls")
            if through is not None:
                calls = [partial(through(x), *args, **kwargs) for x in both]
                name = getattr(through, "__name__", type(through).__name__)
                return self._times(least_seconds(calls, self.device), f"through {name}"), eager
            if self.device.type != "cuda":
                return eager, eager
            busy = 2 * max(eager.model, eager.graph)
            of_both = [device_seconds(x, self.device, busy) for x in calls]
            return self._times(of_both, "of the GPU, as in CUDA graphs"), eager

    def _times(self, seconds: Sequence[float], calls: str) -> Times:
        of_model, of_graph = seconds
        sizes = f", {self.candidates} candidates of {self.users} users" if self.names else ""
        return Times(of_model, of_graph, calls + sizes)

    def _inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Of the graph, by position and by name: rows of the example, repeated."""
        given = self.example.inputs
        entries = named(given)
        rows = _rows(entries[self.names[0]])
        others = [x for x in entries if x not in self.names and _rows(entries[x]) == rows]
        users, candidates = (torch.arange(x, device="cpu") for x in (self.users, self.candidates))
        given = map_named(lambda x: select_rows(x, users % rows), given, self.names)
        given = map_named(lambda x: select_rows(x, candidates % rows), given, others)
        given = map_named(lambda x: candidates.to(x), given, self.counting)
        given[MAP_NAME] = (candidates % self.users).to(self.device)
        positional = _positional(self.example.model)
        return tuple(given.pop(x) for x in positional if x in given), given


class LeftIn(nn.Module):
    """The model, with the inputs of its new graph: it gathers the rows of users. names: of entries
    with one row per user."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names, self.positional = model, names, _positional(model)
        self.eval()

    def forward(self, *args: Any, candidate_to_user: Tensor, **kwargs: Any) -> Any:
        given = dict(zip(self.positional, args)) | kwargs
        given = map_named(lambda x: select(x, candidate_to_user), given, self.names)
        args = tuple(given.pop(x) for x in self.positional[: len(args)])
        return self.model(*args, **given)


def _positional(model: nn.Module) -> list[str]:
    """Names of the inputs that forward takes by position alone."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [x.name for x in parameters if x.kind is x.POSITIONAL_ONLY]


def _rows(x: Any) -> int:
    """Of a tensor or a KeyedJaggedTensor; -1 of another input."""
    if is_keyed_jagged(x):
        return x.stride()
    return len(x) if isinstance(x, Tensor) and x.dim() else -1


def least_seconds(calls: Sequence[Call], device: torch.device) -> list[float]:
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

    for call in [*calls] * WARM_UPS:
        seconds(call)
    rounds: list[list[float]] = []
    while len(rounds) < ROUNDS or sum(map(sum, rounds)) < SECONDS:
        rounds.append(list(map(seconds, calls)))
    return list(map(min, zip(*rounds)))


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
