"""Values with bounds of their rounding errors, and the comparison with what an implementation computed.

A `Bound` holds what exact arithmetic would give (float64), the largest error that arithmetic of lower precision may make, and the standard
deviation that the error has if roundings are independent. Both follow from the computation: eps times the sizes of the terms, to first
order (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3). No implementation is run to find them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# A rounding is uniform within half a spacing of floating point numbers. Between two powers of two the spacing is constant; over values
# whose logarithms are uniform, its root mean square is sqrt(3 / (8 ln 2)) = 0.7355 of eps times the value.
RMS_OF_ROUNDING = math.sqrt(3 / (8 * math.log(2)) / 12)

# An error may be so many standard deviations. Of Gaussian errors one in 10^15 is larger than 8; a single rounding is at most 2.4.
LARGEST_DEVIATION = 8.0

# The root mean square of many errors, each as a part of its own standard deviation, is 1 where all is as predicted. It may be 10 % above
# it, and 5 of its own standard deviations: one over the root of twice the number of independent errors.
MEAN_SLACK, MEAN_DEVIATIONS = 1.1, 5.0


class Bound(NamedTuple):
    """A result and its errors.

    value: float64, exact arithmetic's. error: the largest error. rms: the standard deviation of the error. Of an exact value the last
    two are 0-dimensional zeros. dtype: of the arithmetic that it is computed with, fp32 or fp64; other roundings are made by `rounded`.
    lines: how many groups of elements have errors in common; None: as many as a matrix has rows, or a flat tensor elements.
    """

    value: Tensor
    error: Tensor
    rms: Tensor
    dtype: torch.dtype
    lines: int | None = None

    @property
    def eps(self) -> float:
        return torch.finfo(self.dtype).eps

    @classmethod
    def exact(cls, x: Tensor) -> Bound:
        """An operand; it is computed with in fp32 if it has 32 bits or fewer."""
        zero = torch.zeros((), dtype=torch.float64, device=x.device)
        arithmetic = torch.promote_types(x.dtype, torch.float32)
        return cls(x.detach().double(), zero, zero, arithmetic)

    def map(self, view) -> Bound:
        """The same elements in another shape."""
        return Bound(view(self.value), *(view(x) if x.dim() else x for x in (self.error, self.rms)), self.dtype)

    @property
    def mT(self) -> Bound:
        return self.map(lambda x: x.mT)

    def widened(self, error: Tensor, rms: Tensor) -> Bound:
        """With one more error, independent of the others."""
        return Bound(self.value, self.error + error, torch.hypot(self.rms + torch.zeros_like(rms), rms), self.dtype)

    def off_by(self, roundings: float, size: Tensor | None = None) -> Bound:
        """With the errors of so many roundings of numbers of a size, the value's if none is given."""
        size = self.value.abs() if size is None else size
        return self.widened(roundings * self.eps / 2 * size, math.sqrt(roundings) * RMS_OF_ROUNDING * self.eps * size)

    def rounded(self, dtype: torch.dtype, unit: Tensor | float = 1.0) -> Bound:
        """Rounded to nearest. The spacing of subnormal numbers is that of the smallest normal one, times the unit that values are in."""
        info, size = torch.finfo(dtype), self.value.abs() + self.error
        smallest = info.eps * info.smallest_normal * unit
        return self.widened(
            (info.eps / 2 * size).clamp(min=smallest / 2), (RMS_OF_ROUNDING * info.eps * size).clamp(min=smallest / math.sqrt(12))
        )

    def __add__(self, other: Bound) -> Bound:
        value = self.value + other.value
        return Bound(value, self.error + other.error, torch.hypot(self.rms, other.rms), self.dtype).off_by(1)

    def __sub__(self, other: Bound) -> Bound:
        return self + other._replace(value=-other.value)

    def __mul__(self, other: Bound) -> Bound:
        value = self.value * other.value
        error = self.error * (other.value.abs() + other.error) + self.value.abs() * other.error
        return Bound(value, error, torch.hypot(self.rms * other.value, self.value * other.rms), self.dtype).off_by(1)

    def __truediv__(self, other: Bound) -> Bound:
        """Two roundings: kernels multiply by a reciprocal."""
        value, size = self.value / other.value, other.value.abs()
        error = (self.error + value.abs() * other.error) / size
        return Bound(value, error, torch.hypot(self.rms, value * other.rms) / size, self.dtype).off_by(2)

    def scaled(self, factor: Tensor | float) -> Bound:
        """Times a number; two roundings, as the number may be a product itself."""
        size = factor.abs() if isinstance(factor, Tensor) else abs(factor)
        return Bound(self.value * factor, self.error * size, self.rms * size, self.dtype).off_by(2)

    def __matmul__(self, other: Bound) -> Bound:
        value = self.value @ other.value
        a, b = self.value.abs(), other.value.abs()
        error = _product(self.error, b + other.error) + _product(a, other.error)
        variance = _product(self.rms**2, b**2) + _product(a**2, other.rms**2)
        return Bound(value, error, variance.sqrt(), self.dtype).summed(self.value.shape[-1], a @ b, (a**2) @ (b**2))

    def split_matmul(self, other: Bound, dtype: torch.dtype) -> Bound:
        """The product, of a sum in parts that are rounded to `dtype`, as are the sums of parts."""
        product, eps = self @ other, torch.finfo(dtype).eps
        size, squares = self.value.abs() @ other.value.abs(), (self.value**2) @ (other.value**2)
        return product.widened(eps * size, RMS_OF_ROUNDING * eps * (2 * squares.sqrt() + product.value.abs()))

    def sum(self, dim: int | tuple[int, ...]) -> Bound:
        terms = math.prod(self.value.shape[d] for d in ([dim] if isinstance(dim, int) else dim))
        error, variance = ((x.expand_as(self.value)).sum(dim) for x in (self.error, self.rms**2))
        total = Bound(self.value.sum(dim), error, variance.sqrt(), self.dtype)
        return total.summed(terms, self.value.abs().sum(dim), (self.value**2).sum(dim))

    def summed(self, terms: int | Tensor, size: Tensor, squares: Tensor) -> Bound:
        """With the errors of a sum of so many terms, in any order.

        size, squares: sums of the terms' absolute values and of their squares. The largest error: n steps make at most n roundings, and
        with probability near 1 no more than 4 sqrt(n) that conspire (Higham and Mary 2019); matrix units cut off where others round,
        which is a whole eps, always in one direction, and add 16 products at a time. Three more: products of fp32 made of three parts
        each leave out some 2^-24.
        The standard deviation is that of rounding partial sums, doubled: sorted terms make larger ones. What cutting off makes is no
        deviation but an offset, half an eps of a partial sum every 16 terms, of which half on average.
        """
        terms = torch.as_tensor(terms, dtype=torch.float64, device=size.device)
        largest = torch.minimum(terms, 4 * terms.sqrt() + terms / 16) + 3
        deviation = 2 * RMS_OF_ROUNDING * partial_sums(terms, self.value, squares) + squares.sqrt() / 2 + terms / 64 * self.value.abs()
        return self.widened(largest * self.eps * size, deviation * self.eps)

    def exp(self, ulps: float) -> Bound:
        """By a function that is off by so many units in the last place, a third of that on average; subnormal results may be 0."""
        value, smallest = self.value.exp(), torch.finfo(self.dtype).smallest_normal
        error = value * (torch.expm1(self.error) + ulps * self.eps) + smallest
        return Bound(value, error, value * torch.hypot(self.rms, torch.full_like(value, ulps * self.eps / 3)) + smallest, self.dtype)

    def where(self, keep: Tensor) -> Bound:
        """An exact 0 where not kept."""
        return Bound(*(x.where(keep, 0.0) for x in (self.value, self.error, self.rms)), self.dtype)


