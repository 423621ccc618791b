"""Attention's portable kernels compile for the GPU generations that we support."""

import re

import pytest
from marks import diagonal_first, slow_after

pytest.importorskip("triton")

from jagged_kernels.attention.configs import attention_config, attention_tile, biased_dq_config
from jagged_kernels.attention.triton_dkdv import BackwardDkdv, attention_bwd_dkdv_kernel
from jagged_kernels.attention.triton_dq import BackwardDq, attention_bwd_dq_kernel
from jagged_kernels.attention.triton_forward import Forward, attention_fwd_kernel
from jagged_kernels.attention.triton_tiles import Call, Options
from jagged_kernels.common.activations import activation_function
from jagged_kernels.common.configs import padded_dim

from ..sass import disassembled
from .ahead_of_time import BIASES, MASKS, bias_types, compile_for

KERNELS = {
    "fwd": attention_fwd_kernel,
    "dq": attention_bwd_dq_kernel,
    "dkdv": attention_bwd_dkdv_kernel,
}
POINTERS = {"fwd": Forward, "dq": BackwardDq, "dkdv": BackwardDkdv}
# of a thread block, by compute capability
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# A kernel takes seconds to compile. So an option is compiled for some of the capabilities, and each
# capability with several options. The first ones, each of one kernel, are not slow.
MASKED = [  # activation, mask, capability
    ("gelu_tanh", "none", 100),
    ("silu", "hstu", 90),
    ("softmax", "semi-local", 80),
    ("softmax", "window", 86),
    ("gelu_tanh", "none", 86),
    ("silu", "hstu", 80),
    ("softmax", "semi-local", 100),
    ("softmax", "window", 90),
]
BIASED = [  # bias, head dim, dtype, activation, mask, capability
    ("both", 64, "bf16", "softmax", "none", 90),
    ("all", 96, "fp16", "gelu_tanh", "semi-local", 80),
    ("position", 128, "bf16", "silu", "hstu", 100),
    ("both", 64, "bf16", "softmax", "none", 100),
    ("both", 256, "bf16", "softmax", "window", 80),
    ("both", 256, "bf16", "softmax", "window", 86),
    ("both", 128, "fp32", "silu", "none", 86),
    ("both", 128, "fp32", "silu", "none", 90),
]
GROUPED = [  # query groups, activation, capability, mask, bias
    (2, "softmax", 80, "none", None),
    (3, "softmax", 90, "none", None),
    (2, "softmax", 90, "grouped", "both"),
    (2, "softmax", 100, "none", "all"),
    (2, "gelu_tanh", 90, "none", "position"),
    (2, "softmax", 90, "grouped", None),
    (2, "softmax", 100, "none", None),
    (2, "gelu_tanh", 90, "none", None),
    (3, "gelu_tanh", 80, "grouped", "both"),
    (3, "gelu_tanh", 80, "grouped", None),
    (3, "gelu_tanh", 100, "none", None),
]
DROPPED = [  # head dim, dtype, capability, activation, mask
    (64, "bf16", 90, "softmax", "none"),
    (128, "fp16", 80, "silu", "hstu"),
    (128, "bf16", 100, "softmax", "none"),
    (128, "bf16", 90, "gelu_tanh", "none"),
    (256, "bf16", 86, "softmax", "window"),
    (64, "fp32", 90, "softmax", "semi-local"),
    (128, "fp32", 86, "silu", "none"),
]
PAGED = [  # head dim, dtype, capability, activation, mask, bias
    (128, "bf16", 80, "softmax", "none", None),
    (64, "bf16", 90, "silu", "hstu", None),
    (128, "bf16", 100, "softmax", "none", None),
    (256, "fp16", 90, "softmax", "window", None),
    (64, "fp32", 80, "softmax", "none", None),
    (96, "fp16", 86, "silu", "none", "both"),
]


