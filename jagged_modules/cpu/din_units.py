"""Activations of DIN's hidden units and their gradients, as `unit_activations` defines them, in as
few passes over memory as torch's operators allow. The arguments are overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..unit_activations import UnitTable

aten: Any = torch.ops.aten


class Kept(NamedTuple):
    """What the gradient of a layer's units needs. z, h `[P, H]`: before and after the activation;
    None if it is not read, or overwritten. p: Dice's sigmoid."""

    z: Tensor | None
    h: Tensor
    p: Tensor | None = None


class Units:
    """The units of a hidden layer. table: `[7, H]`, see UnitTable; None without parameters."""

    def __init__(self, name: str, table: Tensor | None) -> None:
        self.name = name
        self.table = None if table is None else UnitTable(*table)
        if name != "dice" or self.table is None:
            return
        t = self.table
        self.rest = 1 - t.slope
        self.scale = t.rstd * t.weight  # of z in the sigmoid
        self.shift = t.bias - t.mean * self.scale
        self.pulls = None
        if t.d0.any() or t.d1.any():
            self.pulls = t.d0 - t.d1 * t.mean * t.rstd, t.d1 * t.rstd

    def activated(self, z: Tensor) -> Tensor:
        """h `[P, H]`, in z's memory if that is possible."""
        if self.name in _IN_PLACE:
            return _IN_PLACE[self.name](z)
        if self.table is None:
            return z
        if self.name == "prelu":
            return torch.prelu(z, self.table.slope)
        return self.kept(z).h

    def kept(self, z: Tensor) -> Kept:
        """h, and what else `gradients` reads."""
        if self.name == "silu":
            return Kept(z, torch.nn.functional.silu(z))
        if self.name != "dice" or self.table is None:
            return Kept(None if self.table is None else z, self.activated(z))
        p = torch.addcmul(self.shift, z, self.scale).sigmoid_()
        return Kept(z, torch.addcmul(self.table.slope, p, self.rest).mul_(z), p)

    def gradients(self, dh: Tensor, kept: Kept) -> tuple[Tensor, Tensor | None]:
        """The gradient of z, and sums over P `[3, H]`: the gradients of slope, bias and weight;
        None without parameters."""
        if self.name in _BACKWARD:
            of = kept.h if kept.z is None else kept.z
            return _BACKWARD[self.name](dh, of), None
        if self.table is None or kept.z is None:
            return dh, None
        if kept.p is not None:
            return self._of_dice(self.table, dh, kept.z, kept.p)
        dz = aten.threshold_backward(dh, kept.z, 0)
        below = dh.sub_(dz)  # the gradients of h where z <= 0
        dz.addcmul_(below, self.table.slope)
        dslope = below.mul_(kept.z).sum(0)
        zero = torch.zeros_like(dslope)
        return dz, torch.stack([dslope, zero, zero])

    def _of_dice(self, table: UnitTable, dh: Tensor, z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """With n = (z - mean) · rstd, and g = dh · z · (1 - slope) · p (1 - p), the gradient of the
        sigmoid's input: dz = dh (p + slope (1 - p)) + g · rstd · weight + d0 + d1 · n."""
        g = dh * z
        dslope = g.addcmul_(g, p, value=-1).sum(0)
        g.mul_(p)
        dz = torch.addcmul(table.slope, p, self.rest, out=p).mul_(dh)
        dz.addcmul_(g, self.rest * self.scale)
        if self.pulls is not None:
            dz.add_(self.pulls[0]).addcmul_(z, self.pulls[1])
        dbias = g.sum(0)
        of_n = (g.mul_(z).sum(0) - table.mean * dbias) * table.rstd
        return dz, torch.stack([dslope, self.rest * dbias, self.rest * of_n])


_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "sigmoid": torch.sigmoid_,
    "silu": lambda z: torch.nn.functional.silu(z, inplace=True),
}
# of dh, and of h or, for silu, z
_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda dh, h: aten.threshold_backward.grad_input(dh, h, 0, grad_input=dh),
    "sigmoid": lambda dh, h: aten.sigmoid_backward.grad_input(dh, h, grad_input=dh),
    "silu": lambda dh, z: aten.silu_backward.grad_input(dh, z, grad_input=dh),
}
