"""Launches of compiled kernels in less host time than `JITFunction.run` takes.

Triton binds the arguments of every launch by name, describes the layout of each TMA descriptor as text, and compares the globals that a
kernel reads with their values when it was compiled. Here a dictionary leads from what a kernel was compiled for to the compiled kernel.
Triton itself runs the first launch of each entry, and every launch that a hook wants to see.
"""

from __future__ import annotations

import functools

from triton import knobs
from triton._C.libtriton import native_specialize_impl as specialisation
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from .descriptors import Described


class CachedLaunches(JITFunction):
    """A JITFunction that finds compiled kernels by `_cache_key`. Other arguments than `tl.constexpr` must be given by position."""

    def cache_launches(self) -> None:
        """What a constructor would do: a kernel gets this class when it is a JITFunction already.

        Raises:
            ValueError: a `tl.constexpr` parameter has others behind it.
        """
        params = [p for p in self.params if not p.is_constexpr]
        if any(p.is_constexpr for p in self.params[: len(params)]):
            raise ValueError(f"the constants of {self.__name__} must be its last parameters")
        self._rules = [(p.is_const, not p.do_not_specialize, not p.do_not_specialize_on_alignment) for p in params]
        self._constants = (None,) * (len(self.params) - len(params))  # a compiled kernel ignores their values
        self._compiled = {}

    def __getitem__(self, grid):
        return functools.partial(self.run, grid=grid, warmup=False)

    def run(self, *args, grid, warmup, **constants):
        """As `JITFunction.run`."""
        if warmup or callable(grid) or len(args) != len(self._rules) or self.pre_run_hooks or _is_observed():
            return super().run(*args, grid=grid, warmup=warmup, **constants)
        active = driver.active
        device = active.get_current_device()
        key = self._cache_key(device, args, constants)
        kernel = self._compiled.get(key)
        if kernel is None:
            kernel = super().run(*args, grid=grid, warmup=False, **constants)
            if kernel is not None:  # a hook of Triton's may have prevented the compilation
                self._compiled[key] = kernel
        else:
            blocks, stream = (*grid, 1, 1)[:3], active.get_current_stream(device)
            kernel.run(*blocks, stream, kernel.function, kernel.packed_metadata, None, None, None, *args, *self._constants)
        return kernel

    def _cache_key(self, device: int, args: tuple, constants: dict) -> tuple:
        """What the compiled kernel depends on. Triton's own function describes an argument: its dtype, whether it is aligned, None, 1 or
        divisible by 16, how wide an integer is. It takes long for a descriptor, of which only the box matters."""
        backend = _backend(device)
        described = [
            x.box if isinstance(x, Described) else specialisation(backend, x, const, specialise, align)
            for x, (const, specialise, align) in zip(args, self._rules)
        ]
        return device, knobs.runtime.debug, knobs.compilation.instrumentation_mode, *constants, *constants.values(), *described


def _is_observed() -> bool:
    """Whether a profiler has a hook on launches. Triton 3.6 has chains of hooks, which may be empty."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@functools.cache
def _backend(device: int):
    """Triton's backend for the current device, of which `device` is the index."""
    return make_backend(driver.active.get_current_target())
