"""Applies one-line bugs, one at a time, to a copy of the project. The named tests must fail for
each. `make mutants ARGS="--sample 8"`

The lists are tests/mutants/*.txt. A paragraph is one mutant: what it breaks, the file, the text
that is replaced (lines that begin with "- "), the text that replaces it ("+ "), and the tests, as
pytest's node ids. What needs a GPU begins with "gpu: ". The text must be in the file exactly once,
so that a list does not outlive the code.

Each run of pytest is a fork of this process, which has imported torch but nothing of the project.
So a run need not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# beside the files at the root, what is copied
FOLDERS = ("jagged_modules", "kernels", "examples", "tests", "docs")
INTERPRETER = "tests/jagged_kernels/interpreter"
# seconds of one run, after which it is an error: a busy machine takes long, a loop without end
# longer
TIME_LIMIT = 3600
BROKEN = (ImportError, NameError, SyntaxError)  # a module with one of these fails any test
# by pytest's exit status
OUTCOMES = {0: "survived", 1: "killed", 2: "broken", 3: "broken", 4: "broken", 5: "broken"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """what: what it breaks, in a few words. tests: pytest's node ids."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @classmethod
    def parse(cls, paragraph: str) -> Mutant:
        what, file, *lines = paragraph.splitlines()
        old, new = (
            "\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in ("- ", "+ ")
        )
        return cls(
            what, file, old, new, tuple(line for line in lines if not line.startswith(("- ", "+ ")))
        )

    @property
    def needs_gpu(self) -> bool:
        return self.what.startswith("gpu: ")

    @property
    def interpreted(self) -> bool:
        """Whether its tests run in Triton's interpreter."""
        return self.tests[0].startswith(INTERPRETER)

    @property
    def places(self) -> re.Pattern[str]:
        """What matches the replaced text, however the formatter breaks its lines."""
        text = re.escape(" ".join(self.old.split()))
        text = re.sub(r"(\\[(\[{])(?=.)", r"\1\\s*", text)  # after an opening bracket
        text = re.sub(r"(?<=.)(\\[)\]}])", r"(?:,?\\s)?\\s*\1", text)  # before a closing one
        return re.compile(text.replace("\\ ", r"\s+"))

    def applied(self, text: str) -> str:
        """The mutated text of the file."""
        return self.places.sub(lambda _: self.new, text)

    def fault(self, root: Path) -> str | None:
        """Why this is no mutant of the source, or None."""
        if not self.tests or len({test.startswith(INTERPRETER) for test in self.tests}) > 1:
            return "needs tests, either all of the interpreter or none"
        for test in self.tests:
            file, _, name = test.partition("::")
            text = (root / file).read_text() if (root / file).is_file() else ""
            function = name.partition("[")[0].rpartition("::")[2]
            if not text or (name and f"def {function}(" not in text):
                return f"there is no test {test}"
        if not (root / self.file).is_file():
            return "there is no such file"
        text = (root / self.file).read_text()
        if (found := len(self.places.findall(text))) != 1 or not self.old:
            return f"its text must be in the file once, found {found} times: {self.old}"
        try:
            if self.file.endswith(".py"):
                compile(self.applied(text), self.file, "exec")
        except SyntaxError as error:
            return f"is no Python: {error}"
        return None


def read(folder: Path) -> list[Mutant]:
    """The mutants of all lists in a folder."""
    texts = (path.read_text() for path in sorted(folder.glob("*.txt")))
    return [Mutant.parse(paragraph) for text in texts for paragraph in text.strip().split("\n\n")]


class _Faults:
    """A plugin of pytest that notes errors which a mutant should not cause: they say nothing about
    the test."""

    def __init__(self):
        self.broken = False

    def pytest_runtest_makereport(self, call):
        error = call.excinfo and call.excinfo.value
        while error is not None:
            # Triton's
            self.broken |= isinstance(error, BROKEN) or type(error).__name__ == "CompilationError"
            error = error.__cause__ or error.__context__


