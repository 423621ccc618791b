"""AttentionMask: which keys a query row sees."""

from __future__ import annotations

import dataclasses
from typing import final

import torch
from jagged_kernels.schedule.cost import MaskParams
from torch import Tensor
from torch.types import Device

from .scalars import check_flag, check_shape, check_size, is_sequence, to_ints
from .segments import check_device, check_integers, check_not_negative, values_are_checkable

LONGEST = 2**30
# fields that are numbers, which an HSTUConfig has too
LENGTHS = (
    "target_group_size",
    "contextual_seqlen",
    "max_attn_len",
    "min_full_attn_seqlen",
    "global_prefix",
    "recent_history",
)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMask:
    """Which columns (keys) of a segment each of its query rows sees. The fields combine: a row sees
    a column if all fields allow it. Only global_prefix adds columns to those.

    Queries are aligned with the end of the keys: row i of Nq has position i + Nk - Nq. All
    positions below are columns. The first `contextual_seqlen` columns are context (features that
    are not events), the last `num_targets` are targets (candidates to score), and the columns
    before the targets are history. A row always sees its own column.

    HSTU's rule (Zhai et al. 2024, as in Meta's generative-recommenders) for n columns, t targets, c
    = contextual_seqlen, causal:

        M = n - t - c + 1 if c else n - t
        id(i) = min(max(i - c + 1, 0) if c else i, M)
        keep = i == j or id(i) > id(j)
        if max_attn_len:
            near = id(i) - id(j) <= max_attn_len
            keep = keep and (near or (min_full_attn_seqlen and id(i) >= M - min_full_attn_seqlen))
        if c:
            keep = keep or (id(i) == 0 and id(j) < M)

    Args:
        causal: a row sees no later column. If False, history rows see all history within
            abs(id(i) - id(j)) <= max_attn_len, and only rows of its own group see a target.
        window: (left, right): a row sees columns with -right <= i - j <= left. None on either side
            means no limit.
        num_targets: `[B]` int32 or int64, the number of targets at the end of each segment; at most
            the segment's length.
        target_group_size: number of targets in a group, counted from the first target. A target
            also sees the earlier ones of its group.
        contextual_seqlen: number c of context columns at the start; their id is 0. Context rows see
            all context and history. History rows and targets see the context if max_attn_len
            reaches id 0. If a segment has fewer than c columns before its targets, M is not
            positive, and under the causal rule each row sees only itself and the earlier targets of
            its group.
        max_attn_len: number of ids that a row sees back; 0: no limit.
        min_full_attn_seqlen: this many rows at the end of the history, and the targets, are exempt
            from max_attn_len.
        global_prefix: every row sees this many columns at the start, up to the first target,
            whatever the other fields hide; under a causal mask, up to its own column. With a window
            or max_attn_len this is semi-local attention.
        recent_history: attention truncation: only the last recent_history columns of the history
            are seen; 0: no limit. The columns before them, context too, are hidden, except in the
            global prefix. A row still sees its own column.

    Semi-local attention and attention truncation are those of recent variants of HSTU. The rule for
    them, after the window:

        if recent_history: keep = keep and (j >= n - t - recent_history or i == j)
        keep = keep or (j < min(global_prefix, n - t) and (j <= i or not causal))

    Raises:
        TypeError, ValueError: a field has another type, is negative, or is above 2^30.

    Example::

        print(jm.AttentionMask(causal=True, num_targets=torch.tensor([2])).picture(6))
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    num_targets: Tensor | None = None
    target_group_size: int = 1
    contextual_seqlen: int = 0
    max_attn_len: int = 0
    min_full_attn_seqlen: int = 0
    global_prefix: int = 0
    recent_history: int = 0

    def __init_subclass__(cls) -> None:
        """TypeError: kernels read the fields, so another rule would be ignored silently."""
        raise TypeError(
            "AttentionMask must not be subclassed: kernels read its fields, not its rule"
        )

    def __post_init__(self) -> None:
        check_flag("causal", self.causal)
        if self.window is not None:
            if not is_sequence(self.window) or len(self.window) != 2:
                raise TypeError(f"window must be a pair (left, right) or None, got {self.window!r}")
            for name, side in zip(("window's left", "window's right"), self.window):
                if side is not None:
                    _check_length(name, side)
            object.__setattr__(self, "window", tuple(self.window))
        if self.num_targets is not None:
            check_integers("num_targets", self.num_targets)
            check_not_negative("num_targets", self.num_targets)
        check_size("target_group_size", self.target_group_size)
        for name in LENGTHS:
            _check_length(name, getattr(self, name))

    def __repr__(self) -> str:
        """The fields that differ from their defaults. num_targets shows its shape only: reading the
        values could wait for a device."""
        given = {
            field.name: (getattr(self, field.name), field.default)
            for field in dataclasses.fields(self)
        }
        targets, _ = given.pop("num_targets")
        parts = [
            f"{name}={value!r}" for name, (value, default) in given.items() if value != default
        ]
        if targets is not None:
            shown = f"Tensor{list(targets.shape)}" if isinstance(targets, Tensor) else targets
            parts.append(f"num_targets={shown}")
        return f"AttentionMask({', '.join(parts)})"

    @property
    def params(self) -> MaskParams:
        """The fields as integers, which the kernels take. They hold whether there are num_targets,
        not their values."""
        left, right = self.window or (None, None)
        return MaskParams(
            causal=int(self.causal),
            left=-1 if left is None else left,
            right=-1 if right is None else right,
            has_targets=int(self.num_targets is not None),
            group_size=self.target_group_size,
            context=self.contextual_seqlen,
            max_attn_len=self.max_attn_len,
            full_attn_len=self.min_full_attn_seqlen if self.max_attn_len else 0,
            global_prefix=self.global_prefix,
            recent_history=self.recent_history,
        )

    @classmethod
    def from_params(cls, params: MaskParams, num_targets: Tensor | None) -> AttentionMask:
        """The mask with these `params`, and num_targets `[B]` int32 or int64."""
        left, right = (None if x < 0 else x for x in (params.left, params.right))
        return cls(
            causal=bool(params.causal),
            window=(left, right),
            num_targets=num_targets,
            target_group_size=params.group_size,
            contextual_seqlen=params.context,
            max_attn_len=params.max_attn_len,
            min_full_attn_seqlen=params.full_attn_len,
            global_prefix=params.global_prefix,
            recent_history=params.recent_history,
        )

    def hides_nothing(self) -> bool:
        """Whether every row sees every column."""
        left, right = self.window or (None, None)
        limited = self.causal or self.max_attn_len or self.recent_history
        return left is None and right is None and self.num_targets is None and not limited

    def keep(
        self, num_queries: int, num_keys: int, num_targets: int = 0, device: Device = None
    ) -> Tensor:
        """Boolean `[num_queries, num_keys]`, True where a row sees a key, for one segment with
        num_targets targets. Made on `device`.

        Raises:
            TypeError, ValueError: a size is not a non-negative integer.
        """
        for name, size in (
            ("num_queries", num_queries),
            ("num_keys", num_keys),
            ("num_targets", num_targets),
        ):
            check_size(name, size, at_least=0)
        return self.rule(
            torch.arange(num_queries, device=device) + (num_keys - num_queries),
            num_keys,
            num_targets,
        )

    def rule(self, i: Tensor, num_keys: int, num_targets: int = 0) -> Tensor:
        """Boolean `[rows, num_keys]`, True where the row at position i sees a key: see
        `is_visible`.

        Args:
            i: `[rows]` integers, positions (columns) of the rows.
            num_keys: columns of the segment.
            num_targets: how many of them, at the end, are targets.
        """
        j = torch.arange(num_keys, device=i.device)
        return is_visible(self, i[:, None], j, num_keys, num_targets)

    def picture(self, length: int, segment: int = 0, num_queries: int | None = None) -> str:
        """The mask of one segment as text: one line per row, `#` where it sees the column, `.`
        where it does not.

        Args:
            length: columns (keys) of the segment.
            segment: index of the segment in num_targets.
            num_queries: rows of the segment; `length` if None.

        Raises:
            TypeError, ValueError: a size is not a non-negative integer; there is no such segment.
        """
        check_size("length", length, at_least=0)
        check_size("segment", segment, at_least=0)
        num_queries = length if num_queries is None else num_queries
        check_size("num_queries", num_queries, at_least=0)
        if self.num_targets is not None and segment >= self.num_targets.shape[0]:
            raise ValueError(
                f"segment must be below the number of num_targets, {self.num_targets.shape[0]}, got"
                f" {segment}"
            )
        if self.num_targets is not None and self.num_targets.is_meta:
            raise ValueError("num_targets must have values to draw the mask, got a meta tensor")
        num_targets = 0 if self.num_targets is None else int(self.num_targets[segment])
        seen = self.keep(num_queries, length, num_targets, device="cpu")
        return "\n".join(" ".join("#" if x else "." for x in to_ints(row)) for row in seen)


def is_visible(
    mask: AttentionMask, i: Tensor, j: Tensor, num_keys: int | Tensor, num_targets: int | Tensor
) -> Tensor:
    """Whether rows at positions i see columns j of segments of num_keys columns, of which the last
    num_targets are targets: the rule of `AttentionMask`, written out. The arguments broadcast."""
    c, first_target = mask.contextual_seqlen, num_keys - num_targets
    last_id = first_target - c + 1 if c else first_target

    def identity(position: Tensor) -> Tensor:
        return ((position - c + 1).clamp(min=0) if c else position).clamp(max=last_id)

    distance = identity(i) - identity(j)
    keep = (i == j) | (distance > 0)
    if not mask.causal:
        keep, distance = (i == j) | (j < first_target), distance.abs()
    if mask.max_attn_len:
        near = distance <= mask.max_attn_len
        if mask.min_full_attn_seqlen:
            near |= identity(i) >= last_id - mask.min_full_attn_seqlen
        keep &= near
    if c:
        keep |= (identity(i) == 0) & (identity(j) < last_id)
    group_of_i = (i - first_target) // mask.target_group_size
    group_of_j = (j - first_target) // mask.target_group_size
    keep |= (j >= first_target) & (j <= i) & (group_of_i == group_of_j)
    if mask.window is not None:
        left, right = mask.window
        if left is not None:
            keep &= j >= i - left
        if right is not None:
            keep &= j <= i + right
    if mask.recent_history:
        keep &= (j >= first_target - mask.recent_history) | (i == j)
    if mask.global_prefix:
        in_prefix = (j < mask.global_prefix) & (j < first_target)
        keep |= in_prefix & (j <= i) if mask.causal else in_prefix
    return keep


def field_of_later_rows(mask: AttentionMask) -> str | None:
    """The name of a field of a causal mask by which later rows change what earlier ones see; None
    if no field does."""
    for name in ("contextual_seqlen", "recent_history"):
        if getattr(mask, name):
            return name
    return "min_full_attn_seqlen" if mask.max_attn_len and mask.min_full_attn_seqlen else None


def _check_length(name: str, value: int) -> None:
    """Raise unless value is an int from 0 to 2^30: kernels add it to positions, and the sum must
    fit int32."""
    check_size(name, value, at_least=0)
    if value > LONGEST:
        raise ValueError(f"{name} must be at most 2^30, got {value}")


def check_num_targets(
    name: str, num_targets: Tensor | None, kv_offsets: Tensor, device: torch.device, owner: str
) -> None:
    """ValueError unless num_targets `[B]`, called `name`, match kv_offsets `[B + 1]` and are on
    `device`. owner: as in `check_device`."""
    if num_targets is None:
        return
    check_integers(name, num_targets)
    segments = kv_offsets.shape[0] - 1
    check_shape(name, num_targets, "[B]", segments)
    check_device(name, num_targets, device, owner)
    if not segments or not values_are_checkable(num_targets):
        return
    if not values_are_checkable(kv_offsets):
        return
    lengths = kv_offsets.diff().to(num_targets)
    if bool((num_targets > lengths).any()):
        segment = int((num_targets > lengths).int().argmax())
        found = f"{int(num_targets[segment])} of {int(lengths[segment])} at segment {segment}"
        raise ValueError(f"{name} must be at most the segment's length, got {found}")
