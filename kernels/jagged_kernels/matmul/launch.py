"""Launches of the matrix multiplications of jagged tensors (op.py has their arguments)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..common.activations import activation_factors, activation_function
from ..common.configs import GemmConfig
from ..common.device import (
    aligned_strides,
    cdiv,
    chunk_shift,
    contiguous_last_dim,
    device_properties,
    precision,
    row_strides,
)
from .configs import jagged_matmul_config
from .triton_kernels import (
    Dense,
    Options,
    array_jagged_bmm_kernel,
    jagged_dense_bmm_kernel,
    jagged_jagged_bmm_kernel,
    jagged_outer_kernel,
    jagged_symmetric_kernel,
    sum_chunks_kernel,
)

SYMMETRIC_BLOCK = 32


def dense(
    x: Tensor,
    offsets: Tensor,
    y: Tensor,
    bias: Tensor | None,
    activation: str | None,
    grad: Tensor | None,
) -> Tensor:
    """activation(x[b] @ y[b] + bias[b]), or with `grad` the gradient of the activation's input."""
    x, (segments, depth, columns) = contiguous_last_dim(x), y.shape
    bias = None if bias is None else contiguous_last_dim(bias)
    grad = None if grad is None else contiguous_last_dim(grad)
    transposed = y.stride(2) != 1 and y.stride(1) == 1
    y = y if transposed or y.stride(2) == 1 else y.contiguous()
    out = x.new_empty((x.shape[0], columns))
    if out.numel() == 0 or segments == 0:
        return out.zero_()
    function, factor = None, 1.0
    if activation is not None:
        is_bfloat16 = x.dtype == torch.bfloat16
        function = activation_function(activation, is_bfloat16)
        factor, _ = activation_factors(activation, is_bfloat16, 1.0)
    config, launch = _config("dense", x, 0, columns)
    others = [(tensor, 0) for tensor in (bias, grad) if tensor is not None]
    align, (stride_x, stride_yb, stride_y, *rest) = aligned_strides(
        (x, 0), (y, 0), (y, 2 if transposed else 1), *others
    )
    # strides of those that are given, in the order of `others`
    stride_grad = rest.pop() if grad is not None else 0
    stride_bias = rest.pop() if bias is not None else 0
    grid = ((x.shape[0] // config.block_m + segments) * cdiv(columns, config.block_n),)
    jagged_dense_bmm_kernel[grid](
        Dense(x, y, bias, grad, out),
        *(offsets, segments),
        *(stride_x, stride_yb, stride_y, stride_bias, stride_grad),
        ACTIVATION=function,
        **_options(launch, d=depth, t=columns, align=align, transposed=transposed, factor=factor),
    )
    return out


def jagged_jagged(
    x: Tensor | None, y: Tensor, offsets: Tensor, max_seqlen: int | None, batch_invariant: bool
) -> Tensor:
    """x[b]ᵀ @ y[b], `[B, D, T]`; x None: a column of ones."""
    x = None if x is None else contiguous_last_dim(x)
    y = contiguous_last_dim(y)
    segments = offsets.shape[0] - 1
    (length, columns), depth = y.shape, 1 if x is None else x.shape[1]
    out = y.new_empty((segments, depth, columns))
    if out.numel() == 0:
        return out
    config, launch = _config("jagged", y, depth, columns)
    if x is None:
        launch = launch | dict(block_m=1)
    tiles = cdiv(depth, config.block_m) * cdiv(columns, config.block_n)
    shift = chunk_shift(length, max_seqlen, tiles, y.device, batch_invariant)
    chunks = length >> shift
    partial = y.new_empty((2 * chunks, depth, columns), dtype=torch.float32)
    operands = (y,) if x is None else (x, y)
    align, strides = row_strides(*operands)
    jagged_jagged_bmm_kernel[((chunks + segments) * tiles,)](
        *(x, y, out, partial),
        *(offsets, segments, shift, strides[0], strides[-1]),
        **_options(launch, d=depth, t=columns, align=align),
    )
    if length > 1 << shift:
        size, block = depth * columns, 256
        sum_chunks_kernel[(chunks * cdiv(size, block),)](
            partial, out, offsets, segments, shift, SIZE=size, CHUNKS=16, BLOCK=block, num_warps=4
        )
    return out


def outer(
    x: Tensor, y: Tensor | None, x_offsets: Tensor, y_offsets: Tensor, p_offsets: Tensor, total: int
) -> Tensor:
    """x[b] @ y[b]ᵀ, `[total]`; y None: x[b] @ x[b]ᵀ."""
    if total == 0 or x.shape[1] == 0:
        return x.new_zeros((total,))
    p = x.new_empty((total,))
    config, launch = _config("outer", x, 0, 0)
    segments = x_offsets.shape[0] - 1
    align, strides = row_strides(x, x if y is None else y)
    jagged_outer_kernel[(x.shape[0] // config.block_m + segments,)](
        *(x, y, p),
        *(x_offsets, y_offsets, p_offsets, segments),
        *strides,
        **_options(launch, d=x.shape[1], t=0, align=align),
    )
    return p


def symmetric(p: Tensor, offsets: Tensor, p_offsets: Tensor, rows: int) -> Tensor:
    """p[b] + p[b]ᵀ; p and offsets as in `triton_jagged_gram`. rows: offsets[-1]."""
    p, segments = p.contiguous(), offsets.shape[0] - 1
    out = torch.empty_like(p)
    if p.numel():
        jagged_symmetric_kernel[(rows // SYMMETRIC_BLOCK + segments,)](
            p, out, offsets, p_offsets, segments, BLOCK=SYMMETRIC_BLOCK
        )
    return out


def array(
    p: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, p_offsets: Tensor, rows: int,
    transposed: bool,
) -> Tensor:  # fmt: skip
    """p[b] @ y[b]; if `transposed`, p[b]ᵀ @ y[b].

    Args:
        p: `[Σ N_b M_b]`, the matrices p[b] `[N_b, M_b]`, fp32, fp16 or bf16; offsets as in
            `triton_jagged_outer`.
        y: `[Ly, D]`; transposed: `[Lx, D]`.
        rows: number of rows of the result: Lx; transposed: Ly.

    Returns:
        `[rows, D]`.
    """
    p, y = p.contiguous(), contiguous_last_dim(y)
    columns, segments = y.shape[1], x_offsets.shape[0] - 1
    out = y.new_empty((rows, columns))
    if out.numel() == 0:
        return out
    config, launch = _config("array", y, 0, columns)
    align, (stride,) = row_strides(y)
    out_offsets, y_offsets = (y_offsets, x_offsets) if transposed else (x_offsets, y_offsets)
    array_jagged_bmm_kernel[((rows // config.block_m + segments) * cdiv(columns, config.block_n),)](
        *(p, y, out),
        *(out_offsets, y_offsets, p_offsets, segments, stride),
        **_options(launch, d=columns, t=0, align=align, transposed=transposed),
    )
    return out


def _config(kernel: str, x: Tensor, rows: int, columns: int) -> tuple[GemmConfig, dict]:
    """Launch configuration, and what of `_options` follows from it. rows, columns: see
    `jagged_matmul_config`."""
    return _cached_config(kernel, x.element_size(), rows, columns, x.device, precision(x))


@functools.cache
def _cached_config(
    kernel: str, itemsize: int, rows: int, columns: int, device: torch.device, precision: str
) -> tuple[GemmConfig, dict]:
    config = jagged_matmul_config(
        kernel, itemsize, device_properties(device).capability, rows, columns, precision
    )
    blocks = dict(block_m=config.block_m, block_n=config.block_n, block_k=config.block_k)
    return config, blocks | dict(
        precision=precision, num_warps=config.num_warps, num_stages=config.num_stages
    )


def _options(launch: dict, **sizes) -> dict:
    """Constants and options of a launch. launch: of `_config`. sizes: the other `Options`."""
    fields = launch | sizes
    launch = {name: fields.pop(name) for name in ("num_warps", "num_stages")}
    return dict(OPTIONS=Options(**fields), **launch)
