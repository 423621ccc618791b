"""The kernels of jagged matrix multiplication and softmax compile for the GPU generations that we
support."""

import re

import pytest
from marks import diagonal_first, slow_after

pytest.importorskip("triton")

from jagged_kernels.common.activations import activation_function
from jagged_kernels.matmul import triton_kernels as jagged_matmul_kernels
from jagged_kernels.matmul.configs import jagged_matmul_config
from jagged_kernels.matmul.launch import SYMMETRIC_BLOCK
from jagged_kernels.softmax import triton_kernels as jagged_softmax
from jagged_kernels.softmax.configs import jagged2_softmax_config, jagged_softmax_config

from .ahead_of_time import compile_for


def compile_jagged(kernel, capability, dtype, options, **constants):
    """A compiled kernel of jagged matrix multiplication or softmax; `options`: its launch
    configuration."""

    def type_of(arg):
        if arg == "pointers":
            names = jagged_matmul_kernels.Dense._fields
            given = ("constexpr" if constants.get(x, x) is None else f"*{dtype}" for x in names)
            return jagged_matmul_kernels.Dense(*given)
        if arg in ("partial_ptr", "sums_ptr"):
            return "*fp32"
        return (
            "*i64"
            if arg.endswith("offsets_ptr")
            else f"*{dtype}"
            if arg.endswith("_ptr")
            else "i32"
        )

    aligned = [arg for arg in kernel.arg_names if arg.endswith("_ptr") or arg == "pointers"]
    aligned = [arg for arg in aligned if constants.get(arg, arg) is not None]
    return compile_for(capability, kernel, constants, type_of, aligned, **options)


JAGGED_MATMULS = {  # kernel, its name in the configurations, constants of a variant
    "dense": ("jagged_dense_bmm_kernel", "dense", dict(ACTIVATION=None, bias=None, grad=None)),
    "dense-transposed": (
        "jagged_dense_bmm_kernel",
        "dense",
        dict(ACTIVATION=None, transposed=True, grad=None),
    ),
    "dense-dact": ("jagged_dense_bmm_kernel", "dense", dict(factor=0.5)),
    "jagged": ("jagged_jagged_bmm_kernel", "jagged", {}),
    "outer": ("jagged_outer_kernel", "outer", {}),
    "gram": ("jagged_outer_kernel", "outer", dict(y_ptr=None)),
    "array": ("array_jagged_bmm_kernel", "array", {}),
    "array-transposed": ("array_jagged_bmm_kernel", "array", dict(transposed=True)),
}


