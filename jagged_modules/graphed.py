"""graphed: a module's forward and backward as CUDA graphs, one pair for each bucket of batch sizes.

A graph has fixed sizes, so a batch is copied into buffers of the bucket's capacities, and the rest
of the buffers is a valid batch too: rows of zeros, in segments behind the real ones. Layers then
write every row. Gradients of the padded results are zero, and so is all that the padding adds to
the gradients of weights. docs/decisions/graphed.md has the reasons.
"""

from __future__ import annotations

import functools
import inspect
import operator
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage] - the base of all batch norms has no public name

from .captured_step import RUNNERS, Call, Step
from .padded_arguments import Arguments, Buckets, capacities_of, check_values
from .scalars import check_kind, check_size
from .settings import backward_workspace, batch_invariant, debug_checks
from .submodules import Members
from .tracing import call_through, one_module
from .validation import transforms_are_active

M = TypeVar("M", bound=nn.Module)
_DTYPE, _IS_TRAINED, _IS_TRAINING = map(operator.attrgetter, ("dtype", "requires_grad", "training"))
REPLAYED = "score", "append"  # of a layer with these methods; `cache` may wait for the device


def graphed(
    module: M,
    *,
    steps_per_octave: int = 8,
    capacities: Sequence[int] | None = None,
    rows: Mapping[str, Sequence[int]] | None = None,
    max_graphs: int = 16,
    offsets: Mapping[str, str] | None = None,
) -> M:
    """The module with its forward and backward replayed from CUDA graphs: the host issues two
    graphs and a few copies, not all kernels.

    Sizes (rows, segments, candidates) are rounded up to capacities, and the arguments are copied
    into buffers of these sizes. The first batch of a bucket captures the graphs; all later ones
    replay them, whatever their sizes and lengths, and read nothing from the device. Results and
    gradients are new tensors of the real sizes. They have the bits of the module's for the padded
    batch, and equal those for the real one up to rounding; gradients accumulate as usual.

    Without gradients, only the forward is captured. A layer's `score` and `append` are replayed
    too, and `PagedHistoryCache(graphed(layer), ...)` appends by replays. Histories in pages are
    read and written where they are: a replay sees what was appended since the last one. Each cache
    has graphs of its own, which keep its pages allocated.

    Arguments on the host are padded there, and all go to the device in one copy from page-locked
    memory. If all of them are there, to the device of the module's parameters.

    `captures` of the result counts the batches that captured graphs.

    The result shares the module's parameters, buffers, submodules and state_dict, under the same
    names, and has its other attributes for reading. Parameters may change in place (optimizers,
    load_state_dict) between calls. New parameters, dtypes, train() or eval(), requires_grad,
    autocast and this package's settings are noticed and lead to other graphs. Copies and pickles
    have no graphs.

    The module must compute each row or segment by itself, as this package's layers do. A loss or a
    mean over the batch belongs outside. Give a `JaggedDINAttention` with a mask, which counts a
    user's candidates, a `CandidateIndex`: the padding of a plain map is candidates of user 0.

    Runs the module without a graph: on other devices than CUDA, under torch.compile, torch.fx,
    torch.func and `debug_checks`, inside another capture, for sizes above `capacities`, and in a
    call between a forward and its backward, whose results the graphs still hold.

    Args:
        module: arguments and results may be tensors, `Jagged`s, (values, offsets) pairs,
            `CandidateIndex`es, `HistoryCache`s and lists, tuples and dicts of them; arguments also
            None, numbers and strings, each value of which takes graphs of its own, as each
            `max_seqlen` does. The first dimension of an argument's tensors changes with the batch,
            and the padding is zeros; other inputs must be parameters or buffers. So must the first
            dimension of a result's tensors be one of these sizes. A Jagged in the result is a
            Jagged, whatever it was wrapped from. Hooks run when graphs are captured, those on the
            result of this function always.
        steps_per_octave: capacities between two powers of two. With 8, rows are padded by at most
            an eighth, or to the next multiple of 8.
        capacities: the capacities instead, in ascending order, for sizes of any kind.
        rows: names of arguments, each with the capacities of its rows, in ascending order. Other
            sizes that happen to be equal then lead to no graph of their own, nor do lengths of
            segments: there are as many graphs as combinations of capacities. The padding is in at
            least one segment; more `capacities` of segments make it shorter. Of a `HistoryCache` in
            pages they are its cached rows, and all rows after an append, whose rows are those of
            the argument events. Names that a call does not have are ignored. Rows that a
            `CandidateIndex` counts cannot be named.
        max_graphs: how many buckets are kept; the least recently used ones are dropped. All share
            one memory pool, as only one runs at a time. Each keeps the buffers of its arguments,
            results and gradients.
        offsets: names of arguments of the module's forward that are offsets, each with the name of
            the argument whose rows they count, for example {"offsets": "values"}. Not needed for
            Jagged and pairs. For a sorted CandidateIndex whose lengths the host does not know, the
            name of the candidates' argument; not needed if that is the only plain floating-point
            argument besides the users'.

    Raises:
        TypeError, ValueError: an argument has another type or is out of range; the module has a
            batch norm, which mixes rows. In a call: an argument of another kind; a result of
                another size; a plain argument that looks like offsets.
        RuntimeError: a second backward of the same call.

    Not re-entrant: call it from one thread and one stream at a time.

    Example::

        device = "cuda" if torch.cuda.is_available() else "cpu"
        attention = jm.graphed(jm.JaggedTargetAttention(64, num_heads=4, device=device))
        for lengths in ([3, 0, 5], [1, 7, 2]):  # batches of other sizes, as a loader yields them
            offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
            history = torch.randn(sum(lengths), 64, device=device), offsets
            attention(torch.randn(3, 2, 64, device=device), history).square().mean().backward()
    """
    check_kind("module", module, nn.Module, "a torch.nn.Module")
    for child in module.modules():
        if isinstance(child, _BatchNorm):
            raise ValueError(
                f"module must compute each row by itself, but it has a {type(child).__name__}"
            )
    check_size("steps_per_octave", steps_per_octave)
    check_size("max_graphs", max_graphs)
    if capacities is not None:
        _check_capacities("capacities", capacities)
    check_kind("rows", rows, (Mapping, type(None)), "a mapping of names to capacities, or None")
    for name, sizes in (rows or {}).items():
        _check_capacities(f"rows[{name!r}]", sizes)
    check_kind("offsets", offsets, (Mapping, type(None)), "a mapping of names to names, or None")
    names = [*inspect.signature(module.forward).parameters]
    for name in (*(offsets or {}), *(offsets or {}).values()):
        if name not in names:
            raise ValueError(
                f"offsets must name arguments of the module's forward, {names}, got {name!r}"
            )
    buckets = Buckets(
        steps_per_octave,
        None if capacities is None else tuple(capacities),
        {name: tuple(sizes) for name, sizes in (rows or {}).items()},
    )
    # has the calls and attributes of the module
    return cast(M, _Graphed(module, buckets, max_graphs, names, dict(offsets or {})))


