"""DIN's attention as one autograd node, above the operators of the kernels and of the CPU path.

With Dice in training, the mean and the variance of each hidden layer depend on all pairs. The
forward computes them layer by layer. The backward sums, from the last layer to the first, what
batch norm's gradient needs (Ioffe and Szegedy 2015): with g the gradient of n = (z - mean) · rstd
and N pairs, that of z is rstd (g - Σ g / N - n Σ (g n) / N). The last two terms are d0 and d1 of
the layer's table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cpu.buckets import compute_dtype
from ..cpu.din import din_attention_backward_cpu, din_attention_cpu, din_moments_cpu
from ..unit_activations import UnitParameters, UnitTable
from .nodes import apply


class DINOperators(NamedTuple):
    """The operators of an implementation."""

    forward: Callable[..., Any]
    moments: Callable[..., Any]
    backward: Callable[..., Any]


def operators(kernels: bool) -> DINOperators:
    """Those of the kernels, or of the CPU path."""
    if not kernels:
        return DINOperators(din_attention_cpu, din_moments_cpu, din_attention_backward_cpu)
    from jagged_kernels.din import op

    return DINOperators(op.triton_din, op.triton_din_moments, op.triton_din_backward)


class DINCall(NamedTuple):
    """What the node computes, besides its tensors. segments, mask: as the operators take them.
    layers: hidden ones. uses_batch: whether Dice takes the statistics of the batch, which have
    gradients."""

    segments: list[Tensor | None]
    activation: str
    softmax: bool
    layers: int
    kernels: bool
    uses_batch: bool
    mask: list[int] | None


class DINTensors(NamedTuple):
    """What may have gradients: q, k, a, b (kernels: its weight), and v unless it is k; weights
    and biases as the operators take them; one slope, norm weight and norm bias for each hidden
    layer, or none."""

    operands: list[Tensor]
    weights: list[Tensor]
    biases: list[Tensor]
    slopes: list[Tensor]
    norm_weights: list[Tensor]
    norm_biases: list[Tensor]


def weighted_events(tensors: DINTensors, call: DINCall, units: UnitParameters | None) -> Tensor:
    """Σ_i p_i v_i of each row of q, `[R, Ev]`. Updates running statistics in training."""
    statistics: list[Tensor] = []
    if call.activation == "dice" and units is not None:
        with torch.no_grad():
            statistics = _statistics(tensors, call, units)
    flat = [x for group in tensors for x in group]
    sizes = [len(group) for group in tensors]
    eps = 0.0 if units is None else units.eps
    return apply(_Node, call, sizes, eps, statistics, *flat)


def _statistics(tensors: DINTensors, call: DINCall, units: UnitParameters) -> list[Tensor]:
    """Number of pairs, mean and variance `[3, H]` of each hidden layer; 0 pairs where they are the
    running ones."""
    found: list[Tensor] = []
    moments = operators(call.kernels).moments
    means, variances = units.running_means, units.running_vars
    for layer in range(call.layers):
        if means is not None and variances is not None and not units.training:
            mean = means[layer]
            found.append(torch.stack([torch.zeros_like(mean), mean, variances[layer]]))
            continue
        missing = [x.new_zeros((3, len(x))) for x in tensors.slopes[layer:]]
        tables = _tables(tensors, [*found, *missing], units.eps)
        moment = moments(*_arguments(tensors, tables, call), layer, call.mask)
        if means is not None and variances is not None:
            count, mean, variance = moment.unbind()
            unbiased = variance * (count / (count - 1).clamp(min=1))
            weight = (count > 0).to(mean) * units.momentum  # 0 without pairs
            means[layer].add_(weight * (mean - means[layer]))
            variances[layer].add_(weight * (unbiased - variances[layer]))
        found.append(moment)
    return found


def _tables(
    tensors: DINTensors,
    statistics: Sequence[Tensor],
    eps: float,
    pulls: dict[int, Tensor] | None = None,
) -> list[Tensor]:
    """The units' tables `[7, H]`, with these d0 and d1 `[2, H]` of layers, otherwise 0. Those of
    PReLU, which has no statistics, have slopes alone."""
    tables: list[Tensor] = []
    dtype = compute_dtype(tensors.operands[0])
    if not statistics:
        return [pad(x.to(dtype)[None], (0, 0, 0, 6)) for x in tensors.slopes]
    for layer, (slope, (_, mean, variance)) in enumerate(zip(tensors.slopes, statistics)):
        zero = torch.zeros_like(mean)
        weight = tensors.norm_weights[layer] if tensors.norm_weights else torch.ones_like(mean)
        bias = tensors.norm_biases[layer] if tensors.norm_biases else zero
        rows = [slope, mean, torch.rsqrt(variance + eps), weight, bias]
        d = (pulls or {}).get(layer, (zero, zero))
        tables.append(torch.stack([x.to(dtype) for x in (*rows, *d)]))
    return tables


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: DINCall,
        sizes: list[int],
        eps: float,
        statistics: list[Tensor],
        *flat: Tensor,
    ) -> Tensor:
        tensors = _grouped(flat, sizes)
        tables = _tables(tensors, statistics, eps)
        arguments = *_arguments(tensors, tables, call), call.softmax, call.mask
        out, lse = operators(call.kernels).forward(*arguments)
        ctx.save_for_backward(out, lse, *call.segments, *statistics, *flat)
        ctx.call, ctx.sizes, ctx.eps = call[1:], sizes, eps  # without the tensors
        ctx.statistics = len(statistics)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (do,) = grads
        out, lse, *rest = ctx.saved_tensors  # checkpointing allows one read
        segments, rest = rest[:3], rest[3:]
        statistics, flat = rest[: ctx.statistics], rest[ctx.statistics :]
        call = DINCall(segments, *ctx.call)
        tensors = _grouped(flat, ctx.sizes)
        pulls: dict[int, Tensor] = {}
        delta = (out.to(lse.dtype) * do).sum(1) if call.softmax else lse
        run = operators(call.kernels).backward

        def gradients(layer: int) -> list[Tensor]:
            tables = _tables(tensors, statistics, ctx.eps, pulls)
            arguments = _arguments(tensors, tables, call)
            return run(do, lse, delta, *arguments, call.softmax, layer, call.mask)

        if call.uses_batch:
            tables = _tables(tensors, statistics, ctx.eps)
            for layer in reversed(range(call.layers)):
                count, table = statistics[layer][0], UnitTable(*tables[layer])
                (sums,) = gradients(layer)
                # without pairs there are no statistics
                factor = torch.where(count > 0, table.weight * table.rstd / count.clamp(min=1), 0)
                pulls[layer] = -factor * sums[1:]
        found = gradients(-1)
        count = sum(ctx.sizes[:3])
        slopes, biases, weights = zip(*found[count:]) if len(found) > count else ((), (), ())
        of_units = [*slopes, *(weights if tensors.norm_weights else ())]
        of_units += biases if tensors.norm_biases else ()
        needs = ctx.needs_input_grad[4:]
        results = [
            x.to(given.dtype) if need else None
            for x, given, need in zip([*found[:count], *of_units], flat, needs)
        ]
        return None, None, None, None, *results


def _grouped(flat: Sequence[Tensor], sizes: Sequence[int]) -> DINTensors:
    groups: list[list[Tensor]] = []
    for size in sizes:
        groups.append(list(flat[:size]))
        flat = flat[size:]
    return DINTensors(*groups)


def _arguments(tensors: DINTensors, tables: list[Tensor], call: DINCall) -> tuple[Any, ...]:
    return (
        tensors.operands,
        tensors.weights,
        tensors.biases,
        tables or [None] * call.layers,  # AOTInductor takes no empty list
        call.segments,
        call.activation,
    )
