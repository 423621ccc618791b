"""Checks that the jagged operators share, and whether they run kernels."""

from __future__ import annotations

from torch import Tensor

from ..dtypes import autocast, uses_kernels
from ..validation import IMPLEMENTATIONS, check_implementation, check_tensor, refuse_transforms


def checked_operands(
    function: str, implementation: str, cast: bool = True, /, **named: tuple[Tensor, str]
) -> list[Tensor]:
    """Check type, dtype, rank and device of tensors given as name=(tensor, shape). Return them, in
    autocast's dtype if `cast`."""
    for name, (x, shape) in named.items():
        check_tensor(name, x, shape.count(",") + 1, shape, function, implementation)
        check_implementation(implementation, IMPLEMENTATIONS, x.device)
    (first, *others), tensors = named, [autocast(x) if cast else x for x, _ in named.values()]
    for name, x in zip(others, tensors[1:]):
        if x.dtype != tensors[0].dtype:
            raise ValueError(f"{name} must have {first}'s dtype, {tensors[0].dtype}, got {x.dtype}")
        if x.device != tensors[0].device:
            raise ValueError(
                f"{name} must be on {first}'s device, {tensors[0].device}, got {x.device}"
            )
    return tensors


def runs_kernels(implementation: str, x: Tensor) -> bool:
    """Whether the operator runs kernels. RuntimeError inside a torch.func transform."""
    refuse_transforms("the jagged operators do")
    return uses_kernels(x.device, implementation)


def check_segment_matrices(name: str, x: Tensor, offsets: Tensor, width: int) -> None:
    """ValueError unless x has one matrix `[width, T]` for each segment."""
    expected = offsets.shape[0] - 1, width
    if x.shape[:2] != expected:
        raise ValueError(
            f"{name} must have shape [B, D, T] with B, D = {list(expected)}, got {list(x.shape)}"
        )
