"""Bounds of linear compression and of jagged matrix multiplication and softmax, forward and backward.

Sums are in fp32 (float64 for float64 operands) and each result is rounded once. Offsets are `[B + 1]`; shapes and flat buffers are those of
the functions of the same names.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from .activations import activated
from .arithmetic import Arithmetic, arithmetic_of, splits_sums
from .bound import RMS_OF_ROUNDING, Bound, partial_sums

Bounds = dict[str, Bound]


def linear_compress(
    weights: Sequence[Tensor], embeddings: Sequence[Tensor], indices: Sequence[Tensor], do: Tensor, *, arithmetic: Arithmetic | None = None
) -> Bounds:
    """Bounds of out[b] = Σ_l (W_l @ E_l)[index_l[b]], "out", and of the gradients "dweights[l]", "dembeddings[l]".

        G_l[u] = Σ dO[b] over the b with index_l[b] = u,  dW_l = Σ_u G_l[u] E_l[u]ᵀ,  dE_l[u] = W_lᵀ G_l[u]

    indices: one `[B]` for each level but the last. The levels' results are added in fp32 and rounded once. The sums G_l are rounded once,
    before their MMA. With Arithmetic.rounds_levels each level's result and each sum of two is rounded, and G_l is summed in the operands'
    dtype.
    """
    arithmetic = arithmetic_of(do) if arithmetic is None else arithmetic
    dtype, results = do.dtype, {}
    own = functools.partial(torch_product, operand=do)
    multiply = own if arithmetic.torch_products else operator.matmul
    maps = [*(index.long() for index in indices), torch.arange(do.shape[0], device=do.device)]
    out = None
    for weight, embedding, index in [list(zip(weights, embeddings, maps))[i] for i in (-1, *range(len(indices)))]:  # in torch's order
        product = multiply(Bound.exact(weight), Bound.exact(embedding))
        product = product.rounded(dtype) if arithmetic.rounds_levels else product
        product = product.map(lambda x, index=index: x[index])
        out = product if out is None else out + product
        out = out.rounded(dtype) if arithmetic.rounds_levels and out is not product else out
    results["out"] = out if arithmetic.rounds_levels else out.rounded(dtype)
    for level, (weight, embedding, index) in enumerate(zip(weights, embeddings, maps)):
        grad = Bound.exact(do)
        if level < len(indices):
            grad = _group_sums(do, index, embedding.shape[0], arithmetic)
        flat = (x.map(lambda y: y.transpose(0, 1).flatten(1)) for x in (grad, Bound.exact(embedding)))
        rows, columns = flat
        results[f"dweights[{level}]"] = multiply(rows, columns.mT).rounded(dtype)
        results[f"dembeddings[{level}]"] = own(Bound.exact(weight).mT, grad).rounded(dtype)  # the kernels use torch.bmm here too
    return results


def torch_product(a: Bound, b: Bound, operand: Tensor) -> Bound:
    """a @ b by torch, for operands of the dtype and device of `operand`."""
    return a.split_matmul(b, operand.dtype) if splits_sums(operand) else a @ b


def _group_sums(x: Tensor, index: Tensor, groups: int, arithmetic: Arithmetic) -> Bound:
    """Σ x[b] over the b with index[b] = u, rounded to x's dtype once or, with rounds_levels, after each addition."""

    def sums(y: Tensor) -> Tensor:
        return y.new_zeros((groups, *y.shape[1:])).index_add_(0, index, y)

    terms, exact = index.bincount(minlength=groups), x.double()
    value, size, squares = sums(exact), sums(exact.abs()), sums(exact**2)
    bound = Bound(value, torch.zeros_like(value), torch.zeros_like(value), Bound.exact(x).dtype).summed(terms[:, None, None], size, squares)
    if arithmetic.rounds_levels:
        eps, terms = torch.finfo(x.dtype).eps, terms[:, None, None]
        bound = bound.widened(terms * eps / 2 * size, RMS_OF_ROUNDING * eps * partial_sums(terms, value, squares))
    return bound.rounded(x.dtype)


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
    """Bounds of activation(x[b] @ y[b] + bias[b]), `jagged_linear` with weights for each segment: "out", "dx", "dy" and, with a bias
    `[B, T]`, "dbias". The gradient before the activation may be rounded before its MMA (Arithmetic.rounds_factors)."""
    arithmetic = arithmetic_of(x) if arithmetic is None else arithmetic
    totals = {"out": _Places(do), "dx": _Places(x), "dy": _Places(y)} | ({} if bias is None else {"dbias": _Places(bias)})
    for b, rows in enumerate(_slices(offsets)):
        a, matrix, grad = (Bound.exact(t) for t in (x[rows], y[b], do[rows]))
        z = a @ matrix
        if bias is not None:
            z = z + Bound.exact(bias[b]).map(lambda t, z=z: t.expand_as(z.value))
        if activation is not None:
            z, slope = activated(z, activation, arithmetic.approximate and x.dtype == torch.bfloat16)
            grad = slope * grad
            grad = grad.rounded(x.dtype) if arithmetic.rounds_factors else grad
        totals["out"].put(rows, z)
        totals["dx"].put(rows, grad @ matrix.mT)
        totals["dy"].put(b, a.mT @ grad)
        if bias is not None:
            totals["dbias"].put(b, grad.map(lambda t, grad=grad: t.expand_as(grad.value)).sum(0))
    return _rounded(totals, x.dtype)


