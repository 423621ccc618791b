"""Host side of RelativeBias in the kernels: arguments, and memory and final sums of the tables' gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..common.configs import padded_dim
from .bias import PAD, Bias, TableSums
from .params import AttentionParams

_PAD = PAD.value


def kernel_bias(params: AttentionParams) -> Bias | None:
    """The bias of a call as a kernel argument."""
    if not params.has_bias:
        return None
    position, time, boundaries = params.position_bias, params.time_bias, params.boundaries
    if position is not None:
        position = pad(position, (_PAD, _PAD), mode="replicate")
    return Bias(
        position_ptr=position,
        position_stride=None if position is None else _head_stride(position),
        num_positions=None if position is None else position.shape[1],
        time_ptr=time,
        time_stride=None if time is None else _head_stride(time),
        boundaries_ptr=boundaries,
        num_boundaries=None if boundaries is None else boundaries.shape[0],
        timestamps_ptr=params.timestamps,
        query_timestamps_ptr=params.query_timestamps,
        query_shift_ptr=params.query_shift,
        inverse_scale=1 / params.scale,
    )


def _head_stride(table: Tensor) -> int:
    return 0 if table.shape[0] == 1 else table.shape[1]


class TableGradients(NamedTuple):
    """Sums that the programs of a launch write, or their warpgroups or warps, each in its own part, so that their order is fixed."""

    position: Tensor | None
    time: Tensor | None
    scratch: Tensor | None

    @classmethod
    def empty(
        cls, params: AttentionParams, parts: int, device: torch.device, time_parts: int | None = None, block: int | None = None
    ) -> TableGradients:  # fmt: skip
        """Memory for a number of parts. time_parts: of the time table, if it has another number. block: scores in a block of dS, if each part
        needs scratch memory."""
        if not params.table_gradients:
            return cls(None, None, None)
        position = time = scratch = None
        if params.position_bias is not None:
            heads, entries = params.position_bias.shape
            position = torch.zeros(parts, heads, entries + 2 * _PAD, device=device)
            scratch = None if block is None else torch.empty(parts, block, device=device)
        if params.time_bias is not None:
            heads, entries = params.time_bias.shape
            time = torch.zeros(parts if time_parts is None else time_parts, heads, padded_dim(entries), device=device)
        return cls(position, time, scratch)

    @property
    def buckets(self) -> int:
        """Entries of the time table in memory; 1 if only the position table has a gradient, 0 if none has."""
        if self.time is not None:
            return self.time.shape[2]
        return 0 if self.position is None else 1

    def argument(self) -> TableSums | None:
        """The kernel's argument; None without a gradient."""
        if self.position is None and self.time is None:
            return None
        position_stride, time_stride = (None if x is None else x.stride(0) for x in (self.position, self.time))
        time_head_stride = None if self.time is None else _head_stride(self.time[0])
        return TableSums(self.position, position_stride, self.time, time_stride, time_head_stride, self.scratch)

    def results(self, params: AttentionParams, like: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients in the shapes of the tables; `[0]` for a table without one."""
        dposition, dtime = empty_table_gradients(params, like)
        if self.position is not None:
            total = self.position.sum(0)
            dposition.copy_(total[:, _PAD:-_PAD])
            dposition[:, 0] += total[:, :_PAD].sum(1)
            dposition[:, -1] += total[:, -_PAD:].sum(1)
        if self.time is not None:
            dtime.copy_(self.time.sum(0)[:, : dtime.shape[1]])
        return dposition, dtime


def empty_table_gradients(params: AttentionParams, like: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors of the shapes of the tables' gradients; `[0]` for a table that gets none."""
    tables = (params.position_bias, params.time_bias) if params.table_gradients else (None, None)
    dposition, dtime = (like.new_empty(0, dtype=torch.float32) if table is None else torch.empty_like(table) for table in tables)
    return dposition, dtime
