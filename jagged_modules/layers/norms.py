"""Norms of rows, as modules."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from torch.types import Device

from ..cpu.buckets import compute_dtype
from ..functional.layer_norm import layer_norm_rows
from ..functional.nodes import apply
from ..tracing import as_constant
from ..validation import runs_transforms
from .one_node import may_be_one_node

NORM_EPS = 1e-6
_vector_norm: Any = torch.linalg.vector_norm  # pyright: ignore - unannotated in torch


class RowNorm(nn.LayerNorm):
    """A LayerNorm that sums the gradients of its weight and bias in fp32 or fp64 on the CPU too."""

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm_rows(input, self.weight, self.bias, self.eps)


class WideNorm(nn.LayerNorm):
    """A LayerNorm in the dtype of its input, which may be wider than its weight's and bias's."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        return nnf.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class GroupNorm(WideNorm):
    """A WideNorm of each of `groups` equal groups of columns; each column has weight and bias."""

    groups: int

    def forward(self, input: Tensor) -> Tensor:
        grouped = torch.unflatten(input, -1, (self.groups, -1))
        normed = nnf.layer_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2)
        return torch.addcmul(self.bias.to(input.dtype), normed, self.weight.to(input.dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, groups={self.groups}"


class WideRMSNorm(nn.RMSNorm):
    """An RMSNorm that computes, and sums the gradient of its weight, in fp32 or fp64."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        weight = self.weight.to(dtype)
        return nnf.rms_norm(x.to(dtype), weight.shape, weight, self.eps).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """An RMSNorm whose weight may be wider than its input, as under autocast. torch's fused kernels
    need equal dtypes."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        if not _is_for_the_cpu(rows, self.weight):
            return super().forward(rows).to(x.dtype)
        eps = torch.finfo(rows.dtype).eps if self.eps is None else self.eps
        y: Tensor = apply(_CPUNorm, rows, self.weight, eps)
        return y.to(x.dtype)


def _is_for_the_cpu(x: Tensor, weight: Tensor) -> bool:
    """Whether `_CPUNorm` takes them."""
    if not x.is_cpu or runs_transforms() or not may_be_one_node(x, on_cpu=True):
        return False
    is_wide = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)
    return is_wide and {type(x), type(weight)} <= {Tensor, nn.Parameter}


class _CPUNorm(torch.autograd.Function):
    """An RMSNorm of rows in the weight's dtype. torch's on the CPU is a chain of operators: its
    backward takes up to three times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norms: Tensor = _vector_norm(x, dim=-1, keepdim=True)
        rstd = norms.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        ctx.eps = eps
        return (x * rstd).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight, rstd) = grads, ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradients are differentiated too
            y = nnf.rms_norm(x, weight.shape, weight, ctx.eps)
            wanted = [given for given in (x, weight) if given.requires_grad]
            found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
            return *(next(found) if z.requires_grad else None for z in (x, weight)), None
        normed = x * rstd
        products = dy * normed
        means = (products @ weight).mul_(1 / x.shape[-1]).unsqueeze(-1)
        dx = (dy * weight).sub_(normed.mul_(means)).mul_(rstd)
        return dx, products.reshape(-1, len(weight)).sum(0), None


NORM_KINDS = {  # by HSTUConfig.norm: of the input, and of attention's output
    "layer": (RowNorm, WideNorm),
    "rms": (WideRMSNorm, WideRMSNorm),
    "group": (RowNorm, GroupNorm),
}


def make_norm(
    kind: type[nn.Module],
    width: int,
    groups: int = 1,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """A norm of `width` columns, with HSTU's eps. groups: of a GroupNorm."""
    norm = kind(width, eps=NORM_EPS, device=device, dtype=dtype)
    if isinstance(norm, GroupNorm):
        norm.groups = groups
    return norm


def norm_parameters(norm: nn.Module) -> tuple[Any, Any]:
    """Weight and bias, which is None for an RMSNorm."""
    own: Any = norm  # see `parameters_of`
    return own._parameters["weight"], own._parameters.get("bias")


class NormOptions(NamedTuple):
    """A norm module's numbers, for kernels. eps: None for torch's default of an RMSNorm."""

    eps: float | None
    groups: int
    rms: bool

    @classmethod
    def of(cls, norm: nn.Module) -> NormOptions:
        numbers: Any = norm
        eps = None if numbers.eps is None else as_constant(numbers.eps)
        return cls(eps, getattr(norm, "groups", 1), isinstance(norm, nn.RMSNorm))
