"""Bounds of jagged matrix multiplication and softmax, forward and backward.

Sums are in fp32 (float64 for float64 operands) and each result is rounded once. Offsets are
`[B + 1]`; shapes and flat buffers are those of the functions of the same names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activations import activated
from .arithmetic import Arithmetic, arithmetic_of
from .bound import Bound, Bounds


def jagged_dense_bmm(
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    do: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    arithmetic: Arithmetic | None = None,
) -> Bounds:
    """Bounds of activation(x[b] @ y[b] + bias[b]), `jagged_linear` with weights for each segment:
    "out", "dx", "dy" and, with a bias `[B, T]`, "dbias". The gradient before the activation may be
    rounded before its MMA (Arithmetic.rounds_factors)."""
    arithmetic = arithmetic_of(x) if arithmetic is None else arithmetic
    totals = {"out": _Result(do), "dx": _Result(x), "dy": _Result(y)} | (
        {} if bias is None else {"dbias": _Result(bias)}
    )
    for b, rows in enumerate(_slices(offsets)):
        a, matrix, grad = (Bound.exact(t) for t in (x[rows], y[b], do[rows]))
        z = a @ matrix
        if bias is not None:
            z = z + Bound.exact(bias[b]).map(lambda t, z=z: t.expand_as(z.value))
        if activation is not None:
            z, dact = activated(z, activation, arithmetic.approximate and x.dtype == torch.bfloat16)
            grad = dact * grad
            grad = grad.rounded(x.dtype) if arithmetic.rounds_factors else grad
        totals["out"].put(rows, z)
        totals["dx"].put(rows, grad @ matrix.mT)
        totals["dy"].put(b, a.mT @ grad)
        if bias is not None:
            totals["dbias"].put(b, grad.map(lambda t, grad=grad: t.expand_as(grad.value)).sum(0))
    return _rounded(totals, x.dtype)


def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor, do: Tensor) -> Bounds:
    """Bounds of x[b]ᵀ @ y[b]: "out", "dx", "dy"."""
    totals = {"out": _Result(do), "dx": _Result(x), "dy": _Result(y)}
    for b, rows in enumerate(_slices(offsets)):
        a, c, grad = (Bound.exact(t) for t in (x[rows], y[rows], do[b]))
        totals["out"].put(b, a.mT @ c)
        totals["dx"].put(rows, c @ grad.mT)
        totals["dy"].put(rows, a @ grad)
    return _rounded(totals, x.dtype)


def jagged_sum(x: Tensor, offsets: Tensor, do: Tensor) -> Bounds:
    """Bounds of the sums of each segment's rows: "out", "dx"."""
    totals = {"out": _Result(do), "dx": _Result(x)}
    for b, rows in enumerate(_slices(offsets)):
        totals["out"].put(b, Bound.exact(x[rows]).sum(0))
        totals["dx"].put(rows, Bound.exact(do[b].expand_as(x[rows])))
    return {"out": totals["out"].bound.rounded(x.dtype), "dx": totals["dx"].bound}  # a copy


def jagged_outer(
    x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, p_offsets: Tensor, do: Tensor
) -> Bounds:
    """Bounds of p[b] = x[b] @ y[b]ᵀ, flattened, `jagged_jagged_bmm_jagged_out`: "out", "dx",
    "dy"."""
    totals = {"out": _Result(do), "dx": _Result(x), "dy": _Result(y)}
    for rows, columns, scores in zip(*map(_slices, (x_offsets, y_offsets, p_offsets))):
        a, c = Bound.exact(x[rows]), Bound.exact(y[columns])
        grad = Bound.exact(do[scores].view(len(a.value), len(c.value)))
        totals["out"].put(scores, (a @ c.mT).map(torch.flatten))
        totals["dx"].put(rows, grad @ c)
        totals["dy"].put(columns, grad.mT @ a)
    return _rounded(totals, x.dtype)


def jagged_gram(x: Tensor, offsets: Tensor, p_offsets: Tensor, do: Tensor) -> Bounds:
    """Bounds of p[b] = x[b] @ x[b]ᵀ, flattened: "out" and "dx" = (do + doᵀ) x. Either do + doᵀ or
    do x and doᵀ x may be rounded."""
    totals = {"out": _Result(do), "dx": _Result(x)}
    for rows, scores in zip(_slices(offsets), _slices(p_offsets)):
        a = Bound.exact(x[rows])
        grad = Bound.exact(do[scores].view(len(a.value), len(a.value)))
        totals["out"].put(scores, (a @ a.mT).map(torch.flatten))
        totals["dx"].put(rows, (grad + grad.mT).rounded(x.dtype) @ a)
    return _rounded(totals, x.dtype)


