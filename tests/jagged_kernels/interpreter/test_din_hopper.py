"""Hopper's kernels of DIN's attention on a CPU, by emulated_gluon.py. Others run in the
interpreter."""

import pytest
import torch
from din_problem import ACTIVATIONS, MASKS
from emulated_gluon import Descriptor, emulated
from jagged_kernels.din import op
from marks import slow_after

BF16 = torch.bfloat16
SEGMENTS = dict(candidates=[0, 3, 1, 3, 0] + [4] * 9 + [6] * 3, lengths=[1, 64, 3, 65, 128, 0, 300])
NORMALIZE = {x: "softmax" if x in ("sigmoid", "silu", "identity") else None for x in ACTIVATIONS}


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    """Its kernels, with programs that have several rows of q or one."""
    for folder in ("forward", "rows", "events"):
        module = emulated(f"jagged_kernels.din.hopper_{folder}")
        for name in vars(op):
            if name.endswith("_hopper_kernel") and hasattr(module, name):
                monkeypatch.setattr(op, name, getattr(module, name))
    monkeypatch.setattr(op, "descriptor", Descriptor)
    monkeypatch.setattr(op._Launch, "programs", lambda _, rows: min(rows, 5))

    def runs(launch, backward):
        options = launch.constants["OPTIONS"]
        return options.same and not (backward and options.hidden[0] > 80)

    monkeypatch.setattr(op, "_runs_hopper", runs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_and_gradients(check_din, activation):
    options = dict(width=64, v_width=None, hidden=(80, 40), normalize=NORMALIZE[activation])
    check_din(activation, BF16, "cpu", **options, **SEGMENTS)


@slow_after(
    5,
    "mask, activation, normalize",
    [(x, "dice-eval", None) for x in MASKS] + [(x, "silu", "softmax") for x in MASKS],
)
def test_masks(check_din, mask, activation, normalize):
    options = dict(width=64, v_width=None, hidden=(80, 40), normalize=normalize, mask=mask)
    check_din(activation, BF16, "cpu", **options, **SEGMENTS)


@slow_after(
    4,
    "sizes",
    [((80, 64), 64), ((64, 32), 8), ((33, 16), 40), ((5, 3), 20), ((16, 20), 64), ((80, 33), 24)],
    ids=str,
)
def test_sizes(check_din, sizes):
    hidden, width = sizes
    options = dict(candidates=[0, 1, 1, 1, 2], lengths=[2, 70, 129], normalize="softmax")
    check_din("relu", BF16, "cpu", hidden=hidden, width=width, v_width=None, **options)
