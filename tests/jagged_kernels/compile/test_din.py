"""The kernels of DIN's attention compile for the GPU generations that we support."""

import pytest
import triton
from marks import diagonal_first, slow_after

pytest.importorskip("triton")

from jagged_kernels.common.activations import activation_function
from jagged_kernels.common.configs import padded_dim
from jagged_kernels.din import (
    hopper_events,
    hopper_forward,
    hopper_rows,
    triton_backward,
    triton_forward,
)
from jagged_kernels.din.configs import din_config, hopper_config, pieces
from jagged_kernels.din.mlp import Operands, Options, Users, has_table

from ..sass import disassembled, spilled_bytes
from .ahead_of_time import MASKS, compile_for, gluon_descriptor

KERNELS = dict(
    fwd=triton_forward.din_fwd_kernel,
    hopper=hopper_forward.din_fwd_hopper_kernel,
    moments=triton_forward.din_moments_kernel,
    dmlp=triton_backward.din_bwd_dmlp_kernel,
    dq=triton_backward.din_bwd_dq_kernel,
    dkdv=triton_backward.din_bwd_dkdv_kernel,
    rows=hopper_rows.din_bwd_rows_hopper_kernel,
    mlp=hopper_rows.din_bwd_rows_hopper_kernel,
    events=hopper_events.din_bwd_events_hopper_kernel,
)
HOPPER = dict(hopper="fwd", rows="mlp", mlp="mlp", events="events")  # names of configurations
FP32 = ("lse", "delta", "parts", "sums")
RESULTS = dict(
    fwd=("out", "lse"),
    hopper=("out", "lse"),
    dmlp=("do", "lse", "delta", "parts", "sums"),
    dq=("do", "lse", "delta", "dq", "da", "parts", "sums"),
    dkdv=("do", "lse", "delta", "dk", "dv"),
    rows=("do", "lse", "delta", "dq", "da", "parts", "sums"),
    mlp=("do", "lse", "delta", "parts", "sums"),
    events=("do", "lse", "delta", "dk"),
)
# Bytes of a thread's registers in memory. Those of dmlp and dq are read between rows of q, but with
# Dice some of them in each round. Its kernels of fewer bytes and more instructions were slower.
SPILLED = dict(fwd=0, moments=0, dmlp=160, dq=64, dkdv=160)
SPILLED_BY_DICE = dict(fwd=0, moments=0, dmlp=576, dq=496, dkdv=200)
SPILLED_UNDER_A_MASK = dict(fwd=0, moments=0, dmlp=592, dq=512, dkdv=208)  # by Dice
by_name = pytest.mark.parametrize("name", [x for x in KERNELS if x not in HOPPER])


