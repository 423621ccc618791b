"""The norm and the residual around a part f of a node: an attention, a feed-forward network.

    norm_first   y = x + dropout(f(norm(x)))        dx = norm's backward(f's backward(dy)) + dy
    otherwise    s = x + dropout(f(x)),  y = norm(s)
                 ds = norm's backward(dy),  dx = f's backward(ds) + ds

A norm reads its rows once and writes them in the dtype that the next GEMM takes. Its backward adds
the residual's gradient where it rounds dx.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..functional.tail import cleared, residual_sum
from .norms import NormOptions
from .one_node import dropout_gradient, dropped, gemm_rows

S = TypeVar("S")


class Residual(NamedTuple):
    """What is around f.

    Attributes:
        dtype: of the rows that f takes.
        norm: the norm's numbers.
        norm_first: see above.
        result: dtype of a norm behind the residual.
        dropout: probability, 0 outside of training.
        columns: behind the rows that f takes, as in `gemm_rows`; 0: none.
    """

    dtype: torch.dtype
    norm: NormOptions
    norm_first: bool = True
    result: torch.dtype | None = None
    dropout: float = 0.0
    columns: int = 0


class Around(NamedTuple):
    """What the backward reads: the norm's rows, weight and statistics, and what dropout keeps.
    end: of the rows."""

    end: Tensor | None = None
    rows: Any = None
    weight: Any = None
    mean: Any = None
    rstd: Any = None
    kept: Tensor | None = None

    @classmethod
    def first_of(cls, saved: Sequence[Any]) -> tuple[Around, Sequence[Any]]:
        """From the first of these, and the others."""
        count = len(cls._fields)
        return cls(*saved[:count]), saved[count:]


def with_residual(
    x: Tensor,
    norm: tuple[Tensor, Tensor | None],
    residual: Residual,
    end: Tensor | None,
    part: Callable[[Tensor], tuple[Tensor, S]],
) -> tuple[Tensor, Around, S]:
    """y, and what the backwards read, of this and of the part f. x: `[L, E]`. norm: its weight and
    bias. end: of the rows. part: f, of rows in its dtype."""
    dtype, options, norm_first, result, dropout, columns = residual
    mean = rstd = None
    if norm_first:
        rows, mean, rstd = row_norm(x, *norm, dtype, options, columns, end)
    else:
        rows = gemm_rows(x, end, dtype) if columns else cleared(x, end, dtype)
    y, saved = part(rows)
    y, kept = dropped(y, dropout)
    y = residual_sum(x, y, end)
    if not norm_first:
        x = y
        y, mean, rstd = row_norm(x, *norm, result or x.dtype, options, 0, end)
    return y, Around(end, x, norm[0], mean, rstd, kept), saved


def residual_gradients(
    dy: Tensor,
    around: Around,
    residual: Residual,
    wanted: tuple[bool, bool],
    part: Callable[[Tensor, bool], tuple[Tensor | None, S]],
) -> tuple[Tensor | None, tuple[Tensor | None, Tensor | None], S]:
    """Gradients of x, of the norm's weight and bias, and of the part's other inputs. wanted:
    whether those of x and of the norm are. None where they are not. part: f's backward, of its
    result's gradient and whether that of its rows is wanted. Returns it, and the others."""
    of_x, of_norm = wanted
    dtype, norm, norm_first, _, dropout, _ = residual
    end, rows, weight, mean, rstd, kept = around
    of_rows = rows, weight, mean, rstd
    if norm_first:
        grad = dropout_gradient(cleared(dy, end, dtype), kept, dropout)
        drows, others = part(grad, of_x or of_norm)
        if drows is None:
            return None, (None, None), others
        dx, sums = row_norm_gradients(drows, *of_rows, dy, norm, end)
        return dx, sums, others
    ds, sums = row_norm_gradients(dy, *of_rows, None, norm, end)
    drows, others = part(dropout_gradient(ds.to(dtype), kept, dropout), of_x)
    return None if drows is None else drows.add_(ds), sums, others


# -- what kernels compute --------------------------------------------------------------------------


def row_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    norm: NormOptions,
    columns: int = 0,
    end: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of each of its groups of columns, computed in fp32, in dtype, with `columns` behind
    them as in `gemm_rows`; mean (not of an RMSNorm) and 1 / deviation of each. Rows from end[-1] on
    are 0."""
    from jagged_kernels.common.ops import called
    from jagged_kernels.rows.op import triton_row_norm

    eps, groups, rms = norm
    if eps is None:  # as in torch
        eps = torch.finfo(torch.promote_types(x.dtype, weight.dtype)).eps
    of_norm = weight, bias, dtype, eps, groups, rms, columns, end
    return called(triton_row_norm, x, *of_norm)


def row_norm_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    residual: Tensor | None,
    norm: NormOptions,
    end: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """Of x, plus the gradient of the residual, in x's dtype; of weight and bias in weight's."""
    from jagged_kernels.common.ops import called
    from jagged_kernels.rows.op import triton_row_norm_backward

    of_norm = x, mean, rstd, weight, residual, 0.0, norm.rms, end  # its eps is in rstd
    dx, sums = called(triton_row_norm_backward, dy, *of_norm)
    dweight, dbias = sums.to(weight.dtype)
    return dx, (dweight, None if norm.rms else dbias)


def normed_columns_gradients(grads: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """Replace the first columns of `grads`, the gradient of the RMSNorm of x, by that of x. The
    gradient of weight, in fp32."""
    from jagged_kernels.common.ops import called
    from jagged_kernels.rows.op import triton_row_norm_packed_backward

    # kernels read no mean of this norm, and its eps is in rstd
    return called(triton_row_norm_packed_backward, grads, 0, x, rstd, rstd, weight, 0.0, True)[0]
