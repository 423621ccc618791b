"""Bookkeeping on the host in the calling thread alone.

torch runs operators of 32,768 elements and more in its pool of threads, a few (repeat_interleave, searchsorted, indexing) of far fewer.
Where the cores are busy each of them waits for the pool for milliseconds, longer than lengths, offsets and tile lists take to compute.
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
    """Operators that the calling thread runs meanwhile do not use torch's pool; also a decorator.

    torch.set_num_threads is of the process; OpenMP's number of threads is the calling thread's own, so other threads keep theirs.
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
