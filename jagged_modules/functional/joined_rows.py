"""Concatenation of two tensors along their rows, without a copy if they are adjacent in one
buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..validation import transforms_are_active


def joined_rows(x: Tensor, y: Tensor) -> Tensor:
    """The rows of x `[N, ...]`, then those of y. A view if y follows x in memory, else a copy."""
    if torch.compiler.is_compiling() or transforms_are_active() or not _adjoin(x, y):
        return torch.cat([x, y])
    return _JoinedRows.apply(x, y)  # type: ignore[no-untyped-call]  # unannotated in torch


def _adjoin(x: Tensor, y: Tensor) -> bool:
    same = (
        x.dtype == y.dtype
        and x.device == y.device
        and x.shape[1:] == y.shape[1:]
        and x.stride() == y.stride()
    )
    if not same or x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return False
    return x.stride(0) > 0 and y.storage_offset() == x.storage_offset() + x.shape[0] * x.stride(0)


class _JoinedRows(torch.autograd.Function):
    """A view over x and y. The gradient of torch's x.as_strided flows to x only, not to y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.rows = x.shape[0], y.shape[0]
        return x.detach().as_strided((sum(ctx.rows), *x.shape[1:]), x.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        dx, dy = torch.split_with_sizes(grads[0], ctx.rows)
        return dx, dy
