"""What the kernels of block attention take besides q, k and v."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RotaryParams(NamedTuple):
    """Rotary embedding of q and k. cos, sin: `[P, D / 2]` fp32, contiguous, or None without rotary.
    positions: `[L]`, or None for positions counted from the segments' starts. rotate_v: v is
    rotated too. linear: angles are linear in the position. precise: the Hopper kernels keep rotated
    bf16 operands in fp16, each tile scaled by a power of two."""

    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor | None
    rotate_v: bool
    linear: bool
    precise: bool

    @property
    def kind(self) -> str:
        """ "none"; "relative": positions may be counted from a tile's first row, as scores depend
        on differences alone; "absolute"."""
        if self.cos is None:
            return "none"
        if self.linear and self.positions is None and not self.rotate_v:
            return "relative"
        return "absolute"

    @property
    def num_positions(self) -> int:
        return 0 if self.cos is None else self.cos.shape[0]


class BlockAttentionParams(NamedTuple):
    """offsets: `[B + 1]`. block_size: a power of two. implementation: "triton", "hopper", or
    "auto", which prefers Hopper's kernels. batch_invariant: "auto" chooses the same kernels for a
    single row as for many, and dropout counts rows from their block's start. clear_tail: write 0 to
    the rows behind the last segment; False: there are none. dropout_p, dropout_seed: of
    `AttentionParams`; a block is a segment."""

    offsets: Tensor
    rotary: RotaryParams
    block_size: int
    scale: float
    implementation: str
    batch_invariant: bool
    clear_tail: bool
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
