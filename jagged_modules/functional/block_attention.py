"""Attention within blocks of the segments of jagged tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jagged_kernels.block_attention.configs import fits_shared_memory
from jagged_kernels.common.device import contiguous_last_dim
from torch import Tensor

from ..containers.offsets import block_offsets, positions_in_segments
from ..dropout import check_dropout, check_seed, parse_dropout
from ..dtypes import autocast, uses_kernels
from ..rotary import Rotary, apply_rotary, check_rotary, kernel_arguments
from ..scalars import check_size, possessive
from ..settings import is_batch_invariant
from ..validation import check_implementation, check_tensor, refuse_transforms
from .attention import jagged_attention
from .attention_arguments import ATTENTION_IMPLEMENTATIONS, BLOCKS, check_scalars, check_schedule_of
from .attention_call import check_operands
from .tail import offsets_and_tail


def block_diagonal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    block_size: int = 64,
    scale: float | None = None,
    rotary: Rotary | None = None,
    schedule: None = None,
    implementation: str = "auto",
    dropout_p: float = 0,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """Softmax attention within blocks of `block_size` rows. Blocks are counted from the start of
    each segment; the last may be shorter.

    Gradients flow to q, k and v.

    Args:
        q: `[L, H, D]` fp32, fp16 or bf16 (on the CPU also fp64). Any row and head stride: views of
            a packed projection are read in place.
        k, v: `[L, Hkv, D]`, same dtype as q. H is a multiple of Hkv. D is 1 to 256, and even with
            rotary.
        offsets: `[B + 1]` int32 or int64, on q's device or the host.
        block_size: rows of a block: 16, 32, 64 or 128.
        scale: factor of q kᵀ; 1/sqrt(D) if None.
        rotary: rotary position embeddings of q and k, and of v if rotary.rotate is "qkv". None: no
            rotation.
        schedule: must be None. The tiles follow from the offsets alone.
        implementation: "auto", "reference", "triton" or "hopper". "hopper" needs compute capability
            9.0, a 16-bit dtype, H = Hkv, and D a multiple of 8 up to 128; "auto" uses it for these
            inputs. On the CPU, "auto" calls `jagged_attention` with one segment for each
            block. It does the same on CUDA if a block needs more shared memory than the GPU has:
            blocks of 128 with D > 128 (fp32: > 32), and fp32 blocks of 64 with D > 128. Before
            Hopper and on consumer GPUs: also all blocks of 128, and D > 128 (fp32: > 64). On
            consumer GPUs: also fp32 with D > 32, and grouped heads with D > 64.
        dropout_p, dropout_seed: dropout of the weights, as in `jagged_attention` with one segment
            for each block.

    Returns:
        `[L, H, D]`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes, devices, heads, offsets or positions do not match.
        RuntimeError: a second derivative; "reference" supports it.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, 3, "[L, H, D]", "block_diagonal_attention", implementation)
    check_schedule_of(q, schedule)
    q, k, v = (autocast(x) for x in (q, k, v))
    options = block_size, scale, rotary, implementation, dropout_p, dropout_seed
    return _block_attention(q, k, v, _parsed(q, k, v, "q", offsets, *options))


def _block_attention(q: Tensor, k: Tensor, v: Tensor, parsed: _Parsed) -> Tensor:
    offsets, rotary, seed, has_tail, block_size, scale, implementation, p = parsed
    if _has_kernels(q, k, block_size, implementation):
        from jagged_kernels.block_attention.op import triton_block_attention

        q, k, v = (contiguous_last_dim(x) for x in (q, k, v))
        return triton_block_attention(q, k, v, *_kernel_arguments(parsed, q.device))

    dtype = q.dtype
    if rotary is not None:
        # rotate in fp32 and round once, as the kernels do
        if implementation == "reference" or not q.is_cuda:
            q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
        positions = rotary.positions
        if positions is None:
            positions = positions_in_segments(offsets, q.shape[0])
        positions = positions.to(q.device)
        positions = positions.clamp(0, rotary.cos.shape[0] - 1) if has_tail else positions
        cos, sin = (x.to(q.device)[positions] for x in (rotary.cos, rotary.sin))
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        v = apply_rotary(v, cos, sin) if rotary.rotate == "qkv" else v
    blocks = block_offsets(offsets, block_size, q.shape[0])
    out = jagged_attention(
        q, k, v, blocks, scale=scale, implementation=implementation, dropout_p=p,
        dropout_seed=seed[0] if seed else None,
    )  # fmt: skip
    return out.to(dtype)


