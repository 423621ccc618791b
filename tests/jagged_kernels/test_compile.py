"""Every kernel compiles ahead of time, without a GPU, for the generations we support."""

import pytest

triton = pytest.importorskip("triton")

from jagged_kernels import attention, tile_list  # noqa: E402
from jagged_kernels.configs import attention_config, attention_tile, padded_dim  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

KERNELS = {
    "fwd": attention._attention_fwd_kernel,
    "dq": attention._attention_bwd_dq_kernel,
    "dkdv": attention._attention_bwd_dkdv_kernel,
}


def compile_attention(name: str, dim: int, dtype: str, capability: int, tma: bool = False, precision: str = "ieee"):
    """The compiled kernel with the launch configuration that `dim` and `dtype` get on that capability."""
    kernel, itemsize = KERNELS[name], 4 if dtype == "fp32" else 2
    tile = attention_tile(dim, itemsize)
    config = getattr(attention_config(dim, itemsize, divmod(capability, 10), tile.query), name)
    block_m, block_n = (config.block, tile.key) if name == "dkdv" else (tile.query, config.block)
    constants = dict(GROUP=1, HEAD_DIM=dim, V_DIM=dim, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=padded_dim(dim), BLOCK_DV=padded_dim(dim))
    constants |= {arg: None for arg in kernel.arg_names if arg.endswith("_desc")}
    constants |= dict(ALIGN=16 // itemsize, PRECISION=precision, Q_SHARED=False, KV_SHARED=False)
    signature = {}
    for arg in kernel.arg_names:
        if arg in ("lse_ptr", "delta_ptr"):
            signature[arg] = "*fp32"
        elif arg.endswith("offsets_ptr"):
            signature[arg] = "*i64"
        elif arg in ("tiles_ptr", "num_tiles_ptr"):
            signature[arg] = "*i32"
        elif arg.endswith("_ptr"):
            signature[arg] = f"*{dtype}"
        elif arg.endswith("_desc") and tma:
            rows = block_n if arg in ("k_desc", "v_desc") else block_m
            signature[arg] = f"tensordesc<{dtype}[1, {rows}, {padded_dim(dim)}]>"
        else:
            signature[arg] = "fp32" if arg == "scale" else "i32" if arg.startswith("stride_") else "constexpr"
    used = {name: constants[name] for name in signature if signature[name] == "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names) if arg.endswith("_ptr") and arg != "tiles_ptr"}
    source = ASTSource(kernel, signature=signature, constexprs=used, attrs=aligned)
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", KERNELS)
def test_attention_kernels_compile_in_bf16(name, dim, capability):
    compiled = compile_attention(name, dim, "bf16", capability, tma=capability >= 90)
    shared_memory = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}[capability]
    assert compiled.metadata.shared <= shared_memory
    if capability == 90:
        assert "wgmma.mma_async" in compiled.asm["ptx"]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", KERNELS)
def test_attention_kernels_fit_parts_with_little_shared_memory(name, dim):
    assert compile_attention(name, dim, "bf16", 86).metadata.shared <= 99 * 1024


@pytest.mark.parametrize("name", KERNELS)
def test_attention_kernels_compile_in_fp32(name):
    for dim in (64, 128):
        compile_attention(name, dim, "fp32", 90, tma=True, precision="bf16x6")


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_tile_list_kernel_compiles(capability):
    kernel = tile_list._tile_list_kernel
    pointers = dict(offsets_ptr="*i64", other_offsets_ptr="*i64", tiles_ptr="*i32", num_tiles_ptr="*i32")
    signature = pointers | dict(num_segments="i32", num_heads="i32")
    constants = dict(BLOCK_M=64, BLOCK_N=64, SEGMENTS=32, CHUNK=256)
    source = ASTSource(kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
