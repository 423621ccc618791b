"""Linear layers on jagged rows, with one weight for all rows or one for each segment."""

from __future__ import annotations

from typing import Any

import torch
from jagged_kernels.common.device import contiguous_last_dim
from torch import Tensor
from torch.nn import functional as nnf

from ..activations import POINTWISE
from ..containers.offsets import rows_and_segments
from ..containers.padding import padded_to
from ..cpu.buckets import compute_dtype
from ..cpu.invariant import batched_matmul_cpu, pointwise_rows_cpu
from ..reference import jagged_dense_bmm_reference
from ..scalars import check_choice, check_kind, check_shape, check_size
from ..settings import is_batch_invariant
from .matmul import jagged_dense_bmm_cpu
from .nodes import apply
from .operands import check_segment_matrices, checked_operands, runs_kernels
from .tail import entering, leaving, offsets_and_tail, with_zero_tail, without_tail
from .tail import runs_kernels as runs_row_kernels


def jagged_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    offsets: Tensor | None = None,
    activation: str | None = None,
    *,
    max_seqlen: int | None = None,
    implementation: str = "auto",
) -> Tensor:
    """activation(x Wᵀ + bias) with one weight for all rows, or activation(x[b] @ W[b] + bias[b])
    with one weight per segment.

    One weight for all rows uses torch's matrix multiplication, and on CUDA one kernel for the
    activation, whose backward adds up the bias' gradient in the same pass. The algorithm that torch
    selects depends on the number of rows, so under `batch_invariant` this package computes it, as
    one segment. A weight per segment uses `jagged_dense_bmm` with bias and activation in the same
    kernel, rounded once.

    Args:
        x: `[L, D]`, dtypes as in `jagged_dense_bmm` (one weight: fp64 on CUDA too).
        weight: `[T, D]`, as in nn.Linear, or `[B, D, T]`, same dtype.
        bias: `[T]`, or `[B, T]` with a weight per segment, or None; same dtype.
        offsets: `[B + 1]` int32 or int64. Optional with one weight for all rows: they say which
            rows are behind the last segment.
        activation: None, or a pointwise activation of `jagged_attention` (any but softmax).
        max_seqlen: as in `jagged_dense_bmm`; used with a weight per segment only.
        implementation: as in `jagged_dense_bmm`. With one weight it is ignored unless
            `batch_invariant` is on.

    Returns:
        `[L, T]`. Rows behind the last segment are as in `jagged_dense_bmm`.

    Raises:
        TypeError, ValueError, RuntimeError: as `jagged_dense_bmm`; also if offsets are missing with
            a weight per segment.
    """
    check_choice("activation", activation, (None, *POINTWISE), f"None or one of {tuple(POINTWISE)}")
    check_kind("weight", weight, Tensor, "a torch.Tensor")
    shared = weight.dim() == 2
    named = dict(x=(x, "[L, D]"), weight=(weight, "[T, D]" if shared else "[B, D, T]"))
    named |= {} if bias is None else dict(bias=(bias, "[T]" if shared else "[B, T]"))
    variant = "jagged_linear (one weight)" if shared else "jagged_linear (weight per segment)"
    x, weight, *others = checked_operands(variant, implementation, **named)
    bias = others[0] if others else None
    if max_seqlen is not None:
        check_size("max_seqlen", max_seqlen, at_least=0)
    if not shared:
        return _by_segment(x, weight, bias, offsets, activation, max_seqlen, implementation)
    end = None
    if offsets is not None:
        checked, has_tail = offsets_and_tail(offsets, x, max_seqlen=max_seqlen)
        end = checked if has_tail else None
    if weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"weight must have shape [T, D] with x's D, {x.shape[1]}, got {list(weight.shape)}"
        )
    if bias is not None and bias.shape[0] != weight.shape[0]:
        raise ValueError(f"bias must have shape [T] = [{weight.shape[0]}], got {list(bias.shape)}")
    # the rows behind it must reach neither the weight's gradient nor the result
    x = entering(x, end)
    if is_batch_invariant(implementation):
        out = _fixed_linear(x, weight, bias, activation, implementation)
    elif (
        activation not in (None, "identity")
        and x.dtype != torch.float64
        and (runs_row_kernels(x) and runs_row_kernels(weight))
    ):
        return apply(_ActivatedLinear, x, weight, bias, activation, end)
    else:
        out = _activated(nnf.linear(x, weight, bias), activation, False)
    return leaving(out, end)


