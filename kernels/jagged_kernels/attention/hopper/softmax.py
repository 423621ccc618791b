"""Online softmax of the forward kernel for Hopper, in a consumer's registers: running maximum and
sums, and the rescale of the output."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.pipeline import halves
from .scores import visible_keys

# partial sums of a row until its tile ends: two for each of the four threads that hold it
SUMS = gl.constexpr(8)


class SoftmaxState(NamedTuple):
    """Softmax's running maximum `[64]` and partial sums `[64, SUMS]` of the rows, and acc = P v
    `[64, width]`, a tuple of parts."""

    row_max: gl.tensor
    row_sum: gl.tensor
    acc: gl.tensor


@gluon.jit
def _mask_scores(x, value, position, MASK: gl.constexpr):
    """x where the rows see the keys, `value` elsewhere. Without a mask, most blocks have all of
    their keys and are returned as they are."""
    if MASK is not None or position.num_keys < x.shape[1]:
        x = gl.where(visible_keys(position, MASK, x.shape[1]), x, value)
    return x


@gluon.jit
def _fold(x, MAXIMUM: gl.constexpr):
    """Maxima or sums `[64, SUMS]` of the columns that are SUMS apart: within a thread, as a tree
    instead of one long chain."""
    if x.shape[1] == SUMS:
        return x
    else:
        left, right = halves(x)
        left, right = _fold(left, MAXIMUM), _fold(right, MAXIMUM)
        if MAXIMUM:
            return gl.maximum(left, right)
        else:
            return left + right


@gluon.jit
def _online_softmax(scores, position, state, scale, MASK: gl.constexpr, MASKED: gl.constexpr):
    """exp2(scores - running maximum), the new state without an update of acc, and the factor by
    which acc is to be rescaled."""
    row_max = state.row_max
    if MASKED:
        scores = _mask_scores(scores, float("-inf"), position, MASK)
    block_max = gl.convert_layout(gl.max(_fold(scores, True), 1), row_max.type.layout)
    new_max = gl.maximum(row_max, block_max * scale)
    shift = new_max
    # the maximum of a row that has seen no key is -inf; any finite number gives it weights of 0
    if MASKED:
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(scores * scale - shift[:, None])
    rescale = gl.exp2(row_max - shift)
    row_sum = state.row_sum * gl.convert_layout(
        rescale, gl.SliceLayout(1, state.row_sum.type.layout)
    )[:, None] + _fold(p, False)
    return p, SoftmaxState(new_max, row_sum, state.acc), rescale


@gluon.jit
def attention_weights(scores, position, state, scale, OPTIONS: gl.constexpr, MASKED: gl.constexpr):
    """P of a block's scores, the new state without an update of acc, and the factor by which
    softmax rescales acc."""
    if OPTIONS.activation is None:
        return _online_softmax(scores, position, state, scale, OPTIONS.mask, MASKED)
    else:
        p, _ = OPTIONS.activation(scores, scale)
        if MASKED:
            p = _mask_scores(p, 0.0, position, OPTIONS.mask)
        return p, state, state.row_max


@gluon.jit
def rescale_rows(acc, factor):
    """acc, a tuple of parts, times a factor per row."""
    return [x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None] for x in acc]


@gluon.jit
def log2_approx(x):
    """log2 by the special-function unit: error at most 2⁻²², absolute or relative."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )
