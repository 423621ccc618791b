"""One number per segment, expanded to the segment's rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def expand_to_rows(x: Tensor, offsets: Tensor, num_rows: int, has_tail: bool = False) -> Tensor:
    """x[b] repeated for each row of segment b: `[B]` to `[num_rows]`. offsets are `[B + 1]` on x's
    device. The gradient is summed in a fixed order. That of torch.repeat_interleave is not
    deterministic on a GPU. has_tail: there may be rows behind the last segment, whose value is
    0."""
    if has_tail:  # they are the rows of one more segment
        x, offsets = pad(x, (0, 1)), torch.cat([offsets, offsets.narrow(0, 0, 1) + num_rows])
    if x.is_cuda and x.requires_grad and x.dtype == torch.float32:
        return _ExpandToRows.apply(x, offsets, num_rows)  # type: ignore[no-untyped-call]  # unannotated in torch
    return torch.repeat_interleave(x, offsets.diff(), output_size=num_rows)


class _ExpandToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(offsets)
        return torch.repeat_interleave(x, offsets.diff(), output_size=num_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from jagged_kernels.matmul.op import triton_jagged_sum

        (grad,), (offsets,) = grads, ctx.saved_tensors
        return triton_jagged_sum(grad.unsqueeze(1), offsets).squeeze(1), None, None
