"""Settings of the calling thread or task: `debug_checks`, `backward_workspace` and `batch_invariant`.

An operator reads a setting in its forward and passes it on as a plain argument, to its backward too: on a GPU autograd runs backwards in
threads of its own, which see no setting of the caller's.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple

import torch


class _State(NamedTuple):
    """A setting in one thread or task.

    value: in force. entered: the open `with` blocks, outermost first, each with the value that its end restores.
    switched: the object whose construction set the value, and the value before it; None after another change.
    """

    value: Any
    entered: tuple[tuple[_Setting, Any], ...] = ()
    switched: tuple[_Setting, Any] | None = None


class _Setting:
    """A switch and a context manager, as torch.set_grad_enabled is one: constructing it sets the value, `with` restores what was before."""

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
        self._states.set(_State(value, state.entered, (self, state.value)))

    def __enter__(self):
        state = self._state()
        just_constructed = state.switched is not None and state.switched[0] is self
        before = state.switched[1] if just_constructed else state.value
        self._states.set(_State(self._value, (*state.entered, (self, before))))
        return self

    def __exit__(self, *exc) -> None:
        state = self._state()
        ours = [i for i, (setting, _) in enumerate(state.entered) if setting is self]
        if not ours:  # a generator that another thread or task closes: nothing was entered here
            return
        index = ours[-1]
        (_, before), inner = state.entered[index], list(state.entered[index + 1 :])
        if inner:  # a generator has left its block inside of a later one, whose end now restores what this one would have
            inner[0] = inner[0][0], before
        self._states.set(_State(state.value if inner else before, (*state.entered[:index], *inner)))

    @classmethod
    def current(cls) -> Any:
        """The value in force for the calling thread or task."""
        if torch.compiler.is_compiling():
            from .traced_settings import traced_value

            return traced_value(cls)
        return cls._state().value


def _flag(enabled) -> bool:
    from .checks import check_flag  # which asks for debug_checks

    check_flag("enabled", enabled)
    return enabled


class debug_checks(_Setting, default=False):
    """Check the values of device tensors too (offsets, indices); each check waits for the device.

    Constructing the object switches; a `with` block restores at its end what was in force before, as torch.set_grad_enabled does. The
    setting belongs to the calling thread or asyncio task: a new thread has the default, a new task a copy of what its creator has.
    A generator that yields inside of a `with` block leaves the setting in force for its caller. Graphs that are being traced
    (torch.compile, torch.export) have no such checks.

    Args:
        enabled: whether to check from now on.

    Example::

        jm.debug_checks(True)             # from here on
        with jm.debug_checks(True): ...   # or for a block

    Raises:
        TypeError: enabled that is no bool.
    """

    def __init__(self, enabled: bool) -> None:
        super().__init__(_flag(enabled))


class backward_workspace(_Setting, default=None):
    """Bytes that the backward of attention may take, above its gradients, while it runs; None, the default: as many as make it faster.

    On a GPU of compute capability 9.0, with head dims above 64 and no mask, it stores the gradients of the scores, two bytes for each pair
    of a query and a key, where it otherwise computes the scores twice: up to 2 GiB or the gradients' size, whichever is larger.

    The value in force in the forward applies to its backward. A switch and a context manager, of one thread or task, as `debug_checks`;
    torch.compile and torch.export take the value in force while they trace as a constant.

    Args:
        num_bytes: from now on.

    Raises:
        TypeError, ValueError: num_bytes that is no int, or negative.

    Example::

        jm.backward_workspace(0)                 # from here on: none
        with jm.backward_workspace(2**28): ...   # or for a block, in which the forward runs
    """

    def __init__(self, num_bytes: int | None) -> None:
        if num_bytes is not None:
            from .checks import check_size  # which asks for debug_checks

            check_size("num_bytes", num_bytes, at_least=0)
        super().__init__(num_bytes)


class batch_invariant(_Setting, default=False):
    """Results that do not depend on what else is in the batch, bitwise: kernels, tiles and splits are fixed irrespective of it.

    By default the fastest way is chosen by sizes of the batch, such as the mean segment length, and a sum's terms may then be added in
    another order. In this mode a segment alone gives what it gives in any batch; a candidate of `target_attention` or `linear_compress`,
    alone or among others of its user, too. That holds for results and for gradients of rows, in all operators and in this package's
    layers, for the same device, software, dtype, number of threads and layout of tensors (strides, starts at 16-byte boundaries).

    Not covered, as they are sums over the batch or belong to all of it: gradients of weights and of other operands that segments share,
    and of a tensor output_scale; dk and dv where a user's candidates are others; dropout; `HSTUConfig.scaling_seqlen` None, the longest
    segment's length. Nor is what is not computed here: modules around the layers, code that torch.compile generates, `implementation`
    "reference", "decomposed" and "padded", which raise an error in this mode.

    It costs time. On a GPU, short segments take the kernels for long ones and long ones the smaller blocks, nothing is stored for the
    backward's speed (`backward_workspace` has no effect), and layers' projections are products of this package. On the CPU, segments are
    computed one by one, and query rows and rows of projections too.

    The value in force in the forward applies to its backward. A switch and a context manager, of one thread or task, as `debug_checks`;
    torch.compile and torch.export take the value in force while they trace as a constant: a change does not trace anew. A forward that
    torch.utils.checkpoint repeats in a thread of autograd's has the defaults, unless the function that it repeats sets its own.

    Args:
        enabled: whether results are batch-invariant from now on.

    Example::

        with jm.batch_invariant(True):
            scores = model(batch)        # each user's bitwise those of model(user)

    Raises:
        TypeError: enabled that is no bool.
    """

    def __init__(self, enabled: bool) -> None:
        super().__init__(_flag(enabled))


def is_batch_invariant(implementation: str = "auto") -> bool:
    """Whether `batch_invariant` is in force; ValueError if it is, and the implementation has no such mode."""
    enabled = batch_invariant.current()
    if enabled and implementation in ("reference", "decomposed", "padded"):
        raise ValueError(f"implementation must be one that jm.batch_invariant(True) covers, such as 'auto', got {implementation!r}")
    return enabled
