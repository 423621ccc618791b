"""Index tensors: offsets and indices, checked, in one normal form; and what is known of their
segments.

Values of host tensors are always checked, those of device tensors only under `debug_checks`.
Containers with the same offsets share host lengths, tile schedules and an id.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jagged_kernels.common.one_thread import one_thread
from jagged_kernels.schedule.host import TileSchedule
from torch import Tensor
from torch._subclasses import FakeTensor

from .dtypes import WrongDtype, names
from .scalars import check_kind, check_size
from .settings import debug_checks
from .tracing import is_recording
from .validation import check_dense

MAX_SCHEDULES = 16  # that a segmentation keeps


# -- checks, and the normal form ----------------------------------------------------------------


def values_are_checkable(x: Tensor) -> bool:
    """Whether x's values may be read: it is on the host, or `debug_checks` is on. Never while a
    graph is being traced."""
    if not x.is_cpu and (x.is_meta or not debug_checks.current()):
        return False
    return not (torch.compiler.is_compiling() or isinstance(x, FakeTensor))


def check_integers(
    name: str, x: Any, dtypes: tuple[torch.dtype, ...] = (torch.int32, torch.int64)
) -> None:
    """TypeError unless x is a tensor of one of the dtypes, ValueError unless it is 1-D and
    dense."""
    check_dense(name, x)
    if x.dtype not in dtypes:
        raise WrongDtype(f"{name} must be {names(dtypes)}, got {x.dtype}")
    if x.dim() != 1:
        raise ValueError(f"{name} must be 1-D, got shape {list(x.shape)}")


def check_index_values(name: str, x: Tensor, size: int, largest: str) -> None:
    """ValueError unless all values, if they may be read, are 0 to size - 1. largest: how errors
    describe size - 1, which they put in place of its "{}". A text of a symbolic size would add a
    guard to a graph."""
    if values_are_checkable(x) and x.numel():
        low, high = int(x.min()), int(x.max())
        if low < 0 or high >= size:
            raise ValueError(
                f"{name} must be 0 to {largest.format(size - 1)}, got values {low} to {high}"
            )


def check_not_negative(name: str, x: Tensor) -> None:
    """ValueError if a value, if they may be read, is negative."""
    if values_are_checkable(x) and x.numel() and int(x.min()) < 0:
        raise ValueError(f"{name} must not be negative, got {int(x.min())}")


def check_offsets(
    name: str,
    offsets: Any,
    total: int | None = None,
    max_seqlen: int | None = None,
    longest: str = "max_seqlen",
) -> None:
    """TypeError or ValueError unless offsets are int32 or int64 `[B + 1]` and, if their values may
    be read, start at 0, do not decrease, end at `total` and have no segment longer than max_seqlen,
    an int, which errors call `longest`."""
    check_offsets_shape(name, offsets)
    if max_seqlen is not None:
        check_size(longest, max_seqlen, at_least=0)
    if values_are_checkable(offsets):
        _check_offset_values(name, offsets, total, max_seqlen, longest)


def check_offsets_shape(name: str, offsets: Any) -> None:
    """TypeError unless offsets are an int32 or int64 tensor, ValueError unless it is `[B + 1]`."""
    check_integers(name, offsets)
    if offsets.shape[0] < 1:
        raise ValueError(f"{name} must have shape [B + 1], got {list(offsets.shape)}")


@one_thread()
def _check_offset_values(
    name: str, offsets: Tensor, total: int | None, max_seqlen: int | None, longest: str
) -> None:
    if first := offsets[0].item():
        raise ValueError(
            f"{name} must start at 0, got {first}: they are a 0 and the sums of lengths"
        )
    lengths = offsets.diff()
    if lengths.numel() and int(lengths.min()) < 0:
        segment = int(lengths.argmin())
        raise ValueError(
            f"{name} must not decrease, got {offsets[segment].item()} then"
            f" {offsets[segment + 1].item()} at segment {segment}"
        )
    if total is not None and (last := offsets[-1].item()) != total:
        raise ValueError(f"{name} must end at the number of rows, {total}, got {last}")
    if max_seqlen is not None and lengths.numel() and int(lengths.max()) > max_seqlen:
        raise ValueError(
            f"{name} must have segments of at most {longest} = {max_seqlen} rows, got"
            f" {int(lengths.max())}"
        )


def check_is_device(device: object) -> None:
    """TypeError unless a tensor's `to` moves to it: a dtype would convert index tensors too."""
    check_kind("device", device, (torch.device, str, int), "a torch.device, a str or an int")


