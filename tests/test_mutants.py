"""The runner of `make mutants`: which lists are errors, what counts as found, and that it never
touches the source."""

import os
import subprocess
import sys
from pathlib import Path

import mutants
import pytest
from marks import PATIENCE

TESTS = Path(__file__).parent
CORE = "def add(x, y):\n    return x + y\n\n\ndef positive(x):\n    return x > 0 and True\n"
CHECKS = """
import core

def test_add():
    assert core.add(2, 3) == 5

def test_positive():
    assert core.positive(1) and not core.positive(-1)
"""
FOUND = ("A sum is a difference", "core.py", "x + y", "x - y", "tests/test_core.py::test_add")
SURVIVES = ("Zero is positive", "core.py", "x > 0", "x > -1", "tests/test_core.py::test_positive")


@pytest.fixture
def run(tmp_path):
    """Runs the runner on a small project with these mutants: (exit status, output)."""
    (tmp_path / "tests" / "mutants").mkdir(parents=True)
    (tmp_path / "core.py").write_text(CORE)
    (tmp_path / "tests" / "test_core.py").write_text(CHECKS)

    def run(*listed, options=()):
        paragraphs = []
        for what, file, old, new, *tests in listed:
            paragraphs.append(
                "\n".join(
                    [what, file, f"- {old}", *(f"+ {line}" for line in new.split("\n")), *tests]
                )
            )
        (tmp_path / "tests" / "mutants" / "all.txt").write_text("\n\n".join(paragraphs) + "\n")
        # without torch, which takes seconds to import
        program = "import sys, mutants; sys.exit(mutants.main(sys.argv[1:]))"
        command = [sys.executable, "-c", program, "--root", str(tmp_path), *options]
        # no nvidia-smi
        environment = os.environ | dict(
            PYTHONPATH=str(TESTS), PATH="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"
        )
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
        # the copy is changed, never the source
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        assert (tmp_path / "core.py").read_text() == CORE
        return done.returncode, done.stdout

    return run


def test_a_mutant_of_the_same_size_is_found(run):
    """Python must not take the bytecode of the source for that of the mutant, nor that of one
    mutant for the next one's."""
    other = ("A sum is a product", *FOUND[1:3], "x * y", FOUND[4])
    status, output = run(FOUND, other)
    assert status == 0 and "2 mutants: 2 killed, 0 survived, 0 broken, 0 timeout" in output


def test_a_survivor_is_counted_and_named(run):
    status, output = run(FOUND, SURVIVES)
    assert status == 1 and "2 mutants: 1 killed, 1 survived, 0 broken, 0 timeout" in output
    assert "survived core.py: Zero is positive" in output


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("return x", "return y", "its text must be in the file once, found 2 times: return x"),
        ("return z", "return x", "its text must be in the file once, found 0 times: return z"),
        ("x + y", "x +", "is no Python: invalid syntax"),
    ],
)
def test_a_list_that_does_not_fit_the_source_is_an_error(run, old, new, fault):
    status, output = run(FOUND, ("A typing error", "core.py", old, new, "tests/test_core.py"))
    assert (status, output.count("\n")) == (1, 1)  # nothing ran
    assert output.startswith(f"core.py: A typing error: {fault}")


@pytest.mark.parametrize("new", ["x + z", "x + __import__('no_such_module')"])
def test_what_fails_any_test_is_no_mutant(run, new):
    status, output = run(("A name is missing", *FOUND[1:3], new, FOUND[4]))
    assert status == 1 and "1 mutants: 0 killed, 0 survived, 1 broken, 0 timeout" in output


def test_a_module_that_cannot_be_imported_is_no_mutant(run):
    status, output = run(
        ("The import fails", "core.py", "def add(x, y):", "1 / 0\ndef add(x, y):", FOUND[4])
    )
    assert status == 1 and "1 mutants: 0 killed, 0 survived, 1 broken, 0 timeout" in output


def test_the_tests_must_pass_without_a_mutant(run, tmp_path):
    (tmp_path / "tests" / "test_core.py").write_text(
        CHECKS + "\ndef test_wrong():\n    assert core.add(1, 1) == 3\n"
    )
    status, output = run(FOUND[:4] + ("tests/test_core.py::test_wrong",))
    assert (
        status == 1
        and "the tests must pass without a mutant: killed" in output
        and "mutants:" not in output
    )


def test_a_test_that_does_not_exist_is_an_error(run):
    status, output = run(FOUND[:4] + ("tests/test_core.py::test_that_was_renamed",))
    assert (status, output.count("\n")) == (1, 1)  # nothing ran
    assert "there is no test tests/test_core.py::test_that_was_renamed" in output


def test_mutants_of_gpus_wait_for_one(run):
    status, output = run(FOUND, ("gpu: " + SURVIVES[0], *SURVIVES[1:]))
    assert status == 0 and "1 mutants need a GPU" in output and "1 mutants: 1 killed" in output


def test_a_seed_chooses_a_sample(run):
    listed = [(f"Sum {i}", "core.py", "x + y", f"x - y - {i}", FOUND[4]) for i in range(9)]
    first, second = (run(*listed, options=["--sample", "3", "--seed", "a"])[1] for _ in range(2))
    chosen = [{f"Sum {i}" for i in range(9) if f"Sum {i} " in output} for output in (first, second)]
    assert len(chosen[0]) == 3 and chosen[0] == chosen[1]


def test_the_lists_fit_the_project():
    listed = mutants.read(TESTS / "mutants")
    assert [x for x in listed if x.fault(TESTS.parent) or not x.new] == []
    assert len({x.what for x in listed}) == len(listed)
    assert [
        test
        for x in listed
        for test in x.tests
        if not (TESTS.parent / test.split("::")[0]).is_file()
    ] == []
