"""Values with bounds of their rounding errors, and the comparison with what an implementation
computed.

A `Bound` holds the result of exact arithmetic (float64), the largest error that arithmetic of lower
precision may make, and the standard deviation of the error if roundings are independent. Both
errors follow from the computation: eps times the sizes of the terms, to first order (Higham,
Accuracy and Stability of Numerical Algorithms, chapter 3). No implementation is run to find them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

# A rounding error is uniform within half the spacing of floating-point numbers. Between two powers
# of two the spacing is constant; for values whose logarithms are uniform, its root mean square is
# sqrt(3 / (8 ln 2)) = 0.7355 of eps times the value.
RMS_OF_ROUNDING = math.sqrt(3 / (8 * math.log(2)) / 12)

# The largest error allowed, in standard deviations. One in 10^15 Gaussian errors exceeds 8; a
# single rounding is at most 2.4.
LARGEST_DEVIATION = 8.0

# The root mean square of many errors, each divided by its standard deviation, is 1 if the model is
# right. It may be 10 % higher, plus 5 of its own standard deviations, which is one over the root of
# twice the number of independent errors.
MEAN_SLACK, MEAN_DEVIATIONS = 1.1, 5.0


_EQUAL_TERMS = ContextVar("equal terms", default=False)


@contextmanager
def equal_terms() -> Iterator[None]:
    """Sums may have many equal terms. Adding one to a growing sum rounds in one direction, again
    and again, so that n roundings add up to n / 2 eps."""
    token = _EQUAL_TERMS.set(True)
    try:
        yield
    finally:
        _EQUAL_TERMS.reset(token)


class Bound(NamedTuple):
    """A result and its errors.

    Attributes:
        value: the exact result, float64.
        error: the largest error of each element; a 0-dimensional zero if the value is exact.
        rms: the standard deviation of each error; also a 0-dimensional zero if the value is exact.
        dtype: dtype of the arithmetic, fp32 or fp64. `rounded` models rounding to other dtypes.
        lines: number of groups of elements whose errors are not independent; None: the rows of a
            matrix, the elements of a flat tensor.
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
        """An operand without error. Arithmetic is in fp32 if it has 32 bits or fewer, else in
        fp64."""
        zero = torch.zeros((), dtype=torch.float64, device=x.device)
        arithmetic = torch.promote_types(x.dtype, torch.float32)
        return cls(x.detach().double(), zero, zero, arithmetic)

    def map(self, view) -> Bound:
        """Apply `view`, which only changes the shape, to the value and its errors."""
        return Bound(
            view(self.value),
            *(view(x) if x.dim() else x for x in (self.error, self.rms)),
            self.dtype,
        )

    @property
    def mT(self) -> Bound:
        return self.map(lambda x: x.mT)

    def widened(self, error: Tensor, rms: Tensor) -> Bound:
        """The bound with one more error, independent of the others."""
        return Bound(
            self.value,
            self.error + error,
            torch.hypot(self.rms + torch.zeros_like(rms), rms),
            self.dtype,
        )

    def off_by(self, roundings: float, size: Tensor | None = None) -> Bound:
        """The bound with the errors of this number of roundings of numbers of magnitude `size`, by
        default the value's."""
        size = self.value.abs() if size is None else size
        return self.widened(
            roundings * self.eps / 2 * size,
            math.sqrt(roundings) * RMS_OF_ROUNDING * self.eps * size,
        )

    def rounded(self, dtype: torch.dtype, unit: Tensor | float = 1.0) -> Bound:
        """The bound rounded to nearest in dtype. unit: values are stored divided by it, which
        scales the subnormal range."""
        info, size = torch.finfo(dtype), self.value.abs() + self.error
        smallest = info.eps * info.smallest_normal * unit
        return self.widened(
            (info.eps / 2 * size).clamp(min=smallest / 2),
            (RMS_OF_ROUNDING * info.eps * size).clamp(min=smallest / math.sqrt(12)),
        )

    def __add__(self, other: Bound) -> Bound:
        value = self.value + other.value
        return Bound(
            value, self.error + other.error, torch.hypot(self.rms, other.rms), self.dtype
        ).off_by(1)

    def __sub__(self, other: Bound) -> Bound:
        return self + other._replace(value=-other.value)

    def __mul__(self, other: Bound) -> Bound:
        value = self.value * other.value
        error = self.error * (other.value.abs() + other.error) + self.value.abs() * other.error
        return Bound(
            value, error, torch.hypot(self.rms * other.value, self.value * other.rms), self.dtype
        ).off_by(1)

    def __truediv__(self, other: Bound) -> Bound:
        """The quotient, with two roundings: kernels multiply by a reciprocal."""
        value, size = self.value / other.value, other.value.abs()
        error = (self.error + value.abs() * other.error) / size
        return Bound(
            value, error, torch.hypot(self.rms, value * other.rms) / size, self.dtype
        ).off_by(2)

    def scaled(self, factor: Tensor | float) -> Bound:
        """The product with an exact number; two roundings, because the number may be a product
        itself."""
        size = factor.abs() if isinstance(factor, Tensor) else abs(factor)
        return Bound(self.value * factor, self.error * size, self.rms * size, self.dtype).off_by(2)

    def __matmul__(self, other: Bound) -> Bound:
        value = self.value @ other.value
        a, b = self.value.abs(), other.value.abs()
        error = _matmul(self.error, b + other.error) + _matmul(a, other.error)
        variance = _matmul(self.rms**2, b**2) + _matmul(a**2, other.rms**2)
        return Bound(value, error, variance.sqrt(), self.dtype).summed(
            self.value.shape[-1], a @ b, (a**2) @ (b**2)
        )

    def split_matmul(self, other: Bound, dtype: torch.dtype) -> Bound:
        """self @ other by split-K, with partial sums rounded to `dtype`."""
        result, eps = self @ other, torch.finfo(dtype).eps
        size, squares = self.value.abs() @ other.value.abs(), (self.value**2) @ (other.value**2)
        return result.widened(
            eps * size, RMS_OF_ROUNDING * eps * (2 * squares.sqrt() + result.value.abs())
        )

    def sum(self, dim: int | tuple[int, ...]) -> Bound:
        terms = math.prod(self.value.shape[d] for d in ([dim] if isinstance(dim, int) else dim))
        error, variance = ((x.expand_as(self.value)).sum(dim) for x in (self.error, self.rms**2))
        total = Bound(self.value.sum(dim), error, variance.sqrt(), self.dtype)
        return total.summed(terms, self.value.abs().sum(dim), (self.value**2).sum(dim))

    def summed(self, terms: int | Tensor, size: Tensor, squares: Tensor) -> Bound:
        """The bound with the errors of a sum of this number of terms, in any order.

        size, squares: sums of the terms' absolute values and of their squares.

        Largest error: a sum of n terms has at most n roundings, which with probability near 1 add
        up to no more than 4 sqrt(n) of them (Higham and Mary 2019). Tensor cores truncate instead
        of rounding, a whole eps in one direction, once for 16 products. Three more roundings cover
        fp32 MMAs from three 16-bit parts, which omit terms of about 2^-24. Within `equal_terms`,
        roundings all count.

        Standard deviation: that of rounding the partial sums, doubled, because sorted terms have
        larger partial sums. Truncation adds an offset: half an eps of a partial sum for every 16
        terms, half of that on average.
        """
        terms = torch.as_tensor(terms, dtype=torch.float64, device=size.device)
        largest = largest_of_sum(terms, truncated=terms / 16)
        deviation = (
            2 * RMS_OF_ROUNDING * partial_sums(terms, self.value, squares)
            + squares.sqrt() / 2
            + terms / 64 * self.value.abs()
        )
        return self.widened(largest * self.eps * size, deviation * self.eps)

    def exp(self, ulps: float) -> Bound:
        """e^x by a function with an error of up to `ulps` units in the last place, a third of it on
        average. Subnormal results may be 0.

        An exponent off by LARGEST_DEVIATION standard deviations s changes the result by a factor of
        e^(LARGEST_DEVIATION · s), which is more than LARGEST_DEVIATION times what s does.
        """
        value, smallest = self.value.exp(), torch.finfo(self.dtype).smallest_normal
        error = value * (torch.expm1(self.error) + ulps * self.eps) + smallest
        deviation = torch.expm1(LARGEST_DEVIATION * self.rms) / LARGEST_DEVIATION
        return Bound(
            value,
            error,
            value * torch.hypot(deviation, torch.full_like(value, ulps * self.eps / 3)) + smallest,
            self.dtype,
        )

    def where(self, keep: Tensor) -> Bound:
        """The bound where `keep`, an exact 0 elsewhere."""
        return Bound(*(x.where(keep, 0.0) for x in (self.value, self.error, self.rms)), self.dtype)


