"""Block-diagonal attention: the registered operators, their launches and autograd.

    S = scale · R q (R k)ᵀ,  P = softmax(S),  O = P R v              within blocks; R: the rotation,
    of v only if rotate_v dV = R⁻¹ Pᵀ dO,  dP = dO (R v)ᵀ,  dS = P ∘ (dP − rowsum(P ∘ dP)),  dQ =
    scale · R⁻¹ dS R k,  dK = scale · R⁻¹ dSᵀ R q

select.py chooses the kernels, configs.py has their launch configurations. triton_kernels.py and
hopper.py are the two backends.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..common.autograd import below_autograd, differentiate, refuse_derivative
from ..common.configs import KernelChoice
from ..common.descriptors import has_descriptor
from ..common.device import contiguous_last_dim, device_properties, precision, row_and_head_strides
from ..common.ops import operator
from ..common.tail import zero_tails
from .configs import BlockAttentionConfig
from .params import BlockAttentionParams, RotaryParams
from .select import BlockAttentionProblem, select_block_attention
from .triton_kernels import block_attention_bwd_kernel, block_attention_fwd_kernel


def _pack(
    offsets,
    cos,
    sin,
    positions,
    rotate_v,
    linear,
    precise,
    block_size,
    scale,
    implementation,
    batch_invariant,
    clear_tail,
) -> BlockAttentionParams:
    """The arguments of the operators after q, k and v, in their order."""
    rotary = RotaryParams(cos, sin, positions, rotate_v and cos is not None, linear, precise)
    return BlockAttentionParams(
        offsets, rotary, block_size, scale, implementation, batch_invariant, clear_tail
    )


# -- forward ---------------------------------------------------------------------------------------


def _fake(q, k, v, *rest):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@operator("block_attention", fake=_fake)
def triton_block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    rotate_v: bool,
    linear: bool,
    precise: bool,
    block_size: int,
    scale: float,
    implementation: str,
    batch_invariant: bool,
    clear_tail: bool = True,
) -> Tensor:
    """Forward.

    Args:
        q: `[L, H, D]`, k, v: `[L, Hkv, D]`, fp32, fp16 or bf16, last dim contiguous.
        Others: see `BlockAttentionParams` and `RotaryParams`.

    Returns:
        `[L, H, D]`.

    Raises:
        ValueError: implementation "hopper", which does not support the operands.
    """
    params = _pack(
        offsets,
        cos,
        sin,
        positions,
        rotate_v,
        linear,
        precise,
        block_size,
        scale,
        implementation,
        batch_invariant,
        clear_tail,
    )
    return _forward(q, k, v, params)


@operator("block_attention_packed", fake=lambda qkv, *rest: _fake(*qkv.unbind(1)))
def triton_block_attention_packed(
    qkv: Tensor,
    offsets: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    rotate_v: bool,
    linear: bool,
    precise: bool,
    block_size: int,
    scale: float,
    implementation: str,
    batch_invariant: bool,
    clear_tail: bool = True,
) -> Tensor:
    """Forward of q, k and v packed as `[L, 3, H, D]`, last dim contiguous. The backward writes
    their gradients as one tensor, which a projection's backward reads in place; autograd would copy
    three into one. Others: as `triton_block_attention`."""
    params = _pack(
        offsets,
        cos,
        sin,
        positions,
        rotate_v,
        linear,
        precise,
        block_size,
        scale,
        implementation,
        batch_invariant,
        clear_tail,
    )
    return _forward(*qkv.unbind(1), params)


def _forward(q: Tensor, k: Tensor, v: Tensor, params: BlockAttentionParams) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.shape[0] and params.offsets.shape[0] > 1:
        _launch_forward(q, k, v, out, params)
    if params.clear_tail:
        zero_tails((out, params.offsets))
    return out


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, params: BlockAttentionParams
) -> None:
    choice = _select("fwd", q, k, v, params)
    if choice.backend == "hopper":
        from . import hopper  # Gluon is imported only on Hopper, which alone compiles these kernels

        hopper.forward(q, k, v, out, params, choice.config)
        return
    config, rotary = choice.config, params.rotary
    num_tiles, grid = _grid(config, q.shape[0], q.shape[1], params.offsets)
    strides, layout = _layout(q, k, v, out)
    block_attention_fwd_kernel[grid](
        q,
        k,
        v,
        out,
        params.offsets,
        rotary.cos,
        rotary.sin,
        rotary.positions,
        rotary.num_positions,
        params.offsets.shape[0] - 1,
        num_tiles,
        params.scale,
        *strides,
        **layout,
        **_constants(config, q, k, params),
    )


# -- backward --------------------------------------------------------------------------------------


def _backward_fake(do, q, k, v, *rest):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


@operator("block_attention_backward", fake=_backward_fake)
def triton_block_attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    rotate_v: bool,
    linear: bool,
    precise: bool,
    block_size: int,
    scale: float,
    implementation: str,
    batch_invariant: bool,
    clear_tail: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the operands' shapes and dtype."""
    gradients = _backward_fake(do, q, k, v)
    params = _pack(
        offsets,
        cos,
        sin,
        positions,
        rotate_v,
        linear,
        precise,
        block_size,
        scale,
        implementation,
        batch_invariant,
        clear_tail,
    )
    _backward(do, q, k, v, *gradients, params)
    if clear_tail:
        zero_tails(*((x, offsets) for x in gradients))
    return gradients


