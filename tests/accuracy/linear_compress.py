"""Bounds of linear compression, forward and backward."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from .arithmetic import Arithmetic, arithmetic_of, splits_sums
from .bound import RMS_OF_ROUNDING, Bound, Bounds, partial_sums


def linear_compress(
    weights: Sequence[Tensor],
    embeddings: Sequence[Tensor],
    indices: Sequence[Tensor],
    do: Tensor,
    *,
    arithmetic: Arithmetic | None = None,
) -> Bounds:
    """Bounds of out[b] = Σ_l (W_l @ E_l)[index_l[b]], "out", and of the gradients "dweights[l]",
    "dembeddings[l]".

        G_l[u] = Σ dO[b] over the b with index_l[b] = u,  dW_l = Σ_u G_l[u] E_l[u]ᵀ,  dE_l[u] = W_lᵀ
        G_l[u]

    indices: one `[B]` for each level but the last. The levels' results are added in fp32 and
    rounded once. The sums G_l are rounded once, before their MMA. With Arithmetic.rounds_levels
    each level's result and each sum of two is rounded, and G_l is summed in the operands' dtype.
    """
    arithmetic = arithmetic_of(do) if arithmetic is None else arithmetic
    dtype, results = do.dtype, {}
    by_torch = functools.partial(torch_matmul, operand=do)
    matmul = by_torch if arithmetic.torch_matmul else operator.matmul
    maps = [*(index.long() for index in indices), torch.arange(do.shape[0], device=do.device)]
    out = None
    # in torch's order
    for weight, embedding, index in [
        list(zip(weights, embeddings, maps))[i] for i in (-1, *range(len(indices)))
    ]:
        result = matmul(Bound.exact(weight), Bound.exact(embedding))
        result = result.rounded(dtype) if arithmetic.rounds_levels else result
        result = result.map(lambda x, index=index: x[index])
        out = result if out is None else out + result
        out = out.rounded(dtype) if arithmetic.rounds_levels and out is not result else out
    results["out"] = out if arithmetic.rounds_levels else out.rounded(dtype)
    for level, (weight, embedding, index) in enumerate(zip(weights, embeddings, maps)):
        grad = Bound.exact(do)
        if level < len(indices):
            grad = _group_sums(do, index, embedding.shape[0], arithmetic)
        flat = (
            x.map(lambda y: y.transpose(0, 1).flatten(1)) for x in (grad, Bound.exact(embedding))
        )
        rows, columns = flat
        results[f"dweights[{level}]"] = matmul(rows, columns.mT).rounded(dtype)
        # the kernels use torch.bmm here too
        results[f"dembeddings[{level}]"] = by_torch(Bound.exact(weight).mT, grad).rounded(dtype)
    return results


def torch_matmul(a: Bound, b: Bound, operand: Tensor) -> Bound:
    """a @ b by torch, for operands of the dtype and device of `operand`."""
    return a.split_matmul(b, operand.dtype) if splits_sums(operand) else a @ b


def _group_sums(x: Tensor, index: Tensor, groups: int, arithmetic: Arithmetic) -> Bound:
    """Σ x[b] over the b with index[b] = u, rounded to x's dtype once or, with rounds_levels, after
    each addition."""

    def sums(y: Tensor) -> Tensor:
        return y.new_zeros((groups, *y.shape[1:])).index_add_(0, index, y)

    terms, exact = index.bincount(minlength=groups), x.double()
    value, size, squares = sums(exact), sums(exact.abs()), sums(exact**2)
    bound = Bound(
        value, torch.zeros_like(value), torch.zeros_like(value), Bound.exact(x).dtype
    ).summed(terms[:, None, None], size, squares)
    if arithmetic.rounds_levels:
        eps, terms = torch.finfo(x.dtype).eps, terms[:, None, None]
        bound = bound.widened(
            terms * eps / 2 * size, RMS_OF_ROUNDING * eps * partial_sums(terms, value, squares)
        )
    return bound.rounded(x.dtype)
