"""Python programs as forks of one process that has imported what takes seconds, and nothing of the
project.

A fork is a process of its own, which runs the program as Python does: as `__main__`, with its
arguments, path, folder, environment and streams. What libraries read from the environment when they
are imported, such as OMP_NUM_THREADS, is that of the tests. What a program imports, and programs on
a GPU, need Python itself: the imports may have initialised CUDA.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from .marks import PATIENCE

CONTEXT = multiprocessing.get_context("forkserver")
# torchrec and what the programs of examples/ need beside it; those that are not installed are left
# out
CONTEXT.set_forkserver_preload(
    ["torch", "torchrec.distributed", "torchmetrics.functional", "fastapi", "uvicorn", "httpx"]
)


def begin() -> None:
    """Start the process whose forks the programs are. It imports while tests run."""
    forkserver.ensure_running()


@functools.cache
def _path(python_path: str | None) -> list[str]:
    """sys.path of a Python with this PYTHONPATH, without the program's folder."""
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    environment |= {} if python_path is None else {"PYTHONPATH": python_path}
    command = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
    return json.loads(subprocess.check_output(command, env=environment))


def _run(
    arguments: list[str],
    path: list[str],
    folder: str,
    environment: dict[str, str],
    streams: list[Connection],
) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin, sys.stdout = open(0), open(1, "w")
    sys.stderr = open(2, "w", buffering=1)
    multiprocessing.set_start_method(None, force=True)  # Python's default again
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if arguments[0] == "-m":
        sys.path[:], sys.argv = [folder, *path], arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[:], sys.argv = [str(Path(arguments[0]).parent), *path], arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _copy(file: IO) -> Connection:
    """What a process is given in place of a file."""
    return Connection(os.dup(file.fileno()))


class Popen:
    """As `subprocess.Popen` of this Python, with pipes of text as stdin and stdout.

    Args:
        arguments: those of Python: a program's path, or "-m" and a module; and its own.
        stdout: a file in place of the pipe.
        stderr: a file; what stdout is if not given.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        cwd: str | Path = ".",
        env: dict[str, str] | None = None,
        stdout: IO | None = None,
        stderr: IO | None = None,
    ):
        environment = dict(os.environ if env is None else env)
        (read, self.stdin), (self.stdout, write) = (
            (open(x, mode) for x, mode in zip(os.pipe(), "rw", strict=True)) for _ in range(2)
        )
        out = stdout or write
        streams = [_copy(x) for x in (read, out, stderr or out)]
        path = _path(environment.get("PYTHONPATH"))
        command = [str(x) for x in arguments]
        self.process = CONTEXT.Process(
            target=_run, args=(command, path, os.path.abspath(cwd), environment, streams)
        )
        self.process.start()
        for end in (read, write, *streams):
            end.close()
        self.pid, self.kill = self.process.pid, self.process.kill

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout)
        return self.process.exitcode

    def communicate(self) -> tuple[str, None]:
        self.stdin.close()
        with self.stdout:
            out = self.stdout.read()
        self.wait()
        return out, None


def run(arguments: Sequence[object], **options: Any) -> subprocess.CompletedProcess:
    """As `subprocess.run` of this Python with `capture_output=True, text=True`. A program that
    does not end is killed after PATIENCE.

    Args:
        options: of Popen: cwd, env.
    """
    with TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
        process = Popen(arguments, stdout=out, stderr=errors, **options)
        process.stdin.close()
        try:
            code = process.wait(PATIENCE)
        finally:
            process.kill()
            process.stdout.close()
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), errors.read())
