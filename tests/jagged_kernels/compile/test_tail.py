"""The kernels that clear rows behind the last segment compile for the GPU generations that we
support."""

import re

import pytest
from marks import slow_after

pytest.importorskip("triton")

from jagged_kernels.common import tail

from .ahead_of_time import compile_for

DTYPES = ["bf16", "fp32", "fp64"]


@slow_after(1, "capability", [90, 80, 100])
@pytest.mark.parametrize("index", ["i32", "i64"])
def test_zero_tails_compiles(capability, index):
    """For three tensors of several dtypes; rows of 512 elements are written 16 bytes at a time."""
    tensors = dict(out_ptrs=tuple(f"*{dtype}" for dtype in DTYPES), offsets_ptrs=(f"*{index}",) * 3)
    constants = dict(SIZES=(512, 512, 512), BLOCK=tail.BLOCK)
    ptx = compile_for(
        capability, tail.zero_tails_kernel, constants, tensors.get, aligned=tensors, num_warps=4
    ).asm["ptx"]
    assert set(re.findall(r"st\.global(\S*)", ptx)) == {".v4.b32", ".v2.b64"}


@slow_after(1, "capability", [90, 80, 100])
@pytest.mark.parametrize("index", ["i32", "i64"])
@pytest.mark.parametrize(("extra", "other"), [(0, "offsets"), (32, "offsets"), (0, "order")])
def test_keep_rows_compiles(capability, index, extra, other):
    for dtype in DTYPES:
        types = dict.fromkeys(tail.KeptRows._fields, "constexpr") | {other: f"*{index}"}
        types |= dict(x=f"*{dtype}", out=f"*{dtype}")
        tensors = dict(tensors=tail.KeptRows(**types))
        constants = dict(SIZE=512, EXTRA=extra, WIDTH=512 + extra, ALIGN=2, ROWS=8, COLUMNS=512)
        ptx = compile_for(
            capability, tail.keep_rows_kernel, constants, tensors.get, num_warps=4
        ).asm["ptx"]
        assert ".v" in ptx
