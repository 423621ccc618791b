"""What an attention call is given, as named fields: packed once, passed on whole. No triton import."""

from __future__ import annotations

from typing import NamedTuple


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
