"""What differs between the Triton versions whose Gluon the Hopper kernels are written in (3.6 to
3.9)."""

import triton
from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma


def _either(owner, name: str, former_name: str):
    return getattr(owner, name) if hasattr(owner, name) else getattr(owner, former_name)


@builtin
def _async_add(desc, coord, src, _semantic=None):
    """`tma.async_atomic_add` of Triton 3.8: add a block in shared memory to global memory."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle
    )


load_tile = _either(tma, "async_load", "async_copy_global_to_shared")
store_tile = _either(tma, "async_store", "async_copy_shared_to_global")
add_tile = getattr(tma, "async_atomic_add", _async_add)
reinterpret = _either(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
thread_barrier = _either(gl, "barrier", "thread_barrier")
# Triton 3.6 alone reads shared memory in rows of another padding than it was written in.
reinterprets_padding = triton.__version__.startswith("3.6.")