def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor, do: Tensor) -> Bounds:
    """Bounds of x[b]ᵀ @ y[b]: "out", "dx", "dy"."""
    totals = {"out": _Places(do), "dx": _Places(x), "dy": _Places(y)}
    for b, rows in enumerate(_slices(offsets)):
        a, c, grad = (Bound.exact(t) for t in (x[rows], y[rows], do[b]))
        totals["out"].put(b, a.mT @ c)
        totals["dx"].put(rows, c @ grad.mT)
        totals["dy"].put(rows, a @ grad)
    return _rounded(totals, x.dtype)


def jagged_sum(x: Tensor, offsets: Tensor, do: Tensor) -> Bounds:
    """Bounds of the sums of each segment's rows: "out", "dx"."""
    totals = {"out": _Places(do), "dx": _Places(x)}
    for b, rows in enumerate(_slices(offsets)):
        totals["out"].put(b, Bound.exact(x[rows]).sum(0))
        totals["dx"].put(rows, Bound.exact(do[b].expand_as(x[rows])))
    return {"out": totals["out"].bound.rounded(x.dtype), "dx": totals["dx"].bound}  # a copy


def jagged_outer(x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, p_offsets: Tensor, do: Tensor) -> Bounds:
    """Bounds of p[b] = x[b] @ y[b]ᵀ, flattened, `jagged_jagged_bmm_jagged_out`: "out", "dx", "dy"."""
    totals = {"out": _Places(do), "dx": _Places(x), "dy": _Places(y)}
    for rows, columns, place in zip(*map(_slices, (x_offsets, y_offsets, p_offsets))):
        a, c = Bound.exact(x[rows]), Bound.exact(y[columns])
        grad = Bound.exact(do[place].view(len(a.value), len(c.value)))
        totals["out"].put(place, (a @ c.mT).map(torch.flatten))
        totals["dx"].put(rows, grad @ c)
        totals["dy"].put(columns, grad.mT @ a)
    return _rounded(totals, x.dtype)


def jagged_gram(x: Tensor, offsets: Tensor, p_offsets: Tensor, do: Tensor) -> Bounds:
    """Bounds of p[b] = x[b] @ x[b]ᵀ, flattened: "out" and "dx" = (do + doᵀ) x. Either the sum do + doᵀ or both products may be rounded."""
    totals = {"out": _Places(do), "dx": _Places(x)}
    for rows, place in zip(_slices(offsets), _slices(p_offsets)):
        a = Bound.exact(x[rows])
        grad = Bound.exact(do[place].view(len(a.value), len(a.value)))
        totals["out"].put(place, (a @ a.mT).map(torch.flatten))
        totals["dx"].put(rows, (grad + grad.mT).rounded(x.dtype) @ a)
    return _rounded(totals, x.dtype)


