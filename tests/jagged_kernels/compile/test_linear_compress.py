"""The kernels of linear compression, portable and for Hopper, compile for the GPU generations that
we support."""

import contextlib
import io
import math

import pytest
from marks import diagonal_first, slow_after

triton = pytest.importorskip("triton")

from jagged_kernels.common.ptxas import hopper_ptxas
from jagged_kernels.linear_compress import triton_kernels as linear_compress_kernels
from jagged_kernels.linear_compress.configs import (
    hopper_gemm_config,
    linear_compress_config,
    weight_gradient_config,
)
from jagged_kernels.linear_compress.hopper import Memory, Options, linear_compress_fwd_hopper_kernel
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from .ahead_of_time import compile_for, compile_source, gluon_descriptor


def compile_linear_compress(name, capability, dtype, sizes, aligned_embeddings=True):
    """The compiled kernel with its launch configuration; `sizes`: M, K, N of weights `[M, K]` and
    embeddings `[B, K, N]`.

    Embeddings whose rows are not aligned to 16 bytes are not read by a tensor descriptor.
    """
    m, k, n = sizes
    itemsize, generation = 4 if dtype == "fp32" else 2, divmod(capability, 10)
    kernel = getattr(linear_compress_kernels, f"linear_compress_{name}_kernel")
    align = 16 // itemsize if aligned_embeddings else math.gcd(16 // itemsize, n)
    options = dict(m=m, k=k, n=n, align=align, precision="bf16x6" if dtype == "fp32" else "ieee")
    pointers = dict(
        addends_ptr=("*fp32", "*fp32"), indices_ptr=("*i64", "*i32"), partial_ptr="*fp32"
    )
    pointers |= dict(strides=("i32",) * 3)
    if name == "fwd":
        config = linear_compress_config(itemsize, generation, n)
        options |= dict(
            block_m=config.block_m, tail_m=64, block_n=config.block_n, block_k=config.block_k
        )
        shapes = dict(
            w_desc=(config.block_m, config.block_k),
            w_tail_desc=(64, config.block_k),
            e_desc=(config.block_k, config.block_n),
        )
    else:
        config = weight_gradient_config(itemsize, generation, m, k)
        options |= dict(block_m=config.block_m, block_k=config.block_n, block_n=config.block_k)
        shapes = dict(
            g_desc=(config.block_m, config.block_k), e_desc=(config.block_n, config.block_k)
        )
    if capability < 90:
        described = ()
    elif aligned_embeddings:
        described = shapes
    else:  # the weights are padded to 16 bytes
        described = [arg for arg in shapes if arg.startswith("w_")]
    descriptors = {
        arg: f"tensordesc<{dtype}[1, {shapes[arg][0]}, {shapes[arg][1]}]>" for arg in described
    }
    constants = dict(OPTIONS=linear_compress_kernels.Options(**options))
    constants |= {arg: None for arg in shapes if arg not in descriptors}

    def type_of(arg):
        return (
            descriptors.get(arg)
            or pointers.get(arg)
            or (f"*{dtype}" if arg.endswith("_ptr") else None)
        )

    return compile_for(
        capability,
        kernel,
        constants,
        type_of,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


KERNELS = ["fwd", "bwd_dw"]
PLAIN = [  # dtype, compute capability, KiB of shared memory; fp16 has the configurations of bf16
    ("bf16", 90, 227), ("fp32", 80, 163), ("bf16", 100, 227), ("bf16", 86, 99), ("fp16", 80, 163),
    ("bf16", 80, 163), ("bf16", 120, 99), ("fp16", 90, 227), ("fp32", 90, 227), ("fp32", 100, 227),
    ("fp32", 120, 99),
]  # fmt: skip


@slow_after(5, "name, dtype, capability, shared_memory", diagonal_first(KERNELS, PLAIN))
def test_linear_compress_kernels_compile(name, dtype, capability, shared_memory):
    for sizes in ((433, 866, 256), (200, 300, 64))[: 1 if dtype == "fp16" else 2]:
        compiled = compile_linear_compress(name, capability, dtype, sizes)
        assert compiled.metadata.shared <= shared_memory * 1024
        if capability == 90 and dtype != "fp32":
            assert "wgmma.mma_async" in compiled.asm["ptx"]


UNALIGNED = [  # dtype, sizes
    *((dtype, (129, 8, 68)) for dtype in ("bf16", "fp16", "fp32")),
    *(("bf16", sizes) for sizes in ((433, 8, 100), (64, 1, 65), (65, 20, 300), (433, 866, 300))),
    ("fp16", (65, 20, 300)),
    ("fp32", (64, 1, 65)),
    ("fp32", (433, 866, 300)),
]


@slow_after(3, "name, dtype, sizes", diagonal_first(KERNELS, UNALIGNED), ids=str)
def test_linear_compress_kernels_of_unaligned_embeddings_compile(name, dtype, sizes):
    compiled = compile_linear_compress(name, 90, dtype, sizes, aligned_embeddings=False)
    assert compiled.metadata.shared <= 227 * 1024


def test_an_older_ptxas_loses_a_register(monkeypatch):
    """The fault that `hopper_ptxas` avoids, and that `compile_for` finds."""
    if hopper_ptxas() == get_ptxas(90):
        pytest.skip("Triton's own ptxas is sound")
    monkeypatch.setattr("jagged_kernels.common.ptxas.FIRST_SOUND_RELEASE", (0,))
    with pytest.raises(AssertionError, match="UR"):
        compile_linear_compress("fwd", 90, "bf16", (129, 8, 68), aligned_embeddings=False)


@slow_after(
    1,
    "dtype, capability, shared_memory",
    [
        ("bf16", 90, 227),
        ("fp32", 80, 163),
        ("fp16", 80, 163),
        ("fp32", 90, 227),
        ("bf16", 100, 227),
    ],
)
def test_kernel_of_three_shared_levels_compiles(dtype, capability, shared_memory):
    (m, k, n), itemsize = (433, 866, 256), 4 if dtype == "fp32" else 2
    config = linear_compress_config(itemsize, divmod(capability, 10), n)
    numbers = dict(m=m, n=n, block_m=config.block_m, block_n=config.block_n, block_k=config.block_k)
    numbers |= dict(precision="bf16x6" if itemsize == 4 else "ieee", tail_m=64)
    own = linear_compress_kernels.Options(k=k, align=16 // itemsize, **numbers)
    boxes = dict(
        w=(config.block_m, config.block_k), w_tail=(64, config.block_k),
        e=(config.block_k, config.block_n),
    )  # fmt: skip
    descriptors = {
        f"{name}_desc": f"tensordesc<{dtype}[1, {x}, {y}]>" for name, (x, y) in boxes.items()
    }
    level = linear_compress_kernels.SharedLevel(f"*{dtype}", f"*{dtype}", ("i32",) * 3, "*fp32")
    types = dict.fromkeys(("w_ptr", "e_ptr", "out_ptr"), f"*{dtype}")
    types |= dict(shared=(level,) * 3, indices_ptr=("*i64", "*i32", "*i64"), state_ptr="*i32")
    types |= dict(strides=("i32",) * 3, firsts=("i32",) * 5)
    constants = dict(OPTIONS=own, DEPTHS=(1178, 33, 500), ALIGNS=(8, 1, 4))
    if capability >= 90:
        types |= descriptors
    else:
        constants |= dict.fromkeys(descriptors)
    compiled = compile_for(
        capability, linear_compress_kernels.linear_compress_fwd_levels_kernel, constants, types.get,
        ("w_ptr", "e_ptr", "out_ptr", "state_ptr"),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    assert compiled.metadata.shared <= shared_memory * 1024
    if capability == 90 and itemsize == 2:
        assert "wgmma.mma_async" in compiled.asm["ptx"]


@contextlib.contextmanager
def ptxas_remarks(cache):
    """Gathers what ptxas reports of kernels that are compiled meanwhile: registers, spills,
    serialised MMAs.

    cache: an empty folder, because ptxas reports nothing of a kernel that Triton's disk cache has.
    To run it once more takes as long as all else.
    """
    with (
        triton.knobs.cache.scope(),
        triton.knobs.nvidia.scope(),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        triton.knobs.cache.dir, triton.knobs.nvidia.dump_ptxas_log = str(cache), True
        yield printed


def compile_hopper_linear_compress(dtype, sizes, addends, more=()):
    """The compiled kernel for candidates' weights `[M, K]`, a shared level's weights `[M, K']` and
    embeddings `[B, K, N]`.

    `sizes`: M, K, K', N. Where K or K' is 0 the kernel computes the other level alone. `addends`:
    number of coarser levels' results that the epilogue of the candidates' GEMM adds. `more`: K of
    further shared levels that the kernel computes.
    """
    m, k, shared_k, n = sizes
    config = hopper_gemm_config(n)
    boxes = dict(w=[64, config.block_k], e=[1, config.block_k, config.block_n], out=[1, 64, 64])
    boxes = {f"{name}_desc": box for name, box in boxes.items()} | {
        f"shared_{name}_desc": boxes[name] for name in ("w", "e")
    }
    types = {arg: gluon_descriptor(dtype, box) for arg, box in boxes.items()}
    for name in ("second", "third")[: len(more)]:
        types |= {f"{name}_{x}_desc": types[f"{x}_desc"] for x in ("w", "e")}
    types |= dict(more_flags=("*i32",) * len(more))
    types |= dict(addends=("*fp32",) * addends + ("*i64",) * addends)
    types |= dict(memory=Memory("*fp32" if shared_k else "constexpr", "*i32"))
    options = Options(
        m, k, (shared_k, *more) if shared_k else (), -(-n // config.block_n),
        *(config.block_n, config.block_k, config.num_stages, config.num_buffers),
    )  # fmt: skip
    constants = dict(OPTIONS=options)
    constants |= {} if k else dict.fromkeys(("w_desc", "e_desc", "out_desc"))
    constants |= {} if shared_k else dict.fromkeys(("shared_w_desc", "shared_e_desc"))
    absent = ("second", "third")[len(more) :]
    constants |= {f"{name}_{x}_desc": None for name in absent for x in ("w", "e")}
    constants |= {f"{name}_{x}": None for name in absent for x in ("tiles", "tall")}
    return compile_for(
        90,
        linear_compress_fwd_hopper_kernel,
        constants,
        types.get,
        ("addends", "memory", "more_flags"),
        num_warps=4,
        maxnreg=168,
    )


@slow_after(
    2,
    "dtype, sizes, addends",
    [
        ("fp16", (433, 866, 0, 256), 0),
        ("bf16", (192, 600, 40, 128), 2),
        ("bf16", (300, 600, 40, 128), 2),
        ("fp16", (433, 866, 1178, 256), 2),
        ("bf16", (433, 33, 0, 256), 0),
        ("bf16", (433, 0, 500, 256), 0),
        ("bf16", (70, 250, 100, 136), 1),
        ("bf16", (300, 600, 0, 128), 0),
    ],
)
def test_hopper_linear_compress_kernel_compiles(tmp_path, dtype, sizes, addends):
    """Three warpgroups fill an SM, and accumulators take most of their registers. Nothing spills
    with the ptxas of Triton 3.6, with which all figures were measured. That of 3.9 spills up to 120
    bytes per thread."""
    with ptxas_remarks(tmp_path) as printed:
        compiled = compile_hopper_linear_compress(dtype, sizes, addends)
    remarks = printed.getvalue()
    assert compiled.metadata.shared <= 227 * 1024
    if sizes[1]:  # the sum at the head of hopper.py, without its barriers
        assert 0 < compiled.metadata.shared - (208 if sizes[3] <= 128 else 216) * 1024 < 1024
    assert "Used 168 registers" in remarks
    assert "serialized" not in remarks and "wgmma.mma_async" in compiled.asm["ptx"]
    if sizes[1] == 866 and triton.__version__.startswith("3.6."):
        assert " 0 bytes spill stores" in remarks


@slow_after(
    1,
    "sizes, more",
    [  # with 256 columns it compiles for half a minute
        ((192, 250, 40, 128), (40, 33)),
        ((300, 600, 40, 128), (40, 33)),
        ((433, 866, 1178, 256), (1178, 300)),
        ((433, 866, 1178, 256), (40,)),
    ],
)
def test_hopper_kernel_of_several_shared_levels_compiles(tmp_path, sizes, more):
    """It has the registers and the shared memory of the kernel of one level. With three levels of
    256 columns it spills 16 bytes per thread."""
    with ptxas_remarks(tmp_path) as printed:
        compiled = compile_hopper_linear_compress("fp16", sizes, 1 + len(more), more)
    remarks, wide = printed.getvalue(), sizes[3] > 128
    assert 0 < compiled.metadata.shared - (216 if wide else 208) * 1024 < 1024
    assert "Used 168 registers" in remarks and "serialized" not in remarks
    if triton.__version__.startswith("3.6."):
        spilled = 16 if wide and len(more) > 1 else 0
        assert any(f" {x} bytes spill stores" in remarks for x in range(0, spilled + 1, 4))


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_align_rows_kernel_compiles(capability):
    copy = "*fp16", "i32", "constexpr", "*fp16", "i32", "i32"
    signature = dict(copies=(copy, copy), zeros_ptr="*i32", num_zeros="i32", BLOCK="constexpr")
    source = ASTSource(
        linear_compress_kernels.align_rows_kernel,
        signature=signature,
        constexprs={(0, 0, 2): 1, (0, 1, 2): 1, (3,): 1024},
    )
    assert compile_source(capability, source).asm["cubin"]


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_sum_groups_kernel_compiles(capability, levels):
    types = dict(x_ptr="*bf16", orders_ptr="*i64", offsets_ptr="*i64", outs_ptr="*bf16")
    types |= {arg: (types[arg],) * levels for arg in ("orders_ptr", "offsets_ptr", "outs_ptr")}
    types |= dict(firsts=("i32",) * (levels + 1 if levels > 1 else 0), size="i32")
    constants = dict(ROWS=8, BLOCK=1024)
    assert compile_for(
        capability, linear_compress_kernels.sum_groups_kernel, constants, types.get, aligned=()
    ).asm["cubin"]
