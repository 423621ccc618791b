"""Norms of rows, and HSTU's gate with its output projection: the registered operators, their
launches and autograd.

    norm      x̂ = (x - mean) · rstd,  y = x̂ · w + b            rstd = 1 / sqrt(variance + eps)
    backward  g = dy · w,  dx = rstd (g - mean(g) - x̂ mean(g x̂)),  dw = Σ dy x̂,  db = Σ dy
    rms       x̂ = x · rstd, rstd = 1 / sqrt(mean(x²) + eps), and no mean(g)
    residual  the norm of x = x₁ + x₂, of a dy = dy₁ + dy₂; x, y and dx are written for all readers
    gate      s = silu(u),  y = s · norm(a),  out = dropout([s | a | y])
    backward  ds = d₁ + d₃ norm(a),  du = ds silu'(u),  d norm(a) = d₃ s,  da = d₂ + its backward

A norm is over each of `groups` equal groups of a row's columns; w and b have a number for each
column. Arithmetic is fp32 and each result is rounded once. Gradients of w and b are sums over a
fixed number of programs, then over these: two runs give the same bits.

`end` are offsets `[B + 1]`, of which the last one is the number of rows: those behind it are not
read, their results are 0, and no sum has them. None: all are rows.

Dropout multiplies each element by 0 or by 1 / (1 - p), as a hash of the seed, its row and its
column says (Philox). So nothing is stored for the backward, and the seed, which is on the device,
may change between replays of a CUDA graph. p is rounded to a multiple of 2^-21.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.autograd import below_autograd, differentiate, refuse_derivative, refuse_twice
from ..common.device import cdiv, contiguous_last_dim, device_properties, row_strides, zeroed_behind
from ..common.ops import operator
from ..common.tail import kept_rows
from .configs import FEW_WARPS, GATE_BACKWARD, HALVED, RowsConfig, rows_config
from .triton_kernels import (
    RANDOM_NUMBERS,
    Gate,
    GateGradients,
    NormBackward,
    NormForward,
    Options,
    gate_bwd_kernel,
    gate_fwd_kernel,
    row_norm_bwd_kernel,
    row_norm_fwd_kernel,
)


def _statistics_fake(x: Tensor, groups: int, rms: bool) -> tuple[Tensor, Tensor]:
    rstd = x.new_empty((x.shape[0], groups), dtype=torch.float32)
    return x.new_empty(0, dtype=torch.float32) if rms else torch.empty_like(rstd), rstd


def _row_norm_fake(
    x, weight, bias, dtype, eps, groups=1, rms=False, columns=0, end=None, after=None, rows=None
):
    rows = x.shape[0] if rows is None else rows
    y = x.new_empty((rows, x.shape[1] + columns), dtype=dtype)
    return y, *_statistics_fake(x, groups, rms)


@operator("row_norm", _row_norm_fake)
def triton_row_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    eps: float,
    groups: int = 1,
    rms: bool = False,
    columns: int = 0,
    end: Tensor | None = None,
    after: Tensor | None = None,
    rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm, or root mean square norm, of each row.

    Args:
        x: `[L, W]`, fp32, fp16 or bf16, any row stride.
        weight, bias: `[W]`, any of these dtypes.
        dtype: of the result.
        groups: number of groups of W / groups columns, at most 4096 each.
        columns: columns behind y with 1, 0, 0, ...; a power of two or 0 (see `BIAS_COLUMNS`).
        end: integers `[B + 1]`, see above.
        after: not read. A backward that computes y again gives its gradient: torch.compile merges
            equal calls, and would keep y instead.
        rows: of y, at least L, of which those behind L are 0; None: L.

    Returns:
        y `[rows, W + columns]`, and mean and rstd `[L, groups]` fp32; with rms, mean is `[0]`.
    """
    x, weight = contiguous_last_dim(x), weight.contiguous()
    options = eps, groups, rms, columns, end, after, rows
    y, mean, rstd = _row_norm_fake(x, weight, bias, dtype, *options)
    zeroed_behind(y, x.shape[0])
    tensors = NormForward(
        x, None, weight, _contiguous(bias), end, None, y, None, None if rms else mean, rstd
    )
    _write_norm(tensors, (eps, groups, rms), columns)
    return y, mean, rstd


