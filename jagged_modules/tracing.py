"""What records calls, to repeat them with other values: torch.fx, torch.compile, CUDA graphs.

torch.fx records a layer, and a container's constructor, as one call: their code reads sizes, which
a tracer does not know. TorchRec's pipelines trace the model with torch.fx to find the inputs of its
sharded modules.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch.autograd import profiler
from torch.fx import Proxy

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type[Any])
M = TypeVar("M", bound=nn.Module)

_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)


@contextlib.contextmanager
def rehearsal() -> Generator[None, None, None]:
    """`is_recording` is True: the calls before a CUDA graph's capture take the path of the captured
    ones, and compile the same kernels."""
    token = _rehearsing.set(True)
    try:
        yield
    finally:
        _rehearsing.reset(token)


def is_recording(device: torch.device) -> bool:
    """Whether torch.compile or a CUDA graph records the calls on the device.

    What was computed from tensors before is not up to date when the record is repeated, and what is
    computed now has no values yet. So caches must neither be read nor written.
    """
    return (
        torch.compiler.is_compiling()
        or _rehearsing.get()
        or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


def is_symbolic(x: float) -> bool:
    """Whether torch.compile records x as an expression, for example of sizes, whose value changes
    from call to call.

    An operator's floats are constants of the graph, so such a number would compile a graph for each
    value.
    """
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental import symbolic_shapes  # imports sympy

    return not symbolic_shapes.has_static_value(x)


def as_constant(x: float) -> float:
    """A module's number as a constant of the graph. torch.compile takes floats of modules for
    inputs of the graph."""
    if not torch.compiler.is_compiling():
        return x
    from torch.fx.experimental import symbolic_shapes  # imports sympy

    return symbolic_shapes.guard_scalar(x)


def recorded_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A new node of the graph that calls `function` if an argument is a `torch.fx.Proxy`, else
    None."""
    proxy = _first_proxy(args, kwargs)
    return (
        None
        if proxy is None
        else proxy.tracer.create_proxy("call_function", function, args, kwargs)
    )


def one_call(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Decorator for the function of a public class's classmethod: a call with a `torch.fx.Proxy`
    becomes one node of the graph."""

    @functools.wraps(method)
    def call(cls: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        recorded = recorded_call(call_classmethod, (cls.__name__, method.__name__, *args), kwargs)
        return method(cls, *args, **kwargs) if recorded is None else recorded

    return call


def one_module(forward: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Decorator for a layer's forward: a call with a `torch.fx.Proxy` becomes a call of the layer,
    unless the layer is the root. In a profile the call is a range `jagged_modules.<class>`.
    """

    @functools.wraps(forward)
    def call(self: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        proxy = _first_proxy(args, kwargs)
        if proxy is None or proxy.tracer.root is self:
            # Compiled graphs have no ranges: torch names their kernels by module. Otherwise, a
            # range costs more than the two checks.
            # pyright: ignore[reportPrivateUsage] - torch.optim too
            if torch.compiler.is_compiling() or not profiler._is_profiler_enabled:
                return forward(self, *args, **kwargs)
            with profiler.record_function(f"jagged_modules.{type(self).__name__}"):
                return forward(self, *args, **kwargs)
        return proxy.tracer.create_proxy(
            "call_module", proxy.tracer.path_of_module(self), args, kwargs
        )

    return call


def call_classmethod(cls: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """A classmethod of a class of jagged_modules. A graph holds no classes, and a saved graph
    imports its functions from modules."""
    return operator.attrgetter(f"{cls}.{name}")(sys.modules["jagged_modules"])(*args, **kwargs)


def _first_proxy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first proxy among the arguments and their parts, None if there is none. A (values,
    offsets) pair has parts."""
    for x in (*args, *kwargs.values()):
        parts: Any = x if type(x) in (tuple, list) else (x,)
        for part in parts:
            if isinstance(part, Proxy):
                return part
    return None
