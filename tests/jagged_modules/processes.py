"""Prints a digest of training steps' results for each seed:
`python processes.py serial|threads|fork|spawn cpu|cuda`."""

import functools
import hashlib
import multiprocessing
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import torch

try:
    from .training_steps import make_steps, run_steps
except ImportError:  # run as a program
    from training_steps import make_steps, run_steps

WORKERS = 8


def digest(results) -> str:
    return hashlib.sha256(
        b"".join(bytes(x.cpu().contiguous().view(torch.uint8).flatten().tolist()) for x in results)
    ).hexdigest()


def digest_of_steps(seed: int, device: str, steps=None) -> str:
    torch.set_num_threads(1)
    return digest(run_steps(steps or make_steps(device), seed, 2, device))


def in_threads(function) -> list:
    """function(0), function(1), ... in threads that start together."""
    start = threading.Barrier(WORKERS)

    def run(number):
        start.wait()
        return function(number)

    with ThreadPoolExecutor(WORKERS) as threads:
        return list(threads.map(run, range(WORKERS)))


def main(way: str, device: str) -> None:
    work = functools.partial(digest_of_steps, device=device)
    if way == "threads":  # the first calls of the process
        print(*in_threads(functools.partial(work, steps=make_steps(device))))
    elif way == "serial":
        print(*map(work, range(WORKERS)))
    else:
        work(0)  # forked processes inherit state that was already used
        with ProcessPoolExecutor(2, multiprocessing.get_context(way)) as processes:
            print(*processes.map(work, range(WORKERS)))


if __name__ == "__main__":
    main(*sys.argv[1:])
