"""Block attention for Hopper: the computation of triton_kernels.py, with tiles loaded and stored by
the tensor memory accelerator (TMA).

    forward    S = scale · R q (R k)ᵀ,  P = softmax(S),  O = P R v
               R: the rotation, of v only if ROTATE_V
    backward   dV = R⁻¹ Pᵀ dO,  dP = dO (R v)ᵀ,  dS = P ∘ (dP − rowsum(P ∘ dP)),
               dQ = scale · R⁻¹ dS R k,  dK = scale · R⁻¹ dSᵀ R q

Warps           no specialisation: all BLOCK_M / 16 warps (4; 8 for blocks of 128 rows) load,
                compute and store
Tiles           BLOCK_M x BLOCK_D: 64 rows of whole blocks (128 for blocks of 128), 64 columns for D
                <= 64, else 128. A thread block
                computes HEADS_PER_CTA heads of one tile, one after the other
Barriers        q.full, k.full, v.full, do.full: arrive count 1 (the thread that expects the TMA's
                bytes); the operand's tile of this head
                is in shared memory. There are no empty barriers: the same warps fill a buffer after
                the MMA that last reads it
                Results leave by TMA through the staging buffer: tma.store_wait(0) guards its reuse
Shared memory   per 64 x 128 tile of 16 bits 16 KiB, per 64 x 64 matrix 8 KiB; barriers take less
                than 0.1 KiB
                forward    q 16 + k 16 + v 16 + staging 16                                =  64 KiB,
                           three thread blocks an SM
                backward   q 16 + k 16 + v 16 + dO 16 + staging 16 + P 8 + dS 8           =  96 KiB,
                           two thread blocks an SM
                blocks of 128: forward 4 x 32 = 128 KiB, backward 5 x 32 + P 32 + dS 32 = 224 KiB,
                one thread block an SM
Registers       at most 168 a thread in the forward, and in the backward of D <= 64, for three
                thread blocks an SM; otherwise no limit

A buffer is filled for the next head as soon as the last MMA has read it. Rotary rotates q, k and v
in place in shared memory, and dq, dk and dv in registers. In both, a thread owns the same rows and
pairs of columns, so it keeps their cos and sin for all heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common.activations import LOG2_E
from ..common.device import has_descriptor
from ..common.gluon_api import thread_barrier
from ..common.pipeline import head_descriptor, mma_layout
from ..common.ptxas import safe_ptxas
from .configs import HopperBlockAttentionConfig
from .hopper_tiles import (
    Output,
    Rotary,
    as_dtype,
    block_softmax,
    first_tile,
    load,
    load_angles,
    make_input,
    make_staging,
    opaque_tile,
    rotate_in_place,
    store_epilogue,
    unit_of,
    zero_tail,
)
from .params import BlockAttentionParams


class Options(NamedTuple):
    """Constants of a launch. heads_per_cta: heads of a thread block. Others: as of the portable
    kernels. precise: see `RotaryParams`."""

    heads: int
    heads_per_cta: int
    dim: int
    block_m: int
    block_d: int
    block_size: int
    rotate: bool
    rotate_v: bool
    relative: bool
    precise: bool


class Forward(NamedTuple):
    """Pointers of the forward besides those in descriptors."""

    out: gl.tensor
    offsets: gl.tensor
    cos: gl.tensor
    sin: gl.tensor
    positions: gl.tensor


class Backward(NamedTuple):
    """Pointers of the backward besides those in descriptors."""

    dq: gl.tensor
    dk: gl.tensor
    dv: gl.tensor
    offsets: gl.tensor
    cos: gl.tensor
    sin: gl.tensor
    positions: gl.tensor


@gluon.jit
def _start(a, b, zeros):
    """Start the MMA a @ b."""
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


@gluon.jit
def _product(a, b, zeros):
    return warpgroup_mma_wait(0, deps=(_start(a, b, zeros),))


@safe_ptxas
@gluon.jit(do_not_specialize=["num_positions", "num_segments"])
def block_attention_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, out_desc,
    pointers, num_positions, num_segments, numbers, OPTIONS: gl.constexpr,
):  # fmt: skip
    """O of one tile, heads_per_cta heads. Grid: a program for each tile index and group of heads; a
    tile's groups are adjacent. pointers: Forward. numbers: the scale, strides of rows and heads."""
    BLOCK_M: gl.constexpr = OPTIONS.block_m
    BLOCK_D: gl.constexpr = OPTIONS.block_d
    DTYPE: gl.constexpr = q_desc.dtype
    QK_DTYPE: gl.constexpr = gl.float16 if OPTIONS.precise else DTYPE
    q = make_input(q_desc, BLOCK_M, BLOCK_D)
    k = make_input(k_desc, BLOCK_M, BLOCK_D)
    v = make_input(v_desc, BLOCK_M, BLOCK_D)
    out = Output(out_desc, pointers.out, numbers[1], numbers[2])
    staging = make_staging(out_desc, BLOCK_M, BLOCK_D)
    rotated_q, rotated_k = as_dtype(q.rows, QK_DTYPE), as_dtype(k.rows, QK_DTYPE)
    no_scores = gl.zeros([BLOCK_M, BLOCK_M], gl.float32, mma_layout(BLOCK_M, BLOCK_M))
    no_rows = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, mma_layout(BLOCK_M, BLOCK_D))

    tile, position, first_head = first_tile(pointers.offsets, num_segments, OPTIONS)
    load(q, tile, first_head, tile.num_rows > 0)
    load(k, tile, first_head, tile.num_rows > 0)
    load(v, tile, first_head, tile.num_rows > 0)
    rotary = Rotary(pointers.cos, pointers.sin, pointers.positions, num_positions)
    angles = load_angles(rotary, tile, position, OPTIONS)
    for step in range(gl.where(tile.num_rows > 0, OPTIONS.heads_per_cta, 0)):
        tile = opaque_tile(tile)
        head = first_head + step
        more = step + 1 < OPTIONS.heads_per_cta
        phase = step & 1
        mbarrier.wait(q.full, phase)
        mbarrier.wait(k.full, phase)
        unit = 1.0
        # without rotary, rows past the segment's end reach only scores that are masked
        if OPTIONS.rotate:
            q_unit = rotate_in_place(q.rows, angles, tile.num_rows, OPTIONS.precise)
            k_unit = rotate_in_place(k.rows, angles, tile.num_rows, OPTIONS.precise)
            unit = q_unit * k_unit
            fence_async_shared()
            thread_barrier()
        scores = _start(rotated_q, rotated_k.permute((1, 0)), no_scores)
        mbarrier.wait(v.full, phase)
        if OPTIONS.rotate_v:
            rotate_in_place(v.rows, angles, tile.num_rows, False)
        else:
            zero_tail(v.rows, tile.num_rows)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        fence_async_shared()
        thread_barrier()
        load(q, tile, head + 1, more)
        load(k, tile, head + 1, more)
        p = block_softmax(scores, tile.num_rows, numbers[0] * unit * LOG2_E, OPTIONS.block_size)
        p = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, mma_layout(BLOCK_M, BLOCK_D), 2))
        acc = _product(p, v.rows, no_rows)
        store_epilogue(acc, staging, out, tile, head, angles, False, OPTIONS.dim)
        load(v, tile, head + 1, more)
    tma.store_wait(0)


