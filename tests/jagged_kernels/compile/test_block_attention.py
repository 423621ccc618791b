"""The kernels of block-diagonal attention, portable and for Hopper, compile for the GPU generations
that we support."""

import re

import pytest
from marks import diagonal_first, slow_after

pytest.importorskip("triton")

from jagged_kernels.block_attention import hopper, triton_kernels
from jagged_kernels.block_attention.configs import block_attention_config, fits_shared_memory

from .ahead_of_time import compile_for, gluon_descriptor


def compile_block_attention(
    name,
    capability,
    dtype,
    dim,
    block_size,
    rotate,
    relative=False,
    group=1,
    precision="bf16x6",
    dropout=False,
):
    """The compiled kernel with its launch configuration."""
    kernel = getattr(triton_kernels, f"block_attention_{name}_kernel")
    itemsize = 4 if dtype == "fp32" else 2
    rotary = "none" if rotate is None else "relative" if relative else "absolute"
    config = block_attention_config(
        name, dim, itemsize, divmod(capability, 10), block_size, group, rotary
    )
    options = triton_kernels.Options(
        heads=4,
        group=group,
        dim=dim,
        block_m=config.block_m,
        block_size=block_size,
        block_d=config.block_d,
        rotate=rotate is not None,
        rotate_v=rotate == "qkv",
        relative=relative,
        align=16 // itemsize,
        packed=itemsize == 2,
        precision=precision if dtype == "fp32" else "ieee",
    )
    operands = triton_kernels.Forward if name == "fwd" else triton_kernels.Backward
    count = len(operands._fields)
    types = dict(
        x=operands(*[f"*{dtype}"] * count),
        offsets_ptr="*i64",
        tables=(*["constexpr" if rotate is None else "*fp32"] * 2, "constexpr"),
        scale="fp32",
        strides=("i32",) * (2 * count),
        dropout=triton_kernels.DropoutArguments("*i64", "fp32"),
    )
    return compile_for(
        capability,
        kernel,
        dict(OPTIONS=options) | ({} if dropout else dict(dropout=None)),
        types.get,
        aligned=("x", "offsets_ptr", "tables"),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


FP32_DIMS = {  # of rotate, relative
    (None, False): (16, 64),
    ("qk", True): (32,),
    ("qk", False): (16,),
    ("qkv", False): (32, 64),
}
forms = slow_after(1, "rotate, relative", FP32_DIMS, ids=str)
names = pytest.mark.parametrize("name", ["fwd", "bwd"])


@pytest.mark.parametrize("capability", [80, 86, 90, 100])
@forms
@names
def test_block_attention_kernels_compile(name, rotate, relative, capability):
    cases = wide, narrow = (128, 64, 1), (64, 16, 2)
    # 8.0 and 8.6 have the same configurations, which must fit the memory of 8.6. Wide heads take
    # longest to compile there: those with q and k at absolute positions are part of those with v
    # too.
    before_hopper = narrow if (rotate, relative) == ("qk", False) else wide
    cases = {80: [narrow], 86: [before_hopper]}.get(capability, cases)
    for dim, block_size, group in cases:
        compiled = compile_block_attention(
            name, capability, "bf16", dim, block_size, rotate, relative, group
        )
        assert compiled.metadata.shared <= (99 if capability < 90 else 227) * 1024
        if capability == 90:
            assert "wgmma.mma_async" in compiled.asm["ptx"]


@forms
@names
def test_block_attention_kernels_compile_in_fp32(name, rotate, relative):
    for dim in FP32_DIMS[rotate, relative]:
        compile_block_attention(name, 90, "fp32", dim, 64, rotate, relative)


DROPPED = [  # capability, dtype, head dim, block size, rotary, query heads of a key head
    (90, "bf16", 128, 64, "qk", 1),
    (80, "fp16", 64, 16, None, 2),
    (100, "bf16", 128, 64, "qkv", 1),
    (86, "fp32", 32, 32, None, 1),
]


@slow_after(
    2,
    "name, capability, dtype, dim, block_size, rotate, group",
    diagonal_first(["fwd", "bwd"], DROPPED),
    ids=str,
)
def test_kernels_with_dropout_compile(name, capability, dtype, dim, block_size, rotate, group):
    sizes = dtype, dim, block_size, rotate
    compiled = compile_block_attention(name, capability, *sizes, group=group, dropout=True)
    assert compiled.metadata.shared <= {80: 163, 86: 99, 90: 227, 100: 227}[capability] * 1024


@slow_after(1, "dtype, precision", [("bf16", "ieee"), ("fp32", "bf16x6"), ("fp32", "tf32")])
@slow_after(
    2, "capability, shared_memory, block_size", diagonal_first([(86, 99), (90, 227)], [64, 128])
)
def test_supported_blocks_fit_shared_memory(
    capability, shared_memory, dtype, precision, block_size
):
    """The widest heads that the rule allows, in groups: their backward needs most."""
    generation, itemsize = divmod(capability, 10), 4 if dtype == "fp32" else 2
    taken = [
        dim
        for dim in (32, 64, 128, 256)
        if fits_shared_memory(dim, itemsize, generation, block_size, 2)
    ]
    for dim in taken[-1:]:
        compiled = compile_block_attention(
            "bwd", capability, dtype, dim, block_size, None, group=2, precision=precision
        )
        assert compiled.metadata.shared <= shared_memory * 1024
    assert taken or capability == 86 and block_size == 128


@pytest.mark.parametrize("name", ["fwd", "bwd"])
def test_rotated_pairs_are_loaded_sixteen_bytes_at_a_time(name):
    """As four words, or by an asynchronous copy that bypasses L1, which moves 16 bytes."""
    ptx = compile_block_attention(name, 90, "bf16", 128, 64, "qkv").asm["ptx"]
    loads = re.findall(r"ld\.global\S*|cp\.async\.c[ag]\S*", ptx)
    assert sum(".v4." in load or ".cg." in load for load in loads) > 0.7 * len(loads)


def compile_hopper_block_attention(name, dtype, dim, width, block_size, rotate, relative, precise):
    """The compiled kernel for compute capability 9.0; `width`: columns of a tile in shared memory,
    at least `dim`."""
    kernel, rows = getattr(hopper, f"block_attention_{name}_hopper_kernel"), max(block_size, 64)
    constants = dict(
        OPTIONS=hopper.Options(
            heads=4,
            heads_per_cta=2,
            dim=dim,
            block_m=rows,
            block_d=width,
            block_size=block_size,
            rotate=rotate is not None,
            rotate_v=rotate == "qkv",
            relative=relative,
            precise=precise,
        )
    )
    tables = ["constexpr" if rotate is None else "*fp32"] * 2
    results = [f"*{dtype}"] * (1 if name == "fwd" else 3)
    pointers = hopper.Forward if name == "fwd" else hopper.Backward
    types = dict(
        pointers=pointers(*results, "*i64", *tables, "constexpr"),
        numbers=("fp32", *["i32"] * (2 * len(results))),
    )

    def type_of(arg):
        if arg.endswith("_desc"):
            return gluon_descriptor(dtype, [1, rows, width])
        return types.get(arg)

    options = dict(num_warps=rows // 16, maxnreg=168 if name == "fwd" and rows == 64 else None)
    return compile_for(90, kernel, constants, type_of, aligned=(), **options)


@slow_after(
    1, "rotate, relative", [(None, False), ("qk", True), ("qk", False), ("qkv", False)], ids=str
)
@pytest.mark.parametrize("name", ["fwd", "bwd"])
def test_hopper_block_attention_kernels_compile(name, rotate, relative):
    """Two thread blocks of 64 rows share a multiprocessor; tiles are loaded and stored by the
    tensor memory accelerator."""
    cases = (
        ("bf16", 128, 128, 64, False),
        ("bf16", 128, 128, 64, True),
        ("fp16", 40, 64, 16, False),
        ("bf16", 128, 128, 128, False),
    )
    for dtype, dim, width, block_size, precise in cases[:: 1 if rotate else 2]:
        compiled = compile_hopper_block_attention(
            name, dtype, dim, width, block_size, rotate, relative, precise
        )
        assert compiled.metadata.shared <= 227 * 1024 // (2 if block_size <= 64 else 1)
        rows = max(block_size, 64)
        # the sum at the head of hopper.py, without its barriers
        tile, square = 2 * rows * width, 2 * rows * rows
        assert (
            0
            < compiled.metadata.shared - (4 * tile if name == "fwd" else 5 * tile + 2 * square)
            < 1024
        )
        for instruction in (
            "wgmma.mma_async",
            "cp.async.bulk.tensor.3d.shared",
            "cp.async.bulk.tensor.3d.global",
        ):
            assert instruction in compiled.asm["ptx"]
