"""Checks of an attention's arguments that need no segments, and of its schedule."""

from __future__ import annotations

import torch
from jagged_kernels.schedule.cost import is_short
from jagged_kernels.schedule.host import TileSchedule
from torch import Tensor
from torch.nn.functional import pad

from ..activations import ACTIVATIONS
from ..masks import AttentionMask
from ..scalars import check_choice, check_number
from ..segments import check_device
from ..validation import IMPLEMENTATIONS, MAX_HEAD_DIM, check_tensor

ATTENTION_IMPLEMENTATIONS = (*IMPLEMENTATIONS, "hopper")
BLOCKS = (16, 32, 64, 128)  # block sizes, in rows, that the kernels have tiles for
TILES = (*BLOCKS, 192)


def check_operands(q: Tensor, k: Tensor, v: Tensor, q_name: str = "q") -> None:
    """ValueError unless q, k and v, cast by autocast already, match. q_name: what the caller calls
    q."""
    dtype, device = q.dtype, q.device
    for name, x in (("k", k), ("v", v)):
        if x.dtype != dtype:
            raise ValueError(f"{name} must have {q_name}'s dtype, {dtype}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name} must be on {q_name}'s device, {device}, got {x.device}")
    heads, head_dim = q.shape[1:]
    _, kv_heads, k_dim = k.shape
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"v must have k's rows and heads, {list(k.shape[:2])}, got {list(v.shape[:2])}"
        )
    if k_dim != head_dim:
        raise ValueError(f"k must have {q_name}'s head dim, {head_dim}, got {k_dim}")
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{q_name}'s heads must be a multiple of k's, got {heads} and {kv_heads}")
    for name, dim in ((q_name, head_dim), ("v", v.shape[2])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name}'s head dim must be 1 to {MAX_HEAD_DIM}, got {dim}")


def check_scalars(activation: object, scale: object, output_scale: object) -> None:
    """TypeError or ValueError unless these are arguments of `jagged_attention`. The size of a
    tensor output_scale is checked with the segments."""
    if scale is not None:
        check_number("scale", scale)  # a tensor would get no gradient
    check_choice("activation", activation, ACTIVATIONS)
    if isinstance(output_scale, Tensor):
        check_tensor("output_scale", output_scale, output_scale.dim(), "[B]")
    else:
        check_number("output_scale", output_scale, what="a number or a tensor [B]")
    if activation == "softmax" and (isinstance(output_scale, Tensor) or output_scale != 1):
        raise ValueError(f"output_scale must be 1 with softmax, got {output_scale}")


def check_mask(mask: object, keys_are_shared: bool) -> None:
    """TypeError or ValueError unless mask is an AttentionMask or None."""
    if mask is None:
        return
    if not isinstance(mask, AttentionMask):
        raise TypeError(f"mask must be an AttentionMask, got {type(mask).__name__}")
    if keys_are_shared:
        raise ValueError(
            "mask must be None where keys are shared by all segments: their rows have no position"
        )


def check_schedule_of(q: Tensor, schedule: object) -> None:
    """TypeError or ValueError unless schedule is None or has q's heads, and tiles that kernels
    have."""
    if schedule is None:
        return
    if not isinstance(schedule, TileSchedule):
        raise TypeError(f"schedule must be a TileSchedule, got {type(schedule).__name__}")
    if schedule.num_heads != q.shape[1]:
        raise ValueError(f"schedule was built for {schedule.num_heads} heads, q has {q.shape[1]}")
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
