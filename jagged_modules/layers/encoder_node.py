"""JaggedEncoderLayer as one autograd node: the attention of `gdpa_node.py` and the feed-forward
network of `mlp_node.py`, each with a norm and a residual around it, as `residual_node.py` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jagged_kernels.rows.configs import MAX_WIDTH
from torch import Tensor, nn

from ..containers.jagged import Jagged
from ..functional.nodes import apply, differentiable_once
from .gdpa import JaggedGDPA
from .gdpa_node import (
    GDPACall,
    NodeInputs,
    attention_part,
    attention_part_gradients,
    gdpa_dtype,
    node_arguments,
)
from .mlp_node import (
    FeedForward,
    SavedFeedForward,
    feed_forward,
    feed_forward_gradients,
    kernels_activation,
)
from .norms import NormOptions, RMSNorm, RowNorm, norm_parameters
from .one_node import bias_columns, in_training, node_dtype, parameters_of
from .residual_node import Around, Residual, Stream, residual_gradients, with_residual

if TYPE_CHECKING:
    from .encoder import JaggedEncoderLayer

QUERIES = "queries"  # norm_first of SASRec's layers


class EncoderCall(NamedTuple):
    """What the node computes. residual: around the network."""

    attention: GDPACall
    network: FeedForward
    residual: Residual


def encoder_dtype(layer: JaggedEncoderLayer, x: Tensor) -> torch.dtype | None:
    """The dtype in which `encoder_node` computes the layer's result for x, by the modules'
    parameters; None where these are called."""
    attention, norms = layer.attention, (layer.norm1, layer.norm2)
    if type(attention) is not JaggedGDPA or type(layer.dropout) is not nn.Dropout:
        return None
    if any([type(norm) not in (RowNorm, RMSNorm) for norm in norms]):
        return None
    if any([x is None for x in parameters_of(*norms)]):
        return None
    dtype = gdpa_dtype(attention, x, None, attention, layer.dropout, *norms)
    is_one = layer.embedding_dim <= MAX_WIDTH
    return dtype if is_one and dtype == node_dtype(x, (layer.linear1, layer.linear2)) else None


def encoder_node(
    layer: JaggedEncoderLayer, rows: Jagged, num_targets: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The layer's result `[L, E]`, in the dtype that its modules give."""
    x, norm1, norm2, dropout = rows.values, layer.norm1, layer.norm2, layer.dropout
    attention, of_dropout = layer.attention, in_training(dropout, dropout.p)

    def residual(norm: nn.Module, columns: int, is_joined: bool) -> Residual:
        is_wide = torch.is_autocast_enabled(x.device.type) and type(norm) is RowNorm
        result = torch.float32 if is_wide else None  # as autocast's layer norm
        options = NormOptions.of(norm)
        placed = bool(layer.norm_first), result, of_dropout, columns, is_joined, of_norm
        return Residual(dtype, options, *placed)

    of_norm = layer.norm_first == QUERIES
    context = rows.with_values(x) if of_norm else None  # the node takes x once
    around = residual(norm1, 0 if of_norm else bias_columns(x, dtype), not layer.norm_first)
    sides = attention._sides(rows, context, num_targets, dtype)  # pyright: ignore[reportPrivateUsage]
    sides = sides._replace(context=None)
    *inputs, of_attention = node_arguments(attention, x, norm1, dtype, sides, around)
    linears = layer.linear1, layer.linear2
    parameters = parameters_of(*linears)
    network = FeedForward(*kernels_activation(layer.activation), of_dropout)
    call = EncoderCall(of_attention, network, residual(norm2, 0, bool(layer.norm_first)))
    return apply(_Node, *inputs, *norm_parameters(norm2), *parameters, call)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, call = arguments
        count = len(NodeInputs._fields)
        x, of_attention = attention_part(ctx, NodeInputs(*inputs[:count]), call.attention)
        y, of_network = _network(ctx, x, inputs[count:], call)
        ctx.save_for_backward(*of_network, *of_attention)
        return y.joined(call.attention.ends[0])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        around, saved = Around.first_of(ctx.saved_tensors)
        count = len(SavedFeedForward._fields)
        network, of_attention = SavedFeedForward(*saved[:count]), saved[count:]
        kept = Around.first_of(of_attention)[0].kept
        dx, of_network = _network_gradients(ctx, Stream(dy), around, network, kept)
        count = len(NodeInputs._fields)
        if dx is None:
            return *[None] * count, *of_network, None
        return *attention_part_gradients(ctx, dx, of_attention), *of_network, None


def _network(
    ctx: Any, x: Stream, inputs: Sequence[Any], call: EncoderCall
) -> tuple[Stream, list[Tensor | None]]:
    """The layer's result for that of the attention, and what `_network_gradients` reads. inputs:
    weight and bias, which may be None, of the network's norm and of its linears."""
    ctx.network, ctx.network_residual = call[1:]
    trains, end = any(ctx.needs_input_grad), call.attention.ends[0]

    def part(rows: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        return feed_forward(rows, inputs[2:], call.network, trains)

    norm = inputs[0], inputs[1]
    y, around, saved = with_residual(x, norm, call.residual, end, trains, part)
    return y, [*around, *saved]


def _network_gradients(
    ctx: Any, dy: Stream, around: Around, saved: SavedFeedForward, kept: Tensor | None
) -> tuple[Stream | None, tuple[Tensor | None, ...]]:
    """Of the attention's result, of which dropout kept this, and of the inputs of `_network`."""
    count = len(NodeInputs._fields)
    of_attention = any(ctx.needs_input_grad[:count])
    of_network = ctx.needs_input_grad[count:-1]  # as inputs of `_network`

    def part(
        dy: Tensor, sums: Tensor | None, of_rows: bool
    ) -> tuple[Tensor | None, None, tuple[Tensor | None, ...]]:
        wanted = of_rows, *of_network[2:]
        drows, others = feed_forward_gradients(dy, sums, saved, ctx.network, wanted, ctx.dtype)
        return drows, None, others

    needs = of_attention, any(of_network[:2])
    given = around, ctx.network_residual, needs, part, kept
    dx, of_norm, others = residual_gradients(dy, *given)
    return dx, (*of_norm, *others)
