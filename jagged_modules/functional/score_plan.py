"""ScorePlan: where the scores of each segment lie in one flat buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as nnf

from ..scalars import check_kind
from ..validation import check_device, check_offsets, values_are_checkable


@dataclasses.dataclass(frozen=True, eq=False)
class ScorePlan:
    """Where the scores of each segment lie in one flat buffer: N_b · M_b of them from p_offsets[b] on, row by row.

    Made once per batch on the host, by `from_offsets`; shared by all operators on these segments, forward and backward.

    Attributes:
        x_offsets, y_offsets: `[B + 1]`, N_b rows of x and M_b rows of y in segment b. p_offsets: `[B + 1]` int64.
        x_rows, y_rows, total: Σ N_b, Σ M_b and Σ N_b · M_b.

    Example::

        plan = F.ScorePlan.from_offsets(torch.tensor([0, 2, 5]))   # scores of a sequence with itself: 2 · 2 + 3 · 3
        p = F.jagged_jagged_bmm_jagged_out(q, k, plan)             # [13]
        out = F.array_jagged_bmm_jagged_out(F.jagged2_softmax(p, plan), v, plan)
    """

    x_offsets: Tensor
    y_offsets: Tensor
    p_offsets: Tensor
    x_rows: int
    y_rows: int
    total: int

    @classmethod
    def from_offsets(cls, x_offsets: Tensor, y_offsets: Tensor | None = None) -> ScorePlan:
        """The plan for x's and y's segments `[B + 1]` int32 or int64 on the host; of x with itself if y_offsets is None.

        Raises:
            TypeError: not integer tensors. ValueError: no offsets, of different numbers of segments, or not on the host, where alone
            sizes can be read without waiting. Inside of torch.compile too: make the plan outside and pass it in.
        """
        y_offsets = x_offsets if y_offsets is None else y_offsets
        for name, offsets in (("x_offsets", x_offsets), ("y_offsets", y_offsets)):
            check_offsets(name, offsets)
            if offsets.device.type != "cpu":
                raise ValueError(f"{name} must be on the host, where the plan is made before plan.to(device), got {offsets.device}")
            if not values_are_checkable(offsets):
                raise ValueError(f"{name} must have values for a plan to be made, got offsets of a graph that is being traced")
        if x_offsets.shape != y_offsets.shape:
            segments = x_offsets.shape[0] - 1, y_offsets.shape[0] - 1
            raise ValueError("x_offsets and y_offsets must describe the same number of segments, got {} and {}".format(*segments))
        p_offsets = nnf.pad((x_offsets.diff().long() * y_offsets.diff()).cumsum(0), (1, 0))
        return cls(x_offsets, y_offsets, p_offsets, *(int(x[-1]) for x in (x_offsets, y_offsets, p_offsets)))

    @property
    def offsets(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x_offsets, self.y_offsets, self.p_offsets

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> ScorePlan:
        """The plan with its tensors on `device`."""
        return self._moved(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> ScorePlan:
        """The plan in page-locked memory. DataLoader calls it."""
        return self._moved(lambda x: x.pin_memory())

    def _moved(self, move: Callable[[Tensor], Tensor]) -> ScorePlan:
        x_offsets = move(self.x_offsets)
        y_offsets = x_offsets if self.y_offsets is self.x_offsets else move(self.y_offsets)
        return ScorePlan(x_offsets, y_offsets, move(self.p_offsets), self.x_rows, self.y_rows, self.total)


def plan_offsets(plan: ScorePlan, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The plan's offsets on the device of the argument x, called `name`."""
    check_kind("plan", plan, ScorePlan, "a ScorePlan")
    check_device("plan", plan.p_offsets, x.device, f"{name}'s")
    x_offsets, y_offsets, p_offsets = (offsets.to(x.device, non_blocking=True) for offsets in plan.offsets)
    return x_offsets, y_offsets, p_offsets


def check_plan_rows(name: str, x: Tensor, what: str, rows: int) -> None:
    if x.shape[0] != rows:
        raise ValueError(f"{name} must have one entry for each of the plan's {rows} {what}, got {x.shape[0]}")
