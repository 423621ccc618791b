"""Plain torch definitions of the operators: any device and floating dtype, differentiable. The oracle of every test."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, *, scale: float, q_shared: bool = False
) -> Tensor:
    """softmax(scale · q kᵀ) v per segment and head; see `functional.jagged_attention` for shapes. A row without keys gives 0.

    `q_shared`: every segment takes all rows of q, and q_offsets count output rows.
    """
    group = q.shape[1] // k.shape[1]
    outputs = []
    for q_rows, kv_rows in zip(segments(q_offsets, q_shared), segments(kv_offsets), strict=True):
        keys, values = (x[kv_rows].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[q_rows], keys) * scale
        p = torch.softmax(scores, dim=-1)
        outputs.append(torch.einsum("hij,jhd->ihd", p, values))
    return torch.cat(outputs)


def segments(offsets: Tensor, shared: bool = False) -> list[slice]:
    """Row slice of each segment; of the one shared block of rows, once per segment, if `shared`. An empty one if there is none."""
    bounds = offsets.tolist() if offsets.shape[0] > 1 else [0, 0]
    return [slice(0, end - start) if shared else slice(start, end) for start, end in zip(bounds, bounds[1:])]
