"""Hopper's attention and DIN kernels on a CPU, by `emulated_gluon`: the fixtures of the tests that
run them in place of those of the interpreter."""

from __future__ import annotations

import types

import pytest
import torch
from emulated_gluon import Descriptor, emulated
from jagged_kernels.attention import select
from jagged_kernels.attention.hopper import dq_sums, launch
from jagged_kernels.common.configs import padded_dim
from jagged_kernels.din import op as din


def _head_descriptor(x: torch.Tensor, rows: int, columns: int = 256) -> Descriptor:
    width = max(64, padded_dim(min(columns, x.shape[2])))
    return Descriptor(x.permute(1, 0, 2), 1, rows, width)


def _replace_kernels(monkeypatch: pytest.MonkeyPatch, owner: types.ModuleType) -> None:
    """Those of Hopper that a module launches, and its descriptors."""
    for name, kernel in list(vars(owner).items()):
        if name.endswith("_hopper_kernel"):
            monkeypatch.setattr(owner, name, getattr(emulated(kernel.fn.__module__), name))
    monkeypatch.setattr(owner, "descriptor", Descriptor)


@pytest.fixture
def hopper_attention(monkeypatch):
    """implementation="hopper" runs on a CPU."""
    _replace_kernels(monkeypatch, launch)
    monkeypatch.setattr(launch, "head_descriptor", _head_descriptor)
    monkeypatch.setattr(dq_sums, "descriptor", Descriptor)
    supported = select.hopper_is_supported
    monkeypatch.setattr(select, "hopper_is_supported", lambda *x: supported(*x[:3], (9, 0)))


@pytest.fixture
def hopper_din(monkeypatch):
    """DIN's kernels are Hopper's, with programs that have several rows of q or one."""
    _replace_kernels(monkeypatch, din)
    monkeypatch.setattr(din._Launch, "programs", lambda _, rows: min(rows, 5))

    def runs(launch, backward):
        options = launch.constants["OPTIONS"]
        return not (backward and (options.hidden[0] > 80 or options.width > 64))

    monkeypatch.setattr(din, "_runs_hopper", runs)
