"""The assembler that the kernels are compiled with on compute capability 9.0.

ptxas 12.8, which Triton 3.6 and 3.7 run there, miscompiles wgmma. Where two branches, or a branch
and a loop, have an MMA with an operand at the same address in shared memory, it may compute the
address in one of them only. The other reads a register that was never written: wrong results, or an
illegal memory access. The same wheels contain a newer ptxas for Blackwell, which is sound.
"""

from __future__ import annotations

import functools
import threading

from triton import compiler, knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, ptx_get_version
from triton.runtime.jit import JITFunction

from . import precompiled
from .launch import CachedLaunches, LoadedOnce

FIRST_SOUND_RELEASE = (12, 9)
# held while Triton's settings, which belong to the process, are read or set
_lock = threading.Lock()


def safe_ptxas(kernel):
    """Decorator for a kernel, above `triton.jit` or `gluon.jit`: the kernel is compiled by
    `compile_kernel`, and launched by launch.py."""
    if isinstance(kernel, JITFunction):  # Triton's interpreter compiles nothing
        kernel.__class__ = _compiled_safely(type(kernel))
        kernel.cache_launches()
    return kernel


@functools.cache
def _compiled_safely(kind: type[JITFunction]) -> type[JITFunction]:
    """The subclass of `kind` whose attribute `compile` is always `compile_kernel`.

    At its first launch on each device, a JITFunction sets this attribute to Triton's compiler,
    while another thread may be about to read it. So setting it has no effect.
    """
    compile = property(lambda kernel: compile_kernel, lambda kernel, compiler: None)
    return type(
        kind.__name__, (CachedLaunches, kind), {"compile": compile, "__module__": kind.__module__}
    )


def compile_kernel(source, target: GPUTarget, options: dict, **kwargs):
    """`triton.compile`, on compute capability 9.0 with `hopper_ptxas`; nothing is compiled that
    `precompiled` finds. The kernel is a `LoadedOnce`."""
    kernel = precompiled.find(source, target, options)
    if kernel is None:
        kernel = _compile(source, target, options, **kwargs)
    kernel.__class__ = LoadedOnce
    return kernel


def _compile(source, target: GPUTarget, options: dict, **kwargs):
    if target.backend != "cuda" or target.arch // 10 != 9:
        return compiler.compile(source, target=target, options=options, **kwargs)
    with _lock:
        ptxas = hopper_ptxas()
        if ptxas == get_ptxas(90):
            return compiler.compile(source, target=target, options=options, **kwargs)
        with knobs.nvidia.scope():
            knobs.nvidia.ptxas = ptxas.path
            # The PTX version is part of the key of Triton's disk cache, which may hold the kernel
            # as the older ptxas compiled it.
            options = {
                **options,
                "ptx_version": options.get("ptx_version") or ptx_get_version(ptxas.version),
            }
            return compiler.compile(source, target=target, options=options, **kwargs)


def hopper_ptxas() -> knobs.NvidiaTool:
    """The ptxas for compute capability 9.0: Triton's own if it is sound, else the one that Triton
    has for Blackwell.

    Raises:
        RuntimeError: neither is sound.
    """
    own = get_ptxas(90)
    if _release(own) >= FIRST_SOUND_RELEASE:
        return own
    # looked up where it is needed: some builds of Triton do not have it
    other = knobs.nvidia.ptxas_blackwell
    if _release(other) >= FIRST_SOUND_RELEASE:
        return other
    raise RuntimeError(
        f"ptxas {own.version} miscompiles wgmma; set TRITON_PTXAS_PATH to one of CUDA 12.9 or newer"
    )


def _release(ptxas: knobs.NvidiaTool) -> tuple[int, ...]:
    return tuple(int(part) for part in ptxas.version.split("."))