def _packed_backward_fake(do, qkv, *rest):
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


@operator("block_attention_packed_backward", fake=_packed_backward_fake)
def triton_block_attention_packed_backward(
    do: Tensor,
    qkv: Tensor,
    offsets: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    rotate_v: bool,
    linear: bool,
    precise: bool,
    block_size: int,
    scale: float,
    implementation: str,
    batch_invariant: bool,
    clear_tail: bool = True,
) -> Tensor:
    """The gradient `[L, 3, H, D]` of qkv, in its dtype."""
    gradient = _packed_backward_fake(do, qkv)
    params = _pack(
        offsets,
        cos,
        sin,
        positions,
        rotate_v,
        linear,
        precise,
        block_size,
        scale,
        implementation,
        batch_invariant,
        clear_tail,
    )
    _backward(do, *qkv.unbind(1), *gradient.unbind(1), params)
    if clear_tail:
        zero_tails((gradient, offsets))
    return gradient


def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    params: BlockAttentionParams,
) -> None:
    """Write dq, dk and dv."""
    if q.shape[0] == 0 or params.offsets.shape[0] == 1:
        return
    do = contiguous_last_dim(do)
    choice = _select("bwd", q, k, v, params)
    if choice.backend == "hopper":
        from . import hopper

        hopper.backward(do, q, k, v, dq, dk, dv, params, choice.config)
        return
    config, rotary = choice.config, params.rotary
    num_tiles, grid = _grid(config, q.shape[0], k.shape[1], params.offsets)
    strides, layout = _layout(do, q, k, v, dq, dk, dv)
    block_attention_bwd_kernel[grid](
        do,
        q,
        k,
        v,
        dq,
        dk,
        dv,
        params.offsets,
        rotary.cos,
        rotary.sin,
        rotary.positions,
        rotary.num_positions,
        params.offsets.shape[0] - 1,
        num_tiles,
        params.scale,
        *strides,
        **layout,
        **_constants(config, q, k, params),
    )


# -- launches --------------------------------------------------------------------------------------


def _select(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, params: BlockAttentionParams
) -> KernelChoice:
    implementation = params.implementation
    aligned = implementation != "triton" and all(has_descriptor(x) for x in (q, k, v))
    # has_descriptor ignores the stride of a single row
    if aligned and implementation == "auto" and params.batch_invariant:
        aligned = not any(x.stride(0) * x.element_size() % 16 for x in (q, k, v))
    (_, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    problem = BlockAttentionProblem(
        num_heads, num_kv_heads, head_dim, q.dtype, params.block_size, params.rotary.kind, aligned,
        q.device.type, device_properties(q.device).capability,
    )  # fmt: skip
    return select_block_attention(kernel, problem, implementation)


def _grid(
    config: BlockAttentionConfig, num_rows: int, num_heads: int, offsets: Tensor
) -> tuple[int, tuple[int]]:
    """Number of tile indices, which follows from the shapes, and the grid."""
    num_tiles = num_rows // config.block_m + offsets.shape[0] - 1
    return num_tiles, (
        min(device_properties(offsets.device).num_sms * config.ctas_per_sm, num_tiles * num_heads),
    )


def _layout(*tensors: Tensor) -> tuple[list[int], dict]:
    """Row and head strides, and constants of the layout: pairs of 16-bit elements are words if all
    tensors start at 4-byte boundaries."""
    align, strides = row_and_head_strides(*tensors)
    packed = (
        tensors[0].element_size() == 2
        and align % 2 == 0
        and all(x.data_ptr() % 4 == 0 for x in tensors)
    )
    return strides, dict(ALIGN=align, PACKED=packed)


def _constants(
    config: BlockAttentionConfig, q: Tensor, k: Tensor, params: BlockAttentionParams
) -> dict:
    """The other constants of both kernels, and the launch options."""
    kind = params.rotary.kind
    return dict(
        HEADS=q.shape[1],
        GROUP=q.shape[1] // k.shape[1],
        DIM=q.shape[2],
        BLOCK_M=config.block_m,
        BLOCK_SIZE=params.block_size,
        BLOCK_D=config.block_d,
        ROTATE=kind != "none",
        ROTATE_V=params.rotary.rotate_v,
        RELATIVE=kind == "relative",
        PRECISION=precision(q),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


# -- autograd --------------------------------------------------------------------------------------


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, backward_op, *inputs):
        # the first arguments, the options after them
        tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.backward_op, ctx.options, ctx.num_inputs = (
            backward_op,
            inputs[len(tensors) :],
            len(inputs),
        )
        with below_autograd():
            return op(*inputs)

    @staticmethod
    def backward(ctx, do):
        gradients = ctx.backward_op(do, *ctx.saved_tensors, *ctx.options)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        return None, None, *gradients, *(None,) * (ctx.num_inputs - len(gradients))


def _differentiate(op, backward_op) -> None:
    differentiate(op, functools.partial(_BlockAttention.apply, op, backward_op))
    refuse_derivative(
        backward_op,
        "block_diagonal_attention is not differentiable twice: its backward kernel has no"
        " derivative of its own",
    )


_differentiate(triton_block_attention, triton_block_attention_backward)
_differentiate(triton_block_attention_packed, triton_block_attention_packed_backward)