def _write_norm(tensors: NormForward, norm: tuple[float, int, bool], columns: int = 0) -> None:
    """Launch the kernel. norm: eps, groups and rms. columns: as of `triton_row_norm`."""
    x, end = tensors.x, tensors.end
    if x.numel():
        launch = _Launch.of(x.shape[1], norm, x)
        row_norm_fwd_kernel[(cdiv(x.shape[0], launch.config.rows), norm[1])](
            tensors, x.shape[0], 0 if end is None else end.shape[0] - 1, *launch.strides,
            EXTRA=columns, **launch.constants(),
        )  # fmt: skip


def _row_norm_backward_fake(dy, x, mean, rstd, weight, residual, eps, rms=False, end=None):
    sums = x.new_empty((2, x.shape[1]), dtype=torch.float32)
    return x.new_empty(x.shape), sums


@operator("row_norm_backward", _row_norm_backward_fake)
def triton_row_norm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    eps: float,
    rms: bool = False,
    end: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of `triton_row_norm`.

    Args:
        dy: `[L, W]`, gradient of y. x, weight, eps, rms, end: the forward's. mean, rstd: its
            results.
        residual: `[L, W]`, added to the gradient of x.

    Returns:
        dx `[L, W]` in x's dtype, and `[2, W]` fp32, the gradients of weight and bias.
    """
    dx = x.new_empty(x.shape)
    tensors = dy, None, x, mean, rstd, weight, residual, None, end, dx, None
    return dx, _write_norm_gradients(tensors, eps, rms)


def _packed_fake(grads, column, x, mean, rstd, weight, eps, rms=False):
    return x.new_empty((2, x.shape[1]), dtype=torch.float32)


@operator(
    "row_norm_packed_backward",
    _packed_fake,
    "(Tensor(a!) grads, SymInt column, Tensor x, Tensor mean, Tensor rstd, Tensor weight,"
    " float eps, bool rms=False) -> Tensor",
)
def triton_row_norm_packed_backward(
    grads: Tensor,
    column: int,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    eps: float,
    rms: bool = False,
) -> Tensor:
    """`triton_row_norm_backward` that replaces dy, in columns of the gradient of a packed
    projection, by dx.

    Args:
        grads: `[L, P]`. column: the first of the W columns with dy.
        x, mean, rstd, weight, eps, rms: as in `triton_row_norm_backward`; x has the dtype of grads.

    Returns:
        `[2, W]` fp32, the gradients of weight and bias.
    """
    dy = grads[:, column : column + x.shape[1]]
    tensors = dy, None, x, mean, rstd, weight, None, None, None, dy, None
    return _write_norm_gradients(tensors, eps, rms)


def _residual_norm_fake(
    x, added, weight, bias, dtype, copy, eps, groups=1, rms=False, end=None, has_sum=True
):
    wide = x.dtype if added is None else torch.promote_types(x.dtype, added.dtype)
    has_sum = added is not None and (has_sum or wide != torch.float32)
    total = x.new_empty(x.shape if has_sum else 0, dtype=wide)
    other = x.new_empty(0 if copy is None else x.shape, dtype=copy)
    return total, x.new_empty(x.shape, dtype=dtype), other, *_statistics_fake(x, groups, rms)


@operator("row_norm_residual", _residual_norm_fake)
def triton_residual_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    copy: torch.dtype | None,
    eps: float,
    groups: int = 1,
    rms: bool = False,
    end: Tensor | None = None,
    has_sum: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x + added, in the wider of their dtypes, and `triton_row_norm` of it.

    Args:
        added: `[L, W]`, fp32, fp16 or bf16; None: nothing is added. The others are those of
            `triton_row_norm`.
        copy: a second dtype of the norm, or None.
        has_sum: False: the sum is not written, unless the norm is of its rounding to 16 bits.

    Returns:
        The sum `[L, W]`, or `[0]` if it is not written or nothing is added; y `[L, W]`; y in the
        second dtype, or `[0]`; mean and rstd.
    """
    x, added, weight = contiguous_last_dim(x), _contiguous(added), weight.contiguous()
    norm = eps, groups, rms
    results = _residual_norm_fake(x, added, weight, bias, dtype, copy, *norm, end, has_sum)
    total, y, other, mean, rstd = results
    tensors = NormForward(
        x, added, weight, _contiguous(bias), end, total if total.dim() == 2 else None, y,
        None if copy is None else other, None if rms else mean, rstd,
    )  # fmt: skip
    _write_norm(tensors, norm)
    return results


