"""The kernels for short segments compile for the GPU generations that we support, and fit their
shared memory."""

import pytest
from marks import diagonal_first, slow_after

pytest.importorskip("triton")

from jagged_kernels.attention.configs import packed_config
from jagged_kernels.attention.packed_tiles import CHUNK, _pack_kernel
from jagged_kernels.attention.params import Operands
from jagged_kernels.attention.triton_packed import (
    Backward,
    Batch,
    Options,
    Scales,
    packed_attention_bwd_kernel,
    packed_attention_fwd_kernel,
)
from jagged_kernels.common.activations import activation_function
from jagged_kernels.common.configs import padded_dim

from .ahead_of_time import MASKS, compile_for

KERNELS = {"fwd": packed_attention_fwd_kernel, "bwd": packed_attention_bwd_kernel}
# of a thread block, by compute capability
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# capability, dtype, head dim, activation, mask, query heads per key head, cross-attention
CASES = [
    (80, "fp16", 64, "softmax", "none", 1, False),
    (86, "bf16", 128, "silu", "hstu", 2, False),
    (90, "bf16", 128, "softmax", "none", 1, False),
    (90, "fp16", 24, "gelu", "window", 4, False),
    (100, "bf16", 128, "softmax", "semi-local", 1, False),
    (80, "bf16", 128, "softmax", "window", 2, True),
    (86, "fp16", 64, "silu", "none", 1, True),
    (90, "bf16", 128, "softmax", "none", 1, True),
    (90, "bf16", 64, "silu", "hstu", 1, True),
    (100, "fp16", 128, "gelu", "none", 4, True),
]


@slow_after(
    len(CASES),
    "name, capability, dtype, dim, activation, mask, group, cross",
    diagonal_first(KERNELS, CASES),
    ids=str,
)
def test_kernels_compile(name, capability, dtype, dim, activation, mask, group, cross):
    compile_packed(name, capability, dtype, dim, activation, mask, group, cross)


@slow_after(
    1,
    "name, capability, dtype, dim, activation, mask, group, cross",
    diagonal_first(KERNELS, CASES)[2:6],
    ids=str,
)
def test_kernels_with_dropout_compile(name, capability, dtype, dim, activation, mask, group, cross):
    compile_packed(name, capability, dtype, dim, activation, mask, group, cross, dropout=True)


def compile_packed(name, capability, dtype, dim, activation, mask, group, cross, dropout=False):
    config, block = packed_config(name, dim), padded_dim(dim)
    options = dict(
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.max_registers
    )
    launch = Options(
        heads=4,
        group=group,
        head_dim=dim,
        v_dim=dim,
        block_d=block,
        block_dv=block,
        align=8,
        precision="tf32",
        mask=MASKS[mask],
    )
    constants = dict(ACTIVATION=activation_function(activation, dtype == "bf16"), OPTIONS=launch)

    def given(type, there):
        return type if there else "constexpr"

    of_dropout = ("*i64", "fp32") if dropout else ("constexpr", "constexpr")
    operands = [f"*{dtype}"] * (4 if name == "fwd" else 7)
    types = dict(
        x=Operands(*operands, "*fp32") if name == "fwd" else Backward(*operands),
        batch=Batch(
            "*i64",
            given("*i64", cross),
            "*i32",
            "*i32",
            given("*i64", mask not in ("none", "window")),
            given("*fp32", activation != "softmax"),
        ),
        scales=Scales(*["fp32"] * 4, *of_dropout),
        strides=("i32",) * (2 * len(operands)),
    )
    compiled = compile_for(
        capability, KERNELS[name], constants, types.get, aligned=("x", "batch"), **options
    )
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]
    if capability == 90:
        assert "wgmma" in compiled.asm["ptx"]


@slow_after(
    3,
    "capability, offsets, cross",
    diagonal_first([(80, "*i64"), (90, "*i32"), (100, "*i64")], [False, True]),
)
def test_pack_kernel_compiles(capability, offsets, cross):
    types = dict(
        q_offsets_ptr=offsets, kv_offsets_ptr=offsets, tiles_ptr="*i32", num_tiles_ptr="*i32"
    )
    constants = dict(CHUNK=CHUNK) | ({} if cross else dict(kv_offsets_ptr=None))
    assert compile_for(capability, _pack_kernel, constants, types.get, aligned=(), num_warps=1).asm[
        "cubin"
    ]