def array_jagged_bmm(
    p: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, p_offsets: Tensor, do: Tensor, *, transposed: bool = False
) -> Bounds:
    """Bounds of p[b] @ y[b], or p[b]ᵀ @ y[b], `array_jagged_bmm_jagged_out`: "out", "dp", "dy"."""
    totals = {"out": _Places(do), "dp": _Places(p), "dy": _Places(y)}
    for rows, columns, place in zip(*map(_slices, (x_offsets, y_offsets, p_offsets))):
        shape = rows.stop - rows.start, columns.stop - columns.start
        of_y, of_out = (rows, columns) if transposed else (columns, rows)
        matrix, c, grad = Bound.exact(p[place].view(shape)), Bound.exact(y[of_y]), Bound.exact(do[of_out])
        matrix = matrix.mT if transposed else matrix
        dp = grad @ c.mT
        totals["out"].put(of_out, matrix @ c)
        totals["dp"].put(place, (dp.mT if transposed else dp).map(torch.flatten))
        totals["dy"].put(of_y, matrix.mT @ grad)
    return _rounded(totals, y.dtype)


def jagged_softmax(x: Tensor, offsets: Tensor, do: Tensor, *, arithmetic: Arithmetic | None = None) -> Bounds:
    """Bounds of softmax over the rows of each segment: "out", "dx"."""
    totals = {"out": _Places(do), "dx": _Places(x)}
    for rows in _slices(offsets):
        for name, result in zip(totals, _softmax(x[rows], do[rows], 0, arithmetic)):
            totals[name].put(rows, result)
    return _rounded(totals, x.dtype)


def jagged2_softmax(
    p: Tensor, x_offsets: Tensor, y_offsets: Tensor, p_offsets: Tensor, do: Tensor, *, dim: int = -1, arithmetic: Arithmetic | None = None
) -> Bounds:
    """Bounds of softmax over each row (dim -1) or column (-2) of the matrices p[b]: "out", "dp"."""
    totals = {"out": _Places(do), "dp": _Places(p)}
    for rows, columns, place in zip(*map(_slices, (x_offsets, y_offsets, p_offsets))):
        shape = rows.stop - rows.start, columns.stop - columns.start
        for name, result in zip(totals, _softmax(p[place].view(shape), do[place].view(shape), dim, arithmetic)):
            totals[name].put(place, result.map(torch.flatten))
    lines = int(((x_offsets if dim == -1 else y_offsets).diff() * ((y_offsets if dim == -1 else x_offsets).diff() > 0)).sum())
    return {name: bound._replace(lines=lines) for name, bound in _rounded(totals, p.dtype).items()}


def _softmax(x: Tensor, do: Tensor, dim: int, arithmetic: Arithmetic | None) -> tuple[Bound, Bound]:
    """y = softmax(x), and dx = y ∘ (do - Σ y ∘ do) with y rounded to x's dtype."""
    if x.numel() == 0:
        return Bound.exact(x), Bound.exact(x)
    exact, ulps = Bound.exact(x), (arithmetic_of(x) if arithmetic is None else arithmetic).exp_ulps
    largest = exact.value.amax(dim, keepdim=True)
    weights = exact._replace(value=exact.value - largest).off_by(3).exp(ulps)  # a difference, times log2(e), in base 2
    y = weights / weights.sum(dim).map(lambda t: t.unsqueeze(dim))
    grad, rounded = Bound.exact(do), y.rounded(x.dtype)
    delta = (rounded * grad).sum(dim).map(lambda t: t.unsqueeze(dim))
    return y, rounded * (grad - delta)


# -- segments -----------------------------------------------------------------------------------------------------------------------


class _Places:
    """A result assembled from segments; 0 where there is no segment."""

    def __init__(self, like: Tensor):
        self._parts = [torch.zeros(like.shape, dtype=torch.float64, device=like.device) for _ in range(3)]
        self._dtype = Bound.exact(like).dtype

    def put(self, place: slice | int, result: Bound) -> None:
        for part, values in zip(self._parts, result[:3]):
            part[place] = values

    @property
    def bound(self) -> Bound:
        return Bound(*self._parts, self._dtype)


def _rounded(totals: dict[str, _Places], dtype: torch.dtype) -> Bounds:
    return {name: total.bound.rounded(dtype) for name, total in totals.items()}


def _slices(offsets: Tensor) -> list[slice]:
    bounds = offsets.tolist()
    return [slice(start, end) for start, end in zip(bounds, bounds[1:])]
