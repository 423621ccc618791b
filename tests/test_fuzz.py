"""The fuzzer finds, shrinks and repeats failures. Its cases reach the whole supported space. One
test fuzzes for a minute."""

import collections
import json
import os
import subprocess
from pathlib import Path

import pytest
from cases import Case, legal, random_case, smaller_cases
from space import OPERATORS, Range

from . import warm
from .marks import PATIENCE, slow_after

TESTS = Path(__file__).parent
ENVIRONMENT = os.environ | dict(
    PYTHONPATH=os.pathsep.join(map(str, (TESTS, TESTS.parent, TESTS.parent / "kernels")))
)

MUTANTS = {  # what stands in a program before it fuzzes
    "a wrong gradient": (
        """
import jagged_modules.cpu.attention as cpu
right = cpu.softmax_backward
def softmax_backward(do, q, k, *others):
    dq, dk, dv = right(do, q, k, *others)
    return dq, dk * (1.002 if k.shape[2] > 16 else 1), dv  # of segments of more than 16 keys
cpu.softmax_backward = softmax_backward
"""
    ),
    "a crash": (
        """
import os, signal
from jagged_modules import functional as F
right = F.jagged_softmax
def jagged_softmax(x, offsets, **options):
    if (offsets.diff() == 0).any():
        os.kill(os.getpid(), signal.SIGSEGV)
    return right(x, offsets, **options)
F.jagged_softmax = jagged_softmax
"""
    ),
    "a lost context": (
        """
from jagged_modules import functional as F
calls = 0
def jagged_softmax(x, offsets, **options):
    global calls
    calls += 1
    raise RuntimeError(f"CUDA error in call {calls} of a worker")
F.jagged_softmax = jagged_softmax
"""
    ),
    "a call that never ends": (
        """
import time
from jagged_modules import functional as F
F.jagged_softmax = lambda x, offsets, **options: time.sleep(1000)
"""
    ),
    "a neighbour's NaN": (
        """
from jagged_modules import functional as F
right = F.jagged_softmax
F.jagged_softmax = lambda x, offsets, **options: right(x, offsets, **options) + 0 * x.sum()
"""
    ),
    "an ignored stride": (
        """
from jagged_modules import functional as F
right = F.jagged_softmax
F.jagged_softmax = lambda x, offsets, **options: right(x, offsets.as_strided(offsets.shape, (1,)), **options)
"""  # noqa: E501
    ),
}


@pytest.fixture
def fuzz_mutant(tmp_path):
    """The summary of a run, on the CPU, of one function with a mutant's fault."""

    def fuzz(mutant, function, *arguments):
        program, report = tmp_path / "mutant.py", tmp_path / "summary.json"
        program.write_text(f"import sys\nimport fuzz\n{MUTANTS[mutant]}\nsys.exit(fuzz.main())\n")
        flags = [
            "--device",
            "cpu",
            "--function",
            function,
            "--workers",
            "1",
            "--seed",
            "3",
            "--seconds",
            str(PATIENCE),
            "--json",
            str(report),
        ]
        done = warm.run([program, *flags, *arguments], env=ENVIRONMENT)
        assert done.returncode == 1, done.stdout + done.stderr
        return json.loads(report.read_text())

    return fuzz


@pytest.mark.slow
def test_a_wrong_gradient_is_found_made_small_and_repeated(fuzz_mutant):
    summary = fuzz_mutant("a wrong gradient", "jagged_attention", "--max-failures", "1")
    (failure,) = summary["failures"]
    case = failure["case"]
    assert failure["kind"] == "wrong" and "dk" in failure["message"]
    assert (
        max(map(max, case["lengths"])) == 17
        and case["options"]["heads"] == [1, 1]
        and case["options"]["layout"] == "contiguous"
    )
    again = subprocess.run(
        failure["command"], shell=True, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert again.returncode == 1 and failure["message"].splitlines()[0] in again.stdout, (
        again.stdout + again.stderr
    )


@slow_after(
    1,
    "mutant, kind, words",
    [
        ("a neighbour's NaN", "wrong", "segment"),
        ("a crash", "crash", "-11"),
        ("a lost context", "RuntimeError", "call 1 of a worker"),
        ("a call that never ends", "timeout", "more than"),
        ("an ignored stride", "ValueError", "offsets must"),
    ],
)
def test_other_failures(fuzz_mutant, mutant, kind, words):
    """Each failure occurs twice, because a lost worker is replaced."""
    # a busy machine's worker takes seconds to start
    timeout = ["--timeout", "5"] if kind == "timeout" else []
    shrink = "5" if kind == "crash" else "0"  # each attempt to shrink a timeout takes as long as it
    summary = fuzz_mutant(
        mutant, "jagged_softmax", "--max-failures", "2", "--shrink-seconds", shrink, *timeout
    )
    assert len(summary["failures"]) == 2
    for failure in summary["failures"]:
        assert failure["kind"] == kind and words in failure["message"], failure
    if kind == "crash":
        assert 0 in summary["failures"][0]["case"]["lengths"][0]


@pytest.mark.slow
def test_a_minute_on_the_cpu_and_in_the_interpreter():
    """A fixed number of cases, which take about a minute: the same cases on every machine."""
    flags = "--device cpu interpreter --workers 1 --seed 1 --cases 260".split()
    done = warm.run([TESTS / "fuzz.py", *flags, "--seconds", PATIENCE], env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "function, device", [(f, d) for f, x in OPERATORS.items() for d in x.dtypes]
)
def test_every_value_of_every_option_is_drawn(function, device):
    """In 1500 cases, most within the first hundreds."""
    operator, drawn = OPERATORS[function], collections.defaultdict(set)

    def missing():
        yield from (("dtype", x) for x in set(operator.dtypes[device]) - drawn["dtype"])
        for name in operator.names():
            for value in operator.axis(name, device):
                if isinstance(value, Range):
                    found = any(str(x) in drawn[name] for x in range(value.low, value.high + 1))
                else:
                    found = str(list(value) if isinstance(value, tuple) else value) in drawn[name]
                if not found:
                    yield name, value

    for seed in range(1500):
        if seed >= 300 and seed % 100 == 0 and not any(missing()):
            break
        case = random_case(function, seed, device)
        assert case == legal(case) == Case.from_json(case.to_json())
        drawn["dtype"].add(case.dtype)
        for name, value in case.options.items():
            drawn[name].add(str(value))
    assert list(missing()) == [] and drawn["dtype"] <= set(operator.dtypes[device])


@pytest.mark.parametrize("function", OPERATORS)
def test_smaller_cases_are_legal_and_come_to_an_end(function):
    case, steps = random_case(function, 5, "cpu"), 0
    while (smaller := next(smaller_cases(case), None)) is not None:
        assert smaller == legal(smaller) and smaller != case
        case, steps = smaller, steps + 1
        assert steps < 500
    assert sum(map(sum, case.lengths)) == 0
