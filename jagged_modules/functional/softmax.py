"""Softmax within the segments of jagged tensors."""

from __future__ import annotations

from jagged_kernels.common.device import contiguous_last_dim
from torch import Tensor

from ..containers.offsets import matrix_offsets
from ..containers.padding import padded_to
from ..cpu.matmul import softmax_cpu
from ..reference import jagged2_softmax_reference, jagged_softmax_reference
from ..settings import is_batch_invariant
from .operands import checked_operands, runs_kernels
from .score_plan import ScorePlan, check_plan_rows, plan_offsets
from .tail import offsets_and_tail


def jagged_softmax(
    x: Tensor, offsets: Tensor, *, max_seqlen: int | None = None, implementation: str = "auto"
) -> Tensor:
    """Softmax over the rows of each segment, separately for each column.

    It has first derivatives only, and is computed in fp32 (fp64 for fp64).

    Args:
        x: `[L, H]`, for example one column per head; dtypes as in `jagged_dense_bmm`.
        offsets: `[B + 1]` int32 or int64, on x's device or the host.
        max_seqlen, implementation: as in `jagged_dense_bmm`.

    Returns:
        `[L, H]`; each column of a segment sums to 1. 0, with gradients 0, where all scores of the
        column are -infinity, and in rows behind the last segment.

    Raises:
        TypeError, ValueError: as `jagged_dense_bmm`.
        RuntimeError: a second derivative or a torch.func transform; "reference" supports both.
    """
    (x,) = checked_operands("jagged_softmax", implementation, False, x=(x, "[L, H]"))
    offsets, has_tail = offsets_and_tail(offsets, x, max_seqlen=max_seqlen)
    batch_invariant = is_batch_invariant(implementation)
    if implementation == "reference":
        return padded_to(jagged_softmax_reference(x, offsets), x.shape[0])
    if runs_kernels(implementation, x):
        from jagged_kernels.softmax.op import triton_jagged_softmax

        return triton_jagged_softmax(
            contiguous_last_dim(x), offsets, max_seqlen, batch_invariant, has_tail
        )
    return softmax_cpu(
        x.flatten(), offsets, *matrix_offsets(offsets, x.shape[1]), True, batch_invariant
    ).view(x.shape)


def jagged2_softmax(
    p: Tensor, plan: ScorePlan, dim: int = -1, *, implementation: str = "auto"
) -> Tensor:
    """Softmax over each row, or each column, of the matrices p[b] `[N_b, M_b]`.

    It has first derivatives only, and is computed in fp32 (fp64 for fp64).

    Args:
        p: `[Σ N_b · M_b]`, laid out as the result of `jagged_jagged_bmm_jagged_out`; dtypes as in
            `jagged_dense_bmm`.
        plan: the plan of p.
        dim: -1: the scores of a row of x sum to 1. -2: those of a row of y.
        implementation: as in `jagged_dense_bmm`.

    Returns:
        `[Σ N_b · M_b]`. 0, with gradients 0, in rows (with dim -2, columns) whose scores are all
        -infinity, as `jagged_attention` gives for a row that sees no key.

    Raises:
        TypeError, ValueError: as `jagged_dense_bmm`; also if the plan does not have p's number of
            scores, or dim is another number.
        RuntimeError: a second derivative or a torch.func transform; "reference" supports both.
    """
    (p,) = checked_operands("jagged2_softmax", implementation, False, p=(p, "[total]"))
    offsets = plan_offsets(plan, "p", p)
    check_plan_rows("p", p, "scores", plan.total)
    if not isinstance(dim, int) or dim not in (-1, -2):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"dim must be -1 (rows) or -2 (columns), got {dim}")
    batch_invariant = is_batch_invariant(implementation)
    if implementation == "reference":
        return jagged2_softmax_reference(p, *offsets, dim)
    if runs_kernels(implementation, p):
        from jagged_kernels.softmax.op import triton_jagged2_softmax

        return triton_jagged2_softmax(
            p.contiguous(), *offsets, plan.y_rows if dim == -2 else plan.x_rows, dim == -2
        )
    return softmax_cpu(p, *offsets, dim == -2, batch_invariant)
