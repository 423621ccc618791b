"""The bias argument of attention: its checks, and its place among the arguments of the registered
operators."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from jagged_kernels.attention.params import AttentionParams
from torch import Tensor

from ..bias import RelativeBias
from ..containers.jagged import Jagged
from ..scalars import check_kind
from ..segments import normal_form, values_are_checkable


class BiasSide(NamedTuple):
    """The queries or the keys of a bias. name, offsets_name: of the rows and of the segments in
    errors."""

    name: str
    rows: int
    offsets: Tensor
    offsets_name: str


def check_bias(
    bias: RelativeBias,
    device: torch.device,
    num_heads: int,
    owner: str,
    queries: BiasSide,
    keys: BiasSide,
) -> None:
    """Check the bias against the rows and, if their values may be read, the offsets. owner: of the
    device and the heads, such as "q's"."""
    check_kind("bias", bias, RelativeBias, "a RelativeBias")
    for field in dataclasses.fields(bias):
        x = getattr(bias, field.name)
        if x is not None and x.device != device:
            raise ValueError(
                f"bias.{field.name} must be on {owner} device, {device}, got {x.device}"
            )
    for name, table in (("position", bias.position), ("time", bias.time)):
        if table is not None and table.dim() == 2 and table.shape[0] != num_heads:
            raise ValueError(
                f"bias.{name} must have one row for each of {owner} {num_heads} heads, got"
                f" {table.shape[0]}"
            )
    for name, what, side, count in (
        ("timestamps", "row", keys, keys.rows),
        ("query_timestamps", "row", queries, queries.rows),
        ("query_shift", "segment", queries, queries.offsets.shape[0] - 1),
    ):
        x = getattr(bias, name)
        if x is not None and x.shape[0] != count:
            raise ValueError(
                f"bias.{name} must have one element for each {what} of {side.name}, {count}, got"
                f" {x.shape[0]}"
            )
    if bias.max_seqlen is None:
        return
    num_offsets = keys.offsets.shape[0]  # of the queries, those of the first group
    for side in (queries, keys):
        if values_are_checkable(side.offsets) and num_offsets > 1:
            longest = int(side.offsets[:num_offsets].diff().max())
            if longest > bias.max_seqlen:
                raise ValueError(
                    f"{side.offsets_name} must have segments of at most {bias.max_seqlen} rows,"
                    f" those of bias.position, got {longest}"
                )


def check_layer_bias(
    bias: RelativeBias, num_heads: int, queries: tuple[str, Jagged], keys: tuple[str, Jagged]
) -> None:
    """`check_bias` of a layer's containers, by their names in errors."""
    sides = (BiasSide(name, x.num_rows, x.offsets, name) for name, x in (queries, keys))
    check_bias(bias, queries[1].device, num_heads, "the layer's", *sides)


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
    """No view of a table that needs none: that takes time of the host."""
    return table if table.dim() == 2 else table.unsqueeze(0)
