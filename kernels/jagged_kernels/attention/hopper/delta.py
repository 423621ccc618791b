"""delta = rowsum(dO ∘ O), which softmax's backward subtracts from dP, for the kernel of all
gradients. The dq kernel and that of short queries compute it themselves."""

import triton
import triton.language as tl
from torch import Tensor

from ...common.configs import padded_dim
from ...common.device import cdiv
from ...common.ptxas import safe_ptxas


@safe_ptxas
@triton.jit(do_not_specialize=["num_rows", "stride_delta"])
def attention_delta_kernel(
    do_ptr, out_ptr, delta_ptr, num_rows, stride_row, stride_head, stride_delta,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO ∘ O), of a block of rows of a head."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (columns < DIM)[None, :]
    do = tl.load(
        do_ptr + rows[:, None] * stride_row + head * stride_head + columns[None, :],
        mask=mask,
        other=0.0,
    )
    out = tl.load(
        out_ptr + (rows[:, None] * HEADS + head) * DIM + columns[None, :], mask=mask, other=0.0
    )
    tl.store(
        delta_ptr + head * stride_delta + rows,
        tl.sum(do.to(tl.float32) * out.to(tl.float32), 1),
        mask=rows < num_rows,
    )


def write_delta(do: Tensor, out: Tensor, delta: Tensor) -> None:
    """Launch attention_delta_kernel; `out` contiguous, `delta` `[H, rows]`."""
    rows, heads, dim = do.shape
    attention_delta_kernel[(cdiv(rows, 64), heads)](
        do,
        out,
        delta,
        rows,
        do.stride(0),
        do.stride(1),
        delta.stride(0),
        HEADS=heads,
        DIM=dim,
        BLOCK_D=padded_dim(dim),
        ROWS=64,
    )
