"""Which kernels of block attention run. No triton import; the GPU is an argument."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..common.configs import KernelChoice
from .configs import block_attention_config, hopper_block_attention_config


class BlockAttentionProblem(NamedTuple):
    """What the choice depends on: q `[L, num_heads, head_dim]`, k and v
    `[L, num_kv_heads, head_dim]`.

    rotary: "none", "relative" or "absolute" positions. aligned: rows of q, k and v start at 16-byte
    boundaries. dropout: of weights, which Hopper's kernels do not have.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    rotary: str
    aligned: bool
    device_type: str
    capability: tuple[int, int]
    dropout: bool = False


@functools.cache
def select_block_attention(
    kernel: str, problem: BlockAttentionProblem, implementation: str
) -> KernelChoice:
    """Backend and configuration of the kernel "fwd" or "bwd".

    Args:
        implementation: "triton", "hopper", or "auto": "hopper" where it is supported.

    Raises:
        ValueError: implementation "hopper", which does not support the problem.
    """
    num_heads, head_dim, block_size = problem.num_heads, problem.head_dim, problem.block_size
    if implementation != "triton" and _hopper_is_supported(problem):
        return KernelChoice(
            "hopper", hopper_block_attention_config(kernel, num_heads, head_dim, block_size)
        )
    if implementation == "hopper" and problem.dropout:
        raise ValueError(
            "implementation 'hopper' takes no dropout of attention weights: use 'auto' or 'triton'"
        )
    if implementation == "hopper":
        raise ValueError(
            "implementation 'hopper' takes fp16 or bf16 on a GPU of compute capability 9.0, D a"
            " multiple of 8 up to 128, as many key heads as query heads and rows at 16-byte"
            f" boundaries; got {problem.dtype} on {problem.device_type} with capability"
            f" {'.'.join(map(str, problem.capability))}, D = {head_dim}, {num_heads} query heads,"
            f" {problem.num_kv_heads} key heads, rows {'' if problem.aligned else 'not '}at 16-byte"
            " boundaries"
        )
    of_gpu = problem.dtype.itemsize, problem.capability
    of_blocks = block_size, num_heads // problem.num_kv_heads, problem.rotary
    config = block_attention_config(kernel, head_dim, *of_gpu, *of_blocks)
    return KernelChoice("triton", config)


def _hopper_is_supported(problem: BlockAttentionProblem) -> bool:
    on_hopper = problem.device_type == "cuda" and problem.capability == (9, 0)
    same_heads = problem.num_kv_heads == problem.num_heads
    return (
        on_hopper
        and same_heads
        and problem.dtype.itemsize == 2
        and problem.head_dim in range(8, 129, 8)
        and problem.aligned
        and not problem.dropout
    )