def check_device(name: str, x: Tensor, device: torch.device, owner: str) -> None:
    """ValueError unless x is on `device` or the host. owner: of the device, such as "q's"."""
    if x.device != device and x.device.type != "cpu":
        raise ValueError(f"{name} must be on {owner} device, {device}, or the host, got {x.device}")


def checked_offsets(
    name: str,
    offsets: Any,
    total: int,
    like: Tensor,
    owner: str,
    max_seqlen: int | None = None,
    longest: str = "max_seqlen",
) -> Tensor:
    """`check_offsets` and `check_device`, then `normal_form`, on `like`'s device. owner: `like` in
    the message, such as "q's"."""
    check_offsets(name, offsets, total, max_seqlen, longest)
    check_device(name, offsets, like.device, owner)
    return normal_form(offsets, like.device)


def normal_form(x: Tensor, device: torch.device) -> Tensor:
    """x as everything below the public functions takes tensors of indices, and of one number per
    segment: on the device and contiguous. Kernels read no strides of them."""
    moved = x if x.device == device else x.to(device, non_blocking=True)
    return moved.contiguous()


# -- what is known of segments ------------------------------------------------------------------


class Segmentation:
    """Host lengths, tile schedules, and an id that survives copying and pickling.

    Attributes:
        host_lengths: `[B]` lengths on the host, None until they are known.
        schedules: the attention schedules built so far. The key holds the sizes, the queries and
            the mask of the attention.
        prepared: descriptions of the schedules that `Jagged.prepare` built.
    """

    def __init__(self, host_lengths: Tensor | None = None) -> None:
        self.host_lengths: Tensor | None = host_lengths
        self._num_rows: int | None = None
        self.schedules: dict[tuple[object, ...], TileSchedule] = {}
        self.prepared: dict[str, None] = {}  # an ordered set

    @property
    def id(self) -> bytes:
        """Equal for all copies of this segmentation, in every process and thread. Random: process
        ids are reused, and forked processes would continue a counter from the same number."""
        known: bytes | None = vars(self).get("_id")
        return vars(self).setdefault("_id", os.urandom(16)) if known is None else known

    @property
    def num_rows(self) -> int | None:
        """The sum of host_lengths, None until they are known."""
        lengths = self.host_lengths
        if self._num_rows is None and not (lengths is None or isinstance(lengths, FakeTensor)):
            self._num_rows = int(lengths.sum())
        return self._num_rows

    def keep(self, key: tuple[object, ...], schedule: TileSchedule) -> None:
        """Store a schedule. Drop the oldest beyond MAX_SCHEDULES: a cached history meets new
        queries in every batch.

        There is no lock, because a forked process could inherit it locked. Concurrent calls are
        safe without one.
        """
        self.schedules[key] = schedule
        for oldest in list(self.schedules)[:-MAX_SCHEDULES]:
            self.schedules.pop(oldest, None)

    def note_build(self, describe: Callable[[], str], by_prepare: bool) -> None:
        """Record a schedule that `Jagged.prepare` builds. Warn if attention builds one although
        others were prepared."""
        if by_prepare:
            self.prepared[describe()] = None
        elif self.prepared:
            description = describe()
            other = " of other queries" if description in self.prepared else ""
            warnings.warn(
                "no schedule that Jagged.prepare built fits this attention, so it builds one: it"
                f" needs ({description}){other}, prepared are ({'; '.join(self.prepared)})",
                stacklevel=4,
            )

    def lengths_on_host(self, offsets: Tensor) -> Tensor | None:
        """host_lengths; computed once from offsets that are on the host, None if offsets are on a
        device and nobody gave the lengths."""
        if self.host_lengths is None and offsets.is_cpu and values_are_checkable(offsets):
            self.host_lengths = offsets.diff()
        return self.host_lengths


