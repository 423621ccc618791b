"""Which kernels of DIN's attention run, as tables; without a GPU."""

import dataclasses

import pytest
import torch
from jagged_kernels.din.configs import DINProblem, runs_on_hopper

TYPICAL = DINProblem(
    width=64, hidden=(80, 40), dtype=torch.bfloat16, same=True, aligned=True,
    device_type="cuda", capability=(9, 0),
)  # fmt: skip


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, True),
        (dict(hidden=(128, 64)), True),
        (dict(width=128, hidden=(80, 64)), True),
        (dict(width=128, hidden=(128, 64)), False),  # one program an SM
        (dict(width=129), False),
        (dict(hidden=(129, 40)), False),
        (dict(hidden=(80, 65)), False),
        (dict(hidden=(80,)), False),
        (dict(dtype=torch.float16), False),
        (dict(dtype=torch.float32), False),
        (dict(same=False), False),
        (dict(aligned=False), False),
        (dict(capability=(8, 0)), False),
        (dict(capability=(10, 0)), False),
        (dict(device_type="cpu"), False),  # the interpreter
    ],
    ids=str,
)
def test_forward(changes, expected):
    assert runs_on_hopper(dataclasses.replace(TYPICAL, **changes), backward=False) is expected


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, True),
        (dict(width=8, hidden=(5, 3)), True),
        (dict(hidden=(80, 64)), True),
        (dict(hidden=(81, 40)), False),  # registers
        (dict(hidden=(80, 65)), False),
        (dict(width=65), False),
        (dict(hidden=(80,)), False),
        (dict(dtype=torch.float16), False),
        (dict(same=False), False),
        (dict(aligned=False), False),
        (dict(capability=(8, 0)), False),
        (dict(device_type="cpu"), False),
    ],
    ids=str,
)
def test_backward(changes, expected):
    assert runs_on_hopper(dataclasses.replace(TYPICAL, **changes), backward=True) is expected
