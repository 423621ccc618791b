"""Two processes that run functions one after another: starting them takes longer than most tests."""

import contextlib
import pickle
import sys
import threading
import traceback
from multiprocessing import get_context

import pytest
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

from ..distributed.ranks import run_ranks

LONGEST, AFTER_AN_ERROR = 120, 10  # seconds


class Ranks:
    """Two processes with a gloo group. `run(function, *args)` calls a function of a module in both of them."""

    def __init__(self):
        self.ends = []

    def run(self, function, *args):
        if not self.ends:
            self._start()
        for end in self.ends:
            end.send((function, args))
        errors = []
        for end in self.ends:
            error = _answer(end, AFTER_AN_ERROR if errors else LONGEST)
            errors += [error] if error else []
        if any(isinstance(error, (EOFError, TimeoutError)) for error in errors):  # one process waits for another that failed
            self.stop(abort)
        if errors:
            raise errors[0]

    def _start(self):
        self.ends, others = zip(*(get_context("spawn").Pipe() for _ in range(2)))
        self.thread = threading.Thread(target=_run, args=(others,))
        self.thread.start()

    def stop(self, function=sys.exit):
        for end in self.ends:
            with contextlib.suppress(OSError):  # the process has ended
                end.send((function, ()))
        if self.ends:
            self.thread.join()
        self.ends = []


def _answer(end, seconds):
    """The error of a process, or None."""
    if not end.poll(seconds):
        return TimeoutError(f"no answer within {seconds} seconds")
    try:
        return end.recv()
    except EOFError as error:
        return error


def _run(ends):
    with contextlib.suppress(ProcessExitedException):  # of abort, or a crash, which `run` reports
        run_ranks(serve, ends)


def serve(ends):
    """Call the functions that come through this rank's end of a pipe, and answer with their errors."""
    end = ends[dist.get_rank()]
    while True:
        function, args = end.recv()
        try:
            function(*args)
        except Exception as error:
            traceback.print_exc()
            end.send(_as_sent(error))
        else:
            end.send(None)


def abort():
    """End this process with an error, upon which torch ends the others."""
    sys.exit(1)


def _as_sent(error):
    """The error, or one with its text if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(traceback.format_exc())


@pytest.fixture(scope="session")
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.stop()
