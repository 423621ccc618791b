"""Launches of compiled kernels in less host time than `JITFunction.run` takes.

Triton binds the arguments of every launch by name, describes the layout of each TMA descriptor as
text, and compares the globals that a kernel reads with their values when it was compiled. Here a
dictionary leads from what a kernel was compiled for to the compiled kernel. Triton itself runs the
first launch of each entry, and every launch that a hook wants to see. docs/decisions/host-time.md
has figures.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from operator import attrgetter, itemgetter

import torch
import triton
from triton import knobs
from triton._C.libtriton import native_specialize_impl as specialisation
from triton.compiler import CompiledKernel, make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from . import ops
from .descriptors import Described

_NOT_YET = None, None
# by the same thread again if a hook of Triton's loads another kernel
_loading = threading.RLock()


class LoadedOnce(CompiledKernel):
    """A kernel that one thread loads while the others wait.

    Triton 3.6 imports a C module for each type of launcher, all of one name. Python returns the
    same module for those that it has imported before, and fills it again: a launcher may find the
    function of another thread's in it. And Triton returns a launcher while another thread still
    loads the kernel's function.
    """

    def _init_handles(self) -> None:
        with _loading:
            super()._init_handles()

    @property
    def run(self):
        self._init_handles()
        return self._run


class CachedLaunches(JITFunction):
    """A JITFunction that finds compiled kernels by `_cache_key`. Other arguments than
    `tl.constexpr` must be given by position. Tuples of them are looked into, but not tuples in
    tuples, and descriptors in tuples are not known to the launcher."""

    def cache_launches(self) -> None:
        """What a constructor would do: a kernel gets this class when it is a JITFunction already.

        Raises:
            ValueError: a `tl.constexpr` parameter has others behind it.
        """
        params = [p for p in self.params if not p.is_constexpr]
        if any(p.is_constexpr for p in self.params[: len(params)]):
            raise ValueError(f"the constants of {self.__name__} must be its last parameters")
        self._rules = [
            (p.is_const, not p.do_not_specialize, not p.do_not_specialize_on_alignment)
            for p in params
        ]
        # a compiled kernel ignores their values
        self._constants = (None,) * (len(self.params) - len(params))
        # key → compiled kernel, and a function of (grid, stream, arguments) that launches it
        self._compiled: dict[tuple, tuple] = {}
        # types of the arguments, and of what is in their tuples → as _find_positions returns
        self._positions: dict[tuple[type, ...], tuple] = {}

    def __getitem__(self, grid):
        return functools.partial(self.launch, grid)

    def launch(self, grid, /, *args, **constants):
        """As `JITFunction.run`, which also compiles without a launch."""
        if callable(grid) or len(args) != len(self._rules) or self.pre_run_hooks or _is_observed():
            return self.run(*args, grid=grid, warmup=False, **constants)
        device = ops.current_device()
        key = self._cache_key(device, args, constants)
        kernel, launch = self._compiled.get(key, _NOT_YET)
        if kernel is None:
            kernel = self.run(*args, grid=grid, warmup=False, **constants)
            if kernel is not None:  # a hook of Triton's may have prevented the compilation
                self._compiled[key] = kernel, _launcher(kernel, args, self._constants)
        else:
            launch((*grid, 1, 1)[:3], driver.active.get_current_stream(device), args)
        return kernel

    def _cache_key(self, device: int, args: tuple, constants: dict) -> tuple:
        """What the compiled kernel depends on: of a tensor, its dtype and whether it is aligned; of
        a descriptor, its box; of another argument, how Triton's own function describes it, which is
        slower. None and floats are described by their types.

        A kernel has tuples of the same length at the same parameters, or None there, so the types
        of all items tell what lies in which. A plain tuple that begins with an integer, such as
        strides, has integers alone, and is described as a whole."""
        flat = []
        for x in args:
            if not isinstance(x, tuple) or (type(x) is tuple and x and type(x[0]) is int):
                flat.append(x)
            else:
                flat += x
        types = tuple(map(type, flat))
        found = self._positions.get(types) or self._find_positions(types, flat, args)
        tensors, specialised, described, others = found
        specialised, unaligned = specialised(flat), 0
        for x in specialised:
            unaligned |= x.data_ptr()
        return (
            device,
            knobs.runtime.debug,
            knobs.compilation.instrumentation_mode,
            types,
            *constants,
            *constants.values(),
            *map(_DTYPE, tensors(flat)),
            *map(_BOX, described(flat)),
            unaligned % 16 and tuple([x.data_ptr() % 16 == 0 for x in specialised]),
            *[describe(flat[i]) for i, describe in others],
        )

    def _find_positions(self, types: tuple[type, ...], flat: list, args: tuple) -> tuple:
        """Functions that choose the tensors, those whose alignment counts, and the descriptors
        among arguments and items of these types; and the indices of those that have more than a
        type, with functions that describe them."""
        rules, are_arguments = [], []
        for x, rule in zip(args, self._rules):
            # an argument is the next item, or a tuple whose items are
            is_item = len(rules) < len(flat) and flat[len(rules)] is x
            # Triton specialises all that is in a tuple
            rules += [rule] if is_item else [(False, True, True)] * len(x)
            are_arguments += [is_item] * (1 if is_item else len(x))
        tensors = [i for i, kind in enumerate(types) if kind in (torch.Tensor, torch.nn.Parameter)]
        described = [i for i, kind in enumerate(types) if issubclass(kind, Described)]
        others = []
        for i, kind in enumerate(types):
            if kind not in (float, type(None)) and i not in (*tensors, *described):
                integers = kind is int or (kind is tuple and are_arguments[i])
                describe = _describer(rules[i])
                others.append((i, describe if integers else describe.__wrapped__))
        specialised = [i for i in tensors if all(rules[i][1:])]
        chosen = _choose(tensors), _choose(specialised), _choose(described)
        return self._positions.setdefault(types, (*chosen, others))


_DTYPE, _BOX = attrgetter("dtype"), attrgetter("box")


def _choose(indices: list[int]) -> Callable:
    """A function that returns the items of a list at these indices."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return itemgetter(slice(indices[0], indices[0] + 1) if indices else slice(0))


