"""Matrix multiplications within the segments of jagged tensors."""

from __future__ import annotations

from jagged_kernels.common.device import contiguous_last_dim
from torch import Tensor

from ..containers.offsets import matrix_offsets
from ..containers.padding import padded_to
from ..cpu.matmul import matmul_cpu, outer_cpu
from ..reference import (
    array_jagged_bmm_reference,
    jagged_dense_bmm_reference,
    jagged_jagged_bmm_reference,
    jagged_outer_reference,
)
from ..scalars import check_equal, check_flag
from ..settings import is_batch_invariant
from .operands import check_segment_matrices, checked_operands, runs_kernels
from .score_plan import ScorePlan, check_plan_rows, plan_offsets
from .tail import offsets_and_tail


def jagged_dense_bmm(
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    *,
    max_seqlen: int | None = None,
    implementation: str = "auto",
) -> Tensor:
    """out[b] = x[b] @ y[b]: the rows of each segment times the segment's matrix.

    Gradients of any order flow to x and y. fp16 and bf16 are accumulated in fp32 and rounded once.

    Args:
        x: `[L, D]` fp32, fp16 or bf16 (on the CPU also fp64).
        y: `[B, D, T]`, same dtype, any strides.
        offsets: `[B + 1]` int32 or int64, on x's device or the host.
        max_seqlen: rows of the longest segment, if the host knows it. On CUDA, a value of at most
            512 saves one launch. A longer segment is an error if the offsets are on the host;
            otherwise its result is correct but slower.
        implementation: "auto" (Triton on CUDA, batched GEMMs over segments of equal lengths on the
            CPU), "reference" or "triton".

    Returns:
        `[L, T]`. Rows behind the last segment, which only offsets on a device can have, are 0, and
        so are their gradients.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes, devices or offsets do not match; an unknown implementation.
        RuntimeError: a torch.func transform (vmap, grad, jvp); "reference" supports them.
    """
    x, y = checked_operands("jagged_dense_bmm", implementation, x=(x, "[L, D]"), y=(y, "[B, D, T]"))
    offsets, has_tail = offsets_and_tail(offsets, x, max_seqlen=max_seqlen)
    check_segment_matrices("y", y, offsets, x.shape[1])
    batch_invariant = is_batch_invariant(implementation)
    if implementation == "reference":
        return padded_to(jagged_dense_bmm_reference(x, y, offsets), x.shape[0])
    if runs_kernels(implementation, x):
        from jagged_kernels.matmul.op import triton_jagged_dense_bmm

        return triton_jagged_dense_bmm(
            contiguous_last_dim(x), offsets, y, None, None, max_seqlen, batch_invariant, has_tail
        )
    return jagged_dense_bmm_cpu(x, y, offsets, batch_invariant)


def jagged_jagged_bmm(
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    *,
    max_seqlen: int | None = None,
    implementation: str = "auto",
) -> Tensor:
    """out[b] = x[b]ᵀ @ y[b]: one matrix per segment; it is 0 for an empty segment.

    Gradients and precision are as in `jagged_dense_bmm`.

    Args:
        x: `[L, D]`, dtypes as in `jagged_dense_bmm`.
        y: `[L, T]`, same dtype.
        offsets: `[B + 1]` int32 or int64, on x's device or the host.
        max_seqlen, implementation: as in `jagged_dense_bmm`.

    Returns:
        `[B, D, T]`.

    Raises:
        TypeError, ValueError, RuntimeError: as `jagged_dense_bmm`.
    """
    x, y = checked_operands("jagged_jagged_bmm", implementation, x=(x, "[L, D]"), y=(y, "[L, T]"))
    offsets, has_tail = offsets_and_tail(offsets, x, max_seqlen=max_seqlen)
    check_equal("y", "have x's rows", x.shape[0], y.shape[0])
    batch_invariant = is_batch_invariant(implementation)
    if implementation == "reference":
        return jagged_jagged_bmm_reference(x, y, offsets)
    if runs_kernels(implementation, x):
        from jagged_kernels.matmul.op import triton_jagged_jagged_bmm

        x, y = contiguous_last_dim(x), contiguous_last_dim(y)
        return triton_jagged_jagged_bmm(x, y, offsets, max_seqlen, batch_invariant, has_tail)
    segments, width = offsets.shape[0] - 1, x.shape[1]
    matrices, options = matrix_offsets(offsets, width), (segments * width, True, batch_invariant)
    out = matmul_cpu(x.flatten(), y, offsets, *matrices, *options)
    return out.unflatten(0, (segments, width))


