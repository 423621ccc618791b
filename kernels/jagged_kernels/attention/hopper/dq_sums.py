"""The fp32 sums of dq of Hopper's one-pass backward (one_pass.py), and the kernel that
rounds them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.configs import padded_dim
from ...common.loads import find_tile
from ...common.pipeline import TensorDescriptor, descriptor
from ...common.ptxas import safe_ptxas
from ..params import Segments
from ..scales import output_factor


class Options(NamedTuple):
    """Constants of a launch. stride: of the rows of dq. width: of a row of the sums, head dims
    padded to a power of 2. block: rows of a block, 2^shift."""

    stride: int
    dim: int
    width: int
    block: int
    shift: int


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "num_blocks"])
def attention_dq_kernel(
    sums_ptr, added_ptr, dq_ptr, q_offsets_ptr, segment_scale_ptr, factor, output_scale,
    num_segments, num_blocks, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Writes dq of a block of query rows and a head: its sum, rounded; 0 if no tile of keys visits
    it. OPTIONS.stride: of the rows of dq."""
    WIDTH: tl.constexpr = OPTIONS.width
    index = tl.program_id(0) + (tl.load(q_offsets_ptr) >> OPTIONS.shift).to(tl.int32)
    head = tl.program_id(1)
    segment, start, num_rows, first = find_tile(index, q_offsets_ptr, num_segments, OPTIONS.shift)
    if first < num_rows:
        added = tl.load(added_ptr + head * num_blocks + index)
        rows, columns = tl.arange(0, OPTIONS.block)[:, None], tl.arange(0, WIDTH)[None, :]
        real = (first + rows < num_rows) & (columns < OPTIONS.dim)
        block_ptr = sums_ptr + (head.to(tl.int64) * num_blocks + index) * (OPTIONS.block * WIDTH)
        sums = block_ptr + rows * WIDTH + columns
        dq = tl.load(sums, mask=real & (added > 0), other=0.0)
        dq *= factor * output_factor(output_scale, segment_scale_ptr, segment)
        row = (start + first + rows) * OPTIONS.stride
        tl.store(dq_ptr + row + head * OPTIONS.dim + columns, dq, mask=real)


class DqSums(NamedTuple):
    """The sums of dq over tiles of keys, before they are rounded. Each segment begins with a block
    of its own.

    Attributes:
        sums: fp32 `[H, blocks, rows, width]`, not initialised.
        added: int32 `[H · blocks]`, the number of tiles added to each block; zeros.
        next_tile: int32 `[1]`, the number of tiles taken from the list; zero.
    """

    sums: Tensor
    added: Tensor
    next_tile: Tensor

    @classmethod
    def empty(cls, q: Tensor, num_segments: int, block: int) -> DqSums:
        """For the rows of q, in blocks of `block` rows."""
        heads, num_blocks, _, _ = shape = cls._shape(q, num_segments, block)
        # both begin at 16-byte boundaries, as kernels are compiled for one alignment
        counters = torch.zeros(4 + heads * num_blocks, dtype=torch.int32, device=q.device)
        next_tile, added = counters[:1], counters[4:]
        return cls(torch.empty(shape, dtype=torch.float32, device=q.device), added, next_tile)

    @classmethod
    def num_bytes(cls, q: Tensor, num_segments: int, block: int) -> int:
        """The memory that `empty` takes for the sums."""
        return 4 * math.prod(cls._shape(q, num_segments, block))

    @staticmethod
    def _shape(q: Tensor, num_segments: int, block: int) -> tuple[int, int, int, int]:
        num_rows, heads, dim = q.shape
        return heads, num_rows // block + num_segments + 1, block, max(64, padded_dim(dim))

    @property
    def num_blocks(self) -> int:
        return self.sums.shape[1]

    def descriptor(self) -> TensorDescriptor:
        """For TMA stores and additions of 64 rows and 64 columns."""
        return descriptor(self.sums.flatten(1, 2), 1, 64, 64)

    def write(
        self,
        dq: Tensor,
        segments: Segments,
        segment_scale: Tensor | None,
        factor: float,
        output_scale: float,
    ) -> None:
        """Launch attention_dq_kernel."""
        heads, num_blocks, block, width = self.sums.shape
        attention_dq_kernel[(num_blocks, heads)](
            *(self.sums, self.added, dq, segments.q_offsets, segment_scale, factor, output_scale),
            *(segments.q_offsets.shape[0] - 1, num_blocks),
            OPTIONS=Options(dq.stride(0), dq.shape[2], width, block, block.bit_length() - 1),
        )
