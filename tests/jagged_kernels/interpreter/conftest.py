"""These tests run the kernels on host tensors: TRITON_INTERPRET=1 has to be set before triton is imported."""

import os

import pytest


@pytest.fixture(autouse=True)
def _interpreter():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1 in the environment")
