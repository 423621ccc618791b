"""Matrix multiplications of jagged tensors: the registered operators, their launches and autograd.

    jagged_dense_bmm    out[b] = activation(x[b] @ y[b] + bias[b])    dx = dz yᵀ, dy = xᵀ dz, dbias
                        = the sum of dz's rows
    jagged_jagged_bmm   out[b] = x[b]ᵀ @ y[b]                         dx = y gᵀ, dy = x g
    jagged_outer        p[b] = x[b] @ y[b]ᵀ                           dx = g y, dy = gᵀ x
    jagged_gram         p[b] = x[b] @ x[b]ᵀ                           dx = (g + gᵀ) x
    jagged_symmetric    out[b] = p[b] + p[b]ᵀ                         dp = g + gᵀ
    array_jagged_bmm    out[b] = p[b] @ y[b], or p[b]ᵀ @ y[b]         dp = g yᵀ, or y gᵀ; dy = pᵀ g,
                        or p g

Every gradient is another operator of this list, so all of them can be differentiated again; with an
activation, once. Sums are fp32, in an order that follows from the shapes, and rounded once: results
are deterministic. Offsets stay on the device; the last of them is the number of rows. There is one
backend, triton_kernels.py; configs.py has its launch configurations.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..common.activations import activation_factors, activation_function
from ..common.autograd import below_autograd, differentiate, refuse_derivative
from ..common.configs import GemmConfig
from ..common.device import (
    aligned_strides,
    cdiv,
    chunk_shift,
    contiguous_last_dim,
    device_properties,
    precision,
)
from ..common.ops import operator
from ..common.tail import zero_tails
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

# -- operators -------------------------------------------------------------------------------------


def _dense_fake(x, offsets, y, bias, activation, *chunking):
    return x.new_empty((x.shape[0], y.shape[2]))


@operator("jagged_dense_bmm", fake=_dense_fake)
def triton_jagged_dense_bmm(
    x: Tensor,
    offsets: Tensor,
    y: Tensor,
    bias: Tensor | None,
    activation: str | None,
    max_seqlen: int | None = None,
    batch_invariant: bool = False,
    clear_tail: bool = True,
) -> Tensor:
    """out[b] = activation(x[b] @ y[b] + bias[b]).

    Args:
        x: `[L, D]`, fp32, fp16 or bf16. offsets: `[B + 1]`.
        y: `[B, D, T]` of any strides; one matrix for all segments is expanded. bias: `[B, T]` or
            None.
        activation: a name of `common/activations.py`, or None.
        max_seqlen: rows of the longest segment, for the gradients. Too small a value costs time
            only.
        batch_invariant: the gradients' sums over a segment's rows are cut into chunks of a fixed
            length.
        clear_tail: write 0 to the rows behind the last segment, of the result and of x's gradient;
            False: there are none.

    Returns:
        `[L, T]`.
    """
    out = _dense(x, offsets, y, bias, activation, None)
    if clear_tail:
        zero_tails((out, offsets))
    return out


def _dact_fake(grad, x, offsets, y, bias, activation):
    return x.new_empty((x.shape[0], y.shape[2]))


@operator("jagged_dense_bmm_dact", fake=_dact_fake)
def triton_jagged_dense_bmm_dact(
    grad: Tensor, x: Tensor, offsets: Tensor, y: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """Gradient `[L, T]` of the activation's input, which is computed again, given the gradient of
    the result. Rows behind the last segment are not written: what takes this gradient does not read
    them."""
    return _dense(x, offsets, y, bias, activation, grad)


def _dense(
    x: Tensor,
    offsets: Tensor,
    y: Tensor,
    bias: Tensor | None,
    activation: str | None,
    grad: Tensor | None,
) -> Tensor:
    x, (segments, depth, columns) = contiguous_last_dim(x), y.shape
    bias = None if bias is None else contiguous_last_dim(bias)
    grad = None if grad is None else contiguous_last_dim(grad)
    transposed = y.stride(2) != 1 and y.stride(1) == 1
    y = y if transposed or y.stride(2) == 1 else y.contiguous()
    out = x.new_empty((x.shape[0], columns))
    if out.numel() == 0 or segments == 0:
        return out.zero_()
    function = (
        None if activation is None else activation_function(activation, x.dtype == torch.bfloat16)
    )
    factor = (
        1.0
        if activation is None
        else activation_factors(activation, x.dtype == torch.bfloat16, 1.0)[0]
    )
    config, launch = _config("dense", x, 0, columns)
    others = [(tensor, 0) for tensor in (bias, grad) if tensor is not None]
    align, (stride_x, stride_yb, stride_y, *rest) = aligned_strides(
        (x, 0), (y, 0), (y, 2 if transposed else 1), *others
    )
    stride_grad = rest.pop() if grad is not None else 0
    stride_bias = rest.pop() if bias is not None else 0
    grid = ((x.shape[0] // config.block_m + segments) * cdiv(columns, config.block_n),)
    jagged_dense_bmm_kernel[grid](
        Dense(x, y, bias, grad, out),
        offsets,
        segments,
        stride_x,
        stride_yb,
        stride_y,
        stride_bias,
        stride_grad,
        ACTIVATION=function,
        **_options(launch, d=depth, t=columns, align=align, transposed=transposed, factor=factor),
    )
    return out


def _jagged_fake(x, y, offsets, *chunking):
    return x.new_empty((offsets.shape[0] - 1, x.shape[1], y.shape[1]))


@operator("jagged_jagged_bmm", fake=_jagged_fake)
def triton_jagged_jagged_bmm(
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    max_seqlen: int | None = None,
    batch_invariant: bool = False,
    clear_tail: bool = True,
) -> Tensor:
    """out[b] = x[b]ᵀ @ y[b].

    Args:
        x: `[L, D]`, y: `[L, T]`, fp32, fp16 or bf16. offsets: `[B + 1]`.
        max_seqlen: rows of the longest segment. Too small a value costs time only.
        batch_invariant: long segments are cut into chunks of a fixed length.
        clear_tail: as of `triton_jagged_dense_bmm`, for the gradients.

    Returns:
        `[B, D, T]`, 0 for an empty segment.
    """
    return _jagged_jagged(x, y, offsets, max_seqlen, batch_invariant)


def _sum_fake(x, offsets, *chunking):
    return x.new_empty((offsets.shape[0] - 1, x.shape[1]))


@operator("jagged_sum", fake=_sum_fake)
def triton_jagged_sum(
    x: Tensor, offsets: Tensor, max_seqlen: int | None = None, batch_invariant: bool = False
) -> Tensor:
    """Sums of the rows of each segment, `[B, T]`: x `[L, T]` in fp32, fp16 or bf16, offsets
    `[B + 1]`. Others: as
    `triton_jagged_jagged_bmm`."""
    return _jagged_jagged(None, x, offsets, max_seqlen, batch_invariant).squeeze(1)


def _jagged_jagged(
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
    align, strides = aligned_strides(*((tensor, 0) for tensor in operands))
    jagged_jagged_bmm_kernel[((chunks + segments) * tiles,)](
        x,
        y,
        out,
        partial,
        offsets,
        segments,
        shift,
        strides[0],
        strides[-1],
        **_options(launch, d=depth, t=columns, align=align),
    )
    if length > 1 << shift:
        size, block = depth * columns, 256
        sum_chunks_kernel[(chunks * cdiv(size, block),)](
            partial, out, offsets, segments, shift, SIZE=size, CHUNKS=16, BLOCK=block, num_warps=4
        )
    return out


def _outer_fake(x, y, x_offsets, y_offsets, p_offsets, total):
    return x.new_empty((total,))


@operator("jagged_outer", fake=_outer_fake)
def triton_jagged_outer(
    x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, p_offsets: Tensor, total: int
) -> Tensor:
    """p[b] = x[b] @ y[b]ᵀ, row-major and one after the other.

    Args:
        x: `[Lx, D]`, y: `[Ly, D]`, fp32, fp16 or bf16.
        x_offsets, y_offsets: `[B + 1]`, of segments of N_b and M_b rows. p_offsets: `[B + 1]`, of
            N_b M_b elements.
        total: Σ N_b M_b.

    Returns:
        `[total]`.
    """
    return _outer(
        contiguous_last_dim(x), contiguous_last_dim(y), x_offsets, y_offsets, p_offsets, total
    )


def _gram_fake(x, offsets, p_offsets, total):
    return x.new_empty((total,))


@operator("jagged_gram", fake=_gram_fake)
def triton_jagged_gram(x: Tensor, offsets: Tensor, p_offsets: Tensor, total: int) -> Tensor:
    """p[b] = x[b] @ x[b]ᵀ. Reads about half as much as `triton_jagged_outer` of x with itself; same
    arguments."""
    return _outer(contiguous_last_dim(x), None, offsets, offsets, p_offsets, total)


def _outer(
    x: Tensor, y: Tensor | None, x_offsets: Tensor, y_offsets: Tensor, p_offsets: Tensor, total: int
) -> Tensor:
    if total == 0 or x.shape[1] == 0:
        return x.new_zeros((total,))
    p = x.new_empty((total,))
    config, launch = _config("outer", x, 0, 0)
    segments = x_offsets.shape[0] - 1
    align, strides = aligned_strides((x, 0), (x if y is None else y, 0))
    jagged_outer_kernel[(x.shape[0] // config.block_m + segments,)](
        x,
        y,
        p,
        x_offsets,
        y_offsets,
        p_offsets,
        segments,
        *strides,
        **_options(launch, d=x.shape[1], t=0, align=align),
    )
    return p


@operator("jagged_symmetric", fake=lambda p, *_: torch.empty_like(p))
def triton_jagged_symmetric(p: Tensor, offsets: Tensor, p_offsets: Tensor, rows: int) -> Tensor:
    """p[b] + p[b]ᵀ; p and offsets as in `triton_jagged_gram`. rows: offsets[-1]."""
    p, segments = p.contiguous(), offsets.shape[0] - 1
    out = torch.empty_like(p)
    if p.numel():
        jagged_symmetric_kernel[(rows // SYMMETRIC_BLOCK + segments,)](
            p, out, offsets, p_offsets, segments, BLOCK=SYMMETRIC_BLOCK
        )
    return out


def _array_fake(p, y, x_offsets, y_offsets, p_offsets, rows, transposed):
    return y.new_empty((rows, y.shape[1]))


@operator("array_jagged_bmm", fake=_array_fake)
def triton_array_jagged_bmm(
    p: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor,
    p_offsets: Tensor,
    rows: int,
    transposed: bool,
) -> Tensor:
    """out[b] = p[b] @ y[b]; if `transposed`, p[b]ᵀ @ y[b].

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
    align, (stride,) = aligned_strides((y, 0))
    out_offsets, y_offsets = (y_offsets, x_offsets) if transposed else (x_offsets, y_offsets)
    array_jagged_bmm_kernel[((rows // config.block_m + segments) * cdiv(columns, config.block_n),)](
        p,
        y,
        out,
        out_offsets,
        y_offsets,
        p_offsets,
        segments,
        stride,
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


# -- autograd --------------------------------------------------------------------------------------


class _DenseBmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, y, bias, activation, *options):
        ctx.save_for_backward(x, offsets, y, bias)
        ctx.activation, ctx.options = activation, options
        with below_autograd():
            return triton_jagged_dense_bmm(x, offsets, y, bias, activation, *options)

    @staticmethod
    def backward(ctx, grad):
        x, offsets, y, bias = ctx.saved_tensors
        wants_x, _, wants_y, wants_bias, *_ = ctx.needs_input_grad
        if ctx.activation is not None:
            grad = triton_jagged_dense_bmm_dact(grad, x, offsets, y, bias, ctx.activation)
        dx = (
            triton_jagged_dense_bmm(grad, offsets, y.transpose(1, 2), None, None, *ctx.options)
            if wants_x
            else None
        )
        dy = triton_jagged_jagged_bmm(x, grad, offsets, *ctx.options) if wants_y else None
        dbias = triton_jagged_sum(grad, offsets, *ctx.options[:2]) if wants_bias else None
        return dx, None, dy, dbias, None, *(None for _ in ctx.options)


class _JaggedBmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, offsets, *options):
        ctx.save_for_backward(x, y, offsets)
        ctx.options = options
        with below_autograd():
            return triton_jagged_jagged_bmm(x, y, offsets, *options)

    @staticmethod
    def backward(ctx, grad):
        x, y, offsets = ctx.saved_tensors
        dx = (
            triton_jagged_dense_bmm(y, offsets, grad.transpose(1, 2), None, None, *ctx.options)
            if ctx.needs_input_grad[0]
            else None
        )
        dy = (
            triton_jagged_dense_bmm(x, offsets, grad, None, None, *ctx.options)
            if ctx.needs_input_grad[1]
            else None
        )
        return dx, dy, None, *(None for _ in ctx.options)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, *chunking):
        ctx.save_for_backward(offsets)
        ctx.rows, ctx.chunking = x.shape[0], chunking
        with below_autograd():
            return triton_jagged_sum(x, offsets, *chunking)

    @staticmethod
    def backward(ctx, grad):
        (offsets,) = ctx.saved_tensors
        # The rows behind the last segment are those of one more, whose gradient is 0.
        lengths = pad(offsets, (0, 1), value=ctx.rows).diff()
        return (
            pad(grad, (0, 0, 0, 1)).repeat_interleave(lengths, 0, output_size=ctx.rows),
            None,
            *(None for _ in ctx.chunking),
        )