def partial_sums(terms: Tensor, value: Tensor, squares: Tensor) -> Tensor:
    """The 2-norm of the partial sums of so many terms in random order: the k-th is k / n of the whole, and a random walk beside it, which
    the n-th step brings back to 0. squares: the sum of the terms' squares."""
    return (terms * (value**2 / 3 + squares / 6)).sqrt()


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, where a 0-dimensional x or y is 0."""
    return x @ y if x.dim() and y.dim() else x.new_zeros(())


class Comparison(NamedTuple):
    """Errors as parts of what is allowed: the largest of all elements, and their root mean square."""

    largest: float
    mean: float


def compare(actual: Tensor, bound: Bound, name: str = "result") -> Comparison:
    """How much of its bound an error takes: above 1 is too much.

    An element's error may be the largest possible, and no more than LARGEST_DEVIATION standard deviations. The root mean square of all
    errors, in standard deviations, is held to MEAN_SLACK; elements of one of the `lines`, or of one row, have errors in common and count as
    one.
    Where the exact value is no finite number, or rounds to none, so must the actual be; where the error has no bound, it may be anything.

    Raises:
        AssertionError: another shape, or a NaN or an infinity where there should be none.
    """
    assert actual.shape == bound.value.shape, f"{name}: shape {list(actual.shape)}, expected {list(bound.value.shape)}"
    info = torch.finfo(actual.dtype)
    result, value = actual.detach().double(), bound.value
    finite = value.abs() + bound.error <= info.max
    overflown = value.abs() - bound.error > info.max * (1 + info.eps / 4)
    expected = torch.where(overflown, math.inf * value.sign(), value)
    same = torch.isnan(result) & torch.isnan(expected) | (result == expected)
    certain = (overflown | torch.isnan(expected)) & ~same
    assert not certain.any(), f"{name}: {result[certain][0]} where {expected[certain][0]} was expected, {int(certain.sum())} times"
    wrong = finite & ~torch.isfinite(result)
    assert not wrong.any(), f"{name}: {result[wrong][0]} where {value[wrong][0]} was expected, {int(wrong.sum())} times"

    error = torch.where(finite, (result - value).abs(), 0.0)
    zeros = torch.zeros_like(value)
    # Of deviations below 1e-154 the squares, which are added up, are 0 in float64.
    rms = torch.where(finite, bound.rms + 1e-150 * (bound.error > 0).double(), zeros)
    allowed = torch.minimum(torch.where(finite, bound.error + zeros, 1.0), LARGEST_DEVIATION * rms + (~finite).double())
    largest = (error / allowed).nan_to_num(nan=0.0)  # 0 of 0 allowed
    if not (rms > 0).any():
        return Comparison(float(largest.max()) if largest.numel() else 0.0, 0.0)
    deviations = (error / rms)[rms > 0]
    lines = len(deviations) / (rms.shape[-1] if rms.dim() > 1 else 1) if bound.lines is None else bound.lines
    independent = max(1.0, lines)
    mean = deviations.square().mean().sqrt() / (MEAN_SLACK + MEAN_DEVIATIONS / math.sqrt(2 * independent))
    return Comparison(float(largest.max()), float(mean))


def assert_accurate(actual: Mapping[str, Tensor], bounds: Mapping[str, Bound], context: str = "") -> None:
    """Every tensor that an implementation computed is as near to its bound's value as the bound says, and has no name but the bounds'."""
    assert actual.keys() == bounds.keys(), f"{context}: results {list(actual)}, bounds {list(bounds)}"
    for name, bound in bounds.items():
        label = f"{context}: {name}" if context else name
        found = compare(actual[name], bound, label)
        if found.largest > 1 or found.mean > 1:
            error = (actual[name].detach().double() - bound.value).abs()
            raise AssertionError(
                f"{label}: the largest error is {found.largest:.3g} of what is allowed there, the root mean square of all {found.mean:.3g} "
                f"of what is allowed; largest error {float(error.max()):.3g} in values of up to {float(bound.value.abs().max()):.3g}"
            )


def results(operator: Callable[..., Tensor], tensors: Mapping[str, Tensor], grad: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """`operator(*tensors)` as "out", with the gradient of each of the named tensors as "d" and its name; and the gradient of "out" that
    they were made from, random if None. The tensors keep their strides."""
    inputs = [x.detach().requires_grad_() for x in tensors.values()]
    out = operator(*inputs)
    grad = torch.randn_like(out) if grad is None else grad
    gradients = torch.autograd.grad(out, inputs, grad)
    return {"out": out.detach(), **{f"d{name}": x for name, x in zip(tensors, gradients)}}, grad


def check(
    operator: Callable[..., Tensor], bounds: Callable[..., Mapping[str, Bound]], tensors: Mapping[str, Tensor], grad: Tensor | None = None
) -> None:
    """Hold an operator of tensors, forward and every gradient, to `bounds(*tensors, gradient of the result)`."""
    actual, grad = results(operator, tensors, grad)
    assert_accurate(actual, bounds(*tensors.values(), grad))
