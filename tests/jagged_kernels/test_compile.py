"""Every kernel compiles ahead of time, without a GPU, for the generations we support."""

import math
import pathlib
import re
import subprocess
import tempfile

import pytest

triton = pytest.importorskip("triton")

from jagged_kernels import attention_kernels, block_attention, jagged_matmul_kernels, jagged_softmax, linear_compress_kernels, tile_list  # noqa: E402
from jagged_kernels.activations import activation_function  # noqa: E402
from jagged_kernels.configs import (  # noqa: E402
    attention_config,
    attention_tile,
    block_attention_config,
    block_attention_fits,
    hopper_attention_config,
    hopper_product_config,
    jagged2_softmax_config,
    jagged_matmul_config,
    jagged_softmax_config,
    linear_compress_config,
    padded_dim,
    weight_gradient_config,
)
from jagged_kernels.jagged_matmul import SYMMETRIC_BLOCK  # noqa: E402
from jagged_kernels.ptxas import compile_kernel, hopper_ptxas  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from .sass import unwritten_registers  # noqa: E402

KERNELS = {
    "fwd": attention_kernels.attention_fwd_kernel,
    "dq": attention_kernels.attention_bwd_dq_kernel,
    "dkdv": attention_kernels.attention_bwd_dkdv_kernel,
}


def compile_for(capability, source, **options):
    """The kernel as it is compiled for a launch. On compute capability 9.0 no register is read that was not written."""
    compiled = compile_kernel(source, GPUTarget("cuda", capability, 32), options)
    if capability == 90:
        assert not unwritten_registers(compiled.asm["cubin"])
    return compiled


MASKS = {"none": None, "hstu": (1, -1, -1, 1, 2, 3, 100, 20), "window": (0, 64, 32, 0, 1, 0, 0, 0)}


