"""Runs functions of tests in several processes: of a gloo group on the CPU, or of an NCCL group
with a GPU each. The processes stay for the next call, as their imports take seconds."""

from __future__ import annotations

import gc
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

from ..marks import PATIENCE
from ..warm import CONTEXT

TIMEOUT = timedelta(seconds=PATIENCE)


class _Error(NamedTuple):
    """What a process sends instead of a result. error: None if it cannot be sent."""

    error: BaseException | None
    text: str


class Ranks:
    """The processes of one process group.

    Args:
        world_size: number of processes.
        device_type: cpu or cuda.
    """

    def __init__(self, world_size: int, device_type: str = "cpu"):
        self.world_size, self.device_type = world_size, device_type
        self.processes: list[Any] = []
        self.connections: list[Connection] = []
        self.folder: TemporaryDirectory | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(*args)`, a function of a module, in each process. Returns the results.

        Raises:
            The error that all processes raised, if it is the same. RuntimeError with the text of
            each process's error otherwise.
        """
        if not self.processes:
            self._start()
        for connection in self.connections:
            connection.send((function, args))
        results = [_answer(connection, 2 * TIMEOUT) for connection in self.connections]
        errors = {rank: result for rank, result in enumerate(results) if isinstance(result, _Error)}
        if (
            len(errors) == self.world_size
            and len({repr(x.error) for x in errors.values()}) == 1
            and errors[0].error is not None
        ):
            raise errors[0].error
        if errors:
            self.stop()  # their collectives may not match any more
            raise RuntimeError("\n".join(f"rank {rank}: {x.text}" for rank, x in errors.items()))
        return results

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.connections = [], []
        if self.folder is not None:
            self.folder.cleanup()

    def _start(self) -> None:
        # imports may initialise CUDA, and then a fork cannot
        context = CONTEXT if self.device_type == "cpu" else get_context("spawn")
        self.folder = TemporaryDirectory()  # of the store, which later groups of some ranks use too
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = theirs, f"{self.folder.name}/store", rank, self.world_size, self.device_type
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
        for connection in self.connections:
            connection.recv()  # the group is there


def _answer(connection: Connection, timeout: timedelta) -> Any:
    try:
        return (
            connection.recv()
            if connection.poll(timeout.total_seconds())
            else _Error(None, "no answer")
        )
    except EOFError:
        return _Error(None, "the process ended")


def _serve(
    connection: Connection, store: str, rank: int, world_size: int, device_type: str
) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the programs print
    torch.set_num_threads(1)
    gpu = None
    if device_type == "cuda":
        gpu = torch.device("cuda", rank)
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
        device_id=gpu,
    )
    connection.send(None)
    while True:
        function, args = connection.recv()
        try:
            connection.send(function(*args))
        # noqa: BLE001 errors of torch's checkpoints are no Exceptions
        except BaseException as error:
            connection.send(_Error(_sendable(error), traceback.format_exc()))


def _sendable(error: BaseException) -> BaseException | None:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 whatever its class does
        return None


@contextmanager
def one_rank() -> Iterator[None]:
    """This process as the only one of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # a sharded model is a reference cycle that holds the group, whose threads would outlive
        # Python and abort the process
        gc.collect()