def compile_attention(
    name: str,
    dim: int,
    dtype: str,
    capability: int,
    tma: bool = False,
    precision="ieee",
    activation="softmax",
    mask=None,
    long=False,
    query_groups: int = 1,
    bias=None,
    page_rows: int | None = None,
    dropout: bool = False,
    stored: str | None = None,
):
    """The compiled kernel with the launch configuration that `dim` and `dtype` get on that
    capability. bias: a BiasKind, whose tables have gradients. page_rows: of the forward's keys;
    None: they are not in pages. dropout: weights are dropped. stored: dtype of keys in 8 bits."""
    kernel, itemsize = KERNELS[name], 4 if dtype == "fp32" else 2
    tile = attention_tile(dim, itemsize, divmod(capability, 10))
    config = getattr(
        attention_config(dim, itemsize, divmod(capability, 10), tile.query, long), name
    )
    if name == "dq" and bias is not None:
        config = biased_dq_config(config._replace(tile=config.tile or tile.query))
    block_m, block_n = (
        (config.block, tile.key) if name == "dkdv" else (config.tile or tile.query, config.block)
    )
    sums, masked = name == "dq" and bias is not None, mask is not None
    options = Options(
        group=1,
        head_dim=dim,
        v_dim=dim,
        block_d=padded_dim(dim),
        block_dv=padded_dim(dim),
        precision=precision,
        mask=mask,
        bias=bias,
        masked_stages=min(2, config.num_stages) if masked else 1,
        tile=block_n if name == "dkdv" else block_m,
        block=block_m if name == "dkdv" else block_n,
        align=16 // itemsize,
        query_groups=query_groups,
        page_rows=page_rows,
        buckets=max(1, 2 * bias.boundaries) if sums else 0,
    )
    constants = dict(ACTIVATION=activation_function(activation, dtype == "bf16"), OPTIONS=options)
    constants |= {arg: None for arg in kernel.arg_names if arg.endswith("_desc") and not tma}
    constants |= dict(num_segments=None) if query_groups == 1 else {}
    constants |= {} if bias else dict(bias=None)
    constants |= {} if sums else dict(sums=None)
    constants |= {} if page_rows else dict(page_table_ptr=None)
    by_segment = ("*i64", "*fp32") if masked else ("constexpr", "constexpr")
    of_dropout = ("*i64", "fp32") if dropout else ("constexpr", "constexpr")
    call = Call("*i64", "*i64", "*i32", *by_segment, *["fp32"] * 4, *of_dropout)
    operands = POINTERS[name]
    num_rows = sum(x in ("q", "k", "v", "out", "do", "dq", "dk", "dv") for x in operands._fields)

    def type_of(arg):
        if arg in ("bias", "sums"):
            return bias_types(arg, bias, scratch=True, entries=False)
        if arg == "x":
            own = dict(k=stored, v=stored) if stored else {}
            own |= dict(lse="fp32", delta="fp32")
            types = {x: f"*{own.get(x, dtype)}" for x in operands._fields}
            of_scales = ["*fp32", "i32", "i32"] if stored else ["constexpr"] * 3
            types |= zip(operands._fields[-3:], of_scales) if name == "fwd" else ()
            return operands(**types)
        if arg.endswith("_desc"):
            rows = block_n if arg in ("k_desc", "v_desc") else block_m
            return f"tensordesc<{dtype}[1, {rows}, {padded_dim(dim)}]>"
        types = dict(call=call, strides=("i32",) * (2 * num_rows), num_tiles_ptr="*i32")
        return (types | dict(page_table_ptr="*i32")).get(arg)

    of_call = (f"call.{x}" for x in call._fields if x != "tiles_ptr")
    aligned = ["x", "num_tiles_ptr", *of_call]
    return compile_for(
        capability,
        kernel,
        constants,
        type_of,
        aligned,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@slow_after(
    3,
    "dim, capability",
    [*((dim, capability) for dim in (64, 128, 256) for capability in (80, 90, 100)), (96, 90)],
)
@pytest.mark.parametrize("name", KERNELS)
def test_attention_kernels_compile_in_bf16(name, dim, capability):
    compiled = compile_attention(name, dim, "bf16", capability, tma=capability >= 90)
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]
    if capability == 90:
        assert "wgmma.mma_async" in compiled.asm["ptx"]


@slow_after(1, "capability", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_attention_kernels_of_long_segments_compile(name, capability):
    compiled = compile_attention(name, 128, "bf16", capability, tma=capability >= 90, long=True)
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]


PRECISIONS = [("bf16", "ieee"), ("fp32", "bf16x6"), ("fp32", "tf32")]


@slow_after(1, "dim", [64, 128, 256])
@slow_after(3, "name, dtype, precision", diagonal_first(KERNELS, PRECISIONS))
def test_attention_kernels_fit_gpus_with_little_shared_memory(name, dtype, precision, dim):
    compiled = compile_attention(name, dim, dtype, 86, precision=precision)
    assert compiled.metadata.shared <= SHARED_MEMORY[86]


@slow_after(1, "dim", [64, 128])
@pytest.mark.parametrize("name", KERNELS)
def test_attention_kernels_compile_in_fp32(name, dim):
    compile_attention(name, dim, "fp32", 90, tma=True, precision="bf16x6")


