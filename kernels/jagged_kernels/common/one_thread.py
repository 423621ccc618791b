"""Runs host bookkeeping in the calling thread only.

torch runs operators on 32,768 elements and more in its thread pool, and some (repeat_interleave, searchsorted, indexing) on far fewer.
When the cores are busy, each such operator waits milliseconds for the pool: longer than computing lengths, offsets or tile lists takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch is linked with; None in builds with another pool of threads."""
    library = ctypes.CDLL(torch._C.__file__)  # symbols of its dependencies are found through it
    return library if hasattr(library, "omp_set_num_threads") and hasattr(library, "omp_get_max_threads") else None


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Context manager and decorator in which torch operators of the calling thread do not use the thread pool.

    It sets OpenMP's number of threads, which belongs to the calling thread; torch.set_num_threads would change the whole process.
    """
    openmp = _openmp()
    if openmp is None:
        yield
        return
    before = torch.get_num_threads()  # OpenMP's number for this thread, which torch sets at a thread's first call
    openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)
