"""Buckets of a RelativeBias's time table, computed once for a batch: for all heads and layers, and
for the forward and the backward.

They are kept with the timestamps, as long as these live, until one of the tensors that they follow
from is written to, or more recent ones need the room: those of a device take at most LIMIT bytes. A
byte for each pair of a query and a key, hidden ones too, in blocks of 64 by 64 of each segment: 134
MB for 128 segments of 1,024 rows. Hopper's kernels read them. Nothing is stored where

- the host does not know the lengths, and so the number of blocks,
- there are more than LIMIT bytes, or more than 255 boundaries,
- a graph records the call (functional/attention.py): when it is repeated, the timestamps have other
  values,
- a tensor has no version, as those made in inference mode.

The kernels then find each block's buckets themselves.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..common.device import cdiv
from .bias_kernels import stored_buckets_kernel
from .bias_tables import kernel_bias
from .params import AttentionCall

ROWS = 64  # of a block
LIMIT = 2**28  # bytes of a device
LARGEST = 255  # bucket


class StoredBuckets(NamedTuple):
    """Attributes:
    buckets: uint8 `[blocks, 64 · 64]`, in a block in the order of bias.BYTE_ORDER. The blocks of a
        segment follow one another: all blocks of keys of its first block of queries first.
    first_blocks: int32 `[segments]`: the number of each segment's first block.
    """

    buckets: Tensor
    first_blocks: Tensor


class _Kept(NamedTuple):
    """StoredBuckets, and what they follow from besides the timestamps.

    Attributes:
        sources: weak references to tensors, None for those that are.
        key: versions of the timestamps and of the sources, values of the boundaries, and the stream
            that computed the buckets.
    """

    stored: StoredBuckets
    sources: list[weakref.ref[Tensor] | None]
    key: tuple[Any, ...]


_kept: Any = WeakTensorKeyDictionary()  # timestamps → _Kept, the most recent last
_lock = threading.Lock()  # held while _kept is written
_values: Any = WeakTensorKeyDictionary()  # boundaries → their version and values


def with_stored_buckets(call: AttentionCall) -> AttentionCall:
    """The call, whose schedule knows the number of blocks, with StoredBuckets among its params; or
    as it is where nothing is stored."""
    params, (q_offsets, kv_offsets, *_) = call.params, call.segments
    times, boundaries = params.timestamps, params.boundaries
    if call.schedule.num_blocks * ROWS * ROWS > LIMIT or boundaries.shape[0] > LARGEST:
        return call
    sources = q_offsets, kv_offsets, params.query_timestamps, params.query_shift
    if any(x is not None and x.is_inference() for x in (times, boundaries, *sources)):
        return call
    versions = [None if x is None else x._version for x in (times, *sources)]
    has_streams = times.is_cuda and torch.cuda.is_initialized()
    stream = torch.cuda.current_stream(times.device) if has_streams else None
    key = *versions, _values_of(boundaries), stream
    kept = _kept.get(times)
    if kept is None or kept.key != key or not _are_same(kept.sources, sources):
        with torch.inference_mode(False), torch.no_grad():
            stored = make_buckets(call)
        kept = _Kept(stored, [None if x is None else weakref.ref(x) for x in sources], key)
        _keep(times, kept)
    return call._replace(params=params._replace(**kept.stored._asdict()))


def _keep(times: Tensor, kept: _Kept) -> None:
    """Keep buckets, and drop the oldest of their device above LIMIT bytes."""
    with _lock:
        _kept.pop(times, None)
        _kept[times] = kept
        of_device = [x for x in _kept.items() if x[0].device == times.device]
        total = sum(x.stored.buckets.nbytes for _, x in of_device)
        for oldest, x in of_device[:-1]:
            if total > LIMIT:
                del _kept[oldest]
                total -= x.stored.buckets.nbytes


def make_buckets(call: AttentionCall) -> StoredBuckets:
    """Compute them: a launch for the tables that find buckets, one for the buckets, and a few of
    torch for the numbers of blocks."""
    q_offsets, kv_offsets = call.segments.q_offsets, call.segments.kv_offsets
    num_segments, num_blocks = kv_offsets.shape[0] - 1, call.schedule.num_blocks
    of_queries = cdiv(q_offsets[: num_segments + 1].diff(), ROWS)  # those of the first query group
    blocks = of_queries * cdiv(kv_offsets.diff(), ROWS)
    first_blocks = (blocks.cumsum(0) - blocks).to(torch.int32)
    buckets = q_offsets.new_empty(num_blocks, ROWS * ROWS, dtype=torch.uint8)
    stored_buckets_kernel[num_segments, cdiv(num_blocks, num_segments)](
        q_offsets, kv_offsets, first_blocks, buckets, num_blocks, kernel_bias(call.params),
        KIND=call.params.bias_kind, num_warps=4,
    )  # fmt: skip
    return StoredBuckets(buckets, first_blocks)


def _are_same(refs: list[weakref.ref[Tensor] | None], tensors: tuple[Tensor | None, ...]) -> bool:
    return all((None if ref is None else ref()) is x for ref, x in zip(refs, tensors))


def _values_of(boundaries: Tensor) -> tuple[int, ...]:
    """The boundaries' values, by which layers with equal ones share buckets. Reading them waits for
    the device, once for a tensor."""
    known = _values.get(boundaries)
    if known is None or known[0] != boundaries._version:
        known = boundaries._version, tuple(boundaries.tolist())
        _values[boundaries] = known
    return known[1]