def start(root: Path, folder: Path, tests: tuple[str, ...], keep_bytecode: bool) -> int:
    """Start pytest in a copy of the project; the process's id. It writes to the copy's
    output.txt."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    signal.alarm(TIME_LIMIT)
    output = os.open(folder / "output.txt", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    paths = [str(folder / name) for name in (".", "kernels", "tests")]
    sys.path[:] = paths + [
        x for x in sys.path if Path(x).resolve() not in (root, root / "kernels", root / "tests")
    ]
    # its keys lack the mutated code
    os.environ |= dict(PYTHONPATH=os.pathsep.join(paths), TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    if not keep_bytecode:  # bytecode of a mutant of the same size would pass for the source's
        sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    if tests[0].startswith(INTERPRETER):  # triton, which reads it, is imported by the tests
        os.environ["TRITON_INTERPRET"] = "1"
    faults, status = _Faults(), 3
    try:
        status = pytest.main(
            ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", *tests], plugins=[faults]
        )
    finally:
        sys.stdout.flush()
        os._exit(2 if faults.broken else int(status))


def run_all(
    root: Path, copies: list[Path], jobs: list[tuple[tuple[str, ...], Mutant | None]]
) -> Iterator[tuple[Mutant | None, str, str, float]]:
    """Run the jobs, one at a time in each copy: (mutant, its outcome, pytest's output, seconds) as
    they end."""
    waiting, free, running = iter(jobs), list(copies), {}
    while True:
        for copy, (tests, mutant) in zip(free[:], waiting):
            free.remove(copy)
            restore = _apply(copy, mutant) if mutant else lambda: None
            running[start(root, copy, tests, keep_bytecode=mutant is None)] = (
                copy,
                mutant,
                restore,
                time.monotonic(),
            )
        if not running:
            return
        pid, status = os.wait()
        copy, mutant, restore, since = running.pop(pid)
        restore()
        free.append(copy)
        code = os.waitstatus_to_exitcode(status)  # negative: a signal ended it, as a crash does
        outcome = "timeout" if code == -signal.SIGALRM else "killed" if code < 0 else OUTCOMES[code]
        yield (
            mutant,
            outcome,
            (copy / "output.txt").read_text(errors="replace"),
            time.monotonic() - since,
        )


def _apply(copy: Path, mutant: Mutant) -> Callable[[], None]:
    """Put the mutant into the copy. Returns what undoes this."""
    path = copy / mutant.file
    text, before = path.read_text(), path.stat()
    path.write_text(mutant.applied(text))
    # Another second than the source's: Python tells by second and size whether it compiled a file
    # before.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**10))

    def restore() -> None:
        path.write_text(text)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    return restore


def copy_project(root: Path, copy: Path) -> Path:
    """Copy what the tests need."""
    copy.mkdir()
    for name in (x for x in FOLDERS if (root / x).is_dir()):
        shutil.copytree(
            root / name,
            copy / name,
            ignore=shutil.ignore_patterns("__pycache__", "_build", "jupyter_execute", "runs"),
        )
    for file in (x for x in root.iterdir() if x.is_file()):
        shutil.copy2(file, copy)
    return copy


def run_all_checked(root: Path, copies: list[Path], mutants: list[Mutant]) -> int:
    """Run the tests without a mutant, then with each of them, and print the outcomes. Returns the
    exit status."""
    unmutated = []
    for interpreted in (False, True):
        tests = sorted({test for x in mutants if x.interpreted == interpreted for test in x.tests})
        unmutated += [
            (part, None) for i in range(len(copies)) if (part := tuple(tests[i :: len(copies)]))
        ]
    for _, outcome, output, seconds in run_all(root, copies, unmutated):
        if outcome != "survived":
            print(f"{output}\nthe tests must pass without a mutant: {outcome}")
            return 1
        print(f"the tests pass without a mutant ({seconds:.0f} s)", flush=True)
    counts = Counter()
    for mutant, outcome, output, seconds in run_all(root, copies, [(x.tests, x) for x in mutants]):
        counts[outcome] += 1
        failed = re.search("^(?:FAILED|ERROR) (.*?)(?: - |$)", output, re.MULTILINE)
        print(
            f"{outcome:8} {mutant.file}: {mutant.what} ({seconds:.0f} s)"
            f" {failed[1] if failed else ''}",
            flush=True,
        )
        if outcome not in ("killed", "survived"):
            print(output)
    print(
        f"{len(mutants)} mutants:"
        f" {', '.join(f'{counts[x]} {x}' for x in ('killed', 'survived', 'broken', 'timeout'))}"
    )
    return 0 if counts["killed"] == len(mutants) else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--sample", type=int, help="run so many mutants, chosen by the seed")
    parser.add_argument("--seed", default="1", help="any text")
    parser.add_argument(
        "--only", default="", help="run the mutants whose file or description has this text"
    )
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    mutants = read(root / "tests" / "mutants")
    faults = [f"{x.file}: {x.what}: {fault}" for x in mutants if (fault := x.fault(root))]
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return 1
    mutants = [x for x in mutants if options.only in f"{x.file} {x.what}"]
    if any(x.needs_gpu for x in mutants) and not shutil.which("nvidia-smi"):
        print(f"{sum(x.needs_gpu for x in mutants)} mutants need a GPU")
        mutants = [x for x in mutants if not x.needs_gpu]
    if options.sample is not None:
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
        print(f"{len(mutants)} mutants of seed {options.seed}")
    with tempfile.TemporaryDirectory() as folder:
        copies = [copy_project(root, Path(folder) / str(i)) for i in range(max(1, options.workers))]
        gc.freeze()  # collections of the forks need not visit the objects of the imports
        return run_all_checked(root, copies, mutants)


if __name__ == "__main__":
    import hypothesis  # noqa: F401
    import networkx  # noqa: F401
    import sympy  # noqa: F401
    import torch  # noqa: F401

    sys.exit(main())
