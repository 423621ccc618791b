"""These tests run the kernels on host tensors: TRITON_INTERPRET=1 has to be set before triton is
imported."""

import importlib.util
import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from checked_memory import check_memory
    from faster_interpreter import make_faster

    make_faster()
    check_memory()


@pytest.fixture(autouse=True)
def _interpreter():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1 in the environment")
