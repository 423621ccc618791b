"""Runs a test's function in several gloo processes on the CPU."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn


def run_ranks(function: Callable[..., None], *args: Any, world_size: int = 2) -> None:
    """Call `function(*args)` in `world_size` processes with a process group. An exception in one of them is raised here.

    `function` is a function of a module, because processes are spawned.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    spawn(_run, (world_size, port, function, args), nprocs=world_size)


def _run(rank: int, world_size: int, port: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        function(*args)
    finally:
        dist.destroy_process_group()