def block_diagonal_attention_packed(
    qkv: Tensor,
    offsets: Tensor,
    *,
    block_size: int = 64,
    rotary: Rotary | None = None,
    implementation: str = "auto",
    dropout_p: float = 0,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """`block_diagonal_attention` of q, k and v packed in one tensor. The kernels write one packed
    gradient.

    Args:
        qkv: `[L, 3, H, D]`; dtypes, strides and D as for q.
        offsets, block_size, rotary, implementation, dropout_p, dropout_seed: as in
            `block_diagonal_attention`. The scale is 1/sqrt(D).

    Returns:
        `[L, H, D]`.

    Raises:
        TypeError, ValueError, RuntimeError: as `block_diagonal_attention`.
    """
    check_tensor("qkv", qkv, 4, "[L, 3, H, D]", "block_diagonal_attention_packed", implementation)
    if qkv.shape[1] != 3:
        raise ValueError(f"qkv must have shape [L, 3, H, D], got {list(qkv.shape)}")
    qkv = autocast(qkv)
    q, k, v = qkv.unbind(1)
    options = implementation, dropout_p, dropout_seed
    if _has_kernels(q, k, block_size, implementation):
        from jagged_kernels.block_attention.op import triton_block_attention_packed

        arguments = packed_arguments(qkv, offsets, block_size, rotary, *options)
        return triton_block_attention_packed(*arguments)
    parsed = _parsed(q, k, v, "qkv", offsets, block_size, None, rotary, *options)
    return _block_attention(q, k, v, parsed)


def packed_arguments(
    qkv: Tensor,
    offsets: Tensor,
    block_size: int,
    rotary: Rotary | None,
    implementation: str = "auto",
    dropout_p: float = 0,
    dropout_seed: Tensor | None = None,
) -> tuple[Any, ...]:
    """The checked arguments of the packed operators, which kernels compute."""
    q, k, v = qkv.unbind(1)
    options = implementation, dropout_p, dropout_seed
    parsed = _parsed(q, k, v, "qkv", offsets, block_size, None, rotary, *options)
    return contiguous_last_dim(qkv), *_kernel_arguments(parsed, qkv.device)


def _has_kernels(q: Tensor, k: Tensor, block_size: int, implementation: str) -> bool:
    """Whether block attention runs its own kernels for these tensors, instead of `jagged_attention`
    with a segment for each block."""
    group = q.shape[1] // k.shape[1]
    return runs_kernels(q.device, q.dtype, q.shape[2], block_size, group, implementation)


def runs_kernels(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    group: int = 1,
    implementation: str = "auto",
) -> bool:
    """The same of tensors that are not there yet. group: query heads of a key head."""
    if not uses_kernels(device, implementation):
        return False

    from jagged_kernels.common.ops import capability

    if implementation == "hopper":  # which `select_block_attention` refuses if it is not supported
        return True
    return fits_shared_memory(head_dim, dtype.itemsize, capability(device), block_size, group)


class _Parsed(NamedTuple):
    """The arguments of block attention, checked. seed: of dropout; empty if nothing is dropped.
    has_tail: of `offsets_and_tail`."""

    offsets: Tensor
    rotary: Rotary | None
    seed: list[Tensor]
    has_tail: bool
    block_size: int
    scale: float
    implementation: str
    dropout_p: float


def _parsed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    name: str,
    offsets: Tensor,
    block_size: int,
    scale: float | None,
    rotary: Rotary | None,
    implementation: str,
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> _Parsed:
    """After checks of everything but the types, dtypes and ranks of q, k and v. Errors call q
    `name`."""
    checked, has_tail = offsets_and_tail(offsets, q, possessive(name))
    check_operands(q, k, v, name)
    check_scalars("softmax", scale, 1)
    check_implementation(implementation, ATTENTION_IMPLEMENTATIONS, q.device)
    if implementation != "reference":
        refuse_transforms("block_diagonal_attention does")
    if v.shape != k.shape or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"k and v must be [L, Hkv, D] of q {list(q.shape)}, got {list(k.shape)} and"
            f" {list(v.shape)}"
        )
    check_size("block_size", block_size)
    if block_size not in BLOCKS:
        raise ValueError(f"block_size must be one of {BLOCKS}, got {block_size}")
    check_rotary(rotary, q, offsets)
    check_dropout("dropout_p", dropout_p)
    if dropout_seed is not None:
        check_seed(dropout_seed, q.device)
    p, seed = parse_dropout(dropout_p, dropout_seed, q)
    seeds = [] if seed is None else [seed]
    factor = q.shape[2] ** -0.5 if scale is None else float(scale)
    return _Parsed(checked, rotary, seeds, has_tail, block_size, factor, implementation, p)


def _kernel_arguments(parsed: _Parsed, device: torch.device) -> tuple[Any, ...]:
    """The arguments of the operators from the offsets on."""
    offsets, rotary, seed, has_tail, *options = parsed
    tables, rotation = kernel_arguments(rotary, device)
    return offsets, tables + seed, [*rotation, is_batch_invariant(), has_tail], *options
