"""The kernels of DIN's attention compile for the GPU generations that we support."""

import pytest
import torch
from marks import slow_after

pytest.importorskip("triton")

from jagged_kernels.common.activations import activation_function
from jagged_kernels.common.configs import padded_dim
from jagged_kernels.din import triton_backward, triton_forward
from jagged_kernels.din.configs import GROUP, din_config, pieces
from jagged_kernels.din.mlp import Operands, Options

from ..sass import spilled_bytes
from .ahead_of_time import compile_for

KERNELS = dict(
    fwd=triton_forward.din_fwd_kernel,
    moments=triton_forward.din_moments_kernel,
    dmlp=triton_backward.din_bwd_dmlp_kernel,
    dq=triton_backward.din_bwd_dq_kernel,
    dkdv=triton_backward.din_bwd_dkdv_kernel,
)
FP32 = ("lse", "delta", "parts", "sums")
GRADIENTS = dict(
    dmlp=("do", "lse", "delta", "parts", "sums"),
    dq=("do", "lse", "delta", "dq", "da", "parts", "sums"),
    dkdv=("do", "lse", "delta", "dk", "db", "dv"),
)
by_name = pytest.mark.parametrize("name", KERNELS)


def compile_din(
    capability, name, dtype, activation="relu", hidden=(80, 40), width=64, softmax=False, only=-1,
    align=8,
):  # fmt: skip
    """A compiled kernel, as op.py launches it. v is k."""
    config = din_config(name, 4 if dtype == "fp32" else 2, width, hidden)
    units = activation if activation in ("prelu", "dice") else None
    options = Options(
        width=width, v_width=width, block_e=padded_dim(width), block_v=padded_dim(width),
        hidden=hidden, pieces=tuple(map(pieces, hidden)), block=config.block, group=GROUP,
        align=align, precision="bf16x6" if dtype == "fp32" else "tf32", units=units,
        factors=(1.0, 1.0), softmax=softmax, same=True, only=only,
    )  # fmt: skip
    function = activation_function("sigmoid" if units else activation, dtype == "bf16")
    element, layers = f"*{dtype}", len(hidden)
    tuples = dict(
        operands=Operands(*[element] * 5),
        strides=("i32",) * 5,
        weights=(element,) * (layers + 1),
        biases=(element,) * layers,
        tables=("*fp32",) * (layers if units else 0),
    )
    if name in GRADIENTS:
        tuples["gradients"] = tuple("*fp32" if x in FP32 else element for x in GRADIENTS[name])

    def type_of(arg):
        if arg in tuples:
            return tuples[arg]
        if arg.endswith("offsets_ptr"):
            return "*i64"
        if arg.endswith("_ptr"):
            return "*fp32" if arg.removesuffix("_ptr") in FP32 else element
        return None

    pointers = [x for x in KERNELS[name].arg_names if x.endswith("_ptr")]
    aligned = [*pointers, *(x for x in tuples if x != "strides" and tuples[x])]
    return compile_for(
        capability, KERNELS[name], dict(ACTIVATION=function, OPTIONS=options), type_of, aligned,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
