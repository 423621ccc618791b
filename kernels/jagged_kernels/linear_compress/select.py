"""Which kernels of linear compression run. No triton import; the GPU is an argument."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch

from ..common.configs import GemmConfig, KernelChoice
from .configs import hopper_gemm_config, linear_compress_config, weight_gradient_config


class LinearCompressProblem(NamedTuple):
    """What the choice depends on: weights `[M, K_l]`, embeddings `[B_l, K_l, N]`. aligned: rows of
    the embeddings start at 16-byte boundaries. nonempty: all weights have elements, and if there
    are candidates, so have all embeddings."""

    n: int
    dtype: torch.dtype
    aligned: bool
    nonempty: bool
    device_type: str
    capability: tuple[int, int]


class BackwardChoice(NamedTuple):
    """weights: configurations of the Triton GEMMs for each weight's gradient. embeddings: backend
    of the embeddings' gradients, "cublas" or "triton", and configuration for "triton"."""

    weights: tuple[GemmConfig, ...]
    embeddings: KernelChoice


@functools.cache
def select_forward(problem: LinearCompressProblem, implementation: str) -> KernelChoice:
    """Backend and configuration of the forward.

    Args:
        implementation: "triton", "hopper", or "auto": "hopper" where it is supported and N > 64.

    Raises:
        ValueError: implementation "hopper", which does not support the problem.
    """
    on_hopper = problem.device_type == "cuda" and problem.capability == (9, 0)
    supported = (
        on_hopper
        and problem.dtype.itemsize == 2
        and problem.n % 8 == 0
        and problem.aligned
        and problem.nonempty
    )
    if implementation == "hopper" and not supported:
        raise ValueError(
            "implementation 'hopper' takes fp16 or bf16 on a GPU of compute capability 9.0, no"
            " empty weights, and embeddings of N a multiple of 8 with rows at 16-byte boundaries;"
            f" got {problem.dtype} on {problem.device_type} with capability"
            f" {'.'.join(map(str, problem.capability))}, {'no' if problem.nonempty else 'some'}"
            f" empty weights or embeddings, N = {problem.n}, rows"
            f" {'' if problem.aligned else 'not '}at 16-byte boundaries"
        )
    # N <= 64 fills half of its tiles
    if supported and (implementation == "hopper" or (implementation == "auto" and problem.n > 64)):
        return KernelChoice("hopper", hopper_gemm_config(problem.n))
    return KernelChoice("triton", _triton_config(problem))


def select_shared_gemm(
    num_tiles: int, dtype: torch.dtype, device_type: str, num_sms: int, batch_invariant: bool
) -> str:
    """Backend of a shared level's GEMM beside the candidates' Triton GEMM: "triton" or "cublas".
    num_tiles: of 128 x 256. With few of them, cuBLAS takes less host time. cuBLAS chooses its
    algorithm by the batch size."""
    if batch_invariant:
        return "triton"
    if dtype == torch.float32 or device_type != "cuda":
        return "cublas"
    return "triton" if num_tiles > num_sms else "cublas"


@functools.cache
def select_backward(
    problem: LinearCompressProblem, m: int, depths: tuple[int, ...], batch_invariant: bool
) -> BackwardChoice:
    """Backends and configurations of the backward; depths: K of each level."""
    itemsize, capability, uses_tma = problem.dtype.itemsize, problem.capability, _uses_tma(problem)
    weights = (weight_gradient_config(itemsize, capability, m, k) for k in depths)
    return BackwardChoice(
        tuple(dataclasses.replace(config, uses_tma=uses_tma) for config in weights),
        KernelChoice("triton" if batch_invariant else "cublas", _triton_config(problem)),
    )


def _triton_config(problem: LinearCompressProblem) -> GemmConfig:
    config = linear_compress_config(problem.dtype.itemsize, problem.capability, problem.n)
    return dataclasses.replace(config, uses_tma=_uses_tma(problem))


def _uses_tma(problem: LinearCompressProblem) -> bool:
    return problem.device_type == "cuda" and problem.capability >= (9, 0)
