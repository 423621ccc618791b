"""Runs functions of tests in several gloo processes on the CPU. The processes stay for the next test, as their imports take seconds."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

TIMEOUT = timedelta(seconds=60)


class Ranks:
    """The processes of one process group.

    Args:
        world_size: number of processes.
    """

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.processes: list[Any] = []
        self.connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(*args)`, a function of a module, in each process. Returns the results. Errors are raised here, with the rank."""
        if not self.processes:
            self._start()
        for connection in self.connections:
            connection.send((function, args))
        results, errors = [], []
        for rank, connection in enumerate(self.connections):
            try:
                result, error = connection.recv()
            except EOFError:
                result, error = None, "the process ended"
            results.append(result)
            errors += [f"rank {rank}: {error}"] if error else []
        if errors:
            self.stop()  # their collectives may not match any more
            raise RuntimeError("\n".join(errors))
        return results

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.connections = [], []

    def _start(self) -> None:
        context = get_context("spawn")
        with TemporaryDirectory() as folder:
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, f"{folder}/store", rank, self.world_size), daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self.connections.append(ours)
            for connection in self.connections:
                connection.recv()  # the group is there


def _serve(connection: Connection, store: str, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=TIMEOUT)
    connection.send(None)
    while True:
        function, args = connection.recv()
        try:
            connection.send((function(*args), None))
        except BaseException:  # noqa: BLE001 errors of torch's checkpoints are no Exceptions
            connection.send((None, traceback.format_exc()))


@contextmanager
def one_rank() -> Iterator[None]:
    """This process as the only one of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
