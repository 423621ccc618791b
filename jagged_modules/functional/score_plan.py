"""ScorePlan: the layout of all segments' scores in one flat buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as nnf

from ..scalars import check_kind
from ..segments import (
    check_device,
    check_is_device,
    check_offsets,
    normal_form,
    values_are_checkable,
)


@dataclasses.dataclass(frozen=True, eq=False)
class ScorePlan:
    """The layout of the scores of all segments in one flat buffer: segment b has N_b · M_b scores,
    row-major, from p_offsets[b] on.

    `from_offsets` builds it once per batch on the host. All operators on these segments share it,
    forward and backward.

    Attributes:
        x_offsets, y_offsets: `[B + 1]` int32 or int64: segment b has N_b rows of x and M_b rows of
            y.
        p_offsets: `[B + 1]` int64: cumulative N_b · M_b.
        x_rows, y_rows, total: Σ N_b, Σ M_b and Σ N_b · M_b.

    Example::

        q, k, v = torch.randn(3, 5, 16)
        plan = F.ScorePlan.from_offsets(torch.tensor([0, 2, 5]))  # 2 · 2 + 3 · 3 scores
        p = F.jagged_jagged_bmm_jagged_out(q, k, plan)  # [13]
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
        """Build the plan. Call it outside of torch.compile and pass the plan into the compiled
        function.

        Args:
            x_offsets, y_offsets: `[B + 1]` int32 or int64, on the host: reading sizes from a device
                would synchronise. If y_offsets is None, the scores are of x with itself.

        Raises:
            TypeError: x_offsets or y_offsets is not an integer tensor.
            ValueError: they are not valid offsets, have different numbers of segments, are not on
                the host, or are traced.
        """
        y_offsets = x_offsets if y_offsets is None else y_offsets
        for name, offsets in (("x_offsets", x_offsets), ("y_offsets", y_offsets)):
            check_offsets(name, offsets)
            if offsets.device.type != "cpu":
                raise ValueError(
                    f"{name} must be on the host, then move the plan with plan.to(device), got"
                    f" {offsets.device}"
                )
            if not values_are_checkable(offsets):
                raise ValueError(
                    f"{name} must have values, got traced offsets: build the plan outside of the"
                    " compiled function"
                )
        if x_offsets.shape != y_offsets.shape:
            segments = x_offsets.shape[0] - 1, y_offsets.shape[0] - 1
            raise ValueError(
                "x_offsets and y_offsets must describe the same number of segments, "
                "got {} and {}".format(*segments)
            )
        same = y_offsets is x_offsets
        # no later write reaches the plan
        x_offsets = x_offsets.clone(memory_format=torch.contiguous_format)
        y_offsets = x_offsets if same else y_offsets.clone(memory_format=torch.contiguous_format)
        p_offsets = nnf.pad((x_offsets.diff().long() * y_offsets.diff()).cumsum(0), (1, 0))
        totals = (int(x[-1]) for x in (x_offsets, y_offsets, p_offsets))
        return cls(x_offsets, y_offsets, p_offsets, *totals)

    @property
    def offsets(self) -> tuple[Tensor, Tensor, Tensor]:
        """x_offsets, y_offsets and p_offsets."""
        return self.x_offsets, self.y_offsets, self.p_offsets

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> ScorePlan:
        """The plan with its tensors on `device`. non_blocking is that of `Tensor.to`.

        Raises:
            TypeError: device is none, as a dtype.
        """
        check_is_device(device)
        return self._moved(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> ScorePlan:
        """The plan in page-locked memory. torch's DataLoader calls this."""
        return self._moved(lambda x: x.pin_memory())

    def _moved(self, move: Callable[[Tensor], Tensor]) -> ScorePlan:
        x_offsets = move(self.x_offsets)
        y_offsets = x_offsets if self.y_offsets is self.x_offsets else move(self.y_offsets)
        return ScorePlan(
            x_offsets, y_offsets, move(self.p_offsets), self.x_rows, self.y_rows, self.total
        )


def plan_offsets(plan: ScorePlan, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The plan's offsets on x's device. Errors call x `name`."""
    check_kind("plan", plan, ScorePlan, "a ScorePlan")
    check_device("plan", plan.p_offsets, x.device, f"{name}'s")
    x_offsets, y_offsets, p_offsets = (normal_form(offsets, x.device) for offsets in plan.offsets)
    return x_offsets, y_offsets, p_offsets


def check_plan_rows(name: str, x: Tensor, what: str, rows: int) -> None:
    if x.shape[0] != rows:
        raise ValueError(
            f"{name} must have one entry for each of the plan's {rows} {what}, got {x.shape[0]}"
        )