def compile_jagged_matmul(name, capability, dtype, depth, columns, precision):
    """The compiled kernel with the launch configuration for x of `depth` and y of `columns`
    columns."""
    kernel, kind, constants = JAGGED_MATMULS[name]
    itemsize = 4 if dtype == "fp32" else 2
    rows = depth if kind == "jagged" else 0
    config = jagged_matmul_config(
        kind, itemsize, divmod(capability, 10), rows, 0 if kind == "outer" else columns, precision
    )
    sizes = dict(d=depth, t=columns) if kind in ("dense", "jagged") else dict(d=columns, t=0)
    sizes |= dict(block_m=config.block_m, block_n=config.block_n, block_k=config.block_k)
    sizes |= {name: x for name, x in constants.items() if name in ("transposed", "factor")}
    sizes |= dict(align=16 // itemsize, precision=precision)
    constants = constants | dict(OPTIONS=jagged_matmul_kernels.Options(**sizes))
    if name == "dense-dact":
        constants |= dict(ACTIVATION=activation_function("gelu_tanh", dtype == "bf16"))
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    kernel = getattr(jagged_matmul_kernels, kernel)
    return compile_jagged(kernel, capability, dtype, options, **constants)


# capability, its shared memory in KiB, cases of dtype, columns and precision: each with two
# capabilities or more
JAGGED_MATMUL_CASES = [
    (80, 163, [("bf16", 128, "ieee"), ("fp32", 64, "bf16x6"), ("fp32", 128, "tf32")]),
    (
        86,
        99,
        [
            ("bf16", 128, "ieee"),
            ("fp32", 64, "tf32"),
            ("fp32", 128, "tf32"),
            ("fp32", 64, "bf16x6"),
        ],
    ),
    (90, 227, [("bf16", 128, "ieee"), ("bf16", 8, "ieee"), ("fp32", 64, "tf32")]),
    (100, 227, [("bf16", 128, "ieee"), ("bf16", 8, "ieee"), ("fp32", 128, "tf32")]),
]


@slow_after(
    len(JAGGED_MATMULS),
    "name, capability, shared_memory, cases",
    diagonal_first(JAGGED_MATMULS, JAGGED_MATMUL_CASES),
)
def test_jagged_matmul_kernels_compile(name, capability, shared_memory, cases):
    for dtype, size, precision in cases:
        compiled = compile_jagged_matmul(name, capability, dtype, size, size, precision)
        assert compiled.metadata.shared <= shared_memory * 1024
        if capability == 90 and dtype == "bf16" and size == 128:
            assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert re.search("wgmma.mma_async|mma.sync|tcgen05.mma", compiled.asm["ptx"])


@pytest.mark.parametrize("name", ["dense", "dense-transposed", "jagged", "outer", "gram"])
def test_jagged_matmul_kernels_read_sixteen_bytes_at_a_time(name):
    """Rows are a multiple of 16 bytes long, so none is read element by element."""
    ptx = compile_jagged_matmul(name, 90, "bf16", 128, 128, "ieee").asm["ptx"]
    widths = re.findall(r"cp\.async\.c\w\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", ptx)
    assert widths and set(widths) == {"0x10"}


@slow_after(1, "capability", [80, 86, 90, 100])
def test_sums_of_segments_compile(capability):
    for dtype in ("fp32", "bf16"):
        sizes = jagged_matmul_kernels.Options(
            d=1, t=64, block_m=1, block_n=64, block_k=32, align=4, precision="ieee"
        )
        options = dict(num_warps=4, num_stages=3)
        kernel = jagged_matmul_kernels.jagged_jagged_bmm_kernel
        compile_jagged(kernel, capability, dtype, options, x_ptr=None, OPTIONS=sizes)
        sizes = dict(SIZE=4096, CHUNKS=16, BLOCK=256)
        compile_jagged(jagged_matmul_kernels.sum_chunks_kernel, capability, dtype, options, **sizes)


@slow_after(1, "capability", [80, 86, 90, 100])
def test_sums_of_matrices_with_their_transposes_compile(capability):
    for dtype in ("fp32", "fp16", "bf16"):
        compile_jagged(
            jagged_matmul_kernels.jagged_symmetric_kernel,
            capability,
            dtype,
            {},
            BLOCK=SYMMETRIC_BLOCK,
        )


DTYPES = [("fp32", 4), ("bf16", 2)]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@slow_after(
    1,
    "capability, shared_memory, dtypes",
    [(80, 163, DTYPES), (86, 99, DTYPES[:1]), (90, 227, DTYPES[1:]), (100, 227, DTYPES[:1])],
)
def test_jagged_softmax_kernels_compile(capability, shared_memory, dtypes, backward):
    for dtype, itemsize in dtypes:
        constants = {} if backward else dict(grad_ptr=None)
        config = jagged_softmax_config(itemsize, 64)
        for finish in (False, True):
            options = dict(num_warps=config.num_warps)
            kernel = jagged_softmax.jagged_softmax_kernel
            compiled = compile_jagged(
                kernel,
                capability,
                dtype,
                options,
                **constants,
                OPTIONS=jagged_softmax.Options(
                    64, finish, 16 // itemsize, config.lines, config.length
                ),
            )
            assert compiled.metadata.shared <= shared_memory * 1024
        for over_columns in (False, True):
            config = jagged2_softmax_config(over_columns)
            tile = dict(LINES=config.lines, LENGTH=config.length)
            options = dict(num_warps=config.num_warps)
            kernel = jagged_softmax.jagged2_softmax_kernel
            compiled = compile_jagged(
                kernel, capability, dtype, options, **constants, **tile, OVER_COLUMNS=over_columns
            )
            assert compiled.metadata.shared <= shared_memory * 1024