def array_jagged_bmm(
    p: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor,
    p_offsets: Tensor,
    do: Tensor,
    *,
    transposed: bool = False,
) -> Bounds:
    """Bounds of p[b] @ y[b], or p[b]ᵀ @ y[b], `array_jagged_bmm_jagged_out`: "out", "dp", "dy"."""
    totals = {"out": _Result(do), "dp": _Result(p), "dy": _Result(y)}
    for rows, columns, scores in zip(*map(_slices, (x_offsets, y_offsets, p_offsets))):
        shape = rows.stop - rows.start, columns.stop - columns.start
        of_y, of_out = (rows, columns) if transposed else (columns, rows)
        matrix = Bound.exact(p[scores].view(shape))
        c = Bound.exact(y[of_y])
        grad = Bound.exact(do[of_out])
        matrix = matrix.mT if transposed else matrix
        dp = grad @ c.mT
        totals["out"].put(of_out, matrix @ c)
        totals["dp"].put(scores, (dp.mT if transposed else dp).map(torch.flatten))
        totals["dy"].put(of_y, matrix.mT @ grad)
    return _rounded(totals, y.dtype)


def jagged_softmax(
    x: Tensor, offsets: Tensor, do: Tensor, *, arithmetic: Arithmetic | None = None
) -> Bounds:
    """Bounds of softmax over the rows of each segment: "out", "dx"."""
    totals = {"out": _Result(do), "dx": _Result(x)}
    for rows in _slices(offsets):
        for name, result in zip(totals, _softmax(x[rows], do[rows], 0, arithmetic)):
            totals[name].put(rows, result)
    return _rounded(totals, x.dtype)


def jagged2_softmax(
    p: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor,
    p_offsets: Tensor,
    do: Tensor,
    *,
    dim: int = -1,
    arithmetic: Arithmetic | None = None,
) -> Bounds:
    """Bounds of softmax over each row (dim -1) or column (-2) of the matrices p[b]: "out", "dp"."""
    totals = {"out": _Result(do), "dp": _Result(p)}
    for rows, columns, scores in zip(*map(_slices, (x_offsets, y_offsets, p_offsets))):
        shape = rows.stop - rows.start, columns.stop - columns.start
        for name, result in zip(
            totals, _softmax(p[scores].view(shape), do[scores].view(shape), dim, arithmetic)
        ):
            totals[name].put(scores, result.map(torch.flatten))
    lines = int(
        (
            (x_offsets if dim == -1 else y_offsets).diff()
            * ((y_offsets if dim == -1 else x_offsets).diff() > 0)
        ).sum()
    )
    return {name: bound._replace(lines=lines) for name, bound in _rounded(totals, p.dtype).items()}


def _softmax(x: Tensor, do: Tensor, dim: int, arithmetic: Arithmetic | None) -> tuple[Bound, Bound]:
    """y = softmax(x), and dx = y ∘ (do - Σ y ∘ do) with y rounded to x's dtype."""
    if x.numel() == 0:
        return Bound.exact(x), Bound.exact(x)
    exact, ulps = Bound.exact(x), (arithmetic_of(x) if arithmetic is None else arithmetic).exp_ulps
    largest = exact.value.amax(dim, keepdim=True)
    # a difference, times log2(e), in base 2
    weights = exact._replace(value=exact.value - largest).off_by(3).exp(ulps)
    y = weights / weights.sum(dim).map(lambda t: t.unsqueeze(dim))
    grad, rounded = Bound.exact(do), y.rounded(x.dtype)
    delta = (rounded * grad).sum(dim).map(lambda t: t.unsqueeze(dim))
    return y, rounded * (grad - delta)


# -- segments --------------------------------------------------------------------------------------


class _Result:
    """A result written one segment at a time; elements that no segment has are 0."""

    def __init__(self, like: Tensor):
        self._parts = [
            torch.zeros(like.shape, dtype=torch.float64, device=like.device) for _ in range(3)
        ]
        self._dtype = Bound.exact(like).dtype

    def put(self, index: slice | int, result: Bound) -> None:
        for part, values in zip(self._parts, result[:3]):
            part[index] = values

    @property
    def bound(self) -> Bound:
        return Bound(*self._parts, self._dtype)


def _rounded(totals: dict[str, _Result], dtype: torch.dtype) -> Bounds:
    return {name: total.bound.rounded(dtype) for name, total in totals.items()}


def _slices(offsets: Tensor) -> list[slice]:
    bounds = offsets.tolist()
    return [slice(start, end) for start, end in zip(bounds, bounds[1:])]
