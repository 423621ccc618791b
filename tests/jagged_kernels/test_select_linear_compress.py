"""Which kernels of linear compression run, as a table; without a GPU."""

import dataclasses

import pytest
import torch
from jagged_kernels.common.configs import GemmConfig, KernelChoice
from jagged_kernels.linear_compress.configs import HopperGemmConfig
from jagged_kernels.linear_compress.select import (
    LinearCompressProblem,
    select_backward,
    select_forward,
    select_shared_gemm,
)

TYPICAL = LinearCompressProblem(
    n=256, dtype=torch.bfloat16, aligned=True, nonempty=True, device_type="cuda", capability=(9, 0)
)
UNSUPPORTED_BY_HOPPER = {
    "fp32": dict(dtype=torch.float32),
    "N not a multiple of 8": dict(n=260),
    "unaligned rows": dict(aligned=False),
    "an empty weight": dict(nonempty=False),
    "A100": dict(capability=(8, 0)),
    "Blackwell": dict(capability=(10, 0)),
    "interpreter": dict(device_type="cpu"),
}
WIDE = GemmConfig(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4, uses_tma=True)
NARROW = GemmConfig(block_m=128, block_n=128, block_k=32, num_warps=4, num_stages=3, ctas_per_sm=2)
FP32 = GemmConfig(
    block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=2, ctas_per_sm=2, uses_tma=True
)


@pytest.mark.parametrize(
    "changes, implementation, choice",
    [
        (
            {},
            "auto",
            KernelChoice(
                "hopper", HopperGemmConfig(block_n=256, block_k=64, num_stages=3, num_buffers=3)
            ),
        ),
        (
            dict(n=128),
            "auto",
            KernelChoice(
                "hopper", HopperGemmConfig(block_n=128, block_k=64, num_stages=4, num_buffers=3)
            ),
        ),
        (
            dict(n=64),
            "hopper",
            KernelChoice(
                "hopper", HopperGemmConfig(block_n=128, block_k=64, num_stages=4, num_buffers=3)
            ),
        ),
        (
            dict(n=64),
            "auto",
            KernelChoice("triton", dataclasses.replace(NARROW, block_n=64, uses_tma=True)),
        ),
        ({}, "triton", KernelChoice("triton", WIDE)),
        (dict(n=128), "triton", KernelChoice("triton", dataclasses.replace(NARROW, uses_tma=True))),
        (dict(capability=(8, 0)), "auto", KernelChoice("triton", NARROW)),
        (dict(capability=(10, 0)), "auto", KernelChoice("triton", WIDE)),
        (
            dict(capability=(12, 0)),
            "auto",
            KernelChoice("triton", dataclasses.replace(NARROW, uses_tma=True)),
        ),
        (dict(dtype=torch.float32), "auto", KernelChoice("triton", FP32)),
        (
            dict(device_type="cpu"),
            "triton",
            KernelChoice("triton", dataclasses.replace(WIDE, uses_tma=False)),
        ),
    ],
)
def test_forward(changes, implementation, choice):
    assert select_forward(TYPICAL._replace(**changes), implementation) == choice


@pytest.mark.parametrize("reason", UNSUPPORTED_BY_HOPPER)
def test_hopper_is_refused(reason):
    problem = TYPICAL._replace(**UNSUPPORTED_BY_HOPPER[reason])
    assert select_forward(problem, "auto").backend == "triton"
    with pytest.raises(
        ValueError,
        match=(
            r"implementation 'hopper' takes .*; got torch\.\w+ on (cuda|cpu) with capability"
            r" \d+\.0, "
        ),
    ):
        select_forward(problem, "hopper")


@pytest.mark.parametrize(
    "num_tiles, dtype, device_type, batch_invariant, backend",
    [
        (132, torch.bfloat16, "cuda", False, "cublas"),
        (133, torch.bfloat16, "cuda", False, "triton"),
        (133, torch.float32, "cuda", False, "cublas"),
        (133, torch.float16, "cpu", False, "cublas"),
        (1, torch.float16, "cuda", True, "triton"),
        (1, torch.float32, "cuda", True, "triton"),
    ],
)
def test_shared_levels(num_tiles, dtype, device_type, batch_invariant, backend):
    assert select_shared_gemm(num_tiles, dtype, device_type, 132, batch_invariant) == backend


@pytest.mark.parametrize("batch_invariant, backend", [(False, "cublas"), (True, "triton")])
def test_backward(batch_invariant, backend):
    tall = GemmConfig(
        block_m=256, block_n=128, block_k=64, num_warps=8, num_stages=3, uses_tma=True
    )
    wide = dataclasses.replace(tall, block_m=128, block_n=256)
    choice = select_backward(TYPICAL, 433, (128, 256), batch_invariant)
    assert choice.weights == (tall, tall) and choice.embeddings == KernelChoice(backend, WIDE)
    assert select_backward(TYPICAL, 128, (256,), batch_invariant).weights == (wide,)
    older = select_backward(
        TYPICAL._replace(capability=(8, 6)), 433, (866,), batch_invariant
    ).weights
    assert older == (
        GemmConfig(block_m=64, block_n=128, block_k=32, num_warps=4, num_stages=3, ctas_per_sm=2),
    )
