"""The Python examples of README.md run as they stand, one after another: some use names of an earlier one."""

import pytest
from readme import examples


def test_examples_run():
    pytest.importorskip("torchrec")
    names = {"__name__": "readme"}
    for code in examples():
        exec(compile(code, "README.md", "exec"), names)