def _residual_norm_backward_fake(
    dy, added, x, mean, rstd, weight, residual, copy, rms=False, end=None, kept=None, scale=1.0
):
    other = x.new_empty(0 if copy is None else x.shape, dtype=copy)
    return x.new_empty(x.shape), other, x.new_empty((3, x.shape[1]), dtype=torch.float32)


@operator("row_norm_residual_backward", _residual_norm_backward_fake)
def triton_residual_norm_backward(
    dy: Tensor,
    added: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    copy: torch.dtype | None,
    rms: bool = False,
    end: Tensor | None = None,
    kept: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `triton_residual_norm`: dx is that of both of its terms.

    Args:
        dy, added: `[L, W]`, whose sum is the gradient of y; added may be None.
        x: the forward's sum. residual: `[L, W]`, added to its gradient, or None.
        copy: a second dtype of dx, or None.
        kept, scale: of dropout, bools `[L, W]` and the factor of what is kept: the second dx is
            its gradient.
        mean, rstd, weight, rms, end: as in `triton_row_norm_backward`.

    Returns:
        dx `[L, W]` in x's dtype; the second one, or `[0]`; and fp32 `[3, W]`, the gradients of
        weight and bias and the sum of the rows of the second dx.
    """
    dx, other, sums = _residual_norm_backward_fake(dy, added, x, mean, rstd, weight, residual, copy)
    added, copied = _contiguous(added), None if copy is None else other
    kept = None if kept is None else kept.contiguous().view(torch.uint8)
    tensors = dy, added, x, mean, rstd, weight, residual, kept, end, dx, copied
    return dx, other, _write_norm_gradients(tensors, 0.0, rms, len(sums), scale)  # eps is in rstd


def _write_norm_gradients(
    tensors: Sequence[Any], eps: float, rms: bool, count: int = 2, scale: float = 1.0
) -> Tensor:
    """Write dx, which may be dy, and its copy. tensors: those of NormBackward but for the sums.
    Returns `count` sums: the gradients of weight and bias, and the sum of the copy."""
    dy, added, x, mean, rstd, weight, residual, kept, end, dx, copy = tensors
    rows, width = x.shape
    if dx.numel() == 0:
        return x.new_zeros((count, width), dtype=torch.float32)
    dy, x = contiguous_last_dim(dy), contiguous_last_dim(x)
    residual = None if residual is None else contiguous_last_dim(residual)
    strided = [tensor for tensor in (dy, x, dx, residual) if tensor is not None]
    groups = rstd.shape[1]
    launch = _Launch.of(width, (eps, groups, rms), *strided)
    if count > 2:
        launch = launch.with_warps(FEW_WARPS)
    programs = launch.programs(rows, groups, x.device)
    sums = _partial_sums(x, programs, rms, count)
    of_kernel = NormBackward(
        dy, added, x, None if rms else mean, rstd, weight.contiguous(), residual, kept, end, dx,
        copy, sums[0], None if rms else sums[1], sums[2] if count > 2 else None,
    )  # fmt: skip
    row_norm_bwd_kernel[(programs, groups)](
        of_kernel, rows, 0 if end is None else end.shape[0] - 1, scale, launch.strides,
        **launch.constants(),
    )  # fmt: skip
    return sums.sum(1)


def _gate_fake(u, a, weight, bias, seed, dropout, eps, groups=1, rms=False):
    return a.new_empty((a.shape[0], 3 * a.shape[1])), *_statistics_fake(a, groups, rms)


@operator("gate", _gate_fake)
def triton_gate(
    u: Tensor,
    a: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    dropout: float,
    eps: float,
    groups: int = 1,
    rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dropout([silu(u) | a | silu(u) · norm(a)]).

    Args:
        u, a: `[L, W]`, fp32, fp16 or bf16, any row stride.
        weight, bias, groups, rms: of the norm, as in `triton_row_norm`.
        seed: int64 `[]`, of dropout, on the device; None: no dropout.
        dropout: probability with which an element becomes 0.

    Returns:
        `[L, 3 W]` in a's dtype, and mean and rstd of a as in `triton_row_norm`.
    """
    u, a, weight = contiguous_last_dim(u), contiguous_last_dim(a), weight.contiguous()
    out, mean, rstd = _gate_fake(u, a, weight, bias, seed, dropout, eps, groups, rms)
    if out.numel():
        launch = _Launch.of(a.shape[1], (eps, groups, rms), u, a)
        tensors = Gate(u, a, None if rms else mean, rstd, weight, _contiguous(bias), seed)
        gate_fwd_kernel[(cdiv(a.shape[0], launch.config.rows), groups)](
            tensors, out, a.shape[0], _threshold(dropout), launch.strides,
            **launch.constants(),
        )  # fmt: skip
    return out, mean, rstd


def _gate_linear_backward_fake(
    dout, gated, operands, bias, projection, seed, dropout, eps, rms, outs, needs, end=None
):
    _, a, *_ = operands
    dprojection = projection.new_empty(projection.shape if needs else 0, dtype=torch.float32)
    return a.new_empty((2, a.shape[1]), dtype=torch.float32), dprojection


@operator(
    "gate_linear_backward",
    _gate_linear_backward_fake,
    "(Tensor dout, Tensor? gated, Tensor[] operands, Tensor? bias, Tensor projection, Tensor? seed,"
    " float dropout, float eps, bool rms, Tensor(a!)[] outs, bool needs_projection,"
    " Tensor? end=None) -> (Tensor, Tensor)",
)
def triton_gate_linear_backward(
    dout: Tensor,
    gated: Tensor | None,
    operands: list[Tensor],
    bias: Tensor | None,
    projection: Tensor,
    seed: Tensor | None,
    dropout: float,
    eps: float,
    rms: bool,
    outs: list[Tensor],
    needs_projection: bool,
    end: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of out = `triton_gate(u, a, ...)` @ projectionᵀ.

    The gradient of the gate's result is kept in columns of the first of `outs` if they are enough:
    no other memory is taken for it.

    Args:
        dout: `[L, E]`, of any dtype.
        gated: result of `triton_gate`; None: it is computed again.
        operands: u and a of `triton_gate`, its results mean and rstd, and the norm's weight.
        bias, seed, dropout, eps, rms: as in `triton_gate`.
        projection: `[E, 3 W]` in a's dtype.
        outs: `[L, W + C]`, whose first columns become du and whose others have any content, and
            `[L, W]`, which becomes da and may be a. Both have a's dtype. Like u, a and gated, they
            may have more rows than dout, whose gradients are 0.
        needs_projection: compute the gradient of the projection.
        end: of the rows of dout. u and a are finite behind it.

    Returns:
        fp32 `[2, W]`, the gradients of weight and bias; that of the projection `[E, 3 W]` fp32, or
        `[0]`.
    """
    (u, a, mean, rstd, weight), (grads, da) = operands, outs
    if da.numel() == 0:
        results = _gate_linear_backward_fake(
            dout, gated, operands, bias, projection, seed, dropout, eps, rms, outs, needs_projection
        )
        return tuple(x.zero_() for x in results)
    u, a, weight = contiguous_last_dim(u), contiguous_last_dim(a), weight.contiguous()
    (rows, width), groups, du = a.shape, rstd.shape[1], grads[:, : a.shape[1]]
    behind = grads[:, width : 4 * width]
    dgated = behind if behind.shape[1] == 3 * width else a.new_empty((rows, 3 * width))
    launch = _Launch.of(width, (eps, groups, rms), u, a, dgated, du, da, elements=GATE_BACKWARD)
    recomputes = needs_projection and gated is None
    if recomputes and seed is not None:
        launch = launch.with_warps(FEW_WARPS)
    is_halved = dout.dtype != a.dtype and end is None and dout.numel() >= HALVED
    tiles = cdiv(rows, launch.config.rows)
    tiles = cdiv(tiles, 2) if is_halved else tiles
    size = tiles * launch.config.rows
    programs = launch.programs(size, groups, a.device)
    parts = range(0, rows, size)
    sums = _partial_sums(a, len(parts) * programs, rms)
    tensors = Gate(u, a, None if rms else mean, rstd, weight, _contiguous(bias), seed)
    dprojection = None
    for i, first in enumerate(parts):
        part, of_part = slice(first, first + size), sums[:, i * programs : (i + 1) * programs]
        rounded = _rounded_rows(dout[part], end, min(size, rows - first), a.dtype)
        torch.mm(rounded, projection, out=dgated[part])
        gate_bwd_kernel[(programs, groups)](
            tensors,
            GateGradients(dgated, du, da, of_part[0], None if rms else of_part[1]),
            i * tiles, min(first + size, rows), _threshold(dropout), launch.strides,
            RECOMPUTE=recomputes, **launch.constants(),
        )  # fmt: skip
        if needs_projection:
            product = _fp32_product(rounded.t(), (dgated if gated is None else gated)[part])
            dprojection = product if dprojection is None else dprojection.add_(product)
        del rounded  # before the next one is made
    return sums.sum(1), sums.new_empty(0) if dprojection is None else dprojection


def _rounded_rows(x: Tensor, end: Tensor | None, rows: int, dtype: torch.dtype) -> Tensor:
    """x in this dtype, with 0 behind the end and in the rows that it does not have."""
    out = None
    if rows > x.shape[0]:
        out = x.new_empty(rows, x.shape[1], dtype=dtype)
        zeroed_behind(out, x.shape[0])
    return kept_rows(x, end, dtype, out=out)


def _fp32_product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y in fp32. Only CUDA has products of 16-bit matrices that are not rounded."""
    if x.dtype == torch.float32 or not x.is_cuda:
        return x.float() @ y.float()
    return torch.mm(x, y, out_dtype=torch.float32)


def _partial_sums(x: Tensor, programs: int, rms: bool, count: int = 2) -> Tensor:
    """Of the gradients of weight and bias and of others, of which kernels write all. rms: there is
    no bias."""
    new = x.new_zeros if rms else x.new_empty
    return new((count, programs, x.shape[1]), dtype=torch.float32)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


class _Launch(NamedTuple):
    """The constants of a launch, and the row strides, in units of `align` elements."""

    options: Options
    config: RowsConfig
    strides: tuple[int, ...]

    @classmethod
    def of(
        cls, width: int, norm: tuple[float, int, bool], *strided: Tensor, elements: int = 16
    ) -> _Launch:
        """norm: eps, groups and rms. strided: operands whose row strides the kernel is given."""
        eps, groups, rms = norm
        config, (align, strides) = rows_config(width // groups, elements), row_strides(*strided)
        options = Options(width // groups, rms, eps, align, config.rows, config.block)
        return cls(options, config, tuple(strides))

    def with_warps(self, warps: int) -> _Launch:
        """The same for so many warps of a multiprocessor."""
        return self._replace(config=dataclasses.replace(self.config, warps_per_sm=warps))

    def constants(self) -> dict[str, Any]:
        return dict(OPTIONS=self.options, num_warps=self.config.num_warps)

    def programs(self, rows: int, groups: int, device: torch.device) -> int:
        """Number of programs for each group."""
        most = self.config.programs_per_sm * device_properties(device).num_sms
        return min(cdiv(rows, self.config.rows), max(1, most // groups))


def _threshold(dropout: float) -> int:
    """How many of `RANDOM_NUMBERS` keep an element."""
    return round((1 - dropout) * RANDOM_NUMBERS.value)


# -- autograd --------------------------------------------------------------------------------------


class _RowNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weight, bias, dtype, eps, groups=1, rms=False, columns=0, end=None, *others
    ):
        options = eps, groups, rms, columns, end, *others
        with below_autograd():
            y, mean, rstd = triton_row_norm(x, weight, bias, dtype, *options)
        ctx.save_for_backward(x, weight, bias, mean, rstd, end)
        ctx.eps, ctx.rms, ctx.num_others = eps, rms, len(others)
        ctx.mark_non_differentiable(mean, rstd)
        return y, mean, rstd

    @staticmethod
    def backward(ctx, dy, _dmean, _drstd):
        x, weight, bias, mean, rstd, end = ctx.saved_tensors
        dy = dy[: x.shape[0], : x.shape[1]]
        dx, sums = triton_row_norm_backward(dy, x, mean, rstd, weight, None, ctx.eps, ctx.rms, end)
        dbias = None if bias is None else sums[1].to(bias.dtype)
        return dx, sums[0].to(weight.dtype), dbias, *(None,) * (6 + ctx.num_others)


differentiate(triton_row_norm, _RowNorm.apply)
refuse_derivative(
    triton_gate, "the gate's operator has no derivative of its own: its caller has one"
)
refuse_derivative(
    triton_residual_norm, "the norm of a sum has no derivative of its own: its caller has one"
)
refuse_twice("row_norm", triton_row_norm_backward, triton_row_norm_packed_backward)
refuse_twice("row_norm_residual", triton_residual_norm_backward)
refuse_twice("gate", triton_gate_linear_backward)
