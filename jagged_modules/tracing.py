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
    """Whether torch.compile or a CUDA graph records the calls on the device. What was computed from
    tensors before is not up to date when the record is repeated, and what is computed now has no
    values yet. So caches must neither be read nor written."""
    return (
        torch.compiler.is_compiling()
        or _rehearsing.get()
        or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


def is_exporting() -> bool:
    """`torch.compiler.is_exporting()`, which torch.compile of torch 2.11 always traces as True."""
    return torch.compiler._is_exporting_flag  # pyright: ignore[reportPrivateUsage]


def is_symbolic(x: float) -> bool:
    """Whether torch.compile records x as an expression, for example of sizes, whose value changes
    from call to call. An operator's floats are constants of the graph, so such a number would
    compile a graph for each value."""
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental import symbolic_shapes  # imports sympy

    return not symbolic_shapes.has_static_value(x)


def may_hold(condition: bool) -> bool:
    """Whether a condition on sizes holds; True where torch.compile does not know. It knows no size
    that is read from a tensor, as the rows of a feature of a KeyedJaggedTensor."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental import symbolic_shapes  # imports sympy

    return symbolic_shapes.guard_or_true(condition)


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
    """A node of the graph that calls `function` if an argument is a `torch.fx.Proxy`, else None."""
    proxy = _first_proxy(args, kwargs)
    if proxy is None:
        return None
    return proxy.tracer.create_proxy("call_function", function, args, kwargs)


def one_call(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Decorator for the function of a public class's classmethod: a call with a `torch.fx.Proxy`
    becomes one node of the graph."""

    @functools.wraps(method)
    def call(cls: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if _first_proxy(args, kwargs) is None:
            return method(cls, *args, **kwargs)
        return recorded_call(call_classmethod, (cls.__name__, method.__name__, *args), kwargs)

    return call


def one_module(
    forward: Callable[Concatenate[M, P], R],
    around: Callable[[Callable[..., R]], Callable[..., R]] | None = None,
) -> Callable[Concatenate[M, P], R]:
    """Decorator for a layer's forward: a call with a `torch.fx.Proxy` becomes a call of the layer,
    unless the layer is the root. In a profile the call is a range `jagged_modules.<class>`. The
    call may name a method to run instead of forward: see `through_call`. around: what the call runs
    in place of either."""

    @functools.wraps(forward)
    def call(self: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        proxy = _first_proxy(args, kwargs)
        if proxy is not None and proxy.tracer.root is not self:
            path = proxy.tracer.path_of_module(self)
            return proxy.tracer.create_proxy("call_module", path, args, kwargs)
        name: Any = kwargs.pop(_METHOD, None)
        run: Callable[..., R] = forward if name is None else _METHODS[name]
        run = run if around is None else around(run)
        # Compiled graphs have no ranges: torch names their kernels by module. Otherwise, a range
        # costs more than the two checks. torch.optim reads the private name too.
        is_profiling = profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
        if torch.compiler.is_compiling() or not is_profiling:
            return run(self, *args, **kwargs)
        with profiler.record_function(f"jagged_modules.{type(self).__name__}"):
            return run(self, *args, **kwargs)

    return call


_METHOD = "_method"
_METHODS: dict[str, Callable[..., Any]] = {}


def through_call(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Decorator for a layer's other methods that read parameters: the method calls the layer, whose
    `one_module` runs it.

    What changes a module's behaviour does so in its call: `fully_shard` gathers the parameters in
    hooks of the call, and `Module.compile`, torch.fx and users' hooks know nothing else. The call
    names the method by a string, because a graph of torch.fx holds no functions.
    """
    name = method.__qualname__  # not looked up in the class: a subclass may override the method
    _METHODS[name] = method

    @functools.wraps(method)
    def public(self: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self(*args, **kwargs, **{_METHOD: name})

    return public


def call_through(method: Any) -> dict[str, str] | None:
    """The keyword argument with which a call of the layer runs this method of it. None unless the
    method is decorated with `through_call`."""
    name = getattr(method, "__qualname__", None)
    return {_METHOD: name} if name in _METHODS else None


def call_classmethod(cls: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """A classmethod of a class of jagged_modules. A graph holds no classes, and a saved graph
    imports its functions from modules."""
    return operator.attrgetter(f"{cls}.{name}")(sys.modules["jagged_modules"])(*args, **kwargs)


def _first_proxy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first proxy among the arguments and the parts of (values, offsets) pairs, or None."""
    for x in (*args, *kwargs.values()):
        parts: Any = x if type(x) in (tuple, list) else (x,)
        for part in parts:
            if isinstance(part, Proxy):
                return part
    return None