Bounds = dict[str, Bound]  # by name of the result


def largest_of_sum(terms: Tensor, truncated: Tensor | float = 0.0) -> Tensor:
    """The largest error of a sum of this number of terms, in eps of the sum of their absolute
    values, as in `Bound.summed`."""
    largest = torch.minimum(terms, 4 * terms.sqrt() + truncated)
    return (torch.maximum(largest, terms / 2 + truncated) if _EQUAL_TERMS.get() else largest) + 3


def partial_sums(terms: Tensor, value: Tensor, squares: Tensor) -> Tensor:
    """The 2-norm of the partial sums of this number of terms in random order. squares: the sum of
    the terms' squares.

    The k-th partial sum is k / n of the whole plus a random walk that returns to 0 at the n-th
    step.
    """
    return (terms * (value**2 / 3 + squares / 6)).sqrt()


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, where a 0-dimensional x or y is 0."""
    return x @ y if x.dim() and y.dim() else x.new_zeros(())


class Comparison(NamedTuple):
    """Errors divided by what is allowed: the largest over all elements, and the root mean
    square."""

    largest: float
    mean: float


def compare(actual: Tensor, bound: Bound, name: str = "result") -> Comparison:
    """Compare a result with its bound: above 1 is too much.

    The error of each element must be at most the largest possible one and at most LARGEST_DEVIATION
    standard deviations. The root mean square of all errors, in standard deviations, must be at most
    MEAN_SLACK plus a term for chance. For that term the elements of one of the bound's `lines`, or
    of one row, count as one, because their errors are not independent.

    Where the exact value is not finite, or rounds to infinity, the actual value must be equal to
    it. Where the error is unbounded, any value is accepted.

    Raises:
        AssertionError: another shape, or NaN or infinity where a finite value is expected.
    """
    assert actual.shape == bound.value.shape, (
        f"{name}: shape {list(actual.shape)}, expected {list(bound.value.shape)}"
    )
    info = torch.finfo(actual.dtype)
    result, value = actual.detach().double(), bound.value
    finite = value.abs() + bound.error <= info.max
    overflown = value.abs() - bound.error > info.max * (1 + info.eps / 4)
    expected = torch.where(overflown, math.inf * value.sign(), value)
    same = torch.isnan(result) & torch.isnan(expected) | (result == expected)
    certain = (overflown | torch.isnan(expected)) & ~same
    assert not certain.any(), (
        f"{name}: {result[certain][0]} where {expected[certain][0]} was expected,"
        f" {int(certain.sum())} times"
    )
    wrong = finite & ~torch.isfinite(result)
    assert not wrong.any(), (
        f"{name}: {result[wrong][0]} where {value[wrong][0]} was expected, {int(wrong.sum())} times"
    )

    error = torch.where(finite, (result - value).abs(), 0.0)
    zeros = torch.zeros_like(value)
    # The squares of deviations below 1e-154 are 0 in float64.
    rms = torch.where(finite, bound.rms + 1e-150 * (bound.error > 0).double(), zeros)
    allowed = torch.minimum(
        torch.where(finite, bound.error + zeros, 1.0), LARGEST_DEVIATION * rms + (~finite).double()
    )
    largest = (error / allowed).nan_to_num(nan=0.0)  # 0 of 0 allowed
    if not (rms > 0).any():
        return Comparison(float(largest.max()) if largest.numel() else 0.0, 0.0)
    deviations = (error / rms)[rms > 0]
    lines = (
        len(deviations) / (rms.shape[-1] if rms.dim() > 1 else 1)
        if bound.lines is None
        else bound.lines
    )
    independent = max(1.0, lines)
    mean = deviations.square().mean().sqrt() / (
        MEAN_SLACK + MEAN_DEVIATIONS / math.sqrt(2 * independent)
    )
    return Comparison(float(largest.max()), float(mean))


def assert_accurate(
    actual: Mapping[str, Tensor], bounds: Mapping[str, Bound], context: str = ""
) -> None:
    """Check that every tensor is within its bound, and that both mappings have the same names."""
    assert actual.keys() == bounds.keys(), (
        f"{context}: results {list(actual)}, bounds {list(bounds)}"
    )
    for name, bound in bounds.items():
        label = f"{context}: {name}" if context else name
        found = compare(actual[name], bound, label)
        if found.largest > 1 or found.mean > 1:
            error = (actual[name].detach().double() - bound.value).abs()
            raise AssertionError(
                f"{label}: the largest error is {found.largest:.3g} of what is allowed there, the"
                f" root mean square of all {found.mean:.3g} of what is allowed; largest error"
                f" {float(error.max()):.3g} in values of up to {float(bound.value.abs().max()):.3g}"
            )


def results(
    operator: Callable[..., Tensor], tensors: Mapping[str, Tensor], grad: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """({"out": operator(*tensors), "d" + name: gradient of each tensor}, the gradient of "out").

    grad: the gradient of "out", random if None. The tensors keep their strides.
    """
    inputs = [x.detach().requires_grad_() for x in tensors.values()]
    out = operator(*inputs)
    grad = torch.randn_like(out) if grad is None else grad
    gradients = torch.autograd.grad(out, inputs, grad)
    return {"out": out.detach(), **{f"d{name}": x for name, x in zip(tensors, gradients)}}, grad


def check(
    operator: Callable[..., Tensor],
    bounds: Callable[..., Mapping[str, Bound]],
    tensors: Mapping[str, Tensor],
    grad: Tensor | None = None,
) -> None:
    """Check an operator, forward and every gradient, against
    `bounds(*tensors, gradient of the result)`."""
    actual, grad = results(operator, tensors, grad)
    assert_accurate(actual, bounds(*tensors.values(), grad))
