"""Block-diagonal attention: the registered operators, their launches and autograd.

    S = scale · R q (R k)ᵀ,  P = softmax(S),  O = P R v
            within blocks; R: the rotation, of v only if rotate_v
    dV = R⁻¹ Pᵀ dO,  dP = dO (R v)ᵀ,  dS = P ∘ (dP − rowsum(P ∘ dP)),
    dQ = scale · R⁻¹ dS R k,  dK = scale · R⁻¹ dSᵀ R q

select.py chooses the kernels, configs.py has their launch configurations. triton_kernels.py and
hopper.py are the two backends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.autograd import differentiate_by, refuse_twice
from ..common.configs import KernelChoice
from ..common.device import (
    contiguous_last_dim,
    device_properties,
    has_descriptor,
    precision,
    row_and_head_strides,
)
from ..common.ops import operator
from ..common.tail import zero_tails
from .configs import BlockAttentionConfig
from .params import BlockAttentionParams, RotaryParams
from .select import BlockAttentionProblem, select_block_attention
from .triton_kernels import (
    Backward,
    DropoutArguments,
    Forward,
    Options,
    block_attention_bwd_kernel,
    block_attention_fwd_kernel,
)

# Behind the operands of all operators. tables: cos, sin and positions; with dropout the seed.
# flags: the other fields of `RotaryParams`, then batch_invariant and clear_tail.
_OPTIONS = (
    "Tensor offsets, Tensor?[] tables, bool[] flags, SymInt block_size, float scale,"
    " str implementation, float dropout_p=0.0"
)


def _pack(offsets, tables, flags, block_size, scale, implementation, p=0.0) -> BlockAttentionParams:
    cos, sin, positions, *seed = tables
    rotate_v, linear, precise, *others = flags
    rotary = RotaryParams(cos, sin, positions, rotate_v and cos is not None, linear, precise)
    return BlockAttentionParams(
        offsets, rotary, block_size, scale, implementation, *others, p, *seed
    )


# -- forward ---------------------------------------------------------------------------------------


def _fake(q, *rest):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@operator("block_attention", _fake, f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> Tensor")
def triton_block_attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    """Forward.

    Args:
        q: `[L, H, D]`, k, v: `[L, Hkv, D]`, fp32, fp16 or bf16, last dim contiguous.

    Returns:
        `[L, H, D]`.

    Raises:
        ValueError: implementation "hopper", which does not support the operands.
    """
    return _forward(q, k, v, _pack(*options))


@operator(
    "block_attention_packed",
    lambda qkv, *rest: _fake(qkv.unbind(1)[0]),
    f"(Tensor qkv, {_OPTIONS}) -> Tensor",
)
def triton_block_attention_packed(qkv: Tensor, *options: Any) -> Tensor:
    """Forward of q, k and v packed as `[L, 3, H, D]`, last dim contiguous. The backward writes
    their gradients as one tensor, which a projection's backward reads in place; autograd would copy
    three into one."""
    return _forward(*qkv.unbind(1), _pack(*options))


def _forward(q: Tensor, k: Tensor, v: Tensor, params: BlockAttentionParams) -> Tensor:
    out = _fake(q)
    _launch("fwd", Forward(q, k, v, out), params)
    if params.clear_tail:
        zero_tails((out, params.offsets))
    return out


# -- backward --------------------------------------------------------------------------------------


def _backward_fake(do, q, k, v, *rest):
    return tuple(map(_fake, (q, k, v)))


@operator(
    "block_attention_backward",
    _backward_fake,
    f"(Tensor do, Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def triton_block_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the operands' shapes and dtype."""
    gradients, params = _backward_fake(do, q, k, v), _pack(*options)
    _launch("bwd", Backward(contiguous_last_dim(do), q, k, v, *gradients), params)
    if params.clear_tail:
        zero_tails(*((x, params.offsets) for x in gradients))
    return gradients