def are_single(q_offsets: Tensor, kv_offsets: Tensor) -> bool:
    """Whether each segment has one query row."""
    count = q_offsets.shape[0] - 1
    if count < 1 or q_offsets.shape != kv_offsets.shape or int(q_offsets[-1]) != count:
        return False
    return bool((q_offsets.diff() == 1).all())


class RowSegments(NamedTuple):
    """The segments of an operand's rows, parsed: nothing below checks or moves them again.

    Attributes:
        offsets: `[B + 1]` in their normal form, on the operand's device.
        host_lengths: `[B]` on the host, None if only the device knows them.
        num_rows: rows of the operand, None if it is not known.
        has_tail: whether there may be rows behind the last segment. Only the device knows.
    """

    offsets: Tensor
    host_lengths: Tensor | None = None
    num_rows: int | None = None
    has_tail: bool = False

    @property
    def end(self) -> Tensor | None:
        """The offsets, if rows behind the last one may have to be cleared, else None."""
        return self.offsets if self.has_tail else None

    @classmethod
    def equal(cls, rows: int, num_segments: int, like: Tensor) -> RowSegments:
        """Segments of `rows` rows each, with offsets of `like`'s dtype and device."""
        offsets = torch.arange(num_segments + 1, dtype=like.dtype, device=like.device) * rows
        lengths = torch.full((num_segments,), rows, device="cpu")
        return cls(offsets, lengths, num_segments * rows)


class Queries:
    """Base of containers that can be an attention's queries: `Jagged` and `CandidateIndex`."""

    offsets: Tensor
    _known: Segmentation  # of the offsets when they were last read
    _known_of: Tensor | None = None  # these offsets, once they were read: others may be assigned
    _read: tuple[Tensor, int] | None = None  # offsets of a device, and their version then
    _parsed: tuple[object, RowSegments] | None = None  # kept by `Jagged.parsed`
    _checked: tuple[Segmentation, int] | None = None  # what offsets and rows were checked for

    @property
    def segmentation(self) -> Segmentation:
        """What is known of the segments. Other offsets, or a write to these or a view, make a new
        one."""
        offsets, read = self.offsets, self._read
        if read is not None and read[0] is offsets and not torch.compiler.is_compiling():
            if read[1] == offsets._version:
                return self._known
        # `_known` may be of offsets that others have replaced
        known = self._known if self._known_of is None or self._known_of is offsets else None
        self._read_offsets(known=known)
        return self._known

    def _read_offsets(
        self, host_lengths: Tensor | None = None, known: Segmentation | None = None
    ) -> None:
        kept = _kept(self.offsets, host_lengths, known)
        self._known, self._known_of = kept.segmentation, self.offsets
        self._read = (self.offsets, kept.state) if isinstance(kept.state, int) else None

    def __getstate__(self) -> dict[str, Any]:
        _ = self.segmentation  # that of the offsets as they are now
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._read_offsets(known=self._known)  # now, so that the first write to a copy is noticed

    def known_segmentation(self) -> Segmentation | None:
        """For `may_have_tail`: the segmentation, if offsets on a device have not changed since it
        was made. None if they may have."""
        known = self.segmentation
        return None if self._read is None else known

    @property
    def segmentation_id(self) -> bytes:
        """Equal for all copies of the container's segments, in every process and thread."""
        return self.segmentation.id

    def query_segments(self, rows_per_candidate: int) -> RowSegments:
        """The segments of the query rows. rows_per_candidate: query rows of each candidate, where
        the container's rows are candidates."""
        raise NotImplementedError


class _Kept(NamedTuple):
    """A tensor's segmentation, and the state that shows later writes to the tensor: a copy of its
    values, or on a device its version; None if nothing shows them. reference: to the tensor, whose
    end removes this from `_segmentations`."""

    state: Tensor | int | None
    segmentation: Segmentation
    reference: weakref.ref[Tensor] | None = None