def _check_capacities(name: str, capacities: Any) -> None:
    check_kind(name, capacities, (list, tuple), "a sequence of ints")
    for i, size in enumerate(capacities):
        check_size(f"{name}[{i}]", size)
    if not capacities or any(x >= y for x, y in zip(capacities, capacities[1:])):
        raise ValueError(
            f"{name} must be one or more sizes in ascending order, got {list(capacities)}"
        )


class _Graphed(nn.Module):
    """The result of `graphed`. It shares the module's parameters, buffers and submodules, so names
    and state_dict are the module's."""

    takes_host_tables = True  # see `CachingLayer`
    _last: weakref.ref[Call] | None
    _members: Members | None

    def __init__(
        self,
        module: nn.Module,
        buckets: Buckets,
        max_graphs: int,
        names: list[str],
        offsets: dict[str, str],
    ) -> None:
        super().__init__()
        vars(self)["_inner"] = module  # not a submodule, which would add its name to all others
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[shared] = getattr(module, shared)
        self.training = module.training
        self._buckets, self._max_graphs = buckets, max_graphs
        self._names, self._offsets = names, offsets
        self._forget()

    def _forget(self) -> None:
        vars(self).update(self._empty())

    @staticmethod
    def _empty() -> dict[str, Any]:
        """The state that copies do not get. _last: a weak reference to the last call that has a
        backward."""
        return dict(
            _steps=OrderedDict[Any, Step](),
            _last=None,
            captures=0,
            _warned=set[str](),
            _members=None,
        )

    @one_module
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. Arguments, results and errors: see `graphed`."""
        return self._replay(self._names, *args, **kwargs)

    def _replay(self, names: list[str], /, *args: Any, **kwargs: Any) -> Any:
        """A call of the module, whose positional arguments have these names."""
        inner = self._inner
        if torch.compiler.is_compiling() or transforms_are_active() or debug_checks.current():
            return inner(*args, **kwargs)
        if self._members is None:
            self._members = Members(inner)
        members = self._members.refresh()
        parameters = members.parameters
        if Tensor in map(type, parameters):  # torch.func.functional_call replaces them
            return inner(*args, **kwargs)
        arguments = Arguments(args, kwargs, names, self._offsets, self._buckets.rows)
        device = arguments.device
        if device is None or device.type == "cpu":
            own = parameters or members.buffers
            device = own[0].device if own else device
        if device is None or device.type not in RUNNERS or not arguments.leaves:
            return inner(*args, **kwargs)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return inner(*args, **kwargs)
        last = None if self._last is None else self._last()
        if last is not None and not last.differentiated:
            self._warn(
                "a call before the backward of the last one runs without a graph, as does every"
                " call while those results are kept"
            )
            return inner(*args, **kwargs)
        capacities = capacities_of(arguments.leaves, self._buckets)
        if capacities is None:
            sizes = sorted(x for x in arguments.sizes if x >= 0)
            self._warn(
                f"sizes above capacities run without a graph: {sizes} for"
                f" {list(self._buckets.capacities or ())}"
            )
            return inner(*args, **kwargs)

        arguments.capacities = capacities
        trained = torch.is_grad_enabled() and (
            any(map(_IS_TRAINED, parameters))
            or any(leaf.tensor.requires_grad for leaf in arguments.leaves)
        )
        key = self._key(arguments, device, trained, _state(members))
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._capture(arguments, device, trained)
        else:
            self._steps.move_to_end(key)
            step.pad(arguments)
        call = Call() if trained else None
        if call is not None:
            self._last = weakref.ref(call)
        return step.results(arguments, call)

    def _key(self, arguments: Arguments, device: torch.device, trained: bool, state: Any) -> Any:
        wanted = trained and tuple(leaf.tensor.requires_grad for leaf in arguments.leaves)
        leaves = tuple(arguments.forms), tuple(arguments.capacities), wanted
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        settings = (
            batch_invariant.current(),
            backward_workspace.current(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )
        return arguments.spec, leaves, device, trained, state, autocast, settings

    def _capture(self, arguments: Arguments, device: torch.device, trained: bool) -> Step:
        for leaf in arguments.leaves:
            check_values(leaf, arguments.sizes)
        self.captures: int = self.captures + 1
        if self.captures > 4 * self._max_graphs:
            self._warn(
                f"most batches may need new graphs: {self.captures} captured, {self._max_graphs}"
                " kept"
            )
        if len(self._steps) >= self._max_graphs:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the graphs to be dropped may still run
            while len(self._steps) >= self._max_graphs:
                self._steps.popitem(last=False)
        # one that no graph uses any more cannot be used again
        pool = next(iter(self._steps.values())).pool if self._steps else None
        with torch.inference_mode(False):
            return Step(self._inner, arguments, device, trained, pool)

    def _warn(self, message: str) -> None:
        if message.partition(":")[0] not in self._warned:
            self._warned.add(message.partition(":")[0])
            warnings.warn(f"graphed: {message}", stacklevel=8)  # the caller of the module

    # -- as the module -----------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_inner" not in vars(self):
            raise AttributeError(name)
        found = getattr(self._inner, name)
        if name not in REPLAYED:
            return found
        known = call_through(found)
        if known is None:
            return found
        names = [*inspect.signature(found).parameters]
        return functools.partial(self._replay, names, **known)

    def train(self, mode: bool = True) -> _Graphed:
        self._inner.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._inner._apply(fn, recurse)
        self._forget()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._inner._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | self._empty()

    def _get_name(self) -> str:
        return f"graphed({self._inner._get_name()})"

    def extra_repr(self) -> str:
        return self._inner.extra_repr()


def _state(members: Members) -> tuple[Any, ...]:
    """What the graphs of a module depend on: its modes, and where its parameters and buffers are.
    Runs in each call."""
    tensors = members.parameters + members.buffers
    return (
        members.ids,
        *map(_IS_TRAINING, members.modules),
        *map(Tensor.data_ptr, tensors),
        *map(_DTYPE, tensors),
        *map(_IS_TRAINED, members.parameters),
        *[x.shape for x in members.buffers],  # of a table that has grown
    )
