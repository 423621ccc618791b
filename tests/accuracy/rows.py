"""Bounds of the kernels that take whole rows: norms, and HSTU's gate with its output projection.

Arithmetic is in fp32 and each result is rounded once; sums over rows, which are the gradients of a
norm's parameters, stay in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .activations import activated
from .arithmetic import KERNELS, splits_sums
from .bound import Bound, Bounds


class Norm(NamedTuple):
    """A norm over each of `groups` groups of columns."""

    eps: float = 1e-6
    groups: int = 1
    rms: bool = False


def row_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dy: Tensor,
    dtype: torch.dtype,
    norm: Norm,
    added: Tensor | None = None,
    copy: torch.dtype | None = None,
    factors: Tensor | None = None,
) -> Bounds:
    """Bounds of y in dtype "out", and for its gradient dy, plus `added`, of "dx", plus the
    residual, "dweight", "dbias", and "total", the sum of the rows of dx. With a dtype `copy`, also
    of y and dx in it, "copy" and "dcopy". factors: of dropout, of dcopy and total."""
    w, grad = Bound.exact(weight), Bound.exact(dy)
    if added is not None:
        grad = grad + Bound.exact(added)
    xhat, rstd = _normed(Bound.exact(x), norm)
    y = _affine(xhat, weight, bias)
    dx = _norm_gradient(grad * w, xhat, rstd, norm)
    if residual is not None:
        dx = dx + Bound.exact(residual)
    bounds = dict(out=y.rounded(dtype), dx=dx.rounded(x.dtype), dweight=(grad * xhat).sum(0))
    bounds |= {} if bias is None else dict(dbias=grad.sum(0))
    dx = dx if factors is None else dx * Bound.exact(factors)
    bounds |= {} if copy is None else dict(copy=y.rounded(copy), dcopy=dx.rounded(copy))
    return bounds | dict(total=dx.sum(0))


def gate(
    u: Tensor, a: Tensor, weight: Tensor, bias: Tensor | None, factors: Tensor, norm: Norm
) -> Bound:
    """The bound of [silu(u) | a | silu(u) · norm(a)] · factors, those of dropout."""
    silu = _sigmoid(Bound.exact(u)) * Bound.exact(u)
    xhat, _ = _normed(Bound.exact(a), norm)
    y = silu * _affine(xhat, weight, bias)
    return _joined(silu, Bound.exact(a).off_by(0), y).scaled(factors.double()).rounded(a.dtype)


def gate_linear_backward(
    dout: Tensor,
    u: Tensor,
    a: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor,
    factors: Tensor,
    norm: Norm,
) -> Bounds:
    """Bounds of "du", "da", "dweight", "dbias" and "dprojection", for the gradient dout of
    gate(u, a) @ projectionᵀ. Operands of a GEMM are rounded to a's dtype."""
    width, grad, p = a.shape[1], Bound.exact(dout.to(a.dtype)), Bound.exact(projection)
    dgated = grad.split_matmul(p, a.dtype) if splits_sums(a) else grad @ p
    dgated = dgated.rounded(a.dtype).scaled(factors.double())
    du, da, dy = (dgated.map(lambda x, i=i: x[:, i * width : (i + 1) * width]) for i in range(3))
    one, x = Bound.exact(torch.ones_like(u)), Bound.exact(u)
    sigmoid, (xhat, rstd) = _sigmoid(x), _normed(Bound.exact(a), norm)
    silu, w = x * sigmoid, Bound.exact(weight)
    dsilu, dnormed = du + dy * _affine(xhat, weight, bias), dy * silu
    du = dsilu * sigmoid * (one + x * (one - sigmoid))
    da = da + _norm_gradient(dnormed * w, xhat, rstd, norm)
    gated = gate(u, a, weight, bias, factors, norm)
    bounds = dict(du=du.rounded(a.dtype), da=da.rounded(a.dtype))
    bounds |= dict(dweight=(dnormed * xhat).sum(0), dprojection=grad.mT @ gated)
    return bounds if bias is None else bounds | dict(dbias=dnormed.sum(0))


def activation(
    x: Tensor, dy: Tensor, name: str, gated: bool, factors: Tensor | None = None
) -> Bounds:
    """Bounds of act(x), or of act(x₁) · x₂ with `gated`, and for its gradient dy of "dx" and of
    "sums", of its rows. factors: of dropout behind it."""
    width, grad = dy.shape[1], Bound.exact(dy)
    if factors is not None:
        grad = grad * Bound.exact(factors)
    act, dact = activated(Bound.exact(x[:, :width]), name)
    dx, y = grad * dact, act
    if gated:
        gate = Bound.exact(x[:, width:])
        y, dx = act * gate, _joined(grad * gate * dact, grad * act)
    if factors is not None:
        y = y * Bound.exact(factors)
    return dict(out=y.rounded(x.dtype), dx=dx.rounded(x.dtype), sums=dx.sum(0))


def _affine(xhat: Bound, weight: Tensor, bias: Tensor | None) -> Bound:
    y = xhat * Bound.exact(weight)
    return y if bias is None else y + Bound.exact(bias)


def _sigmoid(x: Bound) -> Bound:
    one = Bound.exact(torch.ones_like(x.value, dtype=torch.float32))
    return one / (one + x._replace(value=-x.value).exp(KERNELS.exp_ulps))


def _joined(*parts: Bound) -> Bound:
    value, error, rms = (torch.cat([x[i].expand_as(x.value) for x in parts], 1) for i in range(3))
    return Bound(value, error, rms, parts[0].dtype)


def _grouped(x: Bound, groups: int) -> Bound:
    return x.map(lambda x: x.unflatten(1, (groups, -1)))


def _mean(x: Bound) -> Bound:
    """Over the last dimension, which stays."""
    return x.sum(2).scaled(1 / x.value.shape[2]).map(lambda x: x.unsqueeze(2))


def _normed(x: Bound, norm: Norm) -> tuple[Bound, Bound]:
    """x̂, and rstd [L, groups, 1]."""
    x = _grouped(x, norm.groups)
    if not norm.rms:
        x = x - _mean(x)
    variance = _mean(x * x)
    variance = variance._replace(value=variance.value + norm.eps).off_by(1)
    rstd = variance.value.rsqrt()
    slope = rstd / variance.value / 2
    rstd = Bound(rstd, variance.error * slope, variance.rms * slope, x.dtype).off_by(3)
    return (x * rstd).map(lambda x: x.flatten(1)), rstd


def _norm_gradient(g: Bound, xhat: Bound, rstd: Bound, norm: Norm) -> Bound:
    g, xhat = _grouped(g, norm.groups), _grouped(xhat, norm.groups)
    dx = g - xhat * _mean(g * xhat)
    if not norm.rms:
        dx = dx - _mean(g)
    return (dx * rstd).map(lambda x: x.flatten(1))