class _Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, x_offsets, y_offsets, p_offsets, total):
        ctx.save_for_backward(x, y, x_offsets, y_offsets, p_offsets)
        with below_autograd():
            return triton_jagged_outer(x, y, x_offsets, y_offsets, p_offsets, total)

    @staticmethod
    def backward(ctx, grad):
        x, y, *offsets = ctx.saved_tensors
        dx = (
            triton_array_jagged_bmm(grad, y, *offsets, x.shape[0], False)
            if ctx.needs_input_grad[0]
            else None
        )
        dy = (
            triton_array_jagged_bmm(grad, x, *offsets, y.shape[0], True)
            if ctx.needs_input_grad[1]
            else None
        )
        return dx, dy, None, None, None, None


class _Gram(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, p_offsets, total):
        ctx.save_for_backward(x, offsets, p_offsets)
        with below_autograd():
            return triton_jagged_gram(x, offsets, p_offsets, total)

    @staticmethod
    def backward(ctx, grad):
        x, offsets, p_offsets = ctx.saved_tensors
        both = triton_jagged_symmetric(grad, offsets, p_offsets, x.shape[0])
        return (
            triton_array_jagged_bmm(both, x, offsets, offsets, p_offsets, x.shape[0], False),
            None,
            None,
            None,
        )


