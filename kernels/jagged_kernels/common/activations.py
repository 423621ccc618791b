"""The kernels' activations: one device function per name, (fp32 score, scale) → (act, dact): value
and derivative at x = score · scale.

A kernel takes its function as a constant argument. If it does not use the derivative, the compiler
drops its arithmetic. The functions for bfloat16 are faster: they contain the scale in their
constants, and leave out constant factors of the results (`activation_factors`).
"""

import triton
import triton.language as tl
from triton import JITFunction

from . import gelu_taylor

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x · LOG2_E)
TAYLOR_SQUARE = tl.constexpr(gelu_taylor.RANGE**2)
C1, C2, C3, C4 = (tl.constexpr(coefficient) for coefficient in gelu_taylor.COEFFICIENTS)
S1, S2, S3 = (tl.constexpr(coefficient) for coefficient in gelu_taylor.SLOPE)
NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _identity(score, scale):
    x = score * scale
    return x, tl.where(x > 0, 1.0, 1.0)  # of x's layout, where it has one


@triton.jit
def _relu(score, scale):
    x = score * scale
    return tl.maximum(x, 0.0, propagate_nan=NAN), tl.where(x > 0, 1.0, 0.0)


@triton.jit
def _relu_squared(score, scale):
    x = score * scale
    positive = tl.maximum(x, 0.0, propagate_nan=NAN)
    return positive * positive, 2.0 * positive


@triton.jit
def _leaky_relu(score, scale):
    x = score * scale
    slope = tl.where(x > 0, 1.0, 0.01)
    return x * slope, slope


@triton.jit
def _hardswish(score, scale):
    x = score * scale
    gate = tl.minimum(
        tl.maximum(x * (1.0 / 6.0) + 0.5, 0.0, propagate_nan=NAN), 1.0, propagate_nan=NAN
    )
    return x * gate, tl.where(tl.abs(x) < 3.0, x * (1.0 / 3.0) + 0.5, gate)


@triton.jit
def _reciprocal(x):
    """1 / x by the hardware's instruction, with an error of one unit in the last place: 0 for
    |x| > 2^126. Triton's division has eight more, which scale x."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


if not isinstance(_reciprocal, JITFunction):  # Triton's interpreter has no inline assembly

    @triton.jit
    def _reciprocal(x):
        return 1.0 / x


@triton.jit
def _gate(exponent):
    """1 / (1 + 2^exponent), exactly 0 or 1 at the ends."""
    return _reciprocal(1.0 + tl.exp2(exponent))


@triton.jit
def _sigmoid(score, scale):
    y = _gate(score * (-LOG2_E * scale))
    return y, y - y * y


@triton.jit
def _silu(score, scale):
    gate = _gate(score * (-LOG2_E * scale))
    y = score * scale * gate
    return y, gate + y * (1.0 - gate)


@triton.jit
def _gelu(score, scale):
    x = score * scale
    cdf = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    return x * cdf, cdf + x * (0.3989422804014327 * tl.exp2(x * x * -0.7213475204444817))


@triton.jit
def _gelu_tanh(score, scale):
    x = score * scale
    # 0.5 (1 + tanh(u)) = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x³)
    square = x * x
    gate = _gate(x * (-2.302208198144325 - 0.1029432395800235 * square))
    y = x * gate
    slope = 1.5957691216057308 + 0.21406444881780076 * square
    return y, gate + y * (1.0 - gate) * slope


@triton.jit
def _gelu_taylor(score, scale):
    """x · gate: the same function as gelu_taylor.py's formula, with two instructions less, and four
    less with the derivative. Behind the range the gate is 0 or 1 and its slope 0, exactly."""
    x = score * scale
    t = tl.minimum(x * x, TAYLOR_SQUARE)
    gate = 0.5 + x * (C1 + t * (C2 + t * (C3 + t * C4)))
    # in this order one instruction: saturation of the sum
    gate = tl.minimum(tl.maximum(gate, 0.0), 1.0)
    return x * gate, gate + x * (TAYLOR_SQUARE - t) * (S1 + t * (S2 + t * S3))


@triton.jit
def _fast_tanh(x):
    """The hardware's tanh. Its relative error, 2^-11, is no larger than that of the rounding to
    bfloat16 that follows."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _fast_sigmoid(score, scale):
    y = 0.5 + 0.5 * _fast_tanh(score * (0.5 * scale))
    return y, y - y * y


@triton.jit
def _fast_silu(score, scale):
    """2/scale times the value, twice the derivative."""
    half = score * (0.5 * scale)
    tanh = _fast_tanh(half)
    gate = 1.0 + tanh
    return score * gate, gate + gate * (half - half * tanh)


@triton.jit
def _fast_gelu(score, scale):
    """max(x, 0) - |x| Φ(-|x|). The normal distribution's tail Φ(-|x|) is 2 to the power of a
    polynomial, with a relative error of at most 4.5e-5 for |x| <= 6; beyond, |x| Φ(-|x|) is below
    1e-8. A formula with a reciprocal would take twice as long."""
    x = score * scale
    a = tl.minimum(tl.abs(x), 6.0)
    exponent = -0.05118535319150605 + a * (
        0.007195568274196267 + a * (-0.0006111001453764451 + a * 2.2990054285818254e-05)
    )
    tail = tl.exp2(
        -1.00006477996141 + a * (-1.150174294405763 + a * (-0.46127188436857436 + a * exponent))
    )
    density = 0.3989422804014327 * tl.exp2(x * x * -0.7213475204444817)
    return tl.maximum(x, 0.0, propagate_nan=NAN) - a * tail, tl.where(
        x < 0, tail, 1.0 - tail
    ) + x * density


@triton.jit
def _fast_gelu_tanh(score, scale):
    """2/scale times the value, twice the derivative."""
    square = score * score
    tanh = _fast_tanh(
        score
        * (0.7978845608028654 * scale + (0.035677408136300125 * scale * scale * scale) * square)
    )
    gate = 1.0 + tanh
    slope = 0.7978845608028654 * scale + (0.10703222440890037 * scale * scale * scale) * square
    return score * gate, gate + gate * ((score - score * tanh) * slope)


_EXACT = {
    "identity": _identity,
    "relu": _relu,
    "relu_squared": _relu_squared,
    "leaky_relu": _leaky_relu,
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_taylor": _gelu_taylor,
    "hardswish": _hardswish,
    "sigmoid": _sigmoid,
}
_BFLOAT16 = _EXACT | {
    "silu": _fast_silu,
    "gelu": _fast_gelu,
    "gelu_tanh": _fast_gelu_tanh,
    "sigmoid": _fast_sigmoid,
}
_HALVED = ("silu", "gelu_tanh")  # of the bfloat16 functions


def activation_function(name: str, bfloat16: bool) -> JITFunction | None:
    """The device function of a pointwise activation; None for "softmax", which the kernels compute
    themselves.

    bfloat16: whether P is rounded to bfloat16. Then the hardware's approximate tanh is accurate
    enough.
    """
    return None if name == "softmax" else (_BFLOAT16 if bfloat16 else _EXACT)[name]


def activation_factors(name: str, bfloat16: bool, scale: float) -> tuple[float, float]:
    """(act factor, dact factor), which the function leaves out: a kernel multiplies its results by
    them, once per result, not per score."""
    return (0.5 * scale, 0.5) if bfloat16 and name in _HALVED else (1.0, 1.0)
