"""Checkouts in turn: figures of both, what fails in one of them, a process that gives no answer."""

import json
import shutil
from pathlib import Path

import compare
import pytest

ROOT = Path(__file__).parents[2]
CASE = "operators: jagged_softmax B6 N≤10 H8"
OPTIONS = ["--device", "cpu", "--tiny", "--pause", "0", "--rep", "0.1", "--only", f"^{CASE}$"]


@pytest.fixture
def changed_checkout(tmp_path):
    """A copy of the packages, with a line put at the end of jagged_modules/functional/__init__.py."""

    def make(line):
        for package in ("jagged_modules", "kernels/jagged_kernels"):
            shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
        with open(tmp_path / "jagged_modules" / "functional" / "__init__.py", "a") as file:
            file.write(f"\n{line}\n")
        return tmp_path

    return make


def test_a_checkout_beside_itself(tmp_path, capsys):
    assert compare.main(["jagged_ops", f"one={ROOT}", f"two={ROOT}", "--out", str(tmp_path / "out.json"), *OPTIONS]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["case"], row["implementation"], row["pass"]) for row in rows] == [
        (CASE, "jagged_modules", "forward"),
        (CASE, "jagged_modules", "forward_backward"),
    ]
    assert all(row["cells"].keys() == {"one", "two"} and min(row["cells"].values()) > 0 for row in rows)
    table = capsys.readouterr().out
    assert "| one | two |" in table and table.count("×)") == 2 and "forward+backward" in table


def test_a_wrong_result_is_named_and_not_timed(changed_checkout, capsys):
    changed = changed_checkout("_right = jagged_softmax\n\n\ndef jagged_softmax(*args, **kwargs):\n    return 2 * _right(*args, **kwargs)")
    assert compare.main(["jagged_ops", f"before={ROOT}", f"after={changed}", *OPTIONS]) == 1
    assert "| failed |  | wrong: forward: " in capsys.readouterr().out


def test_a_process_that_gives_no_answer_is_left_out(changed_checkout, capsys):
    changed = changed_checkout("def jagged_softmax(*args, **kwargs):\n    import time\n\n    time.sleep(1000)")
    assert compare.main(["jagged_ops", f"before={changed}", f"after={ROOT}", *OPTIONS, "--limit", "30"]) == 1
    table = capsys.readouterr().out
    assert table.count("no answer in 30 s") == 1 and table.count("jagged_modules | forward") == 2


def test_a_process_that_ends_is_left_out(changed_checkout, capsys):
    changed = changed_checkout("raise SystemExit(3)")
    assert compare.main(["jagged_ops", f"before={ROOT}", f"after={changed}", *OPTIONS]) == 1
    assert "ended with 3" in capsys.readouterr().out


@pytest.mark.parametrize("checkout", ["nowhere", f"name={ROOT / 'tests'}"])
def test_what_is_no_checkout(checkout, capsys):
    with pytest.raises(SystemExit):
        compare.main(["jagged_ops", f"before={ROOT}", checkout])
    assert f"{checkout!r} is not NAME=FOLDER with the folder of a checkout" in capsys.readouterr().err