class _Symmetric(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, offsets, p_offsets, rows):
        ctx.save_for_backward(offsets, p_offsets)
        ctx.rows = rows
        with below_autograd():
            return triton_jagged_symmetric(p, offsets, p_offsets, rows)

    @staticmethod
    def backward(ctx, grad):
        return triton_jagged_symmetric(grad, *ctx.saved_tensors, ctx.rows), None, None, None


class _ArrayBmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, y, x_offsets, y_offsets, p_offsets, rows, transposed):
        ctx.save_for_backward(p, y, x_offsets, y_offsets, p_offsets)
        ctx.transposed = transposed
        with below_autograd():
            return triton_array_jagged_bmm(p, y, x_offsets, y_offsets, p_offsets, rows, transposed)

    @staticmethod
    def backward(ctx, grad):
        p, y, *offsets = ctx.saved_tensors
        x_rows, y_rows = (y, grad) if ctx.transposed else (grad, y)
        dp = (
            triton_jagged_outer(x_rows, y_rows, *offsets, p.shape[0])
            if ctx.needs_input_grad[0]
            else None
        )
        dy = (
            triton_array_jagged_bmm(p, grad, *offsets, y.shape[0], not ctx.transposed)
            if ctx.needs_input_grad[1]
            else None
        )
        return dp, dy, *(None,) * 5


differentiate(triton_jagged_dense_bmm, _DenseBmm.apply)
refuse_derivative(
    triton_jagged_dense_bmm_dact,
    "jagged_dense_bmm is not differentiable twice with an activation: the activation's derivative"
    " has none of its own",
)
differentiate(triton_jagged_jagged_bmm, _JaggedBmm.apply)
differentiate(triton_jagged_sum, _Sum.apply)
differentiate(triton_jagged_outer, _Outer.apply)
differentiate(triton_jagged_gram, _Gram.apply)
differentiate(triton_jagged_symmetric, _Symmetric.apply)
differentiate(triton_array_jagged_bmm, _ArrayBmm.apply)
