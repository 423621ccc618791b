"""The assembler that the kernels are compiled with on compute capability 9.0.

ptxas 12.8, which Triton 3.6 and 3.7 run there, miscompiles wgmma. Where two branches, or a branch and a loop, multiply by an operand at the
same place in shared memory, it may compute the operand's address in one of them only. The other reads a register that was never
written: wrong results, or an illegal memory access. The same wheels carry a newer ptxas for Blackwell, which has no such fault.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from triton import compiler, knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, ptx_get_version

FIRST_SOUND_RELEASE = (12, 9)
_lock = threading.Lock()  # Triton's settings belong to the process


def safe_ptxas(kernel):
    """Decorator for a kernel, above `triton.jit` or `gluon.jit`: it is compiled by `compile_kernel`."""
    caches = getattr(kernel, "device_caches", None)
    if caches is None:  # Triton's interpreter compiles nothing
        return kernel
    create_binder: Callable = caches.default_factory

    def create_binder_and_replace_compile():
        binder = create_binder()  # sets kernel.compile
        kernel.compile = compile_kernel
        return binder

    caches.default_factory = create_binder_and_replace_compile
    return kernel


def compile_kernel(source, target: GPUTarget, options: dict, **kwargs):
    """`triton.compile`, on compute capability 9.0 with `hopper_ptxas`."""
    if target.backend != "cuda" or target.arch // 10 != 9:
        return compiler.compile(source, target=target, options=options, **kwargs)
    ptxas = hopper_ptxas()
    if ptxas == get_ptxas(90):
        return compiler.compile(source, target=target, options=options, **kwargs)
    with _lock, knobs.nvidia.scope():
        knobs.nvidia.ptxas = ptxas.path
        # Part of the key of Triton's cache on disk, which may hold the same kernel as the older ptxas compiled it.
        options = {**options, "ptx_version": options.get("ptx_version") or ptx_get_version(ptxas.version)}
        return compiler.compile(source, target=target, options=options, **kwargs)


def hopper_ptxas() -> knobs.NvidiaTool:
    """The ptxas for compute capability 9.0: Triton's own if it is sound, else the one that Triton has for Blackwell.

    Raises:
        RuntimeError: neither is sound.
    """
    for ptxas in (get_ptxas(90), knobs.nvidia.ptxas_blackwell):
        if _release(ptxas) >= FIRST_SOUND_RELEASE:
            return ptxas
    found = get_ptxas(90).version
    raise RuntimeError(f"ptxas {found} miscompiles wgmma; set TRITON_PTXAS_PATH to one of CUDA 12.9 or newer")


def _release(ptxas: knobs.NvidiaTool) -> tuple[int, ...]:
    return tuple(int(part) for part in ptxas.version.split("."))
