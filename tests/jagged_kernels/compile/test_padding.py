"""The kernels that convert jagged rows and padded ones compile for the GPU generations that we
support."""

import re

import pytest
from marks import slow_after

pytest.importorskip("triton")

from jagged_kernels.rows import padding_kernels as kernels
from jagged_kernels.rows.configs import padding_config

from ..sass import spilled_bytes
from .ahead_of_time import compile_for

BYTES = dict(i8=1, bf16=2, fp32=4, i64=8, fp64=8)
KERNELS = {  # the kernel, and its pointers that are None
    "to padded": (kernels.to_padded_kernel, ("factor",)),
    "to padded, product": (kernels.to_padded_kernel, ()),
    "to jagged": (kernels.to_jagged_kernel, ("x",)),
    "to jagged, product": (kernels.to_jagged_kernel, ()),
    "kept": (kernels.to_jagged_kernel, ("y",)),
}


def compile_padding(capability, name, dtype, index, size, options=(False, False, True)):
    kernel, absent = KERNELS[name]
    config = padding_config(size, BYTES[dtype])
    constants = {f"{x}_ptr": None for x in absent}
    align = 16 // BYTES[dtype] if size % 16 == 0 else 1
    constants["OPTIONS"] = kernels.PaddingOptions(size, *options, align, config.rows, config.block)

    def type_of(arg):
        if arg == "strides":
            return ("i32", "i32")
        if arg.endswith("_ptr"):
            return f"*{index if arg == 'offsets_ptr' else dtype}"
        return None

    return compile_for(capability, kernel, constants, type_of, num_warps=config.num_warps)


@slow_after(1, "capability", [90, 80, 100])
@pytest.mark.parametrize("dtype, index", [("bf16", "i64"), ("fp32", "i32"), ("fp64", "i64")])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile(name, dtype, index, capability):
    """Rows of 512 columns are loaded and stored 16 bytes at a time, and nothing is spilled."""
    compiled = compile_padding(capability, name, dtype, index, 512)
    words = set(re.findall(r"(ld|st)\.global(?:\.\w+)*\.(v4\.b32|v2\.b64)", compiled.asm["ptx"]))
    assert {kind for kind, _ in words} == {"ld", "st"}
    assert spilled_bytes(compiled.asm["cubin"]) == 0


@pytest.mark.parametrize("size", [1, 27, 1000])
@pytest.mark.parametrize("name", KERNELS)
def test_other_rows_compile(name, size):
    for dtype, left in (
        (("i8", True), ("i64", False)) if "product" not in name else [("fp64", True)]
    ):
        compiled = compile_padding(90, name, dtype, "i64", size, (left, True, False))
        assert spilled_bytes(compiled.asm["cubin"]) == 0
