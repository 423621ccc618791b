"""The attention schedules that a batch keeps: `Jagged.prepare` and `Jagged.schedule`."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from jagged_kernels.attention.select import AttentionProblem
from jagged_kernels.schedule.host import TileSchedule, count_blocks

from ..dtypes import FLOATS, WrongDtype, names
from ..masks import AttentionMask, check_num_targets
from ..scalars import check_kind, check_size
from ..schedule import device_schedule, host_schedule
from ..segments import Queries, RowSegments, normal_form, outside_inference_mode
from ..settings import is_batch_invariant
from ..validation import MAX_HEAD_DIM

if TYPE_CHECKING:
    from .jagged import Jagged


class Sizes(NamedTuple):
    """The sizes and options of an attention that its schedule depends on. Of the dtype, only its
    size counts."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    batch_invariant: bool
    dtype: torch.dtype

    @classmethod
    def of(
        cls, num_heads: int, num_kv_heads: int | None, head_dim: int, dtype: torch.dtype
    ) -> Sizes:
        """The checked sizes. TypeError or ValueError as `Jagged.prepare`."""
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, size in zip(cls._fields, (num_heads, num_kv_heads, head_dim)):
            if type(size) is not int or size < 1:  # as they never are in a step: no call for each
                check_size(name, size)
        check_kind("dtype", dtype, torch.dtype, "a torch.dtype")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
            )
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {head_dim}")
        if dtype not in FLOATS:
            raise WrongDtype(f"dtype must be {names(FLOATS)}, got {dtype}")
        return cls(num_heads, num_kv_heads, head_dim, dtype.itemsize, is_batch_invariant(), dtype)


def kept_schedule(
    keys: Jagged,
    queries: Queries | int,
    rows_per_candidate: int,
    sizes: Sizes,
    mask: AttentionMask | None,
    by_prepare: bool = True,
) -> TileSchedule | None:
    """The schedule of these queries on the keys' device: the kept one, or a new one, which is kept.
    None if only the device knows the number of query rows."""
    check_size("rows_per_candidate", rows_per_candidate)
    check_kind("queries", queries, (Queries, int), "a Jagged, a CandidateIndex, an int or None")
    if mask is not None:
        check_kind("mask", mask, AttentionMask, "an AttentionMask")
        mask = None if mask.hides_nothing() else mask
    kept, device = keys.segmentation, keys.device
    segments = queries if isinstance(queries, int) else queries.segmentation_id
    key = (segments, rows_per_candidate, *sizes[:-1], *(mask.params if mask else ()))
    schedule = kept.schedules.get(key)
    if schedule is not None and schedule.tiles.device == device:
        return schedule
    with outside_inference_mode():
        if schedule is None:
            describe = partial(_description, queries, rows_per_candidate, mask, sizes)
            kept.note_build(describe, by_prepare)
            query_segments = _query_segments(keys, queries, rows_per_candidate)
            schedule = _new_schedule(keys, query_segments, sizes, mask, by_prepare)
            if schedule is None:
                return None
        schedule = schedule.to(device, non_blocking=True)
    kept.keep(key, schedule)
    return schedule


def _query_segments(keys: Jagged, queries: Queries | int, rows_per_candidate: int) -> RowSegments:
    """ValueError unless the keys' segments can be those of these queries."""
    if isinstance(queries, int):
        check_size("queries", queries, at_least=0)
        segments = RowSegments.equal(queries, keys.num_segments, keys.offsets)
    else:
        segments = queries.query_segments(rows_per_candidate)
    num_segments = segments.offsets.shape[0] - 1
    if num_segments != keys.num_segments and (
        not keys.num_segments or num_segments % keys.num_segments
    ):
        raise ValueError(
            f"queries must have as many segments as the keys, {keys.num_segments}, or a multiple,"
            f" got {num_segments}"
        )
    return segments


def _new_schedule(
    keys: Jagged, queries: RowSegments, sizes: Sizes, mask: AttentionMask | None, on_host: bool
) -> TileSchedule | None:
    """on_host: from lengths that the host knows. Otherwise the device lists the tiles, by a launch
    or two instead of milliseconds of the host."""
    device = keys.device
    if mask is not None:
        check_num_targets("mask.num_targets", mask.num_targets, keys.offsets, device, "the values'")
    if on_host and queries.host_lengths is not None and keys.host_lengths is not None:
        return host_schedule(
            queries.host_lengths,
            keys.host_lengths,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            dtype=sizes.dtype,
            mask=mask,
            batch_invariant=sizes.batch_invariant,
        )
    num_rows = queries.num_rows
    if num_rows is None and queries.host_lengths is not None:
        num_rows = int(queries.host_lengths.sum())
    if num_rows is None:  # sorted candidates of a device: only q's shape has their number
        return None
    targets = None if mask is None else mask.num_targets
    schedule = device_schedule(
        AttentionProblem(
            sizes.head_dim,
            sizes.head_dim,
            sizes.dtype,
            masked=mask is not None,
            batch_invariant=sizes.batch_invariant,
            q_rows=num_rows,
            kv_rows=keys.num_rows,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
        ),
        normal_form(queries.offsets, device),
        # those of the host are moved once
        keys.parsed("keys").offsets if keys.offsets.is_cpu else normal_form(keys.offsets, device),
        mask=None if mask is None else list(mask.params),
        num_targets=None if targets is None else normal_form(targets, device),
        backward=on_host or torch.is_grad_enabled(),
    )
    if queries.host_lengths is None or keys.host_lengths is None:
        return schedule
    num_blocks = count_blocks(queries.host_lengths, keys.host_lengths)
    return dataclasses.replace(schedule, num_blocks=num_blocks)


def _description(
    queries: Queries | int, rows_per_candidate: int, mask: AttentionMask | None, sizes: Sizes
) -> str:
    """The attention that a schedule is built for, as text for a warning."""
    parts: dict[str, object] = sizes._asdict()
    del parts["dtype"]
    parts["queries"] = queries if isinstance(queries, int) else type(queries).__name__
    if rows_per_candidate != 1:
        parts["rows_per_candidate"] = rows_per_candidate
    return ", ".join(f"{name}={part}" for name, part in dict(parts, mask=mask).items())
