"""Rotary position embeddings in interleaved pairs (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.types import Device

from .scalars import check_choice, check_equal, check_flag, check_kind, check_number, check_size
from .segments import check_device, check_index_values, check_integers, check_offsets, normal_form
from .validation import check_tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary position embeddings: the tables of cos and sin, and what they rotate.

    Args:
        cos, sin: `[P, D / 2]`, floating point, one row per position. No gradient flows to them.
        rotate: "qk" (queries and keys) or "qkv" (values too, as in some published block attention
            models).
        positions: `[L]` int32 or int64, the position of each row, 0 to P - 1. If None, positions
            count from the start of each segment.
        linear: True states that angles are linear in the position, as in `from_frequencies`. Scores
            then depend on distances only, and kernels may count positions from any row, which is
            faster.
        precise: the Hopper kernels keep rotated bf16 q and k, and dS, in fp16 with a power of two
            as scale. This adds three bits of precision. The backward takes a seventh longer, with
            "qkv" two fifths. Other kernels, dtypes and devices ignore it.

    Raises:
        TypeError, ValueError: a field has another type, shape or value.

    Example::

        rotary = jm.Rotary.from_frequencies(head_dim=64, max_seqlen=4096, rotate="qkv")
    """

    cos: Tensor
    sin: Tensor
    rotate: str = "qk"
    positions: Tensor | None = None
    linear: bool = False
    precise: bool = False

    def __post_init__(self) -> None:
        check_tensor("cos", self.cos, 2, "[P, D / 2]")
        check_tensor("sin", self.sin, 2, "[P, D / 2]")
        if self.sin.shape != self.cos.shape:
            raise ValueError(
                f"sin must have cos's shape, {list(self.cos.shape)}, got {list(self.sin.shape)}"
            )
        check_choice("rotate", self.rotate, ("qk", "qkv"), '"qk" or "qkv"')
        if self.positions is not None:
            check_integers("positions", self.positions)
        check_flag("linear", self.linear)
        check_flag("precise", self.precise)

    @classmethod
    def from_frequencies(
        cls,
        head_dim: int,
        max_seqlen: int,
        rotate: str = "qk",
        theta: float = 10000.0,
        device: Device = None,
    ) -> Rotary:
        """Rotate pair i at position p by the angle p · theta^(-2 i / head_dim), as in the paper.

        Args:
            head_dim: width D of a head, even.
            max_seqlen: number of positions P.
            rotate: "qk" or "qkv".
            theta: base of the frequencies.
            device: device of the tables.

        Returns:
            A linear Rotary with fp32 tables `[max_seqlen, head_dim / 2]`.

        Raises:
            TypeError, ValueError: a size is not a positive integer; head_dim is odd; theta is not a
                positive number; rotate is unknown.
        """
        return cls(*rotary_tables(head_dim, max_seqlen, theta, device), rotate, linear=True)


def check_rotary(rotary: Rotary | None, q: Tensor, offsets: Tensor) -> None:
    """Raise unless `rotary` can rotate q `[L, H, D]` with segments at `offsets`. Values on a device
    are checked under debug_checks only."""
    if rotary is None:
        return
    check_kind("rotary", rotary, Rotary, "a Rotary")
    rows, _, dim = q.shape
    if dim % 2 or rotary.cos.shape[1] != dim // 2:
        raise ValueError(
            f"rotary's cos and sin must have shape [P, D / 2] with D = {dim} even, got"
            f" {list(rotary.cos.shape)}"
        )
    if rotary.cos.requires_grad or rotary.sin.requires_grad:
        raise ValueError("rotary's cos and sin must not require gradients: none flow to them")
    for name in ("cos", "sin", "positions"):
        if getattr(rotary, name) is not None:
            check_device(f"rotary's {name}", getattr(rotary, name), q.device, "the queries'")
    positions, limit = rotary.positions, rotary.cos.shape[0]
    if positions is None:
        check_offsets("offsets", offsets, max_seqlen=limit, longest="rotary's max_seqlen")
        return
    check_equal("rotary's positions", "have one entry per row", rows, positions.shape[0])
    check_index_values("rotary's positions", positions, limit, "{}, the rows of cos")


def kernel_arguments(
    rotary: Rotary | None, device: torch.device
) -> tuple[list[Tensor | None], list[bool]]:
    """The kernels' arguments: cos, sin and positions; whether values are rotated too, whether
    angles are linear in the position, precise."""
    if rotary is None:
        return [None, None, None], [False, False, False]
    tables = rotary.cos, rotary.sin
    cos, sin = (x.to(device, torch.float32, non_blocking=True).contiguous() for x in tables)
    positions = None if rotary.positions is None else normal_form(rotary.positions, device)
    return [cos, sin, positions], [rotary.rotate == "qkv", rotary.linear, rotary.precise]


def rotary_tables(
    head_dim: int, max_seqlen: int, theta: float = 10000.0, device: Device = None
) -> tuple[Tensor, Tensor]:
    """cos and sin `[max_seqlen, head_dim / 2]`, fp32."""
    check_size("head_dim", head_dim)
    check_size("max_seqlen", max_seqlen)
    check_number("theta", theta)
    if theta <= 0:
        raise ValueError(f"theta must be positive, got {theta}")
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary pairs, got {head_dim}")
    frequencies = theta ** (
        -torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    )
    angles = torch.arange(max_seqlen, dtype=torch.float64, device="cpu")[:, None] * frequencies
    return angles.cos().float().to(device), angles.sin().float().to(device)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(x0, x1) → (x0 cos − x1 sin, x1 cos + x0 sin) for each interleaved pair (x0, x1) of the last
    dimension (arXiv:2104.09864).

    Computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        x: `[L, H, D]` fp64, fp32, fp16 or bf16, D even.
        cos, sin: `[L, D / 2]`, floating point: one row for each row of x.

    Returns:
        `[L, H, D]` in x's dtype.

    Raises:
        TypeError, ValueError: an argument has another type, dtype or device; shapes do not match.
    """
    check_tensor("x", x, 3, "[L, H, D]", "apply_rotary")
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, 2, "[L, D / 2]", "apply_rotary")
        if x.shape[2] % 2 or table.shape != (x.shape[0], x.shape[2] // 2):
            raise ValueError(
                f"{name} must have shape [L, D / 2] of x {list(x.shape)} with D even, got"
                f" {list(table.shape)}"
            )
        check_equal(name, "be on x's device", x.device, table.device)
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table.to(dtype)[:, None] for table in (cos, sin))
    first, second = torch.unbind(torch.unflatten(x.to(dtype), -1, (-1, 2)), -1)
    return (
        torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
        .flatten(-2)
        .to(x.dtype)
    )
