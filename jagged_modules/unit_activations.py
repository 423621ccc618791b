"""DIN's attention (Zhou et al. 2018, arXiv:1706.06978): the features of a pair of a candidate and
an event, and the activations of the hidden units. PReLU and Dice have parameters per unit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .activations import POINTWISE

# feature → its factors of q, of k and of their product
FEATURES = {
    "q": (1, 0, 0), "k": (0, 1, 0), "q-k": (1, -1, 0), "k-q": (-1, 1, 0), "q*k": (0, 0, 1)
}  # fmt: skip
WITH_PARAMETERS = ("prelu", "dice")
UNIT_ACTIVATIONS = ("sigmoid", *WITH_PARAMETERS, "relu", "silu", "identity")


@dataclasses.dataclass(frozen=True, eq=False)
class UnitParameters:
    """What an activation of hidden units has besides its name: one tensor `[H]` for each hidden
    layer.

    Args:
        slopes: PReLU's slopes for z < 0, or Dice's alpha.
        norm_weights, norm_biases: Dice normalises z and then multiplies and adds these. None: 1, 0.
        running_means, running_vars: statistics of earlier batches, fp32 or fp64. None: Dice always
            takes those of the batch.
        training: Dice takes the batch's statistics over all visible pairs, and updates the running
            ones in place, as torch.nn.BatchNorm1d does.
        momentum: of this update, a number or a tensor of one.
        eps: added to the variance.

    Raises:
        ValueError: running_means without running_vars, or running_vars without running_means.
    """

    slopes: Sequence[Tensor]
    norm_weights: Sequence[Tensor] | None = None
    norm_biases: Sequence[Tensor] | None = None
    running_means: Sequence[Tensor] | None = None
    running_vars: Sequence[Tensor] | None = None
    training: bool = False
    momentum: float | Tensor = 0.1
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if (self.running_means is None) != (self.running_vars is None):
            raise ValueError("units must have both running_means and running_vars, or neither")

    @property
    def uses_batch(self) -> bool:
        """Whether Dice takes the statistics of the batch."""
        return self.training or self.running_means is None


class UnitTable(NamedTuple):
    """One number per unit of a layer. z is normalised to n = (z - mean) · rstd, and
    h = z (p + slope (1 - p)) with p = sigmoid(weight · n + bias). The gradient of z has
    d0 + d1 · n more, which is that through the batch's mean and variance."""

    slope: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor
    bias: Tensor
    d0: Tensor
    d1: Tensor


def unit_activation(z: Tensor, name: str, units: UnitTable | Tensor | None) -> Tensor:
    """The activation of z `[..., H]`. units: a table, or its rows `[7, H]`."""
    if name not in WITH_PARAMETERS or units is None:
        return POINTWISE[name].function(z)
    units = UnitTable(*units)
    if name == "prelu":
        return torch.where(z > 0, z, units.slope * z)
    p = torch.sigmoid((z - units.mean) * units.rstd * units.weight + units.bias)
    return z * (p + units.slope * (1 - p))


def statistics_table(
    units: UnitParameters, layer: int, mean: Tensor, variance: Tensor
) -> UnitTable:
    """The table of a Dice layer with these statistics, without d0 and d1."""
    slope = units.slopes[layer]
    weight, bias = (
        torch.full_like(slope, value) if given is None else given[layer]
        for given, value in ((units.norm_weights, 1.0), (units.norm_biases, 0.0))
    )
    zero = torch.zeros_like(mean)
    return UnitTable(slope, mean, torch.rsqrt(variance + units.eps), weight, bias, zero, zero)


def first_layer(weight: Tensor, features: Sequence[str], width: int) -> tuple[Tensor, ...]:
    """The first linear's weight `[H, |features| · width]` as what multiplies q, k and q ∘ k: three
    `[H, width]`. It is linear in the features, so W x = A q + B k + D (q ∘ k)."""
    blocks = torch.split(weight, width, dim=1)
    sums: list[Tensor] = []
    for part in range(3):
        terms = [
            block if FEATURES[name][part] > 0 else -block
            for name, block in zip(features, blocks)
            if FEATURES[name][part]
        ]
        sums.append(functools.reduce(torch.add, terms) if terms else torch.zeros_like(blocks[0]))
    return tuple(sums)


def pair_features(q: Tensor, k: Tensor, features: Sequence[str]) -> Tensor:
    """The features of pairs of rows of q and k `[P, E]`: `[P, |features| · E]`."""
    values = {
        "q": lambda: q, "k": lambda: k, "q-k": lambda: q - k, "k-q": lambda: k - q,
        "q*k": lambda: q * k,
    }  # fmt: skip
    return torch.cat([values[name]() for name in features], 1)
