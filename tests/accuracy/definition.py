"""Bounds for any function that is defined in plain torch, by Monte Carlo arithmetic (Parker 1997).

The definition runs in float64, once exactly and several times with a random error after each
operation, of the size of a rounding error. The deviations of these results are the errors of a
program that rounds the result of each operation. They do not depend on the order in which this
machine's processor adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .bound import LARGEST_DEVIATION, RMS_OF_ROUNDING, Bound, partial_sums

SAMPLES = 16
# Operations without rounding: their results are elements of their operands, or constants.
EXACT = {
    "abs",
    "alias",
    "cat",
    "clone",
    "constant_pad_nd",
    "copy",
    "detach",
    "empty",
    "expand",
    "full",
    "index",
    "index_select",
    "masked_fill",
    "masked_scatter",
    "max",
    "neg",
    "new_zeros",
    "ones_like",
    "permute",
    "relu",
    "repeat",
    "reshape",
    "scalar_tensor",
    "select_backward",
    "slice_backward",
    "stack",
    "threshold_backward",
    "unbind",
    "view",
    "where",
    "zeros",
    "zeros_like",
    "_unsafe_view",
    "_to_copy",
}


def definition(
    function: Callable[..., Tensor],
    tensors: Mapping[str, Tensor],
    do: Tensor,
    gradients: bool = True,
    samples: int = SAMPLES,
) -> dict[str, Bound]:
    """Bounds of "out", `function(*tensors)`, and of "d" + name, the gradients for the gradient `do`
    of "out". gradients=False: of "out". samples: runs with random errors. An element's deviation
    over its estimated root mean square is distributed as Student's t, whose tails are heavy: large
    tensors need more samples.

    The function is plain torch on the tensors' device, where a GPU's float64 is many times as fast
    as a thread's, and must not use torch's global random numbers.
    """

    def run() -> list[Tensor]:
        inputs = [x.detach().double().requires_grad_() for x in tensors.values()]
        with torch.set_grad_enabled(gradients):
            out = function(*inputs)
        return [
            out.detach(),
            *(
                torch.autograd.grad(out, inputs, do.double(), materialize_grads=True)
                if gradients
                else ()
            ),
        ]

    exact = run()
    with torch.random.fork_rng(devices={x.device for x in tensors.values() if x.is_cuda}):
        torch.manual_seed(0)
        with _RandomErrors(do.dtype):
            runs = [run() for _ in range(samples)]
    names, bounds = ["out", *(f"d{name}" for name in tensors if gradients)], {}
    for name, value, *others in zip(names, exact, *runs):
        rms = sum(((x - value) ** 2 for x in others), torch.zeros_like(value)).div(samples).sqrt()
        bounds[name] = Bound(
            value, LARGEST_DEVIATION * rms, rms, torch.promote_types(do.dtype, torch.float32)
        ).rounded(do.dtype)
    return bounds


class _RandomErrors(TorchDispatchMode):
    """Adds to the result of every operation a random error of rounding it to a dtype, and of
    summing in fp32 (or float64)."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._eps, self._smallest = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
        self._sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__
        if name in EXACT:
            return out
        given = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        sizes = _sum_sizes(name, args, out) if isinstance(out, Tensor) else None
        if name == "native_layer_norm_backward":
            out = self._summed_in_dtype(out, *args)

        def disturbed(x):
            if (
                not isinstance(x, Tensor)
                or x.dtype != torch.float64
                or x.untyped_storage().data_ptr() in given
            ):
                return x
            # below the smallest normal number, spacing does not shrink; 0 is exact
            error = _normal(x) * x.abs().clamp_(min=self._smallest)
            error = error.mul_(RMS_OF_ROUNDING * self._eps).masked_fill_(x == 0, 0).add_(x)
            return error if sizes is None else error.add_(self._sums * _normal(x) * sizes)

        return tree_map(disturbed, out)

    def _summed_in_dtype(
        self, out: tuple, grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, *_
    ) -> tuple:
        """torch sums the gradients of a layer norm's weight and bias row by row in their own dtype
        on the CPU."""
        if out[1] is None:  # no weight
            return out
        results = [out[0]]
        for total, terms in zip(out[1:], (grad * (x - mean) * rstd, grad)):
            terms = terms.reshape(-1, *shape)
            sizes = partial_sums(torch.tensor(float(len(terms))), total, (terms**2).sum(0))
            results.append(total + RMS_OF_ROUNDING * self._eps * _normal(total) * sizes)
        return tuple(results)


def _normal(like: Tensor) -> Tensor:
    """Normal random numbers. On the CPU, those of fp32 take a fifth of the time."""
    return torch.randn_like(like, dtype=torch.float32 if like.is_cpu else like.dtype)


def _sum_sizes(name: str, args: tuple, out: Tensor) -> Tensor | None:
    """The standard deviation of a sum's error, in eps, as in `Bound.summed`; None for operations
    without a sum."""
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        a, b = args[-2:]
        return ((a**2) @ (b**2)).sqrt() * (math.sqrt(a.shape[-1]) / 4 + 1)
    if name in ("index_add", "index_put", "_index_put_impl_"):  # sums of rows
        return _sizes_of_added_rows(name, *args)
    if name in ("sum", "mean", "_softmax_backward_data"):
        source = args[0]
        return (
            out.abs()
            + source.abs().mean() * math.sqrt(max(1, source.numel() // max(1, out.numel()))) / 4
        )
    return None


def _sizes_of_added_rows(name: str, x: Tensor, *args: Any) -> Tensor | None:
    if name == "index_add":
        dim, index, rows = args[:3]
        indices = [None] * dim + [index]
    else:
        indices, rows, *others = args
        if not (others and others[0]):  # nothing is added
            return None
    zeros = torch.zeros_like(x)
    squares = zeros.index_put(indices, rows**2, accumulate=True)
    counts = zeros.index_put(indices, torch.ones_like(rows), accumulate=True)
    total = zeros.index_put(indices, rows, accumulate=True)
    return partial_sums(counts, total, squares)