@operator(
    "block_attention_packed_backward",
    lambda do, qkv, *rest: _fake(qkv),
    f"(Tensor do, Tensor qkv, {_OPTIONS}) -> Tensor",
)
def triton_block_attention_packed_backward(do: Tensor, qkv: Tensor, *options: Any) -> Tensor:
    """The gradient `[L, 3, H, D]` of qkv, in its dtype."""
    gradient, params = _fake(qkv), _pack(*options)
    x = Backward(contiguous_last_dim(do), *qkv.unbind(1), *gradient.unbind(1))
    _launch("bwd", x, params)
    if params.clear_tail:
        zero_tails((gradient, params.offsets))
    return gradient


# -- launches --------------------------------------------------------------------------------------


def _launch(kernel: str, x: Forward | Backward, params: BlockAttentionParams) -> None:
    """Write x's results. kernel: "fwd" or "bwd"."""
    if x.q.shape[0] == 0 or params.offsets.shape[0] == 1:
        return
    choice = _select(kernel, x.q, x.k, x.v, params)
    if choice.backend == "hopper":
        from . import hopper  # Gluon is imported only on Hopper, which alone compiles these kernels

        launch = hopper.forward if kernel == "fwd" else hopper.backward
        launch(*x, params, choice.config)
        return
    num_heads, run = x.q.shape[1], block_attention_fwd_kernel
    if kernel == "bwd":
        num_heads, run = x.k.shape[1], block_attention_bwd_kernel
    config = choice.config
    num_tiles = x.q.shape[0] // config.block_m + params.offsets.shape[0] - 1  # from shapes alone
    num_programs = device_properties(x.q.device).num_sms * config.ctas_per_sm
    arguments, constants = _arguments(x, num_tiles, config, params)
    run[(min(num_programs, num_tiles * num_heads),)](*arguments, **constants)


def _select(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, params: BlockAttentionParams
) -> KernelChoice:
    implementation = params.implementation
    aligned = implementation != "triton" and all(map(has_descriptor, (q, k, v)))
    # has_descriptor ignores the stride of a single row
    if aligned and implementation == "auto" and params.batch_invariant:
        aligned = not any([x.stride(0) * x.element_size() % 16 for x in (q, k, v)])
    (_, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    problem = BlockAttentionProblem(
        num_heads, num_kv_heads, head_dim, q.dtype, params.block_size, params.rotary.kind, aligned,
        q.device.type, device_properties(q.device).capability, params.dropout_seed is not None,
    )  # fmt: skip
    return select_block_attention(kernel, problem, implementation)


def _arguments(
    x: Forward | Backward,
    num_tiles: int,
    config: BlockAttentionConfig,
    params: BlockAttentionParams,
) -> tuple[tuple, dict]:
    """What both kernels take; constants and launch options. Pairs of 16-bit elements are words if
    all tensors start at 4-byte boundaries."""
    rotary, num_segments = params.rotary, params.offsets.shape[0] - 1
    align, strides = row_and_head_strides(*x)
    aligned = align % 2 == 0 and all([tensor.data_ptr() % 4 == 0 for tensor in x])
    options = Options(
        heads=x.q.shape[1],
        group=x.q.shape[1] // x.k.shape[1],
        dim=x.q.shape[2],
        block_m=config.block_m,
        block_size=params.block_size,
        block_d=config.block_d,
        rotate=rotary.kind != "none",
        rotate_v=rotary.rotate_v,
        relative=rotary.kind == "relative",
        align=align,
        packed=x.q.element_size() == 2 and aligned,
        precision=precision(x.q),
        local_rows=params.dropout_seed is not None and params.batch_invariant,
    )
    dropout = None
    if params.dropout_seed is not None:
        dropout = DropoutArguments(params.dropout_seed, params.dropout_p * 2**16)
    tables, sizes = rotary[:3], (rotary.num_positions, num_segments, num_tiles)
    arguments = x, params.offsets, tables, *sizes, params.scale, tuple(strides), dropout
    launch = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    return arguments, dict(OPTIONS=options, **launch)


# -- autograd --------------------------------------------------------------------------------------


def _differentiate(op, backward_op) -> None:
    def gradients(do, _, *arguments):
        found = backward_op(do, *arguments)
        return found if isinstance(found, tuple) else (found,)

    differentiate_by(op, gradients)
    refuse_twice("block_diagonal_attention", backward_op)


_differentiate(triton_block_attention, triton_block_attention_backward)
_differentiate(triton_block_attention_packed, triton_block_attention_packed_backward)
