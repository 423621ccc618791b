"""Prints what training steps give, by seed, computed in one of several ways: `python processes.py serial|threads|fork|spawn`."""

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
    return hashlib.sha256(b"".join(bytes(x.contiguous().view(torch.uint8).flatten().tolist()) for x in results)).hexdigest()


def digest_of_steps(seed: int, steps=None) -> str:
    torch.set_num_threads(1)
    return digest(run_steps(steps or make_steps(), seed, 2))


def in_threads(function) -> list:
    """function(0), function(1), ... in threads that start together."""
    start = threading.Barrier(WORKERS)

    def run(number):
        start.wait()
        return function(number)

    with ThreadPoolExecutor(WORKERS) as threads:
        return list(threads.map(run, range(WORKERS)))


def main(way: str) -> None:
    if way == "threads":  # the first calls of the process
        print(*in_threads(functools.partial(digest_of_steps, steps=make_steps())))
    elif way == "serial":
        print(*map(digest_of_steps, range(WORKERS)))
    else:
        digest_of_steps(0)  # what a forked process inherits has been used
        with ProcessPoolExecutor(2, multiprocessing.get_context(way)) as processes:
            print(*processes.map(digest_of_steps, range(WORKERS)))


if __name__ == "__main__":
    main(sys.argv[1])
