"""Runs torch operators in the calling thread only.

torch runs operators on 32,768 elements and more in its thread pool, and some (repeat_interleave,
searchsorted, indexing) on far fewer. When the cores are busy, each such operator waits milliseconds
for the pool: longer than computing lengths, offsets or tile lists takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch


@functools.cache
def _torch_library() -> ctypes.CDLL:
    return ctypes.CDLL(torch._C.__file__)  # symbols of its dependencies are found through it


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch is linked with; None in builds with another pool of threads."""
    library = _torch_library()
    if hasattr(library, "omp_set_num_threads") and hasattr(library, "omp_get_max_threads"):
        return library
    return None


@functools.cache
def _mkl() -> ctypes.CDLL | None:
    """MKL, whose GEMMs and exponentials do not follow OpenMP's number after a call of
    torch.set_num_threads; None in builds without it."""
    return _torch_library() if hasattr(_torch_library(), "MKL_Set_Num_Threads_Local") else None


@contextlib.contextmanager
def one_thread() -> Iterator[int]:
    """Context manager and decorator in which torch operators of the calling thread do not use the
    thread pool. It sets the numbers of threads that belong to the calling thread;
    torch.set_num_threads would change the whole process. Its value is the number of threads
    outside."""
    # OpenMP's number for this thread, which torch sets at a thread's first call
    before = torch.get_num_threads()
    with set_threads(1):
        yield before


@contextlib.contextmanager
def set_threads(number: int) -> Iterator[None]:
    """`one_thread` for any number of threads."""
    openmp, mkl = _openmp(), _mkl()
    if openmp is None:
        yield
        return
    before = torch.get_num_threads()
    openmp.omp_set_num_threads(number)
    # 0: the number of the process
    mkl_before = 0 if mkl is None else mkl.MKL_Set_Num_Threads_Local(number)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)
        if mkl is not None:
            mkl.MKL_Set_Num_Threads_Local(mkl_before)