def compile_din(
    capability, name, dtype, activation="relu", hidden=(80, 40), width=64, softmax=False, only=-1,
    align=8, mask=None,
):  # fmt: skip
    """A compiled kernel, as op.py launches it. v is k."""
    by_size = tuple(map(pieces, hidden))
    if name in HOPPER:
        config = hopper_config(HOPPER[name], width, hidden)
        by_size = by_size[0], pieces(hidden[1], 8 if name == "hopper" else 16)
        only = dict(rows=0, mlp=1).get(name, only)
    else:
        itemsize, of_device = 4 if dtype == "fp32" else 2, (capability // 10, capability % 10)
        config = din_config(name, itemsize, width, hidden, activation, softmax, of_device)
    units = activation if activation in ("relu", "prelu", "dice") else None
    options = Options(
        width=width, v_width=width, block_e=padded_dim(width), block_v=padded_dim(width),
        hidden=hidden, pieces=by_size, block=config.block, align=align,
        precision="bf16x6" if dtype == "fp32" else "tf32", units=units,
        factors=(1.0, 1.0), softmax=softmax, same=True, only=only, mask=mask,
    )  # fmt: skip
    function = activation_function("sigmoid" if has_table(units) else activation, dtype == "bf16")
    element, layers = f"*{dtype}", len(hidden)
    tuples = dict(
        operands=Operands(*[element] * 5),
        strides=("i32",) * 5,
        weights=(element,) * (layers + 1),
        biases=(element,) * layers,
        tables=("*fp32",) * (layers if has_table(units) else 0),
        users=Users(
            "*i64", "*i64", "*i32" if mask is not None and mask.has_targets else "constexpr"
        ),
    )
    if name in RESULTS:
        argument = "results" if name in ("fwd", "hopper") else "gradients"
        tuples[argument] = tuple("*fp32" if x in FP32 else element for x in RESULTS[name])

    def type_of(arg):
        if arg in tuples:
            return tuples[arg]
        if arg == "k_desc":
            return gluon_descriptor(dtype, [64, max(64, padded_dim(width))])
        if arg.endswith("_ptr"):
            return "*fp32" if arg.removesuffix("_ptr") in FP32 else element
        return None

    constants = dict(ACTIVATION=function, OPTIONS=options)
    pointers = [x for x in KERNELS[name].arg_names if x.endswith("_ptr")]
    aligned = [*pointers, *(x for x in tuples if x != "strides" and tuples[x])]
    return compile_for(
        capability, KERNELS[name], constants, type_of, aligned,
        num_warps=config.num_warps, num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )  # fmt: skip


@slow_after(1, "capability", [90, 80, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@by_name
def test_kernels_compile(name, dtype, capability):
    """With the published numbers of units. A block of 64 events is loaded 16 bytes at a time, and
    its scores are wgmma on Hopper."""
    compiled = compile_din(capability, name, dtype, only=0 if name == "moments" else -1)
    if dtype == "fp32":
        return
    assert "cp.async.cg" in compiled.asm["ptx"] or "ld.global.v4" in compiled.asm["ptx"]
    if capability == 90:
        assert "wgmma" in compiled.asm["ptx"]
        assert spilled_bytes(compiled.asm["cubin"]) <= SPILLED[name]


@slow_after(1, "capability", [100, 80])
@pytest.mark.parametrize("sizes", [((80, 40), 64), ((128,), 256)], ids=str)
def test_softmax_compiles(sizes, capability):
    hidden, width = sizes
    compile_din(capability, "fwd", "bf16", hidden=hidden, width=width, softmax=True)


@slow_after(1, "activation", ["dice", "prelu", "silu", "sigmoid"])
@by_name
def test_activations_compile(name, activation):
    only = 0 if name == "moments" else -1
    compiled = compile_din(90, name, "bf16", activation, softmax=True, only=only)
    if activation == "dice":
        assert spilled_bytes(compiled.asm["cubin"]) <= SPILLED_BY_DICE[name]


@slow_after(
    2, "sizes", [((128, 128), 128, 8), ((128,), 256, 8), ((7,), 5, 1), ((17, 130), 128, 8)], ids=str
)
@by_name
def test_sizes_compile(name, sizes):
    """The largest ones, and one layer of odd ones, whose rows are loaded element by element."""
    hidden, width, align = sizes
    only = 0 if name == "moments" else -1
    compiled = compile_din(90, name, "bf16", hidden=hidden, width=width, align=align, only=only)
    assert compiled.metadata.shared <= 163 * 1024  # of compute capability 8.0


@by_name
def test_large_fp32_sizes_fit_a_thread_block(name):
    """14080 of the 14336 weights that the kernels take."""
    only = 0 if name == "moments" else -1
    compiled = compile_din(90, name, "fp32", hidden=(80, 40), width=128, only=only)
    assert compiled.metadata.shared <= 227 * 1024


@slow_after(1, "case", [(90, "hstu"), (90, "semi-local"), (80, "window"), (100, "hstu")], ids=str)
@by_name
def test_masks_compile(name, case):
    """Rows of k that are seen are loaded 16 bytes at a time."""
    (capability, mask), only = case, 0 if name == "moments" else -1
    options = dict(softmax=True, only=only, mask=MASKS[mask])
    compiled = compile_din(capability, name, "bf16", "dice", **options)
    assert "cp.async.cg" in compiled.asm["ptx"] or "ld.global.v4" in compiled.asm["ptx"]
    if capability == 90:
        assert spilled_bytes(compiled.asm["cubin"]) <= SPILLED_UNDER_A_MASK[name]


@slow_after(1, "capability", [90, 80, 100])
def test_rows_of_units_compile(capability):
    types = dict(tables=("*fp32",) * 2, units=("*fp32",) * 2)
    constants = dict(HIDDEN=(80, 40), BLOCK=128)
    kernel = triton_forward.din_units_kernel
    compile_for(capability, kernel, constants, types.get, types, num_warps=4)


def test_passes_for_the_sums_of_one_layer_compile():
    for name, only in (("moments", 1), ("dmlp", 1), ("dq", 0)):
        compile_din(90, name, "bf16", "dice", only=only)


@slow_after(
    4, "activation, softmax, mask",
    diagonal_first(
        ["relu", "dice", "prelu", "sigmoid", "silu", "identity"],
        [True, False],
        ["none", "hstu", "semi-local", "window"],
    ),
)  # fmt: skip
def test_hopper_compiles(activation, softmax, mask):
    """Its MMAs are asynchronous: the assembler waits for each where it cannot follow their
    accumulators."""
    compiled = compile_din(90, "hopper", "bf16", activation, softmax=softmax, mask=MASKS[mask])
    code = disassembled(compiled.asm["cubin"])
    assert code.count("HGMMA") > 2 * code.count("WARPGROUP.DEPBAR")
    # At most 6 words of them in the loop over tiles, without a mask none; newer Tritons spill more.
    limit = {(False, "none"): 32, (True, "none"): 96}.get((softmax, mask), 144 if softmax else 56)
    if not triton.__version__.startswith("3.6."):
        limit = 168 if mask == "none" else 208
    assert spilled_bytes(compiled.asm["cubin"]) <= limit
    assert 4 * (compiled.metadata.shared + 1024) <= 228 * 1024


@slow_after(1, "sizes", [((80, 40), 128), ((128, 64), 64), ((80, 64), 128), ((5, 3), 20)], ids=str)
def test_hopper_sizes_compile(sizes):
    hidden, width = sizes
    compiled = compile_din(90, "hopper", "bf16", "dice", hidden=hidden, width=width)
    assert spilled_bytes(compiled.asm["cubin"]) <= 24
    assert 2 * (compiled.metadata.shared + 1024) <= 228 * 1024


# Bytes of registers in memory, which the loops over tiles read seldom, but with tables.
SPILLED_ON_HOPPER = dict(rows=(256, 1024), mlp=(64, 400), events=(160, 96))
of_backward = pytest.mark.parametrize("name", ["rows", "mlp", "events"])


@slow_after(
    3, "activation, softmax, mask",
    diagonal_first(
        ["relu", "dice", "prelu", "silu"], [True, False], ["none", "hstu", "window"],
    ),
)  # fmt: skip
@of_backward
def test_hopper_backward_compiles(name, activation, softmax, mask):
    """Its MMAs are asynchronous, as the forward's, and two programs run on an SM."""
    compiled = compile_din(90, name, "bf16", activation, softmax=softmax, mask=MASKS[mask])
    code = disassembled(compiled.asm["cubin"])
    assert code.count("HGMMA") > 1.5 * code.count("WARPGROUP.DEPBAR")
    if triton.__version__.startswith("3.6."):
        limit = SPILLED_ON_HOPPER[name][has_table(activation)]
        assert spilled_bytes(compiled.asm["cubin"]) <= limit
    assert 2 * (compiled.metadata.shared + 1024) <= 228 * 1024


@slow_after(1, "sizes", [((80, 64), 64), ((64, 32), 64), ((33, 16), 40), ((5, 3), 20)], ids=str)
@of_backward
def test_hopper_backward_sizes_compile(name, sizes):
    hidden, width = sizes
    compiled = compile_din(90, name, "bf16", "dice", hidden=hidden, width=width, softmax=True)
    assert 2 * (compiled.metadata.shared + 1024) <= 228 * 1024
