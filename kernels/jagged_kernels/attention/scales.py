"""Device functions of attention's scales, for the portable and the Hopper kernels."""

import triton
import triton.language as tl

from ..common.activations import LOG2_E


@triton.jit
def score_factor(scale, ACTIVATION: tl.constexpr):
    """Factor of q kᵀ. Softmax takes exponentials in base 2."""
    if ACTIVATION is None:
        return scale * LOG2_E
    else:
        return scale


@triton.jit
def output_factor(output_scale, segment_scale_ptr, segment):
    """The output scale, or the segment's own if there is a segment_scale_ptr."""
    if segment_scale_ptr is None:
        return output_scale
    else:
        return tl.load(segment_scale_ptr + segment)
