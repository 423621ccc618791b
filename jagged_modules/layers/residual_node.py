"""The norm and the residual around a part f of a node: an attention, a feed-forward network.

    norm_first   y = x + dropout(f(norm(x)))        dx = norm's backward(f's backward(dy)) + dy
    of_norm      n = norm(x),  y = n + dropout(f(n, x))
                 dx = norm's backward(f's backward(dy) + dy) + f's backward(dy)
    otherwise    s = x + dropout(f(x)),  y = norm(s)
                 ds = norm's backward(dy),  dx = f's backward(ds) + ds

A norm reads its rows once and writes them in the dtypes of all that read them. Sums of the rows
between two parts, and of their gradients, are not tensors until a norm reads them: its kernel adds
the terms. Its backward adds the residual's gradient where it rounds dx.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..functional.tail import cleared, residual_sum
from .norms import NormOptions
from .one_node import dropout_gradient, dropout_scale, dropped, gemm_rows

S = TypeVar("S")


class Residual(NamedTuple):
    """What is around f.

    Attributes:
        dtype: of the rows that f takes.
        norm: the norm's numbers.
        norm_first, of_norm: see above; of_norm is norm_first too.
        result: dtype of a norm that is no operand alone.
        dropout: probability, 0 outside of training.
        columns: behind the rows that f takes, as in `gemm_rows`; 0: none.
        is_joined: another part of the node has its GEMMs before this norm (norm_first), or behind
            it. The norm's gradient, or its result, is also written in their dtype.
    """

    dtype: torch.dtype
    norm: NormOptions
    norm_first: bool = True
    result: torch.dtype | None = None
    dropout: float = 0.0
    columns: int = 0
    is_joined: bool = False
    of_norm: bool = False


class Stream(NamedTuple):
    """Rows x + added `[L, E]` between the parts of a node, or their gradient.

    Attributes:
        added: None if x is all.
        rows: x in the dtype of the GEMMs; of a gradient, that of what dropout gave x. None if it
            was not made.
        sums: of a gradient's rows, `[E]` fp32, or None.
    """

    x: Tensor
    added: Tensor | None = None
    rows: Tensor | None = None
    sums: Tensor | None = None

    def joined(self, end: Tensor | None) -> Tensor:
        """As one tensor, 0 behind the end."""
        return self.x if self.added is None else residual_sum(self.x, self.added, end)


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
    stream: Stream,
    norm: tuple[Tensor, Tensor | None],
    residual: Residual,
    end: Tensor | None,
    trains: bool,
    part: Callable[[Tensor], tuple[Tensor, S]],
) -> tuple[Stream, Around, S]:
    """y, and what the backwards read, of this and of the part f. stream: x. norm: its weight and
    bias. end: of the rows. trains: whether a backward follows. part: f, of rows in its dtype."""
    dtype, options, norm_first, result, dropout, columns, is_joined, of_norm = residual
    x, added, rows, _ = stream
    base = mean = rstd = None
    if not norm_first:
        take = gemm_rows if columns else cleared
        rows = take(x, end, dtype) if rows is None else rows
    elif of_norm:
        both = result or _wide(x, added), dtype
        x, base, rows, mean, rstd = residual_norm(x, added, *norm, both, options, end, trains)
    elif added is None:
        rows, mean, rstd = row_norm(x, *norm, dtype, options, columns, end)
    else:
        x, rows, _, mean, rstd = residual_norm(x, added, *norm, (dtype, None), options, end)
    assert rows is not None
    y, saved = part(rows)
    y, kept = dropped(y, dropout)
    if norm_first:
        around = Around(end, x, norm[0], mean, rstd, kept)
        return Stream(x if base is None else base, y), around, saved
    dtypes = result or _wide(x, y), dtype if is_joined else None
    x, y, copy, mean, rstd = residual_norm(x, y, *norm, dtypes, options, end, trains)
    return Stream(y, None, copy), Around(end, x, norm[0], mean, rstd, kept), saved


def _wide(x: Tensor, added: Tensor | None) -> torch.dtype:
    return x.dtype if added is None else torch.promote_types(x.dtype, added.dtype)


def residual_gradients(
    dy: Stream,
    around: Around,
    residual: Residual,
    wanted: tuple[bool, bool],
    part: Callable[[Tensor, Tensor | None, bool], tuple[Tensor | None, Tensor | None, S]],
    kept_before: Tensor | None = None,
) -> tuple[Stream | None, tuple[Tensor | None, Tensor | None], S]:
    """Gradients of x, of the norm's weight and bias, and of the part's other inputs. wanted:
    whether those of x and of the norm are. None where they are not. part: f's backward, of its
    result's gradient, the sum of the rows of this, or None, and whether the gradient of its rows is
    wanted. Returns it; that of x, if f takes x beside its rows (of_norm), or None; and the
    others. kept_before: what dropout kept of a part before, with the same probability."""
    of_x, of_norm = wanted
    dtype, norm, norm_first, _, dropout, _, is_joined, is_of_norm = residual
    end, rows, weight, mean, rstd, kept = around
    of_rows = rows, weight, mean, rstd
    if not norm_first:
        own = kept, dropout
        ds, of_weights = residual_norm_gradients(*dy[:2], *of_rows, None, dtype, norm, end, own)
        assert ds.rows is not None
        drows, _, others = part(ds.rows, ds.sums, of_x)
        return None if drows is None else Stream(ds.x, drows), of_weights, others
    grad = dy.rows
    if grad is None:
        grad = dropout_gradient(cleared(dy.x, end, dtype), kept, dropout)
    drows, beside, others = part(grad, dy.sums, of_x or of_norm)
    if drows is None:
        return None, (None, None), others
    if not (is_joined or is_of_norm):
        dx, of_weights = row_norm_gradients(drows, *of_rows, dy.x, norm, end)
        return Stream(dx), of_weights, others
    dn, added, residual_gradient = (dy.x, drows, beside) if is_of_norm else (drows, None, dy.x)
    second, before = dtype if is_joined else rows.dtype, (kept_before, dropout)
    stream, of_weights = residual_norm_gradients(
        dn, added, *of_rows, residual_gradient, second, norm, end, before
    )
    return stream, of_weights, others


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

    numbers = _with_eps(norm, x.dtype, weight)
    return called(triton_row_norm, x, weight, bias, dtype, *numbers, columns, end)


def _with_eps(norm: NormOptions, dtype: torch.dtype, weight: Tensor) -> NormOptions:
    """The numbers of a norm of rows in this dtype, with the eps that torch takes for None."""
    if norm.eps is not None:
        return norm
    return norm._replace(eps=torch.finfo(torch.promote_types(dtype, weight.dtype)).eps)


def residual_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    norm: NormOptions,
    end: Tensor | None,
    has_sum: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """x + added, which may be `[0]` without has_sum, or x itself; the norm of it in both dtypes, of
    which the second may be None; and as of `row_norm`. Where the dtypes are equal, both are one
    tensor."""
    from jagged_kernels.common.ops import called
    from jagged_kernels.rows.op import triton_residual_norm

    dtype, second = dtypes
    copy = None if second == dtype else second
    numbers = _with_eps(norm, _wide(x, added), weight)
    given = x, added, weight, bias, dtype, copy, *numbers, end, has_sum
    total, y, other, mean, rstd = called(triton_residual_norm, *given)
    both = other if copy is not None else None if second is None else y
    return x if added is None else total, y, both, mean, rstd


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


def residual_norm_gradients(
    dy: Tensor,
    added: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    residual: Tensor | None,
    dtype: torch.dtype,
    norm: NormOptions,
    end: Tensor | None,
    dropout: tuple[Tensor | None, float],
) -> tuple[Stream, tuple[Tensor | None, Tensor | None]]:
    """`row_norm_gradients` for dy + added. That of x with all that a stream has; its rows in this
    dtype, which are x itself if it is x's and nothing was dropped. dropout: what it kept, and its
    probability."""
    from jagged_kernels.common.ops import called
    from jagged_kernels.rows.op import triton_residual_norm_backward

    kept, scale = dropout[0], dropout_scale(*dropout)
    copy = None if dtype == x.dtype and kept is None else dtype
    given = dy, added, x, mean, rstd, weight, residual, copy, norm.rms, end, kept, scale
    dx, other, (dweight, dbias, sums) = called(triton_residual_norm_backward, *given)
    of_weights = dweight.to(weight.dtype), None if norm.rms else dbias.to(weight.dtype)
    return Stream(dx, None, dx if copy is None else other, sums), of_weights


def normed_columns_gradients(grads: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """Replace the first columns of `grads`, the gradient of the RMSNorm of x, by that of x. The
    gradient of weight, in fp32."""
    from jagged_kernels.common.ops import called
    from jagged_kernels.rows.op import triton_row_norm_packed_backward

    # kernels read no mean of this norm, and its eps is in rstd
    return called(triton_row_norm_packed_backward, grads, 0, x, rstd, rstd, weight, 0.0, True)[0]
