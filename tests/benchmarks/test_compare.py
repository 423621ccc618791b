"""Alternating checkouts: figures of both, failures in one of them, a process that does not
respond."""

import json
import shutil
from pathlib import Path

import compare
import pytest

from ..marks import PATIENCE

ROOT = Path(__file__).parents[2]
CASE = "operators: jagged_softmax B6 N≤10 H8"
OPTIONS = ["--device", "cpu", "--tiny", "--pause", "0", "--rep", "0.1", "--only", f"^{CASE}$"]


@pytest.fixture
def changed_checkout(tmp_path):
    """A copy of the packages, with a line put at the end of
    jagged_modules/functional/__init__.py."""

    def make(line):
        for package in ("jagged_modules", "kernels/jagged_kernels"):
            shutil.copytree(
                ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
            )
        with open(tmp_path / "jagged_modules" / "functional" / "__init__.py", "a") as file:
            file.write(f"\n{line}\n")
        return tmp_path

    return make


@pytest.mark.slow
def test_a_checkout_against_itself(tmp_path, capsys):
    assert (
        compare.main(
            [
                "jagged_ops",
                f"one={ROOT}",
                f"two={ROOT}",
                "--out",
                str(tmp_path / "out.json"),
                *OPTIONS,
            ]
        )
        == 0
    )
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["case"], row["implementation"], row["pass"]) for row in rows] == [
        (CASE, "jagged_modules", "forward"),
        (CASE, "jagged_modules", "forward_backward"),
    ]
    assert all(
        row["cells"].keys() == {"one", "two"} and min(row["cells"].values()) > 0 for row in rows
    )
    table = capsys.readouterr().out
    assert "| one | two |" in table and table.count("×)") == 2 and "forward+backward" in table


@pytest.mark.slow
def test_a_wrong_result_is_named_and_not_timed(changed_checkout, capsys):
    changed = changed_checkout(
        "_right = jagged_softmax\n\n\ndef jagged_softmax(*args, **kwargs):\n    return 2 *"
        " _right(*args, **kwargs)"
    )
    assert compare.main(["jagged_ops", f"before={ROOT}", f"after={changed}", *OPTIONS]) == 1
    assert "| failed |  | wrong: forward: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "line, limit, status",
    [
        ("raise SystemExit(3)", str(PATIENCE), "ended with 3"),
        ("import time\n\ntime.sleep(1000)", "3", "no response in 3 s"),
    ],
    ids=["ends", "waits"],
)
def test_a_process_that_does_not_respond(changed_checkout, line, limit, status, capsys):
    assert (
        compare.main(["jagged_ops", f"only={changed_checkout(line)}", *OPTIONS, "--limit", limit])
        == 1
    )
    assert f"| (none) | failed | {status} |" in capsys.readouterr().out


def test_a_checkout_that_did_not_respond_is_not_measured_again():
    class Fake:
        def __init__(self, ms):
            self.ms, self.asked, self.ended = ms, [], False

        def rows(self, case, limit_s):
            self.asked.append(case)
            ms = self.ms.pop(0)
            if ms is None:
                return [{"implementation": compare.NO_RESPONSE, "status": "no response"}]
            return [{"implementation": "ours", "status": "ok", "forward_ms": ms}]

        def end(self):
            self.ended = True

    good, bad = Fake([3.0, 5.0, 2.0, 6.0]), Fake([4.0, None])
    rows = compare.compare({"good": good, "bad": bad}, ["a", "b"], rounds=2, limit_s=1)
    assert (
        bad.ended
        and bad.asked == ["a", "b"]
        and good.asked == ["a", "b", "a", "b"]
        and not good.ended
    )
    assert [(row["case"], row["pass"], row["cells"]) for row in rows] == [
        ("a", "forward", {"good": 2.0, "bad": 4.0}),
        ("b", "forward", {"good": 5.0}),
        ("b", "failed", {"bad": "no response"}),
    ]


@pytest.mark.parametrize("checkout", ["nowhere", f"name={ROOT / 'tests'}"])
def test_an_argument_without_a_checkout(checkout, capsys):
    with pytest.raises(SystemExit):
        compare.main(["jagged_ops", f"before={ROOT}", checkout])
    assert (
        f"{checkout!r} is not NAME=FOLDER with the folder of a checkout" in capsys.readouterr().err
    )