@functools.cache
def _describer(rule: tuple[bool, bool, bool]):
    """How Triton describes an integer, or a tuple of integers. A look-up takes a fifth of the time
    of its function, which `__wrapped__` calls for arguments of other types. Batches have ever new
    numbers of rows."""
    cached = functools.lru_cache(maxsize=4096)
    return cached(lambda x: specialisation(_backend(ops.current_device()), x, *rule))


def _is_observed() -> bool:
    """Whether a profiler has a hook on launches. Triton 3.6 has chains of hooks, which may be
    empty."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@functools.cache
def _backend(device: int):
    """Triton's backend for the current device, of which `device` is the index."""
    return make_backend(driver.active.get_current_target())


def _launcher(kernel, args: tuple, constants: tuple) -> Callable:
    """A function of (grid, stream, arguments) that launches a compiled kernel. `args`: of its first
    launch.

    Triton's launcher calls a C function, after it has replaced each descriptor by several arguments
    in a loop over all arguments. That takes longer than the C function. For the release that is
    known to do so, `_expanding_launcher` does it instead.
    """
    run = kernel.run
    described = [i for i, x in enumerate(args) if isinstance(x, Described)]
    function = getattr(run, "launch", None)
    if (
        triton.__version__.startswith("3.6.")
        and function
        and not (run.global_scratch_size or run.profile_scratch_size)
    ):
        parts = (
            inspect.getclosurevars(function).nonlocals
            if described
            else dict(launcher=function, tensordesc_meta=[])
        )
        if all(parts["tensordesc_meta"]):  # else there is no tensor memory accelerator
            return _expanding_launcher(
                kernel, parts["launcher"], list(zip(described, parts["tensordesc_meta"])), constants
            )
    before = kernel.function, kernel.packed_metadata, None, None, None
    return lambda grid, stream, args: run(*grid, stream, *before, *args, *constants)


def _expanding_launcher(
    kernel, function: Callable, described: list[tuple[int, dict]], constants: tuple
) -> Callable:
    """described: index and box of each descriptor. constants: placeholders of the constants, which
    the C function ignores."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    run, fill = kernel.run, driver.active.utils.fill_tma_descriptor
    launch_kind = run.launch_cooperative_grid, run.launch_pdl
    before = kernel.function, *launch_kind, None, None, kernel.packed_metadata, None, None, None

    def parts(box: dict) -> tuple:
        kind = TMA_DTYPE_DEVICE_TO_HOST[box["elem_type"]]
        return box["swizzle"], box["elem_size"], kind, box["block_size"]

    # from the last, so that the indices of the others stay
    described = [(i, parts(box)) for i, box in reversed(described)]

    def launch(grid: tuple[int, ...], stream: int, args: tuple) -> None:
        expanded = [*args, *constants]
        for i, box in described:
            x = args[i]
            shape, strides = x.shape, x.strides
            expanded[i : i + 1] = fill(x.base.data_ptr(), *box, shape, strides, 0), *shape, *strides
        function(*grid, stream, *before, *expanded)

    return launch
