"""The bias argument of attention: its checks, and its place among the arguments of the registered
operators."""

from __future__ import annotations

import torch
from jagged_kernels.attention.params import AttentionParams
from torch import Tensor

from ..bias import RelativeBias
from ..segments import normal_form, values_are_checkable


def check_bias(
    bias: RelativeBias,
    q: Tensor,
    kv_rows: int,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    q_name: str = "q",
    offsets_name: str = "q_offsets",
) -> None:
    """Check the bias against the operands and, if their values may be read, the offsets. q_name,
    offsets_name: of q and q_offsets in errors."""
    num_segments = q_offsets.shape[0] - 1
    for name in ("position", "time", "timestamps", "boundaries", "query_timestamps", "query_shift"):
        x = getattr(bias, name)
        if x is not None and x.device != q.device:
            raise ValueError(
                f"bias.{name} must be on {q_name}'s device, {q.device}, got {x.device}"
            )
    for name, table in (("position", bias.position), ("time", bias.time)):
        if table is not None and table.dim() == 2 and table.shape[0] != q.shape[1]:
            raise ValueError(
                f"bias.{name} must have one row for each of {q_name}'s {q.shape[1]} heads, got"
                f" {table.shape[0]}"
            )
    for name, owner, rows in (
        ("timestamps", "k", kv_rows),
        ("query_timestamps", q_name, q.shape[0]),
    ):
        x = getattr(bias, name)
        if x is not None and x.shape[0] != rows:
            raise ValueError(
                f"bias.{name} must have one element for each of {owner}'s rows, {rows}, got"
                f" {x.shape[0]}"
            )
    if bias.query_shift is not None and bias.query_shift.shape[0] != num_segments:
        raise ValueError(
            f"bias.query_shift must have shape [B] = [{num_segments}], got"
            f" {list(bias.query_shift.shape)}"
        )
    if bias.max_seqlen is None:
        return
    num_offsets = kv_offsets.shape[0]  # of the queries, those of the first group
    for name, offsets in ((offsets_name, q_offsets), ("kv_offsets", kv_offsets)):
        if values_are_checkable(offsets) and num_offsets > 1:
            longest = int(offsets[:num_offsets].diff().max())
            if longest > bias.max_seqlen:
                raise ValueError(
                    f"{name} must have segments of at most {bias.max_seqlen} rows, those of"
                    f" bias.position, got {longest}"
                )


def with_bias(params: AttentionParams, bias: RelativeBias, dtype: torch.dtype) -> AttentionParams:
    """params with the bias, its tables `[H or 1, entries]` in fp32; in fp64 with fp64 operands."""
    dtype = torch.promote_types(dtype, torch.float32)
    position, time = (
        None if x is None else _by_head(x.to(dtype).contiguous())
        for x in (bias.position, bias.time)
    )
    others = bias.timestamps, bias.boundaries, bias.query_timestamps, bias.query_shift
    timestamps, boundaries, query_timestamps, query_shift = (
        None if x is None else normal_form(x, x.device) for x in others
    )
    return params._replace(
        table_gradients=any(x is not None and x.requires_grad for x in (position, time)),
        position_bias=position,
        time_bias=time,
        timestamps=timestamps,
        boundaries=boundaries,
        query_timestamps=query_timestamps,
        query_shift=query_shift,
    )


def _by_head(table: Tensor) -> Tensor:
    return table if table.dim() == 2 else table.unsqueeze(0)
