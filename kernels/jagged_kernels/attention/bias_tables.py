"""Host side of RelativeBias in the kernels: arguments, and memory and final sums of the tables'
gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..common.configs import padded_dim
from ..common.device import cdiv
from .bias import LEADING, PAD, TIME_BLOCK, TIME_RECORD, Bias, TableSums
from .bias_kernels import PADDED, SUMMED, bias_tables_kernel, sum_tables_kernel
from .params import AttentionParams, Segments, empty_table_gradients

_PAD = PAD.value


def kernel_bias(
    params: AttentionParams, segments: Segments | None = None, q_rows: int = 0
) -> Bias | None:
    """The bias of a call as a kernel argument. One launch makes its tables. segments, q_rows: for
    Hopper's kernels, which read entries and extremes too, unless buckets are stored."""
    if not params.has_bias:
        return None
    if params.buckets is not None:
        segments = None
    position, time, boundaries = params.position_bias, params.time_bias, params.boundaries
    padded = (
        None
        if position is None
        else position.new_empty((position.shape[0], position.shape[1] + 2 * _PAD))
    )
    edges = leading_bits = entry_table = divided = query_extremes = key_extremes = q_offsets = (
        kv_offsets
    ) = None
    if boundaries is not None:
        divided = time.new_empty(time.shape)
        edges = boundaries.new_empty(boundaries.shape[0] + 1, dtype=torch.int32)
        leading_bits = boundaries.new_empty(LEADING.value + 1, dtype=torch.int32)
        if segments is not None:
            entry_table = boundaries.new_empty(
                (time.shape[0], 4 * LEADING.value + 4), dtype=torch.int32
            )
            q_offsets, kv_offsets = segments.q_offsets, segments.kv_offsets
            rows = q_rows, params.timestamps.shape[0]
            query_extremes, key_extremes = (
                boundaries.new_empty(x // TIME_BLOCK.value + q_offsets.shape[0], TIME_RECORD.value)
                for x in rows
            )
    bias = Bias(
        position_ptr=padded,
        position_stride=_head_stride(padded),
        num_positions=None if padded is None else padded.shape[1],
        time_ptr=divided,
        time_stride=_head_stride(divided),
        boundaries_ptr=boundaries,
        num_boundaries=None if boundaries is None else boundaries.shape[0],
        edges_ptr=edges,
        leading_bits_ptr=leading_bits,
        entries_ptr=entry_table,
        entries_stride=_head_stride(entry_table),
        timestamps_ptr=params.timestamps,
        query_timestamps_ptr=params.query_timestamps,
        query_shift_ptr=params.query_shift,
        query_extremes_ptr=query_extremes,
        key_extremes_ptr=key_extremes,
        first_blocks_ptr=params.first_blocks,
    )
    time_programs = 0 if boundaries is None else time.shape[0]
    padding_programs = (
        0 if padded is None else padded.shape[0] * cdiv(padded.shape[1], PADDED.value)
    )
    segment_programs = 0 if q_offsets is None else q_offsets.shape[0] - 1
    bits = 0 if boundaries is None else boundaries.shape[0].bit_length()
    bias_tables_kernel[(time_programs + padding_programs + segment_programs,)](
        position, time, q_offsets, kv_offsets, segments and segments.segments_per_group, bias,
        1 / params.scale, time_programs, padding_programs,
        BITS=bits, KIND=params.bias_kind, num_warps=8,
    )  # fmt: skip
    return bias


def _head_stride(table: Tensor | None) -> int | None:
    """Elements from one head's row to the next, 0 if heads share it; None without a table."""
    if table is None:
        return None
    return 0 if table.shape[0] == 1 else table.stride(0)


class TableGradients(NamedTuple):
    """Sums that the programs of a launch write, or their warpgroups, each in its own part, so that
    their order is fixed.

    position: `[parts, H or 1, entries + 2 · PAD]`. time: `[parts, H or 1, entries, threads]`;
    without threads, one of each of the entries, padded to a power of two. scratch:
    `[parts, scores of a block]`.
    """

    position: Tensor | None
    time: Tensor | None
    scratch: Tensor | None

    @classmethod
    def empty(
        cls,
        params: AttentionParams,
        parts: int,
        device: torch.device,
        threads: int | None = None,
        block: int | None = None,
    ) -> TableGradients:
        """Memory for a number of parts. threads: of a part, if each sums the time table alone.
        block: scores in a block of dS, if each part needs scratch memory."""
        position = time = scratch = None
        if params.position_bias is not None:
            heads, entries = params.position_bias.shape
            position = torch.zeros(
                parts, heads, entries + 2 * _PAD, dtype=torch.float32, device=device
            )
            scratch = (
                None
                if block is None
                else torch.empty(parts, block, dtype=torch.float32, device=device)
            )
        if params.time_bias is not None:
            heads, entries = params.time_bias.shape
            sizes = (padded_dim(entries), 1) if threads is None else (entries, threads)
            time = torch.zeros(parts, heads, *sizes, dtype=torch.float32, device=device)
        return cls(position, time, scratch)

    @property
    def buckets(self) -> int:
        """Entries of the time table in memory; 1 without one."""
        return 1 if self.time is None else self.time.shape[2]

    def argument(self) -> TableSums:
        """The kernel's argument."""
        position_stride, time_stride = (
            None if x is None else x.stride(0) for x in (self.position, self.time)
        )
        time_head_stride = (
            None if self.time is None else 0 if self.time.shape[1] == 1 else self.time.stride(1)
        )
        return TableSums(
            self.position, position_stride, self.time, time_stride, time_head_stride, self.scratch
        )

    def results(self, params: AttentionParams, like: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients in the shapes of the tables, by one launch; `[0]` for a table without one."""
        dposition, dtime = empty_table_gradients(params, like)
        num_positions = dposition.shape[-1]
        num_buckets = dtime.shape[-1]
        threads = 1 if self.time is None else self.time.shape[3]
        position_programs = dposition.shape[0] * cdiv(num_positions, SUMMED.value)
        time_programs = dtime.shape[0] * (
            cdiv(num_buckets, SUMMED.value) if threads == 1 else num_buckets
        )
        parts = (self.time if self.position is None else self.position).shape[0]
        sum_tables_kernel[(position_programs + time_programs,)](
            self.argument(), dposition, num_positions, dtime, num_buckets, position_programs, parts,
            BUCKETS=self.buckets, THREADS=threads, num_warps=16,
        )  # fmt: skip
        return dposition, dtime
