"""Layers under `batch_invariant`: replacements of torch functions whose results for a row depend on
the number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from torch.overrides import TorchFunctionMode

from ..cpu.invariant import pointwise_rows_cpu
from ..functional import jagged_dense_bmm, jagged_linear
from ..settings import is_batch_invariant
from ..tracing import one_module

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)


def fixed_module(forward: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """`one_module` for a layer whose results for a row do not depend on the other rows under
    `batch_invariant`. Its modules are still called: their hooks run, and callers may replace
    them."""
    return one_module(forward, _with_fixed_rows)


def _with_fixed_rows(run: Callable[..., R]) -> Callable[..., R]:
    if not is_batch_invariant():
        return run

    def with_fixed_rows(*args: Any, **kwargs: Any) -> R:
        with _FixedRows():
            return run(*args, **kwargs)

    return with_fixed_rows


class _FixedRows(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # torch.compile cannot trace the method inside a TorchFunctionMode
        if func is Tensor.unflatten:
            func = torch.unflatten
        return _FIXED.get(func, func)(*args, **(kwargs or {}))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.dim() <= 2:
        return jagged_linear(x, weight, bias)
    return torch.unflatten(jagged_linear(x.flatten(0, -2), weight, bias), 0, x.shape[:-1])


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """As torch's, but the products of two batches of matrices are computed one by one."""
    if x.dim() != 3 or y.dim() != 3 or x.shape[0] != y.shape[0]:
        return x.matmul(y)
    offsets = torch.arange(x.shape[0] + 1, device=x.device) * x.shape[1]
    return torch.unflatten(jagged_dense_bmm(x.flatten(0, 1), y, offsets), 0, x.shape[:2])


def _pointwise(function: Callable[..., Tensor], activation: str) -> Callable[..., Tensor]:
    """The function applied row by row on the CPU: there, the elements left over after full SIMD
    vectors take other instructions. On GPUs the function is unchanged."""

    def fixed(x: Tensor, **options: Any) -> Tensor:
        if x.device.type != "cpu":
            return function(x, **options)
        name = "gelu_tanh" if options.get("approximate") == "tanh" else activation
        rows = x.reshape(1, -1) if x.dim() < 2 else x.flatten(0, -2)
        return pointwise_rows_cpu(rows, name).view(x.shape)

    return fixed


_FIXED: dict[Callable[..., Any], Callable[..., Any]] = {
    nnf.linear: _linear,
    Tensor.matmul: _matmul,
    nnf.silu: _pointwise(nnf.silu, "silu"),
    nnf.gelu: _pointwise(nnf.gelu, "gelu"),
    nnf.hardswish: _pointwise(nnf.hardswish, "hardswish"),
    torch.sigmoid: _pointwise(torch.sigmoid, "sigmoid"),
}