@safe_ptxas
@gluon.jit(do_not_specialize=["num_positions", "num_segments"])
def block_attention_bwd_hopper_kernel(
    do_desc, q_desc, k_desc, v_desc, dq_desc, dk_desc, dv_desc,
    pointers, num_positions, num_segments, numbers, OPTIONS: gl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of one tile, heads_per_cta heads. Grid, numbers: as in the forward.
    pointers: Backward."""
    BLOCK_M: gl.constexpr = OPTIONS.block_m
    BLOCK_D: gl.constexpr = OPTIONS.block_d
    DTYPE: gl.constexpr = q_desc.dtype
    QK_DTYPE: gl.constexpr = gl.float16 if OPTIONS.precise else DTYPE
    q, k = make_input(q_desc, BLOCK_M, BLOCK_D), make_input(k_desc, BLOCK_M, BLOCK_D)
    v, do = make_input(v_desc, BLOCK_M, BLOCK_D), make_input(do_desc, BLOCK_M, BLOCK_D)
    dq_out = Output(dq_desc, pointers.dq, numbers[1], numbers[2])
    dk_out = Output(dk_desc, pointers.dk, numbers[3], numbers[4])
    dv_out = Output(dv_desc, pointers.dv, numbers[5], numbers[6])
    staging = make_staging(dq_desc, BLOCK_M, BLOCK_D)
    rotated_q, rotated_k = as_dtype(q.rows, QK_DTYPE), as_dtype(k.rows, QK_DTYPE)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_M], DTYPE)
    p_buf = gl.allocate_shared_memory(DTYPE, [BLOCK_M, BLOCK_M], square)
    ds_buf = gl.allocate_shared_memory(QK_DTYPE, [BLOCK_M, BLOCK_M], square)
    no_scores = gl.zeros([BLOCK_M, BLOCK_M], gl.float32, mma_layout(BLOCK_M, BLOCK_M))
    no_rows = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, mma_layout(BLOCK_M, BLOCK_D))

    tile, position, first_head = first_tile(pointers.offsets, num_segments, OPTIONS)
    load(q, tile, first_head, tile.num_rows > 0)
    load(k, tile, first_head, tile.num_rows > 0)
    load(v, tile, first_head, tile.num_rows > 0)
    load(do, tile, first_head, tile.num_rows > 0)
    rotary = Rotary(pointers.cos, pointers.sin, pointers.positions, num_positions)
    angles = load_angles(rotary, tile, position, OPTIONS)
    for step in range(gl.where(tile.num_rows > 0, OPTIONS.heads_per_cta, 0)):
        tile = opaque_tile(tile)
        head = first_head + step
        more = step + 1 < OPTIONS.heads_per_cta
        phase = step & 1
        mbarrier.wait(q.full, phase)
        mbarrier.wait(k.full, phase)
        q_unit, k_unit, ds_unit = 1.0, 1.0, 1.0
        if OPTIONS.rotate:
            q_unit = rotate_in_place(q.rows, angles, tile.num_rows, OPTIONS.precise)
            k_unit = rotate_in_place(k.rows, angles, tile.num_rows, OPTIONS.precise)
        else:
            zero_tail(q.rows, tile.num_rows)
            zero_tail(k.rows, tile.num_rows)
        fence_async_shared()
        thread_barrier()
        scores = _start(rotated_q, rotated_k.permute((1, 0)), no_scores)
        mbarrier.wait(v.full, phase)
        mbarrier.wait(do.full, phase)
        zero_tail(do.rows, tile.num_rows)
        if OPTIONS.rotate_v:
            rotate_in_place(v.rows, angles, tile.num_rows, False)
        fence_async_shared()
        thread_barrier()
        dp = _start(do.rows, v.rows.permute((1, 0)), no_scores)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        scale = numbers[0] * q_unit * k_unit * LOG2_E
        p = block_softmax(scores, tile.num_rows, scale, OPTIONS.block_size)
        p_buf.store(p.to(DTYPE))
        dp = warpgroup_mma_wait(0, deps=(dp,))
        dp = gl.where(p > 0, dp, 0.0)  # v's rows past the segment may be NaN: 0 · NaN is NaN
        ds = p * (dp - gl.sum(p * dp, 1)[:, None]) * numbers[0]
        if OPTIONS.precise:
            ds_unit = unit_of(gl.abs(ds))
            ds *= 1.0 / ds_unit
        ds_buf.store(ds.to(QK_DTYPE))
        fence_async_shared()
        thread_barrier()
        load(v, tile, head + 1, more)

        dv = _product(p_buf.permute((1, 0)), do.rows, no_rows)
        store_epilogue(dv, staging, dv_out, tile, head, angles, OPTIONS.rotate_v, OPTIONS.dim)
        load(do, tile, head + 1, more)
        dq = _product(ds_buf, rotated_k, no_rows) * (ds_unit * k_unit)
        store_epilogue(dq, staging, dq_out, tile, head, angles, OPTIONS.rotate, OPTIONS.dim)
        load(k, tile, head + 1, more)
        dk = _product(ds_buf.permute((1, 0)), rotated_q, no_rows) * (ds_unit * q_unit)
        store_epilogue(dk, staging, dk_out, tile, head, angles, OPTIONS.rotate, OPTIONS.dim)
        load(q, tile, head + 1, more)
    tma.store_wait(0)


# -- launches --------------------------------------------------------------------------------------


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    params: BlockAttentionParams,
    config: HopperBlockAttentionConfig,
) -> None:
    """Write out, contiguous."""
    rotary = params.rotary
    block_attention_fwd_hopper_kernel[_grid(q, params, config)](
        *_descriptors(config, q, k, v, out),
        Forward(out, params.offsets, *rotary[:3]),
        rotary.num_positions,
        params.offsets.shape[0] - 1,
        (params.scale, *out.stride()[:2]),
        **_constants(q, params, config),
    )


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    params: BlockAttentionParams, config: HopperBlockAttentionConfig,
) -> None:  # fmt: skip
    """Write dq, dk and dv, last dim contiguous."""
    do = do if has_descriptor(do) else do.contiguous()
    rotary = params.rotary
    block_attention_bwd_hopper_kernel[_grid(q, params, config)](
        *_descriptors(config, do, q, k, v, dq, dk, dv),
        Backward(dq, dk, dv, params.offsets, *rotary[:3]),
        rotary.num_positions,
        params.offsets.shape[0] - 1,
        (params.scale, *dq.stride()[:2], *dk.stride()[:2], *dv.stride()[:2]),
        **_constants(q, params, config),
    )


def _grid(
    q: Tensor, params: BlockAttentionParams, config: HopperBlockAttentionConfig
) -> tuple[int]:
    """Thread blocks are short: the hardware balances them, and neighbours read the same rows, which
    keeps DRAM pages open."""
    num_tiles = q.shape[0] // config.block_m + params.offsets.shape[0] - 1
    return (num_tiles * (q.shape[1] // config.heads_per_cta),)


def _constants(q: Tensor, params: BlockAttentionParams, config: HopperBlockAttentionConfig) -> dict:
    """Constants and launch options of both kernels."""
    rotary, kind = params.rotary, params.rotary.kind
    options = Options(
        heads=q.shape[1],
        heads_per_cta=config.heads_per_cta,
        dim=q.shape[2],
        block_m=config.block_m,
        block_d=config.block_d,
        block_size=params.block_size,
        rotate=kind != "none",
        rotate_v=rotary.rotate_v,
        relative=kind == "relative",
        precise=kind != "none" and rotary.precise and q.dtype == torch.bfloat16,
    )
    return dict(OPTIONS=options, num_warps=config.num_warps, maxnreg=config.max_registers)


def _descriptors(config: HopperBlockAttentionConfig, *tensors: Tensor) -> list[TensorDescriptor]:
    """TMA descriptors of `[L, H, D]` as `[H, L, D]`. A box is one head's tile."""
    return [head_descriptor(x, config.block_m) for x in tensors]
