"""Host side of RelativeBias in the kernels: arguments, and memory and final sums of the tables' gradients."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..common.configs import padded_dim
from .bias import LEADING, LEADING_SHIFT, PAD, Bias, TableSums
from .params import AttentionParams, empty_table_gradients

_PAD = PAD.value
_LARGEST = torch.iinfo(torch.int32).max


def kernel_bias(params: AttentionParams) -> Bias | None:
    """The bias of a call as a kernel argument."""
    if not params.has_bias:
        return None
    position, time, boundaries = params.position_bias, params.time_bias, params.boundaries
    edges = leading_bits = entries = None
    if boundaries is not None:
        edges, leading_bits, last = _bucket_tables(boundaries)
        entries = _entries(time, edges, leading_bits[:-1], last)
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
        edges_ptr=edges,
        leading_bits_ptr=leading_bits,
        entries_ptr=entries,
        entries_stride=None if entries is None else _head_stride(entries),
        timestamps_ptr=params.timestamps,
        query_timestamps_ptr=params.query_timestamps,
        query_shift_ptr=params.query_shift,
        inverse_scale=1 / params.scale,
    )


def _bucket_tables(boundaries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """edges and leading_bits of a `Bias`, and the last bucket for each value of the leading bits."""
    edges = pad(boundaries.clamp(max=_LARGEST), (0, 1), value=_LARGEST).int()
    lowest, highest = _ranges(boundaries.device)
    buckets = torch.searchsorted(boundaries, lowest, right=True, out_int32=True)
    last = torch.maximum(torch.searchsorted(boundaries, highest, right=True, out_int32=True), buckets)
    return edges, torch.cat([buckets, (last - buckets).amax(0, keepdim=True)]), last


def _entries(time: Tensor, edges: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """entries of a `Bias`, int32 `[H or 1, 4 · LEADING + 4]`, of a time table `[H or 1, buckets]`. first, last: buckets for each value of
    the leading bits."""
    edge = edges[first]
    one_boundary = ((edge == edges[(last - 1).clamp(min=0)]) | (first == last)).all()
    shared = torch.stack([edge, first | last << 16]).expand(time.shape[0], 2, -1)
    values = torch.stack([time[:, first], time[:, last]], 1).view(torch.int32)
    entries = torch.cat([shared[:, :1], values, shared[:, 1:]], 1).transpose(1, 2).flatten(1)
    return torch.cat([entries, one_boundary.int().expand(time.shape[0], 4)], 1)


@functools.cache
def _ranges(device: torch.device) -> tuple[Tensor, Tensor]:
    """The least and the greatest distance, int64 `[LEADING]`, that may have given leading bits. Rounding to fp32 may move a distance up, by
    2^-24 of itself, to the next bits; never down, as fp32 has every number at which bits begin. Bits of fractions have no distance: the
    greatest is below the least."""
    bits = torch.arange(LEADING.value + 1, dtype=torch.int32) << LEADING_SHIFT.value
    values = bits.view(torch.float32).double()
    lowest, highest = (values[:-1] * (1 - 2**-22)).ceil(), values[1:].ceil() - 1
    return lowest.long().to(device), highest.long().to(device)


def _head_stride(table: Tensor) -> int:
    return 0 if table.shape[0] == 1 else table.stride(0)


class TableGradients(NamedTuple):
    """Sums that the programs of a launch write, or their warpgroups or warps, each in its own part, so that their order is fixed."""

    position: Tensor | None
    time: Tensor | None
    scratch: Tensor | None

    @classmethod
    def empty(
        cls, params: AttentionParams, parts: int, device: torch.device, threads: int | None = None, block: int | None = None
    ) -> TableGradients:  # fmt: skip
        """Memory for a number of parts. threads: of a part, if each sums the time table alone. block: scores in a block of dS, if each part
        needs scratch memory."""
        position = time = scratch = None
        if params.position_bias is not None:
            heads, entries = params.position_bias.shape
            position = torch.zeros(parts, heads, entries + 2 * _PAD, device=device)
            scratch = None if block is None else torch.empty(parts, block, device=device)
        if params.time_bias is not None:
            heads, entries = params.time_bias.shape
            sizes = (padded_dim(entries),) if threads is None else (entries, threads)
            time = torch.zeros(parts, heads, *sizes, device=device)
        return cls(position, time, scratch)

    @property
    def buckets(self) -> int:
        """Entries of the time table in memory; 1 without one."""
        return 1 if self.time is None else self.time.shape[2]

    def argument(self) -> TableSums:
        """The kernel's argument."""
        position_stride, time_stride = (None if x is None else x.stride(0) for x in (self.position, self.time))
        time_head_stride = None if self.time is None else _head_stride(self.time[0])
        return TableSums(self.position, position_stride, self.time, time_stride, time_head_stride, self.scratch)

    def results(self, params: AttentionParams, like: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients in the shapes of the tables; `[0]` for a table without one."""
        dposition, dtime = empty_table_gradients(params, like)
        if self.position is not None:
            total = self.position.sum(0)
            if dposition.shape[1] == 1:
                dposition = total.sum(1, keepdim=True)
            else:  # the padding's sums belong to the first and last entries
                first, last = total[:, : _PAD + 1].sum(1, keepdim=True), total[:, -_PAD - 1 :].sum(1, keepdim=True)
                dposition = torch.cat([first, total[:, _PAD + 1 : -_PAD - 1], last], dim=1)
        if self.time is not None:
            total = self.time.sum(0 if self.time.dim() == 3 else (0, 3))
            dtime = total[:, : dtime.shape[1]].contiguous()
        return dposition, dtime
