"""Launches of the portable attention kernels (triton_tiles.py)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common.activations import activation_factors, activation_function
from ..common.configs import LaunchConfig, padded_dim
from ..common.descriptors import head_descriptor
from ..common.device import has_descriptor, precision, row_and_head_strides
from .bias import Bias
from .bias_tables import TableGradients, kernel_bias
from .params import (
    AttentionParams,
    BiasKind,
    Gradients,
    MaskParams,
    Operands,
    Segments,
    empty_table_gradients,
)
from .select import Selection
from .tile_lists import kernel_tiles
from .triton_dkdv import BackwardDkdv, attention_bwd_dkdv_kernel
from .triton_dq import BackwardDq, attention_bwd_dq_kernel
from .triton_forward import Forward, attention_fwd_kernel
from .triton_tiles import Call, Options


def triton_forward(
    operands: Operands, segments: Segments, params: AttentionParams, selection: Selection
) -> None:
    """Write `out`, and with softmax `lse`."""
    q, k, v, out, lse = operands
    config, pages = selection.fwd, segments.pages
    scales = pages and pages.scales
    tiles, num_tiles, grid = kernel_tiles(segments, config, out.shape[0], q.shape[1], params)
    if grid:
        align, strides = row_and_head_strides(q, k, v, out)
        blocks, tma = ((k, config.block), (v, config.block)), selection.tma and scales is None
        call = _call(segments, tiles, q, params)
        of_segments = dict(q_shared=segments.q_shared, page_rows=pages and pages.page_rows)
        attention_fwd_kernel[grid](
            Forward(*operands, *(() if scales is None else (scales, *scales.stride()))),
            *_descriptors(tma, align, *blocks),
            *(call, segments.segments_per_group, num_tiles, kernel_bias(params)),
            tuple(strides),
            lse.stride(0),
            pages and pages.table,
            **_constants(config, operands, params, align, **of_segments),
        )


def triton_dq(
    operands: Operands,
    grads: Gradients,
    queries: Segments,
    params: AttentionParams,
    bias: Bias | None,
    selection: Selection,
) -> tuple[Tensor, Tensor]:
    """Write dq, and with softmax delta. Returns the gradients of the bias tables."""
    q, k, v, out, lse = operands
    do, dq, _, _, delta = grads
    config = selection.dq
    tiles, num_tiles, grid = kernel_tiles(queries, config, do.shape[0], q.shape[1], params)
    sums = None
    if params.table_gradients:
        parts, block = grid[0] if grid else 0, config.tile * config.block
        sums = TableGradients.empty(params, parts, q.device, block=block)
    if grid:
        out = do if out is None else out
        align, strides = row_and_head_strides(q, k, v, out, do, dq)
        buckets = sums.buckets if sums else 0
        attention_bwd_dq_kernel[grid](
            BackwardDq(q, k, v, out, do, dq, lse, delta),
            *_descriptors(selection.tma, align, (k, config.block), (v, config.block)),
            *(_call(queries, tiles, q, params), queries.segments_per_group, num_tiles, bias),
            tuple(strides),
            lse.stride(0),
            sums and sums.argument(),
            **_constants(
                config, operands, params, align, q_shared=queries.q_shared, buckets=buckets
            ),
        )
    return empty_table_gradients(params, q) if sums is None else sums.results(params, q)


def triton_dkdv(
    operands: Operands,
    grads: Gradients,
    keys: Segments,
    params: AttentionParams,
    bias: Bias | None,
    kv_shared: bool,
    selection: Selection,
) -> None:
    """Write dk and dv."""
    q, k, v, _, lse = operands
    do, _, dk, dv, delta = grads
    config = selection.dkdv
    rows, heads, _ = dk.shape
    tiles, num_tiles, grid = kernel_tiles(keys, config, rows, heads, params, key_tiles=True)
    if grid:
        align, strides = row_and_head_strides(q, k, v, do, dk, dv)
        of_keys = dict(q_shared=keys.q_shared, kv_shared=kv_shared, query_groups=keys.query_groups)
        attention_bwd_dkdv_kernel[grid](
            BackwardDkdv(q, k, v, do, dk, dv, lse, delta),
            *_descriptors(
                selection.tma, align, (q, config.block), (k, config.tile), (do, config.block)
            ),
            *(_call(keys, tiles, q, params), keys.segments_per_group, num_tiles, bias),
            tuple(strides),
            lse.stride(0),
            **_constants(config, operands, params, align, **of_keys),
        )


def _call(segments: Segments, tiles: Tensor, q: Tensor, params: AttentionParams) -> Call:
    factors = activation_factors(params.activation, q.dtype == torch.bfloat16, params.scale)
    return Call(
        segments.q_offsets, segments.kv_offsets, tiles, params.num_targets, params.segment_scale,
        params.scale, *factors, params.output_scale, params.dropout_seed, params.dropout_threshold,
    )  # fmt: skip


def _constants(
    config: LaunchConfig, operands: Operands, params: AttentionParams, align: int, **options
) -> dict:
    """The constants of a launch. options: fields of `Options` that not all kernels have."""
    q, k, v, _, _ = operands
    dims = q.shape[1] // k.shape[1], q.shape[2], v.shape[2]
    options["local_rows"] = params.dropout_seed is not None and params.batch_invariant
    kind = params.activation, params.mask, params.bias_kind
    return _constants_of(config, dims, q.dtype, precision(q), kind, align, **options)


@functools.cache
def _constants_of(
    config: LaunchConfig,
    dims: tuple[int, int, int],
    dtype: torch.dtype,
    precision: str,
    kind: tuple[str, MaskParams | None, BiasKind | None],
    align: int,
    **options,
) -> dict:
    """dims: query heads of a key head, head dims of q and v."""
    activation, mask, bias = kind
    group, head_dim, v_dim = dims
    options |= dict(tile=config.tile, block=config.block, align=align)
    return dict(
        ACTIVATION=activation_function(activation, dtype == torch.bfloat16),
        OPTIONS=Options(
            group=group,
            head_dim=head_dim,
            v_dim=v_dim,
            block_d=padded_dim(head_dim),
            block_dv=padded_dim(v_dim),
            precision=precision,
            mask=mask and MaskParams(*mask),
            bias=bias,
            masked_stages=1 if mask is None else min(2, config.num_stages),
            **options,
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _descriptors(
    tma: bool, align: int, *blocks: tuple[Tensor, int]
) -> list[TensorDescriptor | None]:
    """TMA descriptors `[H, rows, D]` for (tensor, rows of a block), if rows start at 16-byte
    boundaries; None without TMA. A tensor without rows gets a descriptor of one row that is never
    read: without descriptors another kernel would be compiled."""
    if not tma:
        return [None] * len(blocks)
    tensors = [
        x if x.shape[0] else x.new_empty_strided((1, *x.shape[1:]), x.stride()) for x, _ in blocks
    ]
    aligned = align * blocks[0][0].element_size() >= 16 and all(map(has_descriptor, tensors))
    if not aligned:
        return [None] * len(blocks)
    return [head_descriptor(x, rows) for x, (_, rows) in zip(tensors, blocks)]
