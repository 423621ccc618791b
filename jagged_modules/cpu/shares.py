"""Divides the work of a CPU operator among threads.

torch's threads meet at the end of every operator. On a busy machine each meeting waits until the
system has run all of them, and OpenMP's threads keep a core busy while they wait. The many small
operators on groups of segments then take longer than their work. So each operator runs in one
thread, and the threads compute different groups. They meet once, and sleep while they wait.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from jagged_kernels.common.one_thread import one_thread, set_threads

# least cost of a thread's share in multiplications: 1 to 2 ms, some times as long as another thread
# takes to start
SHARE = 2**24
LARGE = 2**27  # an item of this cost, about 10 ms, is worth a meeting of torch's threads

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_shares(
    compute: Callable[[list[Item]], Result],
    items: Sequence[Item],
    cost: Callable[[Item], int],
    threads: int,
    divisible: bool = True,
) -> list[Result]:
    """Results of compute(items), called within `one_thread`, for up to `threads` shares of about
    equal cost. They depend on nothing else. compute: may run in another thread. Items of a share
    keep their order. threads: the number outside of `one_thread`. divisible: whether the operators
    of a large item are few. Then torch's threads compute it."""
    results, small = [], list(items)
    if divisible and threads > 1 and (large := [item for item in items if cost(item) >= LARGE]):
        small = [item for item in items if cost(item) < LARGE]
        with set_threads(threads):
            results.append(compute(large))
    first, *others = _shares(small, [cost(item) for item in small], threads)
    futures = [_pool().submit(_in_a_thread, compute, share) for share in others]
    try:
        results.append(compute(first))
    finally:
        wait(futures)  # they write to the caller's tensors
    return results + [future.result() for future in futures]


def _shares(items: list[Item], costs: list[int], threads: int) -> list[list[Item]]:
    """Each item, the most expensive first, goes to the share with the least cost. Small costs are
    one share."""
    number = max(1, min(threads, len(items), sum(costs) // SHARE))
    shares: list[list[int]] = [[] for _ in range(number)]
    loads = [0] * number
    for i in sorted(range(len(items)), key=lambda i: -costs[i]):
        least = loads.index(min(loads))
        shares[least].append(i)
        loads[least] += costs[i]
    return [[items[i] for i in sorted(share)] for share in shares]


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "jagged_modules")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not exist in a forked process


def _in_a_thread(compute: Callable[[list[Item]], Result], share: list[Item]) -> Result:
    # Modes belong to a thread. In inference mode, all tensors can be written, also those made in
    # the caller's inference mode.
    with torch.inference_mode(), one_thread():
        return compute(share)
