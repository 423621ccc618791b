"""Settings of the calling thread or task: `debug_checks`, `backward_workspace` and
`batch_invariant`; and `precompiled`, for the process.

An operator reads a setting in its forward and passes it to its backward as a plain argument: on a
GPU autograd runs backwards in its own threads, which do not see the caller's settings.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar

import torch

from .scalars import check_flag, check_size

P = ParamSpec("P")
R = TypeVar("R")


class _Change(NamedTuple):
    """A change of a setting: the object that made it, and the value before it."""

    setting: _Setting
    before: Any


class _State(NamedTuple):
    """A setting in one thread or task.

    Attributes:
        value: the current value.
        entered: the open `with` blocks, outermost first, each with the value that it restores at
            its end.
        switched: the change if the last one was the construction of a setting object, else None.
    """

    value: Any
    entered: tuple[_Change, ...] = ()
    switched: _Change | None = None


class _Setting:
    """A switch, context manager and decorator like torch.set_grad_enabled: construction sets the
    value, `with` restores the last one."""

    _initial: ClassVar[_State]
    _states: ClassVar[ContextVar[_State]]

    def __init_subclass__(cls, default: Any) -> None:
        cls._initial, cls._states = _State(default), ContextVar(cls.__name__)

    @classmethod
    def _state(cls) -> _State:
        return cls._states.get(cls._initial)

    def __init__(self, value: Any) -> None:
        self._value = value
        state = self._state()
        self._states.set(_State(value, state.entered, _Change(self, state.value)))

    def __enter__(self) -> _Setting:
        state = self._state()
        last = state.switched
        before = last.before if last is not None and last.setting is self else state.value
        self._states.set(_State(self._value, (*state.entered, _Change(self, before))))
        return self

    def __exit__(self, *exc: object) -> None:
        state = self._state()
        ours = [i for i, change in enumerate(state.entered) if change.setting is self]
        # a generator entered the block in another thread or task, and is closed in this one
        if not ours:
            return
        index = ours[-1]
        before, inner = state.entered[index].before, list(state.entered[index + 1 :])
        # a generator left its block while a later block is open: the later block restores this
        # block's value
        if inner:
            inner[0] = inner[0]._replace(before=before)
        self._states.set(_State(state.value if inner else before, (*state.entered[:index], *inner)))

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """As a decorator: the value applies while the function runs. Constructing the object then
        has no other effect."""
        state = self._state()
        if state.switched is not None and state.switched.setting is self:
            self._states.set(_State(state.switched.before, state.entered))

        @functools.wraps(function)
        def with_setting(*args: P.args, **kwargs: P.kwargs) -> R:
            with type(self)(self._value):
                return function(*args, **kwargs)

        return with_setting

    @classmethod
    def current(cls) -> Any:
        """The value for the calling thread or task."""
        if torch.compiler.is_dynamo_compiling():
            from .traced_settings import traced_value

            return traced_value(cls)
        return cls._states.get(cls._initial).value


class _Flag(_Setting, default=False):
    def __init__(self, enabled: bool) -> None:
        check_flag("enabled", enabled)
        super().__init__(enabled)


class debug_checks(_Flag, default=False):
    """Check the values of device tensors too (offsets, indices). Each check synchronises with the
    device.

    Constructing the object sets the value; a `with` block restores the previous value at its end,
    as torch.set_grad_enabled does. The setting belongs to the calling thread or asyncio task: a new
    thread starts with the default, a new task with a copy of its creator's. A generator that yields
    inside a `with` block leaves the setting on for its caller. Graphs that are traced
    (torch.compile, torch.export) contain no such checks.

    Args:
        enabled: True: check values from now on.

    Example::

        jm.debug_checks(True)  # from here on
        with jm.debug_checks(True): ...  # or for a block

    Raises:
        TypeError: enabled is not a bool.
    """


class backward_workspace(_Setting, default=None):
    """Limit of the memory, in bytes, that the backward of attention allocates beside its gradients.
    The default, None, is no limit.

    On a GPU of compute capability 9.0, the backward of long segments, without a mask or with the
    causal one, adds up dq in fp32 (four bytes per element of q) instead of computing the scores
    twice. This takes at most 2 GiB or the gradients' size, whichever is larger.

    The value at the time of the forward applies to its backward. A switch and a context manager for
    one thread or task, like `debug_checks`. torch.compile and torch.export trace the value as a
    constant.

    Args:
        num_bytes: the limit from now on, in bytes; None: no limit.

    Raises:
        TypeError: num_bytes is neither None nor an int.
        ValueError: num_bytes is negative.

    Example::

        jm.backward_workspace(0)  # from here on: none
        with jm.backward_workspace(2**28): ...  # or for a block, in which the forward runs
    """

    def __init__(self, num_bytes: int | None) -> None:
        if num_bytes is not None:
            check_size("num_bytes", num_bytes, at_least=0)
        super().__init__(num_bytes)


class batch_invariant(_Flag, default=False):
    """Make results bitwise independent of the rest of the batch: kernels, tiles and splits no
    longer depend on batch sizes.

    By default the fastest implementation is chosen by sizes of the batch, such as the mean segment
    length, which may change the order in which a sum is computed. In this mode a segment has the
    same results alone and in any batch. So has a candidate of `target_attention` or
    `linear_compress`, alone or beside other candidates of its user. This holds for results and for
    gradients of rows, in all operators and in this package's layers, for the same device, software,
    dtype, number of threads and tensor layout (strides, alignment to 16 bytes).

    Not covered, because they depend on the whole batch: gradients of weights, of other operands
    that segments share, and of a tensor output_scale; dk and dv of a user whose set of candidates
    changes; dropout, except of attention weights with a `dropout_seed` and keys that segments do
    not share; `HSTUConfig.scaling_seqlen` None, the length of the longest segment. Not covered
    either, because this package does not compute it: modules around the layers, and code that
    torch.compile generates. `implementation` "reference" raises an error in this mode.

    It costs time. On a GPU, short segments use the kernels for long ones, long segments use smaller
    blocks, the backward stores nothing to save time (`backward_workspace` has no effect), and
    layers' projections use this package's matrix multiplication. On the CPU, segments, query rows
    and rows of projections are computed one by one.

    The value at the time of the forward applies to its backward. A switch and a context manager for
    one thread or task, like `debug_checks`. torch.compile and torch.export trace the value as a
    constant: a change does not cause a new trace. When torch.utils.checkpoint repeats a forward in
    an autograd thread, the forward has the defaults unless the repeated function sets them.

    Args:
        enabled: True: results are batch-invariant from now on.

    Example::

        attention = jm.JaggedGDPA(32, num_heads=2, activation="softmax")
        x = torch.randn(5, 32)
        with jm.batch_invariant(True):
            batch, _ = attention((x, torch.tensor([0, 2, 5])))
            user, _ = attention((x[:2], torch.tensor([0, 2])))  # bitwise equal to batch[:2]

    Raises:
        TypeError: enabled is not a bool.
    """


def is_batch_invariant(implementation: str = "auto") -> bool:
    """Whether `batch_invariant` is on in this thread or task. ValueError if it is, and the
    implementation does not support it."""
    enabled = batch_invariant.current()
    if enabled and implementation == "reference":
        raise ValueError(
            "implementation must be one that jm.batch_invariant(True) covers, such as 'auto', got"
            f" {implementation!r}"
        )
    return enabled


def precompiled(path: str | os.PathLike[str]) -> None:
    """Take compiled kernels from `path` before Triton compiles any or looks into its own cache.
    The environment variable JAGGED_KERNELS does the same when this package is imported. What
    launches the kernels is imported too, for which the first call would wait.

    Kernels of other versions of Triton, Python or this package are not used: a RuntimeWarning says
    which versions differ. So does one for each kernel that the layers launch and that is not there;
    Triton compiles it.

    Args:
        path: a folder or zip, the output of ``python -m jagged_modules.precompile``. Nothing is
            written to it. A zip is unpacked into the folder for temporary files, from which
            programs must be allowed to load libraries.

    Raises:
        FileNotFoundError: there is no such output.
        ImportError: Triton is not installed.
    """
    from jagged_kernels.common.precompiled import import_modules, load

    load(path)
    import_modules()
