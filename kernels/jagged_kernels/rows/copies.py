"""Copies of rows for a GEMM: another launch of the kernel that clears rows behind the last
segment."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.configs import padded_dim
from ..common.device import cdiv, contiguous_last_dim, row_strides, zeroed_behind
from ..common.ops import on_the_tensors_device
from ..common.tail import KeptRows, keep_rows_kernel, kept_rows


@on_the_tensors_device
def copied_rows(
    x: Tensor, offsets: Tensor | None, dtype: torch.dtype, num_rows: int, extra: int
) -> Tensor:
    """x `[rows, columns]` in another dtype, with 0 from offsets[-1] on; without offsets, behind its
    own rows.

    Args:
        num_rows: of the copy, at least those of x.
        extra: columns behind those of x, with 1, 0, 0, ...; 0 or 1 in the rows that x does not
            have.
    """
    rows, size = x.shape
    out = x.new_empty(num_rows, size + extra, dtype=dtype)
    if offsets is None:
        return kept_rows(x, None, dtype, extra, out=zeroed_behind(out, rows))
    x, columns = contiguous_last_dim(x), min(padded_dim(size), 1024)
    height, (align, (stride,)) = 4096 // columns, row_strides(x)
    # It reads no row from offsets[-1] on, so the copy may have more rows.
    keep_rows_kernel[(cdiv(num_rows, height) * cdiv(size, columns),)](
        KeptRows(x, None, None, offsets, out), offsets.shape[0] - 1, num_rows, stride,
        SIZE=size, EXTRA=extra, WIDTH=size + extra, ALIGN=align, ROWS=height, COLUMNS=columns,
        num_warps=4,
    )  # fmt: skip
    return out
