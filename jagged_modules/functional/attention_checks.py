"""Checks of the arguments of attention, and the segments that they describe."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jagged_kernels.schedule.cost import is_short
from jagged_kernels.schedule.host import TileSchedule, num_query_groups
from torch import Tensor
from torch.nn.functional import pad

from ..activations import ACTIVATIONS
from ..masks import AttentionMask, check_num_targets
from ..scalars import check_choice, check_number
from ..validation import (
    IMPLEMENTATIONS,
    MAX_HEAD_DIM,
    check_device,
    check_implementation,
    check_offsets,
    check_tensor,
    normal_form,
)

ATTENTION_IMPLEMENTATIONS = (*IMPLEMENTATIONS, "hopper")
BLOCKS = (16, 32, 64, 128)  # block sizes, in rows, that the kernels have tiles for
TILES = (*BLOCKS, 192)


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | str | None,
    kv_offsets: Tensor | str | None,
    scale: object,
    activation: str,
    output_scale: object,
    mask: object,
    schedule: object,
    implementation: str,
    q_name: str = "q",
) -> None:
    """Check everything that needs no offset values. q, k and v are cast by autocast already.
    q_name: what the caller calls q."""
    dtype, device = q.dtype, q.device
    for name, x in (("k", k), ("v", v)):
        if x.dtype != dtype:
            raise ValueError(f"{name} must have {q_name}'s dtype, {dtype}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name} must be on {q_name}'s device, {device}, got {x.device}")
    (_, heads, head_dim), (kv_rows, kv_heads, k_dim), (v_rows, v_heads, v_dim) = (
        q.shape,
        k.shape,
        v.shape,
    )
    if kv_rows != v_rows or kv_heads != v_heads:
        raise ValueError(
            f"v must have k's rows and heads, {list(k.shape[:2])}, got {list(v.shape[:2])}"
        )
    if k_dim != head_dim:
        raise ValueError(f"k must have {q_name}'s head dim, {head_dim}, got {k_dim}")
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{q_name}'s heads must be a multiple of k's, got {heads} and {kv_heads}")
    for name, dim in ((q_name, head_dim), ("v", v_dim)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name}'s head dim must be 1 to {MAX_HEAD_DIM}, got {dim}")
    for name, offsets in (("q_offsets", q_offsets), ("kv_offsets", kv_offsets)):
        if isinstance(offsets, str):
            check_shared(name, offsets)
        elif isinstance(offsets, Tensor):
            check_device(name, offsets, device, f"{q_name}'s")
    if scale is not None:
        check_number("scale", scale)  # a tensor would get no gradient
    check_choice("activation", activation, ACTIVATIONS)
    if isinstance(output_scale, Tensor):
        # its size is checked with the offsets
        check_tensor("output_scale", output_scale, output_scale.dim(), "[B]")
    else:
        check_number("output_scale", output_scale, what="a number or a tensor [B]")
    if activation == "softmax" and (isinstance(output_scale, Tensor) or output_scale != 1):
        raise ValueError(f"output_scale must be 1 with softmax, got {output_scale}")
    if mask is not None and not isinstance(mask, AttentionMask):
        raise TypeError(f"mask must be an AttentionMask, got {type(mask).__name__}")
    if mask is not None and isinstance(kv_offsets, str):
        raise ValueError(
            "mask must be None where keys are shared by all segments: their rows have no position"
        )
    check_implementation(implementation, ATTENTION_IMPLEMENTATIONS, device)
    if schedule is None:
        return
    if not isinstance(schedule, TileSchedule):
        raise TypeError(f"schedule must be a TileSchedule, got {type(schedule).__name__}")
    if schedule.num_heads != heads:
        raise ValueError(f"schedule was built for {schedule.num_heads} heads, {q_name} has {heads}")
    for half in (schedule, schedule.backward or schedule):
        if half.block_m not in TILES:
            raise ValueError(
                f"schedule must have a block_m of {TILES}, the kernels' tiles, got {half.block_m}"
            )


def check_shared(name: str, offsets: str) -> None:
    if offsets != "shared":
        raise ValueError(f'{name} must be a tensor or "shared", got "{offsets}"')


def check_output_scale(output_scale: Tensor, num_segments: int, device: torch.device) -> None:
    if output_scale.shape != (num_segments,):
        raise ValueError(
            f"output_scale must have shape [B] = [{num_segments}], got {list(output_scale.shape)}"
        )
    check_device("output_scale", output_scale, device, "q's")


def check_schedule(schedule: TileSchedule, q_offsets: Tensor, kv_offsets: Tensor) -> None:
    """ValueError unless the schedule has as many tiles of each segment as these segments need, and
    the segments that it counts as short are short: kernels of packed tiles take them."""
    needed = (
        (q_offsets.diff().long() + schedule.block_m - 1) // schedule.block_m * schedule.num_heads
    )
    listed = schedule.tiles[: int(schedule.num_tiles[0]), 0].bincount(minlength=len(needed))
    needed = pad(needed, (0, len(listed) - len(needed)))
    if not torch.equal(listed, needed):
        segment = int((listed != needed).nonzero()[0])
        raise ValueError(
            f"schedule was built for other lengths: it has {listed[segment]} tiles of segment"
            f" {segment}, q_offsets need {needed[segment]}"
        )
    if q_offsets.shape != kv_offsets.shape:  # no segment of several query groups counts as short
        return
    q_lengths, kv_lengths = q_offsets.diff(), kv_offsets.diff()
    long = ~is_short(q_lengths, kv_lengths)
    for half in (schedule, schedule.backward or schedule):
        segments = half.tiles[int(half.num_tiles[1]) : int(half.num_tiles[0]), 0].long()
        if long[segments].any():
            segment = int(segments[long[segments]][0])
            raise ValueError(
                f"schedule was built for other lengths: it counts segment {segment} as short, which"
                f" has {q_lengths[segment]} queries and {kv_lengths[segment]} keys"
            )


class AttentionSegments(NamedTuple):
    """The segments of an attention.

    Attributes:
        q_offsets, kv_offsets: offsets of query rows, of the output's if q is shared, and of keys.
        q_shared, kv_shared: whether all segments use all rows of q, or of k and v.
        groups: number of query groups.
    """

    q_offsets: Tensor
    kv_offsets: Tensor
    q_shared: bool
    kv_shared: bool
    groups: int

    @property
    def num_segments(self) -> int:
        return self.q_offsets.shape[0] - 1

    def on(self, device: torch.device) -> AttentionSegments:
        """These segments with offsets in their normal form. Equal offsets stay one tensor: kernels
        compare them by identity."""
        q_offsets = normal_form(self.q_offsets, device)
        same = self.kv_offsets is self.q_offsets
        return self._replace(
            q_offsets=q_offsets,
            kv_offsets=q_offsets if same else normal_form(self.kv_offsets, device),
        )

    @property
    def share_keys(self) -> bool:
        """Whether several segments of queries read the same keys."""
        return self.kv_shared or self.groups > 1


def check_segments(
    q: Tensor,
    kv_rows: int,
    q_offsets: Tensor | str,
    kv_offsets: Tensor | str,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    mask: AttentionMask | None,
) -> AttentionSegments:
    """The segments, with their sizes and the offsets' values checked. With shared keys, each
    segment of queries has all of them."""
    same = kv_offsets is q_offsets and max_seqlen_kv is None
    if not isinstance(q_offsets, str):
        check_offsets("q_offsets", q_offsets, q.shape[0], max_seqlen_q, "max_seqlen_q")
        if kv_offsets is q_offsets and kv_rows != q.shape[0]:
            raise ValueError(
                f"k must have q's rows, {q.shape[0]}, because they have the same offsets, got"
                f" {kv_rows}"
            )
    if isinstance(kv_offsets, str):
        if isinstance(q_offsets, str):
            raise ValueError(
                'q_offsets and kv_offsets cannot both be "shared": the number of segments would be'
                " unknown"
            )
        return AttentionSegments(q_offsets, q_offsets, q_shared=False, kv_shared=True, groups=1)
    if not same:
        check_offsets("kv_offsets", kv_offsets, kv_rows, max_seqlen_kv, "max_seqlen_kv")
    if isinstance(q_offsets, str):
        q_offsets = (
            torch.arange(kv_offsets.shape[0], dtype=kv_offsets.dtype, device=kv_offsets.device)
            * q.shape[0]
        )
        segments = AttentionSegments(
            q_offsets, kv_offsets, q_shared=True, kv_shared=False, groups=1
        )
    else:
        segments = AttentionSegments(
            q_offsets, kv_offsets, q_shared=False, kv_shared=False, groups=1
        )
        if not same and q_offsets.shape != kv_offsets.shape:
            groups = num_query_groups(
                "q_offsets", segments.num_segments, "kv_offsets", kv_offsets.shape[0] - 1, mask
            )
            segments = segments._replace(groups=groups)
    if mask is not None:
        check_num_targets("mask.num_targets", mask.num_targets, kv_offsets, q.device, "q's")
    return segments