def compile_attention(
    name: str, dim: int, dtype: str, capability: int, tma: bool = False, precision="ieee", activation="softmax", mask=None, long=False,
    lists: int = 1,
):  # fmt: skip
    """The compiled kernel with the launch configuration that `dim` and `dtype` get on that capability, for so many lists of queries."""
    kernel, itemsize = KERNELS[name], 4 if dtype == "fp32" else 2
    tile = attention_tile(dim, itemsize)
    config = getattr(attention_config(dim, itemsize, divmod(capability, 10), tile.query, long), name)
    block_m, block_n = (config.block, tile.key) if name == "dkdv" else (config.tile or tile.query, config.block)
    constants = dict(GROUP=1, HEAD_DIM=dim, V_DIM=dim, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=padded_dim(dim), BLOCK_DV=padded_dim(dim))
    constants |= {arg: None for arg in kernel.arg_names if arg.endswith("_desc") and not tma}
    constants |= dict(ALIGN=16 // itemsize, PRECISION=precision, Q_SHARED=False, KV_SHARED=False, LISTS=lists)
    constants |= dict(ACTIVATION=activation_function(activation, dtype == "bf16"), MASK=mask)
    constants |= dict(PARTIAL_STAGES=1 if mask is None else min(2, config.num_stages))
    constants |= dict(segment_scale_ptr=None, num_targets_ptr=None) if mask is None else {}
    constants |= dict(num_segments=None) if lists == 1 else {}
    signature = {}
    for arg in kernel.arg_names:
        if arg in constants:
            signature[arg] = "constexpr"
        elif arg in ("lse_ptr", "delta_ptr", "segment_scale_ptr"):
            signature[arg] = "*fp32"
        elif arg.endswith("offsets_ptr") or arg == "num_targets_ptr":
            signature[arg] = "*i64"
        elif arg in ("tiles_ptr", "num_tiles_ptr"):
            signature[arg] = "*i32"
        elif arg.endswith("_ptr"):
            signature[arg] = f"*{dtype}"
        elif arg.endswith("_desc"):
            rows = block_n if arg in ("k_desc", "v_desc") else block_m
            signature[arg] = f"tensordesc<{dtype}[1, {rows}, {padded_dim(dim)}]>"
        else:
            signature[arg] = "fp32" if arg.endswith(("scale", "factor")) else "i32" if arg.startswith(("stride_", "num_")) else "constexpr"
    used = {arg: constants[arg] for arg in signature if signature[arg] == "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names) if arg.endswith("_ptr") and arg != "tiles_ptr"}
    source = ASTSource(kernel, signature=signature, constexprs=used, attrs=aligned)
    return compile_for(capability, source, num_warps=config.num_warps, num_stages=config.num_stages)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", KERNELS)
def test_attention_kernels_compile_in_bf16(name, dim, capability):
    compiled = compile_attention(name, dim, "bf16", capability, tma=capability >= 90)
    shared_memory = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}[capability]
    assert compiled.metadata.shared <= shared_memory
    if capability == 90:
        assert "wgmma.mma_async" in compiled.asm["ptx"]


@pytest.mark.parametrize("capability, shared_memory", [(80, 163), (90, 227)])
@pytest.mark.parametrize("name", KERNELS)
def test_attention_kernels_of_long_segments_compile(name, capability, shared_memory):
    compiled = compile_attention(name, 128, "bf16", capability, tma=capability >= 90, long=True)
    assert compiled.metadata.shared <= shared_memory * 1024


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", KERNELS)
def test_attention_kernels_fit_parts_with_little_shared_memory(name, dim):
    assert compile_attention(name, dim, "bf16", 86).metadata.shared <= 99 * 1024


@pytest.mark.parametrize("name", KERNELS)
def test_attention_kernels_compile_in_fp32(name):
    for dim in (64, 128):
        compile_attention(name, dim, "fp32", 90, tma=True, precision="bf16x6")


@pytest.mark.parametrize("activation, mask", [("gelu_tanh", "none"), ("silu", "hstu"), ("softmax", "window")])
@pytest.mark.parametrize("name", KERNELS)
def test_activations_and_masks_compile(name, activation, mask):
    for capability, shared_memory in ((80, 163), (86, 99), (90, 227 // 2), (100, 227)):
        compiled = compile_attention(name, 128, "bf16", capability, tma=capability >= 90, activation=activation, mask=MASKS[mask])
        assert compiled.metadata.shared <= shared_memory * 1024  # on Hopper two thread blocks share a multiprocessor


@pytest.mark.parametrize("lists", [2, 3])
@pytest.mark.parametrize("name", KERNELS)
def test_attention_kernels_compile_for_several_lists_of_queries(name, lists):
    for capability, shared_memory in ((80, 163), (90, 227), (100, 227)):
        for activation in ("softmax", "gelu_tanh"):
            compiled = compile_attention(name, 128, "bf16", capability, tma=capability >= 90, activation=activation, lists=lists)
            assert compiled.metadata.shared <= shared_memory * 1024


@pytest.mark.parametrize("name", KERNELS)
def test_gelu_taylor_keeps_off_the_special_function_unit(name):
    special = re.compile(r"\b(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh|div)\.\w*\.?f32")
    assert not special.search(compile_attention(name, 64, "bf16", 90, tma=True, activation="gelu_taylor").asm["ptx"])
    assert special.search(compile_attention(name, 64, "bf16", 90, tma=True, activation="gelu_tanh").asm["ptx"])


def compile_hopper_attention(name, dim, dtype, activation, mask=None, shared=False, group=1, lists=1, long=False, kept=False):
    """The compiled kernel for compute capability 9.0 with the launch configuration that it gets; `shared`: with shared queries and keys;
    `lists`: of queries; `long`: segments of keys; `kept`: where gradients of scores are."""
    from jagged_kernels.hopper import attention, attention_backward, attention_dkdv, attention_score_gradients
    from jagged_kernels.hopper.attention_tiles import launch_options
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = {
        "fwd": attention.attention_fwd_hopper_kernel,
        "dq": attention_backward.attention_bwd_dq_hopper_kernel,
        "dkdv": attention_dkdv.attention_bwd_dkdv_hopper_kernel,
        "dq_of_kept": attention_score_gradients.attention_bwd_dq_of_kept_hopper_kernel,
    }[name]
    config = hopper_attention_config(name, dim, activation, mask is not None, long)
    options = launch_options(config)
    constants = dict(HEADS=4, GROUP=group, HEAD_DIM=dim, V_DIM=dim, ACTIVATION=activation_function(activation, dtype == "bf16"), MASK=mask)
    constants |= dict(Q_SHARED=shared, KV_SHARED=shared, Q_REGISTERS=config.rows_in_registers, LISTS=lists)
    constants |= dict(num_segments=None) if lists == 1 else {}
    constants |= options | dict(segment_scale_ptr=None) | ({} if mask else dict(num_targets_ptr=None))
    constants |= dict.fromkeys(("dq_desc", "dk_desc", "dv_desc") if shared else ())
    constants |= dict(QUERY_BLOCK=64) if kept else dict(ds_ptr=None, places_ptr=None)
    types = dict(lse_ptr="*fp32", delta_ptr="*fp32", places_ptr="*i32", num_targets_ptr="*i64", tiles_ptr="*i32", num_tiles_ptr="*i32")
    types |= dict.fromkeys(("dq_ptr", "dk_ptr", "dv_ptr") if shared else (), "*fp32") | dict.fromkeys(constants, "constexpr")
    signature = {}
    for arg in kernel.arg_names:
        if arg.endswith("_desc") and arg not in constants:
            looped = ("q_desc", "do_desc") if name == "dkdv" else ("k_desc", "v_desc")
            box = [1, config.block if arg in looped else 64, 64 if arg == "ds_desc" else padded_dim(dim)]
            layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16 if dtype == "bf16" else gl.float16)
            signature[arg] = f"tensordesc<{dtype}{box},{layout!r}>"
        else:
            default = "*i64" if arg.endswith("offsets_ptr") else f"*{dtype}" if arg.endswith("_ptr") else "i32"
            signature[arg] = types.get(arg, "fp32" if arg.endswith(("scale", "factor")) else default)
    places = {arg: i for i, arg in enumerate(signature)}
    constants = {(places[arg],): value for arg, value in constants.items() if arg in places}
    aligned = {(places[arg],): [["tt.divisibility", 16]] for arg in ("ds_ptr",) if signature.get(arg, "constexpr") != "constexpr"}
    source = GluonASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return compile_for(90, source, num_warps=options["num_warps"], maxnreg=options["maxnreg"])


@pytest.mark.parametrize(
    "activation, mask, group", [("softmax", "none", 1), ("gelu_tanh", "none", 2), ("softmax", "window", 4), ("silu", "hstu", 1)]
)
@pytest.mark.parametrize("dim, dtype", [(64, "bf16"), (96, "fp16"), (128, "bf16")])
@pytest.mark.parametrize("name", ["fwd", "dq", "dkdv"])
def test_hopper_attention_kernels_compile(name, dim, dtype, activation, mask, group):
    compiled = compile_hopper_attention(name, dim, dtype, activation, MASKS[mask], group=group)
    assert compiled.metadata.shared <= 227 * 1024
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor.3d.shared", "setmaxnreg"):
        assert instruction in compiled.asm["ptx"]


@pytest.mark.parametrize("activation, mask", [("softmax", "none"), ("gelu_tanh", "none"), ("softmax", "window"), ("silu", "hstu")])
@pytest.mark.parametrize("dim", [64, 128])
def test_hopper_attention_kernel_of_long_segments_compiles(dim, activation, mask):
    long, short = (compile_hopper_attention("fwd", dim, "bf16", activation, MASKS[mask], long=x) for x in (True, False))
    assert long.asm["ptx"] != short.asm["ptx"] and long.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("mask, group", [("none", 1), ("window", 4)])
@pytest.mark.parametrize("name", ["fwd", "dq", "dkdv"])
def test_hopper_attention_kernels_with_shared_operands_compile(name, mask, group):
    for dim in (64, 128):
        compiled = compile_hopper_attention(name, dim, "bf16", "softmax", MASKS[mask], shared=True, group=group)
        assert compiled.metadata.shared <= 227 * 1024


@pytest.mark.parametrize(
    "dim, dtype, activation, group",
    [
        (64, "bf16", "softmax", 1), (64, "bf16", "gelu_tanh", 4), (96, "fp16", "silu", 1),
        (128, "bf16", "softmax", 4), (128, "bf16", "gelu_tanh", 1),
    ],  # fmt: skip
)
def test_hopper_attention_kernels_that_keep_score_gradients_compile(dim, dtype, activation, group):
    """Blocks leave and enter registers 16 bytes at a time, without shared memory between them and the products."""
    without, keeping = (compile_hopper_attention("dkdv", dim, dtype, activation, group=group, kept=kept) for kept in (False, True))
    vectors, others = (len(re.findall(r"st\.global\S*\.v4", x.asm["ptx"])) for x in (keeping, without))
    assert vectors > others and keeping.asm["ptx"].count("st.shared") == without.asm["ptx"].count("st.shared")
    from_kept = compile_hopper_attention("dq_of_kept", dim, dtype, activation, group=group, kept=True)
    assert "movmatrix" in from_kept.asm["ptx"]
    others = compile_hopper_attention("dq", dim, dtype, activation, group=group, kept=True)
    assert max(x.metadata.shared for x in (keeping, from_kept, others)) <= 227 * 1024


def test_kernels_around_kept_score_gradients_compile():
    from jagged_kernels.hopper.attention_score_gradients import attention_delta_kernel, attention_places_kernel

    places = dict(q_offsets_ptr="*i64", kv_offsets_ptr="*i64", num_tiles_ptr="*i32", places_ptr="*i32", num_other_tiles_ptr="*i32")
    places |= dict(num_segments="i32", capacity="i32")
    delta = dict(do_ptr="*bf16", out_ptr="*bf16", delta_ptr="*fp32")
    delta |= dict.fromkeys(("num_rows", "stride_row", "stride_head", "stride_delta"), "i32")
    for kernel, signature, constants in (
        (attention_places_kernel, places, dict(HEADS=4, QUERY_BLOCK=128, CHUNK=1024)),
        (attention_delta_kernel, delta, dict(HEADS=4, DIM=96, BLOCK_D=128, ROWS=64)),
    ):
        source = ASTSource(kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
        compile_for(90, source)


@pytest.mark.parametrize("dim", [64, 128])
def test_hopper_attention_kernel_of_grouped_keys_compiles(dim):
    assert compile_hopper_attention("dkdv", dim, "bf16", "softmax", group=4).metadata.shared <= 227 * 1024


@pytest.mark.parametrize("lists", [2, 3])
@pytest.mark.parametrize("name", ["fwd", "dq", "dkdv"])
def test_hopper_attention_kernels_compile_for_several_lists_of_queries(name, lists):
    for dim, activation in ((64, "softmax"), (128, "softmax"), (128, "gelu_tanh")):
        assert compile_hopper_attention(name, dim, "bf16", activation, lists=lists).metadata.shared <= 227 * 1024


@pytest.mark.parametrize("lists, other_lists", [(1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_tile_list_kernel_compiles(capability, lists, other_lists):
    kernel = tile_list._tile_list_kernel
    pointers = dict(offsets_ptr="*i64", other_offsets_ptr="*i64", tiles_ptr="*i32", num_tiles_ptr="*i32")
    signature = pointers | dict(num_segments="i32", num_heads="i32")
    constants = dict(BLOCK_M=64, BLOCK_N=64, SEGMENTS=32, CHUNK=256, LISTS=lists, OTHER_LISTS=other_lists)
    source = ASTSource(kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    assert compile_for(capability, source).asm["cubin"]


def compile_linear_compress(name, capability, dtype, sizes, aligned_embeddings=True):
    """The compiled kernel of a weight `[M, K]` and embeddings `[B, K, N]`, with the launch configuration that they get. Embeddings that are
    not aligned to 16 bytes have no descriptor."""
    m, k, n = sizes
    itemsize, generation = 4 if dtype == "fp32" else 2, divmod(capability, 10)
    kernel = getattr(linear_compress_kernels, f"linear_compress_{name}_kernel")
    align = 16 // itemsize if aligned_embeddings else math.gcd(16 // itemsize, n)
    blocks = dict(M=m, K=k, N=n, ALIGN=align, PRECISION="bf16x6" if dtype == "fp32" else "ieee")
    pointers = dict(addends_ptr=("*fp32", "*fp32"), indices_ptr=("*i64", "*i32"), partial_ptr="*fp32")
    if name == "fwd":
        config = linear_compress_config(itemsize, generation, n)
        blocks |= dict(BLOCK_M=config.rows, TAIL_M=64, BLOCK_N=config.columns, BLOCK_K=config.depth)
        shapes = dict(w_desc=(config.rows, config.depth), w_tail_desc=(64, config.depth), e_desc=(config.depth, config.columns))
    else:
        config = weight_gradient_config(itemsize, generation, m, k)
        blocks |= dict(BLOCK_M=config.rows, BLOCK_K=config.columns, BLOCK_N=config.depth)
        shapes = dict(g_desc=(config.rows, config.depth), e_desc=(config.columns, config.depth))
    if capability < 90:
        described = ()
    elif aligned_embeddings:
        described = shapes
    else:  # the weights are padded to 16 bytes
        described = [arg for arg in shapes if arg.startswith("w_")]
    descriptors = {arg: f"tensordesc<{dtype}[1, {shapes[arg][0]}, {shapes[arg][1]}]>" for arg in described}
    constants = blocks | {arg: None for arg in shapes if arg not in descriptors}
    signature = {}
    for arg in kernel.arg_names:
        signature[arg] = "constexpr" if arg in constants else descriptors.get(arg) or pointers.get(arg) or "i32"
        if arg.endswith("_ptr") and arg not in pointers:
            signature[arg] = f"*{dtype}"
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names) if isinstance(signature[arg], str) and "_ptr" in arg
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return compile_for(capability, source, num_warps=config.num_warps, num_stages=config.num_stages)


@pytest.mark.parametrize("capability, shared_memory", [(80, 163), (86, 99), (90, 227), (100, 227)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", ["fwd", "bwd_dw"])
def test_linear_compress_kernels_compile(name, dtype, capability, shared_memory):
    for sizes in ((433, 866, 256), (200, 300, 64)):
        compiled = compile_linear_compress(name, capability, dtype, sizes)
        assert compiled.metadata.shared <= shared_memory * 1024
        if capability == 90 and dtype != "fp32":
            assert "wgmma.mma_async" in compiled.asm["ptx"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("sizes", [(129, 8, 68), (433, 8, 100), (64, 1, 65), (65, 20, 300), (433, 866, 300)], ids=str)
@pytest.mark.parametrize("name", ["fwd", "bwd_dw"])
def test_linear_compress_kernels_of_unaligned_embeddings_compile(name, sizes, dtype):
    compiled = compile_linear_compress(name, 90, dtype, sizes, aligned_embeddings=False)
    assert compiled.metadata.shared <= 227 * 1024


def test_an_older_ptxas_loses_a_register(monkeypatch):
    """The fault that `hopper_ptxas` avoids, and that `compile_for` finds."""
    if hopper_ptxas() == get_ptxas(90):
        pytest.skip("Triton's own ptxas is sound")
    monkeypatch.setattr("jagged_kernels.ptxas.FIRST_SOUND_RELEASE", (0,))
    with pytest.raises(AssertionError, match="UR"):
        compile_linear_compress("fwd", 90, "bf16", (129, 8, 68), aligned_embeddings=False)


def ptxas_remarks(compiled):
    """What the assembler says of a kernel for Hopper: registers, spills, products that it serialises."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "kernel.ptx")
        source.write_text(compiled.asm["ptx"])
        command = [hopper_ptxas().path, "-arch=sm_90a", "-v", source, "-o", source.with_suffix(".cubin")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def compile_hopper_linear_compress(dtype, sizes, addends):
    """The compiled kernel for candidates' weights `[M, K]`, a shared level's `[M, K']` and embeddings `[B, K, N]`, for one of them alone
    where the other's K is 0; `addends`: levels that the candidates' product takes in."""
    from jagged_kernels.hopper.linear_compress_kernels import linear_compress_fwd_hopper_kernel as kernel
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    m, k, shared_k, n = sizes
    config = hopper_product_config(n)
    element = gl.bfloat16 if dtype == "bf16" else gl.float16
    boxes = dict(w=(64, config.depth), e=(1, config.depth, config.columns), out=(1, 64, 64))
    boxes = {f"{name}_desc": box for name, box in boxes.items()} | {f"shared_{name}_desc": boxes[name] for name in ("w", "e")}
    types = {
        arg: f"tensordesc<{dtype}{list(box)},{gl.NVMMASharedLayout.get_default_for(list(box), element)!r}>" for arg, box in boxes.items()
    }
    types |= dict(addends_ptr=("*fp32",) * addends, indices_ptr=("*i64",) * addends)
    types |= dict(shared_ptr="*fp32", state_ptr="*i32")
    constants = dict(M=m, K=k, SHARED_K=shared_k, PANELS=-(-n // config.columns), BLOCK_N=config.columns, BLOCK_K=config.depth)
    constants |= dict(STAGES=config.stages, BUFFERS=config.buffers)
    constants |= {} if k else dict.fromkeys(("w_desc", "e_desc", "out_desc"))
    constants |= {} if shared_k else dict.fromkeys(("shared_w_desc", "shared_e_desc", "shared_ptr"))
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names}
    places = {arg: i for i, arg in enumerate(signature)}
    aligned = {(places[arg],): [["tt.divisibility", 16]] for arg in ("shared_ptr", "state_ptr") if arg not in constants}
    aligned |= {(places[arg], i): [["tt.divisibility", 16]] for arg in ("addends_ptr", "indices_ptr") for i in range(addends)}
    constants = {(places[arg],): x for arg, x in constants.items()}
    return compile_for(90, GluonASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned), num_warps=4, maxnreg=168)


@pytest.mark.parametrize(
    "dtype, sizes, addends",
    [
        ("fp16", (433, 866, 0, 256), 0),
        ("fp16", (433, 866, 1178, 256), 1),
        ("fp16", (433, 866, 1178, 256), 2),
        ("bf16", (433, 500, 64, 256), 2),
        ("bf16", (433, 33, 0, 256), 0),
        ("bf16", (433, 0, 500, 256), 0),
        ("bf16", (70, 250, 0, 136), 0),
        ("bf16", (70, 250, 100, 136), 1),
        ("bf16", (70, 250, 100, 136), 2),
        ("bf16", (300, 600, 0, 128), 0),
        ("bf16", (300, 600, 40, 128), 1),
        ("bf16", (300, 600, 40, 128), 2),
    ],
)
def test_hopper_linear_compress_kernel_compiles(dtype, sizes, addends):
    """Three groups of warps fill a multiprocessor: accumulators take most of their registers, and nothing spills by the assembler of Triton
    3.6, which all figures are measured with; that of 3.9 keeps up to 120 bytes of a thread's in memory."""
    compiled = compile_hopper_linear_compress(dtype, sizes, addends)
    assert compiled.metadata.shared <= 227 * 1024
    remarks = ptxas_remarks(compiled)
    assert "serialized" not in remarks and "wgmma.mma_async" in compiled.asm["ptx"]
    if sizes[1] == 866 and triton.__version__.startswith("3.6."):
        assert " 0 bytes spill stores" in remarks


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_align_rows_kernel_compiles(capability):
    copy = "*fp16", "i32", "constexpr", "*fp16", "i32", "i32"
    signature = dict(copies=(copy, copy), zeros_ptr="*i32", num_zeros="i32", BLOCK="constexpr")
    source = ASTSource(linear_compress_kernels.align_rows_kernel, signature=signature, constexprs={(0, 0, 2): 1, (0, 1, 2): 1, (3,): 1024})
    assert compile_for(capability, source).asm["cubin"]


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_sum_groups_kernel_compiles(capability):
    kernel = linear_compress_kernels.sum_groups_kernel
    signature = dict(x_ptr="*bf16", order_ptr="*i64", offsets_ptr="*i64", out_ptr="*bf16", size="i32")
    constants = dict(ROWS=8, BLOCK=1024)
    source = ASTSource(kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    assert compile_for(capability, source).asm["cubin"]


def compile_block_attention(name, capability, dtype, dim, block_size, rotate, relative=False, group=1, precision="bf16x6"):
    """The compiled kernel with the launch configuration that it gets."""
    kernel, itemsize = getattr(block_attention, f"block_attention_{name}_kernel"), 4 if dtype == "fp32" else 2
    rotary = "none" if rotate is None else "relative" if relative else "absolute"
    config = block_attention_config(name, dim, itemsize, divmod(capability, 10), block_size, group, rotary)
    constants = dict(
        HEADS=4, GROUP=group, DIM=dim, TILE=config.tile, BLOCK=block_size, BLOCK_D=max(32, padded_dim(dim)), positions_ptr=None
    )
    constants |= dict(ROTATE=rotate is not None, ROTATE_V=rotate == "qkv", RELATIVE=relative, ALIGN=16 // itemsize, PACKED=itemsize == 2)
    constants |= dict(PRECISION=precision if dtype == "fp32" else "ieee")
    constants |= dict(cos_ptr=None, sin_ptr=None) if rotate is None else {}
    pointers = dict(offsets_ptr="*i64", cos_ptr="*fp32", sin_ptr="*fp32", scale="fp32")
    signature = {}
    for arg in kernel.arg_names:
        signature[arg] = "constexpr" if arg in constants else pointers.get(arg) or (f"*{dtype}" if arg.endswith("_ptr") else "i32")
    aligned = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names) if signature[arg].startswith("*")}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return compile_for(capability, source, num_warps=config.num_warps, num_stages=config.num_stages)


@pytest.mark.parametrize("rotate, relative", [(None, False), ("qk", True), ("qk", False), ("qkv", False)], ids=str)
@pytest.mark.parametrize("name", ["fwd", "bwd"])
def test_block_attention_kernels_compile(name, rotate, relative):
    for capability, shared_memory in ((80, 163), (86, 99), (90, 227), (100, 227)):
        for dim, block_size, group in ((128, 64, 1), (64, 16, 2)):
            compiled = compile_block_attention(name, capability, "bf16", dim, block_size, rotate, relative, group)
            assert compiled.metadata.shared <= shared_memory * 1024
            if capability == 90:
                assert "wgmma.mma_async" in compiled.asm["ptx"]
    for dim in (16, 32, 64):
        compile_block_attention(name, 90, "fp32", dim, 64, rotate, relative)


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("dtype, precision", [("bf16", "ieee"), ("fp32", "bf16x6"), ("fp32", "tf32")])
@pytest.mark.parametrize("capability, shared_memory", [(86, 99), (90, 227)])
def test_what_block_attention_takes_fits_shared_memory(capability, shared_memory, dtype, precision, block_size):
    """The widest heads that the rule allows, in groups, whose backward needs most."""
    generation, itemsize = divmod(capability, 10), 4 if dtype == "fp32" else 2
    taken = [dim for dim in (32, 64, 128, 256) if block_attention_fits(dim, itemsize, generation, block_size, 2)]
    for dim in taken[-1:]:
        compiled = compile_block_attention("bwd", capability, dtype, dim, block_size, None, group=2, precision=precision)
        assert compiled.metadata.shared <= shared_memory * 1024
    assert taken or capability == 86 and block_size == 128


@pytest.mark.parametrize("name", ["fwd", "bwd"])
def test_rotated_pairs_are_loaded_sixteen_bytes_at_a_time(name):
    """As four words, or asynchronously past the L1 cache, which takes no less."""
    ptx = compile_block_attention(name, 90, "bf16", 128, 64, "qkv").asm["ptx"]
    loads = re.findall(r"ld\.global\S*|cp\.async\.c[ag]\S*", ptx)
    assert sum(".v4." in load or ".cg." in load for load in loads) > 0.7 * len(loads)


@pytest.mark.parametrize("rotate, relative", [(None, False), ("qk", True), ("qk", False), ("qkv", False)], ids=str)
@pytest.mark.parametrize("name", ["fwd", "bwd"])
def test_hopper_block_attention_kernels_compile(name, rotate, relative):
    """Two thread blocks of 64 rows share a multiprocessor; tiles are loaded and stored by the tensor memory accelerator."""
    from jagged_kernels.hopper import block_attention as hopper
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = getattr(hopper, f"block_attention_{name}_hopper_kernel")
    cases = ("bf16", 128, 128, 64, False), ("bf16", 128, 128, 64, True), ("fp16", 40, 64, 16, False), ("bf16", 128, 128, 128, False)
    for dtype, dim, width, block_size, precise in cases[:: 1 if rotate else 2]:
        rows = max(block_size, 64)
        constants = dict(HEADS=4, DIM=dim, WIDTH=width, BLOCK=block_size, TURNS=2, positions_ptr=None)
        constants |= dict(ROTATE=rotate is not None, ROTATE_V=rotate == "qkv", RELATIVE=relative, PRECISE=precise)
        constants |= dict(cos_ptr=None, sin_ptr=None) if rotate is None else {}
        layout = gl.NVMMASharedLayout.get_default_for([1, rows, width], gl.bfloat16 if dtype == "bf16" else gl.float16)
        types = dict(offsets_ptr="*i64", cos_ptr="*fp32", sin_ptr="*fp32", scale="fp32") | dict.fromkeys(constants, "constexpr")
        signature = {}
        for arg in kernel.arg_names:
            default = f"*{dtype}" if arg.endswith("_ptr") else "i32"
            signature[arg] = types.get(arg, f"tensordesc<{dtype}[1, {rows}, {width}],{layout!r}>" if arg.endswith("_desc") else default)
        places = {arg: i for i, arg in enumerate(signature)}
        source = GluonASTSource(kernel, signature=signature, constexprs={(places[arg],): x for arg, x in constants.items()})
        compiled = compile_for(90, source, num_warps=rows // 16, maxnreg=168 if name == "fwd" and rows == 64 else None)
        assert compiled.metadata.shared <= 227 * 1024 // (2 if rows == 64 else 1)
        for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor.3d.shared", "cp.async.bulk.tensor.3d.global"):
            assert instruction in compiled.asm["ptx"]


def compile_jagged(kernel, capability, dtype, options, **constants):
    """A compiled kernel of jagged_matmul_kernels.py or jagged_softmax.py; `options`: its launch configuration."""
    types = dict(partial_ptr="*fp32", sums_ptr="*fp32")
    signature = {}
    for arg in kernel.arg_names:
        default = "*i64" if arg.endswith("offsets_ptr") else f"*{dtype}" if arg.endswith("_ptr") else "i32"
        signature[arg] = "constexpr" if arg in constants else types.get(arg, default)
    aligned = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names) if signature[arg].startswith("*")}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return compile_for(capability, source, **options)


JAGGED_MATMULS = {  # kernel, its name in the configurations, constants of a variant
    "dense": ("jagged_dense_bmm_kernel", "dense", dict(TRANSPOSED=False, ACTIVATION=None, FACTOR=1.0, bias_ptr=None, grad_ptr=None)),
    "dense-transposed": ("jagged_dense_bmm_kernel", "dense", dict(TRANSPOSED=True, ACTIVATION=None, FACTOR=1.0, grad_ptr=None)),
    "dense-slope": ("jagged_dense_bmm_kernel", "dense", dict(TRANSPOSED=False, FACTOR=0.5)),
    "jagged": ("jagged_jagged_bmm_kernel", "jagged", {}),
    "outer": ("jagged_outer_kernel", "outer", {}),
    "gram": ("jagged_outer_kernel", "outer", dict(y_ptr=None)),
    "array": ("array_jagged_bmm_kernel", "array", dict(TRANSPOSED=False)),
    "array-transposed": ("array_jagged_bmm_kernel", "array", dict(TRANSPOSED=True)),
}


def compile_jagged_matmul(name, capability, dtype, depth, columns, precision):
    """The compiled kernel with the launch configuration that rows of `depth` and of `columns` get."""
    kernel, kind, constants = JAGGED_MATMULS[name]
    itemsize = 4 if dtype == "fp32" else 2
    rows = depth if kind == "jagged" else 0
    config = jagged_matmul_config(kind, itemsize, divmod(capability, 10), rows, 0 if kind == "outer" else columns, precision)
    sizes = dict(D=depth, T=columns) if kind in ("dense", "jagged") else dict(D=columns)
    constants = constants | sizes | dict(BLOCK_M=config.rows, BLOCK_N=config.columns, BLOCK_K=config.depth)
    if name == "dense-slope":
        constants |= dict(ACTIVATION=activation_function("gelu_tanh", dtype == "bf16"))
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    kernel = getattr(jagged_matmul_kernels, kernel)
    return compile_jagged(kernel, capability, dtype, options, **constants, ALIGN=16 // itemsize, PRECISION=precision)


@pytest.mark.parametrize("capability, shared_memory", [(80, 163), (86, 99), (90, 227), (100, 227)])
@pytest.mark.parametrize("name", JAGGED_MATMULS)
def test_jagged_matmul_kernels_compile(name, capability, shared_memory):
    cases = [("bf16", 128, "ieee"), ("bf16", 8, "ieee"), ("fp32", 64, "tf32"), ("fp32", 128, "tf32"), ("fp32", 64, "bf16x6")]
    for dtype, size, precision in cases:
        compiled = compile_jagged_matmul(name, capability, dtype, size, size, precision)
        assert compiled.metadata.shared <= shared_memory * 1024
        if capability == 90 and dtype == "bf16" and size == 128:
            assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert re.search("wgmma.mma_async|mma.sync|tcgen05.mma", compiled.asm["ptx"])


@pytest.mark.parametrize("name", ["dense", "dense-transposed", "jagged", "outer", "gram"])
def test_jagged_matmul_kernels_read_sixteen_bytes_at_a_time(name):
    """Rows of a multiple of 16 bytes, whatever the number of the row: nothing is read by elements."""
    ptx = compile_jagged_matmul(name, 90, "bf16", 128, 128, "ieee").asm["ptx"]
    widths = re.findall(r"cp\.async\.c\w\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", ptx)
    assert widths and set(widths) == {"0x10"}


@pytest.mark.parametrize("capability", [80, 86, 90, 100])
def test_sums_of_segments_compile(capability):
    for dtype in ("fp32", "bf16"):
        sizes = dict(D=1, T=64, BLOCK_M=1, BLOCK_N=64, BLOCK_K=32, ALIGN=4, PRECISION="ieee", x_ptr=None)
        options = dict(num_warps=4, num_stages=3)
        compile_jagged(jagged_matmul_kernels.jagged_jagged_bmm_kernel, capability, dtype, options, **sizes)
        sizes = dict(SIZE=4096, PARTS=16, BLOCK=256)
        compile_jagged(jagged_matmul_kernels.sum_chunks_kernel, capability, dtype, options, **sizes)


@pytest.mark.parametrize("capability", [80, 86, 90, 100])
def test_sums_of_matrices_with_their_transposes_compile(capability):
    for dtype in ("fp32", "fp16", "bf16"):
        compile_jagged(jagged_matmul_kernels.jagged_symmetric_kernel, capability, dtype, {}, BLOCK=SYMMETRIC_BLOCK)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("capability, shared_memory", [(80, 163), (86, 99), (90, 227), (100, 227)])
def test_jagged_softmax_kernels_compile(capability, shared_memory, backward):
    for dtype, itemsize in (("fp32", 4), ("bf16", 2)):
        constants = {} if backward else dict(grad_ptr=None)
        config = jagged_softmax_config(itemsize, 64)
        tile = dict(LINES=config.lines, LENGTH=config.length)
        for finish in (False, True):
            options = dict(num_warps=config.num_warps)
            kernel = jagged_softmax.jagged_softmax_kernel
            compiled = compile_jagged(kernel, capability, dtype, options, **constants, **tile, H=64, FINISH=finish, ALIGN=16 // itemsize)
            assert compiled.metadata.shared <= shared_memory * 1024
        for over_columns in (False, True):
            config = jagged2_softmax_config(over_columns)
            tile = dict(LINES=config.lines, LENGTH=config.length)
            options = dict(num_warps=config.num_warps)
            kernel = jagged_softmax.jagged2_softmax_kernel
            compiled = compile_jagged(kernel, capability, dtype, options, **constants, **tile, OVER_COLUMNS=over_columns)
            assert compiled.metadata.shared <= shared_memory * 1024
