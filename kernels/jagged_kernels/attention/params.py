"""The arguments of an attention call as named tuples. No triton import."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..common.configs import padded_dim
from ..schedule.cost import MaskParams


class BiasKind(NamedTuple):
    """What a RelativeBias has, as a constant of a launch. boundaries: a power of 2 not below their
    number; 0 without a time table."""

    position: bool
    boundaries: int
    query_times: bool
    shift: bool


class AttentionParams(NamedTuple):
    """What is computed. The fields are the last arguments of the registered operators of CPU and
    GPU, in their order.

    Attributes:
        scale: factor of q kᵀ.
        q_shared: every segment takes all rows of q; q_offsets count output rows.
        activation: a public name.
        mask: `MaskParams`, as a list at an operator's boundary; None: everything is visible.
        output_scale: factor of the output.
        batch_invariant: kernels, tiles and splits do not depend on the number of rows or segments.
        table_gradients: the backward also computes the gradients of position_bias and time_bias.
        num_targets: `[B]`, if the mask has targets.
        segment_scale: fp32, one factor of the output for each segment of queries; replaces
            output_scale if not None.
        position_bias, time_bias, timestamps, boundaries, query_timestamps, query_shift: the fields
            of `RelativeBias`. Tables are `[H or 1, entries]`, in fp32, or fp64 with fp64 operands.
            None without them.
    """

    scale: float
    q_shared: bool
    activation: str
    mask: MaskParams | list[int] | None
    output_scale: float
    batch_invariant: bool
    table_gradients: bool
    num_targets: Tensor | None
    segment_scale: Tensor | None
    position_bias: Tensor | None = None
    time_bias: Tensor | None = None
    timestamps: Tensor | None = None
    boundaries: Tensor | None = None
    query_timestamps: Tensor | None = None
    query_shift: Tensor | None = None

    @property
    def has_bias(self) -> bool:
        return self.position_bias is not None or self.time_bias is not None

    @property
    def bias_kind(self) -> BiasKind | None:
        if not self.has_bias:
            return None
        boundaries = 0 if self.time_bias is None else padded_dim(self.time_bias.shape[1] - 1)
        return BiasKind(
            self.position_bias is not None,
            boundaries,
            self.query_timestamps is not None,
            self.query_shift is not None,
        )


class Operands(NamedTuple):
    """q, k, v and out `[rows, heads, dim]`, and with softmax the log-sum-exp of the scores in base
    2, `[H, rows]`. out is None if the backward does not read it."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    lse: Tensor


class Gradients(NamedTuple):
    """do: gradient of the output. dq, dk, dv: the backward's results. delta: rowsum(dO ∘ O), which
    one kernel writes, another reads."""

    do: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    delta: Tensor


def empty_table_gradients(params: AttentionParams, like: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors of the shapes of the tables' gradients; `[0]` for a table that gets none."""
    if not params.table_gradients:
        return like.new_empty(0), like.new_empty(0)
    tables = params.position_bias, params.time_bias
    dposition, dtime = (
        like.new_empty(0) if table is None else torch.empty_like(table) for table in tables
    )
    return dposition, dtime
