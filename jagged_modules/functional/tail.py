"""Rows behind the last segment, where only the device knows where that one ends: docs/decisions/rows-behind-the-end.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..containers.segmentation import rows_on_host
from ..tracing import is_recording
from ..validation import transforms_are_active, values_are_checkable


def may_have_tail(name: str, offsets: Tensor, rows: int, device: torch.device) -> bool:
    """Whether only the device knows if there are rows behind offsets[-1]. Offsets whose values may be read are checked already.

    Args:
        offsets: as the caller gave them, before they are moved to `device`. Errors call them `name`.

    Raises:
        ValueError: a container has noted the lengths on the host, and they do not add up to `rows`.
    """
    if is_recording(device):
        return True
    if values_are_checkable(offsets):
        return False
    known = rows_on_host(offsets)
    if known is not None and known != rows:
        raise ValueError(f"{name} must end at the number of rows, {rows}, got {known}")
    return known is None


def behind_end(offsets: Tensor, rows: int, positions: Tensor | None = None) -> Tensor:
    """bool `[rows]`: whether the row, or its position if given, is behind the last segment."""
    positions = torch.arange(rows, device=offsets.device) if positions is None else positions
    return positions >= offsets[-1]


def without_tail(x: Tensor, offsets: Tensor, positions: Tensor | None = None) -> Tensor:
    """A copy of x `[rows, ...]` with 0 in the rows behind the last segment, and 0 in the gradient of these rows. A NaN there is not read.

    Args:
        offsets: `[B + 1]`, on x's device.
        positions: `[rows]`, what is compared with offsets[-1]: for rows in another order than that of the segments. None: the rows'
            indices.
    """
    if not _runs_kernels(x):
        return x.masked_fill(behind_end(offsets, x.shape[0], positions).view(-1, *[1] * (x.dim() - 1)), 0)
    return _WithoutTail.apply(x, offsets, positions)  # type: ignore[no-untyped-call]  # unannotated in torch


def with_clean_tail(x: Tensor, offsets: Tensor) -> Tensor:
    """`without_tail` of a tensor that a layer has just computed: its rows behind the last segment are overwritten in place."""
    if not (_runs_kernels(x) and x.is_contiguous()):
        return without_tail(x, offsets)
    return _CleanTail.apply(x, offsets)  # type: ignore[no-untyped-call]  # unannotated in torch


def padded_to(x: Tensor, rows: int) -> Tensor:
    """x `[n, ...]` with rows of 0 behind its own."""
    return x if x.shape[0] == rows else pad(x, (0, 0) * (x.dim() - 1) + (0, rows - x.shape[0]))


def _runs_kernels(x: Tensor) -> bool:
    """Whether one kernel of ours may run. Graphs take torch's operators, which compilers fuse with their neighbours."""
    return x.is_cuda and type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling() and not transforms_are_active()


class _WithoutTail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, positions: Tensor | None) -> Tensor:
        from jagged_kernels.common.tail import kept_rows

        ctx.save_for_backward(offsets, positions)
        return kept_rows(x, offsets, positions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return without_tail(grads[0], *ctx.saved_tensors), None, None


class _CleanTail(torch.autograd.Function):
    """Autograd does not see the write. If the function that made x has saved it, that function's gradient is 0 in these rows all the same,
    because this one's is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor) -> Tensor:
        from jagged_kernels.common.tail import zero_tails

        ctx.save_for_backward(offsets)
        zero_tails((x, offsets))
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return without_tail(grads[0], *ctx.saved_tensors), None
