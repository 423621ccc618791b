"""The kernels that take whole rows compile for the GPU generations that we support."""

import re

import pytest
from marks import slow_after

pytest.importorskip("triton")

from jagged_kernels.common.activations import activation_function
from jagged_kernels.rows import activation_kernels as activations
from jagged_kernels.rows import triton_kernels as rows
from jagged_kernels.rows.configs import FEW_WARPS, GATE_BACKWARD, activation_config, rows_config

from ..sass import registers_per_thread, spilled_bytes
from .ahead_of_time import compile_for

FP32 = {"mean", "rstd", "dweight", "dbias", "weight", "bias", "total"}


def compile_rows(
    capability, kernel, dtype, dim, rms=False, dropout=True, align=8, recompute=True, residual=False
):
    """A compiled kernel; `dtype`: of the GEMMs' operands, next to fp32 rows. residual: the norm is
    of a sum."""
    config = rows_config(dim, *[GATE_BACKWARD] * (kernel is rows.gate_bwd_kernel))
    options = rows.Options(dim, rms, 1e-6, align, config.rows, config.block)
    absent = {"mean", "bias", "dbias"} if rms else set()
    absent |= set() if dropout else {"seed", "end"}
    absent |= set() if residual else {"added", "kept", "copy", "total"}
    of_rows = {"x", "residual", "dx"}

    def pointer(name):
        if name in absent:
            return "constexpr"
        if name in ("seed", "end"):
            return "*i64"
        if name == "kept":
            return "*u8"
        return "*fp32" if name in FP32 | of_rows else f"*{dtype}"

    tuples = dict(
        row_norm_fwd_kernel=dict(tensors=rows.NormForward),
        row_norm_bwd_kernel=dict(tensors=rows.NormBackward),
        gate_fwd_kernel=dict(tensors=rows.Gate),
        gate_bwd_kernel=dict(tensors=rows.Gate, grads=rows.GateGradients),
    ).get(kernel.__name__, {})
    strides = dict(row_norm_bwd_kernel=4, gate_fwd_kernel=2, gate_bwd_kernel=5)

    def type_of(arg):
        if arg in tuples:
            return tuples[arg](*map(pointer, tuples[arg]._fields))
        if arg == "strides":
            return ("i32",) * strides[kernel.__name__]
        if arg == "scale":
            return "fp32"
        return pointer(arg.removesuffix("_ptr")) if arg.endswith("_ptr") else None

    constants = dict(OPTIONS=options, RECOMPUTE=recompute, EXTRA=32)
    aligned = [x for x in kernel.arg_names if x.endswith("_ptr")]
    return compile_for(
        capability, kernel, constants, type_of, [*aligned, *tuples], num_warps=config.num_warps
    )


KERNELS = [
    rows.row_norm_fwd_kernel,
    rows.row_norm_bwd_kernel,
    rows.gate_fwd_kernel,
    rows.gate_bwd_kernel,
]
by_name = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)


@slow_after(1, "capability", [90, 80, 100])
@pytest.mark.parametrize("dtype, rms", [("bf16", False), ("fp16", True), ("fp32", False)])
@by_name
def test_kernels_compile(kernel, dtype, rms, capability):
    """Rows of 512 columns are loaded and stored 16 bytes at a time, and no more than a few numbers
    are spilled."""
    of_norms = kernel in KERNELS[:2]
    for residual in (False, True) if of_norms else (False,):
        compiled = compile_rows(capability, kernel, dtype, 512, rms=rms, residual=residual)
        ptx = compiled.asm["ptx"]
        assert {"ld", "st"} <= set(re.findall(r"(ld|st)\.global(?:\.\w+)*\.v4\.b32", ptx))
        assert spilled_bytes(compiled.asm["cubin"]) <= 16


@pytest.mark.parametrize("dim", [27, 64, 4096])
@by_name
def test_other_widths_compile(kernel, dim):
    align = 1 if dim == 27 else 8
    for dropout, recompute in ((True, True), (False, False)):
        compiled = compile_rows(
            90, kernel, "bf16", dim, dropout=dropout, align=align, recompute=recompute
        )
        assert spilled_bytes(compiled.asm["cubin"]) <= 64


@pytest.mark.parametrize("dim", [64, 256, 512, 1024])
def test_the_programs_of_a_backward_run_at_the_same_time(dim):
    """A multiprocessor has 2^16 registers."""
    compiled = compile_rows(90, rows.gate_bwd_kernel, "bf16", dim)
    assert registers_per_thread(compiled.asm["cubin"]) * 32 * FEW_WARPS <= 2**16
    compiled = compile_rows(90, rows.row_norm_bwd_kernel, "bf16", dim, residual=True)
    assert registers_per_thread(compiled.asm["cubin"]) * 32 * FEW_WARPS <= 2**16
    assert spilled_bytes(compiled.asm["cubin"]) <= 16


def compile_activation(
    capability, kernel, dtype, width, name="silu", gated=True, align=8, again=False
):
    config, of_options = activation_config(width), activations.ActivationOptions
    options = of_options(width, gated, align, config.rows, config.block, again, again)
    types = dict(sums="*fp32", end="*i64", kept="*u8" if again else "constexpr")

    def type_of(arg):
        if arg == "tensors":
            tensors = activations.ActivationBackward
            return tensors(*(types.get(field, f"*{dtype}") for field in tensors._fields))
        if arg == "strides":
            return ("i32",) * (3 if kernel is activations.activation_bwd_kernel else 2)
        if arg == "scale":
            return "fp32"
        return f"*{dtype}" if arg.endswith("_ptr") else None

    constants = dict(ACTIVATION=activation_function(name, False), OPTIONS=options)
    pointers = [x for x in kernel.arg_names if x.endswith("_ptr") or x == "tensors"]
    return compile_for(capability, kernel, constants, type_of, pointers, num_warps=config.num_warps)


@pytest.mark.parametrize("capability", [90, 80, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "kernel",
    [activations.activation_fwd_kernel, activations.activation_bwd_kernel],
    ids=lambda kernel: kernel.__name__,
)
def test_activations_compile(kernel, dtype, capability):
    for name, gated, width, align, again in (
        ("silu", True, 512, 8, False),
        ("gelu", False, 512, 8, False),
        ("gelu_taylor", False, 27, 1, False),
        ("silu", True, 512, 8, True),
        ("gelu", False, 512, 8, True),
    ):
        compiled = compile_activation(capability, kernel, dtype, width, name, gated, align, again)
        if again:
            warps = FEW_WARPS if gated else activation_config(width).warps_per_sm
            assert registers_per_thread(compiled.asm["cubin"]) * 32 * warps <= 2**16
        assert spilled_bytes(compiled.asm["cubin"]) == 0
        accesses = set(re.findall(r"(ld|st)\.global(?:\.\w+)*\.v4\.b32", compiled.asm["ptx"]))
        assert accesses == ({"ld", "st"} if align == 8 else set())
