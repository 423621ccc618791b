"""What an attention call is given, as named fields: packed once, passed on whole. No triton import."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MaskParams(NamedTuple):
    """The fields of `AttentionMask` as integers, in the order in which the kernels and operators take them; -1: an open side.

    left, right: of the window. full_attn_len: min_full_attn_seqlen, 0 without max_attn_len.
    """

    causal: int
    left: int
    right: int
    has_targets: int
    group_size: int
    context: int
    max_attn_len: int
    full_attn_len: int


class AttentionParams(NamedTuple):
    """What is computed, in the order of the last arguments of the registered operators, of CPU and GPU.

    Attributes:
        scale: factor of q kᵀ.
        q_shared: every segment takes all rows of q; q_offsets count output rows.
        activation: a public name.
        mask: `MaskParams`, as a list at an operator's boundary; None: everything is visible.
        output_scale: factor of the output.
        batch_invariant: kernels, tiles and splits do not depend on the number of rows or segments.
        num_targets: `[B]`, if the mask has targets.
        segment_scale: fp32, one factor of the output for each segment of queries; takes the place of output_scale if not None.
    """

    scale: float
    q_shared: bool
    activation: str
    mask: MaskParams | list[int] | None
    output_scale: float
    batch_invariant: bool
    num_targets: Tensor | None
    segment_scale: Tensor | None


class Operands(NamedTuple):
    """q, k, v `[rows, heads, dim]`, the output, and with softmax its log-sum-exp `[H, rows]` in base 2. out is None where the backward does
    not read it."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    lse: Tensor


class Gradients(NamedTuple):
    """Of the output, the input of the backward; of q, k and v, its outputs; and delta = rowsum(dO ∘ O), which one kernel writes for the
    other."""

    do: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    delta: Tensor
