"""The arguments of a public function of attention, checked and parsed into one AttentionCall."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jagged_kernels.schedule.cost import is_short
from jagged_kernels.schedule.host import TileSchedule, num_query_groups
from torch import Tensor
from torch.nn.functional import pad

from ..activations import ACTIVATIONS
from ..dropout import check_dropout, check_seed
from ..masks import AttentionMask, check_num_targets
from ..scalars import check_choice, check_kind, check_number
from ..segments import (
    RowSegments,
    check_device,
    check_offsets,
    parse_segments,
    values_are_checkable,
)
from ..validation import IMPLEMENTATIONS, check_implementation, check_tensor
from .attention_bias import BiasSide, check_bias
from .attention_call import AttentionOptions, ParsedAttention, checked_call
from .paged_keys import check_pages

ATTENTION_IMPLEMENTATIONS = (*IMPLEMENTATIONS, "hopper")
BLOCKS = (16, 32, 64, 128)  # block sizes, in rows, that the kernels have tiles for
TILES = (*BLOCKS, 192)


class Side(NamedTuple):
    """The segments of the queries or of the keys, as a caller of a public function gives them."""

    offsets: Any  # a tensor, or "shared"
    max_seqlen: int | None = None


def parse_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Side | RowSegments,
    keys: Side | RowSegments,
    options: AttentionOptions,
) -> ParsedAttention:
    """`checked_call` of operands with three dimensions, after checks of everything else that a
    caller of a public function gives."""
    activation, scale, output_scale, mask, bias, schedule, implementation, pages, *_ = options
    if pages is not None:
        check_pages(pages, (q, k, v), queries, keys, options)
    for name, side in (("q_offsets", queries), ("kv_offsets", keys)):
        if isinstance(side.offsets, str):
            check_shared(name, side.offsets)
        elif isinstance(side.offsets, Tensor):
            check_device(name, side.offsets, q.device, "q's")
    check_scalars(activation, scale, output_scale)
    check_dropout("dropout_p", options.dropout_p)
    if options.dropout_seed is not None:
        check_seed(options.dropout_seed, q.device)
    check_mask(mask)
    if mask is not None and isinstance(keys.offsets, str):
        raise ValueError(
            "mask must be None where keys are shared by all segments: their rows have no position"
        )
    check_implementation(implementation, ATTENTION_IMPLEMENTATIONS, q.device)
    check_schedule_of(q, schedule)
    kv_rows = k.shape[0] if pages is None else pages.num_rows
    own, others = check_sides(q, kv_rows, queries, keys, mask)
    if bias is not None:
        if own is None or others is None:
            raise ValueError(
                "bias must be None where segments share queries or keys: rows have no position"
            )
        of_queries = BiasSide("q", q.shape[0], queries.offsets, "q_offsets")
        of_keys = BiasSide("k", kv_rows, keys.offsets, "kv_offsets")
        check_bias(bias, q.device, q.shape[1], "q's", of_queries, of_keys)
    parsed = checked_call(q, k, v, own, others, options)
    segments, tiles = parsed.call.segments, parsed.call.schedule
    if tiles is not None and values_are_checkable(tiles.num_tiles):
        check_schedule(tiles, segments.q_offsets, segments.kv_offsets)
    return parsed


def check_sides(
    q: Tensor,
    kv_rows: int,
    queries: Side | RowSegments,
    keys: Side | RowSegments,
    mask: AttentionMask | None,
) -> tuple[RowSegments | None, RowSegments | None]:
    """The segments of queries and of keys, None where all segments share them, with their sizes and
    the offsets' values checked."""
    same_offsets = keys.offsets is queries.offsets
    if isinstance(queries.offsets, str) and isinstance(keys.offsets, str):
        raise ValueError(
            'q_offsets and kv_offsets cannot both be "shared": the number of segments would be'
            " unknown"
        )
    own = _parsed(queries, "q_offsets", q.shape[0], q.device, "max_seqlen_q")
    if same_offsets and kv_rows != q.shape[0]:
        raise ValueError(
            f"k must have q's rows, {q.shape[0]}, because they have the same offsets, got {kv_rows}"
        )
    if own is not None and same_offsets and isinstance(keys, Side) and keys.max_seqlen is None:
        others: RowSegments | None = own
    else:
        others = _parsed(keys, "kv_offsets", kv_rows, q.device, "max_seqlen_kv")
        if own is not None and others is not None and same_offsets:
            others = others._replace(offsets=own.offsets)  # kernels compare them by identity
    if own is not None and others is not None:
        num_segments, num_keys = (x.offsets.shape[0] - 1 for x in (own, others))
        if num_segments != num_keys:
            num_query_groups("q_offsets", num_segments, "kv_offsets", num_keys)
    if mask is not None:
        check_num_targets("mask.num_targets", mask.num_targets, keys.offsets, q.device, "q's")
    return own, others


def _parsed(
    side: Side | RowSegments, name: str, rows: int, device: torch.device, longest: str
) -> RowSegments | None:
    """The segments of an operand with so many rows. longest: the name of max_seqlen in errors."""
    if isinstance(side, RowSegments):
        return side
    if isinstance(side.offsets, str):
        return None
    check_offsets(name, side.offsets, rows, side.max_seqlen, longest)
    return parse_segments(name, side.offsets, rows, device)


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


def check_mask(mask: object) -> None:
    """TypeError unless mask is an AttentionMask or None."""
    if mask is not None:
        check_kind("mask", mask, AttentionMask, "an AttentionMask")


def check_schedule_of(q: Tensor, schedule: Any) -> None:
    """TypeError or ValueError unless schedule is None or has q's heads, and tiles that kernels
    have."""
    if schedule is None:
        return
    check_kind("schedule", schedule, TileSchedule, "a TileSchedule")
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
