"""Checks of the bias that a caller gives a layer."""

from __future__ import annotations

import dataclasses

from ..bias import RelativeBias
from ..containers.jagged import Jagged
from ..scalars import check_kind
from ..segments import values_are_checkable


def check_layer_bias(
    bias: RelativeBias, x: Jagged, keys: Jagged, keys_name: str, num_heads: int, x_name: str = "x"
) -> None:
    """Check the bias against the containers, by their names in the caller's code."""
    check_kind("bias", bias, RelativeBias, "a RelativeBias")
    device = x.values.device
    for field in dataclasses.fields(bias):
        tensor = getattr(bias, field.name)
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"bias.{field.name} must be on the layer's device, {device}, got {tensor.device}"
            )
    for name, table in (("position", bias.position), ("time", bias.time)):
        if table is not None and table.dim() == 2 and table.shape[0] != num_heads:
            raise ValueError(
                f"bias.{name} must have one row for each of the layer's {num_heads} heads,"
                f" got {table.shape[0]}"
            )
    for name, times, owner, rows in (
        ("timestamps", bias.timestamps, keys_name, keys.num_rows),
        ("query_timestamps", bias.query_timestamps, x_name, x.values.shape[0]),
        ("query_shift", bias.query_shift, x_name, x.num_segments),
    ):
        if times is not None and times.shape[0] != rows:
            what = "segment" if name == "query_shift" else "row"
            raise ValueError(
                f"bias.{name} must have one element for each {what} of {owner}, {rows}, got"
                f" {times.shape[0]}"
            )
    for name, offsets in ((x_name, x.offsets), (keys_name, keys.offsets)):
        if bias.max_seqlen is None or not values_are_checkable(offsets) or offsets.shape[0] < 2:
            continue
        longest = int(offsets.diff().max())
        if longest > bias.max_seqlen:
            raise ValueError(
                f"bias.position has entries for {bias.max_seqlen} rows, but {name} has a"
                f" segment of {longest} rows"
            )