# The id of offsets → _Kept. Not an attribute of the tensor, because torch.save would save it. A
# WeakTensorKeyDictionary takes several times longer.
_segmentations: dict[int, _Kept] = {}


def segmentation_of(
    offsets: Tensor, host_lengths: Tensor | None = None, known: Segmentation | None = None
) -> Segmentation:
    """The segmentation of this tensor object; a new one if the tensor was written to since the last
    call. known: that of a tensor of which no call or `remember` knows yet, for example an unpickled
    one."""
    return _kept(offsets, host_lengths, known).segmentation


def _kept(offsets: Tensor, host_lengths: Tensor | None, known: Segmentation | None) -> _Kept:
    if not _is_tracked(offsets):
        return _Kept(None, known or Segmentation(host_lengths))
    kept = _segmentations.get(id(offsets))
    if kept is None or not _is_unchanged(kept, offsets):
        segmentation = known if kept is None and known is not None else Segmentation(host_lengths)
        return _keep(offsets, segmentation)
    if kept.segmentation.host_lengths is None:
        kept.segmentation.host_lengths = host_lengths
    return kept


def parse_segments(
    name: str, offsets: Tensor, rows: int, device: torch.device, known: Segmentation | None = None
) -> RowSegments:
    """The segments of an operand with so many rows, of offsets that are checked as far as their
    values may be read. Errors call the offsets `name`. known: as in `may_have_tail`. ValueError if
    a container has noted the lengths on the host, and they do not add up to `rows`."""
    return RowSegments(
        normal_form(offsets, device),
        num_rows=rows,
        has_tail=may_have_tail(name, offsets, rows, device, known),
    )


def may_have_tail(
    name: str, offsets: Tensor, rows: int, device: torch.device, known: Segmentation | None = None
) -> bool:
    """Whether only the device knows if there are rows behind offsets[-1]. Raises as
    `parse_segments`.

    Args:
        offsets: as the caller gave them, before they are moved to `device`. Errors call them
            `name`.
        known: `Queries.known_segmentation`, where a container has the offsets.
    """
    if is_recording(device):
        return True
    if values_are_checkable(offsets):
        return False
    if known is None:
        kept = _segmentations.get(id(offsets)) if _is_tracked(offsets) else None
        if kept is None or not _is_unchanged(kept, offsets):
            return True
        known = kept.segmentation
    end = known.num_rows
    if end is not None and end != rows:
        raise ValueError(f"{name} must end at the number of rows, {rows}, got {end}")
    return end is None


def remember(offsets: Tensor, segmentation: Segmentation) -> None:
    """Assign the segmentation to this tensor too, for example to a copy on another device."""
    if _is_tracked(offsets):
        _keep(offsets, segmentation)


def _keep(offsets: Tensor, segmentation: Segmentation) -> _Kept:
    state = offsets.clone() if _on_host(offsets) else offsets._version
    # called with the reference, which pop takes for what it returns if there is no entry
    end = functools.partial(_segmentations.pop, id(offsets))
    kept = _segmentations[id(offsets)] = _Kept(state, segmentation, weakref.ref(offsets, end))
    return kept


def _is_unchanged(kept: _Kept, offsets: Tensor) -> bool:
    if isinstance(kept.state, Tensor):
        return torch.equal(kept.state, offsets)
    return kept.state == offsets._version


def _is_tracked(offsets: Tensor) -> bool:
    """Whether writes to the tensor can be detected: inference tensors on a device have no version
    counter. A pytree may have put another object in the tensor's place."""
    if torch.compiler.is_compiling() or not isinstance(offsets, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        return False
    return _on_host(offsets) or not offsets.is_inference()


def _on_host(offsets: Tensor) -> bool:
    return offsets.is_cpu and values_are_checkable(offsets)


def outside_inference_mode() -> contextlib.AbstractContextManager[None]:
    """Where tensors are made that are kept: a later call may save them for its backward."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


def record_stream(stream: torch.Stream, *tensors: Tensor | None) -> None:
    """`Tensor.record_stream` of the tensors on a device. Host tensors have no stream."""
    for x in tensors:
        if x is not None and x.device.type != "cpu":
            x.record_stream(stream)
