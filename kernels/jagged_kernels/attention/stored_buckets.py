"""Buckets of a RelativeBias's time table, computed once for a batch: for all heads, layers, and the
forward and backward.

They are kept with the timestamps, as host lengths and schedules are with offsets
(jagged_modules/segments.py): as long as the timestamps live, and until one of the tensors that they
follow from is written to. A byte for each pair of a query and a key, in blocks of 64 by 64 of each
segment; 134 MB for 128 segments of 1,024 rows. Hopper's kernels read them. Nothing is stored where

- the host does not know the lengths, and so the number of blocks,
- there are more blocks than LIMIT, or more than 255 boundaries,
- a graph records the call: it would read them after the timestamps have changed
  (functional/attention.py),
- a tensor has no version, as those made in inference mode.

The kernels then compute buckets themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..common.device import cdiv
from .bias_kernels import stored_buckets_kernel
from .bias_tables import kernel_bias
from .params import AttentionCall

ROWS = 64  # of a block
LIMIT = 2**28  # bytes of buckets
LARGEST = 255  # bucket


class StoredBuckets(NamedTuple):
    """Attributes:
    buckets: uint8 `[blocks, 64 · 64]`. Those of a segment follow one another, all blocks of keys
        of its first block of queries first. bias.BYTE_ORDER is the order in a block.
    first_blocks: int32 `[segments]`: the number of a segment's first block.
    """

    buckets: Tensor
    first_blocks: Tensor


class _Kept(NamedTuple):
    """StoredBuckets, the tensors that they follow from but the timestamps, as weak references, the
    versions of all, and the stream that they were computed on."""

    stored: StoredBuckets
    sources: list[weakref.ref[Tensor] | None]
    versions: list[int | None]
    stream: torch.Stream | None


# timestamps → _Kept
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def with_stored_buckets(call: AttentionCall) -> AttentionCall:
    """The call, whose schedule knows the number of blocks, with StoredBuckets among its params, or
    as it is where nothing is stored."""
    params, blocks = call.params, call.schedule.num_blocks
    timestamps, boundaries = params.timestamps, params.boundaries
    times = params.query_timestamps, params.query_shift
    sources = boundaries, *times, call.segments.q_offsets, call.segments.kv_offsets
    if blocks * ROWS * ROWS > LIMIT or boundaries.shape[0] > LARGEST:
        return call
    if any(x is not None and x.is_inference() for x in (timestamps, *sources)):
        return call
    buckets, first_blocks = _kept_buckets(call, timestamps, sources)
    return call._replace(params=params._replace(buckets=buckets, first_blocks=first_blocks))


def _kept_buckets(
    call: AttentionCall, timestamps: Tensor, sources: Sequence[Tensor | None]
) -> StoredBuckets:
    has_streams = timestamps.is_cuda and torch.cuda.is_initialized()
    stream = torch.cuda.current_stream(timestamps.device) if has_streams else None
    versions = [None if x is None else x._version for x in (timestamps, *sources)]
    kept = _kept.get(timestamps)
    if kept is not None and kept.versions == versions and kept.stream == stream:
        if all((None if ref is None else ref()) is x for ref, x in zip(kept.sources, sources)):
            return kept.stored
    with torch.inference_mode(False), torch.no_grad():
        stored = make_buckets(call)
    refs = [None if x is None else weakref.ref(x) for x in sources]
    _kept[timestamps] = _Kept(stored, refs, versions, stream)
    return stored


def make_buckets(call: AttentionCall) -> StoredBuckets:
    """Compute them: a launch for the tables that find buckets, one for the buckets, and a few small
    ones of torch for the numbers of blocks."""
    q_offsets, kv_offsets = call.segments.q_offsets, call.segments.kv_offsets
    num_segments = kv_offsets.shape[0] - 1
    blocks = cdiv(q_offsets[: num_segments + 1].diff(), ROWS) * cdiv(kv_offsets.diff(), ROWS)
    first_blocks = (blocks.cumsum(0) - blocks).to(torch.int32)
    num_blocks = call.schedule.num_blocks
    buckets = q_offsets.new_empty(num_blocks, ROWS * ROWS, dtype=torch.uint8)
    stored_buckets_kernel[num_segments, cdiv(num_blocks, num_segments)](
        q_offsets, kv_offsets, first_blocks, buckets, num_blocks, kernel_bias(call.params),
        KIND=call.params.bias_kind, num_warps=4,
    )  # fmt: skip
    return StoredBuckets(buckets, first_blocks)