def _by_segment(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    activation: str | None,
    max_seqlen: int | None,
    implementation: str,
) -> Tensor:
    """`jagged_linear` with a weight `[B, D, T]`."""
    offsets, has_tail = offsets_and_tail(offsets, x, max_seqlen=max_seqlen)
    check_segment_matrices("weight", weight, offsets, x.shape[1])
    if bias is not None:
        check_shape("bias", bias, "[B, T]", *weight.shape[::2])
    batch_invariant = is_batch_invariant(implementation)
    if implementation != "reference" and runs_kernels(implementation, x):
        from jagged_kernels.matmul.op import triton_jagged_dense_bmm

        x, options = contiguous_last_dim(x), (max_seqlen, batch_invariant, has_tail)
        return triton_jagged_dense_bmm(x, offsets, weight, bias, activation, *options)
    dtype = x.dtype
    # the sum with the bias is rounded once, at the end
    x, weight = (tensor.to(compute_dtype(tensor)) for tensor in (x, weight))
    if implementation == "reference":
        out = padded_to(jagged_dense_bmm_reference(x, weight, offsets), x.shape[0])
    else:
        out = jagged_dense_bmm_cpu(x, weight, offsets, batch_invariant)
    if bias is not None:
        segments = rows_and_segments(offsets, x.shape[0])[1]
        segments = segments.clamp(max=bias.shape[0] - 1) if has_tail else segments
        out = out + bias.to(out.dtype).index_select(0, segments)
    out = _activated(out, activation, batch_invariant)
    return (without_tail(out, offsets) if has_tail else out).to(dtype)


def _activated(x: Tensor, activation: str | None, batch_invariant: bool) -> Tensor:
    if activation is None:
        return x
    if batch_invariant:
        return pointwise_rows_cpu(x, activation)
    return POINTWISE[activation].function(x)


class _ActivatedLinear(torch.autograd.Function):
    """y = act(z), z = x Wᵀ + b, 0 behind the end. dz and the sums of its columns, which are db, are
    one kernel's; dx = dz W, dW = dzᵀ x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        end: Tensor | None,
    ) -> Tensor:
        from jagged_kernels.rows.activation import triton_activation

        if activation == "relu" and bias is not None:
            y = z = relu_linear(x, weight, bias)
        else:
            z = nnf.linear(x, weight, bias)
            y = triton_activation(z, activation)
        y = with_zero_tail(y, end)
        ctx.save_for_backward(x, weight, bias, y if keeps_result(activation) else z, end)
        ctx.activation = activation
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from jagged_kernels.rows.activation import triton_activation_backward

        (dy,), (x, weight, bias, z, end) = grads, ctx.saved_tensors
        if torch.is_grad_enabled():  # the kernel has no derivative
            dy = dy if end is None else without_tail(dy, end)
            dz = POINTWISE[ctx.activation].backward(dy, nnf.linear(x, weight, bias))
            sums = dz.sum(0)
        else:
            dz, sums = triton_activation_backward(dy, z, ctx.activation, False, end)
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        return (
            dz @ weight if of_x else None,
            dz.mT @ x if of_weight else None,
            sums.to(dz.dtype) if of_bias else None,
            None,
            None,
        )


def keeps_result(activation: str) -> bool:
    """Whether the backward of an activation of rows reads its result: no z lives until then. ReLU's
    derivative follows from it."""
    return activation == "relu"


def relu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """ReLU of x Wᵀ + bias. cuBLAS computes it in the GEMM: 98,304 rows of 512 to 2,048 columns took
    .32 instead of .51 ms (H200, bf16, 2026-11-30). A NaN stays NaN."""
    functions: Any = torch  # the operator has no public name
    return functions._addmm_activation(bias, x, weight.t())


def _fixed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, implementation: str
) -> Tensor:
    """activation(x Wᵀ + bias), weight `[T, D]`. A row of the result has the same bits whatever the
    other rows of x."""
    if runs_kernels(implementation, x):
        from jagged_kernels.matmul.op import triton_jagged_dense_bmm

        offsets = torch.arange(2, device=x.device) * x.shape[0]
        bias = None if bias is None else bias[None]
        return triton_jagged_dense_bmm(
            contiguous_last_dim(x), offsets, weight.mT[None], bias, activation, None, True
        )
    dtype = x.dtype
    x, weight = (tensor.to(compute_dtype(tensor)) for tensor in (x, weight))
    out = batched_matmul_cpu(weight, x[:, :, None]).squeeze(2)
    out = out if bias is None else out + bias.to(out.dtype)
    return _activated(out, activation, True).to(dtype)
