"""The interpreter tests fail if a kernel reads or writes an element outside of its tensors."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl


@triton.jit
def _copy(x_ptr, y_ptr, first, x_len, y_len, atomic: tl.constexpr):
    i = first + tl.arange(0, 8)
    x = tl.load(x_ptr + i, mask=i < x_len)
    if atomic:
        tl.atomic_add(y_ptr + i, x, mask=i < y_len)
    else:
        tl.store(y_ptr + i, x, mask=i < y_len)


def copy(first=0, x_len=5, y_len=5, atomic=False):
    """The views lie in the middle of larger tensors, whose other elements the kernel may not touch
    either."""
    x, y = torch.arange(20.0)[5:10], torch.zeros(20)[5:10]
    _copy[(1,)](x, y, first, x_len, y_len, atomic)
    return y


@pytest.mark.parametrize("atomic", [False, True])
def test_masked_elements_are_not_touched(atomic):
    assert copy(atomic=atomic).tolist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    "options, message",
    [
        (
            dict(x_len=6),
            "load of 1 elements of 4 bytes outside of the kernel's tensors, \\+0 bytes",
        ),
        (dict(first=-1), "load of 1 elements of 4 bytes outside of the kernel's tensors, -4 bytes"),
        (
            dict(y_len=7),
            "store of 2 elements of 4 bytes outside of the kernel's tensors, \\+0 bytes",
        ),
        (
            dict(y_len=7, atomic=True),
            "atomic operation of 2 elements of 4 bytes outside of the kernel's tensors, \\+0 bytes",
        ),
    ],
)
def test_elements_outside(options, message):
    with pytest.raises(triton.runtime.errors.InterpreterError, match=message):
        copy(**options)