def jagged_jagged_bmm_jagged_out(
    x: Tensor, y: Tensor, plan: ScorePlan, *, implementation: str = "auto"
) -> Tensor:
    """p[b] = x[b] @ y[b]ᵀ: the scores of each row of x with each row of y in the same segment, in
    one flat buffer.

    Gradients and precision are as in `jagged_dense_bmm`.

    Args:
        x: `[Lx, D]`, dtypes as in `jagged_dense_bmm`.
        y: `[Ly, D]`, same dtype. If y is the same tensor object as x, and the plan is of x alone,
            forward and backward take about half the time.
        plan: the plan of x's and y's offsets.
        implementation: as in `jagged_dense_bmm`.

    Returns:
        `[Σ N_b · M_b]`: p[b] `[N_b, M_b]` of all segments, each in row-major order.

    Raises:
        TypeError, ValueError, RuntimeError: as `jagged_dense_bmm`; also if the plan does not have
            the operands' numbers of rows.
    """
    itself = y is x
    x, y = checked_operands(
        "jagged_jagged_bmm_jagged_out", implementation, x=(x, "[Lx, D]"), y=(y, "[Ly, D]")
    )
    offsets = plan_offsets(plan, "x", x)
    check_plan_rows("x", x, "x rows", plan.x_rows)
    check_plan_rows("y", y, "y rows", plan.y_rows)
    check_equal("y", "have x's width", x.shape[1], y.shape[1])
    batch_invariant = is_batch_invariant(implementation)
    if implementation == "reference":
        return jagged_outer_reference(x, y, *offsets[:2])
    if runs_kernels(implementation, x):
        from jagged_kernels.matmul.op import triton_jagged_gram, triton_jagged_outer

        if itself and plan.y_offsets is plan.x_offsets:
            x_offsets, _, p_offsets = offsets
            return triton_jagged_gram(contiguous_last_dim(x), x_offsets, p_offsets, plan.total)
        return triton_jagged_outer(
            contiguous_last_dim(x), contiguous_last_dim(y), *offsets, plan.total
        )
    return outer_cpu(x, y, *offsets, plan.total, batch_invariant)


def array_jagged_bmm_jagged_out(
    p: Tensor, y: Tensor, plan: ScorePlan, *, transposed: bool = False, implementation: str = "auto"
) -> Tensor:
    """out[b] = p[b] @ y[b]: sums of y's rows, weighted by the scores of the segment. If transposed,
    out[b] = p[b]ᵀ @ y[b].

    Gradients and precision are as in `jagged_dense_bmm`. A row without scores has the result 0.

    Args:
        p: `[Σ N_b · M_b]`, laid out as the result of `jagged_jagged_bmm_jagged_out`; dtypes as in
            `jagged_dense_bmm`.
        y: `[Ly, D]`, same dtype; `[Lx, D]` if transposed.
        plan: the plan of x's and y's offsets.
        transposed: multiply by p[b]ᵀ.
        implementation: as in `jagged_dense_bmm`.

    Returns:
        `[Lx, D]`; `[Ly, D]` if transposed.

    Raises:
        TypeError, ValueError, RuntimeError: as `jagged_dense_bmm`; also if the plan does not have
            the operands' numbers of rows.
    """
    check_flag("transposed", transposed)
    p, y = checked_operands(
        "array_jagged_bmm_jagged_out",
        implementation,
        p=(p, "[total]"),
        y=(y, "[Lx, D]" if transposed else "[Ly, D]"),
    )
    offsets = plan_offsets(plan, "p", p)
    check_plan_rows("p", p, "scores", plan.total)
    check_plan_rows("y", y, *(("x rows", plan.x_rows) if transposed else ("y rows", plan.y_rows)))
    batch_invariant = is_batch_invariant(implementation)
    if implementation == "reference":
        return array_jagged_bmm_reference(p, y, *offsets, transposed)
    out_rows = plan.y_rows if transposed else plan.x_rows
    if runs_kernels(implementation, p):
        from jagged_kernels.matmul.op import triton_array_jagged_bmm

        return triton_array_jagged_bmm(
            p.contiguous(), contiguous_last_dim(y), *offsets, out_rows, transposed
        )
    return matmul_cpu(p, y, *offsets, out_rows, transposed, batch_invariant)


def jagged_dense_bmm_cpu(x: Tensor, y: Tensor, offsets: Tensor, batch_invariant: bool) -> Tensor:
    """`jagged_dense_bmm` on the CPU, without checks."""
    matrices = matrix_offsets(offsets, x.shape[1])
    return matmul_cpu(
        x.flatten(), y.flatten(0, 1), offsets, *matrices, x.shape[0], False, batch_invariant
    )
