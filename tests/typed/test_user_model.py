"""The file that type checkers check is a program that runs."""

import runpy
from pathlib import Path

from readme import shortly_timed


def test_it_runs():
    with shortly_timed():
        runpy.run_path(str(Path(__file__).with_name("user_model.py")))["main"]()
