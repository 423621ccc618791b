"""Launches of the kernels for short segments (triton_packed.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.activations import activation_factors, activation_function
from ..common.configs import LaunchConfig, padded_dim
from ..common.device import device_properties, precision, row_and_head_strides
from .packed_tiles import PackedTiles, pack_short_segments
from .params import AttentionParams, Gradients, Operands, Segments
from .triton_packed import (
    Backward,
    Batch,
    Options,
    Scales,
    packed_attention_bwd_kernel,
    packed_attention_fwd_kernel,
)


def forward(
    operands: Operands, segments: Segments, params: AttentionParams, config: LaunchConfig
) -> None:
    """Write `out`, and with softmax `lse`, of the short segments."""
    q, k, v, out, lse = operands
    packed = pack_short_segments(segments, q.shape[0], k.shape[0])
    align, strides = row_and_head_strides(q, k, v, out)
    packed_attention_fwd_kernel[_grid(config, packed, q)](
        *(operands, _batch(packed, params), _scales(q, params), tuple(strides), lse.stride(0)),
        **_constants(config, operands, params, align),
    )


def backward(
    operands: Operands,
    grads: Gradients,
    segments: Segments,
    params: AttentionParams,
    config: LaunchConfig,
) -> None:
    """Write dq, dk and dv of the short segments."""
    q, k, v, _, _ = operands
    do, dq, dk, dv, _ = grads
    packed = pack_short_segments(segments, q.shape[0], k.shape[0])
    align, strides = row_and_head_strides(q, k, v, do, dq, dk, dv)
    packed_attention_bwd_kernel[_grid(config, packed, k)](
        *(Backward(q, k, v, do, dq, dk, dv), _batch(packed, params)),
        *(_scales(q, params), tuple(strides)),
        **_constants(config, operands, params, align),
    )


def _batch(packed: PackedTiles, params: AttentionParams) -> Batch:
    return Batch(*packed, params.num_targets, params.segment_scale)


def _scales(q: Tensor, params: AttentionParams) -> Scales:
    factors = activation_factors(params.activation, q.dtype == torch.bfloat16, params.scale)
    dropout = params.dropout_seed, params.dropout_threshold
    return Scales(params.scale, *factors, params.output_scale, *dropout)


def _grid(config: LaunchConfig, packed: PackedTiles, x: Tensor) -> tuple[int]:
    """As many programs as run on the GPU at a time, at most one for each tile and head of x."""
    workers = device_properties(x.device).num_sms * config.ctas_per_sm
    return (min(workers, len(packed.tiles) * x.shape[1]),)


def _constants(
    config: LaunchConfig, operands: Operands, params: AttentionParams, align: int
) -> dict:
    q, k, v, _, _ = operands
    options = Options(
        heads=q.shape[1],
        group=q.shape[1] // k.shape[1],
        head_dim=q.shape[2],
        v_dim=v.shape[2],
        block_d=padded_dim(q.shape[2]),
        block_dv=padded_dim(v.shape[2]),
        align=align,
        precision=precision(q),
        mask=params.mask,
    )
    return dict(
        ACTIVATION=activation_function(params.activation, q.dtype == torch.bfloat16),
        OPTIONS=options,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
