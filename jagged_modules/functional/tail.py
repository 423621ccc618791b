"""Rows behind the last segment, where only the device knows where that one ends:
docs/decisions/rows-behind-the-end.md.

A layer clears them where its input enters and where its result leaves. In between, they are rows
like others: finite, with gradients of 0 from the result on. So they add 0 to the gradients of the
weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..segments import checked_offsets, may_have_tail
from ..validation import runs_transforms
from .nodes import apply


def offsets_and_tail(
    offsets: Any, x: Tensor, owner: str = "x's", max_seqlen: int | None = None
) -> tuple[Tensor, bool]:
    """`checked_offsets` of the rows of x, which errors call by its `owner`, and `may_have_tail`."""
    checked = checked_offsets("offsets", offsets, x.shape[0], x, owner, max_seqlen)
    return checked, may_have_tail("offsets", offsets, x.shape[0], x.device)


def without_tail(x: Tensor, offsets: Tensor, clears_gradient: bool = True) -> Tensor:
    """A copy of x `[rows, ...]` with 0 in the rows from offsets[-1] on, and 0 in the gradient of
    these rows. A NaN there is not read. offsets: `[B + 1]` in their normal form. clears_gradient:
    False where the gradient is 0 there already, which saves a pass over it."""
    if not runs_kernels(x):
        behind = torch.arange(x.shape[0], device=x.device) >= offsets.select(0, -1)
        return x.masked_fill(behind.view(-1, *[1] * (x.dim() - 1)), 0)
    return apply(_WithoutTail, x, offsets, clears_gradient)


def entering(x: Tensor, end: Tensor | None) -> Tensor:
    """A layer's input, cleared. Its gradient is 0 behind the end, as that of the result is."""
    return x if end is None else without_tail(x, end, clears_gradient=False)


def leaving(x: Tensor, end: Tensor | None) -> Tensor:
    """A result that the caller has just computed, cleared in place, and its gradient too."""
    if end is None:
        return x
    if not (runs_kernels(x) and x.is_contiguous()):
        return without_tail(x, end)
    return apply(_Leaving, x, end)


def with_zero_tail(x: Tensor, end: Tensor | None, *others: tuple[Tensor, Tensor]) -> Tensor:
    """`leaving` of a result that a node has just computed, below autograd: also in a graph it costs
    no pass over the other rows. others: tensors with their ends, cleared in place by the same
    launch; none in a graph."""
    if others:
        from jagged_kernels.common.tail import zero_tails_on_device

        own = [] if end is None else [(x, end)]
        zero_tails_on_device(*own, *others)
        return x
    if end is None:
        return x
    if not (_has_kernels(x) and x.is_contiguous()):
        return without_tail(x, end)
    from jagged_kernels.common.tail import zero_tail

    zero_tail(x, end)
    return x


def residual_sum(x: Tensor, y: Tensor, end: Tensor | None) -> Tensor:
    """x + y, of equal shapes, as `with_zero_tail`. Of fp32 rows and 16-bit ones, one kernel reads
    and writes each once; torch's does not load them in words."""
    if not runs_kernels(x) or x.dtype == y.dtype or x.dtype != torch.float32:
        return with_zero_tail(x + y, end)
    from jagged_kernels.common.tail import kept_rows_on_device

    return kept_rows_on_device(x, end, x.dtype, 0, y)


def cleared(x: Tensor, end: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`entering` in this dtype, below autograd: both in one pass."""
    if end is None:
        return x.to(dtype)
    if not runs_kernels(x):
        return without_tail(x, end).to(dtype)
    from jagged_kernels.common.tail import kept_rows_on_device

    return kept_rows_on_device(x, end, dtype)


def runs_kernels(x: Tensor) -> bool:
    """Whether one kernel of ours may run. Graphs take torch's operators, which compilers fuse with
    their neighbours. Triton has no complex numbers."""
    return _has_kernels(x) and not torch.compiler.is_compiling()


def copies_by_kernels(x: Tensor) -> bool:
    """Whether operators of ours that copy rows may run, also in a graph."""
    if runs_transforms():
        return False
    return x.is_cuda and not x.is_complex() and type(x) in (Tensor, torch.nn.Parameter)


def _has_kernels(x: Tensor) -> bool:
    """Whether operators of ours may run."""
    return copies_by_kernels(x) and x.is_floating_point()


class _WithoutTail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, clears_gradient: bool) -> Tensor:
        from jagged_kernels.common.tail import kept_rows_on_device

        ctx.save_for_backward(*((offsets,) if clears_gradient else ()))
        return kept_rows_on_device(x, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,), end = grads, ctx.saved_tensors
        return without_tail(grad, *end) if end else grad, None, None


class _Leaving(torch.autograd.Function):
    """Autograd does not see the write. If the function that made x has saved it, that function's
    gradient is 0 in these rows all the same, because this one's is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor) -> Tensor:
        from jagged_kernels.common.tail import zero_tails_on_device

        ctx.save_for_backward(offsets)
        zero_tails_on_device((x, offsets))
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return without_tail(grads[0], *ctx.saved_tensors), None