@slow_after(3, "name, activation, mask, capability", diagonal_first(KERNELS, MASKED))
def test_activations_and_masks_compile(name, activation, mask, capability):
    options = dict(tma=capability >= 90, activation=activation, mask=MASKS[mask])
    compiled = compile_attention(name, 128, "bf16", capability, **options)
    # On Hopper two thread blocks share a multiprocessor.
    assert compiled.metadata.shared <= SHARED_MEMORY[capability] // (2 if capability == 90 else 1)


@slow_after(
    3, "name, bias, dim, dtype, activation, mask, capability", diagonal_first(KERNELS, BIASED)
)
def test_attention_kernels_with_a_bias_compile(
    name, bias, dim, dtype, activation, mask, capability
):
    options = dict(
        tma=capability >= 90,
        activation=activation,
        mask=MASKS[mask],
        precision="bf16x6" if dtype == "fp32" else "ieee",
    )
    compiled = compile_attention(name, dim, dtype, capability, bias=BIASES[bias], **options)
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]


@slow_after(
    4, "name, query_groups, activation, capability, mask, bias", diagonal_first(KERNELS, GROUPED)
)
def test_attention_kernels_compile_for_several_query_groups(
    name, query_groups, activation, capability, mask, bias
):
    options = dict(tma=capability >= 90, activation=activation, query_groups=query_groups)
    options |= dict(mask=MASKS[mask], bias=BIASES.get(bias))
    compiled = compile_attention(name, 128, "bf16", capability, **options)
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]


@slow_after(3, "dim, dtype, capability, activation, mask, bias", PAGED)
def test_the_forward_compiles_with_keys_in_pages(dim, dtype, capability, activation, mask, bias):
    """With as many stages as without pages."""
    options = dict(
        tma=capability >= 90, activation=activation, mask=MASKS[mask], bias=BIASES.get(bias)
    )
    options |= dict(precision="bf16x6" if dtype == "fp32" else "ieee")
    paged, plain = (
        compile_attention("fwd", dim, dtype, capability, page_rows=rows, **options)
        for rows in (256, None)
    )
    assert paged.metadata.shared == plain.metadata.shared <= SHARED_MEMORY[capability]


@slow_after(
    3,
    "stored, dim, dtype, capability",
    [
        ("i8", 64, "bf16", 90),
        ("fp8e4nv", 128, "fp16", 90),
        ("i8", 256, "fp32", 80),
        ("fp8e4nv", 128, "bf16", 100),
        ("i8", 128, "bf16", 86),
    ],
)
def test_the_forward_compiles_with_keys_in_8_bits(stored, dim, dtype, capability):
    options = dict(activation="silu", mask=MASKS["hstu"], stored=stored)
    options |= dict(precision="bf16x6" if dtype == "fp32" else "ieee")
    compiled = compile_attention("fwd", dim, dtype, capability, page_rows=256, **options)
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]


@slow_after(3, "name, dim, dtype, capability, activation, mask", diagonal_first(KERNELS, DROPPED))
def test_attention_kernels_with_dropout_compile(name, dim, dtype, capability, activation, mask):
    options = dict(tma=capability >= 90, activation=activation, mask=MASKS[mask], dropout=True)
    options |= dict(precision="bf16x6" if dtype == "fp32" else "ieee")
    compiled = compile_attention(name, dim, dtype, capability, **options)
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]


@slow_after(1, "name", ["dkdv", "fwd", "dq"])
def test_four_weights_share_a_call_of_philox(name):
    """Full and masked blocks each have a body, and a call has seven products."""
    tile, dim = attention_tile(64, 2, (9, 0)), 64
    config = getattr(attention_config(dim, 2, (9, 0), tile.query, False), name)
    rows = tile.key if name == "dkdv" else config.tile or tile.query
    weights = rows * config.block // (32 * config.num_warps)
    ptx = compile_attention(name, dim, "bf16", 90, tma=True, dropout=True).asm["ptx"]
    assert 0 < len(re.findall(r"mul\.hi\.u32", ptx)) <= 2 * 7 * weights / 4


@slow_after(1, "name", KERNELS)
def test_gelu_taylor_uses_no_special_function_unit(name):
    """And its clamp is part of the multiplication before it."""
    special = re.compile(r"\b(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh|div)\.\w*\.?f32")
    polynomial = compile_attention(name, 64, "bf16", 90, tma=True, activation="gelu_taylor")
    assert not special.search(polynomial.asm["ptx"])
    assert "FFMA.SAT" in disassembled(polynomial.asm["cubin"])
    assert special.search(
        compile_attention(name, 64, "bf16", 90, tma=True, activation="gelu_tanh").asm["ptx"]
    )
