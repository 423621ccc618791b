"""Layers under `batch_invariant`: torch's functions of rows whose results depend on how many rows there are, in their fixed forms."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as nnf
from torch.overrides import TorchFunctionMode

from .cpu_invariant import pointwise_rows_cpu
from .functional import jagged_linear
from .settings import is_batch_invariant


def fixed_rows(forward: Callable) -> Callable:
    """Decorator of a layer's method: under `batch_invariant`, what its modules compute of a row does not depend on the other rows.

    The modules are called as ever, so that their hooks run and other modules may take their place.
    """

    @functools.wraps(forward)
    def method(*args, **kwargs):
        if not is_batch_invariant():
            return forward(*args, **kwargs)
        with _FixedRows():
            return forward(*args, **kwargs)

    return method


class _FixedRows(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.unflatten:  # which torch.compile cannot trace here
            function = torch.unflatten
        return _FIXED.get(function, function)(*args, **(kwargs or {}))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return jagged_linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1]) if x.dim() > 2 else jagged_linear(x, weight, bias)


def _pointwise(function: Callable, activation: str) -> Callable:
    """GPUs compute every element by the same instructions; the CPU those that fill no vector by others."""

    def fixed(x: Tensor, **options) -> Tensor:
        if x.device.type != "cpu":
            return function(x, **options)
        name = "gelu_tanh" if options.get("approximate") == "tanh" else activation
        return pointwise_rows_cpu(torch.atleast_2d(x).flatten(0, -2), name).view(x.shape)

    return fixed


_FIXED = {
    nnf.linear: _linear,
    nnf.silu: _pointwise(nnf.silu, "silu"),
    nnf.gelu: _pointwise(nnf.gelu, "gelu"),
    nnf.hardswish: _pointwise(nnf.hardswish, "hardswish"),
    torch.sigmoid: _pointwise(torch.sigmoid, "sigmoid"),
}
